"""Best rates of each kind of engine work, measured by driving real workers with that work alone.

All workers run at once, as they do in a pipeline, so shared memory bandwidth is counted. Each kind
gets its most favourable form: one adapter, full batches, sequences of the workload's length.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from marlaas.types import (
    AdapterSpec,
    Datum,
    GenerateRequest,
    Objective,
    PolicyId,
    SamplingParams,
    WorkerStats,
)
from marlaas.workers.local import LocalWorker

POLICY = PolicyId("bench/rates")
ROUNDS = 3
"""Repetitions of each kind; the best one counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Lengths that the rates are measured at."""

    prompt_tokens: int = 40
    sampled_tokens: int = 24
    vocab_size: int = 256
    """Token ids are drawn below it."""


async def measure_rates(workers: Sequence[LocalWorker], shape: Shape) -> dict[str, float]:
    """Return tokens per second of one worker, by kind of work, while all of them do that kind."""
    await asyncio.gather(*(worker.create(POLICY, AdapterSpec()) for worker in workers))
    best = dict.fromkeys(KINDS, 0.0)
    for round_ in range(ROUNDS):
        for kind, work in _WORK.items():
            before = await _stats(workers)
            await asyncio.gather(*(work(worker, shape, round_) for worker in workers))
            after = await _stats(workers)
            best[kind] = max(best[kind], _rate(before, after, kind))
    await asyncio.gather(*(worker.remove(POLICY) for worker in workers))
    return best


async def _stats(workers: Sequence[LocalWorker]) -> list[WorkerStats]:
    return list(await asyncio.gather(*(worker.stats() for worker in workers)))


def _rate(before: Sequence[WorkerStats], after: Sequence[WorkerStats], kind: str) -> float:
    def total(stats: Sequence[WorkerStats], values: str) -> float:
        mappings: list[Mapping[str, float]] = [getattr(one, values) for one in stats]
        return sum(mapping.get(kind, 0.0) for mapping in mappings)

    busy_s = total(after, "busy_s") - total(before, "busy_s")
    return (total(after, "tokens") - total(before, "tokens")) / max(busy_s, 1e-9)


async def _prefill(worker: LocalWorker, shape: Shape, round_: int) -> None:
    await _sample(worker, shape, f"prefill-{round_}", count=64, max_tokens=1)


async def _decode(worker: LocalWorker, shape: Shape, round_: int) -> None:
    # As many tokens for every sequence: the batch is full from the first step to the last.
    count = worker.max_decoding
    await _sample(worker, shape, f"decode-{round_}", count=count, max_tokens=shape.sampled_tokens)


async def _sample(
    worker: LocalWorker, shape: Shape, label: str, *, count: int, max_tokens: int
) -> None:
    requests = [
        GenerateRequest(
            request_id=f"{label}/{idx}",
            sequence_id=f"{label}/{idx}",
            policy_id=POLICY,
            version=0,
            tokens=_tokens(shape.prompt_tokens, shape, idx),
            sampling=SamplingParams(max_tokens=max_tokens, seed=idx),
        )
        for idx in range(count)
    ]
    await asyncio.gather(*(worker.generate(request) for request in requests))


async def _train(worker: LocalWorker, shape: Shape, round_: int) -> None:
    data = [_datum(shape, idx) for idx in range(48)]
    await worker.forward_backward(POLICY, data, Objective(name="dppo_tis"))


async def _score(worker: LocalWorker, shape: Shape, round_: int) -> None:
    await worker.forward(POLICY, 0, [_datum(shape, idx) for idx in range(48)])


_WORK = {"prefill": _prefill, "decode": _decode, "train": _train, "score": _score}

KINDS = tuple(_WORK)


def _datum(shape: Shape, idx: int) -> Datum:
    length = shape.prompt_tokens + shape.sampled_tokens
    weights = np.zeros(length, dtype=np.float32)
    weights[shape.prompt_tokens :] = 1e-3
    return Datum(
        tokens=_tokens(length, shape, idx),
        weights=weights,
        advantages=weights,
        sampling_logprobs=np.full(length, -1.0, dtype=np.float32),
    )


def _tokens(length: int, shape: Shape, idx: int) -> np.ndarray:
    return ((np.arange(length) * 7 + idx * 13) % shape.vocab_size).astype(np.int32)
