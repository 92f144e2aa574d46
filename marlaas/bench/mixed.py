"""What it costs that many adapters share a batch, and what fusing their updates gains.

Two questions, each on `tiny` and on the shape of SmolLM2-135M with random weights (speed does not
depend on the values of weights):

- decode: a batch of sequences under 32 adapters of ranks 4, 8, 16 and 32, over the same batch under
  one adapter (the mean time of one of each rank);
- update: `forward_backward` and `optim_step` of 32 such policies in fused passes, over one policy
  after the other, at 16, 64 and 128 tokens a policy.

Both sides of a ratio take turns, so that whatever else the machine does meets both; times are
medians, of CPU time with one thread and of wall time with more. The last line of the output is one
JSON object; a ratio in it is the smaller one of the two bases.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from marlaas.bench import machine
from marlaas.runtime import rng

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # Before torch is loaded.

import numpy as np
import torch

from marlaas.bench.synthetic import clock_s, load, random_data, random_slot, time_s
from marlaas.engine.generator import BatchGenerator
from marlaas.engine.trainer import LoraTrainer
from marlaas.engine.types import SequenceRequest
from marlaas.model.bank import Slot
from marlaas.model.base import BaseModel
from marlaas.types import AdamParams, AdapterSpec, Objective, SamplingParams

MIXED_RANKS = (4, 8, 16, 32)

PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured."""

    num_adapters: int = 32
    batch_sizes: tuple[int, ...] = (32, 64)
    """Sequences in the decode batch."""
    policy_tokens: tuple[int, ...] = (16, 64, 128)
    """Tokens of one policy's update."""
    decode_rounds: int = 9
    decode_steps: int = 8
    """Steps of one side before the other's turn."""
    update_rounds: int = 5
    budget_tokens: int = 512
    """Tokens of one fused pass."""


PLANS: Mapping[str, Plan] = {
    "tiny": Plan(decode_rounds=21, decode_steps=20, update_rounds=9),
    "smollm2-135m": Plan(decode_rounds=5, decode_steps=4, update_rounds=3),
}
QUICK_PLANS: Mapping[str, Plan] = {
    "tiny": replace(PLANS["tiny"], batch_sizes=(32,), decode_rounds=11, update_rounds=3),
    "smollm2-135m": replace(
        PLANS["smollm2-135m"], batch_sizes=(32,), update_rounds=2, policy_tokens=(16,)
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One ratio: how long each side took."""

    name: str
    together_s: float
    """Median time with 32 adapters: of a decode step, of the update of all policies."""
    apart_s: float
    """Median time under one adapter, or of one policy after the other."""
    tokens: int
    """Tokens that each side processed in that time."""
    ratios: tuple[float, ...]
    """`apart_s / together_s` of each round."""

    @property
    def ratio(self) -> float:
        """How many times as fast the 32 together are."""
        return statistics.median(self.ratios)


# ---------------------------------------------------------------------------------------------
# Decode


def measure_decode(base: BaseModel, plan: Plan, batch_size: int) -> list[Measured]:
    """Measure decode steps of one batch size under many adapters and under one."""
    mixed = [MIXED_RANKS[idx % len(MIXED_RANKS)] for idx in range(plan.num_adapters)]
    cases = {
        "mixed ranks": (mixed, MIXED_RANKS),
        "all of rank 8": ([8] * plan.num_adapters, (8,)),
    }
    measured = []
    for name, (ranks_together, ranks_apart) in cases.items():
        together_slots = [random_slot(base, rank, idx) for idx, rank in enumerate(ranks_together)]
        apart_slots = [random_slot(base, rank, 1000 + rank) for rank in ranks_apart]
        together = _decoding(base, plan, batch_size, together_slots)
        apart = [_decoding(base, plan, batch_size, [slot]) for slot in apart_slots]
        rounds = [
            (_steps_s(together, plan), statistics.mean(_steps_s(one, plan) for one in apart))
            for _ in range(plan.decode_rounds)
        ]
        measured.append(_as_measured(f"decode {batch_size} rows, {name}", rounds, batch_size))
        for slot in [*together_slots, *apart_slots]:
            base.bank.free(slot)
    return measured


def _decoding(
    base: BaseModel, plan: Plan, batch_size: int, slots: Sequence[Slot]
) -> BatchGenerator:
    """Return a generator whose batch of sequences, spread over the slots, has begun to decode."""
    max_tokens = plan.decode_rounds * plan.decode_steps + 16
    longest = PROMPT_TOKENS + max_tokens
    generator = BatchGenerator(
        base,
        kv_capacity_tokens=2 * batch_size * (longest + 64),
        max_context=longest,
        max_batch=batch_size,
    )
    for idx in range(batch_size):
        tokens = rng("prompt", idx).integers(base.vocab_size, size=PROMPT_TOKENS)
        generator.submit(
            SequenceRequest(
                request_id=str(idx),
                sequence_id=str(idx),
                slot=slots[idx % len(slots)],
                tokens=tokens.astype(np.int32),
                sampling=SamplingParams(max_tokens=max_tokens, seed=idx),
            )
        )
    while generator.num_waiting:
        generator.step()
    for _ in range(3):
        generator.step()
    return generator


def _steps_s(generator: BatchGenerator, plan: Plan) -> float:
    """Return the median time of the next steps."""
    times = []
    for _ in range(plan.decode_steps):
        started = clock_s()
        _, work = generator.step()
        times.append(clock_s() - started)
        assert work is not None
        assert work.kind == "decode"
    return statistics.median(times)


# ---------------------------------------------------------------------------------------------
# Updates


def measure_update(base: BaseModel, plan: Plan, num_tokens: int) -> Measured:
    """Measure the update of all policies in fused passes, and of one policy after the other."""
    trainer = LoraTrainer(base, budget_tokens=plan.budget_tokens)
    slots, data = {}, {}
    for key in range(plan.num_adapters):
        spec = AdapterSpec(rank=MIXED_RANKS[key % len(MIXED_RANKS)], seed=key)
        trainer.create(key, spec)
        slots[key] = random_slot(base, spec.rank, key)
        data[key] = random_data(base, num_tokens, key)
    keys = list(slots)

    def update(members: Sequence[int]) -> None:
        for key in members:
            trainer.submit_forward_backward(
                key, slots[key], data[key], Objective(name="dppo_tis"), ticket=key
            )
        while trainer.has_work:
            trainer.step()
        for key in members:
            trainer.optim_step(key, AdamParams(lr=1e-6))
            base.bank.write(slots[key], trainer.weights(key))

    update(keys)
    update(keys[:1])
    rounds = [
        (time_s(lambda: update(keys)), time_s(lambda: [update([key]) for key in keys]))
        for _ in range(plan.update_rounds)
    ]
    for slot in slots.values():
        base.bank.free(slot)
    name = f"update, {num_tokens} tokens a policy"
    return _as_measured(name, rounds, plan.num_adapters * num_tokens)


# ---------------------------------------------------------------------------------------------
# All of it


def measure(base: BaseModel, plan: Plan, report: Callable[[str], None]) -> list[Measured]:
    """Measure everything of one base, reporting row by row."""
    rows: list[Measured] = []
    for batch_size in plan.batch_sizes:
        rows += measure_decode(base, plan, batch_size)
        for row in rows[-2:]:
            report(_line(base.name, row))
    for num_tokens in plan.policy_tokens:
        rows.append(measure_update(base, plan, num_tokens))
        report(_line(base.name, rows[-1]))
    return rows


def summarize(rows: Mapping[str, Sequence[Measured]]) -> dict[str, float]:
    """Return the ratios to hold a build to: of each kind the smallest over the bases.

    The decode ratio is that of one row per adapter at rank 8; that of mixed ranks stands beside it.
    """
    found: dict[str, list[float]] = {}
    for measured in rows.values():
        for row in measured:
            found.setdefault(row.name, []).append(row.ratio)
    summary = {}
    for name, ratios in found.items():
        if name.startswith("update"):
            summary[f"fused_speedup_{name.split()[1]}_tokens"] = min(ratios)
        elif name == "decode 32 rows, mixed ranks":
            summary["decode_ratio_32_mixed_ranks"] = min(ratios)
        elif name == "decode 32 rows, all of rank 8":
            summary["decode_ratio_32_to_1"] = min(ratios)
    return {name: round(ratio, 3) for name, ratio in summary.items()}


def write_report(folder: Path, result: Mapping, rows: Mapping[str, Sequence[Measured]]) -> None:
    """Write `mixed.json`, the table `mixed.md` and the plot `mixed.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mixed.json").write_text(json.dumps(result, indent=2) + "\n")
    lines = [
        machine.as_markdown(result["machine"], result["probe"]),
        f"{result['num_adapters']} adapters on attention and MLP, {result['num_threads']} thread, "
        f"medians of {result['clock']}.",
        "",
        "| base | what | 32 together | one | ratio (quartiles) | tokens/s together |",
        "|---|---|---|---|---|---|",
    ]
    for base, measured in rows.items():
        for row in measured:
            low, high = _quartiles(row)
            lines.append(
                f"| {base} | {row.name} | {_milliseconds(row.together_s)} | "
                f"{_milliseconds(row.apart_s)} | {row.ratio:.2f} ({low:.2f}-{high:.2f}) | "
                f"{row.tokens / row.together_s:.0f} |"
            )
    (folder / "mixed.md").write_text("\n".join(lines) + "\n")
    _draw(folder / "mixed.png", rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="marlaas bench mixed", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="about a minute: fewer layers, rounds")
    parser.add_argument("--base", choices=tuple(PLANS), action="append", help="only this base")
    parser.add_argument("--threads", type=int, default=1, help="threads of the engine (1)")
    parser.add_argument("--out", type=Path, help="folder for mixed.json, mixed.md and mixed.png")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    about, rates = machine.describe(), machine.probe(options.threads)
    print(machine.as_markdown(about, rates))
    rows: dict[str, list[Measured]] = {}
    for name, plan in (QUICK_PLANS if options.quick else PLANS).items():
        if name in (options.base or PLANS):
            base = load(name, is_quick=options.quick)
            rows[base.name] = measure(base, plan, print)
    result = {
        **summarize(rows),
        "bench": "mixed",
        "is_quick": options.quick,
        "num_adapters": Plan().num_adapters,
        "num_threads": options.threads,
        "clock": "CPU time" if options.threads == 1 else "wall time",
        "machine": about,
        "probe": rates,
        "rows": {base: [_as_json(row) for row in measured] for base, measured in rows.items()},
    }
    if options.out:
        write_report(options.out, result, rows)
    print(json.dumps(result))
    return 0


# ---------------------------------------------------------------------------------------------
# Small things


def _as_measured(name: str, rounds: Sequence[tuple[float, float]], tokens: int) -> Measured:
    together, apart = zip(*rounds, strict=True)
    return Measured(
        name=name,
        together_s=statistics.median(together),
        apart_s=statistics.median(apart),
        tokens=tokens,
        ratios=tuple(one / all_of_them for all_of_them, one in rounds),
    )


def _quartiles(row: Measured) -> tuple[float, float]:
    if len(row.ratios) < 2:
        return row.ratio, row.ratio
    low, _, high = statistics.quantiles(row.ratios, n=4, method="inclusive")
    return low, high


def _line(base: str, row: Measured) -> str:
    low, high = _quartiles(row)
    return (
        f"{base:<40} {row.name:<32} {_milliseconds(row.together_s):>10} "
        f"{_milliseconds(row.apart_s):>10}  x {row.ratio:.2f} ({low:.2f}-{high:.2f})"
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _as_json(row: Measured) -> dict[str, object]:
    low, high = _quartiles(row)
    rounded = {
        "ratio": round(row.ratio, 3),
        "ratio_low": round(low, 3),
        "ratio_high": round(high, 3),
    }
    return {**{k: v for k, v in asdict(row).items() if k != "ratios"}, **rounded}


def _draw(path: Path, rows: Mapping[str, Sequence[Measured]]) -> None:
    """Draw every ratio as a bar, one colour per base, with a line where both sides are equal."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row.name for measured in rows.values() for row in measured))
    figure = Figure(figsize=(8, 0.5 + 0.45 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    height = 0.8 / len(rows)
    for idx, (base, measured) in enumerate(rows.items()):
        places = [names.index(row.name) + idx * height for row in measured]
        axes.barh(places, [row.ratio for row in measured], height=height, label=base)
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(names))], names)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("times as fast as under one adapter, or one after the other")
    axes.legend()
    figure.savefig(path, dpi=120)
