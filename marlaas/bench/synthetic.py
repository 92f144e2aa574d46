"""What engine benchmarks are made of: bases by name, adapters, training data, and the clock.

Speed does not depend on the values of weights, so a shape with random ones stands for a model.
"""

import os
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # Before torch is loaded.

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from marlaas.engine.adapter_io import target_kinds
from marlaas.model.bank import Slot, init_adapter
from marlaas.model.base import BaseModel, adopt, load_base
from marlaas.runtime import cpu_s, now_s, rng
from marlaas.text.bases import packaged_folder
from marlaas.types import AdapterSpec, Datum

SMOLLM2_SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
SMOLLM2_LAYERS = 30


QUICK_LAYERS = 6
"""Layers of the SmolLM2 shape in quick benchmarks; all layers are alike."""

SEQUENCE_TOKENS = 64
"""Longest sequence of made-up data; more tokens a policy are several sequences."""


def smollm2_model(num_layers: int) -> LlamaForCausalLM:
    """Return a random model of SmolLM2-135M's shape, as `transformers` makes it."""
    config = LlamaConfig(**SMOLLM2_SHAPE, num_hidden_layers=num_layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def load(name: str, *, is_quick: bool) -> BaseModel:
    """Return `tiny`, or a base of SmolLM2-135M's shape; with packed weights where they pay."""
    if name == "tiny":
        base = load_base(packaged_folder("tiny"))
    else:
        num_layers = QUICK_LAYERS if is_quick else SMOLLM2_LAYERS
        label = f"SmolLM2-135M shape, {num_layers} layers, random"
        base = adopt(smollm2_model(num_layers), label)
    base.prepack()
    return base


def random_slot(base: BaseModel, rank: int, seed: int) -> Slot:
    """Return a slot with a fresh adapter on attention and MLP."""
    kinds = target_kinds(AdapterSpec(rank=rank))
    slot = base.bank.allocate(rank=rank, scale=2.0, kinds=kinds)
    layout = base.bank.bucket(rank).layout
    base.bank.write(slot, init_adapter(layout, rank=rank, kinds=kinds, seed=seed))
    return slot


def random_data(base: BaseModel, num_tokens: int, seed: int) -> list[Datum]:
    """Return sequences of `num_tokens` tokens in all, the second half of each to be trained."""
    chance = rng("datum", seed)
    data = []
    for start in range(0, num_tokens, SEQUENCE_TOKENS):
        length = min(SEQUENCE_TOKENS, num_tokens - start)
        is_trained = np.arange(length) >= length // 2
        data.append(
            Datum(
                tokens=chance.integers(base.vocab_size, size=length).astype(np.int32),
                weights=is_trained.astype(np.float32),
                advantages=chance.standard_normal(length).astype(np.float32),
                sampling_logprobs=np.full(length, -5.0, dtype=np.float32),
            )
        )
    return data


def time_s(work: Callable[[], object]) -> float:
    """Return how long something takes, on `clock_s`."""
    started = clock_s()
    work()
    return clock_s() - started


def clock_s() -> float:
    """Return CPU time where one thread does everything: other processes do not enter it."""
    return cpu_s() if torch.get_num_threads() == 1 else now_s()
