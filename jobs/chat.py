"""A conversation at the terminal: question, streamed answer, and the history behind both.

a line -> /command, or a question behind the history -> answer, round by round -> history
Ctrl-C ends the answer after its round and not the program; pressed again, at once, and the question is forgotten.
"""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import FrameType

from rich.console import Console
from rich.text import Text

from dspark.data.conversations import Message
from dspark.decoding.answers import answer_text
from dspark.decoding.rounds import Progress
from dspark.errors import InputError
from jobs.assistant import Assistant
from jobs.display import numbers, print_meaning, show, shows_marks

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer, /help says this again"
_PROMPT = "> "


def chat(assistant: Assistant, console: Console, notes: Console, first: str | None) -> None:
    """Answers line after line until the last one; `first` is a question that was asked before.

    An error of a question, such as a conversation that has become too long, costs this question alone.
    """
    print_meaning(notes, shows_marks(console))
    _say(notes, HELP)
    history, waiting = list(assistant.opening), first
    while True:
        try:
            text, waiting = _line() if waiting is None else waiting, None
            match text:
                case None | "/exit":
                    return
                case "/reset":
                    history = list(assistant.opening)
                    _say(notes, "a new conversation")
                case "/help":
                    _say(notes, HELP)
                case command if command.startswith("/"):
                    _say(notes, f"there is no {command.split()[0]} (a question may begin with a blank): {HELP}")
                case question if question.strip():
                    history = _answered(assistant, console, notes, [*history, Message("user", question)])
        except KeyboardInterrupt:  # at the prompt: the line that was being typed is dropped
            notes.print()


def _answered(assistant: Assistant, console: Console, notes: Console, asked: list[Message]) -> list[Message]:
    """The history behind the answer to its last message, or without that message where there is none."""
    try:
        with _interrupts() as stopped, closing(assistant.stream(asked)) as stream:
            row, seconds = show(_until(stream, stopped), assistant.tokenizer, console)
    except InputError as error:
        notes.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        return asked[:-1]
    except KeyboardInterrupt:
        _say(notes, "stopped at once; this question is forgotten")
        return asked[:-1]
    assert row is not None, "a prompt pass gives a token"
    note = numbers(len(row.tokens), row.rounds, seconds)
    _say(notes, note if row.finish is not None else f"{note}; stopped")
    return [*asked, Message("assistant", answer_text(assistant.tokenizer, row.tokens, row.finish or "length"))]


def _until(stream: Iterator[Progress], stopped: threading.Event) -> Iterator[Progress]:
    """The stream up to the round in which it was told to stop."""
    for row in stream:
        yield row
        if stopped.is_set():
            return


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets; the next one raises KeyboardInterrupt."""
    stopped = threading.Event()

    def take(_number: int, _frame: FrameType | None) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    before = signal.signal(signal.SIGINT, take)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


def _line() -> str | None:
    """The next line of stdin, without blanks behind it; None: there is none."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.rstrip() if line else None
    import readline  # noqa: F401 - so that `input` edits lines and remembers them

    try:
        return input(_PROMPT).rstrip()
    except EOFError:
        print()  # the next prompt of the shell begins a line
        return None


def _say(notes: Console, text: str) -> None:
    notes.print(Text(text, style="dim"), soft_wrap=True)
