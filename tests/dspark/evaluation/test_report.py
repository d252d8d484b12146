"""The report: what it shows and leaves out, that no text becomes markup."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.evaluation import plots
from dspark.evaluation.figures import DARK, LIGHT
from dspark.evaluation.metrics import PromptResult
from dspark.evaluation.report import ReportData, write_report
from dspark.evaluation.summary import result_json

HOSTILE = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"
SECONDS = {"total": 72.0, "prepare": 10.0, "train": 40.0, "evaluate": 22.0}


def result_of(name: str, domain: str, temperature: float = 0.0, *, same: bool = True) -> PromptResult:
    """Seven tokens: the first, one accepted and its correction, two accepted and a bonus, one cut by the cap."""
    rounds = [
        {"proposed": 2, "accepted": 1, "kept": 2, "confidences": [0.9, 0.4]},
        {"proposed": 2, "accepted": 2, "kept": 3, "confidences": [0.9, 0.8]},
        {"proposed": 2, "accepted": 1, "kept": 1, "confidences": [0.7, 0.6]},
    ]
    return PromptResult(
        id=name, domain=domain, temperature=temperature, prompt_tokens=4, tokens=[0, 1, 2, 3, 4, 5, 6],
        drafted=[False, True, False, True, True, False, True], finish="length", rounds=rounds,
        plain_tokens=[0, 1, 2, 3, 4, 5, 6 if same else 9], identical=same, plain_seconds=0.7, speculative_seconds=0.35,
        seconds={"prefill": 0.05, "draft": 0.1, "verify": 0.15, "other": 0.05},
        text="an answer", prompt=f"{name} asks {HOSTILE}",
    )  # fmt: skip


def history_of(steps: int) -> list[dict[str, float]]:
    noise = np.random.default_rng(0).normal(0, 0.05, (steps, 5))
    return [
        {
            "step": step,
            "loss": 3 - 1.5 * step / steps + noise[step, 0],
            "loss_ce": 9 - 5 * step / steps + noise[step, 1],
            "loss_l1": 1.9 - 0.9 * step / steps + noise[step, 2],
            "loss_confidence": 0.6 + noise[step, 3],
            "tau_probabilistic": 1 + step / steps + noise[step, 4],
            "tau_greedy": 1.1 + step / steps,
            "tokens_per_second": 900.0,
        }
        for step in range(steps)
    ]


def texts(ids: Sequence[int]) -> list[str]:
    words = [" The", " sum", "\n", " <b>is</b>", " 4", " &amp;", "<|im_end|>", "", " x", " other"]
    return [words[i] for i in ids]


def report_of(results: list[PromptResult], history: list[dict[str, float]]) -> ReportData:
    return ReportData(
        title=f"run {HOSTILE}", settings_yaml=f"name: {HOSTILE}\nseed: 3\n",
        facts={"Target": HOSTILE, "Machine": "2 cores"}, history=history, results=results,
        result=result_json(results, SECONDS, 400, "3", history),
        token_texts=texts, commands=[f"dspark run {HOSTILE}"],
    )  # fmt: skip


HELD_OUT = [result_of(f"{domain}-{i}", domain) for i in range(4) for domain in ("math", "code")]
SAMPLED = [result_of("math-0", "math", 0.7)]
HEAD = ("reliability_confidence", "reliability_survival", "thresholds")  # pictures of the confidence head
BENCHMARK = [replace(result_of("gsm8k/1", "gsm8k"), plain_seconds=7.0)]


class Page(HTMLParser):
    """Tags with their attributes, visible text, and the style sheet."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = self.style = ""
        self._pieces: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "style":
            self.style += data
        else:
            self.text += data
            self._pieces.append(data)

    @property
    def words(self) -> str:
        """The text with one blank between words, for which no-break spaces count as blanks too."""
        return " ".join(" ".join(self._pieces).split())

    @property
    def tokens(self) -> list[str | None]:
        return [attrs["class"] for tag, attrs in self.elements if tag == "span" and "title" in attrs]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with every section; of the benchmark too few rounds for its conditional picture."""
    folder = tmp_path_factory.mktemp("report")
    return write_report(folder, report_of(HELD_OUT + SAMPLED + BENCHMARK, history_of(400)))


def page_of(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_the_headline_numbers_are_on_the_page(full: Path) -> None:
    page = page_of(full)
    words = page.words
    # 6 tokens kept in 3 rounds; 0.1 s a token plainly, 0.05 s speculatively.
    assert "Acceptance length, T = 0 2.00" in words
    assert "Acceptance length, T = 0.7 2.00" in words
    assert "Identical outputs 8 of 8" in words
    assert "Speed-up 2.00×" in words
    assert "Tokens per second 20.0 plain decoding: 10.0" in words
    assert "1 min 12 s (prepare 10.0 s, train 40.0 s, evaluate 22.0 s)" in words
    assert {"good"} == {
        str(attrs["class"]).split()[-1] for tag, attrs in page.elements if attrs.get("class") == "card good"
    }


def test_the_tables_give_each_domain_and_temperature_with_definitions(full: Path) -> None:
    words = page_of(full).words
    row = "4 2.00 2.33 66.7% 66.7% 10.0 20.0 2.00×"
    assert f"Temperature 0 math {row} code {row} all 8 {row[2:]} Temperature 0.7 math 1 {row[2:]}" in words
    # 24 rounds of the eight prompts: slot 0 accepted in all, slot 1 in one of three.
    assert "all 24 unconditional 100% 33% conditional 100% 33%" in words
    assert "0 5.6 2.8 14.3% 28.6% 42.9% 14.3% 0.7 0.7 0.3 14.3% 28.6% 42.9% 14.3%" in words
    assert "Benchmarks" in words and "gsm8k 1 2.00 2.33 66.7% 66.7% 1.0 20.0 20.00×" in words
    assert "Published count Accepted draft tokens + 1 per round" in words


def test_no_text_becomes_markup(full: Path) -> None:
    page = page_of(full)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "iframe", "object", "link", "base", "b"}
    assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on")]
    # Title, heading, fact, command, settings, and the prompts of the three domains shown.
    assert page.text.count(HOSTILE) == 5 + 3
    assert " <b>is</b>" in page.text and " &amp;" in page.text


def test_the_page_needs_nothing_from_outside(full: Path) -> None:
    page = page_of(full)
    references = [str(attrs[name]) for _, attrs in page.elements for name in ("src", "srcset", "href") if name in attrs]
    assert len(references) == 2 * 12
    assert all(reference.startswith("data:image/png;base64,") for reference in references)
    assert "url(" not in page.style and "@import" not in page.style


def test_the_pictures_lie_beside_the_page(full: Path) -> None:
    names = ["loss", *HEAD[:2], "slots", "slots_benchmarks", "slots_conditional", "speed"]
    names += ["speed_benchmarks", "tau", HEAD[2], "time", "time_benchmarks"]
    files = sorted((full.parent / "plots").iterdir())
    assert [file.stem for file in files] == names
    assert all(file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") for file in files)


def test_sample_tokens_are_marked_by_who_made_them(full: Path) -> None:
    kinds = ["plain", "accepted", "corrected", "accepted", "accepted", "bonus", "accepted"]
    page = page_of(full)
    assert page.tokens == 3 * [f"token {kind}" for kind in kinds]
    titles = [attrs["title"] for tag, attrs in page.elements if tag == "span" and "title" in attrs]
    assert titles[:3] == [
        "target alone, prompt pass",
        "accepted, round 1: 2 proposed, 1 accepted, 2 kept",
        "corrected, round 1: 2 proposed, 1 accepted, 2 kept",
    ]
    assert " The sum↵\n <b>is</b> 4 &amp;<|im_end|>" in page.text


def test_outputs_that_differ_are_shown_as_a_fault(tmp_path: Path) -> None:
    results = [result_of("a", "math"), result_of("b", "code", same=False)]
    page = page_of(write_report(tmp_path, report_of(results, [])))
    assert "1 of 2" in page.text and "differs from plain decoding" in page.text
    assert ("div", {"class": "card bad"}) in page.elements
    assert "Plain decoding gave:  The sum\n <b>is</b> 4 &amp; other" in page.text


def test_a_run_that_only_evaluates_has_no_training_section(tmp_path: Path) -> None:
    seconds = {"total": 22.0, "evaluate": 22.0}
    report = report_of(HELD_OUT[:1], [])
    report = replace(report, result=result_json(HELD_OUT[:1], seconds, None, None, []), commands=[])
    page = page_of(write_report(tmp_path, report))
    assert not re.search("Training|Optimizer steps|Registered version|T\u00a0=\u00a01|Benchmarks|NaN|None", page.text)
    assert "22.0 s (evaluate 22.0 s)" in page.words
    assert sorted(file.stem for file in (tmp_path / "plots").iterdir()) == [
        *HEAD[:2],
        "slots",
        "speed",
        HEAD[2],
        "time",
    ]


def test_sampled_results_alone_make_a_report(tmp_path: Path) -> None:
    page = page_of(write_report(tmp_path, report_of(SAMPLED, [])))
    assert "Acceptance by slot, temperature 0.7" in page.text
    assert "Identical outputs" not in page.text


def test_a_report_without_results_shows_the_training(tmp_path: Path) -> None:
    page = page_of(write_report(tmp_path, report_of([], history_of(3))))
    assert "Training" in page.text and "Generated samples" not in page.text and "Held-out" not in page.text


def test_result_json_holds_the_promised_numbers() -> None:
    result = result_json(HELD_OUT + SAMPLED, SECONDS, 400, "3", history_of(20))
    assert result["acceptance_length"] == {"t0": 2.0, "t1": 2.0}
    assert result["identical"] == [8, 8]
    assert result["speedup"] == pytest.approx(2.0)
    assert result["tokens_per_second"] == pytest.approx({"plain": 10.0, "speculative": 20.0})
    assert result["seconds"] == SECONDS
    assert (result["steps"], result["model_version"]) == (400, "3")
    assert result["held_out"]["t0"]["by_domain"]["code"]["acceptance_length"] == 2.0
    assert result["held_out"]["t0"]["by_domain"]["code"]["accept_by_slot"] == [1.0, 1 / 3]
    assert result["training"]["tau_greedy"] == pytest.approx({"first": 1.1 + 4.5 / 20, "last": 1.1 + 14.5 / 20})


def test_benchmarks_do_not_enter_the_headline_unless_they_are_all_there_is() -> None:
    both = result_json(HELD_OUT + BENCHMARK, SECONDS, 400, "3", [])
    assert both["identical"] == [8, 8]
    assert both["speedup"] == pytest.approx(2.0)
    assert both["benchmarks"]["t0"]["overall"]["speedup"] == pytest.approx(20.0)
    alone = result_json(BENCHMARK, SECONDS, None, None, [])
    assert alone["identical"] == [1, 1]
    assert alone["speedup"] == pytest.approx(20.0)


def test_what_was_not_measured_or_is_not_finite_is_null() -> None:
    history: list[dict[str, Any]] = [
        {"step": 1, "loss": math.nan},
        {"step": 2, "loss": np.float32(1.5), "tau_greedy": None},
    ]
    result = result_json([], {"total": math.inf, "evaluate": np.float64(2)}, None, None, history)
    text = json.dumps(result, allow_nan=False)
    assert json.loads(text) == {
        "acceptance_length": {"t0": None, "t1": None},
        "identical": None,
        "speedup": None,
        "tokens_per_second": {"plain": None, "speculative": None},
        "seconds": {"total": None, "prepare": None, "train": None, "evaluate": 2.0},
        "steps": None,
        "model_version": None,
        "training": {"loss": {"first": 1.5, "last": 1.5}},
        "held_out": {},
        "benchmarks": {},
        "drafters": {},
        "comparison": {},
    }


def test_plots_bear_gaps_zeros_and_single_points() -> None:
    ragged = [{"step": 1, "loss": math.nan}, {"step": 2, "loss": 0.0, "tau_greedy": 1.0}]
    rates = {f"domain {i}": [0.5, None, 0.25][: 1 + i % 3] for i in range(9)}
    for picture in (
        plots.loss_curves(ragged, LIGHT),
        plots.tau_curves(ragged, DARK),
        plots.slot_curves(rates, "accepted", LIGHT),
        plots.slot_curves({"math": [None]}, "accepted", LIGHT),
    ):
        assert picture.startswith(b"\x89PNG")


def test_the_two_themes_differ_and_a_picture_repeats_to_the_byte() -> None:
    history = history_of(5)
    light = plots.loss_curves(history, LIGHT)
    assert light == plots.loss_curves(history, LIGHT)
    assert light != plots.loss_curves(history, DARK)
