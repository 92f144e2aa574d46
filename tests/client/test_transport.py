"""What is repeated, what is not, and what arrives when the wire breaks."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest

from marlaas.client.transport import Patience, Transport, read_events
from marlaas.errors import (
    Conflict,
    InvalidRequest,
    MarlaasError,
    NotFound,
    QuotaExceeded,
    Unauthorized,
    Unreachable,
    UnsupportedFeature,
)
from tests.client.scripted import Scripted, answer, events, raw, refusal, serving

BUSY = refusal(503, "store_unavailable", "the disk is full", Retry_After="3")
HANG_UP = b""


def seqs(transport: Transport, count: int) -> list[int]:
    """Return the numbers of the first events of a stream from its beginning."""
    stream = transport.stream("/v1/events", after=0)
    return [event["seq"] for event in islice(filter(None, stream), count)]


@contextmanager
def reaching(*answers: bytes, **patience: float) -> Iterator[tuple[Scripted, Transport, list]]:
    waits: list[float] = []
    with serving(*answers) as script:
        transport = Transport(
            script.url, "tml-key", patience=Patience(**patience), sleep=waits.append
        )
        try:
            yield script, transport, waits
        finally:
            transport.close()


def test_the_key_goes_into_the_header_and_the_answer_comes_back_as_json():
    with reaching(answer(200, {"tenant": "acme"})) as (script, transport, _):
        assert transport.call("GET", "/v1/whoami", params={"tenant": "acme", "not": None}) == {
            "tenant": "acme"
        }
    assert script.requests[0].headers["x-api-key"] == "tml-key"
    assert script.requests[0].path == "/v1/whoami?tenant=acme"


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_request", InvalidRequest),
        (400, "unsupported_feature", UnsupportedFeature),
        (401, "unauthorized", Unauthorized),
        (404, "not_found", NotFound),
        (409, "conflict", Conflict),
        (500, "something_new", MarlaasError),
    ],
)
def test_an_error_has_the_class_of_its_code_and_is_not_repeated(status, code, kind):
    with (
        reaching(refusal(status, code, "no")) as (script, transport, _),
        pytest.raises(kind, match="no") as raised,
    ):
        transport.call("GET", "/v1/jobs")
    assert type(raised.value) is kind
    assert raised.value.code == code
    assert len(script.requests) == 1


def test_every_problem_that_the_service_found_is_in_the_error():
    refused = refusal(400, "invalid_request", "2 problems", "steps: got 0", "rank: got 99")
    with reaching(refused) as (_, transport, _), pytest.raises(InvalidRequest) as raised:
        transport.call("POST", "/v1/jobs", body={})
    assert raised.value.problems == ("steps: got 0", "rank: got 99")


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_service_that_refuses_for_now_is_asked_again_whatever_was_asked(method):
    with reaching(BUSY, BUSY, answer(200, [])) as (script, transport, waits):
        assert transport.call(method, "/v1/jobs") == []
    assert len(script.requests) == 3
    assert waits == [3.0, 3.0]


def test_a_client_that_was_closed_reaches_nobody_and_says_so():
    with reaching(answer(200, {})) as (script, transport, _):
        transport.close()
        with pytest.raises(Unreachable, match="was closed"):
            transport.call("GET", "/v1/whoami")
        assert not script.requests


def test_waits_double_with_jitter_and_end():
    with (
        reaching(raw(503, b""), attempts=5, first_wait_s=1, max_wait_s=4) as (_, transport, waits),
        pytest.raises(MarlaasError, match="503"),
    ):
        transport.call("GET", "/v1/jobs")
    assert len(waits) == 4
    for wait_s, most_s in zip(waits, (1, 2, 4, 4), strict=True):
        assert most_s / 2 <= wait_s <= most_s


def test_a_quota_of_the_day_is_not_waited_for():
    refused = refusal(429, "quota_exceeded", "tokens of the day", Retry_After="7200")
    with reaching(refused) as (script, transport, _), pytest.raises(QuotaExceeded) as raised:
        transport.call("POST", "/v1/jobs")
    assert raised.value.retry_after_s == 7200
    assert len(script.requests) == 1


def test_a_lost_answer_is_asked_for_again_only_where_twice_is_once():
    with reaching(HANG_UP, answer(200, 1)) as (script, transport, _):
        assert transport.call("GET", "/v1/jobs") == 1
    with reaching(HANG_UP, answer(200, 1)) as (script, transport, _):
        assert transport.call("POST", "/v1/jobs", is_repeatable=True) == 1
    with (
        reaching(HANG_UP, answer(200, 1)) as (script, transport, _),
        pytest.raises(Unreachable, match="look before asking again"),
    ):
        transport.call("POST", "/v1/tenants/acme/keys")
        assert len(script.requests) == 1


def test_a_delete_whose_first_answer_was_lost_may_find_nothing_left():
    gone = refusal(404, "not_found", "no job sums")
    with reaching(HANG_UP, gone) as (_, transport, _):
        assert transport.call("DELETE", "/v1/jobs/sums") is None
    with reaching(gone) as (_, transport, _), pytest.raises(NotFound):
        transport.call("DELETE", "/v1/jobs/sums")


def test_a_service_that_is_not_there_is_named_with_what_to_do():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        waits: list[float] = []
        transport = Transport(url, "key", sleep=waits.append)
        with pytest.raises(Unreachable) as raised:
            transport.call("POST", "/v1/tenants")
        transport.close()
    assert url in str(raised.value)
    assert "marlaas serve" in str(raised.value) and "MARLAAS_URL" in str(raised.value)
    assert len(waits) == 5


def test_what_is_not_a_service_of_ours_is_said_to_be_none():
    with (
        reaching(raw(200, b"<html>")) as (_, transport, _),
        pytest.raises(MarlaasError, match="did not answer in JSON"),
    ):
        transport.call("GET", "/v1/jobs")
    with (
        reaching(raw(403, b"<html>")) as (_, transport, _),
        pytest.raises(MarlaasError, match="403"),
    ):
        transport.call("GET", "/v1/jobs")


def test_a_file_is_sent_whole_again_after_a_failed_attempt(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "1 + 1"}\n' * 100_000)
    with reaching(BUSY, answer(200, {})) as (script, transport, _):
        transport.call("PUT", "/v1/prompts/sums", body=path)
    assert [request.body == path.read_bytes() for request in script.requests] == [True, True]


# ---------------------------------------------------------------------------------------------
# Streams


def test_a_stream_that_breaks_goes_on_behind_the_last_event():
    with reaching(events(1, 2), HANG_UP, events(2, 3), events(4)) as (script, transport, _):
        seen = seqs(transport, 4)
    assert seen == [1, 2, 3, 4]
    assert [request.headers["last-event-id"] for request in script.requests] == list("0223")


def test_a_stream_that_the_service_ends_is_opened_again():
    with reaching(events(1, is_cut=False), BUSY, events(2)) as (_, transport, waits):
        seen = seqs(transport, 2)
    assert seen == [1, 2]
    assert 3.0 in waits, "as long as the refusal asked for"


def test_half_an_event_is_not_an_event():
    half = 'id: 2\ndata: {"seq": 2}\n'
    with reaching(events(1, tail=half), events(2)) as (script, transport, _):
        seen = seqs(transport, 2)
    assert seen == [1, 2]
    assert len(script.requests) == 2


def test_a_stream_gives_up_once_patience_ends():
    with (
        reaching(HANG_UP, stream_s=0.0) as (_, transport, _),
        pytest.raises(Unreachable, match="lost the service"),
    ):
        list(transport.stream("/v1/events", after=0))


def test_a_stream_of_nothing_known_is_refused_at_once():
    with (
        reaching(refusal(404, "not_found", "no job sums")) as (_, transport, _),
        pytest.raises(NotFound),
    ):
        list(transport.stream("/v1/jobs/sums/events", after=0))


def test_data_over_several_lines_is_one_event():
    lines = ["data: a", "data:b", "", ": alive", "", "data: c"]
    assert list(read_events(iter(lines))) == ["a\nb", ""]


# ---------------------------------------------------------------------------------------------
# Downloads


def test_a_download_that_breaks_is_made_again_and_leaves_nothing_behind(tmp_path):
    cut = raw(200, b"half", length=10)
    with reaching(cut, raw(200, b"all of it")) as (_, transport, _):
        target = transport.download("/v1/x", tmp_path / "new" / "adapter.tar.gz")
    assert target.read_bytes() == b"all of it"
    assert list(target.parent.iterdir()) == [target]


def test_a_download_that_fails_leaves_what_was_there(tmp_path):
    target = tmp_path / "adapter.tar.gz"
    target.write_bytes(b"the old one")
    with (
        reaching(raw(200, b"half", length=10), attempts=2) as (_, transport, _),
        pytest.raises(Unreachable),
    ):
        transport.download("/v1/x", target)
    assert target.read_bytes() == b"the old one"
    assert list(tmp_path.iterdir()) == [target]


def test_a_download_of_nothing_known_makes_no_file(tmp_path):
    with (
        reaching(refusal(404, "not_found", "no version 3")) as (_, transport, _),
        pytest.raises(NotFound, match="no version 3"),
    ):
        transport.download("/v1/x", Path(tmp_path) / "adapter")
    assert list(tmp_path.iterdir()) == []
