"""A server that answers by a script, faults of the wire included: for the transport's own tests."""

import json
import socket
import socketserver
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Request:
    """What arrived."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Scripted:
    """One answer a connection, in order; the last one is given again and again.

    An answer is raw bytes; after them the connection ends. Empty bytes hang up without a word.
    """

    answers: list[bytes]
    requests: list[Request] = field(default_factory=list)
    url: str = ""

    def next_answer(self) -> bytes:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def answer(status: int, body: object = None, **headers: str) -> bytes:
    """Return a whole HTTP answer with a JSON body."""
    content = b"" if body is None else json.dumps(body).encode()
    return raw(status, content, **headers)


def raw(status: int, content: bytes, *, length: int | None = None, **headers: str) -> bytes:
    """Return an HTTP answer; a `length` beyond the content makes it one that was cut off."""
    lines = [f"HTTP/1.1 {status} Words", f"Content-Length: {length or len(content)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + content


def refusal(status: int, code: str, message: str, *problems: str, **headers: str) -> bytes:
    error = {"code": code, "message": message, "problems": list(problems)}
    return answer(status, {"error": error}, **headers)


def events(*seqs: int, tail: str = "", is_cut: bool = True) -> bytes:
    """Return a stream that holds events and then ends; `is_cut` ends it without its last chunk."""
    text = "".join(f': alive\n\nid: {seq}\nevent: step\ndata: {{"seq": {seq}}}\n\n' for seq in seqs)
    content = (text + tail).encode()
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    return (
        head
        + f"{len(content):x}\r\n".encode()
        + content
        + b"\r\n"
        + (b"" if is_cut else b"0\r\n\r\n")
    )


@contextmanager
def serving(*answers: bytes) -> Iterator[Scripted]:
    """Serve a script on a loopback port as long as the block runs."""
    script = Scripted(list(answers))

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            head = self.rfile.readline().decode().split()
            if len(head) < 2:
                return
            headers = {}
            while line := self.rfile.readline().decode().strip():
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
            body = self.rfile.read(int(headers.get("content-length", 0)))
            script.requests.append(Request(head[0], head[1], headers, body))
            self.wfile.write(script.next_answer())
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        script.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield script
        finally:
            server.shutdown()
            thread.join()
