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
from marlaas.store.schema import METADATA
from marlaas.types import EventKind, JobState, UploadKind, Usage
from tests.store.records import (
    ACME,
    all_rows,
    eval_of,
    group_of,
    record_of,
    spec_of,
    trajectory_of,
    write_adapter,
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


def check_invariants(store: Store) -> None:
    """What must hold after any kill."""
    lines = store.events(ACME)
    assert [line.seq for line in lines] == list(range(1, len(lines) + 1))
    used = Usage()
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
    for folder in ("jobs", "uploads"):
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
