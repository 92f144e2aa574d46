"""Keys and values of many sequences: one contiguous slab each, and how passes attend over them.

Slabs, not pages: on a CPU, gathering pages each step costs more than the attention itself. Slabs
of one capacity are rows of one tensor, and the rows that decode are kept together at its front, so
that a decode step is one attention call per capacity over views, without a copy.

    row of a class   0 ......... decoding ......... filling ......... idle ......... free
    bounds                       bounds[0]          bounds[1]         bounds[2]

Invariants:
- Positions of a row from its slab's `length` on are zero: a masked NaN still reaches the output.
- The capacities of all slabs together stay within the pool's budget.
- A slab's row changes as others come and go; only the slab itself is a stable handle.

Shape suffixes: N tokens of a pass, B sequences of one class, T tokens of one sequence, L cached
positions, H query heads, G key-value heads, Q query heads per key-value head, E head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn import functional as F

from marlaas.model.attention import causal_attention

MIN_CAPACITY_TOKENS = 64
"""Capacity of the smallest class; each further class doubles it."""

LENGTH_STEP = 32
"""Attention lengths are rounded up to it. Masked positions then change no bit of a result (16 would
do, 8 would not: measured)."""

EXACT_MAX_QUERIES = 3
"""With more query heads to one product, its sum over 192 positions and that over 256 are cut into
different pieces: the rounding would depend on the longest neighbour (measured, see the tests)."""


class SlabKind(IntEnum):
    """What a slab is used for. The order is the order of rows in a class."""

    DECODING = 0
    FILLING = 1
    """Being prefilled."""
    IDLE = 2
    """Parked between turns, or a shared prefix."""


@dataclass(slots=True, eq=False)
class Slab:
    """Room for the keys and values of one sequence: `allocate -> (set_kind, grow)* -> free`."""

    owner: object
    kind: SlabKind
    home: "SlabClass"
    row: int
    length: int = 0
    """Positions that hold keys and values. Whoever writes them raises it after the pass."""

    @property
    def capacity(self) -> int:
        return self.home.capacity


class SlabClass:
    """All slabs of one capacity, as rows of one tensor that grows and shrinks with demand."""

    def __init__(self, capacity: int, like: Tensor) -> None:
        self.capacity = capacity
        num_layers, _, _, num_kv_heads, _, head_dim = like.shape
        self.kv = like.new_zeros(num_layers, 2, 0, num_kv_heads, capacity, head_dim)
        """[layers, keys and values, rows, G, capacity, E]. The positions of one head lie side by
        side: attention, which is bound by memory, reads them in one go."""
        self.slabs: list[Slab] = []
        self.bounds = [0, 0, 0]
        """End of the decoding, the filling and the idle rows."""

    @property
    def num_rows(self) -> int:
        return self.kv.shape[2]

    def resize(self, num_rows: int) -> None:
        """Change the number of rows; used ones keep their contents."""
        num_used = len(self.slabs)
        assert num_rows >= num_used, "rows in use cannot be dropped"
        old = self.kv
        with torch.inference_mode(False):  # Slabs change inside and outside of inference mode.
            self.kv = old.new_zeros(*old.shape[:2], num_rows, *old.shape[3:])
        self.kv[:, :, :num_used] = old[:, :, :num_used]

    def add(self, slab: Slab) -> None:
        """Take in a slab as the last used row, idle for now."""
        slab.home, slab.row, slab.kind = self, len(self.slabs), SlabKind.IDLE
        self.slabs.append(slab)
        self.bounds[SlabKind.IDLE] += 1

    def remove(self, slab: Slab) -> None:
        """Empty a slab and let go of its row."""
        self.kv[:, :, slab.row, :, : slab.length] = 0
        slab.length = 0
        self.move(slab, SlabKind.IDLE)
        self._swap(slab.row, len(self.slabs) - 1)
        self.slabs.pop()
        self.bounds[SlabKind.IDLE] -= 1

    def move(self, slab: Slab, kind: SlabKind) -> None:
        """Carry a slab into the rows of `kind`, across one boundary after the other."""
        while slab.kind < kind:
            self._swap(slab.row, self.bounds[slab.kind] - 1)
            self.bounds[slab.kind] -= 1
            slab.kind = SlabKind(slab.kind + 1)
        while slab.kind > kind:
            slab.kind = SlabKind(slab.kind - 1)
            self._swap(slab.row, self.bounds[slab.kind])
            self.bounds[slab.kind] += 1

    def _swap(self, row: int, other_row: int) -> None:
        if row == other_row:
            return
        first, second = self.slabs[row], self.slabs[other_row]
        here = self.kv[:, :, row, :, : max(first.length, second.length)]
        there = self.kv[:, :, other_row, :, : max(first.length, second.length)]
        if not first.length:
            here.copy_(there)
            there.zero_()
        elif not second.length:
            there.copy_(here)
            here.zero_()
        else:
            kept = here.clone()
            here.copy_(there)
            there.copy_(kept)
        self.slabs[row], self.slabs[other_row] = second, first
        first.row, second.row = other_row, row


class SlabPool:
    """All slabs of one device within a budget of `capacity_tokens`, counted in slab capacity.

    slab = pool.allocate(owner, 40)          # None when the budget does not allow it
    ... prefill 40 tokens, slab.length = 40 ...
    pool.set_kind(slab, SlabKind.DECODING)
    ... one decode step, slab.length = 41 ...
    pool.free(slab)
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        capacity_tokens: int,
    ) -> None:
        self.capacity_tokens = capacity_tokens
        self.used_tokens = 0
        self.decode_epoch = 0
        """Changes whenever the decoding rows of any class do."""
        self._classes: dict[int, SlabClass] = {}
        self._like = torch.empty(num_layers, 2, 0, num_kv_heads, 0, head_dim).to(device, dtype)

    @property
    def classes(self) -> list[SlabClass]:
        """The classes so far, smallest capacity first."""
        return [self._classes[capacity] for capacity in sorted(self._classes)]

    def decoding(self) -> list[Slab]:
        """The slabs that decode, class after class: the order of a decode pass."""
        return [slab for home in self.classes for slab in home.slabs[: home.bounds[0]]]

    def allocate(self, owner: object, num_tokens: int) -> Slab | None:
        """Return an empty slab for at least `num_tokens`, to be filled; None if over budget."""
        capacity = capacity_for(num_tokens)
        if self.used_tokens + capacity > self.capacity_tokens:
            return None
        self.used_tokens += capacity
        home = self._class_with_room(capacity)
        slab = Slab(owner, SlabKind.IDLE, home, -1)
        home.add(slab)
        self.set_kind(slab, SlabKind.FILLING)
        return slab

    def free(self, slab: Slab) -> None:
        """Zero the slab and give its room back."""
        self._note(slab.kind)
        slab.home.remove(slab)
        self.used_tokens -= slab.capacity

    def set_kind(self, slab: Slab, kind: SlabKind) -> None:
        self._note(slab.kind, kind)
        slab.home.move(slab, kind)

    def grow(self, slab: Slab, num_tokens: int) -> bool:
        """Move the slab to where `num_tokens` fit; False if over budget, nothing changed then."""
        old, capacity = slab.home, capacity_for(num_tokens)
        if capacity <= old.capacity:
            return True
        if self.used_tokens - old.capacity + capacity > self.capacity_tokens:
            return False
        self._note(slab.kind)
        kind, length = slab.kind, slab.length
        kept = old.kv[:, :, slab.row, :, :length].clone()
        old.remove(slab)
        self.used_tokens += capacity - old.capacity
        new = self._class_with_room(capacity)
        new.add(slab)
        new.move(slab, kind)
        new.kv[:, :, slab.row, :, :length] = kept
        slab.length = length
        return True

    def copy(self, source: Slab, target: Slab) -> None:
        """Fill an empty slab with all that another one holds."""
        assert target.length == 0, "only an empty slab is filled by a copy"
        end = source.length
        source_kv = source.home.kv[:, :, source.row, :, :end]
        target.home.kv[:, :, target.row, :, :end] = source_kv
        target.length = end

    def check(self) -> None:
        """Assert every invariant of this module; for tests."""
        assert self.used_tokens <= self.capacity_tokens
        assert self.used_tokens == sum(c.capacity * len(c.slabs) for c in self.classes)
        for home in self.classes:
            assert home.bounds[-1] == len(home.slabs) <= home.num_rows
            starts = [0, *home.bounds]
            for row, slab in enumerate(home.slabs):
                assert slab.home is home and slab.row == row
                assert starts[slab.kind] <= row < home.bounds[slab.kind]
                assert slab.length <= home.capacity
                assert not home.kv[:, :, row, :, slab.length :].any(), "stale keys past the length"
            assert not home.kv[:, :, len(home.slabs) :].any(), "stale keys in a free row"

    def _note(self, *kinds: SlabKind) -> None:
        if SlabKind.DECODING in kinds:
            self.decode_epoch += 1

    def _class_with_room(self, capacity: int) -> SlabClass:
        """Return the class with a free row, made within the budget by trimming other classes."""
        if capacity not in self._classes:
            self._classes[capacity] = SlabClass(capacity, self._like)
        home = self._classes[capacity]
        if len(home.slabs) == home.num_rows:
            num_rows = max(4, 2 * home.num_rows)
            others = [c for c in self._classes.values() if c is not home]
            allocated = sum(c.capacity * c.num_rows for c in others)
            if allocated + capacity * num_rows > self.capacity_tokens:
                for other in others:
                    if other.num_rows > len(other.slabs):
                        other.resize(len(other.slabs))
                allocated = sum(c.capacity * c.num_rows for c in others)
                fitting = (self.capacity_tokens - allocated) // capacity
                num_rows = max(len(home.slabs) + 1, min(num_rows, fitting))
            home.resize(num_rows)
            self.decode_epoch += 1  # Views of the old tensors are stale.
        return home


def capacity_for(num_tokens: int) -> int:
    """Return the capacity of the smallest class that holds `num_tokens`."""
    capacity = MIN_CAPACITY_TOKENS
    while capacity < num_tokens:
        capacity *= 2
    return capacity


# ---------------------------------------------------------------------------------------------
# Attention over slabs


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one slab that one prefill pass computes: [slab.length, end)."""

    slab: Slab
    end: int


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


class _DecodePart:
    """The decoding rows of one class, for as long as they stay the same."""

    def __init__(self, home: SlabClass, first: int) -> None:
        self.home = home
        self.own = slice(first, first + home.bounds[0])
        """Place of these rows in the pass."""
        num_layers, _, num_rows, num_heads, capacity, width = home.kv.shape
        device = home.kv.device
        self.stores = home.kv.view(num_layers, -1, width).unbind()
        """Per layer, the keys and values of all rows, heads and positions, one after another."""
        place_2RG = torch.arange(2 * num_rows * num_heads, device=device).view(2, num_rows, -1)
        self.start_2BG = place_2RG[:, : home.bounds[0]] * capacity
        """Where in a layer's store each row and head begins."""
        self.position_C = torch.arange(capacity, device=device)
        self.visible, self.hidden = home.kv.new_tensor([0.0, -torch.inf]).unbind()
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
        is_past_BL = self.position_C[:length] <= position_B[:, None]
        self.mask_B11L = torch.where(is_past_BL, self.visible, self.hidden)[:, None, None]
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
