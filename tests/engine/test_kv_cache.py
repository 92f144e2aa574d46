"""Slabs through their lives, and attention over them against plain attention."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from marlaas.config import slab_tokens
from marlaas.engine.kv_attention import DecodeContext, PrefillContext
from marlaas.engine.kv_cache import Chunk, Slab, SlabKind, SlabPool

torch.set_num_threads(1)

NUM_LAYERS, G, Q, E = 2, 2, 3, 8
SCALING = E**-0.5


def make_pool(capacity_tokens: int = 4096, dtype: torch.dtype = torch.float64) -> SlabPool:
    return SlabPool(
        num_layers=NUM_LAYERS,
        num_kv_heads=G,
        head_dim=E,
        dtype=dtype,
        device="cpu",
        capacity_tokens=capacity_tokens,
    )


def fill(slab: Slab, value: float, length: int) -> None:
    slab.home.kv[:, :, slab.row, :, :length] = value
    slab.length = length


def holds(slab: Slab, value: float) -> bool:
    return bool((slab.home.kv[:, :, slab.row, :, : slab.length] == value).all())


def test_capacities_double_from_64():
    assert [slab_tokens(n) for n in (1, 64, 65, 128, 129, 1000)] == [64, 64, 128, 128, 256, 1024]


def test_slabs_keep_their_contents_whatever_happens_to_others():
    """Random lives of slabs against a plain dictionary of what each should hold."""
    rng = np.random.default_rng(0)
    pool = make_pool(2048)
    expected: dict[Slab, float] = {}
    for step in range(1500):
        slabs = list(expected)
        slab = slabs[rng.integers(len(slabs))] if slabs else None
        match rng.integers(5) if slab is not None else 0:
            case 0:
                slab = pool.allocate(step, int(rng.integers(1, 300)))
                if slab is not None:
                    assert slab.kind is SlabKind.FILLING and slab.length == 0
                    fill(slab, step + 1, int(rng.integers(slab.capacity + 1)))
                    expected[slab] = step + 1
            case 1:
                pool.free(slab)
                del expected[slab]
            case 2:
                pool.set_kind(slab, SlabKind(rng.integers(3)))
            case 3:
                before, wanted = slab.capacity, int(rng.integers(1, 400))
                if pool.grow(slab, wanted):
                    assert slab.capacity == max(before, slab_tokens(wanted))
                else:
                    assert slab.capacity == before
            case 4:
                copy = pool.allocate(-step, slab.length)
                if copy is not None:
                    pool.copy(slab, copy)
                    expected[copy] = expected[slab]
        pool.check()
        assert all(holds(slab, value) for slab, value in expected.items())
    for slab in expected:
        pool.free(slab)
    pool.check()
    assert pool.used_tokens == 0


def test_the_budget_is_never_passed_and_freed_room_is_found_again():
    pool = make_pool(512)
    slabs = [pool.allocate(None, 64) for _ in range(8)]
    assert all(slabs) and pool.allocate(None, 1) is None
    for slab in slabs[:4]:
        pool.free(slab)
    assert pool.allocate(None, 257) is None
    large = pool.allocate(None, 256)
    assert large is not None and large.capacity == 256
    assert not pool.grow(large, 257) and large.capacity == 256
    # Memory that small slabs no longer use is given back to make room for the large one.
    assert sum(home.capacity * home.num_rows for home in pool.classes) <= 512
    pool.check()


def test_decoding_slabs_are_the_first_rows_and_changes_among_them_are_told():
    pool = make_pool()
    slabs = [pool.allocate(idx, 10) for idx in range(6)]
    assert pool.decoding() == []
    for idx in (3, 0, 5):
        epoch = pool.decode_epoch
        pool.set_kind(slabs[idx], SlabKind.DECODING)
        assert pool.decode_epoch != epoch
    assert {slab.owner for slab in pool.decoding()} == {0, 3, 5}
    assert [slab.row for slab in pool.decoding()] == [0, 1, 2]
    epoch = pool.decode_epoch
    pool.set_kind(slabs[1], SlabKind.IDLE)
    pool.free(slabs[2])
    assert pool.decode_epoch == epoch
    pool.set_kind(slabs[0], SlabKind.IDLE)
    assert pool.decode_epoch != epoch
    assert {slab.owner for slab in pool.decoding()} == {3, 5}


def attend_plainly(q_THE: torch.Tensor, k_TGE: torch.Tensor, v_TGE: torch.Tensor) -> torch.Tensor:
    """Return causal attention of the last tokens q over all of k and v, head by head."""
    start = len(k_TGE) - len(q_THE)
    out_THE = torch.empty_like(q_THE)
    for head in range(q_THE.shape[1]):
        group = head // (q_THE.shape[1] // k_TGE.shape[1])
        scores = q_THE[:, head] @ k_TGE[:, group].T * SCALING
        is_later = torch.arange(len(k_TGE)) > start + torch.arange(len(q_THE))[:, None]
        out_THE[:, head] = scores.masked_fill(is_later, -torch.inf).softmax(-1) @ v_TGE[:, group]
    return out_THE


def random_qkv(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    make = lambda heads: torch.randn(num_tokens, heads, E, dtype=torch.float64)  # noqa: E731
    return make(G * Q), make(G), make(G)


def test_prefill_and_decode_over_slabs_equal_plain_attention():
    """Five sequences of different lengths, in chunks, then decoded together, in every layer."""
    torch.manual_seed(0)
    pool = make_pool()
    lengths = [1, 40, 64, 70, 130]
    histories = [[random_qkv(length + 100) for _ in range(NUM_LAYERS)] for length in lengths]
    slabs = [pool.allocate(idx, length + 1) for idx, length in enumerate(lengths)]
    for ends in ([min(33, n) for n in lengths], lengths):
        chunks = [Chunk(slab, end) for slab, end in zip(slabs, ends, strict=True)]
        chunks = [chunk for chunk in chunks if chunk.end > chunk.slab.length]
        spans = [(chunk.slab.owner, chunk.slab.length, chunk.end) for chunk in chunks]
        context = PrefillContext(chunks, torch.float64, torch.device("cpu"))
        for layer in range(NUM_LAYERS):
            packed = [
                torch.cat([histories[owner][layer][part][start:end] for owner, start, end in spans])
                for part in range(3)
            ]
            padded = [F.pad(part, (0, 0, 0, 0, 0, 2), value=torch.nan) for part in packed]
            out = context.attend(layer, *padded, SCALING)
            assert not out[-2:].any()
            pieces = out[:-2].split([end - start for _, start, end in spans])
            for (owner, start, end), piece in zip(spans, pieces, strict=True):
                q, k, v = histories[owner][layer]
                torch.testing.assert_close(piece, attend_plainly(q[start:end], k[:end], v[:end]))
        for chunk in chunks:
            chunk.slab.length = chunk.end
    for slab in slabs:
        pool.set_kind(slab, SlabKind.DECODING)

    context, epoch = DecodeContext(pool), pool.decode_epoch
    for step in range(70):
        for slab in slabs:
            assert pool.grow(slab, slab.length + 1)
        if pool.decode_epoch != epoch:
            context, epoch = DecodeContext(pool), pool.decode_epoch
        rows = pool.decoding()
        position_N = torch.tensor([slab.length for slab in rows])
        context.advance(position_N, [int(position_N[part.own].max()) for part in context.parts])
        for layer in range(NUM_LAYERS):
            new = [
                torch.stack([histories[slab.owner][layer][part][slab.length] for slab in rows])
                for part in range(3)
            ]
            padded = [F.pad(part, (0, 0, 0, 0, 0, step % 2), value=torch.nan) for part in new]
            out = context.attend(layer, *padded, SCALING)
            assert not out[len(rows) :].any()
            for row, slab in enumerate(rows):
                q, k, v = (part[: slab.length + 1] for part in histories[slab.owner][layer])
                torch.testing.assert_close(out[row], attend_plainly(q[-1:], k, v)[0])
        for slab in rows:
            slab.length += 1
        pool.check()


@pytest.mark.parametrize("heads", [(2, 3, 8), (2, 2, 40), (3, 3, 64), (1, 4, 16), (2, 7, 64)])
def test_in_exact_mode_decode_attention_has_the_same_bits_whatever_the_other_rows(heads):
    """The measured property that exact mode stands on, on the machine at hand."""
    torch.manual_seed(0)
    num_groups, num_queries, width = heads
    lengths = (1, 7, 63, 64, 65, 129, 200, 300, 511, 513, 700, 1000)
    tokens = [torch.randn(3, num_groups, 1024, width) for _ in range(2)]
    q = torch.randn(3, num_groups * num_queries, width)
    new = torch.randn(3, num_groups, width)

    def decode(others: list[int], length: int) -> torch.Tensor:
        pool = SlabPool(
            num_layers=1,
            num_kv_heads=num_groups,
            head_dim=width,
            dtype=torch.float32,
            device="cpu",
            capacity_tokens=4096,
        )
        for idx, end in enumerate([length, *others]):
            slab = pool.allocate(idx, 1024)
            for part in range(2):
                slab.home.kv[0, part, slab.row, :, :end] = tokens[part][idx, :, :end]
            slab.length = end
            pool.set_kind(slab, SlabKind.DECODING)
        context = DecodeContext(pool, is_exact=True)
        position_N = torch.tensor([slab.length for slab in pool.decoding()])
        context.advance(position_N, [int(position_N.max())])
        rows = slice(0, len(position_N))
        return context.attend(0, q[rows], new[rows], new[rows], width**-0.5)[0]

    for length in lengths:
        alone = decode([], length)
        for others in ([3], [150], [250, 600], [1023, 5]):
            assert torch.equal(decode(others, length), alone)
