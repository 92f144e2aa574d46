"""What cannot be trained or drawn is refused in words, and the run goes on as if it never came."""

import socket
import time
from typing import Any

import numpy as np
import pytest
import tinker
import zstandard
from tinker import types
from tinker.proto import tinker_public_pb2 as proto

from tests.tinker.served import (
    WAIT_S,
    Tenant,
    datum,
    logprobs,
    new_run,
    prompt,
    some_tokens,
    train,
)

pytestmark = pytest.mark.slow

GOOD = [datum(some_tokens(1, 9))]
N = 8


def floats(value: float = 0.5, length: int = N) -> np.ndarray:
    return np.full(length, value, np.float32)


def with_rl(**inputs: Any) -> types.Datum:
    return datum(some_tokens(1, 9), **{"logprobs": floats(-1), "advantages": floats(), **inputs})


def sparse(columns: list[int], rows: list[int]) -> types.Datum:
    tensor = types.TensorData(
        data=np.full(len(columns), 1, np.int64),
        dtype="int64",
        shape=[N, 4],
        sparse_crow_indices=rows,
        sparse_col_indices=columns,
    )
    return types.Datum(
        model_input=prompt(some_tokens(1, 9)[:-1]),
        loss_fn_inputs={"target_tokens": tensor, "weights": np.ones((N, 4), np.float32)},
    )


CROSS = "cross_entropy"
IS = "importance_sampling"
FAULTS: dict[str, tuple[types.Datum, str, dict | None, str]] = {
    "a token out of range": (datum([5, 6, 1024, 7]), CROSS, None, "1024"),
    "a target out of range": (
        datum([5, 6, 7], target_tokens=np.array([6, 5000]), weights=floats(1, 2)),
        CROSS,
        None,
        "5000",
    ),
    "a negative token": (datum([5, -3, 7, 8]), CROSS, None, "-3"),
    "weights that are no numbers": (
        datum(some_tokens(1, 9), weights=floats(np.nan)),
        CROSS,
        None,
        "weights",
    ),
    "advantages that are no numbers": (with_rl(advantages=floats(np.nan)), IS, None, "advantages"),
    "infinite logprobs": (with_rl(logprobs=floats(-np.inf)), IS, None, "logprobs"),
    "an input that is too short": (
        datum(some_tokens(1, 9), weights=floats(1, 3)),
        CROSS,
        None,
        "weights",
    ),
    "targets that are too few": (
        datum(some_tokens(1, 9), target_tokens=np.arange(3, 6), weights=floats(1, 3)),
        CROSS,
        None,
        "target_tokens",
    ),
    "no targets": (
        types.Datum(model_input=prompt([5, 6]), loss_fn_inputs={"weights": floats(1, 2)}),
        CROSS,
        None,
        "target_tokens",
    ),
    "no advantages": (datum(some_tokens(1, 9), logprobs=floats(-1)), IS, None, "advantages"),
    "no ratio mask": (with_rl(), "gspo", None, "sequence_ratio_mask"),
    "an input nobody knows": (with_rl(rewards=floats()), IS, None, "rewards"),
    "targets that are no integers": (
        datum(some_tokens(1, 9), target_tokens=floats(), weights=floats()),
        CROSS,
        None,
        "target_tokens",
    ),
    "an option nobody knows": (with_rl(), "ppo", {"clip": 0.2}, "clip"),
    "an option that is text": (with_rl(), "ppo", {"clip_low_threshold": "low"}, "clip_low"),
    "an option that is no number": (with_rl(), "dro", {"beta": float("nan")}, "beta"),
    "nothing at all": (types.Datum(model_input=prompt([]), loss_fn_inputs={}), CROSS, None, "0"),
    "more than the context": (datum(some_tokens(1, 2100)), CROSS, None, "2047"),
    "a column that is not there": (sparse([9], [0, 1, *[1] * (N - 1)]), CROSS, None, "target"),
    "rows that go back": (sparse([1, 2], [0, 2, 1, *[2] * (N - 2)]), CROSS, None, "target"),
    "a tensor of a gigabyte": (
        types.Datum(
            model_input=prompt([5]),
            loss_fn_inputs={
                "target_tokens": types.TensorData(
                    data=np.ones(1, np.int64),
                    dtype="int64",
                    shape=[1, 2**40],
                    sparse_crow_indices=[0, 1],
                    sparse_col_indices=[2**39],
                ),
                "weights": floats(1, 1),
            },
        ),
        CROSS,
        None,
        "sparse",
    ),
}


@pytest.fixture(scope="module")
def expected(service: tinker.ServiceClient) -> np.ndarray:
    run = new_run(service)
    train(run, GOOD)
    return logprobs(run, GOOD)[0]


@pytest.mark.parametrize("fault", FAULTS)
def test_data_that_cannot_be_trained_are_refused_and_the_run_goes_on(run, expected, fault: str):
    broken, loss, config, words = FAULTS[fault]
    passed = run.forward_backward([GOOD[0], broken], loss, config)
    stepped = run.optim_step(types.AdamParams(learning_rate=1e-3))
    with pytest.raises(tinker.TinkerError, match=f"(?s){words}") as refusal:
        passed.result(timeout=WAIT_S)
    assert "Traceback" not in str(refusal.value)
    with pytest.raises(tinker.RequestFailedError) as failure:
        stepped.result(timeout=WAIT_S)
    assert failure.value.category == tinker.types.RequestErrorCategory.User
    train(run, GOOD)
    assert np.array_equal(logprobs(run, GOOD)[0], expected), "nothing was left of what failed"


@pytest.mark.parametrize(
    ("chunk", "words"),
    [
        (types.ImageChunk(data=b"png", format="png", expected_tokens=1), "image"),
        (types.DmelChunk(dmel=b"audio"), "dmel|audio"),
    ],
    ids=["image", "dmel"],
)
def test_what_is_no_text_is_refused_by_its_name(service, run, chunk, words: str):
    mixed = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[5, 6]), chunk])
    broken = types.Datum(
        model_input=mixed,
        loss_fn_inputs={"target_tokens": np.array([6, 7, 8]), "weights": floats(1, 3)},
    )
    with pytest.raises(tinker.TinkerError, match=f"(?i){words}"):
        run.forward_backward([broken], CROSS).result(timeout=WAIT_S)
    sampler = service.create_sampling_client(base_model="tiny").result(timeout=WAIT_S)
    with pytest.raises(tinker.TinkerError, match=f"(?i){words}"):
        sampler.sample(mixed, 1, types.SamplingParams(max_tokens=1)).result(timeout=WAIT_S)


@pytest.mark.parametrize(
    "adam",
    [
        {"learning_rate": float("nan")},
        {"learning_rate": -1.0},
        {"beta1": 1.5},
        {"eps": -1.0},
        {"grad_clip_norm": float("inf")},
    ],
    ids=str,
)
def test_a_step_that_cannot_be_taken_is_refused(acme: Tenant, adam: dict):
    """By hand: the SDK's own JSON leaves out what is no number."""
    (name,) = adam
    with acme.wire() as wire:
        model = wire.new_model(wire.new_session())
        body = str({"learning_rate": 1e-3, **adam}).replace("'", '"')
        body = body.replace("nan", "NaN").replace("inf", "Infinity")
        answer = wire.send(
            "POST",
            "optim_step",
            content=f'{{"model_id": "{model}", "seq_id": 1, "adam_params": {body}}}',
            headers={"Content-Type": "application/json"},
        )
        assert answer.status_code in (400, 422)
        assert name in answer.text or "is no JSON" in answer.text


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -7}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**9}, "2048|max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"seed": 2**80}, "seed"),
    ],
    ids=str,
)
def test_a_sample_that_cannot_be_drawn_is_refused(service, params: dict, words: str):
    sampler = service.create_sampling_client(base_model="tiny").result(timeout=WAIT_S)
    asked = types.SamplingParams(**{"max_tokens": 2, **params})
    with pytest.raises(tinker.TinkerError, match=words):
        sampler.sample(prompt([5, 6]), 1, asked).result(timeout=WAIT_S)


@pytest.mark.parametrize(
    ("tokens", "samples", "words"),
    [([], 1, "empty"), ([5, 2000], 1, "2000"), ([5], 0, "num_samples"),
     ([5], 10**6, "num_samples")],
)  # fmt: skip
def test_a_prompt_that_cannot_be_is_refused(service, tokens, samples: int, words: str):
    sampler = service.create_sampling_client(base_model="tiny").result(timeout=WAIT_S)
    asked = types.SamplingParams(max_tokens=1)
    with pytest.raises(tinker.TinkerError, match=words):
        sampler.sample(prompt(tokens), samples, asked).result(timeout=WAIT_S)


def test_bodies_that_are_no_request_are_refused(acme: Tenant):
    with acme.wire() as wire:
        model = wire.new_model(wire.new_session())
        request = proto.ForwardBackwardRequest(model_id=model, seq_id=1, loss_fn=CROSS)
        good = request.SerializeToString()
        bomb = zstandard.ZstdCompressor().compress(bytes(1 << 30))
        for body, headers in (
            (b"\xff\xfe nonsense", {}),
            (good[:-3], {}),
            (good, {"Content-Encoding": "zstd"}),
            (bomb, {"Content-Encoding": "zstd"}),
            (good, {"Content-Encoding": "br"}),
            (bytes(80 << 20), {}),
        ):
            answer = wire.forward_backward_bytes(body, **headers)
            assert 400 <= answer.status_code < 500, (headers, answer.text)
            assert answer.status_code not in (408, 409, 429), "the SDK would try those again"
        for path, body in (
            ("create_session", {"tags": "no list", "user_metadata": {}, "sdk_version": "0.38.0"}),
            ("create_model", {"session_id": 7}),
            ("optim_step", {"model_id": model}),
            ("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {"momentum": 0.9}}),
            ("asample", {"prompt": "text"}),
            ("retrieve_future", {"request_id": 3}),
            ("retrieve_future", {"request_id": "nothing"}),
            ("weights_info", {"tinker_path": "http://elsewhere"}),
        ):
            answer = wire.post(path, **body)
            assert answer.status_code in (400, 404, 422), (path, answer.text)
            assert "error" in answer.text or "detail" in answer.text


def test_a_key_is_needed_and_an_operators_owns_nothing(acme: Tenant):
    from tests.tinker.wire import Wire

    with Wire(acme.running.url, "tml-nobody") as stranger:
        assert stranger.post("client/config", sdk_version="0.38.0").status_code == 401
    with Wire(acme.running.url, acme.running.operator_key) as operator:
        answer = operator.post("create_session", tags=[], user_metadata={}, sdk_version="0.38.0")
        assert answer.status_code in (400, 403) and "tenant" in answer.text


def test_a_client_that_leaves_in_the_middle_of_its_request_is_no_fault_of_the_service(acme: Tenant):
    host, port = acme.running.url.removeprefix("http://").split(":")
    path = "/api/v1/telemetry"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {acme.key}\r\nContent-Length: 999\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + b"{")
        time.sleep(0.5)
    log = acme.running.folder / "stderr.log"
    deadline = time.monotonic() + WAIT_S
    while '"status": 499' not in (text := log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert "unexpected exception" not in text
