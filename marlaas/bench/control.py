"""The control plane alone: what a job, a group and an event cost when engines cost nothing.

    real controller, store (SQLite file), tokenizer  ──►  `fake_engine.FakeEngine`: fixed latencies

One process of its own for every number of active jobs. All of them run at once and share the same
engines, so the load (groups a second) is the same in every row and only the number of jobs differs:
CPU per group, lag of the event loop and cost of an admission should not grow with it.

- *submitted, started*: jobs a second that `submit` made durable, then jobs a second that went from
  queued to running.
- *events*: a second, in the measured time (steps of jobs, at this load); *events, most*: lines a
  second that the store takes when 32 writers do nothing else.
- *CPU per group*: of the whole process, from opening to the trained step, the fake engine included.
- *admission*: one turn of the fair queue alone, with all jobs ready.
- *lag*: how late a timer of 5 ms comes.

What is measured begins once there were as many steps as there are jobs. Memory of a job is the
slope between the least and the most jobs.
"""

import argparse
import asyncio
import json
import multiprocessing
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from marlaas import runtime
from marlaas.bench.fake_engine import CoinFamily, FakeEngine, FakeSpeed
from marlaas.bench.machine import describe
from marlaas.bench.onlooker import Onlooker
from marlaas.loop.controller import Controller, LoopSettings
from marlaas.loop.fairness import FairQueue
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.text.bases import ensure_base
from marlaas.text.chat import ChatTokenizer
from marlaas.types import (
    EventKind,
    Group,
    JobSpec,
    JobState,
    StepRecord,
    TenantId,
)

NUM_JOBS = (10, 100, 1000)
JOBS_PER_TENANT = 10
NUM_ENGINES = 2
NUM_WRITERS = 32
"""Tasks that submit jobs, or write events, at the same time."""

PROMPTS_PER_STEP, GROUP_SIZE = 2, 4
SPEED = FakeSpeed(turn_s=0.2, max_decoding=64)
"""Two such engines sample 640 sequences of 16 tokens a second: more than real ones on `tiny` do on
two cores."""

LAG_TIMER_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long and how much is measured."""

    base: str
    seconds: float
    """Measured time per number of jobs."""
    num_events: int
    num_admissions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One number of active jobs."""

    num_jobs: int
    submitted_per_s: float
    started_per_s: float
    start_lag_max_s: float
    """Of the event loop, while all jobs started at once."""
    groups_per_s: float
    steps_per_s: float
    events_per_s: float
    events_most_per_s: float
    cpu_ms_per_group: float
    cpu_share: float
    """CPU seconds of the process per second."""
    admission_us: float
    memory_mb: float
    """That all jobs together made the process grow by."""
    lag_p50_s: float
    lag_p99_s: float
    lag_max_s: float


def main(argv: Sequence[str]) -> int:
    args = _parse(argv)
    plan = Plan(
        base=args.base,
        seconds=args.seconds,
        num_events=1000 if args.quick else 5000,
        num_admissions=5000 if args.quick else 20_000,
    )
    rows = [_in_a_fresh_process(num_jobs, plan) for num_jobs in args.jobs]
    _print(Console(), rows)
    result = {
        "bench": "control",
        "machine": describe(),
        "engine": {"num_engines": NUM_ENGINES, **asdict(SPEED)},
        "rows": [asdict(row) for row in rows],
        "cpu_per_group_growth": rows[-1].cpu_ms_per_group / rows[0].cpu_ms_per_group,
        "admission_growth": rows[-1].admission_us / rows[0].admission_us,
        "memory_kb_per_job": _memory_kb_per_job(rows),
        "submitted_per_s": rows[-1].submitted_per_s,
        "events_most_per_s": rows[-1].events_most_per_s,
        "lag_p50_s": rows[-1].lag_p50_s,
        "lag_p99_s": rows[-1].lag_p99_s,
        "lag_max_s": rows[-1].lag_max_s,
    }
    print(json.dumps(result))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="marlaas bench control", description=__doc__)
    parser.add_argument("--jobs", type=int, nargs="+", default=list(NUM_JOBS), metavar="N")
    parser.add_argument("--quick", action="store_true", help="about a minute: 5 s a row")
    parser.add_argument("--seconds", type=float, default=None, help="measured time of a row")
    parser.add_argument("--base", default="tiny", help="whose tokenizer renders and decodes")
    args = parser.parse_args(argv)
    args.seconds = args.seconds or (5.0 if args.quick else 30.0)
    return args


def _in_a_fresh_process(num_jobs: int, plan: Plan) -> Row:
    """Measure one row where nothing was allocated before."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(measure, num_jobs, plan).result()


def measure(num_jobs: int, plan: Plan) -> Row:
    """Return one row, measured in this process."""
    with tempfile.TemporaryDirectory(prefix="marlaas-bench-") as folder:
        return asyncio.run(_measure(num_jobs, plan, Path(folder)))


async def _measure(num_jobs: int, plan: Plan, folder: Path) -> Row:
    tokenizer = ChatTokenizer.load(ensure_base(plan.base))
    store = AsyncStore(Store(folder))
    counts = Counts()
    engines = [
        FakeEngine(f"fake-{number}", vocab_size=tokenizer.vocab_size, speed=SPEED)
        for number in range(NUM_ENGINES)
    ]
    controller = Controller(
        store,
        engines,
        tokenizer,
        make_family=lambda spec: CoinFamily(),
        observer=counts,
        settings=LoopSettings(max_running_jobs=num_jobs),
    )
    specs = [_job(number) for number in range(num_jobs)]
    events_most_per_s = await _write_events(store, plan.num_events)
    runtime.settle_heap()  # as the server does
    rss_bytes, began_s = runtime.rss_bytes(), runtime.now_s()
    await _side_by_side([controller.submit(spec) for spec in specs])
    submitted_s = runtime.now_s() - began_s
    lag = LagMeter()
    async with asyncio.TaskGroup() as tasks:
        measuring = tasks.create_task(lag.run())
        serving = tasks.create_task(controller.serve())
        began_s = runtime.now_s()
        await counts.until_running(num_jobs)
        started_s = runtime.now_s() - began_s
        start_lag_s = lag.take()
        await counts.until_steps(num_jobs)
        lag.take()
        before = await Reading.take(store, counts, specs)
        await asyncio.sleep(plan.seconds)
        lags = lag.take()
        spent = (await Reading.take(store, counts, specs)).since(before)
        memory_bytes = runtime.rss_bytes() - rss_bytes
        measuring.cancel()
        controller.stop()
        await serving
    await store.close()
    p50, p99 = np.percentile(lags, [50, 99])
    return Row(
        num_jobs=num_jobs,
        submitted_per_s=num_jobs / submitted_s,
        started_per_s=num_jobs / started_s,
        start_lag_max_s=max(start_lag_s),
        groups_per_s=spent.num_groups / spent.at_s,
        steps_per_s=spent.num_steps / spent.at_s,
        events_per_s=spent.num_events / spent.at_s,
        events_most_per_s=events_most_per_s,
        cpu_ms_per_group=1000 * spent.cpu_s / spent.num_groups,
        cpu_share=spent.cpu_s / spent.at_s,
        admission_us=admission_us(num_jobs, plan.num_admissions),
        memory_mb=memory_bytes / 1e6,
        lag_p50_s=float(p50),
        lag_p99_s=float(p99),
        lag_max_s=max(lags),
    )


def _job(number: int) -> JobSpec:
    return JobSpec(
        tenant=TenantId(f"tenant-{number // JOBS_PER_TENANT:03d}"),
        name=f"job-{number:04d}",
        env={"family": "coin"},
        steps=1_000_000,
        prompts_per_step=PROMPTS_PER_STEP,
        group_size=GROUP_SIZE,
        eval_prompts=0,
        max_tokens=SPEED.num_tokens,
        seed=number,
    )


async def _side_by_side(calls: Sequence) -> None:
    """Await calls, `NUM_WRITERS` at a time."""
    waiting = iter(calls)

    async def write() -> None:
        for call in waiting:
            await call

    async with asyncio.TaskGroup() as tasks:
        for _ in range(NUM_WRITERS):
            tasks.create_task(write())


async def _write_events(store: AsyncStore, num_events: int) -> float:
    """Return how many lines of history a second the store takes."""
    began_s = runtime.now_s()
    await _side_by_side(
        [
            store.call(
                Store.add_event, TenantId(f"writer-{number % 10}"), "", EventKind.LOG, {"text": "x"}
            )
            for number in range(num_events)
        ]
    )
    return num_events / (runtime.now_s() - began_s)


def admission_us(num_jobs: int, num_admissions: int) -> float:
    """Return microseconds of one turn of the fair queue, with `num_jobs` jobs ready.

    A turn finds the job, charges it, and settles another cost; at one in four the job has no free
    slot, leaves, and comes back, as jobs do.
    """
    specs = [_job(number) for number in range(num_jobs)]
    costs = {spec.job_id: 0.5 + (number % 7) / 7 for number, spec in enumerate(specs)}
    by_id = {spec.job_id: spec for spec in specs}
    queue = FairQueue(costs.__getitem__, {})
    for spec in specs:
        queue.add(spec)
    began_s = runtime.cpu_s()
    for admission in range(num_admissions):
        job_id = queue.next()
        assert job_id is not None
        spec = by_id[job_id]
        queue.charge(spec, costs[job_id])
        queue.charge(spec, costs[job_id] * ((admission % 5) - 2) / 10)
        if admission % 4 == 0:
            queue.discard(spec)
            queue.add(spec)
    return (runtime.cpu_s() - began_s) / num_admissions * 1e6


# ---------------------------------------------------------------------------------------------
# What is counted


class Counts(Onlooker):
    """Counts, and fails the benchmark with a job."""

    def __init__(self) -> None:
        self.num_groups = 0
        self.num_steps = 0
        self.num_running = 0
        self._changed = asyncio.Event()

    async def until_running(self, num_jobs: int) -> None:
        """Return once so many jobs run."""
        while self.num_running < num_jobs:
            self._changed.clear()
            await self._changed.wait()

    async def until_steps(self, num_steps: int) -> None:
        """Return once so many steps were made."""
        while self.num_steps < num_steps:
            self._changed.clear()
            await self._changed.wait()

    def job_state(self, spec: JobSpec, state: JobState, reason: str) -> None:
        if state.is_terminal:
            raise RuntimeError(f"job {spec.job_id} ended as {state}: {reason}")
        self.num_running += state is JobState.RUNNING
        self._changed.set()

    def step_done(self, spec: JobSpec, record: StepRecord) -> None:
        self.num_steps += 1
        self._changed.set()

    def group_done(self, spec: JobSpec, group: Group) -> None:
        self.num_groups += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """All counters at one moment, or what they grew by."""

    at_s: float
    cpu_s: float
    num_groups: int
    num_steps: int
    num_events: int

    @classmethod
    async def take(cls, store: AsyncStore, counts: Counts, specs: Sequence[JobSpec]) -> "Reading":
        """Read every counter."""
        tenants = {spec.tenant for spec in specs}
        events = [await store.call(Store.last_event, tenant) for tenant in tenants]
        return cls(
            at_s=runtime.now_s(),
            cpu_s=runtime.cpu_s(),
            num_groups=counts.num_groups,
            num_steps=counts.num_steps,
            num_events=sum(events),
        )

    def since(self, before: "Reading") -> "Reading":
        """Return what happened since another reading."""
        return Reading(
            **{name: getattr(self, name) - getattr(before, name) for name in Reading.__slots__}
        )


class LagMeter:
    """Measures how late a timer comes, until it is cancelled."""

    def __init__(self) -> None:
        self._lags_s: list[float] = []

    async def run(self) -> None:
        while True:
            due_s = runtime.now_s() + LAG_TIMER_S
            await asyncio.sleep(LAG_TIMER_S)
            self._lags_s.append(max(0.0, runtime.now_s() - due_s))

    def take(self) -> list[float]:
        """Return what was measured since the last time."""
        taken, self._lags_s = self._lags_s, []
        return taken or [0.0]


# ---------------------------------------------------------------------------------------------


def _memory_kb_per_job(rows: Sequence[Row]) -> float | None:
    """Return the slope of memory over jobs; None where there is one row."""
    least, most = rows[0], rows[-1]
    if least.num_jobs == most.num_jobs:
        return None
    return (most.memory_mb - least.memory_mb) * 1000 / (most.num_jobs - least.num_jobs)


SHOWN: Mapping[str, Callable[[Row], str]] = {
    "jobs submitted / s": lambda row: f"{row.submitted_per_s:.0f}",
    "jobs started / s": lambda row: f"{row.started_per_s:.0f}",
    "groups / s (load)": lambda row: f"{row.groups_per_s:.0f}",
    "steps / s (load)": lambda row: f"{row.steps_per_s:.0f}",
    "events / s (load)": lambda row: f"{row.events_per_s:.0f}",
    "events / s, most": lambda row: f"{row.events_most_per_s:.0f}",
    "CPU ms / group": lambda row: f"{row.cpu_ms_per_group:.2f}",
    "CPU share of a core": lambda row: f"{row.cpu_share:.0%}",
    "admission, us": lambda row: f"{row.admission_us:.1f}",
    "memory, MB": lambda row: f"{row.memory_mb:.1f}",
    "lag p50, ms": lambda row: f"{1000 * row.lag_p50_s:.1f}",
    "lag p99, ms": lambda row: f"{1000 * row.lag_p99_s:.1f}",
    "lag max, ms": lambda row: f"{1000 * row.lag_max_s:.1f}",
    "lag max while all start, ms": lambda row: f"{1000 * row.start_lag_max_s:.0f}",
}


def _print(console: Console, rows: Sequence[Row]) -> None:
    table = Table(
        title=f"{NUM_ENGINES} fake engines, {SPEED.max_decoding} sequences each, "
        f"{SPEED.turn_s} s a turn",
        caption="the same load in every row; CPU per group and admission should be flat",
    )
    table.add_column("active jobs")
    for row in rows:
        table.add_column(str(row.num_jobs), justify="right")
    for name, shown in SHOWN.items():
        table.add_row(name, *(shown(row) for row in rows))
    console.print(table)
    if (slope_kb := _memory_kb_per_job(rows)) is not None:
        console.print(f"memory of one more job: {slope_kb:.0f} kB")
