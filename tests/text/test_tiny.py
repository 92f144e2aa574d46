"""The packaged base `tiny` is a Hugging Face folder like any other."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from marlaas.text.bases import resolve_base
from marlaas.text.chat import ChatTokenizer


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(resolve_base("tiny")).eval()


def test_every_token_of_the_tokenizer_has_an_embedding_and_the_other_way_round(model):
    assert ChatTokenizer.load(resolve_base("tiny")).vocab_size == model.config.vocab_size


def test_the_stock_fast_tokenizer_reads_the_same_ids():
    ours = ChatTokenizer.load(resolve_base("tiny"))
    theirs = PreTrainedTokenizerFast.from_pretrained(resolve_base("tiny"))
    text = "<|im_start|>user\nWhat is 7 + 12?<|im_end|>\n"
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert len(theirs) == ours.vocab_size
    assert theirs.eos_token_id in ours.stop_token_ids


def test_it_is_small_enough_to_ship(model):
    assert sum(p.numel() for p in model.parameters()) < 1.6e6
    assert (resolve_base("tiny") / "model.safetensors").stat().st_size < 7e6


def test_far_positions_give_finite_and_sensible_predictions(model):
    ours = ChatTokenizer.load(resolve_base("tiny"))
    turn = "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\nHello! How can I help you?"
    unit = ours.encode(f"{turn}<|im_end|>\n")
    tokens = torch.tensor([(unit * (1024 // len(unit) + 1))[:1024]])
    with torch.no_grad():
        logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
    of_next = logprobs.gather(1, tokens[0, 1:, None])[:, 0]
    assert torch.isfinite(of_next).all()
    assert of_next[-128:].mean() > -1.5


def test_generation_config_names_the_end_of_turn():
    config = json.loads((resolve_base("tiny") / "generation_config.json").read_text())
    end = ChatTokenizer.load(resolve_base("tiny")).encode("<|im_end|>")[0]
    assert end in config["eos_token_id"]
