"""LoRA of decode steps on a CPU: one token per sequence, few tokens for each of many adapters.

    delta_n = sum_r u_nr s B^T[slot_n, r, :]      with  u_nr = sum_d x_nd A^T[slot_n, d, r]

Both are weighted sums of rows of a table, which is what `torch.embedding_bag` computes: one call
over all tokens, in any order, where batched products would call a tiny product per adapter and
gather, pad and scatter around it. Each token's sums are its own: company changes no bit of them.

The tables hold copies of the adapters in use, linear by linear, A and B transposed and B scaled. An
adapter is copied when it first decodes; sets that come and go copy nothing. Called by `lora.py`.

Shape suffixes: N tokens of the pass, n tokens of one part, D input width, O output width, R bucket
rank, S places in the tables.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from marlaas.model.lora import ModuleShape, RowLayout

_SUM = 0
"""The mode of `torch.embedding_bag`."""


class DecodeTables:
    """Copies of a bucket's adapters as tables. `place` before a batch, `drop` when one changes.

    A place is kept until another adapter needs it.
    """

    def __init__(self, layout: "RowLayout") -> None:
        self.layout = layout
        self.num_places = 0
        self.weights: dict[str, tuple[Tensor, Tensor]] = {}
        """Module name to A^T [S * D, R] and s B^T [S * R, O]."""
        self._places: dict[int, int] = {}
        """Bank row to place, least recently used first."""
        self._free: list[int] = []

    @staticmethod
    def fits(rows_SP: Tensor) -> bool:
        """Return whether adapters of this device and type can be served from tables."""
        return rows_SP.device.type == "cpu" and rows_SP.dtype == torch.float32

    def place(self, rows: Sequence[int], rows_SP: Tensor, scales: Sequence[float]) -> list[int]:
        """Return where in the tables the adapters of these bank rows are, copied if need be."""
        wanted = set(rows)
        new = [row for row in rows if row not in self._places]
        idle = [row for row in self._places if row not in wanted]
        while len(self._free) < len(new) and idle:
            self.drop(idle.pop(0))
        if len(self._free) < len(new):
            self._grow(max(4, 2 * self.num_places, len(wanted)), rows_SP)
        for row in new:
            self._places[row] = self._free.pop()
            self._copy(self._places[row], rows_SP[row], scales[row])
        for row in rows:
            self._places[row] = self._places.pop(row)
        return [self._places[row] for row in rows]

    def drop(self, row: int) -> None:
        """Forget the copy of a bank row, if there is one."""
        place = self._places.pop(row, None)
        if place is not None:
            self._free.append(place)

    def _grow(self, num_places: int, like: Tensor) -> None:
        for module in self.layout.modules:
            old = self.weights.get(module.name)
            rank, width_in, width_out = self.layout.rank, module.in_features, module.out_features
            a_table = like.new_zeros(num_places * width_in, rank)
            b_table = like.new_zeros(num_places * rank, width_out)
            if old is not None:
                a_table[: len(old[0])], b_table[: len(old[1])] = old
            self.weights[module.name] = (a_table, b_table)
        self._free += range(num_places - 1, self.num_places - 1, -1)
        self.num_places = num_places

    def _copy(self, place: int, row_P: Tensor, scale: float) -> None:
        for module in self.layout.modules:
            a_RD, b_OR = self.layout.row_views(row_P, module)
            a_table, b_table = self.weights[module.name]
            a_table.view(self.num_places, -1, self.layout.rank)[place] = a_RD.t()
            torch.mul(
                b_OR.t(), scale, out=b_table.view(self.num_places, self.layout.rank, -1)[place]
            )


class DecodePart:
    """The tokens of one pass whose adapters are served from the tables of one bucket."""

    def __init__(
        self,
        tables: DecodeTables,
        kinds: frozenset[str],
        token_places: Sequence[tuple[int, int]],
        num_tokens: int,
    ) -> None:
        """Args:
        token_places: (token of the pass, place of its adapter), tokens in order.
        """
        self.kinds = kinds
        self._weights = tables.weights
        tokens = [token for token, _ in token_places]
        self._place_n = torch.tensor([place for _, place in token_places], dtype=torch.int32)
        self._token_n = None if len(tokens) == num_tokens else torch.tensor(tokens)
        """None when every token of the pass belongs to this part."""
        rank = tables.layout.rank
        is_own_N = torch.zeros(num_tokens, dtype=torch.int32)
        is_own_N[tokens] = 1
        self._index_b = (self._place_n[:, None] * rank + _arange(rank)).flatten()
        # Tokens of other parts have empty bags, whose sum is zero.
        self._start_b_N = (is_own_N.cumsum(0, dtype=torch.int32) - is_own_N) * rank
        self._bags_a: dict[int, tuple[Tensor, Tensor]] = {}
        """Input width to table rows and bag starts of the A products."""

    def forward_(self, y_NO: Tensor, x_ND: Tensor, module: "ModuleShape") -> Tensor:
        a_table, b_table = self._weights[module.name]
        index_a, start_a_n = self._bag_a(module.in_features)
        x_nD = x_ND if self._token_n is None else x_ND.index_select(0, self._token_n)
        inner_nR = _weighted_sums(a_table, index_a, start_a_n, x_nD)
        y_NO += _weighted_sums(b_table, self._index_b, self._start_b_N, inner_nR)
        return inner_nR

    def backward_(self, *_: object) -> None:
        raise AssertionError("decode steps have no gradient")

    def _bag_a(self, width: int) -> tuple[Tensor, Tensor]:
        if width not in self._bags_a:
            index_a = (self._place_n[:, None] * width + _arange(width)).flatten()
            self._bags_a[width] = (index_a, _arange(len(self._place_n)) * width)
        return self._bags_a[width]


def _arange(end: int) -> Tensor:
    return torch.arange(end, dtype=torch.int32)


def _weighted_sums(table: Tensor, index: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of each bag's table rows times their weights."""
    return torch.embedding_bag(table, index, starts, False, _SUM, False, weights.reshape(-1))[0]
