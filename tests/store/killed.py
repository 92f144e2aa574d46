"""A history of calls, killed at every statement in turn, and what is left each time.

Run as `python -m tests.store.killed STRIDE ROOT [URL]`: for every n, or every STRIDE-th, a child
goes through the history and is killed (SIGKILL) just before its n-th statement; then the history
goes on from what is stored, as a restarted service does. In the end there must be the same rows as
without a kill.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

import sqlalchemy as sa

from marlaas import runtime
from marlaas.store.db import GroupState, Store
from marlaas.store.files import size_of
from marlaas.store.schema import METADATA
from marlaas.types import (
    FORWARD_BACKWARD,
    EventKind,
    JobState,
    Operation,
    OperationState,
    StateKind,
    UploadKind,
    Usage,
)
from tests.store.records import (
    ACME,
    RUN,
    all_rows,
    checkpoint_of,
    eval_of,
    group_of,
    operation_of,
    record_of,
    run_of,
    sampler_of,
    session_of,
    spec_of,
    trajectory_of,
    write_adapter,
    write_run_state,
    write_state,
)


def history(store: Store) -> None:
    """Do what is not done yet: two steps of a job, and another job that comes and goes."""
    store.add_job(ACME, spec_of(), idempotency_key="k")
    store.add_first_version(ACME, "sums", "hash0")
    if store.job(ACME, "sums").state is not JobState.DONE:
        store.set_job_state(ACME, "sums", JobState.RUNNING)
    for step in (1, 2):
        if store.job(ACME, "sums").step < step:
            take_step(store, step)
    if not store.evaluations(ACME, "sums"):
        store.add_evaluation(ACME, "sums", eval_of(2), usage=Usage(evaluated_tokens=7))
    if not store.versions(ACME, "sums")[2].has_adapter:
        folder = Path(store.files.version(ACME, "sums", 2).adapter)
        if folder.exists():
            store.keep_adapter(ACME, "sums", 2)
        else:
            write_adapter(store, 2)
    store.promote(ACME, "sums", 2)
    store.set_job_state(ACME, "sums", JobState.DONE)
    if not any(line.kind is EventKind.DELETED for line in store.events(ACME)):
        come_and_go(store)
    drive(store)


def take_step(store: Store, step: int) -> None:
    indices = (2 * step - 2, 2 * step - 1)
    there = {row.index: row.state for row in store.groups(ACME, "sums")}
    for index in indices:
        if there.get(index, GroupState.OPEN) is GroupState.OPEN:
            store.open_group(ACME, "sums", index, version=step - 1)
            store.finish_group(ACME, "sums", group_of(index, trajectory_of()))
    write_state(store, step)
    record = record_of(step, *indices)
    store.commit_step(ACME, "sums", record, dropped={indices[1]: "zero_variance"})


def come_and_go(store: Store) -> None:
    upload = store.put_upload(ACME, UploadKind.PROMPTS, "mine", b"{}\n", 1)
    spec = spec_of(name="gone", env={"family": "custom", "prompts": upload.digest})
    store.add_job(ACME, spec)
    store.set_job_state(ACME, "gone", JobState.CANCELLED)
    if not store.usage_by_job(ACME).get("gone"):
        store.add_usage(ACME, "gone", Usage(served_tokens=5))
    store.delete_job(ACME, "gone")


def drive(store: Store) -> None:
    """Two steps of a run, with a checkpoint each, as a client asks and as a loop does."""
    store.add_session(ACME, session_of())
    store.add_run(ACME, run_of())
    for seq, kind in enumerate(
        ("create", FORWARD_BACKWARD, "optim_step", "save", FORWARD_BACKWARD, "optim_step", "save")
    ):
        if store.run(ACME, RUN).boundary_seq >= seq:
            continue
        operation = store.accept(ACME, operation_of(seq, kind, payload=b"%d" % seq))
        if operation.state is OperationState.ACCEPTED:
            execute(store, operation)
    store.add_sampler(ACME, sampler_of())
    store.finish_session(ACME, "s-1", "success")


def execute(store: Store, operation: Operation) -> None:
    seq, run = operation.seq, store.run(ACME, RUN)
    if operation.kind == "create":
        store.commit_run_step(
            ACME, RUN, seq, version=0, state_path=None, state_kind=StateKind.FRESH,
            adapter_hash="hash0",
        )  # fmt: skip
    elif operation.kind == "optim_step":
        version = run.version + 1
        store.commit_run_step(
            ACME, RUN, seq, version=version, state_path=write_run_state(store, version),
            state_kind=StateKind.SNAPSHOT, adapter_hash=f"hash{version}", result=b"stepped",
            usage=Usage(trained_tokens=3),
        )  # fmt: skip
    elif operation.kind == "save":
        new = checkpoint_of(store, generation=seq, version=run.version)
        store.add_checkpoint(ACME, new, overwrite=True)
        store.finish_operation(ACME, RUN, seq, result=b"saved")
    else:
        store.finish_operation(ACME, RUN, seq, result=b"out", usage=Usage(prefill_tokens=1))


def check_runs(store: Store) -> Usage:
    """What must hold of runs after any kill; return what they used."""
    used = Usage()
    for run in store.runs(ACME)[0]:
        if run.state_path is not None:
            assert Path(run.state_path).read_bytes() == b"sssss"
        assert (run.version > 0) == (run.state_path is not None)
        behind = [one.seq for one in store.replayable(ACME, run.run_id)]
        behind += [one.seq for one in store.accepted(ACME, run.run_id)]
        assert all(seq > run.boundary_seq for seq in behind)
        passes = run.version + len(store.replayable(ACME, run.run_id))
        used += Usage(trained_tokens=3 * run.version, prefill_tokens=passes)
        for stored in store.checkpoints(ACME, run.run_id)[0]:
            assert size_of(stored.folder) == stored.size_bytes == 7
    return used


def check_invariants(store: Store) -> None:
    """What must hold after any kill."""
    lines = store.events(ACME)
    assert [line.seq for line in lines] == list(range(1, len(lines) + 1))
    used = check_runs(store)
    for stored in store.jobs(ACME):
        key = (ACME, stored.spec.name)
        assert [record.step for record in store.steps(*key)] == list(range(1, stored.step + 1))
        kinds = [line.kind for line in store.events(ACME, job=key[1])]
        assert kinds.count(EventKind.STEP) == stored.step
        versions = store.versions(*key)
        assert [row.version for row in versions if row.has_state] == [stored.step][: stored.step]
        for row in versions:
            if row.has_state:
                store.check_state(*key, row.version)
        groups = store.groups(*key)
        taken = [index for record in store.steps(*key) for index in record.group_indices]
        assert store.consumed_groups(*key) == taken
        for row in groups:
            if row.group is not None:
                used += Usage(sampled_tokens=5, prefill_tokens=4)
            if row.state is GroupState.TRAINED:
                used += Usage(trained_tokens=10)
    counted = store.usage(ACME)
    assert (counted.sampled_tokens, counted.trained_tokens, counted.prefill_tokens) == (
        used.sampled_tokens,
        used.trained_tokens,
        used.prefill_tokens,
    )


def is_killed(root: Path, url: str | None, number: int) -> bool:
    """Go through the history in a child; return False if it ended before its n-th statement."""
    child = os.fork()
    if child == 0:
        store = Store.open(root, url=url)
        left = number

        def count(*_: object) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        sa.event.listen(store._engine, "before_cursor_execute", count)
        history(store)
        store.close()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0


def empty(store: Store) -> None:
    with store._transaction() as db:
        for table in reversed(METADATA.sorted_tables):
            db.execute(table.delete())
    for folder in ("jobs", "runs", "uploads"):
        shutil.rmtree(store.files.root / folder, ignore_errors=True)


def main(stride: int, root: Path, url: str | None) -> None:
    runtime.wall_time_s = lambda: 1796083200.0
    store = Store.open(root, url=url)
    history(store)
    check_invariants(store)
    expected = all_rows(store)
    history(store)
    assert all_rows(store) == expected
    number = 0
    is_at_end = False
    while not is_at_end:
        number += stride
        empty(store)
        store.close()
        is_at_end = not is_killed(root, url, number)
        store = Store.open(root, url=url)
        check_invariants(store)
        history(store)
        assert all_rows(store) == expected, number
        check_invariants(store)
    store.close()
    print(number)  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
