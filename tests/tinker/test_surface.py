"""Every public method of the SDK's clients is called against the service, or refused in words.

`CALLS` and `REFUSED` hold one entry a method; a test compares them with what the installed SDK has,
so that a new method is noticed. What returns a future is tried both ways: waited for and awaited.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import tinker
import torch
from tinker import types
from tinker.lib.api_future_impl import QueueState

from tests.tinker.served import ALIAS, BASE, FOLDER, GREEDY, WAIT_S, Tenant, datum, new_run, prompt

pytestmark = [
    pytest.mark.slow,
    # Half of the surface is deprecated: it is called all the same.
    pytest.mark.filterwarnings("ignore:DEPRECATED"),
    pytest.mark.filterwarnings("ignore:.*is experimental"),
]

CLIENTS = (
    tinker.ServiceClient,
    tinker.TrainingClient,
    tinker.SamplingClient,
    tinker.RestClient,
    tinker.AdminClient,
)
TOKENS = [5, 6, 7, 8, 9]
ADAM = types.AdamParams(learning_rate=1e-4)


@dataclass
class World:
    """What the calls work on: one session, one run that took a step, one of each checkpoint."""

    tenant: Tenant
    service: tinker.ServiceClient
    run: tinker.TrainingClient
    sampler: tinker.SamplingClient
    weights: str
    sampler_weights: str
    external: str
    num_saved: int = 0
    data: list[types.Datum] = field(default_factory=lambda: [datum(TOKENS)])

    @property
    def rest(self) -> tinker.RestClient:
        return self.tenant.rest()

    @property
    def session_id(self) -> str:
        return self.service.holder.get_session_id()

    def name(self) -> str:
        """Return a name that no checkpoint has yet."""
        self.num_saved += 1
        return f"saved-{self.num_saved}"

    def checkpoint(self) -> str:
        """Return a new checkpoint's path."""
        return self.run.save_state(self.name()).result(timeout=WAIT_S).path


@pytest.fixture(scope="module")
def world(acme: Tenant, service: tinker.ServiceClient) -> Iterator[World]:
    run = new_run(service, user_metadata={"purpose": "surface"})
    run.forward_backward([datum(TOKENS)], "cross_entropy").result(timeout=WAIT_S)
    run.optim_step(ADAM).result(timeout=WAIT_S)
    yield World(
        tenant=acme,
        service=service,
        run=run,
        sampler=run.save_weights_and_get_sampling_client().result(timeout=WAIT_S),
        weights=run.save_state("first").result(timeout=WAIT_S).path,
        sampler_weights=run.save_weights_for_sampler("first").result(timeout=WAIT_S).path,
        external=run.save_weights_external("first", 3600).result(timeout=WAIT_S).path,
    )


Call = Callable[[World], Any]
Check = Callable[[World, Any], object]


def custom_loss(data: list[types.Datum], logprobs: list[torch.Tensor]):
    loss = -torch.cat(logprobs).sum()
    return loss, {"nll:sum": loss.item()}


def traced_loss(logprobs: torch.Tensor, weights: torch.Tensor):
    loss = -(logprobs * weights).sum()
    return loss, {"custom/nll:sum": loss}


def passed(world: World, output: types.ForwardBackwardOutput) -> bool:
    (row,) = output.loss_fn_outputs
    return row["logprobs"].shape == [4] and "loss:sum" in output.metrics


def sampled(world: World, response: types.SampleResponse) -> bool:
    (sequence,) = response.sequences
    logprobs = sequence.logprobs
    return logprobs is not None and 1 <= len(sequence.tokens) == len(logprobs) <= 8


def is_run(world: World, client: tinker.TrainingClient) -> bool:
    return client.get_info().model_data.model_name == BASE and ":train:" in client.model_id


def is_sampler(world: World, client: tinker.SamplingClient) -> bool:
    return client.get_base_model() == BASE


def is_none(world: World, value: None) -> bool:
    return value is None


def kind_of(kind: str) -> Check:
    return lambda world, saved: f"/{kind}/" in saved.path


def knows_tokens(world: World, tokenizer: Any) -> bool:
    return tokenizer.decode(tokenizer.encode("What is 3 + 4?")) == "What is 3 + 4?"


def has_first(world: World, answer: types.CheckpointsListResponse) -> bool:
    by_path = {checkpoint.tinker_path: checkpoint for checkpoint in answer.checkpoints}
    return [
        (by_path[path].checkpoint_id, by_path[path].checkpoint_type)
        for path in (world.weights, world.sampler_weights, world.external)
    ] == [
        ("weights/first", "training"),
        ("sampler_weights/first", "sampler"),
        ("external_weights/first", "external"),
    ]


def is_our_run(world: World, answer: types.TrainingRun) -> bool:
    metadata = answer.user_metadata or {}
    return (
        (answer.training_run_id, answer.base_model, answer.lora_rank)
        == (world.run.model_id, BASE, 8)
        and answer.is_lora
        and metadata["purpose"] == "surface"
    )


def has_our_run(world: World, answer: types.TrainingRunsResponse) -> bool:
    return world.run.model_id in [run.training_run_id for run in answer.training_runs]


CALLS: dict[str, tuple[Call, Check]] = {
    # -- ServiceClient
    "ServiceClient.close": (lambda w: w.tenant.service().close("success", detail="done"), is_none),
    "ServiceClient.copy_weights": (
        lambda w: w.tenant.service(project_id="p").copy_weights(w.weights, ttl_seconds=3600),
        lambda w, path: path.endswith("/weights/first") and path != w.weights,
    ),
    "ServiceClient.create_custom_loss": (
        # The same loss is created once a session.
        lambda w: w.tenant.service().create_custom_loss(traced_loss, {"logprobs": 1, "weights": 1}),
        lambda w, handle: handle.loss_id is None,
    ),
    "ServiceClient.create_lora_training_client": (
        lambda w: w.service.create_lora_training_client(BASE, rank=8),
        is_run,
    ),
    "ServiceClient.create_lora_training_client_async": (
        lambda w: w.service.create_lora_training_client_async(BASE, rank=8),
        is_run,
    ),
    "ServiceClient.create_rest_client": (
        lambda w: w.service.create_rest_client(),
        lambda w, rest: rest.get_server_capabilities().result().supported_models,
    ),
    "ServiceClient.create_sampling_client": (
        lambda w: w.service.create_sampling_client(w.sampler_weights, BASE),
        is_sampler,
    ),
    "ServiceClient.create_sampling_client_async": (
        lambda w: w.service.create_sampling_client_async(base_model=BASE),
        is_sampler,
    ),
    "ServiceClient.create_training_client_from_state": (
        lambda w: w.service.create_training_client_from_state(w.weights),
        is_run,
    ),
    "ServiceClient.create_training_client_from_state_async": (
        lambda w: w.service.create_training_client_from_state_async(w.weights, base_model=BASE),
        is_run,
    ),
    "ServiceClient.create_training_client_from_state_with_optimizer": (
        lambda w: w.service.create_training_client_from_state_with_optimizer(w.weights),
        is_run,
    ),
    "ServiceClient.create_training_client_from_state_with_optimizer_async": (
        lambda w: w.service.create_training_client_from_state_with_optimizer_async(w.weights),
        is_run,
    ),
    "ServiceClient.get_console_url": (
        lambda w: w.service.get_console_url(),
        lambda w, url: w.session_id in url,
    ),
    "ServiceClient.get_server_capabilities": (
        lambda w: w.service.get_server_capabilities(),
        lambda w, answer: BASE in [model.model_name for model in answer.supported_models],
    ),
    "ServiceClient.get_server_capabilities_async": (
        lambda w: w.service.get_server_capabilities_async(),
        lambda w, answer: BASE in [model.model_name for model in answer.supported_models],
    ),
    "ServiceClient.get_telemetry": (lambda w: w.service.get_telemetry(), lambda w, value: value),
    # -- TrainingClient
    "TrainingClient.create_sampling_client": (
        lambda w: w.run.create_sampling_client(w.sampler_weights),
        is_sampler,
    ),
    "TrainingClient.create_sampling_client_async": (
        lambda w: w.run.create_sampling_client_async(w.weights),
        is_sampler,
    ),
    "TrainingClient.forward": (lambda w: w.run.forward(w.data, "cross_entropy"), passed),
    "TrainingClient.forward_async": (
        lambda w: w.run.forward_async(w.data, "cross_entropy"),
        passed,
    ),
    "TrainingClient.forward_backward": (
        lambda w: w.run.forward_backward(w.data, "cross_entropy"),
        passed,
    ),
    "TrainingClient.forward_backward_async": (
        lambda w: w.run.forward_backward_async(w.data, "cross_entropy"),
        passed,
    ),
    "TrainingClient.forward_backward_custom": (
        lambda w: w.run.forward_backward_custom(w.data, custom_loss),
        lambda w, output: passed(w, output) and output.metrics["nll:sum"] > 0,
    ),
    "TrainingClient.forward_backward_custom_async": (
        lambda w: w.run.forward_backward_custom_async(w.data, custom_loss),
        passed,
    ),
    "TrainingClient.get_console_url": (
        lambda w: w.run.get_console_url(),
        lambda w, url: url.startswith("http"),
    ),
    "TrainingClient.get_info": (
        lambda w: w.run.get_info(),
        lambda w, info: (info.model_id, info.lora_rank) == (w.run.model_id, 8),
    ),
    "TrainingClient.get_info_async": (
        lambda w: w.run.get_info_async(),
        lambda w, info: info.is_lora,
    ),
    "TrainingClient.get_telemetry": (lambda w: w.run.get_telemetry(), lambda w, value: value),
    "TrainingClient.get_tokenizer": (lambda w: w.run.get_tokenizer(), knows_tokens),
    "TrainingClient.load_state": (
        lambda w: w.run.load_state(w.weights),
        lambda w, loaded: loaded.path in (None, w.weights),
    ),
    "TrainingClient.load_state_async": (
        lambda w: w.run.load_state_async(w.weights),
        lambda w, loaded: loaded.path in (None, w.weights),
    ),
    "TrainingClient.load_state_with_optimizer": (
        lambda w: w.run.load_state_with_optimizer(w.weights),
        lambda w, loaded: loaded.path in (None, w.weights),
    ),
    "TrainingClient.load_state_with_optimizer_async": (
        lambda w: w.run.load_state_with_optimizer_async(w.weights),
        lambda w, loaded: loaded.path in (None, w.weights),
    ),
    "TrainingClient.optim_step": (
        lambda w: w.run.optim_step(ADAM),
        lambda w, stepped: stepped.metrics is None or all(map(str, stepped.metrics)),
    ),
    "TrainingClient.optim_step_async": (
        lambda w: w.run.optim_step_async(adam_params=ADAM),
        lambda w, stepped: True,
    ),
    "TrainingClient.save_state": (
        lambda w: w.run.save_state(w.name(), user_metadata={"a": "b"}),
        kind_of("weights"),
    ),
    "TrainingClient.save_state_async": (
        lambda w: w.run.save_state_async(w.name(), ttl_seconds=3600),
        kind_of("weights"),
    ),
    "TrainingClient.save_weights_and_get_sampling_client": (
        lambda w: w.run.save_weights_and_get_sampling_client(),
        is_sampler,
    ),
    "TrainingClient.save_weights_and_get_sampling_client_async": (
        lambda w: w.run.save_weights_and_get_sampling_client_async(kind="inflight"),
        is_sampler,
    ),
    "TrainingClient.save_weights_external": (
        lambda w: w.run.save_weights_external(w.name()),
        kind_of("external_weights"),
    ),
    "TrainingClient.save_weights_external_async": (
        lambda w: w.run.save_weights_external_async(w.name(), 3600),
        kind_of("external_weights"),
    ),
    "TrainingClient.save_weights_for_sampler": (
        lambda w: w.run.save_weights_for_sampler(w.name()),
        kind_of("sampler_weights"),
    ),
    "TrainingClient.save_weights_for_sampler_async": (
        lambda w: w.run.save_weights_for_sampler_async(w.name(), 3600, {"a": "b"}),
        kind_of("sampler_weights"),
    ),
    # -- SamplingClient
    "SamplingClient.compute_logprobs": (
        lambda w: w.sampler.compute_logprobs(prompt(TOKENS)),
        lambda w, value: value[0] is None and all(one < 0 for one in value[1:]),
    ),
    "SamplingClient.compute_logprobs_async": (
        lambda w: w.sampler.compute_logprobs_async(prompt(TOKENS), 2),
        lambda w, value: value[:3] == [None] * 3 and None not in value[3:],
    ),
    "SamplingClient.create": (
        lambda w: tinker.SamplingClient.create(w.service.holder, base_model=BASE),
        is_sampler,
    ),
    "SamplingClient.from_sampler_handle": (
        lambda w: tinker.SamplingClient.from_sampler_handle(
            w.sampler.get_sampler_handle(), api_key=w.tenant.key
        ).sample(prompt(TOKENS), 1, GREEDY),
        sampled,
    ),
    "SamplingClient.get_base_model": (
        lambda w: w.sampler.get_base_model(),
        lambda w, name: name == BASE,
    ),
    "SamplingClient.get_base_model_async": (
        lambda w: w.sampler.get_base_model_async(),
        lambda w, name: name == BASE,
    ),
    "SamplingClient.get_sampler_handle": (
        lambda w: w.sampler.get_sampler_handle(),
        lambda w, handle: isinstance(handle, str),
    ),
    "SamplingClient.get_telemetry": (lambda w: w.sampler.get_telemetry(), lambda w, value: value),
    # It looks for a tokenizer under the name of the base: a folder is one that needs no hub.
    "SamplingClient.get_tokenizer": (
        lambda w: (
            w.service.create_sampling_client(base_model=FOLDER).result(timeout=WAIT_S)
        ).get_tokenizer(),
        knows_tokens,
    ),
    "SamplingClient.on_queue_state_change": (
        lambda w: w.sampler.on_queue_state_change(QueueState.ACTIVE, None),
        is_none,
    ),
    "SamplingClient.sample": (lambda w: w.sampler.sample(prompt(TOKENS), 1, GREEDY), sampled),
    "SamplingClient.sample_async": (
        lambda w: w.sampler.sample_async(prompt(TOKENS), 1, GREEDY),
        sampled,
    ),
    # -- RestClient
    "RestClient.copy_weights": (
        lambda w: w.rest.copy_weights(w.sampler_weights, "any-project"),
        lambda w, path: path.endswith("/sampler_weights/first") and path != w.sampler_weights,
    ),
    "RestClient.copy_weights_async": (
        lambda w: w.rest.copy_weights_async(w.weights, "any-project", ttl_seconds=3600),
        lambda w, path: path.endswith("/weights/first") and path != w.weights,
    ),
    "RestClient.delete_checkpoint": (
        lambda w: w.rest.delete_checkpoint(
            w.run.model_id, w.checkpoint().removeprefix(f"tinker://{w.run.model_id}/")
        ),
        is_none,
    ),
    "RestClient.delete_checkpoint_async": (
        lambda w: w.rest.delete_checkpoint_async(
            w.run.model_id, w.checkpoint().removeprefix(f"tinker://{w.run.model_id}/")
        ),
        is_none,
    ),
    "RestClient.delete_checkpoint_from_tinker_path": (
        lambda w: w.rest.delete_checkpoint_from_tinker_path(w.checkpoint()),
        is_none,
    ),
    "RestClient.delete_checkpoint_from_tinker_path_async": (
        lambda w: w.rest.delete_checkpoint_from_tinker_path_async(w.checkpoint()),
        is_none,
    ),
    "RestClient.get_external_weights_urls": (
        lambda w: w.rest.get_external_weights_urls(w.external),
        lambda w, answer: "adapter_config.json" in answer.urls,
    ),
    "RestClient.get_external_weights_urls_async": (
        lambda w: w.rest.get_external_weights_urls_async(w.external),
        lambda w, answer: "adapter_model.safetensors" in answer.urls,
    ),
    "RestClient.get_sampler": (
        lambda w: w.rest.get_sampler(w.sampler._sampling_session_id),
        lambda w, answer: answer.base_model == BASE,
    ),
    "RestClient.get_sampler_async": (
        lambda w: w.rest.get_sampler_async(w.sampler._sampling_session_id),
        lambda w, answer: answer.sampler_id == w.sampler._sampling_session_id,
    ),
    "RestClient.get_server_capabilities": (
        lambda w: w.rest.get_server_capabilities(),
        lambda w, answer: answer.supported_models[0].max_context_length == 2048,
    ),
    "RestClient.get_session": (
        lambda w: w.rest.get_session(w.session_id),
        lambda w, answer: (
            w.run.model_id in answer.training_run_ids
            and answer.user_metadata == {"suite": "acceptance"}
        ),
    ),
    "RestClient.get_session_async": (
        lambda w: w.rest.get_session_async(w.session_id),
        lambda w, answer: w.sampler._sampling_session_id in answer.sampler_ids,
    ),
    "RestClient.get_telemetry": (lambda w: w.rest.get_telemetry(), lambda w, value: True),
    "RestClient.get_training_run": (
        lambda w: w.rest.get_training_run(w.run.model_id),
        is_our_run,
    ),
    "RestClient.get_training_run_async": (
        lambda w: w.rest.get_training_run_async(w.run.model_id, access_scope="accessible"),
        is_our_run,
    ),
    "RestClient.get_training_run_by_tinker_path": (
        lambda w: w.rest.get_training_run_by_tinker_path(w.weights),
        is_our_run,
    ),
    "RestClient.get_training_run_by_tinker_path_async": (
        lambda w: w.rest.get_training_run_by_tinker_path_async(w.weights),
        is_our_run,
    ),
    "RestClient.get_weights_info_by_tinker_path": (
        lambda w: w.rest.get_weights_info_by_tinker_path(w.weights),
        lambda w, info: (
            (info.base_model, info.lora_rank) == (BASE, 8)
            and info.train_unembed
            and info.train_mlp
            and info.train_attn
        ),
    ),
    "RestClient.list_checkpoints": (
        lambda w: w.rest.list_checkpoints(w.run.model_id),
        has_first,
    ),
    "RestClient.list_checkpoints_async": (
        lambda w: w.rest.list_checkpoints_async(w.run.model_id),
        has_first,
    ),
    "RestClient.list_sessions": (
        lambda w: w.rest.list_sessions(limit=100),
        lambda w, answer: w.session_id in answer.sessions,
    ),
    "RestClient.list_sessions_async": (
        lambda w: w.rest.list_sessions_async(limit=1, offset=0),
        lambda w, answer: len(answer.sessions) == 1,
    ),
    "RestClient.list_training_runs": (
        lambda w: w.rest.list_training_runs(limit=100),
        has_our_run,
    ),
    "RestClient.list_training_runs_async": (
        lambda w: w.rest.list_training_runs_async(limit=1),
        lambda w, answer: len(answer.training_runs) == 1 < answer.cursor.total_count,
    ),
    "RestClient.list_user_checkpoints": (
        lambda w: w.rest.list_user_checkpoints(limit=100),
        has_first,
    ),
    "RestClient.list_user_checkpoints_async": (
        lambda w: w.rest.list_user_checkpoints_async(limit=1),
        lambda w, answer: len(answer.checkpoints) == 1,
    ),
    "RestClient.publish_checkpoint_from_tinker_path": (
        lambda w: w.rest.publish_checkpoint_from_tinker_path(w.checkpoint()),
        is_none,
    ),
    "RestClient.publish_checkpoint_from_tinker_path_async": (
        lambda w: w.rest.publish_checkpoint_from_tinker_path_async(w.checkpoint()),
        is_none,
    ),
    "RestClient.search_sessions": (
        lambda w: w.rest.search_sessions(types.SessionSearchRequest(session_id=w.session_id)),
        lambda w, answer: [one.session_id for one in answer.sessions] == [w.session_id],
    ),
    "RestClient.set_checkpoint_ttl_from_tinker_path": (
        lambda w: w.rest.set_checkpoint_ttl_from_tinker_path(w.checkpoint(), 7200),
        is_none,
    ),
    "RestClient.set_checkpoint_ttl_from_tinker_path_async": (
        lambda w: w.rest.set_checkpoint_ttl_from_tinker_path_async(w.checkpoint(), None),
        is_none,
    ),
    "RestClient.unpublish_checkpoint_from_tinker_path": (
        lambda w: w.rest.unpublish_checkpoint_from_tinker_path(w.checkpoint()),
        is_none,
    ),
    "RestClient.unpublish_checkpoint_from_tinker_path_async": (
        lambda w: w.rest.unpublish_checkpoint_from_tinker_path_async(w.checkpoint()),
        is_none,
    ),
}

CALLS["AdminClient.get_telemetry"] = (lambda w: admin(w).get_telemetry(), lambda w, value: True)

DATES = ("2026-01-01", "2026-02-01")
REFUSED: dict[str, tuple[Call, str]] = {
    "RestClient.assign_session_project": (
        lambda w: w.rest.assign_session_project(w.session_id, "p"),
        "project",
    ),
    "RestClient.assign_session_project_async": (
        lambda w: w.rest.assign_session_project_async(w.session_id, "p"),
        "project",
    ),
    "RestClient.export_session_trace": (
        lambda w: w.rest.export_session_trace(w.session_id),
        "trace",
    ),
    "RestClient.export_session_trace_async": (
        lambda w: w.rest.export_session_trace_async(w.session_id),
        "trace",
    ),
    "RestClient.get_audit_log": (lambda w: w.rest.get_audit_log(), "audit"),
    "RestClient.get_audit_log_async": (lambda w: w.rest.get_audit_log_async(), "audit"),
    "RestClient.get_billing_usage": (lambda w: w.rest.get_billing_usage(*DATES), "usage"),
    "RestClient.get_billing_usage_async": (
        lambda w: w.rest.get_billing_usage_async(*DATES),
        "usage",
    ),
    "RestClient.get_current_checkpoint_storage_usage": (
        lambda w: w.rest.get_current_checkpoint_storage_usage(),
        "usage",
    ),
    "RestClient.get_current_checkpoint_storage_usage_async": (
        lambda w: w.rest.get_current_checkpoint_storage_usage_async(),
        "usage",
    ),
    # Refused by the SDK itself: it answers from a token that self-hosted keys are not.
    "RestClient.whoami": (lambda w: w.rest.whoami(), "JWT"),
    "AdminClient.get_audit_log": (lambda w: admin(w).get_audit_log(), "audit"),
    "AdminClient.get_audit_log_async": (lambda w: admin(w).get_audit_log_async(), "audit"),
    "AdminClient.get_billing_usage_async": (
        lambda w: admin(w).get_billing_usage_async(*DATES),
        "usage",
    ),
    "AdminClient.get_current_checkpoint_storage_usage_async": (
        lambda w: admin(w).get_current_checkpoint_storage_usage_async(),
        "usage",
    ),
    "AdminClient.get_billing_usage": (lambda w: admin(w).get_billing_usage(*DATES), "usage"),
    "AdminClient.get_current_checkpoint_storage_usage": (
        lambda w: admin(w).get_current_checkpoint_storage_usage(),
        "usage",
    ),
}


def admin(world: World) -> tinker.AdminClient:
    return tinker.AdminClient(base_url=world.tenant.running.url, api_key=world.tenant.key)


def waited(value: Any) -> Any:
    """Return what a call comes to for a program without an event loop of its own."""
    if isinstance(value, tinker.APIFuture):
        return value.result(timeout=WAIT_S)
    return waited(asyncio.run(value)) if inspect.isawaitable(value) else value


async def awaited(value: Any) -> Any:
    """Return what a call comes to inside an event loop."""
    while inspect.isawaitable(value):
        value = await value
    return value


def public_methods() -> set[str]:
    return {
        f"{client.__name__}.{name}"
        for client in CLIENTS
        for name in dir(client)
        if not name.startswith("_") and callable(getattr(client, name))
    }


def test_every_public_method_of_the_sdk_is_called_or_refused():
    assert CALLS.keys() | REFUSED.keys() == public_methods()
    assert not CALLS.keys() & REFUSED.keys()


@pytest.mark.parametrize("name", CALLS)
def test_a_method_does_what_it_is_for(world: World, name: str):
    call, check = CALLS[name]
    value = call(world)
    is_future = isinstance(value, tinker.APIFuture)
    assert check(world, waited(value))
    if is_future:
        assert check(world, asyncio.run(awaited_call(call, world)))


async def awaited_call(call: Call, world: World) -> Any:
    return await awaited(call(world))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_offered_is_refused_in_words(world: World, name: str):
    call, words = REFUSED[name]
    with pytest.raises((tinker.TinkerError, RuntimeError, ValueError), match=words):
        waited(call(world))


@pytest.mark.filterwarnings("ignore:Using the future")
def test_the_future_of_a_client_can_be_used_as_the_client(world: World):
    run = world.service.create_lora_training_client(BASE, rank=8)
    assert passed(world, run.forward(world.data, "cross_entropy").result(timeout=WAIT_S))
    sampler = run.save_weights_and_get_sampling_client()
    assert sampled(world, sampler.sample(prompt(TOKENS), 1, GREEDY).result(timeout=WAIT_S))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (lambda w: w.service.create_lora_training_client("no-such-base"), "no-such-base.*tiny"),
        (lambda w: w.service.create_lora_training_client(BASE, rank=0), "rank"),
        (lambda w: w.service.create_lora_training_client(BASE, rank=65), "rank.*64"),
        (
            lambda w: w.service.create_lora_training_client(
                BASE, optimizer=types.DimuonOptimizerConfig()
            ),
            "dimuon",
        ),
        (lambda w: w.run.optim_step(types.DimuonParams(learning_rate=0.1)), "dimuon"),
        (lambda w: w.run.save_weights_external(w.name(), 3600, ["age1abc"]), "age"),
        (lambda w: w.run.save_state("a/b"), "name"),
        (lambda w: w.run.save_state("first"), "first.*(exists|overwrite)"),
        (lambda w: w.run.save_state(w.name(), ttl_seconds=10), "ttl"),
        (lambda w: w.service.create_sampling_client(base_model="no-such-base"), "no-such-base"),
        (
            lambda w: w.service.create_sampling_client("tinker://no:train:0/weights/x"),
            "no:train:0",
        ),
        (
            lambda w: w.service.create_training_client_from_state("tinker://no:train:0/weights/x"),
            "no:train:0",
        ),
        (
            lambda w: w.service.create_training_client_from_state(
                w.weights, weights_access_token="t"
            ),
            "token",
        ),
        (
            lambda w: w.service.create_training_client_from_state(w.weights, "no-such-base"),
            "no-such-base",
        ),
        (lambda w: w.rest.get_training_run("no:train:0"), "no:train:0"),
        (lambda w: w.rest.get_weights_info_by_tinker_path("tinker://no/weights/x"), "no"),
    ],
)
def test_a_request_that_cannot_be_is_refused_at_once_and_says_why(
    world: World, asked: Call, words: str
):
    with pytest.raises((tinker.TinkerError, ValueError), match=rf"(?is){words}"):
        waited(asked(world))


def test_an_alias_of_the_base_is_the_base(acme: Tenant):
    service = acme.service()
    names = acme.rest().get_server_capabilities().result(timeout=WAIT_S).supported_models
    assert {BASE, ALIAS} <= {model.model_name for model in names}
    run = service.create_lora_training_client(ALIAS, rank=8, seed=7).result(timeout=WAIT_S)
    assert run.get_info().model_data.model_name == ALIAS
    assert run.get_tokenizer().encode("7")
    alias, base = (
        service.create_sampling_client(base_model=name)
        .result(timeout=WAIT_S)
        .compute_logprobs(prompt(TOKENS))
        .result(timeout=WAIT_S)
        for name in (ALIAS, BASE)
    )
    assert alias == base
