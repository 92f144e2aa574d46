"""Whole requests through `BatchGenerator`, against full forward passes and against themselves."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from marlaas.engine.generator import BatchGenerator
from marlaas.engine.kv_attention import PrefillContext
from marlaas.engine.kv_cache import Chunk, SlabPool
from marlaas.engine.sampler import uniforms
from marlaas.engine.trainer import LoraTrainer
from marlaas.engine.types import SequenceRequest, SequenceResult
from marlaas.errors import CapacityExceeded, InvalidRequest, UnsupportedFeature
from marlaas.model.attention import PackedSequences
from marlaas.model.bank import Slot
from marlaas.model.base import BaseModel
from marlaas.model.lora import LoraBatch, Segment
from marlaas.types import Datum, SamplingParams, StopReason
from tests.models import ALL_KINDS, random_adapter, random_adapters, random_llama, random_qwen3

torch.set_num_threads(1)


def make(base: BaseModel, **options: object) -> BatchGenerator:
    settings = {"kv_capacity_tokens": 16384, "max_context": 256, **options}
    return BatchGenerator(base, **settings)  # type: ignore[arg-type]


def prompt(length: int, seed: int = 0, vocab_size: int = 128) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, length).astype(np.int32)


def ask(name: str, tokens: np.ndarray, slot: Slot | None = None, **fields: object):
    sampling = {
        key: fields.pop(key) for key in list(fields) if key in SamplingParams.__dataclass_fields__
    }
    return SequenceRequest(
        request_id=name,
        sequence_id=fields.pop("sequence_id", name),  # type: ignore[arg-type]
        slot=slot,
        tokens=np.asarray(tokens, dtype=np.int32),
        sampling=SamplingParams(**{"max_tokens": 12, "seed": 1, **sampling}),  # type: ignore
        **fields,  # type: ignore[arg-type]
    )


def drain(generator: BatchGenerator, num_steps: int = 10_000) -> dict[str, SequenceResult]:
    results = {}
    for _ in range(num_steps):
        ended, _ = generator.step()
        generator.pool.check()
        results.update({result.request_id: result for result in ended})
        if not generator.has_work:
            break
    return results


def generate(generator: BatchGenerator, requests: Sequence[SequenceRequest]):
    for request in requests:
        generator.submit(request)
    return drain(generator)


def logprobs_of(base: BaseModel, tokens: Sequence[int], slot: Slot | None) -> torch.Tensor:
    """Return the logprobs [T, V] of a full forward pass, as training computes them."""
    num_tokens = len(tokens)
    batch = LoraBatch.build(base.bank, [Segment(slot, num_tokens)]) if slot else None
    ids = torch.tensor(np.asarray(tokens, dtype=np.int64))
    with torch.inference_mode(), base.bank.active(batch):
        hidden = base.hidden(ids, torch.arange(num_tokens), PackedSequences([num_tokens]), batch)
        return base.head(hidden).float().log_softmax(-1)


def sample_naively(base: BaseModel, request: SequenceRequest) -> tuple[list[int], list[float]]:
    """Sample with one full forward pass per token, at temperature only."""
    tokens, logprobs = request.tokens.tolist(), []
    for _ in range(request.sampling.max_tokens):
        logits = logprobs_of(base, tokens, request.slot)[-1] / request.sampling.temperature
        probabilities = logits.double().softmax(-1)
        seed = np.array([request.sampling.seed], dtype=np.uint64)
        uniform = uniforms(seed, np.array([len(tokens)]))
        token = int(torch.searchsorted(probabilities.cumsum(0), torch.from_numpy(uniform))[0])
        logprobs.append(float(probabilities[token].log()))
        tokens.append(token)
    return tokens[len(request.tokens) :], logprobs


def assert_same_bits(one: SequenceResult, other: SequenceResult) -> None:
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.logprobs.tobytes() == other.logprobs.tobytes()
    assert one.stop_reason == other.stop_reason


@pytest.mark.parametrize("make_base", [random_llama, random_qwen3])
def test_tokens_and_logprobs_equal_those_of_full_forward_passes(make_base):
    base = make_base()
    slots = [None, *random_adapters(base, [4, 8, 16, 40], kinds=ALL_KINDS)]
    requests = [
        ask(f"r{idx}", prompt(5 + 9 * idx, idx), slots[idx % 5], temperature=0.8, seed=idx)
        for idx in range(10)
    ]
    results = generate(make(base), requests)
    for request in requests:
        tokens, logprobs = sample_naively(base, request)
        result = results[request.request_id]
        assert result.tokens.tolist() == tokens
        np.testing.assert_allclose(result.logprobs, logprobs, atol=1e-4)
        assert result.stop_reason is StopReason.LENGTH
        assert result.slots == [(0, request.slot)]


def test_sequences_outgrow_their_slabs():
    base = random_llama()
    request = ask("long", prompt(3), max_tokens=200)
    result = generate(make(base), [request])["long"]
    assert result.tokens.tolist() == sample_naively(base, request)[0]


# -- how sampling ends ------------------------------------------------------------------------


def test_sampling_ends_after_a_stop_token_and_keeps_it():
    base = random_llama()
    tokens = generate(make(base), [ask("free", prompt(6), max_tokens=30)])["free"].tokens
    stop = int(tokens[10])
    first = tokens.tolist().index(stop)
    request = ask("stopped", prompt(6), max_tokens=30, stop_token_ids=(127, stop))
    result = generate(make(base), [request])["stopped"]
    assert result.stop_reason is StopReason.STOP_TOKEN
    assert result.tokens.tolist() == tokens[: first + 1].tolist()


def test_sampling_ends_once_the_completion_contains_a_stop_string():
    def decode_text(tokens: list[int]) -> str:
        return "".join(f"<{token}>" for token in tokens)

    base = random_llama()
    tokens = generate(make(base), [ask("free", prompt(6), max_tokens=30)])["free"].tokens
    stop = decode_text(tokens[9:12].tolist())[1:-1]
    generator = make(base, decode_text=decode_text)
    stopped = ask("stopped", prompt(6), max_tokens=30, stop_strings=("never", stop))
    results = generate(generator, [stopped, ask("free", prompt(6), max_tokens=30)])
    assert results["stopped"].stop_reason is StopReason.STOP_STRING
    assert results["stopped"].tokens.tolist() == tokens[:12].tolist()
    assert results["free"].stop_reason is StopReason.LENGTH
    # A stop string of the context does not count.
    in_context = ask("again", tokens[:12], max_tokens=3, stop_strings=(stop,))
    assert generate(generator, [in_context])["again"].stop_reason is StopReason.LENGTH


def test_sampling_ends_where_the_context_does():
    base = random_llama()
    generator = make(base, max_context=64)
    requests = [
        ask("runs into it", prompt(60), max_tokens=30),
        ask("just fits", prompt(52), max_tokens=12),
        ask("is full already", prompt(64), prompt_logprobs=True),
        ask("wants nothing", prompt(10), max_tokens=0, prompt_logprobs=True),
    ]
    results = generate(generator, requests)
    assert [len(results[r.request_id].tokens) for r in requests] == [4, 12, 0, 0]
    assert [results[r.request_id].stop_reason for r in requests] == [
        StopReason.CONTEXT_FULL,
        StopReason.LENGTH,
        StopReason.CONTEXT_FULL,
        StopReason.LENGTH,
    ]
    assert len(results["is full already"].prompt_logprobs) == 64
    assert generator.kv_tokens == 0


def test_what_cannot_be_served_is_refused_with_the_numbers():
    base = random_llama()
    generator = make(base, max_context=64)
    with pytest.raises(CapacityExceeded, match=r"65 tokens .* at most 64"):
        generator.submit(ask("long", prompt(65)))
    with pytest.raises(InvalidRequest, match="at least one"):
        generator.submit(ask("empty", prompt(0)))
    for token in (-1, 128):
        with pytest.raises(InvalidRequest, match="0 to 127"):
            generator.submit(ask("foreign", np.array([3, token])))
    with pytest.raises(UnsupportedFeature, match="stop strings"):
        generator.submit(ask("texts", prompt(5), stop_strings=("x",)))
    with pytest.raises(CapacityExceeded, match=r"kv_capacity_tokens 100: .* 256 takes 256"):
        make(base, kv_capacity_tokens=100)
    assert not generator.has_work


def test_a_request_can_be_cancelled_in_every_state():
    base = random_llama()
    shared = prompt(40, 9)
    group = {"prefix_id": "p", "prefix_len": 40}

    def build() -> BatchGenerator:
        generator = make(base, max_batch=2, prefill_budget_tokens=16)
        for name in ("a", "b", "c", "d"):
            generator.submit(ask(name, shared, max_tokens=4, seed=ord(name), **group))
        return generator

    undisturbed = drain(build())
    for num_steps in range(16):
        for name in ("a", "b", "d"):
            generator = build()
            results = {}
            for _ in range(num_steps):
                results.update({result.request_id: result for result in generator.step()[0]})
            cancelled = generator.cancel(name)
            results.update(drain(generator))
            for other, result in results.items():
                assert result.tokens.tolist() == undisturbed[other].tokens.tolist()
            assert (cancelled is None) == (name in results)
            if cancelled is not None:
                num_tokens = len(cancelled.tokens)
                assert cancelled.stop_reason is StopReason.CANCELLED
                assert (cancelled.tokens == undisturbed[name].tokens[:num_tokens]).all()
            assert not generator.has_work and generator.num_waiting == 0
    assert make(base).cancel("unknown") is None


# -- prompt logprobs --------------------------------------------------------------------------


@pytest.mark.parametrize("is_exact", [False, True])
def test_prompt_logprobs_equal_those_of_a_full_forward_pass(is_exact):
    base = random_llama()
    slots = [None, *random_adapters(base, [8, 16], kinds=ALL_KINDS)]
    requests = [
        ask(
            f"{slot}-{length}",
            prompt(length, length),
            slot,
            max_tokens=2,
            prompt_logprobs=True,
            topk_prompt_logprobs=5,
            prefix_id="shared",
            prefix_len=length // 2,
        )
        for slot in slots
        for length in (1, 2, 17, 200)
    ]
    generator = make(base, prefill_budget_tokens=150, is_exact=is_exact)
    results = generate(generator, requests)
    for request in requests:
        result = results[request.request_id]
        expected = logprobs_of(base, request.tokens, request.slot)[:-1]
        chosen = expected.gather(1, torch.tensor(request.tokens[1:, None].astype(np.int64)))
        top = expected.topk(5)
        assert (
            np.isnan(result.prompt_logprobs[0]) and np.isnan(result.topk_prompt_logprobs[0]).all()
        )
        np.testing.assert_allclose(result.prompt_logprobs[1:], chosen[:, 0], atol=1e-4)
        np.testing.assert_allclose(result.topk_prompt_logprobs[1:], top.values, atol=1e-4)
        assert (result.topk_prompt_ids[1:] == top.indices.numpy()).all()
        assert result.topk_prompt_ids.dtype == np.int32
        assert result.prompt_logprobs.dtype == np.float32
        assert result.num_cached_tokens == 0


def scored_fields(result: SequenceResult) -> dict[str, np.ndarray]:
    """Return all that a result says beside its tokens and their logprobs."""
    names = [name for name in SequenceResult.__dataclass_fields__ if "prompt" in name]
    names += ["topk_sample_ids", "topk_sample_logprobs"]
    return {name: value for name in names if (value := getattr(result, name)) is not None}


@pytest.mark.parametrize("is_exact", [False, True])
def test_given_tokens_are_scored_cell_by_cell_from_where_it_is_asked(is_exact):
    base = random_llama()
    slots = [None, *random_adapters(base, [8], kinds=ALL_KINDS)]
    rng = np.random.default_rng(0)
    requests = []
    for slot in slots:
        for length, first in ((1, 0), (2, 1), (40, 0), (40, 13), (40, 39), (40, 40)):
            targets = rng.integers(-1, 128, (length, 3)).astype(np.int32)
            name = f"{slot}-{length}-{first}"
            requests.append(
                ask(name, prompt(length), slot, max_tokens=1, prompt_logprobs=True,
                    target_prompt_ids=targets, prompt_logprobs_from=first)
            )  # fmt: skip
    results = generate(make(base, prefill_budget_tokens=16, is_exact=is_exact), requests)
    for request in requests:
        result, length = results[request.request_id], len(request.tokens)
        logprob_TV = logprobs_of(base, request.tokens, request.slot)[:-1].numpy()
        targets = request.target_prompt_ids
        expected = np.full((length, 3), np.nan, dtype=np.float32)
        rows = np.arange(length - 1)[:, None]
        expected[1:] = np.where(targets[1:] < 0, np.nan, logprob_TV[rows, targets[1:]])
        own = np.full(length, np.nan, dtype=np.float32)
        own[1:] = logprob_TV[rows[:, 0], request.tokens[1:]]
        first = request.prompt_logprobs_from
        expected[:first], own[:first] = np.nan, np.nan
        np.testing.assert_allclose(result.target_prompt_logprobs, expected, atol=1e-4)
        np.testing.assert_allclose(result.prompt_logprobs, own, atol=1e-4)
        assert result.target_prompt_logprobs.dtype == np.float32


@pytest.mark.parametrize("is_exact", [False, True])
def test_what_is_before_the_first_score_may_come_from_memory(is_exact):
    base = random_llama()
    (slot,) = random_adapters(base, [8], kinds=ALL_KINDS)
    shared = {"prefix_id": "p", "prefix_len": 59, "prompt_logprobs": True, "max_tokens": 2}
    tokens = prompt(60)
    generator = make(base, is_exact=is_exact)
    results = generate(
        generator,
        [ask(f"{first}-{idx}", tokens, slot, prompt_logprobs_from=first, **shared)
         for first in (0, 40) for idx in range(3)],
    )  # fmt: skip
    whole = results["0-0"].prompt_logprobs
    for idx in range(3):
        assert results[f"0-{idx}"].num_cached_tokens == 0
        tail = results[f"40-{idx}"].prompt_logprobs
        assert np.isnan(tail[:40]).all()
        np.testing.assert_allclose(tail[40:], whole[40:], atol=1e-5)
    assert results["40-2"].num_cached_tokens == 39
    # So may the KV of an earlier turn.
    turn = ask("t", tokens[:30], slot, sequence_id="turns", max_tokens=4, keep_kv=True)
    said = generate(generator, [turn])["t"].tokens
    longer = np.concatenate([tokens[:30], said, tokens[30:]])
    for first, num_cached in ((33, 0), (34, 33), (50, 33)):
        again = ask("u", longer, slot, sequence_id="turns", max_tokens=1, keep_kv=False,
                    prompt_logprobs=True, prompt_logprobs_from=first)  # fmt: skip
        result = generate(generator, [again])["u"]
        assert result.num_cached_tokens == num_cached
        expected = logprobs_of(base, longer, slot)[np.arange(63), longer[1:].astype(np.int64)]
        np.testing.assert_allclose(result.prompt_logprobs[first:], expected[first - 1 :], atol=1e-4)
        generate(generator, [turn])


def test_alternatives_of_the_context_are_drawn_as_tokens_are():
    base = random_llama()
    request = ask("a", prompt(5), max_tokens=0, temperature=0.5, top_k=9, prompt_alt_tokens_k=128)
    results = [
        generate(make(base), [replace(request, prompt_logprobs_from=first)])["a"]
        for first in (0, 3)
    ]
    ids, logprobs = results[0].prompt_alt_ids, results[0].prompt_alt_logprobs
    assert ids.shape == (5, 128) and ids.dtype == np.int32
    assert (ids[0] == -1).all() and np.isnan(logprobs[0]).all()
    logits_TV = 2 * logprobs_of(base, request.tokens, None)[:-1]
    for entry, logits_V in enumerate(logits_TV, start=1):
        kept = logits_V.topk(9)
        expected = torch.full((128,), -torch.inf).scatter(0, kept.indices, kept.values)
        expected = expected.log_softmax(-1).numpy()
        np.testing.assert_allclose(logprobs[entry], expected[ids[entry]], atol=1e-4)
        share = np.bincount(ids[entry], minlength=128) / 128
        assert np.abs(share - np.exp(expected)).max() < 0.15
    assert (results[1].prompt_alt_ids[3:] == ids[3:]).all()
    assert (results[1].prompt_alt_ids[:3] == -1).all()
    again = generate(make(base), [replace(request, sampling=SamplingParams(max_tokens=0, seed=2))])
    assert (again["a"].prompt_alt_ids[1:] != ids[1:]).any()


# -- the most likely tokens beside the sampled ones ----------------------------------------------


@pytest.mark.parametrize("is_exact", [False, True])
def test_most_likely_tokens_come_with_every_sampled_one(is_exact):
    base = random_llama()
    slots = [None, *random_adapters(base, [8], kinds=ALL_KINDS)]
    requests = [
        ask(f"r{idx}", prompt(4 + idx, idx), slots[idx % 2], topk_sample_logprobs=num_top, **params)
        for idx, (num_top, params) in enumerate(
            [
                (3, {"temperature": 0.6}),
                (5, {"top_k": 2}),
                (0, {}),
                (3, {"temperature": 0.0}),
                (1, {"max_tokens": 0}),
            ]
        )
    ]
    results = generate(make(base, is_exact=is_exact), requests)
    assert results["r2"].topk_sample_ids is None and results["r2"].topk_sample_logprobs is None
    assert results["r4"].topk_sample_ids.shape == (0, 1)
    for request in requests:
        if not (num_top := request.topk_sample_logprobs):
            continue
        result = results[request.request_id]
        assert result.topk_sample_ids.shape == (len(result.tokens), num_top)
        for place in range(len(result.tokens)):
            context = np.concatenate([request.tokens, result.tokens[:place]])
            logits_V = logprobs_of(base, context, request.slot)[-1]
            top = (logits_V / (request.sampling.temperature or 1.0)).log_softmax(-1).topk(num_top)
            assert result.topk_sample_ids[place].tolist() == top.indices.tolist()
            np.testing.assert_allclose(result.topk_sample_logprobs[place], top.values, atol=1e-4)


def test_without_stop_tokens_nothing_but_a_limit_ends_a_sequence():
    base = random_llama()
    request = ask("endless", prompt(6), max_tokens=10_000, stop_token_ids=())
    others = ask("stops", prompt(7), max_tokens=40, stop_token_ids=(1, 2, 3))
    results = generate(make(base, max_context=200), [request, others])
    assert results["endless"].stop_reason is StopReason.CONTEXT_FULL
    assert len(results["endless"].tokens) == 194
    assert len(set(results["endless"].tokens.tolist())) > 60


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"topk_sample_logprobs": 129}, "topk_sample_logprobs = 129; expected 0..128"),
        ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs = -1; expected 0..128"),
        ({"prompt_alt_tokens_k": 1000}, "prompt_alt_tokens_k = 1000; expected 0..128"),
        ({"prompt_logprobs_from": 5}, "prompt_logprobs_from = 5; expected 0..4"),
        ({"target_prompt_ids": np.zeros((3, 2), np.int32)}, r"shape \(3, 2\); expected \(4, K\)"),
        ({"target_prompt_ids": np.full((4, 1), 128, np.int32)}, "expected integers, -1 to 127"),
    ],
)
def test_scores_that_cannot_be_had_are_refused(wrong, problem):
    generator = make(random_llama())
    with pytest.raises(InvalidRequest, match=problem):
        generator.submit(ask("r", prompt(4), **wrong))
    with pytest.raises(InvalidRequest, match=r"shape \(4, 1\): expected \(T,\)"):
        generator.submit(ask("r", prompt(4)[:, None]))
    assert not generator.has_work


# -- shared prefixes and turns ----------------------------------------------------------------


def count_prefill(generator: BatchGenerator) -> tuple[dict[str, SequenceResult], int]:
    results, num_prefilled = {}, 0
    while generator.has_work:
        ended, work = generator.step()
        results.update({result.request_id: result for result in ended})
        num_prefilled += work.num_tokens if work and work.kind == "prefill" else 0
    return results, num_prefilled


def test_a_prefix_that_arrives_together_is_computed_once():
    base = random_llama()
    slots = random_adapters(base, [8, 8])
    opening = prompt(50, 3)
    generator = make(base)
    for slot in slots:
        for idx in range(8):
            tokens = np.concatenate([opening, prompt(idx, idx)])
            name = f"{slot.row}-{idx}"
            generator.submit(ask(name, tokens, slot, seed=idx, prefix_id="p", prefix_len=50))
    results, num_prefilled = count_prefill(generator)
    # Without a rest, the last token of the prefix is each sequence's own: 49 are shared.
    assert num_prefilled == 2 * (49 + 50 + sum(range(8)) - 7)
    for slot in slots:
        for idx in range(8):
            request = ask("x", np.concatenate([opening, prompt(idx, idx)]), slot, seed=idx)
            result = results[f"{slot.row}-{idx}"]
            assert result.tokens.tolist() == sample_naively(base, request)[0]
            assert result.num_cached_tokens == (50 if idx else 49)
    # Later, too, while memory allows; but not under another slot, id or opening.
    generator.submit(ask("later", opening, slots[0], prefix_id="p", prefix_len=50))
    assert count_prefill(generator)[1] == 0
    generator.submit(ask("base", opening, None, prefix_id="p", prefix_len=50))
    generator.submit(ask("other id", opening, slots[0], prefix_id="q", prefix_len=50))
    generator.submit(ask("other text", prompt(50, 4), slots[0], prefix_id="p", prefix_len=50))
    assert count_prefill(generator)[1] == 3 * 49


def test_a_further_turn_computes_only_what_is_new():
    base = random_llama()
    slot = random_adapter(base, 8)
    generator = make(base)
    tokens, num_sampled = prompt(20), 0
    for turn in range(3):
        request = ask(f"turn {turn}", tokens, slot, sequence_id="s", seed=5, keep_kv=True)
        generator.submit(request)
        assert generator.num_parked == min(turn, 1)
        results, num_prefilled = count_prefill(generator)
        result = results[f"turn {turn}"]
        expected, logprobs = sample_naively(base, request)
        assert result.tokens.tolist() == expected
        np.testing.assert_allclose(result.logprobs, logprobs, atol=1e-4)
        # The last sampled token and seven of the eight new ones; the eighth is decoded.
        assert num_prefilled == (8 if turn else 19)
        assert result.num_cached_tokens == (len(tokens) - 9 if turn else 0)
        num_sampled += len(expected)
        tokens = np.concatenate([tokens, result.tokens, prompt(8, turn)])
    assert generator.num_parked == 1 and generator.kv_tokens > 0
    generator.release("s")
    assert generator.num_parked == 0 and generator.kv_tokens == 0


def test_parked_kv_is_used_only_by_the_same_tokens_under_the_same_slot():
    base = random_llama()
    slots = random_adapters(base, [8, 8])
    first = ask("first", prompt(20), slots[0], sequence_id="s", keep_kv=True)
    for change in ("tokens", "slot", "shorter", "none"):
        generator = make(base)
        result = generate(generator, [first])["first"]
        tokens = np.concatenate([first.tokens, result.tokens, prompt(5, 7)])
        slot = slots[0]
        if change == "tokens":
            tokens[7] += 1
        elif change == "slot":
            slot = slots[1]
        elif change == "shorter":
            tokens = tokens[:25]
        request = ask("second", tokens, slot, sequence_id="s")
        second = generate(generator, [request])["second"]
        assert second.tokens.tolist() == sample_naively(base, request)[0]
        assert (second.num_cached_tokens > 0) == (change == "none")
        assert generator.kv_tokens == 0


def test_forgetting_a_slot_drops_all_kv_computed_under_it():
    base = random_llama()
    slots = random_adapters(base, [8, 8])
    generator = make(base)
    shared = {"prefix_id": "p", "prefix_len": 30, "keep_kv": True}
    generate(generator, [ask(f"r{slot.row}", prompt(40), slot, **shared) for slot in slots])
    before = generator.kv_tokens
    generator.forget_slot(slots[0])
    assert generator.kv_tokens == before / 2 and generator.num_parked == 1
    generator.forget_slot(slots[1])
    assert generator.kv_tokens == 0
    # The slot's next holder computes its own.
    base.bank.free(slots[0])
    slot = random_adapter(base, 8, seed=77)
    assert slot == slots[0]
    request = ask("r", prompt(40), slot, sequence_id=f"r{slot.row}", **shared)
    result = generate(generator, [request])["r"]
    assert result.tokens.tolist() == sample_naively(base, request)[0]
    assert result.num_cached_tokens == 30  # Its own prefix.


def test_a_slot_in_use_is_not_forgotten():
    base = random_llama()
    slot = random_adapter(base, 8)
    generator = make(base)
    generator.submit(ask("r", prompt(40), slot))
    with pytest.raises(AssertionError, match="in use"):
        generator.forget_slot(slot)


# -- changing adapters in flight --------------------------------------------------------------


def continue_under(base: BaseModel, tokens: list[int], old: Slot, new: Slot, num_old: int):
    """Return the logprobs [n, V] of the tokens past `num_old`, whose KV alone is of `new`."""
    pool = SlabPool(
        num_layers=base.num_layers,
        num_kv_heads=base.num_kv_heads,
        head_dim=base.head_dim,
        dtype=base.dtype,
        device=base.device,
        capacity_tokens=256,
    )
    slab = pool.allocate(None, len(tokens))
    outs = []
    for slot, end in ((old, num_old), (new, len(tokens))):
        ids = torch.tensor(tokens[slab.length : end])
        context = PrefillContext([Chunk(slab, end)], base.dtype, base.device)
        batch = LoraBatch.build(base.bank, [Segment(slot, len(ids))])
        with torch.inference_mode(), base.bank.active(batch):
            hidden = base.hidden(ids, torch.arange(slab.length, end), context, batch)
            outs.append(base.head(hidden).log_softmax(-1))
        slab.length = end
    return outs[1]


def test_in_flight_sequences_go_on_under_the_new_slot_and_pinned_ones_stay():
    base = random_llama()
    old, new = random_adapters(base, [8, 16])
    generator = make(base)
    generator.submit(ask("pinned", prompt(10), old))
    generator.submit(ask("flying", prompt(10), old, is_in_flight=True))
    for _ in range(5):
        generator.step()
    num_old = int(generator.pool.decoding()[0].length) - 10 + 1
    generator.switch_slot(old, new)
    results = drain(generator)
    pinned, flying = results["pinned"], results["flying"]
    assert pinned.tokens.tolist() == sample_naively(base, ask("x", prompt(10), old))[0]
    assert pinned.slots == [(0, old)]
    assert flying.tokens[:num_old].tolist() == pinned.tokens[:num_old].tolist()
    assert flying.slots == [(0, old), (num_old, new)]
    tokens = [*prompt(10).tolist(), *flying.tokens.tolist()]
    logprobs = continue_under(base, tokens, old, new, 10 + num_old - 1)
    expected = logprobs[:-1].gather(1, torch.tensor(tokens[10 + num_old :])[:, None])[:, 0]
    np.testing.assert_allclose(flying.logprobs[num_old:], expected, atol=1e-4)


def test_mixed_kv_serves_only_its_own_in_flight_sequence():
    base = random_llama()
    old, new = random_adapters(base, [8, 8])

    def first_turn() -> tuple[BatchGenerator, np.ndarray]:
        generator = make(base)
        shared = {"prefix_id": "p", "prefix_len": 10}
        generator.submit(
            ask("r", prompt(20), old, sequence_id="s", is_in_flight=True, keep_kv=True, **shared)
        )
        for _ in range(6):
            generator.step()
        generator.switch_slot(old, new)
        result = drain(generator)["r"]
        return generator, np.concatenate([prompt(20), result.tokens, prompt(4, 4)])

    generator, tokens = first_turn()
    assert [p.slot for p in generator.scheduler.prefixes.values()] == [old]
    generator.forget_slot(old)
    assert generator.num_parked == 1
    flying = ask("next", tokens, new, sequence_id="s", is_in_flight=True)
    assert generate(generator, [flying])["next"].num_cached_tokens == len(tokens) - 5

    generator, tokens = first_turn()
    pinned = ask("next", tokens, new, sequence_id="s")
    result = generate(generator, [pinned])["next"]
    assert result.num_cached_tokens == 0
    assert result.tokens.tolist() == sample_naively(base, pinned)[0]


def test_a_sequence_that_waits_for_a_prefix_leaves_it_when_its_slot_changes():
    base = random_llama()
    old, new = random_adapters(base, [8, 8])
    generator = make(base, prefill_budget_tokens=16)
    shared = {"prefix_id": "p", "prefix_len": 60, "is_in_flight": True}
    generator.submit(ask("a", prompt(60), old, **shared))
    generator.submit(ask("b", prompt(60), old, **shared))
    generator.step()
    generator.switch_slot(old, new)
    generator.forget_slot(old)
    results = drain(generator)
    expected = sample_naively(base, ask("x", prompt(60), new))[0]
    assert results["a"].tokens.tolist() == results["b"].tokens.tolist() == expected
    assert results["a"].slots == [(0, new)]


# -- memory pressure --------------------------------------------------------------------------


def pressing_requests(slots: Sequence[Slot | None]) -> list[SequenceRequest]:
    return [
        ask(f"r{idx}", prompt(20 + 7 * idx, idx), slots[idx % len(slots)], max_tokens=90, seed=idx)
        for idx in range(6)
    ]


@pytest.mark.parametrize("is_exact", [False, True])
def test_preempted_sequences_sample_the_same_tokens(is_exact):
    base = random_llama()
    slots = [None, *random_adapters(base, [8, 16])]
    roomy = generate(make(base, is_exact=is_exact), pressing_requests(slots))
    tight = make(base, is_exact=is_exact, kv_capacity_tokens=512)
    num_preempted = 0
    preempt = tight.scheduler.preempt

    def counting(sequence):
        nonlocal num_preempted
        num_preempted += 1
        preempt(sequence)

    tight.scheduler.preempt = counting
    results = generate(tight, pressing_requests(slots))
    assert num_preempted > 0
    for name, result in results.items():
        assert result.tokens.tolist() == roomy[name].tokens.tolist()
        np.testing.assert_allclose(result.logprobs, roomy[name].logprobs, atol=1e-4)
        if is_exact:
            assert_same_bits(result, roomy[name])
    assert tight.kv_tokens == 0


def test_parked_kv_goes_before_shared_prefixes_and_both_before_running_sequences():
    base = random_llama()
    generator = make(base, kv_capacity_tokens=256)
    opening = prompt(30)
    generate(generator, [ask("old", prompt(20), keep_kv=True)])
    generate(generator, [ask("young", prompt(20), keep_kv=True)])
    generate(generator, [ask("group", opening, prefix_id="p", prefix_len=30)])
    assert generator.kv_tokens == 3 * 64

    def left() -> tuple[list[str], int]:
        return list(generator.scheduler.parked), len(generator.scheduler.prefixes)

    running = ask("running", prompt(2), max_tokens=250)
    generator.submit(running)
    seen = [left()]
    while generator.has_work:
        ended, _ = generator.step()
        if left() != seen[-1]:
            seen.append(left())
    assert seen == [(["old", "young"], 1), (["young"], 1), ([], 0)]
    assert ended[0].tokens.tolist() == sample_naively(base, running)[0]


def test_a_sequence_and_its_own_prefix_that_do_not_fit_together_still_run():
    base = random_llama()
    generator = make(base, kv_capacity_tokens=256, max_context=256)
    shared = {"prefix_id": "p", "prefix_len": 150, "max_tokens": 40}
    requests = [ask(name, prompt(150), seed=ord(name), **shared) for name in "ab"]
    results = generate(generator, requests)
    for request in requests:
        expected = sample_naively(base, request)[0]
        assert results[request.request_id].tokens.tolist() == expected


@dataclass
class Player:
    """What one trajectory of the test below is made of, and how far it has come."""

    opening: int
    said: int
    sampled: int
    num_turns: int
    tokens: np.ndarray
    logprobs: list[np.ndarray] = field(default_factory=list)


def test_a_long_trajectory_of_many_turns_completes_beside_short_ones_in_a_tight_budget():
    """16k tokens in 20 turns with a KV budget of 32k: slabs of the long one double while 15 short
    trajectories grow, so parked KV is dropped and running sequences start over."""
    config = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "head_dim": 8}
    base = random_llama(max_position_embeddings=1 << 15, num_attention_heads=2, **config)
    generator = make(base, kv_capacity_tokens=1 << 15, max_context=1 << 15, max_batch=16)
    num_preempted, preempt = 0, generator.scheduler.preempt

    def counting(sequence):
        nonlocal num_preempted
        num_preempted += 1
        preempt(sequence)

    generator.scheduler.preempt = counting
    long = Player(780, 780, 39, 20, prompt(780))
    players = {"long": long}
    players |= {f"s{idx}": Player(480, 60, 150, 6, prompt(480, idx)) for idx in range(15)}

    def begin(name: str) -> None:
        player, turn = players[name], len(players[name].logprobs)
        is_last = turn + 1 == player.num_turns
        fields = {"sequence_id": name, "max_tokens": player.sampled, "seed": turn}
        generator.submit(ask(f"{name}/{turn}", player.tokens, keep_kv=not is_last, **fields))

    for name in players:
        begin(name)
    num_reused = 0
    while generator.has_work:
        for result in generator.step()[0]:
            name = result.sequence_id
            player = players[name]
            assert result.stop_reason is StopReason.LENGTH
            num_reused += result.num_cached_tokens
            player.logprobs.append(result.logprobs)
            player.tokens = np.concatenate([player.tokens, result.tokens])
            if len(player.logprobs) < player.num_turns:
                said = prompt(player.said, len(player.logprobs))
                player.tokens = np.concatenate([player.tokens, said])
                begin(name)
        assert generator.kv_tokens <= 1 << 15
    generator.pool.check()
    assert all(len(player.logprobs) == player.num_turns for player in players.values())
    assert 16_000 < len(long.tokens) <= 16_384
    assert num_preempted > 0 and num_reused > 0
    zeros = np.zeros(len(long.tokens), dtype=np.float32)
    datum = Datum(tokens=long.tokens, weights=zeros, advantages=zeros, sampling_logprobs=zeros)
    trainer = LoraTrainer(base)
    trainer.submit_forward(None, None, [datum], 0)
    [(_, [output])], _ = trainer.step()
    for turn, sampled in enumerate(long.logprobs):
        start = long.opening + turn * (long.said + long.sampled)
        scored = output.logprobs[start : start + long.sampled]
        np.testing.assert_allclose(scored, sampled, atol=1e-3)


# -- NaN stays where it is --------------------------------------------------------------------


def poisoned(base: BaseModel, kinds: frozenset[str] = ALL_KINDS) -> Slot:
    slot = random_adapter(base, 8, kinds=kinds)
    base.bank.write(slot, torch.full_like(base.bank.read(slot), torch.nan))
    return slot


@pytest.mark.parametrize("kinds", [ALL_KINDS, frozenset({"v_proj"}), frozenset({"lm_head"})])
def test_nan_weights_of_a_neighbour_end_its_sequences_and_change_no_other(kinds):
    base = random_llama()
    slots = [None, *random_adapters(base, [8, 16], kinds=ALL_KINDS)]

    def healthy() -> list[SequenceRequest]:
        params = {"temperature": 0.9, "top_p": 0.9}
        return [
            ask(f"r{idx}", prompt(9 + idx, idx), slots[idx % 3], seed=idx, **params)
            for idx in range(6)
        ]

    expected = generate(make(base, is_exact=True), healthy())
    bad = poisoned(base, kinds)
    nan_requests = [
        ask("nan", prompt(12), bad, top_p=0.5, keep_kv=True),
        ask("greedy nan", prompt(90), bad, temperature=0.0, prefix_id="p", prefix_len=80),
        ask("truncated nan", prompt(5), bad, top_k=3, min_p=0.1),
    ]
    generator = make(base, is_exact=True)
    results = generate(generator, [nan_requests[0], *healthy(), *nan_requests[1:]])
    for name, result in expected.items():
        assert_same_bits(results[name], result)
    for request in nan_requests:
        result = results[request.request_id]
        assert result.stop_reason is StopReason.NON_FINITE
        assert len(result.tokens) == len(result.logprobs) == 0
    assert generator.num_parked == 0


def test_nan_left_by_a_freed_sequence_does_not_reach_the_next_holder_of_its_slab():
    base = random_llama()
    bad = poisoned(base)
    generator = make(base, is_exact=True)
    request = ask("healthy", prompt(5), max_tokens=100)
    expected = generate(make(base, is_exact=True), [request])["healthy"]
    for length in (3, 60, 100):
        nan_requests = [ask(f"nan {idx}", prompt(length), bad) for idx in range(4)]
        generate(generator, nan_requests)
        assert_same_bits(generate(generator, [request])["healthy"], expected)


def test_nan_in_a_parked_slab_of_the_same_class_stays_there():
    base = random_llama()
    generator = make(base)
    request = ask("healthy", prompt(5))
    expected = sample_naively(base, request)[0]
    generate(generator, [ask("parked", prompt(20), keep_kv=True)])
    slab = generator.scheduler.parked["parked"].slab
    slab.home.kv[:, :, slab.row, :, : slab.length] = torch.nan
    assert generate(generator, [request])["healthy"].tokens.tolist() == expected
    generator.release("parked")
    generator.pool.check()


# -- neighbours change no bit -----------------------------------------------------------------


class Story:
    """The turns of one sequence: what it says next depends on what it sampled."""

    def __init__(self, idx: int, slots: Sequence[Slot | None], rng: np.random.Generator) -> None:
        self.name, self.slot = f"s{idx}", slots[rng.integers(len(slots))]
        self.group = f"g{rng.integers(3)}"
        opening = prompt(40, int(self.group[1:]))
        self.tokens = np.concatenate([opening, prompt(int(rng.integers(0, 12)), idx)])
        self.is_shared = bool(rng.integers(2))
        self.turns = int(rng.integers(1, 4))
        self.params = [
            {},
            {"temperature": 0.7},
            {"top_p": 0.8, "temperature": 1.3},
            {"top_k": 20, "min_p": 0.02},
            {"temperature": 0.0},
        ][rng.integers(5)]
        self.lengths = rng.integers(1, 50, self.turns).tolist()
        self.inserts = rng.integers(0, 30, self.turns).tolist()
        self.has_scores = bool(rng.integers(3) == 0)
        self.num_top = int(rng.integers(4))
        self.first_scored = float(rng.random())
        self.results: list[SequenceResult] = []

    def _scores(self) -> dict[str, object]:
        """Return what is asked of the context of this turn, from somewhere on."""
        columns = (self.tokens[:, None] + np.arange(3)) % 129 - 1
        return {
            "target_prompt_ids": columns.astype(np.int32),
            "prompt_alt_tokens_k": 2,
            "prompt_logprobs_from": int(self.first_scored * len(self.tokens)),
        }

    def next_request(self) -> SequenceRequest | None:
        turn = len(self.results)
        if turn == self.turns:
            return None
        if turn:
            words = prompt(self.inserts[turn], turn)
            self.tokens = np.concatenate([self.tokens, self.results[-1].tokens, words])
        return ask(
            f"{self.name}/{turn}",
            self.tokens,
            self.slot,
            sequence_id=self.name,
            seed=len(self.name) + turn,
            max_tokens=self.lengths[turn],
            stop_token_ids=(3, 5),
            keep_kv=True,
            prefix_id=self.group if self.is_shared else "",
            prefix_len=40 if self.is_shared else 0,
            prompt_logprobs=self.has_scores and turn == 0,
            topk_sample_logprobs=self.num_top,
            **(self._scores() if self.has_scores else {}),
            **self.params,
        )


def play(generator: BatchGenerator, stories: list[Story], rng: np.random.Generator) -> None:
    """Run all stories with random arrivals, and noise from requests that are cancelled."""
    ready = [story.next_request() for story in stories]
    by_name = {story.name: story for story in stories}
    num_noises = 0
    while ready or generator.has_work:
        while ready and (rng.random() < 0.5 or not generator.has_work):
            generator.submit(ready.pop(rng.integers(len(ready))))
        if rng.random() < 0.05:
            num_noises += 1
            noise = ask(f"noise{num_noises}", prompt(int(rng.integers(1, 80)), num_noises))
            generator.submit(noise)
        if num_noises and rng.random() < 0.05:
            generator.cancel(f"noise{rng.integers(num_noises) + 1}")
        for result in generator.step()[0]:
            story = by_name.get(result.sequence_id)
            if story is None:
                continue
            story.results.append(result)
            request = story.next_request()
            if request is None:
                generator.release(story.name)
            else:
                ready.append(request)
        generator.pool.check()


@pytest.mark.parametrize("seed", range(4))
def test_company_order_and_memory_pressure_change_no_bit_in_exact_mode(seed):
    sizes = [{}, {"hidden_size": 40, "num_hidden_layers": 1}][seed % 2]
    base = (random_llama, random_qwen3)[seed // 2 % 2](**sizes)
    slots = [None, *random_adapters(base, [3, 8, 16, 64], kinds=ALL_KINDS)]
    options = {"is_exact": True, "prefill_budget_tokens": 37, "max_context": 256}

    def stories(indices: Sequence[int]) -> list[Story]:
        return [Story(idx, slots, np.random.default_rng((seed, idx))) for idx in indices]

    crowds = []
    for capacity in (16384, 1024, 512):
        crowd = stories(range(10))
        generator = make(base, kv_capacity_tokens=capacity, max_batch=9, **options)
        play(generator, crowd, np.random.default_rng(capacity + seed))
        crowds.append(crowd)
    for idx in range(10):
        (alone,) = stories([idx])
        play(make(base, **options), [alone], np.random.default_rng(99))
        for crowd in crowds:
            assert len(crowd[idx].results) == len(alone.results) == alone.turns
            for one, other in zip(crowd[idx].results, alone.results, strict=True):
                assert_same_bits(one, other)
                left, right = scored_fields(one), scored_fields(other)
                assert left.keys() == right.keys()
                assert all(left[name].tobytes() == right[name].tobytes() for name in left)


# -- sharing the device -----------------------------------------------------------------------


def test_a_pass_stays_within_its_budget_and_mixes_sequences():
    base = random_llama()
    slots = random_adapters(base, [8, 16])
    generator = make(base, prefill_budget_tokens=64)
    for idx, length in enumerate((30, 30, 150, 20, 40)):
        generator.submit(ask(f"r{idx}", prompt(length), slots[idx % 2], max_tokens=1))
    sizes = []
    while generator.has_work:
        _, work = generator.step()
        if work.kind == "prefill":
            sizes.append(work.num_tokens)
    assert sizes == [58, 64, 64, 21 + 19, 39]


def test_decoding_goes_on_between_the_passes_of_a_long_prefill():
    base = random_llama()
    generator = make(base, prefill_budget_tokens=16)
    generator.submit(ask("short", prompt(2), max_tokens=10))
    generator.step()
    generator.submit(ask("long", prompt(200), max_tokens=2))
    kinds = []
    while generator.has_work:
        kinds.append(generator.step()[1].kind)
    assert kinds[:8] == ["decode", "prefill"] * 4


def test_the_batch_never_grows_past_its_limit():
    base = random_llama()
    generator = make(base, max_batch=3)
    for idx in range(8):
        generator.submit(ask(f"r{idx}", prompt(5, idx), max_tokens=3 + idx))
    results, most = {}, 0
    while generator.has_work:
        results.update({result.request_id: result for result in generator.step()[0]})
        most = max(most, generator.num_decoding)
    assert most == 3 and len(results) == 8


def free_unused(generator: BatchGenerator, retired: list[Slot]) -> None:
    """Free the retired slots that no sequence uses any more, as a worker does."""
    used = {sequence.slot for sequence in generator.scheduler.sequences()}
    for slot in [slot for slot in retired if slot not in used]:
        retired.remove(slot)
        generator.forget_slot(slot)
        generator.base.bank.free(slot)


@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends_once_and_no_memory_is_lost_whatever_is_called(seed):
    """Versions come and go as a worker makes them; requests of several turns, cancelled at will."""
    base = random_llama(num_hidden_layers=1)
    rng = np.random.default_rng(seed)
    is_exact = bool(seed % 2)
    generator = make(base, kv_capacity_tokens=1024, max_batch=6, is_exact=is_exact)
    live = random_adapters(base, [8, 16, 8])
    retired: list[Slot] = []
    open_requests: dict[str, SequenceRequest] = {}
    ended: list[str] = []
    histories = {f"s{idx}": prompt(int(rng.integers(1, 60)), idx) for idx in range(8)}
    num_requests = 0

    def close(result: SequenceResult) -> None:
        request = open_requests.pop(result.request_id)
        ended.append(result.request_id)
        assert len(result.logprobs) == len(result.tokens)
        assert [start for start, _ in result.slots] == sorted({s for s, _ in result.slots})
        assert result.slots[0] == (0, request.slot) or request.is_in_flight
        assert len(result.slots) == 1 or request.is_in_flight
        tokens = np.concatenate([request.tokens, result.tokens, prompt(int(rng.integers(9)), 1)])
        histories[result.sequence_id] = tokens if len(tokens) < 200 else tokens[:20]

    for _ in range(400):
        busy = {request.sequence_id for request in open_requests.values()}
        idle = [name for name in histories if name not in busy]
        match rng.integers(10):
            case 0 | 1 | 2 if idle:
                name = idle[rng.integers(len(idle))]
                num_requests += 1
                request = ask(
                    f"q{num_requests}",
                    histories[name],
                    live[rng.integers(len(live))],
                    sequence_id=name,
                    max_tokens=int(rng.integers(0, 80)),
                    seed=num_requests,
                    keep_kv=bool(rng.integers(2)),
                    prefix_id=("", "p")[rng.integers(2)],
                    prefix_len=int(rng.integers(1, 40)),
                    is_in_flight=bool(rng.integers(2)),
                    prompt_logprobs=bool(rng.integers(4) == 0),
                    prompt_logprobs_from=int(rng.integers(len(histories[name]))),
                    topk_sample_logprobs=int(rng.integers(3)),
                )
                open_requests[request.request_id] = request
                generator.submit(request)
            case 3 if open_requests:
                name = list(open_requests)[rng.integers(len(open_requests))]
                result = generator.cancel(name)
                assert result is not None and result.stop_reason is StopReason.CANCELLED
                close(result)
            case 4 if idle:
                generator.release(idle[rng.integers(len(idle))])
            case 5:
                old = live.pop(0)
                live.append(random_adapter(base, old.rank, seed=int(rng.integers(1000))))
                generator.switch_slot(old, live[-1])
                retired.append(old)
            case _:
                for result in generator.step()[0]:
                    close(result)
        free_unused(generator, retired)
        generator.pool.check()
    while generator.has_work:
        for result in generator.step()[0]:
            close(result)
    assert not open_requests
    assert sorted(ended) == sorted(f"q{idx + 1}" for idx in range(num_requests))
    for name in histories:
        generator.release(name)
    for slot in [*live, *retired]:
        generator.forget_slot(slot)
    assert generator.kv_tokens == generator.num_parked == generator.num_waiting == 0
