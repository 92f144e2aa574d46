"""Whether all three kinds of pass compute what the stock model computes: packed, prefill, decode.

A worker calls `check_base` once, after loading a base and before serving anybody. Random tokens go
through the stock model, through a generator (prefill in several chunks, then decode) and through
one packed pass over what came out. The first two are compared on the random tokens, decode and the
packed pass, which by then is known to be right, on the sampled ones.
"""

import numpy as np
import torch
from torch import Tensor

from marlaas.config import slab_tokens
from marlaas.engine.generator import BatchGenerator
from marlaas.engine.types import SequenceRequest, SequenceResult
from marlaas.model.base import BaseModel
from marlaas.model.self_check import (
    make_reference,
    max_deviation,
    packed_logprobs,
    refuse_above,
)
from marlaas.types import SamplingParams

DECODED_TOKENS = 8
"""Tokens that each sequence of the check samples."""

PREFILL_CHUNK = 24
"""Small, so that prefill continues over what it has cached."""


def check_base(base: BaseModel, *, num_tokens: int | None = None) -> dict[str, float]:
    """Return the largest deviation from the stock model, in nats, of each kind of pass.

    Args:
        num_tokens: random tokens to use; by default as many as are cheap for this base.

    Raises:
        UnsupportedBase: a deviation is more than rounding.
    """
    reference = make_reference(base, num_tokens=num_tokens, room=DECODED_TOKENS)
    results = _generate(base, reference.sequences)
    ends = [len(tokens) - 1 for tokens in reference.sequences]
    sampled = [torch.from_numpy(result.tokens).to(base.device) for result in results]
    whole = tuple(map(_append, reference.sequences, sampled))
    packed = packed_logprobs(base, whole)
    deviations = {
        "packed": max_deviation(
            [logprobs[:end] for logprobs, end in zip(packed, ends, strict=True)],
            reference.logprobs,
        ),
        "prefill": max_deviation(
            [_tensor(result.prompt_logprobs)[1:] for result in results], reference.logprobs
        ),
        "decode": max_deviation(
            [_tensor(result.logprobs) for result in results],
            [logprobs[end:] for logprobs, end in zip(packed, ends, strict=True)],
        ),
    }
    for name, deviation in deviations.items():
        refuse_above(reference.bound, base, name, deviation)
    return deviations


def _generate(base: BaseModel, sequences: tuple[Tensor, ...]) -> list[SequenceResult]:
    """Return what a generator samples after each sequence, with its prompt scored."""
    longest = max(map(len, sequences)) + DECODED_TOKENS
    generator = BatchGenerator(
        base,
        kv_capacity_tokens=2 * len(sequences) * slab_tokens(longest),
        max_context=longest,
        prefill_budget_tokens=PREFILL_CHUNK,
    )
    for idx, tokens in enumerate(sequences):
        generator.submit(
            SequenceRequest(
                request_id=str(idx),
                sequence_id=str(idx),
                slot=None,
                tokens=tokens.cpu().numpy().astype(np.int32),
                sampling=SamplingParams(max_tokens=DECODED_TOKENS, seed=idx),
                prompt_logprobs=True,
            )
        )
    results: dict[str, SequenceResult] = {}
    while generator.has_work:
        ended, _ = generator.step()
        results |= {result.request_id: result for result in ended}
    return [results[str(idx)] for idx in range(len(sequences))]


def _append(tokens_T: Tensor, more_T: Tensor) -> Tensor:
    return torch.cat([tokens_T, more_T.to(tokens_T.dtype)])


def _tensor(values: np.ndarray | None) -> Tensor:
    assert values is not None
    return torch.from_numpy(values)
