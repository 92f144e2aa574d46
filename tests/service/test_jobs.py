"""Jobs over HTTP: handed over once, followed, stopped, compared, removed."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from marlaas.errors import Conflict
from marlaas.store.db import Store
from marlaas.types import Quotas, Tenant, TenantId
from tests.service.bench import FAST, FOREVER, SUMS, bench

pytestmark = pytest.mark.asyncio

UNNAMED = {knob: value for knob, value in SUMS.items() if knob != "name"}


async def test_a_job_runs_to_its_end_and_everything_of_it_can_be_read(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        created = await service.submit()
        assert (created["name"], created["steps"], created["spec"]["rank"]) == ("sums", 3, 8)
        done = await service.ended("sums")
        assert (done["step"], done["promoted"], done["waits_for"]) == (3, None, "")
        assert done["usage"]["sampled_tokens"] > 0
        steps = (await service.get("/v1/jobs/sums/steps"))["steps"]
        assert [step["step"] for step in steps] == [1, 2, 3]
        assert "reward_mean" in steps[0]["metrics"]
        later = await service.get("/v1/jobs/sums/steps?after=2")
        assert ([step["step"] for step in later["steps"]], later["next"]) == ([3], 3)
        judged = (await service.get("/v1/jobs/sums/evaluations"))["evaluations"]
        assert [row["version"] for row in judged] == [0, 3]
        page = await service.get("/v1/jobs/sums/groups?limit=4")
        assert (len(page["groups"]), page["next"]) == (4, 3)
        group = await service.get("/v1/jobs/sums/groups/0?tokens=true")
        trajectory = group["trajectories"][0]
        assert trajectory["messages"][0]["role"] == "user"
        assert len(trajectory["tokens"]["ids"]) == trajectory["num_tokens"]
        assert (await service.get("/v1/jobs/sums/groups/0"))["trajectories"][0]["tokens"] is None


async def test_the_same_job_again_is_the_same_job(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        headers = {"Idempotency-Key": "k1"}
        answers = await asyncio.gather(
            *(service.call("POST", "/v1/jobs", json=SUMS, headers=headers) for _ in range(5))
        )
        assert {answer.status_code for answer in answers} <= {200, 201}
        again = await service.call("POST", "/v1/jobs", json=SUMS, headers=headers)
        assert again.status_code == 200
        assert len((await service.get("/v1/jobs"))["jobs"]) == 1
        other = {**SUMS, "steps": 7}
        assert (await service.call("POST", "/v1/jobs", json=other)).status_code == 409
        renamed = {**SUMS, "name": "other"}
        reused = await service.call("POST", "/v1/jobs", json=renamed, headers=headers)
        assert reused.status_code == 409


async def test_every_fault_of_a_job_is_named_at_once(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        faulty = {**SUMS, "lr": 1e-3, "steps": 0, "tenant": "birch", "max_tokens": 10_000}
        answer = await service.call("POST", "/v1/jobs", json=faulty)
        assert answer.status_code == 422
        error = answer.json()["error"]
        assert error["code"] == "invalid_request"
        places = {problem.partition(":")[0] for problem in error["problems"]}
        assert places == {"lr", "steps", "tenant", "max_tokens"}


async def test_names_that_nothing_has_are_refused_with_every_other_fault(tmp_path: Path) -> None:
    async with bench(tmp_path, is_running=False) as service:
        env = {"family": "custom", "environment": "none", "prompts": "neither"}
        body = {**SUMS, "env": env, "group_size": 1, "steps": 0, "seeded": True,
                "algorithm": "nope", "fork": {"job": "none", "version": 1}}  # fmt: skip
        answer = await service.call("POST", "/v1/jobs", json=body)
        places = [problem.partition(":")[0] for problem in answer.json()["error"]["problems"]]
        assert sorted(places) == [
            "algorithm", "env.environment", "env.prompts", "fork", "group_size", "seeded", "steps",
        ]  # fmt: skip


async def test_a_tenant_may_be_called_what_a_job_may_be(tmp_path: Path) -> None:
    async with bench(tmp_path, is_running=False) as service:
        for length, status in ((64, 201), (65, 422)):
            body = {"tenant": "t" * length}
            answer = await service.call("POST", "/v1/tenants", who="operator", json=body)
            assert answer.status_code == status
            answer = await service.call("POST", "/v1/jobs", json={**SUMS, "name": "j" * length})
            assert answer.status_code == status


async def test_a_seeded_job_needs_a_service_that_is_exact(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        answer = await service.call("POST", "/v1/jobs", json={**SUMS, "seeded": True})
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "unsupported_feature")


async def test_a_job_is_paused_goes_on_is_cancelled_and_removed(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        await service.call("POST", "/v1/jobs", json=FOREVER)
        path = "/v1/jobs/forever"
        assert (await service.call("DELETE", path)).status_code == 409
        paused = await service.call("POST", f"{path}/pause")
        assert (paused.status_code, paused.json()["state"]) == (200, "paused")
        assert (await service.call("POST", f"{path}/pause")).json()["state"] == "paused"
        resumed = await service.call("POST", f"{path}/resume")
        assert resumed.json()["state"] in ("queued", "running")
        cancelled = await service.call("POST", f"{path}/cancel")
        assert cancelled.json()["state"] == "cancelled"
        for verb, words in (
            ("resume", "only paused, held and failed jobs are resumed"),
            ("pause", "only queued and running jobs are paused"),
        ):
            refused = await service.call("POST", f"{path}/{verb}")
            assert refused.status_code == 409
            assert words in refused.json()["error"]["message"]
        assert (await service.call("DELETE", path)).status_code == 204
        assert (await service.call("GET", path)).status_code == 404
        assert (await service.get("/v1/jobs"))["jobs"] == []


async def test_jobs_are_listed_page_by_page_and_by_state(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        for number in range(5):
            await service.submit(name=f"j{number}")
        names, after = [], ""
        while after is not None:
            page = await service.get(f"/v1/jobs?limit=2&after={after}")
            names += [job["name"] for job in page["jobs"]]
            after = page["next"]
        assert names == [f"j{number}" for number in range(5)]
        await service.ended("j4")
        assert (await service.get("/v1/jobs?state=cancelled"))["jobs"] == []
        assert len((await service.get("/v1/jobs?state=done"))["jobs"]) >= 1


async def test_a_full_queue_and_full_storage_refuse_new_jobs(tmp_path: Path) -> None:
    quotas = Quotas(max_running_jobs=0, max_queued_jobs=1, requests_a_second=None)
    async with bench(tmp_path, quotas=quotas) as service:
        await service.submit()
        waiting = await service.get("/v1/jobs/sums")
        assert (waiting["state"], waiting["place"]) == ("queued", 1)
        assert "quota" in waiting["waits_for"]
        refused = await service.call("POST", "/v1/jobs", json={**SUMS, "name": "two"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
        assert int(refused.headers["Retry-After"]) >= 1
        change = {"quotas": {"stored_bytes": 0, "max_queued_jobs": None}}
        await service.call("PATCH", "/v1/tenants/acme", who="operator", json=change)
        full = await service.call("POST", "/v1/jobs", json={**SUMS, "name": "two"})
        assert (full.status_code, "bytes" in full.json()["error"]["message"]) == (429, True)


async def test_a_job_begins_from_the_version_that_a_word_stood_for(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        await service.submit()
        await service.ended("sums")
        forked = await service.submit(name="more", fork={"job": "sums", "version": "latest"})
        assert forked["spec"]["fork"] == {"job": "sums", "version": 3, "with_optimizer": False}
        nowhere = {**SUMS, "name": "x", "fork": {"job": "none", "version": 1}}
        assert (await service.call("POST", "/v1/jobs", json=nowhere)).status_code == 422


async def test_an_evaluation_is_asked_for_and_comes(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        await service.submit()
        await service.ended("sums")
        answer = await service.call("POST", "/v1/jobs/sums/evaluations", json={"version": 2})
        assert (answer.status_code, answer.json()) == (202, {"version": 2})
        async with asyncio.timeout(10):
            while 2 not in [
                row["version"]
                for row in (await service.get("/v1/jobs/sums/evaluations"))["evaluations"]
            ]:
                await asyncio.sleep(0.02)


# ---------------------------------------------------------------------------------------------
# Sweeps

GRID = {"learning_rate": [0.5, 1.0], "rank": [8, 16]}
BASE = {key: value for key, value in SUMS.items() if key not in ("name", "learning_rate")}


async def test_a_sweep_makes_every_combination_and_compares_them(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        body = {"name": "grid", "job": BASE, "grid": GRID}
        answer = await service.call("POST", "/v1/sweeps", json=body)
        assert answer.status_code == 201, answer.text
        again = await service.call("POST", "/v1/sweeps", json=body)
        assert len(again.json()["jobs"]) == 4
        for number in range(1, 5):
            await service.ended(f"grid-{number:03d}")
        table = await service.get("/v1/sweeps/grid")
        assert set(table["knobs"]) == {"learning_rate", "rank"}
        values = {row["job"]: row["values"] for row in table["jobs"]}
        assert values["grid-001"] == {"learning_rate": 0.5, "rank": 8}
        assert values["grid-004"] == {"learning_rate": 1.0, "rank": 16}
        best = [row["best_success"] for row in table["jobs"]]
        assert best == sorted(best, reverse=True)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"grid": {"lr": [1]}}, "grid.lr: unknown key"),
        ({"grid": {"seed": list(range(100)), "rank": list(range(1, 12))}}, "makes 1100 jobs"),
        ({"grid": {"rank": [8]}, "job": {**BASE, "rank": 8}}, "job.rank: is in the grid"),
        ({"grid": {"rank": [8, 900]}}, "rank: got 900"),
    ],
)
async def test_a_sweep_with_a_fault_makes_no_job(
    tmp_path: Path, change: dict, problem: str
) -> None:
    async with bench(tmp_path) as service:
        body = {"name": "grid", "job": BASE, "grid": GRID, **change}
        answer = await service.call("POST", "/v1/sweeps", json=body)
        assert answer.status_code == 422
        assert any(problem in one for one in answer.json()["error"]["problems"])
        assert (await service.get("/v1/jobs"))["jobs"] == []


async def test_a_sweep_that_the_queue_cannot_take_makes_no_job(tmp_path: Path) -> None:
    async with bench(tmp_path, quotas=Quotas(max_queued_jobs=3)) as service:
        body = {"name": "grid", "job": BASE, "grid": GRID}
        assert (await service.call("POST", "/v1/sweeps", json=body)).status_code == 429
        assert (await service.get("/v1/jobs"))["jobs"] == []


async def test_a_version_of_thousands_of_digits_is_the_callers_fault(tmp_path: Path) -> None:
    async with bench(tmp_path, is_running=False) as service:
        await service.submit()
        fork = {"job": "sums", "version": "9" * 5000}
        answer = await service.call("POST", "/v1/jobs", json={**SUMS, "name": "two", "fork": fork})
        assert answer.status_code == 422


async def test_a_sweep_with_the_name_of_another_job_makes_no_job(tmp_path: Path) -> None:
    async with bench(tmp_path, is_running=False) as service:
        await service.submit(name="grid-002", steps=77)
        body = {"name": "grid", "job": BASE, "grid": GRID}
        assert (await service.call("POST", "/v1/sweeps", json=body)).status_code == 409
        names = [row["name"] for row in (await service.get("/v1/jobs"))["jobs"]]
        assert names == ["grid-002"]


async def test_the_same_job_again_needs_no_storage(tmp_path: Path) -> None:
    async with bench(tmp_path, is_running=False) as service:
        await service.submit()
        change = {"quotas": {"stored_bytes": 0}}
        await service.call("PATCH", "/v1/tenants/acme", who="operator", json=change)
        assert (await service.call("POST", "/v1/jobs", json=SUMS)).status_code == 200


async def test_resuming_jobs_does_not_overfill_the_queue(tmp_path: Path) -> None:
    quotas = Quotas(max_queued_jobs=1, requests_a_second=None)
    async with bench(tmp_path, quotas=quotas, is_running=False) as service:
        for name in ("one", "two"):
            await service.submit(name=name)
            await service.call("POST", f"/v1/jobs/{name}/pause")
        answers = await asyncio.gather(
            *(service.call("POST", f"/v1/jobs/{name}/resume") for name in ("one", "two"))
        )
        assert sorted(answer.status_code for answer in answers) == [200, 429]
        assert len((await service.get("/v1/jobs?state=queued"))["jobs"]) == 1


async def test_no_more_jobs_are_judged_at_once_than_may_run(tmp_path: Path) -> None:
    quotas = Quotas(max_running_jobs=1, requests_a_second=None)
    async with bench(tmp_path, quotas=quotas, speed=replace(FAST, token_s=0.02)) as service:
        for name in ("one", "two"):
            await service.submit(name=name, steps=2, eval_prompts=1)
            await service.ended(name)
        answers = [
            await service.call("POST", f"/v1/jobs/{name}/evaluations", json={"version": 1})
            for name in ("one", "two")
        ]
        assert [answer.status_code for answer in answers] == [202, 429]
        assert len(service.parts.controller._jobs) <= 1


@pytest.mark.parametrize(
    ("method", "path", "more"),
    [
        ("POST", "/v1/jobs", {"json": SUMS}),
        ("POST", "/v1/sweeps", {"json": {"name": "s", "job": UNNAMED, "grid": {"rank": [4, 8]}}}),
        ("PUT", "/v1/prompts/p", {"content": b'{"prompt": "hi"}'}),
    ],
)
async def test_what_is_handed_over_while_its_tenant_goes_is_not_the_next_ones(
    tmp_path: Path, method: str, path: str, more: dict
) -> None:
    for num_steps in range(1, 25, 3):
        async with bench(tmp_path / str(num_steps)) as service:
            handing = asyncio.create_task(service.call(method, path, **more))
            for _ in range(num_steps):
                await service.store.call(Store.tenants)
            purged = True
            try:
                await service.store.call(Store.purge_tenant, TenantId("acme"))
            except Conflict:
                purged = False
            answer = await handing
            if not purged:
                continue
            await service.store.call(Store.add_tenant, Tenant(tenant_id=TenantId("acme")))
            assert answer.status_code in (200, 201, 401, 404), answer.text
            assert await service.store.call(Store.jobs, TenantId("acme")) == []
            assert await service.store.call(Store.uploads, TenantId("acme")) == []


@pytest.mark.parametrize("is_sweep", [False, True])
async def test_a_request_that_is_repeated_under_its_key_means_what_it_meant(
    tmp_path: Path, is_sweep: bool
) -> None:
    prompts = b'{"prompt": "one"}'
    async with bench(tmp_path) as service:
        await service.submit()
        await service.ended("sums")
        await service.call("PUT", "/v1/prompts/p", content=prompts)
        source = b"def reward(prompt, reply):\n    return 1.0\n"
        await service.call("PUT", "/v1/environments/e", content=source)
        custom = {"family": "custom", "environment": "e", "prompts": "p", "eval_share": 0}
        knobs = {**UNNAMED, "env": custom, "eval_prompts": 0}
        path, body = "/v1/jobs", {**knobs, "name": "c"}
        if is_sweep:
            path, body = "/v1/sweeps", {"name": "c", "job": knobs, "grid": {"rank": [4, 8]}}
        headers = {"Idempotency-Key": "k"}
        first = await service.call("POST", path, json=body, headers=headers)
        assert first.status_code == 201, first.text
        await service.call("PUT", "/v1/prompts/p", content=prompts + b"\n" + prompts)
        again = await service.call("POST", path, json=body, headers=headers)
        assert again.status_code == (201 if is_sweep else 200), again.text
        other = await service.call("POST", path, json={**body, "name": "d"}, headers=headers)
        assert other.status_code == (201 if is_sweep else 409)
        assert (await service.call("POST", path, json=body)).status_code == 409


async def test_a_fork_of_the_latest_may_be_asked_for_again_when_there_is_a_later_one(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path) as service:
        await service.submit(steps=40)
        async with asyncio.timeout(20):
            while not (await service.get("/v1/jobs/sums/versions"))["versions"]:
                await asyncio.sleep(0.01)
        body = {**SUMS, "name": "f", "fork": {"job": "sums", "version": "latest"}}
        headers = {"Idempotency-Key": "k"}
        first = await service.call("POST", "/v1/jobs", json=body, headers=headers)
        assert first.status_code == 201, first.text
        await service.ended("sums")
        again = await service.call("POST", "/v1/jobs", json=body, headers=headers)
        assert again.status_code == 200, again.text
        assert again.json()["spec"]["fork"] == first.json()["spec"]["fork"]


async def test_a_version_that_was_judged_is_answered_with_its_evaluation(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        await service.submit()
        await service.ended("sums")
        answer = await service.call("POST", "/v1/jobs/sums/evaluations", json={"version": 3})
        judged = (await service.get("/v1/jobs/sums/evaluations"))["evaluations"]
        assert (answer.status_code, answer.json()) == (200, judged[-1])
