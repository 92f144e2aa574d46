"""The simulated pipeline is the real loop and host on a clock: exact, and the same every time."""

import asyncio

import pytest

from marlaas import runtime
from marlaas.bench.paced_engine import Cores
from marlaas.bench.schedule import Episode, Machine, Recording, simulate
from marlaas.bench.workload import Workload
from marlaas.types import JobSpec, Latency

STOP = 2
WORKLOAD = Workload(
    steps=4, prompts_per_step=2, group_size=4, latency=Latency(median_s=0.5, sigma=1.0)
)


def recording() -> Recording:
    """Two groups a family: one turn of five tokens, or two of three; every other one succeeds."""
    one = [Episode(((7, 8, 9, 10),), ((20, 21, 22, 23, STOP),), float(i % 2)) for i in range(4)]
    two = [
        Episode(((7, 8, 9), (11, 12)), ((20, 21, STOP), (30 + i, 31, STOP)), float(i % 2))
        for i in range(4)
    ]
    return {"math": [one, one], "code": [one, one], "search": [two, two]}


def jobs(count: int) -> list[JobSpec]:
    return [WORKLOAD.job(number) for number in range(count)]


def work(cores: Cores, *tasks: tuple[float, float]) -> list[float]:
    """Return when tasks end that begin at given times with so much work each."""

    async def one(begin_s: float, seconds: float) -> float:
        await asyncio.sleep(begin_s)
        await cores.work(seconds)
        return runtime.now_s()

    async def all_of_them() -> list[float]:
        return await asyncio.gather(*(one(*task) for task in tasks))

    return runtime.run_virtual(all_of_them())


def test_who_has_work_shares_the_cores():
    assert work(Cores(2, crowding=1.0), (0.0, 1.0), (0.0, 2.0)) == pytest.approx([1.0, 2.0])
    # Three on two cores: two thirds each until the first ends, then one each.
    ends_s = work(Cores(2, crowding=1.0), (0.0, 1.0), (0.0, 2.0), (0.0, 2.0))
    assert ends_s == pytest.approx([1.5, 2.5, 2.5])


def test_a_crowd_and_a_slow_machine_take_longer():
    crowded_s = work(Cores(1, crowding=1.5), (0.0, 1.0), (0.0, 1.0))
    assert crowded_s == pytest.approx([3.0, 3.0])
    assert work(Cores(1, speed=0.5), (0.0, 1.0)) == pytest.approx([2.0])


def test_a_run_is_the_same_every_time_and_never_faster_than_its_bounds():
    first, again = (simulate(jobs(6), recording()) for _ in range(2))
    assert first == again
    assert first.tokens["decode"] == 4 * 2 * 4 * (4 * 5 + 2 * 6)
    assert 0 < first.limit_fraction < 1
    assert first.staleness_mean > 0
    assert max(first.ends_s.values()) == pytest.approx(first.makespan_s, abs=0.1)


def test_a_slower_machine_takes_longer_and_is_nearer_to_its_limit():
    fast = simulate(jobs(6), recording())
    slow = simulate(jobs(6), recording(), Machine(speed=0.1))
    assert slow.makespan_s > fast.makespan_s
    assert slow.limit_fraction > fast.limit_fraction
