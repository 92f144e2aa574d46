"""Small random base models for tests: real architectures, no download, always the same weights."""

from collections.abc import Sequence

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from marlaas.model.bank import Slot
from marlaas.model.base import BaseModel, adopt
from marlaas.types import TARGET_GROUPS

ALL_KINDS = frozenset(kind for kinds in TARGET_GROUPS.values() for kind in kinds)
BLOCK_KINDS = ALL_KINDS - {"lm_head"}

_SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}


def stock_llama(*, seed: int = 0, dtype: torch.dtype = torch.float32, **config) -> PreTrainedModel:
    """Return a plain random Llama of `transformers`, with attention of its own."""
    return _random(LlamaConfig, seed, dtype, config)


def stock_qwen3(*, seed: int = 0, dtype: torch.dtype = torch.float32, **config) -> PreTrainedModel:
    """Return a plain random Qwen3: norms on queries and keys, heads wider than hidden / heads."""
    return _random(Qwen3Config, seed, dtype, {"head_dim": 16, **config})


def stock_qwen3_moe(
    *, seed: int = 0, dtype: torch.dtype = torch.float32, **config
) -> PreTrainedModel:
    """Return a plain random mixture of experts: eight of them in every layer, two per token."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config = {"head_dim": 16, **experts, **config}
    return _random(Qwen3MoeConfig, seed, dtype, config)


def random_llama(*, seed: int = 0, dtype: torch.dtype = torch.float32, **config) -> BaseModel:
    """Return a small random Llama as a frozen base; `config` overrides fields of its config.

    `tie_word_embeddings=True` gives a model whose head is its embedding.
    """
    return adopt(stock_llama(seed=seed, dtype=dtype, **config), "random-llama")


def random_qwen3(*, seed: int = 0, dtype: torch.dtype = torch.float32, **config) -> BaseModel:
    """Return a small random Qwen3 as a frozen base."""
    return adopt(stock_qwen3(seed=seed, dtype=dtype, **config), "random-qwen3")


def random_qwen3_moe(*, seed: int = 0, dtype: torch.dtype = torch.float32, **config) -> BaseModel:
    """Return a small random mixture of experts as a frozen base; adapters on attention and head."""
    return adopt(stock_qwen3_moe(seed=seed, dtype=dtype, **config), "random-qwen3-moe")


def random_adapters(
    base: BaseModel,
    ranks: Sequence[int],
    *,
    kinds: frozenset[str] = BLOCK_KINDS,
    seed: int = 0,
    size: float = 0.1,
) -> list[Slot]:
    """Allocate one adapter per rank, A and B both random, so that each changes every logit."""
    return [
        random_adapter(base, rank, kinds=kinds, seed=seed + idx, size=size)
        for idx, rank in enumerate(ranks)
    ]


def random_adapter(
    base: BaseModel,
    rank: int,
    *,
    kinds: frozenset[str] = BLOCK_KINDS,
    seed: int = 0,
    size: float = 0.1,
) -> Slot:
    slot = base.bank.allocate(rank=rank, scale=2.0, kinds=kinds)
    layout = base.bank.bucket(rank).layout
    row_P = torch.zeros(layout.length, dtype=base.dtype)
    generator = torch.Generator().manual_seed(seed)
    for module in layout.modules:
        if module.kind in kinds:
            a_RD, b_OR = (view[0] for view in layout.views(row_P[None], module))
            a_RD[:rank] = size * torch.randn(rank, module.in_features, generator=generator)
            b_OR[:, :rank] = size * torch.randn(module.out_features, rank, generator=generator)
    base.bank.write(slot, row_P)
    return slot


def _random(config_class, seed, dtype, overrides) -> PreTrainedModel:
    return stock_model(config_class(**{**_SMALL, **overrides}), seed=seed, dtype=dtype)


def stock_model(
    config: PreTrainedConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Return a random model of `transformers` for a config; its logits are far from uniform."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        # The default initialisation (0.02) leaves the distribution nearly uniform.
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                torch.nn.init.normal_(parameter, std=2.0 * parameter.shape[-1] ** -0.5)
            elif "norm" not in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model.to(dtype).eval()
