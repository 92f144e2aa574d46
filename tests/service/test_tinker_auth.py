"""Who may do what under `/api/v1`: every route, without a key, with an operator's, and by another
tenant that knows all of acme's ids. The table below is the rule; a route not in it fails."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fastapi.routing import iter_route_contexts

from marlaas.service.tinker import schema
from marlaas.store import tenants
from marlaas.store.db import Store
from tests.service.bench import Bench, bench

pytestmark = pytest.mark.asyncio

MINE = {"foreign": 200}
"""It names nothing of anybody's."""
GONE = {"foreign": 404}
REFUSED = {"ok": 422, "foreign": 422}
SAMPLE = {
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
    "sampling_params": {"max_tokens": 1}, "sampling_session_id": "{sampler}", "seq_id": 1,
}  # fmt: skip
LORA = {"rank": 8}


@dataclass(frozen=True)
class Rule:
    """One route, and what acme and birch get when all ids in it are acme's."""

    method: str
    path: str
    body: dict | None = None
    ok: int = 200
    foreign: int = 404
    query: dict = field(default_factory=dict)


CHECKPOINT = "training_runs/{run}/checkpoints/weights/first"
RULES = [
    Rule("POST", "client/config", {"sdk_version": "0.38.0"}, **MINE),
    Rule("POST", "client/dynamic_config", {"sdk_version": "0.38.0"}, **MINE),
    Rule("GET", "healthz", **MINE),
    Rule("GET", "get_server_capabilities", **MINE),
    Rule("POST", "telemetry", {"events": []}, **MINE),
    Rule("POST", "create_session", {"tags": [], "user_metadata": {}, "sdk_version": "1"}, **MINE),
    Rule("POST", "session_heartbeat", {"session_id": "{session}"}),
    Rule("GET", "sessions", **MINE),
    Rule("POST", "sessions/search", {"session_id": "{session}"}, **MINE),
    Rule("GET", "sessions/{session}"),
    Rule("POST", "create_model", {"session_id": "{session}", "model_seq_id": 7,
         "base_model": "tiny", "lora_config": LORA}),
    Rule("POST", "get_info", {"model_id": "{run}"}),
    Rule("POST", "load_weights", {"session_id": "{session}", "model_seq_id": 8,
         "path": "{checkpoint}", "optimizer": False}),
    Rule("POST", "forward_backward"),
    Rule("POST", "optim_step", {"model_id": "{run}", "seq_id": 3,
         "adam_params": {"learning_rate": 0.1}}),
    Rule("POST", "save_weights", {"model_id": "{run}", "seq_id": 4, "path": "second"}),
    Rule("POST", "save_weights_for_sampler", {"model_id": "{run}", "seq_id": 5,
         "sampling_session_seq_id": 5}),
    Rule("POST", "save_weights_external", {"model_id": "{run}", "seq_id": 6, "path": "out"}),
    Rule("POST", "create_sampling_session", {"session_id": "{session}",
         "sampling_session_seq_id": 9, "model_path": "{checkpoint}"}),
    Rule("POST", "join_sampling_session", {"sampling_session_id": "{sampler}"}),
    Rule("GET", "samplers/{sampler}"),
    Rule("POST", "asample", SAMPLE),
    Rule("POST", "retrieve_future", {"request_id": "{operation}"}),
    Rule("POST", "retrieve_futures", {"target": {"sampling_session_id": "{sampler}"},
         "timeout": 0, "retrieved_request_ids": ["{sample}"]}),
    # What is not there is given up already.
    Rule("POST", "cancel_future", {"request_id": "{sample}"}, **MINE),
    Rule("GET", "training_runs", **MINE),
    Rule("GET", "training_runs/{run}"),
    Rule("GET", "training_runs/{run}/checkpoints"),
    Rule("GET", "checkpoints", **MINE),
    Rule("POST", "weights_info", {"tinker_path": "{checkpoint}"}),
    Rule("POST", "copy_weights", {"source_path": "{checkpoint}", "session_id": "{session}",
         "model_seq_id": 10}),
    Rule("GET", f"{CHECKPOINT}/archive", ok=302),
    Rule("GET", f"{CHECKPOINT}/external_weights_urls", ok=422),
    Rule("PUT", f"{CHECKPOINT}/ttl", {"ttl_seconds": 7200}),
    Rule("POST", f"{CHECKPOINT}/publish"),
    Rule("DELETE", f"{CHECKPOINT}/publish"),
    Rule("DELETE", CHECKPOINT),
    Rule("POST", "create_custom_loss", {}, **REFUSED),
    Rule("POST", "auth/token", {}, **REFUSED),
    Rule("GET", "auth/apikey/me", **REFUSED),
    Rule("DELETE", "auth/apikey/me", **REFUSED),
    Rule("PUT", "sessions/{session}/project", {"project_id": "p"}, ok=422),
    Rule("GET", "sessions/{session}/trace_export", ok=422),
    Rule("GET", "audit", query={"event_type": "all"}, **REFUSED),
    Rule("GET", "billing/usage/events", query={"starting_on": "x"}, **REFUSED),
    Rule("GET", "billing/usage/checkpoints/current", **REFUSED),
    Rule("POST", "sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None}),
]  # fmt: skip

PARAMETERS = {
    "{run}": "{run_id}", "{session}": "{session_id}", "{sampler}": "{sampler_id}",
    "/weights/first": "/{kind}/{name}",
}  # fmt: skip


def template(rule: Rule) -> tuple[str, str]:
    path = rule.path
    for ours, theirs in PARAMETERS.items():
        path = path.replace(ours, theirs)
    return rule.method, f"/api/v1/{path}"


def filled(value: object, ids: dict[str, str]) -> object:
    """Return a body or path with ids in place of their names."""
    if isinstance(value, str):
        for name, known in ids.items():
            value = value.replace(f"{{{name}}}", known)
        return value
    if isinstance(value, dict):
        return {name: filled(inner, ids) for name, inner in value.items()}
    return [filled(inner, ids) for inner in value] if isinstance(value, list) else value


async def ask(service: Bench, rule: Rule, ids: dict[str, str], **more: object) -> object:
    path = f"/api/v1/{filled(rule.path, ids)}"
    if rule.path == "forward_backward":
        message = schema.ForwardBackwardRequest(model_id=ids["run"], seq_id=2)
        message.loss_fn = "cross_entropy"
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = b"\x61\0\0\0"
        for name, dtype, data in (("target_tokens", 2, b"\x62" + bytes(7)),
                                  ("weights", 1, b"\0\0\x80\x3f")):  # fmt: skip
            tensor = datum.loss_fn_inputs[name]
            tensor.dtype, tensor.dense = dtype, data
        body = {"content": message.SerializeToString()}
    else:
        body = {} if rule.body is None else {"json": filled(rule.body, ids)}
    return await service.http.request(rule.method, path, params=rule.query, **body, **more)


async def populate(service: Bench) -> dict[str, str]:
    """Give acme a session with a run, a checkpoint, a sampler and a sample."""

    async def post(name: str, body: dict) -> dict:
        answer = await service.call("POST", f"/api/v1/{name}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    session = (await post("create_session", {"tags": []}))["session_id"]
    made = await post("create_model", {"session_id": session, "model_seq_id": 0,
                                       "base_model": "tiny", "lora_config": LORA})  # fmt: skip
    run = made["model_id"]
    saved = await post("save_weights", {"model_id": run, "seq_id": 1, "path": "first"})
    path = (await post("retrieve_future", {"request_id": saved["request_id"]}))["path"]
    sampler = await post("create_sampling_session", {
        "session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"})  # fmt: skip
    ids = {"session": session, "run": run, "checkpoint": path,
           "sampler": sampler["sampling_session_id"], "operation": saved["request_id"]}  # fmt: skip
    sample = await post("asample", filled({**SAMPLE, "seq_id": 0}, ids))
    return {**ids, "sample": sample["request_id"]}


async def test_every_route_lets_in_whom_it_should_and_nobody_else(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        routes = {
            (method, route.path)
            for route in iter_route_contexts(service.app.routes)
            for method in (route.methods or ()) - {"HEAD"}
            if route.path.startswith("/api/v1/") and "{ticket}" not in route.path
        }
        assert {template(rule) for rule in RULES} == routes
        ids = await populate(service)
        for rule in RULES:
            for headers in ({}, {"X-API-Key": "tml-" + "x" * 43}, {"X-API-Key": "x" * 5000}):
                answer = await ask(service, rule, ids, headers=headers)
                assert answer.status_code == 401, rule
            answer = await ask(service, rule, ids, headers=service.headers("operator"))
            assert answer.status_code == 403 and "operator's key" in answer.text, rule
        for rule in RULES:
            answer = await ask(service, rule, ids, headers=service.headers("birch"))
            assert answer.status_code == rule.foreign, (rule, answer.text)
            if rule.foreign == 200:
                assert not any(known in answer.text for known in ids.values()), rule
        for rule in RULES:
            answer = await ask(service, rule, ids, headers=service.headers("acme"))
            assert answer.status_code == rule.ok, (rule, answer.text)


async def test_what_is_published_may_be_read_and_nothing_else(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        ids = await populate(service)
        path, run = ids["checkpoint"], ids["run"]

        async def birch(method: str, name: str, body: dict | None = None) -> tuple[int, dict]:
            more = {} if body is None else {"json": body}
            answer = await service.call(method, f"/api/v1/{name}", who="birch", **more)
            return answer.status_code, answer.json()

        await service.call("POST", f"/api/v1/training_runs/{run}/checkpoints/weights/first/publish")
        status, info = await birch("POST", "weights_info", {"tinker_path": path})
        assert (status, info["lora_rank"], info["base_model"]) == (200, 8, "tiny")
        _, session = await birch("POST", "create_session", {"tags": []})
        status, copy = await birch("POST", "copy_weights", {
            "source_path": path, "session_id": session["session_id"], "model_seq_id": 0,
        })  # fmt: skip
        assert status == 200 and copy["tinker_path"].endswith("/weights/first")
        status, made = await birch("POST", "load_weights", {
            "session_id": session["session_id"], "model_seq_id": 1, "path": path,
            "optimizer": False})  # fmt: skip
        assert status == 200 and made["model_id"] == f"{session['session_id']}:train:1"
        for method, name, body in (
            ("GET", f"training_runs/{run}", None),
            ("GET", f"training_runs/{run}/checkpoints", None),
            ("GET", f"training_runs/{run}/checkpoints/weights/first/archive", None),
            ("DELETE", f"training_runs/{run}/checkpoints/weights/first", None),
            ("DELETE", f"training_runs/{run}/checkpoints/weights/first/publish", None),
        ):
            assert (await birch(method, name, body))[0] == 404, name
        await service.call(
            "DELETE", f"/api/v1/training_runs/{run}/checkpoints/weights/first/publish"
        )
        assert (await birch("POST", "weights_info", {"tinker_path": path}))[0] == 404
        assert (await birch("POST", "weights_info", {"tinker_path": copy["tinker_path"]}))[0] == 200


async def test_operators_see_who_has_which_runs(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        ids = await populate(service)
        answer = await service.call("GET", "/v1/runs?tenant=acme", who="operator")
        (run,) = answer.json()["runs"]
        assert (run["run"], run["session"], run["rank"]) == (ids["run"], ids["session"], 8)
        assert run["is_live"] and run["num_checkpoints"] == 1 and run["stored_bytes"] > 0
        assert (await service.call("GET", "/v1/runs")).json() == answer.json()
        assert (await service.call("GET", "/v1/runs", who="birch")).json()["runs"] == []
        assert (await service.call("GET", "/v1/usage")).json()["live_runs"] == 1
        for seq in (1, 2):
            body = {"session_id": ids["session"], "model_seq_id": seq, "base_model": "tiny",
                    "lora_config": LORA}  # fmt: skip
            assert (await service.call("POST", "/api/v1/create_model", json=body)).is_success
        seen, after = [], 0
        while after is not None:
            page = (await service.call("GET", f"/v1/runs?limit=2&after={after}")).json()
            seen += [row["run"] for row in page["runs"]]
            after = page["next"]
        assert len(seen) == len(set(seen)) == 3
        text = (await service.call("GET", "/metrics", who="operator")).text
        assert 'marlaas_runs{tenant="acme"} 3.0' in text
        assert 'marlaas_stored_bytes{tenant="birch"} 0.0' in text
        assert 'marlaas_used_tokens_total{stage="trained",tenant="acme"}' in text


async def test_a_request_costs_no_visit_to_the_store_for_its_key(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        await service.call("GET", "/api/v1/healthz")
        visits = []
        inner = service.store.call

        async def counted(function: object, *args: object, **kwargs: object) -> object:
            visits.append(function)
            return await inner(function, *args, **kwargs)

        service.store.call = counted
        for _ in range(20):
            await service.call("GET", "/api/v1/healthz")
        assert visits == []


async def test_a_key_that_is_revoked_opens_nothing_at_once(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        made = await service.call("POST", "/v1/tenants/acme/keys", who="operator", json={})
        service.keys["new"] = made.json()["secret"]
        assert (await service.call("GET", "/api/v1/healthz", who="new")).status_code == 200
        path = f"/v1/tenants/acme/keys/{made.json()['key_id']}"
        await service.call("DELETE", path, who="operator")
        assert (await service.call("GET", "/api/v1/healthz", who="new")).status_code == 401


async def test_an_address_of_a_download_opens_one_file_for_a_time(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        ids = await populate(service)
        where = f"/api/v1/training_runs/{ids['run']}/checkpoints/weights/first"
        found = await service.call("GET", f"{where}/archive")
        url = found.headers["location"]
        assert found.status_code == 302 and found.headers["expires"].endswith("GMT")
        sent = await service.http.get(url)
        assert sent.status_code == 200 and sent.headers["content-type"] == "application/gzip"
        assert list(service.parts.scratch.iterdir()) == []
        head, _, file = url.rpartition("/")
        broken = f"{head[:-4]}AAAA/{file}"
        for other in (f"{head}/adapter_config.json", broken, f"{head[:-80]}/{file}", f"{head}!/x"):
            assert (await service.http.get(other)).status_code == 404, other
        await service.call("DELETE", where)
        assert (await service.http.get(url)).status_code == 404


async def test_a_tenant_that_goes_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path) as service:
        ids = await populate(service)
        busy = await service.call("DELETE", "/v1/tenants/acme", who="operator")
        assert busy.status_code == 409 and "is at work" in busy.text
        monkeypatch.setattr(tenants, "_BUSY_S", -1.0)
        assert (await service.call("DELETE", "/v1/tenants/acme", who="operator")).status_code == 204
        assert (await service.call("GET", "/api/v1/checkpoints")).status_code == 401
        assert await service.store.call(Store.unfinished_runs) == []
        assert not list(tmp_path.glob(f"runs/acme/{ids['run']}/*"))
