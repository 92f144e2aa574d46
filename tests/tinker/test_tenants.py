"""Two SDK clients of two tenants beside jobs of the service: nobody changes or sees another's."""

import re
import threading
import time
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from marlaas.types import JobState
from tests.client.running import Running
from tests.tinker.served import (
    BASE,
    WAIT_S,
    Tenant,
    add_tenant,
    datum,
    new_run,
    prompt,
    some_tokens,
)
from tests.tinker.wire import Wire

pytestmark = pytest.mark.slow

STEPS = 3
JOBS: dict[str, dict[str, Any]] = {
    "sums": {"env": {"family": "math"}},
    "grpo": {"env": {"family": "math"}, "algorithm": "grpo", "rank": 16},
    "lookup": {"env": {"family": "search"}},
}
SHORT = {"steps": 3, "prompts_per_step": 2, "group_size": 4, "eval_prompts": 0, "seeded": True}


# ---------------------------------------------------------------------------------------------
# Results


def sdk_loop(tenant: Tenant, seed: int) -> list[np.ndarray]:
    """A small RL loop; return everything that it got to see."""
    service = tenant.service()
    run = new_run(service, seed=seed)
    seen = []
    for step in range(STEPS):
        sampler = run.save_weights_and_get_sampling_client().result(timeout=WAIT_S)
        asked = types.SamplingParams(max_tokens=12, seed=100 * seed + step, stop=[])
        data = []
        for start in range(2):
            tokens = some_tokens(seed + start, 10)
            response = sampler.sample(prompt(tokens), 4, asked).result(timeout=WAIT_S)
            for idx, sequence in enumerate(response.sequences):
                assert sequence.logprobs is not None
                seen += [np.array(sequence.tokens), np.array(sequence.logprobs)]
                blank = [0.0] * (len(tokens) - 1)
                data.append(
                    datum(
                        [*tokens, *sequence.tokens],
                        logprobs=np.array([*blank, *sequence.logprobs], np.float32),
                        advantages=np.array([*blank, *[idx - 1.5] * len(sequence.tokens)], "f4"),
                    )
                )
        passed = run.forward_backward(data, "ppo")
        run.optim_step(types.AdamParams(learning_rate=2e-3)).result(timeout=WAIT_S)
        seen += [row["logprobs"].to_numpy() for row in passed.result().loss_fn_outputs]
    return seen


def curve(running: Running, tenant: str, name: str, job: dict) -> list[dict]:
    with running.client(tenant=tenant) as client:
        done = client.jobs.create(name=name, **SHORT, **job).wait(timeout_s=120)
        assert done.state is JobState.DONE
        return [{key: row[key] for key in row if key != "elapsed_s"} for row in done.metrics()]


def test_everything_at_once_gives_what_each_gives_alone(
    running: Running, acme: Tenant, birch: Tenant
):
    cedar, dill = (add_tenant(running, name).name for name in ("cedar", "dill"))
    alone: dict[str, Any] = {
        "acme": sdk_loop(acme, 1),
        "birch": sdk_loop(birch, 2),
        **{name: curve(running, cedar, name, job) for name, job in JOBS.items()},
    }
    together: dict[str, Any] = {}
    work = {
        "acme": lambda: sdk_loop(acme, 1),
        "birch": lambda: sdk_loop(birch, 2),
        **{
            name: lambda name=name, job=job: curve(running, dill, name, job)
            for name, job in JOBS.items()
        },
    }

    def do(name: str) -> None:
        together[name] = work[name]()

    threads = [threading.Thread(target=do, args=(name,)) for name in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in ("acme", "birch"):
        assert len(alone[name]) == len(together[name]) == STEPS * 24
        for first, second in zip(alone[name], together[name], strict=True):
            assert np.array_equal(first, second)
    for name in JOBS:
        assert alone[name] == together[name]


# ---------------------------------------------------------------------------------------------
# What is seen


@pytest.fixture(scope="module")
def theirs(acme: Tenant) -> dict[str, str]:
    """Ids of one of everything that belongs to acme."""
    service = acme.service()
    run = new_run(service)
    passed = run.forward_backward([datum(some_tokens(1, 9))], "cross_entropy")
    passed.result(timeout=WAIT_S)
    weights = run.save_state("secret").result(timeout=WAIT_S).path
    external = run.save_weights_external("secret", 3600).result(timeout=WAIT_S).path
    sampler = run.save_weights_and_get_sampling_client().result(timeout=WAIT_S)
    with acme.wire() as wire:
        sampled = wire.post("asample", **sample_body(sampler._sampling_session_id, 77))
    return {
        "session": service.holder.get_session_id(),
        "run": run.model_id,
        "sampler": sampler._sampling_session_id,
        "training": f"op:{run.model_id}:1",
        "sampling": sampled.raise_for_status().json()["request_id"],
        "weights": weights,
        "external": external,
    }


def sample_body(sampler: str, seq_id: int = 0) -> dict[str, Any]:
    return {
        "type": "sample",
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
        "sampling_params": {"max_tokens": 1},
    }


LORA = {"rank": 8, "train_unembed": True, "train_mlp": True, "train_attn": True}

REQUESTS: dict[str, Any] = {
    "heartbeat": lambda w, i: w.post("session_heartbeat", session_id=i["session"]),
    "finish": lambda w, i: w.post(
        f"sessions/{i['session']}/finish", reason={"type": "success"}, detail=None
    ),
    "session": lambda w, i: w.send("GET", f"sessions/{i['session']}"),
    "create_model": lambda w, i: w.post(
        "create_model",
        session_id=i["session"],
        model_seq_id=9,
        base_model=BASE,
        lora_config=LORA,
    ),
    "create_sampling_session": lambda w, i: w.post(
        "create_sampling_session",
        session_id=i["session"],
        sampling_session_seq_id=99,
        base_model=BASE,
    ),
    "a sampler of weights": lambda w, i: w.post(
        "create_sampling_session",
        session_id=w.new_session(),
        sampling_session_seq_id=0,
        model_path=i["weights"],
    ),
    "a model of weights": lambda w, i: w.post(
        "load_weights",
        session_id=w.new_session(),
        model_seq_id=0,
        path=i["weights"],
        optimizer=True,
    ),
    "get_info": lambda w, i: w.post("get_info", model_id=i["run"]),
    "forward_backward": lambda w, i: w.forward_backward(i["run"], 50, [datum([5, 6, 7])]),
    "optim_step": lambda w, i: w.optim_step(i["run"], 50),
    "save_weights": lambda w, i: w.post("save_weights", model_id=i["run"], seq_id=50, path="x"),
    "save_weights_for_sampler": lambda w, i: w.post(
        "save_weights_for_sampler", model_id=i["run"], seq_id=50, path="x"
    ),
    "save_weights_external": lambda w, i: w.post(
        "save_weights_external", model_id=i["run"], seq_id=50, path="x"
    ),
    "load_weights": lambda w, i: w.post(
        "load_weights", model_id=i["run"], seq_id=50, path=i["weights"], optimizer=False
    ),
    "asample": lambda w, i: w.post("asample", **sample_body(i["sampler"])),
    "sampler": lambda w, i: w.send("GET", f"samplers/{i['sampler']}"),
    "join": lambda w, i: w.post("join_sampling_session", sampling_session_id=i["sampler"]),
    "retrieve_futures": lambda w, i: w.post(
        "retrieve_futures",
        target={
            "type": "sampling_session",
            "sampling_session_id": i["sampler"],
            "cloned_sampler_id": 0,
        },
        prev_cursor=0,
        timeout=0,
        retrieved_request_ids=[],
    ),
    "a training future": lambda w, i: w.poll(i["training"]),
    "a sampling future": lambda w, i: w.poll(i["sampling"]),
    "run": lambda w, i: w.send("GET", f"training_runs/{i['run']}"),
    "checkpoints": lambda w, i: w.send("GET", f"training_runs/{i['run']}/checkpoints"),
    "delete": lambda w, i: w.send("DELETE", _checkpoint(i["weights"])),
    "publish": lambda w, i: w.send("POST", _checkpoint(i["weights"]) + "/publish"),
    "unpublish": lambda w, i: w.send("DELETE", _checkpoint(i["weights"]) + "/publish"),
    "ttl": lambda w, i: w.send(
        "PUT", _checkpoint(i["weights"]) + "/ttl", json={"ttl_seconds": 3600}
    ),
    "urls": lambda w, i: w.send("GET", _checkpoint(i["external"]) + "/external_weights_urls"),
    "weights_info": lambda w, i: w.post("weights_info", tinker_path=i["weights"]),
    "copy_weights": lambda w, i: w.post(
        "copy_weights", source_path=i["weights"], destination_project_id="p"
    ),
}


def _checkpoint(path: str) -> str:
    run, _, name = path.removeprefix("tinker://").partition("/")
    return f"training_runs/{run}/checkpoints/{name}"


def _elsewhere(ids: dict[str, str]) -> dict[str, str]:
    """Return the same ids of a session that never was."""
    session = ids["session"]
    flipped = session[:-1] + ("0" if session[-1] != "0" else "1")
    return {name: value.replace(session, flipped) for name, value in ids.items()}


@pytest.mark.parametrize("name", REQUESTS)
def test_anothers_id_is_answered_as_one_that_never_was(birch: Tenant, theirs, name: str):
    with birch.wire() as wire:
        seen, never = (REQUESTS[name](wire, ids) for ids in (theirs, _elsewhere(theirs)))
    assert seen.status_code in (400, 404, 410), seen.text
    assert seen.status_code == never.status_code
    assert _blurred(seen.text, theirs) == _blurred(never.text, _elsewhere(theirs))


def _blurred(text: str, ids: dict[str, str]) -> str:
    return re.sub(r'"request_id":"[^"]*"', "", text.replace(ids["session"], "SESSION"))


def test_cancelling_anothers_request_does_nothing(acme: Tenant, birch: Tenant, theirs):
    with birch.wire() as other, acme.wire() as owner:
        answer = other.post("cancel_future", request_id=theirs["sampling"])
        assert answer.status_code in (200, 204, 404)
        assert owner.result(theirs["sampling"]).sequences


def test_lists_hold_only_ones_own(acme: Tenant, birch: Tenant, theirs):
    mine, other = acme.rest(), birch.rest()
    assert theirs["session"] in mine.list_sessions(limit=100).result(timeout=WAIT_S).sessions
    assert theirs["session"] not in other.list_sessions(limit=100).result(timeout=WAIT_S).sessions
    runs = other.list_training_runs(limit=100, access_scope="accessible").result(timeout=WAIT_S)
    assert theirs["run"] not in [run.training_run_id for run in runs.training_runs]
    saved = other.list_user_checkpoints(limit=100).result(timeout=WAIT_S).checkpoints
    assert theirs["weights"] not in [checkpoint.tinker_path for checkpoint in saved]


def test_training_and_sampling_count_as_their_tenants_usage(running: Running):
    tenant = add_tenant(running, "elder")
    run = new_run(tenant.service())
    run.forward_backward([datum(some_tokens(1, 101))], "cross_entropy").result(timeout=WAIT_S)
    sampler = run.save_weights_and_get_sampling_client().result(timeout=WAIT_S)
    asked = types.SamplingParams(max_tokens=7, stop=[])
    sampler.sample(prompt([5, 6]), 3, asked).result(timeout=WAIT_S)
    # What a pass costs is written with the step that ends it.
    run.optim_step(types.AdamParams()).result(timeout=WAIT_S)
    with running.client(tenant.key) as client:
        deadline = time.monotonic() + WAIT_S
        while (used := client.whoami().usage_today).served_tokens < 21:
            assert time.monotonic() < deadline, used
            time.sleep(0.1)
    assert (used.trained_tokens, used.served_tokens) == (101, 21) and used.device_s > 0
    tenant.close()


def test_a_run_beyond_the_quota_is_refused_at_once_until_a_session_ends(running: Running):
    tenant = add_tenant(running, "fir")
    with running.client() as operator:
        operator.tenants.change("fir", max_runs=1)
    first = tenant.service()
    new_run(first)
    begun = time.monotonic()
    with pytest.raises(tinker.BadRequestError, match=r"1 runs are at work.*finish a session"):
        new_run(tenant.service())
    assert time.monotonic() - begun < 10.0, "clients wait out a 429 for minutes"
    first.close("success").result(timeout=WAIT_S)
    tenant.clients.remove(first)
    assert new_run(tenant.service()).get_info().is_lora
    tenant.close()


def test_a_wire_of_one_tenant_speaks_for_that_tenant_only(birch: Tenant):
    with Wire(birch.running.url, birch.key) as wire:
        assert wire.send("GET", "sessions?tenant=acme").status_code in (400, 404, 422)
