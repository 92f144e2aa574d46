"""The process: it listens, drains within its bound when told to end, and comes back as it was."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from marlaas import launch, runtime
from marlaas.errors import InvalidRequest
from marlaas.service import server
from marlaas.store.db import Store
from marlaas.types import OPERATOR, JobState, TenantId
from tests.service.bench import FAST, FOREVER, SETTINGS, SUMS, Bench, bench

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def running(service: Bench) -> AsyncIterator[tuple[httpx.AsyncClient, asyncio.Task[None]]]:
    """Run the server on a free port; the block must end it."""
    listener = server.bind("127.0.0.1", 0)
    task = asyncio.create_task(server.run(service.app, service.parts, listener))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, timeout=10, headers=service.headers()) as http:
        yield http, task
    assert task.done()


async def step_of(http: httpx.AsyncClient, job: str) -> int:
    return (await http.get(f"/v1/jobs/{job}")).json()["step"]


@pytest.mark.asyncio
async def test_a_signal_drains_and_the_job_goes_on_at_the_next_start(tmp_path: Path) -> None:
    async with bench(tmp_path, is_running=False) as service, running(service) as (http, task):
        await http.post("/v1/jobs", json=FOREVER)
        while await step_of(http, "forever") < 2:
            await asyncio.sleep(0.01)
        async with http.stream(
            "GET", "/v1/events", headers={"Accept": "text/event-stream"}
        ) as stream:
            os.kill(os.getpid(), signal.SIGTERM)
            async for _ in stream.aiter_lines():
                pass  # to its end
        async with asyncio.timeout(SETTINGS.drain_s):
            await task
        with pytest.raises(httpx.ConnectError):
            await http.get("/healthz")
        stored = await service.store.call(Store.job, TenantId("acme"), "forever")
        assert stored.state is JobState.RUNNING
        steps = await service.store.call(Store.steps, TenantId("acme"), "forever")
        assert len(steps) == stored.step


@pytest.mark.asyncio
async def test_what_does_not_end_in_time_is_ended(tmp_path: Path) -> None:
    settings = replace(SETTINGS, drain_s=0.5)
    stuck = replace(FAST, train_s=1000.0)
    async with (
        bench(tmp_path, settings=settings, speed=stuck, is_running=False) as service,
        running(service) as (http, task),
    ):
        await http.post("/v1/jobs", json=SUMS)
        while not service.workers[0].tokens["decode"]:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        began_s = runtime.now_s()
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(5):
            await task
        assert runtime.now_s() - began_s < 3


@pytest.mark.asyncio
async def test_a_loop_that_breaks_ends_the_process_with_its_error(tmp_path: Path) -> None:
    async with bench(tmp_path, is_running=False) as service, running(service) as (http, task):

        async def broken(*_: object, **__: object) -> None:
            raise AssertionError("an invariant")

        service.workers[0].forward_backward = broken
        await http.post("/v1/jobs", json=SUMS)
        with pytest.raises(BaseExceptionGroup):
            async with asyncio.timeout(10):
                await task


def test_a_port_that_is_taken_is_found_at_once() -> None:
    with server.bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(InvalidRequest, match=f"{port}: cannot be listened on"):
            server.bind("127.0.0.1", port)


def test_a_base_that_there_is_not_leaves_nothing_behind(tmp_path: Path) -> None:
    words = ["serve", "--base", "nosuch", "--data", str(tmp_path / "data"), "--port", "0"]
    ended = subprocess.run(
        [sys.executable, "-m", "marlaas.cli.main", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 2 and "nosuch" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_first_start_makes_one_operator_key(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    secret = launch.first_operator_key(store)
    assert store.find_key(secret) is not None
    assert launch.first_operator_key(store) == ""
    (key,) = store.keys(OPERATOR)
    store.revoke_key(OPERATOR, key.key_id)
    assert launch.first_operator_key(store).startswith("tml-")
    store.close()


# ---------------------------------------------------------------------------------------------
# The whole thing, with engines

SERVE = (
    "import asyncio, sys\n"
    "from marlaas import config, launch\n"
    "flags = {'folder': sys.argv[1], 'port': 0, 'workers': 1}\n"
    "settings = config.read_serve_settings(flags=flags)\n"
    "asyncio.run(launch.serve(settings, say=lambda line: print(line, flush=True)))\n"
)


@contextmanager
def process(folder: Path) -> Iterator[tuple[subprocess.Popen, str, str]]:
    """Start a service; give its process, address and, at its first start, the operator's key."""
    command = [sys.executable, "-c", SERVE, str(folder)]
    with (folder / "log").open("ab") as log:
        served = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
    assert served.stdout is not None
    url = key = ""
    try:
        for line in served.stdout:
            if match := re.search(r"listening on (\S+)", line):
                url = match[1]
                break
        if not (folder / "key").exists():
            key = served.stdout.readline().split()[-1]
            (folder / "key").write_text(key)
        yield served, url, (folder / "key").read_text()
    finally:
        served.kill()
        served.wait()
        served.stdout.close()


@pytest.mark.slow
def test_a_service_trains_ends_with_zero_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    job = {"name": "sums", "env": {"family": "math"}, "steps": 30, "eval_prompts": 4,
           "prompts_per_step": 2, "group_size": 2, "max_tokens": 8}  # fmt: skip
    with process(tmp_path) as (served, url, key), httpx.Client(base_url=url, timeout=30) as http:
        operator = {"X-API-Key": key}
        assert http.post("/v1/tenants", headers=operator, json={"tenant": "acme"}).is_success
        made = http.post("/v1/tenants/acme/keys", headers=operator, json={}).json()
        tenant = {"Authorization": f"Bearer {made['secret']}"}
        assert http.post("/v1/jobs", headers=tenant, json=job).status_code == 201
        wait(lambda: http.get("/v1/jobs/sums", headers=tenant).json()["step"] >= 2)
        chat = {"model": "base", "messages": [{"role": "user", "content": "2+2="}],
                "max_tokens": 4}  # fmt: skip
        assert http.post("/v1/chat/completions", headers=tenant, json=chat).status_code == 200
        served.send_signal(signal.SIGTERM)
        assert served.wait(40) == 0
    with process(tmp_path) as (served, url, _), httpx.Client(base_url=url, timeout=30) as http:
        wait(lambda: http.get("/v1/jobs/sums", headers=tenant).json()["state"] == "done")
        steps = http.get("/v1/jobs/sums/steps", headers=tenant).json()["steps"]
        assert [step["step"] for step in steps] == list(range(1, 31))
        archive = http.get("/v1/jobs/sums/versions/latest/adapter", headers=tenant)
        assert archive.content[:2] == b"\x1f\x8b"
        served.send_signal(signal.SIGTERM)
        assert served.wait(40) == 0
    log = (tmp_path / "log").read_text()
    assert made["secret"] not in log
    assert key not in log
    assert "alembic" not in log


def wait(is_so: object, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)
