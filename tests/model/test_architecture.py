"""Which architectures are refused before anything runs, and that refusals say what would do."""

import pytest
import torch
from transformers import (
    BertConfig,
    BloomConfig,
    CohereConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Starcoder2Config,
    T5Config,
)

from marlaas.engine.self_check import check_base
from marlaas.errors import UnsupportedBase
from marlaas.model.architecture import attention_window, check_architecture, check_config
from marlaas.model.base import adopt
from tests.models import stock_model

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FOUR_LAYERS = {**SIZES, "num_hidden_layers": 4}


def rope(**parameters):
    return {"rope_parameters": {"rope_theta": 1e4, **parameters}}


REFUSED = {
    "a window": (MistralConfig(**SIZES, sliding_window=64), r"last 64 tokens.*max_context of at"),
    "windows in some layers": (
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=64, max_window_layers=1),
        "sliding window",
    ),
    "linear attention": (
        Qwen3NextConfig(**FOUR_LAYERS, head_dim=8, num_experts=4),
        r"layers of type linear_attention; expected full_attention",
    ),
    "a state-space model": (MambaConfig(vocab_size=64, hidden_size=32), "no attention heads"),
    "attention sinks": (
        GptOssConfig(**{**SIZES, "max_position_embeddings": 64}, head_dim=8, num_local_experts=4),
        "attention sinks",
    ),
    "capped scores": (Gemma2Config(**SIZES, head_dim=8), "caps its attention scores"),
    "scaled logits": (CohereConfig(**SIZES), r"scales its logits .*logit_scale is 0\.0625"),
    "divided logits": (GraniteConfig(**SIZES, logits_scaling=8.0), "logits_scaling is 8"),
    "an encoder-decoder": (T5Config(vocab_size=64, d_model=32), "encoder-decoder"),
    "fused projections": (
        Phi3Config(**SIZES),
        r"no linear q_proj in every layer \(the first one has o_proj, qkv_proj",
    ),
    "transposed projections": (GPT2Config(vocab_size=64, n_embd=32, n_head=2), "no linear q_proj"),
    "an output projection of another name": (
        OPTConfig(vocab_size=64, hidden_size=32, ffn_dim=64, num_attention_heads=4),
        "no linear o_proj",
    ),
    "keys behind a bottleneck": (DeepseekV3Config(**SIZES), "no linear q_proj"),
    "ALiBi": (
        FalconConfig(vocab_size=64, hidden_size=32, num_attention_heads=4, alibi=True),
        "ALiBi",
    ),
    "a context without end": (
        BloomConfig(vocab_size=64, hidden_size=32, n_head=4),
        "how long its context is",
    ),
    "an encoder": (
        BertConfig(vocab_size=64, hidden_size=32, num_attention_heads=4, num_hidden_layers=1),
        "attends to later tokens",
    ),
    "quantised weights": (
        LlamaConfig(**SIZES, quantization_config={"quant_method": "gptq", "bits": 4}),
        "quantised weights",
    ),
    "rotary positions by the longest sequence": (
        LlamaConfig(
            **SIZES,
            **rope(
                rope_type="longrope",
                short_factor=[1.0] * 4,
                long_factor=[2.0] * 4,
                original_max_position_embeddings=128,
            ),
        ),
        r"rope_type longrope\); expected a max_context of at most 128",
    ),
}

SERVED = {
    "a window that is switched off": Qwen2Config(
        **SIZES, use_sliding_window=False, sliding_window=8
    ),
    "scaled rotary positions": LlamaConfig(
        **SIZES,
        **rope(
            rope_type="llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=128,
        ),
    ),
    "dropout in training, which never happens": LlamaConfig(**SIZES, attention_dropout=0.5),
    "biases and a tied head": Qwen2Config(**SIZES, tie_word_embeddings=True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_our_passes_do_not_compute_is_refused_with_the_reason(name):
    config, reason = REFUSED[name]
    with pytest.raises(UnsupportedBase, match=reason) as caught:
        check_architecture(config)
    assert all("expected" in problem for problem in caught.value.problems)


@pytest.mark.parametrize("name", SERVED)
def test_what_looks_odd_and_is_exact_is_served(name):
    config = SERVED[name]
    assert check_architecture(config) == {}
    assert max(check_base(adopt(stock_model(config), "odd")).values()) < 1e-4


def test_every_reason_is_given_at_once():
    config = Gemma2Config(**{**SIZES, "vocab_size": 8}, head_dim=8)
    with pytest.raises(UnsupportedBase) as caught:
        check_config(config)
    assert len(caught.value.problems) == 2  # Scores and logits are capped.


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**SIZES, sliding_window=64),
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=64, max_window_layers=1),
    ],
    ids=["mistral", "qwen2"],
)
def test_a_window_as_wide_as_the_context_is_served_exactly(config):
    assert attention_window(config) == 64
    base = adopt(stock_model(config), "windowed", max_context=64)
    assert base.max_context == 64
    assert max(check_base(base).values()) < 1e-4


def test_a_window_that_no_rule_saw_would_fail_in_numbers():
    base = adopt(stock_model(MistralConfig(**SIZES, sliding_window=None)), "windowed")
    base.stock_config.sliding_window = 16
    with pytest.raises(UnsupportedBase, match=r"packed pass differ .* nats; expected at most"):
        check_base(base)


def test_mlp_targets_that_lie_in_experts_are_named():
    config = Qwen3MoeConfig(**SIZES, head_dim=8, num_experts=4, moe_intermediate_size=16)
    reasons = check_architecture(config)
    assert set(reasons) == {"mlp"}
    assert "experts (Qwen3MoeExperts)" in reasons["mlp"]


def test_dense_layers_among_layers_of_experts_do_not_make_mlp_a_target():
    config = Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=4, moe_intermediate_size=16, mlp_only_layers=[0]
    )
    assert set(check_architecture(config)) == {"mlp"}


def test_mlp_targets_of_other_names_are_named():
    reasons = check_architecture(Starcoder2Config(**SIZES, sliding_window=None))
    assert "c_fc, c_proj" in reasons["mlp"]


def test_a_smaller_context_can_be_chosen_and_a_larger_one_is_cut():
    config = LlamaConfig(**SIZES)
    assert check_config(config) == 512
    assert check_config(config, 100) == 100
    assert check_config(config, 1000) == 512


def test_no_weight_is_made_for_the_check():
    config = LlamaConfig(**{**SIZES, "hidden_size": 65536, "intermediate_size": 1 << 20})
    check_architecture(config)  # 400 GB, were there weights.
    assert torch.empty(0).device.type == "cpu"
