"""What a step trains on, with which weights, and what its row of metrics says."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from marlaas.errors import PolicyDiverged
from marlaas.loop import metrics
from marlaas.loop.algorithms import resolve
from marlaas.loop.training import MAX_CALL_TOKENS, Batch, _chunks, make_batch, train
from marlaas.types import (
    Datum,
    DatumOutput,
    Group,
    JobSpec,
    StepResult,
    StopReason,
    Trajectory,
    TrajectoryEnd,
    Turn,
)

SPEC = JobSpec(tenant="acme", name="j", env={}, max_tokens=16, temperature=0.5)


def trajectory(
    index: int,
    reward: float,
    *,
    sampled: int = 4,
    version: int = 0,
    end: TrajectoryEnd = TrajectoryEnd.DONE,
    **metrics: float,
) -> Trajectory:
    """Three prompt tokens, then `sampled` tokens of one turn."""
    length = 3 + sampled
    mask = np.arange(length) >= 3
    turn = Turn(start=3, end=length, version=version, adapter_hash="h",
                stop_reason=StopReason.STOP_TOKEN)  # fmt: skip
    return Trajectory(
        index=index,
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        sampling_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        turns=(turn,) if sampled else (),
        messages=(),
        reward=reward,
        is_success=reward > 0.5,
        end=end,
        metrics=metrics,
    )


def group(index: int, *trajectories: Trajectory, version: int = 0) -> Group:
    return Group(index=index, prompt_index=index, version=version, trajectories=trajectories)


def batch_of(preset: str, *groups: Group) -> Batch:
    return make_batch(groups, SPEC, resolve({"preset": preset}))


def test_loss_falls_on_sampled_tokens_with_the_groups_advantage() -> None:
    batch = batch_of("dppo_tis", group(0, trajectory(0, 1.0), trajectory(1, 0.0, sampled=6)))
    first, second = batch.data
    assert np.flatnonzero(first.weights).tolist() == [3, 4, 5, 6]
    assert first.weights[3] == pytest.approx(1 / 10)
    assert first.advantages[3] == 0.5 and second.advantages[3] == -0.5
    assert first.advantages[0] == 0
    assert first.temperature == 0.5
    assert first.tokens.dtype == np.int32
    assert {a.dtype for a in (first.weights, first.advantages, first.sampling_logprobs)} == {
        np.dtype(np.float32)
    }
    assert first.reference_logprobs is None


def test_trajectories_without_a_verdict_enter_neither_data_nor_baseline() -> None:
    failed = trajectory(1, 99.0, end=TrajectoryEnd.TOOL_TIMEOUT)
    batch = batch_of("dppo_tis", group(0, trajectory(0, 1.0), failed, trajectory(2, 0.0)))
    assert [datum.advantages[3] for datum in batch.data] == [0.5, -0.5]


@pytest.mark.parametrize(
    ("preset", "is_kept"), [("dppo_tis", False), ("dapo", False), ("grpo", True), ("rloo", True)]
)
def test_groups_of_equal_rewards_are_dropped_where_the_preset_says_so(preset, is_kept) -> None:
    equal = group(7, trajectory(0, 1.0), trajectory(1, 1.0))
    batch = batch_of(preset, equal)
    assert bool(batch.data) == is_kept
    assert batch.dropped == ({} if is_kept else {7: "zero_variance"})


def test_a_group_that_failed_names_its_most_frequent_failure() -> None:
    ends = [TrajectoryEnd.SANDBOX_LOST, TrajectoryEnd.TOOL_TIMEOUT, TrajectoryEnd.TOOL_TIMEOUT]
    failed = group(3, *(trajectory(i, 0.0, end=end) for i, end in enumerate(ends)))
    for preset in ("dppo_tis", "grpo"):
        assert batch_of(preset, failed) == Batch(
            data=[], trajectories=[], dropped={3: "tool_timeout"}
        )


def test_one_normaliser_spans_all_groups_of_the_step() -> None:
    groups = [group(i, trajectory(0, 1.0), trajectory(1, 0.0, sampled=8)) for i in range(3)]
    total = sum(datum.weights.sum() for datum in batch_of("dppo_tis", *groups).data)
    assert total == pytest.approx(1.0)
    total = sum(datum.weights.sum() for datum in batch_of("grpo", *groups).data)
    assert total == pytest.approx(1.0)
    sums = [datum.weights.sum() for datum in batch_of("dr_grpo", *groups).data]
    np.testing.assert_allclose(sums, [4 / (6 * 16), 8 / (6 * 16)] * 3, rtol=1e-6)


def test_long_steps_are_sent_in_bounded_calls() -> None:
    long = Datum(
        tokens=np.zeros(MAX_CALL_TOKENS // 2 + 1, np.int32), weights=np.zeros(0),
        advantages=np.zeros(0), sampling_logprobs=np.zeros(0),
    )  # fmt: skip
    short = replace(long, tokens=np.zeros(1, np.int32))
    huge = replace(long, tokens=np.zeros(2 * MAX_CALL_TOKENS, np.int32))
    calls = list(_chunks([long, short, long, huge, short]))
    assert calls == [[long, short], [long], [huge], [short]]


def test_the_row_describes_groups() -> None:
    groups = [
        group(0, trajectory(0, 1.0, version=3, format=1.0), trajectory(1, 0.0, sampled=6, version=3,
              end=TrajectoryEnd.TRUNCATED, format=0.0)),
        group(1, trajectory(0, 0.0, version=5), trajectory(1, 0.0, version=5,
              end=TrajectoryEnd.TOOL_TIMEOUT)),
    ]  # fmt: skip
    row = metrics.of_groups(groups, version=6, dropped={1: "zero_variance"})
    assert row == pytest.approx({
        "reward_mean": 1 / 3, "reward_std": 2**0.5 / 3, "success": 1 / 3, "staleness_mean": 2.0,
        "staleness_max": 3.0, "groups_zero_variance": 1.0, "groups_dropped": 1.0,
        "tokens_sampled": 18.0, "completion_tokens_mean": 4.5, "turns_mean": 1.0,
        "truncated": 1 / 3, "failed/tool_timeout": 1.0, "env/format": 0.5,
    })  # fmt: skip


def test_the_row_keeps_off_policy_ratio_by_token() -> None:
    (datum,) = batch_of("grpo", group(0, trajectory(0, 1.0))).data
    ratios = np.array([1.0, 2.0, 0.5, 1.0])
    train = datum.sampling_logprobs.copy()
    train[3:] += np.log(ratios)
    train[:3] = -77.0
    counts = {"masked": 1.0, "capped": 2.0, "reference_kl": 0.5}
    output = DatumOutput(logprobs=train, loss=-0.25, counts=counts)
    row = metrics.of_outputs([replace(datum, reference_logprobs=train)], [output])
    assert row == pytest.approx({
        "tokens_trained": 4.0, "loss": -0.25, "log_ratio_mean": np.log(2) / 2,
        "log_ratio_max": np.log(2), "k3": (0 + (1 - np.log(2)) + (-0.5 + np.log(2)) + 0) / 4,
        "ess": ratios.sum() ** 2 / (4 * (ratios**2).sum()), "masked_fraction": 0.25,
        "clipped_fraction": 0.5, "reference_kl": 0.125,
    }, rel=1e-5)  # fmt: skip


def test_rows_of_nothing_are_nan_and_not_zero() -> None:
    row = metrics.of_groups([], version=0, dropped={}) | metrics.of_outputs([], [])
    assert np.isnan(row["reward_mean"]) and np.isnan(row["log_ratio_mean"])
    assert np.isnan(metrics.of_gap([])["gap_max"])


def test_one_broken_token_does_not_overflow_the_row() -> None:
    (datum,) = batch_of("grpo", group(0, trajectory(0, 1.0))).data
    output = DatumOutput(logprobs=datum.sampling_logprobs + np.float32(1e4), loss=0.0)
    row = metrics.of_outputs([datum], [output])
    assert np.isfinite(row["k3"]) and row["log_ratio_max"] == pytest.approx(1e4)


class EchoTrainer:
    """Answers every datum with its sampling logprobs, `gap` off; remembers what it scored again."""

    def __init__(self, gap: float) -> None:
        self.gap = gap
        self.scored: list[int] = []
        """Version of each trajectory that was scored again."""

    async def forward_backward(self, policy_id, data, objective) -> list[DatumOutput]:
        return [DatumOutput(logprobs=d.sampling_logprobs + self.gap, loss=0.0) for d in data]

    async def forward(self, policy_id, version, data) -> list[DatumOutput]:
        self.scored += [version] * len(data)
        return [DatumOutput(logprobs=d.sampling_logprobs + 2 * self.gap, loss=0.0) for d in data]

    async def optim_step(self, policy_id, adam, snapshot=None) -> StepResult:
        return StepResult(version=8, grad_norm=1.0, adapter_hash="h")


class PolicyAt7:
    """Version 7, of which 5 and later are live."""

    version = 7

    def __init__(self, trainer: EchoTrainer) -> None:
        self.trainer = trainer

    def is_live(self, version: int) -> bool:
        return version >= 5

    def snapshot_path(self, version: int) -> str:
        return f"state-{version}"


def step_on(versions: list[int], gap: float = 1e-5) -> tuple[EchoTrainer, dict[str, float]]:
    """Train on one group whose trajectories come from the given versions."""
    trainer = EchoTrainer(gap)
    members = [trajectory(idx, idx % 2, version=version) for idx, version in enumerate(versions)]
    outcome = asyncio.run(
        train(
            PolicyAt7(trainer),  # type: ignore[arg-type]
            SPEC,
            resolve({"preset": "grpo"}),
            [group(0, *members)],
            gap_bound=1e-3,
        )
    )
    return trainer, dict(outcome.metrics)


def test_the_training_pass_itself_measures_the_gap_of_fresh_trajectories() -> None:
    trainer, row = step_on([7, 7, 5, 5])
    assert trainer.scored == []
    assert row["gap_max"] == pytest.approx(1e-5, rel=0.1)


def test_old_trajectories_are_scored_again_under_their_own_version() -> None:
    trainer, row = step_on([6, 5, 6, 4])
    assert len(trainer.scored) == 2 and set(trainer.scored) <= {5, 6}, "4 is not live any more"
    assert row["gap_max"] == pytest.approx(2e-5, rel=0.1)
    assert len(step_on([7, 5, 5, 5])[0].scored) == 1, "one more is missing"


def test_a_gap_past_its_bound_stops_the_job_wherever_it_was_measured() -> None:
    for versions in ([7, 7], [6, 6]):
        with pytest.raises(PolicyDiverged, match="gap"):
            step_on(versions, gap=1e-2)
        with pytest.raises(PolicyDiverged, match="gap"):
            step_on(versions, gap=float("nan"))
