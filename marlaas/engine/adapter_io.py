"""Adapters on disk: folders that PEFT reads, and back.

    adapter_config.json          rank, alpha, target modules
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight [r, in]
                                 base_model.model.<module>.lora_B.weight [out, r]

A row of the bank is padded to its bucket's rank; a folder and a content hash hold the real values
only, so both are the same whatever bucket an adapter lives in. What a folder asks for and a row
cannot represent is refused with the reason: an adapter is loaded exactly or not at all.
"""

import hashlib
import json
import shutil
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from marlaas.engine.durable import beside, put_folder
from marlaas.errors import InvalidRequest, NotFound, UnsupportedFeature
from marlaas.model.bank import ModuleShape, RowLayout
from marlaas.types import RANK_BUCKETS, TARGET_GROUPS, AdapterSpec

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
KEY_PREFIX = "base_model.model."

_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA scales the columns of the merged weight",
    "lora_bias": "LoRA matrices with a bias",
    "fan_in_fan_out": "transposed base weights",
    "modules_to_save": "fully trained modules beside the adapter",
    "rank_pattern": "several ranks in one adapter",
    "alpha_pattern": "several scales in one adapter",
    "target_parameters": "adapters on bare parameters",
    "trainable_token_indices": "trained rows of the embedding",
    "layer_replication": "repeated layers",
    "alora_invocation_tokens": "an adapter that is off until a token is met",
    "use_qalora": "QALoRA pools the input",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "routing among several adapters",
    "monteclora_config": "sampled adapters",
    "velora_config": "compressed activations",
    "corda_config": "CorDA changes the base weights",
    "loftq_config": "LoftQ changes the base weights",
    "megatron_config": "Megatron's parallel layers",
    "lora_ga_config": "LoRA-GA changes the base weights",
    "kasa_config": "KaSA changes the base weights",
}
"""Settings of PEFT that change what an adapter computes, and what they mean."""

_HARMLESS = frozenset(
    {
        *("peft_type", "task_type", "peft_version", "auto_mapping", "inference_mode", "revision"),
        *("base_model_name_or_path", "r", "lora_alpha", "lora_dropout", "bias", "use_rslora"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("init_lora_weights", "eva_config", "qalora_group_size", "megatron_core"),
        *("ensure_weight_tying", "runtime_config"),
    }
)
"""Settings that are read here, or that say nothing beyond the tensors in the folder."""

_HARMLESS_INITS = (True, False, "gaussian", "eva", "orthogonal")
"""Ways to start an adapter that leave the base weights as they are."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that came from a folder."""

    row: Tensor
    """float32 [P], ready for the bank."""
    spec: AdapterSpec
    """Its targets are the smallest set of groups that covers the folder's modules."""
    adapter_hash: str


def target_kinds(spec: AdapterSpec) -> frozenset[str]:
    """Return the names of the linears that an adapter targets, e.g. `q_proj`."""
    return frozenset(kind for target in spec.targets for kind in TARGET_GROUPS[target])


def adapter_tensors(
    row_P: Tensor, spec: AdapterSpec, layout: RowLayout
) -> Iterator[tuple[ModuleShape, Tensor, Tensor]]:
    """Yield each targeted module with its real A [r, in] and B [out, r], in model order."""
    kinds = target_kinds(spec)
    for module in layout.modules:
        if module.kind in kinds:
            a_KRD, b_KOR = layout.views(row_P[None], module)
            yield module, a_KRD[0, : spec.rank], b_KOR[0, :, : spec.rank]


def hash_adapter(row_P: Tensor, spec: AdapterSpec, layout: RowLayout) -> str:
    """Return the content hash: of scale, module names and real values in fp32; never of padding."""
    digest = hashlib.blake2b(struct.pack("<d", spec.alpha / spec.rank), digest_size=16)
    row_P = row_P.detach().to("cpu", torch.float32)
    for module, a_RD, b_OR in adapter_tensors(row_P, spec, layout):
        digest.update(module.name.encode())
        digest.update(a_RD.contiguous().numpy().data)
        digest.update(b_OR.contiguous().numpy().data)
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------
# Writing


def save_adapter(
    folder: Path | str,
    row_P: Tensor,
    spec: AdapterSpec,
    layout: RowLayout,
    *,
    base_name: str,
    is_synced: bool = False,
) -> str:
    """Write a PEFT folder and return the adapter's content hash.

    The folder appears complete or not at all; with `is_synced` it survives a loss of power from the
    return of this call on. One that exists is replaced: versions are immutable, so it can only be
    the same one, written again after a crash.
    """
    folder = Path(folder)
    row_P = row_P.detach().to("cpu", torch.float32)
    tensors = {}
    for module, a_RD, b_OR in adapter_tensors(row_P, spec, layout):
        tensors[f"{KEY_PREFIX}{module.name}.lora_A.weight"] = a_RD.contiguous()
        tensors[f"{KEY_PREFIX}{module.name}.lora_B.weight"] = b_OR.contiguous()
    new = beside(folder, "new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    save_file(tensors, new / WEIGHTS_NAME, metadata={"format": "pt"})
    config = json.dumps(_peft_config(spec, base_name), indent=2)
    (new / CONFIG_NAME).write_text(config + "\n", encoding="utf-8")
    put_folder(new, folder, is_synced=is_synced)
    return hash_adapter(row_P, spec, layout)


def _peft_config(spec: AdapterSpec, base_name: str) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(target_kinds(spec)),
        "init_lora_weights": True,
        "inference_mode": True,
    }


# ---------------------------------------------------------------------------------------------
# Reading


def read_spec(folder: Path | str) -> AdapterSpec:
    """Return the shape of the adapter in a PEFT folder, which says what bucket it needs.

    Raises:
        NotFound: no PEFT folder there.
        UnsupportedFeature: it asks for something that our adapters cannot represent; all of it.
    """
    config = _read_config(Path(folder))
    problems = _config_problems(config)
    if problems:
        raise UnsupportedFeature(*(f"adapter {folder}: {problem}" for problem in problems))
    rank, alpha = config["r"], float(config["lora_alpha"])
    if config.get("use_rslora"):
        # rsLoRA (arXiv 2312.03732) scales by alpha / sqrt(r); ours by alpha / r.
        alpha *= rank**0.5
    return AdapterSpec(rank=rank, alpha=alpha, targets=_groups_of(_kinds_in(config)))


def load_adapter(folder: Path | str, layout: RowLayout) -> LoadedAdapter:
    """Read a PEFT folder into a row of `layout`, the one of the adapter's rank bucket.

    A linear that the spec's groups cover and the folder leaves alone is zero: it adds nothing.

    Raises:
        NotFound: no PEFT folder there.
        UnsupportedFeature: it holds something that a row cannot represent exactly.
        InvalidRequest: its tensors do not fit the base model, or the layout is another bucket's.
    """
    folder = Path(folder)
    spec = read_spec(folder)
    bucket_rank = min(rank for rank in RANK_BUCKETS if rank >= spec.rank)
    if bucket_rank != layout.rank:
        raise InvalidRequest(
            f"adapter {folder} has rank {spec.rank}; expected one of bucket {layout.rank}"
        )
    tensors = _read_tensors(folder)
    row_P = torch.zeros(layout.length)
    problems = []
    for module, a_RD, b_OR in adapter_tensors(row_P, spec, layout):
        for part, place in (("A", a_RD), ("B", b_OR)):
            tensor = tensors.pop(f"{KEY_PREFIX}{module.name}.lora_{part}.weight", None)
            if tensor is None:
                continue
            if tensor.shape == place.shape:
                place.copy_(tensor)
            else:
                problems.append(
                    f"lora_{part} of {module.name} has shape {tuple(tensor.shape)}; "
                    f"expected {tuple(place.shape)}"
                )
    problems += [f"tensor {key} belongs to no linear of this base model" for key in tensors]
    if problems:
        raise InvalidRequest(*(f"adapter {folder}: {problem}" for problem in problems))
    return LoadedAdapter(row_P, spec, hash_adapter(row_P, spec, layout))


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFound(f"{folder} is no PEFT folder: it has no {CONFIG_NAME}") from None
    except ValueError as error:
        raise InvalidRequest(f"{folder / CONFIG_NAME} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise InvalidRequest(f"{folder / CONFIG_NAME}: expected a JSON object")
    return config


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS_NAME
    try:
        return load_file(path)
    except FileNotFoundError:
        raise NotFound(f"{folder} has no {WEIGHTS_NAME}") from None
    except SafetensorError as error:
        raise InvalidRequest(f"{path} cannot be read: {error}") from None


def _config_problems(config: Mapping[str, Any]) -> list[str]:
    problems = [
        f"{name} = {config[name]!r}: {meaning}; expected it off"
        for name, meaning in _REFUSED.items()
        if config.get(name)
    ]
    problems += [
        f"setting {name} = {value!r} is unknown here, so its meaning cannot be kept"
        for name, value in config.items()
        if value and name not in _HARMLESS and name not in _REFUSED
    ]
    if config.get("peft_type") != "LORA":
        problems.append(f"peft_type = {config.get('peft_type')!r}; expected 'LORA'")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        problems.append(f"task_type = {config['task_type']!r}; expected 'CAUSAL_LM'")
    if config.get("bias", "none") != "none":
        problems.append(f"bias = {config['bias']!r}: trained biases; expected 'none'")
    if config.get("init_lora_weights", True) not in _HARMLESS_INITS:
        problems.append(
            f"init_lora_weights = {config['init_lora_weights']!r} may change the base weights; "
            "expected an adapter converted to plain LoRA"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= RANK_BUCKETS[-1]:
        problems.append(f"r = {rank!r}; expected a whole number in 1..{RANK_BUCKETS[-1]}")
    if type(alpha) not in (int, float):
        problems.append(f"lora_alpha = {alpha!r}; expected a number")
    return problems + _target_problems(config)


def _target_problems(config: Mapping[str, Any]) -> list[str]:
    targets = config.get("target_modules")
    if isinstance(targets, str) and targets != "all-linear":
        return [f"target_modules = {targets!r}: a pattern; expected a list of module names"]
    known = sorted(kind for kinds in TARGET_GROUPS.values() for kind in kinds)
    wrong = sorted(_kinds_in(config) - set(known))
    if wrong or not targets:
        return [f"target_modules {wrong}: expected some of {', '.join(known)}"]
    return []


def _kinds_in(config: Mapping[str, Any]) -> set[str]:
    targets = config.get("target_modules") or ()
    if targets == "all-linear":
        return set(target_kinds(AdapterSpec(targets=("attention", "mlp"))))
    return {name.rsplit(".", 1)[-1] for name in targets}


def _groups_of(kinds: set[str]) -> tuple[str, ...]:
    return tuple(name for name, members in TARGET_GROUPS.items() if kinds & set(members))
