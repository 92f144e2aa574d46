"""Shares follow weights in device seconds, debts are paid, and the queue's size does not matter."""

import random
import time
from collections import Counter

import pytest

from marlaas.loop.fairness import (
    CostModel,
    DeficitRing,
    FairQueue,
    Needs,
    TokenCounts,
    WorkerLoad,
)
from marlaas.types import JobSpec, WorkerStats


def job(tenant: str, name: str = "job") -> JobSpec:
    return JobSpec(tenant=tenant, name=name, env={})


def serve(
    queue: FairQueue, specs: list[JobSpec], costs: dict[str, float], total_s: float
) -> Counter:
    """Admit until `total_s` device seconds are spent, with every job always ready."""
    by_id = {spec.job_id: spec for spec in specs}
    spent: Counter = Counter()
    while sum(spent.values()) < total_s:
        spec = by_id[queue.next()]
        queue.charge(spec, costs[spec.job_id])
        spent[spec.job_id] += costs[spec.job_id]
    return spent


def test_a_cheap_and_a_dear_job_get_the_same_device_time() -> None:
    specs = [job("a"), job("b")]
    costs = {"a/job": 1.0, "b/job": 7.0}
    queue = FairQueue(costs.__getitem__, {})
    for spec in specs:
        queue.add(spec)
    spent = serve(queue, specs, costs, 1400)
    assert abs(spent["a/job"] - spent["b/job"]) <= 14


def test_a_tenant_gains_nothing_from_many_jobs() -> None:
    specs = [job("greedy", f"j{i}") for i in range(9)] + [job("modest")]
    costs = {spec.job_id: 1.0 for spec in specs}
    queue = FairQueue(costs.__getitem__, {})
    for spec in specs:
        queue.add(spec)
    spent = serve(queue, specs, costs, 1800)
    assert abs(spent["modest/job"] - 900) <= 10
    shares = [spent[f"greedy/j{i}"] for i in range(9)]
    assert max(shares) - min(shares) <= 2


@pytest.mark.parametrize("weight", [3.0, 0.25])
def test_weights_set_the_shares(weight: float) -> None:
    specs = [job("a"), job("b")]
    costs = {"a/job": 1.0, "b/job": 2.0}
    queue = FairQueue(costs.__getitem__, {"a": weight})
    for spec in specs:
        queue.add(spec)
    spent = serve(queue, specs, costs, 4000)
    assert spent["a/job"] / spent["b/job"] == pytest.approx(weight, rel=0.05)


def test_a_tenant_that_was_alone_has_nothing_saved_up_against_a_newcomer() -> None:
    """What it paid too much for sixteen groups comes back, and buys no sixteen groups."""
    specs = [job("old", f"j{i}") for i in range(4)]
    queue = FairQueue(lambda job_id: 1.0, {})
    for spec in specs:
        queue.add(spec)
    by_id = {spec.job_id: spec for spec in specs}
    opened = []
    for _ in range(16):
        opened.append(by_id[queue.next()])
        queue.charge(opened[-1], 1.0)
    for spec in opened:
        queue.charge(spec, -0.9)
    newcomer = job("new")
    queue.add(newcomer)
    served: Counter = Counter()
    for _ in range(6):
        job_id = queue.next()
        spec = newcomer if job_id == newcomer.job_id else by_id[job_id]
        queue.charge(spec, 1.0)
        served[spec.tenant] += 1
    assert served["new"] >= 2


def test_what_a_group_really_cost_is_settled() -> None:
    """A job that always costs four times its estimate is served four times less often."""
    specs = [job("honest"), job("heavy")]
    queue = FairQueue(lambda job_id: 1.0, {})
    by_id = {spec.job_id: spec for spec in specs}
    for spec in specs:
        queue.add(spec)
    served: Counter = Counter()
    for _ in range(1000):
        spec = by_id[queue.next()]
        served[spec.tenant] += 1
        queue.charge(spec, 1.0)
        queue.charge(spec, 3.0 if spec.tenant == "heavy" else 0.0)
    assert served["honest"] / served["heavy"] == pytest.approx(4.0, rel=0.05)


def test_debt_outlives_absence_and_credit_does_not() -> None:
    ring: DeficitRing[str] = DeficitRing(lambda key: 1.0)
    ring.add("a")
    ring.add("b")
    ring.charge("a", 5.0)
    ring.discard("a")
    ring.add("a")
    taken = []
    for _ in range(8):
        key = ring.head()
        ring.charge(key, 1.0)
        taken.append(key)
    assert taken.count("a") <= 2


def test_everyone_deep_in_debt_is_still_served_at_once() -> None:
    ring: DeficitRing[int] = DeficitRing(lambda key: 1.0)
    for key in range(100):
        ring.add(key)
        ring.charge(key, 1e9 + key)
    began = time.perf_counter()
    assert ring.head() == 0
    assert time.perf_counter() - began < 0.1


def test_a_random_history_never_starves_anyone() -> None:
    rng = random.Random(1)
    specs = [job(f"t{i % 7}", f"j{i}") for i in range(40)]
    costs = {spec.job_id: rng.uniform(0.1, 5.0) for spec in specs}
    queue = FairQueue(costs.__getitem__, {f"t{i}": rng.uniform(0.5, 2) for i in range(7)})
    last = dict.fromkeys(costs, 0)
    by_id = {spec.job_id: spec for spec in specs}
    for spec in specs:
        queue.add(spec)
    for turn in range(20_000):
        job_id = queue.next()
        queue.charge(by_id[job_id], costs[job_id] * rng.uniform(0.5, 2))
        assert turn - last[job_id] < 3000
        last[job_id] = turn
        if rng.random() < 0.3:
            queue.discard(by_id[job_id])
            queue.add(by_id[job_id])


def test_an_empty_queue_has_no_next() -> None:
    queue = FairQueue(lambda job_id: 1.0, {})
    assert queue.next() is None
    queue.add(job("a"))
    queue.discard(job("a"))
    assert queue.next() is None


def test_predictions_follow_what_the_worker_and_the_groups_say() -> None:
    model = CostModel()
    model.expect("a/job", TokenCounts(prefill=0, decode=100, train=0))
    before = model.predict_s("a/job")
    stats = WorkerStats(
        name="w", elapsed_s=10, busy_s={"decode": 4.0}, tokens={"decode": 2000}, num_decoding=0,
        num_waiting=0, num_parked=0, kv_tokens=0, kv_capacity_tokens=1, rss_bytes=0,
    )  # fmt: skip
    model.learn_rates(stats)
    assert model.predict_s("a/job") == pytest.approx(2 * before, rel=1e-3)


def test_a_worker_has_room_until_its_batch_or_its_memory_is_full() -> None:
    load = WorkerLoad(max_decoding=2, kv_capacity_tokens=100)
    left = []
    with load.sampling(60, lambda: left.append(1)):
        assert load.has_room
        with load.sampling(60, lambda: left.append(2)):
            assert not load.has_room
        assert load.has_room
    assert left == [2, 1]
    with load.sampling(1000, lambda: None):
        assert not load.has_room
    assert load.has_room, "a group larger than the memory may still try alone"


# ---------------------------------------------------------------------------------------------
# Within a tenant


def test_the_job_that_ends_last_gets_more_of_its_tenants_part_and_no_other_tenants() -> None:
    specs = [job("a", "long"), job("a", "short"), job("b")]
    costs = {spec.job_id: 1.0 for spec in specs}
    queue = FairQueue(costs.__getitem__, {})
    for spec in specs:
        queue.add(spec)
    queue.expect(specs[0], 30.0)
    queue.expect(specs[1], 15.0)
    spent = serve(queue, specs, costs, 1200)
    assert abs(spent["b/job"] - 600) <= 10
    assert spent["a/long"] / spent["a/short"] == pytest.approx(2.0, rel=0.05)


def test_no_job_is_left_behind_however_long_its_siblings_are() -> None:
    specs = [job("a", f"j{i}") for i in range(5)]
    costs = {spec.job_id: 1.0 for spec in specs}
    queue = FairQueue(costs.__getitem__, {})
    for i, spec in enumerate(specs):
        queue.add(spec)
        queue.expect(spec, 1e6 * i)
    spent = serve(queue, specs, costs, 2000)
    assert max(spent.values()) <= 4.2 * min(spent.values())
    queue.forget(specs[4])
    queue.forget(specs[3])
    again = serve(queue, specs[:3], costs, 300)
    assert min(again.values()) >= 300 / 9 * 0.9


def test_needs_that_are_not_known_are_taken_for_the_average() -> None:
    needs = Needs()
    assert needs.weight_of("a/new") == 1.0
    needs.expect("a/one", 10.0)
    needs.expect("a/two", 30.0)
    assert [needs.weight_of(f"a/{name}") for name in ("one", "new", "two")] == [0.5, 1.0, 1.5]
    needs.expect("a/two", 0.0)
    needs.forget("a/one")
    assert needs.weight_of("a/two") == 1.0, "nothing is left to do: all are alike"
