"""Adds an adapter to a base's weights for good: the result needs no adapter, and none of this code.

    python -m marlaas.engine.merge BASE_FOLDER ADAPTER_FOLDER OUT_FOLDER DTYPE DURABILITY

    W' = W + alpha / rank * B A      for every linear that the adapter targets

`workers/local.py` starts it as a process of its own: one thread, lowest priority, so that a merge
of a large base takes seconds from nobody. Weights are written in the type that the base is served
in, since rounding them to fewer bits could swallow what the adapter adds.

- A head that shares its weights with the embedding is given weights of its own if the adapter
  targets it; the embedding stays as it is.
- Everything else in the base's folder (tokenizer, chat template, stop tokens, licence) is copied.
- The folder appears whole or not at all.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from marlaas.config import Durability
from marlaas.engine.adapter_io import adapter_tensors, load_adapter, read_spec
from marlaas.engine.durable import beside, put_folder
from marlaas.errors import InvalidRequest, MarlaasError
from marlaas.model.bank import RowLayout
from marlaas.model.base import read_config, read_weights
from marlaas.model.convert import folder_in_dtype, without_progress_bars
from marlaas.model.lora import target_shapes
from marlaas.types import RANK_BUCKETS

CONFIG_NAME = "config.json"

REFUSED = 3
"""Exit status of a merge that was refused."""

LOWEST_PRIORITY = 19
"""Engine workers and the server come first on every core."""

_WEIGHT_SUFFIXES = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
)
"""Files of a base that are weights in some form; the merged ones replace them."""


def merge(
    base_folder: Path | str,
    adapter_folder: Path | str,
    out_folder: Path | str,
    *,
    dtype: torch.dtype = torch.float32,
    is_synced: bool = False,
) -> None:
    """Write the merged base to `out_folder`, which must not exist yet.

    Raises:
        NotFound: no PEFT folder at `adapter_folder`.
        InvalidRequest: the adapter does not fit the base, or `out_folder` exists.
    """
    base_folder, out_folder = Path(base_folder), Path(out_folder)
    if out_folder.exists():
        raise InvalidRequest(f"{out_folder} exists; expected a folder that is still to be made")
    spec = read_spec(adapter_folder)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(read_config(base_folder))
    bucket_rank = min(rank for rank in RANK_BUCKETS if rank >= spec.rank)
    layout = RowLayout.build(target_shapes(skeleton), bucket_rank)
    # The adapter is read first: it may be pruned as soon as its job has made newer versions.
    row_P = load_adapter(adapter_folder, layout).row
    model = read_weights(folder_in_dtype(base_folder, dtype), dtype)
    for module, a_RD, b_OR in adapter_tensors(row_P, spec, layout):
        _add(model, module.name, (spec.alpha / spec.rank) * (b_OR @ a_RD))
    _write(model, base_folder, out_folder, is_synced=is_synced)


@torch.no_grad()
def _add(model: PreTrainedModel, name: str, delta_OD: torch.Tensor) -> None:
    """Add to one linear's weights, which are the file's own mapped pages and stay as they are."""
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear), f"{name} is no linear"
    weight_OD = linear.weight
    merged_OD = (weight_OD.float() + delta_OD).to(weight_OD.dtype)
    if weight_OD is model.get_input_embeddings().weight:
        model.config.tie_word_embeddings = False
    linear.weight = nn.Parameter(merged_OD, requires_grad=False)


def _write(model: PreTrainedModel, base_folder: Path, out_folder: Path, *, is_synced: bool) -> None:
    out_folder.parent.mkdir(parents=True, exist_ok=True)
    new = beside(out_folder, "new")
    shutil.rmtree(new, ignore_errors=True)
    try:
        with without_progress_bars():
            model.save_pretrained(new)
        for file in sorted(base_folder.iterdir()):
            if _is_kept(file):
                shutil.copy(file, new / file.name)
        _write_config(model, base_folder, new)
        put_folder(new, out_folder, is_synced=is_synced)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def _is_kept(file: Path) -> bool:
    """Return whether a file of the base belongs to the merged model, too."""
    is_weights = bool(_WEIGHT_SUFFIXES & set(file.suffixes))
    is_own = file.name.startswith(".") or file.name in (CONFIG_NAME, "README.md")
    return file.is_file() and not is_weights and not is_own


def _write_config(model: PreTrainedModel, base_folder: Path, new: Path) -> None:
    """Write the base's own config, which may spell settings for other readers too, with what the
    merge has changed."""
    config = json.loads((base_folder / CONFIG_NAME).read_text(encoding="utf-8"))
    dtype = str(model.dtype).removeprefix("torch.")
    config["tie_word_embeddings"] = model.config.tie_word_embeddings
    for name in ("dtype", "torch_dtype"):
        if name in config:
            config[name] = dtype
    config.setdefault("dtype", dtype)
    (new / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Merge as the command line says; a refusal is two lines or more of output: its class in
    `marlaas.errors`, and the message."""
    os.nice(LOWEST_PRIORITY)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # cleans up on its way out
    torch.set_num_threads(1)
    base_folder, adapter_folder, out_folder, dtype, durability = sys.argv[1:]
    try:
        merge(
            base_folder,
            adapter_folder,
            out_folder,
            dtype=getattr(torch, dtype),
            is_synced=Durability(durability) is Durability.POWER,
        )
    except MarlaasError as error:
        sys.stdout.write(f"{type(error).__name__}\n{error}")
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()
