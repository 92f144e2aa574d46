"""One job while it runs: its parts, and what it would open next."""

import asyncio
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass

from marlaas import runtime
from marlaas.envs.base import Family
from marlaas.errors import EnvironmentFailure, FailureKind, PolicyDiverged
from marlaas.loop import algorithms
from marlaas.loop.buffer import Buffer, Ticket
from marlaas.loop.evaluation import Evaluation
from marlaas.loop.policies import Policy
from marlaas.loop.rollout import GroupPlan, GroupRollout
from marlaas.loop.usage import Meter
from marlaas.loop.verdicts import Verdicts, has_verdict
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import GroupState, Store, StoredJob
from marlaas.types import EvalRecord, Group, JobSpec, StepRecord, TenantId

MAX_BARREN_STEPS = 3
"""Steps in a row without a single verdict, or with a vetoed update, after which a job stops."""

MARGIN = 10
"""How much larger than guessed a job's groups may be: with less room than that in the day's tokens,
the first one is waited for."""

FOLLOW_PACE = 0.3
"""Weight of the newest step in the running mean of a job's pace."""

MEAN_GROUPS = 50
"""Groups that a mean of waits goes back: they have heavy tails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What the store says of a job's earlier runs."""

    job: StoredJob
    consumed: list[int]
    """Indices of the groups that steps have taken."""
    finished: list[Group]
    """Groups that no step has taken yet."""
    evaluations: list[EvalRecord]

    @classmethod
    def read(cls, store: Store, tenant_id: TenantId, name: str) -> "Progress":
        """Read everything in one call of the store."""
        rows = store.groups(tenant_id, name, GroupState.FINISHED)
        return cls(
            job=store.job(tenant_id, name),
            consumed=store.consumed_groups(tenant_id, name),
            finished=[row.group for row in rows if row.group is not None],
            evaluations=store.evaluations(tenant_id, name),
        )


class Job:
    """The parts of one running job; the controller moves it, `restore` sets it where it was left.

    job = Job(spec, family, policy, tasks)
    await job.restore(store)
    plan = job.next_plan()         # a training group or a held-out prompt; None: nothing to open
    job.give_back(plan)            # its worker was lost: it is opened again
    """

    def __init__(
        self, spec: JobSpec, family: Family, policy: Policy, tasks: asyncio.TaskGroup
    ) -> None:
        self.spec = spec
        self.family = family
        self.policy = policy
        self.algorithm = algorithms.resolve(spec.algorithm)
        self.buffer = Buffer(
            num_steps=spec.steps,
            prompts_per_step=spec.prompts_per_step,
            max_staleness=spec.max_staleness,
            is_seeded=spec.is_seeded,
        )
        self.meter = Meter(spec)
        self.verdicts = Verdicts()
        self.is_open = False
        """Its policy is live, so that groups can be opened."""
        self.pace_s: float | None = None
        """Seconds from step to step, lately; None before two steps of this run."""
        self.stepped_s = 0.0
        """When this run's last step was published, on the loop's clock."""
        self._tools_s = 0.0
        """What a group's longest trajectory waits for its environment, on average."""
        self._num_groups = 0
        self.is_satisfied = False
        """An evaluation reached `stop_at_success`."""
        self.rollouts: dict[GroupPlan, GroupRollout] = {}
        """Groups and held-out prompts being sampled."""
        self.evaluations: dict[int, Evaluation] = {}
        """Version -> evaluation in progress."""
        self.judged: set[int] = set()
        """Versions with a stored evaluation."""
        self.judging: set[asyncio.Task[None]] = set()
        """Evaluations in progress."""
        self._sampling: set[asyncio.Task[None]] = set()
        """Rollouts to train on."""
        self._trying: set[asyncio.Task[None]] = set()
        """Rollouts of held-out prompts."""
        self._tidying: set[asyncio.Task[None]] = set()
        self._tasks = tasks
        self._waiting: deque[Evaluation] = deque()
        self._num_evals_owed = 0
        self._num_vetoed = 0
        self._num_failed = 0
        self._began_s = runtime.now_s()

    async def restore(self, store: AsyncStore) -> None:
        """Take over what the store says of earlier runs."""
        progress = await store.call(Progress.read, self.spec.tenant, self.spec.name)
        self._began_s = runtime.now_s() - progress.job.elapsed_s
        self.meter.restore(progress.job.usage)
        self.buffer.restore(progress.job.step, progress.consumed, progress.finished)
        for record in progress.evaluations:
            self.note(record)

    @property
    def elapsed_s(self) -> float:
        """Running time of all runs together."""
        return runtime.now_s() - self._began_s

    @property
    def is_trained(self) -> bool:
        """No further step is to be made."""
        return self.is_satisfied or self.buffer.version == self.spec.steps

    # What to open next ------------------------------------------------------------------------

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Put the prompts of an evaluation among what the job opens."""
        self.evaluations[evaluation.version] = evaluation
        self._waiting.append(evaluation)

    def next_plan(self, *, may_train: bool = True) -> GroupPlan | None:
        """Return what is opened next: for each trajectory trained on, one held-out prompt, while
        there are both; what has nothing to open leaves its place to the other."""
        if not may_train:
            return self._next_eval()
        if self._num_evals_owed > 0:
            plan = self._next_eval() or self._next_group()
        else:
            plan = self._next_group() or self._next_eval()
        if plan is not None:
            change = plan.size if plan.is_training else -plan.size
            owed = self._num_evals_owed + change
            self._num_evals_owed = min(max(owed, 0), self.spec.group_size)
        return plan

    @property
    def next_tokens(self) -> int:
        """Tokens that the next group may take; 0 if there is none to open, or held-out prompts
        alone. Beside a first group, of which nothing is known yet, that is a wide margin."""
        if not self.is_open or self.buffer.next_ticket() is None:
            return 0
        tokens = self.meter.group_tokens(self.family.max_turns)
        is_known = self.meter.has_seen_groups or self.buffer.num_held == 0
        return tokens if is_known else MARGIN * tokens

    def give_back(self, plan: GroupPlan) -> None:
        """Let a lost group or prompt be opened again."""
        if plan.is_training:
            self.buffer.reopen(plan.index)
            return
        evaluation = self.evaluations.get(plan.version)
        if evaluation is not None:
            evaluation.give_back(plan)
            if evaluation not in self._waiting:
                self._waiting.appendleft(evaluation)

    def judge(self, group: Group) -> None:
        """Hand a held-out prompt's verdict to its evaluation, unless that was given up."""
        evaluation = self.evaluations.get(group.version)
        if evaluation is not None:
            evaluation.finish(group)

    def cut(self, index: int) -> None:
        """Cut a straggling training group."""
        for plan, rollout in self.rollouts.items():
            if plan.is_training and plan.index == index:
                rollout.cut()

    def _next_group(self) -> GroupPlan | None:
        ticket: Ticket | None = self.buffer.next_ticket()
        if ticket is None:
            return None
        self.buffer.open(ticket)
        return GroupPlan(index=ticket.index, version=ticket.version, size=self.spec.group_size)

    def _next_eval(self) -> GroupPlan | None:
        while self._waiting:
            plan = self._waiting[0].next_plan()
            if plan is not None:
                return plan
            self._waiting.popleft()
        return None

    # What came of it --------------------------------------------------------------------------

    def check_progress(self, record: StepRecord, groups: list[Group]) -> None:
        """Stop a job whose steps come to nothing.

        Raises:
            PolicyDiverged: updates in a row were not finite.
            EnvironmentFailure: no environment gave a verdict for some steps.
        """
        self._num_vetoed = self._num_vetoed + 1 if record.is_vetoed else 0
        self._num_failed = 0 if has_verdict(groups) else self._num_failed + 1
        if self._num_vetoed == MAX_BARREN_STEPS:
            raise PolicyDiverged(f"{MAX_BARREN_STEPS} updates in a row were not finite")
        if self._num_failed == MAX_BARREN_STEPS:
            raise self.without_verdict(f"in {MAX_BARREN_STEPS} steps", groups)

    def without_verdict(self, where: str, groups: list[Group]) -> EnvironmentFailure:
        """Return why the job cannot go on; `groups` speak if this run saw no failure itself."""
        said = self.verdicts.most_frequent()
        if not said:
            earlier = Verdicts()
            for group in groups:
                earlier.add(group, is_training=True)
            said = earlier.most_frequent()
        return EnvironmentFailure(
            FailureKind.ERROR, f"no verdict {where}, so nothing was learned; most often: {said}"
        )

    def note_step(self) -> None:
        """A step was published: follow the pace."""
        now_s = runtime.now_s()
        if self.stepped_s > 0:
            taken_s = now_s - self.stepped_s
            pace_s = taken_s if self.pace_s is None else self.pace_s
            self.pace_s = pace_s + FOLLOW_PACE * (taken_s - pace_s)
        self.stepped_s = now_s

    def note_tools(self, group: Group) -> None:
        """Follow how long environments hold up a group."""
        waits_s = [sum(turn.latency_s for turn in one.turns) for one in group.trajectories]
        self._num_groups += 1
        follow = 1 / min(self._num_groups, MEAN_GROUPS)
        self._tools_s += follow * (max(waits_s, default=0.0) - self._tools_s)

    def least_s(self, group_device_s: float) -> float:
        """Return how long the job still takes at least, with its worker to itself: device time of
        what is left, and tools, for which as many steps wait at a time as staleness allows."""
        steps_left = self.spec.steps - self.buffer.version
        tools_s = self._tools_s / (1 + self.spec.max_staleness)
        return steps_left * (tools_s + self.spec.prompts_per_step * group_device_s)

    def wait_before_attempt_s(self, attempt: int) -> float:
        """Return how long to wait before a step is tried again after its worker was lost.

        The first repetition comes at once. Later ones wait ever longer, each job differently: if
        one job's step is what ends the worker, its neighbours get theirs done in between.
        """
        if attempt <= 1:
            return 0.0
        jitter = runtime.rng("attempt", self.spec.job_id, self.buffer.version, attempt).random()
        return (0.5 + jitter) * 2.0 ** (attempt - 2)

    def note(self, record: EvalRecord) -> None:
        """Take over a verdict that is stored; stop training once one is good enough."""
        self.judged.add(record.version)
        if 0 < self.spec.stop_at_success <= record.success:
            self.is_satisfied = True
            self.buffer.close()

    # Tasks ------------------------------------------------------------------------------------

    def spawn_rollout(
        self, plan: GroupPlan, rollout: Coroutine[None, None, None]
    ) -> asyncio.Task[None]:
        """Run a rollout; its failure is the job's."""
        return self._spawn(rollout, self._sampling if plan.is_training else self._trying)

    def spawn_evaluation(self, evaluation: Coroutine[None, None, None]) -> None:
        self._spawn(evaluation, self.judging)

    def spawn_tidying(self, tidying: Coroutine[None, None, None]) -> None:
        self._spawn(tidying, self._tidying)

    async def all_judged(self) -> None:
        """Wait for the evaluations in progress, and those that are asked for meanwhile."""
        while self.judging:
            await asyncio.wait(self.judging)

    async def all_tidied(self) -> None:
        """Wait until the files and live versions of the newest version are in order."""
        if self._tidying:
            await asyncio.wait(self._tidying)

    def cancel_training_rollouts(self) -> None:
        """End rollouts that no step will take."""
        for task in self._sampling:
            task.cancel()

    async def cancel_tasks(self) -> None:
        """End all that is in progress; the store knows what to do again."""
        tasks = [*self._sampling, *self._trying, *self.judging, *self._tidying]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(
        self, coroutine: Coroutine[None, None, None], tasks: set[asyncio.Task[None]]
    ) -> asyncio.Task[None]:
        task = self._tasks.create_task(coroutine)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(self._notice_failure)
        return task

    def _notice_failure(self, task: asyncio.Task[None]) -> None:
        """A task that failed ends the others, and none can be added from now on."""
        if not task.cancelled() and task.exception() is not None:
            self.is_open = False
