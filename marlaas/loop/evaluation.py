"""Evaluation of one policy version on held-out prompts, one sample each.

Its rollouts go through the same admission and generator as training rollouts, and no step waits for
them: version n is judged while n + 1 and n + 2 are trained.
"""

import asyncio
from collections import deque

from marlaas.loop.fairness import TokenCounts
from marlaas.loop.rollout import GroupPlan
from marlaas.types import EvalRecord, Group, JobSpec, Usage


def is_due(spec: JobSpec, version: int) -> bool:
    """Return whether the schedule asks for an evaluation of a version: first, every n-th, last."""
    if spec.eval_prompts == 0:
        return False
    if version in (0, spec.steps):
        return True
    return spec.eval_every > 0 and version % spec.eval_every == 0


class Evaluation:
    """One version being judged: each prompt is `waiting -> open -> judged`, then `done` is set.

    evaluation = Evaluation(version=3, num_prompts=128)
    plan = evaluation.next_plan()                   # admission
    evaluation.finish(group)                        # rollout; or give_back(plan) if it was lost
    await evaluation.done.wait()
    record = evaluation.record(elapsed_s=12.0)
    """

    def __init__(self, version: int, num_prompts: int) -> None:
        self.version = version
        self.done = asyncio.Event()
        self._num_prompts = num_prompts
        self._waiting = deque(range(num_prompts))
        self._judged: dict[int, Group] = {}

    def next_plan(self) -> GroupPlan | None:
        """Take the next prompt, or None if all are on their way."""
        if not self._waiting:
            return None
        index = self._waiting.popleft()
        return GroupPlan(index=index, version=self.version, size=1, split="eval")

    def give_back(self, plan: GroupPlan) -> None:
        self._waiting.appendleft(plan.index)

    def finish(self, group: Group) -> None:
        self._judged[group.index] = group
        if len(self._judged) == self._num_prompts:
            self.done.set()

    def record(self, elapsed_s: float) -> EvalRecord:
        """Return what came out; prompts whose environment failed have no verdict."""
        trajectories = [self._judged[index].trajectories[0] for index in sorted(self._judged)]
        judged = [trajectory for trajectory in trajectories if trajectory.end.is_trainable]
        count = max(1, len(judged))
        return EvalRecord(
            version=self.version,
            success=sum(trajectory.is_success for trajectory in judged) / count,
            reward=sum(trajectory.reward for trajectory in judged) / count,
            num_prompts=len(trajectories),
            num_failed=len(trajectories) - len(judged),
            elapsed_s=elapsed_s,
        )

    def usage(self) -> Usage:
        """Return what the evaluation made the generator compute."""
        counts = [TokenCounts.of(group, is_training=False) for group in self._judged.values()]
        return Usage(
            evaluated_tokens=int(sum(count.decode for count in counts)),
            prefill_tokens=int(sum(count.prefill for count in counts)),
        )
