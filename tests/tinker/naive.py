"""The losses as their formulas say, on the stock model with PEFT, in float64: what we must equal.

Nothing here is fast, packed, fused or shared, and nothing is ours. Symbols: lp logprob of the
target, q the `logprobs` input, A the `advantages` input, r = exp(lp - q), `detach` where no
gradient flows.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import peft
import torch
from tinker import types
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.tinker.served import FOLDER

Inputs = Mapping[str, Tensor]


class Naive:
    """The stock base with one adapter, of which a gradient can be taken."""

    def __init__(self, adapter: Path) -> None:
        stock = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float64)
        model = peft.PeftModel.from_pretrained(stock, adapter, is_trainable=True)
        self.model = model.double().eval()

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the adapter's matrices under the names that a PEFT file has."""
        return {
            name.replace(".default", ""): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    def logprobs(self, datum: types.Datum) -> Tensor:
        """Return lp in the shape of the targets, [N] or [N, K]."""
        tokens = torch.tensor(datum.model_input.to_ints())
        logits = self.model(tokens[None]).logits[0].log_softmax(-1)
        targets = datum.loss_fn_inputs["target_tokens"].to_torch().long()
        columns = targets[:, None] if targets.ndim == 1 else targets
        return logits.gather(1, columns).reshape(targets.shape)

    def loss(self, loss: Callable[[Tensor, Inputs], Tensor], data: list[types.Datum]) -> Tensor:
        values = [
            loss(
                self.logprobs(datum),
                {name: value.to_torch().double() for name, value in datum.loss_fn_inputs.items()},
            )
            for datum in data
        ]
        return torch.stack(values).sum()

    def gradient(
        self, loss: Callable[[Tensor, Inputs], Tensor], data: list[types.Datum]
    ) -> dict[str, Tensor]:
        parameters = self.parameters()
        gradients = torch.autograd.grad(
            self.loss(loss, data), list(parameters.values()), allow_unused=True
        )
        return {
            name: torch.zeros_like(parameter) if gradient is None else gradient
            for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
        }


def cross_entropy(lp: Tensor, inputs: Inputs) -> Tensor:
    return -(inputs["weights"] * lp).sum()


def importance_sampling(lp: Tensor, inputs: Inputs) -> Tensor:
    return -((lp - inputs["logprobs"]).exp() * inputs["advantages"]).sum()


def ppo(lp: Tensor, inputs: Inputs, low: float = 0.8, high: float = 1.2) -> Tensor:
    r, a = (lp - inputs["logprobs"]).exp(), inputs["advantages"]
    return -torch.minimum(r * a, _clipped(r, inputs, low, high) * a).sum()


def cispo(lp: Tensor, inputs: Inputs, low: float = 0.0, high: float = 4.0) -> Tensor:
    r = (lp - inputs["logprobs"]).exp()
    return -(_clipped(r, inputs, low, high).detach() * lp * inputs["advantages"]).sum()


def dro(lp: Tensor, inputs: Inputs, beta: float = 0.05) -> Tensor:
    away = lp - inputs["logprobs"]
    return -(lp * inputs["advantages"] - beta / 2 * away.square()).sum()


def gspo(lp: Tensor, inputs: Inputs, low: float = 1 - 3e-4, high: float = 1 + 4e-4) -> Tensor:
    mask, a = inputs["sequence_ratio_mask"], inputs["advantages"]
    ratio = ((lp - inputs["logprobs"]) * mask).sum() / mask.sum().clamp(min=1)
    s = ratio.exp().detach() * (lp - lp.detach()).exp()
    return -torch.minimum(s * a, _clipped(s, inputs, low, high) * a).sum()


def _clipped(r: Tensor, inputs: Inputs, low: float, high: float) -> Tensor:
    """Return r within its bounds: those of each token where there are any."""
    lows = inputs.get("clip_low_threshold", torch.full_like(r, low))
    highs = inputs.get("clip_high_threshold", torch.full_like(r, high))
    return torch.maximum(torch.minimum(r, highs), lows)
