"""Records for the tests of the store, and a look at all its rows."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from marlaas.store.db import Store
from marlaas.store.schema import METADATA
from marlaas.types import (
    AdapterSpec,
    Checkpoint,
    CheckpointKind,
    EvalRecord,
    Group,
    JobSpec,
    Operation,
    Run,
    Sampler,
    Session,
    StateKind,
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


def session_of(session_id: str = "s-1", **changes: object) -> Session:
    return replace(Session(session_id=session_id, metadata={"by": "me"}), **changes)


def run_of(seq: int = 0, session_id: str = "s-1", **changes: object) -> Run:
    run = Run(
        run_id=f"{session_id}:train:{seq}",
        session_id=session_id,
        seq=seq,
        base_model="tiny",
        spec=AdapterSpec(rank=8, alpha=32.0),
        optimizer={"type": "adamw"},
    )
    return replace(run, **changes)


def sampler_of(seq: int = 0, session_id: str = "s-1", **changes: object) -> Sampler:
    sampler = Sampler(
        sampler_id=f"{session_id}:sample:{seq}", session_id=session_id, seq=seq, base_model="tiny"
    )
    return replace(sampler, **changes)


RUN = run_of().run_id


def operation_of(
    seq: int, kind: str = "forward_backward", payload: bytes = b"data", **changes: object
) -> Operation:
    operation = Operation(
        run_id=RUN, seq=seq, kind=kind, request_id=f"op:{RUN}:{seq}", payload=payload
    )
    return replace(operation, **changes)


def with_run(store: Store, tenant: TenantId = ACME, seq: int = 0, session_id: str = "s-1") -> Run:
    """A session with a run that has been created."""
    store.add_session(tenant, session_of(session_id))
    run = run_of(seq, session_id)
    store.add_run(tenant, run)
    store.accept(tenant, operation_of(0, "create", run_id=run.run_id))
    return store.commit_run_step(
        tenant, run.run_id, 0,
        version=0, state_path=None, state_kind=StateKind.FRESH, adapter_hash="hash0",
    )  # fmt: skip


def write_run_state(store: Store, version: int, size: int = 5, tenant: TenantId = ACME) -> str:
    path = store.files.run_state(tenant, RUN, version)
    Path(path).write_bytes(b"s" * size)
    return path


def take_run_step(store: Store, seq: int, version: int, *, size: int = 5, **changes: object) -> Run:
    """Accept an optimizer step and commit it, with a state file."""
    store.accept(ACME, operation_of(seq, "optim_step"))
    step = {
        "version": version,
        "state_path": write_run_state(store, version, size),
        "state_kind": StateKind.SNAPSHOT,
        "adapter_hash": f"hash{version}",
        "result": b"stepped",
    }
    return store.commit_run_step(ACME, RUN, seq, **{**step, **changes})


def checkpoint_of(
    store: Store,
    name: str = "final",
    kind: CheckpointKind = CheckpointKind.SAMPLER,
    *,
    generation: int = 0,
    tenant: TenantId = ACME,
    run_id: str = RUN,
    size: int = 7,
    **changes: object,
) -> Checkpoint:
    """A checkpoint whose files are written."""
    files = store.files.checkpoint(tenant, run_id, kind, name, generation=generation).prepare()
    Path(files.adapter).mkdir(exist_ok=True)
    (Path(files.adapter) / "adapter_model.safetensors").write_bytes(b"a" * size)
    checkpoint = Checkpoint(
        run_id=run_id, kind=kind, name=name, version=1, adapter_hash=f"hash{generation}",
        folder=files.folder,
    )  # fmt: skip
    return replace(checkpoint, **changes)


def all_rows(store: Store) -> dict[str, list[tuple]]:
    """Return every row of every table, sorted."""
    return {
        table.name: sorted(
            (tuple(row) for row in store._rows(table.select(), {})), key=lambda row: repr(row)
        )
        for table in METADATA.sorted_tables
    }
