"""Adapters, uploads, completions, health, metrics, trace and logs over HTTP."""

import asyncio
import io
import json
import logging
import re
import tarfile
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from marlaas.errors import MarlaasError
from marlaas.loop.jobspec import ONE_JOB_KNOBS, describe_job, read_job
from marlaas.service import archives
from marlaas.service.app import STATUS, status_of
from marlaas.service.logs import JsonFormatter, mask
from marlaas.service.telemetry import MAX_TENANTS, Telemetry
from marlaas.service.wire.completions import ChatBody, CompletionBody
from marlaas.service.wire.jobs import JobBody
from marlaas.store.db import Store
from marlaas.store.files import Files
from marlaas.types import TenantId
from tests.service.bench import SETTINGS, SUMS, Bench, bench

pytestmark = pytest.mark.asyncio


def names_in(answer: httpx.Response, mode: str) -> list[str]:
    """Return the names in an archive, which must hold plain files of nobody."""
    with tarfile.open(fileobj=io.BytesIO(answer.content), mode=mode) as tar:
        members = tar.getmembers()
    assert all(one.isreg() and one.uid == 0 and not one.uname for one in members)
    return [one.name for one in members]


async def trained(service: Bench) -> None:
    await service.submit()
    await service.ended("sums")


# ---------------------------------------------------------------------------------------------
# Adapters


async def test_a_version_is_downloaded_alone_and_merged(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        await trained(service)
        base = "/v1/jobs/sums/versions"
        adapter = await service.call("GET", f"{base}/latest/adapter")
        assert (adapter.status_code, names_in(adapter, "r:gz")) == (200, ["adapter"])
        assert 'filename="sums-v3.tar.gz"' in adapter.headers["content-disposition"]
        again = await service.call("GET", f"{base}/3/adapter")
        assert again.content == adapter.content
        merged = await service.call("GET", f"{base}/3/merged")
        assert names_in(merged, "r:") == ["config.json", "model.safetensors"]
        assert int(merged.headers["content-length"]) == len(merged.content)
        assert list(service.parts.scratch.iterdir()) == []
        for version in ("99", "promoted", "newest", "..%2f..%2fetc", "-1"):
            missing = await service.call("GET", f"{base}/{version}/adapter")
            assert missing.status_code == 404, version


async def test_an_archive_over_the_limit_is_refused(tmp_path: Path) -> None:
    settings = replace(SETTINGS, max_archive_bytes=10)
    async with bench(tmp_path, settings=settings) as service:
        await trained(service)
        for kind in ("adapter", "merged"):
            answer = await service.call("GET", f"/v1/jobs/sums/versions/3/{kind}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
        assert list(service.parts.scratch.iterdir()) == []


async def test_a_version_is_promoted_and_an_older_one_again(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        await trained(service)
        for version in (3, 2):
            path = f"/v1/jobs/sums/versions/{version}/promote"
            assert (await service.call("POST", path)).json()["is_promoted"]
            rows = (await service.get("/v1/jobs/sums/versions"))["versions"]
            assert [row["version"] for row in rows if row["is_promoted"]] == [version]
        assert (await service.get("/v1/jobs/sums"))["promoted"] == 2
        assert [row["version"] for row in rows if row["is_latest"]] == [3]
        assert sum(row["is_best"] for row in rows) == 1


async def test_a_version_lives_as_long_as_it_was_told_to(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        await trained(service)

        async def kept() -> list[int]:
            rows = (await service.get("/v1/jobs/sums/versions"))["versions"]
            return [row["version"] for row in rows if row["has_adapter"]]

        before = await kept()
        path = "/v1/jobs/sums/versions/2/keep"
        assert (await service.call("POST", path, json={"for_s": 3600})).json()["expires_s"]
        assert await service.parts.store.call(Store.drop_expired) == 0
        await service.call("POST", path, json={"for_s": None})
        assert await service.parts.store.call(Store.drop_expired) == 0
        assert await kept() == before
        await service.call("POST", path, json={"for_s": 0})
        await service.call("POST", "/v1/jobs/sums/versions/3/promote")
        await service.call("POST", "/v1/jobs/sums/versions/3/keep", json={"for_s": 0})
        assert await service.parts.store.call(Store.drop_expired) == 1
        assert await kept() == [version for version in before if version != 2]
        answer = await service.call("POST", path, json={"for_s": 60})
        assert answer.status_code == 404, "what is gone cannot be kept"


# ---------------------------------------------------------------------------------------------
# Uploads

GOOD = b'{"prompt": "2+2", "answer": 4}\n{"messages": [{"role": "user", "content": "hi"}]}\n'


async def test_prompts_are_kept_by_content_and_found_by_name(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        put = await service.call("PUT", "/v1/prompts/p1", content=GOOD)
        assert (put.status_code, put.json()["num_lines"]) == (200, 2)
        other = await service.call("PUT", "/v1/prompts/p2", content=GOOD)
        assert other.json()["digest"] == put.json()["digest"]
        rows = (await service.get("/v1/uploads"))["uploads"]
        assert [row["name"] for row in rows] == ["p1", "p2"]
        assert (await service.call("DELETE", "/v1/prompts/p1")).status_code == 204
        assert (await service.call("DELETE", "/v1/prompts/p1")).status_code == 404
        assert (await service.call("DELETE", "/v1/environments/p2")).status_code == 404


async def test_faulty_uploads_are_refused_with_every_fault(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        faulty = GOOD + b'{"answer": 4}\n\xff\n'
        answer = await service.call("PUT", "/v1/prompts/p1", content=faulty)
        assert (answer.status_code, len(answer.json()["error"]["problems"])) == (422, 2)
        answer = await service.call("PUT", "/v1/environments/e1", content=b"x = 1\n")
        assert answer.status_code == 422
        for name in ("..", ".hidden", "a%00b", "x" * 200):
            answer = await service.call("PUT", f"/v1/prompts/{name}", content=GOOD)
            assert answer.status_code in (404, 405, 422), name
        assert (await service.get("/v1/uploads"))["uploads"] == []


async def test_an_upload_that_does_not_fit_the_storage_is_refused(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        change = {"quotas": {"stored_bytes": 100}}
        await service.call("PATCH", "/v1/tenants/acme", who="operator", json=change)
        assert (await service.call("PUT", "/v1/prompts/p1", content=GOOD)).status_code == 200
        assert (await service.call("PUT", "/v1/prompts/p2", content=GOOD * 2)).status_code == 429


async def test_a_job_names_uploads_by_digest_so_later_ones_change_nothing(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        env = {"family": "custom", "prompts": "p1", "environment": "e1"}
        missing = await service.call("POST", "/v1/jobs", json={**SUMS, "env": env})
        assert len(missing.json()["error"]["problems"]) == 2
        prompts = (await service.call("PUT", "/v1/prompts/p1", content=GOOD)).json()
        source = b"def reward(prompt, reply):\n    return 1.0\n"
        environment = (await service.call("PUT", "/v1/environments/e1", content=source)).json()
        job = await service.submit(env=env)
        assert job["spec"]["env"]["prompts"] == prompts["digest"]
        assert job["spec"]["env"]["environment"] == environment["digest"]
        await service.call("PUT", "/v1/prompts/p1", content=GOOD * 2)
        again = await service.get("/v1/jobs/sums")
        assert again["spec"]["env"] == job["spec"]["env"]


# ---------------------------------------------------------------------------------------------
# Completions


async def test_the_base_and_any_version_complete_and_are_charged(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        await trained(service)
        messages = [{"role": "user", "content": "say y"}]
        for model in ("base", "sums", "sums@2", "sums@best", "sums@latest"):
            body = {"model": model, "messages": messages, "max_tokens": 4, "n": 2, "seed": 7}
            answer = await service.call("POST", "/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            reply = answer.json()
            assert [choice["index"] for choice in reply["choices"]] == [0, 1]
            assert reply["choices"][0]["finish_reason"] in ("stop", "length")
            counts = reply["usage"]
            assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]
            again = await service.call("POST", "/v1/chat/completions", json=body)
            assert again.json()["choices"] == reply["choices"]
        text = {"model": "base", "prompt": "abc", "max_tokens": 3}
        answer = await service.call("POST", "/v1/completions", json=text)
        assert "text" in answer.json()["choices"][0]
        usage = await service.get("/v1/usage")
        assert usage["total"]["served_tokens"] > 0
        assert set(usage["by_job"]) == {"", "sums"}


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"stream": True}, 422, "unsupported_feature"),
        ({"logprobs": True}, 422, "invalid_request"),
        ({"temperature": -1}, 422, "invalid_request"),
        ({"messages": []}, 422, "invalid_request"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 422, "invalid_request"),
        ({"model": "none"}, 404, "not_found"),
        ({"model": "a@b@c"}, 422, "invalid_request"),
    ],
)
async def test_what_cannot_be_sampled_is_refused(
    tmp_path: Path, change: dict, status: int, code: str
) -> None:
    async with bench(tmp_path) as service:
        body = {"model": "base", "messages": [{"role": "user", "content": "hi"}], **change}
        answer = await service.call("POST", "/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_models_are_the_base_the_jobs_and_their_kept_versions(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        await trained(service)
        listed = await service.get("/v1/models")
        names = [model["id"] for model in listed["data"]]
        assert listed["object"] == "list"
        assert names[:2] == ["base", "sums"] and "sums@3" in names
        assert {model["owned_by"] for model in listed["data"][1:]} == {"acme"}
        for name in names:
            body = {"model": name, "prompt": "hi", "max_tokens": 1}
            assert (await service.call("POST", "/v1/completions", json=body)).status_code == 200
        others = await service.get("/v1/models", who="birch")
        assert [model["id"] for model in others["data"]] == ["base"]


async def test_no_field_of_openai_is_both_taken_and_refused() -> None:
    for body in (ChatBody, CompletionBody):
        assert body.not_supported.isdisjoint(body.model_fields)


@pytest.mark.parametrize(
    ("method", "path", "sent", "problem"),
    [
        (
            "POST", "/v1/chat/completions", {"model": "base", "messages": [], "tools": []},
            "tools: is not supported by this service; expected a request without it",
        ),
        (
            "POST", "/v1/chat/completions", {"model": "base", "messages": [{"role": "me"}]},
            "messages.0.role: got 'me'; expected system, user, assistant or tool",
        ),
        ("POST", "/v1/completions", {"model": "base"}, "prompt: is missing"),
        (
            "POST", "/v1/completions", {"model": "base", "prompt": "x", "n": 0},
            "n: got 0; expected at least 1",
        ),
        (
            "POST", "/v1/completions", {"model": "base", "prompt": "x", "temprature": 0},
            "temprature: unknown key; did you mean `temperature`?",
        ),
        (
            "POST", "/v1/completions", {"model": "base", "prompt": "x", "stream": "perhaps"},
            "stream: got 'perhaps'; expected true or false",
        ),
        (
            "POST", "/v1/completions", {"model": "base", "prompt": 5},
            "prompt: got 5; expected text or a list",
        ),
        ("GET", "/v1/usage?days=0", None, "days: got 0; expected at least 1"),
        ("GET", "/v1/usage?days=many", None, "days: got many; expected a whole number"),
        (
            "POST", "/v1/jobs", b'{"name": "a",\n "env": }',
            "body: is no JSON (line 2, column 9: Expecting value)",
        ),
        ("POST", "/v1/jobs", b"[]", "body: got a list; expected a mapping"),
    ],
)  # fmt: skip
async def test_what_the_schemas_refuse_is_said_in_our_words(
    tmp_path: Path, method: str, path: str, sent: object, problem: str
) -> None:
    async with bench(tmp_path, is_running=False) as service:
        json_type = {"Content-Type": "application/json"}
        more = (
            {"content": sent, "headers": json_type} if isinstance(sent, bytes) else {"json": sent}
        )
        answer = await service.call(method, path, **({} if sent is None else more))
    assert answer.status_code == 422
    assert problem in answer.json()["error"]["problems"], answer.text


async def test_a_request_that_no_route_takes_hears_what_would_be_right(tmp_path: Path) -> None:
    async with bench(tmp_path, is_running=False) as service:
        for method, path, status, words in (
            ("GET", "/v1/jbos", 404, "no route /v1/jbos; did you mean /v1/jobs?"),
            ("GET", "/nothing/like/it", 404, "`GET /openapi.json` lists every route"),
            ("PUT", "/v1/jobs", 405, "PUT is not for /v1/jobs; expected GET or POST"),
        ):
            answer = await service.call(method, path)
            error = answer.json()["error"]
            assert answer.status_code == status
            assert words in error["message"] and error["request_id"], error


async def test_a_prompt_that_surely_does_not_fit_is_not_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path) as service:
        monkeypatch.setattr(service.parts.serving, "tokens", None)
        messages = [{"role": "user", "content": "x" * 900_000}]
        chat = {"model": "base", "messages": messages}
        text = {"model": "base", "prompt": "x" * 900_000}
        for route, body in (("chat/completions", chat), ("completions", text)):
            answer = await service.call("POST", f"/v1/{route}", json=body)
            assert answer.status_code == 422
            assert "less than the base's context" in answer.json()["error"]["message"]


# ---------------------------------------------------------------------------------------------
# Watching


async def test_metrics_count_stages_tenants_and_requests(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        await trained(service)
        service.parts.telemetry.workers_seen([await service.workers[0].stats()])
        text = (await service.call("GET", "/metrics", who="operator")).text
        for line in (
            'marlaas_steps_total{outcome="updated",tenant="acme"}',
            'marlaas_jobs{state="done"} 1.0',
            'marlaas_stage_seconds_count{stage="train",tenant="acme"} 3.0',
            'marlaas_worker_busy_seconds_total{kind="train",worker="worker-0"}',
            'marlaas_http_requests_total{method="GET",route="/v1/jobs/{job}",status="200"}',
            'marlaas_tokens_total{stage="sampled",tenant="acme"}',
            'marlaas_used_tokens_total{stage="sampled",tenant="acme"}',
            'marlaas_used_device_seconds_total{tenant="acme"}',
        ):
            assert line in text, line
        assert 'route="/v1/jobs/sums"' not in text


async def test_label_values_are_bounded() -> None:
    telemetry = Telemetry()
    labels = {telemetry.tenant_label(f"tenant-{number}") for number in range(3 * MAX_TENANTS)}
    assert len(labels) == MAX_TENANTS + 1


async def test_the_trace_opens_in_perfetto(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        await trained(service)
        trace = await service.get("/v1/trace?seconds=60", who="operator")
        events = trace["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        assert {"train", "publish", "rollout"} <= {span["name"] for span in spans}
        assert all(span["dur"] > 0 and {"ts", "pid", "tid"} <= span.keys() for span in spans)
        rows = {event["args"]["name"] for event in events if event["ph"] == "M"}
        assert {"worker-0", "server", "acme/sums train"} <= rows


async def test_workers_and_health_say_how_it_is(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        service.parts.telemetry.workers_seen([await service.workers[0].stats()])
        machine = await service.get("/v1/workers", who="operator")
        assert (machine["base"], machine["workers"][0]["name"]) == ("tiny", "worker-0")
        assert (await service.http.get("/readyz")).json() == {"status": "ok", "problems": []}
        service.parts.draining.set()
        draining = await service.http.get("/readyz")
        assert (draining.status_code, draining.json()["problems"]) == (
            503,
            ["the service is ending"],
        )
        assert (await service.http.get("/healthz")).status_code == 200


async def test_a_request_leaves_one_line_without_what_it_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with bench(tmp_path) as service:
        await service.submit(name="quiet")
        private = {**SUMS, "name": "other", "env": {"family": "math", "kind": "private words"}}
        await service.call("POST", "/v1/jobs", json=private, headers={"X-Request-Id": "mine-1"})
        await service.call("POST", "/api/v1/client/config", json={})
        await service.call("GET", "/v1/jobs/quiet?tenant=acme")
        keys = list(service.keys.values())
    lines = [
        json.loads(JsonFormatter().format(record))
        for record in caplog.records
        if record.name == "marlaas.service.logs"
    ]
    last = lines[-1]
    assert (last["route"], last["status"], last["tenant"]) == ("/v1/jobs/{job}", 200, "acme")
    assert (last["job"], last["method"]) == ("quiet", "GET")
    assert lines[-2]["route"] == "/api/v1/client/config"
    assert last["duration_s"] > 0
    everything = json.dumps(lines)
    assert not any(key in everything for key in keys)
    assert "private words" not in everything
    assert "tenant=acme" not in everything


async def test_keys_and_passwords_are_masked_wherever_they_turn_up() -> None:
    text = f"GET /?key=tml-{'x' * 43} postgresql://me:word@host/db"
    assert mask(text) == "GET /?key=*** postgresql://***@host/db"


async def test_a_fault_of_ours_is_answered_and_logged_without_its_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(tmp_path) as service:

        async def broken() -> None:
            raise ValueError("private words")

        service.app.add_api_route("/broken", broken)
        answer = await service.http.get("/broken")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
    record = next(record for record in caplog.records if record.levelname == "ERROR")
    line = JsonFormatter().format(record)
    assert '"error": "ValueError"' in line
    assert "broken" in line
    assert "private words" not in line


# ---------------------------------------------------------------------------------------------
# The document


async def test_every_error_has_a_status() -> None:
    def subclasses(kind: type) -> set[type]:
        return {kind}.union(*(subclasses(inner) for inner in kind.__subclasses__()))

    ours = {kind for kind in subclasses(MarlaasError) if kind.__module__ == "marlaas.errors"}
    unnamed = {kind for kind in ours if kind.__mro__[1] is MarlaasError} - STATUS.keys()
    assert {kind.__name__ for kind in unnamed} <= {"Unreachable"}
    assert status_of(MarlaasError("x")) == 500


async def test_the_document_says_what_every_route_takes_and_gives(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        document = (await service.http.get("/openapi.json")).json()
    assert document["components"]["securitySchemes"].keys() == {"ApiKey", "Bearer"}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            where = f"{method} {path}"
            assert operation.get("description") or operation.get("summary"), where
            answers = operation["responses"]
            assert any(status[0] in "23" for status in answers), where
            if path.startswith("/v1") or path == "/metrics":
                assert operation["security"], where
                assert {"401", "403", "404", "409", "413", "422", "429", "503"} <= answers.keys()
                shape = answers["404"]["content"]["application/json"]["schema"]["$ref"]
                assert shape.endswith("/ErrorAnswer"), where
            if method in ("post", "put", "patch") and not re.search(
                "/(pause|resume|cancel|promote|publish)$", path
            ):
                assert operation["requestBody"]["content"], where


async def test_the_document_lists_the_knobs_that_a_job_has() -> None:
    assert set(JobBody.model_fields) == set(ONE_JOB_KNOBS)
    body = {"name": "x", "env": {"family": "math"}}
    defaults = describe_job(read_job(body, tenant=TenantId("acme")))
    for name, field in JobBody.model_fields.items():
        if name not in ("name", "env", "algorithm", "latency", "fork"):
            assert field.default == defaults[name], name


async def _start(service: Bench, path: str, *, who: str, taking: asyncio.Event) -> int:
    """Ask for a download as a client who takes nothing of the body until `taking`."""
    status = 0
    begun = asyncio.Event()

    async def receive() -> dict:
        if begun.is_set():
            await asyncio.Event().wait()
        begun.set()
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif status == 200:
            await taking.wait()

    headers = [(b"x-api-key", service.keys[who].encode())]
    scope = {
        "type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "scheme": "http",
        "query_string": b"", "headers": headers, "http_version": "1.1", "root_path": "",
        "server": ("service", 80), "client": ("x", 1), "asgi": {"version": "3.0"},
    }  # fmt: skip
    with suppress(Exception):
        await service.app(scope, receive, send)
    return status


@pytest.mark.parametrize(("kind", "most"), [("merged", 1), ("adapter", 8)])
async def test_slow_readers_hold_a_bounded_number_of_copies(
    tmp_path: Path, kind: str, most: int
) -> None:
    async with bench(tmp_path) as service:
        await trained(service)
        path, taking = f"/v1/jobs/sums/versions/3/{kind}", asyncio.Event()
        slow = [
            asyncio.create_task(_start(service, path, who="acme", taking=taking)) for _ in range(10)
        ]
        async with asyncio.timeout(10):
            while sum(task.done() for task in slow) < 10 - most:
                await asyncio.sleep(0.01)
        assert {task.result() for task in slow if task.done()} == {429}
        assert len(list(service.parts.scratch.iterdir())) <= most
        taking.set()
        assert sorted(await asyncio.gather(*slow)) == [200] * most + [429] * (10 - most)
        assert list(service.parts.scratch.iterdir()) == []
        assert (await service.call("GET", path)).status_code == 200


@pytest.mark.parametrize("kind", ["merged", "adapter"])
async def test_a_download_whose_reader_stalls_or_goes_leaves_nothing(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "STALL_S", 0.1)
    async with bench(tmp_path) as service:
        await trained(service)
        path = f"/v1/jobs/sums/versions/3/{kind}"
        async with asyncio.timeout(10):
            await _start(service, path, who="acme", taking=asyncio.Event())
        assert list(service.parts.scratch.iterdir()) == []
        for after_s in (0.0, 0.001, 0.003, 0.01):
            going = asyncio.create_task(_start(service, path, who="acme", taking=asyncio.Event()))
            await asyncio.sleep(after_s)
            going.cancel()
            await asyncio.wait([going])
            assert list(service.parts.scratch.iterdir()) == []
        assert (await service.call("GET", path)).status_code == 200


async def test_completions_and_verdicts_count_towards_the_days_tokens_and_end_with_them(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path) as service:
        ask = {"model": "base", "prompt": "hi", "max_tokens": 4}
        used = 0
        change = {"quotas": {"tokens_a_day": 10}}
        await service.call("PATCH", "/v1/tenants/acme", who="operator", json=change)
        while used < 10:
            answer = await service.call("POST", "/v1/completions", json=ask)
            assert answer.status_code == 200
            used += answer.json()["usage"]["completion_tokens"]
        refused = await service.call("POST", "/v1/completions", json=ask)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
        assert 1 <= int(refused.headers["Retry-After"]) <= 86_400
        assert (await service.call("POST", "/v1/completions", json=ask, who="birch")).is_success
        await service.submit(who="birch")
        await service.ended("sums", who="birch")
        today = (await service.get("/v1/usage", who="birch"))["today"]
        kinds = ("sampled_tokens", "trained_tokens", "evaluated_tokens", "served_tokens")
        assert all(today[kind] > 0 for kind in kinds)
        tenants = service.parts.controller.tenants
        assert tenants._used("birch").tokens == sum(today[kind] for kind in kinds)


async def test_the_stores_thread_neither_hashes_nor_writes_an_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path) as service:
        threads: list[str] = []
        written = Files.write_upload

        def write(files: Files, tenant_id: TenantId, digest: str, content: bytes) -> None:
            if not files.upload(tenant_id, digest).exists():
                threads.append(threading.current_thread().name)
            written(files, tenant_id, digest, content)

        monkeypatch.setattr(Files, "write_upload", write)
        assert (await service.call("PUT", "/v1/prompts/p", content=GOOD)).status_code == 200
        assert len(threads) == 1 and not threads[0].startswith("store")
