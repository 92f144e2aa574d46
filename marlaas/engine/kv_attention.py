"""How prefill passes and decode steps attend over slabs: the `AttentionContext`s of sampling.

A prefill pass attends chunk by chunk, a decode step class by class: one call for all decoding rows
of a capacity, over views of the slabs, as far as the longest of them reaches.

Shape suffixes: N tokens of a pass, B sequences of one class, T tokens of one sequence, L cached
positions, R rows of a class, H query heads, G key-value heads, Q query heads per key-value head,
E head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from marlaas.engine.kv_cache import Chunk, SlabClass, SlabPool
from marlaas.model.attention import causal_attention

LENGTH_STEP = 32
"""Attention lengths are rounded up to it. Masked positions then change no bit of a result (16 would
do, 8 would not: measured)."""

EXACT_MAX_QUERIES = 3
"""With more query heads to one product, its sum over 192 positions and that over 256 are cut into
different pieces: the rounding would depend on the longest neighbour (measured, see the tests)."""


class PrefillContext:
    """Attention of one prefill pass over the concatenated chunks, each in its own slab.

    Tokens of the pass past the last chunk are padding; their output is zero.
    """

    def __init__(self, chunks: Sequence[Chunk], dtype: torch.dtype, device: torch.device) -> None:
        self._spans: list[tuple[SlabClass, int, int, int, Tensor | None]] = []
        """(class, row, first position, end position, mask [T, L] unless all is new) per chunk."""
        for chunk in chunks:
            start, end = chunk.slab.length, chunk.end
            mask_TL = None
            if start:
                position_T1 = torch.arange(start, end, device=device)[:, None]
                is_later_TL = torch.arange(end, device=device) > position_T1
                mask_TL = torch.zeros(is_later_TL.shape, dtype=dtype, device=device)
                mask_TL.masked_fill_(is_later_TL, -torch.inf)
            self._spans.append((chunk.slab.home, chunk.slab.row, start, end, mask_TL))

    def attend(
        self, layer_idx: int, q_NHE: Tensor, k_NGE: Tensor, v_NGE: Tensor, scaling: float
    ) -> Tensor:
        out_NHE = torch.zeros_like(q_NHE)
        offset = 0
        for home, row, start, end, mask_TL in self._spans:
            own = slice(offset, offset + end - start)
            offset = own.stop
            keys_GLE, values_GLE = home.kv[layer_idx, :, row, :, :end].unbind()
            keys_GLE[:, start:] = k_NGE[own].transpose(0, 1)
            values_GLE[:, start:] = v_NGE[own].transpose(0, 1)
            if mask_TL is None:
                out_NHE[own] = causal_attention(q_NHE[own], k_NGE[own], v_NGE[own], scaling)
                continue
            out_HTE = F.scaled_dot_product_attention(
                q_NHE[own].transpose(0, 1)[None],
                keys_GLE[None],
                values_GLE[None],
                attn_mask=mask_TL,
                scale=scaling,
                enable_gqa=True,
            )[0]
            out_NHE[own] = out_HTE.transpose(0, 1)
        return out_NHE


class _ClassViews:
    """One class as decode attention sees it, for as long as it has this many rows."""

    def __init__(self, home: SlabClass) -> None:
        num_layers, _, num_rows, num_heads, capacity, width = home.kv.shape
        device = home.kv.device
        self.stores = home.kv.view(num_layers, -1, width).unbind()
        """Per layer, the keys and values of all rows, heads and positions, one after another."""
        place_2RG = torch.arange(2 * num_rows * num_heads, device=device).view(2, num_rows, -1)
        self.start_2RG = place_2RG * capacity
        """Where in a layer's store each row and head begins."""
        self.position_C = torch.arange(capacity, device=device)
        self.visible, self.hidden = home.kv.new_tensor([0.0, -torch.inf]).unbind()

    @classmethod
    def of(cls, home: SlabClass) -> "_ClassViews":
        if not isinstance(home.views, cls):
            home.views = cls(home)
        return home.views


class _DecodePart:
    """The decoding rows of one class, for as long as they stay the same."""

    def __init__(self, home: SlabClass, first: int) -> None:
        self.home = home
        self.own = slice(first, first + home.bounds[0])
        """Place of these rows in the pass."""
        self._class = _ClassViews.of(home)
        self.stores = self._class.stores
        self.start_2BG = self._class.start_2RG[:, : home.bounds[0]]
        self.length = 0
        self.views: list[tuple[Tensor, Tensor]] = []
        """Per layer, keys and values [B, G, L, E]."""
        self.mask_B11L = self.index_M = torch.empty(0)

    def advance(self, position_B: Tensor, max_position: int) -> None:
        """Point the part at the positions that the coming step writes and then attends to."""
        length = -(-(max_position + 1) // LENGTH_STEP) * LENGTH_STEP
        if length != self.length:
            self.length = length
            kv = self.home.kv[:, :, : self.home.bounds[0], :, :length]
            self.views = [tuple(layer.unbind()) for layer in kv.unbind()]  # type: ignore[misc]
        of_class = self._class
        is_past_BL = of_class.position_C[:length] <= position_B[:, None]
        self.mask_B11L = torch.where(is_past_BL, of_class.visible, of_class.hidden)[:, None, None]
        self.index_M = (self.start_2BG + position_B[:, None]).flatten()


class DecodeContext:
    """Attention of decode steps: one new token for each decoding slab, in the pool's order.

    Made once per set of decoding rows (`pool.decode_epoch`); `advance` precedes every step. Tokens
    of the pass past the last slab are padding; their output is zero.
    """

    def __init__(self, pool: SlabPool, *, is_exact: bool = False) -> None:
        self._is_exact = is_exact
        self.parts: list[_DecodePart] = []
        first = 0
        for home in pool.classes:
            if home.bounds[0]:
                self.parts.append(_DecodePart(home, first))
                first += home.bounds[0]
        self.num_rows = first

    def advance(self, position_N: Tensor, max_positions: Sequence[int]) -> None:
        """Set the position of each row's new token; `max_positions` has the largest per part."""
        for part, max_position in zip(self.parts, max_positions, strict=True):
            part.advance(position_N[part.own], max_position)

    def attend(
        self, layer_idx: int, q_NHE: Tensor, k_NGE: Tensor, v_NGE: Tensor, scaling: float
    ) -> Tensor:
        outs = [self._attend(part, layer_idx, q_NHE, k_NGE, v_NGE, scaling) for part in self.parts]
        if self.num_rows < q_NHE.shape[0]:
            outs.append(torch.zeros_like(q_NHE[self.num_rows :]))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend(
        self,
        part: _DecodePart,
        layer_idx: int,
        q_NHE: Tensor,
        k_NGE: Tensor,
        v_NGE: Tensor,
        scaling: float,
    ) -> Tensor:
        new_2BGE = torch.cat([k_NGE[part.own], v_NGE[part.own]])
        part.stores[layer_idx].index_copy_(0, part.index_M, new_2BGE.flatten(0, 1))
        keys_BGLE, values_BGLE = part.views[layer_idx]
        # Query heads of one key-value head are rows of one product: Q of them, or fewer if exact.
        num_queries = q_NHE.shape[1] // k_NGE.shape[1]
        num_rows = (
            _largest_divisor(num_queries, EXACT_MAX_QUERIES) if self._is_exact else num_queries
        )
        out_BHQE = F.scaled_dot_product_attention(
            q_NHE[part.own].unflatten(1, (-1, num_rows)),
            keys_BGLE,
            values_BGLE,
            attn_mask=part.mask_B11L,
            scale=scaling,
            enable_gqa=num_rows < num_queries,
        )
        return out_BHQE.flatten(1, 2)


def _largest_divisor(number: int, most: int) -> int:
    return max(n for n in range(1, most + 1) if number % n == 0)
