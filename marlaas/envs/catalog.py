"""Which task families there are, and how one is made from a job's `env` mapping."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import cast

from marlaas.envs.base import Family
from marlaas.envs.settings import did_you_mean, parse_settings
from marlaas.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a family's two classes live; they are imported when a job first asks for them."""

    settings: str
    family: str

    def load(self) -> tuple[type, Callable[..., Family]]:
        """Return the settings class and the family class."""
        return _load(self.settings), cast(Callable[..., Family], _load(self.family))


FAMILIES: Mapping[str, Entry] = {
    "math": Entry("marlaas.envs.math:MathSettings", "marlaas.envs.math:MathFamily"),
    "search": Entry("marlaas.envs.search:SearchSettings", "marlaas.envs.search:SearchFamily"),
    "code": Entry("marlaas.envs.code_problems:CodeSettings", "marlaas.envs.code:CodeFamily"),
}


def make_family(env: Mapping[str, object]) -> Family:
    """Make a family from `{"family": NAME, ...its settings}`.

    Raises:
        InvalidRequest: names every fault of the mapping.
    """
    name = env.get("family")
    if name is None:
        raise InvalidRequest(f"env needs a family, one of {', '.join(FAMILIES)}")
    if not isinstance(name, str) or name not in FAMILIES:
        raise InvalidRequest(f"unknown family {name!r}; {did_you_mean(str(name), list(FAMILIES))}")
    settings_class, family_class = FAMILIES[name].load()
    settings = {key: value for key, value in env.items() if key != "family"}
    return family_class(parse_settings(settings_class, settings))


def _load(path: str) -> type:
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)
