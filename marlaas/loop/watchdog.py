"""Says what makes no progress: which stage of which job waits, for what and for how long.

    with watchdog.watch(spec, Stage.TRAIN, "a step on worker-0"):      # anywhere in the loop
        await ...                                                      # past its bound: a notice

- Every wait of every stage stands here while it lasts. What lasts longer than its stage's bound is
  reported once, and once more when it is over.
- A job of which nothing at all is in progress is reported too: nobody waits in silence.
- A wait costs two dictionary operations; the look around comes once a period, over what waits then.
- The look around is due at fixed times, so its lateness says how long the event loop was held up.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from marlaas import runtime
from marlaas.envs.base import Env, EnvStep, Family
from marlaas.types import JobId, JobSpec, Notice, Prompt

logger = logging.getLogger(__name__)

MAX_LAG_S = 1.0
"""An event loop that is held up longer than this is written to the log."""


class Stage(StrEnum):
    """Where a job can be held up."""

    ROLLOUT = "rollout"
    ENVIRONMENT = "environment"
    TRAIN = "train"
    PUBLISH = "publish"
    STORE = "store"
    WORKER = "worker"
    """A worker is to come back, or to load the policy."""


BOUNDS_S: Mapping[Stage, float] = {
    Stage.ROLLOUT: 120.0,
    Stage.ENVIRONMENT: 120.0,
    Stage.TRAIN: 300.0,
    Stage.PUBLISH: 60.0,
    Stage.STORE: 10.0,
    Stage.WORKER: 120.0,
}
"""Longest time that one wait of a stage takes when all is well, on a slow machine, and some."""

IDLE = "nothing of it is in progress: it waits for its turn, or for room on its worker"


class Watch(Protocol):
    """How a part of the loop says what it waits for: a context manager around the wait."""

    def __call__(self, spec: JobSpec, stage: Stage, what: str) -> "Wait": ...


class Wait:
    """One wait, from `with` to its end."""

    __slots__ = ("_key", "_number", "_watchdog", "since_s", "what")

    def __init__(self, watchdog: "Watchdog", key: tuple[JobId, Stage], what: str) -> None:
        self._watchdog = watchdog
        self._key = key
        self._number = 0
        self.what = what
        self.since_s = 0.0

    def __enter__(self) -> None:
        self.since_s = runtime.now_s()
        self._number = self._watchdog.enter(self._key, self)

    def __exit__(self, *_: object) -> None:
        self._watchdog.leave(self._key, self._number)


@dataclass
class Watched:
    """A job that runs, as the watchdog sees it."""

    spec: JobSpec
    moved_s: float
    """When a wait of the job ended last."""
    waits: dict[Stage, dict[int, Wait]] = field(default_factory=dict)
    """Waits that last, the oldest first."""
    notices: dict[Stage, Notice] = field(default_factory=dict)
    """What was reported and is not over."""


class Watchdog:
    """Watches jobs as long as they are `running`; `run` looks around until it is cancelled.

    watchdog = Watchdog(report=print)
    with watchdog.running(spec):
        with watchdog.watch(spec, Stage.PUBLISH, "version 3 on worker-0"):
            ...
    watchdog.notices(spec.job_id)             # what is held up now
    """

    def __init__(
        self,
        report: Callable[[JobSpec, Notice], None],
        *,
        bounds_s: Mapping[Stage, float] = BOUNDS_S,
        period_s: float = 1.0,
        may_rest: Callable[[JobSpec], bool] = lambda spec: False,
        on_over: Callable[[JobSpec, Stage, str, float], None] | None = None,
    ) -> None:
        """`on_over` hears of every wait that is over: of what, what for, and since when."""
        self._report = report
        self._bounds_s = {**BOUNDS_S, **bounds_s}
        self._period_s = period_s
        self._may_rest = may_rest
        self._on_over = on_over
        self._jobs: dict[JobId, Watched] = {}
        self._numbers = itertools.count(1)
        self.lag_s = 0.0
        """How long the event loop was held up at the last look around."""
        self.max_lag_s = 0.0

    @contextmanager
    def running(self, spec: JobSpec) -> Iterator[None]:
        """Watch a job; outside of it nobody is told what it waits for."""
        self._jobs[spec.job_id] = Watched(spec, runtime.now_s())
        try:
            yield
        finally:
            del self._jobs[spec.job_id]

    def watch(self, spec: JobSpec, stage: Stage, what: str) -> Wait:
        """Return a context manager that stands for one wait, described by `what`."""
        return Wait(self, (spec.job_id, stage), what)

    def notices(self, job_id: JobId) -> list[Notice]:
        """Return what of a job is past its bound, as it was reported."""
        watched = self._jobs.get(job_id)
        return list(watched.notices.values()) if watched is not None else []

    async def run(self) -> None:
        """Look around once a period, and measure how late that comes."""
        while True:
            due_s = runtime.now_s() + self._period_s
            await asyncio.sleep(self._period_s)
            self._note_lag(runtime.now_s() - due_s)
            for watched in list(self._jobs.values()):
                self._look_at(watched)

    # Called by waits ------------------------------------------------------------------------

    def enter(self, key: tuple[JobId, Stage], wait: Wait) -> int:
        """Note a wait; a job that does not run any more is not watched."""
        number = next(self._numbers)
        watched = self._jobs.get(key[0])
        if watched is not None:
            watched.waits.setdefault(key[1], {})[number] = wait
        return number

    def leave(self, key: tuple[JobId, Stage], number: int) -> None:
        """A wait is over."""
        watched = self._jobs.get(key[0])
        if watched is not None:
            wait = watched.waits.get(key[1], {}).pop(number, None)
            watched.moved_s = runtime.now_s()
            if wait is not None and self._on_over is not None:
                self._on_over(watched.spec, key[1], wait.what, wait.since_s)

    # ----------------------------------------------------------------------------------------

    def _look_at(self, watched: Watched) -> None:
        now_s = runtime.now_s()
        if self._may_rest(watched.spec):
            watched.moved_s = now_s
        for stage in Stage:
            oldest = next(iter(watched.waits.get(stage, {}).values()), None)
            if oldest is not None:
                self._judge(watched, stage, oldest.what, now_s - oldest.since_s)
            elif stage is Stage.ROLLOUT and not any(watched.waits.values()):
                self._judge(watched, stage, IDLE, now_s - watched.moved_s)
            else:
                self._judge(watched, stage, "", 0.0)

    def _judge(self, watched: Watched, stage: Stage, cause: str, since_s: float) -> None:
        """Report what passed its bound, once, and what no longer does."""
        is_late, said = since_s > self._bounds_s[stage], watched.notices.get(stage)
        if is_late and said is None:
            notice = self._notice(watched.spec, stage, cause, since_s)
            watched.notices[stage] = notice
            self._report(watched.spec, notice)
        elif said is not None and not is_late:
            del watched.notices[stage]
            self._report(watched.spec, self._notice(watched.spec, stage, "goes on again", 0.0))

    def _notice(self, spec: JobSpec, stage: Stage, cause: str, since_s: float) -> Notice:
        return Notice(stage=stage, tenant=spec.tenant, job=spec.name, cause=cause, since_s=since_s)

    def _note_lag(self, lag_s: float) -> None:
        self.lag_s = max(0.0, lag_s)
        self.max_lag_s = max(self.max_lag_s, self.lag_s)
        if self.lag_s > MAX_LAG_S:
            logger.warning("the event loop was held up for %.1f s", self.lag_s)


class WatchedFamily:
    """A family whose environments' answers are waited for under the watchdog."""

    def __init__(self, family: Family, spec: JobSpec, watch: Watch) -> None:
        self.name = family.name
        self.max_turns = family.max_turns
        self._family = family
        self._spec = spec
        self._watch = watch

    def prompt(self, index: int, *, seed: int, split: str) -> Prompt:
        """Return item `index` of a split."""
        return self._family.prompt(index, seed=seed, split=split)

    def make(self, prompt: Prompt, num_envs: int) -> "Sequence[WatchedEnv]":
        """Return fresh environments for one group."""
        return [
            WatchedEnv(env, self._spec, self._watch) for env in self._family.make(prompt, num_envs)
        ]

    async def start(self) -> None:
        """Start the watched family."""
        with self._watch(self._spec, Stage.ENVIRONMENT, "the environment is to start"):
            await self._family.start()

    async def stop(self) -> None:
        """Stop the watched family."""
        with self._watch(self._spec, Stage.ENVIRONMENT, "the environment is to stop"):
            await self._family.stop()

    def cpu_s(self) -> float:
        """Return CPU seconds of the watched family."""
        return self._family.cpu_s()


class WatchedEnv:
    """An environment whose answers are waited for under the watchdog."""

    def __init__(self, env: Env, spec: JobSpec, watch: Watch) -> None:
        self._env = env
        self._spec = spec
        self._watch = watch

    async def step(self, reply: str, *, is_last: bool) -> EnvStep:
        """Judge the reply."""
        with self._watch(self._spec, Stage.ENVIRONMENT, "a tool or a verdict is to come back"):
            return await self._env.step(reply, is_last=is_last)

    async def close(self) -> None:
        """Close the watched environment."""
        await self._env.close()
