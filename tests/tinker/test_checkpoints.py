"""Checkpoints: saved, loaded, shared, copied, deleted, taken home."""

import time
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.tinker.served import (
    FOLDER,
    WAIT_S,
    Tenant,
    datum,
    download,
    logprobs,
    new_run,
    prompt,
    some_tokens,
    train,
)

pytestmark = pytest.mark.slow

DATA = [datum(some_tokens(seed, 10)) for seed in range(3)]
MORE = [datum(some_tokens(seed, 12)) for seed in range(3, 6)]


@pytest.fixture(scope="module")
def trained(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """A run that took three steps; tests save it and leave it as it is."""
    run = new_run(service)
    for _ in range(3):
        train(run, DATA)
    return run


@pytest.fixture(scope="module")
def saved(trained: tinker.TrainingClient) -> str:
    return trained.save_state("shared", user_metadata={"step": "3"}).result(timeout=WAIT_S).path


def after_more(run: tinker.TrainingClient) -> list[np.ndarray]:
    train(run, MORE)
    return logprobs(run, DATA)


def test_a_run_made_of_a_checkpoint_with_its_optimizer_goes_on_as_the_run_itself(service, saved):
    made = service.create_training_client_from_state_with_optimizer(saved).result(timeout=WAIT_S)
    again = service.create_training_client_from_state_with_optimizer(saved).result(timeout=WAIT_S)
    plain = service.create_training_client_from_state(saved).result(timeout=WAIT_S)
    first, second, other = (after_more(run) for run in (made, again, plain))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert not np.array_equal(first[0], other[0]), "fresh moments take another step"


def test_training_that_was_saved_and_loaded_equals_training_that_went_on(service):
    through = new_run(service)
    train(through, DATA)
    path = through.save_state("middle").result(timeout=WAIT_S).path
    loaded = service.create_training_client_from_state_with_optimizer(path).result(timeout=WAIT_S)
    expected, found = after_more(through), after_more(loaded)
    assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.filterwarnings("ignore:DEPRECATED")
def test_a_run_goes_back_to_a_checkpoint_in_place(service):
    run = new_run(service)
    train(run, DATA)
    before = logprobs(run, DATA)
    path = run.save_state("here").result(timeout=WAIT_S).path
    expected = after_more(run)
    run.load_state_with_optimizer(path).result(timeout=WAIT_S)
    assert all(np.array_equal(a, b) for a, b in zip(before, logprobs(run, DATA), strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(expected, after_more(run), strict=True))
    run.load_state(path).result(timeout=WAIT_S)
    assert not np.array_equal(after_more(run)[0], expected[0])


def test_gradients_that_nobody_stepped_with_are_not_saved(service):
    run, bare = new_run(service), new_run(service)
    for one in (run, bare):
        train(one, DATA)
    run.forward_backward(MORE, "cross_entropy").result(timeout=WAIT_S)
    paths = [one.save_state("pending").result(timeout=WAIT_S).path for one in (run, bare)]
    made = [
        service.create_training_client_from_state_with_optimizer(path).result(timeout=WAIT_S)
        for path in paths
    ]
    first, second = (after_more(one) for one in made)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_name_is_taken_once_unless_it_may_be_overwritten(service):
    run = new_run(service)
    train(run, DATA)
    first = run.save_state("name", user_metadata={"a": "1"}).result(timeout=WAIT_S).path
    old = logprobs(run, DATA)
    train(run, MORE)
    with pytest.raises(tinker.RequestFailedError, match="name"):
        run.save_state("name").result(timeout=WAIT_S)
    assert run.save_state("name", overwrite=True).result(timeout=WAIT_S).path == first
    loaded = service.create_training_client_from_state(first).result(timeout=WAIT_S)
    assert not np.array_equal(logprobs(loaded, DATA)[0], old[0])


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_what_is_taken_home_says_in_peft_what_it_says_here(acme: Tenant, trained, tmp_path: Path):
    path = trained.save_weights_external("home", 3600).result(timeout=WAIT_S).path
    stock = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(stock, download(acme, path, tmp_path)).eval()
    sampler = trained.save_weights_and_get_sampling_client().result(timeout=WAIT_S)
    tokens = some_tokens(0, 40)
    found = sampler.compute_logprobs(prompt(tokens)).result(timeout=WAIT_S)
    with torch.no_grad():
        table = theirs(torch.tensor([tokens])).logits[0].log_softmax(-1)
    expected = table[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert np.allclose(found[1:], expected.numpy(), atol=1e-4)


def test_checkpoints_are_listed_with_what_was_said_of_them(acme: Tenant, trained, saved):
    listed = acme.rest().list_checkpoints(trained.model_id).result(timeout=WAIT_S).checkpoints
    (one,) = [checkpoint for checkpoint in listed if checkpoint.tinker_path == saved]
    assert (one.checkpoint_id, one.checkpoint_type) == ("weights/shared", "training")
    assert one.user_metadata == {"step": "3"} and not one.public and one.expires_at is None
    assert one.size_bytes and one.size_bytes > 10_000
    told = acme.rest().get_training_run(trained.model_id).result(timeout=WAIT_S)
    assert told.last_checkpoint is not None and not told.corrupted


def test_samplers_without_a_name_are_not_listed(acme: Tenant, service):
    run = new_run(service)
    run.save_weights_and_get_sampling_client().result(timeout=WAIT_S)
    assert acme.rest().list_checkpoints(run.model_id).result(timeout=WAIT_S).checkpoints == []


def test_a_time_to_live_is_kept_changed_and_taken_away(acme: Tenant, trained):
    path = trained.save_state("mortal", ttl_seconds=3600).result(timeout=WAIT_S).path
    rest = acme.rest()

    def left_s() -> float | None:
        listed = rest.list_checkpoints(trained.model_id).result(timeout=WAIT_S).checkpoints
        (one,) = [checkpoint for checkpoint in listed if checkpoint.tinker_path == path]
        return None if one.expires_at is None else one.expires_at.timestamp() - time.time()

    assert 3400 < (left_s() or 0) <= 3600
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result(timeout=WAIT_S)
    assert 7000 < (left_s() or 0) <= 7200
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result(timeout=WAIT_S)
    assert left_s() is None


def test_a_deleted_checkpoint_is_gone(acme: Tenant, service, trained):
    path = trained.save_state("gone").result(timeout=WAIT_S).path
    acme.rest().delete_checkpoint_from_tinker_path(path).result(timeout=WAIT_S)
    with pytest.raises(tinker.NotFoundError):
        acme.rest().delete_checkpoint_from_tinker_path(path).result(timeout=WAIT_S)
    with pytest.raises(tinker.TinkerError, match="gone"):
        service.create_training_client_from_state(path).result(timeout=WAIT_S)


def test_another_tenant_takes_a_checkpoint_only_while_it_is_public(
    acme: Tenant, birch: Tenant, trained, tmp_path: Path
):
    path = trained.save_state("open").result(timeout=WAIT_S).path
    theirs, publisher = birch.service(project_id="archive"), acme.rest()
    for attempt in (
        lambda: theirs.create_training_client_from_state(path).result(timeout=WAIT_S),
        lambda: theirs.create_sampling_client(path).result(timeout=WAIT_S),
        lambda: theirs.copy_weights(path).result(timeout=WAIT_S),
        lambda: birch.rest().get_weights_info_by_tinker_path(path).result(timeout=WAIT_S),
    ):
        with pytest.raises(tinker.TinkerError, match="open"):
            attempt()
    publisher.publish_checkpoint_from_tinker_path(path).result(timeout=WAIT_S)
    made = theirs.create_training_client_from_state_with_optimizer(path).result(timeout=WAIT_S)
    assert all(
        np.array_equal(a, b)
        for a, b in zip(logprobs(made, DATA), logprobs(trained, DATA), strict=True)
    )
    copied = theirs.copy_weights(path).result(timeout=WAIT_S)
    for change in (
        lambda: birch.rest().delete_checkpoint_from_tinker_path(path).result(timeout=WAIT_S),
        lambda: birch.rest().unpublish_checkpoint_from_tinker_path(path).result(timeout=WAIT_S),
        lambda: birch.rest().set_checkpoint_ttl_from_tinker_path(path, 3600).result(WAIT_S),
    ):
        with pytest.raises(tinker.NotFoundError):
            change()
    publisher.unpublish_checkpoint_from_tinker_path(path).result(timeout=WAIT_S)
    publisher.delete_checkpoint_from_tinker_path(path).result(timeout=WAIT_S)
    # The copy is its owner's own: it stays when the source is gone.
    own = theirs.create_training_client_from_state(copied).result(timeout=WAIT_S)
    assert np.array_equal(logprobs(own, DATA)[0], logprobs(trained, DATA)[0])


def test_an_address_of_external_weights_is_good_for_its_file_only(acme: Tenant, trained):
    import httpx

    path = trained.save_weights_external("links", 3600).result(timeout=WAIT_S).path
    urls = acme.rest().get_external_weights_urls(path).result(timeout=WAIT_S)
    url = urls.urls["adapter_config.json"]
    assert httpx.get(url).json()["peft_type"] == "LORA"
    assert urls.expires.timestamp() > time.time()
    assert httpx.get(url[:-2] + "xx").status_code in (401, 403, 404)
    other = url.replace("adapter_config.json", "adapter_model.safetensors")
    assert httpx.get(other).status_code in (401, 403, 404)
