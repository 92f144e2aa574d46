"""Jobs from submission to their end, on fake workers under virtual time."""

from dataclasses import replace
from pathlib import Path

from marlaas import runtime
from marlaas.loop.controller import Controller
from marlaas.store.db import Store
from marlaas.types import JobSpec, JobState
from tests.fakes import ByteTokenizer, FakeWorker, Recorder, Speed, family_of


def job(name: str = "say-y", tenant: str = "acme", **changes: object) -> JobSpec:
    spec = JobSpec(
        tenant=tenant, name=name, env={"family": "scripted"}, steps=5, prompts_per_step=2,
        group_size=4, max_tokens=8, learning_rate=5.0, eval_prompts=8, straggler_deadline_s=30.0,
    )  # fmt: skip
    return replace(spec, **changes)


class Run:
    """One controller over fake workers on a store, run under virtual time."""

    def __init__(self, root: Path, *specs: JobSpec, workers: int = 1, **options: object) -> None:
        self.root, self.specs, self.num_workers = root, specs, workers
        self.speed = options.pop("speed", Speed())
        self.worker_options = options.pop("worker_options", {})
        self.options = options
        self.recorder = Recorder()
        self.workers: list[FakeWorker] = []
        self.elapsed_s = 0.0
        self.store = Store(root)
        runtime.run_virtual(self._main())

    async def _main(self) -> None:
        self.workers = [
            FakeWorker(f"worker-{i}", speed=self.speed, **self.worker_options)
            for i in range(self.num_workers)
        ]
        controller = Controller(
            self.store, self.workers, ByteTokenizer(), make_family=family_of,
            observer=self.recorder, **self.options,
        )  # fmt: skip
        for spec in self.specs:
            controller.submit(spec)
        await controller.run()
        self.elapsed_s = runtime.now_s()

    def state(self, spec: JobSpec) -> tuple[JobState, str]:
        stored = self.store.job(spec.tenant, spec.name)
        return stored.state, stored.reason


def test_a_job_learns_to_its_end(tmp_path: Path) -> None:
    spec = job(steps=30)
    run = Run(tmp_path, spec)
    assert run.state(spec) == (JobState.DONE, "")
    records = run.store.steps("acme", "say-y")
    assert [record.step for record in records] == list(range(1, 31))
    first, last = run.store.evaluations("acme", "say-y")
    assert (first.version, last.version) == (0, 30)
    early = sum(r.metrics["reward_mean"] for r in records[:8]) / 8
    late = sum(r.metrics["reward_mean"] for r in records[-8:]) / 8
    assert late > early + 0.1
