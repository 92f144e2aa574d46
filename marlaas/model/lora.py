"""Many LoRA adapters on one frozen base, side by side in every forward and backward pass.

    y = x W^T + s (x A^T) B^T        with A, B, s of the adapter that each token belongs to

The adapters' weights lie in an `AdapterBank` (`bank.py`). A `LoraBatch` says which tokens of one
pass belong to which adapter; `MultiLoraLinear` reads it from the bank.

Invariants:
- An adapter's output and gradient come from its own tokens by its own matrix products. In an
  exact batch every product has at least `EXACT_MIN_ROWS` rows; no neighbour changes a bit then.
- Base weights never receive a gradient.

Shape suffixes: N tokens of a pass, n tokens of one part of it, D input width, O output width,
R bucket rank, S slots, K adapters in the batch, M padded tokens per adapter, P length of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from marlaas.model.bank import AdapterBank, Bucket, ModuleShape, Slot
from marlaas.model.lora_decode import AdapterRow, DecodePart
from marlaas.model.prepack import PackedWeight, should_prepack
from marlaas.types import TARGET_GROUPS

EXACT_MIN_ROWS = 4
"""From this many rows on, CPU matrix products give each row the same bits whatever their number
(measured with oneDNN and MKL on AVX2; tests/parity checks it on the machine at hand)."""

MAX_LOOPED_ADAPTERS = 4
"""Up to so many adapters of adjacent tokens, one set of products each beats batched products."""

MAX_PADDING = 1.5
"""Adapters of scattered tokens are batched by padding while padded tokens stay below this multiple
of the real ones."""

MAX_SHORT_ROWS = 8
"""Adapters with at most this many tokens each are batched whatever the padding: one batched product
costs less than many tiny ones."""


class Segment(NamedTuple):
    """`length` consecutive tokens of a pass under one adapter, or under the base alone."""

    slot: Slot | None
    length: int


class PartTokens(NamedTuple):
    """The adapters of one rank bucket in one pass, and where their tokens are."""

    bucket: Bucket
    rows: tuple[int, ...]
    """Bank row of each adapter."""
    positions: tuple[list[int], ...]
    """Per adapter, the places of its tokens in the pass."""
    grad_rows: tuple[Tensor, ...] | None
    """One gradient row [P] per adapter, which the backward pass adds to."""
    kinds: frozenset[str]
    """Linears that at least one of these adapters targets."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens per adapter."""
        return tuple(len(positions) for positions in self.positions)

    @property
    def scales(self) -> list[float]:
        return [self.bucket.scales[row] for row in self.rows]

    def spans(self) -> tuple[tuple[int, int], ...] | None:
        """Return each adapter's tokens as a half-open range, or None if one is scattered."""
        spans = tuple((positions[0], positions[-1] + 1) for positions in self.positions)
        is_dense = all(
            end - start == length for (start, end), length in zip(spans, self.lengths, strict=True)
        )
        return spans if is_dense else None


def _add_product_(total: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
    """Add `scale x left @ right` to a gradient, which may be wider than its factors."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, alpha=scale)
    else:
        total.add_(left @ right, alpha=scale)


class SpanPart:
    """Adapters whose tokens each are one range of the pass: a few products per adapter, in place.

    Best for few adapters or many tokens. Whatever the company, an adapter's products have the same
    shapes: a training pass is exact this way.
    """

    def __init__(self, tokens: PartTokens, spans: Sequence[tuple[int, int]]) -> None:
        self.kinds = tokens.kinds
        self._layout = tokens.bucket.layout
        self._bank_rows = [tokens.bucket.rows_SP[row] for row in tokens.rows]
        self._grad_rows = tokens.grad_rows
        self._spans, self._scales = spans, tokens.scales

    def forward_(self, y_NO: Tensor, x_ND: Tensor, module: ModuleShape) -> Tensor:
        inners = []
        adapters = zip(self._bank_rows, self._spans, self._scales, strict=True)
        for row_P, (start, end), scale in adapters:
            a_RD, b_OR = self._layout.row_views(row_P, module)
            inner_Rn = a_RD @ x_ND[start:end].t()
            y_NO[start:end].addmm_(inner_Rn.t(), b_OR.t(), alpha=scale)
            inners.append(inner_Rn)
        return inners[0] if len(inners) == 1 else torch.cat(inners, dim=1)

    def backward_(
        self,
        grad_y_NO: Tensor,
        x_ND: Tensor,
        inner_RN: Tensor,
        grad_x_ND: Tensor | None,
        module: ModuleShape,
    ) -> None:
        inners = inner_RN.split([end - start for start, end in self._spans], dim=1)
        grad_rows = self._grad_rows or [None] * len(self._spans)
        adapters = zip(self._bank_rows, grad_rows, self._spans, self._scales, inners, strict=True)
        for row_P, grad_row_P, (start, end), scale, inner_Rn in adapters:
            a_RD, b_OR = self._layout.row_views(row_P, module)
            grad_y_nO = grad_y_NO[start:end]
            grad_inner_Rn = b_OR.t() @ grad_y_nO.t()
            if grad_x_ND is not None:
                grad_x_ND[start:end].addmm_(grad_inner_Rn.t(), a_RD, alpha=scale)
            if grad_row_P is not None:
                grad_a_RD, grad_b_OR = self._layout.row_views(grad_row_P, module)
                _add_product_(grad_a_RD, grad_inner_Rn, x_ND[start:end], scale)
                _add_product_(grad_b_OR.t(), inner_Rn, grad_y_nO, scale)


class EvenPart:
    """Adapters with equally many tokens each, all adjacent: batched products on views, no copy."""

    def __init__(self, tokens: PartTokens, spans: Sequence[tuple[int, int]]) -> None:
        self.kinds = tokens.kinds
        self._layout = tokens.bucket.layout
        self._stack = tokens.bucket.stack(tokens.rows)
        self._grad_rows = tokens.grad_rows
        self._start, self._end = spans[0][0], spans[-1][1]
        self._num_adapters = len(spans)

    @staticmethod
    def fits(spans: Sequence[tuple[int, int]]) -> bool:
        width = spans[0][1] - spans[0][0]
        first = spans[0][0]
        return all(
            (start, end) == (first + idx * width, first + (idx + 1) * width)
            for idx, (start, end) in enumerate(spans)
        )

    def _by_adapter(self, rows_ND: Tensor) -> Tensor:
        return rows_ND[self._start : self._end].unflatten(0, (self._num_adapters, -1))

    def forward_(self, y_NO: Tensor, x_ND: Tensor, module: ModuleShape) -> Tensor:
        a_KRD, b_KOR = self._stack.weights[module.name]
        inner_KRM = torch.bmm(a_KRD, self._by_adapter(x_ND).mT).mul_(self._stack.scale_K11)
        self._by_adapter(y_NO).baddbmm_(inner_KRM.mT, b_KOR.mT)
        return inner_KRM

    def backward_(
        self,
        grad_y_NO: Tensor,
        x_ND: Tensor,
        inner_KRM: Tensor,
        grad_x_ND: Tensor | None,
        module: ModuleShape,
    ) -> None:
        a_KRD, b_KOR = self._stack.weights[module.name]
        grad_y_KMO = self._by_adapter(grad_y_NO)
        grad_inner_KRM = torch.bmm(b_KOR.mT, grad_y_KMO.mT).mul_(self._stack.scale_K11)
        if grad_x_ND is not None:
            self._by_adapter(grad_x_ND).baddbmm_(grad_inner_KRM.mT, a_KRD)
        if self._grad_rows is None:
            return
        # A and the transposed B of a module are neighbours in a row: one addition per adapter.
        places = [self._layout.row_block(row_P, module) for row_P in self._grad_rows]
        grad_KQ = a_KRD.new_empty(len(places), places[0].shape[0])
        grad_a_KRD, grad_b_KOR = self._layout.block_views(grad_KQ, module)
        torch.bmm(grad_inner_KRM, self._by_adapter(x_ND), out=grad_a_KRD)
        torch.bmm(inner_KRM, grad_y_KMO, out=grad_b_KOR.mT)
        torch._foreach_add_(places, grad_KQ.unbind())  # type: ignore[attr-defined]


class GatheredPart:
    """Adapters whose tokens lie anywhere: gathered, and padded to batched products where that pays.

    In an exact batch every product has at least `EXACT_MIN_ROWS` rows.
    """

    def __init__(self, tokens: PartTokens, *, num_tokens: int, is_exact: bool) -> None:
        self.kinds = tokens.kinds
        self._layout = tokens.bucket.layout
        self._stack = tokens.bucket.stack(tokens.rows)
        self._grad_rows = tokens.grad_rows
        self._lengths = lengths = tokens.lengths
        self._min_rows = EXACT_MIN_ROWS if is_exact else 1
        device = tokens.bucket.rows_SP.device
        token_N = torch.tensor([place for places in tokens.positions for place in places])
        is_everything = len(token_N) == num_tokens and bool((token_N.diff() == 1).all())
        self._token_N = None if is_everything else token_N.to(device)
        """Place in the pass of each token of this part; None when that is all tokens in order."""
        self._gather_KM: Tensor | None = None
        """Place in the pass of each padded row; None when adapters are not batched by padding."""
        self._place_N: Tensor | None = None
        """Padded row of each token of this part."""
        longest = max(*lengths, self._min_rows)
        is_balanced = longest * len(lengths) <= MAX_PADDING * sum(lengths)
        if len(lengths) > 1 and (longest <= MAX_SHORT_ROWS or is_balanced):
            place_M = torch.arange(longest)[None]
            length_K1 = torch.tensor(lengths)[:, None]
            start_K1 = length_K1.cumsum(0) - length_K1
            # Rows past an adapter's end repeat its last token; their results are never read.
            gather_KM = token_N[start_K1 + torch.minimum(place_M, length_K1 - 1)].flatten()
            self._gather_KM = gather_KM.to(device)
            self._place_N = (place_M < length_K1).flatten().nonzero()[:, 0].to(device)
        self._scale_n1 = self._stack.scale_K11.flatten().repeat_interleave(
            torch.tensor(lengths, device=device)
        )[:, None]

    def forward_(self, y_NO: Tensor, x_ND: Tensor, module: ModuleShape) -> Tensor:
        a_KRD, b_KOR = self._stack.weights[module.name]
        inner_nR = self._product(x_ND, a_KRD) * self._scale_n1
        self._add_to(y_NO, self._product(inner_nR, b_KOR, is_own=True))
        return inner_nR

    def backward_(
        self,
        grad_y_NO: Tensor,
        x_ND: Tensor,
        inner_nR: Tensor,
        grad_x_ND: Tensor | None,
        module: ModuleShape,
    ) -> None:
        a_KRD, b_KOR = self._stack.weights[module.name]
        grad_inner_nR = self._product(grad_y_NO, b_KOR.mT) * self._scale_n1
        if grad_x_ND is not None:
            self._add_to(grad_x_ND, self._product(grad_inner_nR, a_KRD.mT, is_own=True))
        if self._grad_rows is None:
            return
        adapters = zip(
            self._grad_rows,
            grad_inner_nR.split(self._lengths),
            inner_nR.split(self._lengths),
            self._select(x_ND).split(self._lengths),
            self._select(grad_y_NO).split(self._lengths),
            strict=True,
        )
        for grad_row_P, grad_inner, inner, x, grad_y in adapters:
            grad_a_RD, grad_b_OR = self._layout.row_views(grad_row_P, module)
            _add_product_(grad_a_RD, grad_inner.t(), x)
            _add_product_(grad_b_OR.t(), inner.t(), grad_y)

    def _product(self, x_ND: Tensor, weight_KOD: Tensor, *, is_own: bool = False) -> Tensor:
        """Return each token times its own adapter's matrix, [n, O] for the n tokens of this part.

        Args:
            x_ND: one row per token of the pass, or of this part with `is_own`.
        """
        if self._gather_KM is not None:
            assert self._place_N is not None
            if is_own:
                padded = x_ND.new_zeros(self._gather_KM.shape[0], x_ND.shape[1])
                padded.index_copy_(0, self._place_N, x_ND)
            else:
                padded = x_ND.index_select(0, self._gather_KM)
            out = torch.bmm(padded.unflatten(0, (len(self._lengths), -1)), weight_KOD.mT)
            return out.flatten(0, 1).index_select(0, self._place_N)
        own = x_ND if is_own else self._select(x_ND)
        if len(self._lengths) == 1:
            return self._matmul(own, weight_KOD[0])
        pieces = zip(own.split(self._lengths), weight_KOD, strict=True)
        return torch.cat([self._matmul(piece, weight) for piece, weight in pieces])

    def _matmul(self, x_nD: Tensor, weight_OD: Tensor) -> Tensor:
        num_missing = self._min_rows - x_nD.shape[0]
        if num_missing <= 0:
            return x_nD @ weight_OD.T
        return (F.pad(x_nD, (0, 0, 0, num_missing)) @ weight_OD.T)[: x_nD.shape[0]]

    def _select(self, x_ND: Tensor) -> Tensor:
        """Return the rows of this part's tokens, adapter after adapter."""
        return x_ND if self._token_N is None else x_ND.index_select(0, self._token_N)

    def _add_to(self, y_NO: Tensor, delta: Tensor) -> None:
        """Add this part's rows to the pass's rows in place."""
        if self._token_N is None:
            y_NO += delta
        else:
            y_NO.index_add_(0, self._token_N, delta)


Part = SpanPart | EvenPart | GatheredPart | DecodePart


def _make_decode_part(
    bank: AdapterBank, positions: dict[Slot, list[int]], num_tokens: int
) -> DecodePart:
    assert bank.tables is not None
    adapters = {
        slot: AdapterRow(
            bank.bucket(slot.rank).layout, bank.read(slot), bank.scale(slot), bank.kinds(slot)
        )
        for slot in positions
    }
    return DecodePart(bank.tables, adapters, positions, num_tokens)


def _make_part(tokens: PartTokens, *, num_tokens: int, is_exact: bool) -> Part:
    """Choose how the products of one bucket's adapters are done.

    In an exact batch the choice does not depend on the company: by spans where weight gradients are
    wanted, else gathered.
    """
    spans = tokens.spans()
    if is_exact:
        if tokens.grad_rows is None:
            return GatheredPart(tokens, num_tokens=num_tokens, is_exact=True)
        assert spans is not None, "in an exact training pass an adapter's tokens are adjacent"
        return SpanPart(tokens, spans)
    if spans is None:
        return GatheredPart(tokens, num_tokens=num_tokens, is_exact=False)
    if len(spans) > MAX_LOOPED_ADAPTERS and EvenPart.fits(spans):
        return EvenPart(tokens, spans)
    is_short = max(tokens.lengths) <= MAX_SHORT_ROWS
    if len(spans) > MAX_LOOPED_ADAPTERS and is_short:
        return GatheredPart(tokens, num_tokens=num_tokens, is_exact=False)
    return SpanPart(tokens, spans)


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """Which adapter each token of one pass belongs to."""

    parts: tuple[Part, ...]
    num_tokens: int
    kinds: frozenset[str]
    """Linears that at least one adapter of the batch targets."""

    @classmethod
    def build(
        cls,
        bank: AdapterBank,
        segments: Sequence[Segment],
        *,
        grad_rows: Sequence[Tensor | None] | None = None,
        is_exact: bool = False,
        is_decode: bool = False,
    ) -> "LoraBatch":
        """Describe a pass over the concatenated segments. Segments of one adapter are merged.

        Args:
            grad_rows: per segment, the row [P] that its weight gradient is added to; the same row
                for every segment of an adapter.
            is_exact: neighbours change no bit of a result. The pass itself must have at least
                `EXACT_MIN_ROWS` tokens.
            is_decode: the batch serves many decode steps and no gradient. Tables then serve all
                adapters, where there are tables and more than one adapter, or always if exact.
        """
        positions: dict[Slot, list[int]] = {}
        grads: dict[Slot, Tensor] = {}
        end = 0
        for idx, (slot, length) in enumerate(segments):
            if slot is not None and length:
                positions.setdefault(slot, []).extend(range(end, end + length))
                grad_row = grad_rows[idx] if grad_rows else None
                if grad_row is not None:
                    grads[slot] = grad_row
            end += length
        parts: list[Part] = []
        if is_decode and bank.tables is not None and (is_exact or len(positions) > 1):
            parts.append(_make_decode_part(bank, positions, end))
            positions = {}
        for rank in sorted({slot.rank for slot in positions}):
            slots = sorted(slot for slot in positions if slot.rank == rank)
            tokens = PartTokens(
                bucket=bank.bucket(rank),
                rows=tuple(slot.row for slot in slots),
                positions=tuple(positions[slot] for slot in slots),
                grad_rows=tuple(grads[slot] for slot in slots) if grads else None,
                kinds=frozenset().union(*(bank.kinds(slot) for slot in slots)),
            )
            parts.append(_make_part(tokens, num_tokens=end, is_exact=is_exact))
        return cls(tuple(parts), end, frozenset().union(*(part.kinds for part in parts)))


def lora_forward(y_NO: Tensor, x_ND: Tensor, module: ModuleShape, batch: LoraBatch) -> list[Tensor]:
    """Add every adapter's output to the base output `y_NO` in place.

    Returns:
        Per part of the batch that targets the module, the inner activations, which the backward
        pass takes back.
    """
    return [part.forward_(y_NO, x_ND, module) for part in batch.parts if module.kind in part.kinds]


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

    Each adapter's weight gradient is a product over its own tokens alone.
    """
    targeted = [part for part in batch.parts if module.kind in part.kinds]
    for part, inner in zip(targeted, inners, strict=True):
        part.backward_(grad_y_NO, x_ND, inner, grad_x_ND, module)


class _MultiLoraFunction(torch.autograd.Function):
    """The linear with its adapters; base weights frozen, adapter gradients added to their rows."""

    @staticmethod
    def forward(ctx, x_ND, anchor, linear, batch):
        y_NO = linear.product(x_ND)
        inners = lora_forward(y_NO, x_ND, linear.shape, batch)
        ctx.linear, ctx.batch = linear, batch
        ctx.save_for_backward(x_ND, *inners)
        return y_NO

    @staticmethod
    def backward(ctx, grad_y_NO):  # type: ignore[override]
        x_ND, *inners = ctx.saved_tensors
        grad_y_NO = grad_y_NO.contiguous()
        grad_x_ND = ctx.linear.back(grad_y_NO) if ctx.needs_input_grad[0] else None
        lora_backward(grad_y_NO, x_ND, inners, grad_x_ND, ctx.linear.shape, ctx.batch)
        return grad_x_ND, None, None, None


class MultiLoraLinear(nn.Linear):
    """`nn.Linear` with unchanged parameter names whose output adds each token's own adapter."""

    shape: ModuleShape
    kind: str
    bank: AdapterBank
    packed: PackedWeight | None = None

    @classmethod
    def replace(cls, linear: nn.Linear, name: str, bank: AdapterBank) -> "MultiLoraLinear":
        """Turn a linear into a multi-LoRA one, sharing its parameters."""
        new = cls.__new__(cls)
        new.__dict__ = linear.__dict__
        new.shape = ModuleShape(name, linear.in_features, linear.out_features)
        new.kind = new.shape.kind
        new.bank = bank
        return new

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        batch = self.bank.batch
        x_ND = x.flatten(0, -2)
        if batch is None or self.kind not in batch.kinds:
            if torch.is_grad_enabled() and x.requires_grad:
                return F.linear(x, self.weight, self.bias)
            return self.product(x_ND).view(*x.shape[:-1], -1)
        assert x_ND.shape[0] == batch.num_tokens, "the active batch describes another pass"
        if torch.is_grad_enabled():
            y_NO = _MultiLoraFunction.apply(x_ND, self.bank.anchor, self, batch)
        else:
            y_NO = self.product(x_ND)
            lora_forward(y_NO, x_ND, self.shape, batch)
        return y_NO.view(*x.shape[:-1], -1)

    def product(self, x_ND: Tensor) -> Tensor:
        """Return the base's output [N, O] alone; no gradient is recorded."""
        if self.packed is not None and self.packed.pays(x_ND.shape[0]):
            return self.packed.product(x_ND, self.bias)
        return F.linear(x_ND, self.weight, self.bias)

    def back(self, grad_NO: Tensor) -> Tensor:
        """Return the gradient [N, D] that the base's product sends to its input."""
        if self.packed is not None and self.packed.pays(grad_NO.shape[0]):
            return self.packed.back(grad_NO)
        return grad_NO @ self.weight


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


def prepack(model: nn.Module) -> bool:
    """Let a frozen model's multi-LoRA linears keep packed copies, if those pay; say if they do."""
    linears = [module for module in model.modules() if isinstance(module, MultiLoraLinear)]
    if not should_prepack(linears):
        return False
    for linear in linears:
        linear.packed = PackedWeight(linear.weight)
    return True
