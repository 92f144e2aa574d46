"""Cutting, choosing and laying out: arrays only, no model but the one that costs are made from."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from marlaas.engine.packing import (
    MAX_CHUNK_CELLS,
    MAX_MASKED,
    MIN_FILL,
    VECTOR_ELEMENTS,
    Chunk,
    ChunkQueue,
    PassCost,
    PassSequence,
    SharedPrefix,
    Submission,
    attention_batches,
    cut,
    num_inputs,
    pack,
)
from marlaas.model.bank import Slot
from marlaas.model.lora import Segment
from marlaas.types import Datum, Objective
from tests.engine.data import random_datum, random_group

torch.set_num_threads(1)

LINEAR = PassCost(cost_per_pair=0.0)
"""A sequence costs its tokens."""


def submit(
    data: Sequence[Datum], *, key: str = "p", slot: Slot | None = None, is_training: bool = True
) -> Submission:
    return Submission(
        ticket=key,
        key=key,
        slot=slot,
        data=data,
        objective=Objective(name="dppo_tis") if is_training else None,
        outputs=[None] * len(data),
    )


def full_datum(num_tokens: int, seed: int = 0) -> Datum:
    """Return a datum of which all tokens but the first are trained."""
    rng = np.random.default_rng((num_tokens, seed))
    datum = random_datum(rng, num_tokens)
    weights = np.ones(num_tokens, dtype=np.float32)
    weights[0] = 0.0
    return replace(datum, weights=weights)


def bounds(chunks: Sequence[Chunk]) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.end) for chunk in chunks]


def test_data_are_cut_in_order_into_whole_data_within_the_budget() -> None:
    data = [full_datum(length + 1, seed) for seed, length in enumerate((30, 30, 50, 120, 10, 80))]
    submission = submit(data)
    chunks = cut(submission, LINEAR, 100)
    assert bounds(chunks) == [(0, 2), (2, 3), (3, 4), (4, 6)]
    assert [chunk.cost for chunk in chunks] == [60, 50, 120, 90]
    assert submission.num_chunks_left == 4


def test_equal_data_with_many_targets_are_cut_by_what_is_scored() -> None:
    shape = (33, 128)
    zeros = np.zeros(shape, dtype=np.float32)
    datum = replace(
        full_datum(33),
        targets=np.zeros(shape, dtype=np.int32),
        weights=np.ones(shape, dtype=np.float32),
        advantages=zeros,
        sampling_logprobs=zeros,
    )
    chunks = cut(submit([datum] * 100), LINEAR, 512)
    assert bounds(chunks) == [(0, 64), (64, 100)]
    assert [chunk.cost for chunk in chunks] == [32, 32]
    assert MAX_CHUNK_CELLS == 64 * 32 * 128


def test_the_quadratic_cost_of_attention_counts() -> None:
    data = [full_datum(51, seed) for seed in range(4)]
    cost = PassCost(cost_per_pair=0.02)
    assert cost(50) == 100.0
    assert bounds(cut(submit(data), cost, 250)) == [(0, 2), (2, 4)]


def test_tokens_after_the_last_trained_one_are_not_computed() -> None:
    datum = full_datum(20)
    weights = datum.weights.copy()
    weights[12:] = 0.0
    datum = replace(datum, weights=weights)
    assert num_inputs(datum, is_training=True) == 11
    assert num_inputs(datum, is_training=False) == 19
    assert num_inputs(replace(datum, weights=0 * weights), is_training=True) == 0


def test_a_prompt_that_siblings_share_costs_once_a_chunk() -> None:
    group = random_group(np.random.default_rng(0), 40, [11] * 6)
    (chunk,) = cut(submit(group), LINEAR, 512)
    assert chunk.shared[0] == SharedPrefix(0, 0)
    assert all(prefix.length >= 40 for prefix in chunk.shared[1:])
    # The last one equals the first.
    assert chunk.shared[-1] == SharedPrefix(0, num_inputs(group[-1], is_training=True))
    assert chunk.cost == 40 + sum(num_inputs(datum, is_training=True) - 40 for datum in group[:6])
    first, second = cut(submit(group), LINEAR, 85)
    assert first.shared[0].length == second.shared[0].length == 0
    assert second.cost > 40


@pytest.mark.parametrize("seed", range(20))
def test_a_policy_is_cut_the_same_whatever_its_data_are_queued_with(seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = [full_datum(int(length), seed) for length in rng.integers(2, 60, 12)]
    submission = submit(data)
    chunks = cut(submission, LINEAR, 100)
    queue = ChunkQueue(100, is_exact=bool(seed % 2))
    queue.push(cut(submit([full_datum(40)], key="q"), LINEAR, 100))
    queue.push(chunks)
    queue.push(cut(submit([full_datum(90)] * 3, key="r"), LINEAR, 100))
    taken = []
    while queue:
        taken += [chunk for chunk in queue.pop_pass() if chunk.submission is submission]
    assert bounds(taken) == bounds(chunks), "in order, each once"


def test_a_pass_takes_whole_chunks_of_many_policies_within_the_budget() -> None:
    queue = ChunkQueue(100, is_exact=False)
    for key, length in (("a", 60), ("b", 50), ("c", 30), ("d", 10)):
        queue.push(cut(submit([full_datum(length + 1)], key=key), LINEAR, 100))
    keys = [[chunk.submission.key for chunk in queue.pop_pass()] for _ in range(2)]
    assert keys == [["a", "c", "d"], ["b"]]
    assert not queue.pop_pass()


def test_a_chunk_larger_than_the_budget_runs_alone() -> None:
    queue = ChunkQueue(100, is_exact=False)
    queue.push(cut(submit([full_datum(301)], key="a"), LINEAR, 100))
    queue.push(cut(submit([full_datum(5)], key="b"), LINEAR, 100))
    assert [chunk.submission.key for chunk in queue.pop_pass()] == ["a"]


def test_policies_take_turns() -> None:
    queue = ChunkQueue(100, is_exact=False)
    queue.push(cut(submit([full_datum(91)] * 5, key="flood"), LINEAR, 1))
    queue.push(cut(submit([full_datum(91)], key="late"), LINEAR, 100))
    keys = [queue.pop_pass()[0].submission.key for _ in range(3)]
    assert keys == ["flood", "late", "flood"]


def test_in_exact_mode_a_pass_has_one_chunk_of_a_policy() -> None:
    for is_exact, expected in ((True, 1), (False, 2)):
        queue = ChunkQueue(100, is_exact=is_exact)
        queue.push(cut(submit([full_datum(11)]), LINEAR, 100))
        queue.push(cut(submit([full_datum(11)]), LINEAR, 100))
        assert len(queue.pop_pass()) == expected


def test_scoring_and_training_never_share_a_pass() -> None:
    queue = ChunkQueue(100, is_exact=False)
    queue.push(cut(submit([full_datum(11)], key="a"), LINEAR, 100))
    queue.push(cut(submit([full_datum(11)], key="b", is_training=False), LINEAR, 100))
    queue.push(cut(submit([full_datum(11)], key="c"), LINEAR, 100))
    keys = [[chunk.submission.key for chunk in queue.pop_pass()] for _ in range(2)]
    assert keys == [["a", "c"], ["b"]]


def test_a_dropped_policy_leaves_the_queue() -> None:
    queue = ChunkQueue(100, is_exact=False)
    queue.push(cut(submit([full_datum(91)] * 3, key="a"), LINEAR, 1))
    queue.push(cut(submit([full_datum(11)], key="b"), LINEAR, 100))
    assert len(queue.drop("a")) == 3
    assert "a" not in queue and "b" in queue and len(queue) == 1
    assert not queue.drop("a")


@pytest.mark.parametrize("is_exact", [False, True])
def test_a_layout_says_of_every_scored_token_where_its_prediction_is(is_exact: bool) -> None:
    rng = np.random.default_rng(1)
    by_slot = {
        Slot(16, 0): [random_datum(rng, length) for length in (9, 2, 30)],
        Slot(8, 3): random_group(rng, 12, [4, 7, 4]),
        None: [random_datum(rng, 5)],
    }
    chunks = []
    for slot, data in by_slot.items():
        is_training = slot is not None
        chunks += cut(submit(data, key=str(slot), slot=slot, is_training=is_training), LINEAR, 512)
    packed = pack(chunks, is_exact=is_exact)
    assert [segment.slot for segment in packed.segments[:3]] == [None, Slot(8, 3), Slot(16, 0)]
    assert sum(segment.length for segment in packed.segments) == packed.num_tokens
    # Every sequence that attends is a datum's own inputs, at positions 0, 1, ...
    inputs = {
        tuple(datum.tokens[:length])
        for chunk in packed.chunks
        for datum in chunk.data
        if (length := num_inputs(datum, chunk.submission.is_training))
    }
    attended = set()
    asked = []
    for batch in packed.attention:
        queries_SQ, positions_SQ = batch.queries_SQ, batch.positions_SQ
        if queries_SQ is None:
            queries_SQ, positions_SQ = batch.keys_ST, packed.positions_N[batch.keys_ST]
        assert (packed.positions_N[queries_SQ] == positions_SQ).all()
        asked += queries_SQ.ravel().tolist()
        for place_T in batch.keys_ST:
            _, first = np.unique(place_T, return_index=True)
            own = place_T[np.sort(first)]
            assert packed.positions_N[own].tolist() == list(range(len(own)))
            attended.add(tuple(packed.tokens_N[own]))
    assert inputs <= attended
    assert set(asked) == set(range(packed.num_tokens)), "attention answers every token"
    # A prediction is made at the place of the token before its target.
    place_C = np.full(len(packed.targets_C), -1)
    for rows in (packed.trained, packed.looked_at):
        row_C = np.arange(len(rows.place_M)) if rows.row_C is None else rows.row_C
        place_C[rows.cell_C] = rows.place_M[row_C]
        assert (np.diff(row_C) >= 0).all()
        assert sum(rows.lengths) == len(rows.place_M)
        assert len(packed.segments_of(rows)) == len(packed.chunks)
    start = 0
    for datum_idx, (datum, scored) in enumerate(zip(packed.data, packed.scored, strict=True)):
        rows = slice(start, start + len(scored))
        start += len(scored)
        places = place_C[rows]
        assert packed.tokens_N[places].tolist() == datum.tokens[scored - 1].tolist()
        assert packed.positions_N[places].tolist() == (scored - 1).tolist()
        assert packed.targets_C[rows].tolist() == datum.tokens[scored].tolist()
        assert set(packed.datum_C[rows]) <= {datum_idx}
    assert start == len(packed.targets_C) == packed.chunk_bounds[-1][1]


def test_an_exact_pass_is_padded_so_that_no_real_element_is_in_a_tail() -> None:
    (chunk,) = cut(submit([full_datum(7)], slot=Slot(8, 0)), LINEAR, 512)
    packed = pack([chunk], is_exact=True)
    assert packed.num_tokens == VECTOR_ELEMENTS
    assert packed.segments == (Segment(Slot(8, 0), 6), Segment(None, VECTOR_ELEMENTS - 6))
    assert pack([chunk], is_exact=False).num_tokens == 6


def test_data_without_a_trained_token_take_no_place() -> None:
    empty = replace(full_datum(9), weights=np.zeros(9, dtype=np.float32))
    (chunk,) = cut(submit([empty, full_datum(4), empty], slot=Slot(8, 0)), LINEAR, 512)
    packed = pack([chunk], is_exact=False)
    assert packed.num_tokens == 3
    assert [len(scored) for scored in packed.scored] == [0, 3, 0]
    assert packed.datum_C.tolist() == [1, 1, 1]


def test_sequences_attend_with_others_of_similar_length() -> None:
    sequences = [PassSequence(np.arange(length), 0) for length in (3, 40, 31, 29, 4, 100)]
    batches = attention_batches(sequences)
    assert [batch.keys_ST.shape for batch in batches] == [(1, 100), (2, 40), (1, 29), (2, 4)]
    for batch in batches:
        assert batch.queries_SQ is None
        num_real = sum(len(np.unique(row)) for row in batch.keys_ST)
        assert num_real >= MIN_FILL * batch.num_keys


def test_of_a_shared_prefix_only_its_owner_asks_for_outputs() -> None:
    owner = PassSequence(np.arange(30), 0)
    siblings = [
        PassSequence(np.r_[np.arange(20), np.arange(start, start + num_own)], 20)
        for start, num_own in ((30, 10), (40, 9), (49, 1), (50, 1))
    ]
    whole, similar, short = attention_batches([owner, *siblings])
    assert whole.queries_SQ is None and whole.keys_ST.shape == (1, 30)
    assert similar.queries_SQ is not None and similar.queries_SQ[1].tolist() == [*range(40, 49), 48]
    assert similar.positions_SQ is not None and similar.positions_SQ[0].tolist() == [*range(20, 30)]
    assert similar.num_queries == 30 and similar.num_keys == 90
    assert short.num_queries == 1 and short.num_keys == 21


def test_a_long_sequence_takes_no_mask() -> None:
    long = PassSequence(np.arange(MAX_MASKED + 1), 100)
    assert attention_batches([long])[0].queries_SQ is None
    assert attention_batches([PassSequence(np.arange(MAX_MASKED), 100)])[0].num_queries == (
        MAX_MASKED - 100
    )
