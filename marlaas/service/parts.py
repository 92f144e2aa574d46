"""What the routes work with, made once by the composition root and handed to every request."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request

from marlaas.config import ServeSettings
from marlaas.loop.controller import Controller
from marlaas.loop.serving import Serving
from marlaas.service.limits import Places, Rates, Turns
from marlaas.service.streams import Hub
from marlaas.service.telemetry import Telemetry
from marlaas.service.trials import Trials
from marlaas.store.async_store import AsyncStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The service's parts. Nothing here is made by a request, and no request replaces any."""

    settings: ServeSettings
    store: AsyncStore
    controller: Controller
    serving: Serving
    telemetry: Telemetry
    max_context: int
    """Tokens that the base can attend to."""
    hub: Hub
    scratch: Path
    """Where archives lie while they are sent; emptied at start."""
    rates: Rates = field(default_factory=Rates)
    uploads: Turns = field(default_factory=Turns)
    """One upload of a tenant at a time: so much is held in memory, and no more."""
    readings: Turns = field(default_factory=Turns)
    """One prompt of a tenant is made tokens of at a time."""
    trials: Trials = field(default_factory=Trials)
    adapters: Places = field(
        default_factory=lambda: Places("downloads of adapters", most=64, most_of_one=8)
    )
    merged: Places = field(
        default_factory=lambda: Places("downloads of merged models", most=4, most_of_one=1)
    )
    """Each holds a copy of the base on the disk until it was sent."""
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the service was told to end: it takes no new work."""


def parts_of(request: Request) -> Parts:
    """Return the parts of the app that a request came to."""
    return request.app.state.parts


WithParts = Annotated[Parts, Depends(parts_of)]
