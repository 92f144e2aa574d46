"""The pipeline benchmark's workload under virtual time: what scheduling alone makes of a makespan.

    recorded replies ─► controller, store, fair queue, engine host: all real
                                          │
    engine passes, server, sandboxes: CPU seconds as measured, on cores that all of them share

A makespan on a machine that does other work says little; this one is the same on any machine and
every time. It shows what an order of work costs or gains, and what a machine of another speed makes
of it, not how fast the code is: the times of passes are constants (`paced_engine.PassTimes`).

First one job of each family runs on real engines without latency, and leaves what the policies said
and how they were judged; `--recording FOLDER` keeps that, or takes it from there. Lower bounds are
those of `bench pipeline`.
"""

import argparse
import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from marlaas import runtime
from marlaas.bench.machine import describe
from marlaas.bench.paced_engine import (
    Cores,
    PacedStore,
    PacedWorker,
    PassTimes,
    Server,
    ServerTimes,
)
from marlaas.bench.workload import Silent, Workload, add_flags, read_flags, workload_of
from marlaas.config import RunSettings
from marlaas.envs.base import EnvStep
from marlaas.launch import engine_settings, run_jobs
from marlaas.loop.controller import Controller
from marlaas.store.db import Store
from marlaas.types import JobSpec, JobState, Latency, Message, Prompt, StepRecord, TenantId

NUM_JOBS = (8, 16, 32)
SANDBOX_S = 0.6e-3
"""CPU that one verdict on code takes in its sandbox."""

BEST_RATES = {"decode": 14_803.0, "prefill": 38_938.0, "train": 14_619.0, "score": 35_435.0}
"""Tokens a second of one worker at each kind of work alone; `docs/benchmarks.md`, pipeline."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One trajectory as it was: what the policy read and said turn by turn, and the verdict."""

    inputs: tuple[tuple[int, ...], ...]
    replies: tuple[tuple[int, ...], ...]
    reward: float


Recording = Mapping[str, Sequence[Sequence[Episode]]]
"""By family: the groups of one job, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One simulated run."""

    num_jobs: int
    makespan_s: float
    limit_fraction: float
    bound_fraction: float
    busy_share: float
    """Of the workers' time: they had work, waiting for a core included."""
    engine_share: float
    """Of the cores' time: engines computed."""
    server_share: float
    staleness_mean: float
    ends_s: dict[str, float]
    """By family: when its last job ended."""
    rows_mean: float
    """Sequences of a decode step."""
    tokens: dict[str, int]
    cpu_s: dict[str, float]


def main(argv: Sequence[str]) -> int:
    args = _parse(argv)
    workload = workload_of(args)
    recording = _recording(args.recording, workload)
    machine = Machine(workers=args.workers, speed=args.speed)
    alone_s = {
        family: simulate([workload.job(number)], recording, machine).makespan_s
        for number, family in enumerate(workload.families)
    }
    rows = []
    for num_jobs in args.jobs:
        specs = [_job(workload, number, args.tenants or num_jobs) for number in range(num_jobs)]
        longest_s = max(alone_s[str(spec.env["family"])] for spec in specs)
        rows.append(simulate(specs, recording, machine, alone_s=longest_s))
    _print(rows, alone_s)
    result = {
        "bench": "schedule",
        "machine": describe(),
        "workload": asdict(workload),
        "speed": args.speed,
        "alone_s": alone_s,
        "rows": [asdict(row) for row in rows],
    }
    print(json.dumps(result))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="marlaas bench schedule", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="8 jobs, 3 steps")
    add_flags(parser)
    parser.add_argument("--tenants", type=int, default=None, help="one for each job if not given")
    parser.add_argument("--workers", type=int, default=2, help="and as many cores")
    parser.add_argument("--speed", type=float, default=1.0, help="of the machine; 0.5: half of it")
    parser.add_argument("--recording", type=Path, default=None, help="a run folder")
    return read_flags(parser, argv, NUM_JOBS)


def _job(workload: Workload, number: int, num_tenants: int) -> JobSpec:
    """Return a job of the mix, its tenant one of so many."""
    spec = workload.job(number)
    tenant = TenantId(f"tenant-{number % num_tenants:03d}")
    return replace(spec, tenant=tenant, name=f"{spec.name}-{number}")


# ---------------------------------------------------------------------------------------------
# What policies said


def _recording(folder: Path | None, workload: Workload) -> Recording:
    if folder is not None:
        return record(folder, workload)
    with tempfile.TemporaryDirectory(prefix="marlaas-bench-") as temporary:
        return record(Path(temporary), workload)


def record(folder: Path, workload: Workload) -> Recording:
    """Return one job of each family as it went in a run folder; first run them, if it is empty."""
    quick = replace(workload, latency=Latency(median_s=0.02, sigma=1.0))
    specs = [quick.job(number) for number in range(len(workload.families))]
    if not folder.exists() or not any(folder.iterdir()):
        folder.mkdir(parents=True, exist_ok=True)
        observer = Silent("recording", len(specs) * workload.steps)
        asyncio.run(run_jobs(specs, base="tiny", out=folder, run=RunSettings(), observer=observer))
    store = Store(folder)
    try:
        return {spec.name: _episodes(store, spec) for spec in specs}
    finally:
        store.close()


def _episodes(store: Store, spec: JobSpec) -> list[list[Episode]]:
    rows = store.groups(spec.tenant, spec.name)
    groups = sorted((row.group for row in rows if row.group), key=lambda group: group.index)
    return [
        [
            Episode(
                inputs=tuple(
                    _ids(trajectory.tokens[start : turn.start])
                    for start, turn in zip(
                        (0, *(turn.end for turn in trajectory.turns)),
                        trajectory.turns,
                        strict=False,
                    )
                ),
                replies=tuple(_ids(trajectory.tokens[t.start : t.end]) for t in trajectory.turns),
                reward=trajectory.reward,
            )
            for trajectory in group.trajectories
        ]
        for group in groups
    ]


def _ids(tokens: np.ndarray) -> tuple[int, ...]:
    return tuple(tokens.tolist())


class Replay:
    """A recording as tokenizer, tasks and replies; names stand for texts.

    Jobs of a family all say the same; their tools take different times.
    """

    stop_token_ids: tuple[int, ...]

    def __init__(self, recording: Recording, cores: Cores) -> None:
        self.recording = recording
        self.cores = cores
        last = Counter(
            episode.replies[-1][-1]
            for groups in recording.values()
            for group in groups
            for episode in group
        )
        self.stop_token_ids = (last.most_common(1)[0][0],)

    def episode(self, family: str, group: int, index: int) -> Episode:
        """Return what trajectory `index` of a group is; a recording that is too short repeats."""
        groups = self.recording[family]
        episodes = groups[group % len(groups)]
        return episodes[index % len(episodes)]

    def reply(self, request_id: str) -> Sequence[int]:
        """Return the reply to a request of the rollout stage, by its name."""
        _, job, label, index, turn = request_id.split("/")
        family = job.partition("-")[0]
        group = int(label.removeprefix("train-").partition("@")[0])
        return self.episode(family, group, int(index)).replies[int(turn)]

    # As tokenizer

    def least_tokens(self, messages: Sequence[Message]) -> int:
        return 1

    def render_opening(self, messages: Sequence[Message]) -> Sequence[int]:
        return self._input(messages)

    def render_continuation(
        self, sampled_ids: Sequence[int], messages: Sequence[Message]
    ) -> Sequence[int]:
        return self._input(messages)

    def decode(self, ids: Sequence[int]) -> str:
        return ""

    def _input(self, messages: Sequence[Message]) -> Sequence[int]:
        family, group, index, turn = messages[-1].content.split("/")
        return self.episode(family, int(group), int(index)).inputs[int(turn)]


class ReplayFamily:
    """The tasks of one family as they were recorded."""

    def __init__(self, replay: Replay, name: str) -> None:
        self.name = name
        self._replay = replay
        groups = replay.recording[name]
        self.max_turns = max(len(one.replies) for group in groups for one in group)

    def prompt(self, index: int, *, seed: int, split: str) -> Prompt:
        """Return item `index`, named after its recording."""
        messages = (Message("user", f"{self.name}/{index}/0/0"),)
        return Prompt(index=index, messages=messages, reference={})

    def make(self, prompt: Prompt, num_envs: int) -> "list[ReplayEnv]":
        """Return fresh environments for one group."""
        return [ReplayEnv(self._replay, self.name, prompt.index, idx) for idx in range(num_envs)]

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    def cpu_s(self) -> float:
        return 0.0


class ReplayEnv:
    """One episode of `ReplayFamily`."""

    def __init__(self, replay: Replay, family: str, group: int, index: int) -> None:
        self._replay = replay
        self._place = (family, group, index)
        self._turn = 0

    async def step(self, reply: str, *, is_last: bool) -> EnvStep:
        """Answer as it was answered then."""
        family, group, index = self._place
        if family == "code":
            await self._replay.cores.work(SANDBOX_S)
        episode = self._replay.episode(family, group, index)
        self._turn += 1
        if is_last or self._turn == len(episode.replies):
            return EnvStep(
                reward=episode.reward, is_success=episode.reward > 0, metrics={"format": 1.0}
            )
        return EnvStep(messages=(Message("tool", f"{family}/{group}/{index}/{self._turn}"),))

    async def close(self) -> None:
        pass


# ---------------------------------------------------------------------------------------------
# Running


class Ends(Silent):
    """Notes when jobs end."""

    def __init__(self) -> None:
        super().__init__("", 0)
        self.ends_s: dict[str, float] = {}

    def job_state(self, spec: JobSpec, state: JobState, reason: str) -> None:
        super().job_state(spec, state, reason)
        if state.is_terminal:
            self.ends_s[spec.job_id] = runtime.now_s()

    def step_done(self, spec: JobSpec, record: StepRecord) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What jobs are simulated on."""

    workers: int = 2
    """And as many cores."""
    speed: float = 1.0
    passes: PassTimes = field(default_factory=PassTimes)
    server: ServerTimes = field(default_factory=ServerTimes)


def simulate(
    specs: Sequence[JobSpec],
    recording: Recording,
    machine: Machine | None = None,
    *,
    alone_s: float = 0.0,
) -> Row:
    """Run jobs to their end under virtual time; `alone_s` is what the slowest takes alone."""
    with tempfile.TemporaryDirectory(prefix="marlaas-bench-", dir=_memory()) as folder:
        simulation = Simulation(specs, recording, Path(folder), machine or Machine())
        return simulation.row(runtime.run_virtual(simulation.run()), alone_s)


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


class Simulation:
    """One run: constructed -> `run` -> `row`."""

    def __init__(
        self, specs: Sequence[JobSpec], recording: Recording, folder: Path, machine: Machine
    ) -> None:
        self._specs = specs
        self._machine = machine
        self._cores = Cores(machine.workers, speed=machine.speed)
        self._server = Server(self._cores, machine.server)
        self._replay = Replay(recording, self._cores)
        self._store = PacedStore(Store(folder), self._server)
        self._engines: list[PacedWorker] = []
        self._ends = Ends()

    async def run(self) -> float:
        """Run every job to its end; return the makespan."""
        for settings in engine_settings(RunSettings(num_workers=self._machine.workers), "tiny"):
            self._engines.append(
                PacedWorker(
                    settings, self._replay.reply, self._cores, self._server,
                    times=self._machine.passes,
                )
            )  # fmt: skip
        controller = Controller(
            self._store,
            self._engines,
            self._replay,
            make_family=lambda spec: ReplayFamily(self._replay, str(spec.env["family"])),
            observer=self._ends,
        )
        working = [asyncio.create_task(one.run()) for one in (*self._engines, self._server)]
        for spec in self._specs:
            await controller.submit(spec)
        began_s = runtime.now_s()
        running = asyncio.create_task(controller.run())
        await asyncio.wait([running, *working], return_when=asyncio.FIRST_COMPLETED)
        for task in working:
            if task.done():
                task.result()  # raises: they never end by themselves
            task.cancel()
        await running
        return runtime.now_s() - began_s

    def row(self, makespan_s: float, alone_s: float) -> Row:
        """Return what came of it."""
        specs, speed = self._specs, self._machine.speed
        cores_s = self._machine.workers * makespan_s
        stats = [engine.host.statistics() for engine in self._engines]
        tokens: Counter[str] = Counter()
        engine_cpu_s: Counter[str] = Counter()
        for one in stats:
            tokens.update(one.tokens)
            engine_cpu_s.update(one.cpu_s)
        sandbox_s = SANDBOX_S * sum(
            spec.group_size * spec.prompts_per_step * spec.steps
            for spec in specs
            if spec.env["family"] == "code"
        )
        best_s = sum(tokens[kind] / rate for kind, rate in BEST_RATES.items()) + sandbox_s
        bound_s = best_s / speed / self._machine.workers
        store = self._store.store
        steps = [step for spec in specs for step in store.steps(spec.tenant, spec.name)]
        store.close()
        ends_s: dict[str, float] = {}
        for spec in specs:
            family = str(spec.env["family"])
            ends_s[family] = max(ends_s.get(family, 0.0), self._ends.ends_s[spec.job_id])
        server_s = self._server.busy_s
        return Row(
            num_jobs=len(specs),
            makespan_s=makespan_s,
            limit_fraction=bound_s / makespan_s,
            bound_fraction=max(bound_s, alone_s) / makespan_s,
            busy_share=sum(engine.busy_s for engine in self._engines) / cores_s,
            engine_share=engine_cpu_s.total() / speed / cores_s,
            server_share=server_s / speed / cores_s,
            staleness_mean=sum(step.metrics["staleness_mean"] for step in steps) / len(steps),
            ends_s=ends_s,
            rows_mean=tokens["decode"] / max(1, sum(one.quanta.get("decode", 0) for one in stats)),
            tokens=dict(tokens),
            cpu_s={**engine_cpu_s, "sandbox": sandbox_s, "server": server_s},
        )


def _print(rows: Sequence[Row], alone_s: Mapping[str, float]) -> None:
    table = Table(
        "jobs", "makespan s", "limit fraction", "bound fraction", "busy", "engines computed",
        "server", "staleness", "rows decoded", title="simulated",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            str(row.num_jobs),
            f"{row.makespan_s:.1f}",
            f"{row.limit_fraction:.2f}",
            f"{row.bound_fraction:.2f}",
            f"{row.busy_share:.0%}",
            f"{row.engine_share:.0%}",
            f"{row.server_share:.0%}",
            f"{row.staleness_mean:.1f}",
            f"{row.rows_mean:.0f}",
        )
    console = Console()
    console.print(table)
    for family, seconds in alone_s.items():
        console.print(f"one {family} job alone: {seconds:.1f} s")
    for row in rows:
        ends = ", ".join(f"{family} {seconds:.0f} s" for family, seconds in row.ends_s.items())
        console.print(f"last of {row.num_jobs} jobs: {ends}")
