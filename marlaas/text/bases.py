"""Where the base models that a name may stand for lie on this machine."""

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from safetensors import safe_open

from marlaas.errors import InvalidRequest

PACKAGED_BASES = ("tiny",)
"""Bases that come with the package."""

CONVERTED_BASES = ("smollm2-135m",)
"""Bases that `python -m marlaas.model.convert NAME` puts into the cache."""


def cache_root() -> Path:
    """Return the folder for what can be made again: `MARLAAS_CACHE`, or `~/.cache/marlaas`."""
    return Path(os.environ.get("MARLAAS_CACHE") or Path.home() / ".cache" / "marlaas")


def cache_folder(name: str) -> Path:
    """Return where the converted base `name` lies.

    Raises:
        InvalidRequest: `name` is a `.gguf` file that does not exist.
    """
    return cache_root() / "bases" / (_key_of_file(name) if name.endswith(".gguf") else name)


def _key_of_file(name: str) -> str:
    """Return a name that another file, or the same one after a change, does not get."""
    file = Path(name).expanduser().resolve()
    if not file.is_file():
        raise InvalidRequest(f"base {name!r}: no such file")
    stat = file.stat()
    stamp = f"{file} {stat.st_size} {stat.st_mtime_ns}".encode()
    return f"{file.stem}-{hashlib.blake2b(stamp, digest_size=6).hexdigest()}"


def packaged_folder(name: str) -> Path:
    """Return the folder of a base that comes with the package."""
    return Path(str(resources.files("marlaas"))) / "assets" / name


def resolve_base(name_or_path: str | Path, cache: Callable[[str], Path] = cache_folder) -> Path:
    """Return the model folder that a name or path stands for.

    Raises:
        InvalidRequest: no such base, or one that must be converted first.
    """
    name = str(name_or_path)
    if name in PACKAGED_BASES:
        return packaged_folder(name)
    if name in CONVERTED_BASES or name.endswith(".gguf"):
        folder = cache(name)
        if (folder / "config.json").is_file():
            return folder
        raise InvalidRequest(
            f"base {name!r} is not converted yet; run: python -m marlaas.model.convert {name}"
        )
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if folder.is_dir():
        raise InvalidRequest(f"{name} has no config.json: it is not a Hugging Face model folder")
    names = ", ".join([*PACKAGED_BASES, *CONVERTED_BASES])
    raise InvalidRequest(
        f"unknown base {name!r}; use one of {names}, a .gguf file, or a model folder"
    )


def ensure_base(name_or_path: str | Path) -> Path:
    """Return the folder of a base, converting it first where that is needed.

    Converting needs torch and therefore happens in a process of its own; it takes about a minute.

    Raises:
        InvalidRequest: no such base, or it cannot be converted.
    """
    name = str(name_or_path)
    is_converted = name in CONVERTED_BASES or name.endswith(".gguf")
    if is_converted and not (cache_folder(name) / "config.json").is_file():
        command = [sys.executable, "-m", "marlaas.model.convert", name]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise InvalidRequest(done.stderr.strip().rpartition("\n")[2])
    return resolve_base(name)


def num_weights(folder: Path) -> int:
    """Return how many numbers the weight files of a base hold, by their headers or their size."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    if total:
        return total
    return sum(path.stat().st_size for path in folder.glob("*.bin")) // 2
