"""What the generator samples against other forward passes of the same weights.

The stock model of `transformers` for the base, a packed forward (as training runs it) for adapters,
and the generator itself in other company, at widths of real models.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from marlaas.engine.generator import BatchGenerator
from marlaas.engine.types import SequenceRequest, SequenceResult
from marlaas.model.attention import PackedSequences
from marlaas.model.bank import Slot
from marlaas.model.base import BaseModel
from marlaas.model.lora import LoraBatch, Segment
from marlaas.types import SamplingParams
from tests.models import ALL_KINDS, random_adapters, random_llama, random_qwen3, stock_llama

torch.set_num_threads(1)

MAX_LOGPROB_GAP = 1e-4
"""Between sampling and re-scoring in fp32; measured 2e-5 here."""

TINY = {
    "vocab_size": 1024,
    "hidden_size": 160,
    "intermediate_size": 448,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SMOLLM2_LAYER = {
    "vocab_size": 4096,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 1,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}


def run(base: BaseModel, requests: Sequence[SequenceRequest], **options: object):
    settings = {"kv_capacity_tokens": 32768, "max_context": 512, **options}
    generator = BatchGenerator(base, **settings)  # type: ignore[arg-type]
    for request in requests:
        generator.submit(request)
    results: dict[str, SequenceResult] = {}
    while generator.has_work:
        results.update({result.request_id: result for result in generator.step()[0]})
    return results


def ask(name: str, length: int, slot: Slot | None, vocab_size: int, **fields: object):
    tokens = np.random.default_rng(length).integers(0, vocab_size, length).astype(np.int32)
    sampling = SamplingParams(**{"max_tokens": 24, "seed": length, **fields})  # type: ignore
    return SequenceRequest(
        request_id=name, sequence_id=name, slot=slot, tokens=tokens, sampling=sampling
    )


def rescore(base: BaseModel, jobs: Sequence[tuple[Slot | None, np.ndarray]]) -> list[torch.Tensor]:
    """Return every sequence's token logprobs [T - 1] by one packed pass over all of them."""
    lengths = [len(tokens) for _, tokens in jobs]
    ids = torch.from_numpy(np.concatenate([tokens for _, tokens in jobs]).astype(np.int64))
    positions = torch.cat([torch.arange(length) for length in lengths])
    segments = [Segment(slot, length) for (slot, _), length in zip(jobs, lengths, strict=True)]
    batch = LoraBatch.build(base.bank, segments)
    with torch.inference_mode(), base.bank.active(batch):
        hidden = base.hidden(ids, positions, PackedSequences(lengths), batch)
        logprobs = base.head(hidden).float().log_softmax(-1)
    pieces = zip(logprobs.split(lengths), ids.split(lengths), strict=True)
    return [rows[:-1].gather(1, tokens[1:, None])[:, 0] for rows, tokens in pieces]


@pytest.mark.parametrize(
    "base",
    [
        lambda: random_llama(**TINY),
        lambda: random_llama(**TINY, tie_word_embeddings=True),
        lambda: random_qwen3(**SMOLLM2_LAYER, head_dim=64),
    ],
)
def test_sampling_logprobs_equal_those_of_a_packed_forward(base):
    base = base()
    slots = [None, *random_adapters(base, [8, 8, 16, 32, 64], kinds=ALL_KINDS, size=0.03)]
    requests = [
        ask(f"r{idx}", 3 + 11 * idx, slots[idx % len(slots)], base.vocab_size) for idx in range(18)
    ]
    results = run(base, requests)
    jobs = [
        (request.slot, np.concatenate([request.tokens, results[request.request_id].tokens]))
        for request in requests
    ]
    for request, train_logprobs in zip(requests, rescore(base, jobs), strict=True):
        sampled = results[request.request_id].logprobs
        gap = np.abs(sampled - train_logprobs[len(request.tokens) - 1 :].numpy()).max()
        assert gap <= MAX_LOGPROB_GAP


def test_greedy_sampling_of_the_base_follows_the_stock_model():
    stock, base = stock_llama(**TINY), random_llama(**TINY)
    requests = [ask(f"r{idx}", 5 + 7 * idx, None, 1024, temperature=0.0) for idx in range(6)]
    results = run(base, requests)
    for request in requests:
        result = results[request.request_id]
        tokens = torch.from_numpy(np.concatenate([request.tokens, result.tokens])).long()
        with torch.inference_mode():
            logprobs = stock(tokens[None]).logits[0].log_softmax(-1)
        best = logprobs[len(request.tokens) - 1 : -1].max(-1)
        assert result.tokens.tolist() == best.indices.tolist()
        np.testing.assert_allclose(result.logprobs, best.values, atol=MAX_LOGPROB_GAP)


def test_a_bfloat16_base_samples_from_float32_logprobs():
    base = random_llama(**TINY, dtype=torch.bfloat16)
    (slot,) = random_adapters(base, [8], size=0.03)
    requests = [ask(f"r{idx}", 9 + idx, (None, slot)[idx % 2], 1024) for idx in range(4)]
    results = run(base, requests)
    jobs = [
        (request.slot, np.concatenate([request.tokens, results[request.request_id].tokens]))
        for request in requests
    ]
    for request, train_logprobs in zip(requests, rescore(base, jobs), strict=True):
        sampled = results[request.request_id].logprobs
        assert len(np.unique(sampled)) == len(sampled)
        gaps = np.abs(sampled - train_logprobs[len(request.tokens) - 1 :].numpy())
        assert gaps.mean() < 0.1


@pytest.mark.parametrize("shape", [TINY, SMOLLM2_LAYER])
def test_in_exact_mode_a_sequence_has_the_same_bits_alone_and_among_many(shape):
    base = random_llama(**shape)
    slots = [None, *random_adapters(base, [8] * 9 + [16, 32, 64], kinds=ALL_KINDS, size=0.03)]
    lengths = [1, 2, 4, 9, 17, 30, 31, 64, 65, 100, 129, 200, 255, 300, 5, 6, 7, 8]
    requests = [
        ask(f"r{idx}", length, slots[idx % len(slots)], base.vocab_size, max_tokens=12)
        for idx, length in enumerate(lengths)
    ]
    requests += [ask(f"more{idx}", 40, slots[3], base.vocab_size) for idx in range(7)]
    together = run(base, requests, is_exact=True)
    reversed_ = run(base, requests[::-1], is_exact=True, max_batch=5)
    for request in requests[: len(lengths)]:
        alone = run(base, [request], is_exact=True)[request.request_id]
        for company in (together, reversed_):
            result = company[request.request_id]
            assert result.tokens.tolist() == alone.tokens.tolist()
            assert result.logprobs.tobytes() == alone.logprobs.tobytes()


def test_training_passes_and_sampling_take_turns_on_one_bank():
    """What sampling leaves in the bank (stacked copies, tables) serves training, and back."""
    base = random_llama()
    slots = random_adapters(base, [8] * 6)
    requests = [ask(f"r{idx}", 20, slots[idx % 6], base.vocab_size) for idx in range(12)]
    before = run(base, requests)
    layout = base.bank.bucket(8).layout
    grad_rows = [torch.zeros(layout.length) for _ in slots]
    for _ in range(2):
        batch = LoraBatch.build(
            base.bank, [Segment(slot, 5) for slot in slots], grad_rows=grad_rows
        )
        positions = torch.arange(5).repeat(6)
        with base.bank.active(batch):
            hidden = base.hidden(torch.arange(30), positions, PackedSequences([5] * 6), batch)
            base.head(hidden).logsumexp(-1).sum().backward()
    assert all(bool(row.any()) and bool(row.isfinite().all()) for row in grad_rows)
    # The same weights again sample the same; other weights in the same slot do not.
    after = run(base, requests)
    base.bank.write(slots[0], torch.zeros(layout.length))
    written = run(base, requests)
    for idx, request in enumerate(requests):
        name = request.request_id
        assert after[name].tokens.tolist() == before[name].tokens.tolist()
        is_same = written[name].tokens.tolist() == before[name].tokens.tolist()
        assert is_same == (idx % 6 != 0)
