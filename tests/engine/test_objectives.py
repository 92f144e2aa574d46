"""Every token objective against a naive version: one token at a time, gradients by hand or by
plain autograd, fp64."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from marlaas.engine.objectives import (
    MAX_LOG_RATIO,
    TrainedTokens,
    check_objective,
    kl_to_reference,
    resolve_params,
    token_loss,
)
from marlaas.errors import InvalidRequest
from marlaas.types import OBJECTIVE_PARAMS, Objective

NUM_DATA = 3


def random_tokens(seed: int, *, num_tokens: int = 60) -> TrainedTokens:
    """Return tokens of three data whose ratios lie on both sides of every bound."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(num_tokens, dtype=torch.float64, generator=generator)

    lp_M = -normal(1.0).abs()
    datum_M = torch.arange(num_tokens) * NUM_DATA // num_tokens
    return TrainedTokens(
        logprobs_M=lp_M.clone().requires_grad_(),
        sampling_logprobs_M=(lp_M + normal(0.7)).clamp(max=0.0),
        advantages_M=normal(1.0),
        datum_M=datum_M,
        num_data=NUM_DATA,
        reference_logprobs_M=lp_M + normal(0.5),
    )


def gradient(objective: Objective, tokens: TrainedTokens, weight_M: Tensor) -> Tensor:
    (grad_M,) = torch.autograd.grad(
        token_loss(objective, tokens).loss_M, tokens.logprobs_M, weight_M
    )
    return grad_M


# Each takes (lp, q, A) of one token as floats and returns (loss, d loss / d lp).


def naive_cross_entropy(lp: float, q: float, a: float) -> tuple[float, float]:
    return -lp, -1.0


def naive_importance_sampling(lp: float, q: float, a: float) -> tuple[float, float]:
    r = math.exp(lp - q)
    return -r * a, -r * a


def naive_ppo(lp: float, q: float, a: float) -> tuple[float, float]:
    r = math.exp(lp - q)
    if a > 0:
        return -min(r, 1.28) * a, -r * a if r < 1.28 else 0.0
    return -max(r, 0.8) * a, -r * a if r > 0.8 else 0.0


def naive_cispo(lp: float, q: float, a: float) -> tuple[float, float]:
    w = min(max(math.exp(lp - q), 0.5), 1.5)
    return -w * a * lp, -w * a


def naive_dppo_tis(lp: float, q: float, a: float) -> tuple[float, float]:
    pi, mu = math.exp(lp), math.exp(q)
    w = min(pi / mu, 1.5)
    is_masked = (a > 0 and pi - mu > 0.1) or (a < 0 and mu - pi > 0.1)
    keep = 0.0 if is_masked else 1.0
    return -keep * w * a * lp + 0.01 * (lp - q) ** 2, -keep * w * a + 0.02 * (lp - q)


def naive_dro(lp: float, q: float, a: float) -> tuple[float, float]:
    return -(lp * a - 0.3 / 2 * (lp - q) ** 2), -(a - 0.3 * (lp - q))


def naive_cispo_above_1(lp: float, q: float, a: float) -> tuple[float, float]:
    w = min(max(math.exp(lp - q), 1.25), 1.5)
    return -w * a * lp, -w * a


NAIVE: dict[str, tuple[dict[str, float], Callable]] = {
    "cross_entropy": ({}, naive_cross_entropy),
    "importance_sampling": ({}, naive_importance_sampling),
    "ppo": ({"clip_low": 0.2, "clip_high": 0.28}, naive_ppo),
    "cispo": ({"clip_low": 0.5, "clip_high": 0.5}, naive_cispo),
    "dppo_tis": ({"cap": 1.5, "delta": 0.1, "log_ratio_penalty": 0.01}, naive_dppo_tis),
    "dro": ({"beta": 0.3}, naive_dro),
    "cispo, both bounds above 1": ({"clip_low": -0.25, "clip_high": 0.5}, naive_cispo_above_1),
}


@pytest.mark.parametrize("name", NAIVE)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_of_a_token_objective_equal_the_naive_version(
    name: str, seed: int
) -> None:
    params, naive = NAIVE[name]
    tokens = random_tokens(seed)
    objective = Objective(name=name.partition(",")[0], params=params)
    columns = (tokens.logprobs_M, tokens.sampling_logprobs_M, tokens.advantages_M)
    expected = [naive(*values) for values in zip(*(c.tolist() for c in columns), strict=True)]
    loss_M, grad_M = torch.tensor(expected, dtype=torch.float64).T
    torch.testing.assert_close(token_loss(objective, tokens).loss_M, loss_M)
    weight_M = torch.linspace(0.1, 2.0, len(loss_M), dtype=torch.float64)
    torch.testing.assert_close(gradient(objective, tokens, weight_M), weight_M * grad_M)


@pytest.mark.parametrize("seed", range(3))
def test_gspo_has_the_gradient_of_its_sequence_form(seed: int) -> None:
    """The sequence form, arXiv 2507.18071 eq. 5: one ratio, one advantage, one loss a sequence."""
    clip_low, clip_high = 0.1, 0.2
    tokens = random_tokens(seed)
    a_B = torch.tensor([1.3, -0.7, 0.4], dtype=torch.float64)
    object.__setattr__(tokens, "advantages_M", a_B[tokens.datum_M])
    total = torch.zeros((), dtype=torch.float64)
    for idx in range(NUM_DATA):
        own = tokens.datum_M == idx
        log_r_T = (tokens.logprobs_M - tokens.sampling_logprobs_M)[own]
        s = log_r_T.mean().exp()
        clipped = s.clamp(1 - clip_low, 1 + clip_high)
        total = total - torch.minimum(s * a_B[idx], clipped * a_B[idx])
    (expected_M,) = torch.autograd.grad(total, tokens.logprobs_M)
    weight_M = 1.0 / torch.bincount(tokens.datum_M)[tokens.datum_M].double()
    objective = Objective(name="gspo", params={"clip_low": clip_low, "clip_high": clip_high})
    torch.testing.assert_close(gradient(objective, tokens, weight_M), expected_M)
    loss = (weight_M * token_loss(objective, tokens).loss_M).sum()
    torch.testing.assert_close(loss, total)


@pytest.mark.parametrize("name", OBJECTIVE_PARAMS)
def test_the_kl_term_adds_k3_and_its_gradient_to_any_objective(name: str) -> None:
    tokens = random_tokens(0)
    weight_M = torch.ones_like(tokens.logprobs_M)
    plain = gradient(Objective(name=name), tokens, weight_M)
    with_kl = gradient(Objective(name=name, params={"kl_coef": 0.5}), tokens, weight_M)
    d_M = (tokens.reference_logprobs_M - tokens.logprobs_M).detach()
    torch.testing.assert_close(with_kl - plain, 0.5 * (1.0 - d_M.exp()))
    counts = token_loss(Objective(name=name, params={"kl_coef": 0.5}), tokens).counts
    torch.testing.assert_close(counts["reference_kl"], d_M.exp() - d_M - 1.0)


def test_k3_is_never_negative_and_unbiased_for_samples_of_the_policy() -> None:
    logits_V = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
    reference_V = torch.tensor([0.0, 0.3, 1.0, -0.5], dtype=torch.float64).log_softmax(-1)
    lp_V = logits_V.log_softmax(-1)
    tokens = TrainedTokens(
        logprobs_M=lp_V,
        sampling_logprobs_M=lp_V,
        advantages_M=lp_V,
        datum_M=torch.zeros(4, dtype=torch.int64),
        num_data=1,
        reference_logprobs_M=reference_V,
    )
    k3_V = kl_to_reference(tokens)
    assert bool((k3_V >= 0).all())
    kl = (lp_V.exp() * (lp_V - reference_V)).sum()
    torch.testing.assert_close((lp_V.exp() * k3_V).sum(), kl)


@pytest.mark.parametrize("name", OBJECTIVE_PARAMS)
@pytest.mark.parametrize("gap", [200.0, -200.0])
def test_a_token_absurdly_far_off_policy_gives_finite_loss_and_gradient(
    name: str, gap: float
) -> None:
    tokens = TrainedTokens(
        logprobs_M=torch.tensor([-1.0 + min(gap, 0.0)], requires_grad=True),
        sampling_logprobs_M=torch.tensor([-1.0 - max(gap, 0.0)]),
        advantages_M=torch.tensor([1.0]),
        datum_M=torch.zeros(1, dtype=torch.int64),
        num_data=1,
        reference_logprobs_M=torch.tensor([-300.0]),
    )
    objective = Objective(name=name, params={"kl_coef": 0.1})
    assert bool(token_loss(objective, tokens).loss_M.isfinite().all())
    assert bool(gradient(objective, tokens, torch.ones(1)).isfinite().all())
    assert float(tokens.log_ratio().detach().abs()) <= MAX_LOG_RATIO


def test_counts_say_which_tokens_were_masked_capped_or_clipped() -> None:
    probabilities = torch.tensor([[0.9, 0.5], [0.1, 0.5], [0.9, 0.5], [0.5, 0.5], [0.02, 0.005]])
    tokens = TrainedTokens(
        logprobs_M=probabilities[:, 0].log(),
        sampling_logprobs_M=probabilities[:, 1].log(),
        advantages_M=torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0]),
        datum_M=torch.zeros(5, dtype=torch.int64),
        num_data=1,
    )
    dppo = token_loss(Objective(name="dppo_tis"), tokens).counts
    assert dppo["masked"].tolist() == [True, True, False, False, False]
    assert dppo["capped"].tolist() == [False, False, False, False, True]
    ppo = token_loss(Objective(name="ppo"), tokens).counts
    assert ppo["clipped"].tolist() == [True, True, False, False, True]
    cispo = token_loss(Objective(name="cispo", params={"clip_high": 1.0}), tokens).counts
    assert cispo["clipped"].tolist() == [False, False, False, False, True]


def test_defaults_of_an_objective_are_filled_in() -> None:
    params = resolve_params(Objective(name="dppo_tis", params={"delta": 0.3}))
    assert params == {"cap": 2.0, "delta": 0.3, "log_ratio_penalty": 1e-3, "kl_coef": 0.0}


def test_an_unknown_objective_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match=r"did you mean 'dppo_tis'.*cross_entropy.*gspo"):
        check_objective(Objective(name="dpo_tis"))


def test_every_wrong_parameter_is_named_at_once() -> None:
    params = {"clip_hi": 0.2, "clip_low": math.inf, "kl_coef": -1.0, "clip_high": True}
    with pytest.raises(InvalidRequest) as refusal:
        check_objective(Objective(name="ppo", params=params))
    text = str(refusal.value)
    assert len(refusal.value.problems) == 4
    assert "did you mean 'clip_high'?" in text and "expected any of clip_low, clip_high" in text
    assert "clip_low = inf; expected a finite number" in text
    assert "kl_coef = -1.0; expected a number >= 0" in text


def test_bounds_may_lie_on_one_side_of_1_but_not_cross() -> None:
    check_objective(Objective(name="ppo", params={"clip_low": -0.1, "clip_high": 0.3}))
    check_objective(Objective(name="cispo", params={"clip_low": 0.5, "clip_high": -0.2}))
    with pytest.raises(InvalidRequest, match=r"ratios in \[1.5, 1.2\]; expected bounds"):
        check_objective(Objective(name="gspo", params={"clip_low": -0.5, "clip_high": 0.2}))
