"""Many LoRA adapters on one frozen base, side by side in every forward and backward pass.

    y = x W^T + s (x A^T) B^T        with A, B, s of the adapter that each token belongs to

An `AdapterBank` keeps the weights of all resident adapters as rows of one matrix per rank bucket:
a row holds every A and B of one adapter, and a module's stacked weights are strided views of the
matrix. So copying, hashing, saving or zeroing an adapter is one row operation. A `LoraBatch` says
which tokens of one pass belong to which adapter; `MultiLoraLinear` reads it from the bank.

Invariants:
- A row is zero beyond its adapter's rank and in modules that the adapter does not target, and
  stays so: with A = 0 and B = 0 both gradients are 0.
- An adapter's output and gradient come from its own tokens by its own matrix products. In an
  exact batch every product has at least `EXACT_MIN_ROWS` rows; no neighbour changes a bit then.
- Base weights never receive a gradient.

Shape suffixes: N tokens of a pass, n tokens of one part of it, D input width, O output width,
R bucket rank, S slots, K adapters in the batch, M padded tokens per adapter, P length of a row.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from marlaas.errors import CapacityExceeded
from marlaas.runtime import derive_seed
from marlaas.types import RANK_BUCKETS, TARGET_GROUPS

EXACT_MIN_ROWS = 4
"""From this many rows on, CPU matrix products give each row the same bits whatever their number
(measured with oneDNN and MKL on AVX2; tests/parity checks it on the machine at hand)."""

MAX_PADDING = 1.5
"""Adapters are batched by padding while padded tokens stay below this multiple of the real ones."""

MAX_SHORT_ROWS = 8
"""Adapters with at most this many tokens each are batched whatever the padding: one batched product
costs less than many tiny ones."""

ROW_ALIGNMENT = 64
"""Row lengths are rounded up to it, so that element-wise kernels cut every row the same way."""


class Slot(NamedTuple):
    """Place of one adapter version in the bank."""

    rank: int
    """Bucket rank, one of `RANK_BUCKETS`."""
    row: int


class Segment(NamedTuple):
    """`length` consecutive tokens of a pass under one adapter, or under the base alone."""

    slot: Slot | None
    length: int


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
    """Where each module's A and B lie inside a row of one rank bucket."""

    rank: int
    modules: tuple[ModuleShape, ...]
    offsets: dict[str, tuple[int, int]]
    """Module name to the start of its A (rank x in) and of its B (out x rank)."""
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
        start_a, start_b = self.offsets[module.name]
        rank, width_in, width_out = self.rank, module.in_features, module.out_features
        a_KRD = rows_KP[:, start_a : start_a + rank * width_in].unflatten(1, (rank, width_in))
        b_KOR = rows_KP[:, start_b : start_b + rank * width_out].unflatten(1, (width_out, rank))
        return a_KRD, b_KOR


class RowSet(NamedTuple):
    """Some adapters of a bucket, stacked for batched products."""

    rows: tuple[int, ...]
    weights: dict[str, tuple[Tensor, Tensor]]
    """Module name to A [K, R, D] and B [K, O, R]; views of the bank when the rows are adjacent."""
    scale_K: Tensor


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
        self._row_set = RowSet(rows, views, scale_K)
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
        bucket.write(slot.row, None)
        bucket.kinds[slot.row] = frozenset()
        bucket.free_rows.append(slot.row)
        self.num_used -= 1

    def write(self, slot: Slot, values_P: Tensor) -> None:
        """Set the weights of one adapter."""
        self._buckets[slot.rank].write(slot.row, values_P)

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


@dataclass(frozen=True, slots=True)
class BucketPart:
    """The tokens of one pass whose adapters live in one rank bucket, adapter after adapter."""

    bucket: Bucket
    stack: RowSet
    lengths: tuple[int, ...]
    """Tokens per adapter."""
    min_rows: int
    """Products with fewer rows are padded to it."""
    kinds: frozenset[str]
    """Linears that at least one of these adapters targets."""
    token_N: Tensor | None
    """Position in the pass of each token of this part; None when that is all tokens in order."""
    gather_KM: Tensor | None
    """Position in the pass of each padded place; None when adapters are not batched by padding."""
    place_N: Tensor | None
    """Padded place of each token of this part."""
    grad_rows: tuple[Tensor, ...] | None
    """One gradient row [P] per adapter, which the backward pass adds to."""

    @classmethod
    def build(
        cls,
        bucket: Bucket,
        members: Sequence[tuple[int, Sequence[int], Tensor | None]],
        kinds: frozenset[str],
        *,
        num_tokens: int,
        min_rows: int,
    ) -> "BucketPart":
        """Lay out the tokens of `members`, each (row, positions in the pass, gradient row)."""
        device = bucket.rows_SP.device
        lengths = tuple(len(positions) for _, positions, _ in members)
        token_N = torch.tensor([position for _, positions, _ in members for position in positions])
        is_everything = len(token_N) == num_tokens and bool(
            (token_N[1:] == token_N[:-1] + 1).all()
        )
        gather_KM = place_N = None
        longest = max(max(lengths), min_rows)
        is_balanced = longest * len(lengths) <= MAX_PADDING * sum(lengths)
        if len(lengths) > 1 and (longest <= MAX_SHORT_ROWS or is_balanced):
            places_M = torch.arange(longest)[None]
            length_K1 = torch.tensor(lengths)[:, None]
            start_K1 = length_K1.cumsum(0) - length_K1
            # Places past an adapter's end repeat its last token; their results are never read.
            gather_KM = token_N[start_K1 + torch.minimum(places_M, length_K1 - 1)].flatten()
            place_N = (places_M < length_K1).flatten().nonzero()[:, 0]
        grads = tuple(grad for _, _, grad in members if grad is not None)
        return cls(
            bucket=bucket,
            stack=bucket.stack(tuple(row for row, _, _ in members)),
            lengths=lengths,
            min_rows=min_rows,
            kinds=kinds,
            token_N=None if is_everything else token_N.to(device),
            gather_KM=None if gather_KM is None else gather_KM.to(device),
            place_N=None if place_N is None else place_N.to(device),
            grad_rows=grads or None,
        )

    def product(self, x_ND: Tensor, weight_KOD: Tensor, *, is_own: bool = False) -> Tensor:
        """Return each token times its own adapter's matrix, [n, O] for the n tokens of this part.

        Args:
            x_ND: one row per token of the pass, or of this part with `is_own`.
        """
        if self.gather_KM is not None:
            if is_own:
                assert self.place_N is not None
                padded = x_ND.new_zeros(self.gather_KM.shape[0], x_ND.shape[1])
                padded[self.place_N] = x_ND
            else:
                padded = x_ND[self.gather_KM]
            out = torch.bmm(padded.unflatten(0, (len(self.lengths), -1)), weight_KOD.mT)
            return out.flatten(0, 1)[self.place_N]
        own = x_ND if is_own else self.select(x_ND)
        if len(self.lengths) == 1:
            return self._matmul(own, weight_KOD[0])
        pieces = zip(own.split(self.lengths), weight_KOD, strict=True)
        return torch.cat([self._matmul(piece, weight) for piece, weight in pieces])

    def _matmul(self, x_nD: Tensor, weight_OD: Tensor) -> Tensor:
        num_missing = self.min_rows - x_nD.shape[0]
        if num_missing <= 0:
            return x_nD @ weight_OD.T
        return (F.pad(x_nD, (0, 0, 0, num_missing)) @ weight_OD.T)[: x_nD.shape[0]]

    def select(self, x_ND: Tensor) -> Tensor:
        """Return the rows of this part's tokens, adapter after adapter."""
        return x_ND if self.token_N is None else x_ND[self.token_N]

    def add_to(self, y_NO: Tensor, delta: Tensor) -> None:
        """Add this part's rows to the pass's rows in place."""
        if self.token_N is None:
            y_NO += delta
        else:
            y_NO.index_add_(0, self.token_N, delta)

    @property
    def scale_n1(self) -> Tensor | float:
        """LoRA scale of each token of this part."""
        scales = self.stack.scale_K
        if len(self.lengths) == 1:
            return float(scales[0])
        return scales.repeat_interleave(torch.tensor(self.lengths, device=scales.device))[:, None]


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """Which adapter each token of one pass belongs to."""

    parts: tuple[BucketPart, ...]
    num_tokens: int

    @classmethod
    def build(
        cls,
        bank: AdapterBank,
        segments: Sequence[Segment],
        *,
        grad_rows: Sequence[Tensor | None] | None = None,
        is_exact: bool = False,
    ) -> "LoraBatch":
        """Describe a pass over the concatenated segments. Segments of one adapter are merged.

        Args:
            grad_rows: per segment, the row [P] that its weight gradient is added to; the same row
                for every segment of an adapter.
            is_exact: neighbours change no bit of a result: at least `EXACT_MIN_ROWS` rows each.
                The pass itself must have that many tokens.
        """
        positions: dict[Slot, list[int]] = {}
        grads: dict[Slot, Tensor | None] = {}
        end = 0
        for idx, (slot, length) in enumerate(segments):
            if slot is not None and length:
                positions.setdefault(slot, []).extend(range(end, end + length))
                grads[slot] = grad_rows[idx] if grad_rows else None
            end += length
        parts = []
        for rank in sorted({slot.rank for slot in positions}):
            slots = sorted(slot for slot in positions if slot.rank == rank)
            part = BucketPart.build(
                bank.bucket(rank),
                [(slot.row, positions[slot], grads[slot]) for slot in slots],
                frozenset().union(*(bank.kinds(slot) for slot in slots)),
                num_tokens=end,
                min_rows=EXACT_MIN_ROWS if is_exact else 1,
            )
            parts.append(part)
        return cls(tuple(parts), end)


def lora_forward(y_NO: Tensor, x_ND: Tensor, module: ModuleShape, batch: LoraBatch) -> list[Tensor]:
    """Add every adapter's output to the base output `y_NO` in place.

    Returns:
        Per part of the batch that targets the module, the inner activations s (x A^T) [n, R].
    """
    inners = []
    for part in batch.parts:
        if module.kind in part.kinds:
            a_KRD, b_KOR = part.stack.weights[module.name]
            inner_nR = part.product(x_ND, a_KRD) * part.scale_n1
            part.add_to(y_NO, part.product(inner_nR, b_KOR, is_own=True))
            inners.append(inner_nR)
    return inners


def lora_backward(
    grad_y_NO: Tensor,
    x_ND: Tensor,
    inners: Sequence[Tensor],
    grad_x_ND: Tensor | None,
    module: ModuleShape,
    batch: LoraBatch,
) -> None:
    """Add the adapters' share to the input gradient and each adapter's own weight gradient.

        dU = s (dY B),   dX += dU A,   dA += dU^T X,   dB += dY^T U    with U = s (X A^T)

    Each adapter's products run over its own tokens, so that their bits do not depend on company.
    """
    targeted = [part for part in batch.parts if module.kind in part.kinds]
    for part, inner_nR in zip(targeted, inners, strict=True):
        a_KRD, b_KOR = part.stack.weights[module.name]
        grad_inner_nR = part.product(grad_y_NO, b_KOR.mT) * part.scale_n1
        if grad_x_ND is not None:
            part.add_to(grad_x_ND, part.product(grad_inner_nR, a_KRD.mT, is_own=True))
        if part.grad_rows is None:
            continue
        layout = part.bucket.layout
        pieces = zip(
            part.grad_rows,
            grad_inner_nR.split(part.lengths),
            inner_nR.split(part.lengths),
            part.select(x_ND).split(part.lengths),
            part.select(grad_y_NO).split(part.lengths),
            strict=True,
        )
        for grad_row_P, grad_inner, inner, x, grad_y in pieces:
            grad_a, grad_b = layout.views(grad_row_P[None], module)
            grad_a[0].addmm_(grad_inner.T, x)
            grad_b[0].addmm_(grad_y.T, inner)


class _MultiLoraFunction(torch.autograd.Function):
    """The linear with its adapters; base weights frozen, adapter gradients added to their rows."""

    @staticmethod
    def forward(ctx, x_ND, anchor, linear, batch):  # noqa: ANN001, ANN205
        y_NO = F.linear(x_ND, linear.weight, linear.bias)
        inners = lora_forward(y_NO, x_ND, linear.shape, batch)
        ctx.linear, ctx.batch = linear, batch
        ctx.save_for_backward(x_ND, *inners)
        return y_NO

    @staticmethod
    def backward(ctx, grad_y_NO):  # noqa: ANN001, ANN205
        x_ND, *inners = ctx.saved_tensors
        grad_y_NO = grad_y_NO.contiguous()
        grad_x_ND = grad_y_NO @ ctx.linear.weight if ctx.needs_input_grad[0] else None
        lora_backward(grad_y_NO, x_ND, inners, grad_x_ND, ctx.linear.shape, ctx.batch)
        return grad_x_ND, None, None, None


class MultiLoraLinear(nn.Linear):
    """`nn.Linear` with unchanged parameter names whose output adds each token's own adapter."""

    shape: ModuleShape
    bank: AdapterBank

    @classmethod
    def replace(cls, linear: nn.Linear, name: str, bank: AdapterBank) -> "MultiLoraLinear":
        """Turn a linear into a multi-LoRA one, sharing its parameters."""
        new = cls.__new__(cls)
        new.__dict__ = linear.__dict__
        new.shape = ModuleShape(name, linear.in_features, linear.out_features)
        new.bank = bank
        return new

    def forward(self, x: Tensor) -> Tensor:
        batch = self.bank.batch
        if batch is None or not any(self.shape.kind in part.kinds for part in batch.parts):
            return F.linear(x, self.weight, self.bias)
        x_ND = x.flatten(0, -2)
        assert x_ND.shape[0] == batch.num_tokens, "the active batch describes another pass"
        if torch.is_grad_enabled():
            y_NO = _MultiLoraFunction.apply(x_ND, self.bank.anchor, self, batch)
        else:
            y_NO = F.linear(x_ND, self.weight, self.bias)
            lora_forward(y_NO, x_ND, self.shape, batch)
        return y_NO.unflatten(0, x.shape[:-1])


def target_shapes(model: nn.Module) -> list[ModuleShape]:
    """Return the linears of a causal LM that adapters may target, in model order, the head last."""
    known = {kind for kinds in TARGET_GROUPS.values() for kind in kinds}
    shapes = [
        ModuleShape(name, module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] in known
    ]
    return sorted(shapes, key=lambda shape: shape.kind == "lm_head")


def install(model: nn.Module, bank: AdapterBank) -> None:
    """Replace every linear that the bank knows by its multi-LoRA form and freeze the model."""
    model.requires_grad_(False)
    for shape in bank.modules:
        parent_name, _, child_name = shape.name.rpartition(".")
        parent = model.get_submodule(parent_name)
        linear = parent.get_submodule(child_name)
        assert isinstance(linear, nn.Linear), f"{shape.name} is no linear"
        setattr(parent, child_name, MultiLoraLinear.replace(linear, shape.name, bank))


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
