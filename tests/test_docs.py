"""Pages: what is made from code is current, commands are real and run, messages are printed, links lead somewhere."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from benchmarks.write_settings import PAGE, settings_page
from dspark.model.checkpoints import save_drafter
from dspark.sections import TargetSettings
from dspark.target import load_target
from jobs import cli
from jobs.arguments import is_override
from jobs.config import load_settings
from tests.conftest import tiny_preset
from tests.documented import PAGES, ROOT, anchors_of, commands_of, links_of, printed, symptoms_of
from tests.dspark.decoding.decoders import random_drafter
from tests.dspark.folders import TARGET
from tests.tiny import MASK_ID

QUICKSTART = "platform/presets/smollm2_135m.yaml"


def test_the_settings_reference_is_what_the_types_say() -> None:
    assert PAGE.read_text() == settings_page(), "run `make settings`"


def parsed(words: list[str]) -> dict[str, Any]:
    """Arguments of a command, read as the command line reads them; nothing runs."""
    command: Any = typer.main.get_command(cli.app)
    while hasattr(command, "commands"):
        assert words[0] in command.commands, f"there is no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    found: dict[str, Any] = command.make_context(command.name, [word for word in words if word != "--help"]).params
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_settings_on_a_page_exist(page: Path) -> None:
    for words in commands_of(page):
        preset = parsed(words).get("preset")
        if preset is not None:
            preset = ROOT / (QUICKSTART if preset.stem.upper() in ("PRESET", "BEST") else preset)
            load_settings(preset, [word for word in words if is_override(word)])


def test_the_page_of_commands_has_all_of_them() -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    command: Any = typer.main.get_command(cli.app)
    assert [name for name in command.commands if f"| `{name}" not in text] == []
    assert [name for name in command.commands["cache"].commands if name not in text] == []


def drafter_of(target: Path, folder: Path) -> Path:
    """A drafter of the tiny target that knows whose it is."""
    loaded = load_target(TargetSettings(model=str(target), dtype="fp32"))
    made = random_drafter(loaded, "vanilla", (0, 2), MASK_ID)
    facts = {"target": {"name": "org/target", "architectures": ["LlamaForCausalLM"]}}
    save_drafter(folder, made.state_dict(), made.config, loaded.vocabulary, TARGET, 8, torch.float32, facts)
    return folder


def test_documented_dry_runs_run_and_touch_nothing(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    preset = tiny_preset(tmp_path, tiny_target)
    # The quickstart's commands run on a target that loads at once; those of a cluster read the checkout itself.
    tiny = {
        QUICKSTART: str(preset),
        "runs/latest/drafter": str(drafter_of(tiny_target, tmp_path / "drafter")),
        "prepare.source=platform/data/quickstart.jsonl": f"prepare.source={tmp_path / 'train.jsonl'}",
        "exported": str(tmp_path / "exported"),
    }
    (tmp_path / "elsewhere").mkdir()
    before, ran = sorted(tmp_path.rglob("*")), set()
    commands = [words for page in ("commands", "recipes") for words in commands_of(ROOT / "docs" / f"{page}.md")]
    for words in commands:
        if "--dry-run" not in words:
            continue
        at_root = "submit" in words or "--cluster" in words
        monkeypatch.chdir(ROOT if at_root else tmp_path / "elsewhere")
        code = cli.app(words if at_root else [tiny.get(word, word) for word in words], standalone_mode=False)
        assert not code and capsys.readouterr().out, words
        ran.add(words[0])
    assert ran == {"run", "train", "capture", "prepare", "evaluate", "export", "submit", "tune"}
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("page", ["troubleshooting", "clusters"])
def test_symptoms_are_printed_by_the_code(page: str) -> None:
    texts = printed()
    found = symptoms_of(ROOT / "docs" / f"{page}.md")
    assert len(found) >= 5
    unknown = []
    for symptom in found:
        # Two parts may be printed one behind the other, so each is looked for on its own.
        parts = [part.strip() for part in symptom.split("…") if len(part.strip()) > 3]
        if not all(any(part in text for text in texts) for part in parts):
            unknown.append(symptom)
    assert unknown == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for file, anchor in links_of(page):
        assert file.exists(), f"{page.name} links to {file}"
        assert not anchor or anchor in anchors_of(file), f"{page.name} links to {file.name}#{anchor}"


def test_the_readme_links_to_every_guide() -> None:
    linked = {file for file, _ in links_of(ROOT / "README.md")}
    guides = {page for page in PAGES if page.parent == ROOT / "docs"}
    records = {page for page in guides if "\nWritten by `make" in page.read_text()}
    assert guides - records <= linked


def test_files_that_contributing_names_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = {name for name in re.findall(r"`([^`\s]+/[^`\s]+\.py)`", text)}
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).is_file()] == []
