"""A conversation keeps what was said, and forgets what failed."""

from marlaas.cli.chat import converse
from marlaas.errors import CapacityExceeded
from marlaas.types import Message


class Parrot:
    """Repeats the last message and remembers what it was shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[Message, ...]] = []

    def reply(self, messages: tuple[Message, ...]) -> str:
        self.seen.append(messages)
        if messages[-1].content == "fail":
            raise CapacityExceeded("too long")
        if messages[-1].content == "stop":
            raise KeyboardInterrupt
        return f"you said {messages[-1].content}"


def talk(parrot: Parrot, *lines: str) -> None:
    opening = (Message("system", "Be kind."),)
    converse(parrot.reply, opening, iter(lines))


def contents(messages: tuple[Message, ...]) -> list[str]:
    return [message.content for message in messages]


def test_each_turn_is_shown_the_whole_conversation(capsys):
    parrot = Parrot()
    talk(parrot, "a", "", "b")
    assert contents(parrot.seen[1]) == ["Be kind.", "a", "you said a", "b"]
    assert capsys.readouterr().out == "you said a\nyou said b\n"


def test_a_reply_that_fails_or_is_broken_off_leaves_no_trace(capsys):
    parrot = Parrot()
    talk(parrot, "fail", "stop", "c")
    assert contents(parrot.seen[-1]) == ["Be kind.", "c"]
    assert "(too long)" in capsys.readouterr().out


def test_reset_begins_anew_and_quit_ends():
    parrot = Parrot()
    talk(parrot, "a", "/reset", "b", "/quit", "c")
    assert contents(parrot.seen[-1]) == ["Be kind.", "b"]
