"""Who may do what: every route of the app, with every kind of key. The table below is the rule; a
route that is not in it fails."""

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import pytest
from fastapi.routing import iter_route_contexts

from marlaas.store.db import Store
from marlaas.types import Quotas, TenantId
from tests.service.bench import FAST, SUMS, Bench, bench

pytestmark = pytest.mark.asyncio

OPEN, ANY_KEY, TENANT, OPERATOR = "open", "any key", "tenant", "operator"

PROMPTS = b'{"prompt": "acme-private", "answer": 4}\n'
ENVIRONMENT = b"def reward(prompt, reply):\n    return 0.0\n"
CHAT = {"model": "sums@latest", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
SWEEP = {"name": "grid", "job": {"env": {"family": "math"}}, "grid": {"seed": [1, 2]}}
NEW_JOB = {**SUMS, "name": "another"}


@dataclass(frozen=True)
class Rule:
    """One route, whose it is, and what its owner gets."""

    method: str
    path: str
    who: str
    ok: int = 200
    foreign: int = 404
    """What another tenant gets: 404 as for what is not there, unless nothing of acme's is named."""
    body: dict = field(default_factory=dict)
    """`json` or `content` of the request."""

    def request(self, names: dict[str, str]) -> tuple[str, str]:
        return self.method, self.path.format(**names)


OWN = {"foreign": 200}
"""It lists or makes the caller's own things."""

RULES = [
    Rule("GET", "/healthz", OPEN),
    Rule("GET", "/readyz", OPEN),
    Rule("GET", "/openapi.json", OPEN),
    Rule("GET", "/docs", OPEN),
    Rule("GET", "/docs/oauth2-redirect", OPEN),
    Rule("GET", "/v1/whoami", ANY_KEY, **OWN),
    Rule("GET", "/v1/usage", TENANT, **OWN),
    Rule("GET", "/v1/runs", TENANT, **OWN),
    Rule("POST", "/v1/jobs", TENANT, ok=201, foreign=201, body={"json": NEW_JOB}),
    Rule("GET", "/v1/jobs", TENANT, **OWN),
    Rule("GET", "/v1/jobs/{job}", TENANT),
    Rule("GET", "/v1/jobs/{job}/steps", TENANT),
    Rule("GET", "/v1/jobs/{job}/evaluations", TENANT),
    Rule("POST", "/v1/jobs/{job}/evaluations", TENANT, body={"json": {"version": 3}}),
    Rule("GET", "/v1/jobs/{job}/events", TENANT),
    Rule("GET", "/v1/events", TENANT, **OWN),
    Rule("GET", "/v1/jobs/{job}/logs", TENANT),
    Rule("GET", "/v1/jobs/{job}/groups", TENANT),
    Rule("GET", "/v1/jobs/{job}/groups/{index}", TENANT),
    Rule("GET", "/v1/jobs/{job}/versions", TENANT),
    Rule("GET", "/v1/jobs/{job}/versions/{version}/adapter", TENANT),
    Rule("GET", "/v1/jobs/{job}/versions/{version}/merged", TENANT),
    Rule("POST", "/v1/jobs/{job}/versions/{version}/promote", TENANT),
    Rule("POST", "/v1/jobs/{job}/versions/{version}/keep", TENANT, body={"json": {"for_s": 60}}),
    Rule("POST", "/v1/sweeps", TENANT, ok=201, foreign=201, body={"json": SWEEP}),
    Rule("GET", "/v1/sweeps/{sweep}", TENANT),
    Rule("PUT", "/v1/prompts/{prompts}", TENANT, **OWN, body={"content": PROMPTS}),
    Rule("PUT", "/v1/environments/{environment}", TENANT, **OWN, body={"content": ENVIRONMENT}),
    Rule("GET", "/v1/uploads", TENANT, **OWN),
    Rule("POST", "/v1/chat/completions", TENANT, body={"json": CHAT}),
    Rule("GET", "/v1/models", TENANT, **OWN),
    Rule("POST", "/v1/completions", TENANT, body={"json": {"model": "sums", "prompt": "hi"}}),
    Rule("POST", "/v1/jobs/{waiting}/pause", TENANT),
    Rule("POST", "/v1/jobs/{waiting}/resume", TENANT),
    Rule("POST", "/v1/jobs/{waiting}/cancel", TENANT),
    # Another tenant has put one of that name itself, and deletes that one.
    Rule("DELETE", "/v1/prompts/{prompts}", TENANT, ok=204, foreign=204),
    Rule("DELETE", "/v1/environments/{environment}", TENANT, ok=204, foreign=204),
    Rule("DELETE", "/v1/jobs/{job}", TENANT, ok=204),
    Rule("GET", "/metrics", OPERATOR),
    Rule("GET", "/v1/workers", OPERATOR),
    Rule("GET", "/v1/trace", OPERATOR),
    Rule("GET", "/v1/audit", OPERATOR),
    Rule("POST", "/v1/tenants", OPERATOR, ok=201, body={"json": {"tenant": "cedar"}}),
    Rule("GET", "/v1/tenants", OPERATOR),
    Rule("GET", "/v1/tenants/{tenant}", OPERATOR),
    Rule("PATCH", "/v1/tenants/{tenant}", OPERATOR, body={"json": {"weight": 2.0}}),
    Rule("POST", "/v1/tenants/{tenant}/keys", OPERATOR, ok=201, body={"json": {}}),
    Rule("GET", "/v1/tenants/{tenant}/keys", OPERATOR),
    Rule("DELETE", "/v1/tenants/{tenant}/keys/{key_id}", OPERATOR, ok=204),
    Rule("POST", "/v1/operator/keys", OPERATOR, ok=201, body={"json": {}}),
    Rule("GET", "/v1/operator/keys", OPERATOR),
    Rule("DELETE", "/v1/operator/keys/{operator_key_id}", OPERATOR, ok=204),
    Rule("DELETE", "/v1/tenants/{idle}", OPERATOR, ok=204),
]
PLACES = {
    "idle": "tenant",
    "waiting": "job", "sweep": "name", "prompts": "name", "environment": "name",
    "operator_key_id": "key_id",
}  # fmt: skip
"""Names of ours for parameters that several routes have in common."""


def routes(service: Bench) -> set[tuple[str, str]]:
    """Return every (method, path) that the app answers, but for those of `tinker` clients, whose
    rules are in `test_tinker_auth.py`."""
    return {
        (method, route.path)
        for route in iter_route_contexts(service.app.routes)
        for method in (route.methods or ()) - {"HEAD"}
        if not route.path.startswith("/api/v1/")
    }


def template(rule: Rule) -> tuple[str, str]:
    path = rule.path
    for ours, theirs in PLACES.items():
        path = path.replace(f"{{{ours}}}", f"{{{theirs}}}")
    return rule.method, path


async def populate(service: Bench) -> dict[str, str]:
    """Give acme one of everything, and return what the rules call it."""
    await service.call("PUT", "/v1/prompts/p1", content=PROMPTS)
    await service.call("PUT", "/v1/environments/e1", content=ENVIRONMENT)
    await service.submit()
    await service.ended("sums")
    await service.call("PATCH", "/v1/tenants/acme", who="operator",
                       json={"quotas": {"max_running_jobs": 0}})  # fmt: skip
    await service.submit(name="waiting")
    await service.submit(name="table-001")
    await service.call("POST", "/v1/tenants", who="operator", json={"tenant": "idle"})
    _, spare = await spare_keys(service)
    return {
        "job": "sums", "waiting": "waiting", "version": "3", "index": "0", "sweep": "table",
        "prompts": "p1", "environment": "e1", "tenant": "acme", "idle": "idle", **spare,
    }  # fmt: skip


async def spare_keys(service: Bench) -> tuple[str, dict[str, str]]:
    """Make a key that is revoked, and keys to revoke."""
    made = await service.call("POST", "/v1/tenants/acme/keys", who="operator", json={})
    operator = await service.call("POST", "/v1/operator/keys", who="operator", json={})
    spare = {"key_id": made.json()["key_id"], "operator_key_id": operator.json()["key_id"]}
    return made.json()["secret"], spare


async def test_every_route_lets_in_whom_it_should_and_nobody_else(tmp_path: Path) -> None:
    quotas = Quotas(requests_a_second=None, max_running_jobs=1)
    for who in ("acme", "operator"):
        async with bench(tmp_path / who, quotas=quotas) as service:
            assert {template(rule) for rule in RULES} == routes(service)
            names = await populate(service)
            service.keys["revoked"], spare = await spare_keys(service)
            revoking = f"/v1/tenants/acme/keys/{spare['key_id']}"
            await service.call("DELETE", revoking, who="operator")
            for rule in RULES:
                await check_strangers(service, rule, names)
            for rule in RULES:
                await check_another_tenant(service, rule, names)
            for rule in RULES:
                await check_owner(service, rule, names, who)


async def check_strangers(service: Bench, rule: Rule, names: dict[str, str]) -> None:
    """Without a good key nothing but what is open can be had, whatever is asked."""
    method, path = rule.request(names)
    revoked = service.keys["revoked"]
    for headers in (
        {}, {"X-API-Key": "tml-" + "x" * 43}, {"X-API-Key": revoked}, {"X-API-Key": "é"},
        {"Authorization": f"Bearer {revoked}"}, {"X-API-Key": "x" * 5000},
    ):  # fmt: skip
        encoded = {name: value.encode("latin1") for name, value in headers.items()}
        answer = await service.http.request(method, path, headers=encoded, **rule.body)
        assert answer.status_code == (rule.ok if rule.who == OPEN else 401), (rule, answer.text)
        if rule.who != OPEN:
            assert answer.json()["error"]["code"] == "unauthorized"
            assert "WWW-Authenticate" in answer.headers


async def check_another_tenant(service: Bench, rule: Rule, names: dict[str, str]) -> None:
    """Another tenant finds what is not there, and cannot tell that from what is."""
    if rule.who == OPEN:
        return
    method, path = rule.request(names)
    if rule.who == OPERATOR:
        answer = await service.call(method, path, who="birch", **rule.body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden"), rule
        return
    if rule.who == TENANT:
        named = await service.call(method, f"{path}?tenant=acme", who="birch", **rule.body)
        nobody = await service.call(method, f"{path}?tenant=nobody", who="birch", **rule.body)
        assert (named.status_code, nobody.status_code) == (404, 404), rule
        assert words(named, "acme") == words(nobody, "nobody")
    answer = await service.call(method, path, who="birch", **rule.body)
    assert answer.status_code == rule.foreign, (rule, answer.text)
    assert "acme" not in answer.text, rule
    if rule.foreign == 404 and "json" not in rule.body:
        method, elsewhere = rule.request({**names, "job": "none", "waiting": "none",
                                          "sweep": "none", "prompts": "none",
                                          "environment": "none"})  # fmt: skip
        missing = await service.call(method, elsewhere, who="birch", **rule.body)
        assert missing.status_code == 404
        there = [names[place] for place in PLACES | {"job": ""} if place in rule.path
                 and place in names]  # fmt: skip
        assert words(answer, *there) == words(missing, "none"), rule


async def check_owner(service: Bench, rule: Rule, names: dict[str, str], who: str) -> None:
    method, path = rule.request(names)
    if who == "operator":
        if rule.who == TENANT:
            unsaid = await service.call(method, path, who=who, **rule.body)
            assert unsaid.status_code == 422, rule
            path += "?tenant=acme"
        answer = await service.call(method, path, who=who, **rule.body)
    elif rule.who == OPERATOR:
        answer = await service.call(method, path, **rule.body)
        assert answer.status_code == 403, rule
        return
    else:
        own = "?tenant=acme" if rule.who == TENANT else ""
        answer = await service.call(method, path + own, **rule.body)
    assert answer.status_code == rule.ok, (rule, who, answer.text)


def words(answer: httpx.Response, *names: str) -> str:
    """Return what an error says, without the names that it repeats."""
    error = answer.json()["error"]
    said = f"{error['code']} {error['message']}"
    for name in names:
        said = said.replace(name, "NAME")
    return said


# ---------------------------------------------------------------------------------------------


async def test_what_an_operator_does_is_written_down(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        await service.call("POST", "/v1/tenants", who="operator", json={"tenant": "cedar"})
        made = await service.call("POST", "/v1/tenants/cedar/keys", who="operator", json={})
        await service.call("POST", "/v1/jobs?tenant=acme", who="operator", json=SUMS)
        entries = (await service.get("/v1/audit", who="operator"))["entries"]
        assert [(entry["action"], entry["tenant"]) for entry in entries] == [
            ("add tenant", "cedar"), ("add key", "cedar"), ("POST /v1/jobs", "acme"),
        ]  # fmt: skip
        assert made.json()["secret"] not in str(entries)
        me = await service.get("/v1/whoami", who="operator")
        assert {entry["actor"] for entry in entries} == {f"operator/{me['key_id']}"}


async def test_a_key_works_until_it_is_revoked_and_the_last_one_cannot_go(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        made = (await service.call("POST", "/v1/tenants/acme/keys", who="operator",
                                   json={"label": "laptop"})).json()  # fmt: skip
        service.keys["new"] = made["secret"]
        me = await service.get("/v1/whoami", who="new")
        assert (me["tenant"], me["role"], me["key_id"]) == ("acme", "tenant", made["key_id"])
        path = f"/v1/tenants/acme/keys/{made['key_id']}"
        assert (await service.call("DELETE", path, who="operator")).status_code == 204
        assert (await service.call("GET", "/v1/whoami", who="new")).status_code == 401
        listed = (await service.get("/v1/tenants/acme/keys", who="operator"))["keys"]
        assert [key["label"] for key in listed] == ["", "laptop"]
        assert made["secret"] not in str(listed)
        own = (await service.get("/v1/whoami", who="operator"))["key_id"]
        last = await service.call("DELETE", f"/v1/operator/keys/{own}", who="operator")
        assert last.status_code == 409


async def test_a_tenant_is_changed_in_what_is_named_only(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        change = {"quotas": {"tokens_a_day": 1000}}
        await service.call("PATCH", "/v1/tenants/acme", who="operator", json=change)
        change = {"weight": 3.0, "quotas": {"max_running_jobs": None}}
        answer = await service.call("PATCH", "/v1/tenants/acme", who="operator", json=change)
        quotas = answer.json()["quotas"]
        assert answer.json()["weight"] == 3.0
        assert (quotas["tokens_a_day"], quotas["max_running_jobs"]) == (1000, None)
        assert quotas["max_queued_jobs"] == 200
        assert (await service.get("/v1/whoami"))["quotas"] == quotas


async def test_a_tenant_that_goes_leaves_nothing(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        await service.submit()
        await service.ended("sums")
        assert (await service.call("DELETE", "/v1/tenants/acme", who="operator")).status_code == 204
        assert (await service.call("GET", "/v1/jobs")).status_code == 401
        answer = await service.call("GET", "/v1/jobs?tenant=acme", who="operator")
        assert answer.status_code == 404
        assert await service.store.call(Store.jobs, TenantId("acme")) == []


async def test_a_parameter_that_a_route_does_not_know_is_refused(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        answer = await service.call("GET", "/v1/jobs?stat=running")
        assert answer.status_code == 422
        assert answer.json()["error"]["problems"] == [
            "stat: unknown query parameter; expected after, limit, state, tenant"
        ]


async def test_a_tenant_whose_version_is_being_judged_goes_later(tmp_path: Path) -> None:
    async with bench(tmp_path, speed=replace(FAST, token_s=0.02)) as service:
        await service.submit(steps=2, eval_prompts=1)
        await service.ended("sums")
        asked = await service.call("POST", "/v1/jobs/sums/evaluations", json={"version": 1})
        assert asked.status_code == 202
        early = await service.call("DELETE", "/v1/tenants/acme", who="operator")
        assert (early.status_code, early.json()["error"]["code"]) == (409, "conflict")
        async with asyncio.timeout(10):
            while service.parts.controller._judging.is_visited("acme/sums"):
                await asyncio.sleep(0.02)
        again = await service.call("DELETE", "/v1/tenants/acme", who="operator")
        assert again.status_code == 204
        await service.submit(who="birch", steps=1, eval_prompts=1)
        await service.ended("sums", who="birch")


async def test_a_tenant_of_a_name_used_before_has_used_nothing(tmp_path: Path) -> None:
    quotas = Quotas(requests_a_second=None, tokens_a_day=50)
    async with bench(tmp_path, quotas=quotas) as service:
        await service.submit()
        async with asyncio.timeout(10):
            while not service.parts.controller._tenants.why_spent("acme", 50):
                await asyncio.sleep(0.02)
        await service.call("POST", "/v1/jobs/sums/cancel")
        await service.call("DELETE", "/v1/tenants/acme", who="operator")
        again = {"tenant": "acme", "quotas": {"tokens_a_day": 50}}
        await service.call("POST", "/v1/tenants", who="operator", json=again)
        assert service.parts.controller._tenants.why_spent("acme", 50) == ""
