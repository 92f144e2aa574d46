"""Our attention, registered with `transformers` under the name `marlaas`.

Every pass is one packed row of tokens [1, N]; who may attend to whom is not a mask but an object,
the pass's `AttentionContext`, handed through the model's forward as the keyword `context`. Two
kinds exist: `PackedSequences` here (whole sequences, for training and scoring) and the cached
context of `engine/kv_attention.py` (prefill and decode). Attention is always per sequence: no dense
mask ever spans two tenants' tokens, and NaN in one sequence cannot reach another.

Shape suffixes: N packed tokens, H query heads, G key-value heads, E head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from marlaas.errors import UnsupportedBase

ATTENTION_NAME = "marlaas"

_IGNORED_ARGUMENTS = frozenset(
    ("dropout", "position_ids", "use_cache", "cache", "past_key_values", "is_causal")
)
"""What models pass along that means nothing for an exact, cache-less causal attention."""


class AttentionContext(Protocol):
    """How the tokens of one pass attend."""

    def attend(
        self, layer_idx: int, q_NHE: Tensor, k_NGE: Tensor, v_NGE: Tensor, scaling: float
    ) -> Tensor:
        """Return the attention output [N, H, E]; a cached context stores keys and values first."""
        ...


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Whole sequences one after another; each attends causally to itself alone."""

    lengths: Sequence[int]

    def attend(
        self, layer_idx: int, q_NHE: Tensor, k_NGE: Tensor, v_NGE: Tensor, scaling: float
    ) -> Tensor:
        pieces = zip(
            q_NHE.split(self.lengths),
            k_NGE.split(self.lengths),
            v_NGE.split(self.lengths),
            strict=True,
        )
        return torch.cat([causal_attention(q, k, v, scaling) for q, k, v in pieces])


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Sequences of one pass that attend together, as places in the pass.

    Sequences shorter than the longest repeat their last token at the end.
    """

    keys_ST: np.ndarray
    """The place of each token of each sequence, shared prefix included."""
    queries_SQ: np.ndarray | None = None
    """The place of each token whose output is wanted; None: of every one."""
    positions_SQ: np.ndarray | None = None
    """Where in their sequence the queries are."""

    @property
    def num_keys(self) -> int:
        return self.keys_ST.size

    @property
    def num_queries(self) -> int:
        return self.keys_ST.size if self.queries_SQ is None else self.queries_SQ.size

    @property
    def num_masked(self) -> int:
        """Elements of its mask."""
        return 0 if self.queries_SQ is None else self.queries_SQ.size * self.keys_ST.shape[1]


@dataclass(frozen=True, slots=True)
class BatchedSequences:
    """Sequences in batches of similar length, one product a batch; prefixes may be shared.

    A place may be in several sequences: then their tokens up to there are the same, and only one of
    them needs its output. The others ask for the outputs of their own tokens alone, over all keys.
    Repeated last tokens come after the real ones, which never see them.
    """

    parts: "Sequence[_BatchPart]"
    own_N: Tensor
    """int64. Where each token of the pass is among the queries of all batches."""

    @classmethod
    def build(
        cls, batches: Sequence[AttentionBatch], dtype: torch.dtype, device: torch.device
    ) -> "BatchedSequences":
        parts = [_BatchPart.build(batch, dtype, device) for batch in batches]
        places = [_queries(batch).ravel() for batch in batches]
        # Of a token's rows the first is a real one: repeated last tokens come after them.
        _, own_N = np.unique(np.concatenate(places), return_index=True)
        return cls(parts, torch.from_numpy(own_N).to(device))

    def attend(
        self, layer_idx: int, q_NHE: Tensor, k_NGE: Tensor, v_NGE: Tensor, scaling: float
    ) -> Tensor:
        outs = [part.attend(q_NHE, k_NGE, v_NGE, scaling) for part in self.parts]
        return torch.cat(outs).index_select(0, self.own_N)


def _queries(batch: AttentionBatch) -> np.ndarray:
    return batch.keys_ST if batch.queries_SQ is None else batch.queries_SQ


@dataclass(frozen=True, slots=True)
class _BatchPart:
    """One attention batch on the device."""

    shape: tuple[int, int]
    """[S, T] of the keys."""
    key_L: Tensor
    query_L: Tensor
    mask_S1QT: Tensor | None
    """None: every token is a query, and attention is plainly causal."""

    @classmethod
    def build(cls, batch: AttentionBatch, dtype: torch.dtype, device: torch.device) -> "_BatchPart":
        key_L = torch.from_numpy(batch.keys_ST.ravel()).to(device)
        if batch.queries_SQ is None or batch.positions_SQ is None:
            return cls(batch.keys_ST.shape, key_L, key_L, None)
        num_keys = batch.keys_ST.shape[1]
        position_SQ1 = torch.from_numpy(batch.positions_SQ).to(device)[:, :, None]
        is_later_SQT = torch.arange(num_keys, device=device) > position_SQ1
        mask_SQT = torch.zeros(is_later_SQT.shape, dtype=dtype, device=device)
        mask_SQT.masked_fill_(is_later_SQT, -torch.inf)
        query_L = torch.from_numpy(batch.queries_SQ.ravel()).to(device)
        return cls(batch.keys_ST.shape, key_L, query_L, mask_SQT[:, None])

    def attend(self, q_NHE: Tensor, k_NGE: Tensor, v_NGE: Tensor, scaling: float) -> Tensor:
        """Return the outputs of the queries, sequence after sequence, [S Q, H, E]."""
        num_sequences = self.shape[0]
        q_SHQE, k_SGTE, v_SGTE = (
            x.index_select(0, where_L).unflatten(0, (num_sequences, -1)).transpose(1, 2)
            for x, where_L in ((q_NHE, self.query_L), (k_NGE, self.key_L), (v_NGE, self.key_L))
        )
        out_SHQE = F.scaled_dot_product_attention(
            q_SHQE,
            k_SGTE,
            v_SGTE,
            attn_mask=self.mask_S1QT,
            is_causal=self.mask_S1QT is None,
            scale=scaling,
            enable_gqa=q_SHQE.shape[1] != k_SGTE.shape[1],
        )
        return out_SHQE.transpose(1, 2).flatten(0, 1)


def causal_attention(q_TGE: Tensor, k_TGE: Tensor, v_TGE: Tensor, scaling: float) -> Tensor:
    """Return causal attention of one whole sequence, [T, H, E]; key-value heads are shared."""
    out = F.scaled_dot_product_attention(
        q_TGE.transpose(0, 1)[None],
        k_TGE.transpose(0, 1)[None],
        v_TGE.transpose(0, 1)[None],
        is_causal=True,
        scale=scaling,
        enable_gqa=q_TGE.shape[1] != k_TGE.shape[1],
    )
    return out[0].transpose(0, 1)


def _attention(  # noqa: PLR0913 - the signature is that of `transformers`
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    context: AttentionContext | None = None,
    sliding_window: int | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """The function that `transformers` calls in every attention layer, on [1, heads, N, E]."""
    unknown = {name: value for name, value in others.items() if value is not None}
    unknown = {name: value for name, value in unknown.items() if name not in _IGNORED_ARGUMENTS}
    if unknown or sliding_window is not None or attention_mask is not None:
        names = [*unknown, *(["sliding_window"] if sliding_window is not None else [])]
        raise UnsupportedBase(
            f"attention of {type(module).__name__} asks for {', '.join(names) or 'a mask'}, "
            "which our attention does not compute; expected plain causal attention"
        )
    assert context is not None, "a pass needs its attention context"
    assert query.shape[0] == 1, "passes are one packed row"
    out_NHE = context.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
    )
    return out_NHE[None], None


def register() -> None:
    """Make the name `marlaas` known to `transformers`; no mask is built for it."""
    AttentionInterface.register(ATTENTION_NAME, _attention)
