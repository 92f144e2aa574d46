"""The Python SDK: a thin, typed, synchronous client of a MARLaaS service.

    credentials ──► Client ──► jobs ──► Job ──► Adapter          what one calls
                      │         │        │         │
                      └─────────┴── Transport ─────┘             what goes over the wire, and again

- Nothing is kept here: the service has the truth, and a record is how it stood when it was asked.
- Nothing heavy is imported: no torch, no web framework, no database.
"""

from marlaas.client.client import Client
from marlaas.client.credentials import (
    Credentials,
    credentials_file,
    find_credentials,
    save_credentials,
)
from marlaas.client.jobs import Adapter, Job, Sweep
from marlaas.client.transport import Patience

__all__ = [
    "Adapter",
    "Client",
    "Credentials",
    "Job",
    "Patience",
    "Sweep",
    "credentials_file",
    "find_credentials",
    "save_credentials",
]
