"""AdamW on one flat row of parameters, in place. The trainer calls it, once per policy and step.

Shape suffix: P length of a policy's row.
"""

import math

import torch
from torch import Tensor

from marlaas.types import AdamParams

CLIP_EPSILON = 1e-6
"""Added to the norm that a clipped gradient is divided by, as `torch.nn.utils.clip_grad_norm_`
does."""


def adamw_(
    weights_P: Tensor,
    exp_avg_P: Tensor,
    exp_avg_sq_P: Tensor,
    grad_P: Tensor,
    adam: AdamParams,
    num_steps: int,
) -> None:
    """Make update number `num_steps` (1-based) of one policy. All rows but `grad_P` change.

        m = beta1 m + (1 - beta1) g,    v = beta2 v + (1 - beta2) g^2
        w = w - lr wd w - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    Source: AdamW, arXiv 1711.05101, algorithm 2; same form as `torch.optim.AdamW`.
    """
    exp_avg_P.lerp_(grad_P, 1.0 - adam.beta1)
    exp_avg_sq_P.mul_(adam.beta2).addcmul_(grad_P, grad_P, value=1.0 - adam.beta2)
    correction1 = 1.0 - adam.beta1**num_steps
    correction2 = 1.0 - adam.beta2**num_steps
    denominator_P = exp_avg_sq_P.sqrt().div_(math.sqrt(correction2)).add_(adam.eps)
    if adam.weight_decay:
        weights_P.mul_(1.0 - adam.lr * adam.weight_decay)
    weights_P.addcdiv_(exp_avg_P, denominator_P, value=-adam.lr / correction1)


def clip_(grad_P: Tensor, max_norm: float) -> float:
    """Scale a gradient down to `max_norm` (0: leave it) and return its norm before that.

    A norm that is not finite leaves the gradient as it is; the caller vetoes the update.
    """
    # Accumulated in fp64: a sum of squares overflows fp32 from elements of about 1e19 on.
    norm = float(torch.linalg.vector_norm(grad_P, dtype=torch.float64))
    if max_norm and math.isfinite(norm) and norm > max_norm:
        grad_P.mul_(max_norm / (norm + CLIP_EPSILON))
    return norm


def check_adam(adam: AdamParams) -> list[str]:
    """Return what is wrong with the parameters of an update, with what would be right."""
    ranges = {
        "lr": (adam.lr, 0.0 <= adam.lr < math.inf, "a finite number >= 0"),
        "beta1": (adam.beta1, 0.0 <= adam.beta1 < 1.0, "a number in [0, 1)"),
        "beta2": (adam.beta2, 0.0 <= adam.beta2 < 1.0, "a number in [0, 1)"),
        "eps": (adam.eps, 0.0 < adam.eps < math.inf, "a finite number > 0"),
        "weight_decay": (adam.weight_decay, 0.0 <= adam.weight_decay < math.inf, "a number >= 0"),
        "max_grad_norm": (adam.max_grad_norm, 0.0 <= adam.max_grad_norm < math.inf, "0 or more"),
    }
    return [
        f"adam {name} = {value!r}; expected {expected}"
        for name, (value, is_right, expected) in ranges.items()
        if not is_right
    ]
