"""One service on one folder that is killed as planned, and the client that stays.

start ─► ready ─► first step of this life ─► strike ─► (dead) ─► start ...      then to the end
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from marlaas import runtime
from marlaas.bench.crash_client import NUM_JOBS, TENANTS, Job, Listener, Submitter, Told, make_jobs
from marlaas.bench.crash_server import Boundary
from marlaas.bench.crash_strikes import Strike, Target
from marlaas.bench.processes import Process, descendants
from marlaas.config import ServeSettings
from marlaas.store.db import Store
from marlaas.types import Quotas, Role, Tenant, TenantId

READY_LIMIT_S = 120.0
PROGRESS_LIMIT_S = 120.0
DEATH_LIMIT_S = 30.0
"""How long a boundary is waited for before the server is killed where it is."""
END_LIMIT_S = 1800.0
SURVIVOR_LIMIT_S = 5.0
FEW_JOBS = 2
"""With so few jobs left, eight more are handed over."""


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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
