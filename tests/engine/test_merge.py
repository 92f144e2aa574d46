"""A merged folder is the base with the adapter on, to anybody's stock code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from marlaas.engine.adapter_io import save_adapter
from marlaas.engine.merge import REFUSED, merge
from marlaas.engine.trainer import LoraTrainer
from marlaas.errors import InvalidRequest, NotFound
from marlaas.model.attention import PackedSequences
from marlaas.model.base import load_base
from marlaas.model.lora import LoraBatch, Segment
from marlaas.text.bases import packaged_folder
from marlaas.types import AdapterSpec
from tests.engine.data import host
from tests.models import stock_llama, stock_qwen3

torch.set_num_threads(1)

TOKENS = torch.arange(40) * 7 % 128


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("MARLAAS_CACHE", str(tmp_path_factory.mktemp("cache")))


def base_folder(folder: Path, make=stock_llama, **config) -> Path:
    make(**config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("hello")
    (folder / "pytorch_model.bin").write_text("weights in another form")
    return folder


def adapter_on(base: Path, folder: Path, spec: AdapterSpec, dtype=torch.float32) -> Tensor:
    """Save a random adapter; return the logits of base and adapter as we serve them."""
    ours = load_base(base, dtype=dtype)
    trainer = LoraTrainer(ours)
    slot = host(trainer, "p", spec)
    layout = trainer.state("p").layout
    save_adapter(folder, trainer.weights("p"), spec, layout, base_name="random")
    batch = LoraBatch.build(ours.bank, [Segment(slot, len(TOKENS))])
    with torch.no_grad(), ours.bank.active(batch):
        places = torch.arange(len(TOKENS))
        return ours.head(ours.hidden(TOKENS, places, PackedSequences([len(TOKENS)]), batch))


def stock_logits(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return model(TOKENS[None], use_cache=False).logits[0].float()


@pytest.mark.parametrize("make", [stock_llama, stock_qwen3])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("targets", [("attention", "mlp"), ("attention", "head")])
def test_a_merged_model_gives_the_logits_of_base_and_adapter_in_stock_transformers(
    make, is_tied: bool, targets: tuple[str, ...], tmp_path: Path
) -> None:
    base = base_folder(tmp_path / "base", make, tie_word_embeddings=is_tied)
    spec = AdapterSpec(rank=5, alpha=7.0, targets=targets)
    expected = adapter_on(base, tmp_path / "adapter", spec)
    merge(base, tmp_path / "adapter", tmp_path / "merged")
    logits = stock_logits(tmp_path / "merged")
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert (logits - stock_logits(base)).abs().max() > 0.1, "the adapter does something"


def test_a_tied_head_gets_weights_of_its_own_only_where_the_adapter_targets_it(
    tmp_path: Path,
) -> None:
    base = base_folder(tmp_path / "base", tie_word_embeddings=True)
    for name, targets, is_tied in (
        ("blocks", ("mlp",), True),
        ("head", ("head",), False),
    ):
        adapter_on(base, tmp_path / f"{name}-adapter", AdapterSpec(targets=targets))
        merge(base, tmp_path / f"{name}-adapter", tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["tie_word_embeddings"] is is_tied
        with safe_open(tmp_path / name / "model.safetensors", framework="pt") as weights:
            assert ("lm_head.weight" in weights.keys()) is not is_tied  # noqa: SIM118
            embedding = weights.get_tensor("model.embed_tokens.weight")
        stock: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base)
        assert torch.equal(embedding, stock.get_input_embeddings().weight)


def test_everything_but_weights_comes_from_the_base(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", dtype=torch.bfloat16)
    adapter_on(base, tmp_path / "adapter", AdapterSpec(), dtype=torch.bfloat16)
    merge(base, tmp_path / "adapter", tmp_path / "merged", dtype=torch.bfloat16)
    merged = tmp_path / "merged"
    names = {"config.json", "generation_config.json", "model.safetensors"}
    assert {file.name for file in merged.iterdir()} == names | {
        "tokenizer.json",
        "chat_template.jinja",
    }
    assert (merged / "chat_template.jinja").read_text() == "hello"
    theirs, ours = (json.loads((f / "config.json").read_text()) for f in (base, merged))
    assert theirs == ours
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_weights_are_written_in_the_type_that_the_base_is_served_in(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", dtype=torch.bfloat16)
    expected = adapter_on(base, tmp_path / "adapter", AdapterSpec(rank=2))
    merge(base, tmp_path / "adapter", tmp_path / "merged")
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "float32"
    torch.testing.assert_close(stock_logits(tmp_path / "merged"), expected, rtol=0, atol=1e-4)


def test_what_cannot_be_merged_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base")
    with pytest.raises(NotFound):
        merge(base, tmp_path / "nothing", tmp_path / "merged")
    other = base_folder(tmp_path / "other", hidden_size=16)
    adapter_on(other, tmp_path / "adapter", AdapterSpec())
    with pytest.raises(InvalidRequest, match="expected"):
        merge(base, tmp_path / "adapter", tmp_path / "merged")
    with pytest.raises(InvalidRequest, match="exists"):
        merge(other, tmp_path / "adapter", tmp_path / "base")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "other"]


def test_the_command_line_says_which_error_it_was(tmp_path: Path) -> None:
    folders = (packaged_folder("tiny"), tmp_path / "nothing", tmp_path / "out")
    command = [sys.executable, "-m", "marlaas.engine.merge", *map(str, folders)]
    done = subprocess.run(
        [*command, "float32", "process"], check=False, capture_output=True, text=True
    )
    assert done.returncode == REFUSED
    assert done.stdout.startswith("NotFound\n")
