"""Whose keys are good, remembered for a moment: a client that polls sends hundreds a second."""

from dataclasses import dataclass

from marlaas import runtime
from marlaas.types import ApiKey, Tenant

KEPT_S = 1.0
"""How long a key that was revoked by another process may still open something."""

MAX_KEPT = 4096
"""Keys that are remembered; past that all are forgotten."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A key that is good, and its owner; `tenant` is None for an operator's."""

    key: ApiKey
    tenant: Tenant | None

    @property
    def actor(self) -> str:
        """Who it was, for the audit log."""
        return f"{self.key.tenant_id}/{self.key.key_id}"


class Identities:
    """Identities by digest of their key: the keys themselves are kept nowhere.

    generation = identities.generation
    identity = ...                                  # read from the store
    identities.put(digest, identity, generation)    # not, if `forget` was called since
    """

    def __init__(self) -> None:
        self.generation = 0
        self._kept: dict[bytes, tuple[Identity, float]] = {}

    def get(self, digest: bytes) -> Identity | None:
        found = self._kept.get(digest)
        if found is None or found[1] < runtime.now_s():
            return None
        return found[0]

    def put(self, digest: bytes, identity: Identity, generation: int) -> None:
        if generation != self.generation:
            return
        if len(self._kept) >= MAX_KEPT:
            self._kept.clear()
        self._kept[digest] = identity, runtime.now_s() + KEPT_S

    def forget(self) -> None:
        """Keys or tenants have changed."""
        self.generation += 1
        self._kept.clear()
