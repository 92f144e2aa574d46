"""How close the engine comes to the machine, and to what people would use instead.

- decode: tokens/s of whole generations at 1 to 64 rows, over `transformers`' `generate` with the
  same prompts and lengths; once more with ragged lengths, as replies have them.
- train: `forward_backward` and `optim_step` of 8 policies at 16 to 256 tokens a policy, fused, over
  the same code one policy at a time, and over PEFT with one adapter.

Every row stands beside its limit: the larger of arithmetic over the rate of the best matrix product
that the machine was seen to do, and bytes over the rate that it reads memory at.

    decode step of B rows   bytes = 4 (N + D P_A) + 8 L d_kv sum(n)
                            FLOP  = 2 B (N + P_A) + 4 L d_a sum(n)
    LoRA training           FLOP  = 4 N_l T + 4 N_h T_scored + 6 P_A T + 7 L d_a sum(S^2)

N weights (N_l of the layers, N_h of the head), P_A of one adapter, D adapters, L layers, d_a and
d_kv widths of queries and of keys, n tokens of context, T tokens in sequences of S. A base that
fits in the caches, as `tiny` does, is not read from memory: its limit by bytes does not bind.

All sides take turns; times are medians of CPU time on one thread. The last line is one JSON object.
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
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from marlaas.bench.synthetic import (
    QUICK_LAYERS,
    SMOLLM2_LAYERS,
    load,
    random_data,
    random_slot,
    smollm2_model,
    time_s,
)
from marlaas.engine.generator import BatchGenerator
from marlaas.engine.trainer import LoraTrainer
from marlaas.engine.types import SequenceRequest
from marlaas.model.base import BaseModel
from marlaas.text.bases import packaged_folder
from marlaas.types import AdamParams, AdapterSpec, Datum, Objective, SamplingParams

RANK = 8
PROMPT_TOKENS = 32
NUM_POLICIES = 8
CACHE_BYTES = 16 << 20
"""Weights of at most so many bytes are taken to stay in the caches of a core and its neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured."""

    batch_sizes: tuple[int, ...] = (1, 8, 16, 32, 64)
    new_tokens: int = 48
    ragged_rows: int = 32
    policy_tokens: tuple[int, ...] = (16, 64, 128, 256)
    rounds: int = 5
    budget_tokens: int = 512


PLANS: Mapping[str, Plan] = {
    "tiny": Plan(rounds=7, budget_tokens=1024),
    "smollm2-135m": Plan(new_tokens=24, rounds=3),
}
QUICK_PLANS: Mapping[str, Plan] = {
    "tiny": replace(PLANS["tiny"], batch_sizes=(1, 32), policy_tokens=(16, 128), rounds=3),
    "smollm2-135m": replace(
        PLANS["smollm2-135m"], batch_sizes=(1, 16), policy_tokens=(64,), new_tokens=12, rounds=2
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement: ours, the others', and the limit, all in seconds for the same work."""

    name: str
    tokens: int
    """That each side samples or trains on."""
    ours_s: float
    limit_s: float
    others: Mapping[str, float]
    """Median ratio of their time to ours, by name."""

    @property
    def fraction(self) -> float:
        """Of the limit's rate that is reached."""
        return self.limit_s / self.ours_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one base's work takes at least on this machine."""

    flops: float
    read_bytes_per_s: float
    layer_weights: int
    head_weights: int
    adapter_weights: int
    num_layers: int
    query_width: int
    key_width: int
    """Of keys and of values each."""

    @classmethod
    def of(cls, base: BaseModel, probe: Mapping[str, float]) -> "Limits":
        head = base.head.weight.numel()
        layers = sum(p.numel() for p in base.model.parameters() if p.dim() == 2) - head
        embedding = base.model.get_input_embeddings().weight
        if embedding is not base.head.weight:
            layers -= embedding.numel()
        shapes = [shape for shape in base.bank.modules if shape.kind != "lm_head"]
        queries = next(shape.out_features for shape in shapes if shape.kind == "q_proj")
        return cls(
            flops=probe["gemm_gflops"] * 1e9,
            read_bytes_per_s=probe["read_gb_per_s"] * 1e9,
            layer_weights=layers,
            head_weights=head,
            adapter_weights=sum(RANK * (one.in_features + one.out_features) for one in shapes),
            num_layers=base.num_layers,
            query_width=queries,
            key_width=base.num_kv_heads * base.head_dim,
        )

    def decode_s(self, contexts: Sequence[int], num_adapters: int) -> float:
        """Return the least time of one decode step of sequences with so much context."""
        num_weights = self.layer_weights + self.head_weights
        context = sum(contexts)
        flop = 2 * len(contexts) * (num_weights + self.adapter_weights)
        flop += 4 * self.num_layers * self.query_width * context
        num_bytes = 4 * (num_weights + num_adapters * self.adapter_weights)
        num_bytes += 8 * self.num_layers * self.key_width * context
        is_cached = 4 * num_weights <= CACHE_BYTES
        return max(flop / self.flops, 0.0 if is_cached else num_bytes / self.read_bytes_per_s)

    def train_s(self, data: Sequence[Datum]) -> float:
        """Return the least time of forward and backward passes over data."""
        inputs = [len(datum.tokens) - 1 for datum in data]
        scored = sum(int(np.count_nonzero(datum.weights)) for datum in data)
        flop = (4 * self.layer_weights + 6 * self.adapter_weights) * sum(inputs)
        flop += 4 * self.head_weights * scored
        flop += 7 * self.num_layers * self.query_width * sum(length**2 for length in inputs)
        return flop / self.flops


# ---------------------------------------------------------------------------------------------
# Decode


def measure_decode(
    base: BaseModel, stock: PreTrainedModel, limits: Limits, plan: Plan, lengths: Sequence[int]
) -> Row:
    """Measure generations of given lengths, one sequence each, against `transformers`."""
    prompts = [
        rng("prompt", idx).integers(base.vocab_size, size=PROMPT_TOKENS).astype(np.int32)
        for idx in range(len(lengths))
    ]
    ids = torch.from_numpy(np.stack(prompts)).long()

    longest = PROMPT_TOKENS + max(lengths)
    generator = BatchGenerator(
        base,
        kv_capacity_tokens=2 * len(prompts) * (longest + 64),
        max_context=longest,
        max_batch=len(prompts),
    )

    def ours() -> None:
        _generate(generator, prompts, lengths)

    @torch.inference_mode()
    def theirs() -> None:
        # It pads: a batch runs until its longest sequence ends.
        stock.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            min_new_tokens=max(lengths),
            max_new_tokens=max(lengths),
            eos_token_id=None,
            pad_token_id=0,
        )

    steps = [
        [PROMPT_TOKENS + step for length in lengths if length > step]
        for step in range(1, max(lengths))
    ]
    num_inputs = len(lengths) * PROMPT_TOKENS
    prefill_flop = 2 * num_inputs * limits.layer_weights + 2 * len(lengths) * limits.head_weights
    limit_s = prefill_flop / limits.flops + sum(limits.decode_s(step, 0) for step in steps)
    is_ragged = len(set(lengths)) > 1
    name = f"decode {len(lengths)} rows" + (", ragged" if is_ragged else "")
    sides = {"transformers": theirs}
    return _row(name, sum(lengths), ours, sides, limit_s, plan.rounds)


def _generate(
    generator: BatchGenerator, prompts: Sequence[np.ndarray], lengths: Sequence[int]
) -> None:
    for idx, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        sampling = SamplingParams(max_tokens=length, seed=idx)
        generator.submit(
            SequenceRequest(
                request_id=str(idx),
                sequence_id=str(idx),
                slot=None,
                tokens=prompt,
                sampling=sampling,
            )
        )
    while generator.has_work:
        generator.step()


def ragged_lengths(num: int, longest: int) -> list[int]:
    """Return lengths as replies have them: geometric, a third of the longest on average."""
    drawn = rng("lengths", num, longest).geometric(3 / longest, size=num)
    return [min(longest, int(length)) for length in drawn[:-1]] + [longest]


# ---------------------------------------------------------------------------------------------
# Training


def measure_train(
    base: BaseModel,
    stock: Callable[[], PreTrainedModel],
    limits: Limits,
    plan: Plan,
    num_tokens: int,
) -> Row:
    """Measure updates of all policies, fused, one at a time, and with PEFT."""
    trainer = LoraTrainer(base, budget_tokens=plan.budget_tokens)
    data = {key: random_data(base, num_tokens, key) for key in range(NUM_POLICIES)}
    slots = {key: random_slot(base, RANK, key) for key in data}
    for key in data:
        trainer.create(key, AdapterSpec(rank=RANK, seed=key))

    def update(keys: Sequence[int]) -> None:
        for key in keys:
            objective = Objective(name="importance_sampling")
            trainer.submit_forward_backward(key, slots[key], data[key], objective, ticket=key)
        while trainer.has_work:
            trainer.step()
        for key in keys:
            trainer.optim_step(key, AdamParams(lr=1e-6))
            base.bank.write(slots[key], trainer.weights(key))

    sides = {"one at a time": lambda: [update([key]) for key in data]}
    if has_peft():
        peft_update = _peft_update(stock())
        sides["PEFT"] = lambda: [peft_update(data[key]) for key in data]
    every = [datum for own in data.values() for datum in own]
    name = f"train {num_tokens} tokens x {NUM_POLICIES}"
    row = _row(
        name,
        NUM_POLICIES * num_tokens,
        lambda: update(list(data)),
        sides,
        limits.train_s(every),
        plan.rounds,
    )
    for slot in slots.values():
        base.bank.free(slot)
    return row


def has_peft() -> bool:
    """Return whether PEFT is installed beside us."""
    try:
        import peft  # noqa: F401
    except ImportError:
        return False
    return True


def _peft_update(model: PreTrainedModel) -> Callable[[Sequence[Datum]], None]:
    """Return what makes one update of a PEFT adapter on `model`, as a training script would."""
    from peft import LoraConfig, get_peft_model

    linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    wrapped = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=16, target_modules=linears))
    parameters = [one for one in wrapped.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-6)

    def update(data: Sequence[Datum]) -> None:
        tokens = torch.from_numpy(np.stack([datum.tokens for datum in data])).long()
        weights = torch.from_numpy(np.stack([datum.weights for datum in data]))[:, 1:]
        gains = torch.from_numpy(np.stack([datum.advantages for datum in data]))[:, 1:]
        sampled = torch.from_numpy(np.stack([datum.sampling_logprobs for datum in data]))[:, 1:]
        logits = wrapped(input_ids=tokens[:, :-1]).logits
        logprobs = -F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        (-(logprobs - sampled).exp() * gains * weights).sum().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return update


# ---------------------------------------------------------------------------------------------
# All of it


def _row(
    name: str,
    tokens: int,
    ours: Callable[[], object],
    others: Mapping[str, Callable[[], object]],
    limit_s: float,
    rounds: int,
) -> Row:
    """Time every side in turns, after one round that warms up."""
    times: dict[str, list[float]] = {"ours": [], **{other: [] for other in others}}
    for round_ in range(rounds + 1):
        for side, work in {"ours": ours, **others}.items():
            seconds = time_s(work)
            if round_:
                times[side].append(seconds)
    ratios = {
        other: statistics.median(
            theirs / own for theirs, own in zip(times[other], times["ours"], strict=True)
        )
        for other in others
    }
    return Row(
        name=name,
        tokens=tokens,
        ours_s=statistics.median(times["ours"]),
        limit_s=limit_s,
        others=ratios,
    )


def measure(
    name: str,
    plan: Plan,
    probe: Mapping[str, float],
    report: Callable[[str], None],
    *,
    is_quick: bool,
) -> list[Row]:
    """Measure everything of one base, reporting row by row."""
    base = load(name, is_quick=is_quick)
    limits = Limits.of(base, probe)

    def stock() -> PreTrainedModel:
        if name == "tiny":
            return AutoModelForCausalLM.from_pretrained(packaged_folder("tiny"))
        return smollm2_model(QUICK_LAYERS if is_quick else SMOLLM2_LAYERS)

    rows = []
    peer = stock().eval()
    peer.generation_config.max_length = None
    cases = [[plan.new_tokens] * size for size in plan.batch_sizes]
    for lengths in [*cases, ragged_lengths(plan.ragged_rows, plan.new_tokens)]:
        rows.append(measure_decode(base, peer, limits, plan, lengths))
        report(_line(base.name, rows[-1]))
    for num_tokens in plan.policy_tokens:
        rows.append(measure_train(base, stock, limits, plan, num_tokens))
        report(_line(base.name, rows[-1]))
    return rows


def write_report(folder: Path, result: Mapping, rows: Mapping[str, Sequence[Row]]) -> None:
    """Write `engine.json`, the table `engine.md` and the plot `engine.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "engine.json").write_text(json.dumps(result, indent=2) + "\n")
    lines = [
        machine.as_markdown(result["machine"], result["probe"]),
        "",
        "| base | what | tokens/s | fraction of the limit | over others |",
        "|---|---|---|---|---|",
    ]
    for base, measured in rows.items():
        for row in measured:
            over = ", ".join(f"{other} {ratio:.2f}" for other, ratio in row.others.items())
            rate = row.tokens / row.ours_s
            lines.append(f"| {base} | {row.name} | {rate:,.0f} | {row.fraction:.2f} | {over} |")
    (folder / "engine.md").write_text("\n".join(lines) + "\n")
    _draw(folder / "engine.png", rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="marlaas bench engine", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="about a minute: fewer layers, rounds")
    parser.add_argument("--base", choices=tuple(PLANS), action="append", help="only this base")
    parser.add_argument("--out", type=Path, help="folder for engine.json, engine.md and engine.png")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    about, probe = machine.describe(), machine.probe()
    print(machine.as_markdown(about, probe))
    rows: dict[str, list[Row]] = {}
    for name, plan in (QUICK_PLANS if options.quick else PLANS).items():
        if name in (options.base or PLANS):
            rows[name] = measure(name, plan, probe, print, is_quick=options.quick)
    result = {
        "bench": "engine",
        "is_quick": options.quick,
        "machine": about,
        "probe": probe,
        "rows": {base: [_as_json(row) for row in measured] for base, measured in rows.items()},
    }
    if options.out:
        write_report(options.out, result, rows)
    print(json.dumps(result))
    return 0


def _line(base: str, row: Row) -> str:
    over = "  ".join(f"{other} x {ratio:.2f}" for other, ratio in row.others.items())
    rate = row.tokens / row.ours_s
    return f"{base:<38} {row.name:<24} {rate:>9,.0f} tokens/s  limit {row.fraction:.2f}  {over}"


def _as_json(row: Row) -> dict[str, object]:
    return {**asdict(row), "fraction": round(row.fraction, 3)}


def _draw(path: Path, rows: Mapping[str, Sequence[Row]]) -> None:
    """Draw each row's fraction of the limit, and its ratios to the others."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 0.8 + 0.32 * max(len(own) for own in rows.values()) * len(rows)))
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    labels = [f"{base}: {row.name}" for base, measured in rows.items() for row in measured]
    every = [row for measured in rows.values() for row in measured]
    left.barh(labels, [row.fraction for row in every])
    left.set_xlim(0, 1)
    left.set_xlabel("fraction of the machine's limit")
    left.invert_yaxis()
    for other, marker in (("transformers", "o"), ("PEFT", "s"), ("one at a time", "x")):
        points = [(row.others[other], label) for row, label in zip(every, labels, strict=True)
                  if other in row.others]  # fmt: skip
        if points:
            right.plot(*zip(*points, strict=True), marker, label=other)
    right.axvline(1.0, color="black", linewidth=0.8)
    right.set_xlabel("times as fast as")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
