"""`marlaas chat`: talk to a base model, to an adapter on top of it, or to a job on a service.

The conversation is kept in memory and sent whole with every turn. `/reset` begins anew, `/quit` or
Ctrl-D ends, Ctrl-C breaks off a reply. When input is not a terminal, each line is one message.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from marlaas.errors import InvalidRequest, MarlaasError
from marlaas.types import Message, SamplingParams

SENT_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
"""What a service is told of how to sample."""

Reply = Callable[[tuple[Message, ...]], str]
"""Returns the model's reply to a conversation."""


def command(args: argparse.Namespace) -> int:
    """Open the model, talk until the person has had enough, and close it."""
    sampling = make_sampling(args)
    if args.job is None and (args.url or args.tenant):
        raise InvalidRequest("--url, --tenant: say where a job is; expected --job with them")
    if args.job is not None and (args.base or args.adapter):
        raise InvalidRequest("--job: the service has its base; expected no --base or --adapter")
    with _on_service(args, sampling) if args.job else _here(args, sampling) as reply:
        opening = (Message("system", args.system),) if args.system else ()
        if args.message is not None:
            print(reply((*opening, Message("user", args.message))))
        else:
            converse(reply, opening, _lines())
    return 0


@contextmanager
def _here(args: argparse.Namespace, sampling: SamplingParams) -> Iterator[Reply]:
    """Load the model into a worker of this machine."""
    from marlaas import launch  # faulty flags are refused before the engines' side is loaded

    with asyncio.Runner() as runner:
        chat = runner.run(launch.open_chat(args.base or "tiny", args.adapter))
        try:
            yield lambda messages: runner.run(chat.reply(messages, sampling))
        finally:
            runner.run(chat.close())


@contextmanager
def _on_service(args: argparse.Namespace, sampling: SamplingParams) -> Iterator[Reply]:
    """Ask the service that has the job."""
    from marlaas.cli.connection import connected, located

    options = {name: getattr(sampling, name) for name in SENT_SAMPLING}
    with connected(args) as client:
        acting, model = located(client, args, args.job)
        yield lambda messages: acting.chat(model, messages, **options)


def make_sampling(args: argparse.Namespace) -> SamplingParams:
    """Check the flags that say how a reply is sampled.

    Raises:
        InvalidRequest: with every flag that is out of range.
    """
    ranges = {
        "temperature": (args.temperature, 0, 10),
        "top-p": (args.top_p, 1e-6, 1),
        "top-k": (args.top_k, 0, 1_000_000),
        "min-p": (args.min_p, 0, 1),
        "max-tokens": (args.max_tokens, 1, 32_768),
        "seed": (args.seed, 0, 2**62),
    }
    problems = [
        f"--{name}: got {value}; expected from {low:g} to {high:g}"
        for name, (value, low, high) in ranges.items()
        if not low <= value <= high
    ]
    if problems:
        raise InvalidRequest(*problems)
    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
    )


def converse(reply: Reply, opening: tuple[Message, ...], lines: Iterator[str]) -> None:
    """Answer each line; a reply that fails or is broken off leaves no trace in the conversation."""
    messages = opening
    for line in lines:
        if line == "/quit":
            return
        if line == "/reset":
            messages = opening
            print("(a new conversation)")
            continue
        if not line:
            continue
        asked = (*messages, Message("user", line))
        try:
            words = reply(asked)
        except KeyboardInterrupt:
            print("\n(broken off)")
            continue
        except MarlaasError as error:
            print(f"({error})")
            continue
        print(words)
        messages = (*asked, Message("assistant", words))


def _lines() -> Iterator[str]:
    """Yield what the person types, with a prompt and line editing on a terminal."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin)
        return
    import readline  # noqa: F401 (gives `input` a history and arrow keys)

    print("Ctrl-D ends, /reset begins anew.")
    while True:
        try:
            yield input("\n> ").strip()
        except EOFError:
            print()
            return
