"""What is asked of a context's own tokens, collected chunk by chunk as prefill passes go over it.

Entry t describes token t, hence the prediction made at position t - 1; entry 0 has none, nor has
any before the first that is asked for. At temperature 1, under the whole distribution, except for
drawn tokens. Logits of a few positions exist at a time.

Shape suffixes: T entries of the context or of one chunk, V vocabulary, D width, K columns: most
likely tokens, given ones, drawn ones.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from marlaas.engine.sampler import SamplingBatch, sample_many
from marlaas.engine.types import SequenceRequest

ROWS_AT_ONCE = 128
"""Positions whose logits are in memory at once."""

MAX_COLUMNS = 256
"""Most likely, given or drawn tokens of one position."""


class _Column(NamedTuple):
    """Tokens of the next entries with their logprobs."""

    ids_TK: Tensor
    logprobs_TK: Tensor


@dataclass(slots=True)
class PromptScores:
    """What is known so far of one context: `add` per chunk, then `fields`."""

    request: SequenceRequest
    num_scored: int
    """Positions whose next token is scored, those that nobody asked for included."""
    _columns: dict[str, list[_Column]] = field(default_factory=dict)

    @classmethod
    def of(cls, request: SequenceRequest) -> "PromptScores | None":
        """Return what to collect for a request; None if it asks nothing of its context."""
        return cls(request, request.first_scored) if request.is_scored else None

    @property
    def is_complete(self) -> bool:
        return self.num_scored >= len(self.request.tokens) - 1

    def add(
        self, hidden_TD: Tensor, next_token_T: Tensor, to_logits: Callable[[Tensor], Tensor]
    ) -> None:
        """Score the tokens that follow the next positions, whose last hidden states are given."""
        pieces = zip(hidden_TD.split(ROWS_AT_ONCE), next_token_T.split(ROWS_AT_ONCE), strict=True)
        for piece_TD, token_T in pieces:
            for name, column in self._read(to_logits(piece_TD), token_T):
                self._columns.setdefault(name, []).append(column)
            self.num_scored += len(token_T)

    def _read(self, logits_TV: Tensor, token_T: Tensor) -> Iterator[tuple[str, _Column]]:
        """Yield what is asked of the next entries; uses the logits up."""
        request = self.request
        first = self.num_scored + 1
        entries = np.arange(first, first + len(token_T))
        logprob_TV = logits_TV.log_softmax(-1)
        if request.prompt_logprobs:
            ids_T1 = token_T[:, None]
            yield "prompt", _Column(ids_T1, logprob_TV.gather(1, ids_T1).cpu())
        if request.topk_prompt_logprobs:
            top_TK = logprob_TV.topk(request.topk_prompt_logprobs, dim=-1)
            yield "topk", _Column(top_TK.indices.cpu(), top_TK.values.cpu())
        if request.target_prompt_ids is not None:
            ids_TK = torch.from_numpy(request.target_prompt_ids[entries].astype(np.int64))
            chosen_TK = logprob_TV.gather(1, ids_TK.clamp(min=0).to(logprob_TV.device)).cpu()
            yield "target", _Column(ids_TK, chosen_TK.masked_fill_(ids_TK < 0, torch.nan))
        if request.prompt_alt_tokens_k:
            params = [request.sampling] * len(entries)
            batch = SamplingBatch.build(params, logits_TV.shape[1], logits_TV.device)
            drawn = sample_many(logits_TV, batch, entries, request.prompt_alt_tokens_k)
            yield "alt", _Column(drawn.token_NK.cpu(), drawn.logprob_NK.cpu())

    def fields(self) -> dict[str, np.ndarray]:
        """Return what was asked for, named as in `SequenceResult`; -1 and NaN where there is none.

        Call it once `is_complete`.
        """
        request, fields = self.request, {}
        if request.prompt_logprobs:
            fields["prompt_logprobs"] = self._whole("prompt", 1)[1][:, 0]
        if num := request.topk_prompt_logprobs:
            fields["topk_prompt_ids"], fields["topk_prompt_logprobs"] = self._whole("topk", num)
        if request.target_prompt_ids is not None:
            num = request.target_prompt_ids.shape[1]
            fields["target_prompt_logprobs"] = self._whole("target", num)[1]
        if num := request.prompt_alt_tokens_k:
            fields["prompt_alt_ids"], fields["prompt_alt_logprobs"] = self._whole("alt", num)
        return fields

    def _whole(self, name: str, num_columns: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids int32 [T, K] and logprobs float32 [T, K] of the whole context."""
        num_tokens = len(self.request.tokens)
        ids = np.full((num_tokens, num_columns), -1, dtype=np.int32)
        logprobs = np.full((num_tokens, num_columns), np.nan, dtype=np.float32)
        start = self.request.first_scored + 1
        for column in self._columns.get(name, ()):
            end = start + len(column.ids_TK)
            ids[start:end] = column.ids_TK.numpy()
            logprobs[start:end] = column.logprobs_TK.numpy()
            start = end
        return ids, logprobs


def score_problems(request: SequenceRequest, vocab_size: int) -> Iterator[str]:
    """Yield what is wrong with what a request asks of its context and of its sampled tokens."""
    num_tokens, most = len(request.tokens), min(MAX_COLUMNS, vocab_size)
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        if not 0 <= getattr(request, name) <= most:
            yield f"{name} = {getattr(request, name)}; expected 0..{most}"
    if not 0 <= request.prompt_logprobs_from <= num_tokens:
        yield f"prompt_logprobs_from = {request.prompt_logprobs_from}; expected 0..{num_tokens}"
    targets = request.target_prompt_ids
    if targets is None:
        return
    if targets.ndim != 2 or len(targets) != num_tokens or not 1 <= targets.shape[1] <= MAX_COLUMNS:
        yield (
            f"target_prompt_ids has shape {targets.shape}; expected ({num_tokens}, K) with K "
            f"in 1..{MAX_COLUMNS}"
        )
    elif targets.dtype.kind not in "iu" or targets.min() < -1 or targets.max() >= vocab_size:
        yield f"target_prompt_ids: expected integers, -1 to {vocab_size - 1}"
