"""A custom environment that cannot work is refused when its job is handed over."""

from pathlib import Path

import pytest

from tests.service.bench import SUMS, Bench, bench

pytestmark = pytest.mark.asyncio

PROMPTS = b"".join(b'{"prompt": "What is %d + 1?", "answer": %d}\n' % (n, n) for n in range(9))
GOOD = "def reward(prompt, reply):\n    return 1.0\n"
ENV = {"family": "custom", "prompts": "p", "environment": "e"}


async def upload(service: Bench, source: str, prompts: bytes = PROMPTS) -> None:
    for path, content in (("/v1/prompts/p", prompts), ("/v1/environments/e", source.encode())):
        answer = await service.call("PUT", path, content=content)
        assert answer.status_code == 200, answer.text


async def problem_of(service: Bench, **changes: object) -> str:
    """Return the one problem for which a job is refused."""
    env = {**ENV, **changes}
    answer = await service.call("POST", "/v1/jobs", json={**SUMS, "env": env})
    assert answer.status_code == 422, answer.text
    (problem,) = answer.json()["error"]["problems"]
    assert (await service.get("/v1/jobs"))["jobs"] == []
    return problem


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def reward(prompt, reply):\n    return prompt['anser']\n", "KeyError: 'anser' (line 2)"),
        ("def reward(prompt, reply):\n    return float('nan')\n", "a finite number"),
        ("def reward(prompt, reply):\n    while True: pass\n", "took longer than 0.3 s"),
    ],
)
async def test_a_function_that_fails_on_the_first_prompt_is_refused(
    tmp_path: Path, source: str, reason: str
) -> None:
    async with bench(tmp_path) as service:
        await upload(service, source)
        problem = await problem_of(service, time_limit_s=0.3)
        assert problem.startswith("env: on the first prompt with an empty reply: ")
        assert reason in problem


async def test_what_only_the_job_says_is_checked_with_it(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        await upload(service, GOOD, b'{"prompt": "x"}\n' * 9)
        assert "set split_by: line, or eval_share: 0" in await problem_of(service)
        assert "expected eval_prompts: 0, or a share" in await problem_of(service, eval_share=0)
        await upload(service, GOOD)
        assert "several turns need start and step" in await problem_of(service, max_turns=2)


async def test_a_call_that_may_take_longer_than_a_trial_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("marlaas.envs.custom.CHECK_LIMIT_S", 0.3)
    async with bench(tmp_path) as service:
        await upload(service, "def reward(prompt, reply):\n    while True: pass\n")
        await service.submit(env={**ENV, "time_limit_s": 60})


async def test_an_environment_is_tried_once_for_a_sweep_and_for_a_job_handed_over_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    async def note(*arguments: object) -> None:
        tried.append(arguments)

    monkeypatch.setattr("marlaas.service.trials.check_job", note)
    async with bench(tmp_path, is_running=False) as service:
        await upload(service, GOOD)
        job = {**SUMS, "env": ENV}
        for status in (201, 200):
            answer = await service.call("POST", "/v1/jobs", json=job)
            assert (answer.status_code, len(tried)) == (status, 1)
        del job["name"]
        body = {"name": "grid", "job": job, "grid": {"seed": [1, 2, 3]}}
        assert (await service.call("POST", "/v1/sweeps", json=body)).status_code == 201
        assert len(tried) == 1
        other = {**job, "env": {**ENV, "memory_mb": 128}}
        body = {"name": "more", "job": other, "grid": {"seed": [1, 2, 3]}}
        assert (await service.call("POST", "/v1/sweeps", json=body)).status_code == 201
        assert len(tried) == 2


async def test_a_sweep_over_an_environment_that_fails_makes_no_job(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        await upload(service, "def reward(prompt, reply):\n    return prompt['anser']\n")
        job = {key: value for key, value in SUMS.items() if key != "name"}
        body = {"name": "grid", "job": {**job, "env": ENV}, "grid": {"seed": [1, 2]}}
        answer = await service.call("POST", "/v1/sweeps", json=body)
        assert (answer.status_code, "KeyError" in answer.text) == (422, True)
        assert (await service.get("/v1/jobs"))["jobs"] == []
