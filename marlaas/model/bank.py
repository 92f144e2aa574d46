"""The weights of all resident adapters, as rows of one matrix per rank bucket.

A row holds every A and B of one adapter, and a module's stacked weights are strided views of the
matrix. So copying, hashing, saving or zeroing an adapter is one row operation.

Invariant: a row is zero beyond its adapter's rank and in modules that the adapter does not target,
and stays so: with A = 0 and B = 0 both gradients are 0.

Shape suffixes: R bucket rank, D input width, O output width, K adapters in a batch, P length of a
row, Q length of one module's block.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from marlaas.errors import CapacityExceeded
from marlaas.model.lora_decode import DecodeTables
from marlaas.runtime import derive_seed
from marlaas.types import RANK_BUCKETS

if TYPE_CHECKING:
    from marlaas.model.lora import LoraBatch

ROW_ALIGNMENT = 64
"""Row lengths are rounded up to it, so that element-wise kernels cut every row the same way."""


class Slot(NamedTuple):
    """Place of one adapter version in the bank."""

    rank: int
    """Bucket rank, one of `RANK_BUCKETS`."""
    row: int


@dataclass(frozen=True, slots=True)
class ModuleShape:
    """A linear that adapters may target: its name in the model and its widths."""

    name: str
    in_features: int
    out_features: int

    @property
    def kind(self) -> str:
        """Last part of the name, e.g. `q_proj`."""
        return self.name.rsplit(".", 1)[-1]


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where each module's A and B lie inside a row of one rank bucket.

    B is stored transposed, rank x out: a product with a matrix of eight rows is two to four times
    as fast on a CPU as one with a matrix of eight columns, and B is what gradients are made from.
    """

    rank: int
    modules: tuple[ModuleShape, ...]
    offsets: dict[str, tuple[int, int]]
    """Module name to the start of its A (rank x in) and of its B (rank x out)."""
    length: int

    @classmethod
    def build(cls, modules: Sequence[ModuleShape], rank: int) -> "RowLayout":
        offsets, end = {}, 0
        for module in modules:
            start_b = end + rank * module.in_features
            offsets[module.name] = (end, start_b)
            end = start_b + rank * module.out_features
        length = -(-end // ROW_ALIGNMENT) * ROW_ALIGNMENT
        return cls(rank, tuple(modules), offsets, length)

    def views(self, rows_KP: Tensor, module: ModuleShape) -> tuple[Tensor, Tensor]:
        """Return the stacked A [K, R, D] and B [K, O, R] of one module as views of rows."""
        return self.block_views(rows_KP[:, self.offsets[module.name][0] :], module)

    def block_views(self, blocks_KQ: Tensor, module: ModuleShape) -> tuple[Tensor, Tensor]:
        """Return stacked A and B as views of blocks that begin with one module's."""
        rank, width_in, width_out = self.rank, module.in_features, module.out_features
        num_rows, stride = blocks_KQ.shape[0], blocks_KQ.stride(0)
        start_a = blocks_KQ.storage_offset()
        start_b = start_a + rank * width_in
        a_KRD = blocks_KQ.as_strided((num_rows, rank, width_in), (stride, width_in, 1), start_a)
        b_KOR = blocks_KQ.as_strided((num_rows, width_out, rank), (stride, 1, width_out), start_b)
        return a_KRD, b_KOR

    def row_block(self, row_P: Tensor, module: ModuleShape) -> Tensor:
        """Return the part [Q] of a row that holds one module: A, then the transposed B."""
        start = self.offsets[module.name][0]
        return row_P[start : start + self.rank * (module.in_features + module.out_features)]

    def row_views(self, row_P: Tensor, module: ModuleShape) -> tuple[Tensor, Tensor]:
        """Return A [R, D] and B [O, R] of one module as views of one row."""
        start_a, start_b = self.offsets[module.name]
        rank, width_in, width_out = self.rank, module.in_features, module.out_features
        first = row_P.storage_offset()
        a_RD = row_P.as_strided((rank, width_in), (width_in, 1), first + start_a)
        b_OR = row_P.as_strided((width_out, rank), (1, width_out), first + start_b)
        return a_RD, b_OR


class RowSet(NamedTuple):
    """Some adapters of a bucket, stacked for batched products."""

    rows: tuple[int, ...]
    weights: dict[str, tuple[Tensor, Tensor]]
    """Module name to A [K, R, D] and B [K, O, R]; views of the bank when the rows are adjacent."""
    scale_K11: Tensor


class Bucket:
    """The adapters of one rank bucket: rows that grow by doubling, each with scale and targets."""

    def __init__(self, layout: RowLayout, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.rows_SP = torch.zeros(0, layout.length, dtype=dtype, device=device)
        self.scales: list[float] = []
        self.kinds: list[frozenset[str]] = []
        self.free_rows: list[int] = []
        self._row_set: RowSet | None = None

    def grow(self, num_rows: int) -> None:
        """Make room for `num_rows` rows in all; contents stay."""
        old = self.rows_SP
        self.rows_SP = torch.zeros(num_rows, old.shape[1], dtype=old.dtype, device=old.device)
        self.rows_SP[: old.shape[0]] = old
        self.free_rows += range(num_rows - 1, old.shape[0] - 1, -1)
        self.scales += [0.0] * (num_rows - old.shape[0])
        self.kinds += [frozenset()] * (num_rows - old.shape[0])
        self._row_set = None

    def write(self, row: int, values_P: Tensor | None) -> None:
        """Set a row, or zero it. The only writer of rows: stacked copies of the row are dropped."""
        if values_P is None:
            self.rows_SP[row].zero_()
        else:
            self.rows_SP[row].copy_(values_P)
        if self._row_set is not None and row in self._row_set.rows:
            self._row_set = None

    def stack(self, rows: tuple[int, ...]) -> RowSet:
        """Return the weights of `rows` stacked. The last set is kept: decode asks for it again."""
        if self._row_set is not None and self._row_set.rows == rows:
            return self._row_set
        if rows == tuple(range(rows[0], rows[0] + len(rows))):
            weights_KP = self.rows_SP[rows[0] : rows[0] + len(rows)]
        else:
            weights_KP = self.rows_SP[list(rows)]
        layout = self.layout
        views = {module.name: layout.views(weights_KP, module) for module in layout.modules}
        scale_K = weights_KP.new_tensor([self.scales[row] for row in rows])
        self._row_set = RowSet(rows, views, scale_K[:, None, None])
        return self._row_set


class AdapterBank:
    """All resident adapters of one device. `allocate -> write -> (passes) -> free`.

    A pass runs inside `with bank.active(batch):`, which is how the linears learn whose tokens they
    see. One pass at a time: the bank belongs to one engine thread.

        slot = bank.allocate(rank=4, scale=2.0, kinds=frozenset({"q_proj"}))
        bank.write(slot, flat_P)
        with bank.active(LoraBatch.build(bank, [Segment(slot, 7), Segment(None, 3)])):
            hidden = model(input_ids=ids_of_10_tokens)
    """

    def __init__(
        self,
        modules: Sequence[ModuleShape],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_slots: int = 16384,
    ) -> None:
        self.modules = tuple(modules)
        self.max_slots = max_slots
        self.num_used = 0
        self.batch: LoraBatch | None = None
        self.anchor = torch.zeros((), dtype=dtype, device=device, requires_grad=True)
        """An input that asks for a gradient: makes autograd run our backward on a frozen base."""
        self._buckets = {
            rank: Bucket(RowLayout.build(modules, rank), dtype, torch.device(device))
            for rank in RANK_BUCKETS
        }
        self.tables = None
        """Copies of the adapters that decode, where decode steps are served from tables."""
        if torch.device(device).type == "cpu" and dtype == torch.float32:
            self.tables = DecodeTables(self.modules)

    def bucket(self, rank: int) -> Bucket:
        """Return the bucket that an adapter of `rank` lives in."""
        for bucket_rank in RANK_BUCKETS:
            if rank <= bucket_rank:
                return self._buckets[bucket_rank]
        raise CapacityExceeded(f"rank {rank}: expected at most {RANK_BUCKETS[-1]}")

    def allocate(self, *, rank: int, scale: float, kinds: frozenset[str]) -> Slot:
        """Reserve a zeroed row for an adapter that targets the linears named in `kinds`."""
        if self.num_used >= self.max_slots:
            raise CapacityExceeded(f"all {self.max_slots} adapter slots are in use")
        bucket = self.bucket(rank)
        if not bucket.free_rows:
            bucket.grow(max(4, 2 * bucket.rows_SP.shape[0]))
        row = bucket.free_rows.pop()
        bucket.scales[row], bucket.kinds[row] = scale, kinds
        self.num_used += 1
        return Slot(bucket.layout.rank, row)

    def free(self, slot: Slot) -> None:
        """Give a row back; it is zeroed, so that nothing of it can reach its next holder."""
        bucket = self._buckets[slot.rank]
        assert slot.row not in bucket.free_rows, "slot freed twice"
        self._write(slot, None)
        bucket.kinds[slot.row] = frozenset()
        bucket.free_rows.append(slot.row)
        self.num_used -= 1

    def write(self, slot: Slot, values_P: Tensor) -> None:
        """Set the weights of one adapter."""
        self._write(slot, values_P)

    def _write(self, slot: Slot, values_P: Tensor | None) -> None:
        self._buckets[slot.rank].write(slot.row, values_P)
        if self.tables is not None:
            self.tables.drop(slot)

    def read(self, slot: Slot) -> Tensor:
        """Return the weights of one adapter [P], a view that must not be written."""
        return self._buckets[slot.rank].rows_SP[slot.row]

    def scale(self, slot: Slot) -> float:
        return self._buckets[slot.rank].scales[slot.row]

    def kinds(self, slot: Slot) -> frozenset[str]:
        """Return the names of the linears that the adapter targets, e.g. `q_proj`."""
        return self._buckets[slot.rank].kinds[slot.row]

    @contextmanager
    def active(self, batch: "LoraBatch | None") -> Iterator[None]:
        """Run passes with `batch`; for training the backward pass belongs inside, too."""
        assert self.batch is None, "passes do not nest"
        self.batch = batch
        try:
            yield
        finally:
            self.batch = None


def init_adapter(layout: RowLayout, *, rank: int, kinds: frozenset[str], seed: int) -> Tensor:
    """Return a fresh adapter row [P] in fp32: A uniform as `nn.Linear` starts (the form that PEFT
    uses, kaiming with a = sqrt 5), B zero, so that it changes nothing yet.

    The values depend on (seed, module, rank) alone, not on the bucket or on other modules.
    """
    row_P = torch.zeros(layout.length)
    for module in layout.modules:
        if module.kind in kinds:
            generator = torch.Generator().manual_seed(derive_seed(seed, module.name, rank))
            bound = module.in_features**-0.5
            a_RD, _ = (view[0] for view in layout.views(row_P[None], module))
            values = torch.rand(rank, module.in_features, generator=generator)
            a_RD[:rank] = (2 * values - 1) * bound
    return row_P
