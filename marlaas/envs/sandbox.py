"""Runs code of a policy or a tenant apart from everything else, and reports what it returned.

One `Sandbox` per (tenant, job), started by the family that needs it. It keeps up to `max_parallel`
containers; each runs one call at a time, so calls share nothing, and a container that hangs is
killed without harm to the others.

    Sandbox.call ── container (`container.py`) ── fresh process per call (`sandbox_child.py`)
      values, or what went wrong  <── pipe, bounded

- A tenant's file is loaded once per container; every call begins where its import ended.
- What the code did wrong is data in a report; `EnvironmentFailure` means that nobody knows.
- Expected values stay here: code is told arguments, and its results are compared outside.
- Code never runs without a container: where none can start, `start` raises the reason.
"""

import asyncio
import json
import marshal
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from marlaas.envs import sandbox_child
from marlaas.envs.container import Container, Reply, SandboxLimits, lost
from marlaas.errors import EnvironmentFailure, FailureKind

RELATIVE_TOLERANCE = 1e-9
"""Of floating-point results, so that another order of summation is no error."""


class Limit(StrEnum):
    """The bound that a call ran over."""

    TIME = "time"
    MEMORY = "memory"
    PROCESSES = "processes"
    FILES = "files"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReport:
    """What the code of one call did."""

    values: Mapping[int, object]
    """JSON value by call; a call that failed or was never reached is absent."""
    errors: Mapping[int, str]
    """What a call raised instead."""
    error: str
    """Why there are no further values: the code does not compile, ran over a limit, died; or ""."""
    limit: Limit | None
    """The limit behind `error` or one of `errors`."""
    printed: str
    """The beginning of what the code printed."""
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict of hidden tests on a function."""

    passed: int
    total: int
    error: str
    """The first thing that went wrong, in words for the policy; never holds an expected value."""
    limit: Limit | None
    printed: str
    cpu_s: float

    @property
    def is_success(self) -> bool:
        """True when every test passed and no limit was broken."""
        return self.passed == self.total and self.limit is None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A tenant's file that calls begin with."""

    text: str
    load_limit_s: float
    """CPU seconds that its import may take."""
    on_print: Callable[[str], None] | None = None
    """Told what the import printed, its traceback included, each time that a container loads it."""


Case = tuple[Sequence[object], object]
"""Arguments and expected value, JSON both."""


class Sandbox:
    """Runs calls in containers: `new -> start -> call, call, ... -> stop`.

    Use from one event loop. `call` and `run_tests` may be awaited concurrently; more than
    `max_parallel` wait for their turn. Containers beyond the first start when
    they are first needed.
    """

    def __init__(self, limits: SandboxLimits | None = None, file: SourceFile | None = None) -> None:
        self._limits = limits or SandboxLimits()
        self._file = file
        self._turns = asyncio.Semaphore(self._limits.max_parallel)
        self._idle: list[Container] = []
        self._containers: set[Container] = set()
        self._reapers: set[asyncio.Task] = set()
        self._retired_cpu_s = 0.0
        self._is_stopped = False

    async def start(self) -> None:
        """Start the first container.

        Raises:
            EnvironmentFailure: this machine cannot contain code, or the file cannot be loaded;
                says why.
        """
        self._idle.append(await self._open_container())

    async def stop(self) -> None:
        """Kill every container; calls in flight fail. Idempotent."""
        self._is_stopped = True
        for container in list(self._containers):
            self._retire(container)
        await asyncio.gather(*self._reapers)

    def cpu_s(self) -> float:
        """Return CPU seconds that all processes in the containers have used so far.

        A call that was cut off is charged its wall time, since its container could not report.
        """
        return self._retired_cpu_s + sum(container.cpu_s for container in self._containers)

    async def run_tests(
        self, code: str, entry: str, tests: Sequence[Case], *, timeout_s: float
    ) -> Verdict:
        """Call function `entry` of `code` with the arguments of each test and compare the results.

        Raises:
            EnvironmentFailure: there is no verdict (see `call`).
        """
        calls = [arguments for arguments, _ in tests]
        report = await self.call(code, entry, calls, timeout_s=timeout_s)
        verdicts = [
            index in report.values and equals(report.values[index], expected)
            for index, (_, expected) in enumerate(tests)
        ]
        return Verdict(
            passed=sum(verdicts),
            total=len(tests),
            error=_first_fault(report, calls, verdicts),
            limit=report.limit,
            printed=report.printed,
            cpu_s=report.cpu_s,
        )

    async def call(
        self, code: str | None, entry: str, calls: Sequence[Sequence[object]], *, timeout_s: float
    ) -> CallReport:
        """Execute `code` in a fresh process and call its function `entry` once per argument list.

        Without code, `entry` is a function of the loaded file; code sees the file's names as the
        mapping `environment`.
        `timeout_s` bounds the CPU time of all calls together, `WALL_FACTOR` times that their wall
        time. Cancelling ends the code.

        Raises:
            EnvironmentFailure: SANDBOX_LOST; the call may be retried. Another kind if a container
                could not load the file.
        """
        body = marshal.dumps((code, entry, [list(arguments) for arguments in calls]))
        async with self._turns:
            container = self._idle.pop() if self._idle else await self._open_container()
            try:
                report = _read_report(await container.call(body, timeout_s), len(calls))
            except BaseException:
                self._retire(container)
                raise
            self._idle.append(container)
            return report

    @staticmethod
    async def probe() -> str:
        """Return why code cannot be contained on this machine; "" if it can."""
        sandbox = Sandbox()
        try:
            await sandbox.start()
            report = await sandbox.call("def f(x): return x", "f", [[1]], timeout_s=5.0)
            return "" if report.values == {0: 1} else f"a trial call failed: {report.error}"
        except EnvironmentFailure as failure:
            return str(failure)
        finally:
            await sandbox.stop()

    async def _open_container(self) -> Container:
        if self._is_stopped:
            raise lost("the sandbox has been stopped")
        container = Container(self._limits)
        self._containers.add(container)
        try:
            await container.start()
            if self._file is not None:
                await _load(container, self._file)
        except BaseException:
            self._retire(container)
            raise
        return container

    def _retire(self, container: Container) -> None:
        """Kill a container and keep the account of what it used."""
        container.kill()
        if container in self._containers:
            self._containers.remove(container)
            self._retired_cpu_s += container.cpu_s
        if container in self._idle:
            self._idle.remove(container)
        reaper = asyncio.create_task(container.reap())
        self._reapers.add(reaper)
        reaper.add_done_callback(self._reapers.discard)


def failure_kind(limit: Limit | None) -> FailureKind:
    """Return what kind of failure it is when an environment itself breaks a limit, or none."""
    if limit is None:
        return FailureKind.ERROR
    return FailureKind.TIMEOUT if limit is Limit.TIME else FailureKind.SANDBOX_LIMIT


def equals(value: object, expected: object) -> bool:
    """Return whether two JSON values are the same: numbers by value, true only to true."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, float) or isinstance(expected, float):
        if not isinstance(value, int | float) or not isinstance(expected, int | float):
            return False
        try:
            return math.isclose(value, expected, rel_tol=RELATIVE_TOLERANCE)
        except OverflowError:
            return False
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(equals, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(
            equals(value[key], expected[key]) for key in expected
        )
    return type(value) is type(expected) and value == expected


# ---------------------------------------------------------------------------------------------


async def _load(container: Container, file: SourceFile) -> None:
    """Load a tenant's file.

    Raises:
        EnvironmentFailure: it could not be imported; says why.
    """
    reply = await container.load(file.text, file.load_limit_s)
    if reply.printed and file.on_print is not None:
        file.on_print(reply.printed)
    report = _read_report(reply, 0)
    if not reply.results.endswith(sandbox_child.LOADED):
        error = report.error or "it ended the process that imports it"
        message = f"the environment file cannot be loaded: {error}"
        raise EnvironmentFailure(failure_kind(report.limit), message)


def _read_report(reply: Reply, num_calls: int) -> CallReport:
    """Turn a reply into a report. Trust no byte of its results.

    Raises:
        EnvironmentFailure: the code was never started.
    """
    first, *rest = reply.results.split(b"\n")
    if first + b"\n" != sandbox_child.READY:
        raise lost(f"the sandbox could not confine the code: {reply.printed}")
    values: dict[int, object] = {}
    errors: dict[int, str] = {}
    error, limit = "", _as_limit(reply.limit)
    for line in map(_parsed, rest):
        index = line.get("index")
        if type(index) is not int or not 0 <= index < num_calls:
            error = error or str(line.get("error", ""))
        elif index not in values and index not in errors:
            if "value" in line:
                values[index] = line["value"]
            else:
                errors[index] = str(line.get("error"))
        limit = limit or _as_limit(line.get("limit"))
    if limit is not None and reply.limit:
        error = f"ran over the limit of {limit.value}"
    elif reply.died_of:
        error = f"died of signal {reply.died_of}"
    elif not error and len(values) + len(errors) < num_calls:
        error = "ended before every call was made"
    return CallReport(
        values=values,
        errors=errors,
        error=error,
        limit=limit,
        printed=reply.printed,
        cpu_s=reply.cpu_s,
    )


def _parsed(line: bytes) -> dict:
    """Return a line of results; an empty record if it is none."""
    if not line:
        return {}
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _as_limit(name: object) -> Limit | None:
    return Limit(name) if isinstance(name, str) and name in set(Limit) else None


def _first_fault(
    report: CallReport, calls: Sequence[Sequence[object]], verdicts: Sequence[bool]
) -> str:
    """Return the first thing that went wrong, in words for the policy."""
    for index, is_right in enumerate(verdicts):
        if is_right:
            continue
        arguments = ", ".join(map(_shown, calls[index]))
        if index in report.errors:
            return f"with ({arguments}): {report.errors[index]}"
        if index in report.values:
            return f"with ({arguments}): wrong result {_shown(report.values[index])}"
        break
    return report.error


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
