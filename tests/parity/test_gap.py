"""What was sampled, re-scored by the trainer under the same adapter: the gap is rounding only."""

import numpy as np
import pytest
import torch

from marlaas.engine.adapter_io import target_kinds
from marlaas.engine.generator import BatchGenerator
from marlaas.engine.trainer import LoraTrainer
from marlaas.engine.types import SequenceRequest
from marlaas.types import AdapterSpec, Datum, SamplingParams
from tests.models import random_llama

GAP_BOUND = 1e-4
"""Design section 6: sampling logprobs against a re-score, fp32."""


@pytest.mark.parametrize("prefill_budget_tokens", [24, 64, 512])
def test_sampling_logprobs_equal_a_rescore_over_many_groups_with_shared_prompts(
    prefill_budget_tokens: int,
) -> None:
    base = random_llama()
    trainer = LoraTrainer(base)
    spec = AdapterSpec(targets=("attention", "mlp", "head"))
    state = trainer.create("p", spec)
    state.weights_P.copy_(torch.randn(len(state.weights_P)) * 0.05)
    slot = base.bank.allocate(rank=spec.rank, scale=2.0, kinds=target_kinds(spec))
    base.bank.write(slot, trainer.weights("p"))
    generator = BatchGenerator(
        base,
        kv_capacity_tokens=16384,
        max_context=256,
        prefill_budget_tokens=prefill_budget_tokens,
    )
    rng = np.random.default_rng(0)
    requests = []
    for group in range(6):
        prompt = rng.integers(0, base.vocab_size, 9 + 5 * group).astype(np.int32)
        for index in range(5):
            name = f"{group}/{index}"
            request = SequenceRequest(
                request_id=name,
                sequence_id=name,
                slot=slot,
                tokens=prompt,
                sampling=SamplingParams(max_tokens=3 + 4 * index + group, seed=group * 10 + index),
                prefix_id=str(group),
                prefix_len=len(prompt),
            )
            requests.append(request)
            generator.submit(request)
    results = {}
    while generator.has_work:
        finished, _ = generator.step()
        results |= {result.request_id: result for result in finished}
    data = []
    for request in requests:
        result = results[request.request_id]
        tokens = np.concatenate([request.tokens, result.tokens])
        zeros = np.zeros(len(tokens), dtype=np.float32)
        data.append(Datum(tokens=tokens, weights=zeros, advantages=zeros, sampling_logprobs=zeros))
    trainer.submit_forward("p", slot, data, ticket=0)
    outputs = []
    while trainer.has_work:
        finished, _ = trainer.step()
        outputs += [output for _, group in finished for output in group]
    for request, output in zip(requests, outputs, strict=True):
        sampled = results[request.request_id].logprobs
        gap = np.abs(output.logprobs[len(request.tokens) :] - sampled)
        assert gap.max() < GAP_BOUND
