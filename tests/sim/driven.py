"""Clients that drive runs under virtual time, from one seed, while servers and workers die.

    seed ─► DrivenPlan (scripts, crashes, kills) ─► lives, until all have their outcome ─► check

As in `simulation.py` a life is one server process, which ends at a durable write, before or after
it. Clients outlive servers: what they heard no answer to they send again, under the same number.
Run `python -m tests.sim.driven SEED` to replay one seed and see its plan.
"""

import asyncio
import random
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from marlaas import runtime
from marlaas.loop.operations import (
    Body,
    LoadWeights,
    Result,
    SaveForSampler,
    SaveWeights,
    Value,
    request_id_of,
)
from marlaas.loop.policies import Placement
from marlaas.loop.runner import RunnerSettings
from marlaas.loop.runs import Runs
from marlaas.loop.usage import Tenants
from marlaas.store.async_store import AsyncStore
from marlaas.types import AdapterSpec, OperationState, Run, Session, TenantId
from tests.driving import STEP, Reference, faulty, train
from tests.fakes import FakeWorker, SlowStore, Speed, hash_of
from tests.sim.simulation import Crash, CrashingStore

MAX_LIVES = 40
MAX_VIRTUAL_S = 1e6
PAUSE_S = 3600.0
"""Time between lives."""
LETTERS = "abcdefgh"


@dataclass(frozen=True, kw_only=True)
class Script:
    """What one client does."""

    tenant: TenantId
    seq: int
    bodies: tuple[Body, ...]
    order: tuple[int, ...]
    """Numbers in the order in which they are sent; some of them more than once."""
    waits: tuple[float, ...]
    """Seconds before each is sent."""

    @property
    def session_id(self) -> str:
        return f"s-{self.tenant}"

    @property
    def run_id(self) -> str:
        return f"{self.session_id}:train:{self.seq}"


@dataclass(frozen=True, kw_only=True)
class DrivenPlan:
    """Everything that a seed decides."""

    scripts: tuple[Script, ...]
    num_workers: int
    settings: RunnerSettings
    speed: Speed
    store_s: float
    crashes: tuple[tuple[int, bool], ...]
    """Per life: at which durable write it ends, and whether before or after it."""
    kills: tuple[tuple[float, int], ...]
    """In every life: when which worker is lost."""

    @classmethod
    def draw(cls, seed: int) -> "DrivenPlan":
        rng = random.Random(f"driven {seed}")
        num_workers = rng.choice([1, 1, 2])
        return cls(
            scripts=tuple(
                _draw_script(rng, TenantId(f"tenant-{number % 2}"), number)
                for number in range(rng.randint(1, 4))
            ),
            num_workers=num_workers,
            settings=RunnerSettings(
                max_loaded=rng.choice([1, 2, 32]),
                max_training_tokens=rng.choice([1, 20, 4096]),
                max_passes=rng.choice([1, 3, 16]),
            ),
            speed=Speed(train_s=rng.choice([0.001, 0.1]), restart_s=rng.choice([0.1, 20.0])),
            store_s=rng.choice([0.0, 0.001, 0.05]),
            crashes=tuple(
                (int(rng.expovariate(1 / 25)) + 1, rng.random() < 0.5)
                for _ in range(rng.choice([0, 1, 3, 6]))
            ),
            kills=tuple(
                (rng.uniform(0, 20), rng.randrange(num_workers))
                for _ in range(rng.choice([0, 0, 1, 3]))
            ),
        )


def _draw_script(rng: random.Random, tenant: TenantId, seq: int) -> Script:
    run_id = f"s-{tenant}:train:{seq}"
    bodies = tuple(_draw_body(rng, run_id, seq, number) for number in range(1, rng.randint(3, 25)))
    order = list(range(1, len(bodies) + 1))
    for start in range(0, len(order), 3):  # as chunks of one batch: the first comes last
        if rng.random() < 0.5:
            order[start : start + 3] = reversed(order[start : start + 3])
    for number in list(order):
        if rng.random() < 0.2:
            order.insert(rng.randrange(len(order)), number)
    waits = tuple(rng.choice([0.0, 0.0, rng.expovariate(1)]) for _ in order)
    return Script(tenant=tenant, seq=seq, bodies=bodies, order=tuple(order), waits=waits)


def _draw_body(rng: random.Random, run_id: str, seq: int, number: int) -> Body:
    def words() -> list[str]:
        return [
            "".join(rng.choices(LETTERS, k=rng.randint(2, 6))) for _ in range(rng.randint(1, 3))
        ]

    name = rng.choice("uvw")
    choices = (
        (8, lambda: train(*words())),
        (2, lambda: train(*words(), is_forward_only=True)),
        (1, faulty),
        (5, lambda: STEP),
        (2, lambda: SaveWeights(name=name, overwrite=rng.random() < 0.5)),
        (2, lambda: SaveForSampler(sampler_seq=1000 * seq + number)),
        (2, lambda: LoadWeights(path=f"tinker://{run_id}/weights/{name}", with_optimizer=True)),
    )  # fmt: skip
    (make,) = rng.choices([make for _, make in choices], [share for share, _ in choices])
    return make()


@dataclass
class Client:
    """One client through all lives: what it has heard of."""

    script: Script
    outcomes: dict[int, Result] = field(default_factory=dict)

    async def play(self, runs: Runs, store: CrashingStore) -> None:
        """Send what has no known outcome, and wait for all of them."""
        script = self.script
        store.add_session(script.tenant, Session(session_id=script.session_id))
        run = Run(
            run_id=script.run_id, session_id=script.session_id, seq=script.seq, base_model="tiny",
            spec=AdapterSpec(),
        )  # fmt: skip
        await self._hear(runs, store, await runs.create(script.tenant, run), 0)
        for number, wait_s in zip(script.order, script.waits, strict=True):
            if number not in self.outcomes:
                await asyncio.sleep(wait_s)
                body = script.bodies[number - 1]
                await runs.submit(script.tenant, script.run_id, number, body)
        for number in range(1, len(script.bodies) + 1):
            await self._hear(runs, store, request_id_of(script.run_id, number), number)

    async def _hear(self, runs: Runs, store: CrashingStore, request_id: str, number: int) -> None:
        while True:
            result = await runs.wait(self.script.tenant, request_id, timeout_s=25.0)
            if store.is_over:
                raise Crash
            if isinstance(result, Result):
                before = self.outcomes.setdefault(number, result)
                assert _shape(before) == _shape(result), f"{request_id} had two outcomes"
                return


class DyingStore(CrashingStore):
    """A `CrashingStore` that says when its process has died."""

    @property
    def is_over(self) -> bool:
        return self.num_writes >= self._crash_at


def _shape(result: Result) -> tuple[str, str, type[Value | None]]:
    return result.error, result.category, type(result.value)


def drive(plan: DrivenPlan, root: Path) -> tuple[DyingStore, list[Client]]:
    """Live until every client has heard of everything."""
    clients = [Client(script) for script in plan.scripts]
    epoch_s = 0.0
    for life in range(MAX_LIVES):
        crash_at, is_before = plan.crashes[life] if life < len(plan.crashes) else (1e18, False)
        store = DyingStore(root, crash_at, is_before=is_before)
        try:
            runtime.run_virtual(_live(plan, store, clients), epoch_s=epoch_s)
        except Crash:
            store.close()
            epoch_s += PAUSE_S
            continue
        return store, clients
    raise AssertionError(f"not done after {MAX_LIVES} lives")


async def _live(plan: DrivenPlan, store: DyingStore, clients: list[Client]) -> None:
    workers = [FakeWorker(f"worker-{i}", speed=plan.speed) for i in range(plan.num_workers)]
    if plan.store_s:
        calls: AsyncStore = SlowStore(store, call_s=plan.store_s, seed=len(clients))
    else:
        calls = AsyncStore(store, is_threaded=False)
    tenants = Tenants({})
    placement = Placement(workers, tenants.weights)
    runs = Runs(placement, calls, tenants=tenants, settings=plan.settings)
    loop = asyncio.get_running_loop()
    for when_s, index in plan.kills:
        loop.call_later(when_s, workers[index].kill)
    async with asyncio.timeout(MAX_VIRTUAL_S):
        await runs.start()
        await asyncio.gather(*(client.play(runs, store) for client in clients))
        await runs.close()
    for worker in workers:
        assert not worker.policies, f"left on {worker.name}: {list(worker.policies)}"


def check(store: DyingStore, clients: list[Client]) -> None:
    """Compare with what must come of every script, executed one operation after another."""
    tokens: dict[TenantId, int] = {}
    for client in clients:
        script, expected, saved = client.script, Reference.fresh(), {}
        for number, body in enumerate(script.bodies, start=1):
            category = expected.apply(body, saved)
            outcome = client.outcomes[number]
            assert outcome.category == category, f"{script.run_id} {number}: {outcome}"
            stored = store.operation(script.tenant, script.run_id, number)
            assert stored.state is (OperationState.FAILED if category else OperationState.DONE)
        run = store.run(script.tenant, script.run_id)
        assert run.version == expected.version
        assert run.adapter_hash == hash_of(expected.logits), script.run_id
        assert store.accepted(script.tenant, script.run_id) == []
        tokens[script.tenant] = tokens.get(script.tenant, 0) + expected.trained_tokens
    for tenant, trained in tokens.items():
        assert store.usage(tenant).trained_tokens == trained
    assert store.unfinished_runs() == []


if __name__ == "__main__":
    chosen = DrivenPlan.draw(int(sys.argv[-1]))
    print(chosen)  # noqa: T201
    with tempfile.TemporaryDirectory() as folder:
        check(*drive(chosen, Path(folder)))
