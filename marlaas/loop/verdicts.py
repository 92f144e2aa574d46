"""What the environments of one job said: whether any judged at all, and why the others did not.

    group finished ─► add ─► texts that are new ─► the tenant's job log
                       └──► every call timed out, no step had a verdict, the job had none ─► failed

A failure ends its own trajectory and is data. A job in which nothing else ever happens learns
nothing, and must end with the reason instead of with the last step.
"""

import math
from collections import Counter
from collections.abc import Iterable

from marlaas.errors import EnvironmentFailure, FailureKind
from marlaas.types import Group, StepRecord, Trajectory, TrajectoryEnd

MAX_TIMEOUTS = 32
"""Trajectories that ended in a time-out before there was any verdict, after which a job stops: each
takes its whole time limit, so steps without a verdict would take hours."""

MAX_TEXTS = 100
"""Distinct failures that are told and counted: code may put anything into what it says."""

MAX_CHARS = 500
"""Of one failure."""

_FAILURES = {kind.value for kind in FailureKind}


class Verdicts:
    """Counts what came of a job's trajectories in this run.

    verdicts = Verdicts()
    for text in verdicts.add(group): log(text)
    verdicts.check_timeouts()
    verdicts.most_frequent()             # "environment_error: reward failed: KeyError: 'anser'"
    """

    def __init__(self) -> None:
        self.has_trained = False
        """A group to train on had a verdict."""
        self._has_any = False
        self._num_timeouts = 0
        self._counts: Counter[str] = Counter()
        self._told: set[str] = set()

    def add(self, group: Group, *, is_training: bool) -> list[str]:
        """Count a group; return what environments said that is to be told, each text once."""
        if has_verdict([group]):
            self._has_any = True
            self.has_trained = self.has_trained or is_training
        untold = []
        for trajectory in group.trajectories:
            text = self._count(trajectory)
            if text and text not in self._told and trajectory.end.value in _FAILURES:
                self._told.add(text)
                untold.append(text)
        if len(self._told) == MAX_TEXTS and untold:
            untold.append("further failures are not listed here; they are with their rollouts")
        return untold

    def most_frequent(self) -> str:
        """Return the failure that came most often, or nothing."""
        (found, _), *_ = self._counts.most_common(1) or [("", 0)]
        return found

    def check_timeouts(self) -> None:
        """Stop a job whose every call takes too long.

        Raises:
            EnvironmentFailure: it has timed out often, and nothing else happened.
        """
        if not self._has_any and self._num_timeouts >= MAX_TIMEOUTS:
            raise EnvironmentFailure(
                FailureKind.TIMEOUT,
                f"{self._num_timeouts} trajectories timed out before there was any verdict; most "
                f"often: {self.most_frequent()}",
            )

    def _count(self, trajectory: Trajectory) -> str:
        """Return a failure's text, unless there were too many distinct ones before."""
        if trajectory.end.is_trainable:
            return ""
        self._num_timeouts += trajectory.end is TrajectoryEnd.TOOL_TIMEOUT
        text = (trajectory.detail or trajectory.end.value)[:MAX_CHARS]
        if text not in self._counts and len(self._counts) == MAX_TEXTS:
            return ""
        self._counts[text] += 1
        return text


def has_verdict(groups: Iterable[Group]) -> bool:
    """Return whether an environment judged anything in some groups."""
    return any(t.end.is_trainable for group in groups for t in group.trajectories)


def had_verdict(record: StepRecord) -> bool:
    """Return whether the groups of a step had one: without any, there is no mean of rewards."""
    return not math.isnan(record.metrics.get("reward_mean", math.nan))
