"""Every part of every preset against a version that is written as naively as the paper."""

import numpy as np
import pytest

from marlaas.errors import InvalidRequest
from marlaas.loop import algorithms
from marlaas.loop.algorithms import PRESETS, resolve

REWARDS = np.array([1.0, 0.0, 0.0, 0.5, 1.0])
LENGTHS = np.array([3, 1, 4, 1, 5])


def test_group_mean_subtracts_the_mean() -> None:
    mean = sum(REWARDS) / 5
    np.testing.assert_allclose(algorithms.group_mean(REWARDS), [r - mean for r in REWARDS])


def test_group_standard_divides_by_the_population_deviation() -> None:
    mean = sum(REWARDS) / 5
    std = (sum((r - mean) ** 2 for r in REWARDS) / 5) ** 0.5
    np.testing.assert_allclose(
        algorithms.group_standard(REWARDS), [(r - mean) / std for r in REWARDS], rtol=1e-4
    )
    assert (algorithms.group_standard(np.ones(4)) == 0).all()


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    expected = [r - np.delete(REWARDS, i).mean() for i, r in enumerate(REWARDS)]
    np.testing.assert_allclose(algorithms.leave_one_out(REWARDS), expected)
    assert algorithms.leave_one_out(np.ones(1)) == 0


@pytest.mark.parametrize(
    ("normaliser", "naive"),
    [
        (algorithms.by_step_tokens, lambda loss: sum(sum(s) for s in loss) / LENGTHS.sum()),
        (algorithms.by_sequence_mean, lambda loss: np.mean([np.mean(s) for s in loss])),
        (algorithms.by_constant, lambda loss: sum(sum(s) for s in loss) / (5 * 64)),
        (algorithms.by_sequence_sum, lambda loss: np.mean([sum(s) for s in loss])),
    ],
)
def test_summing_weighted_token_losses_gives_the_papers_average(normaliser, naive) -> None:
    losses = [np.random.default_rng(i).normal(size=n) for i, n in enumerate(LENGTHS)]
    weights = normaliser(LENGTHS, 64)
    total = sum((w * s).sum() for w, s in zip(weights, losses, strict=True))
    np.testing.assert_allclose(total, naive(losses))


def test_groups_without_variance_teach_nothing() -> None:
    assert algorithms.has_variance(REWARDS)
    for rewards in ([], [1.0], [0.5, 0.5]):
        assert not algorithms.has_variance(np.array(rewards))
    assert algorithms.has_any_verdict(np.array([0.5]))
    assert not algorithms.has_any_verdict(np.array([]))


def test_the_presets_are_those_of_the_papers() -> None:
    table = {
        name: (a.advantage.__name__, a.objective.name, dict(a.objective.params),
               a.normaliser.__name__, a.keeps.__name__)
        for name, a in PRESETS.items()
    }  # fmt: skip
    ppo, wide = {"clip_low": 0.2, "clip_high": 0.2}, {"clip_low": 0.2, "clip_high": 0.28}
    tis = {"cap": 2.0, "delta": 0.2, "log_ratio_penalty": 1e-3}
    assert table == {
        "dppo_tis": ("group_mean", "dppo_tis", tis, "by_step_tokens", "has_variance"),
        "grpo": ("group_standard", "ppo", ppo, "by_sequence_mean", "has_any_verdict"),
        "dr_grpo": ("group_mean", "ppo", ppo, "by_constant", "has_any_verdict"),
        "dapo": ("group_standard", "ppo", wide, "by_step_tokens", "has_variance"),
        "gspo": ("group_standard", "gspo", {"clip_low": 3e-4, "clip_high": 4e-4},
                 "by_sequence_mean", "has_any_verdict"),
        "cispo": ("group_standard", "cispo", {"clip_low": 1.0, "clip_high": 4.0},
                  "by_step_tokens", "has_variance"),
        "rloo": ("leave_one_out", "importance_sampling", {}, "by_sequence_sum", "has_any_verdict"),
    }  # fmt: skip


def test_overrides_replace_numbers_and_leave_the_preset_alone() -> None:
    algorithm = resolve({"preset": "grpo", "clip_high": 0.3, "kl_coef": 0.01, "warmup_steps": 4})
    assert algorithm.objective.params == {"clip_low": 0.2, "clip_high": 0.3, "kl_coef": 0.01}
    assert (algorithm.kl_coef, algorithm.warmup_steps) == (0.01, 4)
    assert PRESETS["grpo"].objective.params == {"clip_low": 0.2, "clip_high": 0.2}
    assert resolve({}).preset == "dppo_tis"


def test_the_learning_rate_warms_up_and_stays() -> None:
    algorithm = resolve({"preset": "grpo", "warmup_steps": 3})
    rates = [algorithm.lr_at(step, 1.0) for step in (1, 2, 3, 4, 5)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert resolve({"preset": "grpo"}).lr_at(1, 0.5) == 0.5


def test_every_mistake_is_named_with_what_would_be_right() -> None:
    with pytest.raises(InvalidRequest, match="expected one of dppo_tis, grpo, dr_grpo, dapo"):
        resolve({"preset": "gpro"})
    with pytest.raises(InvalidRequest) as error:
        resolve({"preset": "grpo", "clip_hihg": 1, "clip_low": "x", "warmup_steps": 1.5,
                 "kl_coef": -1, "max_grad_norm": True, "clip_high": float("nan")})  # fmt: skip
    assert error.value.problems == (
        "unknown parameter 'clip_hihg' of grpo; expected one of clip_low, clip_high, kl_coef, "
        "warmup_steps, max_grad_norm (did you mean clip_high?)",
        "clip_low: got 'x'; expected a number of at least 0",
        "warmup_steps: got 1.5; expected a whole number of at least 0",
        "kl_coef: got -1; expected a number of at least 0",
        "max_grad_norm: got True; expected a number of at least 0",
        "clip_high: got nan; expected a number of at least 0",
    )
