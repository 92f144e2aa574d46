"""The engine worker process: `python -m marlaas.workers.process FD`, started by `workers/local.py`.

One thread: read what has arrived, do one quantum, write the replies. It ends when its parent's end
of the socket closes, so no worker outlives its server.
"""

import contextlib
import select
import signal
import socket
import sys

from marlaas.config import Durability, EngineSettings
from marlaas.store.codec import decode
from marlaas.workers import messages as m
from marlaas.workers.framing import FrameReader
from marlaas.workers.host import EngineHost

RECEIVE_BYTES = 1 << 20


def build_host(settings: EngineSettings) -> tuple[EngineHost, dict[str, float]]:
    """Load the base, check it against the stock model, and build the engine around it."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from marlaas.engine.generator import BatchGenerator
    from marlaas.engine.self_check import check_base
    from marlaas.engine.trainer import LoraTrainer
    from marlaas.model.base import load_base
    from marlaas.text.chat import ChatTokenizer

    disable_progress_bar()
    torch.set_num_threads(settings.num_threads)
    base = load_base(
        settings.base_folder, dtype=getattr(torch, settings.dtype), device=settings.device
    )
    if settings.is_prepacked:
        base.prepack()
    deviations = check_base(base)
    tokenizer = ChatTokenizer.load(settings.base_folder)
    generator = BatchGenerator(
        base,
        kv_capacity_tokens=settings.kv_capacity_tokens,
        max_batch=settings.max_batch,
        prefill_budget_tokens=settings.prefill_budget_tokens,
        max_context=settings.max_context,
        decode_text=tokenizer.decode,
        is_exact=settings.is_exact,
    )
    trainer = LoraTrainer(
        base,
        budget_tokens=settings.train_budget_tokens,
        memory_budget_bytes=settings.pass_memory_bytes,
        is_exact=settings.is_exact,
    )
    is_synced = settings.durability is Durability.POWER
    host = EngineHost(settings.name, base, generator, trainer, is_synced=is_synced)
    return host, deviations


def serve(connection: socket.socket, host: EngineHost) -> None:
    """Run the worker until the parent closes the connection or asks for a shutdown."""
    reader = FrameReader()
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    while True:
        if poller.poll(0 if host.has_work else None):
            chunk = connection.recv(RECEIVE_BYTES)
            if not chunk:
                return
            for call_id, message in reader.feed(chunk):
                if isinstance(message, m.Shutdown):
                    connection.sendall(m.pack(call_id, m.ReplyNone()))
                    return
                assert not isinstance(message, m.Reply), "only the worker replies"
                host.handle(call_id, message)
        if host.has_work:
            host.run_quantum()
        if host.replies:
            connection.sendall(b"".join(m.pack(*reply) for reply in host.replies))
            host.replies.clear()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the server to handle
    connection = socket.socket(fileno=int(sys.argv[1]))
    size = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little")
    settings = decode(connection.recv(size, socket.MSG_WAITALL), EngineSettings)
    try:
        host, deviations = build_host(settings)
    except Exception as error:  # the parent turns it into a clear message; nothing runs yet
        reply = m.ReplyError(type(error).__name__, str(error))
        connection.sendall(m.pack(0, reply))
        return
    ready = m.ReplyReady(
        max_context=settings.max_context,
        self_check=deviations,
        max_trained_tokens=host.trainer.max_tokens,
    )
    connection.sendall(m.pack(0, ready))
    with contextlib.suppress(ConnectionError):  # the server is gone: nobody to answer any more
        serve(connection, host)


if __name__ == "__main__":
    main()
