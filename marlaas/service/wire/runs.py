"""Schemas of the runs of `tinker` clients, as their tenant and operators list them."""

from marlaas.service.wire.common import Answer
from marlaas.store.db import RunRow


class RunInfo(Answer):
    """A policy that a client drives operation by operation."""

    run: str
    session: str
    rank: int
    version: int
    """Optimizer steps and loads so far."""
    is_live: bool
    """It counts against the tenant's `max_runs`."""
    num_waiting: int
    """Operations that were accepted and are not executed yet."""
    num_checkpoints: int
    stored_bytes: int
    """Training state, operations that are kept, and checkpoints."""
    created_s: float
    used_s: float
    """When an operation was last accepted or finished."""
    metadata: dict[str, str]
    """What the client noted."""

    @classmethod
    def of(cls, row: RunRow) -> "RunInfo":
        run = row.run
        return cls(
            run=run.run_id,
            session=run.session_id,
            rank=run.spec.rank,
            version=run.version,
            is_live=row.is_live,
            num_waiting=row.num_waiting,
            num_checkpoints=row.num_checkpoints,
            stored_bytes=row.stored_bytes,
            created_s=run.created_s,
            used_s=run.used_s,
            metadata=dict(run.metadata),
        )


class RunPage(Answer):
    runs: list[RunInfo]
    """Newest first."""
    next: int | None
    """Where the next page begins (`after`); null on the last."""
