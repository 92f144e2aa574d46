"""Adapter folders: PEFT reads ours with the same logits, we read PEFT's, and refuse the rest."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import marlaas
from marlaas.engine import adapter_io
from marlaas.engine.adapter_io import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    hash_adapter,
    load_adapter,
    read_spec,
    save_adapter,
    target_kinds,
)
from marlaas.engine.trainer import LoraTrainer
from marlaas.errors import InvalidRequest, NotFound, UnsupportedFeature
from marlaas.model.attention import PackedSequences
from marlaas.model.bank import Slot
from marlaas.model.base import BaseModel, load_base
from marlaas.model.lora import LoraBatch, Segment
from marlaas.types import AdamParams, AdapterSpec, Datum, Objective
from tests.engine.data import VOCAB, host
from tests.models import random_llama, random_qwen3, stock_llama, stock_qwen3

torch.set_num_threads(1)

EVERYTHING = ("attention", "mlp", "head")
SPEC = AdapterSpec(rank=5, alpha=7.0, targets=EVERYTHING, seed=1)
"""Its rank is not its bucket's, its alpha not its rank."""

TINY = Path(marlaas.__file__).parent / "assets/tiny"

TOKENS = np.random.default_rng(0).integers(0, VOCAB, 50)


def our_logits(base: BaseModel, slot: Slot) -> Tensor:
    batch = LoraBatch.build(base.bank, [Segment(slot, len(TOKENS))])
    with torch.no_grad(), base.bank.active(batch):
        hidden_ND = base.hidden(
            torch.from_numpy(TOKENS),
            torch.arange(len(TOKENS)),
            PackedSequences([len(TOKENS)]),
            batch,
        )
        return base.head(hidden_ND)


def peft_model(model: PreTrainedModel, folder: Path) -> peft.PeftModel:
    with warnings.catch_warnings():
        # PEFT warns of tied heads: merging would change the embedding, too.
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(model, folder)


def peft_logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)[None], use_cache=False).logits[0]


@pytest.mark.parametrize("make", [(random_llama, stock_llama), (random_qwen3, stock_qwen3)])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("targets", [EVERYTHING, ("attention",), ("mlp", "head")])
def test_a_saved_adapter_gives_the_same_logits_in_peft(
    make: tuple[Callable, Callable], is_tied: bool, targets: tuple[str, ...], tmp_path: Path
) -> None:
    make_base, make_stock = make
    base = make_base(tie_word_embeddings=is_tied)
    trainer = LoraTrainer(base)
    spec = AdapterSpec(rank=5, alpha=7.0, targets=targets)
    slot = host(trainer, "p", spec)
    layout = trainer.state("p").layout
    save_adapter(tmp_path / "p", trainer.weights("p"), spec, layout, base_name="random")
    stock = make_stock(tie_word_embeddings=is_tied)
    base_logits = peft_logits(stock)
    logits = peft_logits(peft_model(stock, tmp_path / "p"))
    assert (logits - base_logits).abs().max() > 0.1, "the adapter does something"
    torch.testing.assert_close(our_logits(base, slot), logits, rtol=0, atol=1e-4)


def test_a_wide_adapter_on_everything_of_the_shipped_base_trains_and_loads_in_peft(
    tmp_path: Path,
) -> None:
    base = load_base(TINY)
    trainer = LoraTrainer(base)
    spec = AdapterSpec(rank=32, alpha=32.0, targets=EVERYTHING, seed=3)
    layout = trainer.create("p", spec).layout
    slot = base.bank.allocate(rank=32, scale=1.0, kinds=target_kinds(spec))
    base.bank.write(slot, trainer.weights("p"))
    weights = np.ones(len(TOKENS), dtype=np.float32)
    weights[0] = 0.0
    datum = Datum(
        tokens=TOKENS.astype(np.int32),
        weights=weights,
        advantages=0 * weights,
        sampling_logprobs=0 * weights,
    )
    losses = []
    for _ in range(3):
        trainer.submit_forward_backward("p", slot, [datum], Objective(name="cross_entropy"), 0)
        ((_, (output,)),) = trainer.step()[0]
        losses.append(output.loss)
        trainer.optim_step("p", AdamParams(lr=1e-3, eps=1e-12))
        base.bank.write(slot, trainer.weights("p"))
    assert losses[2] < losses[1] < losses[0]
    save_adapter(tmp_path / "p", trainer.weights("p"), spec, layout, base_name="tiny")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    logits = peft_logits(peft_model(stock, tmp_path / "p"))
    torch.testing.assert_close(our_logits(base, slot), logits, rtol=0, atol=1e-3)


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("target_modules", [["q_proj", "v_proj", "down_proj"], "all-linear"])
def test_an_adapter_made_by_peft_gives_the_same_logits_here(
    use_rslora: bool, target_modules: list[str] | str, tmp_path: Path
) -> None:
    config = peft.LoraConfig(
        r=5,
        lora_alpha=7,
        target_modules=target_modules,
        use_rslora=use_rslora,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(stock_llama(), config)
    model.save_pretrained(tmp_path)
    logits = peft_logits(model)

    base = random_llama()
    spec = read_spec(tmp_path)
    assert spec.targets == ("attention", "mlp") and spec.rank == 5
    loaded = load_adapter(tmp_path, base.bank.bucket(spec.rank).layout)
    slot = base.bank.allocate(
        rank=spec.rank, scale=spec.alpha / spec.rank, kinds=target_kinds(spec)
    )
    base.bank.write(slot, loaded.row)
    torch.testing.assert_close(our_logits(base, slot), logits, rtol=0, atol=1e-4)


def saved(folder: Path, spec: AdapterSpec = SPEC) -> tuple[LoraTrainer, str]:
    """Save a random adapter; return its trainer and the hash that saving returned."""
    trainer = LoraTrainer(random_llama())
    host(trainer, "p", spec)
    layout = trainer.state("p").layout
    name = save_adapter(folder, trainer.weights("p"), spec, layout, base_name="random")
    return trainer, name


def test_what_is_saved_loads_bit_for_bit_with_the_same_hash(tmp_path: Path) -> None:
    trainer, saved_hash = saved(tmp_path / "p")
    loaded = load_adapter(tmp_path / "p", trainer.state("p").layout)
    assert loaded.spec == AdapterSpec(rank=5, alpha=7.0, targets=EVERYTHING)
    assert torch.equal(loaded.row, trainer.weights("p"))
    assert loaded.adapter_hash == saved_hash == trainer.adapter_hash("p")


def test_the_hash_sees_values_and_scale_but_no_bucket() -> None:
    trainer = LoraTrainer(random_llama())
    host(trainer, "p", SPEC)
    state = trainer.state("p")
    wide = trainer.base.bank.bucket(32).layout
    row_P = torch.zeros(wide.length)
    for module in wide.modules:
        pairs = zip(
            wide.row_views(row_P, module),
            state.layout.row_views(state.weights_P, module),
            strict=True,
        )
        for place, matrix in pairs:
            place[: matrix.shape[0], : matrix.shape[1]] = matrix
    name = hash_adapter(state.weights_P, SPEC, state.layout)
    assert hash_adapter(row_P, SPEC, wide) == name
    other_scale = AdapterSpec(rank=5, alpha=8.0, targets=EVERYTHING)
    assert hash_adapter(row_P, other_scale, wide) != name
    row_P[0] += 1e-6
    assert hash_adapter(row_P, SPEC, wide) != name


def test_a_folder_is_replaced_whole_and_nothing_else_is_left_behind(tmp_path: Path) -> None:
    saved(tmp_path / "p")
    (tmp_path / "p" / "stray").write_text("")
    (tmp_path / ".p.new").mkdir()
    saved(tmp_path / "p", AdapterSpec(rank=2, targets=("mlp",)))
    assert [path.name for path in tmp_path.iterdir()] == ["p"]
    assert {path.name for path in (tmp_path / "p").iterdir()} == {CONFIG_NAME, WEIGHTS_NAME}
    assert read_spec(tmp_path / "p").targets == ("mlp",)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"use_dora": True}, "use_dora = True: DoRA"),
        ({"bias": "all"}, "bias = 'all': trained biases; expected 'none'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"r": 65}, r"r = 65; expected a whole number in 1\.\.64"),
        ({"r": "8"}, "r = '8'"),
        ({"lora_alpha": None}, "lora_alpha = None; expected a number"),
        ({"rank_pattern": {"q_proj": 4}}, "several ranks in one adapter"),
        ({"alpha_pattern": {"q_proj": 4}}, "several scales in one adapter"),
        ({"modules_to_save": ["embed_tokens"]}, "fully trained modules"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3'; expected 'LORA'"),
        ({"task_type": "SEQ_CLS"}, "task_type = 'SEQ_CLS'; expected 'CAUSAL_LM'"),
        ({"init_lora_weights": "pissa"}, "may change the base weights"),
        ({"target_modules": ".*q_proj"}, "a pattern; expected a list of module names"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, r"\['embed_tokens'\]: expected some of"),
        ({"target_modules": None}, "expected some of"),
        ({"new_trick": 3}, "setting new_trick = 3 is unknown here"),
    ],
)
def test_what_a_row_cannot_represent_is_refused_with_the_reason(
    change: dict, problem: str, tmp_path: Path
) -> None:
    trainer, _ = saved(tmp_path)
    path = tmp_path / CONFIG_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UnsupportedFeature, match=problem):
        load_adapter(tmp_path, trainer.state("p").layout)


def test_every_reason_is_named_at_once(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / CONFIG_NAME
    changes = {"use_dora": True, "bias": "all", "r": 0}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UnsupportedFeature) as refusal:
        read_spec(tmp_path)
    assert len(refusal.value.problems) == 3


def test_every_setting_of_todays_peft_is_known() -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM").to_dict()
    config = {name: sorted(v) if isinstance(v, set) else v for name, v in config.items()}
    folder_config = json.loads(json.dumps(config, default=str)) | {"peft_type": "LORA"}
    assert not adapter_io._config_problems(folder_config)
    assert set(config) <= adapter_io._HARMLESS | set(adapter_io._REFUSED)


def test_tensors_that_do_not_fit_the_base_are_refused(tmp_path: Path) -> None:
    trainer, _ = saved(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS_NAME)
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    tensors[key] = tensors[key][:, :-1].contiguous()
    tensors["base_model.model.model.layers.9.mlp.up_proj.lora_A.weight"] = torch.zeros(5, 32)
    save_file(tensors, tmp_path / WEIGHTS_NAME)
    with pytest.raises(InvalidRequest) as refusal:
        load_adapter(tmp_path, trainer.state("p").layout)
    text = str(refusal.value)
    assert "lora_A of model.layers.0.self_attn.q_proj has shape (5, 31); expected (5, 32)" in text
    assert "layers.9.mlp.up_proj.lora_A.weight belongs to no linear" in text


def test_an_adapter_of_another_bucket_is_refused(tmp_path: Path) -> None:
    trainer, _ = saved(tmp_path)
    with pytest.raises(InvalidRequest, match="has rank 5; expected one of bucket 16"):
        load_adapter(tmp_path, trainer.base.bank.bucket(16).layout)


def test_a_folder_that_is_no_adapter_is_refused(tmp_path: Path) -> None:
    layout = random_llama().bank.bucket(8).layout
    with pytest.raises(NotFound, match="is no PEFT folder"):
        load_adapter(tmp_path, layout)
    saved(tmp_path)
    (tmp_path / WEIGHTS_NAME).write_bytes(b"12345678 nonsense")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        load_adapter(tmp_path, layout)
    (tmp_path / WEIGHTS_NAME).unlink()
    with pytest.raises(NotFound, match="has no adapter_model"):
        load_adapter(tmp_path, layout)
    (tmp_path / CONFIG_NAME).write_text("{")
    with pytest.raises(InvalidRequest, match="is no JSON"):
        load_adapter(tmp_path, layout)
