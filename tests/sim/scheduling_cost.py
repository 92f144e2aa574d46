"""What the loop itself costs, apart from engines: server CPU per admission and per trajectory.

Run `python -m tests.sim.scheduling_cost`. An admission must cost the same at ten jobs and at a
thousand; what a trajectory costs bounds how many a second one server can drive.
"""

import tempfile
from pathlib import Path

from marlaas import runtime
from marlaas.loop.controller import Controller
from marlaas.loop.fairness import FairQueue
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.types import JobSpec
from tests.fakes import ByteTokenizer, FakeWorker, Speed, family_of


def admission_us(num_jobs: int, num_admissions: int = 20_000) -> float:
    """Return microseconds per admission with `num_jobs` jobs ready, three to a tenant."""
    specs = [
        JobSpec(tenant=f"t{index // 3}", name=f"j{index}", env={}) for index in range(num_jobs)
    ]
    costs = {spec.job_id: 0.5 + (index % 7) / 7 for index, spec in enumerate(specs)}
    by_id = {spec.job_id: spec for spec in specs}
    queue = FairQueue(costs.__getitem__, {})
    for spec in specs:
        queue.add(spec)
    began_s = runtime.cpu_s()
    for admission in range(num_admissions):
        spec = by_id[queue.next()]
        queue.charge(spec, costs[spec.job_id])
        queue.charge(spec, costs[spec.job_id] * ((admission % 5) - 2) / 10)
        if admission % 4 == 0:  # a job without a free slot leaves, and comes back
            queue.discard(spec)
            queue.add(spec)
    return (runtime.cpu_s() - began_s) / num_admissions * 1e6


def trajectory_us(num_jobs: int, steps: int = 4) -> float:
    """Return microseconds of server CPU per trajectory of a run, the fake engine's included."""
    specs = [
        JobSpec(tenant=f"t{index // 3}", name=f"j{index}", env={"family": "scripted"},
                steps=steps, eval_prompts=0, max_tokens=2)
        for index in range(num_jobs)
    ]  # fmt: skip

    async def main(root: Path) -> None:
        speed = Speed(max_decoding=256)
        controller = Controller(
            AsyncStore(Store(root), is_threaded=False), [FakeWorker(speed=speed)],
            ByteTokenizer(), make_family=family_of,
        )  # fmt: skip
        for spec in specs:
            await controller.submit(spec)
        await controller.run()

    with tempfile.TemporaryDirectory() as folder:
        began_s = runtime.cpu_s()
        runtime.run_virtual(main(Path(folder)))
        elapsed_s = runtime.cpu_s() - began_s
    return elapsed_s / (num_jobs * steps * 4 * 8) * 1e6


if __name__ == "__main__":
    for count in (10, 100, 1000):
        print(f"{count:5} jobs: {admission_us(count):6.1f} us per admission")  # noqa: T201
    for count in (1, 10, 50):
        print(f"{count:5} jobs: {trajectory_us(count):6.0f} us per trajectory")  # noqa: T201
