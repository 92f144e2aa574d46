"""A copy of everything while the service runs, and the way back.

    store ──backup──► folder (store.db, jobs/ ..., backup.json) ──restore──► empty folder, URL

1. Writers are held for the milliseconds that it takes to begin reading and to hard-link the files
   that rows name. Nothing is deleted before the commit that forgets it, so rows and files match.
2. Writers go on while the rows, as they were then, are copied.
3. The copy appears under its name when it is whole.

- A backup is a folder with an SQLite database, whatever the store's own database is. So it can be
  restored into either, which is also the way from SQLite to PostgreSQL.
- Files never change once they are there: a hard link is a copy. On another disk they are copied.
"""

import fcntl
import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from marlaas import __version__, runtime
from marlaas.errors import Conflict, NotFound, StoreUnavailable
from marlaas.store import migrate
from marlaas.store.database import BEGIN, SQLITE_FILE, Database, engine_of, unavailable
from marlaas.store.files import Files, disk_errors, link_or_copy
from marlaas.store.schema import (
    METADATA,
    api_keys,
    checkpoints,
    events,
    jobs,
    runs,
    sessions,
    tenants,
    uploads,
    versions,
)
from marlaas.types import CheckpointKind, TenantId

MANIFEST = "backup.json"

_HOLD_WRITERS = {
    "sqlite": ("BEGIN IMMEDIATE",),
    # In the order in which transactions take them, so that none waits for another in a circle.
    "postgresql": (
        "BEGIN",
        "LOCK TABLE jobs, versions, uploads, runs, checkpoints IN SHARE ROW EXCLUSIVE MODE",
    ),
}
_BEGIN_READING = {
    "sqlite": "BEGIN",
    "postgresql": "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY",
}
_ROWS_A_BATCH = 500
_FIRST_ROW = sa.select(jobs.c.name).limit(1)
_ON_DISK = sa.select(versions).where((versions.c.has_state == 1) | (versions.c.has_adapter == 1))

_STATES = sa.select(runs.c.state_path).where(runs.c.state_path.is_not(None))
_CHECKPOINTS = sa.select(
    checkpoints.c.tenant_id,
    checkpoints.c.run_id,
    checkpoints.c.kind,
    checkpoints.c.name,
    checkpoints.c.generation,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupSummary:
    """What a backup holds."""

    num_files: int
    num_bytes: int
    """Of the files, without the database."""
    missing: tuple[str, ...]
    """Files that rows name and that were not there: the store was damaged before."""


class Backups(Database):
    """The part of `Store` that copies itself."""

    def backup(self, target: Path) -> BackupSummary:
        """Copy everything into the folder `target`, which must be new or empty.

        Uses connections of its own, so it may run on another thread beside all other calls.

        Raises:
            Conflict: there is something at `target`, or another backup is under way.
            StoreUnavailable: the database or a disk refused; nothing is left at `target`.
        """
        partial = _partial(target)
        with disk_errors(target), _alone(self.files.root) as staging:
            try:
                partial.mkdir(parents=True)
                with self._frozen(staging) as (reader, missing):
                    _copy_database(reader, partial)
                for kind in staging.iterdir():
                    shutil.move(kind, partial / kind.name)
                summary = _write_manifest(partial, missing)
                _appear(partial, target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        return summary

    @contextmanager
    def _frozen(self, staging: Path) -> Iterator[tuple[sa.Connection, list[str]]]:
        """Yield a connection that reads the rows of one moment, whose files are in `staging`, and
        which of them were missing."""
        try:
            with self._engine.connect() as reader:
                with self._engine.connect() as holder:
                    for statement in _HOLD_WRITERS[self._dialect]:
                        holder.exec_driver_sql(statement)
                    reader.exec_driver_sql(_BEGIN_READING[self._dialect])
                    reader.execute(_FIRST_ROW).all()  # reading begins with the first read
                    missing = _link_files(reader, self.files, Files(staging))
                    holder.rollback()
                yield reader, missing
        except DBAPIError as error:
            raise unavailable(self._engine, error) from error


def restore(archive: Path, root: Path, *, url: str | None = None) -> None:
    """Make a store's folder from a backup; with a URL, its rows go to that PostgreSQL database.

    Raises:
        NotFound: `archive` is no backup.
        Conflict: `root` or the database is not empty.
        StoreUnavailable: the backup is damaged or too new, or a disk or the database refused.
    """
    _check_whole(archive)
    partial = _partial(root)
    with disk_errors(root):
        try:
            shutil.copytree(archive, partial, ignore=shutil.ignore_patterns(MANIFEST))
            Database(partial).close()  # brings an older schema up to date, refuses a newer one
            if url is None:
                _appear(partial, root)
            else:
                _restore_into(url, partial, root)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


# ---------------------------------------------------------------------------------------------
# Files


@contextmanager
def _alone(root: Path) -> Iterator[Path]:
    """Yield a folder beside the files to link them into; for one backup at a time."""
    staging = root / "backup.staging"
    with open(root / "backup.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict("another backup of this store is under way: wait for it") from None
        shutil.rmtree(staging, ignore_errors=True)  # of a backup that was killed
        staging.mkdir()
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _link_files(reader: sa.Connection, files: Files, copies: Files) -> list[str]:
    """Link every file that rows name; return those that are not there."""
    missing: list[str] = []
    for row in reader.execute(_ON_DISK):
        key = (TenantId(row.tenant_id), row.job, row.version)
        source, copy = files.version(*key), copies.version(*key).prepare()
        if row.has_state:
            _link(Path(source.state), Path(copy.state), missing)
        if row.has_adapter:
            _link(Path(source.adapter), Path(copy.adapter), missing)
    for row in reader.execute(_STATES):
        copy = copies.root / row.state_path
        copy.parent.mkdir(parents=True, exist_ok=True)
        _link(files.root / row.state_path, copy, missing)
    for row in reader.execute(_CHECKPOINTS):
        key = (TenantId(row.tenant_id), row.run_id, CheckpointKind(row.kind), row.name)
        source, copy = (
            of.checkpoint(*key, generation=row.generation).folder for of in (files, copies)
        )
        copy.parent.mkdir(parents=True, exist_ok=True)
        _link(source, copy, missing)
    for row in reader.execute(sa.select(uploads.c.tenant_id, uploads.c.digest).distinct()):
        key = (TenantId(row.tenant_id), row.digest)
        copies.upload(*key).parent.mkdir(parents=True, exist_ok=True)
        _link(files.upload(*key), copies.upload(*key), missing)
    return missing


def _link(source: Path, copy: Path, missing: list[str]) -> None:
    """Link a file, or the files of a folder."""
    try:
        if source.is_dir():
            shutil.copytree(source, copy, copy_function=link_or_copy)
        else:
            link_or_copy(str(source), str(copy))
    except FileNotFoundError:
        missing.append(str(source))


def _partial(target: Path) -> Path:
    """Return where something is made that is to appear at `target`, which must be free."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise Conflict(f"{target} is not empty: name a new folder")
    partial = target.with_name(f"{target.name}.partial")
    if partial.exists():
        raise Conflict(f"{partial} is left of another attempt: remove it first")
    return partial


def _appear(partial: Path, target: Path) -> None:
    with suppress(FileNotFoundError):
        target.rmdir()
    partial.rename(target)


def _write_manifest(folder: Path, missing: list[str]) -> BackupSummary:
    sizes = {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {
        "marlaas": __version__,
        "schema": migrate.HEAD,
        "made_s": runtime.wall_time_s(),
        "missing": missing,
        "files": sizes,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    del sizes[SQLITE_FILE]
    return BackupSummary(
        num_files=len(sizes), num_bytes=sum(sizes.values()), missing=tuple(missing)
    )


def _check_whole(archive: Path) -> None:
    try:
        manifest = json.loads((archive / MANIFEST).read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"{archive} is no backup (it has no {MANIFEST})") from None
    for name, size in manifest["files"].items():
        path = archive / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            raise StoreUnavailable(
                f"the backup is damaged: {path} has {found} bytes instead of {size}"
            )
    path = archive / SQLITE_FILE
    # Immutable: a read leaves no files beside it.
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)) as db:
        try:
            verdict = db.execute("PRAGMA quick_check").fetchone()[0]
        except sqlite3.DatabaseError as error:
            verdict = str(error)
    if verdict != "ok":
        raise StoreUnavailable(f"the backup is damaged: {path}: {verdict.splitlines()[-1]}")


# ---------------------------------------------------------------------------------------------
# Rows


def _copy_database(reader: sa.Connection, folder: Path) -> None:
    """Copy the rows that a connection reads into a new SQLite database."""
    if reader.dialect.name == "sqlite":
        source = reader.connection.driver_connection
        assert isinstance(source, sqlite3.Connection)
        try:
            with closing(sqlite3.connect(folder / SQLITE_FILE)) as copy:
                source.backup(copy)
        except sqlite3.DatabaseError as error:
            raise StoreUnavailable(f"{folder}: {error}") from error
        return
    engine = engine_of(folder)
    with engine.connect() as writer:
        migrate.upgrade(writer, BEGIN["sqlite"])
        writer.exec_driver_sql(BEGIN["sqlite"])
        _copy_rows(reader, writer)
        writer.exec_driver_sql("COMMIT")


def _restore_into(url: str, partial: Path, root: Path) -> None:
    """Move the rows of a restored folder into a database, in one transaction."""
    target = Database(partial, url=url)
    source = engine_of(partial)
    try:
        with target._transaction() as writer, source.connect() as reader:
            for table in (jobs, sessions, tenants, api_keys, events):
                if writer.execute(sa.select(sa.literal(1)).select_from(table).limit(1)).first():
                    raise Conflict(f"the database has {table.name}: restore into an empty one")
            for table in reversed(METADATA.sorted_tables):
                writer.execute(sa.delete(table))
            _copy_rows(reader, writer)
            reader.close()
            (partial / SQLITE_FILE).unlink()
            _appear(partial, root)
    finally:
        target.close()


def _copy_rows(reader: sa.Connection, writer: sa.Connection) -> None:
    for table in METADATA.sorted_tables:
        for rows in reader.execute(sa.select(table)).mappings().partitions(_ROWS_A_BATCH):
            writer.execute(sa.insert(table), [dict(row) for row in rows])
