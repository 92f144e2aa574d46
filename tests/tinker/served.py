"""A real service and real SDK clients of its tenants; what the acceptance suite shares.

Running (a `marlaas serve` process) ── Tenant (name, key) ── ServiceClient, RestClient, Wire
"""

import contextlib
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types

from marlaas.errors import Conflict
from marlaas.text.bases import resolve_base
from tests.client.running import Running
from tests.tinker.wire import Wire

BASE = "tiny"
ALIAS = "Qwen/Qwen3-8B-Base"
"""A name that the service of the suite serves its base under, too."""
FOLDER = str(resolve_base(BASE))
"""And the folder that its tokenizer lies in."""
RANK = 8
WAIT_S = 60.0
"""No single answer of the suite takes longer; a future that does has hung."""

GREEDY = types.SamplingParams(max_tokens=8, temperature=0.0)
CHAT = '<|im_start|>user\nWhat is 3 + 4? End with "Answer: " and the number.<|im_end|>\n'
CHAT += "<|im_start|>assistant\n"
"""A prompt that the base ends its reply to by itself."""


@dataclass
class Tenant:
    """One tenant of a running service, and the SDK clients that speak for it."""

    running: Running
    name: str
    key: str
    clients: list[tinker.ServiceClient] = field(default_factory=list)

    def service(self, **arguments: Any) -> tinker.ServiceClient:
        """Return a new client, hence a new session; closed with the tenant."""
        client = tinker.ServiceClient(base_url=self.running.url, api_key=self.key, **arguments)
        self.clients.append(client)
        return client

    def rest(self) -> tinker.RestClient:
        return tinker.RestClient(base_url=self.running.url, api_key=self.key)

    def wire(self) -> Wire:
        return Wire(self.running.url, self.key)

    def close(self) -> None:
        for client in self.clients:
            client.close("success").result(timeout=WAIT_S)
        self.clients.clear()
        holder = self.rest().holder
        holder.run_coroutine_threadsafe(holder.aclose()).result(timeout=WAIT_S)


def start(folder: Path, *flags: str) -> Running:
    """Start a service, of one worker if no flag says else, that also serves its base as `ALIAS`."""
    settings = folder / "settings.yaml"
    settings.write_text(f"model_aliases: [{ALIAS}, {FOLDER}]\ntinker_gap_s: 3\n")
    running = Running(folder)
    running.start("--config", str(settings), *flags)
    return running


def add_tenant(running: Running, name: str) -> Tenant:
    with running.client() as operator:
        with contextlib.suppress(Conflict):
            operator.tenants.create(name)
        return Tenant(running, name, operator.tenants.add_key(name).secret)


def new_run(
    service: tinker.ServiceClient, *, seed: int = 7, rank: int = RANK, **arguments: Any
) -> tinker.TrainingClient:
    """Return a training client of a fresh adapter that `seed` decides."""
    made = service.create_lora_training_client(BASE, rank=rank, seed=seed, **arguments)
    return made.result(timeout=WAIT_S)


def prompt(tokens: list[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(tokens)


def datum(tokens: list[int] | np.ndarray, **inputs: Any) -> types.Datum:
    """Return a datum that predicts the tokens from their own beginnings; all weigh 1."""
    tokens = [int(token) for token in tokens]
    if not inputs:
        inputs = {"weights": np.ones(len(tokens) - 1, np.float32)}
    inputs.setdefault("target_tokens", np.array(tokens[1:], np.int64))
    return types.Datum(model_input=prompt(tokens[:-1]), loss_fn_inputs=inputs)


def some_tokens(seed: int, length: int) -> list[int]:
    """Return token ids that any base with 1024 of them has."""
    return np.random.Generator(np.random.Philox(seed)).integers(3, 1024, length).tolist()


def train(run: tinker.TrainingClient, data: list[types.Datum], lr: float = 1e-3) -> None:
    """One step of cross entropy."""
    passed = run.forward_backward(data, "cross_entropy")
    stepped = run.optim_step(types.AdamParams(learning_rate=lr))
    passed.result(timeout=WAIT_S)
    stepped.result(timeout=WAIT_S)


def logprobs(run: tinker.TrainingClient, data: list[types.Datum]) -> list[np.ndarray]:
    """Return what the run's present weights say of the targets."""
    output = run.forward(data, "cross_entropy").result(timeout=WAIT_S)
    return [row["logprobs"].to_numpy() for row in output.loss_fn_outputs]


def download(tenant: Tenant, path: str, folder: Path) -> Path:
    """Fetch the files of external weights, as anybody who has the addresses can."""
    urls = tenant.rest().get_external_weights_urls(path).result(timeout=WAIT_S).urls
    for name, url in urls.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(url) as answer:
            target.write_bytes(answer.read())
    return folder


def export(tenant: Tenant, run: tinker.TrainingClient, folder: Path, name: str = "out") -> Path:
    """Return a PEFT folder of the run's present weights."""
    saved = run.save_weights_external(name, ttl_seconds=3600).result(timeout=WAIT_S)
    return download(tenant, saved.path, folder)
