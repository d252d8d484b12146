"""An answer while it is decoded: its text, which of its tokens the drafter guessed, and its numbers so far.

tokens of a round -> characters as they become complete -> terminal: coloured, above a line of live numbers
                                                        -> anything else: plain text
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from dspark.decoding.rounds import Progress, Round
from dspark.evaluation.definitions import DEFINITIONS

ACCEPTED = "green"
# What a model writes must not steer the terminal: of the control characters, tab and line break are left.
_STEERING = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\ufffd")
_SPARE_ROWS = 3  # of the screen's height, for the numbers and what stands above


def show(
    stream: Iterable[Progress], tokenizer: PreTrainedTokenizerBase, console: Console
) -> tuple[Progress | None, float]:
    """Prints an answer as it arrives.

    Returns:
        The request as the stream left it, None if it gave nothing, and the seconds that it took.
    """
    characters, began = Characters(tokenizer), time.perf_counter()
    row, shown = None, 0
    with Display(console) as display:
        for row in stream:
            for token, drafted in zip(row.tokens[shown:], row.drafted[shown:], strict=True):
                display.write(characters.of(token), drafted)
            shown = len(row.tokens)
            display.status(numbers(shown, row.rounds, time.perf_counter() - began))
        display.write(characters.rest(), drafted=False)
    return row, time.perf_counter() - began


class Display(AbstractContextManager["Display"]):
    """Text that grows. On a terminal the last line is drawn anew after every round, with the numbers below it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        moving = console.is_terminal and not console.is_dumb_terminal
        # The line is erased in the end, and printed as text that the terminal itself wraps.
        self._live = Live(console=console, auto_refresh=False, transient=True) if moving else None
        self._line, self._status = Text(), ""

    def __enter__(self) -> "Display":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._print(self._live)
        else:
            self._console.file.write("\n")
            self._console.file.flush()

    def write(self, text: str, drafted: bool) -> None:
        """Text of one token; `drafted`: an accepted draft."""
        if self._live is None:
            self._console.file.write(text.translate(_STEERING) if self._console.is_terminal else text)
            self._console.file.flush()
            return
        *whole, rest = text.translate(_STEERING).split("\n")
        style = ACCEPTED if drafted else ""
        for part in whole:
            self._line.append(part, style)
            self._print(self._live)
        self._line.append(rest, style)

    def status(self, line: str) -> None:
        """The numbers so far."""
        self._status = line
        if self._live is not None:
            self._place(self._live)
            self._live.refresh()

    def _place(self, live: Live) -> None:
        # A paragraph higher than the screen could not be drawn anew: its end is. A wide character has two columns.
        most = self._console.width * max(1, self._console.height - _SPARE_ROWS) // 2
        live.update(Group(self._line[-most:], Text(self._status, style="dim")))

    def _print(self, live: Live) -> None:
        """Moves the line from the part that is drawn anew to what stays."""
        line, self._line = self._line, Text()
        self._place(live)
        self._console.print(line, soft_wrap=True)


class Characters:
    """Text of tokens that arrive one by one: a character is given out when all its bytes are there.

    What was given out is not decoded again, so the cost of a token does not grow; but for the last piece, because a
    tokenizer may drop the blank at the start of what it decodes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._pending: list[int] = []

    def of(self, token: int) -> str:
        """The characters that `token` completes; special tokens have none."""
        self._pending.append(token)
        piece = self._piece()
        if not piece or piece.endswith("\ufffd"):
            return ""
        self._before, self._pending = self._pending, []
        return piece

    def rest(self) -> str:
        """What is left when no token follows: bytes that never became a character."""
        piece, self._pending = self._piece(), []
        return piece

    def _piece(self) -> str:
        return self._decode([*self._before, *self._pending])[len(self._decode(self._before)) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def numbers(tokens: int, rounds: Sequence[Round], seconds: float) -> str:
    """Tokens, speed, acceptance length and verify rate of an answer so far."""
    speed = f"{tokens} token{'s' if tokens > 1 else ''}, {tokens / seconds:.1f} tokens/s"
    if not rounds:
        return f"{speed}, no round: the prompt pass gave the only token"
    kept, verified = sum(one.kept for one in rounds), sum(one.proposed + 1 for one in rounds)
    of_rounds = f"{len(rounds)} round{'s' if len(rounds) > 1 else ''}"
    return f"{speed}, acceptance length {kept / len(rounds):.2f} over {of_rounds}, verify rate {kept / verified:.0%}"


def print_meaning(console: Console, marked: bool) -> None:
    """What the colours and the numbers mean; without colours only the numbers."""
    if marked:
        console.print(Text.assemble((ACCEPTED, ACCEPTED), (": drafted and accepted; else: the target's own", "dim")))
    for name in ("acceptance_length", "verify_rate"):
        console.print(Text(f"{name.replace('_', ' ')}: {DEFINITIONS[name]}", style="dim"))
    console.print(Text("tokens/s: of the whole answer, with the pass over the prompt.", style="dim"))


def shows_marks(console: Console) -> bool:
    """Whether accepted tokens are coloured: not in a file, on a dumb terminal, or where NO_COLOR is set."""
    return console.color_system is not None and not console.no_color and not console.is_dumb_terminal
