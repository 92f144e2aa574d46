"""Cutting a byte stream into messages, on both ends of a worker's socket."""

from marlaas.workers import messages as m


class FrameReader:
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> list[tuple[int, m.Call | m.Reply]]:
        """Add bytes; return the (call id, message) of every frame that is now whole."""
        self._buffer += chunk
        frames, start = [], 0
        with memoryview(self._buffer) as data:
            while len(data) - start >= m.HEADER_BYTES:
                body_start = start + m.HEADER_BYTES
                length, call_id, type_ = m.unpack_header(data, start)
                if len(data) < body_start + length:
                    break
                start = body_start + length
                frames.append((call_id, m.unpack_body(type_, data[body_start:start])))
        del self._buffer[:start]
        return frames
