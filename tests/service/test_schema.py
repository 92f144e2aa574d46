"""Requests made from the OpenAPI document, right ones and wrong ones: whatever comes, the service
has an answer that is not a fault of its own, in the shape that the document promises."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.generation import GenerationMode

from marlaas import runtime
from marlaas.service import server
from tests.service.bench import FOREVER, bench
from tests.service.test_tinker_auth import populate

load_all_checks()
CHECKS = [not_a_server_error, *schemathesis.checks.CHECKS.get_by_names(
    ["status_code_conformance", "content_type_conformance", "response_schema_conformance"]
)]  # fmt: skip

BUDGET_S = 45.0
NUM_EXAMPLES = 20
REAL = {"job": "sums", "version": "latest", "tenant": "acme", "name": "p1", "index": 0,
        "kind": "weights"}  # fmt: skip
"""What there is: half of the requests name it, or few would come past the first look-up."""


@schemathesis.serializer("application/jsonl", "text/x-python", "application/x-protobuf")
def as_text(context: object, value: object) -> bytes:
    return str(value).encode(errors="surrogatepass")


@dataclass
class Running:
    url: str
    keys: dict[str, str]


@contextmanager
def running(root: Path) -> Iterator[Running]:
    """Run a service on a thread, with a job that ran and one that runs."""
    found: list[Running] = []
    is_up, is_over = threading.Event(), threading.Event()

    async def main() -> None:
        async with bench(root) as service:
            await service.call("PUT", "/v1/prompts/p1", content=b'{"prompt": "x"}\n')
            await service.submit()
            await service.ended("sums")
            await service.call("POST", "/v1/jobs", json=FOREVER)
            ids = await populate(service)
            REAL.update(run_id=ids["run"], session_id=ids["session"], sampler_id=ids["sampler"])
            listener = server.bind("127.0.0.1", 0)
            config = uvicorn.Config(service.app, log_config=None, lifespan="off", ws="none")
            web = uvicorn.Server(config)
            serving = asyncio.create_task(web._serve(sockets=[listener]))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            found.append(Running(url, service.keys))
            is_up.set()
            while not is_over.is_set():
                await asyncio.sleep(0.05)
            web.should_exit = True
            await serving

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        assert is_up.wait(30)
        yield found[0]
    finally:
        is_over.set()
        thread.join(30)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")
@pytest.mark.parametrize("is_tinker", [False, True], ids=["ours", "tinker"])
def test_whatever_is_asked_the_service_has_an_answer(tmp_path: Path, is_tinker: bool) -> None:
    with running(tmp_path) as service:
        schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json")
        operations = [result.ok() for result in schema.get_all_operations()]
        operations = [one for one in operations if one.path.startswith("/api/v1/") is is_tinker]
        assert len(operations) > 40
        began_s = runtime.now_s()
        num_asked = 0
        for round_number, mode in enumerate([GenerationMode.POSITIVE, GenerationMode.NEGATIVE]):
            for operation in operations:
                if runtime.now_s() - began_s < BUDGET_S:
                    num_asked += ask(service, operation, mode, seed=round_number)
        assert num_asked > 200


def ask(service: Running, operation: object, mode: GenerationMode, *, seed: int) -> int:
    """Send requests to one operation and check the answers; return how many."""
    is_operators = "operating" in operation.tags or operation.path == "/metrics"
    key = service.keys["operator" if is_operators else "acme"]
    count = 0

    @settings(
        max_examples=NUM_EXAMPLES, deadline=None, database=None, derandomize=True,
        phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        nonlocal count
        count += 1
        if count % 2 and case.method != "DELETE":
            known = {name: REAL[name] for name in case.path_parameters or {} if name in REAL}
            case.path_parameters = {**(case.path_parameters or {}), **known}
            case.query = {k: v for k, v in (case.query or {}).items() if k != "tenant"}
        answer = case.call(headers={"X-API-Key": key}, timeout=20)
        case.validate_response(answer, checks=CHECKS)

    # Where nothing is taken, nothing can be wrong.
    with suppress(Unsatisfiable):
        check()
    return count
