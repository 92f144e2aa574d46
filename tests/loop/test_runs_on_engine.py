"""Runs on a real worker process in exact mode: what is brought back has the same bits."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from marlaas.config import RunSettings
from marlaas.launch import engine_settings, started
from marlaas.loop.operations import (
    Body,
    ForwardBackward,
    LoadWeights,
    OptimStep,
    PassResult,
    Result,
    Saved,
    SaveForSampler,
    SaveWeights,
)
from marlaas.loop.policies import Placement
from marlaas.loop.runner import RunnerSettings
from marlaas.loop.runs import Runs
from marlaas.runtime import rng
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.types import (
    AdamParams,
    AdapterSpec,
    Datum,
    Objective,
    Run,
    Session,
    StepResult,
    TenantId,
)
from marlaas.workers.local import LocalWorker

ACME, OTHER = TenantId("acme"), TenantId("other")
STEP = OptimStep(adam=AdamParams(lr=0.01, weight_decay=0.01))
SPEC = AdapterSpec(rank=8, alpha=32.0, targets=("attention", "mlp", "head"), seed=3)


def batch(number: int, num_data: int = 5) -> ForwardBackward:
    """Return training data that depend on the number alone."""
    draw = rng("batch", number)
    data = []
    for _ in range(num_data):
        length = int(draw.integers(20, 90))
        weights = np.ones(length, dtype=np.float32)
        weights[0] = 0
        data.append(
            Datum(
                tokens=draw.integers(1, 200, length).astype(np.int32),
                weights=weights / 50,
                advantages=draw.normal(size=length).astype(np.float32),
                sampling_logprobs=np.full(length, -5.0, dtype=np.float32),
            )
        )
    return ForwardBackward(data=data, objective=Objective(name="importance_sampling"))


class Client:
    """A client of one run."""

    def __init__(self, runs: Runs, store: AsyncStore, tenant_id: TenantId, seq: int = 0) -> None:
        self.runs = runs
        self.store = store
        self.tenant_id = tenant_id
        self.run_id = f"s-{tenant_id}:train:{seq}"
        self.seq = seq
        self.number = 0

    async def create(self, path: str | None = None, *, with_optimizer: bool = False) -> None:
        session_id = f"s-{self.tenant_id}"
        await self.store.call(Store.add_session, self.tenant_id, Session(session_id=session_id))
        run = Run(
            run_id=self.run_id, session_id=session_id, seq=self.seq, base_model="tiny", spec=SPEC
        )  # fmt: skip
        source = None
        if path is not None:
            source = await self.store.call(Store.find_checkpoint, self.tenant_id, path)
        await self.result(
            await self.runs.create(
                self.tenant_id, run, source=source, with_optimizer=with_optimizer
            )
        )

    async def send(self, *bodies: Body) -> list[str]:
        ids = []
        for body in bodies:
            self.number += 1
            ids.append(await self.runs.submit(self.tenant_id, self.run_id, self.number, body))
        return ids

    async def do(self, *bodies: Body) -> list[Result]:
        return [await self.result(request_id) for request_id in await self.send(*bodies)]

    async def result(self, request_id: str) -> Result:
        result = await self.runs.wait(self.tenant_id, request_id, timeout_s=60.0)
        assert isinstance(result, Result) and not result.error, result
        return result

    async def adapter_hash(self) -> str:
        return (await self.store.call(Store.run, self.tenant_id, self.run_id)).adapter_hash


@asynccontextmanager
async def worker_process() -> AsyncIterator[LocalWorker]:
    settings = engine_settings(RunSettings(num_workers=1), "tiny", is_exact=True)
    async with started(settings) as (worker,):
        yield worker


@asynccontextmanager
async def serving(root: Path, worker: LocalWorker, **settings: int) -> AsyncIterator:
    store = AsyncStore(Store(root))
    runs = Runs(Placement([worker], {}), store, settings=RunnerSettings(**settings))
    await runs.start()
    try:
        yield runs, store
    finally:
        await runs.close()
        await store.close()


def kill(worker: LocalWorker) -> None:
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)


async def trained(client: Client, numbers: Sequence[int]) -> str:
    """Train on batches, two a step; return the adapter's hash."""
    for first, second in zip(numbers[::2], numbers[1::2], strict=True):
        await client.send(batch(first), batch(second))
        await client.do(STEP)
    return await client.adapter_hash()


def test_lost_workers_and_servers_change_no_bit_of_a_run(tmp_path: Path) -> None:
    async def main() -> None:
        async with worker_process() as worker:
            async with serving(tmp_path / "whole", worker) as (runs, store):
                client = Client(runs, store, ACME)
                await client.create()
                expected = await trained(client, [1, 2, 3, 4])
            async with serving(tmp_path / "broken", worker) as (runs, store):
                client = Client(runs, store, ACME)
                await client.create()
                await client.do(batch(1))
                kill(worker)
                await client.do(batch(2), STEP, batch(3))
            async with serving(tmp_path / "broken", worker) as (runs, store):
                client = Client(runs, store, ACME)
                client.number = 4
                (waiting,) = await client.send(batch(4))
                await asyncio.sleep(0.01)
                kill(worker)
                await client.result(waiting)
                await client.do(STEP)
                assert await client.adapter_hash() == expected

    asyncio.run(main())


def test_neighbours_and_a_place_lost_to_them_change_no_bit_of_a_run(tmp_path: Path) -> None:
    async def main() -> None:
        async with worker_process() as worker:
            alone = {}
            for tenant_id, numbers in ((ACME, [1, 2, 3, 4]), (OTHER, [5, 6, 7, 8])):
                async with serving(tmp_path / tenant_id, worker) as (runs, store):
                    client = Client(runs, store, tenant_id)
                    await client.create()
                    alone[tenant_id] = await trained(client, numbers)
            for max_loaded in (1, 8):
                folder = tmp_path / f"both-{max_loaded}"
                async with serving(folder, worker, max_loaded=max_loaded) as (runs, store):
                    mine, theirs = Client(runs, store, ACME), Client(runs, store, OTHER)
                    await mine.create()
                    await theirs.create()
                    hashes = await asyncio.gather(
                        trained(mine, [1, 2, 3, 4]), trained(theirs, [5, 6, 7, 8])
                    )
                    assert hashes == [alone[ACME], alone[OTHER]]

    asyncio.run(main())


def test_what_is_saved_goes_on_like_the_run_with_its_optimizer_and_scores_alike_without(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        scoring = replace(batch(9), is_forward_only=True)
        async with worker_process() as worker, serving(tmp_path, worker) as (runs, store):
            client = Client(runs, store, ACME)
            await client.create()
            await trained(client, [1, 2])
            saved, scores, _ = await client.do(SaveWeights(name="one"), scoring, batch(3))
            assert isinstance(saved.value, Saved) and saved.value.path is not None
            path = saved.value.path
            saved_hash = await client.adapter_hash()
            await client.do(STEP)
            expected = await client.adapter_hash()

            whole, bare = Client(runs, store, ACME, seq=1), Client(runs, store, ACME, seq=2)
            await whole.create(path, with_optimizer=True)
            await bare.create(path)
            for other in (whole, bare):
                assert await other.adapter_hash() == saved_hash
                (again,) = await other.do(scoring)
                assert isinstance(again.value, PassResult)
                assert isinstance(scores.value, PassResult)
                for one, two in zip(again.value.outputs, scores.value.outputs, strict=True):
                    np.testing.assert_array_equal(one.logprobs, two.logprobs)
                await other.do(batch(3), STEP)
            assert await whole.adapter_hash() == expected
            fresh_moments = await bare.adapter_hash()
            assert fresh_moments != expected

            for with_optimizer, hash_ in ((True, expected), (False, fresh_moments)):
                load = LoadWeights(path=path, with_optimizer=with_optimizer)
                results = await client.do(batch(7), load, batch(3), STEP)
                assert await client.adapter_hash() == hash_
                step = results[-1].value
                assert isinstance(step, StepResult) and step.adapter_hash == hash_
            (sampler,) = await client.do(SaveForSampler(sampler_seq=0))
            assert isinstance(sampler.value, Saved)
            # Once what was loaded before is gone, and the worker with it.
            kill(worker)
            await client.do(batch(4), STEP)
            await bare.do(batch(4), STEP)
            assert await client.adapter_hash() == await bare.adapter_hash()
            stats = await worker.stats()
            assert stats.tokens["train"] > 0

    asyncio.run(main())


def test_the_engine_refuses_what_it_cannot_train_on_and_the_run_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with worker_process() as worker, serving(tmp_path, worker) as (runs, store):
            client = Client(runs, store, ACME)
            await client.create()
            long = replace(batch(1).data[0], tokens=np.full(8, 10**6, dtype=np.int32))
            wrong = ForwardBackward(data=[long], objective=Objective(name="importance_sampling"))
            ids = await client.send(batch(1), wrong, STEP, batch(2), batch(3), STEP)
            results = [await runs.wait(ACME, one, timeout_s=60.0) for one in ids]
            categories = [result.category for result in results if isinstance(result, Result)]
            assert categories == ["", "user", "user", "", "", ""]
            other = Client(runs, store, OTHER)
            await other.create()
            assert await client.adapter_hash() == await trained(other, [2, 3])

    asyncio.run(main())
