"""Samplers of clients: what a request is, what becomes of it, who is told, who may ask."""

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from marlaas import runtime
from marlaas.errors import (
    Conflict,
    Expired,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    WorkerLost,
)
from marlaas.loop.operations import Category, QueueState, Waiting
from marlaas.loop.samplers import (
    CLONE,
    SampleFailure,
    SampleRequest,
    SampleResult,
    Samplers,
    SamplerSettings,
)
from marlaas.loop.serving import Extras, ServingSettings
from marlaas.store.async_store import AsyncStore
from marlaas.types import (
    AdapterSpec,
    Checkpoint,
    CheckpointKind,
    Completion,
    GenerateRequest,
    Quotas,
    Run,
    Session,
    Tenant,
)
from tests.fakes import STOP, FakeWorker, Speed, hash_of
from tests.fakes import _write as write_adapter
from tests.loop.test_serving import Bench, bench, run, saying

PROMPT = np.frombuffer(b"hello", dtype=np.uint8).astype(np.int32)
REQUEST = SampleRequest(tokens=PROMPT, max_tokens=6, seed=5)


@dataclass
class Lab:
    """A service in small, with samplers."""

    at: Bench
    samplers: Samplers

    async def of_base(self, tenant: str = "acme", session: str = "s-1", seq: int = 0) -> str:
        with_session(self.at, tenant, session)
        return await self.samplers.create(tenant, session, seq, "tiny", None)

    async def sample(
        self, sampler_id: str, seq: int = 0, request: SampleRequest = REQUEST, tenant: str = "acme"
    ) -> SampleResult:
        request_id, _ = await self.samplers.submit(tenant, sampler_id, seq, request)
        result = await self.samplers.wait(tenant, request_id, 1e4)
        assert isinstance(result, SampleResult), result
        return result


@asynccontextmanager
async def lab(
    root: Path,
    *workers: FakeWorker,
    settings: SamplerSettings | None = None,
    serving: ServingSettings | None = None,
) -> AsyncIterator[Lab]:
    async with bench(root, *workers, settings=serving) as at:
        samplers = Samplers(at.serving, AsyncStore(at.store, is_threaded=False), settings)
        try:
            yield Lab(at, samplers)
        finally:
            await samplers.close()


def with_session(at: Bench, tenant: str, session: str) -> None:
    try:
        at.store.add_session(tenant, Session(session_id=session))
    except Conflict:
        at.store.session(tenant, session)


def keep(at: Bench, tenant: str, session: str, name: str, letter: str) -> Checkpoint:
    """Store a checkpoint that says one letter."""
    with_session(at, tenant, session)
    run_id = f"{session}:train:0"
    spec = AdapterSpec()
    at.store.add_run(
        tenant, Run(run_id=run_id, session_id=session, seq=0, base_model="tiny", spec=spec)
    )
    logits = saying(letter)
    files = at.store.files.checkpoint(tenant, run_id, CheckpointKind.SAMPLER, name).prepare()
    Path(files.adapter).mkdir()
    write_adapter(Path(files.adapter) / "adapter", 0, logits)
    return at.store.add_checkpoint(
        tenant,
        Checkpoint(
            run_id=run_id,
            kind=CheckpointKind.SAMPLER,
            name=name,
            version=0,
            adapter_hash=hash_of(logits),
            folder=files.folder,
        ),
    )


def text(result: SampleResult) -> list[str]:
    return [bytes(one.tokens.tolist()).decode() for one in result.completions]


# What a request is ------------------------------------------------------------------------------


def test_the_same_request_again_is_the_same_request_waiting_or_done(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as at:
            sampler = await at.of_base()
            first = await at.samplers.submit("acme", sampler, 3, REQUEST)
            assert await at.samplers.submit("acme", sampler, 3, REQUEST) == first
            result = await at.samplers.wait("acme", first[0], 1e4)
            assert await at.samplers.submit("acme", sampler, 3, REQUEST) == first
            assert await at.samplers.wait("acme", first[0], 0) is result
            assert at.at.workers[0].tokens["decode"] == len(result.completions[0].tokens)
            with pytest.raises(InvalidRequest, match="another request"):
                await at.samplers.submit("acme", sampler, 3, replace(REQUEST, n=2))

    run(scenario())


def test_every_sample_has_an_id_of_its_own(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as at:
            sampler = await at.of_base()
            request_id, ids = await at.samplers.submit("acme", sampler, 0, replace(REQUEST, n=4))
            assert request_id == "smp:s-1:sample:0:0"
            assert len(set(ids)) == 4
            result = await at.samplers.wait("acme", request_id, 1e4)
            assert isinstance(result, SampleResult)
            assert len(result.completions) == 4

    run(scenario())


def test_a_seed_decides_and_without_one_chance_does(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as at:
            sampler = await at.of_base()
            request = replace(REQUEST, max_tokens=40, stop_token_ids=(), n=2)
            first, again = (
                await at.sample(sampler, 0, request),
                await at.sample(sampler, 1, request),
            )
            assert text(first) == text(again)
            assert text(first)[0] != text(first)[1]
            by_chance = replace(request, seed=None)
            assert text(await at.sample(sampler, 2, by_chance)) != text(
                await at.sample(sampler, 3, by_chance)
            )

    run(scenario())


def test_without_stops_of_its_own_a_request_stops_as_the_base_does(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as at:
            sampler = await at.of_base()
            request = replace(REQUEST, max_tokens=390)
            usual = (await at.sample(sampler, 0, request)).completions[0].tokens
            assert len(usual) < 390
            assert usual[-1] == STOP
            never = await at.sample(sampler, 1, replace(request, stop_token_ids=()))
            assert len(never.completions[0].tokens) == 390

    run(scenario())


def test_what_does_not_fit_the_context_is_refused_with_what_would(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as at:
            sampler = await at.of_base()
            left = at.at.serving.max_context - len(PROMPT)
            with pytest.raises(InvalidRequest, match=f"expected at most {left}"):
                await at.samplers.submit("acme", sampler, 0, replace(REQUEST, max_tokens=left + 1))
            with pytest.raises(InvalidRequest, match="temperature"):
                await at.samplers.submit("acme", sampler, 0, replace(REQUEST, temperature=np.nan))
            await at.sample(sampler, 0, replace(REQUEST, max_tokens=None))

    run(scenario())


# Whom it belongs to -------------------------------------------------------------------------------


def test_another_tenants_ids_are_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as at:
            sampler = await at.of_base()
            request_id, _ = await at.samplers.submit("acme", sampler, 0, REQUEST)
            with pytest.raises(NotFound):
                await at.samplers.submit("birch", sampler, 0, REQUEST)
            with pytest.raises(NotFound):
                await at.samplers.create("birch", "s-1", 1, "tiny", None)
            for call in (
                at.samplers.wait("birch", request_id, 0),
                at.samplers.completions_since("birch", sampler, 0, 0, 0),
                at.samplers.join("birch", sampler),
            ):
                with pytest.raises(NotFound) as caught:
                    await call
                assert not isinstance(caught.value, Expired)
            await at.samplers.cancel("birch", request_id)
            at.samplers.acknowledge("birch", [request_id])
            assert isinstance(await at.samplers.wait("acme", request_id, 1e4), SampleResult)

    run(scenario())


def test_a_checkpoint_is_sampled_and_a_published_one_by_anybody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path, settings=SamplerSettings(recheck_s=1.0)) as at:
            kept = keep(at.at, "acme", "s-1", "best", "d")
            own = await at.samplers.create("acme", "s-1", 0, "tiny", kept.path)
            assert text(await at.sample(own)) == ["dddddd"]
            with_session(at.at, "birch", "s-2")
            with pytest.raises(NotFound):
                await at.samplers.create("birch", "s-2", 0, "tiny", kept.path)
            key = ("acme", kept.run_id, kept.kind, kept.name)
            at.at.store.publish_checkpoint(*key, is_public=True)
            theirs = await at.samplers.create("birch", "s-2", 0, "tiny", kept.path)
            assert text(await at.sample(theirs, tenant="birch")) == ["dddddd"]
            at.at.store.publish_checkpoint(*key, is_public=False)
            await asyncio.sleep(2.0)
            with pytest.raises(NotFound):
                await at.samplers.submit("birch", theirs, 1, REQUEST)
            assert text(await at.sample(own, 1)) == ["dddddd"]
            at.at.store.delete_checkpoint(*key)
            await asyncio.sleep(2.0)
            with pytest.raises(NotFound):
                await at.samplers.submit("acme", own, 2, REQUEST)

    run(scenario())


def test_what_is_sampled_is_the_callers_to_pay(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as at:
            sampler = await at.of_base()
            result = await at.sample(sampler, 0, replace(REQUEST, stop_token_ids=()))
            await asyncio.sleep(2.0)
            usage = at.at.store.usage("acme")
            assert usage.served_tokens == 6 == len(result.completions[0].tokens)
            assert usage.prefill_tokens == len(PROMPT)
            assert usage.device_s > 0

    run(scenario())


# What becomes of it -------------------------------------------------------------------------------


def test_results_are_read_again_until_they_are_acknowledged_or_too_old(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path, settings=SamplerSettings(kept_s=100)) as at:
            sampler = await at.of_base()
            await at.sample(sampler, 0)
            old = "smp:s-1:sample:0:0"
            for _ in range(3):
                assert isinstance(await at.samplers.wait("acme", old, 0), SampleResult)
            await asyncio.sleep(200)
            await at.sample(sampler, 1)
            with pytest.raises(Expired):
                await at.samplers.wait("acme", old, 0)
            new = "smp:s-1:sample:0:1"
            at.samplers.acknowledge("acme", [new, "smp:s-1:sample:0:77"])
            with pytest.raises(Expired):
                await at.samplers.wait("acme", new, 0)

    run(scenario())


def test_a_tenants_results_take_bounded_memory_and_none_goes_unread(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path, settings=SamplerSettings(kept_bytes=9000)) as at:
            sampler = await at.of_base()
            accepted = []
            with pytest.raises(QuotaExceeded, match="wait to be fetched"):
                for seq in range(10):
                    accepted.append((await at.samplers.submit("acme", sampler, seq, REQUEST))[0])
                    await asyncio.sleep(1.0)
            assert len(accepted) == 5
            await at.sample(await at.of_base("birch", "s-2"), 0, tenant="birch")
            for one in accepted:
                assert isinstance(await at.samplers.wait("acme", one, 0), SampleResult)
            await at.sample(sampler, 20)
            with pytest.raises(Expired):
                await at.samplers.wait("acme", accepted[0], 0)
            assert isinstance(await at.samplers.wait("acme", accepted[4], 0), SampleResult)

    run(scenario())


def test_after_a_restart_a_request_has_expired_and_strange_ones_are_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as at:
            sampler = await at.of_base()
            fresh = Samplers(at.at.serving, AsyncStore(at.at.store, is_threaded=False))
            with pytest.raises(Expired):
                await fresh.wait("acme", f"smp:{sampler}:4", 0)
            for strange in ("smp:s-9:sample:0:4", "smp::4", f"smp:{sampler}:x", "op:a:1", ""):
                with pytest.raises(NotFound) as caught:
                    await fresh.wait("acme", strange, 0)
                assert not isinstance(caught.value, Expired)

    run(scenario())


def test_waiting_ends_with_the_time_out_and_a_cancelled_request_leaves_the_batch(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with lab(tmp_path, FakeWorker(speed=Speed(token_s=1.0))) as at:
            sampler = await at.of_base()
            request = replace(REQUEST, max_tokens=100, stop_token_ids=())
            request_id, _ = await at.samplers.submit("acme", sampler, 0, request)
            began_s = runtime.now_s()
            assert isinstance(await at.samplers.wait("acme", request_id, 25), Waiting)
            assert runtime.now_s() - began_s == pytest.approx(25)
            await at.samplers.cancel("acme", request_id)
            failure = await at.samplers.wait("acme", request_id, 1)
            assert failure == SampleFailure(
                error="the request was cancelled", category=Category.USER
            )

    run(scenario())


def test_too_many_samples_are_refused_for_the_moment(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path, serving=ServingSettings(max_sampling=10)) as at:
            sampler = await at.of_base()
            for seq in range(5):
                await at.samplers.submit("acme", sampler, seq, replace(REQUEST, n=2))
            with pytest.raises(QuotaExceeded, match="at most 10"):
                await at.samplers.submit("acme", sampler, 5, REQUEST)
            await at.samplers.wait("acme", f"smp:{sampler}:0", 1e4)
            await at.sample(sampler, 5)

    run(scenario())


FLOOD = replace(REQUEST, max_tokens=50, stop_token_ids=())


async def flooded(at: Lab, tenant: str, num_requests: int = 2000) -> list[str]:
    sampler = await at.of_base(tenant, f"s-{tenant}")
    return [
        (await at.samplers.submit(tenant, sampler, seq, FLOOD))[0] for seq in range(num_requests)
    ]


@pytest.mark.parametrize(("num_floods", "num_requests"), [(1, 2000), (3, 700)])
def test_thousands_of_samples_of_others_leave_a_single_one_its_turn(
    num_floods: int, num_requests: int, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as at:
            small = await at.of_base("birch", "s-2")
            took_s = []

            async def ask(seq: int) -> None:
                began_s = runtime.now_s()
                await at.sample(small, seq, FLOOD, tenant="birch")
                took_s.append(runtime.now_s() - began_s)

            await ask(0)
            ids = {
                tenant: await flooded(at, tenant, num_requests)
                for tenant in (f"acme-{flood}" for flood in range(num_floods))
            }
            await asyncio.sleep(2.0)  # newcomers come first, and each flood was one
            for seq in range(1, 40):
                await ask(seq)
                await asyncio.sleep(0.17)
            assert max(took_s) < 1.1 * took_s[0]
            for tenant, requests in ids.items():
                waits = (at.samplers.wait(tenant, one, 1e5) for one in requests)
                results = await asyncio.gather(*waits)
                assert all(isinstance(one, SampleResult) for one in results)

    run(scenario())


def test_floods_share_a_worker_by_weight_and_the_batch_is_full(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path, FakeWorker(speed=Speed(max_decoding=32))) as at:
            at.at.controller.tenants.weights["heavy"] = 3.0
            requests = {tenant: await flooded(at, tenant) for tenant in ("heavy", "light")}
            await asyncio.sleep(20.0)
            assert at.at.workers[0].num_decoding == 30
            done = dict.fromkeys(requests, 0)
            for tenant, ids in requests.items():
                for one in ids:
                    outcome = await at.samplers.wait(tenant, one, 0)
                    done[tenant] += isinstance(outcome, SampleResult)
            assert done["heavy"] + done["light"] > 0.9 * 30 * 20.0 / 0.5
            assert 2.5 < done["heavy"] / done["light"] < 3.5

    run(scenario())


def test_a_sample_that_waits_takes_little_memory(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path, FakeWorker(speed=Speed(token_s=10.0))) as at:
            await flooded(at, "acme", 100)
            tracemalloc.start()
            before, _ = tracemalloc.get_traced_memory()
            requests = await flooded(at, "birch", 2000)
            after, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert (after - before) / len(requests) < 3000
            assert len(asyncio.all_tasks()) < 200

    run(scenario())


def test_a_client_that_goes_away_finds_its_request_and_one_that_cancels_frees_the_batch(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        worker = FakeWorker(speed=Speed(token_s=1.0, max_decoding=4))
        async with lab(tmp_path, worker) as at:
            sampler = await at.of_base()
            ids = [
                (await at.samplers.submit("acme", sampler, seq, replace(FLOOD, n=3)))[0]
                for seq in range(4)
            ]
            waiting = [asyncio.create_task(at.samplers.wait("acme", one, 1e3)) for one in ids]
            await asyncio.sleep(2.0)
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert worker.num_decoding == 4
            for one in ids[:3]:
                await at.samplers.cancel("acme", one)
            await asyncio.sleep(0.5)
            assert worker.num_decoding == 3, "of the one that is left"
            assert isinstance(await at.samplers.wait("acme", ids[3], 1e4), SampleResult)
            for one in ids[:3]:
                assert isinstance(await at.samplers.wait("acme", one, 0), SampleFailure)
            assert worker.tokens["decode"] == 150

    run(scenario())


# What is computed once ----------------------------------------------------------------------------


def test_equal_prompts_of_one_tenant_share_their_prefix_and_never_those_of_two(
    tmp_path: Path,
) -> None:
    class Noting(FakeWorker):
        def __init__(self) -> None:
            super().__init__()
            self.requests: list[GenerateRequest] = []

        async def generate(self, request: GenerateRequest) -> Completion:
            self.requests.append(request)
            return await super().generate(request)

    async def scenario() -> None:
        worker = Noting()
        async with lab(tmp_path, worker) as at:
            ours, theirs = await at.of_base(), await at.of_base("birch", "s-2")
            await at.sample(ours, 0)
            assert worker.requests.pop().prefix_id == "", "nobody to share with"
            other = replace(REQUEST, tokens=PROMPT[::-1].copy())
            for seq in range(1, 4):
                await at.samplers.submit("acme", ours, seq, replace(REQUEST, seed=seq))
            await at.samplers.submit("acme", ours, 4, replace(other, n=2))
            await at.samplers.submit("birch", theirs, 1, replace(REQUEST, n=2))
            await asyncio.sleep(5.0)
            names = [request.prefix_id for request in worker.requests]
            assert len(set(names[:3])) == len(set(names[3:5])) == len(set(names[5:])) == 1
            assert len(set(names)) == 3 and "" not in names
            assert len({request.sequence_id for request in worker.requests}) == 7
            await asyncio.sleep(5.0)
            assert at.at.serving._dispatcher._prompts == {}

    run(scenario())


def test_large_requests_fill_all_workers_and_small_ones_stay_together(tmp_path: Path) -> None:
    async def scenario() -> None:
        speed = Speed(token_s=1.0, max_decoding=64)
        workers = [FakeWorker(f"worker-{index}", speed=speed) for index in range(2)]
        async with lab(tmp_path, *workers) as at:
            sampler = await at.of_base()
            await at.samplers.submit("acme", sampler, 0, replace(FLOOD, n=64))
            await asyncio.sleep(5.0)
            assert [worker.num_decoding for worker in workers] == [32, 32]
            await at.samplers.cancel("acme", f"smp:{sampler}:0")
            await asyncio.sleep(1.0)
            await at.samplers.submit("acme", sampler, 1, replace(FLOOD, n=8))
            await asyncio.sleep(5.0)
            assert sorted(worker.num_decoding for worker in workers) == [0, 8]

    run(scenario())


def test_what_is_asked_of_the_prompt_the_first_sample_says(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as at:
            sampler = await at.of_base()
            extras = Extras(
                prompt_logprobs=True,
                topk_prompt_logprobs=3,
                target_prompt_ids=np.full((len(PROMPT), 2), 97, np.int32),
                prompt_logprobs_from=2,
                topk_sample_logprobs=2,
            )
            result = await at.sample(sampler, 0, replace(REQUEST, n=3, extras=extras))
            first, *others = result.completions
            assert first.prompt_logprobs is not None and first.topk_prompt_ids is not None
            assert np.isnan(first.prompt_logprobs[:2]).all()
            assert np.isfinite(first.prompt_logprobs[2:]).all()
            assert first.target_prompt_logprobs is not None
            assert all(one.prompt_logprobs is None for one in others)
            assert all(one.topk_sample_ids is not None for one in result.completions)
            wrong = Extras(
                topk_prompt_logprobs=1000,
                prompt_logprobs_from=77,
                target_prompt_ids=np.zeros(3, np.int32),
            )
            with pytest.raises(InvalidRequest) as refusal:
                await at.sample(sampler, 1, replace(REQUEST, extras=wrong))
            assert len(refusal.value.problems) == 3

    run(scenario())


# What goes wrong ----------------------------------------------------------------------------------


def test_a_checkpoint_that_expires_says_so_and_what_is_sampled_from_is_in_use(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as at:
            kept = keep(at.at, "acme", "s-1", "#12", "d")
            key = ("acme", kept.run_id, kept.kind, kept.name)
            sampler = await at.samplers.create("acme", "s-1", 0, "tiny", kept.path)
            at.at.store.finish_session("acme", "s-1", "success")
            for seq in range(5):
                await asyncio.sleep(1000.0)
                assert text(await at.sample(sampler, seq)) == ["dddddd"]
                assert at.at.store.checkpoint(*key).used_s >= runtime.wall_time_s() - 1.0
                assert at.at.store.prune_ephemeral("acme", kept.run_id, keep_newest=0) == 0
            at.at.store.set_checkpoint_ttl(*key, expires_s=runtime.wall_time_s() + 100.0)
            await asyncio.sleep(50.0)
            await at.sample(sampler, 5)
            await asyncio.sleep(50.0)
            with pytest.raises(NotFound, match=r"#12, which sampler .* has expired"):
                await at.samplers.submit("acme", sampler, 6, REQUEST)
            assert isinstance(await at.samplers.wait("acme", f"smp:{sampler}:5", 0), SampleResult)
            again = await at.samplers.submit("acme", sampler, 5, REQUEST)
            assert again[0] == f"smp:{sampler}:5", "what was taken stays taken"

    run(scenario())


def test_a_checkpoint_that_is_deleted_while_requests_wait_fails_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        worker = FakeWorker(speed=Speed(token_s=1.0, max_decoding=1))
        async with lab(tmp_path, worker) as at:
            kept = keep(at.at, "acme", "s-1", "best", "d")
            base = await at.of_base("acme", "s-1", 7)
            sampler = await at.samplers.create("acme", "s-1", 0, "tiny", kept.path)
            await at.samplers.submit("acme", base, 0, REQUEST)
            request_id, _ = await at.samplers.submit("acme", sampler, 0, REQUEST)
            at.at.store.delete_checkpoint("acme", kept.run_id, kept.kind, kept.name)
            failure = await at.samplers.wait("acme", request_id, 1e3)
            assert isinstance(failure, SampleFailure) and failure.category is Category.USER

    run(scenario())


def test_a_spent_day_is_waited_out_and_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as at:
            quotas = Quotas(tokens_a_day=20)
            at.at.controller.tenants_changed([Tenant(tenant_id="acme", quotas=quotas)])
            sampler = await at.of_base()
            request = replace(REQUEST, max_tokens=25, stop_token_ids=())
            await at.sample(sampler, 0, request)
            request_id, _ = await at.samplers.submit("acme", sampler, 1, request)
            waiting = await at.samplers.wait("acme", request_id, 25)
            assert isinstance(waiting, Waiting)
            assert waiting.queue_state is QueueState.PAUSED_RATE_LIMIT
            assert "20 tokens a day" in waiting.reason
            await at.samplers.cancel("acme", request_id)
            assert isinstance(await at.samplers.wait("acme", request_id, 1), SampleFailure)
            request_id, _ = await at.samplers.submit("acme", sampler, 2, request)
            assert isinstance(await at.samplers.wait("acme", request_id, 86_400), SampleResult)

    run(scenario())


def test_workers_that_are_lost_cost_a_sample_time_and_no_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        worker = FakeWorker(speed=Speed(token_s=1.0, restart_s=60.0))
        async with lab(tmp_path, worker) as at:
            sampler = await at.of_base()
            request_id, _ = await at.samplers.submit("acme", sampler, 0, FLOOD)
            for _ in range(3):
                await asyncio.sleep(20.0)
                worker.kill()
                waiting = await at.samplers.wait("acme", request_id, 25)
                assert isinstance(waiting, Waiting)
                assert waiting.queue_state is QueueState.PAUSED_CAPACITY
                await asyncio.sleep(60.0)
            assert isinstance(await at.samplers.wait("acme", request_id, 1e3), SampleResult)
            worker.kill(for_good=True)
            request_id, _ = await at.samplers.submit("acme", sampler, 1, FLOOD)
            failure = await at.samplers.wait("acme", request_id, 1e3)
            assert isinstance(failure, SampleFailure) and failure.category is Category.SERVER

    run(scenario())


def test_a_service_that_ends_takes_nothing_in_and_lets_clients_ask_anew(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path, FakeWorker(speed=Speed(token_s=1.0))) as at:
            sampler = await at.of_base()
            request_id, _ = await at.samplers.submit("acme", sampler, 0, FLOOD)
            waiting = asyncio.create_task(at.samplers.wait("acme", request_id, 1e3))
            await asyncio.sleep(5.0)
            await at.samplers.close()
            with pytest.raises(Expired):
                await waiting
            with pytest.raises(WorkerLost, match="about to end"):
                await at.samplers.submit("acme", sampler, 1, FLOOD)
            assert at.at.workers[0].num_decoding == 0

    run(scenario())


def test_a_bug_of_ours_is_a_failure_of_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(FakeWorker):
        async def generate(self, request: GenerateRequest) -> Completion:
            raise ZeroDivisionError("secret of another tenant")

    async def scenario() -> None:
        async with lab(tmp_path, Broken()) as at:
            sampler = await at.of_base()
            request_id, _ = await at.samplers.submit("acme", sampler, 0, replace(REQUEST, n=3))
            failure = await at.samplers.wait("acme", request_id, 10)
            assert isinstance(failure, SampleFailure) and failure.category is Category.SERVER
            assert "secret" not in failure.error
            assert "ZeroDivisionError" in caplog.text

    run(scenario())


def test_stops_that_would_slow_down_neighbours_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as at:
            sampler = await at.of_base()
            for stops, words in (((7,) * 1000, "1000 stop tokens"), ((1 << 70,), "expected ids")):
                with pytest.raises(InvalidRequest, match=words):
                    await at.sample(sampler, 0, replace(REQUEST, stop_token_ids=stops))

    run(scenario())


@pytest.mark.parametrize("seed", range(15))
def test_whatever_clients_and_workers_do_each_request_has_one_outcome_and_nothing_is_left(
    seed: int, tmp_path: Path
) -> None:
    rng = runtime.rng("samplers", seed)
    letters = {"acme": "ab", "birch": "cd"}

    async def client(at: Lab, tenant: str, sampler: str, letter: str, seq: int) -> None:
        await asyncio.sleep(float(rng.uniform(0, 30)))
        request = replace(REQUEST, n=int(rng.integers(1, 5)))
        try:
            request_id, _ = await at.samplers.submit(tenant, sampler, seq, request)
        except QuotaExceeded:
            return
        if rng.random() < 0.2:
            await asyncio.sleep(float(rng.exponential(2.0)))
            await at.samplers.cancel(tenant, request_id)
        outcome = await at.samplers.wait(tenant, request_id, 1e4)
        assert await at.samplers.submit(tenant, sampler, seq, request)
        assert await at.samplers.wait(tenant, request_id, 0) is outcome
        if isinstance(outcome, SampleResult):
            assert text(outcome) == [letter * 6] * request.n
        if rng.random() < 0.5:
            at.samplers.acknowledge(tenant, [request_id])

    async def scenario() -> None:
        speed = Speed(token_s=float(rng.choice([0.01, 0.3])), restart_s=2.0, max_decoding=8)
        workers = [FakeWorker(f"worker-{index}", speed=speed) for index in range(2)]
        serving = ServingSettings(max_loaded=2, max_sampling=40)
        async with lab(tmp_path, *workers, serving=serving) as at:
            samplers = []
            for tenant, names in letters.items():
                for number, letter in enumerate(names):
                    kept = keep(at.at, tenant, f"s-{tenant}", letter, letter)
                    made = await at.samplers.create(
                        tenant, f"s-{tenant}", number, "tiny", kept.path
                    )
                    samplers.append((tenant, made, letter))
            for _ in range(int(rng.integers(4))):
                kill = workers[rng.integers(2)].kill
                asyncio.get_running_loop().call_later(float(rng.uniform(0, 30)), kill)
            await asyncio.gather(
                *(client(at, *samplers[rng.integers(4)], seq) for seq in range(60))
            )
            await asyncio.sleep(5.0)
            assert at.samplers._orders == {}
            at.at.check_nothing_is_left()
            assert all(worker.num_decoding == 0 for worker in workers)
            for lanes in at.at.serving._dispatcher._lanes.values():
                assert (lanes._num_open, lanes.num_waiting) == (0, 0)
                assert lanes.station.load.num_kept == 0
            await asyncio.sleep(4000.0)
            assert len(at.samplers._results) == 0

    run(scenario())


# Who is told --------------------------------------------------------------------------------------


def test_whoever_follows_a_sampler_hears_of_every_request_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as at:
            sampler = await at.of_base()
            heard: list[str] = []

            async def follow() -> None:
                cursor = 0
                while len(heard) < 30:
                    told, cursor = await at.samplers.completions_since(
                        "acme", sampler, 0, cursor, 1e3
                    )
                    heard.extend(one.request_id for one in told)

            following = asyncio.create_task(follow())
            for seq in range(30):
                await at.samplers.submit("acme", sampler, seq, REQUEST)
                await asyncio.sleep(0.01 * (seq % 3))
            await following
            assert sorted(heard) == sorted(f"smp:{sampler}:{seq}" for seq in range(30))

    run(scenario())


def test_clones_hear_of_their_own_requests_only_and_no_two_get_one_number(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as at:
            sampler = await at.of_base()
            clone = await at.samplers.join("acme", sampler)
            other = await at.samplers.join("acme", sampler)
            assert 0 < clone < CLONE and clone != other
            seq = clone * CLONE + 4
            await at.sample(sampler, seq)
            follow = at.samplers.completions_since
            told, cursor = await follow("acme", sampler, clone, 0, 0)
            assert [one.request_id for one in told] == [f"smp:{sampler}:{seq}"]
            assert not told[0].is_failed and told[0].num_bytes > 0
            assert await follow("acme", sampler, clone, cursor, 0) == ([], cursor)
            assert (await follow("acme", sampler, other, 0, 0))[0] == []
            assert (await follow("acme", sampler, 0, 0, 0))[0] == []
            huge = 482_255_857 * CLONE
            await at.sample(sampler, huge)
            told, _ = await follow("acme", sampler, 482_255_857, 0, 0)
            assert [one.request_id for one in told] == [f"smp:{sampler}:{huge}"]
            with pytest.raises(InvalidRequest, match="seq_id"):
                await at.samplers.submit("acme", sampler, 1 << 63, REQUEST)

    run(scenario())


def test_a_follower_of_an_earlier_process_is_told_that_what_it_waits_for_is_lost(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with lab(tmp_path, FakeWorker(speed=Speed(token_s=1.0))) as at:
            sampler = await at.of_base()
            await at.samplers.submit("acme", sampler, 0, replace(REQUEST, max_tokens=1))
            lost, _ = await at.samplers.submit("acme", sampler, 1, FLOOD)
            told, cursor = await at.samplers.completions_since("acme", sampler, 0, 0, 30)
            assert [one.request_id for one in told] == [f"smp:{sampler}:0"]
            await asyncio.sleep(10.0)
            await at.samplers.close()
            later = Samplers(at.at.serving, AsyncStore(at.at.store, is_threaded=False))
            new, _ = await later.submit("acme", sampler, 2, REQUEST)
            for old_cursor in (cursor, 0):
                told, newer = await later.completions_since("acme", sampler, 0, old_cursor, 30)
                failed = {one.request_id for one in told if one.is_failed}
                assert lost in failed and new not in failed
                assert len(told) < 5000
            with pytest.raises(Expired):
                await later.wait("acme", lost, 0)
            told, _ = await later.completions_since("acme", sampler, 0, newer, 30)
            assert [one.request_id for one in told] == [new]
            fresh = await later.create("acme", "s-1", 1, "tiny", None)
            assert (await later.completions_since("acme", fresh, 0, 0, 0))[0] == []
            await later.close()

    runtime.run_virtual(scenario(), epoch_s=1.8e9)
