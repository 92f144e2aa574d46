"""Chunked logprobs against whole logits, with temperatures and head adapters."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from marlaas.engine.logprobs import (
    MIN_CHUNK_ROWS,
    ScoredRows,
    cut_head_chunks,
    selected_logprobs,
)
from marlaas.model.bank import Slot
from marlaas.model.base import BaseModel
from marlaas.model.lora import Segment
from tests.models import ALL_KINDS, BLOCK_KINDS, random_adapter, random_llama

torch.set_num_threads(1)

LENGTHS = (5, 40, 1, 23, 12)


def make_case(base: BaseModel) -> tuple[list[Segment], Tensor, Tensor, Tensor]:
    """Return segments (one of the base, one without a head adapter), hidden, targets, 1 / T."""
    slots = [
        random_adapter(base, 4, kinds=ALL_KINDS, seed=1),
        random_adapter(base, 16, kinds=frozenset({"lm_head"}), seed=2),
        None,
        random_adapter(base, 8, kinds=ALL_KINDS, seed=3),
        random_adapter(base, 8, kinds=BLOCK_KINDS, seed=4),
    ]
    segments = [Segment(slot, length) for slot, length in zip(slots, LENGTHS, strict=True)]
    generator = torch.Generator().manual_seed(0)
    num_rows = sum(LENGTHS)
    hidden_MD = torch.randn(num_rows, 32, dtype=base.dtype, generator=generator)
    targets_M = torch.randint(0, base.vocab_size, (num_rows,), generator=generator)
    inverse_temperature_M = 0.5 + torch.rand(num_rows, dtype=base.dtype, generator=generator)
    return segments, hidden_MD, targets_M, inverse_temperature_M


def head_matrices(base: BaseModel, slot: Slot) -> tuple[Tensor, Tensor]:
    layout = base.bank.bucket(slot.rank).layout
    a_RD, b_OR = layout.row_views(base.bank.read(slot), base.head.shape)
    return a_RD.clone().requires_grad_(), b_OR.clone().requires_grad_()


def naive_logprobs(
    base: BaseModel,
    hidden_MD: Tensor,
    targets_M: Tensor,
    inverse_temperature_M: Tensor,
    segments: list[Segment],
    matrices: dict[Slot, tuple[Tensor, Tensor]],
) -> Tensor:
    pieces = []
    for (slot, length), hidden in zip(segments, hidden_MD.split(LENGTHS), strict=True):
        logits = hidden @ base.head.weight.T
        if slot in matrices:
            a_RD, b_OR = matrices[slot]
            logits = logits + base.bank.scale(slot) * (hidden @ a_RD.T) @ b_OR.T
        assert logits.shape[0] == length
        pieces.append(logits)
    scaled_MV = torch.cat(pieces) * inverse_temperature_M[:, None]
    return scaled_MV.log_softmax(-1).gather(1, targets_M[:, None])[:, 0]


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("max_chunk_logits", [1, 128 * 25, 1 << 23])
def test_chunked_logprobs_and_gradients_equal_whole_logits(
    is_tied: bool, is_exact: bool, max_chunk_logits: int
) -> None:
    base = random_llama(dtype=torch.float64, tie_word_embeddings=is_tied)
    segments, hidden_MD, targets_M, inverse_temperature_M = make_case(base)
    matrices = {
        slot: head_matrices(base, slot)
        for slot, _ in segments
        if slot is not None and "lm_head" in base.bank.kinds(slot)
    }
    leaf_MD = hidden_MD.clone().requires_grad_()
    expected_M = naive_logprobs(base, leaf_MD, targets_M, inverse_temperature_M, segments, matrices)
    upstream_M = torch.linspace(-1, 1, len(targets_M), dtype=torch.float64)
    expected_M.backward(upstream_M)

    own_MD = hidden_MD.clone().requires_grad_()
    grad_rows = [
        None if slot is None else torch.zeros_like(base.bank.read(slot)) for slot, _ in segments
    ]
    rows = ScoredRows(
        targets_C=targets_M,
        segments=segments,
        inverse_temperature_M=inverse_temperature_M,
        grad_rows=grad_rows,
    )
    logprobs_M = selected_logprobs(
        base, own_MD, rows, is_exact=is_exact, max_chunk_logits=max_chunk_logits
    )
    logprobs_M.backward(upstream_M)
    torch.testing.assert_close(logprobs_M.detach(), expected_M.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(own_MD.grad, leaf_MD.grad, rtol=1e-10, atol=1e-12)
    for (slot, _), grad_row_P in zip(segments, grad_rows, strict=True):
        if slot not in matrices:
            assert grad_row_P is None or not grad_row_P.any()
            continue
        layout = base.bank.bucket(slot.rank).layout
        for ours, leaf in zip(
            layout.row_views(grad_row_P, base.head.shape), matrices[slot], strict=True
        ):
            torch.testing.assert_close(ours, leaf.grad, rtol=1e-10, atol=1e-12)


def test_autograd_agrees_with_finite_differences() -> None:
    base = random_llama(dtype=torch.float64)
    slot = random_adapter(base, 4, kinds=ALL_KINDS)
    hidden_MD = torch.randn(6, 32, dtype=torch.float64, requires_grad=True)
    targets_M = torch.arange(6)
    rows = ScoredRows(targets_C=targets_M, segments=[Segment(slot, 6)])
    assert torch.autograd.gradcheck(lambda x: selected_logprobs(base, x, rows), hidden_MD)


def test_no_tensor_is_larger_than_one_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    base = random_llama(vocab_size=512)
    slot = random_adapter(base, 8, kinds=ALL_KINDS)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                sizes.append(out.numel())
            return out

    hidden_MD = torch.randn(300, 32, requires_grad=True)
    targets_M = torch.zeros(300, dtype=torch.int64)
    max_chunk_logits = 512 * 100
    rows = ScoredRows(
        targets_C=targets_M,
        segments=[Segment(slot, 300)],
        grad_rows=[torch.zeros_like(base.bank.read(slot))],
    )
    with Watch():
        logprobs_M = selected_logprobs(base, hidden_MD, rows, max_chunk_logits=max_chunk_logits)
        logprobs_M.backward(torch.ones(300))
    assert max(sizes) == max_chunk_logits


def test_chunks_are_whole_segments_or_pieces_at_fixed_multiples() -> None:
    slots = [Slot(8, row) for row in range(4)]
    segments = [Segment(slot, length) for slot, length in zip(slots, (3, 5, 25, 4), strict=True)]
    chunks = cut_head_chunks(segments, [None] * 4, 10)
    cuts = [[(s.slot.row, s.length) for s in chunk.segments] for chunk in chunks]
    assert cuts == [[(0, 3), (1, 5)], [(2, 10)], [(2, 10)], [(2, 5)], [(3, 4)]]
    assert [(chunk.start, chunk.end) for chunk in chunks] == [
        (0, 8),
        (8, 18),
        (18, 28),
        (28, 33),
        (33, 37),
    ]
    exact = cut_head_chunks(segments, [None] * 4, 10, is_exact=True)
    assert [len(chunk.segments) for chunk in exact] == [1] * 6


def test_empty_segments_make_no_chunk() -> None:
    segments = [Segment(None, 0), Segment(Slot(8, 0), 4), Segment(None, 0)]
    (chunk,) = cut_head_chunks(segments, [None] * 3, MIN_CHUNK_ROWS)
    assert (chunk.start, chunk.end) == (0, 4)


def test_logprobs_are_computed_in_fp32_or_wider() -> None:
    base = random_llama(dtype=torch.bfloat16)
    hidden_MD = torch.randn(4, 32, dtype=torch.bfloat16)
    targets_M = torch.arange(4)
    rows = ScoredRows(targets_C=targets_M, segments=[Segment(None, 4)])
    logprobs_M = selected_logprobs(base, hidden_MD, rows)
    assert logprobs_M.dtype == torch.float32
    expected_MV = F.linear(hidden_MD, base.head.weight).float().log_softmax(-1)
    torch.testing.assert_close(logprobs_M, expected_MV[range(4), range(4)])
