"""The durable record: what is committed survives, what is half done does not exist."""

import inspect
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy.exc import IntegrityError

from marlaas.errors import Conflict, InvalidRequest, NotFound
from marlaas.store.db import CROSS_TENANT, GroupState, Store
from marlaas.store.files import Files
from marlaas.types import EvalRecord, Group, JobSpec, JobState, StepRecord, TenantId

ACME, OTHER = TenantId("acme"), TenantId("other")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def spec_of(tenant: TenantId, name: str = "sums", **changes: object) -> JobSpec:
    return replace(JobSpec(tenant=tenant, name=name, env={"family": "math"}), **changes)


def group_of(index: int, version: int = 0) -> Group:
    return Group(index=index, prompt_index=index, version=version, trajectories=())


def record_of(step: int, *groups: int) -> StepRecord:
    return StepRecord(
        step=step, group_indices=groups, adapter_hash=f"hash{step}", is_vetoed=False,
        is_empty=False, metrics={"reward_mean": 0.5}, elapsed_s=float(step),
    )  # fmt: skip


def with_finished(store: Store, tenant: TenantId, *indices: int) -> None:
    for index in indices:
        store.open_group(tenant, "sums", index, version=0)
        store.finish_group(tenant, "sums", group_of(index))


def test_submitting_the_same_job_again_changes_nothing(store: Store) -> None:
    assert store.add_job(ACME, spec_of(ACME))
    assert not store.add_job(ACME, spec_of(ACME))
    with pytest.raises(Conflict, match="other settings"):
        store.add_job(ACME, spec_of(ACME, steps=3))


def test_a_foreign_job_and_a_missing_job_look_alike(store: Store) -> None:
    store.add_job(ACME, spec_of(ACME))
    with pytest.raises(NotFound) as foreign:
        store.job(OTHER, "sums")
    with pytest.raises(NotFound) as missing:
        Store(store.files.root / "empty").job(OTHER, "sums")
    assert str(foreign.value) == str(missing.value)


def test_two_tenants_may_use_the_same_names(store: Store) -> None:
    for tenant in (ACME, OTHER):
        store.add_job(tenant, spec_of(tenant))
    with_finished(store, ACME, 0)
    with_finished(store, OTHER, 0, 1)
    assert [row.index for row in store.groups(ACME, "sums")] == [0]
    assert [row.index for row in store.groups(OTHER, "sums")] == [0, 1]
    assert [row.spec.tenant for row in store.all_jobs()] == [ACME, OTHER]


def test_a_step_moves_record_groups_version_and_cursor_together(store: Store) -> None:
    store.add_job(ACME, spec_of(ACME))
    with_finished(store, ACME, 0, 1, 2)
    store.add_first_version(ACME, "sums", "hash0")
    store.commit_step(ACME, "sums", record_of(1, 0, 1), dropped={1: "zero_variance"})
    assert store.job(ACME, "sums").step == 1
    assert [(row.state, row.reason, row.step) for row in store.groups(ACME, "sums")] == [
        (GroupState.TRAINED, "", 1),
        (GroupState.DROPPED, "zero_variance", 1),
        (GroupState.FINISHED, "", None),
    ]
    assert store.consumed_groups(ACME, "sums") == [0, 1]
    assert store.steps(ACME, "sums") == [record_of(1, 0, 1)]
    assert [(row.version, row.has_state) for row in store.versions(ACME, "sums")] == [
        (0, False),
        (1, True),
    ]


def test_a_step_that_takes_a_group_twice_leaves_no_trace(store: Store) -> None:
    store.add_job(ACME, spec_of(ACME))
    with_finished(store, ACME, 0, 1)
    store.commit_step(ACME, "sums", record_of(1, 0), dropped={})
    with pytest.raises(AssertionError, match="took a group twice"):
        store.commit_step(ACME, "sums", record_of(2, 0, 1), dropped={})
    assert store.job(ACME, "sums").step == 1
    assert [row.index for row in store.groups(ACME, "sums", GroupState.FINISHED)] == [1]


def test_steps_cannot_be_skipped(store: Store) -> None:
    store.add_job(ACME, spec_of(ACME))
    with pytest.raises(AssertionError, match="not the next one"):
        store.commit_step(ACME, "sums", record_of(2), dropped={})


def test_a_finished_group_cannot_be_finished_or_reopened(store: Store) -> None:
    store.add_job(ACME, spec_of(ACME))
    with_finished(store, ACME, 0)
    with pytest.raises(AssertionError, match="not open"):
        store.finish_group(ACME, "sums", group_of(0))
    store.open_group(ACME, "sums", 0, version=9)
    assert store.groups(ACME, "sums")[0].version == 0


def test_committed_state_survives_a_kill(tmp_path: Path) -> None:
    first = Store(tmp_path)
    first.add_job(ACME, spec_of(ACME))
    with_finished(first, ACME, 0)
    first._connection.exec_driver_sql("BEGIN IMMEDIATE")
    first._connection.exec_driver_sql("UPDATE jobs SET step = 99")
    second = sqlite3.connect(tmp_path / "store.db")  # a kill is a reader that never hears COMMIT
    assert second.execute("SELECT step FROM jobs").fetchone() == (0,)
    assert second.execute("SELECT state FROM groups").fetchone() == ("finished",)


def test_impossible_states_are_refused_by_the_schema(store: Store) -> None:
    store.add_job(ACME, spec_of(ACME))
    with pytest.raises(IntegrityError):
        store._connection.exec_driver_sql("UPDATE jobs SET state = 'asleep'")
    with pytest.raises(IntegrityError):
        store._connection.exec_driver_sql(
            "INSERT INTO groups (tenant_id, job, idx, state, version) "
            "VALUES ('acme', 'sums', 0, 'trained', 0)"
        )


def test_evaluations_and_states_come_back(store: Store) -> None:
    store.add_job(ACME, spec_of(ACME))
    record = EvalRecord(
        version=0, success=0.5, reward=0.25, num_prompts=4, num_failed=1, elapsed_s=1.0
    )
    store.add_evaluation(ACME, "sums", record)
    store.set_job_state(ACME, "sums", JobState.RUNNING)
    store.set_job_state(ACME, "sums", JobState.HELD, "gap 0.1")
    assert store.evaluations(ACME, "sums") == [record]
    assert (store.job(ACME, "sums").state, store.job(ACME, "sums").reason) == ("held", "gap 0.1")


def test_adapters_outside_the_kept_set_are_deleted(store: Store) -> None:
    store.add_job(ACME, spec_of(ACME))
    store.add_first_version(ACME, "sums", "hash0")
    for version in (0, 1, 2):
        if version:
            store.commit_step(ACME, "sums", record_of(version), dropped={})
        files = store.files.version(ACME, "sums", version).prepare()
        Path(files.adapter).mkdir()
        store.keep_adapter(ACME, "sums", version)
    store.prune_adapters(ACME, "sums", {0, 2})
    assert [row.version for row in store.versions(ACME, "sums") if row.has_adapter] == [0, 2]
    on_disk = sorted(path.name for path in (store.files.job(ACME, "sums") / "versions").iterdir())
    assert on_disk == ["v000000", "v000002"]


def test_only_the_newest_state_snapshot_is_kept(store: Store) -> None:
    store.add_job(ACME, spec_of(ACME))
    for step in (1, 2):
        Path(store.files.version(ACME, "sums", step).prepare().state).write_bytes(b"x")
        store.commit_step(ACME, "sums", record_of(step), dropped={})
    assert not Path(store.files.version(ACME, "sums", 1).state).exists()
    assert Path(store.files.version(ACME, "sums", 2).state).exists()


@pytest.mark.parametrize("name", ["..", "a/b", "", ".hidden", "a\0b", "a b", "x" * 200])
def test_names_cannot_leave_their_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest):
        Files(tmp_path).job(ACME, name)
    with pytest.raises(InvalidRequest):
        Files(tmp_path).job(TenantId(name), "job")


def test_every_public_function_takes_the_tenant_first() -> None:
    for name, function in inspect.getmembers(Store, inspect.isfunction):
        if not name.startswith("_") and name not in CROSS_TENANT:
            assert list(inspect.signature(function).parameters)[1] == "tenant_id", name
