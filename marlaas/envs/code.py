"""Family `code`: small programs judged by hidden tests in a sandbox; one turn.

    user       Take x, add 3, then multiply by 2. Write it as a Python expression. ...
    assistant  Answer: (x + 3) * 2

The sandbox belongs to the family, so to one job of one tenant. Replies of a group that hold the
same code are judged once: a policy that has learnt something says the same thing again and again,
and what a fresh process does with the same code and tests is the same.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import cast

from marlaas.envs.base import EnvStep
from marlaas.envs.code_problems import CodeSettings, extract_code, make_problem
from marlaas.envs.container import SandboxLimits
from marlaas.envs.sandbox import Case, Limit, Sandbox, Verdict
from marlaas.errors import EnvironmentFailure, FailureKind
from marlaas.types import Prompt

CPU_LIMIT_S = 2.0
"""For all tests of a reply together; a right answer takes a few milliseconds."""

EXPRESSION_ENTRY = "f"
"""Name of the function that an expression is made into."""


class CodeFamily:
    """Makes programming problems and judges replies by running them."""

    name = "code"
    max_turns = 1

    def __init__(self, settings: CodeSettings, limits: SandboxLimits | None = None) -> None:
        self._settings = settings
        self._sandbox = Sandbox(limits)

    def prompt(self, index: int, *, seed: int, split: str) -> Prompt:
        """Return item `index` of a split."""
        return make_problem(self._settings, index, seed=seed, split=split)

    def make(self, prompt: Prompt, num_envs: int) -> "Sequence[CodeEnv]":
        """Return fresh environments for one group."""
        judge = CodeJudge(self._sandbox, prompt.reference)
        return [CodeEnv(judge) for _ in range(num_envs)]

    async def start(self) -> None:
        """Start the sandbox.

        Raises:
            EnvironmentFailure: this machine cannot contain code; says why.
        """
        await self._sandbox.start()

    async def stop(self) -> None:
        """End the sandbox."""
        await self._sandbox.stop()

    def cpu_s(self) -> float:
        """Return CPU seconds that the sandbox has used so far."""
        return self._sandbox.cpu_s()


class CodeJudge:
    """Judges code by the hidden tests of one prompt, for all trajectories of a group."""

    def __init__(self, sandbox: Sandbox, reference: Mapping[str, object]) -> None:
        self._sandbox = sandbox
        self._entry = cast(str, reference["entry"])
        self._tests = cast(Sequence[Case], reference["tests"])
        self._verdicts: dict[str, Verdict] = {}
        self._judging: dict[str, asyncio.Lock] = {}
        """By code; whoever waits for a lock finds the verdict, or is the next to try."""

    async def verdict(self, code: str) -> Verdict:
        """Return the verdict on code as a policy wrote it.

        Raises:
            EnvironmentFailure: the sandbox was lost twice.
        """
        async with self._judging.setdefault(code, asyncio.Lock()):
            if code in self._verdicts:
                return self._verdicts[code]
            verdict = await self._run(code)
            if verdict.limit is None:  # Running over a limit may be the machine's doing.
                self._verdicts[code] = verdict
            return verdict

    async def _run(self, code: str) -> Verdict:
        source, entry = code, self._entry
        if not entry:
            source, entry = as_function(code), EXPRESSION_ENTRY
        try:
            return await self._run_once(source, entry)
        except EnvironmentFailure as failure:
            if failure.kind is not FailureKind.SANDBOX_LOST:
                raise
        return await self._run_once(source, entry)

    async def _run_once(self, source: str, entry: str) -> Verdict:
        return await self._sandbox.run_tests(source, entry, self._tests, timeout_s=CPU_LIMIT_S)


class CodeEnv:
    """Judges one reply."""

    def __init__(self, judge: CodeJudge) -> None:
        self._judge = judge

    async def step(self, reply: str, *, is_last: bool) -> EnvStep:
        """Return reward 1 when the code in the reply passes every hidden test, else 0.

        Raises:
            EnvironmentFailure: the sandbox was lost twice.
        """
        code = extract_code(reply)
        return _judged(None if code is None else await self._judge.verdict(code))

    async def close(self) -> None:
        """Nothing to free."""


def as_function(expression: str) -> str:
    """Return source of a function of x with the value of `expression`, whatever that text is."""
    return (
        f'_expression = compile({expression!r}, "<solution>", "eval")\n'
        f"def {EXPRESSION_ENTRY}(x):\n"
        '    return eval(_expression, {"x": x})\n'
    )


def _judged(report: Verdict | None) -> EnvStep:
    """Return the end of the episode; None when the reply held no code."""
    is_success = report is not None and report.is_success
    limit = report.limit if report else None
    return EnvStep(
        reward=float(is_success),
        is_success=is_success,
        metrics={
            "format": float(report is not None),
            "tests_passed": report.passed / report.total if report else 0.0,
            "timeout": float(limit is Limit.TIME),
            "sandbox_limit": float(limit is not None and limit is not Limit.TIME),
        },
    )
