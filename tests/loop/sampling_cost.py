"""What a sample costs the server, apart from engines and HTTP: CPU and memory while it waits.

Run `python -m tests.loop.sampling_cost`. Two workers of 64 places answer after 20 ms; all samples
are asked for at once.
"""

import asyncio
import tempfile
import tracemalloc
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from marlaas import runtime
from marlaas.loop.controller import Controller
from marlaas.loop.samplers import SampleRequest, Samplers
from marlaas.loop.serving import Serving
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.types import Completion, GenerateRequest, SamplingParams, Session, StopReason
from tests.fakes import ByteTokenizer, FakeWorker, Speed, family_of

NUM_SAMPLES = 2000
SAMPLING = SamplingParams(max_tokens=32, seed=3)
ANSWER = Completion(
    request_id="", tokens=np.zeros(32, np.int32), logprobs=np.zeros(32, np.float32),
    stop_reason=StopReason.LENGTH, versions=np.zeros(32, np.int32), adapter_hash="",
)  # fmt: skip


class Echo(FakeWorker):
    """An engine that costs nothing."""

    async def generate(self, request: GenerateRequest) -> Completion:
        await asyncio.sleep(0.02)
        return ANSWER


def prompt(index: int) -> np.ndarray:
    return np.array([*range(200), index], dtype=np.int32)


async def one_by_one(serving: Serving, _: Samplers, sampler: str) -> None:
    samples = (serving.sample("acme", None, prompt(i), SAMPLING) for i in range(NUM_SAMPLES))
    await asyncio.gather(*samples)


async def by_eights(serving: Serving, _: Samplers, sampler: str) -> None:
    samples = (
        serving.sample("acme", None, prompt(i), SAMPLING, 8) for i in range(NUM_SAMPLES // 8)
    )
    await asyncio.gather(*samples)


async def as_requests(_: Serving, samplers: Samplers, sampler: str) -> None:
    async def ask(seq: int) -> None:
        request = SampleRequest(tokens=prompt(seq), max_tokens=32, seed=3)
        request_id, _ = await samplers.submit("acme", sampler, seq, request)
        await samplers.wait("acme", request_id, 100.0)

    await asyncio.gather(*(ask(seq) for seq in range(NUM_SAMPLES)))


async def waiting_bytes(samplers: Samplers, sampler: str) -> float:
    """Return what a request takes that waits, its prompt of 201 tokens included."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for seq in range(NUM_SAMPLES):
        request = SampleRequest(tokens=prompt(seq), max_tokens=32, seed=3)
        await samplers.submit("acme", sampler, 10**9 + seq, request)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / NUM_SAMPLES


Way = Callable[[Serving, Samplers, str], Awaitable[None]]


async def measure(root: Path) -> None:
    speed = Speed(max_decoding=64)
    workers = [Echo(f"worker-{index}", speed=speed) for index in range(2)]
    store = AsyncStore(Store(root))
    controller = Controller(store, workers, ByteTokenizer(), make_family=family_of)
    serving = Serving(controller.placement, store, ByteTokenizer(), tenants=controller.tenants)
    samplers = Samplers(serving, store)
    running = asyncio.create_task(controller.serve())
    await store.call(Store.add_session, "acme", Session(session_id="s-1"))
    sampler = await samplers.create("acme", "s-1", 0, "tiny", None)
    await serving.sample("acme", None, prompt(0), replace(SAMPLING, seed=1))
    ways: tuple[Way, ...] = (one_by_one, by_eights, as_requests)
    for way in ways:
        began_s = runtime.cpu_s()
        await way(serving, samplers, sampler)
        cost_s = (runtime.cpu_s() - began_s) / NUM_SAMPLES
        print(f"{way.__name__:12} {cost_s * 1e6:6.0f} us a sample")  # noqa: T201
    num_bytes = await waiting_bytes(samplers, sampler)
    print(f"{num_bytes:6.0f} bytes a request that waits")  # noqa: T201
    await samplers.close()
    await serving.close()
    controller.stop()
    await running
    await store.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder)))
