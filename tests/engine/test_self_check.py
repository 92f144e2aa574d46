"""The check of a base at load finds what differs, and lets rounding pass."""

import time

import pytest
import torch

from marlaas.engine.self_check import check_base
from marlaas.errors import UnsupportedBase
from marlaas.model.base import load_base
from marlaas.text.bases import packaged_folder
from tests import models


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [models.random_llama, models.random_qwen3])
def test_every_pass_agrees_with_the_stock_model_within_rounding(make, dtype):
    deviations = check_base(make(dtype=dtype))
    assert set(deviations) == {"packed", "prefill", "decode"}


def test_the_packaged_base_passes_within_a_second():
    base = load_base(packaged_folder("tiny"))
    check_base(base)  # Imports and first calls of kernels.
    started = time.process_time()
    assert max(check_base(base).values()) < 5e-5
    assert time.process_time() - started < 1.0


def test_a_wrong_scale_of_attention_is_found():
    base = models.random_llama()
    base.model.model.layers[1].self_attn.scaling *= 1.01
    with pytest.raises(UnsupportedBase, match=r"our packed pass differ .* by .*e-\d+ nats"):
        check_base(base)


def test_a_pass_that_gives_nan_is_found():
    base = models.random_llama()
    base.model.model.layers[1].self_attn.scaling = float("nan")
    with pytest.raises(UnsupportedBase, match=r"by inf nats; expected at most 3\.0e-04"):
        check_base(base)


def test_a_wrong_layer_order_in_the_cache_is_found():
    base = models.random_llama()
    base.model.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(UnsupportedBase, match="our prefill pass differ"):
        check_base(base)


def test_the_check_leaves_the_base_as_it_was():
    base = models.random_llama()
    weights = {name: value.clone() for name, value in base.model.state_dict().items()}
    first = check_base(base)
    assert check_base(base) == first
    assert base.model.config._attn_implementation == "marlaas"
    assert base.bank.num_used == 0
    for name, value in base.model.state_dict().items():
        assert torch.equal(value, weights[name])
