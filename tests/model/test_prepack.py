"""Packed copies of weights: the same products up to rounding, in every kind of pass."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from marlaas.config import RunSettings, resolve
from marlaas.engine.self_check import check_base
from marlaas.engine.trainer import LoraTrainer
from marlaas.model.lora import MultiLoraLinear
from marlaas.model.prepack import PackedWeight, is_available, padded_rows
from marlaas.types import AdapterSpec, Objective
from tests.engine.data import host, random_group
from tests.models import random_llama, random_qwen3

torch.set_num_threads(1)

needs_packing = pytest.mark.skipif(
    not is_available(torch.zeros(8, 8)), reason="this build of torch cannot pack weights"
)


def pack(base) -> None:
    """Pack whether it pays on this machine or not."""
    for module in base.model.modules():
        if isinstance(module, MultiLoraLinear):
            module.packed = PackedWeight(module.weight)


@needs_packing
@pytest.mark.parametrize("num_rows", [1, 3, 8, 100])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_weight_multiplies_like_the_weight(num_rows: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    weight_OD, bias_O = torch.randn(48, 40), torch.randn(48) if has_bias else None
    packed = PackedWeight(weight_OD)
    x_ND, grad_NO = torch.randn(num_rows, 40), torch.randn(num_rows, 48)
    torch.testing.assert_close(packed.product(x_ND, bias_O), F.linear(x_ND, weight_OD, bias_O))
    torch.testing.assert_close(packed.back(grad_NO), grad_NO @ weight_OD)


@needs_packing
@pytest.mark.parametrize(
    "make_base", [random_llama, random_qwen3, lambda: random_llama(tie_word_embeddings=True)]
)
def test_every_pass_of_a_packed_base_is_the_stock_models(make_base) -> None:
    base = make_base()
    pack(base)
    assert max(check_base(base).values()) < 1e-4


@needs_packing
def test_gradients_through_packed_weights_are_those_of_plain_ones() -> None:
    gradients = []
    for is_packed in (False, True):
        base = random_llama()
        if is_packed:
            pack(base)
        trainer = LoraTrainer(base)
        spec = AdapterSpec(rank=4, targets=("attention", "mlp", "head"), seed=1)
        slot = host(trainer, "p", spec)
        data = random_group(np.random.default_rng(0), 20, [9, 12, 7])
        trainer.submit_forward_backward("p", slot, data, Objective(name="ppo"), ticket=0)
        trainer.step()
        gradients.append(trainer.gradient("p").clone())
    plain, packed = gradients
    assert plain.abs().max() > 0
    torch.testing.assert_close(packed, plain, rtol=1e-4, atol=1e-6)


def test_rows_are_padded_to_few_numbers() -> None:
    """oneDNN keeps a kernel for each number of rows."""
    padded = [padded_rows(num_rows) for num_rows in range(1, 1025)]
    assert all(have >= need for need, have in enumerate(padded, 1))
    assert len(set(padded)) == 7 + 16 + 28


@needs_packing
def test_a_packed_copy_is_used_once_there_is_enough_to_multiply() -> None:
    small, large = PackedWeight(torch.ones(192, 192)), PackedWeight(torch.ones(4096, 192))
    assert [small.pays(num_rows) for num_rows in (1, 4, 64)] == [False, False, True]
    assert large.pays(1)


@needs_packing
def test_exact_mode_refuses_packed_weights() -> None:
    base = random_llama()
    pack(base)
    with pytest.raises(AssertionError, match="plain products"):
        LoraTrainer(base, is_exact=True)


def test_weights_are_copied_only_where_memory_allows_and_no_bit_is_promised() -> None:
    run = RunSettings(num_workers=2)
    facts = {"base_name": "b", "base_folder": "b", "max_context": 512, "kv_bytes_per_token": 4096}
    small, huge = 1 << 20, 1 << 50
    assert resolve(run, **facts, base_bytes=small)[0].is_prepacked
    assert not resolve(run, **facts, base_bytes=huge)[0].is_prepacked
    exact = resolve(run, **facts, base_bytes=small, is_exact=True)[0]
    assert not exact.is_prepacked and exact.is_exact
