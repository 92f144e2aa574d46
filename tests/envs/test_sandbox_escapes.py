"""Attacks on the sandbox, tried for real: each is contained and typed, and the next call works.

Run as a program (`python test_sandbox_escapes.py NAME...`) it tries them as whoever runs it: the
suite does that as an ordinary user, too.
"""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import marlaas
from marlaas.envs.container import SandboxLimits
from marlaas.envs.sandbox import CallReport, Sandbox, SourceFile

REFUSED = asyncio.run(Sandbox.probe())
pytestmark = pytest.mark.skipif(REFUSED != "", reason=REFUSED)

REPOSITORY = Path(marlaas.__file__).parent.parent

TRY = """
import ctypes, errno, mmap, os, resource, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def tried(**attempts):
    "Return the names of the attempts that succeed."
    done = []
    for name, attempt in attempts.items():
        try:
            if attempt() != -1: done.append(name)
        except (OSError, ValueError, AttributeError): pass
    return done
"""

ATTACKS: dict[str, tuple[str, object]] = {
    # Code with a function f, and what comes of it: a value, or a limit, or words of an error.
    "host files": (
        f"""
def f():
    paths = ["/etc/passwd", "/etc/shadow", "/etc/hostname", "/root", "/home", "/var", "/run",
             "/sys", "/proc/1/environ", "/proc/self/mem", "/proc/self/fd", "/dev/shm",
             "/dev/kmsg", "/dev/pts", "/dev/fd", {str(REPOSITORY)!r}, {str(Path.home())!r},
             {str(Path(__file__))!r}]
    return [path for path in paths if os.path.lexists(path)]""",
        [],
    ),
    "processes of others": (
        """
def f():
    return tried(list=lambda: os.listdir("/proc"), maps=lambda: open("/proc/self/maps"),
                 parent=lambda: open(f"/proc/{os.getppid()}/environ"))""",
        [],
    ),
    "links out": (
        """
def f():
    os.symlink("/etc/passwd", "/tmp/soft")
    os.symlink("/proc/self/root/../../../..", "/tmp/up")
    return tried(read=lambda: open("/tmp/soft"), up=lambda: os.listdir("/tmp/up"),
                 hard=lambda: os.link("/python/server.py", "/tmp/hard") or open("/tmp/hard", "r+"),
                 device=lambda: os.mknod("/tmp/sda", 0o60666, os.makedev(8, 0)),
                 memory=lambda: os.mknod("/tmp/mem", 0o20666, os.makedev(1, 1)))""",
        [],
    ),
    "network": (
        """
def f():
    return tried(tcp=lambda: socket.create_connection(("127.0.0.1", PORT), 1),
                 udp=lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
                 six=lambda: socket.socket(socket.AF_INET6),
                 raw=lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
                 netlink=lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
                 dns=lambda: socket.gethostbyname("localhost.example.com"),
                 ring=lambda: libc.syscall(425, 8, ctypes.create_string_buffer(256)),
                 path=lambda: socket.socket(socket.AF_UNIX).connect(PATH),
                 abstract=lambda: socket.socket(socket.AF_UNIX).connect(ABSTRACT))""",
        [],
    ),
    "rights": (
        """
def f():
    return tried(uid=lambda: os.setuid(0), gid=lambda: os.setgid(0),
                 groups=lambda: os.setgroups([0]),
                 uids=lambda: os.setresuid(0, 0, 0),
                 capabilities=lambda: libc.capset(struct.pack("Ii", 0x20080522, 0),
                                                  struct.pack("6I", 1 << 21, 1 << 21, 0, 0, 0, 0)),
                 chroot=lambda: os.chroot("/tmp"), nice=lambda: os.nice(-5),
                 files=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096)),
                 space=lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40)),
                 others=lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0)))""",
        [],
    ),
    "namespaces and mounts": (
        """
def f():
    return tried(user=lambda: libc.unshare(0x10000000), mounts=lambda: libc.unshare(0x20000),
                 clone=lambda: libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0),
                 clone3=lambda: libc.syscall(435, ctypes.create_string_buffer(88), 88),
                 mount=lambda: libc.mount(b"proc", b"/tmp", b"proc", 0, b""),
                 unmount=lambda: libc.umount2(b"/tmp", 2), setns=lambda: libc.setns(0, 0),
                 pivot=lambda: libc.syscall(155, b"/tmp", b"/tmp"))""",
        [],
    ),
    "doors into the kernel": (
        """
def f():
    return tried(bpf=lambda: libc.syscall(321, 0, 0, 0),
                 perf=lambda: libc.syscall(298, 0, 0, -1, -1, 0),
                 keys=lambda: libc.syscall(250, 0, -3, 1), faults=lambda: libc.syscall(323, 0),
                 shm=lambda: libc.shmget(0, 4096, 0o1600), queue=lambda: libc.msgget(0, 0o1600),
                 memfd=lambda: libc.memfd_create(b"m", 0), log=lambda: libc.klogctl(3, None, 0),
                 x32=lambda: libc.syscall(0x40000000 + 39))""",
        [],
    ),
    "other processes' memory": (
        """
def f():
    pids = [pid for pid in range(1, 64) if pid != os.getpid()]
    word = ctypes.create_string_buffer(8)
    done = []
    for pid in pids:
        done += tried(trace=lambda: libc.ptrace(16, pid, 0, 0),
                      seize=lambda: libc.ptrace(0x4206, pid, 0, 0),
                      read=lambda: libc.process_vm_readv(pid, word, 1, word, 1, 0),
                      write=lambda: libc.process_vm_writev(pid, word, 1, word, 1, 0),
                      descriptor=lambda: libc.syscall(438, os.pidfd_open(pid), 0, 0))
    return done""",
        [],
    ),
    "shared memory": (
        "def f():\n    return tried(anonymous=lambda: mmap.mmap(-1, 4096),"
        " file=lambda: mmap.mmap(os.open('/tmp/m', os.O_RDWR | os.O_CREAT), 0))",
        [],
    ),
    "clocks": (
        """
def f():
    os.environ["TZ"] = "XXX-5"
    time.tzset()
    return tried(wall=lambda: time.clock_settime(time.CLOCK_REALTIME, 0),
                 adjust=lambda: libc.adjtimex(struct.pack("I200x", 1)))""",
        [],
    ),
    "secrets in the environment": (
        """
def f():
    environment = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
    return [dict(os.environ), environment[0] if environment else None, sys.argv[1:][:0]]""",
        [{}, None, []],
    ),
    "descriptors left open": (
        "def f():\n    return [fd for fd in range(64) if tried(stat=lambda: os.fstat(fd) and 0)]",
        [0, 1, 2, 3],
    ),
    "fork bomb": ("def f():\n    while True: os.fork()", "processes"),
    "thread bomb": (
        "import threading\ndef f():\n"
        "    while True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        "processes",
    ),
    "memory bomb": (
        "def f():\n    hoard = []\n    while True: hoard.append(bytes(1 << 22))",
        "memory",
    ),
    "infinite loop": ("def f():\n    while True: pass", "time"),
    "sleep": ("def f(): time.sleep(1000)", "time"),
    "deaf to signals": (
        "def f():\n    for n in range(1, 65):\n        try: signal.signal(n, signal.SIG_IGN)\n"
        "        except (OSError, ValueError): pass\n    while True: pass",
        "time",
    ),
    "output flood": ("def f():\n    while True: os.write(1, b'x' * 65536)", "output"),
    "error flood": ("def f():\n    while True: os.write(2, b'x' * 65536)", "output"),
    "giant value": ("def f(): return 'x' * (1 << 24)", "output"),
    "flooding the reply": ("def f():\n    while True: os.write(3, b'{}\\n' * 999)", "output"),
    "file flood": (
        "def f():\n    for i in range(10 ** 6): open(f'/tmp/{i}', 'w').close()",
        "files",
    ),
    "big file": (
        "def f():\n    file = open('/tmp/a', 'wb')\n    while True: file.write(bytes(1 << 20))",
        "files",
    ),
    "descriptor flood": (
        "def f():\n    hoard = []\n    while True: hoard.append(os.pipe())",
        "files",
    ),
    "crash": ("def f(): ctypes.string_at(0)", "died of signal 11"),
    "closing the reply": ("def f(): os.close(3)", "ended before every call was made"),
    "forging a frame": (
        """
def f():
    frame = struct.pack("!BBddII", 0, 0, 0, 0, 30, 0) + b'{"index": 0, "value": 7}'
    for fd in range(64): tried(write=lambda: os.write(fd, b"\\n" + frame + b"\\n"))
    return "honest" """,
        "honest",
    ),
    "killing everyone": (
        """
def f():
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL):
        for pid in (*range(1, os.getpid()), -1):
            try: os.kill(pid, number)
            except OSError: pass
    return "alive" """,
        "alive",
    ),
    "stopping the template": (
        "def f():\n    for pid in range(2, os.getpid()):\n"
        "        tried(stop=lambda: os.kill(pid, signal.SIGSTOP))",
        None,
    ),
    "killing its own group": ("def f(): os.killpg(0, 9)", "died of signal 9"),
    "a daemon": (
        """
def f():
    try:
        if os.fork() == 0: time.sleep(1000)
    except BlockingIOError: return "refused" """,
        "refused",
    ),
    "a daemon in the template's place": (
        """
def f():
    for pid in range(2, os.getpid()): tried(kill=lambda: os.kill(pid, signal.SIGKILL))
    time.sleep(0.02)
    try:
        if os.fork() == 0: time.sleep(1000)
    except BlockingIOError: return "refused"
    return "forked" """,
        "refused",
    ),
    "a trap for the next call": (
        """
import builtins, json, marshal, random
def f():
    main = sys.modules["__main__"]
    main.run_calls = main.write_all = main.exit_after = builtins.compile = lambda *_: None
    json.dumps = marshal.loads = os.write = os.pread = os.dup2 = builtins.len = None
    main.RESULTS_FD, main.READY, sys.modules["re"] = 1, b"", None
    open("/tmp/left", "w").write("x")
    os.chmod("/tmp", 0)
    random.seed(5)""",
        "ended before every call was made",
    ),
}

PLAIN = "import os, random\ndef f(): return [os.listdir('/tmp'), len([1]), random.random()]"
"""A call that finds everything as it was, if calls share nothing."""


def outcome(report: CallReport) -> object:
    """Return what became of f(): the limit, the value, or the words of the error."""
    if report.limit is not None:
        return report.limit.value
    return report.values[0] if 0 in report.values else report.errors.get(0, report.error)


async def attack_all(
    names: Sequence[str], world: str = "PORT, PATH, ABSTRACT = 9, '/tmp/x', ''"
) -> list:
    """Try attacks one after another in one container, a plain call after each.

    Returns pairs of outcomes.
    """
    sandbox = Sandbox(SandboxLimits(max_parallel=1))
    await sandbox.start()
    try:
        pairs = []
        for name in names:
            code = f"{TRY}\n{world}\n{ATTACKS[name][0]}"
            report = await sandbox.call(code, "f", [[]], timeout_s=0.5)
            plain = await sandbox.call(PLAIN, "f", [[]], timeout_s=5.0)
            pairs.append([outcome(report), outcome(plain)])
        return pairs
    finally:
        await sandbox.stop()


def assert_contained(names: Sequence[str], pairs: list) -> None:
    alone = pairs[0][1]
    assert alone[:2] == [[], 1], alone
    for name, (got, after) in zip(names, pairs, strict=True):
        wanted = ATTACKS[name][1]
        assert after == alone, f"{name} changed the next call: {after}"
        assert got == wanted or (isinstance(got, str) and str(wanted) in got), f"{name}: {got}"


def test_attacks_are_contained_and_the_next_call_works(tmp_path: Path):
    abstract = f"\0marlaas-escape-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as by_path,
        socket.socket(socket.AF_UNIX) as by_name,
    ):
        path = str(tmp_path / "socket")
        for server, address in ((by_path, path), (by_name, abstract)):
            server.bind(address)
            server.listen()
        port = tcp.getsockname()[1]
        world = f"PORT, PATH, ABSTRACT = {port}, {path!r}, {abstract!r}"
        assert_contained(list(ATTACKS), asyncio.run(attack_all(list(ATTACKS), world)))


def test_an_ordinary_user_contains_every_attack_too():
    python = shutil.which("python3", path="/usr/bin")
    if os.geteuid() != 0 or python is None:
        pytest.skip("needs root and a Python that every user may run")
    version = subprocess.check_output([python, "-c", "import sys; print(sys.version_info[:2])"])
    if version.decode().strip() != str(sys.version_info[:2]):
        pytest.skip("needs the same version of Python, for its packages")
    search_path = [str(REPOSITORY), *(path for path in sys.path if path.endswith("-packages"))]
    done = subprocess.run(
        [python, str(Path(__file__)), *ATTACKS],
        capture_output=True,
        text=True,
        user=65534,
        group=65534,
        extra_groups=[],
        cwd="/",
        env={"PYTHONPATH": os.pathsep.join(search_path), "SECRET": "of the server"},
    )
    if "PermissionError" in done.stderr or "No module named" in done.stderr:
        pytest.skip("the package lies where other users cannot read it")
    assert done.returncode == 0, done.stderr
    assert_contained(list(ATTACKS), json.loads(done.stdout))


# ---------------------------------------------------------------------------------------------
# A tenant's file


FILE = """
import os, signal
SEEN = []
def reward(prompt, reply):
    SEEN.append(reply)
    exec(prompt.get("code", ""), globals())
    return len(SEEN)
"""


def rewards_of(source: str, *codes: str, **limits: int) -> list[object]:
    """Return what `reward` of a file gave, one prompt with code after another in one container."""

    async def main() -> list[object]:
        file = SourceFile(text=source, load_limit_s=1.0)
        sandbox = Sandbox(SandboxLimits(max_parallel=1, **limits), file)
        try:
            await sandbox.start()
            return [
                outcome(await sandbox.call(None, "reward", [[{"code": code}, ""]], timeout_s=0.5))
                for code in codes
            ]
        finally:
            await sandbox.stop()

    return asyncio.run(main())


def test_calls_of_one_file_share_nothing_even_if_a_reply_takes_it_over():
    takeovers = (
        "SEEN.extend(range(99)); globals()['reward'] = lambda *_: 5",
        "import environment; environment.reward = lambda *_: 5; del SEEN[:]",
        "for pid in range(2, os.getpid()): os.kill(pid, 9)",
        "for pid in range(2, os.getpid()): os.kill(pid, signal.SIGSTOP)",
        "import sys; sys.modules['__main__'].run = None",
        "open('/tmp/left', 'w').close()",
        "while True: pass",
    )
    plain = "assert os.listdir('/tmp') == []"
    codes = [code for takeover in takeovers for code in (takeover, plain)]
    assert rewards_of(FILE, *codes)[1::2] == [1] * len(takeovers)


def test_a_file_cannot_keep_memory_threads_or_processes_between_its_calls():
    for line in (
        "import mmap; SHARED = mmap.mmap(-1, 4096)",
        "import threading, time; threading.Thread(target=time.sleep, args=(9,)).start()",
        "import os; os.fork()",
    ):
        with pytest.raises(Exception, match="the environment file cannot be loaded"):
            rewards_of(f"{line}\n{FILE}", "")
    descriptor = "import os; FD = os.pipe()[1]\n" + FILE
    assert "Bad file descriptor" in str(rewards_of(descriptor, "os.write(FD, b'x')")[0])


def test_a_hostile_file_harms_its_own_calls_only():
    """Whatever it does to the machinery it runs in: a typed end, and the other sandbox works."""
    for line in (
        "import os; os.close(3)",
        "import os; os.dup2(1, 3); os.dup2(1, 0)",
        "import signal; signal.setitimer(signal.ITIMER_REAL, 0.01)",
        "import sys; sys.modules['__main__'].PID = None",
        "import resource; resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))",
        "import os; os.write(4, b'{\"loaded\": true}\\n'); os._exit(0)",
        "import os; os.kill(os.getpid(), 19)",
    ):
        try:
            (result,) = rewards_of(f"{line}\n{FILE}", "")
            assert result == 1, line
        except Exception as error:
            assert type(error).__name__ == "EnvironmentFailure", line
        assert rewards_of(FILE, "") == [1]


def test_no_call_finds_the_words_of_an_earlier_one_in_memory():
    search = """
import ctypes, gc
libc = ctypes.CDLL(None)
libc.sbrk.restype = ctypes.c_void_p
def f(*backwards):
    small = [object() for _ in range(10000)]
    pages = {id(one) >> 12 << 12 for one in (*small, *backwards, f, f.__name__)}
    memory = [ctypes.string_at(page, 4096) for page in pages]
    memory.append(ctypes.string_at(libc.sbrk(0) - (1 << 20), 1 << 20))
    return [sum(part.count(word[::-1].encode()) for part in memory) for word in backwards]
"""
    used, never_used = "words-of-an-earlier-call", "words-that-nobody-said-x"

    async def main() -> object:
        sandbox = Sandbox(SandboxLimits(max_parallel=1))
        try:
            await sandbox.start()
            leave = "kept = []\ndef f(word):\n    kept.append(word * 2)\n    return word"
            await sandbox.call(leave, "f", [[used]] * 20, timeout_s=1.0)
            words = [used[::-1], never_used[::-1], "backwards"[::-1]]
            return outcome(await sandbox.call(search, "f", [words], timeout_s=5.0))
        finally:
            await sandbox.stop()

    found = asyncio.run(main())
    assert isinstance(found, list) and found[0] == found[1], found
    assert found[2] > 0, "the search finds nothing at all"


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(attack_all(sys.argv[1:]))))
