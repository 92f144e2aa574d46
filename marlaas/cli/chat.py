"""`marlaas chat`: talk to a base model, or to an adapter on top of it.

The conversation is kept in memory and sent whole with every turn. `/reset` begins anew, `/quit` or
Ctrl-D ends, Ctrl-C breaks off a reply. When input is not a terminal, each line is one message.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Protocol

from marlaas.errors import InvalidRequest, MarlaasError
from marlaas.types import Message, SamplingParams


class Chat(Protocol):
    """One open base or adapter, as `launch.open_chat` returns it."""

    async def reply(self, messages: tuple[Message, ...], sampling: SamplingParams) -> str:
        """Return the model's reply to a conversation."""
        ...

    async def close(self) -> None:
        """End the worker behind it."""
        ...


def command(args: argparse.Namespace) -> int:
    """Open the model, talk until the person has had enough, and close it."""
    sampling = make_sampling(args)
    from marlaas import launch  # faulty flags are refused before the engines' side is loaded

    opening = (Message("system", args.system),) if args.system else ()
    with asyncio.Runner() as runner:
        chat: Chat = runner.run(launch.open_chat(args.base, args.adapter))
        try:
            if args.message is not None:
                messages = (*opening, Message("user", args.message))
                print(runner.run(chat.reply(messages, sampling)))
            else:
                converse(runner.run, chat, opening, sampling, _lines())
        finally:
            runner.run(chat.close())
    return 0


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


def converse(
    wait: Callable[[Coroutine[object, object, str]], str],
    chat: Chat,
    opening: tuple[Message, ...],
    sampling: SamplingParams,
    lines: Iterator[str],
) -> None:
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
            reply = wait(chat.reply(asked, sampling))
        except KeyboardInterrupt:
            print("\n(broken off)")
            continue
        except MarlaasError as error:
            print(f"({error})")
            continue
        print(reply)
        messages = (*asked, Message("assistant", reply))


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
