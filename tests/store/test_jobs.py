"""Jobs: accepted once, moved legally, counted, listed in order, deleted whole."""

import inspect
from pathlib import Path

import pytest
from sqlalchemy.exc import DBAPIError

from marlaas.errors import Conflict, InvalidRequest, NotFound
from marlaas.store.db import CROSS_TENANT, Store
from marlaas.store.files import Files
from marlaas.types import JOB_MOVES, EventKind, Fork, JobState, TenantId, Usage
from tests.store.records import (
    ACME,
    OTHER,
    all_rows,
    eval_of,
    group_of,
    spec_of,
    take_steps,
    with_finished,
    write_adapter,
)


def states_of(store: Store, job: str = "sums") -> list[str]:
    lines = store.events(ACME, job=job)
    return [str(line.data["state"]) for line in lines if line.kind is EventKind.STATE]


def test_submitting_the_same_job_again_changes_nothing(store: Store) -> None:
    assert store.add_job(ACME, spec_of())
    assert not store.add_job(ACME, spec_of())
    with pytest.raises(Conflict, match="other settings"):
        store.add_job(ACME, spec_of(steps=3))
    assert states_of(store) == ["queued"]


def test_an_idempotency_key_stands_for_one_job(store: Store) -> None:
    assert store.add_job(ACME, spec_of(), idempotency_key="k1")
    assert not store.add_job(ACME, spec_of(), idempotency_key="k1")
    with pytest.raises(Conflict, match="idempotency key 'k1' was used for another job"):
        store.add_job(ACME, spec_of(name="other"), idempotency_key="k1")
    assert store.add_job(ACME, spec_of(name="other"), idempotency_key="k2")
    assert store.add_job(OTHER, spec_of(OTHER), idempotency_key="k1")
    assert store.add_job(ACME, spec_of(name="third"))
    assert store.add_job(ACME, spec_of(name="fourth"))


def test_a_foreign_job_and_a_missing_job_look_alike(store: Store, tmp_path: Path) -> None:
    store.add_job(ACME, spec_of())
    with pytest.raises(NotFound) as foreign:
        store.job(OTHER, "sums")
    with pytest.raises(NotFound) as missing:
        Store(tmp_path / "empty").job(OTHER, "sums")
    assert str(foreign.value) == str(missing.value)


def test_two_tenants_may_use_the_same_names(store: Store) -> None:
    for tenant in (ACME, OTHER):
        store.add_job(tenant, spec_of(tenant))
    with_finished(store, ACME, 0)
    with_finished(store, OTHER, 0, 1)
    assert [row.index for row in store.groups(ACME, "sums")] == [0]
    assert [row.index for row in store.groups(OTHER, "sums")] == [0, 1]
    assert [row.spec.tenant for row in store.all_jobs()] == [ACME, OTHER]


def test_jobs_come_in_pages_in_the_order_of_acceptance(store: Store) -> None:
    names = ["c", "a", "d", "b"]
    for name in names:
        store.add_job(ACME, spec_of(name=name))
    store.set_job_state(ACME, "a", JobState.RUNNING)
    assert [row.spec.name for row in store.jobs(ACME)] == names
    assert [row.spec.name for row in store.jobs(ACME, limit=2)] == ["c", "a"]
    assert [row.spec.name for row in store.jobs(ACME, after="a", limit=1)] == ["d"]
    assert [row.spec.name for row in store.jobs(ACME, state=JobState.QUEUED)] == ["c", "d", "b"]
    assert store.jobs(ACME, after="b") == []
    with pytest.raises(NotFound, match="no job 'gone'"):
        store.jobs(ACME, after="gone")


def test_jobs_are_counted_by_state(store: Store) -> None:
    for name in ("a", "b", "c"):
        store.add_job(ACME, spec_of(name=name))
    store.set_job_state(ACME, "a", JobState.RUNNING)
    counts = store.job_counts(ACME)
    assert set(counts) == set(JobState)
    assert (counts[JobState.QUEUED], counts[JobState.RUNNING], sum(counts.values())) == (2, 1, 3)
    assert not any(store.job_counts(OTHER).values())


WAYS = {
    JobState.QUEUED: (),
    JobState.RUNNING: (JobState.RUNNING,),
    JobState.PAUSED: (JobState.PAUSED,),
    JobState.DONE: (JobState.RUNNING, JobState.DONE),
    JobState.HELD: (JobState.RUNNING, JobState.HELD),
    JobState.FAILED: (JobState.FAILED,),
    JobState.CANCELLED: (JobState.CANCELLED,),
}
"""How a new job gets into each state."""


def test_only_legal_moves_are_made_and_each_leaves_a_line(store: Store) -> None:
    for start, way in WAYS.items():
        for end in JobState:
            name = f"{start.value}-{end.value}"
            store.add_job(ACME, spec_of(name=name))
            for state in way:
                store.set_job_state(ACME, name, state)
            if end is start:
                store.set_job_state(ACME, name, end)
                assert states_of(store, name) == ["queued", *way]
            elif end in JOB_MOVES[start]:
                store.set_job_state(ACME, name, end, "because")
                assert store.job(ACME, name).state is end
                assert states_of(store, name) == ["queued", *way, end.value]
            else:
                with pytest.raises(Conflict, match=f"is {start.value}: it cannot become"):
                    store.set_job_state(ACME, name, end)
                assert states_of(store, name) == ["queued", *way]


def test_a_state_may_get_another_reason(store: Store) -> None:
    store.add_job(ACME, spec_of())
    for reason in ("the cap", "the tenant", "the tenant", "zero \0 and half \ud800 a letter"):
        store.set_job_state(ACME, "sums", JobState.PAUSED, reason)
    assert store.job(ACME, "sums").reason == "zero \N{REPLACEMENT CHARACTER} and half ? a letter"
    assert states_of(store) == ["queued", "paused", "paused", "paused"]


def test_a_foreign_job_cannot_be_moved(store: Store) -> None:
    store.add_job(ACME, spec_of())
    with pytest.raises(NotFound):
        store.set_job_state(OTHER, "sums", JobState.CANCELLED)


def test_impossible_states_are_refused_by_the_schema(store: Store) -> None:
    store.add_job(ACME, spec_of())
    for statement in (
        "UPDATE jobs SET state = 'asleep'",
        "UPDATE jobs SET step = -1",
        "INSERT INTO groups (tenant_id, job, idx, state, version) "
        "VALUES ('acme', 'sums', 0, 'trained', 0)",
        "INSERT INTO groups (tenant_id, job, idx, state, version) "
        "VALUES ('acme', 'nobody', 0, 'open', 0)",
        "INSERT INTO events (tenant_id, seq, at_s, job, kind, data) "
        "VALUES ('acme', 9, 0, '', 'rumour', '{}')",
        "INSERT INTO tenants (tenant_id, weight, quotas, created_s) VALUES ('b', 0, '{}', 0)",
        "INSERT INTO api_keys (tenant_id, key_id, role, label, digest, created_s) "
        "VALUES ('b', 'k', 'operator', '', 'd', 0)",
        "UPDATE jobs SET step = 'three'",
    ):
        with pytest.raises(DBAPIError), store._transaction() as db:
            db.exec_driver_sql(statement)


def test_a_deleted_job_leaves_nothing_but_what_it_used(store: Store) -> None:
    for name in ("sums", "stays"):
        store.add_job(ACME, spec_of(name=name), idempotency_key=name)
        with_finished(store, ACME, 0, 1, job=name)
        store.add_first_version(ACME, name, "hash0")
        write_adapter(store, 0, job=name)
        take_steps(store, 1, job=name)
        store.add_evaluation(ACME, name, eval_of(1), usage=Usage(evaluated_tokens=3))
        store.set_job_state(ACME, name, JobState.RUNNING)
    before, last = store.usage(ACME), store.last_event(ACME)
    bytes_of_one = store.stored_bytes(ACME) // 2
    with pytest.raises(Conflict, match="is running: pause or cancel it first"):
        store.delete_job(ACME, "sums")
    store.set_job_state(ACME, "sums", JobState.CANCELLED)
    with pytest.raises(NotFound):
        store.delete_job(OTHER, "sums")
    store.delete_job(ACME, "sums")

    assert [row.spec.name for row in store.jobs(ACME)] == ["stays"]
    rows = all_rows(store)
    for table in ("groups", "group_records", "steps", "evaluations", "versions"):
        assert rows[table] and {row[1] for row in rows[table]} == {"stays"}
    assert not store.files.job(ACME, "sums").exists()
    assert list((store.files.root / "trash").iterdir()) == []
    assert store.files.job(ACME, "stays").exists()
    assert store.usage(ACME) == before
    assert set(store.usage_by_job(ACME)) == {"", "stays"}
    assert store.stored_bytes(ACME) == bytes_of_one + len('{"job":"sums"}')
    lines = store.events(ACME)
    assert [line.seq for line in lines] == list(range(1, last + 3))
    assert (lines[-1].kind, lines[-1].data) == (EventKind.DELETED, {"job": "sums"})
    assert store.events(ACME, job="sums") == []


def test_a_job_may_come_again_after_it_was_deleted(store: Store) -> None:
    store.add_job(ACME, spec_of(), idempotency_key="k")
    with_finished(store, ACME, 0)
    store.set_job_state(ACME, "sums", JobState.CANCELLED)
    store.delete_job(ACME, "sums")
    left = store.files.version(ACME, "sums", 3).prepare()  # by a kill before files were deleted
    assert store.add_job(ACME, spec_of(steps=2), idempotency_key="k")
    assert store.groups(ACME, "sums") == []
    assert store.job(ACME, "sums").usage == Usage()
    assert states_of(store) == ["queued"]
    assert not left.folder.exists()


def test_a_job_stays_while_another_is_about_to_begin_from_it(store: Store) -> None:
    store.add_job(ACME, spec_of())
    store.set_job_state(ACME, "sums", JobState.CANCELLED)
    store.add_job(ACME, spec_of(name="next", fork=Fork(job="sums", version=0)))
    with pytest.raises(Conflict, match="'next' is about to begin from 'sums'"):
        store.delete_job(ACME, "sums")
    take_steps(store, 1, job="next")
    store.delete_job(ACME, "sums")


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


def test_no_function_finds_what_another_tenant_has(store: Store) -> None:
    store.add_job(ACME, spec_of())
    store.open_group(ACME, "sums", 0, version=0)
    store.add_first_version(ACME, "sums", "hash0")
    take_steps(store, 1)
    before = all_rows(store)
    for find in (
        lambda: store.group(OTHER, "sums", 0),
        lambda: store.promote(OTHER, "sums", 0),
        lambda: store.promoted(OTHER, "sums"),
        lambda: store.check_state(OTHER, "sums", 1),
        lambda: store.delete_job(OTHER, "sums"),
    ):
        with pytest.raises(NotFound):
            find()
    with pytest.raises(AssertionError, match="was not open"):
        store.finish_group(OTHER, "sums", group_of(0))
    for found in (
        store.jobs(OTHER), store.groups(OTHER, "sums"), store.group_page(OTHER, "sums"),
        store.steps(OTHER, "sums"), store.versions(OTHER, "sums"), store.events(OTHER),
        store.evaluations(OTHER, "sums"), store.consumed_groups(OTHER, "sums"),
        store.uploads(OTHER), store.keys(OTHER), store.usage_by_job(OTHER),
    ):  # fmt: skip
        assert not found
    assert all_rows(store) == before
