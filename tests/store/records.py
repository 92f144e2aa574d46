"""Records for the tests of the store, and a look at all its rows."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from marlaas.store.db import Store
from marlaas.store.schema import METADATA
from marlaas.types import (
    EvalRecord,
    Group,
    JobSpec,
    StepRecord,
    StopReason,
    TenantId,
    Trajectory,
    TrajectoryEnd,
    Turn,
)

ACME, OTHER = TenantId("acme"), TenantId("other")


def spec_of(tenant: TenantId = ACME, name: str = "sums", **changes: object) -> JobSpec:
    return replace(JobSpec(tenant=tenant, name=name, env={"family": "math"}), **changes)


def trajectory_of(
    index: int = 0,
    *,
    turns: tuple[tuple[int, int], ...] = ((4, 9),),
    length: int = 10,
    reward: float = 0.0,
    end: TrajectoryEnd = TrajectoryEnd.DONE,
) -> Trajectory:
    """A trajectory whose tokens [start, end) of each turn were sampled."""
    mask = np.zeros(length, dtype=bool)
    for start, stop in turns:
        mask[start:stop] = True
    return Trajectory(
        index=index,
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        sampling_logprobs=np.zeros(length, dtype=np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        turns=tuple(
            Turn(start=start, end=stop, version=0, adapter_hash="ab",
                 stop_reason=StopReason.LENGTH)
            for start, stop in turns
        ),
        messages=(),
        reward=reward,
        is_success=reward > 0,
        end=end,
    )  # fmt: skip


def group_of(index: int, *trajectories: Trajectory, version: int = 0) -> Group:
    return Group(index=index, prompt_index=index, version=version, trajectories=trajectories)


def record_of(step: int, *groups: int) -> StepRecord:
    return StepRecord(
        step=step, group_indices=groups, adapter_hash=f"hash{step}", is_vetoed=False,
        is_empty=False, metrics={"reward_mean": 0.5}, elapsed_s=float(step),
    )  # fmt: skip


def eval_of(version: int, success: float = 0.5) -> EvalRecord:
    return EvalRecord(
        version=version, success=success, reward=0.25, num_prompts=4, num_failed=1, elapsed_s=1.0
    )


def with_finished(store: Store, tenant: TenantId, *indices: int, job: str = "sums") -> None:
    for index in indices:
        store.open_group(tenant, job, index, version=0)
        store.finish_group(tenant, job, group_of(index, trajectory_of(reward=float(index % 2))))


def write_state(store: Store, step: int, content: bytes = b"state", job: str = "sums") -> Path:
    path = Path(store.files.version(ACME, job, step).prepare().state)
    path.write_bytes(content)
    return path


def write_adapter(store: Store, version: int, size: int = 7, job: str = "sums") -> Path:
    """Write an adapter folder as a worker does, and tell the store."""
    folder = Path(store.files.version(ACME, job, version).prepare().adapter)
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"a" * size)
    store.keep_adapter(ACME, job, version)
    return folder


def take_steps(store: Store, *steps: int, job: str = "sums") -> None:
    """Commit steps with a state file each, that take no group."""
    for step in steps:
        write_state(store, step, job=job)
        store.commit_step(ACME, job, record_of(step), dropped={})


def all_rows(store: Store) -> dict[str, list[tuple]]:
    """Return every row of every table, sorted."""
    return {
        table.name: sorted(
            (tuple(row) for row in store._rows(table.select(), {})), key=lambda row: repr(row)
        )
        for table in METADATA.sorted_tables
    }
