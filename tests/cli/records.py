"""Small records for the tests of the command line."""

import numpy as np

from marlaas.types import (
    EvalRecord,
    Group,
    JobSpec,
    Message,
    StepRecord,
    StopReason,
    TenantId,
    Trajectory,
    TrajectoryEnd,
    Turn,
    WorkerStats,
)


def make_spec(name: str = "sums", *, tenant: str = "acme", steps: int = 4) -> JobSpec:
    return JobSpec(tenant=TenantId(tenant), name=name, env={"family": "math"}, steps=steps)


def make_step(step: int, *, success: float = 0.5, **metrics: float) -> StepRecord:
    return StepRecord(
        step=step,
        group_indices=(step - 1,),
        adapter_hash=f"hash-{step}",
        is_vetoed=False,
        is_empty=False,
        metrics={"reward_mean": success, "success": success, "staleness_mean": 1.5, **metrics},
        elapsed_s=2.0 * step,
    )


def make_eval(version: int, success: float) -> EvalRecord:
    return EvalRecord(
        version=version,
        success=success,
        reward=success,
        num_prompts=64,
        num_failed=0,
        elapsed_s=1.0,
    )


def make_trajectory(
    index: int, *, end: TrajectoryEnd = TrajectoryEnd.DONE, versions: tuple[int, ...] = (2, 2, 2)
) -> Trajectory:
    """Three tokens of prompt, three that were sampled."""
    return Trajectory(
        index=index,
        tokens=np.array([5, 6, 7, 8, 9, 10], np.int32),
        loss_mask=np.array([False] * 3 + [True] * 3),
        sampling_logprobs=np.array([0, 0, 0, -0.1, -1 / 3, -2e-7], np.float32),
        versions=np.array([-1, -1, -1, *versions], np.int32),
        turns=(
            Turn(
                start=3,
                end=6,
                version=versions[0],
                adapter_hash="ab12",
                stop_reason=StopReason.STOP_TOKEN,
                latency_s=0.25,
            ),
        ),
        messages=(Message("user", "What is 3 + 4?"), Message("assistant", "It is 7 ✓.")),
        reward=1.0,
        is_success=True,
        end=end,
        detail="the tool took too long" if end is TrajectoryEnd.TOOL_TIMEOUT else "",
    )


def make_group(index: int, *trajectories: Trajectory) -> Group:
    return Group(
        index=index,
        prompt_index=index,
        version=2,
        trajectories=trajectories or (make_trajectory(0), make_trajectory(1)),
    )


def make_stats(name: str, **busy_s: float) -> WorkerStats:
    return WorkerStats(
        name=name,
        elapsed_s=100.0,
        busy_s=busy_s,
        tokens={},
        num_decoding=14,
        num_waiting=3,
        num_parked=5,
        kv_tokens=12_000,
        kv_capacity_tokens=65_536,
        rss_bytes=900_000_000,
    )
