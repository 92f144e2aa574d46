"""Which base models our passes reproduce exactly, decided before any of their weights is read.

Called by `base.load_base` before loading, and by `base.adopt` on the model itself. What is let
through still has to agree with the stock model in numbers (`self_check`). Every reason says what
would be right. Whatever no rule here names falls to three nets: an attention argument that we do
not know, a linear that is missing, a difference in numbers.
"""

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from marlaas.errors import UnsupportedBase
from marlaas.types import TARGET_GROUPS

_FULL, _WINDOWED = "full_attention", frozenset(("sliding_attention", "chunked_attention"))

_WINDOW_FIELDS = (
    "sliding_window",
    "sliding_window_size",
    "window_size",
    "attention_window",
    "local_attention",
    "attention_chunk_size",
)
"""Config fields under which architectures keep how far back a token sees."""

_NEUTRAL_VALUES: Mapping[str, tuple[object, str]] = {
    "attn_logit_softcapping": (None, "caps its attention scores"),
    "final_logit_softcapping": (None, "caps its logits"),
    "logit_scale": (1, "scales its logits behind the head"),
    "logits_scaling": (1, "scales its logits behind the head"),
    "lm_head_multiplier": (1, "scales its logits behind the head"),
    "logits_mup_width_multiplier": (1, "scales its logits behind the head"),
    "alibi": (False, "biases attention by distance (ALiBi)"),
    "num_kv_shared_layers": (0, "shares keys and values between layers"),
    "use_bidirectional_attention": (False, "attends to later tokens"),
    "quantization_config": (None, "has quantised weights"),
}
"""Config field to the value at which it does nothing, and what it does at any other."""

_FIXED_ROPE = frozenset(("default", "linear", "llama3", "yarn", "proportional"))
"""Rotary embeddings whose frequencies do not depend on the longest sequence of a pass."""

_SINK = re.compile(r"(^|[._])sinks?([._]|$)")
_INDEX = re.compile(r"\.(\d+)(?=\.|$)")


def check_architecture(config: PreTrainedConfig, max_context: int | None = None) -> dict[str, str]:
    """Return what `check_modules` does, from the config alone, on a model without weights.

    Raises:
        UnsupportedBase: with every reason why our passes would not equal the model's.
    """
    check_config(config, max_context)
    try:
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), trust_remote_code=False
            )
    except ValueError as error:
        raise UnsupportedBase(
            f"base {config.model_type}: transformers has no causal language model of this "
            f"architecture ({str(error).partition(chr(10))[0]}); expected a decoder-only one"
        ) from error
    return check_modules(skeleton)


def check_config(config: PreTrainedConfig, max_context: int | None = None) -> int:
    """Return how many positions a base of this config may use, at most `max_context` if given.

    Raises:
        UnsupportedBase: with every reason why our passes would not equal the model's.
    """
    limit = getattr(config, "max_position_embeddings", None)
    problems = list(_config_problems(config))
    used = 0
    if not isinstance(limit, int):
        problems.append("does not say how long its context is; expected max_position_embeddings")
    elif not problems:
        used = min(limit, max_context or limit)
        problems += _reach_problems(config, used)
    if problems:
        raise UnsupportedBase(*(f"base {config.model_type}: {problem}" for problem in problems))
    return used


def check_modules(model: PreTrainedModel) -> dict[str, str]:
    """Return the groups of targets that adapters cannot have on this model, each with the reason.

    Raises:
        UnsupportedBase: the model is not one that adapters could be put on at all.
    """
    name, config = type(model).__name__, model.config
    problems = []
    if not model._supports_attention_backend:
        problems.append("computes attention by itself; expected one with exchangeable attention")
    if any(_SINK.search(parameter) for parameter, _ in model.named_parameters()):
        problems.append("has attention sinks; expected plain softmax attention")
    if any(getattr(module, "is_causal", None) is False for module in model.modules()):
        problems.append("attends to later tokens; expected a causal model")
    reasons = {group: _missing(model, group) for group in TARGET_GROUPS}
    for group in ("attention", "head"):
        if reasons[group]:
            problems.append(f"{reasons[group]}; expected linears of these names")
    if not problems:
        problems += _head_width_problems(model)
    if problems:
        raise UnsupportedBase(*(f"base {config.model_type} ({name}): {text}" for text in problems))
    return {group: reason for group, reason in reasons.items() if reason}


def ignore_window(model: PreTrainedModel) -> None:
    """Switch off an attention window that `check_config` found to be wider than any context."""
    windowed = [module for module in model.modules() if getattr(module, "sliding_window", None)]
    for module in windowed:
        module.sliding_window = None  # type: ignore[assignment]
    if not windowed and getattr(model.config, "sliding_window", None):
        model.config.sliding_window = None


# ---------------------------------------------------------------------------------------------
# What the config says


def _config_problems(config: PreTrainedConfig) -> Iterable[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "is an encoder-decoder; expected a decoder-only causal language model"
    if config.get_text_config() is not config:
        yield "holds more than a language model; expected its language model in a folder of its own"
    if not getattr(config, "num_attention_heads", None):
        yield "has no attention heads (a state-space model?); expected attention in every layer"
    for field, (neutral, effect) in _NEUTRAL_VALUES.items():
        value = getattr(config, field, neutral)
        if value is not None and value != neutral:
            yield f"{effect} ({field} is {_short(value)}); expected {field} {neutral}"
    odd = sorted(set(layer_types(config)) - {_FULL} - _WINDOWED)
    if odd:
        yield f"has layers of type {', '.join(odd)}; expected {_FULL} in every layer"


def _reach_problems(config: PreTrainedConfig, used: int) -> Iterable[str]:
    """Name what makes a token see less, or positions mean something else, within `used` tokens."""
    window = attention_window(config)
    if window is not None and window < used:
        yield (
            f"sees only the last {window} tokens in some layers (sliding window) of {used}; "
            f"expected full attention, or a max_context of at most {window}"
        )
    for rope in _rope_parameters(config):
        kind = rope.get("rope_type", "default")
        trained = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if kind not in _FIXED_ROPE and used > trained:
            yield (
                f"rotates positions by the longest sequence of a pass past {trained} tokens "
                f"(rope_type {kind}); expected a max_context of at most {trained}"
            )


def layer_types(config: PreTrainedConfig) -> tuple[str, ...]:
    """Return the kind of each layer as the config tells it; empty when it does not tell."""
    for field in ("layer_types", "layers_block_type", "attention_layers"):
        kinds = getattr(config, field, None)
        if kinds and all(isinstance(kind, str) for kind in kinds):
            return tuple(kinds)
    return ()


def attention_window(config: PreTrainedConfig) -> int | None:
    """Return how many tokens back the narrowest layer sees, itself included; None without limit."""
    kinds = layer_types(config)
    if getattr(config, "use_sliding_window", None) is False or (kinds and set(kinds) == {_FULL}):
        return None
    values = [getattr(config, field, None) for field in _WINDOW_FIELDS]
    windows = [value for value in values if isinstance(value, int) and value > 0]
    return min(windows, default=None)


def _rope_parameters(config: PreTrainedConfig) -> list[Mapping[str, Any]]:
    """Return the rotary settings, one entry or one per kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return nested or ([rope] if rope else [])


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


# ---------------------------------------------------------------------------------------------
# What the modules say


def _missing(model: PreTrainedModel, group: str) -> str:
    """Return why the linears of a target group cannot carry adapters; "" if they can."""
    if group == "head":
        head = model.get_output_embeddings()
        is_ours = isinstance(head, nn.Linear) and getattr(model, "lm_head", None) is head
        return "" if is_ours else "has no head that is a linear named lm_head"
    num_layers = model.config.num_hidden_layers
    for kind in TARGET_GROUPS[group]:
        places = [
            _INDEX.findall(name)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] == kind
        ]
        has_each_once = sorted(places) == sorted([str(layer)] for layer in range(num_layers))
        if not has_each_once:
            return _absence(model, kind)
    return ""


def _absence(model: PreTrainedModel, kind: str) -> str:
    """Say what stands where `kind` was looked for."""
    experts = next((m for n, m in model.named_modules() if n.endswith(".experts")), None)
    if experts is not None and kind in TARGET_GROUPS["mlp"]:
        return f"{kind} lies in experts ({type(experts).__name__}), which carry no adapters"
    first = [name for name, _ in model.named_modules() if ".0." in name and _is_matrix(model, name)]
    found = ", ".join(dict.fromkeys(name.rsplit(".", 1)[-1] for name in first))
    return f"has no linear {kind} in every layer (the first one has {found or 'no linears'})"


def _is_matrix(model: PreTrainedModel, name: str) -> bool:
    weight = getattr(model.get_submodule(name), "weight", None)
    return weight is not None and weight.ndim == 2


def _head_width_problems(model: PreTrainedModel) -> Iterable[str]:
    """Name layers whose keys or values are not what the KV cache is laid out for."""
    num_kv_heads, head_dim = kv_shape(model.config)
    for name, module in model.named_modules():
        kind = name.rsplit(".", 1)[-1]
        if kind in ("k_proj", "v_proj") and module.out_features != num_kv_heads * head_dim:
            yield (
                f"{name} is {module.out_features} wide; "
                f"expected {num_kv_heads} heads of {head_dim} in every layer"
            )
            return


def kv_shape(config: PreTrainedConfig) -> tuple[int, int]:
    """Return the number of key-value heads and the width of a head."""
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return num_kv_heads, head_dim
