"""Runs: in order, to one outcome each, whatever is lost in between."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from marlaas import runtime
from marlaas.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded
from marlaas.loop.fairness import TokenCounts
from marlaas.loop.operations import (
    Body,
    ForwardBackward,
    LoadWeights,
    OperationKind,
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
    AdapterSpec,
    JobSpec,
    Objective,
    PolicyId,
    Quotas,
    Run,
    Session,
    Tenant,
)
from tests.driving import STEP, datum, faulty, reference, train
from tests.fakes import ALPHABET, FakePolicy, FakeWorker, SlowStore, Speed

ACME, OTHER = "acme", "other"
PLENTY_S = 1e5


@pytest.fixture(autouse=True)
def faults(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No test passes in which a fault of the server was written to the log."""
    yield
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@dataclass
class Server:
    """One process: workers, the store on a folder, runs."""

    store: Store
    workers: list[FakeWorker]
    runs: Runs
    placement: Placement
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
    make: type[FakeWorker] = FakeWorker,
    store_s: float = 0.0,
    **worker: object,
) -> AsyncIterator[Server]:
    """Serve from a folder; `is_killed`: the process ends without a word."""
    store = Store(root)
    fakes = [make(f"worker-{i}", speed=speed or Speed(), **worker) for i in range(workers)]
    tenants = Tenants({})
    tenants.change([Tenant(tenant_id=ACME, quotas=quotas)])
    placement = Placement(fakes, tenants.weights)
    calls = SlowStore(store, call_s=store_s, seed=0) if store_s else None
    threadless = AsyncStore(store, is_threaded=False)
    runs = Runs(placement, calls or threadless, tenants=tenants, settings=settings)
    await runs.start()
    try:
        yield Server(store, fakes, runs, placement, tenants)
        if not is_killed:
            await runs.close()
    finally:
        store.close()


def virtually(main: Coroutine) -> None:
    runtime.run_virtual(main)


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


def test_a_large_batch_whose_first_part_comes_last_is_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as server:
            run = await server.new()
            ids = []
            for seq in (2, 3, 4, 5, 1):  # 30 s each on a slow line
                await asyncio.sleep(30.0)
                ids.append(await server.runs.submit(ACME, run, seq, train("ab")))
            assert [(await done(server, one)).error for one in ids] == [""] * 5

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


def test_a_refused_pass_spoils_the_step_behind_it_and_no_other(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as server:
            run = await server.new()
            await server.runs.reject(ACME, run, 3, "a bad datum")
            await server.send(run, train("ab"), STEP)
            server.numbers[run] = 3
            results = await server.do(run, train("cc"), STEP, train("abb"), STEP)
            assert (await done(server, f"op:{run}:2")).error == ""
            assert [result.category for result in results] == ["", "user", "", ""]
            np.testing.assert_array_equal(server.weights(run), reference([["ab"], ["abb"]]))

    virtually(main())


def test_a_worker_holds_one_version_of_a_run(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as server:
            run = await server.new()
            save = SaveForSampler(name="a")
            await server.do(run, train("ab"), STEP, save, train("ab"), STEP, STEP, STEP)
            await asyncio.sleep(1.0)
            assert len(server.policy(run).live) == 0  # the newest one lives once it is saved
            await server.do(run, replace(save, name="b"))
            assert list(server.policy(run).live) == [4]

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


def test_a_run_that_no_base_can_have_fails_and_leaves_nothing_behind(tmp_path: Path) -> None:
    class StrictWorker(FakeWorker):
        async def create(self, policy_id: PolicyId, spec: AdapterSpec) -> str:
            raise InvalidRequest("rank = 8; expected less")

    async def main() -> None:
        async with serving(tmp_path, make=StrictWorker) as server:
            run = await server.new()
            results = await server.do(run, train(), STEP)
            assert [result.category for result in results] == ["user", "user"]
            assert "expected less" in results[0].error
            await asyncio.sleep(1.0)
            assert server.runs._runners == {} and server.placement._assigned == {}

    virtually(main())


def test_what_was_accepted_is_executed_though_its_client_left_meanwhile(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, store_s=0.1) as server:
            run = await server.new()
            sending = asyncio.create_task(server.runs.submit(ACME, run, 1, train("ab")))
            await asyncio.sleep(0.01)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            await done(server, await server.runs.submit(ACME, run, 2, STEP))
            np.testing.assert_array_equal(server.weights(run), reference([["ab"]]))
            assert runtime.now_s() < 30.0

    virtually(main())


def test_a_fault_of_ours_costs_one_operation_and_no_other_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class BrokenWorker(FakeWorker):
        async def forward_backward(self, policy_id: PolicyId, data: Sequence, objective: Objective):
            if len(data) == 3:
                raise ZeroDivisionError
            return await super().forward_backward(policy_id, data, objective)

    async def main() -> None:
        async with serving(tmp_path, make=BrokenWorker) as server:
            run, other = await server.new(), await server.new(1)
            results = await server.do(run, train("ab"), train("ab", "ab", "ab"), STEP)
            assert [result.category for result in results] == ["", "server", "user"]
            assert "ZeroDivisionError" in results[1].error
            for made, letters in ((run, "abb"), (other, "ac")):
                (_, step) = await server.do(made, train(letters), STEP)
                assert step.error == ""
            np.testing.assert_array_equal(server.weights(run), reference([["abb"]]))
        caplog.clear()

    virtually(main())


# ---------------------------------------------------------------------------------------------
# Losses and restarts


def test_a_gradient_survives_a_killed_server_and_a_killed_worker(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, is_killed=True) as server:
            run = await server.new()
            await server.do(run, train("ab", "abb"), train("ac"))
        async with serving(tmp_path) as server:
            server.numbers[run] = 2
            await server.do(run, train("add"))
            server.worker.kill()
            await server.do(run, train("ae"))
            server.worker.kill()
            (step,) = await server.do(run, STEP)
            assert step.error == ""
            expected = reference([["ab", "abb", "ac", "add", "ae"]])
            # Data of one pass are added up one by one, as they are here.
            np.testing.assert_array_equal(server.weights(run), expected)

    virtually(main())


def test_what_was_accepted_is_executed_once_though_its_server_died(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, is_killed=True) as server:
            run = await server.new()
            ids = await server.send(run, train("ab"), STEP, train("abb"), STEP)
        async with serving(tmp_path) as server:
            results = [await done(server, request_id) for request_id in ids]
            assert [result.error for result in results] == [""] * 4
            assert value(results[3]).version == 2
            np.testing.assert_array_equal(server.weights(run), reference([["ab"], ["abb"]]))
            assert server.store.usage(ACME).trained_tokens == 5

    virtually(main())


def test_a_step_that_was_committed_is_not_done_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, is_killed=True) as server:
            run = await server.new()
            ids = await server.send(run, train("ab"), STEP)
            while server.store.run(ACME, run).version == 0:
                await asyncio.sleep(0.001)
        async with serving(tmp_path) as server:
            again = await server.runs.submit(ACME, run, 2, STEP)
            assert again == ids[1]
            assert value(await done(server, again)).version == 1
            server.numbers[run] = 2
            await server.do(run, train("abb"), STEP)
            np.testing.assert_array_equal(server.weights(run), reference([["ab"], ["abb"]]))

    virtually(main())


def test_an_operation_that_ends_every_worker_is_given_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, speed=Speed(train_s=1.0, restart_s=1.0)) as server:
            run = await server.new()
            (request_id,) = await server.send(run, train("abcdefgh"))

            async def strike() -> None:
                while True:
                    await asyncio.sleep(3.0)
                    server.worker.kill()

            striking = asyncio.create_task(strike())
            result = await done(server, request_id)
            assert (result.category, "lost workers" in result.error) == ("server", True)
            striking.cancel()
            results = await server.do(run, STEP, train("ab"), STEP)
            assert [result.category for result in results] == ["user", "", ""]

    virtually(main())


def test_without_any_worker_operations_fail_instead_of_waiting_for_ever(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, workers=2) as server:
            run = await server.new()
            await server.do(run, train("ab"))
            server.workers[0].kill(for_good=True)
            (step,) = await server.do(run, STEP)
            assert step.error == ""
            np.testing.assert_array_equal(server.weights(run), reference([["ab"]]))
            server.workers[1].kill(for_good=True)
            (result,) = await server.do(run, train())
            assert (result.category, "worker" in result.error) == ("server", True)

    virtually(main())


def test_closing_loses_nothing_and_lets_go_of_whoever_waits(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, speed=Speed(train_s=2.0)) as server:
            run = await server.new()
            ids = await server.send(run, train("ab"), train("abb"), STEP)
            waiting = asyncio.create_task(server.runs.wait(ACME, ids[2], timeout_s=PLENTY_S))
            await asyncio.sleep(5.0)
            await server.runs.close()
            assert isinstance(await waiting, Waiting)
        async with serving(tmp_path) as server:
            assert [(await done(server, one)).error for one in ids] == ["", "", ""]
            np.testing.assert_array_equal(server.weights(run), reference([["ab", "abb"]]))

    virtually(main())


def test_a_number_far_beyond_the_next_one_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as server:
            run = await server.new()
            for seq in (1 << 62, 10_002):
                with pytest.raises(InvalidRequest, match="expected the next number"):
                    await server.runs.submit(ACME, run, seq, train())
                with pytest.raises(InvalidRequest, match="expected the next number"):
                    await server.runs.reject(ACME, run, seq, "refused")
            results = await server.do(run, train("ab"), STEP)
            assert [result.category for result in results] == ["", ""]

    virtually(main())


def test_whoever_waits_is_woken_by_the_outcome_and_may_ask_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, speed=Speed(train_s=10.0)) as server:
            run = await server.new()
            (request_id,) = await server.send(run, train("ab"))
            began_s = runtime.now_s()
            early = await server.runs.wait(ACME, request_id, timeout_s=1.0)
            assert early == Waiting(queue_state=QueueState.ACTIVE)
            results = await asyncio.gather(*(done(server, request_id) for _ in range(3)))
            assert runtime.now_s() - began_s == pytest.approx(20.0, abs=0.1)
            again = await done(server, request_id)
            for result in (*results, again):
                outputs = value(result).outputs
                np.testing.assert_array_equal(outputs[0].logprobs, value(again).outputs[0].logprobs)
        async with serving(tmp_path) as server:
            assert value(await done(server, request_id)).metrics == value(again).metrics

    virtually(main())


def test_a_state_that_comes_back_as_another_is_not_trained_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as server:
            run = await server.new()
            await server.do(run, train("ab"), STEP)
            path = Path(server.store.run(ACME, run).state_path)
            path.write_bytes(path.read_bytes()[:-8] + b"\0" * 8)
            server.worker.kill()
            (result,) = await server.do(run, train("ab"))
            assert (result.category, "came back as" in result.error) == ("server", True)
            assert server.store.run(ACME, run).is_corrupted

    virtually(main())


# ---------------------------------------------------------------------------------------------
# Checkpoints


def test_a_saved_run_goes_on_elsewhere_as_it_would_have(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as server:
            run = await server.new()
            results = await server.do(
                run, train("ab"), STEP, train("ac"), SaveWeights(name="one"), STEP
            )
            path = value(results[3]).path
            assert path == f"tinker://{run}/weights/one"
            owner_and_checkpoint = server.store.find_checkpoint(ACME, path)
            other = await server.new(1, source=owner_and_checkpoint, with_optimizer=True)
            third = await server.new(2, source=owner_and_checkpoint)
            # A save neither uses nor clears what was accumulated.
            np.testing.assert_array_equal(server.weights(run), reference([["ab"], ["ac"]]))
            for made in (other, third):
                await server.do(made, train("ac"), STEP)
                np.testing.assert_array_equal(server.weights(made), server.weights(run))
            server.store.delete_checkpoint(ACME, run, "weights", "one")
            server.worker.kill()
            await server.do(other, train("ae"), STEP)
            expected = reference([["ab"], ["ac"], ["ae"]])
            np.testing.assert_array_equal(server.weights(other), expected)

    virtually(main())


def test_a_fresh_run_is_saved_and_gone_on_from(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as server:
            run = await server.new()
            (saved,) = await server.do(run, SaveWeights(name="start", ttl_s=3600.0))
            source = server.store.find_checkpoint(ACME, value(saved).path)
            assert source[1].expires_s == pytest.approx(runtime.wall_time_s() + 3600, abs=1)
            other = await server.new(1, source=source, with_optimizer=True)
            await server.do(other, train("ab"), STEP)
            np.testing.assert_array_equal(server.weights(other), reference([["ab"]]))

    virtually(main())


def test_loading_into_a_run_that_has_trained_replaces_what_it_was(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as server:
            run = await server.new()
            await server.do(run, train("ab"), STEP, SaveWeights(name="one"), train("cc"), STEP)
            path = f"tinker://{run}/weights/one"
            load = LoadWeights(path=path, with_optimizer=True)
            results = await server.do(run, train("dd"), load, train("ac"), STEP)
            assert [result.error for result in results] == [""] * 4
            assert value(results[1]).version == 3
            expected = reference([["ab"], ["ac"]])
            np.testing.assert_array_equal(server.weights(run), expected)
            await server.do(run, LoadWeights(path=path), train("ac"))
            await asyncio.sleep(1.0)
            assert len(server.policies(run)) == 1
            server.worker.kill()
            await server.do(run, STEP)
            np.testing.assert_array_equal(server.weights(run), expected)
            missing = f"tinker://{run}/weights/two"
            (result,) = await server.do(run, LoadWeights(path=missing))
            assert (result.category, "no checkpoint" in result.error) == ("user", True)

    virtually(main())


def test_another_tenants_checkpoint_is_loaded_when_it_is_published(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as server:
            run = await server.new()
            await server.do(run, train("ab"), STEP, SaveWeights(name="one"))
            path = f"tinker://{run}/weights/one"
            theirs = await server.new(tenant=OTHER)
            load = LoadWeights(path=path)
            (private,) = await server.do(theirs, load, tenant=OTHER)
            (nothing,) = await server.do(
                theirs, LoadWeights(path=path.replace("one", "two")), tenant=OTHER
            )
            assert private.error.replace("one", "two") == nothing.error
            with pytest.raises(NotFound):
                server.store.find_checkpoint(OTHER, path)
            server.store.publish_checkpoint(ACME, run, "weights", "one")
            await server.do(theirs, load, tenant=OTHER)
            source = server.store.find_checkpoint(OTHER, path)
            copy = await server.new(1, tenant=OTHER, source=source)
            server.store.delete_checkpoint(ACME, run, "weights", "one")
            for made in (theirs, copy):
                await server.do(made, train("ac"), STEP, tenant=OTHER)
                expected = reference([["ab"], ["ac"]])
                np.testing.assert_array_equal(server.weights(made, OTHER), expected)

    virtually(main())


def test_unnamed_saves_become_samplers_and_named_ones_are_kept_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as server:
            run = await server.new()
            session = server.store.run(ACME, run).session_id
            results = await server.do(
                run, train("ab"), STEP, SaveForSampler(sampler_seq=4), SaveForSampler(name="a"),
                SaveForSampler(name="a"), SaveWeights(name="b"), SaveWeights(name="b"),
                SaveWeights(name="b", overwrite=True), SaveForSampler(),
            )  # fmt: skip
            categories = [result.category for result in results]
            assert categories == ["", "", "", "", "user", "", "user", "", "user"]
            saved = value(results[2])
            assert (saved.path, saved.sampler_id) == (None, f"{session}:sample:4")
            sampler = server.store.sampler(ACME, saved.sampler_id)
            _, checkpoint = server.store.find_checkpoint(ACME, sampler.checkpoint_path)
            assert checkpoint.adapter_hash == server.store.run(ACME, run).adapter_hash
            assert (checkpoint.folder / "adapter").is_dir() and checkpoint.is_ephemeral
            assert server.store.checkpoints(ACME, run)[1] == 2

    virtually(main())


def test_a_full_storage_takes_no_checkpoint(tmp_path: Path) -> None:
    async def main() -> None:
        quotas = replace(UNLIMITED, stored_bytes=1, max_runs=1)
        async with serving(tmp_path, quotas=quotas) as server:
            run = await server.new()
            results = await server.do(run, train("ab"), STEP, SaveWeights(name="one"))
            assert [result.category for result in results] == ["", "", "user"]
            with pytest.raises(QuotaExceeded):
                await server.new(1)

    virtually(main())


def test_passes_without_a_step_fill_no_more_than_a_tenants_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("marlaas.loop.runner.UNCHECKED_BYTES", 5_000)

    async def main() -> None:
        quotas = replace(UNLIMITED, stored_bytes=50_000)
        async with serving(tmp_path, quotas=quotas) as server:
            run = await server.new()
            results = await server.do(run, *[train(*["abcdefgh"] * 8)] * 100)
            full = [result for result in results if result.error]
            assert full and all("bytes" in one.error for one in full)
            assert {one.category for one in full} == {"user"}
            assert server.store.stored_bytes(ACME) < 60_000
            (step,) = await server.do(run, STEP)  # gives back what the passes took
            assert step.category == "user" and server.store.stored_bytes(ACME) < 40_000

    virtually(main())


# ---------------------------------------------------------------------------------------------
# Sharing a worker


def test_a_run_that_made_room_in_between_is_as_if_it_had_stayed(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, settings=RunnerSettings(max_loaded=1)) as server:
            runs = [await server.new(number) for number in range(3)]
            for letters in ("ab", "ac", "ad"):
                for run in runs:
                    await server.do(run, train(letters))
                for run in runs:
                    await server.do(run, train("bb"), STEP)
                assert sum(len(server.policies(run)) for run in runs) == 1
            for run in runs:
                await server.do(run, train("ab"))
                server.worker.policies[next(iter(server.worker.policies))].gradient = None
                expected = reference([["ab", "bb"], ["ac", "bb"], ["ad", "bb"]])
                np.testing.assert_array_equal(server.weights(run), expected)

    virtually(main())


def test_runs_that_find_no_room_say_so_and_have_their_turn(tmp_path: Path) -> None:
    async def main() -> None:
        settings = RunnerSettings(max_loaded=1)
        async with serving(tmp_path, speed=Speed(train_s=1.0), settings=settings) as server:
            first, second = [await server.new(number) for number in range(2)]
            await server.send(first, *[train("abcdefgh")] * 4)
            await asyncio.sleep(1.0)
            (request_id,) = await server.send(second, train("ab"))
            waiting = await server.runs.wait(ACME, request_id, timeout_s=1.0)
            assert isinstance(waiting, Waiting)
            assert waiting.queue_state is QueueState.PAUSED_CAPACITY
            assert "make room on worker-0" in waiting.reason
            assert (await done(server, request_id)).error == ""

    virtually(main())


def test_a_tenant_whose_tokens_are_used_up_keeps_no_place_from_others(tmp_path: Path) -> None:
    async def main() -> None:
        settings = RunnerSettings(max_loaded=1)
        quotas = replace(UNLIMITED, tokens_a_day=4)
        async with serving(tmp_path, settings=settings, quotas=quotas) as server:
            spent = await server.new()
            await server.do(spent, train("abb"), train("abb"))
            ids = await server.send(spent, train("ab"), STEP)
            await asyncio.sleep(1.0)
            began_s = runtime.now_s()
            other = await server.new(tenant=OTHER)
            await server.do(other, train("ab"), STEP, tenant=OTHER)
            assert runtime.now_s() - began_s < 10.0
            assert [(await done(server, one)).error for one in ids] == ["", ""]
            expected = reference([["abb", "abb", "ab"]])
            np.testing.assert_array_equal(server.weights(spent), expected)

    virtually(main())


def test_a_run_that_waits_behind_a_gap_keeps_no_place_from_others(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, settings=RunnerSettings(max_loaded=1)) as server:
            run = await server.new()
            late = await server.runs.submit(ACME, run, 2, train("abb"))
            await asyncio.sleep(1.0)
            began_s = runtime.now_s()
            await server.do(await server.new(tenant=OTHER), train("ab"), tenant=OTHER)
            assert runtime.now_s() - began_s < 10.0
            await server.runs.submit(ACME, run, 1, train("ab"))
            assert (await done(server, late)).error == ""

    virtually(main())


@pytest.mark.parametrize("letters", [[train("ab"), STEP], [train("ab")]])
def test_runs_that_never_rest_take_turns_with_those_of_others(
    tmp_path: Path, letters: list[Body]
) -> None:
    async def main() -> None:
        settings = RunnerSettings(max_loaded=2)
        async with serving(tmp_path, speed=Speed(train_s=1.0), settings=settings) as server:
            restless = [await server.new(number) for number in range(3)]

            async def work(run: str) -> None:
                while True:
                    ids = await server.send(run, *letters * 4)
                    await done(server, ids[-3])  # the next ones are there before it is idle

            working = [asyncio.create_task(work(run)) for run in restless]
            await asyncio.sleep(60.0)
            began_s = runtime.now_s()
            other = await server.new(tenant=OTHER)
            results = await server.do(other, train("ab"), STEP, tenant=OTHER)
            assert [result.error for result in results] == ["", ""]
            assert runtime.now_s() - began_s < 120.0
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
            numbers = [server.runs._runners[ACME, run].journal.next_seq for run in restless]
            assert min(numbers) > 4  # its own take turns, too

    virtually(main())


def test_a_finished_sessions_runs_leave_their_worker(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as server:
            run = await server.new()
            other = await server.new(session="s-2")
            await server.send(run, train("ab"))
            server.store.finish_session(ACME, "s-acme", "success")
            await server.runs.end_session(ACME, "s-acme")
            await asyncio.sleep(5.0)
            assert (len(server.policies(run)), len(server.policies(other))) == (0, 1)
            server.numbers[run] = 1
            await server.do(run, STEP)
            await asyncio.sleep(5.0)
            assert server.policies(run) == []
            await server.runs.drop_tenant(ACME)
            assert server.worker.policies == {}

    virtually(main())


def test_two_tenants_side_by_side_each_get_what_they_would_get_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as server:
            mine, theirs = await server.new(), await server.new(tenant=OTHER)
            for letters in ("ab", "add", "ac"):
                await server.send(mine, train(letters), train("ce"), STEP)
                await server.send(theirs, train(letters * 2), STEP, tenant=OTHER)
            await server.do(mine, SaveWeights(name="end"))
            await server.do(theirs, SaveWeights(name="end"), tenant=OTHER)
            np.testing.assert_array_equal(
                server.weights(mine), reference([["ab", "ce"], ["add", "ce"], ["ac", "ce"]])
            )
            np.testing.assert_array_equal(
                server.weights(theirs, OTHER), reference([["abab"], ["addadd"], ["acac"]])
            )

    virtually(main())


def test_a_tenant_that_floods_a_worker_does_not_keep_a_small_one_waiting(tmp_path: Path) -> None:
    async def main() -> None:
        settings = RunnerSettings(max_training_tokens=16)
        async with serving(tmp_path, speed=Speed(train_s=1.0), settings=settings) as server:
            flood = [await server.new(number) for number in range(4)]
            small = await server.new(tenant=OTHER)
            for run in flood:
                await server.send(run, *[train("abcdefgh")] * 10)
            await asyncio.sleep(20.0)
            began_s = runtime.now_s()
            await server.do(small, train("ab"), tenant=OTHER)
            # Two passes of the other tenant at most are before it.
            assert runtime.now_s() - began_s < 16.0 + 2.0 + 1.0
            for run in flood:
                assert (await done(server, f"op:{run}:10")).error == ""

    virtually(main())


def test_training_is_charged_to_who_waits_for_turns_at_sampling(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as server:
            (station,) = server.placement.stations
            waiting = [JobSpec(tenant=tenant, name="j", env={}) for tenant in (ACME, OTHER)]
            for spec in waiting:
                counts = TokenCounts(prefill=10, decode=10, train=0)
                station.costs.expect(spec.job_id, counts)
                station.queue.add(spec)
            run = await server.new()
            await server.do(run, train(*["abcdefgh"] * 20))
            turns = []
            for _ in range(4):
                turns.append(station.queue.next())
                spec = next(spec for spec in waiting if spec.job_id == turns[-1])
                station.queue.charge(spec, station.costs.predict_s(spec.job_id))
            assert turns == [waiting[1].job_id] * 4

    virtually(main())


def test_a_tenant_whose_tokens_are_used_up_waits_for_the_next_day(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, quotas=replace(UNLIMITED, tokens_a_day=4)) as server:
            run = await server.new()
            ids = await server.send(run, train("ab"), train("abb"), STEP, train("ab"), STEP)
            for request_id in ids[:3]:
                assert (await done(server, request_id)).error == ""
            waiting = await server.runs.wait(ACME, ids[3], timeout_s=10.0)
            assert isinstance(waiting, Waiting)
            assert waiting.queue_state is QueueState.PAUSED_RATE_LIMIT
            assert "4 tokens a day" in waiting.reason
            assert value(await done(server, ids[4])).version == 2
            assert runtime.now_s() == pytest.approx(86_400.0, abs=10.0)
            (_, request_id) = await server.send(run, train("abcdefgh"), train("ab"))
            server.tenants.change([Tenant(tenant_id=ACME, quotas=UNLIMITED)])
            assert (await done(server, request_id)).error == ""
            assert runtime.now_s() < 87_000.0

    virtually(main())


def test_too_much_that_waits_is_refused_but_for_what_the_rest_waits_for(tmp_path: Path) -> None:
    async def main() -> None:
        settings = RunnerSettings(max_waiting_bytes=2000)
        async with serving(tmp_path, settings=settings) as server:
            run = await server.new()
            ids = [await server.runs.submit(ACME, run, seq, train("abc")) for seq in range(2, 4)]
            with pytest.raises(QuotaExceeded):
                for seq in range(4, 20):
                    await server.runs.submit(ACME, run, seq, train("abc"))
            await server.runs.submit(ACME, run, 1, train(*["abcdefgh"] * 20))
            for request_id in ids:
                assert (await done(server, request_id)).error == ""

    virtually(main())


# ---------------------------------------------------------------------------------------------
# Metrics


def test_metrics_of_a_pass_have_reductions_and_say_how_far_the_policy_moved(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with serving(tmp_path) as server:
            run = await server.new()
            (supervised,) = await server.do(run, train("abc", "ab"))
            assert value(supervised).metrics == {
                "tokens_trained:sum": 3.0,
                "loss:sum": pytest.approx(-3.0),
                "masked:sum": 0.0,
            }
            behind = np.full(3, np.log(1 / len(ALPHABET)) - 0.1, dtype=np.float32)
            ones = np.ones(3, dtype=np.float32)
            one = datum("abc", sampling_logprobs=behind, advantages=ones)
            body = ForwardBackward(data=[one], objective=Objective(name="importance_sampling"))
            (sampled,) = await server.do(run, body)
            row = value(sampled).metrics
            assert row["log_ratio_mean:mean"] == row["log_ratio_max:max"] == pytest.approx(0.1)
            assert row["k3:mean"] == pytest.approx(np.exp(0.1) - 1.1, rel=1e-3)
            (scored,) = await server.do(run, train("abc", is_forward_only=True))
            assert value(scored).metrics["loss:sum"] == pytest.approx(2 * np.log(len(ALPHABET)))
            assert all(name.count(":") == 1 for name in row)

    virtually(main())
