"""Versions: which files are kept, and that rows and files agree."""

from pathlib import Path

import pytest

from marlaas import runtime
from marlaas.errors import Conflict, NotFound, StoreUnavailable
from marlaas.store.db import Store
from tests.store.records import (
    ACME,
    record_of,
    spec_of,
    take_steps,
    write_adapter,
    write_state,
)


@pytest.fixture
def job(store: Store) -> Store:
    """A store with a job at step 2, whose three adapters are kept."""
    store.add_job(ACME, spec_of())
    store.add_first_version(ACME, "sums", "hash0")
    write_adapter(store, 0)
    for step in (1, 2):
        take_steps(store, step)
        write_adapter(store, step)
    return store


def kept(store: Store) -> list[int]:
    return [row.version for row in store.versions(ACME, "sums") if row.has_adapter]


def test_adapters_outside_the_kept_set_are_deleted(job: Store) -> None:
    job.prune_adapters(ACME, "sums", {0, 2})
    assert kept(job) == [0, 2]
    on_disk = sorted(path.name for path in (job.files.job(ACME, "sums") / "versions").iterdir())
    assert on_disk == ["v000000", "v000002"]


def test_the_promoted_version_stays_whatever_the_kept_set_is(job: Store) -> None:
    assert job.promoted(ACME, "sums") is None
    job.promote(ACME, "sums", 1)
    job.prune_adapters(ACME, "sums", {2})
    assert kept(job) == [1, 2]
    assert job.promoted(ACME, "sums") == job.job(ACME, "sums").promoted == 1
    job.promote(ACME, "sums", 2)
    job.prune_adapters(ACME, "sums", {2})
    assert kept(job) == [2]
    with pytest.raises(Conflict, match="version 1 of job 'sums' is not kept"):
        job.promote(ACME, "sums", 1)
    with pytest.raises(NotFound, match="no version 7"):
        job.promote(ACME, "sums", 7)
    assert job.promoted(ACME, "sums") == 2


def test_a_version_may_be_kept_until_a_time(job: Store) -> None:
    now_s = runtime.wall_time_s()
    job.keep_until(ACME, "sums", 0, now_s + 1000)
    job.keep_until(ACME, "sums", 1, now_s - 1)
    job.prune_adapters(ACME, "sums", {2})
    assert kept(job) == [0, 2]
    assert next(row.expires_s for row in job.versions(ACME, "sums")) == now_s + 1000
    job.keep_until(ACME, "sums", 0, None)
    job.prune_adapters(ACME, "sums", {2})
    assert kept(job) == [2]


def test_only_the_newest_state_snapshot_is_kept(job: Store) -> None:
    assert not Path(job.files.version(ACME, "sums", 1).state).exists()
    assert Path(job.files.version(ACME, "sums", 2).state).exists()


def test_states_that_a_kill_left_behind_go_at_the_next_step(job: Store, url: str | None) -> None:
    left = write_state(job, 1)
    second = Store(job.files.root, url=url)
    write_state(second, 3)
    second.commit_step(ACME, "sums", record_of(3), dropped={})
    assert not left.exists()
    second.close()


def test_a_state_that_is_not_as_committed_is_found_out(job: Store) -> None:
    job.check_state(ACME, "sums", 2)
    path = Path(job.files.version(ACME, "sums", 2).state)
    path.write_bytes(b"stat")
    with pytest.raises(StoreUnavailable, match="version 2 of acme/sums is damaged: 4 bytes on"):
        job.check_state(ACME, "sums", 2)
    path.unlink()
    with pytest.raises(StoreUnavailable, match="0 bytes on disk, 5 committed"):
        job.check_state(ACME, "sums", 2)
    with job._transaction() as db:  # as it was before sizes were recorded
        db.exec_driver_sql("UPDATE versions SET state_bytes = 0")
    with pytest.raises(StoreUnavailable, match="0 bytes on disk, 0 committed"):
        job.check_state(ACME, "sums", 2)
    path.write_bytes(b"whatever")
    job.check_state(ACME, "sums", 2)
    with pytest.raises(NotFound, match="has no training state"):
        job.check_state(ACME, "sums", 1)


def test_stored_bytes_follow_what_is_kept(job: Store) -> None:
    history = sum(len(str(event.data)) for event in job.events(ACME))
    before = job.stored_bytes(ACME)
    assert 5 + 3 * 7 < before < 5 + 3 * 7 + 2 * history, "files, and what the history takes"
    job.prune_adapters(ACME, "sums", {2})
    assert job.stored_bytes(ACME) == before - 2 * 7
