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
class BatchedSequences:
    """Whole sequences in batches of similar length, one product a batch; prefixes may be shared.

    A batch [S, T] lists the place in the pass of each token of its sequences. A place may be in
    several sequences: then their tokens up to there are the same. Sequences shorter than T repeat
    their last token; these rows come after the real ones, which never see them.
    """

    shapes: Sequence[tuple[int, int]]
    """[S, T] of each batch."""
    place_L: Tensor
    """int64. Place in the pass of each token of all batches."""
    own_N: Tensor
    """int64. Where each token of the pass is among these."""

    @classmethod
    def build(cls, batches: Sequence[np.ndarray], device: torch.device) -> "BatchedSequences":
        place_L = np.concatenate([batch.ravel() for batch in batches])
        # Of a token's rows the first is a real one: repeated last tokens come after them.
        _, own_N = np.unique(place_L, return_index=True)
        return cls(
            [batch.shape for batch in batches],
            torch.from_numpy(place_L).to(device),
            torch.from_numpy(own_N).to(device),
        )

    def attend(
        self, layer_idx: int, q_NHE: Tensor, k_NGE: Tensor, v_NGE: Tensor, scaling: float
    ) -> Tensor:
        sizes = [num_sequences * length for num_sequences, length in self.shapes]
        pieces = zip(
            self.shapes,
            *(x.index_select(0, self.place_L).split(sizes) for x in (q_NHE, k_NGE, v_NGE)),
            strict=True,
        )
        outs = []
        for shape, *qkv in pieces:
            q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in qkv)
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
            )
            outs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outs).index_select(0, self.own_N)


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
