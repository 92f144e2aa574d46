"""Groups: what was sampled, stored before anything is trained on it.

    open ─► finished ─► trained | dropped

- A finished group is written whole with its summary and its usage, in one transaction.
- Lists read summaries only; the trajectories of one group are read when it is asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from statistics import fmean
from typing import Any

import numpy as np
import sqlalchemy as sa
from sqlalchemy import bindparam

from marlaas.errors import NotFound
from marlaas.store import codec
from marlaas.store.columns import finite_or_none
from marlaas.store.database import insert_into, prepared
from marlaas.store.schema import group_records, groups
from marlaas.store.usage import UsageRecords
from marlaas.types import Group, GroupSummary, TenantId, Trajectory, Usage


class GroupState(StrEnum):
    """`open -> finished -> trained | dropped`."""

    OPEN = "open"
    FINISHED = "finished"
    TRAINED = "trained"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """A group and its fate."""

    index: int
    state: GroupState
    reason: str
    version: int
    step: int | None
    """The step that consumed it."""
    group: Group | None
    """None while open."""


_OF_JOB = (groups.c.tenant_id == bindparam("tenant"), groups.c.job == bindparam("of_job"))


@cache
def _open(dialect: str) -> sa.Executable:
    insert = insert_into(dialect, groups)
    insert = insert.on_conflict_do_update(
        index_elements=["tenant_id", "job", "idx"],
        set_={"version": insert.excluded.version},
        where=groups.c.state == sa.literal_column("'open'"),
    )
    return prepared(dialect, insert, "tenant_id", "job", "idx", "state", "version")


_FINISH = (
    sa.update(groups)
    .where(*_OF_JOB, groups.c.idx == bindparam("index"), groups.c.state == GroupState.OPEN.value)
    .values(
        state=GroupState.FINISHED.value,
        num_trajectories=bindparam("trajectories"),
        num_tokens=bindparam("tokens"),
        reward_mean=bindparam("reward"),
        success_mean=bindparam("success"),
        record_bytes=bindparam("size"),
    )
)
_ADD_RECORD = sa.insert(group_records)
_RECORD = sa.select(group_records.c.record).where(
    group_records.c.tenant_id == bindparam("tenant"),
    group_records.c.job == bindparam("of_job"),
    group_records.c.idx == bindparam("index"),
)
_ALL = (
    sa.select(groups, group_records.c.record)
    .outerjoin(
        group_records,
        (group_records.c.tenant_id == groups.c.tenant_id)
        & (group_records.c.job == groups.c.job)
        & (group_records.c.idx == groups.c.idx),
    )
    .where(*_OF_JOB)
    .order_by(groups.c.idx)
)
_OF_STATE = _ALL.where(groups.c.state == bindparam("state"))
_ONE = _ALL.where(groups.c.idx == bindparam("index"))
_CONSUMED = (
    sa.select(groups.c.idx).where(*_OF_JOB, groups.c.step.is_not(None)).order_by(groups.c.idx)
)


class Groups(UsageRecords):
    """The part of `Store` that keeps trajectories."""

    def open_group(self, tenant_id: TenantId, job: str, index: int, *, version: int) -> None:
        """Record that a group is being sampled; again if its first sampling was lost."""
        values = {
            "tenant_id": tenant_id,
            "job": job,
            "idx": index,
            "state": GroupState.OPEN.value,
            "version": version,
        }
        with self._transaction() as db:
            db.execute(_open(self._dialect), values)

    def finish_group(self, tenant_id: TenantId, job: str, group: Group) -> None:
        """Store what was sampled, and count it, before anything is trained on it; the very same
        again changes nothing: a connection may be lost behind a commit."""
        blob = codec.encode(group)
        summary = summary_columns(group)
        values = {
            "tenant": tenant_id,
            "of_job": job,
            "index": group.index,
            "trajectories": summary["num_trajectories"],
            "tokens": summary["num_tokens"],
            "reward": summary["reward_mean"],
            "success": summary["success_mean"],
            "size": len(blob),
        }
        record = {"tenant_id": tenant_id, "job": job, "idx": group.index, "record": blob}
        with self._transaction() as db:
            if db.execute(_FINISH, values).rowcount == 0:
                before = db.execute(_RECORD, values).scalar()
                is_same = before is not None and bytes(before) == blob
                assert is_same, f"group {group.index} of {tenant_id}/{job} was not open"
                return
            db.execute(_ADD_RECORD, record)
            self._count(db, tenant_id, job, sampling_usage(group), group_bytes=len(blob))

    def groups(
        self, tenant_id: TenantId, job: str, state: GroupState | None = None
    ) -> list[StoredGroup]:
        """Return a job's groups by index, of one state or all."""
        values = {"tenant": tenant_id, "of_job": job}
        if state is None:
            rows = self._rows(_ALL, values)
        else:
            rows = self._rows(_OF_STATE, {**values, "state": state.value})
        return [_stored_group(row) for row in rows]

    def group(self, tenant_id: TenantId, job: str, index: int) -> StoredGroup:
        """Return one group with its trajectories.

        Raises:
            NotFound: this tenant has no such group.
        """
        row = self._row(_ONE, {"tenant": tenant_id, "of_job": job, "index": index})
        if row is None:
            raise NotFound(f"no group {index} of job {job!r}")
        return _stored_group(row)

    def group_page(  # noqa: PLR0913, the conditions of a list
        self,
        tenant_id: TenantId,
        job: str,
        *,
        step: int | None = None,
        state: GroupState | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
        after: int = -1,
        limit: int = 100,
    ) -> list[GroupSummary]:
        """Return summaries of the groups behind index `after` that meet every condition given.

        A bound on the reward leaves out groups without a verdict.
        """
        conditions = [groups.c.tenant_id == tenant_id, groups.c.job == job, groups.c.idx > after]
        if step is not None:
            conditions.append(groups.c.step == step)
        if state is not None:
            conditions.append(groups.c.state == GroupState(state).value)
        if min_reward is not None:
            conditions.append(groups.c.reward_mean >= min_reward)
        if max_reward is not None:
            conditions.append(groups.c.reward_mean <= max_reward)
        page = sa.select(groups).where(*conditions).order_by(groups.c.idx).limit(limit)
        return [_summary(row) for row in self._rows(page, {})]

    def consumed_groups(self, tenant_id: TenantId, job: str) -> list[int]:
        """Return the indices of the groups that steps have taken, without their records."""
        rows = self._rows(_CONSUMED, {"tenant": tenant_id, "of_job": job})
        return [row.idx for row in rows]


def sampling_usage(group: Group) -> Usage:
    """Return what sampling a group took: sampled tokens, and context tokens computed for them.

    The opening of the conversation is computed once a group; what an environment says afterwards,
    once for each trajectory that answers to it.
    """
    sampled = prefill = opening = 0
    for trajectory in group.trajectories:
        count = int(np.count_nonzero(trajectory.loss_mask))
        sampled += count
        if trajectory.turns:
            opening = trajectory.turns[0].start
            prefill += trajectory.turns[-1].end - opening - count
    return Usage(sampled_tokens=sampled, prefill_tokens=opening + prefill)


def summary_columns(group: Group) -> Mapping[str, Any]:
    """Return the columns of a group that lists show."""
    judged = [one for one in group.trajectories if one.end.is_trainable]
    return {
        "num_trajectories": len(group.trajectories),
        "num_tokens": sum(len(one.tokens) for one in group.trajectories),
        "reward_mean": finite_or_none(_mean_reward(judged)),
        "success_mean": sum(one.is_success for one in judged) / len(judged) if judged else None,
    }


def _mean_reward(judged: list[Trajectory]) -> float | None:
    return fmean(one.reward for one in judged) if judged else None


def _stored_group(row: sa.Row) -> StoredGroup:
    return StoredGroup(
        index=row.idx,
        state=GroupState(row.state),
        reason=row.reason,
        version=row.version,
        step=row.step,
        group=None if row.record is None else codec.decode(row.record, Group),
    )


def _summary(row: sa.Row) -> GroupSummary:
    return GroupSummary(
        index=row.idx,
        state=row.state,
        reason=row.reason,
        version=row.version,
        step=row.step,
        num_trajectories=row.num_trajectories,
        reward_mean=row.reward_mean,
        success_mean=row.success_mean,
        num_tokens=row.num_tokens,
    )
