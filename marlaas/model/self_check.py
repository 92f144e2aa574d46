"""Whether our packed pass computes what the stock model computes, on this machine, for this base.

Called at every load through `engine.self_check`, which adds prefill and decode. The stock model is
the class of `transformers` as it is, eager attention included, on the same weights: no second copy.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from marlaas.errors import UnsupportedBase
from marlaas.model.attention import PackedSequences
from marlaas.model.base import BaseModel

MAX_DEVIATION = {torch.float64: 1e-5, torch.float32: 3e-4}
"""Bound of the difference between our logprobs and those of the stock model, in nats. Measured in
fp32 over 320 tokens, all passes: 1.0e-5 for `tiny`, 3.6e-5 for SmolLM2-135M with MKL's products on
AVX2, 1.0e-4 with oneDNN's on AVX-512. There both lie within 8.6e-5 of fp64 (ours 7.8e-5), so that
two right results may be 1.7e-4 apart. A wrong mask, position or scale shows as 1e-2 and more.
In fp64 2.7e-6 for a small Qwen3: the stock softmax and norms are fp32 all the same."""

MAX_ROUNDINGS = 4.0
"""In half precision the bound is this multiple of how far the stock model is from itself when it
computes attention by another of its own functions. Measured in bf16: 0.08 for `tiny` (ours 0.17),
0.42 for SmolLM2-135M (ours 0.42)."""

CHECK_FLOPS = 1.2e10
"""Work that one of the check's passes may take on a CPU: about half a second of one core."""

MIN_TOKENS, MAX_TOKENS = 40, 320
"""Bounds of the number of tokens of the check. No window hides behind it: a base with one that is
narrower than its context is refused, whatever the numbers say."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Random sequences and what the stock model says of them."""

    sequences: tuple[Tensor, ...]
    """int64 [T] each, of different lengths."""
    logprobs: tuple[Tensor, ...]
    """float64 [T - 1] each: of token t + 1 given tokens 0 .. t."""
    bound: float
    """Largest difference of ours that is still rounding, in nats."""


def stock_twin(base: BaseModel) -> PreTrainedModel:
    """Return the unmodified model of `transformers` that shares the weights of `base`."""
    config = copy.deepcopy(base.stock_config)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        twin = type(base.model)(config)
    twin.load_state_dict(base.model.state_dict(), assign=True)
    # Buffers that no checkpoint holds, such as rotary frequencies; some models update theirs.
    for name, buffer in base.model.named_buffers():
        parent_name, _, child_name = name.rpartition(".")
        setattr(twin.get_submodule(parent_name), child_name, buffer.clone())
    return twin.requires_grad_(False).eval()


def make_reference(base: BaseModel, *, num_tokens: int | None = None, room: int = 0) -> Reference:
    """Run the stock model over random tokens, by default as many as are cheap for this base.

    Args:
        room: positions of the context to leave free.
    """
    length = min(num_tokens or _num_tokens(base), base.max_context - room)
    generator = torch.Generator().manual_seed(0)
    sequences = tuple(
        torch.randint(base.vocab_size, (count,), generator=generator).to(base.device)
        for count in (length - length // 4, max(2, length // 4))
    )
    twin = stock_twin(base)
    logprobs = _stock_logprobs(twin, sequences)
    bound = MAX_DEVIATION.get(base.dtype)
    if bound is None:
        twin.set_attn_implementation("sdpa")
        bound = MAX_ROUNDINGS * max_deviation(_stock_logprobs(twin, sequences), logprobs)
    return Reference(sequences, logprobs, bound)


def _stock_logprobs(twin: PreTrainedModel, sequences: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    with torch.inference_mode():
        return tuple(
            next_logprobs(twin(input_ids=tokens[None], use_cache=False).logits[0], tokens)
            for tokens in sequences
        )


def packed_logprobs(base: BaseModel, sequences: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the logprobs [T - 1] of each sequence from one packed pass of ours, base alone."""
    lengths = [len(tokens) for tokens in sequences]
    positions_N = torch.cat([torch.arange(length) for length in lengths]).to(base.device)
    with torch.inference_mode():
        hidden_ND = base.hidden(
            torch.cat(list(sequences)), positions_N, PackedSequences(lengths), None
        )
        logits = base.head(hidden_ND).split(lengths)
    return tuple(map(next_logprobs, logits, sequences))


def max_deviation(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return the largest absolute difference; infinity with a NaN, or with nothing to compare."""
    pairs = zip(ours, theirs, strict=True)
    difference = torch.cat([(a.cpu().double() - b.cpu().double()).abs() for a, b in pairs])
    return float(difference.nan_to_num(nan=torch.inf).max()) if len(difference) else float("inf")


def refuse_above(bound: float, base: BaseModel, name: str, deviation: float) -> None:
    """Refuse the base when a pass of ours differs from the stock model by more than rounding.

    Raises:
        UnsupportedBase: with the value and the bound.
    """
    if not deviation <= bound:
        raise UnsupportedBase(
            f"base {base.name}: logprobs of our {name} pass differ from the stock model's by "
            f"{deviation:.2e} nats; expected at most {bound:.1e} in {base.dtype}"
        )


def next_logprobs(logits_TV: Tensor, tokens_T: Tensor) -> Tensor:
    """Return the logprob of each token but the first, [T - 1], in fp64."""
    logprobs_TV = logits_TV[:-1].double().log_softmax(-1)
    return logprobs_TV.gather(1, tokens_T[1:, None])[:, 0]


def _num_tokens(base: BaseModel) -> int:
    if base.device.type != "cpu":
        return MAX_TOKENS
    num_weights = sum(parameter.numel() for parameter in base.model.parameters())
    return max(MIN_TOKENS, min(MAX_TOKENS, int(CHECK_FLOPS / (2 * num_weights))))
