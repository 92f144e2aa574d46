"""Sees everything that the loop tells, and does nothing: what a benchmark watches, it overrides."""

from collections.abc import Sequence

from marlaas.types import EvalRecord, Group, JobSpec, JobState, Notice, StepRecord, WorkerStats


class Onlooker:
    """A `JobObserver` without an opinion."""

    def job_state(self, spec: JobSpec, state: JobState, reason: str) -> None:
        pass

    def step_done(self, spec: JobSpec, record: StepRecord) -> None:
        pass

    def eval_done(self, spec: JobSpec, record: EvalRecord) -> None:
        pass

    def group_done(self, spec: JobSpec, group: Group) -> None:
        pass

    def notice(self, spec: JobSpec, notice: Notice) -> None:
        pass

    def stage_done(self, spec: JobSpec, stage: str, worker: str, began_s: float, what: str) -> None:
        pass

    def workers_seen(self, stats: Sequence[WorkerStats]) -> None:
        pass
