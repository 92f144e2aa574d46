"""MARLaaS: many tenants RL-fine-tune one shared frozen base model at the same time."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from marlaas.client import Client as Client

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import the client only where it is asked for: an engine worker has no use for it."""
    if name == "Client":
        from marlaas.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
