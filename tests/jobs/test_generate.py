"""The generate command on a tiny target: its text, its marks, its summary; and characters from bytes."""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dspark.data.conversations import Message
from dspark.data.render import Renderer
from dspark.decoding.engine import Engine, Generation, Request, Round, Sampling
from dspark.learning import DrafterSettings
from dspark.model.checkpoints import load_drafter, save_drafter
from dspark.model.config import draft_config
from dspark.model.drafter import new_drafter
from dspark.quickstart import dense_folder
from dspark.sections import TargetSettings
from dspark.target import load_target
from dspark.target_files import load_whole_config
from jobs.generate import Characters, generate, show, summary
from tests.dspark.decoding.decoders import random_eagle3
from tests.dspark.folders import convert
from tests.tiny import MASK_ID, tiny_target_folder, tiny_tokenizer


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint and its target."""
    folder = tiny_target_folder(tmp_path / "target")
    target = load_target(TargetSettings(model=str(folder), dtype="fp32"))
    settings = DrafterSettings(layers=2, block=4, taps=(0, 2, 4), mask_token_id=MASK_ID, markov_rank=8)
    config = draft_config(target.config, settings)
    state = new_drafter(config, seed=0).state_dict()
    save_drafter(tmp_path / "drafter", state, config, target.vocabulary, target.config, 8, torch.float32, {})
    return tmp_path / "drafter", folder


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_answer_is_printed_as_plain_text_with_a_summary(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], temperature: float
) -> None:
    checkpoint, folder = folders
    generate(checkpoint, str(folder), "Hi", max_new_tokens=20, temperature=temperature, seed=1, dtype="fp32")
    answer, last = capsys.readouterr().out.rstrip("\n").rsplit("\n", 1)

    target = load_target(TargetSettings(model=str(folder), dtype="fp32"))
    prompt = Renderer(target.tokenizer, 512, None).prompt([Message("user", "Hi")])
    # At temperature 0 the drafter changes nothing, so plain decoding tells the answer.
    drafter = load_drafter(checkpoint, target.device, target.dtype).drafter if temperature else None
    request = Request("generate", tuple(prompt), 20, Sampling(temperature=temperature, seed=1))
    (wanted,) = Engine(target, drafter, 1, 512).generate([request])
    assert answer == target.tokenizer.decode(list(wanted.tokens), skip_special_tokens=True)
    assert re.fullmatch(
        rf"{len(wanted.tokens)} tokens, [\d.]+ tokens/s, acceptance length 1\.\d\d over \d+ rounds \(tokens kept per "
        r"round: accepted drafts \+ 1, .*\)",
        last,
    )


@pytest.mark.parametrize("layout", ["speculators", "specforge"])
def test_a_drafter_in_the_layout_of_an_engine_gives_the_same_answer(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    checkpoint, folder = folders
    answers = []
    for drafter in (checkpoint, convert(checkpoint, checkpoint.with_name("exported"), layout)):
        generate(drafter, str(folder), "Hi", max_new_tokens=20, temperature=1.0, seed=1, dtype="fp32")
        answers.append(re.sub(r"[\d.]+ tokens/s", "", capsys.readouterr().out))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("family", "form"), [("llama", "llama"), ("gemma4", None)])
def test_an_eagle3_drafter_of_any_form_answers_as_its_target_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, form: Any
) -> None:
    folder = tiny_target_folder(tmp_path / "target", family)
    target = load_target(TargetSettings(model=str(folder), dtype="fp32"))
    drafter = random_eagle3(target, family=form)
    state, config = drafter.state_dict(), drafter.config
    whole = load_whole_config(TargetSettings(model=str(folder)))
    save_drafter(tmp_path / "drafter", state, config, target.vocabulary, whole, None, torch.float32, {})
    capsys.readouterr()  # what libraries say when they are first imported
    generate(tmp_path / "drafter", str(folder), "Hi", max_new_tokens=12, temperature=0.0, seed=1, dtype="fp32")
    answer, last = capsys.readouterr().out.rstrip("\n").rsplit("\n", 1)
    prompt = Renderer(target.tokenizer, 512, None).prompt([Message("user", "Hi")])
    (wanted,) = Engine(target, None, 1, 512).generate([Request("generate", tuple(prompt), 12, Sampling())])
    assert answer == target.tokenizer.decode(list(wanted.tokens), skip_special_tokens=True)
    assert last.startswith(f"{len(wanted.tokens)} tokens, ")


def stream_of(tokens: Sequence[int], drafted: Sequence[bool]) -> Any:
    """What an engine would stream."""
    yield from zip(tokens, drafted, strict=True)
    return Generation("r", tuple(tokens), tuple(drafted), (Round(1, 1, 2, (), (), 1),), "stop")


def shown(tokens: Sequence[int], drafted: Sequence[bool], terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, color_system="standard" if terminal else None)
    result = show(stream_of(tokens, drafted), tiny_tokenizer(), console)
    assert result.tokens == tuple(tokens)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_accepted_tokens_are_green_on_a_terminal_and_control_characters_are_shown_as_such() -> None:
    tokens = tiny_tokenizer().encode("ab c\n\x1b[2J", add_special_tokens=False)
    drafted = [False, True, True, *[False] * (len(tokens) - 3)]
    assert shown(tokens, drafted, terminal=True) == "a\x1b[32mb\x1b[0m\x1b[32m \x1b[0mc\n\ufffd[2J\n"
    assert shown(tokens, drafted, terminal=False) == "ab c\n\x1b[2J\n"


def test_long_text_is_neither_wrapped_nor_taken_for_markup() -> None:
    text = "[red]" + "x" * 300
    tokens = tiny_tokenizer().encode(text, add_special_tokens=False)
    assert shown(tokens, [False] * len(tokens), terminal=True) == text + "\n"


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


def test_the_summary_of_a_single_token_has_no_acceptance_length() -> None:
    generation = Generation("r", (5,), (False,), (), "length")
    assert summary(generation, 0.5) == "1 token, 2.0 tokens/s, no round: the prefill gave the only token"


def test_the_summary_averages_kept_tokens() -> None:
    rounds = tuple(Round(4, accepted, kept, (), (), 4) for accepted, kept in ((4, 5), (1, 2), (3, 2)))
    generation = Generation("r", (1,) * 10, (False,) * 10, rounds, "stop")
    assert summary(generation, 2.0).startswith("10 tokens, 5.0 tokens/s, acceptance length 3.00 over 3 rounds (")
