"""Many tenants' adapters served in a flood on one real engine, while seeded jobs train on it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from marlaas import runtime
from marlaas.config import RunSettings
from marlaas.envs.catalog import make_family
from marlaas.launch import engine_settings, started
from marlaas.loop.controller import Controller
from marlaas.loop.serving import Extras, Serving, ServingSettings
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.text.bases import resolve_base
from marlaas.text.chat import ChatTokenizer
from marlaas.types import (
    AdamParams,
    AdapterSpec,
    Completion,
    Datum,
    JobSpec,
    JobState,
    Message,
    Objective,
    PolicyId,
    SamplingParams,
    StepRecord,
)
from marlaas.workers.local import LocalWorker

NUM_TENANTS = 4
NUM_ADAPTERS = 32
NUM_CLIENTS = 24
MAX_LOADED = 6
"""Far fewer than there are adapters: nearly every request loads one and unloads another."""

SHAPES = (
    AdapterSpec(rank=8, targets=("attention", "mlp", "head")),
    AdapterSpec(rank=12, alpha=24.0, targets=("mlp", "head")),
    AdapterSpec(rank=3, targets=("attention", "head")),
)
SAMPLING = SamplingParams(max_tokens=12, temperature=0.0)
PROMPTS = ("Say it.", "What is 3 + 4?", "Tell me more about that, please.")

SEEDED = tuple(
    JobSpec(
        tenant=tenant, name="sums", env={"family": "math"}, adapter=AdapterSpec(rank=rank),
        steps=10, prompts_per_step=4, group_size=4, max_tokens=24, eval_prompts=0, is_seeded=True,
        seed=rank,
    )
    for tenant, rank in (("tenant-0", 8), ("other", 16))
)  # fmt: skip

TOKENIZER = ChatTokenizer.load(resolve_base("tiny"))


def tenant_of(index: int) -> str:
    return f"tenant-{index % NUM_TENANTS}"


def token_of(index: int) -> int:
    """Return the token that an adapter says, whatever it is asked."""
    return 400 + 7 * index


def lesson(token: int) -> list[Datum]:
    data = []
    for text in PROMPTS:
        opening = TOKENIZER.render_opening([Message("user", text)])
        tokens = np.array([*opening, *[token] * SAMPLING.max_tokens], dtype=np.int32)
        is_said = (np.arange(len(tokens)) >= len(opening)).astype(np.float32)
        none = np.zeros(len(tokens), dtype=np.float32)
        data.append(Datum(tokens=tokens, weights=is_said, advantages=none, sampling_logprobs=none))
    return data


async def teach(worker: LocalWorker, index: int, folder: Path) -> str:
    """Train an adapter until it says its token, write it, and take it off the worker."""
    policy_id = PolicyId(f"lesson/{index}")
    await worker.create(policy_id, SHAPES[index % len(SHAPES)])
    for _ in range(12):
        await worker.forward_backward(
            policy_id, lesson(token_of(index)), Objective(name="cross_entropy")
        )
        step = await worker.optim_step(policy_id, AdamParams(lr=3e-2))
        await worker.publish(policy_id, step.version)
    adapter_hash = await worker.save_adapter(policy_id, step.version, str(folder))
    await worker.remove(policy_id)
    return adapter_hash


async def add_versions(store: Store, worker: LocalWorker) -> None:
    """Make a job of one version for every adapter."""
    for index in range(NUM_ADAPTERS):
        tenant, job = tenant_of(index), f"says-{index}"
        store.add_job(tenant, JobSpec(tenant=tenant, name=job, env={}))
        store.set_job_state(tenant, job, JobState.CANCELLED)
        files = store.files.version(tenant, job, 0).prepare()
        adapter_hash = await teach(worker, index, Path(files.adapter))
        store.add_first_version(tenant, job, adapter_hash)
        store.keep_adapter(tenant, job, 0)


@asynccontextmanager
async def running(store: Store, worker: LocalWorker) -> AsyncIterator[tuple[Controller, Serving]]:
    calls = AsyncStore(store, is_threaded=False)
    controller = Controller(
        calls, [worker], TOKENIZER, make_family=lambda spec: make_family(spec.env)
    )
    settings = ServingSettings(max_loaded=MAX_LOADED)
    serving = Serving(controller.placement, calls, TOKENIZER, settings)
    jobs = asyncio.create_task(controller.serve())
    yield controller, serving
    controller.stop()
    await jobs
    await serving.close()


async def train(controller: Controller, store: Store) -> None:
    for spec in SEEDED:
        await controller.submit(spec)
    while any(store.job(spec.tenant, spec.name).state.is_active for spec in SEEDED):
        await asyncio.sleep(0.05)


def curves(store: Store) -> list[list[str]]:
    """Return every step of the seeded jobs, to the last bit: `repr` of a float has them all."""

    def row(record: StepRecord) -> str:
        return f"{record.adapter_hash} {dict(record.metrics)!r}"

    return [[row(one) for one in store.steps(spec.tenant, spec.name)] for spec in SEEDED]


async def ask(serving: Serving, index: int) -> Completion:
    prompt = [Message("user", PROMPTS[index % len(PROMPTS)])]
    (answer,) = await serving.complete(tenant_of(index), f"says-{index}", prompt, SAMPLING)
    assert answer.tokens.tolist() == [token_of(index)] * SAMPLING.max_tokens, "another's answer"
    return answer


async def flood(serving: Serving, alone: Sequence[Completion], training: asyncio.Task) -> int:
    """Ask adapters in a random order until training ends; return how many answers came."""

    async def client(number: int) -> int:
        rng, count = runtime.rng("client", number), 0
        while not training.done():
            index = int(rng.integers(NUM_ADAPTERS))
            answer = await ask(serving, index)
            assert answer.adapter_hash == alone[index].adapter_hash
            assert (answer.logprobs == alone[index].logprobs).all(), "a neighbour changed a bit"
            count += 1
        return count

    return sum(await asyncio.gather(*(client(number) for number in range(NUM_CLIENTS))))


@pytest.mark.slow
def test_a_flood_of_served_adapters_changes_no_bit_of_seeded_jobs_and_mixes_up_no_answer(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        settings = engine_settings(RunSettings(num_workers=1), "tiny", is_exact=True)
        async with started(settings) as (worker,):
            quiet = Store(tmp_path / "quiet")
            async with running(quiet, worker) as (controller, _):
                await train(controller, quiet)
            store = Store(tmp_path / "flooded")
            await add_versions(store, worker)
            async with running(store, worker) as (controller, serving):
                alone = [await ask(serving, index) for index in range(NUM_ADAPTERS)]
                training = asyncio.create_task(train(controller, store))
                num_answers = await flood(serving, alone, training)
                await training
                num_loads = serving._dispatcher.shelves[worker.name].num_loads
            assert num_answers > NUM_ADAPTERS
            assert num_loads > 2 * NUM_ADAPTERS, "answers come from versions loaded for them"
            assert len({answer.adapter_hash for answer in alone}) == NUM_ADAPTERS
            assert curves(store) == curves(quiet)
            assert [len(curve) for curve in curves(store)] == [10, 10]

    asyncio.run(scenario())


def test_samples_share_prompts_within_a_tenant_only_and_no_bit_depends_on_that(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        settings = engine_settings(RunSettings(num_workers=1), "tiny", is_exact=True)
        async with started(settings) as (worker,):
            store = Store(tmp_path)
            async with running(store, worker) as (_, serving):
                prompt = serving.tokens("Once upon a time there was a very small model. " * 3)

                async def ask(tenant: str, seed: int, n: int = 1) -> list[Completion]:
                    sampling = SamplingParams(max_tokens=16, seed=seed)
                    return await serving.sample(tenant, None, prompt, sampling, n)

                def words(completions: Sequence[Completion]) -> list[tuple[bytes, bytes]]:
                    return [(one.tokens.tobytes(), one.logprobs.tobytes()) for one in completions]

                (alone,) = await ask("acme", 1)
                assert alone.num_cached_tokens == 0
                group = await ask("acme", 1, n=4)
                assert [one.num_cached_tokens for one in group] == [len(prompt) - 1] * 4
                assert words(group)[0] == words([alone])[0]
                assert len(set(words(group))) == 4
                several = await asyncio.gather(*(ask("acme", 1) for _ in range(3)))
                assert all(words(one) == words([alone]) for one in several)
                (foreign,) = await ask("birch", 1)
                assert foreign.num_cached_tokens == 0
                group = await ask("birch", 1, n=2)
                assert words(group)[0] == words([alone])[0]
                extras = Extras(prompt_logprobs=True, topk_sample_logprobs=2)
                sampling = SamplingParams(max_tokens=4, seed=1)
                first, second = await serving.sample(
                    "acme", None, prompt, sampling, 2, extras=extras
                )
                assert first.prompt_logprobs is not None and second.prompt_logprobs is None
                assert np.isfinite(first.prompt_logprobs[1:]).all()
            # Of those that share a prompt one pays for it, the others for its last token; scoring
            # a prompt shares none.
            assert store.usage("acme").served_tokens == 16 * 8 + 2 * 4
            assert store.usage("acme").prefill_tokens == 5 * len(prompt) + 5
            assert store.usage("birch").served_tokens == 16 * 3
            assert store.usage("birch").prefill_tokens == 2 * len(prompt) + 1

    asyncio.run(scenario())
