"""The train stage: one optimizer step of one policy, from finished groups to a step result.

    groups ─► advantages, weights ─► data ─► forward_backward ─► gap check ─► optim_step ─► outcome

- A group that could teach nothing is consumed with a reason; a step of only such groups moves the
  clock and not the weights.
- Nothing here is durable or visible: the controller commits the outcome, then publishes it. A step
  whose worker was lost is simply run again from its groups.
- The *gap* compares sampling and train logprobs under the version that sampled. It is rounding;
  past its bound the job's numbers are not to be trusted. The off-policy ratio is another thing.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from marlaas import runtime
from marlaas.errors import PolicyDiverged
from marlaas.loop import metrics
from marlaas.loop.algorithms import Algorithm
from marlaas.loop.concurrency import all_or_none
from marlaas.loop.policies import Policy
from marlaas.types import (
    BASE_VERSION,
    AdamParams,
    Datum,
    DatumOutput,
    Group,
    JobSpec,
    StepResult,
    Trajectory,
)

MAX_CALL_TOKENS = 16_384
"""Tokens of one `forward_backward` call: bounds a message; the worker cuts micro-batches itself."""

NUM_RESCORED = 2
"""Trajectories of a step whose gap is known at least. Those that the trained version itself sampled
are measured for nothing, by the training pass; others are scored again, if there are too few."""

ZERO_VARIANCE = "zero_variance"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a step trains on, and why it leaves out the rest."""

    data: list[Datum]
    trajectories: list[Trajectory]
    """What each datum was made from."""
    dropped: Mapping[int, str]
    """Group index -> reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one step did."""

    result: StepResult
    dropped: Mapping[int, str]
    is_vetoed: bool
    is_empty: bool
    metrics: Mapping[str, float]


async def train(
    policy: Policy,
    spec: JobSpec,
    algorithm: Algorithm,
    groups: Sequence[Group],
    *,
    gap_bound: float,
) -> Outcome:
    """Run the step that makes version `policy.version + 1`; it is neither committed nor live yet.

    Raises:
        PolicyDiverged: the gap is past its bound.
        WorkerLost: nothing happened; run it again once the policy has recovered.
    """
    version, policy_id = policy.version, spec.policy_id
    batch = make_batch(groups, spec, algorithm)
    accumulating = asyncio.create_task(_accumulate(policy, spec, algorithm, batch.data))
    is_fresh = [_is_of(trajectory, version) for trajectory in batch.trajectories]
    num_missing = NUM_RESCORED - sum(is_fresh)
    rescoring = asyncio.create_task(measure_gap(policy, spec, groups, num_missing))
    await all_or_none([accumulating, rescoring])
    (data, outputs), gaps = accumulating.result(), rescoring.result()
    for datum, output, fresh in zip(data, outputs, is_fresh, strict=True):
        if fresh:
            gaps += _gaps(output.logprobs, datum.sampling_logprobs, datum.weights != 0)
    if gaps and not np.max(gaps) <= gap_bound:  # NaN is past every bound
        raise PolicyDiverged(
            f"gap {np.max(gaps):.2e} is past its bound {gap_bound:.0e}: sampling and training "
            f"disagree about the same weights at step {version + 1}"
        )
    adam = AdamParams(
        lr=algorithm.lr_at(version + 1, spec.learning_rate),
        max_grad_norm=algorithm.max_grad_norm,
    )
    snapshot = policy.snapshot_path(version + 1)
    result = await policy.trainer.optim_step(policy_id, adam, snapshot)
    assert result.version == version + 1, f"the trainer made {result.version} after {version}"
    row = {
        **metrics.of_groups(groups, version=version, dropped=batch.dropped),
        **metrics.of_outputs(data, outputs),
        **metrics.of_gap(gaps),
        "grad_norm": result.grad_norm if data else 0.0,
        "lr": adam.lr,
    }
    return Outcome(
        result=result,
        dropped=batch.dropped,
        is_vetoed=result.is_vetoed,
        is_empty=not data,
        metrics=row,
    )


async def _accumulate(
    policy: Policy, spec: JobSpec, algorithm: Algorithm, data: Sequence[Datum]
) -> tuple[list[Datum], list[DatumOutput]]:
    """Accumulate the gradient of a step; return what was trained on and what came out."""
    trained: list[Datum] = []
    outputs: list[DatumOutput] = []
    for chunk in _chunks(data):
        if algorithm.kl_coef:
            references = await policy.trainer.forward(None, BASE_VERSION, chunk)
            chunk = [
                replace(datum, reference_logprobs=reference.logprobs)
                for datum, reference in zip(chunk, references, strict=True)
            ]
        trained += chunk
        outputs += await policy.trainer.forward_backward(spec.policy_id, chunk, algorithm.objective)
    return trained, outputs


def make_batch(groups: Sequence[Group], spec: JobSpec, algorithm: Algorithm) -> Batch:
    """Turn groups into training data: advantages per group, one normaliser for the whole step."""
    kept: list[tuple[Trajectory, float]] = []
    dropped: dict[int, str] = {}
    for group in groups:
        judged = [t for t in group.trajectories if t.end.is_trainable and t.loss_mask.any()]
        reward_n = np.array([trajectory.reward for trajectory in judged])
        if not judged:
            dropped[group.index] = _failure_of(group)
        elif not algorithm.keeps(reward_n):
            dropped[group.index] = ZERO_VARIANCE
        else:
            kept += zip(judged, algorithm.advantage(reward_n).tolist(), strict=True)
    if not kept:
        return Batch(data=[], trajectories=[], dropped=dropped)
    length_N = np.array([np.count_nonzero(trajectory.loss_mask) for trajectory, _ in kept])
    weight_N = algorithm.normaliser(length_N, spec.max_tokens)
    data = [
        _datum(trajectory, advantage, weight, spec.temperature)
        for (trajectory, advantage), weight in zip(kept, weight_N.tolist(), strict=True)
    ]
    return Batch(data=data, trajectories=[one for one, _ in kept], dropped=dropped)


async def measure_gap(
    policy: Policy, spec: JobSpec, groups: Sequence[Group], num_wanted: int
) -> list[float]:
    """Score some of the step's trajectories again, each under the version that sampled it.

    Returns |train - sampling logprob| per token. Trajectories that saw several versions, or whose
    version is not live any more, cannot be compared and are left out.
    """
    if num_wanted <= 0:
        return []
    candidates = [
        trajectory
        for group in groups
        for trajectory in group.trajectories
        if _one_version(trajectory) and policy.is_live(trajectory.turns[0].version)
    ]
    if not candidates:
        return []
    rng = runtime.rng("gap", spec.seed, policy.version)
    picks = rng.choice(len(candidates), size=min(num_wanted, len(candidates)), replace=False)
    by_version: dict[int, list[Trajectory]] = {}
    for pick in sorted(picks):
        trajectory = candidates[pick]
        by_version.setdefault(trajectory.turns[0].version, []).append(trajectory)
    gaps: list[float] = []
    for version, chosen in by_version.items():
        data = [_datum(trajectory, 0.0, 1.0, spec.temperature) for trajectory in chosen]
        outputs = await policy.trainer.forward(spec.policy_id, version, data)
        for trajectory, output in zip(chosen, outputs, strict=True):
            sampled = trajectory.sampling_logprobs
            gaps += _gaps(output.logprobs, sampled, trajectory.loss_mask)
    return gaps


def _gaps(trained: np.ndarray, sampled: np.ndarray, where: np.ndarray) -> list[float]:
    return np.abs(trained - sampled)[where].tolist()


def _is_of(trajectory: Trajectory, version: int) -> bool:
    """Return whether one version, and this one, sampled all of a trajectory."""
    turns = trajectory.turns
    return bool(turns) and turns[0].version == version and _one_version(trajectory)


def _datum(trajectory: Trajectory, advantage: float, weight: float, temperature: float) -> Datum:
    on_sampled = trajectory.loss_mask.astype(np.float32)
    return Datum(
        tokens=trajectory.tokens,
        weights=on_sampled * np.float32(weight),
        advantages=on_sampled * np.float32(advantage),
        sampling_logprobs=trajectory.sampling_logprobs,
        temperature=temperature,
    )


def _one_version(trajectory: Trajectory) -> bool:
    sampled = trajectory.versions[trajectory.loss_mask]
    return len(sampled) > 0 and bool((sampled == sampled[0]).all())


def _failure_of(group: Group) -> str:
    """Return the most frequent way in which a group's trajectories failed."""
    return Counter(trajectory.end.value for trajectory in group.trajectories).most_common(1)[0][0]


def _chunks(data: Sequence[Datum]) -> Iterator[list[Datum]]:
    """Yield runs of `data` of at most `MAX_CALL_TOKENS` tokens, at least one datum each."""
    chunk: list[Datum] = []
    num_tokens = 0
    for datum in data:
        if chunk and num_tokens + len(datum.tokens) > MAX_CALL_TOKENS:
            yield chunk
            chunk, num_tokens = [], 0
        chunk.append(datum)
        num_tokens += len(datum.tokens)
    if chunk:
        yield chunk
