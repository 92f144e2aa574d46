"""The real app on the real store and controller, over fake workers that take almost no time."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from fastapi import FastAPI

from marlaas.config import ServeSettings
from marlaas.loop.controller import Controller, LoopSettings
from marlaas.loop.runs import Runs
from marlaas.loop.samplers import Samplers
from marlaas.loop.serving import Serving
from marlaas.service.app import make_app
from marlaas.service.parts import Parts, ServedBase
from marlaas.service.streams import Hub
from marlaas.service.telemetry import Telemetry
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.types import OPERATOR, JobSpec, Message, Quotas, Role, Tenant, TenantId
from tests.fakes import ByteTokenizer, FakeWorker, ScriptedFamily, Speed

FAST = Speed(token_s=1e-4, prefill_s=0.0, train_s=0.0, call_s=1e-4, restart_s=0.01)
SETTINGS = ServeSettings(heartbeat_s=0.2, drain_s=5.0)
SUMS = {
    "name": "sums", "env": {"family": "math"}, "steps": 3, "prompts_per_step": 2, "group_size": 4,
    "max_tokens": 8, "learning_rate": 1.0, "eval_prompts": 4,
}  # fmt: skip
UNPACED = Quotas(requests_a_second=None)
FOREVER = {**SUMS, "name": "forever", "steps": 100_000}


def family_of(spec: JobSpec) -> ScriptedFamily:
    """Every job's environment is a fast scripted one, whatever it says."""
    return ScriptedFamily()


class Tokenizer(ByteTokenizer):
    """Bytes of UTF-8: a client may say anything."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def _render(self, messages: Sequence[Message]) -> bytes:
        text = "".join(f"{message.role}:{message.content}\n" for message in messages)
        return f"{text}assistant:".encode()


class Worker(FakeWorker):
    """A fake worker whose base is two files, into which an adapter is merged by copying it."""

    async def merge(self, adapter_folder: str, out_folder: str) -> None:
        adapter = Path(adapter_folder) / "adapter"
        Path(out_folder).mkdir(parents=True)
        (Path(out_folder) / "config.json").write_text("{}")
        (Path(out_folder) / "model.safetensors").write_bytes(adapter.read_bytes())


@dataclass
class Bench:
    """A service with two tenants, acme and birch, and an operator."""

    app: FastAPI
    parts: Parts
    store: AsyncStore
    workers: list[Worker]
    http: httpx.AsyncClient
    keys: dict[str, str] = field(default_factory=dict)
    """By owner: acme, birch, operator."""

    def headers(self, who: str = "acme") -> dict[str, str]:
        return {"X-API-Key": self.keys[who]}

    async def call(
        self, method: str, path: str, *, who: str = "acme", **more: object
    ) -> httpx.Response:
        headers = {**self.headers(who), **more.pop("headers", {})}
        return await self.http.request(method, path, headers=headers, **more)

    async def get(self, path: str, *, who: str = "acme", **more: object) -> dict:
        """Return the JSON of a GET that must succeed."""
        response = await self.call("GET", path, who=who, **more)
        assert response.status_code == 200, response.text
        return response.json()

    async def submit(self, *, who: str = "acme", **changes: object) -> dict:
        response = await self.call("POST", "/v1/jobs", who=who, json={**SUMS, **changes})
        assert response.status_code == 201, response.text
        return response.json()

    async def ended(self, job: str, *, who: str = "acme", state: str = "done") -> dict:
        """Wait for a job's end."""
        async with asyncio.timeout(20):
            while (row := await self.get(f"/v1/jobs/{job}", who=who))["state"] != state:
                assert row["state"] in ("queued", "running"), row
                await asyncio.sleep(0.02)
        return row


@asynccontextmanager
async def bench(
    root: Path,
    *,
    settings: ServeSettings = SETTINGS,
    quotas: Quotas = UNPACED,
    speed: Speed = FAST,
    is_running: bool = True,
) -> AsyncIterator[Bench]:
    """Start a service, and its loop unless somebody else does; it ends with the block."""
    store = AsyncStore(Store.open(root))
    workers = [Worker(speed=speed)]
    telemetry = Telemetry(max_spans=settings.trace_spans)
    controller = Controller(
        store, workers, Tokenizer(), make_family=family_of, observer=telemetry,
        on_stage=telemetry.stage_done,
        settings=LoopSettings(max_running_jobs=settings.max_running_jobs),
    )  # fmt: skip
    serving = Serving(controller.placement, store, Tokenizer(), tenants=controller.tenants)
    parts = Parts(
        settings=settings,
        store=store,
        controller=controller,
        serving=serving,
        runs=Runs(controller.placement, store, tenants=controller.tenants),
        samplers=Samplers(serving, store),
        base=ServedBase(
            names=("tiny", *settings.model_aliases),
            architecture="Fake",
            tokenizer_id="/tiny",
            vocab_size=256,
        ),
        download_key=b"0" * 32,
        telemetry=telemetry,
        hub=Hub(store, heartbeat_s=settings.heartbeat_s, max_streams=settings.max_streams),
        max_context=workers[0].capabilities.max_context,
        scratch=root / "scratch",
    )
    keys = await store.call(_populate, quotas)
    await parts.runs.start()
    controller.tenants_changed(await store.call(Store.tenants))
    app = make_app(parts)
    running = asyncio.create_task(controller.serve()) if is_running else None
    transport = httpx.ASGITransport(app)
    http = httpx.AsyncClient(transport=transport, base_url="http://service", timeout=30)
    try:
        async with app.router.lifespan_context(app), http:
            yield Bench(app, parts, store, workers, http, keys)
    finally:
        try:
            if running is not None:
                controller.stop()
                await asyncio.wait_for(running, 10)
        finally:
            await parts.runs.close()
            await parts.samplers.close()
            await parts.serving.close()
            await store.close()


def _populate(store: Store, quotas: Quotas) -> dict[str, str]:
    keys = {}
    for name in ("acme", "birch"):
        store.add_tenant(Tenant(tenant_id=TenantId(name), quotas=quotas))
        _, keys[name] = store.add_key(TenantId(name), role=Role.TENANT)
    _, keys["operator"] = store.add_key(OPERATOR, role=Role.OPERATOR)
    return keys
