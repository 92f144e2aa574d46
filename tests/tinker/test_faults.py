"""The service is killed while clients wait, and comes back: they get their answers, once each.

Every story is told twice on the same service, once in peace and once through a kill; in exact mode
the second must say what the first said, bit for bit.
"""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import tinker
from tinker import types

from tests.client.running import Running
from tests.tinker.served import (
    BASE,
    WAIT_S,
    Tenant,
    add_tenant,
    datum,
    logprobs,
    new_run,
    prompt,
    some_tokens,
    start,
    train,
)

pytestmark = pytest.mark.slow

SMALL = [datum(some_tokens(seed, 12)) for seed in range(3)]
LARGE = [datum(some_tokens(seed, 200)) for seed in range(48)]
"""Takes the worker about a second, so that a kill falls into the pass."""
ADAM = types.AdamParams(learning_rate=1e-3)
LONG = types.SamplingParams(max_tokens=600, seed=5, stop=[])


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    service = start(tmp_path_factory.mktemp("faults"), "--exact")
    yield service
    assert service.stop() == 0


@pytest.fixture(scope="module")
def acme(running: Running) -> Iterator[Tenant]:
    tenant = add_tenant(running, "acme")
    yield tenant
    tenant.close()


def kill_and_start(running: Running) -> None:
    running.kill()
    running.start(*flags(running))


def flags(running: Running) -> list[str]:
    return ["--exact", "--config", str(running.folder / "settings.yaml")]


def passes(service: tinker.ServiceClient, while_it_runs) -> list[np.ndarray]:
    """Gradients of two passes, the kill in the second one, then the step that takes both."""
    run = new_run(service)
    run.forward_backward(SMALL, "cross_entropy").result(timeout=WAIT_S)
    passed = run.forward_backward(LARGE, "cross_entropy")
    stepped = run.optim_step(ADAM)
    while_it_runs()
    outputs = passed.result(timeout=WAIT_S).loss_fn_outputs
    stepped.result(timeout=WAIT_S)
    return [row["logprobs"].to_numpy() for row in outputs] + logprobs(run, SMALL)


def samples(service: tinker.ServiceClient, while_it_runs) -> list[np.ndarray]:
    run = new_run(service)
    train(run, SMALL)
    sampler = run.save_weights_and_get_sampling_client().result(timeout=WAIT_S)
    futures = [sampler.sample(prompt(some_tokens(seed, 10)), 2, LONG) for seed in range(4)]
    while_it_runs()
    return [
        np.array(sequence.tokens)
        for future in futures
        for sequence in future.result(timeout=WAIT_S).sequences
    ]


def steps(service: tinker.ServiceClient, while_it_runs) -> list[np.ndarray]:
    """Steps that are queued, the kill while they are taken."""
    run = new_run(service)
    queued = []
    for _ in range(6):
        run.forward_backward(SMALL, "cross_entropy")
        queued.append(run.optim_step(ADAM))
    queued[0].result(timeout=WAIT_S)
    while_it_runs()
    for step in queued:
        step.result(timeout=WAIT_S)
    return logprobs(run, SMALL)


def saves(service: tinker.ServiceClient, while_it_runs) -> list[np.ndarray]:
    """Saves that are queued, the kill while they are made; each can be loaded afterwards."""
    run = new_run(service)
    train(run, SMALL)
    queued = [
        run.save_state("one"),
        run.save_weights_for_sampler("two"),
        run.save_weights_external("three", 3600),
        run.save_state("four"),
    ]
    while_it_runs()
    paths = [save.result(timeout=WAIT_S).path for save in queued]
    train(run, SMALL)
    loaded = [
        service.create_training_client_from_state_with_optimizer(path).result(timeout=WAIT_S)
        for path in (paths[0], paths[3])
    ]
    sampler = service.create_sampling_client(paths[1]).result(timeout=WAIT_S)
    scored = sampler.compute_logprobs(prompt(some_tokens(0, 12))).result(timeout=WAIT_S)
    found = [array for one in loaded for array in logprobs(one, SMALL)]
    return [*found, *logprobs(run, SMALL), np.array(scored[1:])]


@pytest.mark.parametrize(
    ("first", "second", "pause_s"),
    [(passes, samples, 0.6), (steps, saves, 0.05)],
    ids=["in a pass and in samples", "in steps and in saves"],
)
def test_who_waits_through_a_kill_gets_what_there_would_have_been_without(
    running: Running, acme: Tenant, first, second, pause_s: float
):
    stories = (first, second)
    expected = [story(acme.service(), lambda: None) for story in stories]
    both_wait = threading.Barrier(3)
    found: dict[int, list[np.ndarray]] = {}

    def tell(idx: int) -> None:
        found[idx] = stories[idx](acme.service(), lambda: both_wait.wait(timeout=WAIT_S))

    threads = [threading.Thread(target=tell, args=(idx,)) for idx in range(2)]
    for thread in threads:
        thread.start()
    both_wait.wait(timeout=WAIT_S)
    time.sleep(pause_s)
    kill_and_start(running)
    for thread in threads:
        thread.join()
    for idx, before in enumerate(expected):
        assert len(found[idx]) == len(before)
        for one, other in zip(before, found[idx], strict=True):
            assert np.array_equal(one, other)


def test_a_client_that_only_listens_outlives_a_restart(running: Running, acme: Tenant):
    service = acme.service()
    run = new_run(service)
    train(run, SMALL)
    sampler = service.create_sampling_client(base_model=BASE).result(timeout=WAIT_S)
    before = sampler.compute_logprobs(prompt([5, 6, 7])).result(timeout=WAIT_S)
    expected = logprobs(run, SMALL)
    assert running.stop() == 0
    running.start(*flags(running))
    assert sampler.compute_logprobs(prompt([5, 6, 7])).result(timeout=WAIT_S) == before
    assert all(np.array_equal(a, b) for a, b in zip(expected, logprobs(run, SMALL), strict=True))
