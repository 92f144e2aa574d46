"""The whole loop and its store under virtual time, from one seed: jobs, what tenants do with them,
and what goes wrong.

    seed ─► Plan (jobs, acts, crashes, kills) ─► lives until every job is terminal ─► Outcome

A *life* is one server process: a controller on the store, with fresh workers. It ends by itself or
by a crash at a durable write, before or after it; then the next life begins on what is on disk. An
*act* is what a tenant, an operator or fate does at a moment: pause, cancel, fork, a lower quota, a
lost worker. Acts that a crash interrupts are done again in the next life. Run
`python -m tests.sim.simulation [service] SEED` to replay one seed and see its plan.
"""

import asyncio
import random
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from marlaas import runtime
from marlaas.loop.algorithms import PRESETS
from marlaas.loop.controller import Controller, LoopSettings, Mode
from marlaas.loop.usage import UNLIMITED
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.types import JobSpec, Quotas, Tenant, TenantId
from tests.fakes import ByteTokenizer, FakeWorker, Recorder, SlowStore, Speed, family_of
from tests.sim.actor import Actor

MAX_LIVES = 40
MAX_VIRTUAL_S = 1e7


NUM_TENANTS = 3


def tenant_name(number: int) -> TenantId:
    return TenantId(f"tenant-{number % NUM_TENANTS}")


class Crash(BaseException):
    """The server process is killed here."""


class CrashingStore(Store):
    """A store whose process dies at its n-th durable write, just before it or just after."""

    def __init__(self, root: Path, crash_at: float, *, is_before: bool) -> None:
        self.num_writes = 0
        self._crash_at = crash_at
        self._is_before = is_before
        super().__init__(root)

    @contextmanager
    def _transaction(self) -> Iterator:
        self.num_writes += 1
        is_last = self.num_writes == self._crash_at
        if self.num_writes > self._crash_at or (is_last and self._is_before):
            raise Crash
        with super()._transaction() as db:
            yield db
        if is_last:
            raise Crash


@dataclass(frozen=True, kw_only=True)
class Act:
    """Something that is done `after_s` seconds after the act before it."""

    after_s: float
    verb: str
    """A method of `Actor`."""
    target: int
    """Picks the job, tenant or worker."""
    number: int
    """Whatever number the verb needs."""
    is_awaited: bool = True
    """The next act comes after it, not beside it."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that a seed decides."""

    specs: tuple[JobSpec, ...]
    num_workers: int
    speed: Speed
    crashes: tuple[tuple[int, bool], ...] = ()
    """Per life: at which durable write it ends, and whether before or after it."""
    kills: tuple[tuple[float, int], ...] = ()
    """In the first life: when which worker is lost."""
    mode: Mode = Mode.ASYNC
    acts: tuple[Act, ...] = ()
    quotas: tuple[Quotas, ...] = ()
    """Of tenants 0, 1, ...; empty: nobody has any."""
    max_running_jobs: int = 64
    store_s: float = 0.0
    """How long a call of the store takes, twice, on average; 0: it is made where it stands."""

    @classmethod
    def draw(cls, seed: int) -> "Plan":
        rng = random.Random(seed)
        num_workers = rng.choice([1, 1, 2])
        specs = tuple(_draw_job(rng, index) for index in range(rng.randint(1, 4)))
        return cls(
            specs=specs,
            num_workers=num_workers,
            speed=Speed(max_decoding=rng.choice([4, 16, 64]), restart_s=rng.choice([0.1, 20.0])),
            crashes=tuple(
                (int(rng.expovariate(1 / 40)) + 1, rng.random() < 0.5)
                for _ in range(rng.choice([0, 1, 3, 6]))
            ),
            kills=tuple(
                (rng.uniform(0, 30), rng.randrange(num_workers))
                for _ in range(rng.choice([0, 0, 1, 3]))
            ),
            mode=Mode.LOCKSTEP if rng.random() < 0.1 else Mode.ASYNC,
            store_s=rng.choice([0.0, 0.001, 0.05]),
        )

    @classmethod
    def draw_service(cls, seed: int) -> "Plan":
        """Draw a history with tenants that act while their jobs run."""
        plan, rng = cls.draw(seed), random.Random(f"acts {seed}")
        num_acts = rng.choice([3, 8, 20])
        return replace(
            plan,
            specs=tuple(_capped(rng, spec) for spec in plan.specs),
            acts=tuple(_draw_act(rng) for _ in range(num_acts)),
            quotas=tuple(_draw_quotas(rng) for _ in range(NUM_TENANTS)),
            max_running_jobs=rng.choice([1, 2, 64]),
        )

    def alone(self, spec: JobSpec) -> "Plan":
        """Return the plan in which one job runs by itself and nothing goes wrong."""
        return replace(
            self, specs=(spec,), num_workers=1, crashes=(), kills=(), acts=(), quotas=(),
            max_running_jobs=64, mode=Mode.ASYNC,
        )  # fmt: skip


VERBS = {
    "pause": 4, "resume": 3, "cancel": 1, "flood": 1, "fork": 2, "evaluate": 2,
    "quota": 2, "lose_worker": 1, "delete": 1,
}  # fmt: skip
"""How often each verb is drawn, relative to the others."""


def _draw_act(rng: random.Random) -> Act:
    return Act(
        after_s=rng.choice([0.0, rng.expovariate(1), rng.expovariate(1 / 10)]),
        verb=rng.choices(list(VERBS), list(VERBS.values()))[0],
        target=rng.randrange(100),
        number=rng.randrange(10),
        is_awaited=rng.random() < 0.5,
    )


def _draw_quotas(rng: random.Random) -> Quotas:
    return replace(
        UNLIMITED,
        max_running_jobs=rng.choice([None, 1, 2]),
        tokens_a_day=rng.choice([None, None, 3000]),
    )


def _capped(rng: random.Random, spec: JobSpec) -> JobSpec:
    return replace(
        spec,
        max_job_tokens=rng.choice([0, 0, 0, 500]),
        max_device_s=rng.choice([0.0, 0.0, 0.0, 1.0]),
    )


def _draw_job(rng: random.Random, index: int) -> JobSpec:
    is_seeded = rng.random() < 0.4
    has_kl = rng.random() < 0.2
    eval_every = rng.choice([0, 1, 2])
    return JobSpec(
        tenant=tenant_name(rng.randrange(NUM_TENANTS)),
        name=f"job-{index}",
        env={
            "family": "scripted",
            "max_turns": rng.choice([1, 1, 3]),
            "tool_s": rng.choice([0.0, 0.3, 3.0]),
            "tail": rng.choice([0.0, 0.8, 1.5]),
            "fail_rate": rng.choice([0.0, 0.0, 0.1, 0.4]),
        },
        algorithm={"preset": rng.choice(list(PRESETS)), **({"kl_coef": 0.01} if has_kl else {})},
        steps=rng.randint(2, 6),
        prompts_per_step=rng.randint(1, 3),
        group_size=rng.randint(2, 4),
        max_staleness=rng.randint(0, 4),
        learning_rate=rng.choice([0.5, 5.0]),
        max_tokens=rng.choice([2, 6]),
        eval_every=eval_every,
        eval_prompts=rng.randint(1, 4),
        stop_at_success=rng.choice([0.0, 0.0, 0.9]) if eval_every else 0.0,
        is_in_flight=not is_seeded and rng.random() < 0.2,
        is_seeded=is_seeded,
        straggler_deadline_s=rng.choice([0.5, 5.0, 1e5]),
        seed=rng.randrange(1000),
        keep_versions=rng.randint(0, 3),
    )


@dataclass
class Outcome:
    """What is left after the last life."""

    store: CrashingStore
    recorder: Recorder
    specs: list[JobSpec] = field(default_factory=list)
    """Jobs that were accepted."""
    tenants: dict[TenantId, Tenant] = field(default_factory=dict)
    workers: list[FakeWorker] = field(default_factory=list)
    num_lives: int = 0
    makespan_s: float = 0.0


def simulate(plan: Plan, root: Path) -> Outcome:
    """Live until every job is terminal."""
    recorder, acts, epoch_s = Recorder(), deque(plan.acts), 0.0
    tenants = {
        tenant_name(i): Tenant(tenant_id=tenant_name(i), quotas=quotas)
        for i, quotas in enumerate(plan.quotas)
    }
    specs = list(plan.specs)
    for life in range(MAX_LIVES):
        crash_at, is_before = plan.crashes[life] if life < len(plan.crashes) else (1e18, False)
        store = CrashingStore(root, crash_at, is_before=is_before)
        outcome = Outcome(store, recorder, specs, tenants, num_lives=life + 1)
        kills = plan.kills if life == 0 else ()
        try:
            runtime.run_virtual(_live(plan, outcome, acts, kills), epoch_s=epoch_s)
        except BaseException as error:
            if not _is_crash(error):
                raise
            store.close()
            epoch_s += 3600.0
            continue
        return outcome
    raise AssertionError(f"not done after {MAX_LIVES} lives")


def _is_crash(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_is_crash(inner) for inner in error.exceptions)
    return isinstance(error, Crash)


def _async_store(plan: Plan, store: Store) -> AsyncStore:
    if plan.store_s:
        return SlowStore(store, call_s=plan.store_s, seed=len(plan.specs))
    return AsyncStore(store, is_threaded=False)


async def _live(
    plan: Plan, outcome: Outcome, acts: deque[Act], kills: tuple[tuple[float, int], ...]
) -> None:
    workers = [FakeWorker(f"worker-{i}", speed=plan.speed) for i in range(plan.num_workers)]
    outcome.workers = workers
    controller = Controller(
        _async_store(plan, outcome.store), workers, ByteTokenizer(),
        make_family=family_of, observer=outcome.recorder, mode=plan.mode,
        settings=LoopSettings(max_running_jobs=plan.max_running_jobs, watch_every_s=300.0),
    )  # fmt: skip
    controller.tenants_changed(outcome.tenants.values())
    for spec in plan.specs:
        await controller.submit(spec)
    loop = asyncio.get_running_loop()
    for when_s, index in kills:
        loop.call_later(when_s, workers[index].kill)
    async with asyncio.timeout(MAX_VIRTUAL_S):
        if plan.acts:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(Actor(controller, outcome, acts).play())
                tasks.create_task(controller.serve())
        else:
            await controller.run()
    outcome.makespan_s = runtime.now_s()


if __name__ == "__main__":
    from tests.sim.checks import check

    draw = Plan.draw_service if sys.argv[1] == "service" else Plan.draw
    chosen = draw(int(sys.argv[-1]))
    print(*chosen.specs, replace(chosen, specs=()), sep="\n")  # noqa: T201
    with tempfile.TemporaryDirectory() as folder:
        check(chosen, simulate(chosen, Path(folder)))
