"""Loading bases: exact, frozen, mapped and not copied, complete or refused."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from marlaas.engine.generator import BatchGenerator
from marlaas.engine.self_check import check_base
from marlaas.engine.trainer import LoraTrainer
from marlaas.errors import InvalidRequest, UnsupportedBase, UnsupportedFeature
from marlaas.model.attention import PackedSequences
from marlaas.model.base import BaseModel, load_base
from marlaas.model.lora import LoraBatch, Segment
from marlaas.types import AdapterSpec
from tests import models


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MARLAAS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


STOCK = {
    "llama": lambda **options: models.stock_llama(**options),
    "qwen3": lambda **options: models.stock_qwen3(**options),
    "tied": lambda **options: models.stock_llama(tie_word_embeddings=True, **options),
    "experts": lambda **options: models.stock_qwen3_moe(**options),
}


@pytest.fixture(params=STOCK)
def stock(request):
    return STOCK[request.param]()


@pytest.fixture
def folder(stock, tmp_path):
    stock.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


TOKENS = torch.arange(3, 40)


def base_logits(base: BaseModel, batch: LoraBatch | None = None) -> torch.Tensor:
    context = PackedSequences([len(TOKENS)])
    with torch.no_grad(), base.bank.active(batch):
        return base.head(base.hidden(TOKENS, torch.arange(len(TOKENS)), context, batch))


def test_a_loaded_base_computes_what_the_stock_model_computes(stock, folder):
    base = load_base(folder)
    expected = stock(input_ids=TOKENS[None], use_cache=False).logits[0]
    assert (base_logits(base) - expected).abs().max() < 1e-4
    assert max(check_base(base).values()) < 1e-4
    assert base.name == "model"


def test_no_base_weight_is_trainable(folder):
    assert not any(parameter.requires_grad for parameter in load_base(folder).model.parameters())


def test_a_tied_head_stays_the_embedding(tmp_path):
    STOCK["tied"]().save_pretrained(tmp_path)
    base = load_base(tmp_path)
    assert base.head.weight is base.model.get_input_embeddings().weight
    assert base.supported_targets == ("attention", "mlp", "head")


def test_weights_are_the_pages_of_the_file(folder):
    base = load_base(folder)
    ranges = _mapped_ranges(folder)
    for name, parameter in base.model.named_parameters():
        if "experts" not in name:  # Stored one by one, stacked while loading.
            address = parameter.data_ptr()
            assert any(start <= address < end for start, end in ranges), name


def test_weights_of_fewer_bits_are_cast_once_into_a_file_that_all_map(tmp_path, cache):
    STOCK["llama"](dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    base, again = load_base(tmp_path / "half"), load_base(tmp_path / "half")
    stored = load_file(tmp_path / "half" / "model.safetensors")
    (copy,) = (path for path in (cache / "float32").iterdir() if path.is_dir())
    for loaded in (base, again):
        assert loaded.dtype is torch.float32
        ranges = _mapped_ranges(copy)
        for name, parameter in loaded.model.named_parameters():
            assert torch.equal(parameter, stored[name].float())
            assert any(start <= parameter.data_ptr() < end for start, end in ranges), name


def test_a_base_can_be_loaded_in_half_precision(folder):
    base = load_base(folder, dtype=torch.bfloat16)
    assert base.dtype is torch.bfloat16
    check_base(base)


def test_a_folder_that_lacks_weights_is_refused(tmp_path):
    STOCK["llama"]().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidRequest, match=r"lacks weights of the model: lm_head\.weight"):
        load_base(tmp_path)


def test_weights_of_another_shape_or_none_at_all_are_refused(tmp_path):
    STOCK["llama"]().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    with pytest.raises(InvalidRequest, match="cannot load the weights"):
        load_base(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InvalidRequest, match=r"cannot load the weights.*model\.safetensors"):
        load_base(tmp_path)


def test_a_folder_that_brings_its_own_code_is_refused(tmp_path):
    config = {
        "model_type": "mine",
        "auto_map": {
            "AutoConfig": "configuration_mine.MineConfig",
            "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedBase, match="expected a folder whose config"):
        load_base(tmp_path)


def test_a_refused_base_is_refused_before_its_weights_are_read(tmp_path):
    config = {"model_type": "mistral", "sliding_window": 64, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedBase, match="sliding window"):
        load_base(tmp_path)


def test_experts_carry_no_adapter_and_attention_does():
    base = models.random_qwen3_moe()
    assert base.supported_targets == ("attention", "head")
    (problem,) = base.target_problems(("attention", "mlp"))
    assert problem.startswith("target mlp: base random-qwen3-moe: gate_proj lies in experts")
    assert problem.endswith("expected targets among attention, head")
    assert base.target_problems(("attention", "head")) == []
    assert {shape.kind for shape in base.bank.modules}.isdisjoint({"gate_proj", "down_proj"})


def test_a_policy_on_experts_is_refused_by_the_trainer():
    trainer = LoraTrainer(models.random_qwen3_moe())
    with pytest.raises(InvalidRequest, match=r"target mlp: .* lies in experts"):
        trainer.create("p", AdapterSpec(targets=("attention", "mlp")))
    trainer.create("p", AdapterSpec(targets=("attention",)))


def test_exact_results_are_refused_on_a_base_with_experts():
    base = models.random_qwen3_moe()
    with pytest.raises(UnsupportedFeature, match="expected a base without experts"):
        LoraTrainer(base, is_exact=True)
    with pytest.raises(UnsupportedFeature, match="jobs that are not seeded"):
        BatchGenerator(base, kv_capacity_tokens=1024, max_context=128, is_exact=True)


def test_adapters_on_the_attention_of_a_base_with_experts_train():
    base = models.random_qwen3_moe()
    slot = models.random_adapter(base, 4, kinds=frozenset({"q_proj", "v_proj", "lm_head"}))
    plain = base_logits(base)
    grad_P = torch.zeros_like(base.bank.read(slot))
    segments = [Segment(slot, len(TOKENS))]
    batch = LoraBatch.build(base.bank, segments, grad_rows=[grad_P])
    with base.bank.active(batch):
        positions = torch.arange(len(TOKENS))
        hidden = base.hidden(TOKENS, positions, PackedSequences([len(TOKENS)]), batch)
        logits = base.head(hidden)
        logits.log_softmax(-1)[:, 5].sum().backward()
    assert (logits - plain).abs().max() > 0.1
    assert grad_P.isfinite().all()
    assert grad_P.abs().max() > 0


def _mapped_ranges(folder) -> list[tuple[int, int]]:
    """Return where files of a folder lie in this process's address space."""
    with open(f"/proc/{os.getpid()}/maps") as maps:
        spans = [line.split()[0] for line in maps if str(folder) in line]
    return [tuple(int(end, 16) for end in span.split("-")) for span in spans]  # type: ignore
