"""History: numbered without gaps, told after the commit, resumable."""

import threading
from pathlib import Path

import pytest

from marlaas.store.db import Store
from marlaas.store.events import MAX_LOG_EVENTS
from marlaas.types import EventKind, JobState, TenantId
from tests.store.records import ACME, OTHER, record_of, spec_of


def test_lines_are_numbered_by_tenant_and_resume_behind_a_number(store: Store) -> None:
    for tenant in (ACME, OTHER):
        store.add_job(tenant, spec_of(tenant))
    assert store.add_event(ACME, "sums", EventKind.LOG, {"text": "hello"}) == 2
    assert store.add_event(OTHER, "sums", EventKind.LOG, {"text": "there"}) == 2
    assert store.add_event(ACME, "", EventKind.NOTICE, {"stage": "store"}) == 3
    assert [line.seq for line in store.events(ACME)] == [1, 2, 3]
    assert [line.seq for line in store.events(ACME, after=1, limit=1)] == [2]
    assert [line.seq for line in store.events(ACME, job="sums")] == [1, 2]
    assert (store.last_event(ACME), store.last_event(OTHER)) == (3, 2)
    assert store.last_event(TenantId("nobody")) == 0
    line = store.events(ACME, after=1)[0]
    assert (line.job, line.kind, line.data) == ("sums", EventKind.LOG, {"text": "hello"})


def test_a_call_that_fails_takes_no_number(store: Store) -> None:
    store.add_job(ACME, spec_of())
    with pytest.raises(AssertionError):
        store.commit_step(ACME, "sums", record_of(1, 5), dropped={})
    assert store.last_event(ACME) == 1
    store.commit_step(ACME, "sums", record_of(1), dropped={})
    assert [line.seq for line in store.events(ACME)] == [1, 2]


def test_whatever_tenant_code_prints_can_be_a_line(store: Store) -> None:
    text = "zero \0, half a letter \ud800, \N{SNOWMAN}"
    store.add_event(ACME, "sums", EventKind.LOG, {"text": text, "more": ["\udfff", 1.5, None]})
    data = store.events(ACME)[0].data
    assert data == {
        "text": "zero \N{REPLACEMENT CHARACTER}, half a letter ?, \N{SNOWMAN}",
        "more": ["?", 1.5, None],
    }


def test_listeners_hear_of_events_after_their_commit(store: Store, url: str | None) -> None:
    reader = Store(store.files.root, url=url)
    heard = []
    store.on_event = lambda tenant_id: heard.append((tenant_id, reader.last_event(tenant_id)))
    store.add_job(ACME, spec_of())
    store.set_job_state(ACME, "sums", JobState.RUNNING)
    store.open_group(ACME, "sums", 0, version=0)  # no event
    with pytest.raises(AssertionError):
        store.commit_step(ACME, "sums", record_of(1, 5), dropped={})
    store.add_job(OTHER, spec_of(OTHER))
    assert heard == [(ACME, 1), (ACME, 2), (OTHER, 1)]
    reader.close()


def test_two_processes_that_write_leave_no_gap(tmp_path: Path, url: str | None) -> None:
    """A threads' connection each stands for a process: the service, and an operator's command."""
    Store.open(tmp_path, url=url).close()

    def write() -> None:
        store = Store.open(tmp_path, url=url)
        for _ in range(50):
            store.add_event(ACME, "", EventKind.LOG, {"text": "x"})
        store.close()

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = Store.open(tmp_path, url=url)
    assert [line.seq for line in store.events(ACME)] == list(range(1, 151))
    store.close()


def test_only_the_newest_log_lines_of_a_job_are_kept_and_numbers_have_no_gap(store: Store) -> None:
    store.add_job(ACME, spec_of())
    before = store.stored_bytes(ACME)
    with store._transaction() as db:
        for _ in range(MAX_LOG_EVENTS + 10):
            store._write_event(db, ACME, "sums", EventKind.LOG, {"text": "x" * 100})
        store._write_event(db, ACME, "other", EventKind.LOG, {"text": "y"})
    lines = store.events(ACME, limit=5000)
    assert [line.seq for line in lines] == list(range(1, MAX_LOG_EVENTS + 13))
    kept = [line.seq for line in lines if line.kind is EventKind.LOG and line.job == "sums"]
    assert kept == list(range(12, MAX_LOG_EVENTS + 12))
    assert {(line.kind, line.job) for line in lines[1:11]} == {(EventKind.DELETED, "")}
    stored = store.stored_bytes(ACME) - before
    assert 100 * MAX_LOG_EVENTS < stored < 130 * MAX_LOG_EVENTS
    store.set_job_state(ACME, "sums", JobState.CANCELLED)
    store.delete_job(ACME, "sums")
    assert store.stored_bytes(ACME) < 100
