"""`dspark generate`: answers by speculative decoding, streamed, with the tokens that the drafter guessed marked.

a prompt, or a chat -> assistant: target and drafter -> text on stdout, numbers on stderr
"""

import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from dspark.data.conversations import Message
from dspark.errors import InputError
from jobs.assistant import Assistant, Wish
from jobs.chat import chat
from jobs.display import numbers, print_meaning, show, shows_marks


def generate(checkpoint: Path, prompt: str | None, file: Path | None, as_chat: bool, wish: Wish) -> None:
    """Answers `prompt`, the text of `file` or of stdin; or holds a conversation, where a person sits at the terminal.

    The answer goes to stdout, its numbers to stderr; on a terminal accepted drafts are coloured, elsewhere the text is
    plain.

    Raises:
        InputError: target, checkpoint, prompt and wish do not go together.
    """
    if prompt is not None and file is not None:
        raise InputError("both a prompt and --file were given: leave one out")
    text = prompt if file is None else _read(file)
    console, notes = Console(highlight=False), Console(stderr=True, highlight=False)
    if as_chat or (text is None and sys.stdin.isatty()):
        chat(Assistant(checkpoint, wish), console, notes, text)
        return
    text = _read(None) if text is None else text
    if not text.strip():
        raise InputError("the prompt is empty: give it as an argument, with --file or on stdin, or chat with --chat")
    assistant = Assistant(checkpoint, wish)
    row, seconds = show(assistant.stream([*assistant.opening, Message("user", text)]), assistant.tokenizer, console)
    assert row is not None, "a prompt pass gives a token"
    notes.print(Text(numbers(len(row.tokens), row.rounds, seconds), style="dim"), soft_wrap=True)
    print_meaning(notes, shows_marks(console))


def _read(file: Path | None) -> str:
    """The text of a file, None: of stdin; without the line break at its end, which nobody meant."""
    try:
        return (sys.stdin.read() if file is None else file.read_text(encoding="utf-8")).removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file or 'stdin'} cannot be read as UTF-8 text ({error}): give a text file") from error


if __name__ == "__main__":
    from jobs.cli import command_main

    command_main("generate")
