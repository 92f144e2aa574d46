"""Samplers of clients: what a request is, what becomes of it, who is told, who may ask."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from marlaas import runtime
from marlaas.errors import Conflict, Expired, InvalidRequest, NotFound, QuotaExceeded
from marlaas.loop.operations import Category, Waiting
from marlaas.loop.samplers import (
    CLONE,
    SampleFailure,
    SampleRequest,
    SampleResult,
    Samplers,
    SamplerSettings,
)
from marlaas.loop.serving import ServingSettings
from marlaas.store.async_store import AsyncStore
from marlaas.types import AdapterSpec, Checkpoint, CheckpointKind, Run, Session
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


def test_a_tenants_results_take_bounded_memory_the_oldest_go_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path, settings=SamplerSettings(kept_bytes=2500)) as at:
            sampler = await at.of_base()
            for seq in range(10):
                await at.sample(sampler, seq)
            with pytest.raises(Expired):
                await at.samplers.wait("acme", "smp:s-1:sample:0:0", 0)
            newest = await at.samplers.wait("acme", "smp:s-1:sample:0:9", 0)
            assert isinstance(newest, SampleResult)

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


def test_two_thousand_samples_of_one_tenant_leave_another_one_its_turn(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as at:
            flood, small = await at.of_base(), await at.of_base("birch", "s-2")
            request = replace(REQUEST, stop_token_ids=())
            began_s = runtime.now_s()
            await at.sample(small, 0, request, tenant="birch")
            alone_s = runtime.now_s() - began_s
            ids = [
                (await at.samplers.submit("acme", flood, seq, request))[0] for seq in range(2000)
            ]
            began_s = runtime.now_s()
            await at.sample(small, 1, request, tenant="birch")
            assert runtime.now_s() - began_s < 5 * alone_s
            results = await asyncio.gather(*(at.samplers.wait("acme", one, 1e4) for one in ids))
            assert all(isinstance(one, SampleResult) for one in results)

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
            assert clone != other
            seq = clone * CLONE + 4
            await at.sample(sampler, seq)
            told, cursor = await at.samplers.completions_since("acme", sampler, clone, 0, 0)
            assert [one.request_id for one in told] == [f"smp:{sampler}:{seq}"]
            assert await at.samplers.completions_since("acme", sampler, clone, cursor, 0) == ([], 1)
            assert await at.samplers.completions_since("acme", sampler, other, 0, 0) == ([], 0)

    run(scenario())


def test_a_follower_with_a_cursor_of_an_earlier_process_hears_what_is_new(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as at:
            sampler = await at.of_base()
            waiting = asyncio.create_task(
                at.samplers.completions_since("acme", sampler, 0, 400, 1e3)
            )
            await asyncio.sleep(0)
            await at.sample(sampler)
            told, cursor = await waiting
            assert [len(told), cursor] == [1, 1]

    run(scenario())
