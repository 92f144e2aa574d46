"""Queues, cuts and memory, without a model: passes are played by setting lengths."""

import numpy as np
import pytest
import torch

from marlaas.engine.kv_cache import Chunk, SlabPool
from marlaas.engine.scheduler import Scheduler
from marlaas.engine.sequence import LiveSequence
from marlaas.engine.types import SequenceRequest
from marlaas.types import SamplingParams


def make(capacity_tokens: int = 4096, **options: object) -> Scheduler:
    pool = SlabPool(
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        dtype=torch.float32,
        device="cpu",
        capacity_tokens=capacity_tokens,
    )
    settings = {"max_batch": 8, "budget_tokens": 32, **options}
    return Scheduler(pool, **settings)  # type: ignore[arg-type]


def add(
    scheduler: Scheduler, name: str, length: int, *, arrival: int = 0, prefix_len: int = 0
) -> LiveSequence:
    request = SequenceRequest(
        request_id=name,
        sequence_id=name,
        slot=None,
        tokens=np.arange(length, dtype=np.int32),
        sampling=SamplingParams(max_tokens=500),
        prefix_id="p" if prefix_len else "",
        prefix_len=prefix_len,
    )
    sequence = LiveSequence(
        slot=None,
        tokens=request.tokens.tolist(),
        request=request,
        arrival=arrival,
        limit=length + 500,
        prefix_len=min(prefix_len, length - 1),
    )
    scheduler.add(sequence)
    return sequence


def prefill_all(scheduler: Scheduler) -> list[list[tuple[int, int]]]:
    """Play prefill passes until none is left; return the spans of each."""
    passes = []
    scheduler.admit()
    while chunks := scheduler.next_prefill():
        passes.append([(chunk.slab.length, chunk.end) for chunk in chunks])
        scheduler.prefilled(chunks)
        scheduler.admit()
    return passes


def decode(scheduler: Scheduler, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        scheduler.make_room()
        for slab in scheduler.pool.decoding():
            slab.length += 1
            if slab.length == len(slab.owner.tokens):
                slab.owner.tokens.append(0)


def names(scheduler: Scheduler) -> list[str]:
    return sorted(slab.owner.request.request_id for slab in scheduler.pool.decoding())


def test_prefill_leaves_the_last_token_to_the_first_decode_step():
    scheduler = make()
    add(scheduler, "one", 1)
    add(scheduler, "ten", 10, arrival=1)
    assert prefill_all(scheduler) == [[(0, 9)]]
    assert names(scheduler) == ["one", "ten"]


def test_prefill_is_cut_at_a_sequences_own_places_whatever_the_company():
    alone, crowded = make(), make()
    add(alone, "x", 100, prefix_len=40)
    for idx, length in enumerate((20, 7, 61)):
        add(crowded, f"n{idx}", length, arrival=idx)
    add(crowded, "x", 100, arrival=3, prefix_len=40)
    cuts = []
    for scheduler in (alone, crowded):
        passes = prefill_all(scheduler)
        assert all(sum(end - start for start, end in spans) <= 32 for spans in passes)
        spans = [span for one in passes for span in one]
        cuts.append([span for span in spans if span in [(0, 32), (32, 40), (40, 72), (72, 99)]])
    assert cuts[0] == [(0, 32), (32, 40), (40, 72), (72, 99)]
    assert cuts[1][-3:] == cuts[0][-3:]


def test_first_come_first_served_even_when_a_later_one_would_fit():
    scheduler = make(1024)
    add(scheduler, "running", 400)
    scheduler.admit()
    add(scheduler, "large", 500, arrival=1)
    add(scheduler, "small", 5, arrival=2)
    prefill_all(scheduler)
    assert names(scheduler) == ["running"]
    scheduler.remove("running")
    prefill_all(scheduler)
    assert names(scheduler) == ["large"]


def test_the_youngest_is_preempted_and_comes_back_before_later_arrivals():
    scheduler = make(256)
    old = add(scheduler, "old", 50)
    young = add(scheduler, "young", 50, arrival=1)
    prefill_all(scheduler)
    add(scheduler, "later", 2, arrival=2)
    decode(scheduler, 80)
    assert names(scheduler) == ["old"] and young.num_sampled == 79
    assert [sequence.request.request_id for sequence in scheduler.waiting] == ["young", "later"]
    assert old.slab.capacity == 256
    scheduler.remove("old")
    # What was sampled is computed again in one go, not replayed.
    assert prefill_all(scheduler) == [[(0, 32)], [(32, 64)], [(64, 96)], [(96, 128)]]
    assert young.num_sampled == 79


def test_in_exact_mode_what_was_decoded_is_replayed_by_decode_steps():
    scheduler = make(256, is_exact=True)
    add(scheduler, "old", 50)
    young = add(scheduler, "young", 50, arrival=1)
    prefill_all(scheduler)
    decode(scheduler, 80)
    assert names(scheduler) == ["old"] and young.decoded == [[49, 128]]
    scheduler.remove("old")
    assert prefill_all(scheduler) == [[(0, 32)], [(32, 49)]]
    assert names(scheduler) == ["young"]
    decode(scheduler, 79)
    assert young.num_cached == 128 and young.num_sampled == 79
    decode(scheduler)
    assert young.num_sampled == 80 and young.decoded == [[49, 128]]
    young.note_decoded()
    assert young.decoded == [[49, 129]]


def test_a_shared_prefix_that_nobody_waits_for_any_more_is_not_computed():
    scheduler = make()
    for idx in range(3):
        add(scheduler, f"r{idx}", 60, arrival=idx, prefix_len=50)
    scheduler.admit()
    assert scheduler.next_prefill() == [Chunk(next(iter(scheduler.prefixes.values())).slab, 32)]
    for idx in range(3):
        assert scheduler.has_work
        assert scheduler.remove(f"r{idx}") is not None
    assert not scheduler.has_work and scheduler.pool.used_tokens == 0


@pytest.mark.parametrize("is_exact", [False, True])
def test_under_any_pressure_everyone_finishes(is_exact):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        scheduler = make(1024, max_batch=5, is_exact=is_exact)
        targets = {}
        for idx in range(12):
            prefix_len = int(rng.integers(2)) * 30
            name = f"r{idx}"
            sequence = add(
                scheduler, name, int(rng.integers(31, 300)), arrival=idx, prefix_len=prefix_len
            )
            targets[name] = len(sequence.tokens) + int(rng.integers(1, 200))
        for _ in range(20_000):
            if not scheduler.has_work:
                break
            scheduler.admit()
            chunks = scheduler.next_prefill()
            assert len(scheduler.running) <= 5
            if chunks:
                scheduler.prefilled(chunks)
            else:
                decode(scheduler)
            for slab in scheduler.pool.decoding():
                sequence = slab.owner
                if len(sequence.tokens) >= targets[sequence.request.request_id]:
                    scheduler.finish(sequence, keep_kv=bool(rng.integers(2)))
                elif sequence.next_prefill_end(32) > sequence.num_cached:
                    scheduler.refill(sequence)
        assert not scheduler.has_work
        scheduler.pool.check()


def test_parked_kv_is_kept_while_its_own_next_turn_waits_for_memory():
    scheduler = make(512)
    first = add(scheduler, "s", 60)
    prefill_all(scheduler)
    decode(scheduler, 20)
    scheduler.finish(first, keep_kv=True)
    add(scheduler, "running", 150, arrival=1)
    prefill_all(scheduler)
    assert scheduler.pool.used_tokens == 128 + 256
    second = add(scheduler, "s", 200, arrival=2)
    second.tokens[:80] = first.tokens[:80]
    prefill_all(scheduler)
    assert names(scheduler) == ["running"] and scheduler.parked["s"].slab.length == 79
    scheduler.remove("running")
    prefill_all(scheduler)
    assert names(scheduler) == ["s"] and second.num_reused == 79
