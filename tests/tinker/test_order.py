"""Numbers decide the order of training operations, once each, whatever a network does to them."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.tinker.served import Tenant, datum, some_tokens
from tests.tinker.wire import Wire

pytestmark = pytest.mark.slow

DATA = [datum(some_tokens(seed, 9)) for seed in range(2)]
BROKEN = [datum(some_tokens(3, 9), weights=np.full(8, np.nan, np.float32))]


@pytest.fixture(scope="module")
def wire(acme: Tenant) -> Iterator[Wire]:
    with acme.wire() as client:
        yield client


@pytest.fixture
def model(wire: Wire) -> str:
    return wire.new_model(wire.new_session())


def request_id(answer) -> str:
    return answer.raise_for_status().json()["request_id"]


def pass_(wire: Wire, model: str, seq_id: int, data=DATA) -> str:
    return request_id(wire.forward_backward(model, seq_id, data))


def step(wire: Wire, model: str, seq_id: int) -> str:
    return request_id(wire.optim_step(model, seq_id))


def logprobs(wire: Wire, request: str) -> np.ndarray:
    return wire.result(request).loss_fn_outputs[0]["logprobs"].to_numpy()


@pytest.fixture(scope="module")
def in_order(wire: Wire) -> list[np.ndarray]:
    """What pass, step, pass, step, pass say when they come as they are numbered."""
    model = wire.new_model(wire.new_session())
    passes = []
    for seq_id in (1, 3, 5):
        passes.append(pass_(wire, model, seq_id))
        step(wire, model, seq_id + 1)
    return [logprobs(wire, request) for request in passes]


@pytest.mark.parametrize("order", [(2, 1, 3, 4, 5), (5, 4, 3, 2, 1), (3, 2, 5, 4, 1)], ids=str)
def test_operations_that_come_in_any_order_are_done_in_theirs(wire, model, in_order, order):
    requests = {}
    for seq_id in order:
        requests[seq_id] = (step if seq_id % 2 == 0 else pass_)(wire, model, seq_id)
    for expected, seq_id in zip(in_order, (1, 3, 5), strict=True):
        assert np.array_equal(logprobs(wire, requests[seq_id]), expected)


def test_a_number_that_comes_twice_is_one_operation(wire, model, in_order):
    first = [pass_(wire, model, 1), pass_(wire, model, 1)]
    steps = [step(wire, model, 2) for _ in range(3)]
    assert len(set(first)) == len(set(steps)) == 1
    second = pass_(wire, model, 3)
    assert np.array_equal(logprobs(wire, second), in_order[1])
    assert step(wire, model, 2) == steps[0], "and is known when it is long done"


def test_a_number_with_another_content_is_refused_and_changes_nothing(wire, model, in_order):
    pass_(wire, model, 1)
    step(wire, model, 2)
    for answer in (
        wire.forward_backward(model, 1, [datum(some_tokens(8, 9))]),
        wire.optim_step(model, 2, beta1=0.5),
        wire.optim_step(model, 1),
    ):
        assert answer.status_code in (400, 422), answer.text
    assert np.array_equal(logprobs(wire, pass_(wire, model, 3)), in_order[1])


def test_a_result_can_be_read_again(wire, model):
    request = pass_(wire, model, 1)
    assert np.array_equal(logprobs(wire, request), logprobs(wire, request))


def test_a_refused_submit_uses_its_number_up(wire, model, in_order):
    refused = wire.forward_backward(model, 1, BROKEN)
    if refused.status_code == 200:
        assert wire.result(request_id(refused))["category"] == "user"
    else:
        assert refused.status_code in (400, 422), refused.text
    failed = wire.result(step(wire, model, 2))
    assert failed["category"] == "user", "no step is taken with part of a gradient"
    passes = [pass_(wire, model, 3), pass_(wire, model, 5)] if step(wire, model, 4) else []
    for expected, request in zip(in_order[:2], passes, strict=True):
        assert np.array_equal(logprobs(wire, request), expected)


def test_a_number_that_never_comes_fails_what_waits_behind_it(wire, model):
    """The suite's service waits three seconds for a missing number."""
    late = pass_(wire, model, 3)
    failed = wire.result(late, within_s=30.0)
    assert failed["category"] == "server" and "1" in failed["error"]


@pytest.mark.parametrize("seq_id", [0, -1, 2**31 - 1])
def test_a_number_that_cannot_be_is_refused(wire, model, seq_id):
    answer = wire.optim_step(model, seq_id)
    if answer.status_code == 200:
        assert wire.result(request_id(answer), within_s=30.0)["category"] in ("user", "server")
    else:
        assert answer.status_code in (400, 422), answer.text
