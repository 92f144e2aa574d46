"""Sessions, runs and samplers: made once, found by their owner only, ended when nobody is there."""

from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy.exc import DBAPIError

from marlaas import runtime
from marlaas.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded, StoreUnavailable
from marlaas.store.db import Store
from marlaas.store.runs import EMPTY_SESSION_KEPT_S, IDLE_RUN_S, STATE_KEPT_S
from marlaas.types import AdapterSpec, CheckpointKind, Session, StateKind
from tests.store.records import (
    ACME,
    OTHER,
    RUN,
    all_rows,
    checkpoint_of,
    operation_of,
    run_of,
    sampler_of,
    session_of,
    take_run_step,
    with_run,
)


class Clock:
    """A wall clock that stands until it is moved."""

    now_s = 1796083200.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(runtime, "wall_time_s", clock)
    return clock


def test_a_session_comes_back_as_it_was(store: Store, clock: Clock) -> None:
    session = session_of(tags=("a", "b"), project_id="p", display_name="zero \0")
    store.add_session(ACME, session)
    store.add_session(ACME, session)
    stored = store.session(ACME, "s-1")
    assert stored == replace(
        session,
        display_name="zero \N{REPLACEMENT CHARACTER}",
        created_s=clock.now_s,
        seen_s=clock.now_s,
    )
    clock.now_s += 10.0
    store.touch_session(ACME, "s-1")
    store.update_session(ACME, "s-1", project_id="q")
    touched = store.session(ACME, "s-1")
    assert (touched.seen_s, touched.created_s) == (clock.now_s, stored.created_s)
    assert (touched.project_id, touched.display_name) == ("q", stored.display_name)


def test_a_session_id_belongs_to_one_tenant(store: Store) -> None:
    store.add_session(ACME, session_of())
    with pytest.raises(Conflict, match="session id 's-1' is taken"):
        store.add_session(OTHER, session_of())
    with pytest.raises(Conflict, match="is taken"):
        store.add_session(ACME, session_of(metadata={}))
    with pytest.raises(NotFound):
        store.session(OTHER, "s-1")


def test_the_first_word_about_a_sessions_end_holds(store: Store, clock: Clock) -> None:
    store.add_session(ACME, session_of())
    store.finish_session(ACME, "s-1", "success")
    ended = store.session(ACME, "s-1")
    clock.now_s += 5.0
    store.finish_session(ACME, "s-1", "interrupted")
    assert store.session(ACME, "s-1") == ended
    assert (ended.end_reason, ended.finished_s) == ("success", clock.now_s - 5.0)


def test_sessions_come_in_pages_newest_first(store: Store, clock: Clock) -> None:
    for number in range(5):
        store.add_session(ACME, session_of(f"s-{number}"))
        clock.now_s += 1.0

    def ids(found: list[Session]) -> list[str]:
        return [session.session_id for session in found]

    assert ids(store.sessions(ACME)) == ["s-4", "s-3", "s-2", "s-1", "s-0"]
    assert ids(store.sessions(ACME, limit=2, offset=1)) == ["s-3", "s-2"]
    assert store.sessions(OTHER) == []


def test_a_run_is_made_once(store: Store) -> None:
    store.add_session(ACME, session_of())
    run = run_of(metadata={"renderer_name": "plain"})
    assert store.add_run(ACME, run)
    assert not store.add_run(ACME, run)
    stored = store.run(ACME, RUN)
    assert replace(stored, created_s=0.0, used_s=0.0) == run
    for other in (
        {"spec": AdapterSpec(rank=16)}, {"base_model": "large"}, {"metadata": {}},
        {"optimizer": {}}, {"run_id": "s-1:train:7"}, {"seq": 1},
    ):  # fmt: skip
        with pytest.raises(Conflict, match="was made with other settings"):
            store.add_run(ACME, replace(run, **other))
    assert store.runs(ACME) == ([stored], 1)


def test_a_run_belongs_to_a_session_of_its_tenant(store: Store) -> None:
    store.add_session(ACME, session_of())
    store.add_session(OTHER, session_of("s-2"))
    with pytest.raises(NotFound, match="no session 's-3'"):
        store.add_run(ACME, run_of(session_id="s-3"))
    with pytest.raises(NotFound, match="no session 's-1'"):
        store.add_run(OTHER, run_of())
    store.add_run(ACME, run_of())
    with pytest.raises(Conflict):
        store.add_run(OTHER, run_of(session_id="s-2", run_id=RUN))


def test_no_id_of_a_run_is_there_under_two_tenants(store: Store) -> None:
    with_run(store)
    store.add_session(OTHER, session_of("s-2"))
    with pytest.raises(DBAPIError), store._transaction() as db:
        db.exec_driver_sql(
            "INSERT INTO runs (tenant_id, session_id, run_id, seq, base_model, spec, metadata, "
            f"optimizer, created_s, used_s) SELECT 'other', 's-2', '{RUN}', 0, base_model, spec, "
            "metadata, optimizer, created_s, used_s FROM runs"
        )


def test_runs_come_in_pages_by_session(store: Store, clock: Clock) -> None:
    for session_id in ("s-1", "s-2"):
        store.add_session(ACME, session_of(session_id))
        for seq in range(3):
            store.add_run(ACME, run_of(seq, session_id))
        clock.now_s += 1.0
    page, total = store.runs(ACME, limit=4, offset=1)
    assert ([run.run_id for run in page], total) == (
        ["s-2:train:1", "s-2:train:0", "s-1:train:2", "s-1:train:1"], 6,
    )  # fmt: skip
    page, total = store.runs(ACME, session_id="s-1")
    assert ([run.seq for run in page], total) == ([2, 1, 0], 3)
    assert store.runs(OTHER) == ([], 0)


def test_so_many_runs_may_be_at_work(store: Store, clock: Clock) -> None:
    store.add_session(ACME, session_of())
    for seq in range(2):
        store.add_run(ACME, run_of(seq), max_live=2)
    with pytest.raises(QuotaExceeded, match="2 runs are at work, and 2 may be"):
        store.add_run(ACME, run_of(2), max_live=2)
    assert not store.add_run(ACME, run_of(1), max_live=2)
    assert (store.num_live_runs(ACME), store.num_live_runs(OTHER)) == (2, 0)
    clock.now_s += IDLE_RUN_S
    assert store.num_live_runs(ACME) == 0
    store.touch_session(ACME, "s-1")
    assert store.num_live_runs(ACME) == 2
    store.finish_session(ACME, "s-1", "success")
    assert store.num_live_runs(ACME) == 0


def test_a_list_of_runs_says_what_each_holds_and_waits_for(store: Store, clock: Clock) -> None:
    run = with_run(store)
    saved = store.add_checkpoint(ACME, checkpoint_of(store))
    store.accept(ACME, operation_of(1, "forward"))
    clock.now_s += 1.0
    store.add_session(ACME, session_of("s-2"))
    store.add_run(ACME, run_of(session_id="s-2"))
    store.finish_session(ACME, "s-2", "success")
    newest, first = store.run_rows(ACME)
    assert (newest.run.session_id, newest.is_live, newest.num_checkpoints) == ("s-2", False, 0)
    assert newest.stored_bytes == 0
    assert (first.run.run_id, first.is_live, first.num_checkpoints) == (run.run_id, True, 1)
    assert first.num_waiting >= 1 and first.stored_bytes >= saved.size_bytes > 0
    assert first.stored_bytes == store.stored_bytes(ACME)
    assert [row.run.run_id for row in store.run_rows(ACME, limit=1, offset=1)] == [run.run_id]
    assert store.run_rows(OTHER) == []


def test_what_a_run_begins_from_is_its_own(store: Store) -> None:
    with_run(store)
    source = store.add_checkpoint(ACME, checkpoint_of(store))
    store.add_session(OTHER, session_of("s-2"))
    run = run_of(session_id="s-2")
    store.add_run(OTHER, run)
    store.accept(OTHER, operation_of(0, "create", run_id=run.run_id))
    moved = store.commit_run_step(
        OTHER, run.run_id, 0, version=0, state_path=str(source.folder / "adapter"),
        state_kind=StateKind.ADAPTER, adapter_hash="hash",
    )  # fmt: skip
    assert moved.state_path == store.files.run_state(OTHER, run.run_id, 0)
    assert store.stored_bytes(OTHER) == 7
    store.delete_checkpoint(ACME, RUN, source.kind, source.name)
    assert (Path(moved.state_path or "") / "adapter_model.safetensors").read_bytes() == b"a" * 7
    for missing, error in (
        (str(source.folder / "adapter"), NotFound),
        ("v000001", StoreUnavailable),
    ):
        path = missing if "/" in missing else store.files.run_state(OTHER, run.run_id, 1)
        with pytest.raises(error):
            store.commit_run_step(
                OTHER, run.run_id, 1, version=1, state_path=path,
                state_kind=StateKind.ADAPTER, adapter_hash="hash",
            )  # fmt: skip


def test_the_state_of_an_abandoned_run_goes_and_its_checkpoints_stay(
    store: Store, clock: Clock
) -> None:
    with_run(store)
    take_run_step(store, 1, 1)
    store.add_checkpoint(ACME, checkpoint_of(store))
    clock.now_s += STATE_KEPT_S
    store.touch_session(ACME, "s-1")
    assert store.drop_expired() == 0
    store.finish_session(ACME, "s-1", "success")
    store.accept(ACME, operation_of(2, "forward"))
    clock.now_s += STATE_KEPT_S
    assert store.drop_expired() == 0
    store.finish_operation(ACME, RUN, 2)
    clock.now_s += STATE_KEPT_S
    assert store.drop_expired() == 1
    assert store.drop_expired() == 0
    run = store.run(ACME, RUN)
    assert (run.ended_s, run.state_path, run.version) == (clock.now_s, None, 1)
    assert not (store.files.run(ACME, RUN) / "states").exists()
    assert all_rows(store)["operations"] == []
    assert store.stored_bytes(ACME) == 7
    assert store.checkpoints(ACME)[1] == 1
    with pytest.raises(Conflict, match="ended, its training state is gone: begin another one"):
        store.accept(ACME, operation_of(3))


def test_sessions_that_left_nothing_go_and_are_bounded(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_run(store)
    for name in ("s-empty", "s-sampled"):
        store.add_session(ACME, Session(session_id=name))
        sampler = replace(sampler_of(), session_id=name, sampler_id=f"{name}:sample:0", seq=0)
        store.add_sampler(ACME, replace(sampler, checkpoint_path=None))
    clock.now_s += EMPTY_SESSION_KEPT_S + 1
    store.use_sampler(ACME, "s-sampled:sample:0")
    store.drop_expired()
    left = {session.session_id for session in store.sessions(ACME)}
    assert left == {"s-1", "s-sampled"}
    with pytest.raises(NotFound):
        store.sampler(ACME, "s-empty:sample:0")
    monkeypatch.setattr("marlaas.store.sessions.MAX_SESSIONS", len(left))
    with pytest.raises(QuotaExceeded):
        store.add_session(ACME, Session(session_id="s-more"))
    store.add_session(OTHER, Session(session_id="s-theirs"))


def test_a_sampler_is_made_once(store: Store, clock: Clock) -> None:
    store.add_session(ACME, session_of())
    sampler = sampler_of(checkpoint_path=f"tinker://{RUN}/sampler_weights/final")
    stored = store.add_sampler(ACME, sampler)
    assert stored == replace(sampler, created_s=clock.now_s, used_s=clock.now_s)
    clock.now_s += 1.0
    assert store.add_sampler(ACME, sampler) == store.sampler(ACME, sampler.sampler_id) == stored
    for other in (
        {"checkpoint_path": None},
        {"base_model": "large"},
        {"sampler_id": "s-1:sample:9"},
    ):
        with pytest.raises(Conflict, match="is another one"):
            store.add_sampler(ACME, replace(sampler, **other))
    store.add_sampler(ACME, sampler_of(1))
    assert [one.seq for one in store.samplers(ACME, "s-1")] == [0, 1]
    assert store.use_sampler(ACME, sampler.sampler_id).used_s == clock.now_s


STRANGE = ["..", "a/b", "", ".hidden", "a\0b", "a b", "\ud800", "x" * 200]


@pytest.mark.parametrize("name", STRANGE)
def test_strange_ids_find_nothing(store: Store, name: str) -> None:
    for find in (
        lambda: store.session(ACME, name),
        lambda: store.finish_session(ACME, name, ""),
        lambda: store.run(ACME, name),
        lambda: store.sampler(ACME, name),
        lambda: store.use_sampler(ACME, name),
        lambda: store.operation(ACME, name, 1),
        lambda: store.accept(ACME, operation_of(1, run_id=name)),
        lambda: store.checkpoint(ACME, name, CheckpointKind.WEIGHTS, name),
    ):
        with pytest.raises(NotFound):
            find()
    assert store.runs(ACME, session_id=name)[1] == store.checkpoints(ACME, name)[1] == 0


@pytest.mark.parametrize("number", [-1, 2**63])
def test_numbers_that_cannot_be_are_refused(store: Store, number: int) -> None:
    with_run(store)
    store.add_session(ACME, session_of())
    for call in (
        lambda: store.add_run(ACME, run_of(number)),
        lambda: store.add_sampler(ACME, sampler_of(number)),
        lambda: store.accept(ACME, operation_of(number)),
    ):
        with pytest.raises(InvalidRequest, match="use a number from 0"):
            call()
    with pytest.raises(NotFound):
        store.operation(ACME, RUN, number)


@pytest.mark.parametrize("name", STRANGE)
def test_ids_cannot_leave_their_folder(store: Store, name: str) -> None:
    with pytest.raises(InvalidRequest):
        store.add_session(ACME, session_of(name))
    with pytest.raises(InvalidRequest):
        store.files.run(ACME, name)
    with pytest.raises(InvalidRequest):
        checkpoint_of(store, name)


def test_what_another_tenant_has_is_not_there(store: Store) -> None:
    with_run(store)
    store.add_sampler(ACME, sampler_of())
    before = all_rows(store)
    for call in (
        lambda: store.session(OTHER, "s-1"),
        lambda: store.touch_session(OTHER, "s-1"),
        lambda: store.finish_session(OTHER, "s-1", "success"),
        lambda: store.update_session(OTHER, "s-1", display_name="mine"),
        lambda: store.add_run(OTHER, run_of(1)),
        lambda: store.run(OTHER, RUN),
        lambda: store.mark_corrupted(OTHER, RUN),
        lambda: store.add_sampler(OTHER, sampler_of(1)),
        lambda: store.sampler(OTHER, sampler_of().sampler_id),
        lambda: store.use_sampler(OTHER, sampler_of().sampler_id),
    ):
        with pytest.raises(NotFound) as foreign:
            call()
        assert "acme" not in str(foreign.value)
    assert store.runs(OTHER, session_id="s-1") == ([], 0)
    assert store.samplers(OTHER, "s-1") == []
    assert all_rows(store) == before
