"""An algorithm is a preset of four small named parts; a job may override numbers, never the parts.

    rewards of a group ─► advantage ─► token objective (in the trainer) x weight from the normaliser
                     └──► filter: groups that could teach nothing are consumed without training

`resolve` turns a job's `{"preset": NAME, ...}` into an `Algorithm`; `docs/algorithms.md` lists the
presets. Formulas use r_i for the reward of trajectory i of the n in its group that have a verdict,
L_i for its number of trained tokens, N for the sequences of a step, w_i for the weight that each of
its tokens gets. The trainer sums weight x token loss, so the normaliser is the whole average.
"""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from marlaas.errors import InvalidRequest
from marlaas.types import Objective

STD_EPSILON = 1e-6
"""Added to the standard deviation of a group's rewards: equal rewards give 0 and not NaN."""


# ---------------------------------------------------------------------------------------------
# Advantages: rewards [n] of one group -> advantages [n]


def group_mean(reward_n: np.ndarray) -> np.ndarray:
    """Return A_i = r_i - mean(r).

    Source: Dr. GRPO, arXiv 2503.20783, eq. 3 (no division by the standard deviation).
    """
    return reward_n - reward_n.mean()


def group_standard(reward_n: np.ndarray) -> np.ndarray:
    """Return A_i = (r_i - mean(r)) / (std(r) + eps).

    Source: GRPO, arXiv 2402.03300, section 4.1.2. The standard deviation is that of the population.
    """
    return (reward_n - reward_n.mean()) / (reward_n.std() + STD_EPSILON)


def leave_one_out(reward_n: np.ndarray) -> np.ndarray:
    """Return A_i = r_i - mean of the others' rewards = n / (n - 1) * (r_i - mean(r)).

    Source: RLOO, arXiv 2402.14740, eq. 7.
    """
    n = len(reward_n)
    return (reward_n - reward_n.mean()) * (n / max(n - 1, 1))


# ---------------------------------------------------------------------------------------------
# Normalisers: trained tokens [N] of a step's sequences -> weight of each of their tokens [N]


def by_step_tokens(length_N: np.ndarray, max_tokens: int) -> np.ndarray:
    """Return w_i = 1 / sum_j L_j: every token of the step counts the same.

    Source: DAPO, arXiv 2503.14476, section 3.3 (token-level loss).
    """
    return np.full(len(length_N), 1.0 / length_N.sum())


def by_sequence_mean(length_N: np.ndarray, max_tokens: int) -> np.ndarray:
    """Return w_i = 1 / (N L_i): mean over a sequence's tokens, then over sequences.

    Source: GRPO, arXiv 2402.03300, eq. 3; GSPO, arXiv 2507.18071, eq. 5.
    """
    return 1.0 / (len(length_N) * length_N)


def by_constant(length_N: np.ndarray, max_tokens: int) -> np.ndarray:
    """Return w_i = 1 / (N max_tokens): no length enters, so none is rewarded.

    Source: Dr. GRPO, arXiv 2503.20783, appendix (the constant is the generation budget).
    """
    return np.full(len(length_N), 1.0 / (len(length_N) * max_tokens))


def by_sequence_sum(length_N: np.ndarray, max_tokens: int) -> np.ndarray:
    """Return w_i = 1 / N: a sequence counts with the sum over its tokens, as log pi(y|x) does.

    Source: RLOO, arXiv 2402.14740, eq. 7.
    """
    return np.full(len(length_N), 1.0 / len(length_N))


# ---------------------------------------------------------------------------------------------
# Filters: rewards [n] of one group -> is it worth training on?


def has_any_verdict(reward_n: np.ndarray) -> bool:
    """Keep every group in which the environment judged a trajectory."""
    return len(reward_n) > 0


def has_variance(reward_n: np.ndarray) -> bool:
    """Keep groups whose rewards differ: where all are equal, every advantage is 0.

    Source: DAPO, arXiv 2503.14476, section 3.2. There the batch is refilled; here such a group
    counts as consumed, so that the schedule does not depend on rewards.
    """
    return len(reward_n) > 1 and bool(np.ptp(reward_n) > 0)


# ---------------------------------------------------------------------------------------------
# Presets


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """What to do with the groups of a step."""

    preset: str
    advantage: Callable[[np.ndarray], np.ndarray]
    objective: Objective
    normaliser: Callable[[np.ndarray, int], np.ndarray]
    keeps: Callable[[np.ndarray], bool]
    kl_coef: float = 0.0
    """Weight of the k3 estimate of KL(policy || base), per token; 0 asks for no reference pass.
    Source: arXiv 2402.03300, eq. 4."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly to the job's; then constant."""
    max_grad_norm: float = 1.0
    """Gradient norm of a policy is clipped to it; 0 does not clip."""

    def lr_at(self, step: int, learning_rate: float) -> float:
        """Return the learning rate of a 1-based step: lr * min(1, step / (warmup_steps + 1))."""
        return learning_rate * min(1.0, step / (self.warmup_steps + 1))


_PRESETS: tuple[Algorithm, ...] = (
    Algorithm(
        preset="dppo_tis",
        advantage=group_mean,
        objective=Objective(
            name="dppo_tis", params={"cap": 2.0, "delta": 0.2, "log_ratio_penalty": 1e-3}
        ),
        normaliser=by_step_tokens,
        keeps=has_variance,
    ),
    Algorithm(
        preset="grpo",
        advantage=group_standard,
        objective=Objective(name="ppo", params={"clip_low": 0.2, "clip_high": 0.2}),
        normaliser=by_sequence_mean,
        keeps=has_any_verdict,
    ),
    Algorithm(
        preset="dr_grpo",
        advantage=group_mean,
        objective=Objective(name="ppo", params={"clip_low": 0.2, "clip_high": 0.2}),
        normaliser=by_constant,
        keeps=has_any_verdict,
    ),
    Algorithm(
        preset="dapo",
        advantage=group_standard,
        objective=Objective(name="ppo", params={"clip_low": 0.2, "clip_high": 0.28}),
        normaliser=by_step_tokens,
        keeps=has_variance,
    ),
    Algorithm(
        preset="gspo",
        advantage=group_standard,
        # Sequence-level ratios are far closer to 1 than token ratios; section 5.1 of the paper.
        objective=Objective(name="gspo", params={"clip_low": 3e-4, "clip_high": 4e-4}),
        normaliser=by_sequence_mean,
        keeps=has_any_verdict,
    ),
    Algorithm(
        preset="cispo",
        advantage=group_standard,
        # arXiv 2506.13585 sets no lower bound (clip_low 1 is ratio >= 0) and does not name the
        # upper one; ScaleRL, arXiv 2510.13786, finds it uncritical between 4 and 8: ratio <= 5.
        objective=Objective(name="cispo", params={"clip_low": 1.0, "clip_high": 4.0}),
        normaliser=by_step_tokens,
        keeps=has_variance,
    ),
    Algorithm(
        preset="rloo",
        advantage=leave_one_out,
        objective=Objective(name="importance_sampling"),
        normaliser=by_sequence_sum,
        keeps=has_any_verdict,
    ),
)

PRESETS: Mapping[str, Algorithm] = {algorithm.preset: algorithm for algorithm in _PRESETS}

_COMMON: Mapping[str, type] = {"kl_coef": float, "warmup_steps": int, "max_grad_norm": float}
"""Parameters that every preset takes beside those of its objective."""


def resolve(setting: Mapping[str, object]) -> Algorithm:
    """Return the algorithm that a job asks for: `{"preset": NAME, ...numbers to override}`.

    Raises:
        InvalidRequest: an unknown preset or parameter, or a number out of range; all at once.
    """
    name = setting.get("preset", "dppo_tis")
    if name not in PRESETS:
        raise InvalidRequest(f"unknown preset {name!r}; expected one of {', '.join(PRESETS)}")
    algorithm = PRESETS[cast(str, name)]
    overrides = {key: value for key, value in setting.items() if key != "preset"}
    known = (*algorithm.objective.params, *_COMMON)
    problems = [_unknown(algorithm.preset, key, known) for key in overrides if key not in known]
    problems += [
        f"{key}: got {value!r}; expected {_expected(key)}"
        for key, value in overrides.items()
        if key in known and not _is_valid(key, value)
    ]
    if problems:
        raise InvalidRequest(*problems)
    numbers = {key: cast(float, value) for key, value in overrides.items()}
    common = {key: kind(numbers[key]) for key, kind in _COMMON.items() if key in numbers}
    params = {
        key: float(numbers.get(key, default)) for key, default in algorithm.objective.params.items()
    }
    if common.get("kl_coef"):
        params["kl_coef"] = common["kl_coef"]
    objective = Objective(name=algorithm.objective.name, params=params)
    return replace(algorithm, objective=objective, **common)


def _unknown(preset: str, key: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"unknown parameter {key!r} of {preset}; expected one of {', '.join(known)}{hint}"


def _is_valid(key: str, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return value >= 0 and (_COMMON.get(key) is not int or value == int(value))


def _expected(key: str) -> str:
    return "a whole number of at least 0" if _COMMON.get(key) is int else "a number of at least 0"
