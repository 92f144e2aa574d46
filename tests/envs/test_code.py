"""The code family: what a reply earns, and what is the sandbox's failing and not the policy's."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from marlaas.envs.base import EnvStep
from marlaas.envs.catalog import make_family
from marlaas.envs.code import CodeFamily
from marlaas.envs.code_problems import CodeSettings
from marlaas.envs.container import SandboxLimits
from marlaas.envs.sandbox import Sandbox
from marlaas.errors import EnvironmentFailure, FailureKind
from marlaas.types import Prompt

REFUSED = asyncio.run(Sandbox.probe())
pytestmark = pytest.mark.skipif(REFUSED != "", reason=REFUSED)

PROBLEM = Prompt(
    index=0, messages=(), reference={"tests": [[[1], 8], [[2], 10], [[-3], 0]], "entry": ""}
)
"""(x + 3) * 2."""


def with_family(use: Callable[[CodeFamily], Awaitable], **settings: object):
    """Run `use` with a started family and return its result."""

    async def main():
        family = CodeFamily(CodeSettings(**settings), SandboxLimits(max_parallel=1))
        await family.start()
        try:
            return await use(family)
        finally:
            await family.stop()

    return asyncio.run(main())


def judge(*replies: str) -> list[EnvStep]:
    """Return what each reply earns for `PROBLEM`."""

    async def use(family: CodeFamily) -> list[EnvStep]:
        envs = family.make(PROBLEM, len(replies))
        return [
            await env.step(reply, is_last=True) for env, reply in zip(envs, replies, strict=True)
        ]

    return with_family(use)


def in_reply(code: str) -> str:
    """Return a reply that holds the code."""
    return f"```python\n{code}\n```" if code.startswith("def") else f"Answer: {code}"


@pytest.mark.parametrize("kind", ["expression", "function"])
def test_the_solution_of_every_problem_is_rewarded(kind: str):
    async def use(family: CodeFamily) -> None:
        for index in range(12):
            prompt = family.prompt(index, seed=3, split="train")
            solution = str(prompt.reference["solution"])
            mistaken = f"{solution} + 10 ** 9"
            first, second = family.make(prompt, 2)
            right = await first.step(in_reply(solution), is_last=True)
            wrong = await second.step(in_reply(mistaken), is_last=True)
            await first.close()
            assert right.reward == 1.0 and right.is_success and right.is_done, prompt
            assert right.metrics["tests_passed"] == 1.0
            assert wrong.reward == 0.0 and not wrong.is_success

    with_family(use, kind=kind)


def test_only_all_tests_together_are_rewarded():
    right, partly, wrong = judge("Answer: (x + 3) * 2", "Answer: abs(x) * 2 + 6", "Answer: x")
    assert (right.reward, right.metrics["tests_passed"]) == (1.0, 1.0)
    assert partly.reward == 0.0 and partly.metrics["tests_passed"] == pytest.approx(2 / 3)
    assert (wrong.reward, wrong.metrics["tests_passed"]) == (0.0, 0.0)


def test_equal_code_in_a_group_is_run_once():
    async def use(family: CodeFamily) -> tuple[list[float], list[EnvStep]]:
        reply = "Answer: sum(range(5 * 10 ** 6)) * 0 + (x + 3) * 2"
        spent_s, steps = [], []
        for size in (1, 8):
            before_s = family.cpu_s()
            envs = family.make(PROBLEM, size)
            steps = await asyncio.gather(*(env.step(reply, is_last=True) for env in envs))
            spent_s.append(family.cpu_s() - before_s)
        return spent_s, steps

    (once_s, group_s), steps = with_family(use)
    assert [step.reward for step in steps] == [1.0] * 8
    assert group_s < 3 * once_s


def test_a_cancelled_reply_leaves_its_siblings_to_find_the_verdict():
    async def use(family: CodeFamily) -> EnvStep:
        first, second = family.make(PROBLEM, 2)
        reply = "Answer: sum(range(10 ** 6)) * 0 + (x + 3) * 2"
        cancelled = asyncio.create_task(first.step(reply, is_last=True))
        judged = asyncio.create_task(second.step(reply, is_last=True))
        await asyncio.sleep(0.005)
        cancelled.cancel()
        return await judged

    assert with_family(use).reward == 1.0


def test_a_reply_without_code_earns_nothing_and_needs_no_sandbox():
    (step,) = judge("I do not know.")
    assert step.reward == 0.0 and not step.is_success
    assert step.metrics == {"format": 0, "tests_passed": 0, "timeout": 0, "sandbox_limit": 0}


def test_failings_of_the_policy_are_scored_and_named():
    broken, raises, endless, hog, bomb = judge(
        "Answer: (x + ",
        "Answer: x / 0",
        "Answer: max(iter(int, 1))",
        "Answer: len('a' * 10 ** 10)",
        "Answer: [__import__('os').fork() for _ in range(99)]",
    )
    assert {step.reward for step in (broken, raises, endless, hog, bomb)} == {0.0}
    assert broken.metrics == raises.metrics
    assert broken.metrics == {"format": 1, "tests_passed": 0, "timeout": 0, "sandbox_limit": 0}
    assert endless.metrics["timeout"] == 1 and endless.metrics["sandbox_limit"] == 0
    assert hog.metrics["sandbox_limit"] == bomb.metrics["sandbox_limit"] == 1


def test_an_expression_must_be_one():
    statements = ("return (x + 3) * 2", "y = 1; (x + 3) * 2", "(x + 3) * 2)\ndef f(x: (0")
    assert {step.reward for step in judge(*map(in_reply, statements))} == {0.0}
    fenced = judge("```python\nx\n) + (0\n```", "```python\ndef f(x): return (x + 3) * 2\n```")
    assert {step.reward for step in fenced} == {0.0}


def kill_containers(*already: int) -> list[int]:
    """Kill every container of this process. Returns those that were not killed `already`."""
    parents, first_inside = {}, []
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            text, pid = status.read_text(), int(status.parent.name)
            parents[pid] = int(text.split("PPid:")[1].split()[0])
            if text.split("NSpid:")[1].splitlines()[0].split()[1:] == ["1"]:
                first_inside.append(pid)
    ours = [pid for pid in first_inside if parents.get(parents[pid]) == os.getpid()]
    for pid in ours:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [pid for pid in ours if pid not in already]


def test_a_lost_sandbox_is_tried_again_once():
    async def use(family: CodeFamily) -> None:
        first, second = family.make(PROBLEM, 2)
        killed = kill_containers()
        assert len(killed) == 1
        step = await first.step("Answer: (x + 3) * 2", is_last=True)
        assert step.reward == 1.0
        judging = asyncio.create_task(second.step("Answer: max(iter(int, 1))", is_last=True))
        while not judging.done():
            killed += kill_containers(*killed)
            await asyncio.sleep(0.01)
        assert len(killed) == 3
        with pytest.raises(EnvironmentFailure) as caught:
            await judging
        assert caught.value.kind is FailureKind.SANDBOX_LOST

    with_family(use)


def test_without_a_sandbox_the_family_does_not_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("marlaas.envs.container.find_bwrap", lambda: "/nonexistent/bwrap")

    async def main() -> None:
        family = CodeFamily(CodeSettings())
        with pytest.raises(EnvironmentFailure, match=r"the sandbox cannot start.*nonexistent"):
            await family.start()
        (env,) = family.make(family.prompt(0, seed=0, split="train"), 1)
        with pytest.raises(EnvironmentFailure):
            await env.step("Answer: x", is_last=True)
        await family.stop()

    asyncio.run(main())


def test_the_catalog_makes_it_and_its_cpu_time_is_told():
    family = make_family({"family": "code", "kind": "function", "num_tests": 4})
    assert (family.name, family.max_turns) == ("code", 1)

    async def main() -> None:
        await family.start()
        before_s = family.cpu_s()
        (env,) = family.make(family.prompt(0, seed=0, split="eval"), 1)
        await env.step("```python\ndef f(x): return sum(range(10 ** 7))\n```", is_last=True)
        await family.stop()
        await family.stop()
        assert family.cpu_s() > before_s > 0

    asyncio.run(main())
