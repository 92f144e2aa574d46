"""Both databases for the tests of the store."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from marlaas.store.db import Store
from marlaas.store.schema import METADATA
from tests.store import postgres


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.Server]:
    try:
        with postgres.server() as server:
            yield server
    except postgres.NoServer as reason:
        pytest.skip(str(reason))


@pytest.fixture
def postgres_url(postgres_server: postgres.Server) -> Iterator[str]:
    """A new, empty database."""
    with postgres_server.database() as url:
        yield url


@pytest.fixture(scope="session")
def shared_postgres_url(postgres_server: postgres.Server) -> Iterator[str]:
    with postgres_server.database() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    """A database without rows; None is SQLite in the store's folder."""
    if request.param == "sqlite":
        return None
    url = request.getfixturevalue("shared_postgres_url")
    store = Store.open(tmp_path / "emptying", url=url)
    with store._transaction() as db:
        for table in reversed(METADATA.sorted_tables):
            db.execute(table.delete())
    store.close()
    return url


@pytest.fixture
def store(tmp_path: Path, url: str | None) -> Iterator[Store]:
    store = Store.open(tmp_path / "root", url=url)
    yield store
    store.close()
