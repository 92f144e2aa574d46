"""Runs: policies that clients drive, with the newest durable state of each; and samplers.

    add_run ─► [operations]* ─► drop_expired (long after its session): state gone, ended_s set
                                              checkpoints and row stay

- Adding is idempotent on (session, seq): a client that heard no answer asks again.
- A run's state is a file of its own. What it begins from, another run's checkpoint, is linked into
  its folder first: it stays whatever becomes of that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import sqlalchemy as sa
from sqlalchemy import bindparam, func

from marlaas import runtime
from marlaas.errors import Conflict, NotFound, QuotaExceeded, StoreUnavailable
from marlaas.store import codec
from marlaas.store.columns import check_number, clean_text, encode_json
from marlaas.store.files import check_run_id, size_of
from marlaas.store.schema import checkpoints, operations, runs, samplers, sessions
from marlaas.store.sessions import Sessions
from marlaas.types import AdapterSpec, Run, Sampler, StateKind, TenantId

IDLE_RUN_S = 3600.0
"""A run counts against `Quotas.max_runs` until its session ends, or until neither run nor session
was heard of for this long."""

STATE_KEPT_S = 24 * 3600.0
"""How long the training state of a run is kept after its last operation, once its session ended or
fell silent. Checkpoints are what lasts."""

EMPTY_SESSION_KEPT_S = 7 * 24 * 3600.0
"""How long a session without runs is kept, with its samplers, after it was heard of last, or any of
these was used."""

_RETRY_S = 60.0

_SESSION = sa.select(sessions.c.session_id).where(
    sessions.c.tenant_id == bindparam("tenant"), sessions.c.session_id == bindparam("session")
)
_THIS = (runs.c.tenant_id == bindparam("tenant"), runs.c.run_id == bindparam("run"))
_ADD = sa.insert(runs)
_ONE = sa.select(runs).where(*_THIS)
_SAME = sa.select(runs).where(
    (runs.c.run_id == bindparam("run"))
    | (
        (runs.c.tenant_id == bindparam("tenant"))
        & (runs.c.session_id == bindparam("session"))
        & (runs.c.seq == bindparam("number"))
    )
)
_IN_SESSION = (sessions.c.tenant_id == runs.c.tenant_id) & (
    sessions.c.session_id == runs.c.session_id
)
_IS_LIVE = sa.and_(
    runs.c.ended_s.is_(None),
    sessions.c.finished_s.is_(None),
    (runs.c.used_s > bindparam("since")) | (sessions.c.seen_s > bindparam("since")),
)
_NUM_LIVE = (
    sa.select(func.count())
    .select_from(runs.join(sessions, _IN_SESSION))
    .where(runs.c.tenant_id == bindparam("tenant"), _IS_LIVE)
)


def _of_run(table: sa.Table, what: sa.ColumnElement[int]) -> sa.Select[tuple[int]]:
    """Select a number of the rows of another table that are of a run."""
    of_run = (table.c.tenant_id == runs.c.tenant_id) & (table.c.run_id == runs.c.run_id)
    return sa.select(func.coalesce(what, 0)).where(of_run).correlate(runs)


_WITH_USE = (
    sa.select(
        runs,
        sa.case((_IS_LIVE, 1), else_=0).label("is_live"),
        _of_run(operations, func.count())
        .where(operations.c.state == sa.literal_column("'accepted'"))
        .scalar_subquery()
        .label("num_waiting"),
        _of_run(checkpoints, func.count()).scalar_subquery().label("num_checkpoints"),
        (
            runs.c.state_bytes
            + runs.c.journal_bytes
            + _of_run(checkpoints, func.sum(checkpoints.c.size_bytes)).scalar_subquery()
        ).label("stored_bytes"),
    )
    .select_from(runs.join(sessions, _IN_SESSION))
    .where(runs.c.tenant_id == bindparam("tenant"))
    .order_by(runs.c.created_s.desc(), runs.c.session_id, runs.c.seq.desc())
)
_OLD = (
    sa.select(runs.c.tenant_id, runs.c.run_id)
    .join(sessions, _IN_SESSION)
    .where(
        runs.c.ended_s.is_(None),
        runs.c.used_s <= bindparam("since"),
        sessions.c.finished_s.is_not(None) | (sessions.c.seen_s <= bindparam("since")),
        ~sa.exists().where(
            operations.c.tenant_id == runs.c.tenant_id,
            operations.c.run_id == runs.c.run_id,
            operations.c.state == sa.literal_column("'accepted'"),
        ),
    )
)
_DROP_EMPTY = sa.delete(sessions).where(
    sessions.c.seen_s <= bindparam("since"),
    ~sa.exists().where(_IN_SESSION),
    ~sa.exists().where(
        samplers.c.tenant_id == sessions.c.tenant_id,
        samplers.c.session_id == sessions.c.session_id,
        samplers.c.used_s > bindparam("since"),
    ),
)
_END = (
    sa.update(runs)
    .where(*_THIS)
    .values(
        ended_s=bindparam("now"),
        state_kind=StateKind.FRESH.value,
        state_path=None,
        state_bytes=0,
        journal_bytes=0,
    )
)
_FORGET_OPERATIONS = sa.delete(operations).where(
    operations.c.tenant_id == bindparam("tenant"), operations.c.run_id == bindparam("run")
)
_UNFINISHED = (
    sa.select(operations.c.tenant_id, operations.c.run_id)
    .where(operations.c.state == sa.literal_column("'accepted'"))
    .distinct()
    .order_by(operations.c.tenant_id, operations.c.run_id)
)
_MARK = sa.update(runs).where(*_THIS).values(is_corrupted=1)

_ADD_SAMPLER = sa.insert(samplers)
_SAME_SAMPLER = sa.select(samplers).where(
    samplers.c.tenant_id == bindparam("tenant"),
    (samplers.c.sampler_id == bindparam("sampler"))
    | (
        (samplers.c.session_id == bindparam("session"))
        & (samplers.c.seq == bindparam("number"))
    ),
)  # fmt: skip
_SAMPLER = sa.select(samplers).where(
    samplers.c.tenant_id == bindparam("tenant"), samplers.c.sampler_id == bindparam("sampler")
)
_SAMPLERS = (
    sa.select(samplers)
    .where(
        samplers.c.tenant_id == bindparam("tenant"), samplers.c.session_id == bindparam("session")
    )
    .order_by(samplers.c.seq)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A run, with what it holds and waits for."""

    run: Run
    is_live: bool
    """It counts against its tenant's quota of runs."""
    num_waiting: int
    """Operations that were accepted and are not executed yet."""
    num_checkpoints: int
    """Unnamed ones too."""
    stored_bytes: int
    """Its training state, what of its operations is kept, and its checkpoints."""


class RunRecords(Sessions):
    """The part of `Store` that knows runs and samplers."""

    def add_run(self, tenant_id: TenantId, run: Run, *, max_live: int | None = None) -> bool:
        """Store a run of a session; False if the very same is there already.

        Raises:
            NotFound: this tenant has no such session.
            Conflict: there is another run of that number or id.
            QuotaExceeded: the tenant has `max_live` runs at work.
        """
        check_number("model_seq_id", run.seq)
        check_run_id(run.run_id)
        row = _run_row(tenant_id, run)
        find = {
            "tenant": tenant_id,
            "session": clean_text(run.session_id),
            "run": run.run_id,
            "number": run.seq,
        }
        with self._transaction() as db:
            if db.execute(_SESSION, find).first() is None:
                raise NotFound(f"no session {run.session_id!r}")
            before = db.execute(_SAME, find).mappings().all()
            if before:
                _check_same(row, before)
                return False
            self._check_live(db, tenant_id, max_live)
            state = self._own_state(tenant_id, run.run_id, run.version, run.state_path)
            db.execute(_ADD, {**row, **state, "state_kind": run.state_kind.value})
        return True

    def run(self, tenant_id: TenantId, run_id: str) -> Run:
        """Return a run.

        Raises:
            NotFound: this tenant has no such run.
        """
        row = self._row(_ONE, {"tenant": tenant_id, "run": clean_text(run_id)})
        if row is None:
            raise no_run(run_id)
        return self._run(row)

    def runs(
        self,
        tenant_id: TenantId,
        *,
        session_id: str | None = None,
        limit: int = 100,
        offset: int = 0,
    ) -> tuple[list[Run], int]:
        """Return a tenant's runs, newest first, of one session or all; and how many there are."""
        conditions = [runs.c.tenant_id == tenant_id]
        if session_id is not None:
            conditions.append(runs.c.session_id == clean_text(session_id))
        order = (runs.c.created_s.desc(), runs.c.session_id, runs.c.seq.desc())
        page = sa.select(runs).where(*conditions).order_by(*order).limit(limit).offset(offset)
        total = sa.select(func.count()).select_from(runs).where(*conditions)
        return [self._run(row) for row in self._rows(page, {})], self._row(total, {})[0]

    def run_rows(self, tenant_id: TenantId, *, limit: int = 100, offset: int = 0) -> list[RunRow]:
        """Return a tenant's runs, newest first, each with what it holds and waits for."""
        query = _WITH_USE.limit(limit).offset(offset)
        return [
            RunRow(
                run=self._run(row),
                is_live=bool(row.is_live),
                num_waiting=int(row.num_waiting),
                num_checkpoints=int(row.num_checkpoints),
                stored_bytes=int(row.stored_bytes),
            )
            for row in self._rows(query, _live(tenant_id))
        ]

    def num_live_runs(self, tenant_id: TenantId) -> int:
        """Return how many runs of a tenant are at work, as its quota counts them."""
        return self._row(_NUM_LIVE, _live(tenant_id))[0]

    def mark_corrupted(self, tenant_id: TenantId, run_id: str) -> None:
        """Note that the state of a run cannot be trusted any more."""
        with self._transaction() as db:
            if db.execute(_MARK, {"tenant": tenant_id, "run": clean_text(run_id)}).rowcount != 1:
                raise no_run(run_id)

    def unfinished_runs(self) -> list[tuple[TenantId, str]]:
        """Return the runs of every tenant that have accepted operations to be executed."""
        return [(TenantId(row.tenant_id), row.run_id) for row in self._rows(_UNFINISHED, {})]

    # Samplers -----------------------------------------------------------------------------

    def add_sampler(self, tenant_id: TenantId, sampler: Sampler) -> Sampler:
        """Store a sampler of a session, and return it; the very same again changes nothing.

        Raises:
            NotFound: this tenant has no such session.
            Conflict: there is another sampler of that number or id.
        """
        check_number("sampling_session_seq_id", sampler.seq)
        check_run_id(sampler.sampler_id)
        find = {
            "tenant": tenant_id,
            "session": clean_text(sampler.session_id),
            "sampler": sampler.sampler_id,
            "number": sampler.seq,
        }
        row: dict[str, object] = {
            "tenant_id": tenant_id,
            "session_id": sampler.session_id,
            "sampler_id": sampler.sampler_id,
            "seq": sampler.seq,
            "base_model": clean_text(sampler.base_model),
            "checkpoint_path": sampler.checkpoint_path,
        }
        with self._transaction() as db:
            if db.execute(_SESSION, find).first() is None:
                raise NotFound(f"no session {sampler.session_id!r}")
            before = db.execute(_SAME_SAMPLER, find).mappings().all()
            if not before:
                now_s = sampler.created_s or runtime.wall_time_s()
                db.execute(_ADD_SAMPLER, {**row, "created_s": now_s, "used_s": now_s})
            elif any(one[name] != row[name] for one in before for name in row):
                raise Conflict(
                    f"sampler {sampler.seq} of session {sampler.session_id!r} is another one: "
                    "count on with each new one"
                )
        return self.sampler(tenant_id, sampler.sampler_id)

    def sampler(self, tenant_id: TenantId, sampler_id: str) -> Sampler:
        """Return a sampler.

        Raises:
            NotFound: this tenant has no such sampler.
        """
        row = self._row(_SAMPLER, {"tenant": tenant_id, "sampler": clean_text(sampler_id)})
        if row is None:
            raise no_sampler(sampler_id)
        return _sampler(row)

    def samplers(self, tenant_id: TenantId, session_id: str) -> list[Sampler]:
        """Return the samplers of a session, by number."""
        rows = self._rows(_SAMPLERS, {"tenant": tenant_id, "session": clean_text(session_id)})
        return [_sampler(row) for row in rows]

    # --------------------------------------------------------------------------------------

    def _check_live(self, db: sa.Connection, tenant_id: TenantId, max_live: int | None) -> None:
        if max_live is None:
            return
        num_live = db.execute(_NUM_LIVE, _live(tenant_id)).scalar_one()
        if num_live >= max_live:
            raise QuotaExceeded(
                f"{num_live} runs are at work, and {max_live} may be: finish a session first",
                _RETRY_S,
            )

    def _own_state(
        self, tenant_id: TenantId, run_id: str, version: int, path: str | None
    ) -> dict[str, object]:
        """Return the columns of a run's state, which is linked into its own folder unless it is
        there."""
        if path is None:
            return {"state_path": None, "state_bytes": 0}
        own = Path(path)
        if own.parent != self.files.run(tenant_id, run_id) / "states":
            if not own.exists():
                raise NotFound(f"the checkpoint that run {run_id!r} begins from is gone")
            own = Path(self.files.run_state(tenant_id, run_id, version))
            self.files.link(path, own)
        num_bytes = size_of(own)
        if num_bytes == 0:
            raise StoreUnavailable(f"{own} is not there: the state of {run_id!r} was not written")
        return {"state_path": str(own.relative_to(self.files.root)), "state_bytes": num_bytes}

    def _end_old_runs(self) -> int:
        """Delete the training state of runs that nobody will go on with; return how many."""
        now_s = runtime.wall_time_s()
        with self._transaction() as db:
            old = db.execute(_OLD, {"since": now_s - STATE_KEPT_S}).all()
            for row in old:
                key = {"tenant": row.tenant_id, "run": row.run_id}
                db.execute(_FORGET_OPERATIONS, key)
                db.execute(_END, {**key, "now": now_s})
        for row in old:
            self.files.delete_run_states(TenantId(row.tenant_id), row.run_id)
        return len(old)

    def _drop_empty_sessions(self) -> int:
        """Delete sessions, and their samplers, that left nothing behind; return how many."""
        with self._transaction() as db:
            since_s = runtime.wall_time_s() - EMPTY_SESSION_KEPT_S
            return db.execute(_DROP_EMPTY, {"since": since_s}).rowcount

    def _run(self, row: sa.Row) -> Run:
        path = None if row.state_path is None else str(self.files.root / row.state_path)
        return Run(
            run_id=row.run_id,
            session_id=row.session_id,
            seq=row.seq,
            base_model=row.base_model,
            spec=codec.decode(row.spec, AdapterSpec),
            metadata=msgspec.json.decode(row.metadata),
            optimizer=msgspec.json.decode(row.optimizer),
            created_s=row.created_s,
            used_s=row.used_s,
            version=row.version,
            boundary_seq=row.boundary_seq,
            state_path=path,
            state_kind=StateKind(row.state_kind),
            adapter_hash=row.adapter_hash,
            is_corrupted=bool(row.is_corrupted),
            ended_s=row.ended_s,
        )


def no_run(run_id: str) -> NotFound:
    return NotFound(f"no run {run_id!r}")


def no_sampler(sampler_id: str) -> NotFound:
    return NotFound(f"no sampler {sampler_id!r}")


def _live(tenant_id: TenantId) -> dict[str, object]:
    return {"tenant": tenant_id, "since": runtime.wall_time_s() - IDLE_RUN_S}


_ASKED = ("tenant_id", "session_id", "run_id", "seq", "base_model", "metadata", "optimizer")
"""Columns that say what a client asked for; `spec` too, which is bytes."""


def _run_row(tenant_id: TenantId, run: Run) -> dict[str, object]:
    now_s = run.created_s or runtime.wall_time_s()
    return {
        "tenant_id": tenant_id,
        "session_id": run.session_id,
        "run_id": run.run_id,
        "seq": run.seq,
        "base_model": clean_text(run.base_model),
        "spec": codec.encode(run.spec),
        "metadata": encode_json(run.metadata),
        "optimizer": encode_json(run.optimizer),
        "created_s": now_s,
        "used_s": now_s,
        "version": run.version,
        "boundary_seq": run.boundary_seq,
        "adapter_hash": run.adapter_hash,
    }


def _check_same(row: Mapping[str, object], before: Sequence[sa.RowMapping]) -> None:
    for one in before:
        is_same = bytes(one["spec"]) == row["spec"]
        if not is_same or any(one[name] != row[name] for name in _ASKED):
            raise Conflict(
                f"run {row['seq']} of session {row['session_id']!r} was made with other settings: "
                "count on with each new one"
            )


def _sampler(row: sa.Row) -> Sampler:
    return Sampler(
        sampler_id=row.sampler_id,
        session_id=row.session_id,
        seq=row.seq,
        base_model=row.base_model,
        checkpoint_path=row.checkpoint_path,
        created_s=row.created_s,
        used_s=row.used_s,
    )
