"""Keys and values of many sequences: one contiguous slab each. Attention: `kv_attention.py`.

Slabs, not pages: on a CPU, gathering pages each step costs more than the attention itself. Slabs
of one capacity are rows of one tensor, and the rows that decode are kept together at its front, so
that a decode step is one attention call per capacity over views, without a copy.

    row of a class   0 ......... decoding ......... filling ......... idle ......... free
    bounds                       bounds[0]          bounds[1]         bounds[2]

Invariants:
- Positions of a row from its slab's `length` on are zero: a masked NaN still reaches the output.
- The capacities of all slabs together stay within the pool's budget, and so do the rows of all
  classes. While a class grows, its old rows and its new ones exist side by side, and a slab that
  moves to a larger class once more: for that moment up to as much again. It comes out of the room
  that training passes have (`config.pass_memory_bytes`), as one thread does one or the other.
- A slab's row changes as others come and go; only the slab itself is a stable handle.

Shape suffixes: G key-value heads, E head width.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from marlaas.config import slab_tokens


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


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one slab that one prefill pass computes: [slab.length, end)."""

    slab: Slab
    end: int


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
        self.views: object = None
        """What decode attention keeps about `kv`; it goes when `kv` does."""

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
        self.views = None
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

    Memory follows demand: a class grows by doubling, and gives back free rows that another needs.
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

    @property
    def has_decoding(self) -> bool:
        return any(home.bounds[SlabKind.DECODING] for home in self._classes.values())

    def decoding(self) -> list[Slab]:
        """The slabs that decode, class after class: the order of a decode pass."""
        return [slab for home in self.classes for slab in home.slabs[: home.bounds[0]]]

    def allocate(self, owner: object, num_tokens: int) -> Slab | None:
        """Return an empty slab for at least `num_tokens`, to be filled; None if over budget."""
        capacity = slab_tokens(num_tokens)
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
        old, capacity = slab.home, slab_tokens(num_tokens)
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
        assert sum(c.capacity * c.num_rows for c in self.classes) <= self.capacity_tokens
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
