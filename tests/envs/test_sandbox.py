"""Code is judged by what it returns, and whatever it tries stays inside."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

import marlaas
from marlaas.envs import sandbox_child
from marlaas.envs.container import SandboxLimits, find_bwrap
from marlaas.envs.sandbox import Case, Limit, Sandbox, Verdict, equals
from marlaas.errors import EnvironmentFailure, FailureKind

REFUSED = asyncio.run(Sandbox.probe())
pytestmark = pytest.mark.skipif(REFUSED != "", reason=REFUSED)

REPOSITORY = Path(marlaas.__file__).parent.parent


def in_sandbox(use: Callable[[Sandbox], Awaitable], **limits: int):
    """Run `use` with a started sandbox and return its result."""

    async def main():
        sandbox = Sandbox(SandboxLimits(**limits))
        await sandbox.start()
        try:
            return await use(sandbox)
        finally:
            await sandbox.stop()

    return asyncio.run(main())


def judge_all(codes: Sequence[str], *tests: Case, timeout_s: float = 5.0, **limits: int):
    """Return the verdict on each code, whose function is called f."""

    async def use(sandbox: Sandbox) -> list[Verdict]:
        return await asyncio.gather(
            *(sandbox.run_tests(code, "f", tests, timeout_s=timeout_s) for code in codes)
        )

    return in_sandbox(use, **limits)


def judge(code: str, *tests: Case, timeout_s: float = 5.0, **limits: int) -> Verdict:
    """Return the verdict on one code."""
    return judge_all([code], *tests, timeout_s=timeout_s, **limits)[0]


def result_of(*codes: str, **limits: int) -> list:
    """Return what f() of each code returned, or its error, one call after another."""

    async def use(sandbox: Sandbox) -> list:
        reports = [await sandbox.call(code, "f", [[]], timeout_s=5.0) for code in codes]
        return [report.values.get(0, report.errors.get(0, report.error)) for report in reports]

    return in_sandbox(use, **limits)


def descendants(pid: int) -> dict[int, str]:
    """Return the living processes below `pid` with their status texts."""
    found, parents = {}, {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
        except OSError:
            continue
        if "State:\tZ" not in text:
            parents[int(status.parent.name)] = int(text.split("PPid:")[1].split()[0])
            found[int(status.parent.name)] = text
    below = {pid}
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    return {child: found[child] for child in below - {pid} if child in found}


def contained(pid: int) -> list[int]:
    """Return the descendants of `pid` that are in a container: those with a second pid there."""
    return [
        child
        for child, status in descendants(pid).items()
        if len(status.split("NSpid:")[1].splitlines()[0].split()) > 1
    ]


IDLE = 2
"""Processes in a container between calls: the server and the template."""


# ---------------------------------------------------------------------------------------------
# Verdicts


def test_right_code_passes_and_wrong_code_fails_with_a_share():
    verdict = judge("def f(x):\n    return x + 1", ([1], 2), ([2], 3), ([-5], -4))
    assert verdict.is_success and (verdict.passed, verdict.total, verdict.error) == (3, 3, "")
    verdict = judge("def f(x):\n    return abs(x) + 1", ([1], 2), ([2], 3), ([-5], -4))
    assert not verdict.is_success and (verdict.passed, verdict.total) == (2, 3)
    assert verdict.error == "with (-5): wrong result 6"


def test_the_text_for_the_policy_says_what_went_wrong():
    faults = {
        "def f(x):\n    return x +": "SyntaxError: invalid syntax (<solution>, line 2)",
        "g = 1": "there is no function f",
        "f = 3": "there is no function f",
        "def f(x):\n    return 1 / x": ("with (0): ZeroDivisionError: division by zero (line 2)"),
        "def f(x): return {x}": (
            "with (0): TypeError: Object of type set is not JSON serializable"
        ),
        "import os\nos.abort()": "died of signal 6",
        "def f(x): exit_now()": "with (0): NameError: name 'exit_now' is not defined (line 1)",
    }
    verdicts = judge_all(list(faults), ([0], 2))
    assert [verdict.error for verdict in verdicts] == list(faults.values())


def test_a_call_that_raises_does_not_hide_the_others():
    verdict = judge("def f(x):\n    return 1 // x", ([1], 1), ([0], 0), ([1], 1))
    assert (verdict.passed, verdict.total) == (2, 3)


def test_code_that_does_not_end_is_cut():
    codes = (
        "def f(x):\n    while True: pass",
        "def f(x): return 3 ** 10 ** 9",
        "import time\ndef f(x): time.sleep(100)",
        "while True: pass",
        "import signal\nsignal.signal(signal.SIGXCPU, lambda *_: None)\n"
        "def f(x):\n    while True: pass",
    )
    verdicts = judge_all(codes, ([1], 1), timeout_s=0.25, max_parallel=len(codes))
    assert {(verdict.passed, verdict.limit) for verdict in verdicts} == {(0, Limit.TIME)}


def test_code_that_catches_the_signal_of_the_cpu_limit_is_cut_all_the_same():
    code = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    verdict = judge(code, ([1], 1), timeout_s=1.0)
    assert (verdict.passed, verdict.limit) == (0, Limit.TIME) and verdict.cpu_s < 3.0


def test_calls_before_the_cut_count():
    verdict = judge("def f(x):\n    while x: pass\n    return 0", ([0], 0), ([1], 0), timeout_s=0.3)
    assert (verdict.passed, verdict.total, verdict.limit) == (1, 2, Limit.TIME)


def test_printing_is_kept_and_harmless():
    verdict = judge("def f(x):\n    print('seen', x)\n    return x", ([1], 1), ([2], 2))
    assert verdict.is_success and verdict.printed == "seen 1\nseen 2\n"


def test_results_do_not_depend_on_the_container():
    code = "import random\ndef f():\n    return [hash('a'), random.random(), list({'b', 'c', 'd'})]"
    first, second = result_of(code), result_of(code)
    assert first == second and len(first[0]) == 3


def test_numbers_are_equal_by_value_and_true_only_to_true():
    assert equals(2, 2.0) and equals(0.1 + 0.2, 0.3) and equals([1, {"a": None}], [1, {"a": None}])
    assert not equals(True, 1) and not equals(1, True) and not equals(0, False)
    assert not equals("1", 1) and not equals([1], [1, 2]) and not equals(None, 0)
    assert not equals(float("nan"), float("nan")) and not equals(10**400, 1.0)
    assert not equals({"a": 1}, {"b": 1}) and not equals("a", 1.0)


# ---------------------------------------------------------------------------------------------
# Forging


FORGERIES = (
    "class Any:\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"
    "def f(x): return Any()",
    "class Any(int):\n    def __eq__(self, other): return True\ndef f(x): return Any(5)",
    "class Any(str):\n    def __eq__(self, other): return True\ndef f(x): return Any('5')",
    "import sys\nsys.exit(0)",
    "import sys\ndef f(x): sys.exit(0)",
    "import os\nos._exit(0)",
    "import os\ndef f(x): os._exit(0)",
    "import os\ndef f(x): os.kill(os.getpid(), 9)",
    'print(\'{"index": 0, "value": 987654321}\')',
    'import os\nos.write(3, b\'{"index": 0, "passed": true}\\n{"ready": true}\\n\')',
    "import os\nfor fd in range(64):\n    try: os.write(fd, b'\\xff' * 100)\n"
    "    except OSError: pass",
    'import json\njson.dumps = lambda *_: \'{"index": 0, "value": true}\'\ndef f(x): return 1',
    "import builtins\nbuiltins.all = lambda *_: True\ndef f(x): return 1",
    "def f(x): return float('nan')",
    "def f(x): return True",
    "def f(x):\n    deep = []\n    for _ in range(10 ** 5): deep = [deep]\n    return deep",
    "import os\nos.write(3, b'[' * 10000 + b'\\n')",
    "import __main__\n__main__.run_calls = print\n__main__.FIRST_FD = 1\ndef f(x): return 0",
)


def test_no_trick_passes_a_hidden_test():
    for code, verdict in zip(FORGERIES, judge_all(FORGERIES, ([1], 987654321)), strict=True):
        assert verdict.passed == 0 and not verdict.is_success and verdict.error != "", code


def test_expected_values_are_nowhere_inside():
    search = """
import gc, sys
def f(x):
    seen, frame = [], sys._getframe()
    while frame:
        seen.append(dict(frame.f_locals))
        frame = frame.f_back
    everything = repr(seen) + repr([o for o in gc.get_objects() if isinstance(o, (list, dict))])
    return ["98765" + "4321" in everything, "12345" + "6789" in everything]
"""
    verdict = judge(search, ([123456789], 987654321), timeout_s=5.0)
    assert verdict.error == "with (123456789): wrong result [false, true]"


def test_the_first_value_of_a_call_stands():
    forged = 'import os\ndef f(x):\n    os.write(3, b\'{"index": 1, "value": 7}\\n\')\n    return 8'
    verdict = judge(forged, ([1], 8), ([1], 8))
    assert verdict.passed == 1


# ---------------------------------------------------------------------------------------------
# Limits


def test_a_fork_bomb_hits_the_limit_on_processes():
    bomb = "import os\ndef f(x):\n    while True: os.fork()"
    for max_processes in (1, 8):
        verdict = judge(bomb, ([1], 1), max_processes=max_processes)
        assert (verdict.passed, verdict.limit) == (0, Limit.PROCESSES)


def test_threads_count_as_processes():
    code = """
import threading
def f(n):
    gate = threading.Event()
    threads = [threading.Thread(target=gate.wait, daemon=True) for _ in range(n)]
    for thread in threads: thread.start()
    gate.set()
    for thread in threads: thread.join()
    return n
"""
    assert judge(code, ([3], 3), max_processes=4).is_success
    assert judge(code, ([4], 4), max_processes=4).limit is Limit.PROCESSES


def test_a_memory_hog_hits_the_limit_on_memory():
    codes = (
        "def f(x): return len('a' * (1 << 30))",
        "def f(x):\n    hoard = []\n    while True: hoard.append(bytes(1 << 20))",
    )
    for code, verdict in zip(codes, judge_all(codes, ([1], 1)), strict=True):
        assert (verdict.passed, verdict.limit) == (0, Limit.MEMORY), code


def test_endless_output_hits_the_limit_on_output():
    codes = (
        "def f(x):\n    while True: print('again')",
        "import os\ndef f(x):\n    while True: os.write(3, b'0' * 4096)",
        "def f(x): return 'a' * 10 ** 6",
        "def f(x): print('a' * 10 ** 6); return 1",
    )
    for code, verdict in zip(codes, judge_all(codes, ([1], 1)), strict=True):
        assert verdict.limit is Limit.OUTPUT and not verdict.is_success, code
        assert len(verdict.printed) <= 2_000


def test_files_are_bounded():
    codes = (
        "def f(x):\n    with open('/tmp/a', 'wb') as file:\n"
        "        while True: file.write(bytes(1 << 20))",
        "def f(x):\n    for i in range(10 ** 6): open(f'/tmp/{i}', 'w').close()",
        "def f(x):\n    files = []\n    while True: files.append(open('/dev/null'))",
        "def f(x):\n    for i in range(10 ** 6):\n"
        "        with open(f'/tmp/{i}', 'wb') as file: file.write(bytes(1 << 20))",
    )
    for code, verdict in zip(codes, judge_all(codes, ([1], 1)), strict=True):
        assert (verdict.passed, verdict.limit) == (0, Limit.FILES), code


# ---------------------------------------------------------------------------------------------
# Containment


def test_the_host_is_not_there():
    code = f"""
import os
def f():
    paths = ["/etc", "/etc/shadow", "/root", "/home", "/proc", "/sys", "/var", "/run", "/boot",
             "/usr/bin", "/bin", "/mnt", "/opt", "/dev/shm", "/dev/mem", "/dev/tty",
             {str(REPOSITORY)!r}, {str(Path.home())!r}]
    return [path for path in paths if os.path.exists(path)] + sorted(os.listdir("/"))
"""
    (seen,) = result_of(code)
    assert set(seen) <= {"dev", "lib", "lib64", "python", "tmp", "usr"}


def test_nothing_can_be_written_outside_tmp():
    code = """
import os
def f():
    written = []
    folders = ["/", *("/" + name for name in os.listdir("/"))]
    folders += ["/usr/lib", "/python/lib", "/python/bin", os.path.dirname(os.__file__)]
    for folder in folders:
        try:
            open(folder + "/new", "w").close()
            written.append(folder)
        except OSError: pass
    for path in ("/python/server.py", "/python/bin/python3", "/dev/sda"):
        try:
            open(path, "r+b").close()
            written.append(path)
        except OSError: pass
    return written
"""
    assert result_of(code) == [["/tmp"]]


def test_the_environment_is_empty_and_the_user_has_no_rights():
    code = """
import ctypes, os, struct
def f():
    libc = ctypes.CDLL(None)
    header, sets = struct.pack("Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    libc.capget(header, sets)
    return [dict(os.environ), os.getresuid(), os.getgroups(), sets.raw == bytes(24)]
"""
    (seen,) = result_of(code)
    assert seen[0] == {} and seen[1] == [1000, 1000, 1000] and 0 not in seen[2] and seen[3] is True


def test_there_is_no_network():
    code = """
import socket
def f():
    opened = []
    for family in ("AF_INET", "AF_INET6", "AF_NETLINK", "AF_VSOCK", "AF_PACKET"):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
            try: opened.append(repr(socket.socket(getattr(socket, family), kind)))
            except PermissionError: pass
    return opened
"""
    connect = "import socket\ndef f(): socket.create_connection(('127.0.0.1', 80))"
    opened, error = result_of(code, connect)
    assert opened == [] and error.startswith("PermissionError")


def test_abstract_sockets_of_the_host_are_out_of_reach():
    name = f"\0marlaas-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        (error,) = result_of(
            "import socket\ndef f():\n"
            f"    socket.socket(socket.AF_UNIX).connect({name!r})\n    return 'connected'"
        )
    assert error.startswith("ConnectionRefusedError")


def test_other_processes_cannot_be_seen_or_harmed():
    attack = """
import ctypes, os, resource, signal
def f():
    libc, server, done = ctypes.CDLL(None), os.getppid(), []
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGSEGV):
        for pid in (server, 1, -1):
            try: os.kill(pid, number)
            except OSError: pass
    attempts = {
        "limits": lambda: resource.prlimit(server, resource.RLIMIT_AS, (1, 1)),
        "priority": lambda: os.setpriority(os.PRIO_PROCESS, server, 19),
        "cores": lambda: os.sched_setaffinity(server, {0}),
        "root": lambda: os.chroot("/tmp"),
        "user": lambda: os.setuid(0),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
            done.append(name)
        except OSError: pass
    pointers = {
        "trace": lambda: libc.ptrace(16, server, 0, 0),
        "namespace": lambda: libc.unshare(0x10000000),
        "mount": lambda: libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, b""),
        "unmount": lambda: libc.umount2(b"/tmp", 2),
        "shared": lambda: libc.shmget(0, 4096, 0o1600),
        "memory": lambda: libc.memfd_create(b"m", 0),
        "kernel log": lambda: libc.klogctl(3, ctypes.create_string_buffer(64), 64),
        "clone": lambda: libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0),
    }
    return done + [name for name, call in pointers.items() if call() != -1]
"""
    works = "def f(): return 'works'"
    assert result_of(attack, works, max_parallel=1) == [[], "works"]


def test_links_lead_nowhere():
    code = """
import os
def f():
    os.symlink("/etc/shadow", "/tmp/link")
    os.symlink("/", "/tmp/up")
    seen = [os.path.exists("/tmp/link"), os.path.exists("/tmp/up/../../root")]
    try: os.link("/python/server.py", "/tmp/hard")
    except OSError as error: seen.append(error.errno)
    return seen
"""
    (seen,) = result_of(code)
    assert seen[:2] == [False, False] and len(seen) == 3


def test_nothing_is_left_for_the_next_call():
    leave = """
import builtins, json, math, os, random, sys, tempfile
def f():
    open("/tmp/left", "w").write("message")
    os.mkdir("/tmp/folder", 0)
    os.chmod("/tmp", 0)
    math.pi = 3
    builtins.len = lambda _: 0
    sys.modules["json"] = None
    random.seed(5)
    os.environ["left"] = "message"
"""
    look = """
import json, math, os, random
def f():
    open("/tmp/new", "w").close()
    return [os.listdir("/tmp"), math.pi, len([1]), dict(os.environ), random.random()]
"""
    alone = result_of(look)[0]
    assert result_of(leave, look, leave, look, max_parallel=1) == [None, alone, None, alone]


def test_processes_left_behind_are_killed():
    leave = """
import os, time
def f():
    if (pid := os.fork()) == 0:
        os.setpgid(0, 0)
        if os.fork() == 0:
            while True: time.sleep(0.01)
        os._exit(0)
    return pid
"""
    look = """
import os
def f():
    alive = []
    for pid in range(2, 100):
        try: os.kill(pid, 0)
        except ProcessLookupError: continue
        alive.append(pid)
    return len(alive) == 2 and os.getpid() in alive  # and the template
"""
    left, is_alone = result_of(leave, look, max_parallel=1, max_processes=4)
    assert isinstance(left, int) and is_alone is True


def test_code_gives_way_to_engines_and_cannot_help_it():
    """Its niceness counts within one session only: it has the server's and can begin no other."""
    code = """
import os
def f():
    refused = []
    for act in (os.setsid, lambda: os.setpriority(os.PRIO_PROCESS, 0, 0), lambda: os.nice(-1)):
        try: act()
        except PermissionError: refused.append(True)
    return [os.getpriority(os.PRIO_PROCESS, 0), refused]
"""
    niceness = min(19, os.getpriority(os.PRIO_PROCESS, 0) + sandbox_child.NICENESS)
    assert result_of(code) == [[niceness, [True, True, True]]]

    async def sessions(sandbox: Sandbox) -> set[int]:
        return {os.getsid(pid) for pid in contained(os.getpid())}

    assert in_sandbox(sessions) == {os.getsid(0)}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run code as another user")
def test_started_by_root_code_runs_as_a_user_that_the_host_gives_no_right():
    async def use(sandbox: Sandbox) -> list[str]:
        inside = contained(os.getpid())
        return [Path(f"/proc/{pid}/status").read_text() for pid in inside]

    statuses = in_sandbox(use)
    uids = {uid for text in statuses for uid in text.split("Uid:")[1].splitlines()[0].split()}
    assert len(uids) == 1 and 60_600 <= int(uids.pop()) < 61_100


USE_UNPRIVILEGED = """
import asyncio
from marlaas.envs.sandbox import Sandbox
async def main():
    sandbox = Sandbox()
    await sandbox.start()
    bomb = "import os\\ndef f(x):\\n    while True: os.fork()"
    print([
        (await sandbox.run_tests(code, "f", [([1], 2)], timeout_s=5.0)).error
        for code in ("def f(x): return x + 1", bomb, "def f(x): return open('/etc/passwd')")
    ])
    await sandbox.stop()
asyncio.run(main())
"""


def test_an_ordinary_user_can_contain_code_too():
    python = shutil.which("python3", path="/usr/bin")
    if os.geteuid() != 0 or python is None:
        pytest.skip("needs root and a Python that every user may run")
    version = subprocess.check_output([python, "-c", "import sys; print(sys.version_info[:2])"])
    if version.decode().strip() != str(sys.version_info[:2]):
        pytest.skip("needs the same version of Python, for its packages")
    search_path = [str(REPOSITORY), *(path for path in sys.path if path.endswith("-packages"))]
    done = subprocess.run(
        [python, "-c", USE_UNPRIVILEGED],
        capture_output=True,
        text=True,
        user=65534,
        group=65534,
        extra_groups=[],
        cwd="/",
        env={"PYTHONPATH": os.pathsep.join(search_path)},
    )
    if "PermissionError" in done.stderr or "No module named" in done.stderr:
        pytest.skip("the package lies where other users cannot read it")
    assert done.returncode == 0, done.stderr
    assert "['', 'with (1): BlockingIOError" in done.stdout and "FileNotFoundError" in done.stdout


# ---------------------------------------------------------------------------------------------
# Life of a sandbox


def test_where_code_cannot_be_contained_the_reason_is_given():
    """Inside a container that forbids user namespaces, nothing runs and the reason is named."""
    script = "import asyncio; from marlaas.envs.sandbox import Sandbox as S\n"
    script += "print('reason:', asyncio.run(S.probe()))"
    container = [find_bwrap(), "--dev-bind", "/", "/", "--unshare-user", "--disable-userns"]
    done = subprocess.run(
        [*container, "--proc", "/proc", sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])},
    )
    assert "reason: sandbox_lost: the sandbox cannot start: bwrap:" in done.stdout, done


def test_a_killed_container_is_a_typed_failure_and_the_next_call_works():
    async def use(sandbox: Sandbox) -> None:
        call = asyncio.create_task(
            sandbox.run_tests("while True: pass", "f", [([1], 1)], timeout_s=30.0)
        )
        while len(contained(os.getpid())) <= IDLE:
            await asyncio.sleep(0.01)
        for pid in contained(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(EnvironmentFailure) as caught:
            await call
        assert caught.value.kind is FailureKind.SANDBOX_LOST
        report = await sandbox.run_tests("def f(x): return x", "f", [([1], 1)], timeout_s=1.0)
        assert report.is_success

    in_sandbox(use)


def test_a_container_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("marlaas.envs.container.REPLY_GRACE_S", 0.1)

    async def use(sandbox: Sandbox) -> None:
        for pid in contained(os.getpid()):
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EnvironmentFailure, match="no answer"):
            await sandbox.call("def f(): pass", "f", [[]], timeout_s=0.1)
        assert (await sandbox.call("def f(): return 1", "f", [[]], timeout_s=1.0)).values == {0: 1}

    in_sandbox(use)


def test_a_cancelled_call_ends_its_code_and_frees_its_place():
    async def use(sandbox: Sandbox) -> None:
        call = asyncio.create_task(sandbox.call("while True: pass", "f", [[]], timeout_s=30.0))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        report = await sandbox.call("def f(): return 1", "f", [[]], timeout_s=1.0)
        assert report.values == {0: 1}
        assert len(contained(os.getpid())) == IDLE

    in_sandbox(use, max_parallel=1)


def test_a_start_that_is_cancelled_leaves_no_process():
    async def main() -> None:
        for milliseconds in range(0, 60, 6):
            sandbox = Sandbox()
            starting = asyncio.create_task(sandbox.start())
            await asyncio.sleep(milliseconds / 1000)
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await sandbox.stop()
        assert [text for text in descendants(os.getpid()).values() if "bwrap" in text] == []
        assert contained(os.getpid()) == []

    asyncio.run(main())


def test_stopping_fails_calls_in_flight_and_leaves_no_process():
    async def use(sandbox: Sandbox) -> None:
        calls = [
            asyncio.create_task(sandbox.call("while True: pass", "f", [[]], timeout_s=30.0))
            for _ in range(4)
        ]
        await asyncio.sleep(0.3)
        await sandbox.stop()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(outcome, EnvironmentFailure) for outcome in outcomes)
        assert contained(os.getpid()) == []
        await sandbox.stop()

    in_sandbox(use)


def test_containers_die_with_the_process_that_made_them():
    script = """
import asyncio
from marlaas.envs.sandbox import Sandbox
async def main():
    sandbox = Sandbox()
    await sandbox.start()
    print("started", flush=True)
    await sandbox.call("while True: pass", "f", [[]], timeout_s=60.0)
asyncio.run(main())
"""
    path = os.pathsep.join([str(REPOSITORY), *sys.path])
    owner = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env={"PYTHONPATH": path}
    )
    assert owner.stdout is not None and owner.stdout.readline() == b"started\n"

    async def wait_for(is_done: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not is_done():
                await asyncio.sleep(0.02)

    asyncio.run(wait_for(lambda: len(contained(owner.pid)) > IDLE))
    inside = contained(owner.pid)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    asyncio.run(wait_for(lambda: not any(Path(f"/proc/{pid}/root").is_dir() for pid in inside)))


def test_calls_run_side_by_side_up_to_the_bound_and_never_mix():
    async def use(sandbox: Sandbox) -> int:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.005)
                ticks += 1

        ticking = asyncio.create_task(tick())
        code = "import time\ndef f(x):\n    time.sleep(0.02)\n    return x * x"
        verdicts: list[Verdict] = await asyncio.gather(
            *(sandbox.run_tests(code, "f", [([i], i * i)], timeout_s=5.0) for i in range(24))
        )
        ticking.cancel()
        assert all(verdict.is_success for verdict in verdicts)
        assert len(contained(os.getpid())) == 3 * IDLE
        return ticks

    assert in_sandbox(use, max_parallel=3) >= 10


def test_cpu_time_counts_processes_that_nobody_waited_for():
    orphan = """
import os, time
def f():
    if os.fork() == 0:
        if os.fork() == 0:
            while time.process_time() < 0.3: pass
            open("/tmp/done", "w").close()
        os._exit(0)
    while not os.path.exists("/tmp/done"): time.sleep(0.01)
"""

    async def use(sandbox: Sandbox) -> tuple[float, float, str]:
        before_s = sandbox.cpu_s()
        report = await sandbox.call(orphan, "f", [[]], timeout_s=5.0)
        return sandbox.cpu_s() - before_s, report.cpu_s, report.error

    total_s, call_s, error = in_sandbox(use, max_processes=4)
    assert error == "" and 0.25 <= call_s <= total_s < 3.0


def test_cpu_time_of_cut_calls_and_stopped_sandboxes_is_kept():
    async def main() -> None:
        sandbox = Sandbox()
        await sandbox.start()
        started_s = sandbox.cpu_s()
        assert started_s > 0
        call = asyncio.create_task(sandbox.call("while True: pass", "f", [[]], timeout_s=30.0))
        await asyncio.sleep(0.3)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await sandbox.stop()
        assert sandbox.cpu_s() >= started_s + 0.25

    asyncio.run(main())
