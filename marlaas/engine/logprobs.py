"""Logprobs of chosen tokens from hidden states, through the head chunk by chunk.

A cell is one chosen token of one row. Several of a row share its logits: the product of a row is
made once, however many tokens are scored from it.

    z = (h W^T + bias + head adapter) / temperature,    logprob = z[target] - logsumexp(z)

The logits of a pass never exist at once: forward keeps two numbers per row, backward computes a
chunk's logits again. Only when all of them fit into one chunk are they kept instead.

Invariants:
- A chunk is a run of whole adapter segments, or one piece of a segment larger than a chunk, cut
  at fixed multiples from that segment's own start. So which tokens share a weight-gradient product
  depends on the adapter's own tokens alone. In exact mode every segment has chunks of its own.
- Log-softmax is computed in fp32 or wider.

Shape suffixes: M rows, C cells, m and c those of one chunk, D width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from marlaas.model.base import BaseModel
from marlaas.model.lora import (
    EXACT_MIN_ROWS,
    LoraBatch,
    MultiLoraLinear,
    Segment,
    lora_backward,
    lora_forward,
)

MAX_CHUNK_LOGITS = 1 << 23
"""Logits of one chunk: 32 MiB in fp32, which leaves the head's matrix product long enough to be
efficient (170 rows of a 49k vocabulary)."""

MIN_CHUNK_ROWS = 16
"""A chunk has at least so many rows, however large the vocabulary."""


@dataclass(frozen=True, slots=True)
class HeadChunk:
    """Rows [start, end) of those to score."""

    start: int
    end: int
    segments: tuple[Segment, ...]
    grad_rows: tuple[Tensor | None, ...]


def cut_head_chunks(
    segments: Sequence[Segment],
    grad_rows: Sequence[Tensor | None],
    max_rows: int,
    *,
    is_exact: bool = False,
) -> list[HeadChunk]:
    """Cut the rows of `segments` into chunks of at most `max_rows`."""
    chunks: list[HeadChunk] = []
    start = end = 0
    held: list[tuple[Segment, Tensor | None]] = []

    def close() -> None:
        nonlocal start
        if end > start:
            held_segments, held_grads = zip(*held, strict=True)
            chunks.append(HeadChunk(start, end, held_segments, held_grads))
        start = end
        held.clear()

    for (slot, length), grad_row in zip(segments, grad_rows, strict=True):
        if is_exact or end - start + length > max_rows:
            close()
        for piece_start in range(0, length, max_rows):
            piece = min(max_rows, length - piece_start)
            held.append((Segment(slot, piece), grad_row))
            end += piece
            if length > max_rows:
                close()
    close()
    return chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """What to score: whose rows they are, and their target tokens."""

    targets_C: Tensor
    segments: Sequence[Segment]
    """Whose rows these are, in order; one segment per adapter."""
    row_C: Tensor | None = None
    """The row of each target, ascending; None: one each, in order."""
    inverse_temperature_M: Tensor | None = None
    """Logits are multiplied by it; None means 1."""
    grad_rows: Sequence[Tensor | None] | None = None
    """Per segment, the row [P] that the gradient of its head adapter is added to."""


def selected_logprobs(
    base: BaseModel,
    hidden_MD: Tensor,
    rows: ScoredRows,
    *,
    is_exact: bool = False,
    max_chunk_logits: int = MAX_CHUNK_LOGITS,
) -> Tensor:
    """Return log p(target | hidden) for every cell [C], in fp32 or wider.

    Differentiable towards `hidden_MD`; the head adapters' gradients are added to their rows in the
    backward pass. With `is_exact` neighbours change no bit of a row's result.
    """
    max_rows = max(MIN_CHUNK_ROWS, max_chunk_logits // base.vocab_size)
    grad_rows = rows.grad_rows or [None] * len(rows.segments)
    chunks = cut_head_chunks(rows.segments, grad_rows, max_rows, is_exact=is_exact)
    pass_ = HeadPass(
        base=base,
        targets_C=rows.targets_C,
        row_C=rows.row_C,
        inverse_temperature_M=rows.inverse_temperature_M,
        chunks=chunks,
        cells=_cells_of(chunks, rows.row_C),
        is_exact=is_exact,
    )
    if torch.is_grad_enabled() and (hidden_MD.requires_grad or rows.grad_rows is not None):
        return _SelectedLogprobs.apply(hidden_MD, base.bank.anchor, pass_)
    return pass_.score(hidden_MD)[0]


def _cells_of(chunks: Sequence[HeadChunk], row_C: Tensor | None) -> list[slice]:
    """Return the cells of each chunk."""
    if row_C is None:
        return [slice(chunk.start, chunk.end) for chunk in chunks]
    edges = torch.tensor([[chunk.start, chunk.end] for chunk in chunks]).reshape(-1, 2)
    bounds = torch.searchsorted(row_C.cpu(), edges).tolist()
    return [slice(start, end) for start, end in bounds]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPass:
    """What one pass through the head needs beside the hidden states."""

    base: BaseModel
    targets_C: Tensor
    row_C: Tensor | None
    """None: the cells are the rows."""
    inverse_temperature_M: Tensor | None
    chunks: Sequence[HeadChunk]
    cells: Sequence[slice]
    """Per chunk."""
    is_exact: bool

    @property
    def head(self) -> MultiLoraLinear:
        return self.base.head

    def score(self, hidden_MD: Tensor) -> tuple[Tensor, Tensor, "_Logits | None"]:
        """Return logprobs [C], log-sum-exps [M] and, if there is one chunk only, its logits."""
        dtype = torch.promote_types(hidden_MD.dtype, torch.float32)
        logprobs_C = hidden_MD.new_empty(len(self.targets_C), dtype=dtype)
        lse_M = hidden_MD.new_empty(hidden_MD.shape[0], dtype=dtype)
        logits = None
        for chunk, cells in zip(self.chunks, self.cells, strict=True):
            logits = self.logits(hidden_MD, chunk)
            target_c = self.targets_C[cells]
            lse_m = lse_M[chunk.start : chunk.end]
            torch.logsumexp(logits.z_mV, dim=-1, out=lse_m)
            if self.row_C is None:
                target_z_c, lse_c = logits.z_mV.gather(1, target_c[:, None])[:, 0], lse_m
            else:
                row_c = self.row_C[cells] - chunk.start
                target_z_c, lse_c = logits.z_mV[row_c, target_c], lse_m[row_c]
            torch.sub(target_z_c, lse_c, out=logprobs_C[cells])
        return logprobs_C, lse_M, logits if len(self.chunks) == 1 else None

    def logits(self, hidden_MD: Tensor, chunk: HeadChunk) -> "_Logits":
        """Return the logits of one chunk, divided by temperature."""
        hidden_mD = hidden_MD[chunk.start : chunk.end]
        num_missing = EXACT_MIN_ROWS - hidden_mD.shape[0] if self.is_exact else 0
        if num_missing > 0:
            padded = F.pad(hidden_mD, (0, 0, 0, num_missing))
            z_mV = self.head.product(padded)[: hidden_mD.shape[0]]
        else:
            z_mV = self.head.product(hidden_mD)
        batch = self._adapters(chunk)
        inners = [] if batch is None else lora_forward(z_mV, hidden_mD, self.head.shape, batch)
        z_mV = z_mV.to(torch.promote_types(z_mV.dtype, torch.float32))
        if self.inverse_temperature_M is not None:
            z_mV *= self.inverse_temperature_M[chunk.start : chunk.end, None]
        return _Logits(z_mV, inners, batch)

    def _adapters(self, chunk: HeadChunk) -> LoraBatch | None:
        """Return the adapters of a chunk that target the head; the others add nothing."""
        bank, kind = self.base.bank, self.head.shape.kind
        has_head = [slot is not None and kind in bank.kinds(slot) for slot, _ in chunk.segments]
        if not any(has_head):
            return None
        segments = [
            Segment(slot if has else None, length)
            for (slot, length), has in zip(chunk.segments, has_head, strict=True)
        ]
        grads = None if all(row is None for row in chunk.grad_rows) else chunk.grad_rows
        return LoraBatch.build(bank, segments, grad_rows=grads, is_exact=self.is_exact)

    def backpropagate(
        self, grad_C: Tensor, hidden_MD: Tensor, lse_M: Tensor, kept: "_Logits | None"
    ) -> Tensor:
        """Return the gradient of the hidden states, add the adapters' own to their rows, and use up
        the kept logits.

        dz = sum over cells of g (onehot(target) - softmax(z)) / temperature
        dh = dz W + (adapter's share)
        """
        grad_hidden_MD = torch.empty_like(hidden_MD)
        scaled_g_C = grad_C.to(lse_M.dtype)
        if self.inverse_temperature_M is not None:
            inverse_C = self.inverse_temperature_M
            scaled_g_C = scaled_g_C * (inverse_C if self.row_C is None else inverse_C[self.row_C])
        for chunk, cells in zip(self.chunks, self.cells, strict=True):
            logits = kept if kept is not None else self.logits(hidden_MD, chunk)
            rows = slice(chunk.start, chunk.end)
            g_c, target_c = scaled_g_C[cells], self.targets_C[cells]
            softmax_mV = logits.z_mV.sub_(lse_M[rows, None]).exp_()
            if self.row_C is None:
                dz_mV = softmax_mV.mul_(-g_c[:, None])
                dz_mV.scatter_add_(1, target_c[:, None], g_c[:, None])
            else:
                row_c = self.row_C[cells] - chunk.start
                g_m = g_c.new_zeros(chunk.end - chunk.start).index_add_(0, row_c, g_c)
                dz_mV = softmax_mV.mul_(-g_m[:, None])
                dz_mV.index_put_((row_c, target_c), g_c, accumulate=True)
            dz_mV = dz_mV.to(hidden_MD.dtype)
            grad_hidden_mD = self._project_back(dz_mV)
            if logits.batch is not None:
                lora_backward(
                    dz_mV,
                    hidden_MD[rows],
                    logits.inners,
                    grad_hidden_mD,
                    self.head.shape,
                    logits.batch,
                )
            grad_hidden_MD[rows] = grad_hidden_mD
        return grad_hidden_MD

    def _project_back(self, dz_mV: Tensor) -> Tensor:
        num_missing = EXACT_MIN_ROWS - dz_mV.shape[0] if self.is_exact else 0
        if num_missing <= 0:
            return self.head.back(dz_mV)
        return self.head.back(F.pad(dz_mV, (0, 0, 0, num_missing)))[: dz_mV.shape[0]]


@dataclass(frozen=True, slots=True)
class _Logits:
    z_mV: Tensor
    inners: list[Tensor]
    """Inner activations of the head adapters, which their backward pass needs."""
    batch: LoraBatch | None


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_MD, anchor, pass_):
        logprobs_C, lse_M, ctx.kept = pass_.score(hidden_MD)
        ctx.pass_ = pass_
        ctx.save_for_backward(hidden_MD, lse_M)
        return logprobs_C

    @staticmethod
    def backward(ctx, grad_C):  # type: ignore[override]
        hidden_MD, lse_M = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None
        return ctx.pass_.backpropagate(grad_C, hidden_MD, lse_M, kept), None, None
