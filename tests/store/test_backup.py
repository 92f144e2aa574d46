"""A backup made while the service runs is of one moment, and restores whole or not at all."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from marlaas.errors import Conflict, NotFound, StoreUnavailable
from marlaas.store.db import Store, restore
from marlaas.store.files import size_of
from marlaas.types import CheckpointKind, EventKind, Role, Tenant, UploadKind, Usage
from tests.store.records import (
    ACME,
    RUN,
    all_rows,
    checkpoint_of,
    eval_of,
    operation_of,
    record_of,
    sampler_of,
    spec_of,
    take_run_step,
    take_steps,
    with_finished,
    with_run,
    write_adapter,
    write_state,
)


def fill(store: Store) -> None:
    """Something in every table, and files of every kind."""
    store.add_tenant(Tenant(tenant_id=ACME))
    store.add_key(ACME, role=Role.TENANT)
    store.audit("k1", "tenant.add", ACME, None)
    upload = store.put_upload(ACME, UploadKind.PROMPTS, "mine", b"{}\n", 1)
    store.add_job(ACME, spec_of(env={"family": "custom", "prompts": upload.digest}))
    store.add_first_version(ACME, "sums", "hash0")
    write_adapter(store, 0)
    with_finished(store, ACME, 0, 1)
    write_state(store, 1)
    store.commit_step(ACME, "sums", record_of(1, 0, 1), dropped={1: "zero_variance"})
    store.add_evaluation(ACME, "sums", eval_of(1), usage=Usage(evaluated_tokens=3))
    store.open_group(ACME, "sums", 2, version=1)
    with_run(store)
    take_run_step(store, 1, 1)
    store.accept(ACME, operation_of(2))
    store.add_checkpoint(ACME, checkpoint_of(store, generation=3))
    weights = checkpoint_of(store, "#1", kind=CheckpointKind.WEIGHTS, has_optimizer=True)
    store.files.link(store.run(ACME, RUN).state_path or "", weights.folder / "state")
    store.add_checkpoint(ACME, weights)
    store.add_sampler(ACME, sampler_of())


NUM_FILES = 3 + 1 + 1 + 2
"""Of the job, of the run, of its two checkpoints."""


def files_of(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for kind in ("jobs", "runs", "uploads")
        for path in (root / kind).rglob("*")
        if path.is_file()
    }


def test_what_is_restored_equals_what_was_backed_up(
    store: Store, tmp_path: Path, url: str | None
) -> None:
    fill(store)
    rows, files = all_rows(store), files_of(store.files.root)
    assert all(rows.values()) and len(files) == NUM_FILES
    summary = store.backup(tmp_path / "backup")
    assert (summary.num_files, summary.missing) == (NUM_FILES, ())
    assert summary.num_bytes == sum(map(len, files.values()))
    take_steps(store, 2)
    restore(tmp_path / "backup", tmp_path / "restored")
    restored = Store(tmp_path / "restored")
    assert all_rows(restored) == rows
    assert files_of(tmp_path / "restored") == files
    restored.check_state(ACME, "sums", 1)
    state = restored.run(ACME, RUN).state_path
    assert state == str(tmp_path / "restored/runs/acme" / RUN / "states/v000001")
    assert restored.unfinished_runs() == [(ACME, RUN)]
    take_run_step(restored, 3, 2)
    take_steps(restored, 2)
    assert [line.seq for line in restored.events(ACME)] == list(range(1, 5))
    restored.close()
    assert sorted(path.name for path in tmp_path.iterdir() if "partial" in path.name) == []
    assert not (store.files.root / "backup.staging").exists()


def test_a_backup_moves_a_store_to_postgresql(tmp_path: Path, postgres_url: str) -> None:
    small = Store(tmp_path / "small")
    fill(small)
    rows = all_rows(small)
    small.backup(tmp_path / "backup")
    small.close()
    restore(tmp_path / "backup", tmp_path / "moved", url=postgres_url)
    moved = Store.open(tmp_path / "moved", url=postgres_url)
    assert all_rows(moved) == rows
    assert not (tmp_path / "moved/store.db").exists()
    assert len(files_of(tmp_path / "moved")) == NUM_FILES
    moved.add_event(ACME, "sums", EventKind.LOG, {"text": "here now"})
    moved.close()
    with pytest.raises(Conflict, match="the database has jobs: restore into an empty one"):
        restore(tmp_path / "backup", tmp_path / "again", url=postgres_url)
    assert not (tmp_path / "again").exists()


def test_a_backup_beside_a_running_service_is_of_one_moment(
    store: Store, tmp_path: Path, url: str | None
) -> None:
    """Steps are committed, adapters pruned and jobs deleted while backups are made."""
    store.add_job(ACME, spec_of())
    store.add_first_version(ACME, "sums", "hash0")
    with_run(store)
    stop = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        step = 0
        while not stop.is_set() and step < 400:
            step += 1
            with_finished(store, ACME, step)
            write_state(store, step, b"s" * step)
            store.commit_step(ACME, "sums", record_of(step, step), dropped={})
            write_adapter(store, step, size=step)
            store.prune_adapters(ACME, "sums", {step})
            take_run_step(store, step, step, size=step)
            for name in ("final", f"#{step}"):
                new = checkpoint_of(store, name, generation=step, size=step)
                store.add_checkpoint(ACME, new, overwrite=True)
            store.prune_ephemeral(ACME, RUN, keep_newest=1, unused_for_s=0.0)

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            failures.append(error)

    service = threading.Thread(target=guarded)
    service.start()
    try:
        for number in range(5):
            assert store.backup(tmp_path / f"backup-{number}").missing == ()
    finally:
        stop.set()
        service.join()
    assert failures == []
    for number in range(5):
        check_consistent(tmp_path / f"backup-{number}", tmp_path / f"restored-{number}")


def check_consistent(archive: Path, root: Path) -> None:
    restore(archive, root)
    store = Store(root)
    step = store.job(ACME, "sums").step
    assert [record.step for record in store.steps(ACME, "sums")] == list(range(1, step + 1))
    assert store.consumed_groups(ACME, "sums") == list(range(1, step + 1))
    lines = store.events(ACME)
    assert [line.seq for line in lines] == list(range(1, step + 2))
    assert store.usage(ACME).trained_tokens == 10 * step
    versions = store.versions(ACME, "sums")
    assert [row.version for row in versions if row.has_state] == ([step] if step else [])
    for row in versions:
        files = store.files.version(ACME, "sums", row.version)
        if row.has_state:
            assert Path(files.state).read_bytes() == b"s" * step
        if row.has_adapter:
            assert files.adapter_bytes() == row.version
    run = store.run(ACME, RUN)
    assert run.state_path is None or Path(run.state_path).stat().st_size == run.version
    for name in [row[3] for row in all_rows(store)["checkpoints"]]:
        stored = store.checkpoint(ACME, RUN, CheckpointKind.SAMPLER, name)
        assert size_of(stored.folder) == stored.size_bytes
    store.close()


def test_files_that_were_lost_before_are_named(store: Store, tmp_path: Path) -> None:
    fill(store)
    version, run = store.files.version(ACME, "sums", 1), store.run(ACME, RUN)
    lost = [Path(version.state), Path(run.state_path or "")]
    for path in lost:
        path.unlink()
    assert store.backup(tmp_path / "backup").missing == tuple(map(str, lost))


def test_a_backup_needs_a_place_of_its_own(store: Store, tmp_path: Path) -> None:
    fill(store)
    (tmp_path / "empty").mkdir()
    store.backup(tmp_path / "empty")
    with pytest.raises(Conflict, match="is not empty: name a new folder"):
        store.backup(tmp_path / "empty")
    with pytest.raises(Conflict, match="is not empty"):
        restore(tmp_path / "empty", store.files.root)
    (tmp_path / "other.partial").mkdir()
    with pytest.raises(Conflict, match=r"other\.partial is left of another attempt"):
        store.backup(tmp_path / "other")


def without_manifest(archive: Path) -> None:
    (archive / "backup.json").unlink()


def cut_adapter(archive: Path) -> None:
    path = next(archive.rglob("adapter_model.safetensors"))
    path.unlink()  # a hard link: writing to it would damage the store
    path.write_bytes(b"a")


def cut_database(archive: Path) -> None:
    content = (archive / "store.db").read_bytes()
    (archive / "store.db").write_bytes(content[: len(content) // 2])


def scratch_database(archive: Path) -> None:
    content = (archive / "store.db").read_bytes()
    (archive / "store.db").write_bytes(b"x" * len(content))


def flip_in_database(archive: Path) -> None:
    content = bytearray((archive / "store.db").read_bytes())
    content[4096:8192] = b"\xff" * 4096  # the root of a table
    (archive / "store.db").write_bytes(content)


@pytest.mark.parametrize(
    "damage, error, message",
    [
        (without_manifest, NotFound, r"is no backup \(it has no backup.json\)"),
        (cut_adapter, StoreUnavailable, "safetensors has 1 bytes instead of 7"),
        (cut_database, StoreUnavailable, "store.db has"),
        (scratch_database, StoreUnavailable, "store.db: file is not a database"),
        (flip_in_database, StoreUnavailable, "the backup is damaged: .*store.db: "),
    ],
)
def test_a_damaged_backup_is_refused_and_leaves_nothing(
    tmp_path: Path, damage: Callable[[Path], None], error: type[Exception], message: str
) -> None:
    store = Store(tmp_path / "root")
    fill(store)
    store.backup(tmp_path / "backup")
    damage(tmp_path / "backup")
    with pytest.raises(error, match=message):
        restore(tmp_path / "backup", tmp_path / "restored")
    assert not (tmp_path / "restored").exists()
    assert not (tmp_path / "restored.partial").exists()
    store.close()


def test_a_backup_on_another_disk_is_copied(tmp_path: Path) -> None:
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system here")
    target = other / f"marlaas-backup-{tmp_path.name}-{tmp_path.stat().st_ino}"
    store = Store(tmp_path / "root")
    fill(store)
    try:
        store.backup(target)
        restore(target, tmp_path / "restored")
    finally:
        shutil.rmtree(target, ignore_errors=True)
    assert files_of(tmp_path / "restored") == files_of(store.files.root)
    store.close()
