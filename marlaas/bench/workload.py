"""The jobs that benchmarks run: a third from each family, tokens and latency as documented.

Tokens and turns on `tiny` (measured, see `docs/benchmarks.md`): math 1 turn, code 1 turn, search 2
to 3 turns; every environment call waits a log-normal time.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from marlaas.config import RunSettings
from marlaas.launch import RunSummary, run_jobs
from marlaas.loop.controller import Mode
from marlaas.store.db import Store
from marlaas.types import (
    EvalRecord,
    Group,
    JobSpec,
    JobState,
    Latency,
    Notice,
    StepRecord,
    TenantId,
    WorkerStats,
)

FAMILIES = ("math", "code", "search")

MAX_TOKENS = {"math": 48, "code": 40, "search": 32}
"""Most tokens per turn: what the longest right answers of each family need, with room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One kind of job mix."""

    steps: int = 6
    prompts_per_step: int = 4
    group_size: int = 8
    latency: Latency = field(default_factory=lambda: Latency(median_s=0.5, sigma=1.0))
    max_staleness: int = 4
    eval_prompts: int = 0
    families: tuple[str, ...] = FAMILIES

    def job(self, number: int, **changes: object) -> JobSpec:
        """Return job `number` of the mix; families take turns, every job has its own tenant."""
        family = self.families[number % len(self.families)]
        fields: dict[str, object] = {
            "tenant": TenantId(f"tenant-{number:03d}"),
            "name": family,
            "env": {"family": family},
            "steps": self.steps,
            "prompts_per_step": self.prompts_per_step,
            "group_size": self.group_size,
            "max_staleness": self.max_staleness,
            "max_tokens": MAX_TOKENS[family],
            "latency": self.latency,
            "eval_prompts": self.eval_prompts,
            "seed": number,
            **changes,
        }
        return JobSpec(**fields)  # type: ignore[arg-type]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Let a benchmark be told its workload and how many jobs of it; `read_flags` reads them."""
    parser.add_argument("--jobs", type=int, nargs="+", default=None, metavar="N")
    parser.add_argument("--steps", type=int, default=None, help="optimizer steps of each job")
    parser.add_argument("--prompts", type=int, default=4, help="prompts a step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-staleness", type=int, default=4)
    parser.add_argument("--latency-median", type=float, default=0.5, metavar="SECONDS")
    parser.add_argument("--latency-sigma", type=float, default=1.0)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)


def read_flags(
    parser: argparse.ArgumentParser, argv: Sequence[str], num_jobs: Sequence[int]
) -> argparse.Namespace:
    """Return what a benchmark was told; without `--jobs` it is run with `num_jobs` each."""
    args = parser.parse_args(argv)
    args.jobs = args.jobs or ([8] if args.quick else list(num_jobs))
    args.steps = args.steps or (3 if args.quick else 24)
    return args


def workload_of(args: argparse.Namespace) -> Workload:
    """Return the workload that `read_flags` was told."""
    return Workload(
        steps=args.steps,
        prompts_per_step=args.prompts,
        group_size=args.group_size,
        latency=Latency(median_s=args.latency_median, sigma=args.latency_sigma),
        max_staleness=args.max_staleness,
        families=tuple(args.families),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """What a finished job left in the store."""

    spec: JobSpec
    steps: tuple[StepRecord, ...]
    evaluations: tuple[EvalRecord, ...]


class Silent:
    """A `JobObserver` that shows how many steps are done, and fails the benchmark with a job."""

    def __init__(self, label: str, num_steps: int) -> None:
        self._label = label
        self._num_steps = num_steps
        self._num_done = 0

    def job_state(self, spec: JobSpec, state: JobState, reason: str) -> None:
        if state.is_terminal and state is not JobState.DONE:
            raise RuntimeError(f"job {spec.job_id} ended as {state}: {reason}")

    def step_done(self, spec: JobSpec, record: StepRecord) -> None:
        self._num_done += 1
        line = f"{self._label}: step {self._num_done} of {self._num_steps}"
        print(line, end="\n" if self._num_done == self._num_steps else "\r", file=sys.stderr)

    def eval_done(self, spec: JobSpec, record: EvalRecord) -> None:
        pass

    def group_done(self, spec: JobSpec, group: Group) -> None:
        pass

    def notice(self, spec: JobSpec, notice: Notice) -> None:
        pass

    def workers_seen(self, stats: Sequence[WorkerStats]) -> None:
        pass


async def run_mix(
    specs: Sequence[JobSpec],
    *,
    label: str,
    base: str = "tiny",
    run: RunSettings | None = None,
    mode: Mode = Mode.ASYNC,
) -> tuple[RunSummary, list[JobResult]]:
    """Run jobs in a temporary run folder; return where the time went, and their records."""
    with _temporary_folder() as out:
        summary = await run_jobs(
            specs,
            base=base,
            out=out,
            run=run or RunSettings(),
            mode=mode,
            observer=Silent(label, sum(spec.steps for spec in specs)),
        )
        store = Store(out)
        try:
            results = [
                JobResult(
                    spec=spec,
                    steps=tuple(store.steps(spec.tenant, spec.name)),
                    evaluations=tuple(store.evaluations(spec.tenant, spec.name)),
                )
                for spec in specs
            ]
        finally:
            store.close()
    return summary, results


@contextmanager
def _temporary_folder():
    with tempfile.TemporaryDirectory(prefix="marlaas-bench-") as folder:
        yield Path(folder)
