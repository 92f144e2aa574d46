"""Policies and random training data for tests of the trainer."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from marlaas.engine.adapter_io import target_kinds
from marlaas.engine.trainer import LoraTrainer
from marlaas.model.bank import Slot
from marlaas.types import AdapterSpec, Datum

VOCAB = 128
"""Of the small models in `tests.models`."""


def with_wide_norms(model: PreTrainedModel) -> PreTrainedModel:
    """Make the norms of an fp64 model compute in fp64: they cast to fp32, which rounds gradients
    that flow through them at 1e-7, more or less of it depending on what is computed together."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = partial(rms_norm, module)
    return model


def rms_norm(norm: torch.nn.Module, x: Tensor) -> Tensor:
    mean_square = x.square().mean(-1, keepdim=True)
    return norm.weight * x * (mean_square + norm.variance_epsilon).rsqrt()


def random_datum(
    rng: np.random.Generator, num_tokens: int, *, num_prompt: int = 2, temperature: float = 1.0
) -> Datum:
    """Return a datum whose tokens after the prompt are trained, a few in between left out."""
    weights = rng.uniform(0.5, 1.5, num_tokens) / num_tokens
    weights[:num_prompt] = 0.0
    weights[num_prompt + 1 :: 5] = 0.0
    return Datum(
        tokens=rng.integers(0, VOCAB, num_tokens).astype(np.int32),
        weights=weights.astype(np.float32),
        advantages=rng.standard_normal(num_tokens).astype(np.float32),
        sampling_logprobs=rng.uniform(-6, -3, num_tokens).astype(np.float32),
        reference_logprobs=rng.uniform(-6, -3, num_tokens).astype(np.float32),
        temperature=temperature,
    )


def random_group(rng: np.random.Generator, num_prompt: int, lengths: Sequence[int]) -> list[Datum]:
    """Return data with a common prompt: siblings of one group, the last one equal to the first."""
    prompt = rng.integers(0, VOCAB, num_prompt).astype(np.int32)
    group = []
    for length in lengths:
        datum = random_datum(rng, num_prompt + length, num_prompt=num_prompt)
        tokens = np.concatenate([prompt, datum.tokens[num_prompt:]])
        group.append(replace(datum, tokens=tokens))
    same = replace(group[-1], tokens=group[0].tokens, weights=group[0].weights)
    return [*group, same] if lengths[0] == lengths[-1] else group


def host(trainer: LoraTrainer, key: str, spec: AdapterSpec, *, size: float = 0.1) -> Slot:
    """Create a policy whose A and B are both random and put it into a slot of the bank."""
    state = trainer.create(key, spec)
    kinds = target_kinds(spec)
    rng = np.random.default_rng(spec.seed)
    for module in state.layout.modules:
        if module.kind in kinds:
            a_RD, b_OR = state.layout.row_views(state.weights_P, module)
            for matrix in (a_RD[: spec.rank], b_OR[:, : spec.rank]):
                values = size * rng.standard_normal(matrix.shape)
                matrix.copy_(matrix.new_tensor(values))
    slot = trainer.base.bank.allocate(rank=spec.rank, scale=spec.alpha / spec.rank, kinds=kinds)
    trainer.base.bank.write(slot, state.weights_P)
    return slot
