"""What `make bench-decode` writes into the guide."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.decode_record import BEGIN, BOUNDS, END, MEANINGS, record


def report(missed: list[str], differences: list[dict[str, Any]]) -> dict[str, Any]:
    sizes = {"prompts": 32, "new_tokens": 64, "prompt_tokens": 3_200}
    numbers = dict.fromkeys(MEANINGS, 1.23456) | {"identical": True}
    return {
        "command": "make bench-decode", "machine": {"device": "a processor", "threads": 2}, "missed": missed,
        "drafter": {"name": "DSpark, 2 layers", "steps": 950}, "fp32": sizes | numbers,
        "bf16": sizes | {"prompts": 8, "plain_1_tokens_per_s": 7.0, "identical": False, "differences": differences},
    }  # fmt: skip


def test_the_figures_of_the_guide_are_replaced_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "docs" / "decoding.md"
    page.parent.mkdir()
    page.write_text(f"# Decoding\n\n{BEGIN}\nold\n{END}\n\nThe end.\n")
    difference = {"prompt": "gsm8k/3", "side": "speculative", "batch": 8, "place": 5, "gap": 0.125, "roundings": 1.0}
    record(report(["outside_share"], [difference]))
    first = page.read_text()
    assert first.startswith(f"# Decoding\n\n{BEGIN}\n\nMeasured by `make bench-decode` on: device a processor")
    assert first.endswith(f"{END}\n\nThe end.\n") and "old" not in first
    assert "| a round in plain tokens | 1.235 | <= 1.8 |  |" in first
    assert "| every text that of plain decoding at batch 1 | yes |  | no |" in first
    assert "| gsm8k/3 | speculative | 8 | 5 | 0.125 | 1.0 |" in first
    assert f"Missed: {MEANINGS['outside_share']}." in first
    record(report(["outside_share"], [difference]))
    assert page.read_text() == first
    record(report([], []))
    assert "Every bound is met." in page.read_text() and "gsm8k" not in page.read_text()


def test_every_bound_is_shown_and_the_guide_has_a_place_for_the_figures() -> None:
    assert BOUNDS.keys() <= MEANINGS.keys()
    page = Path("docs/decoding.md").read_text()
    assert page.count(BEGIN) == page.count(END) == 1 and page.index(BEGIN) < page.index(END)
