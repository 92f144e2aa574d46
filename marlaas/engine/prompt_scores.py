"""Logprobs of a context's own tokens, collected chunk by chunk as prefill passes go over it.

Entry t describes token t, hence the prediction made at position t - 1; entry 0 has none. At
temperature 1, under the whole distribution. Logits of a few positions exist at a time.

Shape suffixes: T positions of one chunk, V vocabulary, D width, K most likely tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

ROWS_AT_ONCE = 128
"""Positions whose logits are in memory at once."""


@dataclass(slots=True)
class PromptScores:
    """What is known so far of one context: `add` per chunk, then `logprobs` and `topk`."""

    num_top: int
    """Most likely tokens to keep at each position; 0 keeps none."""
    num_scored: int = 0
    """Positions whose next token is scored."""
    _chosen: list[Tensor] = field(default_factory=list)
    _ids: list[Tensor] = field(default_factory=list)
    _values: list[Tensor] = field(default_factory=list)

    def add(
        self, hidden_TD: Tensor, next_token_T: Tensor, to_logits: Callable[[Tensor], Tensor]
    ) -> None:
        """Score the tokens that follow the next positions, whose last hidden states are given."""
        pieces = zip(hidden_TD.split(ROWS_AT_ONCE), next_token_T.split(ROWS_AT_ONCE), strict=True)
        for piece_TD, token_T in pieces:
            logprob_TV = to_logits(piece_TD).log_softmax(-1)
            top_TK = logprob_TV.topk(self.num_top, dim=-1)
            self.num_scored += len(token_T)
            self._chosen.append(logprob_TV.gather(1, token_T[:, None])[:, 0].cpu())
            self._ids.append(top_TK.indices.to("cpu", torch.int32))
            self._values.append(top_TK.values.cpu())

    def logprobs(self) -> np.ndarray:
        """Return float32 [T] of the whole context, NaN at 0."""
        return torch.cat([torch.full((1,), torch.nan), *self._chosen]).numpy()

    def topk(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ids int32 [T, K], -1 at 0, and their logprobs float32 [T, K], NaN at 0."""
        no_ids = torch.full((1, self.num_top), -1, dtype=torch.int32)
        no_values = torch.full((1, self.num_top), torch.nan)
        ids, values = torch.cat([no_ids, *self._ids]), torch.cat([no_values, *self._values])
        return ids.numpy(), values.numpy()
