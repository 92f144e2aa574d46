"""Steps and evaluations: what becomes of a policy.

    finished groups ─► commit_step: record + fates + version + cursor + usage + event ─► published

- A step is one transaction, committed before its version is published.
- An evaluation belongs to a version; judged again, the later one holds, and history has both.
"""

from collections.abc import Mapping
from functools import cache

import sqlalchemy as sa
from sqlalchemy import bindparam

from marlaas import runtime
from marlaas.errors import NotFound
from marlaas.store import codec
from marlaas.store.columns import finite_or_none
from marlaas.store.database import insert_into, prepared
from marlaas.store.groups import GroupState
from marlaas.store.schema import evaluations, groups, jobs, steps, versions
from marlaas.store.versions import Versions
from marlaas.types import EvalRecord, EventKind, StepRecord, TenantId, Usage

_MOVE_CURSOR = (
    sa.update(jobs)
    .where(
        jobs.c.tenant_id == bindparam("tenant"),
        jobs.c.name == bindparam("of_job"),
        jobs.c.step == bindparam("before"),
    )
    .values(step=bindparam("now"), elapsed_s=bindparam("elapsed"))
)
_HAS_JOB = sa.select(jobs.c.name).where(
    jobs.c.tenant_id == bindparam("tenant"), jobs.c.name == bindparam("of_job")
)
_FINISHED = (
    groups.c.tenant_id == bindparam("tenant"),
    groups.c.job == bindparam("of_job"),
    groups.c.state == GroupState.FINISHED.value,
)
_TRAIN = (
    sa.update(groups)
    .where(*_FINISHED, groups.c.idx.in_(bindparam("indices", expanding=True)))
    .values(state=GroupState.TRAINED.value, step=bindparam("now"))
    .returning(groups.c.num_tokens)
)
_DROP = (
    sa.update(groups)
    .where(*_FINISHED, groups.c.idx == bindparam("index"))
    .values(state=GroupState.DROPPED.value, step=bindparam("now"), reason=bindparam("why"))
)
_ADD_STEP = sa.insert(steps)
_FORGET_STATE = (
    sa.update(versions)
    .where(
        versions.c.tenant_id == bindparam("tenant"),
        versions.c.job == bindparam("of_job"),
        versions.c.has_state == 1,
    )
    .values(has_state=0, state_bytes=0)
)
_ADD_VERSION = sa.insert(versions)
_STEP = sa.select(steps.c.record).where(
    steps.c.tenant_id == bindparam("tenant"),
    steps.c.job == bindparam("of_job"),
    steps.c.step == bindparam("now"),
)
_STEPS = (
    sa.select(steps.c.record)
    .where(
        steps.c.tenant_id == bindparam("tenant"),
        steps.c.job == bindparam("of_job"),
        steps.c.step > bindparam("after"),
    )
    .order_by(steps.c.step)
)
_EVALUATION = sa.select(evaluations.c.record).where(
    evaluations.c.tenant_id == bindparam("tenant"),
    evaluations.c.job == bindparam("of_job"),
    evaluations.c.version == bindparam("of_version"),
)
_EVALUATIONS = (
    sa.select(evaluations.c.record)
    .where(evaluations.c.tenant_id == bindparam("tenant"), evaluations.c.job == bindparam("of_job"))
    .order_by(evaluations.c.version)
)


@cache
def _add_evaluation(dialect: str) -> sa.Executable:
    insert = insert_into(dialect, evaluations)
    insert = insert.on_conflict_do_update(
        index_elements=["tenant_id", "job", "version"],
        set_={"success": insert.excluded.success, "record": insert.excluded.record},
    )
    return prepared(dialect, insert, "tenant_id", "job", "version", "success", "record")


_NOTHING = Usage()


class Steps(Versions):
    """The part of `Store` that makes steps true."""

    _tidied: set[tuple[TenantId, str]]
    """Jobs that this process has committed a step of."""

    def commit_step(
        self, tenant_id: TenantId, job: str, record: StepRecord, *, dropped: Mapping[int, str]
    ) -> None:
        """Make a step true: its record, the fate of its groups, its version and the cursor.

        `dropped` says why a consumed group was not trained on. The step's state snapshot must be on
        disk; the one before it is deleted. The very same again changes nothing: a connection may be
        lost behind a commit.
        """
        key = {"tenant": tenant_id, "of_job": job}
        cursor = {"before": record.step - 1, "now": record.step, "elapsed": record.elapsed_s}
        step = {"tenant_id": tenant_id, "job": job, "step": record.step}
        blob = codec.encode(record)
        version = {
            "tenant_id": tenant_id,
            "job": job,
            "version": record.step,
            "adapter_hash": record.adapter_hash,
            "created_s": runtime.wall_time_s(),
            "has_state": 1,
            "state_bytes": self.files.version(tenant_id, job, record.step).state_bytes(),
        }
        with self._transaction() as db:
            if db.execute(_MOVE_CURSOR, {**key, **cursor}).rowcount == 0:
                before = db.execute(_STEP, {**key, "now": record.step}).scalar()
                is_same = before is not None and bytes(before) == blob
                assert is_same, f"step {record.step} of {tenant_id}/{job} is not the next one"
                return
            trained_tokens = self._consume(db, key, record, dropped)
            db.execute(_ADD_STEP, {**step, "record": blob})
            db.execute(_FORGET_STATE, key)
            db.execute(_ADD_VERSION, version)
            self._count(db, tenant_id, job, Usage(trained_tokens=trained_tokens))
            self._write_event(db, tenant_id, job, EventKind.STEP, _step_data(record))
        self._delete_older_states(tenant_id, job, record.step)

    def steps(self, tenant_id: TenantId, job: str, *, after: int = 0) -> list[StepRecord]:
        """Return the learning curve, from behind step `after`."""
        rows = self._rows(_STEPS, {"tenant": tenant_id, "of_job": job, "after": after})
        return [codec.decode(row.record, StepRecord) for row in rows]

    def add_evaluation(
        self, tenant_id: TenantId, job: str, record: EvalRecord, *, usage: Usage = _NOTHING
    ) -> None:
        """Store what an evaluation found, and count what it took; the very same again changes
        nothing: a connection may be lost behind a commit.

        Raises:
            NotFound: the job was deleted meanwhile.
        """
        row = {
            "tenant_id": tenant_id,
            "job": job,
            "version": record.version,
            "success": finite_or_none(record.success),
            "record": codec.encode(record),
        }
        key = {"tenant": tenant_id, "of_job": job}
        with self._transaction() as db:
            if db.execute(_HAS_JOB, key).first() is None:
                raise NotFound(f"no job {job!r}")
            before = db.execute(_EVALUATION, {**key, "of_version": record.version}).scalar()
            if before is not None and bytes(before) == row["record"]:
                return
            db.execute(_add_evaluation(self._dialect), row)
            self._count(db, tenant_id, job, usage)
            self._write_event(db, tenant_id, job, EventKind.EVALUATION, _evaluation_data(record))

    def evaluations(self, tenant_id: TenantId, job: str) -> list[EvalRecord]:
        """Return a job's evaluations by version."""
        rows = self._rows(_EVALUATIONS, {"tenant": tenant_id, "of_job": job})
        return [codec.decode(row.record, EvalRecord) for row in rows]

    # --------------------------------------------------------------------------------------

    def _consume(
        self,
        db: sa.Connection,
        key: Mapping[str, str],
        record: StepRecord,
        dropped: Mapping[int, str],
    ) -> int:
        """Give every group of a step its fate; return how many tokens were trained on."""
        trained = [index for index in record.group_indices if index not in dropped]
        lost = [index for index in record.group_indices if index in dropped]
        num_consumed = trained_tokens = 0
        if trained:
            values = {**key, "now": record.step, "indices": trained}
            counts = db.execute(_TRAIN, values).scalars().all()
            num_consumed, trained_tokens = len(counts), sum(counts)
        if lost:
            fates = [
                {**key, "now": record.step, "index": index, "why": dropped[index]} for index in lost
            ]
            num_consumed += db.execute(_DROP, fates).rowcount
        is_whole = num_consumed == len(record.group_indices)
        assert is_whole, f"step {record.step} took a group twice"
        return trained_tokens

    def _delete_older_states(self, tenant_id: TenantId, job: str, step: int) -> None:
        """Delete the state before a step; once in a process, also what a kill left of others."""
        if (tenant_id, job) in self._tidied:
            self.files.delete_state(tenant_id, job, step - 1)
        else:
            self._tidied.add((tenant_id, job))
            self.files.delete_states_before(tenant_id, job, step)


def _step_data(record: StepRecord) -> dict[str, object]:
    return {
        "step": record.step,
        "metrics": record.metrics,
        "elapsed_s": record.elapsed_s,
        "is_empty": record.is_empty,
        "is_vetoed": record.is_vetoed,
    }


def _evaluation_data(record: EvalRecord) -> dict[str, object]:
    return {
        "version": record.version,
        "success": record.success,
        "reward": record.reward,
        "num_prompts": record.num_prompts,
        "num_failed": record.num_failed,
        "elapsed_s": record.elapsed_s,
    }
