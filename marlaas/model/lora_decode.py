"""LoRA of decode steps on a CPU: one token per sequence, few tokens for each of many adapters.

    delta_n = sum_r u_nr s B^T[slot_n, r, :]      with  u_nr = sum_d x_nd A^T[slot_n, d, r]

Both are weighted sums of rows of a table, which is what `torch.embedding_bag` computes: one call
over all tokens, in any order, where batched products would call a tiny product per adapter and
gather, pad and scatter around it. Each token's sums are its own: company changes no bit of them.

Ranks mix in one table: an adapter of rank 32 is four slices of rank 8, each with a place in the
tables. The tables hold copies of the adapters in use, linear by linear, A and B transposed and B
scaled. An adapter is copied when it first decodes; sets that come and go copy nothing.

Called by `lora.py`. Shape suffixes: N tokens of the pass, n those with an adapter, b their slices,
D input width, O output width, R rank, S places in the tables.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from marlaas.model.bank import ModuleShape, RowLayout, Slot

SLICE_RANK = 8
"""Rank of one place in the tables; divides the rank of every bucket."""

_SUM = 0
"""The mode of `torch.embedding_bag`."""


class AdapterRow(NamedTuple):
    """One adapter as the bank keeps it."""

    layout: "RowLayout"
    row_P: Tensor
    scale: float
    kinds: frozenset[str]
    """Linears that it targets."""


class DecodeTables:
    """Copies of adapters as tables: `place` before a batch is built, `drop` when one changes.

    An adapter keeps its places until another one needs them. There are tables for the linears that
    some adapter targeted; what lies there at the places of one that does not is never read.
    """

    def __init__(self, modules: Sequence["ModuleShape"]) -> None:
        self.num_places = 0
        self.weights: dict[str, tuple[Tensor, Tensor]] = {}
        """Module name to A^T [S * D, 8] and s B^T [S * 8, O]."""
        self._modules = modules
        self._places: dict[Slot, list[int]] = {}
        """Least recently used first."""
        self._free: list[int] = []

    def place(self, adapters: "Mapping[Slot, AdapterRow]") -> "dict[Slot, list[int]]":
        """Return where in the tables the slices of these adapters are, copied there if need be."""
        new = [slot for slot in adapters if slot not in self._places]
        idle = [slot for slot in self._places if slot not in adapters]
        num_needed = sum(slot.rank for slot in new) // SLICE_RANK
        while len(self._free) < num_needed and idle:
            self.drop(idle.pop(0))
        if len(self._free) < num_needed:
            num_places = self.num_places + num_needed - len(self._free)
            self._grow(max(num_places, 2 * self.num_places))
        for slot in new:
            self._places[slot] = [self._free.pop() for _ in range(slot.rank // SLICE_RANK)]
            self._copy(self._places[slot], adapters[slot])
        for slot in adapters:
            self._places[slot] = self._places.pop(slot)
        return {slot: self._places[slot] for slot in adapters}

    def drop(self, slot: "Slot") -> None:
        """Forget the copy of an adapter, if there is one."""
        self._free += self._places.pop(slot, [])

    def _grow(self, num_places: int) -> None:
        for name, tables in self.weights.items():
            old_a, old_b = tables
            factor = num_places / self.num_places
            new_a = old_a.new_zeros(round(len(old_a) * factor), old_a.shape[1])
            new_b = old_b.new_zeros(round(len(old_b) * factor), old_b.shape[1])
            new_a[: len(old_a)], new_b[: len(old_b)] = old_a, old_b
            self.weights[name] = (new_a, new_b)
        self._free += range(num_places - 1, self.num_places - 1, -1)
        self.num_places = num_places

    def _copy(self, places: list[int], adapter: AdapterRow) -> None:
        for module in self._modules:
            if module.kind not in adapter.kinds:
                continue
            width_in, width_out = module.in_features, module.out_features
            if module.name not in self.weights:
                self.weights[module.name] = (
                    torch.zeros(self.num_places * width_in, SLICE_RANK),
                    torch.zeros(self.num_places * SLICE_RANK, width_out),
                )
            a_table, b_table = self.weights[module.name]
            a_SDR = a_table.view(self.num_places, width_in, SLICE_RANK)
            b_SRO = b_table.view(self.num_places, SLICE_RANK, width_out)
            a_RD, b_OR = adapter.layout.row_views(adapter.row_P, module)
            for idx, place in enumerate(places):
                ranks = slice(idx * SLICE_RANK, (idx + 1) * SLICE_RANK)
                a_SDR[place] = a_RD[ranks].t()
                torch.mul(b_OR[:, ranks].t(), adapter.scale, out=b_SRO[place])


class DecodePart:
    """All tokens of one pass that have an adapter, served from the tables."""

    def __init__(
        self,
        tables: DecodeTables,
        adapters: "Mapping[Slot, AdapterRow]",
        positions: "Mapping[Slot, Sequence[int]]",
        num_tokens: int,
    ) -> None:
        """Lay out a pass.

        Args:
            positions: the tokens of each adapter in the pass.
        """
        self.kinds = frozenset().union(*(adapter.kinds for adapter in adapters.values()))
        self._adapters, self._positions, self._num_tokens = adapters, positions, num_tokens
        self._places = tables.place(adapters)
        self._weights = tables.weights
        self._layouts: dict[str, TokenLayout] = {}
        """By kind of linear: the tokens whose adapters target it."""

    def forward_(self, y_NO: Tensor, x_ND: Tensor, module: "ModuleShape") -> Tensor:
        kind = module.kind
        layout = self._layouts.get(kind)
        if layout is None:
            layout = self._layouts[kind] = self._layout(kind)
        a_table, b_table = self._weights[module.name]
        if layout.token_b is None:
            x_bD = x_ND[: layout.num_slices]
        else:
            x_bD = x_ND.index_select(0, layout.token_b)
        inner_bR = layout.bags_a(module.in_features).weighted_sums(a_table, x_bD)
        y_NO += layout.bags_b.weighted_sums(b_table, inner_bR)
        return inner_bR

    def backward_(self, *_: object) -> None:
        raise AssertionError("decode steps have no gradient")

    def _layout(self, kind: str) -> "TokenLayout":
        slots = tuple(slot for slot, adapter in self._adapters.items() if kind in adapter.kinds)
        for known in self._layouts.values():
            if known.slots == slots:
                return known
        token_places: list[list[int]] = [[] for _ in range(self._num_tokens)]
        for slot in slots:
            for token in self._positions[slot]:
                token_places[token] = self._places[slot]
        return TokenLayout(slots, token_places)


class TokenLayout:
    """Which table rows the sums of each token are over, for the tokens of some adapters."""

    def __init__(self, slots: "tuple[Slot, ...]", token_places: Sequence[Sequence[int]]) -> None:
        """Lay out tokens, each with the places of its adapter's slices, if any."""
        self.slots = slots
        num_slices = [len(places) for places in token_places]
        self._place_b = _int32([place for places in token_places for place in places])
        token_b = [token for token, num in enumerate(num_slices) for _ in range(num)]
        self.num_slices = len(token_b)
        is_in_order = token_b == list(range(len(token_b)))
        self.token_b = None if is_in_order else torch.tensor(token_b)
        """Token of each slice; None when the first tokens, or all, have one each."""
        # Tokens without an adapter have empty bags, whose sum is zero.
        self.bags_b = Bags.of_slices(self._place_b, SLICE_RANK, num_slices)
        self._bags_a: dict[int, Bags] = {}

    def bags_a(self, width_in: int) -> "Bags":
        """Return one bag per slice, over the rows of its A^T."""
        bags = self._bags_a.get(width_in)
        if bags is None:
            bags = Bags.one_each(self._place_b, width_in)
            self._bags_a[width_in] = bags
        return bags


class Bags(NamedTuple):
    """Which rows of a table each sum is over."""

    row: Tensor
    start: Tensor
    """Where in `row` each bag begins."""

    @classmethod
    def of_slices(cls, place_b: Tensor, num_rows: int, num_slices: Sequence[int]) -> "Bags":
        """Return bags over all `num_rows` table rows of each slice, `num_slices` to a bag."""
        row = (place_b[:, None] * num_rows + _range(num_rows)).flatten()
        num = _int32(num_slices)
        return cls(row, (num.cumsum(0, dtype=torch.int32) - num) * num_rows)

    @classmethod
    def one_each(cls, place_b: Tensor, num_rows: int) -> "Bags":
        """Return one bag for each slice, over all its `num_rows` table rows."""
        row = (place_b[:, None] * num_rows + _range(num_rows)).flatten()
        return cls(row, _range(len(place_b)) * num_rows)

    def weighted_sums(self, table: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of each bag's table rows times their weights."""
        return torch.embedding_bag(
            table, self.row, self.start, False, _SUM, False, weights.reshape(-1)
        )[0]


@lru_cache(maxsize=64)
def _range(num: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(num, dtype=torch.int32)


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
