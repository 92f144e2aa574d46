"""Real worker processes: started, killed, brought back, and two of them as one split worker."""

import asyncio
import os
import signal
from dataclasses import replace

import numpy as np
import pytest

from marlaas.config import Durability, Placement, RunSettings
from marlaas.errors import InvalidRequest, NotFound, WorkerLost
from marlaas.launch import arrange, engine_settings, started
from marlaas.types import (
    AdamParams,
    AdapterSpec,
    Datum,
    GenerateRequest,
    Objective,
    PolicyId,
    SamplingParams,
)
from marlaas.workers.local import LocalWorker

POLICY = PolicyId("acme/sums")


def request(version: int, *, max_tokens: int = 8, name: str = "s") -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        sequence_id=name,
        policy_id=POLICY,
        version=version,
        tokens=np.arange(10, 20, dtype=np.int32),
        sampling=SamplingParams(max_tokens=max_tokens, seed=3),
    )


def datum() -> Datum:
    ones = np.ones(20, dtype=np.float32)
    ones[0] = 0
    return Datum(
        tokens=np.arange(20, dtype=np.int32),
        weights=ones,
        advantages=ones,
        sampling_logprobs=-3 * ones,
    )


def test_a_killed_worker_fails_its_open_calls_and_comes_back_without_policies() -> None:
    async def scenario() -> None:
        async with started(engine_settings(RunSettings(num_workers=1), "tiny")) as (worker,):
            assert worker.incarnation == 1
            assert max(worker.self_check.values()) < 1e-4
            assert worker.capabilities.max_trained_tokens == worker.capabilities.max_context
            await worker.create(POLICY, AdapterSpec())
            open_call = asyncio.create_task(worker.generate(request(0, max_tokens=1500)))
            await asyncio.sleep(0.1)
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
            with pytest.raises(WorkerLost):
                await open_call
            with pytest.raises(WorkerLost):
                await worker.stats()
            await asyncio.gather(worker.recover(), worker.recover())
            assert worker.incarnation == 2
            with pytest.raises(NotFound):
                await worker.generate(request(0))

    asyncio.run(scenario())


def test_a_split_worker_samples_from_what_its_other_half_has_trained() -> None:
    async def scenario() -> None:
        settings = engine_settings(RunSettings(num_workers=2, placement=Placement.SPLIT), "tiny")
        async with started(settings) as engines:
            (worker,) = arrange(engines, Placement.SPLIT)
            created = await worker.create(POLICY, AdapterSpec())
            first = await worker.generate(request(0, name="first"))
            assert first.adapter_hash == created
            await worker.forward_backward(POLICY, [datum()], Objective(name="dppo_tis"))
            step = await worker.optim_step(POLICY, AdamParams(lr=0.1))
            await worker.publish(POLICY, step.version)
            await worker.retire(POLICY, 0)
            second = await worker.generate(request(1, name="second"))
            assert second.adapter_hash == step.adapter_hash != created
            training, sampling = engines
            assert (await sampling.stats()).tokens["decode"] == 16
            assert "decode" not in (await training.stats()).tokens

    asyncio.run(scenario())


@pytest.mark.parametrize("placement", Placement)
def test_both_kinds_of_worker_fork_a_trained_adapter_and_serve_it_beside_its_policy(
    placement: Placement, tmp_path
) -> None:
    async def scenario() -> None:
        run = RunSettings(num_workers=2, placement=placement, durability=Durability.POWER)
        async with started(engine_settings(run, "tiny")) as engines:
            worker = arrange(engines, placement)[0]
            await worker.create(POLICY, AdapterSpec())
            await worker.forward_backward(POLICY, [datum()], Objective(name="dppo_tis"))
            step = await worker.optim_step(POLICY, AdamParams(lr=0.1), str(tmp_path / "state"))
            await worker.publish(POLICY, 1)
            expected = await worker.generate(request(1, name="expected"))
            await worker.save_adapter(POLICY, 1, str(tmp_path / "adapter"))
            for source in ("adapter", "state"):
                fork = PolicyId(f"acme/{source}")
                created = await worker.create_from(fork, AdapterSpec(), str(tmp_path / source))
                assert created == step.adapter_hash
                forked = await worker.generate(replace(request(0, name=source), policy_id=fork))
                assert forked.tokens.tolist() == expected.tokens.tolist()
            beside = PolicyId(f"{POLICY}#serve-1")
            await worker.load_version(beside, 1, str(tmp_path / "adapter"))
            served = await worker.generate(replace(request(1, name="beside"), policy_id=beside))
            assert served.tokens.tolist() == expected.tokens.tolist()
            lost = engines[-1]
            assert lost.pid is not None
            os.kill(lost.pid, signal.SIGKILL)
            await lost.lost.wait()
            await worker.recover()
            again = beside if placement is Placement.SPLIT else PolicyId(f"{POLICY}#serve-2")
            assert await worker.load_version(again, 1, str(tmp_path / "adapter")) == created
            await worker.retire(beside, 1)
            with pytest.raises(NotFound):
                await worker.generate(replace(request(1, name="gone"), policy_id=beside))

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_merge_needs_no_engine_and_leaves_nothing_when_it_is_cancelled(tmp_path) -> None:
    async def scenario() -> None:
        settings = engine_settings(RunSettings(num_workers=1), "tiny")
        async with started(settings) as (worker,):
            await worker.create(POLICY, AdapterSpec())
            await worker.save_adapter(POLICY, 0, str(tmp_path / "adapter"))
        assert worker.lost.is_set()
        await worker.merge(str(tmp_path / "adapter"), str(tmp_path / "merged"))
        assert (tmp_path / "merged" / "model.safetensors").is_file()
        with pytest.raises(NotFound, match="no PEFT folder"):
            await worker.merge(str(tmp_path / "nothing"), str(tmp_path / "other"))
        merging = asyncio.create_task(
            worker.merge(str(tmp_path / "adapter"), str(tmp_path / "third"))
        )
        await asyncio.sleep(1.0)
        merging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await merging
        assert {path.name for path in tmp_path.iterdir()} == {"adapter", "merged"}

    asyncio.run(scenario())


def test_a_base_that_cannot_be_served_is_refused_by_the_workers_start(tmp_path) -> None:
    async def scenario() -> None:
        settings = engine_settings(RunSettings(num_workers=1), "tiny")[0]
        (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
        broken = type(settings)(name="e", base_name="broken", base_folder=str(tmp_path))
        worker = LocalWorker(broken)
        try:
            with pytest.raises(InvalidRequest):
                await worker.start()
        finally:
            await worker.stop()

    asyncio.run(scenario())
