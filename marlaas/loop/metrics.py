"""One flat row per optimizer step, computed from what was consumed and what the trainer said.

`docs/metrics.md` describes every column. Nothing here decides anything: the loop hands over a
step's groups and outputs, and gets numbers back. Columns with nothing to average are NaN.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from marlaas.types import Datum, DatumOutput, Group, Objective, Trajectory

NAN = float("nan")


def of_groups(groups: Sequence[Group], *, version: int, dropped: Mapping[int, str]) -> dict:
    """Describe the groups that a step at trainer version `version` consumed."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    judged = [trajectory for trajectory in trajectories if trajectory.end.is_trainable]
    rewards = np.array([trajectory.reward for trajectory in judged])
    lags = [
        version - trajectory.min_version
        for trajectory in trajectories
        if trajectory.min_version is not None
    ]
    sampled = [int(np.count_nonzero(trajectory.loss_mask)) for trajectory in trajectories]
    row = {
        "reward_mean": _mean(rewards),
        "reward_std": float(rewards.std()) if len(rewards) else NAN,
        "success": _mean([trajectory.is_success for trajectory in judged]),
        "staleness_mean": _mean(lags),
        "staleness_max": float(max(lags, default=NAN)),
        "groups_zero_variance": float(list(dropped.values()).count("zero_variance")),
        "groups_dropped": float(len(dropped)),
        "tokens_sampled": float(sum(sampled)),
        "completion_tokens_mean": _mean(sampled),
        "turns_mean": _mean([len(trajectory.turns) for trajectory in trajectories]),
        "truncated": _mean([trajectory.end == "truncated" for trajectory in judged]),
    }
    failures = Counter(t.end.value for t in trajectories if not t.end.is_trainable)
    row |= {f"failed/{kind}": float(count) for kind, count in failures.items()}
    return row | _of_environment(judged)


def _of_environment(judged: Sequence[Trajectory]) -> dict:
    values: dict[str, list[float]] = {}
    for trajectory in judged:
        for name, value in trajectory.metrics.items():
            values.setdefault(f"env/{name}", []).append(value)
    return {name: _mean(column) for name, column in values.items()}


def of_outputs(data: Sequence[Datum], outputs: Sequence[DatumOutput]) -> dict:
    """Describe how far the trained policy is from the ones that sampled, token by token.

    With log r = train logprob - sampling logprob of each trained token:
        k3 = mean(r - 1 - log r), an estimate of KL(sampling || train) that is never negative
        ess = (sum r)^2 / (n sum r^2), the share of tokens that carry the weighted sum
    """
    if not data:
        return {"tokens_trained": 0.0} | dict.fromkeys(_OF_TRAINED_TOKENS, NAN)
    trained = np.concatenate([output.logprobs for output in outputs])
    sampled = np.concatenate([datum.sampling_logprobs for datum in data])
    is_trained = np.concatenate([datum.weights for datum in data]) != 0
    log_ratio = (trained - sampled)[is_trained].astype(np.float64)
    num_tokens = len(log_ratio)
    ratio = np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    has_reference = data[0].reference_logprobs is not None
    counts = _sums(outputs)
    return {
        "tokens_trained": float(num_tokens),
        "loss": float(sum(output.loss for output in outputs)),
        "log_ratio_mean": _mean(np.abs(log_ratio)),
        "log_ratio_max": float(np.abs(log_ratio).max(initial=0.0)),
        "k3": _mean(ratio - 1 - log_ratio),
        "ess": float(ratio.sum() ** 2 / (num_tokens * (ratio**2).sum())),
        "masked_fraction": counts["masked"] / num_tokens,
        "clipped_fraction": (counts["clipped"] + counts["capped"]) / num_tokens,
        "reference_kl": counts["reference_kl"] / num_tokens if has_reference else NAN,
    }


def of_pass(
    data: Sequence[Datum],
    outputs: Sequence[DatumOutput],
    objective: Objective,
    *,
    is_forward_only: bool,
) -> dict[str, float]:
    """Describe one call of a client as `name:reduction`: chunks of a batch are put together by the
    client, sums added, means weighted, maxima taken.

    A call that only scores has no loss from the trainer: that of `cross_entropy` follows from the
    logprobs, other objectives have none here.
    """
    is_trained = _joined([datum.weights for datum in data]) != 0
    trained = _joined([output.logprobs for output in outputs])
    row = {"tokens_trained:sum": float(np.count_nonzero(is_trained))}
    if not is_forward_only:
        row["loss:sum"] = float(sum(output.loss for output in outputs))
    elif objective.name == "cross_entropy":
        row["loss:sum"] = -float(np.dot(_joined([datum.weights for datum in data]), trained))
    row |= {f"{name}:sum": float(count) for name, count in _sums(outputs).items()}
    if objective.name != "cross_entropy" and is_trained.any():
        sampled = _joined([datum.sampling_logprobs for datum in data])
        log_ratio = (trained - sampled)[is_trained]
        ratio = np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        row["log_ratio_mean:mean"] = _mean(np.abs(log_ratio))
        row["log_ratio_max:max"] = float(np.abs(log_ratio).max())
        row["k3:mean"] = _mean(ratio - 1 - log_ratio)
    return row


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the cells of all arrays, one after another, in double precision."""
    cells = [array.ravel() for array in arrays] or [np.zeros(0)]
    return np.concatenate(cells).astype(np.float64)


def _sums(outputs: Sequence[DatumOutput]) -> Counter[str]:
    """Return the outputs' counts, added up by name."""
    sums: Counter[str] = Counter()
    for output in outputs:
        sums.update(output.counts)
    return sums


_OF_TRAINED_TOKENS = (
    "loss",
    "log_ratio_mean",
    "log_ratio_max",
    "k3",
    "ess",
    "masked_fraction",
    "clipped_fraction",
    "reference_kl",
)

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to it before exp: one broken token gives a number and no overflow."""


def of_gap(gaps: Sequence[float]) -> dict:
    """Describe |train - sampling logprob| of re-scored tokens, both under one version."""
    return {"gap_mean": _mean(gaps), "gap_max": float(max(gaps, default=NAN))}


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else NAN
