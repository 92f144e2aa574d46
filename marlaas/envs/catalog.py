"""Which task families there are, and how one is made from a job's `env` mapping."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import cast

from marlaas.envs.base import Family, Log, ReadUpload
from marlaas.envs.settings import did_you_mean, parse_settings
from marlaas.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a family's two classes live; they are imported when a job first asks for them."""

    settings: str
    family: str
    takes_uploads: bool = False
    """The family reads files of the tenant and has something to say to their log."""

    def load(self) -> tuple[type, Callable[..., Family]]:
        """Return the settings class and the family class."""
        return _load(self.settings), cast(Callable[..., Family], _load(self.family))


FAMILIES: Mapping[str, Entry] = {
    "math": Entry("marlaas.envs.math:MathSettings", "marlaas.envs.math:MathFamily"),
    "search": Entry("marlaas.envs.search:SearchSettings", "marlaas.envs.search:SearchFamily"),
    "code": Entry("marlaas.envs.code_problems:CodeSettings", "marlaas.envs.code:CodeFamily"),
    "custom": Entry(
        "marlaas.envs.custom:CustomSettings",
        "marlaas.envs.custom:CustomFamily",
        takes_uploads=True,
    ),
}


def make_family(
    env: Mapping[str, object],
    *,
    read_upload: ReadUpload | None = None,
    log: Log | None = None,
) -> Family:
    """Make a family from `{"family": NAME, ...its settings}`.

    Without `read_upload` a family that needs it can be made, and so checked, but not started.

    Raises:
        InvalidRequest: names every fault of the mapping.
    """
    name = env.get("family")
    if name is None:
        raise InvalidRequest(f"env needs a family, one of {', '.join(FAMILIES)}")
    if not isinstance(name, str) or name not in FAMILIES:
        raise InvalidRequest(f"unknown family {name!r}; {did_you_mean(str(name), list(FAMILIES))}")
    settings_class, family_class = FAMILIES[name].load()
    settings = parse_settings(
        settings_class, {key: value for key, value in env.items() if key != "family"}
    )
    if FAMILIES[name].takes_uploads:
        return family_class(settings, read_upload=read_upload, log=log)
    return family_class(settings)


def _load(path: str) -> type:
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)
