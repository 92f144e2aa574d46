"""Latency is drawn from the seed and costs only the event loop's time."""

import asyncio
import math
import statistics

from marlaas import runtime
from marlaas.envs.catalog import make_family
from marlaas.envs.latency import draw_wait_s, with_latency
from marlaas.types import Latency

MATH = {"family": "math", "kind": "sums"}


def waits_s(latency: Latency, *, seed: int, order: list[int], num_turns: int = 1) -> list[float]:
    """Return how long each environment of one group took per turn, stepped in the given order."""
    family = with_latency(make_family(MATH), latency, seed)
    envs = family.make(family.prompt(7, seed=0, split="train"), 4)

    async def main() -> list[float]:
        waits = [0.0] * len(envs)
        for index in order:
            for _ in range(num_turns):
                began_s = runtime.now_s()
                await envs[index].step("Answer: 1", is_last=True)
                waits[index] = round(runtime.now_s() - began_s, 6)
        return waits

    return runtime.run_virtual(main())


def test_the_same_seed_gives_the_same_waits_in_any_order():
    latency = Latency(median_s=2.0, sigma=1.0)
    waits = waits_s(latency, seed=1, order=[0, 1, 2, 3])
    assert waits == waits_s(latency, seed=1, order=[3, 1, 0, 2])
    assert waits != waits_s(latency, seed=2, order=[0, 1, 2, 3])
    assert waits != waits_s(latency, seed=1, order=[0, 1, 2, 3], num_turns=2)
    assert len(set(waits)) == 4


def test_waits_have_the_median_and_spread_asked_for():
    latency = Latency(median_s=0.5, sigma=0.8)
    drawn = [draw_wait_s(latency, seed=0, prompt=i, env=0, turn=0) for i in range(2000)]
    assert abs(statistics.median(drawn) - 0.5) < 0.04
    logarithms = [math.log(wait_s) for wait_s in drawn]
    assert abs(statistics.stdev(logarithms) - 0.8) < 0.05


def test_without_spread_every_call_takes_the_median():
    assert waits_s(Latency(median_s=3.0), seed=0, order=[0, 1, 2, 3]) == [3.0] * 4


def test_environments_wait_side_by_side():
    family = with_latency(make_family(MATH), Latency(median_s=3600.0), 0)
    envs = family.make(family.prompt(0, seed=0, split="train"), 100)

    async def main() -> float:
        await asyncio.gather(*(env.step("", is_last=True) for env in envs))
        return runtime.now_s()

    assert runtime.run_virtual(main()) == 3600.0


def test_the_family_is_otherwise_the_wrapped_one():
    plain = make_family(MATH)
    slow = with_latency(plain, Latency(median_s=1.0), 0)
    assert (slow.name, slow.max_turns, slow.cpu_s()) == (plain.name, plain.max_turns, 0.0)
    prompt = slow.prompt(3, seed=5, split="eval")
    assert prompt == plain.prompt(3, seed=5, split="eval")
    reply = f"Answer: {prompt.reference['answer']}"

    async def main() -> None:
        await slow.start()
        (env,) = slow.make(prompt, 1)
        assert (await env.step(reply, is_last=True)).is_success
        await env.close()
        await slow.stop()

    runtime.run_virtual(main())


def test_no_latency_is_no_wrapper():
    family = make_family(MATH)
    assert with_latency(family, Latency(), 0) is family
