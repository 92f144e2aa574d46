"""Draws the next token of every row of a decode batch at once.

The uniform number of a row is a hash of (seed, position): no generator object, no state, and the
same draw whatever else is in the batch and however often it is repeated.

Which distribution a logprob belongs to: the one that was sampled from, i.e. logits / temperature,
truncated, renormalised. At temperature 0 the most likely token is taken and its logprob is that
under temperature 1, truncation ignored.

Truncation keeps a token when all of these hold, each on the distribution after temperature:
top_k (among the k most likely), top_p (in the smallest set of most likely tokens whose mass
reaches top_p) and min_p (at least min_p times as likely as the most likely). Tokens exactly as
likely as the last one kept are kept, too.

Shape suffixes: N rows, V vocabulary, J blocks of the vocabulary, K candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from marlaas.types import SamplingParams

_BLOCK = 128
"""Tokens per block: the inverse of the distribution is searched by block, then inside it."""

_NUM_CANDIDATES = 1024
"""Truncation looks at this many most likely tokens before it sorts the whole vocabulary."""

_U64 = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64. Source: Steele, Lea and Flood, 2014, as published by Vigna."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seed_N: np.ndarray, position_N: np.ndarray) -> np.ndarray:
    """Return one number in [0, 1) for each (seed, position), float64.

    u = mix(mix(seed) + (position + 1) * golden) / 2^64: the SplitMix64 stream that starts at
    mix(seed), so that neighbouring seeds are far apart.

    Args:
        seed_N: uint64.
        position_N: place of the token to draw in its sequence.
    """
    state_N = _mix(seed_N + _GOLDEN) + (position_N.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(state_N) >> np.uint64(11)) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Truncation:
    """The rows of a batch that truncate, and how."""

    row_N: Tensor
    top_k_N1: Tensor
    """Vocabulary size where there is no limit."""
    top_p_N1: Tensor
    min_p_N1: Tensor
    num_candidates: int
    """How many of the most likely tokens to look at first; the vocabulary for all of them."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of all rows, made once per set of rows."""

    seed_N: np.ndarray
    temperature_N1: Tensor | None
    """None when every row has temperature 1; 1 where it is 0."""
    greedy_N: Tensor | None
    """Rows with temperature 0, if any."""
    truncation: Truncation | None

    @classmethod
    def build(
        cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device | str = "cpu"
    ) -> "SamplingBatch":
        temperatures = [p.temperature or 1.0 for p in params]
        greedy = [row for row, p in enumerate(params) if p.temperature == 0]
        truncated = [row for row, p in enumerate(params) if _is_truncated(p, vocab_size)]
        has_temperature = any(temperature != 1.0 for temperature in temperatures)
        return cls(
            seed_N=np.array([p.seed & _U64 for p in params], dtype=np.uint64),
            temperature_N1=(
                torch.tensor(temperatures, device=device)[:, None] if has_temperature else None
            ),
            greedy_N=torch.tensor(greedy, device=device) if greedy else None,
            truncation=(
                _truncation(truncated, [params[row] for row in truncated], vocab_size, device)
                if truncated
                else None
            ),
        )


@dataclass(frozen=True, slots=True)
class Samples:
    """What one step drew."""

    token_N: Tensor
    """int64."""
    logprob_N: Tensor
    """float32."""
    is_finite_N: Tensor
    """False: the row's logits held NaN or infinity, its token and logprob mean nothing."""


def sample(logits_NV: Tensor, batch: SamplingBatch, position_N: np.ndarray) -> Samples:
    """Draw one token per row. `logits_NV` is float32 and is overwritten.

    Args:
        position_N: place in its sequence of the token to draw.
    """
    num_rows, vocab_size = logits_NV.shape
    # One NaN or infinity makes the sum of a row non-finite; finite logits are far from overflow.
    is_finite_N = logits_NV.sum(-1).isfinite()
    if batch.temperature_N1 is not None:
        logits_NV /= batch.temperature_N1
    if batch.truncation is not None:
        _truncate(logits_NV, batch.truncation)
    max_N1 = logits_NV.amax(-1, keepdim=True)
    greedy_token = None
    if batch.greedy_N is not None:
        greedy_token = logits_NV[batch.greedy_N].argmax(-1)

    num_blocks = -(-vocab_size // _BLOCK)
    weight_NV = logits_NV.sub_(max_N1).exp_()
    if num_blocks * _BLOCK != vocab_size:
        weight_NV = F.pad(weight_NV, (0, num_blocks * _BLOCK - vocab_size))
    weight_NJB = weight_NV.view(num_rows, num_blocks, _BLOCK)
    uniform_N1 = torch.from_numpy(uniforms(batch.seed_N, position_N)).to(logits_NV.device)[:, None]
    # The block whose cumulative mass first exceeds u * total, then the token inside that block.
    mass_NJ = weight_NJB.sum(-1, dtype=torch.float64).cumsum(-1)
    total_N = mass_NJ[:, -1]
    target_N1 = _below(uniform_N1 * total_N[:, None], mass_NJ)
    block_N1 = torch.searchsorted(mass_NJ, target_N1, right=True).clamp_(max=num_blocks - 1)
    before_N1 = torch.where(block_N1 > 0, mass_NJ.gather(1, (block_N1 - 1).clamp(min=0)), 0.0)
    rows_N = torch.arange(num_rows, device=logits_NV.device)
    inside_NB = weight_NJB[rows_N, block_N1[:, 0]]
    inside_mass_NB = inside_NB.cumsum(-1, dtype=torch.float64)
    rest_N1 = _below(target_N1 - before_N1, inside_mass_NB)
    place_N1 = torch.searchsorted(inside_mass_NB, rest_N1, right=True).clamp_(max=_BLOCK - 1)
    token_N = (block_N1 * _BLOCK + place_N1)[:, 0].clamp_(max=vocab_size - 1)
    if greedy_token is not None:
        token_N[batch.greedy_N] = greedy_token
    chosen_N = weight_NV.gather(1, token_N[:, None])[:, 0].double()
    logprob_N = (chosen_N.log() - total_N.log()).float()
    return Samples(token_N, logprob_N, is_finite_N)


def _below(target_N1: Tensor, mass_NK: Tensor) -> Tensor:
    """Return the target, or the next number below the whole mass if rounding put it there."""
    end_N1 = mass_NK[:, -1:]
    return torch.minimum(target_N1, end_N1.nextafter(torch.zeros_like(end_N1)))


def _is_truncated(params: SamplingParams, vocab_size: int) -> bool:
    if params.temperature == 0:
        return False
    return 0 < params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0


def _truncation(
    rows: list[int], params: list[SamplingParams], vocab_size: int, device: torch.device | str
) -> Truncation:
    top_ks = [min(p.top_k or vocab_size, vocab_size) for p in params]
    has_open_nucleus = any(p.top_p < 1.0 and not p.top_k for p in params)
    limits = [top_k for top_k in top_ks if top_k < vocab_size]
    num_candidates = max([*limits, _NUM_CANDIDATES if has_open_nucleus else 1])
    return Truncation(
        row_N=torch.tensor(rows, device=device),
        top_k_N1=torch.tensor(top_ks, device=device)[:, None],
        top_p_N1=torch.tensor([p.top_p for p in params], device=device)[:, None].double(),
        min_p_N1=torch.tensor([p.min_p for p in params], device=device)[:, None].double(),
        num_candidates=min(num_candidates, vocab_size),
    )


def _truncate(logits_NV: Tensor, truncation: Truncation) -> None:
    """Set the logits that the rows of `truncation` do not keep to -inf, in place."""
    row_logits = logits_NV[truncation.row_N]
    logsumexp_N1 = row_logits.logsumexp(-1, keepdim=True)
    vocab_size = row_logits.shape[1]
    top_NK = row_logits.topk(truncation.num_candidates, dim=-1).values
    probability_NK = (top_NK - logsumexp_N1).double().exp()
    mass_NK = probability_NK.cumsum(-1)
    is_limited_N1 = truncation.top_k_N1 <= truncation.num_candidates
    has_nucleus_N1 = (truncation.top_p_N1 >= 1.0) | (mass_NK[:, -1:] >= truncation.top_p_N1)
    if not bool((is_limited_N1 | has_nucleus_N1).all()):
        top_NK = row_logits.sort(dim=-1, descending=True).values
        probability_NK = (top_NK - logsumexp_N1).double().exp()
        mass_NK = probability_NK.cumsum(-1)
    rank_K = torch.arange(top_NK.shape[1], device=top_NK.device)
    is_kept_NK = (rank_K < truncation.top_k_N1) & (
        (mass_NK - probability_NK < truncation.top_p_N1) | (truncation.top_p_N1 >= 1.0)
    )
    is_kept_NK[:, 0] = True
    last_N1 = is_kept_NK.sum(-1, keepdim=True) - 1
    threshold_N1 = top_NK.gather(1, last_N1)
    # A row that keeps every candidate for want of any top_k or top_p limit keeps the rest as well.
    is_open_N1 = (truncation.top_k_N1 == vocab_size) & (truncation.top_p_N1 >= 1.0)
    threshold_N1 = threshold_N1.masked_fill(is_open_N1, float("-inf"))
    min_logit_N1 = (top_NK[:, :1].double() + truncation.min_p_N1.log()).to(top_NK.dtype)
    threshold_N1 = torch.maximum(threshold_N1, min_logit_N1)
    logits_NV[truncation.row_N] = row_logits.masked_fill(row_logits < threshold_N1, float("-inf"))
