"""What a tenant's own code prints, on its way to that tenant's log: bounded, and nowhere else.

    log = PrintLog(callback)
    log.add("Traceback (most recent call last): ...")     # callback(text), unless it is too much

Lines come in bursts from many episodes at once; a file that prints in every call must cost neither
the store nor a reader more than `MINUTE_CHARACTERS` a minute.
"""

from collections.abc import Callable

from marlaas.runtime import now_s

CALL_CHARACTERS = 4_000
"""Most that one call adds; the rest of it is cut."""
MINUTE_CHARACTERS = 40_000
MINUTE_S = 60.0


class PrintLog:
    """Hands text on within a budget per minute: `open -> spent -> open again a minute later`."""

    def __init__(self, write: Callable[[str], None] | None) -> None:
        self._write = write
        self._minute_began_s = now_s()
        self._left = MINUTE_CHARACTERS
        self._num_left_out = 0

    def add(self, text: str) -> None:
        """Pass on the beginning of `text`, if this minute has room for it."""
        if self._write is None or not text.strip():
            return
        if now_s() - self._minute_began_s >= MINUTE_S:
            self._begin_minute(self._write)
        if self._left <= 0:
            self._num_left_out += 1
            return
        room = min(self._left, CALL_CHARACTERS)
        cut = text if len(text) <= room else f"{text[:room]}\n[cut: {len(text) - room} characters]"
        self._left -= len(cut)
        self._write(cut.rstrip("\n"))

    def _begin_minute(self, write: Callable[[str], None]) -> None:
        self._minute_began_s, self._left = now_s(), MINUTE_CHARACTERS
        if self._num_left_out:
            write(f"[left out: the output of {self._num_left_out} calls within a minute]")
            self._num_left_out = 0
