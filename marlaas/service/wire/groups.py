"""Schemas of groups and trajectories."""

from marlaas.service.wire.common import Answer, Number, finite, finite_row
from marlaas.store.db import StoredGroup
from marlaas.types import (
    GroupSummary,
    Trajectory,
    Turn,
)


class GroupRow(Answer):
    """What a list shows of a group."""

    index: int
    state: str
    reason: str
    version: int
    step: int | None
    num_trajectories: int
    reward_mean: Number
    success_mean: Number
    num_tokens: int

    @classmethod
    def of(cls, row: GroupSummary) -> "GroupRow":
        return cls(
            index=row.index,
            state=row.state,
            reason=row.reason,
            version=row.version,
            step=row.step,
            num_trajectories=row.num_trajectories,
            reward_mean=None if row.reward_mean is None else finite(row.reward_mean),
            success_mean=None if row.success_mean is None else finite(row.success_mean),
            num_tokens=row.num_tokens,
        )


class GroupPage(Answer):
    groups: list[GroupRow]
    next: int | None
    """Hand it to `after` for the next page; null on the last one."""


class MessageInfo(Answer):
    role: str
    content: str


class TurnInfo(Answer):
    """One generation: tokens [start, end) were sampled."""

    start: int
    end: int
    version: int
    adapter_hash: str
    stop_reason: str
    latency_s: float

    @classmethod
    def of(cls, turn: Turn) -> "TurnInfo":
        return cls(
            start=turn.start,
            end=turn.end,
            version=turn.version,
            adapter_hash=turn.adapter_hash,
            stop_reason=turn.stop_reason.value,
            latency_s=turn.latency_s,
        )


class TokensInfo(Answer):
    """Every token of a trajectory; the lists are aligned."""

    ids: list[int]
    is_sampled: list[bool]
    sampling_logprobs: list[Number]
    versions: list[int]
    """-1 where the token was not sampled."""

    @classmethod
    def of(cls, trajectory: Trajectory) -> "TokensInfo":
        return cls(
            ids=trajectory.tokens.tolist(),
            is_sampled=trajectory.loss_mask.tolist(),
            sampling_logprobs=[finite(value) for value in trajectory.sampling_logprobs.tolist()],
            versions=trajectory.versions.tolist(),
        )


class TrajectoryInfo(Answer):
    """One rollout, readable."""

    index: int
    messages: list[MessageInfo]
    turns: list[TurnInfo]
    reward: Number
    is_success: bool
    end: str
    detail: str
    metrics: dict[str, Number]
    num_tokens: int
    tokens: TokensInfo | None
    """Only when asked for."""

    @classmethod
    def of(cls, trajectory: Trajectory, *, with_tokens: bool) -> "TrajectoryInfo":
        return cls(
            index=trajectory.index,
            messages=[MessageInfo(role=m.role, content=m.content) for m in trajectory.messages],
            turns=[TurnInfo.of(turn) for turn in trajectory.turns],
            reward=finite(trajectory.reward) if trajectory.end.is_trainable else None,
            is_success=trajectory.is_success,
            end=trajectory.end.value,
            detail=trajectory.detail,
            metrics=finite_row(trajectory.metrics),
            num_tokens=len(trajectory.tokens),
            tokens=TokensInfo.of(trajectory) if with_tokens else None,
        )


class GroupInfo(Answer):
    """A group with all its trajectories; none while it is being sampled."""

    index: int
    state: str
    reason: str
    version: int
    step: int | None
    prompt_index: int | None
    trajectories: list[TrajectoryInfo]

    @classmethod
    def of(cls, stored: StoredGroup, *, with_tokens: bool) -> "GroupInfo":
        group = stored.group
        trajectories = () if group is None else group.trajectories
        return cls(
            index=stored.index,
            state=stored.state,
            reason=stored.reason,
            version=stored.version,
            step=stored.step,
            prompt_index=None if group is None else group.prompt_index,
            trajectories=[TrajectoryInfo.of(t, with_tokens=with_tokens) for t in trajectories],
        )
