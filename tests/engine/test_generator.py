"""Whole requests through `BatchGenerator`, against full forward passes and against themselves."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from marlaas.engine.generator import BatchGenerator
from marlaas.engine.sampler import uniforms
from marlaas.engine.types import SequenceRequest, SequenceResult
from marlaas.errors import CapacityExceeded, InvalidRequest, UnsupportedFeature
from marlaas.model.attention import PackedSequences
from marlaas.model.base import BaseModel
from marlaas.model.lora import LoraBatch, Segment, Slot
from marlaas.types import SamplingParams, StopReason
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
