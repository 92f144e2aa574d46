"""The peak of a pass is predicted from its size, and is what the process then takes."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from marlaas.engine.pass_memory import PassMemory, PassSize
from marlaas.engine.trainer import LoraTrainer
from marlaas.types import AdapterSpec, Datum, Objective
from tests.engine.data import host
from tests.models import random_llama, random_qwen3

torch.set_num_threads(1)

NARROW = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
WIDE = NARROW | {
    "vocab_size": 16384,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}

MEASURED_OVER_PREDICTED = (0.9, 1.1)
OVERHEAD_BYTES = 5 << 20
"""What a first long pass leaves in a process that had none: code, kernels, lists."""


@pytest.mark.parametrize(
    ("shape", "cases"),
    [
        (
            NARROW,
            [("checkpointed", 2048), ("checkpointed", 4096), ("plain", 1024)],
        ),
        (WIDE, [("checkpointed", 2048), ("plain", 1024), ("scored", 2048), ("kv", 3000)]),
    ],
)
def test_a_process_takes_what_was_predicted(shape, cases) -> None:
    probe = subprocess.run(
        [sys.executable, "-m", "marlaas.bench.memory_probe"],
        input=json.dumps({"shape": shape, "cases": cases}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rows = [json.loads(line) for line in probe.stdout.splitlines()]
    assert [(row["kind"], row["tokens"]) for row in rows] == cases
    low, high = MEASURED_OVER_PREDICTED
    for row in rows:
        predicted, measured = row["predicted_bytes"], row["measured_bytes"]
        assert low * predicted < measured < high * predicted + OVERHEAD_BYTES, row


@pytest.mark.parametrize("make_base", [random_llama, random_qwen3])
def test_what_autograd_keeps_of_a_layer_is_counted(make_base) -> None:
    base = make_base(hidden_size=64, intermediate_size=160, num_hidden_layers=4)
    trainer = LoraTrainer(base, checkpointing="never")
    slot = host(trainer, "p", AdapterSpec(rank=8))
    num_tokens = 256
    every = np.arange(num_tokens) > 0
    datum = Datum(
        tokens=(np.arange(num_tokens) % 100).astype(np.int32),
        weights=every.astype(np.float32),
        advantages=every.astype(np.float32),
        sampling_logprobs=np.full(num_tokens, -5, dtype=np.float32),
    )
    kept: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    trainer.submit_forward_backward("p", slot, [datum], Objective(name="ppo"), ticket=0)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        trainer.step()
    weights = {parameter.data_ptr() for parameter in base.model.parameters()}
    measured = sum(size for pointer, size in kept.items() if pointer not in weights)
    memory = PassMemory.of(base)
    size = PassSize(*(num_tokens,) * 3, num_ranks=8 * num_tokens)
    predicted = memory.training(size, is_checkpointed=False)
    # Without what a backward pass makes: two of the residual stream, two of the MLP.
    predicted -= num_tokens * 2 * (memory.width + memory.mlp)
    assert 0.9 < measured / predicted < 1.1


def test_memory_grows_in_proportion_to_length() -> None:
    memory = PassMemory.of(random_llama())
    for is_checkpointed in (False, True):
        short, double, treble = (
            memory.training(
                PassSize.of_sequence(num, has_head_adapter=False), is_checkpointed=is_checkpointed
            )
            for num in (1_000_000, 2_000_000, 3_000_000)
        )
        assert treble - double == double - short


def test_checkpointing_never_predicts_more() -> None:
    memory = PassMemory.of(random_llama())
    for num_tokens in (10, 1000, 100_000):
        size = PassSize.of_sequence(num_tokens)
        plain = memory.training(size, is_checkpointed=False)
        assert memory.training(size, is_checkpointed=True) <= plain
        assert memory.scoring(size) <= plain


def test_the_longest_sequence_is_the_last_one_that_fits() -> None:
    memory = PassMemory.of(random_llama())
    for budget_bytes in (0, 1 << 20, 1 << 30):
        longest = memory.longest(budget_bytes)
        peaks = [
            memory.training(PassSize.of_sequence(num), is_checkpointed=True)
            for num in (longest, longest + 1)
        ]
        assert peaks[0] <= max(budget_bytes, peaks[0] if longest == 0 else 0)
        assert peaks[1] > budget_bytes
