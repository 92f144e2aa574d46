"""Runs: in order, to one outcome each, whatever is lost in between."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from marlaas import runtime
from marlaas.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded
from marlaas.loop.operations import (
    Body,
    ForwardBackward,
    LoadWeights,
    OperationKind,
    OptimStep,
    PassResult,
    QueueState,
    Result,
    SaveForSampler,
    SaveWeights,
    Waiting,
)
from marlaas.loop.policies import Placement
from marlaas.loop.runner import RunnerSettings
from marlaas.loop.runs import Runs
from marlaas.loop.usage import UNLIMITED, Tenants
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.types import (
    AdamParams,
    AdapterSpec,
    Datum,
    Objective,
    OperationState,
    Quotas,
    Run,
    Session,
    StepResult,
    Tenant,
)
from tests.fakes import ALPHABET, FakePolicy, FakeWorker, Speed, logprobs_of

ACME, OTHER = "acme", "other"
ADAM = AdamParams(lr=0.5)
PLENTY_S = 1e5
CROSS_ENTROPY = Objective(name="cross_entropy")


def datum(letters: str = "abc", weight: float = 1.0, **changes: object) -> Datum:
    """Teach the fake policy to say what follows the first letter."""
    tokens = np.frombuffer(letters.encode(), dtype=np.uint8).astype(np.int32)
    weights = np.full(len(tokens), weight, dtype=np.float32)
    weights[0] = 0
    zeros = np.zeros(len(tokens), dtype=np.float32)
    made = Datum(tokens=tokens, weights=weights, advantages=zeros, sampling_logprobs=zeros)
    return replace(made, **changes)


def train(*letters: str, **changes: object) -> ForwardBackward:
    return ForwardBackward(
        data=[datum(one) for one in letters or ("abc",)], objective=CROSS_ENTROPY, **changes
    )


def faulty() -> ForwardBackward:
    return ForwardBackward(
        data=[datum(advantages=np.zeros(7, np.float32))], objective=CROSS_ENTROPY
    )


STEP = OptimStep(adam=ADAM)


@dataclass
class Server:
    """One process: workers, the store on a folder, runs."""

    store: Store
    workers: list[FakeWorker]
    runs: Runs
    tenants: Tenants
    numbers: dict[str, int] = field(default_factory=dict)

    @property
    def worker(self) -> FakeWorker:
        return self.workers[0]

    async def new(
        self, seq: int = 0, tenant: str = ACME, session: str | None = None, **source: object
    ) -> str:
        """Make a run; return its id."""
        session = session or f"s-{tenant}"
        self.store.add_session(tenant, Session(session_id=session))
        run = Run(
            run_id=f"{session}:train:{seq}", session_id=session, seq=seq, base_model="tiny",
            spec=AdapterSpec(alpha=32.0),
        )  # fmt: skip
        await done(self, await self.runs.create(tenant, run, **source), tenant)
        return run.run_id

    async def send(self, run_id: str, *bodies: Body, tenant: str = ACME) -> list[str]:
        """Submit operations under the next numbers."""
        ids = []
        for body in bodies:
            self.numbers[run_id] = self.numbers.get(run_id, 0) + 1
            ids.append(await self.runs.submit(tenant, run_id, self.numbers[run_id], body))
        return ids

    async def do(self, run_id: str, *bodies: Body, tenant: str = ACME) -> list[Result]:
        """Submit operations and wait for their outcomes."""
        ids = await self.send(run_id, *bodies, tenant=tenant)
        return [await done(self, one, tenant) for one in ids]

    def weights(self, run_id: str, tenant: str = ACME) -> np.ndarray:
        """Return what is on the worker of a run."""
        return self.policy(run_id, tenant).logits

    def policy(self, run_id: str, tenant: str = ACME) -> FakePolicy:
        (found,) = self.policies(run_id, tenant)
        return found

    def policies(self, run_id: str, tenant: str = ACME) -> list[FakePolicy]:
        name = f"{tenant}/{run_id}#"
        return [
            policy
            for worker in self.workers
            for policy_id, policy in worker.policies.items()
            if policy_id.startswith(name)
        ]


async def done(server: Server, request_id: str, tenant: str = ACME) -> Result:
    result = await server.runs.wait(tenant, request_id, timeout_s=PLENTY_S)
    assert isinstance(result, Result), result
    return result


@asynccontextmanager
async def serving(
    root: Path,
    *,
    workers: int = 1,
    speed: Speed | None = None,
    quotas: Quotas = UNLIMITED,
    settings: RunnerSettings | None = None,
    is_killed: bool = False,
    **worker: object,
) -> AsyncIterator[Server]:
    """Serve from a folder; `is_killed`: the process ends without a word."""
    store = Store(root)
    fakes = [FakeWorker(f"worker-{i}", speed=speed or Speed(), **worker) for i in range(workers)]
    tenants = Tenants({})
    tenants.change([Tenant(tenant_id=ACME, quotas=quotas)])
    runs = Runs(
        Placement(fakes, tenants.weights), AsyncStore(store, is_threaded=False),
        tenants=tenants, settings=settings,
    )  # fmt: skip
    await runs.start()
    try:
        yield Server(store, fakes, runs, tenants)
        if not is_killed:
            await runs.close()
    finally:
        store.close()


def virtually(main: Coroutine) -> None:
    runtime.run_virtual(main)


def reference(batches: Sequence[Sequence[str]], lr: float = ADAM.lr) -> np.ndarray:
    """Return the weights that training on batches, one step each, gives."""
    logits = np.zeros(len(ALPHABET))
    for batch in batches:
        gradient = None
        for letters in batch:
            one = datum(letters)
            trained = np.flatnonzero(one.weights)
            counts = np.zeros(len(ALPHABET))
            for token in one.tokens[trained].tolist():
                counts[ALPHABET.tolist().index(token)] += 1.0
            counts -= float(len(trained)) * np.exp(logprobs_of(logits))
            gradient = counts if gradient is None else gradient + counts
        logits = logits + lr * gradient
    return logits


def value(result: Result) -> object:
    assert result.value is not None, result.error
    return result.value


# ---------------------------------------------------------------------------------------------
# Order


def test_operations_are_executed_by_number_whatever_the_order_they_arrive_in(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with serving(tmp_path) as server:
            run = await server.new()
            ids = {}
            for seq, body in ((3, STEP), (2, train("abb")), (1, train("ab"))):
                ids[seq] = await server.runs.submit(ACME, run, seq, body)
                await asyncio.sleep(1.0)
            assert [(await done(server, ids[seq])).error for seq in (1, 2, 3)] == ["", "", ""]
            np.testing.assert_array_equal(server.weights(run), reference([["ab", "abb"]]))
            assert server.store.run(ACME, run).version == 1

    virtually(main())


def test_a_number_that_never_comes_costs_those_behind_it_and_nothing_else(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as server:
            run = await server.new()
            first = await server.runs.submit(ACME, run, 1, train())
            await done(server, first)
            began_s = runtime.now_s()
            behind = [
                await server.runs.submit(ACME, run, seq, body)
                for seq, body in ((3, train()), (5, train()))
            ]
            waiting = await server.runs.wait(ACME, behind[0], timeout_s=30.0)
            assert isinstance(waiting, Waiting) and "operation 2" in waiting.reason
            for request_id in behind:
                result = await done(server, request_id)
                assert (result.category, "operation 2" in result.error) == ("server", True)
            assert runtime.now_s() - began_s == pytest.approx(60.0, abs=1.0)
            late = await server.runs.submit(ACME, run, 2, train())
            assert (await done(server, late)).category == "server"
            server.numbers[run] = 5
            results = await server.do(run, STEP, train("ab"), STEP)
            assert [result.category for result in results] == ["user", "", ""]
            np.testing.assert_array_equal(server.weights(run), reference([["ab"]]))

    virtually(main())


def test_the_same_number_again_is_the_same_operation(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as server:
            run = await server.new()
            ids = [await server.runs.submit(ACME, run, 1, train()) for _ in range(3)]
            await done(server, ids[0])
            ids.append(await server.runs.submit(ACME, run, 1, train()))
            assert len(set(ids)) == 1
            with pytest.raises(Conflict):
                await server.runs.submit(ACME, run, 1, STEP)
            server.numbers[run] = 1
            await server.do(run, STEP)
            np.testing.assert_array_equal(server.weights(run), reference([["abc"]]))
            assert server.store.usage(ACME).trained_tokens == 3
            again = await server.runs.create(ACME, server.store.run(ACME, run))
            assert again == f"op:{run}:0"

    virtually(main())


def test_a_refused_request_uses_its_number_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as server:
            run = await server.new()
            behind = await server.runs.submit(ACME, run, 3, train("ab"))
            kind = OperationKind.SAVE_WEIGHTS
            for _ in range(2):
                refused = await server.runs.reject(ACME, run, 2, "no such name", kind=kind)
            assert (await done(server, refused)).error == "no such name"
            await server.runs.reject(ACME, run, 1, "a bad name", kind=kind)
            began_s = runtime.now_s()
            await done(server, behind)
            assert runtime.now_s() - began_s < 1.0
            server.numbers[run] = 3
            (step,) = await server.do(run, STEP)
            assert step.error == ""

    virtually(main())


def test_a_refusal_ahead_of_its_turn_is_known_after_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, is_killed=True) as server:
            run = await server.new()
            await server.runs.reject(ACME, run, 4, "a bad datum")
            await server.send(run, train(), STEP)
        async with serving(tmp_path) as server:
            server.numbers[run] = 2
            began_s = runtime.now_s()
            assert (await done(server, f"op:{run}:2")).error == ""
            (third,) = await server.do(run, train())
            assert third.error == ""
            server.numbers[run] = 4
            results = await server.do(run, STEP, train("ab"), STEP)
            assert [result.category for result in results] == ["user", "", ""]
            assert runtime.now_s() - began_s < 30.0

    virtually(main())


# ---------------------------------------------------------------------------------------------
# Failures


def test_after_a_failed_pass_the_step_fails_and_clears_and_the_next_one_works(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with serving(tmp_path) as server:
            run = await server.new()
            results = await server.do(run, train("ab"), faulty(), STEP)
            assert [result.category for result in results] == ["", "user", "user"]
            assert "advantages has shape" in results[1].error
            assert server.store.run(ACME, run).version == 0
            results = await server.do(run, train("abb"), STEP)
            assert [result.error for result in results] == ["", ""]
            np.testing.assert_array_equal(server.weights(run), reference([["abb"]]))
            # Scoring alone leaves the gradient as it is.
            scoring = replace(faulty(), is_forward_only=True)
            results = await server.do(run, train("ab"), scoring, STEP)
            assert [result.category for result in results] == ["", "user", ""]

    virtually(main())


def test_a_vetoed_update_fails_and_leaves_everything_as_it_was(tmp_path: Path) -> None:
    async def main() -> None:
        vetoed = []
        async with serving(
            tmp_path, is_vetoed=lambda policy_id, version: vetoed.append(version) or version == 2
        ) as server:
            run = await server.new()
            results = await server.do(run, train("ab"), STEP, train("cc"), STEP)
            assert [result.category for result in results] == ["", "", "", "user"]
            assert "not finite" in results[3].error
            before = server.store.run(ACME, run)
            assert (before.version, before.boundary_seq) == (1, 4)
            (_, step) = await server.do(run, train("abb"), STEP)
            assert value(step).version == 2
            np.testing.assert_array_equal(server.weights(run), reference([["ab"], ["abb"]]))

    virtually(main())


def test_an_unknown_request_and_another_tenants_look_alike(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as server:
            run = await server.new()
            for request_id in (f"op:{run}:0", f"op:{run}:9", "op:9", "smp:x:1", "op:a:-1"):
                with pytest.raises(NotFound):
                    await server.runs.wait(OTHER, request_id, timeout_s=1.0)
            with pytest.raises(NotFound):
                await server.runs.submit(OTHER, run, 1, train())
            with pytest.raises(NotFound):
                await server.runs.reject(OTHER, run, 1, "no")
            await server.do(run, train())

    virtually(main())
