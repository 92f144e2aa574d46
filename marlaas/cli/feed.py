"""From a service to a display: jobs, events and workers become calls of `display.Lines`.

    thread a tenant ─► jobs, then events ─┐
    thread ─► workers, now and then ──────┴─► queue ─► `drain`, in the thread that draws ─► Lines

- Only the thread that draws touches the lines.
- Events say what happened; whenever a stream stands anew the jobs are looked at again, so that
  nothing is missed and no step is shown twice.
- What fails in a thread comes out of `drain`: no display stands still without a word.
"""

import math
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from marlaas import runtime
from marlaas.cli.display import Lines
from marlaas.client import Client
from marlaas.client.records import Evaluation, JobInfo
from marlaas.errors import MarlaasError, NotFound
from marlaas.types import (
    EvalRecord,
    Event,
    EventKind,
    JobSpec,
    JobState,
    StepRecord,
    TenantId,
)

WORKERS_EVERY_S = 0.5


class Feed:
    """Feeds one display: constructed -> (follow | watch_workers)* -> drain* -> close.

    feed.follow("acme", client)
    while not feed.is_over:
        feed.drain(0.25)
    """

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._num_opening = 0
        self._is_closed = threading.Event()

    def follow(
        self, tenant: str, client: Client, *, only: str | None = None, with_ended: bool = False
    ) -> None:
        """Show a tenant's jobs that are queued or running, and those to come; or only one job.

        `with_ended` shows those too that have ended already.
        """
        self._num_opening += 1
        reader = _Reader(tenant, client, self._lines, self._queue.put)
        reader.only, reader.with_ended = only, with_ended or only is not None
        self._start(reader.read, then=self._opened)

    def watch_workers(self, client: Client) -> None:
        """Show where the workers' time goes; takes an operator's key."""

        def read() -> Iterator[None]:
            while not self._is_closed.wait(WORKERS_EVERY_S):
                seen = partial(self._lines.workers_seen, client.machine().workers)
                self._queue.put(seen)
                yield

        self._start(read, then=lambda: None)

    def drain(self, timeout_s: float) -> None:
        """Hand over what came in; wait for the first of it at most so long.

        Raises:
            MarlaasError: the service is lost for good, or refused something.
        """
        try:
            self._queue.get(timeout=timeout_s)()
            while True:
                self._queue.get_nowait()()
        except queue.Empty:
            return

    @property
    def is_over(self) -> bool:
        """Whether all jobs are known and none is queued or running."""
        is_active = any(line.state.is_active for line in self._lines.jobs.values())
        return self._num_opening == 0 and not is_active

    def close(self) -> None:
        """Let the threads end; one that waits for an event ends with its connection."""
        self._is_closed.set()

    def _opened(self) -> None:
        self._num_opening -= 1

    def _start(self, read: Callable[[], Iterator[None]], *, then: Callable[[], None]) -> None:
        """Run a reader in a thread until the feed is closed; `then` comes after its first look."""

        def run() -> None:
            is_first = True
            try:
                for _ in read():
                    if is_first:
                        self._queue.put(then)
                    is_first = False
                    if self._is_closed.is_set():
                        return
            except MarlaasError as error:
                self._queue.put(partial(_raise, error))

        threading.Thread(target=run, name="feed", daemon=True).start()


def _raise(error: MarlaasError) -> None:
    raise error


class _Reader:
    """What a tenant's thread knows: the jobs that are shown, and how far each was read."""

    def __init__(
        self,
        tenant: str,
        client: Client,
        lines: Lines,
        put: Callable[[Callable[[], None]], object],
    ) -> None:
        self.only: str | None = None
        self.with_ended = False
        self._tenant = tenant
        self._client = client
        self._lines = lines
        self._put = put
        self._specs: dict[str, JobSpec] = {}
        self._steps: dict[str, int] = {}
        """The newest step that was shown."""

    def read(self) -> Iterator[None]:
        """Look at the jobs and follow their events; yield after each of both."""
        job = None if self.only is None else self._client.jobs.get(self.only)
        for event in (job or self._client).follow():
            if event is None:
                infos = [job.refresh().info] if job else [j.info for j in self._client.jobs.list()]
                for info in infos:
                    self._look(info)
            else:
                self._take(event)
            yield

    def _look(self, info: JobInfo) -> None:
        """Show what the job itself says, and the steps of it that no event told of."""
        is_new = info.name not in self._specs
        if is_new and not info.state.is_active and not self.with_ended:
            return
        spec = self._specs.setdefault(info.name, _spec_of(self._tenant, info))
        seen = self._steps.setdefault(info.name, 0)
        if is_new or info.step > seen:
            job = self._client.jobs.get(info.name)
            records = [_step_record(row) for row in job.metrics(after=seen)]
            evals = [_eval_record(row) for row in job.evaluations()] if is_new else []
            self._steps[info.name] = max([seen, *(record.step for record in records)])
            self._put(lambda: self._lines.recall(spec, records, evals))
        self._put(lambda: _set_state(self._lines, spec, info.state, info.reason))

    def _take(self, event: Event) -> None:
        if event.job not in self._specs:
            self._meet(event.job)
        spec = self._specs.get(event.job)
        if spec is None:
            return
        data: Mapping[str, Any] = event.data
        if event.kind is EventKind.STATE:
            state = JobState(data["state"])
            self._put(lambda: _set_state(self._lines, spec, state, data["reason"]))
        elif event.kind is EventKind.STEP and data["step"] > self._steps[event.job]:
            self._steps[event.job] = data["step"]
            record = _step_record({**data, **data["metrics"]})
            self._put(lambda: _show_step(self._lines, spec, record))
        elif event.kind is EventKind.EVALUATION:
            evaluation = _eval_record(Evaluation(**data))
            self._put(lambda: self._lines.eval_done(spec, evaluation))
        elif event.kind is EventKind.NOTICE:
            self._put(lambda: self._lines.say(f"{spec.job_id}: {data['stage']}: {data['cause']}"))

    def _meet(self, name: str) -> None:
        """Begin to show a job that an event is the first word of."""
        if self.only is not None:
            return
        try:
            self._look(self._client.jobs.get(name).info)
        except NotFound:
            return  # deleted since


def _show_step(lines: Lines, spec: JobSpec, record: StepRecord) -> None:
    """Groups are no events, so what was sampled is counted by step."""
    num_tokens = record.metrics.get("tokens_sampled", 0.0)
    lines.line(spec).note_tokens(int(num_tokens), runtime.now_s())
    lines.step_done(spec, record)


def _set_state(lines: Lines, spec: JobSpec, state: JobState, reason: str) -> None:
    line = lines.line(spec)
    if (line.state, line.reason) != (state, reason):
        lines.job_state(spec, state, reason)


def _spec_of(tenant: str, info: JobInfo) -> JobSpec:
    """Return as much of a job as a display reads."""
    return JobSpec(tenant=TenantId(tenant), name=info.name, env=info.spec["env"], steps=info.steps)


def _step_record(row: Mapping[str, Any]) -> StepRecord:
    """Return a row of the curve as the loop reports it."""
    names = ("step", "elapsed_s", "is_empty", "is_vetoed")
    metrics = {
        name: math.nan if value is None else float(value)
        for name, value in row.items()
        if name not in names and isinstance(value, int | float | None)
    }
    return StepRecord(
        step=row["step"],
        group_indices=(),
        adapter_hash="",
        is_vetoed=row["is_vetoed"],
        is_empty=row["is_empty"],
        metrics=metrics,
        elapsed_s=row["elapsed_s"],
    )


def _eval_record(row: Evaluation) -> EvalRecord:
    return EvalRecord(
        version=row.version,
        success=math.nan if row.success is None else row.success,
        reward=math.nan if row.reward is None else row.reward,
        num_prompts=row.num_prompts,
        num_failed=row.num_failed,
        elapsed_s=row.elapsed_s,
    )
