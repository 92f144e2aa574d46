"""Measures in a process of its own how much memory single passes take at their peak.

    {"shape": ..., "cases": [[kind, tokens], ...]} on stdin  ──►  one JSON line per case on stdout

`bench/memory.py` and a test start it. The peak is the process's, as the system counts it, over what
it held just before: tensors, copies of the library below, and what it fails to give back, all.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # Before torch is loaded.

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from marlaas.bench.synthetic import random_slot
from marlaas.config import slab_tokens
from marlaas.engine.allocator import blocks_from_system, give_back
from marlaas.engine.generator import BatchGenerator
from marlaas.engine.pass_memory import PassMemory, PassSize
from marlaas.engine.trainer import LoraTrainer
from marlaas.engine.types import SequenceRequest
from marlaas.model.base import BaseModel, adopt
from marlaas.runtime import cpu_s, rss_bytes
from marlaas.types import AdapterSpec, Datum, Objective, SamplingParams

KINDS = ("checkpointed", "plain", "scored", "kv")
"""Training with and without checkpointing; scoring; and a context of a generator with its KV."""

RANK = 8
PREFILL_TOKENS = 512
WARM_TOKENS = 96
NO_BOUND = 1 << 50


def measure(base: BaseModel, kind: str, num_tokens: int) -> dict[str, object]:
    """Return predicted and measured peak of one case."""
    memory = PassMemory.of(base)
    size = PassSize(
        num_tokens - 1,
        num_tokens - 1,
        num_tokens - 1,
        num_rows=num_tokens - 1 if kind == "scored" else num_tokens // 2,
        num_ranks=RANK * num_tokens,
    )
    if kind == "kv":
        work, predicted = _generation(base, memory, num_tokens)
    elif kind == "scored":
        work, predicted = _scoring(base, num_tokens), memory.scoring(size)
    else:
        is_checkpointed = kind == "checkpointed"
        work = _training(base, num_tokens, is_checkpointed=is_checkpointed)
        predicted = memory.training(size, is_checkpointed=is_checkpointed)
    began_s = cpu_s()
    # As long passes are done; of short ones the heap would keep what this is to measure.
    with blocks_from_system():
        peak = peak_bytes(work)
    return {
        "kind": kind,
        "tokens": num_tokens,
        "predicted_bytes": predicted,
        "measured_bytes": peak,
        "cpu_s": round(cpu_s() - began_s, 2),
    }


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most memory that this process had during `work` over what it had before it."""
    give_back()  # What is free and still here would hide a part of what is to come.
    Path("/proc/self/clear_refs").write_text("5")  # The peak so far is forgotten.
    before = rss_bytes()
    work()
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return 1024 * int(peak) - before


def _training(base: BaseModel, num_tokens: int, *, is_checkpointed: bool) -> Callable[[], None]:
    trainer = _trainer(base, "always" if is_checkpointed else "never")
    trainer.create("p", AdapterSpec(rank=RANK))
    slot = random_slot(base, RANK, 0)

    def train(num: int) -> None:
        trainer.submit_forward_backward("p", slot, [_datum(num)], Objective(name="dppo_tis"), 0)
        while trainer.has_work:
            trainer.step()
        assert trainer.gradient("p").isfinite().all()

    train(WARM_TOKENS)
    return lambda: train(num_tokens)


def _scoring(base: BaseModel, num_tokens: int) -> Callable[[], None]:
    trainer, slot = _trainer(base, "never"), random_slot(base, RANK, 0)

    def score(num: int) -> None:
        trainer.submit_forward("p", slot, [_datum(num)], 0)
        while trainer.has_work:
            trainer.step()

    score(WARM_TOKENS)
    return lambda: score(num_tokens)


def _trainer(base: BaseModel, checkpointing: str) -> LoraTrainer:
    return LoraTrainer(base, checkpointing=checkpointing, memory_budget_bytes=NO_BOUND)


def _generation(
    base: BaseModel, memory: PassMemory, num_tokens: int
) -> tuple[Callable[[], None], int]:
    """Return the prefill of a context in a new slab, and what both are predicted to take."""
    capacity = slab_tokens(num_tokens + 1)
    slot = random_slot(base, RANK, 0)

    def fill(num: int, num_kept: int) -> None:
        generator = BatchGenerator(
            base,
            kv_capacity_tokens=num_kept,
            max_context=num_kept,
            prefill_budget_tokens=PREFILL_TOKENS,
        )
        request = SequenceRequest(
            request_id="r",
            sequence_id="s",
            slot=slot,
            tokens=_datum(num).tokens,
            sampling=SamplingParams(max_tokens=1, seed=0),
        )
        generator.submit(request)
        while generator.has_work:
            generator.step()

    fill(WARM_TOKENS, 2 * WARM_TOKENS + 64)
    kv_bytes = 2 * base.num_layers * base.num_kv_heads * base.head_dim * 4 * capacity
    return (
        lambda: fill(num_tokens, capacity),
        kv_bytes + memory.prefill(min(PREFILL_TOKENS, num_tokens), num_tokens),
    )


def _datum(num_tokens: int) -> Datum:
    is_trained = (np.arange(num_tokens) >= num_tokens // 2).astype(np.float32)
    return Datum(
        tokens=(np.arange(num_tokens) * 7 % 1000).astype(np.int32),
        weights=is_trained,
        advantages=is_trained,
        sampling_logprobs=np.full(num_tokens, -5, dtype=np.float32),
    )


def make_base(shape: Mapping[str, object]) -> BaseModel:
    """Return a random base; packed as workers' are, where it pays."""
    torch.manual_seed(0)
    config = LlamaConfig(**shape, max_position_embeddings=1 << 16, tie_word_embeddings=True)
    base = adopt(LlamaForCausalLM(config), "random")
    base.prepack()
    return base


def run() -> None:
    torch.set_num_threads(1)
    wanted = json.load(sys.stdin)
    base = make_base(wanted["shape"])
    for kind, num_tokens in wanted["cases"]:
        print(json.dumps(measure(base, kind, num_tokens)), flush=True)


if __name__ == "__main__":
    run()
