"""What the server sends in one turn of its loop arrives at once, in order; an end is told once."""

import asyncio
import socket

from marlaas.workers import messages as m
from marlaas.workers.framing import FrameReader
from marlaas.workers.local import Connection


async def connected(
    received: list[tuple[int, m.Call | m.Reply]], ends: list[str]
) -> tuple[Connection, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    theirs.settimeout(5.0)
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: Connection(lambda *message: received.append(message), lambda: ends.append("end")),
        sock=ours,
    )
    return connection, theirs


def test_frames_of_one_turn_leave_together_and_in_order() -> None:
    async def scenario() -> None:
        connection, theirs = await connected([], [])
        with theirs:
            for call_id in range(8):
                connection.send(m.pack(call_id, m.GetStats()))
            await asyncio.sleep(0)
            first = FrameReader().feed(theirs.recv(1 << 16))
            assert [call_id for call_id, _ in first] == list(range(8))
            connection.send(m.pack(8, m.Shutdown()))
            connection.close()  # what was sent before still leaves
            assert FrameReader().feed(theirs.recv(1 << 16)) == [(8, m.Shutdown())]
            await connection.ended.wait()

    asyncio.run(scenario())


def test_replies_are_handed_over_until_the_worker_is_gone_and_then_its_end_is_told() -> None:
    async def scenario() -> None:
        received: list[tuple[int, m.Call | m.Reply]] = []
        ends: list[str] = []
        connection, theirs = await connected(received, ends)
        with theirs:
            theirs.sendall(m.pack(3, m.ReplyNone()) + m.pack(1, m.ReplyHash("ab")) + b"\x07")
        await connection.ended.wait()
        assert received == [(3, m.ReplyNone()), (1, m.ReplyHash("ab"))]
        assert ends == ["end"]

    asyncio.run(scenario())
