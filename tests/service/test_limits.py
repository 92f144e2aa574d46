"""Sizes, rates and shapes: what is too large, too fast or not well formed is refused as that."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from marlaas.errors import InvalidRequest
from marlaas.service.limits import Room, check_json
from marlaas.types import Quotas
from tests.service.bench import SETTINGS, SUMS, Tokenizer, bench

SMALL = replace(SETTINGS, max_body_bytes=2048, max_upload_bytes=4096)


class Pieces:
    """A body of a known or unknown length that says how much of it was taken."""

    def __init__(self, count: int, size: int = 1000) -> None:
        self.count, self.size, self.num_taken = count, size, 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(self.count):
            self.num_taken += 1
            yield b"x" * self.size


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/sweeps", "/v1/chat/completions"])
async def test_a_body_that_is_announced_too_large_is_not_read(tmp_path: Path, path: str) -> None:
    async with bench(tmp_path, settings=SMALL) as service:
        body = Pieces(1000)
        headers = {"Content-Length": str(1 << 30), "Content-Type": "application/json"}
        answer = await service.call("POST", path, content=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
        assert body.num_taken == 0


@pytest.mark.asyncio
async def test_a_body_that_says_no_length_is_read_up_to_the_limit(tmp_path: Path) -> None:
    async with bench(tmp_path, settings=SMALL) as service:
        body = Pieces(1000)
        answer = await service.call("PUT", "/v1/prompts/p", content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
        assert body.num_taken <= 5
        assert (await service.get("/v1/uploads"))["uploads"] == []


@pytest.mark.asyncio
async def test_a_large_upload_without_a_key_is_a_missing_key(tmp_path: Path) -> None:
    async with bench(tmp_path, settings=SMALL) as service:
        body = Pieces(1000)
        answer = await service.http.put("/v1/prompts/p", content=body)
        assert (answer.status_code, body.num_taken) == (401, 0)


@pytest.mark.asyncio
async def test_a_tenant_that_asks_too_fast_waits_and_its_neighbour_does_not(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path, quotas=Quotas(requests_a_second=5.0)) as service:
        answers = [await service.call("GET", "/v1/whoami") for _ in range(30)]
        statuses = [answer.status_code for answer in answers]
        assert 10 <= statuses.count(200) < 20
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.json()["error"]["code"] == "quota_exceeded"
        assert int(refused.headers["Retry-After"]) >= 1
        assert (await service.call("GET", "/v1/whoami", who="birch")).status_code == 200
        lifted = {"quotas": {"requests_a_second": None}}
        await service.call("PATCH", "/v1/tenants/acme", who="operator", json=lifted)
        assert (await service.call("GET", "/v1/whoami")).status_code == 200


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"a": [0, {"b": 2**63}]}, r"body\.a\[1\]\.b: expected a whole number of 64 bits"),
        ({"a": float("nan")}, r"body\.a: expected a finite number"),
        ({"a": "\ud800"}, r"body\.a: expected Unicode"),
        ({"a\x00": 1}, r"body: a key: expected Unicode"),
        (json.loads("[" * 30 + "]" * 30), "nested deeper"),
    ],
)
def test_json_that_nobody_could_keep_is_refused_with_its_place(value: object, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        check_json(value)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "body",
    [
        b"{", b"\xff", b"[]", b"null", b"1e999", b"[" * 100_000,
        json.dumps({**SUMS, "env": {"family": "math", "kind": "\ud800"}}).encode(),
        json.dumps({**SUMS, "seed": 10**40}).encode(),
        b'{"name": "x", "env": {"family": "math"}, "steps": NaN}',
    ],
)  # fmt: skip
async def test_a_body_that_is_no_job_is_refused_in_the_usual_shape(
    tmp_path: Path, body: bytes
) -> None:
    async with bench(tmp_path) as service:
        headers = {"Content-Type": "application/json"}
        answer = await service.call("POST", "/v1/jobs", content=body, headers=headers)
        assert answer.status_code == 422, answer.text
        error = answer.json()["error"]
        assert (error["code"], bool(error["message"])) == ("invalid_request", True)
        assert error["request_id"] == answer.headers["X-Request-Id"]


@pytest.mark.asyncio
async def test_a_prompt_that_takes_long_to_read_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(self: Tokenizer, text: str) -> list[int]:
        time.sleep(0.5)
        return [1]

    monkeypatch.setattr(Tokenizer, "encode", slowly)
    async with bench(tmp_path) as service:
        body = {"model": "base", "prompt": "x", "max_tokens": 1}
        asking = [
            asyncio.create_task(service.call("POST", "/v1/completions", json=body))
            for _ in range(3)
        ]
        await asyncio.sleep(0.1)
        began_s = time.monotonic()
        await service.get("/v1/whoami", who="birch")
        assert time.monotonic() - began_s < 0.3
        assert [(await one).status_code for one in asking] == [200] * 3


@pytest.mark.asyncio
async def test_rates_that_no_clock_can_hold_are_refused_and_never_a_fault(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        for rate in (1e-320, 1e-4):
            change = {"quotas": {"requests_a_second": rate}}
            answer = await service.call("PATCH", "/v1/tenants/acme", who="operator", json=change)
            assert answer.status_code == 422, answer.text
    async with bench(tmp_path / "old", quotas=Quotas(requests_a_second=1e-320)) as service:
        answers = [await service.call("GET", "/v1/whoami") for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429]
        assert answers[1].headers["Retry-After"] == "3600"


@pytest.mark.asyncio
async def test_room_is_waited_for_by_its_tenant_alone() -> None:
    room, order = Room(100), []

    async def hold(name: str, num_bytes: int, until: asyncio.Event) -> None:
        async with room.of(name, num_bytes):
            order.append(name)
            await until.wait()

    first, rest = asyncio.Event(), asyncio.Event()
    rest.set()
    tasks = [asyncio.create_task(hold("acme", 90, first))]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(hold(name, 1000, rest)) for name in ("acme", "birch")]
    for _ in range(20):
        await asyncio.sleep(0)
    assert order == ["acme", "birch"]
    tasks[1].cancel()
    tasks.append(asyncio.create_task(hold("acme", 11, rest)))
    first.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["acme", "birch", "acme"] and not room._taken
