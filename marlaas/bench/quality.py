"""Does company or asynchrony change what a job learns?

Exact part: in seeded mode a job's curve alone and beside 31 others is compared record by record,
adapter hashes included: equal means bit for bit. Statistical part: jobs with staleness up to 4, all
at once, against the same jobs in lockstep (exact on-policy, one after another): held-out success
after the last step and area under the learning curve, paired by seed, with 95 % intervals.
"""

import argparse
import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from marlaas.bench.machine import describe
from marlaas.bench.workload import FAMILIES, JobResult, Workload, run_mix
from marlaas.loop.controller import Mode
from marlaas.store.codec import encode
from marlaas.types import JobSpec, Latency

COMPANY = 31
"""Other jobs beside the one that is compared in the exact part."""

T_975 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantiles of Student's t by degrees of freedom; beyond, the normal one is close."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Asynchronous in company minus lockstep alone, over paired seeds."""

    family: str
    num_pairs: int
    success_async: float
    success_lockstep: float
    success_difference: float
    success_interval: tuple[float, float]
    """95 % interval of the mean paired difference."""
    area_difference: float
    """Of mean training success over all steps, the area under the curve per step."""
    area_interval: tuple[float, float]
    success_before: float


def main(argv: Sequence[str]) -> int:
    args = _parse(argv)
    console = Console()
    result: dict[str, object] = {"bench": "quality", "machine": describe()}
    if "exact" in args.parts:
        exact = asyncio.run(_exact(args.exact_steps, args.company, args.base))
        console.print(_exact_table(exact))
        result["exact"] = exact
        result["exact_identical"] = all(exact.values())
    if "statistical" in args.parts:
        differences = asyncio.run(_statistical(args))
        console.print(_table(differences))
        result["differences"] = [asdict(difference) for difference in differences]
        result["pooled_success_difference"] = differences[-1].success_difference
        if args.out:
            _plot(differences, args.out)
    print(json.dumps(result))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="marlaas bench quality", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 seeds, few steps and prompts")
    parser.add_argument("--parts", nargs="+", default=["exact", "statistical"],
                        choices=["exact", "statistical"])  # fmt: skip
    parser.add_argument("--seeds", type=int, default=None, help="paired seeds per family")
    parser.add_argument("--steps", type=int, default=None, help="optimizer steps of each job")
    parser.add_argument("--eval-prompts", type=int, default=None, help="held-out prompts")
    parser.add_argument("--max-staleness", type=int, default=4)
    parser.add_argument("--exact-steps", type=int, default=None)
    parser.add_argument("--company", type=int, default=None, help="other jobs in the exact part")
    parser.add_argument("--latency-median", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--latency-sigma", type=float, default=1.0)
    parser.add_argument("--base", default="tiny")
    parser.add_argument("--out", type=Path, default=None, help="folder for the plot")
    args = parser.parse_args(argv)
    args.seeds = args.seeds or (2 if args.quick else 10)
    args.steps = args.steps or (4 if args.quick else 16)
    args.eval_prompts = args.eval_prompts or (64 if args.quick else 1000)
    args.exact_steps = args.exact_steps or (2 if args.quick else 4)
    args.company = args.company or (5 if args.quick else COMPANY)
    return args


# ---------------------------------------------------------------------------------------------
# Exact


async def _exact(steps: int, num_others: int, base: str) -> dict[str, bool]:
    """Return per family whether a seeded job alone equals the same job in company."""
    workload = Workload(steps=steps, latency=Latency(median_s=0.05, sigma=1.0))
    mix = [workload.job(number, is_seeded=True) for number in range(num_others + 1)]
    _, together = await run_mix(mix, label=f"{len(mix)} seeded jobs", base=base)
    same = {}
    for number, family in enumerate(FAMILIES):
        _, alone = await run_mix([mix[number]], label=f"{family} alone", base=base)
        same[family] = _curve(alone[0]) == _curve(together[number])
    return same


def _curve(result: JobResult) -> list[bytes]:
    """Return what of a job's records must not depend on time or company, to the bit.

    As bytes, since a metric may be NaN, which does not equal itself.
    """
    return [encode(replace(record, elapsed_s=0.0)) for record in result.steps]


def _exact_table(same: dict[str, bool]) -> Table:
    table = Table(title="seeded mode: alone against in company, every record and adapter hash")
    table.add_column("family")
    table.add_column("identical, bit for bit")
    for family, is_same in same.items():
        table.add_row(family, "yes" if is_same else "NO")
    return table


# ---------------------------------------------------------------------------------------------
# Statistical


async def _statistical(args: argparse.Namespace) -> list[Difference]:
    workload = Workload(
        steps=args.steps,
        max_staleness=args.max_staleness,
        eval_prompts=args.eval_prompts,
        latency=Latency(median_s=args.latency_median, sigma=args.latency_sigma),
    )
    specs = [workload.job(number) for number in range(len(FAMILIES) * args.seeds)]
    _, company = await run_mix(specs, label=f"{len(specs)} jobs at once", base=args.base)
    _, lockstep = await run_mix(
        specs, label=f"{len(specs)} jobs in lockstep", base=args.base, mode=Mode.LOCKSTEP
    )
    pairs = list(zip(company, lockstep, strict=True))
    rows = [
        _difference(family, [pair for pair in pairs if _family(pair[0].spec) == family])
        for family in FAMILIES
    ]
    return [*rows, _difference("pooled", pairs)]


def _family(spec: JobSpec) -> str:
    return str(spec.env["family"])


def _difference(family: str, pairs: Sequence[tuple[JobResult, JobResult]]) -> Difference:
    success = np.array([[_final(one) for one in pair] for pair in pairs])
    area = np.array([[_area(one) for one in pair] for pair in pairs])
    return Difference(
        family=family,
        num_pairs=len(pairs),
        success_async=float(success[:, 0].mean()),
        success_lockstep=float(success[:, 1].mean()),
        success_difference=float((success[:, 0] - success[:, 1]).mean()),
        success_interval=_interval(success[:, 0] - success[:, 1]),
        area_difference=float((area[:, 0] - area[:, 1]).mean()),
        area_interval=_interval(area[:, 0] - area[:, 1]),
        success_before=float(np.mean([pair[0].evaluations[0].success for pair in pairs])),
    )


def _final(result: JobResult) -> float:
    return max(result.evaluations, key=lambda record: record.version).success


def _area(result: JobResult) -> float:
    return float(np.mean([record.metrics["success"] for record in result.steps]))


def _interval(difference_n: np.ndarray) -> tuple[float, float]:
    """Return mean -+ t s / sqrt(n), Student's 95 % interval of the mean."""
    count = len(difference_n)
    if count < 2:
        return (math.nan, math.nan)
    quantile = T_975[count - 1] if count <= len(T_975) else 1.96 + 2.4 / (count - 1)
    half = quantile * float(difference_n.std(ddof=1)) / math.sqrt(count)
    mean = float(difference_n.mean())
    return (mean - half, mean + half)


def _table(differences: Sequence[Difference]) -> Table:
    table = Table(title="staleness up to 4 in company, minus lockstep alone (points of success)")
    for name in ("family", "pairs", "before", "async", "lockstep", "difference", "95 %", "area"):
        table.add_column(name, justify="left" if name == "family" else "right")
    for row in differences:
        low, high = row.success_interval
        table.add_row(
            row.family,
            str(row.num_pairs),
            f"{100 * row.success_before:.1f}",
            f"{100 * row.success_async:.1f}",
            f"{100 * row.success_lockstep:.1f}",
            f"{100 * row.success_difference:+.1f}",
            f"{100 * low:+.1f} .. {100 * high:+.1f}",
            f"{100 * row.area_difference:+.1f}",
        )
    return table


def _plot(differences: Sequence[Difference], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    out.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(figsize=(6, 3), layout="constrained")
    places = range(len(differences))
    middles = [100 * row.success_difference for row in differences]
    halves = [50 * (row.success_interval[1] - row.success_interval[0]) for row in differences]
    axes.errorbar(places, middles, yerr=halves, fmt="o", capsize=4)
    axes.axhline(0, color="gray", linewidth=1)
    axes.axhspan(-2, 2, color="gray", alpha=0.15, label="within 2 points")
    axes.set_xticks(places, [row.family for row in differences])
    axes.set_ylabel("success, async - lockstep, points")
    axes.legend()
    figure.savefig(out / "quality.png", dpi=120)
    pyplot.close(figure)
