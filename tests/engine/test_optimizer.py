"""AdamW on a row against `torch.optim.AdamW`."""

import math

import pytest
import torch

from marlaas.engine.optimizer import adamw_, check_adam, clip_
from marlaas.types import AdamParams


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_updates_equal_those_of_torch(
    dtype: torch.dtype, rtol: float, weight_decay: float, max_grad_norm: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    weights_P = torch.randn(257, dtype=dtype, generator=generator)
    reference = torch.nn.Parameter(weights_P.clone())
    adam = AdamParams(lr=0.03, weight_decay=weight_decay, max_grad_norm=max_grad_norm)
    optimizer = torch.optim.AdamW(
        [reference],
        lr=adam.lr,
        betas=(adam.beta1, adam.beta2),
        eps=adam.eps,
        weight_decay=weight_decay,
    )
    exp_avg_P, exp_avg_sq_P = torch.zeros_like(weights_P), torch.zeros_like(weights_P)
    for step in range(1, 12):
        grad_P = torch.randn(257, dtype=dtype, generator=generator) * step
        reference.grad = grad_P.clone()
        if max_grad_norm:
            norm = torch.nn.utils.clip_grad_norm_([reference], max_grad_norm)
            assert clip_(grad_P, max_grad_norm) == pytest.approx(float(norm), rel=1e-6)
        optimizer.step()
        adamw_(weights_P, exp_avg_P, exp_avg_sq_P, grad_P, adam, step)
        torch.testing.assert_close(weights_P, reference.data, rtol=rtol, atol=rtol)


def test_zeros_stay_zero() -> None:
    rows = torch.zeros(4, 64)
    rows[3, :32] = 1.0
    adamw_(rows[0], rows[1], rows[2], rows[3], AdamParams(lr=0.1, weight_decay=0.5), 1)
    assert bool((rows[0, 32:] == 0).all()) and bool((rows[0, :32] != 0).all())


def test_clipping_scales_to_the_limit_and_returns_the_norm_before() -> None:
    grad_P = torch.tensor([3.0, 4.0])
    assert clip_(grad_P, 10.0) == 5.0
    assert grad_P.tolist() == [3.0, 4.0]
    assert clip_(grad_P, 0.0) == 5.0
    assert grad_P.tolist() == [3.0, 4.0]
    assert clip_(grad_P, 1.0) == 5.0
    assert float(grad_P.norm()) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_returned_as_such(value: float) -> None:
    assert not math.isfinite(clip_(torch.tensor([1.0, value]), 1.0))


def test_a_large_finite_gradient_has_a_finite_norm() -> None:
    assert clip_(torch.full((4,), 1e30), 0.0) == pytest.approx(2e30)


def test_every_wrong_adam_parameter_is_named() -> None:
    adam = AdamParams(lr=-1.0, beta1=1.0, beta2=math.nan, eps=0.0, weight_decay=-1.0)
    problems = check_adam(adam)
    assert [problem.split()[1] for problem in problems] == [
        "lr",
        "beta1",
        "beta2",
        "eps",
        "weight_decay",
    ]
    assert not check_adam(AdamParams(lr=1e-3))
