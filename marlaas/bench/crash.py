"""A service that is killed again and again: nothing lost, nothing doubled, nothing done anew.

    plan of strikes ─► [server up ─► recovered ─► strike ─► dead]* ─► jobs run to their end ─► audit
                          ▲ SIGKILL: the server at a moment or a durable boundary,
                            an engine worker, or a sandbox

Eight jobs of two tenants (half of them seeded) run on the real service while a client hands them
over and follows the event streams across every death. When all are used up, eight more follow. At
the end the store and what the client was told are compared with each other, and seeded jobs with
the same jobs on a service that nobody touched.

- *lost*: steps that the client was told of and that are not there, or are others, afterwards.
- *doubled*: steps that were told twice, and groups that two steps were trained on.
- *regenerated*: groups that were sampled again although their record was durable. (A group in
  flight is sampled again, and an evaluation in flight is made again: neither was durable.)
- *recovery*: from the death of the server to the first step that is committed after it.
- *survivors*: processes of a dead server that are there 5 s later.
"""

import argparse
import itertools
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from marlaas import runtime
from marlaas.bench.crash_server import Boundary, Moment
from marlaas.bench.machine import describe
from marlaas.bench.processes import Process, descendants
from marlaas.bench.workload import FAMILIES, MAX_TOKENS
from marlaas.client import Client
from marlaas.client.transport import read_events
from marlaas.config import ServeSettings
from marlaas.errors import MarlaasError
from marlaas.loop.usage import sampled_tokens, trained_tokens
from marlaas.store.codec import encode
from marlaas.store.db import GroupState, Store
from marlaas.types import EventKind, JobState, Quotas, Role, Tenant, TenantId

NUM_JOBS = 8
TENANTS = ("acme", "birch")

OPERATIONS = (
    "set_job_state",
    "open_group",
    "finish_group",
    "commit_step",
    "keep_adapter",
    "prune_adapters",
    "add_usage",
    "add_evaluation",
)
"""Operations of the store at which a running job becomes durable."""

FIRST_OPERATIONS = ("accept", "add_first_version")
"""Those at which it begins to be: they come while jobs are handed over."""

MAX_NUMBER = {"open_group": 12, "finish_group": 12, "commit_step": 4, "keep_adapter": 4}
"""Which call of an operation is struck, at most; of the others the first or second."""

READY_LIMIT_S = 120.0
PROGRESS_LIMIT_S = 120.0
DEATH_LIMIT_S = 30.0
"""How long a boundary is waited for before the server is killed where it is."""
END_LIMIT_S = 1800.0
SURVIVOR_LIMIT_S = 5.0
FEW_JOBS = 2
"""With so few jobs left, eight more are handed over."""


class Target(StrEnum):
    """What is killed."""

    BOUNDARY = "server at a boundary"
    SERVER = "server"
    WORKER = "engine worker"
    SANDBOX = "sandbox"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One kill."""

    target: Target
    boundary: Boundary | None = None
    is_early: bool = False
    """The server is armed before it starts: it may be struck while it recovers."""
    wait_s: float = 0.0
    """After the first step of the server's life; for the others than boundaries."""

    def __str__(self) -> str:
        if self.boundary is None:
            return self.target.value
        early = ", from the start" if self.is_early else ""
        boundary = self.boundary
        return f"{boundary.moment} {boundary.operation} number {boundary.number}{early}"


def draw_strikes(num_kills: int, seed: int) -> list[Strike]:
    """Return kills in order: six in ten at boundaries, each boundary once before any comes again;
    one in eight of a worker, one in twelve of a sandbox, the others of the server at a moment."""
    rng = runtime.rng("strikes", seed)
    num_sandboxes, num_workers = num_kills // 12, num_kills // 8
    num_boundaries = round(0.6 * num_kills)
    num_servers = num_kills - num_boundaries - num_workers - num_sandboxes
    points, first_points = _points(OPERATIONS, rng), _points(FIRST_OPERATIONS, rng)
    num_first = min(len(first_points), num_boundaries // 4)
    first = [
        _at(operation, moment, rng, is_early=True) for operation, moment in first_points[:num_first]
    ]
    rest = [
        _at(*points[number % len(points)], rng, is_early=rng.random() < 0.25)
        for number in range(num_boundaries - num_first)
    ]
    for target, count in (
        (Target.SERVER, num_servers),
        (Target.WORKER, num_workers),
        (Target.SANDBOX, num_sandboxes),
    ):
        rest += [Strike(target=target, wait_s=rng.uniform(0.0, 2.0)) for _ in range(count)]
    return [*first, *(rest[index] for index in rng.permutation(len(rest)))]


def _points(operations: Sequence[str], rng: np.random.Generator) -> list[tuple[str, Moment]]:
    """Return each operation with each moment, in an order that is drawn."""
    points = list(itertools.product(operations, Moment))
    return [points[index] for index in rng.permutation(len(points))]


def _at(operation: str, moment: Moment, rng: np.random.Generator, *, is_early: bool) -> Strike:
    number = 1 + int(rng.integers(MAX_NUMBER.get(operation, 2)))
    boundary = Boundary(operation=operation, moment=moment, number=number)
    return Strike(target=Target.BOUNDARY, boundary=boundary, is_early=is_early)


# ---------------------------------------------------------------------------------------------
# The command


def main(argv: Sequence[str]) -> int:
    args = _parse(argv)
    console = Console()
    strikes = draw_strikes(args.kills, args.seed)
    with _run_folder(args.keep) as folder:
        say("reference: the same jobs, undisturbed")
        whole = Trial(folder / "undisturbed", args).run([])
        say(f"disturbed: {len(strikes)} kills")
        struck = Trial(folder / "disturbed", args).run(strikes)
        findings = audit(struck, whole)
    _print(console, struck, whole, findings)
    result = {
        "bench": "crash",
        "machine": describe(),
        "kills": len(struck.deaths),
        "kills_by_target": dict(Counter(death.target.value for death in struck.deaths)),
        "seed": args.seed,
        "steps": sum(findings.steps.values()),
        "steps_lost": len(findings.lost),
        "steps_doubled": len(findings.doubled),
        "groups_regenerated": findings.num_regenerated,
        "seeded_identical": findings.is_seeded_identical,
        "seeded_compared": findings.num_compared,
        "other_faults": findings.faults,
        "survivors": struck.num_survivors,
        "recover_s_median": _median(struck.recoveries_s),
        "recover_s_max": max(struck.recoveries_s, default=None),
        "ready_s_median": _median(struck.ready_s),
        "worker_recover_s_max": max(struck.worker_recoveries_s, default=None),
        "undisturbed_s": whole.elapsed_s,
        "disturbed_s": struck.elapsed_s,
    }
    print(json.dumps(result))
    return 0 if findings.is_clean else 1


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="marlaas bench crash", description=__doc__)
    parser.add_argument("--kills", type=int, default=None, metavar="N", help="default: 50")
    parser.add_argument("--quick", action="store_true", help="a few minutes at most: 8 kills")
    parser.add_argument("--steps", type=int, default=None, help="optimizer steps of each job")
    parser.add_argument("--seed", type=int, default=0, help="draws the kills")
    parser.add_argument("--base", default="tiny")
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--keep", action="store_true", help="leave the run folders where they are")
    args = parser.parse_args(argv)
    args.kills = args.kills if args.kills is not None else (8 if args.quick else 50)
    args.steps = args.steps or (6 if args.quick else 20)
    return args


@contextmanager
def _run_folder(is_kept: bool) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="marlaas-crash-"))
    try:
        yield folder
    finally:
        if is_kept:
            say(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


# ---------------------------------------------------------------------------------------------
# A service that can be killed


class Server:
    """One service on one folder and port: (start -> ready -> dead)*."""

    def __init__(self, folder: Path, *, base: str, num_workers: int | None) -> None:
        folder.mkdir(parents=True)
        self.data = folder / "data"
        self.record_file = folder / "regenerated.jsonl"
        self._strike_file = folder / "strike.json"
        self._plan_file = folder / "plan.json"
        self._log_file = folder / "server.log"
        self.port = _free_port()
        settings = ServeSettings(
            base=base,
            folder=str(self.data),
            port=self.port,
            workers=num_workers,
            exact=True,
            log_level="warning",
        )
        plan = {
            "settings": asdict(settings),
            "strike_file": str(self._strike_file),
            "record_file": str(self.record_file),
        }
        self._plan_file.write_text(json.dumps(plan))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, boundary: Boundary | None = None) -> None:
        """Start a life; it ends at `boundary` if one is given."""
        self._strike_file.unlink(missing_ok=True)
        if boundary is not None:
            self.arm(boundary)
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "marlaas.bench.crash_server", str(self._plan_file)],
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the benchmark, which then ends it
            )

    def arm(self, boundary: Boundary) -> None:
        boundary.write(self._strike_file)

    def family(self) -> list[Process]:
        """Return the processes that the server has started, and theirs."""
        return descendants(self._process.pid) if self._process is not None else []

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def wait_for_death(self, limit_s: float) -> bool:
        """Return whether the server died by itself in time."""
        assert self._process is not None
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        if self._process.returncode != -signal.SIGKILL:
            raise RuntimeError(
                f"the server ended with status {self._process.returncode}:\n{self._last_words()}"
            )
        return True

    def stop(self) -> int:
        """End the service as an operator does; return its exit status."""
        if self._process is None:
            return 0
        self._process.terminate()
        return self._process.wait(60)

    def is_ready(self) -> bool:
        if not self.is_alive and self._process and self._process.returncode != -signal.SIGKILL:
            raise RuntimeError(f"the server does not start:\n{self._last_words()}")
        try:
            return httpx.get(f"{self.url}/readyz", timeout=2.0).is_success
        except httpx.TransportError:
            return False

    def _last_words(self) -> str:
        return self._log_file.read_text(errors="replace")[-4000:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---------------------------------------------------------------------------------------------
# A client that stays


@dataclass
class Told:
    """What the event streams said, of all tenants; several threads write."""

    steps: dict[tuple[str, str, int], Mapping[str, Any]] = field(default_factory=dict)
    """Tenant, job, step -> the event's data."""
    doubled: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    newest_step_s: float = 0.0
    """Wall time at which the newest step was committed."""
    ended: set[tuple[str, str]] = field(default_factory=set)
    """Tenant and name of jobs that are over."""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def hear(self, tenant: str, event: Mapping[str, Any]) -> None:
        """Take an event over."""
        with self.changed:
            if event["kind"] == EventKind.STEP.value:
                key = (tenant, event["job"], event["data"]["step"])
                if key in self.steps:
                    self.doubled.append("/".join(map(str, key)))
                self.steps[key] = event["data"]
                self.newest_step_s = max(self.newest_step_s, event["at_s"])
            elif event["kind"] == EventKind.STATE.value:
                state = JobState(event["data"]["state"])
                if state.is_terminal:
                    self.ended.add((tenant, event["job"]))
            self.changed.notify_all()

    def wait_for(self, is_so: Callable[[], bool], limit_s: float) -> bool:
        """Return whether something became so in time."""
        with self.changed:
            return self.changed.wait_for(is_so, limit_s)


class Listener(threading.Thread):
    """Follows one tenant's stream across deaths, behind the last event that it has."""

    def __init__(self, url: str, key: str, tenant: str, told: Told) -> None:
        super().__init__(name=f"listener {tenant}", daemon=True)
        self._url = url
        self._key = key
        self._tenant = tenant
        self._told = told
        self._seq = 0
        self.is_over = threading.Event()

    def run(self) -> None:
        while not self.is_over.is_set():
            with suppress(httpx.TransportError):
                self._listen()
            self.is_over.wait(0.1)

    def _listen(self) -> None:
        headers = {
            "X-API-Key": self._key,
            "Accept": "text/event-stream",
            "Last-Event-ID": str(self._seq),
        }
        with httpx.stream("GET", f"{self._url}/v1/events", headers=headers, timeout=30.0) as answer:
            if not answer.is_success:
                return
            for data in read_events(answer.iter_lines()):
                if data:
                    self._take(json.loads(data))

    def _take(self, event: Mapping[str, Any]) -> None:
        if event["seq"] != self._seq + 1:
            self._told.faults.append(
                f"{self._tenant}: event {event['seq']} came behind {self._seq}"
            )
        self._seq = event["seq"]
        self._told.hear(self._tenant, event)


class Submitter(threading.Thread):
    """Hands jobs over until the service has taken them, however often it dies meanwhile."""

    def __init__(self, url: str, keys: Mapping[str, str], jobs: "Sequence[Job]") -> None:
        super().__init__(name="submitter", daemon=True)
        self._clients = {tenant: Client(url, key) for tenant, key in keys.items()}
        self._jobs = jobs

    def run(self) -> None:
        for job in self._jobs:
            while True:
                try:
                    self._clients[job.tenant].jobs.create(**job.words)
                    break
                except MarlaasError as error:
                    if not error.code == "unreachable":
                        raise
                    time.sleep(0.2)
        for client in self._clients.values():
            client.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as it is handed over."""

    tenant: str
    words: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.words["name"]

    def __str__(self) -> str:
        return f"{self.tenant}/{self.name}"


def make_jobs(wave: int, steps: int) -> list[Job]:
    """Return eight jobs, in every wave the same but for their tenants; half of them seeded."""
    return [
        Job(
            tenant=f"{TENANTS[number % 2 ^ number // 2 % 2]}-{wave}",
            words={
                "name": f"job-{number}",
                "env": {"family": FAMILIES[number % len(FAMILIES)]},
                "steps": steps,
                "prompts_per_step": 2,
                "group_size": 4,
                "max_staleness": 2,
                "max_tokens": MAX_TOKENS[FAMILIES[number % len(FAMILIES)]],
                "latency": {"median_s": 0.05, "sigma": 1.0},
                "eval_every": 3,
                "eval_prompts": 8,
                "seeded": number % 2 == 0,
                "seed": number,
            },
        )
        for number in range(NUM_JOBS)
    ]


# ---------------------------------------------------------------------------------------------
# One trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A kill that happened."""

    target: Target
    at_s: float
    """Monotonic."""
    wall_s: float


class Trial:
    """One folder's history: `run`, then a store that nobody uses, and what was seen meanwhile."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.server = Server(folder, base=args.base, num_workers=args.workers)
        self.told = Told()
        self.jobs: list[Job] = []
        self.deaths: list[Death] = []
        self.recoveries_s: list[float] = []
        self.worker_recoveries_s: list[float] = []
        self.ready_s: list[float] = []
        self.num_survivors = 0
        self.elapsed_s = 0.0
        self._steps = args.steps
        self._rng = runtime.rng("victims", args.seed)
        self._keys: dict[str, str] = {}
        self._listeners: list[Listener] = []
        self._unrecovered: Death | None = None
        """The server's last death, until a step was committed after it."""
        self._left_behind: list[Process] = []

    def run(self, strikes: Sequence[Strike]) -> "Trial":
        """Go through the strikes, then let every job end."""
        began_s = runtime.now_s()
        self._keys = self._add_tenants(num_waves=1 + len(strikes))
        try:
            self._add_wave()
            for number, strike in enumerate(strikes, 1):
                what = self._strike(strike)
                say(f"  {number}/{len(strikes)}: {what}; {len(self.told.steps)} steps so far")
            self._to_the_end()
        finally:
            for listener in self._listeners:
                listener.is_over.set()
            if self.server.is_alive:
                self.server.kill()
        self.elapsed_s = runtime.now_s() - began_s
        return self

    # Strikes ----------------------------------------------------------------------------------

    def _strike(self, strike: Strike) -> str:
        """Kill once; return what was done."""
        is_early = strike.is_early and not self.server.is_alive
        if not self.server.is_alive:
            self._start(strike.boundary if is_early else None)
        if not is_early:
            self._await_recovery()
        match strike.target:
            case Target.BOUNDARY:
                return self._strike_boundary(strike, is_armed=is_early)
            case Target.SERVER:
                time.sleep(strike.wait_s)
                self._kill_server()
                return str(strike)
            case Target.WORKER:
                return self._strike_child(strike, "marlaas.workers.process")
            case Target.SANDBOX:
                return self._strike_child(strike, "bwrap")

    def _strike_boundary(self, strike: Strike, *, is_armed: bool) -> str:
        assert strike.boundary is not None
        if not is_armed:
            self.server.arm(strike.boundary)
        family = self.server.family()
        limit_s = runtime.now_s() + DEATH_LIMIT_S
        while not self.server.wait_for_death(0.05):
            family = self.server.family() or family
            self._keep_busy()
            if runtime.now_s() > limit_s:
                self._kill_server()
                return f"{strike}: did not come; killed where it was"
        self._note_death(Target.BOUNDARY, family)
        return str(strike)

    def _kill_server(self) -> None:
        family = self.server.family()
        self.server.kill()
        self._note_death(Target.SERVER, family)

    def _strike_child(self, strike: Strike, command: str) -> str:
        """Kill a random process below the server, and wait until every job has made a step."""
        time.sleep(strike.wait_s)
        limit_s = runtime.now_s() + DEATH_LIMIT_S
        while not (found := [one for one in self.server.family() if command in one.command]):
            self._keep_busy()
            if runtime.now_s() > limit_s:
                return f"{strike}: there is none"
            time.sleep(0.05)
        before = Counter((tenant, job) for tenant, job, _ in self.told.steps)
        victim = found[self._rng.integers(len(found))]
        with suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGKILL)
        began_s = runtime.now_s()
        self.deaths.append(_death(strike.target))
        if not self.told.wait_for(lambda: self._all_moved(before), PROGRESS_LIMIT_S):
            self.told.faults.append(f"after the death of a {strike.target} not every job went on")
        elif strike.target is Target.WORKER:
            self.worker_recoveries_s.append(runtime.now_s() - began_s)
        return str(strike)

    def _all_moved(self, before: Mapping[tuple[str, str], int]) -> bool:
        now = Counter((tenant, job) for tenant, job, _ in self.told.steps)
        return all(job in self.told.ended or now[job] > count for job, count in before.items())

    # Lives ------------------------------------------------------------------------------------

    def _start(self, boundary: Boundary | None) -> None:
        """Start a life; return once it is ready, or over."""
        began_s = runtime.now_s()
        self.server.start(boundary)
        while not self.server.is_ready():
            if not self.server.is_alive:
                return
            if runtime.now_s() - began_s > READY_LIMIT_S:
                raise RuntimeError("the server does not become ready")
            time.sleep(0.05)
        self.ready_s.append(runtime.now_s() - began_s)

    def _await_recovery(self) -> None:
        """Return once a step was committed in this life."""
        since_s = self._unrecovered.wall_s if self._unrecovered else 0.0
        limit_s = runtime.now_s() + PROGRESS_LIMIT_S
        while not self.told.wait_for(lambda: self.told.newest_step_s > since_s, 0.2):
            self._keep_busy()
            if runtime.now_s() > limit_s:
                raise RuntimeError("no step came after a restart")
        if self._unrecovered is not None:
            self.recoveries_s.append(runtime.now_s() - self._unrecovered.at_s)
            self._unrecovered = None
            self._count_survivors()

    def _note_death(self, target: Target, family: Sequence[Process]) -> None:
        self._unrecovered = _death(target)
        self.deaths.append(self._unrecovered)
        self._left_behind += family

    def _count_survivors(self) -> None:
        """Count what of earlier lives still runs, after a while to notice their end."""
        time.sleep(max(0.0, self.deaths[-1].at_s + SURVIVOR_LIMIT_S - runtime.now_s()))
        for one in self._left_behind:
            if one.is_alive:
                say(f"  survivor: {one}")
                self.num_survivors += 1
                os.kill(one.pid, signal.SIGKILL)
        self._left_behind = []

    def _to_the_end(self) -> None:
        if not self.server.is_alive:
            self._start(None)
        if self.deaths:
            self._await_recovery()
        if not self.told.wait_for(lambda: self._num_left() == 0, END_LIMIT_S):
            raise RuntimeError("not every job came to its end")
        status = self.server.stop()
        if status != 0:
            self.told.faults.append(f"the server ended with status {status} when told to stop")

    # Jobs -------------------------------------------------------------------------------------

    def _num_left(self) -> int:
        return len(self.jobs) - len(self.told.ended)

    def _keep_busy(self) -> None:
        """Hand over eight more jobs when most have ended: strikes are for a service at work."""
        if self._num_left() <= FEW_JOBS:
            self._add_wave()

    def _add_wave(self) -> None:
        jobs = make_jobs(len(self.jobs) // NUM_JOBS, self._steps)
        keys = {job.tenant: self._keys[job.tenant] for job in jobs}
        for tenant, key in keys.items():
            listener = Listener(self.server.url, key, tenant, self.told)
            listener.start()
            self._listeners.append(listener)
        self.jobs += jobs
        Submitter(self.server.url, keys, jobs).start()

    def _add_tenants(self, num_waves: int) -> dict[str, str]:
        """Add the tenants of all waves, while nobody uses the store; return their keys."""
        store = Store.open(self.server.data)
        try:
            keys: dict[str, str] = {}
            quotas = Quotas(requests_a_second=None)
            for tenant in (f"{name}-{wave}" for wave in range(num_waves) for name in TENANTS):
                store.add_tenant(Tenant(tenant_id=TenantId(tenant), quotas=quotas))
                _, keys[tenant] = store.add_key(TenantId(tenant), role=Role.TENANT)
            return keys
        finally:
            store.close()


def _death(target: Target) -> Death:
    return Death(target=target, at_s=runtime.now_s(), wall_s=runtime.wall_time_s())


# ---------------------------------------------------------------------------------------------
# The audit


@dataclass(kw_only=True)
class Findings:
    """What is wrong with a store that a trial has left."""

    steps: dict[str, int] = field(default_factory=dict)
    """Of every job, as tenant/name."""
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    num_regenerated: int = 0
    num_compared: int = 0
    """Seeded jobs that were compared with an undisturbed one."""
    unlike: list[str] = field(default_factory=list)
    """Those that differ."""

    @property
    def is_seeded_identical(self) -> bool:
        return self.num_compared > 0 and not self.unlike

    @property
    def is_clean(self) -> bool:
        bad = [*self.lost, *self.doubled, *self.faults, *self.unlike]
        return not bad and not self.num_regenerated


def audit(struck: Trial, whole: Trial) -> Findings:
    """Compare what a trial left with what its client was told, and with an undisturbed trial."""
    findings = Findings(
        doubled=list(struck.told.doubled), faults=[*whole.told.faults, *struck.told.faults]
    )
    with suppress(FileNotFoundError):
        findings.num_regenerated = len(struck.server.record_file.read_text().splitlines())
    store, other = Store.open(struck.server.data), Store.open(whole.server.data)
    try:
        curves = {job.name: _curve(other, job) for job in whole.jobs}
        for job in struck.jobs:
            _check_job(findings, store, struck.told, job)
            if job.words["seeded"]:
                findings.num_compared += 1
                if _curve(store, job) != curves[job.name]:
                    findings.unlike.append(str(job))
        for tenant in {job.tenant for job in struck.jobs}:
            _check_events(findings, store, TenantId(tenant))
    finally:
        store.close()
        other.close()
    return findings


def _check_job(findings: Findings, store: Store, told: Told, job: Job) -> None:
    tenant_id, name = TenantId(job.tenant), job.name
    stored = store.job(tenant_id, name)
    if stored.state is not JobState.DONE:
        findings.faults.append(f"{job} is {stored.state}: {stored.reason}")
    records = {record.step: record for record in store.steps(tenant_id, name)}
    findings.steps[str(job)] = len(records)
    if sorted(records) != list(range(1, job.words["steps"] + 1)):
        findings.faults.append(f"{job} has steps {sorted(records)}")
    for (tenant, other, step), data in told.steps.items():
        if (tenant, other) == (job.tenant, name) and (
            step not in records or records[step].elapsed_s != data["elapsed_s"]
        ):
            findings.lost.append(f"{job} step {step}")
    trained = Counter(index for record in records.values() for index in record.group_indices)
    findings.doubled += [f"{job} group {index}" for index, n in trained.items() if n > 1]
    _check_groups(findings, store, job, trained)


def _check_groups(findings: Findings, store: Store, job: Job, trained: Mapping[int, int]) -> None:
    """Check that each trained group is there, and that usage is what is stored, to the token."""
    tenant_id, name = TenantId(job.tenant), job.name
    rows = [(row, row.group) for row in store.groups(tenant_id, name) if row.group is not None]
    done = {row.index for row, _ in rows if row.step is not None}
    if done != set(trained):
        findings.faults.append(f"{job}: groups {sorted(done ^ set(trained))} and steps disagree")
    sampled = sum(sampled_tokens(group) for _, group in rows)
    dropped = {row.index: row.reason for row, _ in rows if row.state is not GroupState.TRAINED}
    tokens = trained_tokens([group for _, group in rows], dropped)
    usage = store.usage_by_job(tenant_id)[name]
    if (usage.sampled_tokens, usage.trained_tokens) != (sampled, tokens):
        findings.faults.append(f"{job}: usage {usage}, stored are {sampled} and {tokens} tokens")


def _check_events(findings: Findings, store: Store, tenant_id: TenantId) -> None:
    """Check that a tenant's history has no gap and each step once, in order."""
    events = store.events(tenant_id, limit=10**6)
    if [event.seq for event in events] != list(range(1, len(events) + 1)):
        findings.faults.append(f"{tenant_id}: events are not numbered 1, 2, 3, ...")
    steps: dict[str, list[object]] = {}
    for event in events:
        if event.kind is EventKind.STEP:
            steps.setdefault(event.job, []).append(event.data["step"])
    for job, numbers in steps.items():
        if numbers != list(range(1, len(numbers) + 1)):
            findings.faults.append(f"{tenant_id}/{job}: history has steps {numbers}")


def _curve(store: Store, job: Job) -> list[bytes]:
    """Return all that a seed decides of a job, as bytes: a metric may be NaN."""
    key = (TenantId(job.tenant), job.name)
    records = [*store.steps(*key), *store.evaluations(*key)]
    return [encode(replace(record, elapsed_s=0.0)) for record in records]


def _print(console: Console, struck: Trial, whole: Trial, findings: Findings) -> None:
    table = Table(title=f"{len(struck.deaths)} kills, {len(struck.jobs)} jobs")
    table.add_column("what")
    table.add_column("found", justify="right")
    table.add_column("expected", justify="right")
    for target, count in Counter(death.target for death in struck.deaths).items():
        table.add_row(f"killed: {target}", str(count), "")
    rows = {
        "steps": (sum(findings.steps.values()), ""),
        "steps lost": (len(findings.lost), "0"),
        "steps doubled": (len(findings.doubled), "0"),
        "groups regenerated": (findings.num_regenerated, "0"),
        "seeded jobs identical": (
            f"{findings.num_compared - len(findings.unlike)} of {findings.num_compared}",
            "all",
        ),
        "other faults": (len(findings.faults), "0"),
        "survivors": (struck.num_survivors, "0"),
        "server ready, median s": (_shown(struck.ready_s, statistics.median), ""),
        "first step after a kill, median s": (_shown(struck.recoveries_s, statistics.median), ""),
        "first step after a kill, max s": (_shown(struck.recoveries_s, max), "< 15"),
        "all jobs on after a worker's death, max s": (_shown(struck.worker_recoveries_s, max), ""),
        "whole run, s (undisturbed, one wave)": (
            f"{struck.elapsed_s:.0f} ({whole.elapsed_s:.0f})",
            "",
        ),
    }
    for name, (found, expected) in rows.items():
        table.add_row(name, str(found), expected)
    console.print(table)
    for fault in (*findings.lost, *findings.doubled, *findings.faults, *findings.unlike):
        console.print(fault)


def _shown(values: Sequence[float], of: Callable[[Sequence[float]], float]) -> str:
    return f"{of(values):.1f}" if values else "-"
