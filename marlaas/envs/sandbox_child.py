"""Runs inside the sandbox: makes one fresh process for every request and reports what it did.

Started by `container.py` as the first process of a bubblewrap container; standard library only.

    server        reads a request, enforces wall time and output, kills whatever is left
      |- template   confined once: no capability, resource limits, system call filter; has loaded
      |             what every call needs, and the tenant's file if there is one; then only clones
      `- runner     a copy of the template: executes one request

- A runner is a sibling of the template (CLONE_PARENT): the server itself waits for it, so what it
  used and how it ended is not hearsay. What it changes dies with it: memory, processes, /tmp.
- A runner cannot disturb the server: the first process of a pid namespace ignores signals from
  inside, and system calls that act on another process are refused. It may end the template, which
  only costs a new one.
- Nothing that a runner can write to is kept: each gets new pipes, and memory cannot be shared.
- The server and the template of other code interpret no byte that a runner wrote. None of them ever
  learns an expected value.

Frames: `REQUEST_HEADER` and a body; `REPLY_HEADER`, the runner's results, what it printed. The body
of `LOAD` is source text, that of `CALL` a marshalled (code or None, entry, argument lists).
"""

import _socket
import builtins
import contextlib
import ctypes
import errno
import gc
import importlib
import json
import marshal
import math
import os
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
    *("bisect", "collections", "copy", "functools", "heapq", "itertools", "math", "operator"),
    *("random", "re", "string", "typing"),
)
"""Modules that code often imports; a runner finds them loaded. Each costs every call a little."""

CALL, LOAD = 0, 1
REQUEST_HEADER = struct.Struct("!BId")
"""`CALL` or `LOAD`, bytes of the body, limit in CPU seconds."""
REPLY_HEADER = struct.Struct("!BBddII")
"""Index in `LIMITS`, signal that ended the runner or 0, CPU seconds of this call and of everything
so far, bytes of results, bytes of printed text."""
LIMITS = ("", "time", "output")
"""Limits that the server enforces; others surface in the runner."""
ORDER = struct.Struct("II")
"""From the server to the template: bytes of the body, limit in whole CPU seconds. With it travel
three descriptors: the body, the write ends for results and for printed text."""
DESCRIPTORS = struct.Struct("3i")
PID = struct.Struct("i")
"""The template's answer: the runner's process, or 0 if it could not be made."""

CHANNEL_FD = 3
"""Where the template hears the server; the runner has its result pipe there."""
RESULTS_FD = 3
"""The runner's end of the result pipe; every higher descriptor is closed."""
LOAD_RESULTS_FD = 4
"""The same for the template, while it loads a file."""
SPARE_FDS = (20, 21, 22)
"""Numbers that no descriptor of the server has."""
MAX_SERVER_FILES = 32
"""Descriptors that the server may have open; others close all they inherit."""
CHUNK_BYTES = 1 << 14
MAX_ERROR = 300
"""Characters of an exception's text that are reported."""
CODE_NAME, FILE_NAME = "<solution>", "environment.py"
"""What code of a request, and the tenant's file, are called in tracebacks."""
START_AND_STEP = "start, step"
"""Entry that calls the file's `start` with the prompt, then `step` with the state it returned."""
READY, LOADED = b'{"ready": true}\n', b'{"loaded": true}\n'
TEMPLATE_ANSWER_S = 20.0
"""A template answers within microseconds, unless the machine or its tenant's file hangs."""

UID = 1000
"""The user inside; `container.py` decides which user of the host that is."""

# Linux system call interface: values of <linux/prctl.h>, <linux/sched.h>, <linux/mount.h>.
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS = 1, 4, 8
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
CLONE_PARENT, CLONE_NEW_ANY = 0x8000, 0x7E020000
MS_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
MNT_DETACH = 2
CAP_SYS_ADMIN = 21
CAPABILITY_VERSION_3 = 0x20080522

libc = ctypes.CDLL(None, use_errno=True)
libc_with_lock = ctypes.PyDLL(None)
"""For `clone`: it must not give up the interpreter, which the copy could never take again."""
encode = json.JSONEncoder().encode


NICENESS = 10
"""Code gives way to engines and server: a core that one of them wants goes to it nine times in ten.
It holds as all of them are in one session (a kernel that groups by session shares a core among
sessions first), so code must not begin one of its own."""


def main() -> None:
    """Serve until the other side closes its end."""
    limits = json.loads(sys.argv[1])
    os.environ.clear()
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(2, 1)
    os.chdir("/")
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_SERVER_FILES, MAX_SERVER_FILES))
    # A first process of a namespace ignores every signal for which it has no handler.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.nice(NICENESS)
    drop_user()
    for name in PRELOADED:
        importlib.import_module(name)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    limits["filter"] = system_call_filter(os.uname().machine)
    mount_tmp(limits)
    server = Server(limits)
    server.check_bounds()
    write_all(replies, REPLY_HEADER.pack(0, 0, 0.0, server.cpu_s(), 0, 0))
    while True:
        server.serve(requests, replies)


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


# ---------------------------------------------------------------------------------------------
# Server


class Broken(Exception):
    """The template ended or does not answer."""


class Output:
    """The two pipes of one process: made, handed over, read, and closed by the server."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.results, self.results_end = os.pipe()
        self.printed, self.printed_end = os.pipe()
        self.buffers = {self.results: bytearray(), self.printed: bytearray()}

    def hand_over(self) -> None:
        """Close the write ends; others have them now."""
        os.close(self.results_end)
        os.close(self.printed_end)

    def read(self, fd: int) -> bool:
        """Take a chunk. Returns whether there was one."""
        chunk = os.read(fd, CHUNK_BYTES)
        self.buffers[fd] += chunk
        return bool(chunk)

    def is_full(self) -> bool:
        return any(len(buffer) > self._max_bytes for buffer in self.buffers.values())

    def drain(self, *, has_writers: bool = False) -> None:
        """Read what was left in the pipes, up to the bound; never wait for a living writer."""
        for fd in self.buffers:
            while not self.is_full() and not (has_writers and not is_readable(fd, 0)):
                if not self.read(fd):
                    break

    def close(self) -> None:
        os.close(self.results)
        os.close(self.printed)


class Template:
    """The process that runners are copies of, as the server sees it: `forked -> loaded -> dead`."""

    def __init__(self, limits: dict, source: str | None, output: Output, load_s: float) -> None:
        self.channel, theirs = _socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            exit_after(be_template, theirs.fileno(), output, source, load_s, limits)
        theirs.close()
        self.process = os.pidfd_open(self.pid)

    def clone(self, body: int, size: int, output: Output, cpu_limit_s: float) -> int:
        """Have a runner made. Returns its process.

        Raises:
            Broken: there is none.
        """
        order = ORDER.pack(size, math.ceil(cpu_limit_s))
        fds = DESCRIPTORS.pack(body, output.results_end, output.printed_end)
        try:
            self.channel.sendmsg([order], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, fds)])
            if not is_readable(self.channel.fileno(), TEMPLATE_ANSWER_S):
                raise Broken("the template does not answer")
            answer = self.channel.recv(PID.size)
        except OSError as error:
            raise Broken(str(error)) from None
        if len(answer) != PID.size or PID.unpack(answer)[0] <= 0:
            raise Broken("the template made no process")
        return PID.unpack(answer)[0]

    def is_alive(self) -> bool:
        return not is_readable(self.process, 0)

    def cpu_s(self) -> float:
        """Return its CPU seconds by its own clock, see clock_getcpuclockid(3)."""
        return time.clock_gettime(~self.pid << 3 | 2)

    def close(self) -> None:
        self.channel.close()
        os.close(self.process)


class Server:
    """Makes templates and runners, watches them, and cleans up after each."""

    def __init__(self, limits: dict) -> None:
        self._limits = limits
        self._source: str | None = None
        self._load_s = 1.0
        self._template: Template | None = None

    def check_bounds(self) -> None:
        """Make a first runner, and sure that it can leave no process behind if it may have none."""
        _, _, output = self._call(marshal.dumps((FORKS, "forks", [[]])), 5.0)
        first, _, rest = bytes(output.buffers[output.results]).partition(b"\n")
        if first + b"\n" != READY:
            words = output.buffers[output.printed].decode(errors="replace")
            raise OSError(f"code cannot be confined: {words}")
        if self._limits["max_processes"] == 1 and rest != b'{"index": 0, "value": false}\n':
            raise OSError("this machine does not enforce the limit on processes")

    def serve(self, requests: int, replies: int) -> None:
        """Answer one request."""
        header = read_exactly(requests, REQUEST_HEADER.size)
        kind, length, cpu_limit_s = REQUEST_HEADER.unpack(header)
        body = read_exactly(requests, length)
        spent_s = self.cpu_s()
        untouched = tmp_state()
        if kind == LOAD:
            self._end_all()
            self._source, self._load_s = body.decode(), cpu_limit_s
            limit, died_of, output = self._load()
        else:
            limit, died_of, output = self._call(body, cpu_limit_s)
        body[:] = bytes(length)  # A template that is made later inherits this memory.
        call_s = self.cpu_s() - spent_s
        if died_of == signal.SIGXCPU or (died_of == signal.SIGKILL and call_s >= cpu_limit_s):
            limit = limit or "time"
        if tmp_state() != untouched:
            checked(libc.umount2(b"/tmp", MNT_DETACH))
            mount_tmp(self._limits)
        sizes = [len(buffer) for buffer in output.buffers.values()]
        header = REPLY_HEADER.pack(LIMITS.index(limit), died_of, call_s, self.cpu_s(), *sizes)
        write_all(replies, b"".join([header, *output.buffers.values()]))

    def cpu_s(self) -> float:
        """Return CPU seconds of everything that runs or ran in this container."""
        kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        reaped_s = sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, kinds))
        return reaped_s + (self._template.cpu_s() if self._template else 0.0)

    def _load(self) -> tuple[str, int, Output]:
        """Make a template. Returns the limit that it broke, the signal it died of, its output."""
        output = Output(self._limits["output_bytes"])
        template = Template(self._limits, self._source, output, self._load_s)
        self._template = template
        output.hand_over()
        deadline_s = time.monotonic() + self._load_s * self._limits["wall_factor"]
        limit = watch(template.process, output, deadline_s, until_closed=output.results)
        # A process that dies closes its pipes before others can see that it is dead.
        is_lost = bool(limit) or not output.buffers[output.results].endswith(LOADED)
        died_of = self._end_all() if is_lost else 0
        output.drain(has_writers=not is_lost)
        output.close()
        return limit, died_of, output

    def _call(self, body: bytes | bytearray, cpu_limit_s: float) -> tuple[str, int, Output]:
        """Have one request executed. Returns the same of its runner."""
        try:
            pid, output = self._start_runner(body, cpu_limit_s)
        except Broken:  # What ended it was of an earlier call, or of the tenant's file.
            self._end_all()
            try:
                pid, output = self._start_runner(body, cpu_limit_s)
            except Broken as error:
                self._end_all()
                return "", 0, failed_output(str(error))
        deadline_s = time.monotonic() + cpu_limit_s * self._limits["wall_factor"]
        try:
            process = os.pidfd_open(pid)
        except OSError as error:
            self._end_all()
            return "", 0, failed_output(str(error))
        limit = watch(process, output, deadline_s)
        os.close(process)
        died_of = self._end_runner(pid)
        if not limit:
            output.drain()
            limit = "output" if output.is_full() else ""
        output.close()
        return limit, died_of, output

    def _start_runner(self, body: bytes | bytearray, cpu_limit_s: float) -> tuple[int, Output]:
        if self._template is None:
            limit, _, loading = self._load()
            if self._template is None:
                words = loading.buffers[loading.printed].decode(errors="replace")
                raise Broken(f"the template cannot be made {limit} {words}")
        assert self._template is not None
        output = Output(self._limits["output_bytes"])
        fd = os.memfd_create("request")
        try:
            write_all(fd, body)
            return self._template.clone(fd, len(body), output, cpu_limit_s), output
        except Broken:
            output.close()
            raise
        finally:
            os.close(fd)
            output.hand_over()

    def _end_runner(self, pid: int) -> int:
        """End a runner and whatever it left. Returns the signal that it died of, or 0."""
        assert self._template is not None
        is_alone = self._limits["max_processes"] == 1
        if is_alone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            try:
                status = os.waitpid(pid, 0)[1]
            except ChildProcessError:  # A tenant's template named a process that is none of ours.
                status, is_alone = 0, False
            if is_alone and self._template.is_alive():
                os.kill(self._template.pid, signal.SIGCONT)
                return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            self._end_all()
            return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        return self._end_all(pid)

    def _end_all(self, pid: int = 0) -> int:
        """End and reap every other process of this namespace, the template too.

        Returns the signal that ended `pid`, or else the template, or 0.
        """
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        if self._template is not None:
            pid = pid or self._template.pid
            self._template.close()
            self._template = None
        status = 0
        while True:
            try:
                reaped, its_status = os.waitpid(-1, 0)
            except ChildProcessError:
                return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            if reaped == pid:
                status = its_status


FORKS = """
import os
def forks():
    try:
        os.fork()
    except BlockingIOError:
        return False
    return True
"""


def failed_output(words: str) -> Output:
    """Return the output of a runner that was never made: no result, and the reason."""
    output = Output(0)
    output.hand_over()
    output.close()
    output.buffers[output.printed] += words.encode()
    return output


def mount_tmp(limits: dict) -> None:
    """Put an empty, bounded, writable folder at /tmp."""
    options = f"size={limits['tmp_bytes']},nr_inodes={limits['max_tmp_files']},mode=777"
    checked(libc.mount(b"tmpfs", b"/tmp", b"tmpfs", MS_NOSUID_NODEV_NOEXEC, options.encode()))


def tmp_state() -> tuple:
    """Return what tells whether /tmp was touched; replacing it costs more than a whole call."""
    status = os.stat("/tmp")
    is_open = status.st_mode & stat.S_IRWXU == stat.S_IRWXU
    return status.st_mode, status.st_ctime_ns, os.listdir("/tmp") if is_open else None


def watch(process: int, output: Output, deadline_s: float, until_closed: int = -1) -> str:
    """Collect output until a process ends, or closes a pipe. Returns the limit it broke, or ""."""
    poll = select.poll()
    for fd in (process, *output.buffers):
        poll.register(fd, select.POLLIN)
    while (left_s := deadline_s - time.monotonic()) > 0:
        for fd, _ in poll.poll(left_s * 1000):
            if fd == process:
                return ""
            if not output.read(fd):
                if fd == until_closed:
                    return ""
                poll.unregister(fd)
            if output.is_full():
                return "output"
    return "time"


def is_readable(fd: int, timeout_s: float) -> bool:
    """Wait until a descriptor can be read. Returns False when that takes too long."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


# ---------------------------------------------------------------------------------------------
# Template


def be_template(
    channel_fd: int, output: Output, source: str | None, load_s: float, limits: dict
) -> None:
    """Confine this process, load the tenant's file if there is one, then make runners forever."""
    ends = (channel_fd, output.results_end, output.printed_end)
    for end, spare in zip(ends, SPARE_FDS, strict=True):
        os.dup2(end, spare)
    channel, results, printed = SPARE_FDS
    os.dup2(channel, CHANNEL_FD)
    os.dup2(results, LOAD_RESULTS_FD)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.closerange(LOAD_RESULTS_FD + 1, MAX_SERVER_FILES)
    confine(limits)
    warm_up()
    write_all(LOAD_RESULTS_FD, READY)
    namespace = None if source is None else load(source, load_s, limits)
    sys.stdout.flush()
    sys.stderr.flush()
    write_all(LOAD_RESULTS_FD, LOADED)
    null = os.open("/dev/null", os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.closerange(LOAD_RESULTS_FD, max(MAX_SERVER_FILES, limits["max_open_files"]))
    allow_processes(limits, limits["max_processes"])
    gc.collect()
    gc.freeze()
    make_runners(namespace, max(MAX_SERVER_FILES, limits["max_open_files"]))


def make_runners(namespace: dict | None, max_files: int) -> None:
    """Copy this process once for every order of the server.

    A raw `clone`, since `fork` knows no CLONE_PARENT; nothing has to be set right after it, because
    a template has one thread. Handlers registered for forks do not run: the same request finds the
    same state of `random`.
    """
    channel = _socket.socket(fileno=CHANNEL_FD)
    number = CLONE[list(AUDIT_ARCH).index(os.uname().machine)]
    clone, flags = libc_with_lock.syscall, CLONE_PARENT | signal.SIGCHLD
    while order := channel.recvmsg(ORDER.size, 64):
        if not order[0]:
            os._exit(0)
        fds = DESCRIPTORS.unpack(order[1][0][2])
        pid = clone(number, flags, 0, 0, 0, 0)
        if pid == 0:
            exit_after(run, fds, ORDER.unpack(order[0]), namespace, max_files)
        for fd in fds:
            os.close(fd)
        channel.send(PID.pack(max(pid, 0)))


def confine(limits: dict) -> None:
    """Give up everything that code does not need. Cannot be undone."""
    for kind, bound in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_NOFILE, limits["max_open_files"]),
        (resource.RLIMIT_FSIZE, limits["tmp_bytes"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(kind, (bound, bound))
    allow_processes(limits, limits["max_processes"] - 1)  # A file that loads is no runner yet.
    set_capabilities(0)
    checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    code = ctypes.create_string_buffer(limits["filter"], len(limits["filter"]))
    program = struct.pack("HxxxxxxP", len(limits["filter"]) // 8, ctypes.addressof(code))
    checked(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0))


def allow_processes(limits: dict, count: int) -> None:
    """Bound the processes beside server and template, which belong to the same user and count."""
    resource.setrlimit(resource.RLIMIT_NPROC, (count + 2, limits["max_processes"] + 2))


def warm_up() -> None:
    """Run what every runner runs, so that memory it needs is laid out before it is copied.

    Measured: a first `compile` in a fresh copy touches 220 new pages, one in a warm copy 100.
    """
    random_module = sys.modules["random"]
    null = os.open("/dev/null", os.O_WRONLY)
    code = "import re\nscale = [2]\ndef f(x):\n    return eval('x * 2 + 1', {'x': x})\n"
    body = marshal.dumps((code, "f", [[1], [2]]))
    for _ in range(WARM_UPS):
        request, entry, calls = marshal.loads(body)
        run_calls(request, entry, calls, None, null)
    os.close(null)
    random_module.seed(0)


WARM_UPS = 24
"""The interpreter specialises code within its first dozen runs."""


def load(source: str, load_s: float, limits: dict) -> dict:
    """Execute the tenant's file as a module; report the outcome; end the process on a fault."""
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(load_s), resource.RLIM_INFINITY))
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    module = type(sys)("environment")
    module.__file__ = FILE_NAME
    sys.modules["environment"] = module
    lines = source.splitlines(keepends=True)
    importlib.import_module("linecache").cache[FILE_NAME] = (len(source), None, lines, FILE_NAME)
    os.chdir("/tmp")
    try:
        exec(compile(source, FILE_NAME, "exec"), module.__dict__)
        if threads := sys.modules["_thread"]._count():  # A copy of this process has none of them.
            raise RuntimeError(f"the file leaves {threads} threads running after its import")
    except BaseException as error:
        print_traceback()
        write_all(LOAD_RESULTS_FD, encode(described(error)).encode() + b"\n")
        sys.stdout.flush()
        os._exit(1)
    os.chdir("/")
    resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return module.__dict__


# ---------------------------------------------------------------------------------------------
# Runner


def run(fds: tuple, order: tuple, namespace: dict | None, max_files: int) -> None:
    """Run the code of a request: write a line once it is set up, then one for each call."""
    (body_fd, results, printed), (size, cpu_limit_s) = fds, order
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.dup2(results, RESULTS_FD)
    body = os.pread(body_fd, size, 0)
    os.closerange(RESULTS_FD + 1, max_files)
    os.setpgid(0, 0)  # A signal to its group reaches nobody else.
    os.chdir("/tmp")
    # The signal of the soft limit may be caught; the hard one ends the process.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_limit_s, cpu_limit_s + 1))
    os.write(RESULTS_FD, READY)
    code, entry, calls = marshal.loads(body)
    run_calls(code, entry, calls, namespace, RESULTS_FD)
    sys.stdout.flush()
    sys.stderr.flush()


def run_calls(
    code: str | None, entry: str, calls: list, environment: dict | None, results: int
) -> None:
    """Execute `code`, then call its function `entry` with each argument list.

    Without code the functions of the tenant's file are called; with both, code sees the file's
    names as the mapping `environment`.
    """
    try:
        if code is None:
            function = file_function(environment or {}, entry)
        else:
            namespace: dict = {"__name__": "solution", "__builtins__": builtins}
            if environment is not None:
                namespace["environment"] = environment
            exec(compile(code, CODE_NAME, "exec"), namespace)
            function = namespace.get(entry)
        if not callable(function):
            write_all(results, encode({"error": f"there is no function {entry}"}).encode() + b"\n")
            return
    except BaseException as error:
        write_all(results, encode(described(error)).encode() + b"\n")
        return
    for index, arguments in enumerate(calls):
        try:
            line = encode({"index": index, "value": function(*arguments)})
        except BaseException as error:
            if code is None:
                print_traceback()
            line = encode({"index": index, **described(error)})
        write_all(results, line.encode() + b"\n")


def file_function(environment: dict, entry: str) -> object:
    """Return a function of the tenant's file; `START_AND_STEP` is the first turn of an episode."""
    if entry != START_AND_STEP:
        return environment.get(entry)

    def first_step(prompt: dict, reply: str, is_last: bool) -> object:
        state = environment["start"](prompt)
        if not isinstance(state, dict):
            raise TypeError(f"start must return a dict of JSON values, got {type(state).__name__}")
        return environment["step"](json.loads(encode(state)), reply, is_last)

    return first_step


def print_traceback() -> None:
    """Print the exception being handled, from the tenant's file on, as Python would."""
    with contextlib.suppress(BaseException):
        traceback = importlib.import_module("traceback")
        kind, error, trace = sys.exc_info()
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        traceback.print_exception(kind, error, trace, limit=-MAX_FRAMES)
        sys.stderr.flush()


MAX_FRAMES = 12
"""Innermost frames of a traceback that are printed."""


def described(error: BaseException) -> dict:
    """Return an exception as text, with the line it was raised on and the limit behind it."""
    try:
        text = str(error)[:MAX_ERROR]
    except BaseException:
        text = ""
    where, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename in (CODE_NAME, FILE_NAME):
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
    "setsid": (112, 157),
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
MMAP = (9, 222)
MAP_SHARED = 1
PRLIMIT = (302, 261)
SOCKET = (41, 198)
SOCKETPAIR = (53, 199)
AF_UNIX = 1

READ, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
OFFSET_CALL, OFFSET_ARCH, OFFSET_ARGUMENTS = 0, 4, 16
ALLOW, REFUSE = 0x7FFF0000, 0x00050000


def system_call_filter(machine: str) -> bytes:
    """Return the seccomp program of a runner as packed instructions."""
    column = list(AUDIT_ARCH).index(machine)
    denied = (RETURN, 0, 0, REFUSE | errno.EPERM)
    allowed = (RETURN, 0, 0, ALLOW)
    program = [
        (READ, 0, 0, OFFSET_ARCH),
        (JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        denied,
        (READ, 0, 0, OFFSET_CALL),
        (JUMP_GREATER_EQUAL, 0, 1, FIRST_X32_CALL),
        denied,
    ]
    for numbers in SYSTEM_CALLS.values():
        program += [(JUMP_EQUAL, 0, 1, numbers[column]), denied]
    program += [(JUMP_EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, REFUSE | errno.ENOSYS)]
    for numbers, argument, test in (
        (CLONE, 0, (JUMP_ANY_BIT, 0, 1, CLONE_NEW_ANY)),
        (PRLIMIT, 0, (JUMP_EQUAL, 1, 0, 0)),
        (SOCKET, 0, (JUMP_EQUAL, 1, 0, AF_UNIX)),
        (SOCKETPAIR, 0, (JUMP_EQUAL, 1, 0, AF_UNIX)),
        # Memory that a template shares with its copies would carry a call's words to the next.
        (MMAP, 3, (JUMP_ANY_BIT, 0, 1, MAP_SHARED)),
    ):
        program += [
            (JUMP_EQUAL, 0, 4, numbers[column]),
            (READ, 0, 0, OFFSET_ARGUMENTS + 8 * argument),
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


def write_all(fd: int, data: bytes | bytearray) -> None:
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
