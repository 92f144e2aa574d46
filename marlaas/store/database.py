"""One open database: its connection, its transactions, its errors as ours. The base of `Store`.

    opened (schema current) -> [_rows | _transaction]* -> closed

- SQLite in WAL mode, or PostgreSQL by URL; everything above this module is the same for both.
- What is written in one `_transaction` becomes true together, or not at all. SQLite takes its write
  lock at the beginning, so what is read inside stays true until the end.
- What the world does to a database (full disk, lock, lost server) is `StoreUnavailable`; what only
  a bug can do (a constraint, wrong SQL) comes through as it is.
- Listeners hear of events after the commit that wrote them.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    IntegrityError,
    NotSupportedError,
    ProgrammingError,
)
from sqlalchemy.pool import NullPool

from marlaas.errors import InvalidRequest, StoreUnavailable
from marlaas.store import migrate
from marlaas.store.files import Files
from marlaas.store.hold import hold, hold_database
from marlaas.types import TenantId

SQLITE_FILE = "store.db"
"""Name of the SQLite database in the store's folder."""

BUSY_TIMEOUT_S = 30.0
"""How long a call waits for another process that writes, before it is given up."""

_SYNCHRONOUS = {"process": "NORMAL", "power": "FULL"}
_SYNCHRONOUS_COMMIT = {"process": "off", "power": "on"}
"""PostgreSQL's word for the same: whether a commit waits for the disk of the database server."""

BEGIN = {"sqlite": "BEGIN IMMEDIATE", "postgresql": "BEGIN"}

_INSERT = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
_WORDS = {
    "sqlite": sqlite.dialect(paramstyle="named"),
    "postgresql": postgresql.dialect(paramstyle="named"),
}

_BUGS = (DataError, IntegrityError, NotSupportedError, ProgrammingError)
"""Errors that no state of the world explains."""

_ADVICE = {
    "locked": "another process has been writing for long; one server at a time uses a store",
    "readonly": "its files or their folder cannot be written by this user",
    "read-only": "it takes no writes now",
    "lock timeout": "another process has been writing for long; one server at a time uses a store",
    "full": "free space on its disk; nothing was half-written",
    "No space left": "free space on its disk; nothing was half-written",
    "disk I/O error": "its disk fails or is full; nothing was half-written",
    "malformed": "the file is damaged; restore the newest backup",
    "not a database": "the file is damaged; restore the newest backup",
    "unable to open": "its folder cannot be read or written by this user",
}
"""What to do, by what the database says."""


class Database:
    """The connection that one thread at a time uses, with the files beside it."""

    on_event: Callable[[TenantId], None] | None = None
    """Called after a commit that wrote events of a tenant, on the thread that committed."""

    def __init__(
        self,
        root: Path,
        *,
        durability: str = "process",
        url: str | None = None,
        runs_jobs: bool = False,
    ) -> None:
        if durability not in _SYNCHRONOUS:
            raise InvalidRequest(f"durability {durability!r}: use one of {', '.join(_SYNCHRONOUS)}")
        self.files = Files(root)
        self.files.make_root()
        self.url = url
        self._engine = engine_of(root, durability, url, runs_jobs=runs_jobs)
        self._dialect = self._engine.dialect.name
        self._told: set[TenantId] = set()
        self._hold = hold(root) if runs_jobs else None
        try:
            self._connection = self._engine.connect()
        except BaseException as error:
            self._let_go()
            if isinstance(error, DBAPIError):
                raise unavailable(self._engine, error) from error
            raise
        try:
            with self._typed_errors():
                migrate.upgrade(self._connection, BEGIN[self._dialect])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._connection.close()
        self._engine.dispose()
        self._let_go()

    def _let_go(self) -> None:
        """Let another process run the jobs."""
        if self._hold is not None:
            os.close(self._hold)
            self._hold = None

    # Reading and writing ------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        """Everything written inside becomes durable together, or not at all."""
        try:
            self._connection.exec_driver_sql(BEGIN[self._dialect])
            yield self._connection
            self._connection.exec_driver_sql("COMMIT")
        except BaseException as error:
            self._told.clear()
            self._roll_back()
            if isinstance(error, DBAPIError) and not isinstance(error, _BUGS):
                raise unavailable(self._engine, error) from error
            raise
        self._tell()

    def _rows(self, statement: sa.Executable, values: Mapping[str, Any]) -> Sequence[Any]:
        with self._typed_errors():
            return self._connection.execute(statement, values).all()

    def _row(self, statement: sa.Executable, values: Mapping[str, Any]) -> Any:
        """Return the first row, or None."""
        with self._typed_errors():
            return self._connection.execute(statement, values).first()

    def _tell(self) -> None:
        if self._told:
            told, self._told = self._told, set()
            if self.on_event is not None:
                for tenant_id in told:
                    self.on_event(tenant_id)

    # Errors -------------------------------------------------------------------------------

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            if isinstance(error, _BUGS):
                raise
            self._roll_back()
            raise unavailable(self._engine, error) from error

    def _roll_back(self) -> None:
        """Undo what is not committed; after a lost connection, let the next call connect again."""
        try:
            self._connection.rollback()
        except DBAPIError:
            self._connection.invalidate()
            self._connection.rollback()


def unavailable(engine: sa.Engine, error: DBAPIError) -> StoreUnavailable:
    """Return a database's refusal as an error of ours: where, what it said, what to do."""
    said = str(error.orig).strip().split("\n")[0]
    advice = next((text for word, text in _ADVICE.items() if word in said), "")
    where = engine.url.render_as_string(hide_password=True)
    return StoreUnavailable(f"{where}: {said}{f' ({advice})' if advice else ''}")


def insert_into(dialect: str, table: sa.Table) -> Any:
    """Return an INSERT that can say what is done on a conflict, in the words of a database."""
    return _INSERT[dialect](table)


def prepared(dialect: str, insert: Any, *columns: str) -> sa.TextClause:
    """Return an INSERT of some columns as text, made once.

    SQLAlchemy keeps compiled statements, but compiles those with a conflict clause anew at every
    call, at 0.2 ms each.
    """
    return sa.text(str(insert.compile(dialect=_WORDS[dialect], column_keys=columns)))


def engine_of(
    root: Path, durability: str = "process", url: str | None = None, *, runs_jobs: bool = False
) -> sa.Engine:
    """Return the engine of the database. Transactions are begun and ended by statements of ours, so
    that a read outside of one takes no lock and leaves none."""
    if url is None:
        path = root / SQLITE_FILE
        engine = sa.create_engine(
            sa.URL.create("sqlite", database=str(path)),
            poolclass=NullPool,
            isolation_level="AUTOCOMMIT",
            connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False},
        )
        settings = [
            "PRAGMA journal_mode = WAL",
            f"PRAGMA synchronous = {_SYNCHRONOUS[durability]}",
            "PRAGMA foreign_keys = ON",
        ]
    else:
        engine = _postgresql(url)
        settings = [
            f"SET synchronous_commit = {_SYNCHRONOUS_COMMIT[durability]}",
            f"SET lock_timeout = '{BUSY_TIMEOUT_S:g}s'",
        ]

    def prepare(dbapi_connection: Any, _: object) -> None:
        cursor = dbapi_connection.cursor()
        for setting in settings:
            cursor.execute(setting)
        if runs_jobs and url is not None:
            hold_database(cursor, engine.url.render_as_string(hide_password=True))
        cursor.close()

    event.listen(engine, "connect", prepare)
    return engine


def _postgresql(url: str) -> sa.Engine:
    try:
        parsed = sa.make_url(url)
    except (ArgumentError, ValueError):
        parsed = None
    if parsed is None or parsed.get_backend_name() != "postgresql":
        # Not the whole URL: it may hold a password.
        kind = url.partition(":")[0]
        raise InvalidRequest(
            f"store URL {kind!r}://...: use postgresql://USER:PASSWORD@HOST/DATABASE, or none for "
            "SQLite"
        )
    try:
        # The driver is psycopg 3 whatever the URL says: "postgresql://" alone means another one.
        return sa.create_engine(
            parsed.set(drivername="postgresql+psycopg"),
            poolclass=NullPool,
            isolation_level="AUTOCOMMIT",
        )
    except ModuleNotFoundError:
        raise InvalidRequest(
            "PostgreSQL needs its driver: pip install 'marlaas[postgres]'"
        ) from None
