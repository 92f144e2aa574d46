"""What the routes work with, made once by the composition root and handed to every request."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request

from marlaas.config import ServeSettings
from marlaas.loop.controller import Controller
from marlaas.loop.runs import Runs
from marlaas.loop.samplers import Samplers
from marlaas.loop.serving import Serving
from marlaas.service.identities import Identities
from marlaas.service.limits import Places, Rates, Room, Turns
from marlaas.service.streams import Hub
from marlaas.service.telemetry import Telemetry
from marlaas.service.trials import Trials
from marlaas.store.async_store import AsyncStore

MAX_PASS_BYTES_OF_ONE = 128 << 20
"""Of one tenant's requests to train, while they are read: decompressed."""

MAX_UNFOLDED_BYTES_OF_ONE = 512 << 20
"""What the sparse tensors of one tenant's requests to train come to, until these are accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedBase:
    """What clients that drive runs are told of the base."""

    names: tuple[str, ...]
    """It goes by any of these; the first is its own."""
    architecture: str
    tokenizer_id: str
    """Where such a client finds the tokenizer: a folder, or a name on a hub."""
    vocab_size: int
    """Token ids are from 0 to less than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The service's parts. Nothing here is made by a request, and no request replaces any."""

    settings: ServeSettings
    store: AsyncStore
    controller: Controller
    serving: Serving
    runs: Runs
    samplers: Samplers
    base: ServedBase
    telemetry: Telemetry
    max_context: int
    """Tokens that the base can attend to."""
    hub: Hub
    scratch: Path
    """Where archives lie while they are sent; emptied at start."""
    download_key: bytes
    """Signs addresses from which a file is fetched without a key."""
    identities: Identities = field(default_factory=Identities)
    rates: Rates = field(default_factory=Rates)
    passes: Room = field(default_factory=lambda: Room(MAX_PASS_BYTES_OF_ONE))
    unfolded: Room = field(default_factory=lambda: Room(MAX_UNFOLDED_BYTES_OF_ONE))
    """Taken by who has room in `passes`, never the other way round."""
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
