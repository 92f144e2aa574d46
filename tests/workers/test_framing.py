"""However a byte stream is cut, the same messages come out of it."""

import numpy as np
import pytest

from marlaas.types import Completion, StopReason
from marlaas.workers import messages as m
from marlaas.workers.framing import FrameReader


def completion(length: int) -> m.ReplyCompletion:
    return m.ReplyCompletion(
        Completion(
            request_id=f"of-{length}",
            tokens=np.arange(length, dtype=np.int32),
            logprobs=np.full(length, -0.5, dtype=np.float32),
            stop_reason=StopReason.LENGTH,
            versions=np.zeros(length, dtype=np.int32),
            adapter_hash="ab",
        )
    )


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 10**6])
def test_frames_come_out_whole_and_in_order_however_the_stream_is_cut(chunk_bytes: int) -> None:
    lengths = [0, 1, 5, 300]
    sent = [(7, m.ReplyNone()), *((length, completion(length)) for length in lengths)]
    stream = b"".join(m.pack(call_id, message) for call_id, message in sent)
    reader, received = FrameReader(), []
    for start in range(0, len(stream), chunk_bytes):
        received += reader.feed(stream[start : start + chunk_bytes])
    assert [call_id for call_id, _ in received] == [call_id for call_id, _ in sent]
    assert m.ReplyNone() == received[0][1]
    for (length, reply), _ in zip(received[1:], lengths, strict=True):
        assert isinstance(reply, m.ReplyCompletion)
        assert reply.completion.request_id == f"of-{length}"
        np.testing.assert_array_equal(reply.completion.tokens, np.arange(length))
