"""A policy's calls reach the worker that holds it, or nobody."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from marlaas import runtime
from marlaas.errors import WorkerLost
from marlaas.loop.fairness import TokenCounts
from marlaas.loop.policies import Placement, Policy
from marlaas.loop.watchdog import Watchdog
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.types import AdamParams, GenerateRequest, JobSpec, SamplingParams, StepRecord
from tests.fakes import FakeWorker

SPEC = JobSpec(tenant="acme", name="j", env={}, steps=10, keep_versions=2)
ADAM = AdamParams(lr=0.1)


def started(root: Path, *workers: FakeWorker, spec: JobSpec = SPEC) -> tuple[Policy, Store]:
    store = Store(root)
    store.add_job(spec.tenant, spec)
    placement = Placement(workers, {})
    placement.assign(spec, TokenCounts.guess(spec, max_turns=1))
    threadless = AsyncStore(store, is_threaded=False)
    watch = Watchdog(report=lambda spec, notice: None).watch
    return Policy(spec, placement, threadless, watch=watch, on_room=lambda: None), store


async def step(policy: Policy, store: Store) -> int:
    """Make, commit and publish one version without data."""
    version = policy.version + 1
    result = await policy.trainer.optim_step("acme/j", ADAM, policy.snapshot_path(version))
    record = StepRecord(
        step=version, group_indices=(), adapter_hash=result.adapter_hash, is_vetoed=False,
        is_empty=True, metrics={}, elapsed_s=0.0,
    )  # fmt: skip
    store.commit_step("acme", "j", record, dropped={})
    await policy.publish(version)
    await policy.keep_adapter()
    return version


def request(version: int, name: str = "s") -> GenerateRequest:
    return GenerateRequest(
        request_id=name, sequence_id=name, policy_id="acme/j", version=version,
        tokens=np.array([97], dtype=np.int32), sampling=SamplingParams(max_tokens=4),
    )  # fmt: skip


def test_a_restarted_worker_gets_no_call_before_the_policy_is_loaded_again(tmp_path: Path) -> None:
    async def main() -> None:
        worker = FakeWorker()
        policy, store = started(tmp_path, worker)
        await policy.start(oldest_needed=0)
        version = await step(policy, store)
        generator = policy.generator(2)
        worker.kill()
        with pytest.raises(WorkerLost):
            await policy.trainer.forward("acme/j", version, [])
        await worker.recover()
        with pytest.raises(WorkerLost):
            await policy.trainer.forward("acme/j", version, [])
        with pytest.raises(WorkerLost):
            await generator.generate(request(version))
        await asyncio.gather(policy.recover(), policy.recover())
        assert policy.version == version
        await policy.trainer.forward("acme/j", version, [])
        with pytest.raises(WorkerLost):
            await generator.generate(request(version))
        await policy.generator(1).generate(request(version))

    runtime.run_virtual(main())


def test_held_versions_survive_retirement_pruning_and_a_lost_worker(tmp_path: Path) -> None:
    async def main() -> None:
        worker = FakeWorker()
        policy, store = started(tmp_path, worker)
        await policy.start(oldest_needed=0)
        for _ in range(2):
            await step(policy, store)
        policy.hold(2)
        for _ in range(4):
            await policy.retire(await step(policy, store))
        assert set(worker.policies["acme/j"].live) == {2, 6}
        worker.kill()
        await policy.recover()
        assert set(worker.policies["acme/j"].live) == {2, 6}
        policy.let_go(2)
        await policy.retire(await step(policy, store))
        assert set(worker.policies["acme/j"].live) == {7}
        kept = [row.version for row in store.versions("acme", "j") if row.has_adapter]
        assert kept == [0, 6, 7]

    runtime.run_virtual(main())


def test_a_policy_gives_up_after_too_many_losses(tmp_path: Path) -> None:
    class Fragile(FakeWorker):
        async def create(self, policy_id: str, spec: object) -> str:
            self.kill()
            raise WorkerLost("again")

    async def main() -> None:
        policy, _ = started(tmp_path, Fragile())
        with pytest.raises(WorkerLost, match="lost 5 times in a row"):
            await policy.start(oldest_needed=0)

    runtime.run_virtual(main())


def test_places_are_reserved_until_the_first_turn_or_the_end(tmp_path: Path) -> None:
    async def main() -> None:
        policy, _ = started(tmp_path, FakeWorker())
        await policy.start(oldest_needed=0)
        load = policy.station.load
        generator = policy.generator(3)
        assert (load.num_reserved, load.num_sampling) == (3, 0)
        running = asyncio.create_task(generator.generate(request(0)))
        await asyncio.sleep(0)
        assert (load.num_reserved, load.num_sampling) == (2, 1)
        await running
        assert (load.num_reserved, load.num_sampling, load.kv_tokens) == (2, 0, 0)
        generator.close()
        generator.close()
        assert load.num_reserved == 0

    runtime.run_virtual(main())


def test_jobs_go_where_least_work_waits() -> None:
    async def main() -> None:
        placement = Placement([FakeWorker("a"), FakeWorker("b")], {})
        sizes = {"big": 30, "small-0": 10, "small-1": 10, "small-2": 10}
        where = {}
        for name, steps in sizes.items():
            spec = replace(SPEC, name=name, steps=steps)
            counts = TokenCounts.guess(spec, max_turns=1)
            where[name] = placement.assign(spec, counts).worker.name
        assert where == {"big": "a", "small-0": "b", "small-1": "b", "small-2": "b"}

    runtime.run_virtual(main())


def test_a_tenants_jobs_are_spread_over_the_workers() -> None:
    """Shares hold worker by worker: with all jobs on one of two a tenant has half of its part."""

    async def main() -> None:
        placement = Placement([FakeWorker("a"), FakeWorker("b")], {})
        order = ("acme", "bolt", "acme", "bolt", "acme", "bolt")
        where: dict[str, list[str]] = {"acme": [], "bolt": []}
        for number, tenant in enumerate(order):
            spec = replace(SPEC, tenant=tenant, name=f"job-{number}")
            counts = TokenCounts.guess(spec, max_turns=1)
            where[tenant].append(placement.assign(spec, counts).worker.name)
        assert where == {"acme": ["a", "b", "a"], "bolt": ["b", "a", "b"]}

    runtime.run_virtual(main())
