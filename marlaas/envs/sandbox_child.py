"""Runs inside the sandbox: forks one fresh process for every request and reports what it did.

Started by `sandbox.py` as the first process of a bubblewrap container; standard library only.

    server      reads a request, forks, enforces wall time and output, kills whatever is left
      `- runner   no capability, resource limits, system call filter; runs the policy's code

- What a runner changes dies with it: its memory, every process it left behind, and /tmp.
- A runner cannot disturb the server: the first process of a pid namespace ignores signals from
  inside, and system calls that act on another process are refused.
- The server interprets no byte that a runner wrote. It never learns an expected value.

Frames: `REQUEST_HEADER` and a JSON body; `REPLY_HEADER`, the runner's results, what it printed.
"""

import builtins
import contextlib
import ctypes
import errno
import gc
import importlib
import json
import math
import os
import random
import resource
import select
import signal
import stat
import struct
import sys
import time
from collections.abc import Callable
from typing import NoReturn

PRELOADED = (
    *("bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions"),
    *("functools", "heapq", "itertools", "operator", "re", "statistics", "string", "typing"),
)
"""Modules that code often imports; a runner finds them loaded."""

REQUEST_HEADER = struct.Struct("!Id")
"""Bytes of the body, limit in CPU seconds."""
REPLY_HEADER = struct.Struct("!BBddII")
"""Index in `LIMITS`, signal that ended the runner or 0, CPU seconds of this call and of everything
so far, bytes of results, bytes of printed text."""
LIMITS = ("", "time", "output")
"""Limits that the server enforces; others surface in the runner."""

FIRST_FD = 3
"""The runner's end of the result pipe; every higher descriptor is closed."""
MAX_SERVER_FILES = 32
"""Descriptors that the server may have open; a runner closes all it inherits."""
CHUNK_BYTES = 1 << 14
MAX_ERROR = 300
"""Characters of an exception's text that are reported."""

UID = 1000
"""The user inside; `sandbox.py` decides which user of the host that is."""

# Linux system call interface: values of <linux/prctl.h>, <linux/sched.h>, <linux/mount.h>.
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS = 1, 4, 8
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
CLONE_NEW_ANY = 0x7E020000
MS_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
MNT_DETACH = 2
CAP_SYS_ADMIN = 21
CAPABILITY_VERSION_3 = 0x20080522

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Serve until the other side closes its end."""
    limits = json.loads(sys.argv[1])
    os.environ.clear()
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    os.chdir("/")
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_SERVER_FILES, MAX_SERVER_FILES))
    # A first process of a namespace ignores every signal for which it has no handler.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    drop_user()
    for name in PRELOADED:
        importlib.import_module(name)
    limits["filter"] = system_call_filter(os.uname().machine)
    mount_tmp(limits)
    gc.collect()
    gc.freeze()
    write_all(replies, REPLY_HEADER.pack(0, 0, 0.0, cpu_s(), 0, 0))
    while True:
        serve(requests, replies, limits)


def drop_user() -> None:
    """Become `UID` if started as root; keep the one capability that `mount_tmp` needs."""
    if os.getuid() == 0:
        checked(libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0))
        os.setgroups([])
        os.setresgid(UID, UID, UID)
        os.setresuid(UID, UID, UID)
    set_capabilities(1 << CAP_SYS_ADMIN)
    # A change of user clears it.
    checked(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    # Nobody of the same user may trace this process or read its memory.
    checked(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))


def serve(requests: int, replies: int, limits: dict) -> None:
    """Answer one request."""
    length, cpu_limit_s = REQUEST_HEADER.unpack(read_exactly(requests, REQUEST_HEADER.size))
    body = read_exactly(requests, length)
    deadline_s = time.monotonic() + cpu_limit_s * limits["wall_factor"]
    spent_s = cpu_s()
    untouched = tmp_state()
    results, results_end = os.pipe()
    printed, printed_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(printed_end, 1)
        os.dup2(printed_end, 2)
        os.dup2(results_end, FIRST_FD)
        exit_after(run, body, limits, cpu_limit_s)
    body[:] = bytes(length)  # The next runner inherits this memory.
    os.close(results_end)
    os.close(printed_end)
    buffers = {results: bytearray(), printed: bytearray()}
    limit = watch(pid, buffers, deadline_s, limits["output_bytes"])
    status = kill_all(pid)
    if not limit and drain(buffers, limits["output_bytes"]):
        limit = "output"
    os.close(results)
    os.close(printed)
    died_of = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    call_s = cpu_s() - spent_s
    if died_of == signal.SIGXCPU or (died_of == signal.SIGKILL and call_s >= cpu_limit_s):
        limit = limit or "time"
    if tmp_state() != untouched:
        checked(libc.umount2(b"/tmp", MNT_DETACH))
        mount_tmp(limits)
    sizes = [len(buffer) for buffer in buffers.values()]
    header = REPLY_HEADER.pack(LIMITS.index(limit), died_of, call_s, cpu_s(), *sizes)
    write_all(replies, b"".join([header, *buffers.values()]))


def mount_tmp(limits: dict) -> None:
    """Put an empty, bounded, writable folder at /tmp."""
    options = f"size={limits['tmp_bytes']},nr_inodes={limits['max_tmp_files']},mode=777"
    checked(libc.mount(b"tmpfs", b"/tmp", b"tmpfs", MS_NOSUID_NODEV_NOEXEC, options.encode()))


def tmp_state() -> tuple:
    """Return what tells whether /tmp was touched; replacing it costs more than a whole call."""
    status = os.stat("/tmp")
    is_open = status.st_mode & stat.S_IRWXU == stat.S_IRWXU
    return status.st_mode, status.st_ctime_ns, os.listdir("/tmp") if is_open else None


def watch(pid: int, buffers: dict[int, bytearray], deadline_s: float, max_bytes: int) -> str:
    """Collect output until the runner ends. Returns the limit that it broke, or ""."""
    process = os.pidfd_open(pid)
    poll = select.poll()
    for fd in (process, *buffers):
        poll.register(fd, select.POLLIN)
    try:
        while (left_s := deadline_s - time.monotonic()) > 0:
            for fd, _ in poll.poll(left_s * 1000):
                if fd == process:
                    return ""
                chunk = os.read(fd, CHUNK_BYTES)
                if not chunk:
                    poll.unregister(fd)
                buffers[fd] += chunk
                if len(buffers[fd]) > max_bytes:
                    return "output"
        return "time"
    finally:
        os.close(process)


def kill_all(pid: int) -> int:
    """End and reap every other process of this namespace. Returns the exit status of `pid`."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    status = 0
    while True:
        try:
            reaped, its_status = os.waitpid(-1, 0)
        except ChildProcessError:
            return status
        if reaped == pid:
            status = its_status


def drain(buffers: dict[int, bytearray], max_bytes: int) -> bool:
    """Read what dead processes left in the pipes. Returns whether a bound was passed."""
    for fd, buffer in buffers.items():
        while len(buffer) <= max_bytes:
            chunk = os.read(fd, CHUNK_BYTES)
            if not chunk:
                break
            buffer += chunk
    return any(len(buffer) > max_bytes for buffer in buffers.values())


# ---------------------------------------------------------------------------------------------
# Runner


def run(body: bytearray, limits: dict, cpu_limit_s: float) -> None:
    """Run the code of a request: write a line once it is confined, then one for each call."""
    confine(limits, cpu_limit_s)
    request = json.loads(body)
    emit({"ready": True})
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    random.seed(0)
    run_calls(request["code"], request["entry"], request["calls"])
    sys.stdout.flush()
    sys.stderr.flush()


def confine(limits: dict, cpu_limit_s: float) -> None:
    """Give up everything that the policy's code does not need. Cannot be undone."""
    os.setsid()
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.closerange(FIRST_FD + 1, MAX_SERVER_FILES)
    os.chdir("/tmp")
    cpu_s_whole = math.ceil(cpu_limit_s)
    for kind, soft, hard in (
        # The signal of the soft limit may be caught; the hard one ends the process.
        (resource.RLIMIT_CPU, cpu_s_whole, cpu_s_whole + 1),
        (resource.RLIMIT_AS, limits["memory_bytes"], limits["memory_bytes"]),
        (resource.RLIMIT_NOFILE, limits["max_open_files"], limits["max_open_files"]),
        (resource.RLIMIT_FSIZE, limits["tmp_bytes"], limits["tmp_bytes"]),
        # The server belongs to the same user and counts too.
        (resource.RLIMIT_NPROC, limits["max_processes"] + 1, limits["max_processes"] + 1),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
    ):
        resource.setrlimit(kind, (soft, hard))
    set_capabilities(0)
    checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    code = ctypes.create_string_buffer(limits["filter"], len(limits["filter"]))
    program = struct.pack("HxxxxxxP", len(limits["filter"]) // 8, ctypes.addressof(code))
    checked(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0))


def run_calls(code: str, entry: str, calls: list) -> None:
    """Execute `code`, then call its function `entry` with each argument list."""
    namespace = {"__name__": "solution", "__builtins__": builtins}
    try:
        exec(compile(code, "<solution>", "exec"), namespace)
        function = namespace.get(entry)
        if not callable(function):
            emit({"error": f"there is no function {entry}"})
            return
    except BaseException as error:
        emit(described(error))
        return
    for index, arguments in enumerate(calls):
        try:
            record = {"index": index, "value": function(*arguments)}
            line = json.dumps(record)
        except BaseException as error:
            line = json.dumps({"index": index, **described(error)})
        write_all(FIRST_FD, line.encode() + b"\n")


def emit(record: dict) -> None:
    """Write one line for the caller."""
    write_all(FIRST_FD, json.dumps(record).encode() + b"\n")


def described(error: BaseException) -> dict:
    """Return an exception as text, with the line it was raised on and the limit behind it."""
    try:
        text = str(error)[:MAX_ERROR]
    except BaseException:
        text = ""
    where, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<solution>":
            where = f" (line {trace.tb_lineno})"
        trace = trace.tb_next
    kind = type(error).__name__
    words = f"{kind}: {text}" if text else kind
    return {"error": f"{words}{where}", "limit": limit_of(error)}


def limit_of(error: BaseException) -> str:
    """Return which limit an exception stands for, or ""."""
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return "processes"
    if isinstance(error, OSError):
        if error.errno == errno.EAGAIN:
            return "processes"
        if error.errno == errno.ENOMEM:
            return "memory"
        if error.errno in (errno.EMFILE, errno.EFBIG, errno.ENOSPC):
            return "files"
    return ""


# ---------------------------------------------------------------------------------------------
# System calls

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

FIRST_X32_CALL = 0x40000000

SYSTEM_CALLS = {
    # Number on x86_64, number on aarch64.
    # New namespaces and mounts: rights inside a user namespace reach much of the kernel.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    # Other processes of the same user: the server is one.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # What outlives a process, or memory that no limit counts.
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # Wide doors into the kernel that such code never needs.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_setup": (206, 0),
    "fanotify_init": (300, 262),
    "syslog": (103, 116),
}
"""Refused altogether."""

CLONE3 = (435, 435)
"""Its flags lie in memory that a filter cannot read; libraries fall back to `clone`."""

CLONE = (56, 220)
PRLIMIT = (302, 261)
SOCKET = (41, 198)
SOCKETPAIR = (53, 199)
AF_UNIX = 1

LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
OFFSET_CALL, OFFSET_ARCH, OFFSET_ARGUMENT = 0, 4, 16
ALLOW, REFUSE = 0x7FFF0000, 0x00050000


def system_call_filter(machine: str) -> bytes:
    """Return the seccomp program of a runner as packed instructions."""
    column = list(AUDIT_ARCH).index(machine)
    denied = (RETURN, 0, 0, REFUSE | errno.EPERM)
    allowed = (RETURN, 0, 0, ALLOW)
    program = [
        (LOAD, 0, 0, OFFSET_ARCH),
        (JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        denied,
        (LOAD, 0, 0, OFFSET_CALL),
        (JUMP_GREATER_EQUAL, 0, 1, FIRST_X32_CALL),
        denied,
    ]
    for numbers in SYSTEM_CALLS.values():
        program += [(JUMP_EQUAL, 0, 1, numbers[column]), denied]
    program += [(JUMP_EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, REFUSE | errno.ENOSYS)]
    for numbers, test in (
        (CLONE, (JUMP_ANY_BIT, 0, 1, CLONE_NEW_ANY)),
        (PRLIMIT, (JUMP_EQUAL, 1, 0, 0)),
        (SOCKET, (JUMP_EQUAL, 1, 0, AF_UNIX)),
        (SOCKETPAIR, (JUMP_EQUAL, 1, 0, AF_UNIX)),
    ):
        program += [
            (JUMP_EQUAL, 0, 4, numbers[column]),
            (LOAD, 0, 0, OFFSET_ARGUMENT),
            test,
            denied,
            allowed,
        ]
    return b"".join(struct.pack("HBBI", *line) for line in [*program, allowed])


def set_capabilities(mask: int) -> None:
    """Make `mask` the effective and permitted capabilities, with none to inherit."""
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    checked(libc.capset(header, struct.pack("6I", mask, mask, 0, 0, 0, 0)))


def checked(result: int) -> None:
    """Raise the error of a system call that failed."""
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def cpu_s() -> float:
    """Return CPU seconds of this process and of all its reaped descendants."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, kinds))


def read_exactly(fd: int, size: int) -> bytearray:
    """Read `size` bytes, or end this process when the other side has gone."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        num_read = os.readv(fd, [view])
        if num_read == 0:
            os._exit(0)
        view = view[num_read:]
    return data


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def exit_after(function: Callable, *arguments: object) -> NoReturn:
    """Call a function in a forked process and end it, without the parent's clean-up."""
    try:
        function(*arguments)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
