"""Many jobs at once against one after another: makespan, busy share, and how near the limit.

    makespan_ratio  = measured makespan / sum of the jobs' lockstep times
    limit_fraction  = lower bound of the makespan / measured makespan
    lower bound     = (sum over kinds of tokens / best rate + sandbox CPU seconds) / cores

The best rate of each kind of work is the better of a calibration on the same workers (full batches
of one adapter) and of the run itself. Lockstep samples a step's groups, waits for all of them,
trains, publishes, and begins again, one job after another on the same engine; its times add up, so
one job of each family is measured over some steps, and the sum is formed from the time of a step.

A makespan is hardly shorter than what its slowest kind of job takes alone, which waits for tools
while nobody else needs the machine. `bound_fraction` is the larger of both bounds over the measured
makespan: where work is short against latency, `limit_fraction` cannot come near 1, and this can.
"""

import argparse
import asyncio
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from marlaas.bench.machine import describe
from marlaas.bench.rates import KINDS, Shape, measure_rates
from marlaas.bench.workload import JobResult, Workload, add_flags, read_flags, run_mix, workload_of
from marlaas.config import Placement, RunSettings
from marlaas.launch import RunSummary, engine_settings, started
from marlaas.loop.controller import Mode

NUM_JOBS = (1, 2, 4, 8, 16, 32)
LOCKSTEP_WORKERS = (1, 2)
"""Lockstep has one job to run: one worker with all cores as threads, or one worker a core."""

TRIAL_STEPS = 4
"""Steps on which the faster form of lockstep is chosen."""

LOCKSTEP_STEPS = 12
"""Most steps of a lockstep job that are measured; its steps are alike, and wait for each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One number of jobs."""

    num_jobs: int
    makespan_s: float
    lockstep_s: float
    makespan_ratio: float
    limit_fraction: float
    bound_fraction: float
    busy_share: float
    """Mean over workers of the time in which they did engine work."""
    busy_by_kind: dict[str, float]
    staleness_mean: float
    staleness_max: float
    tokens: dict[str, int]
    sandbox_cpu_s: float
    server_cpu_s: float


@dataclass(frozen=True, slots=True)
class Times:
    """What a row is compared with."""

    lockstep_s: float
    """Of all its jobs, one after another."""
    longest_s: float
    """Of its longest job, alone but asynchronous."""


def main(argv: Sequence[str]) -> int:
    args = _parse(argv)
    console = Console()
    workload = workload_of(args)
    rates = asyncio.run(_calibrate(args))
    alone_s = asyncio.run(_alone(workload, args))
    lockstep_s = {} if args.no_lockstep else asyncio.run(_lockstep(workload, args.base))
    rows = []
    for num_jobs in args.jobs:
        specs = [workload.job(number) for number in range(num_jobs)]
        summary, results = asyncio.run(
            run_mix(
                specs,
                label=f"{num_jobs} jobs",
                base=args.base,
                run=RunSettings(num_workers=args.workers, placement=Placement(args.placement)),
            )
        )
        total_s = sum(lockstep_s.get(str(spec.env["family"]), float("nan")) for spec in specs)
        longest_s = max(alone_s[str(spec.env["family"])] for spec in specs)
        rows.append(_row(num_jobs, summary, results, rates, Times(total_s, longest_s)))
    _print(console, workload, rows, rates=rates, lockstep_s=lockstep_s, alone_s=alone_s)
    result = {
        "bench": "pipeline",
        "machine": describe(),
        "workload": asdict(workload),
        "base": args.base,
        "placement": args.placement,
        "best_rates": rates,
        "lockstep_s": lockstep_s,
        "alone_s": alone_s,
        "rows": [asdict(row) for row in rows],
        "makespan_ratio": rows[-1].makespan_ratio,
        "limit_fraction": rows[-1].limit_fraction,
        "bound_fraction": rows[-1].bound_fraction,
        "busy_share": rows[-1].busy_share,
    }
    if args.out:
        _plot(rows, args.out)
    print(json.dumps(result))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="marlaas bench pipeline", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="about a minute: 8 jobs, 3 steps")
    add_flags(parser)
    parser.add_argument("--base", default="tiny")
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--placement", default="replicated", choices=[p.value for p in Placement])
    parser.add_argument("--no-lockstep", action="store_true", help="measure the jobs at once only")
    parser.add_argument("--out", type=Path, default=None, help="folder for the plot")
    return read_flags(parser, argv, NUM_JOBS)


async def _calibrate(args: argparse.Namespace) -> dict[str, float]:
    """Return tokens per second of one worker by kind, all workers of the placement at work."""
    settings = engine_settings(RunSettings(num_workers=args.workers), args.base)
    async with started(settings) as workers:
        return await measure_rates(workers, Shape())


async def _alone(workload: Workload, args: argparse.Namespace) -> dict[str, float]:
    """Return the seconds that one job of each family takes with the machine to itself."""
    alone_s = {}
    for number, family in enumerate(workload.families):
        summary, _ = await run_mix(
            [workload.job(number)],
            label=f"{family} alone",
            base=args.base,
            run=RunSettings(num_workers=args.workers, placement=Placement(args.placement)),
        )
        alone_s[family] = summary.makespan_s
    return alone_s


async def _lockstep(workload: Workload, base: str) -> dict[str, float]:
    """Return the seconds that one job of each family takes in lockstep, in its faster form.

    Which form is faster is decided on a few steps of the first family.
    """
    num_steps = min(LOCKSTEP_STEPS, workload.steps)

    async def seconds(number: int, num_workers: int, steps: int = num_steps) -> float:
        summary, _ = await run_mix(
            [workload.job(number, steps=steps)],
            label=f"lockstep {workload.families[number]}, {num_workers} worker(s)",
            base=base,
            run=RunSettings(num_workers=num_workers),
            mode=Mode.LOCKSTEP,
        )
        return summary.makespan_s

    trial = min(TRIAL_STEPS, workload.steps)
    forms = {number: await seconds(0, number, trial) for number in LOCKSTEP_WORKERS}
    fastest = min(forms, key=lambda num_workers: forms[num_workers])
    return {
        family: await seconds(number, fastest) * workload.steps / num_steps
        for number, family in enumerate(workload.families)
    }


def _row(
    num_jobs: int,
    summary: RunSummary,
    results: Sequence[JobResult],
    rates: dict[str, float],
    times: Times,
) -> Row:
    workers, makespan_s = summary.workers, summary.makespan_s
    tokens: Counter[str] = Counter()
    busy_s: Counter[str] = Counter()
    for worker in workers:
        tokens.update(worker.tokens)
        busy_s.update(worker.busy_s)
    best = {kind: max(rates[kind], tokens[kind] / max(busy_s[kind], 1e-9)) for kind in KINDS}
    cores = len(os.sched_getaffinity(0))
    work_s = sum(tokens[kind] / best[kind] for kind in KINDS) + summary.sandbox_cpu_s
    steps = [record for result in results for record in result.steps]
    engine_s = len(workers) * makespan_s
    return Row(
        num_jobs=num_jobs,
        makespan_s=makespan_s,
        lockstep_s=times.lockstep_s,
        makespan_ratio=makespan_s / times.lockstep_s,
        limit_fraction=work_s / cores / makespan_s,
        bound_fraction=max(work_s / cores, times.longest_s) / makespan_s,
        busy_share=sum(busy_s.values()) / engine_s,
        busy_by_kind={kind: seconds / engine_s for kind, seconds in busy_s.items()},
        staleness_mean=sum(s.metrics.get("staleness_mean", 0.0) for s in steps) / len(steps),
        staleness_max=max(s.metrics.get("staleness_max", 0.0) for s in steps),
        tokens=dict(tokens),
        sandbox_cpu_s=summary.sandbox_cpu_s,
        server_cpu_s=summary.server_cpu_s,
    )


def _print(
    console: Console,
    workload: Workload,
    rows: Sequence[Row],
    *,
    rates: dict[str, float],
    lockstep_s: dict[str, float],
    alone_s: dict[str, float],
) -> None:
    latency = workload.latency
    table = Table(
        title=f"{workload.prompts_per_step} prompts x group {workload.group_size} a step, "
        f"{workload.steps} steps, latency median {latency.median_s} s, sigma {latency.sigma}",
        caption="lockstep is additive: one job of each family measured over at most "
        f"{LOCKSTEP_STEPS} steps, then summed",
    )
    for name in (
        "jobs",
        "makespan s",
        "lockstep s",
        "ratio",
        "limit fraction",
        "bound fraction",
        "busy",
        "staleness",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row.num_jobs),
            f"{row.makespan_s:.1f}",
            f"{row.lockstep_s:.1f}",
            f"{row.makespan_ratio:.3f}",
            f"{row.limit_fraction:.2f}",
            f"{row.bound_fraction:.2f}",
            f"{row.busy_share:.0%}",
            f"{row.staleness_mean:.1f} (max {row.staleness_max:.0f})",
        )
    console.print(table)
    console.print(
        "best rates of one worker, tokens/s: "
        + ", ".join(f"{kind} {rate:.0f}" for kind, rate in rates.items())
    )
    for family, seconds in alone_s.items():
        console.print(f"one {family} job alone, asynchronous: {seconds:.1f} s")
    for family, seconds in lockstep_s.items():
        console.print(f"lockstep, one {family} job alone: {seconds:.1f} s")


def _plot(rows: Sequence[Row], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    out.mkdir(parents=True, exist_ok=True)
    jobs = [row.num_jobs for row in rows]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    left.plot(jobs, [row.lockstep_s for row in rows], "o-", label="one after another, lockstep")
    left.plot(jobs, [row.makespan_s for row in rows], "o-", label="MARLaaS, all at once")
    left.set(xscale="log", yscale="log", xlabel="jobs", ylabel="makespan, s")
    right.plot(jobs, [row.busy_share for row in rows], "o-", label="workers busy")
    right.plot(jobs, [row.limit_fraction for row in rows], "o-", label="fraction of the limit")
    right.plot(jobs, [row.bound_fraction for row in rows], "o-", label="fraction of the bound")
    right.set(xscale="log", xlabel="jobs", ylim=(0, 1.05))
    for axes in (left, right):
        axes.set_xticks(jobs, [str(number) for number in jobs], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(out / "pipeline.png", dpi=120)
    pyplot.close(figure)
