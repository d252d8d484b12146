"""An answer on a screen: the text that stands there in the end, colours, numbers; and characters from bytes."""

import io
import re
from collections.abc import Iterator, Sequence

import pytest
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dspark.decoding.rounds import Drafts, Progress, Request, Round
from dspark.decoding.sampling import Sampling
from dspark.quickstart import dense_folder
from jobs.display import Characters, numbers, print_meaning, show, shows_marks
from tests.tiny import tiny_tokenizer


def console_of(terminal: bool, no_color: bool = False, height: int = 20) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=terminal, color_system="standard" if terminal else None, no_color=no_color,
        width=120, height=height, highlight=False, _environ={},
    )  # fmt: skip


def written(console: Console) -> str:
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def grown(pieces: Sequence[tuple[str, str]]) -> Iterator[Progress]:
    """What an engine would stream: the first piece is the prompt pass, the others accepted drafts and the own token."""
    tokenizer = tiny_tokenizer()
    row = Progress(0, Request("r", (1,), 1000, Sampling()), 1000, ())
    for place, (accepted, own) in enumerate(pieces):
        drafts, (following,) = (tokenizer.encode(text, add_special_tokens=False) for text in (accepted, own))
        if place == 0:
            row.begin(following)
        else:
            row.commit(Drafts(drafts, (), ()), len(drafts) + 1, len(drafts), following)
        yield row


def screen(text: str) -> list[str]:
    """The lines that a terminal shows in the end. Colours are left out."""
    lines: list[list[str]] = [[]]
    row = column = 0
    for count, letter, character in re.findall(r"\x1b\[([?\d;]*)([A-Za-z])|([^\x1b])", text):
        if letter == "A":
            row -= int(count or 1)
        elif letter == "K":
            lines[row] = []
        elif character == "\r":
            column = 0
        elif character == "\n":
            row, column = row + 1, 0
            lines += [[]] * (row == len(lines))
        elif character:
            lines[row] = [*lines[row], *" " * (column - len(lines[row]))]
            lines[row][column : column + 1] = character
            column += 1
    return "\n".join("".join(line).rstrip() for line in lines).rstrip("\n").split("\n")


PIECES = [("", "a"), ("b ", "c"), ("", "\n"), ("d", "e")]


def test_accepted_tokens_are_green_and_the_numbers_grow_below_the_text_and_go() -> None:
    console = console_of(terminal=True)
    row, seconds = show(grown(PIECES), tiny_tokenizer(), console)
    assert row is not None and seconds > 0
    text = written(console)
    assert screen(text) == ["ab c", "de"]
    assert "a\x1b[32mb\x1b[0m\x1b[32m \x1b[0mc\n" in text and "\x1b[32md\x1b[0me\n" in text
    # Kept 3, 1 and 2 tokens of rounds that verified 4, 2 and 3.
    live = re.findall(
        r"(\d+) tokens?, [\d.]+ tokens/s, acceptance length (\d\.\d\d) over (\d) rounds?, verify rate (\d+)%", text
    )
    assert list(dict.fromkeys(live)) == [("4", "3.00", "1", "75"), ("5", "2.00", "2", "67"), ("7", "2.00", "3", "67")]


def test_elsewhere_the_text_is_plain() -> None:
    console = console_of(terminal=False)
    show(grown([*PIECES, ("", "\x1b"), ("[2", "J")]), tiny_tokenizer(), console)
    assert written(console) == "ab c\nde\x1b[2J\n"
    assert not shows_marks(console) and shows_marks(console_of(terminal=True))


def test_without_colours_no_token_is_marked_and_no_legend_is_printed() -> None:
    console = console_of(terminal=True, no_color=True)
    show(grown(PIECES), tiny_tokenizer(), console)
    assert screen(written(console)) == ["ab c", "de"] and "\x1b[32m" not in written(console)
    print_meaning(console, shows_marks(console))
    assert "green" not in written(console) and "verify rate: Tokens kept" in written(console)
    with_colours = console_of(terminal=True)
    print_meaning(with_colours, shows_marks(with_colours))
    assert "\x1b[32mgreen\x1b[0m" in written(with_colours)


def test_control_characters_are_shown_as_such_on_a_terminal() -> None:
    console = console_of(terminal=True)
    show(grown([("", "a"), ("\x1b[2", "J")]), tiny_tokenizer(), console)
    assert screen(written(console)) == ["a\ufffd[2J"]


def test_long_text_is_neither_broken_nor_taken_for_markup_and_never_drawn_higher_than_the_screen() -> None:
    console = console_of(terminal=True, height=6)
    text = "[red]" + "x" * 700
    show(grown([("", letter) for letter in text]), tiny_tokenizer(), console)
    assert screen(written(console)) == [text] and written(console).endswith(f"{text}\n")
    erased = re.findall(r"(?:\x1b\[1A\x1b\[2K)+", written(console))
    assert max(map(len, erased)) // len("\x1b[1A\x1b[2K") < 6


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    characters = Characters(tokenizer)
    return [*(characters.of(token) for token in tokens), characters.rest()]


def test_a_character_of_several_tokens_appears_when_its_last_byte_arrives() -> None:
    tokenizer = tiny_tokenizer()
    tokens = tokenizer.encode("é→😀e", add_special_tokens=False)
    assert len(tokens) == 2 + 3 + 4 + 1
    assert pieces(tokenizer, tokens) == ["", "é", "", "", "→", "", "", "", "😀", "e", ""]


def test_bytes_that_never_become_a_character_are_shown_when_text_goes_on_or_ends() -> None:
    tokenizer = tiny_tokenizer()
    euro = tokenizer.encode("€", add_special_tokens=False)
    (letter,) = tokenizer.encode("a", add_special_tokens=False)
    assert pieces(tokenizer, [euro[0], letter]) == ["", "\ufffda", ""]
    assert pieces(tokenizer, [letter, *euro[:2]]) == ["a", "", "", "\ufffd"]


def test_special_tokens_have_no_characters() -> None:
    tokenizer = tiny_tokenizer()
    tokens = tokenizer.encode("a<|im_end|>b<|im_end|>", add_special_tokens=False)
    assert "".join(pieces(tokenizer, tokens)) == "ab"


@pytest.mark.skipif(not dense_folder().is_dir(), reason="the quickstart's target has not been made on this machine")
def test_streamed_pieces_of_a_real_tokenizer_join_to_the_whole_text() -> None:
    tokenizer = AutoTokenizer.from_pretrained(dense_folder())
    text = "  Naïve 数学 😀😃 x² → y\n\n\tdone  "
    assert "".join(pieces(tokenizer, tokenizer.encode(text, add_special_tokens=False))) == text


def test_an_answer_of_one_token_has_no_acceptance_length() -> None:
    assert numbers(1, (), 0.5) == "1 token, 2.0 tokens/s, no round: the prompt pass gave the only token"


def test_the_numbers_average_kept_tokens() -> None:
    rounds = tuple(Round(4, accepted, kept, (), (), 4) for accepted, kept in ((4, 5), (1, 2), (3, 2)))
    assert numbers(10, rounds, 2.0) == "10 tokens, 5.0 tokens/s, acceptance length 3.00 over 3 rounds, verify rate 60%"
