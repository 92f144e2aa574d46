"""Where the base models that a name may stand for lie on this machine."""

from collections.abc import Callable
from importlib import resources
from pathlib import Path

from marlaas.errors import InvalidRequest

PACKAGED_BASES = ("tiny",)
"""Bases that come with the package."""

CONVERTED_BASES = ("smollm2-135m",)
"""Bases that `python -m marlaas.model.convert NAME` puts into the cache."""


def cache_folder(name: str) -> Path:
    """Return where the converted base `name` lies; a `.gguf` file is cached under its stem."""
    stem = Path(name).stem if name.endswith(".gguf") else name
    return Path.home() / ".cache" / "marlaas" / "bases" / stem


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
