"""Operations: the journal of what clients ask of their runs, and what came of it.

    accept ─► accepted ─┬─ finish_operation ───────────► done | failed
                        └─ commit_run_step (boundary) ─► done | failed, run moved on

- Accepting is idempotent on (run, number): the stored one comes back, whatever its state. Another
  content under a number that was used is refused.
- An accepted operation stays until it is executed. The payload of a `forward_backward` that is done
  stays until a boundary has used its gradient; every other payload goes once it is executed.
- A boundary is one transaction: the operation, the run's version and state, payloads, usage. Its
  state file is on the disk before, and the older one is deleted after.
- Results go by age (`drop_results`); with them, what is left of operations up to the boundary. A
  number up to there is never accepted again.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import sqlalchemy as sa
from sqlalchemy import bindparam

from marlaas import runtime
from marlaas.errors import Conflict, NotFound
from marlaas.store.columns import check_number, clean_text
from marlaas.store.runs import RunRecords, no_run
from marlaas.store.schema import operation_payloads, operation_results, operations, runs
from marlaas.types import (
    FORWARD_BACKWARD,
    Operation,
    OperationState,
    Run,
    StateKind,
    TenantId,
    Usage,
)

_DIGEST_BYTES = 16

RESULT_KEPT_S = 3600.0
"""How long a result waits to be fetched. Clients ask again for minutes."""

_RUN = (runs.c.tenant_id == bindparam("tenant"), runs.c.run_id == bindparam("run"))
_OF_RUN = (operations.c.tenant_id == bindparam("tenant"), operations.c.run_id == bindparam("run"))
_THIS = (*_OF_RUN, operations.c.seq == bindparam("number"))
_IS_ACCEPTED = operations.c.state == sa.literal_column("'accepted'")

_BARE = sa.select(operations).where(*_THIS)
_WITH_RESULT = (
    sa.select(operations, operation_results.c.result)
    .outerjoin(
        operation_results,
        (operation_results.c.tenant_id == operations.c.tenant_id)
        & (operation_results.c.run_id == operations.c.run_id)
        & (operation_results.c.seq == operations.c.seq),
    )
    .where(*_THIS)
)
_WITH_PAYLOADS = (
    sa.select(operations, operation_payloads.c.payload)
    .outerjoin(
        operation_payloads,
        (operation_payloads.c.tenant_id == operations.c.tenant_id)
        & (operation_payloads.c.run_id == operations.c.run_id)
        & (operation_payloads.c.seq == operations.c.seq),
    )
    .where(*_OF_RUN)
    .order_by(operations.c.seq)
)
_ACCEPTED = _WITH_PAYLOADS.where(_IS_ACCEPTED)
_BEHIND_BOUNDARY = (
    sa.select(runs.c.boundary_seq).where(*_RUN).scalar_subquery() < operations.c.seq
)  # fmt: skip
_REPLAYABLE = _WITH_PAYLOADS.where(
    operations.c.kind == FORWARD_BACKWARD,
    operations.c.state == OperationState.DONE.value,
    _BEHIND_BOUNDARY,
)
_FAILED_PASSES = sa.select(sa.func.count()).where(
    *_OF_RUN,
    operations.c.kind == FORWARD_BACKWARD,
    operations.c.state == OperationState.FAILED.value,
    _BEHIND_BOUNDARY,
)
_FINISHED_BEHIND_BOUNDARY = (
    sa.select(operations.c.seq)
    .where(*_OF_RUN, operations.c.state != OperationState.ACCEPTED.value, _BEHIND_BOUNDARY)
    .order_by(operations.c.seq)
)
_RUN_ROW = sa.select(runs).where(*_RUN)
_USE = (
    sa.update(runs)
    .where(*_RUN)
    .values(
        used_s=bindparam("now"),
        journal_bytes=runs.c.journal_bytes + bindparam("more", type_=sa.BigInteger),
    )
)
_ADD = sa.insert(operations)
_ADD_PAYLOAD = sa.insert(operation_payloads)
_ADD_RESULT = sa.insert(operation_results)
_FINISH = (
    sa.update(operations)
    .where(*_THIS, _IS_ACCEPTED)
    .values(
        state=bindparam("new_state"),
        error=bindparam("what"),
        error_category=bindparam("whose"),
        finished_s=bindparam("now"),
    )
    .returning(operations.c.kind)
)
_OF_PAYLOAD = (
    operation_payloads.c.tenant_id == bindparam("tenant"),
    operation_payloads.c.run_id == bindparam("run"),
)
_DROP_PAYLOAD = (
    sa.delete(operation_payloads)
    .where(*_OF_PAYLOAD, operation_payloads.c.seq == bindparam("number"))
    .returning(operation_payloads.c.num_bytes)
)
_DROP_PAYLOADS = (
    sa.delete(operation_payloads)
    .where(*_OF_PAYLOAD, operation_payloads.c.seq <= bindparam("number"))
    .returning(operation_payloads.c.num_bytes)
)
_MOVE = (
    sa.update(runs)
    .where(*_RUN)
    .values(
        version=bindparam("new_version"),
        boundary_seq=bindparam("number"),
        state_path=bindparam("path"),
        state_bytes=bindparam("size"),
        state_kind=bindparam("kind"),
        adapter_hash=bindparam("hash"),
    )
)
_OLD = (
    sa.select(
        operations.c.tenant_id,
        operations.c.run_id,
        operations.c.seq,
        (runs.c.boundary_seq >= operations.c.seq).label("is_over"),
        sa.func.coalesce(operation_results.c.num_bytes, 0).label("num_bytes"),
    )
    .join(
        runs, (runs.c.tenant_id == operations.c.tenant_id) & (runs.c.run_id == operations.c.run_id)
    )
    .outerjoin(
        operation_results,
        (operation_results.c.tenant_id == operations.c.tenant_id)
        & (operation_results.c.run_id == operations.c.run_id)
        & (operation_results.c.seq == operations.c.seq),
    )
    .where(
        operations.c.finished_s.is_not(None),
        operations.c.finished_s <= bindparam("until"),
        operation_results.c.seq.is_not(None) | (runs.c.boundary_seq >= operations.c.seq),
    )
    .limit(bindparam("limit"))
)
_DROP_RESULT = sa.delete(operation_results).where(
    operation_results.c.tenant_id == bindparam("tenant"),
    operation_results.c.run_id == bindparam("run"),
    operation_results.c.seq == bindparam("number"),
)
_FORGET = sa.delete(operations).where(*_THIS)
_SHRINK = (
    sa.update(runs)
    .where(*_RUN)
    .values(journal_bytes=runs.c.journal_bytes - bindparam("less", type_=sa.BigInteger))
)


class Operations(RunRecords):
    """The part of `Store` that keeps the journal of runs."""

    def accept(self, tenant_id: TenantId, operation: Operation) -> Operation:
        """Put an operation into the journal, or return the one that has its number, with its
        result and without its payload. One that is refused at once comes as failed.

        Raises:
            NotFound: this tenant has no such run.
            Conflict: the number was used for something else, or its time is over, or the run's is.
        """
        check_number("seq_id", operation.seq)
        digest = _digest(operation)
        key = _key(tenant_id, operation.run_id, operation.seq)
        with self._transaction() as db:
            stored = db.execute(_WITH_RESULT, key).first()
            if stored is not None:
                if stored.digest != digest:
                    raise Conflict(
                        f"operation {operation.seq} of run {operation.run_id!r} is another one: "
                        "count on with each new one"
                    )
                return _operation(stored, result=stored.result)
            row = db.execute(_RUN_ROW, key).first()
            if row is None:
                raise no_run(operation.run_id)
            _check_open(row, operation)
            new = self._insert(db, tenant_id, operation, digest)
        return new

    def accepted(self, tenant_id: TenantId, run_id: str) -> list[Operation]:
        """Return the operations that are still to be executed, in order, with payloads."""
        rows = self._rows(_ACCEPTED, {"tenant": tenant_id, "run": run_id})
        return [_operation(row, payload=row.payload) for row in rows]

    def replayable(self, tenant_id: TenantId, run_id: str) -> list[Operation]:
        """Return the `forward_backward`s behind the boundary that are done, in order, with
        payloads: what the gradient of the run consists of."""
        rows = self._rows(_REPLAYABLE, {"tenant": tenant_id, "run": run_id})
        return [_operation(row, payload=row.payload) for row in rows]

    def has_failed_pass(
        self, tenant_id: TenantId, run_id: str, *, before_seq: int | None = None
    ) -> bool:
        """Return whether a `forward_backward` behind the boundary, and before a number, failed: the
        gradient lacks it."""
        query = _FAILED_PASSES
        if before_seq is not None:
            query = query.where(operations.c.seq < before_seq)
        return self._row(query, {"tenant": tenant_id, "run": run_id})[0] > 0

    def next_seq(self, tenant_id: TenantId, run_id: str) -> int:
        """Return the number whose turn it is: the first behind the boundary that is not finished.

        Raises:
            NotFound: this tenant has no such run.
        """
        number = self.run(tenant_id, run_id).boundary_seq + 1
        for row in self._rows(_FINISHED_BEHIND_BOUNDARY, {"tenant": tenant_id, "run": run_id}):
            if row.seq != number:
                break
            number += 1
        return number

    def operation(self, tenant_id: TenantId, run_id: str, seq: int) -> Operation:
        """Return an operation with its result and without its payload.

        Raises:
            NotFound: this tenant has no such operation, or it has been forgotten by now.
        """
        is_possible = 0 <= seq < 1 << 63
        row = self._row(_WITH_RESULT, _key(tenant_id, run_id, seq)) if is_possible else None
        if row is None:
            raise _no_operation(run_id, seq)
        return _operation(row, result=row.result)

    def finish_operation(
        self,
        tenant_id: TenantId,
        run_id: str,
        seq: int,
        *,
        result: bytes = b"",
        error: str = "",
        category: str = "",
        usage: Usage | None = None,
    ) -> None:
        """Store what came of an operation: a result, or an error. Once it is finished, another call
        changes nothing: a connection may be lost behind a commit.

        Raises:
            NotFound: this tenant has no such operation.
        """
        key = _key(tenant_id, run_id, seq)
        with self._transaction() as db:
            kind = self._finish(db, key, error, category)
            if kind is None:
                return
            num_bytes = self._add_result(db, key, result)
            if error or kind != FORWARD_BACKWARD:
                num_bytes -= sum(db.execute(_DROP_PAYLOAD, key).scalars())
            self._use(db, key, num_bytes)
            if usage is not None:
                self._count(db, tenant_id, "", usage)

    def commit_run_step(  # noqa: PLR0913, everything that becomes true together
        self,
        tenant_id: TenantId,
        run_id: str,
        seq: int,
        *,
        version: int,
        state_path: str | None,
        state_kind: StateKind,
        adapter_hash: str,
        result: bytes = b"",
        error: str = "",
        category: str = "",
        usage: Usage | None = None,
    ) -> Run:
        """Make a boundary true: what came of the operation that cleared the gradients, the run's
        version and state. Return the run as it is now.

        The state must be on the disk. If it is not in the run's own folder, it is linked there.
        Once the operation is finished, another call changes nothing.

        Raises:
            NotFound: this tenant has no such operation, or what the state is taken from is gone.
            StoreUnavailable: the state is not on the disk.
        """
        key = _key(tenant_id, run_id, seq)
        state = self._own_state(tenant_id, run_id, version, state_path)
        move = {
            "new_version": version,
            "path": state["state_path"],
            "size": state["state_bytes"],
            "kind": StateKind(state_kind).value,
            "hash": adapter_hash,
        }
        with self._transaction() as db:
            if self._finish(db, key, error, category) is not None:
                row = db.execute(_RUN_ROW, key).one()
                is_next = row.version <= version and row.boundary_seq < seq
                assert is_next, f"run {run_id} went back from {row.version} to {version}"
                num_bytes = self._add_result(db, key, result)
                num_bytes -= sum(db.execute(_DROP_PAYLOADS, key).scalars())
                self._use(db, key, num_bytes)
                db.execute(_MOVE, {**key, **move})
                if usage is not None:
                    self._count(db, tenant_id, "", usage)
        self.files.delete_run_states_before(tenant_id, run_id, version)
        return self.run(tenant_id, run_id)

    def drop_results(self, older_than_s: float = RESULT_KEPT_S, *, limit: int = 200) -> int:
        """Delete, for every tenant, results of operations that finished so long ago, and what is
        left of those up to a boundary; return of how many, at most `limit`, so that other calls
        need not wait long: call again until there are none."""
        until_s = runtime.wall_time_s() - older_than_s
        with self._transaction() as db:
            old = db.execute(_OLD, {"until": until_s, "limit": limit}).all()
            if not old:
                return 0
            keys = [{"tenant": row.tenant_id, "run": row.run_id, "number": row.seq} for row in old]
            db.execute(_DROP_RESULT, keys)
            over = [key for key, row in zip(keys, old, strict=True) if row.is_over]
            if over:
                db.execute(_FORGET, over)
            less: dict[tuple[str, str], int] = {}
            for row in old:
                run = (row.tenant_id, row.run_id)
                less[run] = less.get(run, 0) + row.num_bytes
            db.execute(
                _SHRINK,
                [{"tenant": run[0], "run": run[1], "less": size} for run, size in less.items()],
            )
        return len(old)

    # --------------------------------------------------------------------------------------

    def _insert(
        self, db: sa.Connection, tenant_id: TenantId, operation: Operation, digest: str
    ) -> Operation:
        now_s = runtime.wall_time_s()
        is_failed = operation.state is OperationState.FAILED
        assert is_failed or operation.state is OperationState.ACCEPTED
        key = {"tenant_id": tenant_id, "run_id": operation.run_id, "seq": operation.seq}
        row = {
            **key,
            "kind": operation.kind,
            "request_id": operation.request_id,
            "digest": digest,
            "state": operation.state.value,
            "error": clean_text(operation.error),
            "error_category": operation.error_category,
            "created_s": now_s,
            "finished_s": now_s if is_failed else None,
        }
        db.execute(_ADD, row)
        size = 0 if is_failed else len(operation.payload)
        if not is_failed:
            payload = {**key, "num_bytes": size, "payload": operation.payload}
            db.execute(_ADD_PAYLOAD, payload)
        self._use(db, {"tenant": tenant_id, "run": operation.run_id}, size)
        return replace(operation, created_s=now_s, finished_s=row["finished_s"])

    def _finish(
        self, db: sa.Connection, key: Mapping[str, object], error: str, category: str
    ) -> str | None:
        """Finish an operation; return its kind, or None if it was finished before."""
        state = OperationState.FAILED if error else OperationState.DONE
        values = {
            **key,
            "new_state": state.value,
            "what": clean_text(error),
            "whose": category,
            "now": runtime.wall_time_s(),
        }
        kind = db.execute(_FINISH, values).scalar()
        if kind is None and db.execute(_BARE, key).first() is None:
            raise _no_operation(str(key["run"]), key["number"])
        return kind

    def _add_result(self, db: sa.Connection, key: Mapping[str, object], result: bytes) -> int:
        if not result:
            return 0
        row = {
            "tenant_id": key["tenant"],
            "run_id": key["run"],
            "seq": key["number"],
            "num_bytes": len(result),
            "result": result,
        }
        db.execute(_ADD_RESULT, row)
        return len(result)

    def _use(self, db: sa.Connection, key: Mapping[str, object], num_bytes: int) -> None:
        """Note that a run was used, and how the size of its journal changed."""
        values = {
            "tenant": key["tenant"],
            "run": key["run"],
            "now": runtime.wall_time_s(),
            "more": num_bytes,
        }
        db.execute(_USE, values)


def _key(tenant_id: TenantId, run_id: str, seq: int) -> Mapping[str, object]:
    return {"tenant": tenant_id, "run": clean_text(run_id), "number": seq}


def _digest(operation: Operation) -> str:
    digest = hashlib.blake2b(operation.kind.encode(), digest_size=_DIGEST_BYTES)
    digest.update(b"\0")
    digest.update(operation.payload)
    return digest.hexdigest()


def _check_open(run: sa.Row, operation: Operation) -> None:
    if run.ended_s is not None:
        raise Conflict(
            f"run {run.run_id!r} ended, its training state is gone: begin another one from one of "
            "its checkpoints"
        )
    if operation.seq <= run.boundary_seq:
        raise Conflict(
            f"operation {operation.seq} of run {run.run_id!r}: the run went on to "
            f"{run.boundary_seq}, its time is over"
        )


def _no_operation(run_id: str, seq: object) -> NotFound:
    return NotFound(f"no operation {seq} of run {run_id!r}")


def _operation(
    row: sa.Row, *, payload: bytes | None = None, result: bytes | None = None
) -> Operation:
    return Operation(
        run_id=row.run_id,
        seq=row.seq,
        kind=row.kind,
        request_id=row.request_id,
        payload=bytes(payload or b""),
        state=OperationState(row.state),
        result=bytes(result or b""),
        error=row.error,
        error_category=row.error_category,
        created_s=row.created_s,
        finished_s=row.finished_s,
    )
