"""The generate command on a tiny target: its answer, where prompts come from, what options reach the engine."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.data.conversations import Message
from dspark.data.render import Renderer
from dspark.decoding.engine import Engine, Request, Sampling
from dspark.errors import InputError
from dspark.learning import DrafterSettings
from dspark.model.checkpoints import CONFIG, load_drafter, save_drafter
from dspark.model.config import draft_config
from dspark.model.drafter import new_drafter
from dspark.sections import TargetSettings
from dspark.target import Target, load_target
from dspark.target_files import fingerprint, load_whole_config
from jobs.assistant import Assistant, Wish
from jobs.generate import generate
from tests.dspark.decoding.decoders import random_eagle3
from tests.dspark.folders import convert
from tests.tiny import MASK_ID, tiny_target_folder


def tiny_pair(folder: Path) -> tuple[Path, Path]:
    """A checkpoint, which knows its target, and the target."""
    named = tiny_target_folder(folder / "target")
    target = load_target(TargetSettings(model=str(named), dtype="fp32"))
    settings = DrafterSettings(layers=2, block=4, taps=(0, 2, 4), mask_token_id=MASK_ID, markov_rank=8)
    config = draft_config(target.config, settings)
    state = new_drafter(config, seed=0).state_dict()
    facts = {"target": {"name": str(named), "revision": None, "fingerprint": fingerprint(named)}}
    save_drafter(folder / "drafter", state, config, target.vocabulary, target.config, 8, torch.float32, facts)
    return folder / "drafter", named


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_pair(tmp_path_factory.mktemp("generate"))


def target_in(folder: Path) -> Target:
    return load_target(TargetSettings(model=str(folder), dtype="fp32"))


def prompt_of(target: Target, *messages: tuple[str, str]) -> tuple[int, ...]:
    return tuple(Renderer(target.tokenizer, 512, None).prompt([Message(role, text) for role, text in messages]))


def plain_text(target: Target, *messages: tuple[str, str], tokens: int = 20) -> str:
    """What plain decoding answers at temperature 0: a drafter changes nothing."""
    (found,) = Engine(target, None, 1, 512).generate([Request("", prompt_of(target, *messages), tokens, Sampling())])
    return str(target.tokenizer.decode(list(found.tokens), skip_special_tokens=True))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_answer_goes_to_stdout_as_plain_text_and_its_numbers_to_stderr(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], temperature: float
) -> None:
    checkpoint, folder = folders
    generate(checkpoint, "Hi", None, False, Wish(max_new_tokens=20, temperature=temperature, seed=1))
    shown = capsys.readouterr()
    target = target_in(folder)
    if temperature:
        drafter = load_drafter(checkpoint, target.device, target.dtype).drafter
        request = Request("generate", prompt_of(target, ("user", "Hi")), 20, Sampling(temperature, seed=1))
        (wanted,) = Engine(target, drafter, 1, 512).generate([request])
        assert shown.out == f"{target.tokenizer.decode(list(wanted.tokens), skip_special_tokens=True)}\n"
    else:
        assert shown.out == plain_text(target, ("user", "Hi")) + "\n"
    number, meaning = shown.err.split("\n", 1)
    assert re.fullmatch(
        r"\d+ tokens, [\d.]+ tokens/s, acceptance length 1\.\d\d over \d+ rounds, verify rate \d+%", number
    )
    assert meaning.startswith("acceptance length: Tokens kept per round") and "\x1b" not in shown.err


def test_the_prompt_comes_from_a_file_or_from_stdin_and_from_one_place_alone(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, folder = folders
    wanted = plain_text(target_in(folder), ("user", "Grüße"), tokens=8) + "\n"
    wish = Wish(max_new_tokens=8)
    file = tmp_path / "prompt.txt"
    file.write_text("Grüße\n", encoding="utf-8")
    generate(checkpoint, None, file, False, wish)
    assert capsys.readouterr().out == wanted
    monkeypatch.setattr("sys.stdin", io.StringIO("Grüße\n"))
    generate(checkpoint, None, None, False, wish)
    assert capsys.readouterr().out == wanted

    with pytest.raises(InputError, match="both a prompt and --file"):
        generate(checkpoint, "Hi", file, False, wish)
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    with pytest.raises(InputError, match="the prompt is empty"):
        generate(checkpoint, None, None, False, wish)
    file.write_bytes(b"\xff\xfe")
    for unreadable in (file, tmp_path / "nowhere"):
        with pytest.raises(InputError, match=f"{unreadable} cannot be read as UTF-8 text"):
            generate(checkpoint, None, unreadable, False, wish)


def test_options_reach_sampling_policy_and_prompt(folders: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint, folder = folders

    def answer(asked: tuple[Message, ...] = (Message("user", "Hi"),), **options: Any) -> Any:
        assistant = Assistant(checkpoint, Wish(max_new_tokens=16, **options))
        *_, row = assistant.stream([*assistant.opening, *asked])
        return row

    greedy, warm = answer(), answer(temperature=5.0)
    assert answer(temperature=5.0, top_k=1).tokens == greedy.tokens == answer(temperature=5.0, top_p=1e-6).tokens
    assert warm.tokens not in (greedy.tokens, answer(temperature=5.0, seed=1).tokens)
    assert {one.proposed for one in greedy.rounds[:8]} == {4}
    assert {one.proposed for one in answer(slots=2).rounds[:8]} == {2}
    assert {one.proposed for one in answer(policy="threshold", threshold=1.0).rounds} == {0}
    calibration = tmp_path / "calibration.json"
    rates = {"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [100.0, 1.0]}
    calibration.write_text(json.dumps({"temperatures": [1.0] * 4, **rates}))
    assert {one.proposed for one in answer(policy="scheduled", calibration=calibration).rounds} == {0}
    target = target_in(folder)
    assert answer(system="Be brief").request.prompt == prompt_of(target, ("system", "Be brief"), ("user", "Hi"))
    with pytest.raises(InputError, match="policy scheduled needs the target's step rates"):
        answer(policy="scheduled")
    with pytest.raises(InputError, match="a threshold belongs to the policy threshold"):
        answer(threshold=0.5)
    with pytest.raises(InputError, match=r"has \d+ tokens and the target 512 positions"):
        answer((Message("user", "x" * 600),))


def test_thinking_reaches_the_template(folders: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint, folder = folders
    target = tmp_path / "thoughtful"
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).symlink_to(file)
    template = target / "chat_template.jinja"
    text = template.read_text()
    template.unlink()
    template.write_text(text + "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}")
    ends = []
    for thinking in (None, True, False):
        assistant = Assistant(checkpoint, Wish(target=str(target), thinking=thinking, max_new_tokens=1))
        (row,) = assistant.stream([Message("user", "Hi")])
        ends.append(str(assistant.tokenizer.decode(list(row.request.prompt))).rpartition("\n")[2])
    assert ends == ["", "True", "False"]


def test_a_drafter_that_names_no_target_needs_one_and_one_of_other_weights_is_refused(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    checkpoint, _ = folders
    other = tiny_target_folder(tmp_path / "other", seed=1)
    with pytest.raises(InputError, match=f"was trained for target weights .* the target '{other}' has"):
        Assistant(checkpoint, Wish(target=str(other)))
    nameless = tmp_path / "nameless"
    nameless.mkdir()
    values = json.loads((checkpoint / CONFIG).read_text())
    (nameless / CONFIG).write_text(json.dumps({**values, "dspark": {}}))
    with pytest.raises(InputError, match="does not say for which target it was trained: name it with --target"):
        Assistant(nameless, Wish())


@pytest.mark.parametrize("layout", ["speculators", "specforge"])
def test_a_drafter_in_the_layout_of_an_engine_gives_the_same_answer(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    checkpoint, folder = folders
    answers = []
    for drafter in (checkpoint, convert(checkpoint, tmp_path / "exported", layout)):
        wish = Wish(target=str(folder), max_new_tokens=20, temperature=1.0, seed=1)
        generate(drafter, "Hi", None, False, wish)
        shown = capsys.readouterr()
        answers.append((shown.out, re.sub(r"[\d.]+ tokens/s", "", shown.err)))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("family", "form"), [("llama", "llama"), ("gemma4", None)])
def test_an_eagle3_drafter_of_any_form_answers_as_its_target_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, form: Any
) -> None:
    folder = tiny_target_folder(tmp_path / "target", family)
    target = target_in(folder)
    drafter = random_eagle3(target, family=form)
    state, config = drafter.state_dict(), drafter.config
    whole = load_whole_config(TargetSettings(model=str(folder)))
    save_drafter(tmp_path / "drafter", state, config, target.vocabulary, whole, None, torch.float32, {})
    capsys.readouterr()  # what libraries say when they are first imported
    generate(tmp_path / "drafter", "Hi", None, False, Wish(target=str(folder), max_new_tokens=12))
    assert capsys.readouterr().out == plain_text(target, ("user", "Hi"), tokens=12) + "\n"
