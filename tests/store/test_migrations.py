"""A database comes to the schema of this release, whole, or stays as it was."""

import re
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from marlaas.errors import StoreUnavailable
from marlaas.store import codec, migrate
from marlaas.store.db import GroupState, Store
from marlaas.store.schema import METADATA
from marlaas.types import JobState, Usage
from tests.store.records import (
    ACME,
    OTHER,
    all_rows,
    eval_of,
    group_of,
    record_of,
    spec_of,
    trajectory_of,
)

OLD_SCHEMA = Path(__file__).with_name("before_migrations.sql").read_text()


def scripts() -> ScriptDirectory:
    config = Config()
    config.set_main_option("script_location", str(migrate.FOLDER))
    return ScriptDirectory.from_config(config)


def schema_of(path: Path) -> set[tuple[str, tuple[str, ...]]]:
    """Return the words of every table and index, sorted: a column that was added later stands
    behind the constraints."""
    with sqlite3.connect(path) as db:
        rows = db.execute("SELECT name, sql FROM sqlite_master WHERE name NOT LIKE 'alembic%'")
        return {(name, tuple(sorted(re.findall(r"\w+", sql)))) for name, sql in rows if sql}


def make_old(root: Path, *, record: bytes | None = None) -> None:
    """A store from before migrations: a job at step 1, whose second group may be damaged."""
    root.mkdir()
    db = sqlite3.connect(root / "store.db")
    db.executescript(OLD_SCHEMA)
    jobs = [(ACME, "sums", "running", 1, 12.5), (OTHER, "sums", "queued", 0, 0.0)]
    for number, (tenant, name, state, step, elapsed_s) in enumerate(jobs):
        blob = codec.encode(spec_of(tenant, name))
        db.execute(
            "INSERT INTO jobs (tenant_id, name, state, step, elapsed_s, created_s, spec) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (tenant, name, state, step, elapsed_s, 1796083200.0 + number, blob),
        )
    blobs = [codec.encode(group_of(index, trajectory_of(reward=1.0))) for index in range(3)]
    blobs[1] = record or blobs[1]
    for row in [
        (0, "trained", "", 1, blobs[0]),
        (1, "dropped", "zero_variance", 1, blobs[1]),
        (2, "finished", "", None, blobs[2]),
        (3, "open", "", None, None),
    ]:
        db.execute("INSERT INTO groups VALUES ('acme', 'sums', ?, ?, ?, 0, ?, ?)", row)
    step, evaluation = codec.encode(record_of(1, 0, 1)), codec.encode(eval_of(0))
    db.execute("INSERT INTO steps VALUES ('acme', 'sums', 1, ?)", (step,))
    db.execute("INSERT INTO evaluations VALUES ('acme', 'sums', 0, 0.5, ?)", (evaluation,))
    db.execute("INSERT INTO versions VALUES ('acme', 'sums', 0, 'hash0', 0, 1)")
    db.execute("INSERT INTO versions VALUES ('acme', 'sums', 1, 'hash1', 1, 0)")
    db.commit()
    db.close()


def test_the_newest_revision_is_the_one_that_is_looked_for() -> None:
    assert scripts().get_current_head() == migrate.HEAD
    assert [script.revision for script in scripts().walk_revisions()][-1] == "0001"


def test_migrations_make_the_tables_that_the_code_knows(store: Store, tmp_path: Path) -> None:
    context = MigrationContext.configure(store._connection, opts={"compare_type": True})
    assert compare_metadata(context, METADATA) == []
    if store.url is None:  # here constraints are text too, and can be compared
        engine = sa.create_engine(f"sqlite:///{tmp_path / 'created.db'}")
        METADATA.create_all(engine)
        assert schema_of(store.files.root / "store.db") == schema_of(tmp_path / "created.db")
        engine.dispose()


def test_opening_again_changes_nothing(store: Store, url: str | None) -> None:
    store.add_job(ACME, spec_of())
    before = all_rows(store)
    again = Store(store.files.root, url=url)
    assert all_rows(again) == before
    again.close()


def test_a_store_from_before_migrations_is_taken_over(tmp_path: Path) -> None:
    make_old(tmp_path / "root")
    store = Store(tmp_path / "root")
    assert schema_of(tmp_path / "root/store.db") == schema_of(new_store(tmp_path / "new"))
    stored = store.job(ACME, "sums")
    assert (stored.spec, stored.state, stored.step) == (spec_of(), JobState.RUNNING, 1)
    assert stored.elapsed_s == 12.5
    assert [row.spec.tenant for row in store.all_jobs()] == [ACME, OTHER]
    assert [(row.state, row.reason, row.step) for row in store.groups(ACME, "sums")] == [
        (GroupState.TRAINED, "", 1),
        (GroupState.DROPPED, "zero_variance", 1),
        (GroupState.FINISHED, "", None),
        (GroupState.OPEN, "", None),
    ]
    assert store.group(ACME, "sums", 2).group is not None
    assert [row.reward_mean for row in store.group_page(ACME, "sums")] == [1.0, 1.0, 1.0, None]
    assert store.steps(ACME, "sums") == [record_of(1, 0, 1)]
    assert store.evaluations(ACME, "sums") == [eval_of(0)]
    versions = store.versions(ACME, "sums")
    assert [(row.has_state, row.has_adapter, row.success) for row in versions] == [
        (False, True, 0.5),
        (True, False, None),
    ]
    used = Usage(sampled_tokens=15, prefill_tokens=12, trained_tokens=10)
    assert store.usage_by_job(ACME) == {"sums": used}
    assert store.usage(ACME, since_day="2026-12-01") == used
    assert [(line.seq, line.data["state"]) for line in store.events(ACME)] == [(1, "running")]
    store.commit_step(ACME, "sums", record_of(2, 2), dropped={})
    store.add_job(ACME, spec_of(name="next"))
    assert [line.seq for line in store.events(ACME)] == [1, 2, 3]
    store.close()
    Store(tmp_path / "root").close()


def new_store(root: Path) -> Path:
    Store(root).close()
    return root / "store.db"


def test_an_upgrade_that_fails_leaves_the_old_store(tmp_path: Path) -> None:
    make_old(tmp_path / "root", record=b"damaged")
    before = schema_of(tmp_path / "root/store.db")
    with pytest.raises(StoreUnavailable, match="group 1 of acme/sums is damaged"):
        Store(tmp_path / "root")
    assert schema_of(tmp_path / "root/store.db") == before
    with sqlite3.connect(tmp_path / "root/store.db") as db:
        assert db.execute("SELECT count(*) FROM groups").fetchone() == (4,)


def test_a_newer_schema_is_refused_and_left_alone(store: Store, url: str | None) -> None:
    with store._transaction() as db:
        db.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    try:
        with pytest.raises(
            StoreUnavailable, match="schema 9999, made by a newer MARLaaS; this one"
        ):
            Store(store.files.root, url=url)
    finally:
        with store._transaction() as db:
            db.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{migrate.HEAD}'")
    Store(store.files.root, url=url).close()


def test_migrations_are_in_the_package() -> None:
    """A folder without `__init__.py` would be left out of a wheel."""
    for folder in (migrate.FOLDER, migrate.FOLDER / "versions"):
        assert (folder / "__init__.py").is_file()
