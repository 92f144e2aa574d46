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

Shape suffixes: N rows, M rows that truncate, V vocabulary, J blocks of the vocabulary, B tokens of
a block, K candidates, or draws of one row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from marlaas.types import SamplingParams

_BLOCK = 128
"""Tokens per block: a large vocabulary is searched by block, then inside the block."""

_MAX_FLAT_VOCABULARY = 2048
"""Up to here one cumulative sum over all tokens is faster than two searches."""

_BELOW_ONE = 1 - 2.0**-52
"""A positive number times it is smaller than the number, whatever the rounding."""

_NUM_CANDIDATES = (128, 2048)
"""Truncation looks at so many most likely tokens before it sorts the whole vocabulary: a nucleus
rarely needs more, and finding 128 of 49k tokens takes a fiftieth of sorting them."""

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

    row_M: Tensor
    top_k_M1: Tensor
    """Vocabulary size where there is no limit."""
    top_p_M1: Tensor
    """Infinity where there is no limit."""
    log_min_p_M1: Tensor
    """-infinity where there is no limit."""

    @classmethod
    def build(
        cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device | str
    ) -> "Truncation | None":
        """Collect what the rows want; None when no row truncates."""
        rows = [row for row, p in enumerate(params) if _is_truncated(p, vocab_size)]
        if not rows:
            return None
        top_ks = [min(params[row].top_k or vocab_size, vocab_size) for row in rows]
        top_ps = [params[row].top_p if params[row].top_p < 1.0 else np.inf for row in rows]
        min_ps = torch.tensor([params[row].min_p for row in rows], device=device)
        return cls(
            row_M=torch.tensor(rows, device=device),
            top_k_M1=torch.tensor(top_ks, device=device)[:, None],
            top_p_M1=torch.tensor(top_ps, device=device, dtype=torch.float64)[:, None],
            log_min_p_M1=min_ps.log()[:, None],
        )


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
        has_temperature = any(temperature != 1.0 for temperature in temperatures)
        return cls(
            seed_N=np.array([p.seed & _U64 for p in params], dtype=np.uint64),
            temperature_N1=(
                torch.tensor(temperatures, device=device)[:, None] if has_temperature else None
            ),
            greedy_N=torch.tensor(greedy, device=device) if greedy else None,
            truncation=Truncation.build(params, vocab_size, device),
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


@dataclass(frozen=True, slots=True)
class Draws:
    """Several tokens per row, drawn with replacement."""

    token_NK: Tensor
    """int64."""
    logprob_NK: Tensor
    """float32."""


def sample(logits_NV: Tensor, batch: SamplingBatch, position_N: np.ndarray) -> Samples:
    """Draw one token per row. `logits_NV` is float32 and is overwritten.

    Args:
        position_N: place in its sequence of the token to draw.
    """
    # One NaN or infinity makes the sum of a row non-finite; finite logits are far from overflow.
    is_finite_N = logits_NV.sum(-1).isfinite()
    drawn = _draw(logits_NV, batch, uniforms(batch.seed_N, position_N)[:, None])
    return Samples(drawn.token_NK[:, 0], drawn.logprob_NK[:, 0], is_finite_N)


def sample_many(
    logits_NV: Tensor, batch: SamplingBatch, position_N: np.ndarray, num_draws: int
) -> Draws:
    """Draw several tokens per row, as `sample` draws one; each has a seed of its own, a hash of the
    row's and of its number. `logits_NV` is overwritten."""
    number_K = np.arange(1, num_draws + 1, dtype=np.uint64)
    seed_NK = _mix(_mix(batch.seed_N[:, None]) ^ _mix(number_K * _GOLDEN))
    return _draw(logits_NV, batch, uniforms(seed_NK, position_N[:, None]))


def most_likely(
    logits_NV: Tensor, batch: SamplingBatch, row_M: Tensor, num_top: int
) -> tuple[Tensor, Tensor]:
    """Return ids and logprobs [M, num_top] of the most likely tokens of some rows, at the row's
    temperature and before any truncation."""
    logits_MV = logits_NV[row_M]
    if batch.temperature_N1 is not None:
        logits_MV /= batch.temperature_N1[row_M]
    top_MK = logits_MV.log_softmax(-1).topk(num_top, dim=-1)
    return top_MK.indices, top_MK.values


def _draw(logits_NV: Tensor, batch: SamplingBatch, uniform_NK: np.ndarray) -> Draws:
    vocab_size = logits_NV.shape[1]
    if batch.temperature_N1 is not None:
        logits_NV /= batch.temperature_N1
    if batch.truncation is not None:
        _truncate(logits_NV, batch.truncation)
    max_N1 = logits_NV.amax(-1, keepdim=True)
    greedy_token = None
    if batch.greedy_N is not None:
        greedy_token = logits_NV[batch.greedy_N].argmax(-1)

    weight_NV = logits_NV.sub_(max_N1).exp_()
    search = _search_flat if vocab_size <= _MAX_FLAT_VOCABULARY else _search_blocks
    token_NK, total_N1 = search(weight_NV, torch.from_numpy(uniform_NK).to(weight_NV.device))
    # A row with NaN may end up past the last token.
    token_NK.clamp_(max=vocab_size - 1)
    if greedy_token is not None:
        token_NK[batch.greedy_N] = greedy_token[:, None]
    logprob_NK = (weight_NV.gather(1, token_NK) / total_N1).log().float()
    return Draws(token_NK, logprob_NK)


def _search_flat(weight_NV: Tensor, uniform_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens whose cumulative weight first exceeds u times the total, and the total."""
    mass_NV = weight_NV.cumsum(-1, dtype=torch.float64)
    total_N1 = mass_NV[:, -1:]
    return _first_past(mass_NV, uniform_NK * total_N1), total_N1


def _search_blocks(weight_NV: Tensor, uniform_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same, by the block whose cumulative weight first exceeds u times the total."""
    num_rows, vocab_size = weight_NV.shape
    weight_NV = F.pad(weight_NV, (0, -vocab_size % _BLOCK)) if vocab_size % _BLOCK else weight_NV
    weight_NJB = weight_NV.view(num_rows, -1, _BLOCK)
    mass_NJ = weight_NJB.sum(-1, dtype=torch.float64).cumsum(-1)
    total_N1 = mass_NJ[:, -1:]
    target_NK = uniform_NK * total_N1
    block_NK = _first_past(mass_NJ, target_NK).clamp_(max=mass_NJ.shape[1] - 1)
    before_NK = F.pad(mass_NJ, (1, 0)).gather(1, block_NK)
    inside_NKB = weight_NJB.gather(1, block_NK[:, :, None].expand(-1, -1, _BLOCK))
    inside_mass_NKB = inside_NKB.cumsum(-1, dtype=torch.float64)
    place_NK1 = _first_past(inside_mass_NKB, (target_NK - before_NK)[:, :, None])
    return block_NK * _BLOCK + place_NK1[:, :, 0], total_N1


def _first_past(mass: Tensor, target: Tensor) -> Tensor:
    """Return the first places along the last dimension whose cumulative mass exceeds the targets.

    A target that rounding put at the end is taken back, so that a place without mass never is it.
    """
    target = torch.minimum(target, mass[..., -1:] * _BELOW_ONE)
    return torch.searchsorted(mass, target, right=True)


def _is_truncated(params: SamplingParams, vocab_size: int) -> bool:
    if params.temperature == 0:
        return False
    return 0 < params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0


def _truncate(logits_NV: Tensor, truncation: Truncation) -> None:
    """Set the logits that the rows of `truncation` do not keep to -inf, in place."""
    logits_MV = logits_NV[truncation.row_M]
    least_M1 = torch.maximum(
        _last_kept(logits_MV, truncation.top_k_M1, truncation.top_p_M1),
        logits_MV.amax(-1, keepdim=True) + truncation.log_min_p_M1,
    )
    logits_NV[truncation.row_M] = logits_MV.masked_fill_(logits_MV < least_M1, -torch.inf)


def _last_kept(logits_MV: Tensor, top_k_M1: Tensor, top_p_M1: Tensor) -> Tensor:
    """Return the least likely logit [M, 1] that top_k and top_p keep, -inf without a limit."""
    vocab_size = logits_MV.shape[1]
    logsumexp_M1 = logits_MV.logsumexp(-1, keepdim=True)
    last_M1 = logits_MV.new_full((len(logits_MV), 1), -torch.inf)
    is_limited_M1 = (top_k_M1 < vocab_size) | top_p_M1.isfinite()
    open_rows = is_limited_M1[:, 0].nonzero()[:, 0]
    for num_candidates in (*_NUM_CANDIDATES, vocab_size):
        if not len(open_rows):
            break
        num_candidates = min(num_candidates, vocab_size)
        top_MK = logits_MV[open_rows].topk(num_candidates, dim=-1).values
        probability_MK = (top_MK - logsumexp_M1[open_rows]).double().exp()
        mass_before_MK = probability_MK.cumsum(-1) - probability_MK
        rank_K = torch.arange(num_candidates, device=top_MK.device)
        top_k = top_k_M1[open_rows]
        is_kept_MK = (rank_K < top_k) & (mass_before_MK < top_p_M1[open_rows])
        num_kept_M1 = is_kept_MK.sum(-1, keepdim=True).clamp_(min=1)
        last_M1[open_rows] = top_MK.gather(1, num_kept_M1 - 1)
        # All candidates kept: there may be more, unless top_k ends here.
        is_open_M = (num_kept_M1 == num_candidates) & (top_k > num_candidates)
        open_rows = open_rows[is_open_M[:, 0]]
    return last_M1
