"""The journal of runs: accepted once, kept until executed, gone when nobody needs it."""

from pathlib import Path

import pytest

from marlaas import runtime
from marlaas.errors import Conflict, NotFound
from marlaas.store.db import Store
from marlaas.types import OperationState, StateKind, Usage
from tests.store.records import (
    ACME,
    OTHER,
    RUN,
    all_rows,
    operation_of,
    take_run_step,
    with_run,
    write_run_state,
)


def seqs(operations: list) -> list[int]:
    return [operation.seq for operation in operations]


def states_on_disk(store: Store) -> list[str]:
    return sorted(path.name for path in (store.files.run(ACME, RUN) / "states").iterdir())


def test_an_operation_is_accepted_once_whatever_became_of_it(store: Store) -> None:
    with_run(store)
    first = store.accept(ACME, operation_of(1))
    before = all_rows(store)
    again = store.accept(ACME, operation_of(1))
    assert (again.state, again.created_s) == (OperationState.ACCEPTED, first.created_s)
    assert all_rows(store) == before
    store.finish_operation(ACME, RUN, 1, result=b"out")
    done = store.accept(ACME, operation_of(1))
    assert (done.state, done.result, done.payload) == (OperationState.DONE, b"out", b"")
    assert store.operation(ACME, RUN, 1) == done


@pytest.mark.parametrize("other", [{"payload": b"other"}, {"kind": "forward"}])
def test_another_content_under_a_used_number_is_refused(store: Store, other: dict) -> None:
    with_run(store)
    store.accept(ACME, operation_of(1))
    with pytest.raises(Conflict, match=r"operation 1 of run .* is another one"):
        store.accept(ACME, operation_of(1, **other))
    store.finish_operation(ACME, RUN, 1, error="no", category="user")
    with pytest.raises(Conflict):
        store.accept(ACME, operation_of(1, **other))


def test_a_refused_operation_takes_its_number(store: Store) -> None:
    with_run(store)
    refused = operation_of(
        1, payload=b"", state=OperationState.FAILED, error="too long", error_category="user"
    )
    stored = store.accept(ACME, refused)
    assert stored.finished_s is not None
    assert store.accept(ACME, refused) == stored == store.operation(ACME, RUN, 1)
    assert store.accepted(ACME, RUN) == []
    assert store.has_failed_pass(ACME, RUN)
    assert store.next_seq(ACME, RUN) == 2


def test_operations_come_back_in_the_order_of_their_numbers(store: Store) -> None:
    with_run(store)
    for seq in (3, 1, 2, 5):
        store.accept(ACME, operation_of(seq, payload=b"%d" % seq))
    assert [(one.seq, one.payload) for one in store.accepted(ACME, RUN)] == [
        (1, b"1"), (2, b"2"), (3, b"3"), (5, b"5"),
    ]  # fmt: skip
    assert store.next_seq(ACME, RUN) == 1
    store.finish_operation(ACME, RUN, 1)
    store.finish_operation(ACME, RUN, 3)
    assert seqs(store.accepted(ACME, RUN)) == [2, 5]
    assert store.next_seq(ACME, RUN) == 2
    assert store.unfinished_runs() == [(ACME, RUN)]


def test_what_gradients_consist_of_stays_until_a_boundary(store: Store) -> None:
    with_run(store)
    for seq, kind in enumerate(["forward_backward", "forward", "forward_backward"], start=1):
        store.accept(ACME, operation_of(seq, kind, payload=b"p%d" % seq))
        store.finish_operation(ACME, RUN, seq, result=b"r")
    store.accept(ACME, operation_of(4))
    store.finish_operation(ACME, RUN, 4, error="a bad token", category="user")
    assert [(one.seq, one.payload) for one in store.replayable(ACME, RUN)] == [
        (1, b"p1"),
        (3, b"p3"),
    ]
    assert store.has_failed_pass(ACME, RUN)
    run = take_run_step(store, 5, 1)
    assert (run.version, run.boundary_seq, run.adapter_hash) == (1, 5, "hash1")
    assert store.replayable(ACME, RUN) == []
    assert not store.has_failed_pass(ACME, RUN)
    assert all_rows(store)["operation_payloads"] == []
    assert store.operation(ACME, RUN, 5).result == b"stepped"
    assert store.operation(ACME, RUN, 1).result == b"r"
    assert store.next_seq(ACME, RUN) == 6
    assert store.unfinished_runs() == []


def test_a_boundary_replaces_the_state_and_counts_once(store: Store) -> None:
    with_run(store)
    for version in (1, 2):
        run = take_run_step(store, version, version, usage=Usage(trained_tokens=10))
        assert states_on_disk(store) == [f"v00000{version}"]
        assert run.state_path == store.files.run_state(ACME, RUN, version)
        assert (run.state_kind, Path(run.state_path or "").read_bytes()) == (
            StateKind.SNAPSHOT,
            b"sssss",
        )
    before = all_rows(store)
    take_run_step(store, 2, 2, usage=Usage(trained_tokens=10), result=b"other")
    assert all_rows(store) == before
    assert store.usage(ACME).trained_tokens == 20


def test_a_refused_update_is_a_boundary_with_the_state_before(store: Store) -> None:
    with_run(store)
    run = take_run_step(store, 1, 1)
    store.accept(ACME, operation_of(2))
    store.finish_operation(ACME, RUN, 2)
    run = take_run_step(
        store, 3, 1, state_path=run.state_path, error="not finite", category="user", result=b""
    )
    assert (run.version, run.boundary_seq) == (1, 3)
    assert states_on_disk(store) == ["v000001"]
    failed = store.operation(ACME, RUN, 3)
    assert (failed.state, failed.error_category) == (OperationState.FAILED, "user")


def test_results_go_by_age_and_what_is_accepted_stays(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1796083200.0
    monkeypatch.setattr(runtime, "wall_time_s", lambda: now_s)
    with_run(store)
    store.accept(ACME, operation_of(1, "forward"))
    store.finish_operation(ACME, RUN, 1, result=b"old")
    take_run_step(store, 2, 1)
    store.accept(ACME, operation_of(3))
    store.finish_operation(ACME, RUN, 3, result=b"unused gradient")
    store.accept(ACME, operation_of(4))
    stored = store.stored_bytes(ACME)
    now_s += 3599.0
    assert store.drop_results() == 0
    now_s += 1.0
    assert [store.drop_results(limit=3) for _ in range(3)] == [3, 1, 0]
    for seq in (0, 1, 2):
        with pytest.raises(NotFound, match=f"no operation {seq} of run"):
            store.operation(ACME, RUN, seq)
        with pytest.raises(Conflict, match="its time is over"):
            store.accept(ACME, operation_of(seq, "forward"))
    assert store.operation(ACME, RUN, 3).result == b""
    assert seqs(store.replayable(ACME, RUN)) == [3]
    assert seqs(store.accepted(ACME, RUN)) == [4]
    assert store.stored_bytes(ACME) == stored - len(b"old" + b"stepped" + b"unused gradient")


def test_the_journal_is_counted_among_what_is_stored(store: Store) -> None:
    with_run(store)
    assert store.stored_bytes(ACME) == 0
    store.accept(ACME, operation_of(1, payload=b"p" * 1000))
    assert store.stored_bytes(ACME) == 1000
    store.finish_operation(ACME, RUN, 1, result=b"r" * 100)
    assert store.stored_bytes(ACME) == 1100
    take_run_step(store, 2, 1, result=b"")
    assert store.stored_bytes(ACME) == 100 + 5


def test_what_another_tenant_asks_for_is_not_there(store: Store) -> None:
    with_run(store)
    store.accept(ACME, operation_of(1))
    before = all_rows(store)
    path = write_run_state(store, 1)
    for call in (
        lambda: store.accept(OTHER, operation_of(1)),
        lambda: store.operation(OTHER, RUN, 1),
        lambda: store.next_seq(OTHER, RUN),
        lambda: store.finish_operation(OTHER, RUN, 1, result=b"mine"),
        lambda: store.commit_run_step(
            OTHER, RUN, 1, version=1, state_path=None, state_kind=StateKind.FRESH,
            adapter_hash="",
        ),
    ):  # fmt: skip
        with pytest.raises(NotFound):
            call()
    assert store.accepted(OTHER, RUN) == store.replayable(OTHER, RUN) == []
    assert not store.has_failed_pass(OTHER, RUN)
    assert all_rows(store) == before
    assert Path(path).exists()
