"""Completions beside training: which version answers, who waits, who pays, what is left behind."""

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from marlaas import runtime
from marlaas.errors import InvalidRequest, NotFound, PolicyDiverged, QuotaExceeded, WorkerLost
from marlaas.loop.controller import Controller
from marlaas.loop.model_names import find_version
from marlaas.loop.serving import Serving, ServingSettings
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.types import (
    Completion,
    EvalRecord,
    JobSpec,
    JobState,
    Message,
    SamplingParams,
    StepRecord,
    StopReason,
)
from tests.fakes import ALPHABET, ByteTokenizer, FakeWorker, Speed, family_of, hash_of
from tests.fakes import _write as write_adapter

SAMPLING = SamplingParams(max_tokens=6, seed=5)
HELLO = [Message("user", "hello")]


def saying(letter: str) -> np.ndarray:
    """Return the weights of a fake policy that says one letter only."""
    logits = np.full(len(ALPHABET), -50.0)
    logits[ALPHABET.tolist().index(ord(letter))] = 50.0
    return logits


def keep(store: Store, tenant: str, job: str, letters: str) -> None:
    """Store a job whose version v says the v-th letter."""
    store.add_job(tenant, JobSpec(tenant=tenant, name=job, env={}, steps=9))
    for version, letter in enumerate(letters):
        logits = saying(letter)
        if version == 0:
            store.add_first_version(tenant, job, hash_of(logits))
        else:
            record = StepRecord(
                step=version, group_indices=(), adapter_hash=hash_of(logits), is_vetoed=False,
                is_empty=True, metrics={}, elapsed_s=0.0,
            )  # fmt: skip
            store.commit_step(tenant, job, record, dropped={})
        folder = Path(store.files.version(tenant, job, version).prepare().adapter)
        folder.mkdir()
        write_adapter(folder / "adapter", version, logits)
        store.keep_adapter(tenant, job, version)
    store.set_job_state(tenant, job, JobState.CANCELLED)


def judge(store: Store, tenant: str, job: str, success: dict[int, float]) -> None:
    for version, share in success.items():
        record = EvalRecord(
            version=version, success=share, reward=share, num_prompts=4, num_failed=0, elapsed_s=0.0
        )
        store.add_evaluation(tenant, job, record)


@dataclass
class Bench:
    """A service in small: store, workers, controller and serving."""

    store: Store
    workers: list[FakeWorker]
    controller: Controller
    serving: Serving

    async def ask(
        self, tenant: str, model: str, sampling: SamplingParams = SAMPLING, n: int = 1
    ) -> list[Completion]:
        return await self.serving.complete(tenant, model, HELLO, sampling, n)

    async def text(self, tenant: str, model: str) -> str:
        (completion,) = await self.ask(tenant, model)
        return self.serving.text(completion, SAMPLING)

    async def train(self, *specs: JobSpec) -> None:
        """Run jobs to their end."""
        for spec in specs:
            await self.controller.submit(spec)
        while any(self.store.job(spec.tenant, spec.name).state.is_active for spec in specs):
            await asyncio.sleep(0.05)
        states = [self.store.job(spec.tenant, spec.name).state for spec in specs]
        assert states == [JobState.DONE] * len(specs)

    def check_nothing_is_left(self) -> None:
        """No place is taken and nobody waits; versions stay loaded, but nobody holds one."""
        for station in self.controller.placement.stations:
            load = station.load
            assert (load.num_sampling, load.num_reserved, load.kv_tokens) == (0, 0, 0)
            assert station.queue.next() is None
        assert self.serving._completing == self.serving._sampling == {}
        for shelf in self.serving._dispatcher.shelves.values():
            assert all(loaded.num_users == 0 for loaded in shelf._loaded.values())


@asynccontextmanager
async def bench(
    root: Path, *workers: FakeWorker, settings: ServingSettings | None = None
) -> AsyncIterator[Bench]:
    store = Store(root)
    workers = workers or (FakeWorker(),)
    async_store = AsyncStore(store, is_threaded=False)
    controller = Controller(async_store, workers, ByteTokenizer(), make_family=family_of)
    serving = Serving(
        controller.placement, async_store, ByteTokenizer(), settings, tenants=controller.tenants
    )
    running = asyncio.create_task(controller.serve())
    bench = Bench(store, list(workers), controller, serving)
    try:
        yield bench
        bench.check_nothing_is_left()
    finally:
        controller.stop()
        await running
        await serving.close()
        store.close()


def run(scenario: Coroutine[object, object, None]) -> None:
    async def within_bounds() -> None:
        async with asyncio.timeout(1e5):
            await scenario

    runtime.run_virtual(within_bounds())


# Which version answers ---------------------------------------------------------------------------


def test_a_model_name_means_one_kept_version(tmp_path: Path) -> None:
    store = Store(tmp_path)
    keep(store, "acme", "sums", "abcde")
    store.prune_adapters("acme", "sums", {0, 1, 3, 4})
    judge(store, "acme", "sums", {0: 0.1, 1: 0.7, 2: 0.9, 3: 0.7})

    def number(model: str) -> int:
        found = find_version(store, "acme", model)
        assert found is not None and found.job == "sums"
        assert found.adapter_hash == hash_of(saying("abcde"[found.version]))
        return found.version

    assert find_version(store, "acme", "base") is None
    assert number("sums@3") == 3
    assert number("sums@latest") == number("sums") == 4
    assert number("sums@best") == 1, "the best that is kept, the oldest of equals"
    store.promote("acme", "sums", 3)
    assert number("sums@promoted") == number("sums") == 3
    assert number("sums@latest") == 4


@pytest.mark.parametrize(
    ("tenant", "model", "error", "words"),
    [
        ("acme", "nothing", NotFound, "no job 'nothing'"),
        ("birch", "sums", NotFound, "no job 'sums'"),
        ("acme", "sums@2", NotFound, "version 2 of job 'sums' is not kept; kept: 0, 1"),
        ("acme", "sums@best", NotFound, "evaluated"),
        ("acme", "sums@promoted", NotFound, "promoted"),
        ("acme", "fresh", NotFound, "no version yet"),
        ("acme", "sums@", InvalidRequest, "expected base"),
        ("acme", "@3", InvalidRequest, "expected base"),
        ("acme", "sums@newest", InvalidRequest, "expected base"),
        ("acme", "", InvalidRequest, "expected base"),
    ],
)
def test_other_names_are_refused_and_a_foreign_job_looks_like_none(
    tenant: str, model: str, error: type[Exception], words: str, tmp_path: Path
) -> None:
    store = Store(tmp_path)
    keep(store, "acme", "sums", "ab")
    store.add_job("acme", JobSpec(tenant="acme", name="fresh", env={}))
    with pytest.raises(error, match=words):
        find_version(store, tenant, model)


def test_base_and_versions_of_any_job_answer_side_by_side(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as b:
            keep(b.store, "acme", "sums", "abc")
            keep(b.store, "birch", "sums", "xyg")
            names = [("acme", "sums@0"), ("acme", "sums@2"), ("birch", "sums@1"), ("birch", "sums")]
            answers = await asyncio.gather(*(b.text(*name) for name in names))
            assert answers == ["a" * 6, "c" * 6, "y" * 6, "g" * 6]
            (completion,) = await b.ask("acme", "sums@1")
            assert completion.versions.tolist() == [1] * 6
            assert completion.adapter_hash == hash_of(saying("b"))
            (completion,) = await b.ask("acme", "base")
            assert completion.adapter_hash == ""

    run(scenario())


def test_samples_differ_and_a_seed_repeats_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as b:
            sampling = replace(SAMPLING, max_tokens=12, seed=2)
            first, again = [await b.ask("acme", "base", sampling, n=4) for _ in range(2)]
            texts = [completion.tokens.tolist() for completion in first]
            assert len({tuple(text) for text in texts}) == 4
            assert texts == [completion.tokens.tolist() for completion in again]
            (alone,) = await b.ask("acme", "base", sampling)
            assert alone.tokens.tolist() == texts[0]

    run(scenario())


def test_prompts_are_messages_text_or_ids(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as b:
            serving = b.serving
            as_text = "user:hello\nassistant:"
            ids = list(as_text.encode())
            for prompt in (HELLO, as_text, ids, np.array(ids)):
                assert serving.tokens(prompt).tolist() == ids
            for empty in ("", [], np.array([])):
                with pytest.raises(InvalidRequest, match="empty"):
                    serving.tokens(empty)
            with pytest.raises(InvalidRequest, match="token ids"):
                serving.tokens([1, 2**40])

    run(scenario())


def test_text_ends_before_the_stop_string_or_token(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as b:

            def text(said: bytes, reason: StopReason, *stops: str) -> str:
                count = len(said)
                completion = Completion(
                    request_id="r", tokens=np.frombuffer(said, np.uint8).astype(np.int32),
                    logprobs=np.zeros(count, np.float32), stop_reason=reason,
                    versions=np.zeros(count, np.int32), adapter_hash="",
                )  # fmt: skip
                return b.serving.text(completion, replace(SAMPLING, stop_strings=stops))

            assert text(b"ab. cd", StopReason.STOP_STRING, "cd", ". ") == "ab"
            assert text(b"ab\n", StopReason.STOP_TOKEN) == "ab"
            assert text(b"ab. ", StopReason.LENGTH, "never") == "ab. "

    run(scenario())


def test_every_faulty_setting_is_named_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as b:
            faulty = SamplingParams(
                max_tokens=0, temperature=float("nan"), top_p=0.0, top_k=-1, min_p=2.0, seed=-1,
                stop_strings=("",) * 20,
            )  # fmt: skip
            with pytest.raises(InvalidRequest) as refusal:
                await b.ask("acme", "base", faulty, n=0)
            assert len(refusal.value.problems) == 9
            with pytest.raises(InvalidRequest, match="leaves no room in a context of 400"):
                await b.serving.complete("acme", "base", "a" * 400, SAMPLING)

    run(scenario())


# What it costs -----------------------------------------------------------------------------------


def test_what_is_sampled_is_counted_for_the_job_whose_version_it_was(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as b:
            keep(b.store, "acme", "sums", "ab")
            await b.ask("acme", "sums", n=3)
            base = await b.ask("acme", "base", n=2)
            by_job = b.store.usage_by_job("acme")
            assert by_job["sums"].served_tokens == 18
            assert by_job[""].served_tokens == sum(len(one.tokens) for one in base)
            assert by_job["sums"].prefill_tokens == 3 * len(b.serving.tokens(HELLO))
            assert by_job["sums"].device_s > 0
            assert by_job["sums"].sampled_tokens == 0
            assert b.store.usage_by_job("birch") == {}

    run(scenario())


def test_a_tenant_has_so_many_completions_at_once_and_may_let_so_many_wait(tmp_path: Path) -> None:
    settings = ServingSettings(max_completions=3, max_open=8)

    async def scenario() -> None:
        worker = FakeWorker(speed=Speed(max_decoding=64))
        async with bench(tmp_path, worker, settings=settings) as b:
            flood = [asyncio.create_task(b.ask("acme", "base")) for _ in range(8)]
            await asyncio.sleep(0.01)
            with pytest.raises(QuotaExceeded) as refusal:
                await b.ask("acme", "base")
            assert refusal.value.retry_after_s > 0
            other = asyncio.create_task(b.ask("birch", "base", n=3))
            await asyncio.gather(*flood, other)
            assert worker.max_seen_decoding == 6
            await b.ask("acme", "base", n=3)
            with pytest.raises(InvalidRequest, match="n = 4; expected 1 to 3"):
                await b.ask("acme", "base", n=4)

    run(scenario())


# Who waits for whom ------------------------------------------------------------------------------


def training_job(tenant: str, **changes) -> JobSpec:
    spec = JobSpec(
        tenant=tenant, name="train", env={"family": "scripted"}, steps=6, prompts_per_step=2,
        group_size=4, max_tokens=6, eval_prompts=0,
    )  # fmt: skip
    return replace(spec, **changes)


def test_a_flood_of_completions_and_the_training_of_others_share_a_full_worker(
    tmp_path: Path,
) -> None:
    async def scenario(is_flooded: bool, took_s: dict[bool, float]) -> None:
        worker = FakeWorker(speed=Speed(max_decoding=4, token_s=0.1, train_s=0.0))
        settings = ServingSettings(max_completions=200, max_open=2000)
        async with bench(tmp_path / str(is_flooded), worker, settings=settings) as b:

            async def client() -> None:
                while True:
                    await b.ask("acme", "base", replace(SAMPLING, seed=next(seeds)))

            seeds = itertools.count()
            clients = [asyncio.create_task(client()) for _ in range(100 if is_flooded else 0)]
            began_s = runtime.now_s()
            await b.train(training_job("birch", steps=10, max_staleness=0))
            took_s[is_flooded] = runtime.now_s() - began_s
            for one in clients:
                one.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            if is_flooded:
                served = b.store.usage_by_job("acme")[""].served_tokens
                assert served > worker.tokens["decode"] / 5, "serving has its share, too"

    took_s: dict[bool, float] = {}
    run(scenario(False, took_s))
    run(scenario(True, took_s))
    # A hundred clients against one job that has two groups at a time: half each would be twice.
    assert took_s[True] < 3.0 * took_s[False]


def test_training_of_others_keeps_a_completion_waiting_for_few_groups(tmp_path: Path) -> None:
    async def scenario() -> None:
        worker = FakeWorker(speed=Speed(max_decoding=8))
        async with bench(tmp_path, worker) as b:
            specs = [training_job("birch", name=f"train-{index}") for index in range(6)]
            training = asyncio.create_task(b.train(*specs))
            await asyncio.sleep(0.5)
            waits_s = []
            while not training.done():
                began_s = runtime.now_s()
                await b.ask("acme", "base")
                waits_s.append(runtime.now_s() - began_s)
                await asyncio.sleep(0.2)
            await training
            assert len(waits_s) > 5
            # A group of 6 tokens takes 0.06 s and more; one completion alone takes about as long.
            assert max(waits_s) < 1.0

    run(scenario())


# What may go away meanwhile ----------------------------------------------------------------------


def test_a_client_that_leaves_frees_its_place_wherever_it_waits(tmp_path: Path) -> None:
    async def scenario() -> None:
        worker = FakeWorker(speed=Speed(max_decoding=2, token_s=1.0))
        async with bench(tmp_path, worker) as b:
            keep(b.store, "acme", "sums", "ab")
            for delay_s in (0.0, 0.0005, 0.5, 3.0, 30.0):
                asked = [asyncio.create_task(b.ask("acme", "sums@1", n=4)) for _ in range(3)]
                await asyncio.sleep(delay_s)
                for one in asked:
                    one.cancel()
                await asyncio.gather(*asked, return_exceptions=True)
                b.check_nothing_is_left()
                assert worker.num_decoding == 0
            assert await b.text("acme", "sums@1") == "b" * 6

    run(scenario())


def test_idle_versions_make_room_the_least_recently_used_first(tmp_path: Path) -> None:
    settings = ServingSettings(max_loaded=2)

    async def scenario() -> None:
        async with bench(tmp_path, settings=settings) as b:
            keep(b.store, "acme", "sums", "abc")
            worker, shelf = b.workers[0], b.serving._dispatcher.shelves["worker-0"]
            for version in (0, 1, 0, 2):
                await b.ask("acme", f"sums@{version}")
            assert [one.version for one in shelf._loaded] == [0, 2]
            assert len(worker.policies) == 2
            texts = await asyncio.gather(*(b.text("acme", f"sums@{v}") for v in (0, 1, 2) * 5))
            assert texts == [letter * 6 for letter in "abc"] * 5
            assert len(worker.policies) == 2
            assert all("#serve-" in name for name in worker.policies)

    run(scenario())


def test_a_version_in_use_is_never_evicted(tmp_path: Path) -> None:
    settings = ServingSettings(max_loaded=1)

    async def scenario() -> None:
        worker = FakeWorker(speed=Speed(token_s=1.0))
        async with bench(tmp_path, worker, settings=settings) as b:
            keep(b.store, "acme", "sums", "ab")
            first = asyncio.create_task(b.text("acme", "sums@0"))
            await asyncio.sleep(1.0)
            second = asyncio.create_task(b.text("acme", "sums@1"))
            await asyncio.sleep(1.0)
            assert [list(policy.live) for policy in worker.policies.values()] == [[0]]
            assert await asyncio.gather(first, second) == ["a" * 6, "b" * 6]
            assert [list(policy.live) for policy in worker.policies.values()] == [[1]]

    run(scenario())


def test_a_lost_worker_costs_one_repetition_elsewhere(tmp_path: Path) -> None:
    async def scenario() -> None:
        speed = Speed(token_s=1.0, restart_s=100.0)
        workers = [FakeWorker(f"worker-{index}", speed=speed) for index in range(2)]
        async with bench(tmp_path, *workers) as b:
            keep(b.store, "acme", "sums", "ab")
            asked = asyncio.create_task(b.ask("acme", "sums", n=2))
            await asyncio.sleep(2.0)
            (busy,) = (worker for worker in workers if worker.num_decoding)
            busy.kill()
            completions = await asked
            assert [bytes(one.tokens.tolist()) for one in completions] == [b"b" * 6] * 2
            assert runtime.now_s() < 20, "nobody waited for the restart"
            await asyncio.gather(*(b.text("acme", "sums") for _ in range(8)))
            assert runtime.now_s() < 40, "nor do later requests"
            await asyncio.sleep(100)
            assert busy.incarnation == 1, "it is brought back though no job lives there"

    run(scenario())


def test_the_only_worker_is_waited_for_and_one_that_never_comes_back_is_an_error(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        worker = FakeWorker(speed=Speed(token_s=1.0, restart_s=7.0))
        async with bench(tmp_path, worker) as b:
            keep(b.store, "acme", "sums", "ab")
            asked = asyncio.create_task(b.text("acme", "sums"))
            await asyncio.sleep(2.0)
            worker.kill()
            assert await asked == "b" * 6
            asked = asyncio.create_task(b.text("acme", "sums"))
            await asyncio.sleep(2.0)
            worker.kill(for_good=True)
            for attempt in (asked, b.text("acme", "sums")):
                with pytest.raises(WorkerLost):
                    await attempt

    run(scenario())


def test_a_job_that_is_deleted_or_prunes_a_version_meanwhile_harms_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        worker = FakeWorker(speed=Speed(token_s=1.0, max_decoding=1))
        async with bench(tmp_path, worker) as b:
            keep(b.store, "acme", "sums", "abc")
            running = asyncio.create_task(b.text("acme", "sums@1"))
            await asyncio.sleep(1.0)
            latest = asyncio.create_task(b.text("acme", "sums@latest"))
            named = asyncio.create_task(b.text("acme", "sums@2"))
            await asyncio.sleep(1.0)
            b.store.prune_adapters("acme", "sums", {0, 1})
            assert await running == "b" * 6, "what was loaded goes on"
            assert await latest == "b" * 6, "a name means what it means when sampling begins"
            with pytest.raises(NotFound, match="version 2 of job 'sums' is not kept; kept: 0, 1"):
                await named
            shutil.rmtree(b.store.files.job("acme", "sums"))
            assert await b.text("acme", "sums@1") == "b" * 6, "loaded still"
            with pytest.raises(NotFound):
                await b.text("acme", "sums@0")

    run(scenario())


def test_a_folder_that_does_not_hold_what_was_committed_answers_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as b:
            keep(b.store, "acme", "sums", "ab")
            folder = Path(b.store.files.version("acme", "sums", 1).adapter)
            write_adapter(folder / "adapter", 1, saying("y"))
            with pytest.raises(PolicyDiverged, match="its files have changed"):
                await b.ask("acme", "sums")
            assert b.workers[0].policies == {}

    run(scenario())


@pytest.mark.parametrize("seed", range(25))
def test_whatever_clients_and_workers_do_an_answer_is_its_models_and_nothing_is_left(
    seed: int, tmp_path: Path
) -> None:
    rng = runtime.rng("fuzz", seed)
    letters = {("acme", "sums"): "abcde", ("acme", "code"): "fgh", ("birch", "sums"): "xy"}
    settings = ServingSettings(max_completions=3, max_open=10, max_loaded=2)
    answered: list[str] = []

    async def client(b: Bench) -> None:
        tenant, job = list(letters)[rng.integers(len(letters))]
        version = int(rng.integers(len(letters[tenant, job])))
        n, patience_s = int(rng.integers(1, 4)), float(rng.exponential(3.0))
        await asyncio.sleep(float(rng.uniform(0, 30)))
        try:
            async with asyncio.timeout(patience_s if rng.random() < 0.4 else None):
                answers = await b.ask(tenant, f"{job}@{version}", n=n)
        except (TimeoutError, QuotaExceeded, WorkerLost):
            return
        answered.extend(b.serving.text(answer, SAMPLING) for answer in answers)
        assert answered[-n:] == [letters[tenant, job][version] * 6] * n

    async def scenario() -> None:
        speed = Speed(token_s=float(rng.choice([0.01, 0.3])), restart_s=2.0, max_decoding=4)
        workers = [FakeWorker(f"worker-{index}", speed=speed) for index in range(2)]
        async with bench(tmp_path, *workers, settings=settings) as b:
            for (tenant, job), versions in letters.items():
                keep(b.store, tenant, job, versions)
            for _ in range(int(rng.integers(4))):
                kill = workers[rng.integers(2)].kill
                asyncio.get_running_loop().call_later(float(rng.uniform(0, 30)), kill)
            await asyncio.gather(*(client(b) for _ in range(40)))
            await asyncio.sleep(10.0)
            for worker, shelf in zip(workers, b.serving._dispatcher.shelves.values(), strict=True):
                assert len(worker.policies) <= len(shelf) <= settings.max_loaded
            usage = [b.store.usage_by_job(tenant) for tenant in ("acme", "birch")]
            served = sum(one.served_tokens for by_job in usage for one in by_job.values())
            assert served >= 6 * len(answered) > 0

    run(scenario())


def test_a_completion_that_fails_costs_its_tenant_nothing(tmp_path: Path) -> None:
    class Failing(FakeWorker):
        is_failing = False

        async def generate(self, request: object) -> Completion:
            if self.is_failing:
                raise NotFound("the policy is gone")
            return await super().generate(request)

    async def main() -> None:
        worker = Failing()
        async with bench(tmp_path, worker) as service:
            station = service.controller.placement.stations[0]
            charges: list[float] = []
            charge = station.queue.charge

            def note(spec: JobSpec, cost_s: float) -> None:
                charges.append(cost_s)
                charge(spec, cost_s)

            station.queue.charge = note
            await service.ask("acme", "base")
            assert sum(charges) > 0
            charges.clear()
            worker.is_failing = True
            with pytest.raises(NotFound):
                await service.ask("acme", "base")
            assert len(charges) == 2 and sum(charges) == 0

    runtime.run_virtual(main())
