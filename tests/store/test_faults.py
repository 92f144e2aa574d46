"""What the world does to a store: each time a clear error, nothing half-written, nothing lost."""

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa

from marlaas.errors import InvalidRequest, StoreUnavailable
from marlaas.store import database
from marlaas.store.db import Store
from marlaas.types import EventKind, UploadKind
from tests.store import postgres
from tests.store.records import (
    ACME,
    all_rows,
    group_of,
    record_of,
    spec_of,
    trajectory_of,
    with_finished,
    write_state,
)

REPOSITORY = Path(__file__).parents[2]


def run(code: str, *values: object) -> str:
    """Run a program with the package at hand; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, values)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def fill_up(store: Store) -> int:
    """Finish groups until the disk is full; return the index of the one that failed."""
    for index in range(1000):
        store.open_group(ACME, "sums", index, version=0)
        try:
            store.finish_group(ACME, "sums", group_of(index, trajectory_of(length=2000)))
        except StoreUnavailable:
            return index
    raise AssertionError("the disk never became full")


# Disk -----------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_is_said_and_with_space_work_goes_on(small_disk: Path) -> None:
    store = Store(small_disk)
    store.add_job(ACME, spec_of())
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 300_000)
    failed = fill_up(store)
    before = all_rows(store)
    for call in (
        lambda: store.finish_group(ACME, "sums", group_of(failed, trajectory_of(length=2000))),
        lambda: store.put_upload(ACME, UploadKind.PROMPTS, "mine", b"x" * 900_000, 1),
    ):
        with pytest.raises(StoreUnavailable, match=r"full|No space left"):
            call()
    assert all_rows(store) == before
    assert list((small_disk / "uploads").rglob("*.partial")) == []
    ballast.unlink()
    store.finish_group(ACME, "sums", group_of(failed, trajectory_of(length=2000)))
    store.commit_step(ACME, "sums", record_of(1, failed), dropped={})
    with pytest.raises(StoreUnavailable):
        store.backup(small_disk / "backup")
    assert not any(small_disk.glob("backup*/*"))
    store.close()
    store = Store(small_disk)
    assert len(store.consumed_groups(ACME, "sums")) == 1
    store.close()


def test_a_file_that_may_not_grow_is_said(tmp_path: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
from marlaas.store.db import Store
from tests.store.records import ACME, spec_of
from tests.store.test_faults import fill_up
store = Store(Path(sys.argv[1]))
store.add_job(ACME, spec_of())
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
print(fill_up(store))
"""
    failed = int(run(code, tmp_path))
    store = Store(tmp_path)
    states = [row.state.value for row in store.groups(ACME, "sums")]
    assert states == ["finished"] * failed + ["open"]
    store.close()


# Rights ---------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_said() -> None:
    code = """
import os, sys
from pathlib import Path
import alembic.command
from marlaas.errors import StoreUnavailable
from marlaas.store.db import Store
from marlaas.types import UploadKind
from tests.store.records import ACME, spec_of

def attempt(call):
    try:
        call()
    except StoreUnavailable as error:
        print(error)
    else:
        print("no error")

root = Path(sys.argv[1])
store = Store(root / "full")
store.add_job(ACME, spec_of())
store.close()
(root / "empty").mkdir()
(root / "own").mkdir()
for folder in ("full", "empty"):
    os.chmod(root / folder, 0o555)
os.chmod(root / "full/store.db", 0o444)
if os.geteuid() == 0:
    os.chown(root / "own", 65534, 65534)
    os.setuid(65534)
attempt(lambda: Store(root / "full"))
attempt(lambda: Store(root / "empty"))
attempt(lambda: Store(root / "empty/new"))
own = Store(root / "own")
os.chmod(root / "own", 0o555)
attempt(lambda: own.put_upload(ACME, UploadKind.PROMPTS, "mine", b"x", 1))
attempt(lambda: own.backup(root / "backup"))
print(own.uploads(ACME))
"""
    root = Path(tempfile.mkdtemp(prefix="marlaas-rights-", dir="/tmp"))  # open to another user
    try:
        root.chmod(0o755)
        said = run(code, root).splitlines()
    finally:
        for folder in ("full", "own", "empty"):
            (root / folder).chmod(0o755)
        shutil.rmtree(root)
    assert "cannot be" in said[0] and "by this user" in said[0]
    assert "unable to open database file" in said[1] and "by this user" in said[1]
    assert all("Permission denied" in line for line in said[2:5])
    assert said[5] == "[]"


# Others -----------------------------------------------------------------------------------------


@pytest.fixture
def locked(store: Store) -> Iterator[threading.Event]:
    """Another connection has the database locked until the event is set."""
    release, holding = threading.Event(), threading.Event()

    def hold() -> None:
        if store.url is None:
            other = sqlite3.connect(store.files.root / "store.db", isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
        else:
            plain = sa.make_url(store.url).set(drivername="postgresql")
            other = psycopg.connect(plain.render_as_string(hide_password=False))
            other.execute("LOCK TABLE jobs, counters")
        holding.set()
        release.wait()
        other.close()

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait()
    yield release
    release.set()
    thread.join()


def test_a_call_waits_for_another_process_that_writes(
    store: Store, locked: threading.Event
) -> None:
    threading.Timer(1.5, locked.set).start()
    began_s = time.monotonic()
    assert store.add_job(ACME, spec_of())
    assert time.monotonic() - began_s > 1


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.2)


def test_a_lock_that_stays_is_said_and_nothing_is_written(
    impatient: None, store: Store, locked: threading.Event
) -> None:
    with pytest.raises(StoreUnavailable, match="one server at a time uses a store"):
        store.add_job(ACME, spec_of())
    locked.set()
    for _ in range(100):
        try:
            assert store.add_job(ACME, spec_of())
            break
        except StoreUnavailable:
            time.sleep(0.05)
    assert [line.seq for line in store.events(ACME)] == [1]


def test_a_lost_server_is_said_and_found_again(
    tmp_path: Path, postgres_server: postgres.Server, postgres_url: str
) -> None:
    if postgres_server.process is None:
        pytest.skip("the server is not ours to stop")
    store = Store.open(tmp_path, url=postgres_url)
    store.add_job(ACME, spec_of())
    postgres_server.stop()
    with pytest.raises(StoreUnavailable):
        store.job(ACME, "sums")
    with pytest.raises(StoreUnavailable):
        store.add_event(ACME, "sums", EventKind.LOG, {"text": "lost"})
    with pytest.raises(StoreUnavailable):
        Store.open(tmp_path, url=postgres_url)
    postgres_server.start()
    assert store.add_event(ACME, "sums", EventKind.LOG, {"text": "back"}) == 2
    assert store.job(ACME, "sums").step == 0
    store.close()


def test_a_connection_that_is_cut_within_a_call_undoes_it(
    tmp_path: Path, postgres_server: postgres.Server, postgres_url: str
) -> None:
    store = Store.open(tmp_path, url=postgres_url)
    store.add_job(ACME, spec_of())
    process = store._connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()
    cut = pytest.raises(StoreUnavailable, match="terminating connection")
    with cut, store._transaction() as db:
        db.exec_driver_sql("UPDATE jobs SET step = 99")
        postgres_server.execute(f"SELECT pg_terminate_backend({process}, 5000)")
        db.exec_driver_sql("UPDATE jobs SET step = 100")
    assert store.job(ACME, "sums").step == 0
    store.close()


@pytest.mark.parametrize("given", ["mysql://a:secret@b/c", "nonsense", "postgresql://h:x/y"])
def test_a_url_that_cannot_be_is_refused_without_its_password(tmp_path: Path, given: str) -> None:
    with pytest.raises(InvalidRequest, match="use postgresql://") as refused:
        Store.open(tmp_path, url=given)
    assert "secret" not in str(refused.value)


def test_a_server_that_is_not_there_is_said_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"postgresql\+psycopg://me:\*\*\*@127") as refused:
        Store.open(tmp_path, url="postgresql://me:secret@127.0.0.1:1/none")
    assert "secret" not in str(refused.value)


# Kills and damage -----------------------------------------------------------------------------


def test_committed_state_survives_a_kill(store: Store, url: str | None) -> None:
    store.add_job(ACME, spec_of())
    with_finished(store, ACME, 0)
    store._connection.exec_driver_sql(database.BEGIN[store._dialect])
    store._connection.exec_driver_sql("UPDATE jobs SET step = 99")
    second = Store(store.files.root, url=url)  # a kill is a reader that never hears COMMIT
    assert second.job(ACME, "sums").step == 0
    assert [row.state for row in second.groups(ACME, "sums")] == ["finished"]
    second.close()


@pytest.mark.slow
def test_a_kill_at_any_statement_loses_nothing(url: str | None) -> None:
    """At every statement on SQLite; at every fifth on PostgreSQL, where a process costs more."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # spares the disk
    with tempfile.TemporaryDirectory(prefix="marlaas-killed-", dir=shared) as root:
        stride = "1" if url is None else "5"
        command = [sys.executable, "-m", "tests.store.killed", stride, root]
        done = subprocess.run(
            [*command, url] if url else command,
            cwd=REPOSITORY, capture_output=True, text=True, timeout=240,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 80


@pytest.mark.parametrize("lost", [1, 100, 4000])
def test_a_journal_whose_end_is_lost_gives_the_commits_before(tmp_path: Path, lost: int) -> None:
    """What a loss of power may do under durability "process"."""
    store = Store(tmp_path / "root")
    store.add_job(ACME, spec_of())
    with_finished(store, ACME, 0, 1)
    write_state(store, 1)
    before = all_rows(store)
    store.commit_step(ACME, "sums", record_of(1, 0, 1), dropped={})
    shutil.copytree(tmp_path / "root", tmp_path / "copy")  # as a machine that stops leaves it
    store.close()
    journal = tmp_path / "copy/store.db-wal"
    os.truncate(journal, journal.stat().st_size - lost)
    copy = Store(tmp_path / "copy")
    assert all_rows(copy) == before
    copy.commit_step(ACME, "sums", record_of(1, 0, 1), dropped={})
    copy.close()


def test_a_journal_that_is_damaged_gives_the_commits_before(tmp_path: Path) -> None:
    store = Store(tmp_path / "root")
    store.add_job(ACME, spec_of())
    before = all_rows(store)
    start = (tmp_path / "root/store.db-wal").stat().st_size
    with_finished(store, ACME, 0, 1)
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    store.close()
    with open(tmp_path / "copy/store.db-wal", "r+b") as journal:
        journal.seek(start + 100)
        journal.write(b"\xff" * 64)
    copy = Store(tmp_path / "copy")
    assert all_rows(copy) == before
    copy.close()


def test_a_database_that_is_damaged_is_said(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add_job(ACME, spec_of())
    store.close()
    content = (tmp_path / "store.db").read_bytes()
    (tmp_path / "store.db").write_bytes(b"\xff" * 4096 + content[4096:])
    with pytest.raises(StoreUnavailable, match="the file is damaged; restore the newest backup"):
        Store(tmp_path)
    (tmp_path / "store.db").write_bytes(content[:4096])
    with pytest.raises(StoreUnavailable, match="the file is damaged; restore the newest backup"):
        Store(tmp_path).jobs(ACME)
