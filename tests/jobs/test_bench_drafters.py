"""The comparison of three kinds of drafters: that they get the same training, and what its page says."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.drafters import command_of, presets
from benchmarks.results_record import document, findings
from dspark.config import dotted
from dspark.evaluation.comparison import compare
from tests.dspark.evaluation.test_metrics import result_of, round_of

ASKED: dict[str, Any] = {
    "rows": 60,
    "steps": 45,
    "prompts": 6,
    "benchmarks": None,
    "benchmark_prompts": 2,
    "init": "random",
    "cores": 1,
}


def test_the_three_differ_in_their_heads_and_losses_alone(tmp_path: Path) -> None:
    found = presets(Namespace(**ASKED, folder=tmp_path, quick=False))
    dspark, dflash, eagle3 = (dotted(found[kind].model_dump()) for kind in ("dspark", "dflash", "eagle3"))
    assert {key for key in dspark if dspark[key] != dflash[key]} == {
        "name", "output", "drafter.markov_rank", "drafter.confidence", "drafter.confidence_with_markov", "loss.ce",
        "loss.l1", "loss.confidence",
    }  # fmt: skip
    assert {key for key in eagle3 if key in dspark and dspark[key] != eagle3[key]} == {"name", "output", "drafter.kind"}
    assert (eagle3["eagle3.ttt_length"], eagle3["drafter.block"]) == (7, 7)
    for one in (dspark, dflash, eagle3):
        assert (one["data.source"], one["cache.folder"]) == ("cache", str(tmp_path / "cache"))
        assert (one["train.max_steps"], one["train.epochs"]) == (45, 2)  # 90 samples of 60 rows
    rows = (tmp_path / "train.jsonl").read_text().splitlines()
    assert len(set(rows)) == 60 and {"math", "code", "chat"} == {row.split('"')[7] for row in rows}


def report_of(dflash: list[int]) -> dict[str, Any]:
    """DSpark accepts two drafts in every round of eight prompts, DFlash what is given."""
    results = [
        replace(result_of([round_of(7, count)], name=f"p{i}"), drafter=name)
        for name, counts in (("dspark", [2] * 8), ("dflash", dflash))
        for i, count in enumerate(counts)
    ]
    return {
        "settings": {"rows": 60, "steps": 45, "samples": 90, "init": "random", "block": 7, "max_new_tokens": 64},
        "machine": {"device": "a processor"},
        "seconds": {"cache": 1.0, "dspark": None, "dflash": 12.4},
        "training": {name: {"step_seconds": 0.5, "loss": 4.0} for name in ("dspark", "dflash")},
        "comparison": {"held_out": {"t0": compare(results, seed=1)}},
        "positions": {"held_out": {"dspark": [1.0, 0.5], "dflash": [0.5, None]}},
        "identical": {"dspark": [8, 8], "dflash": [8, 8]},
        "command": command_of(["--benchmarks", "/some/where", "--record"]),
    }


@pytest.mark.parametrize(
    ("dflash", "says"),
    [
        ([1] * 8, "dspark - dflash = +1.000 (1.000 to 1.000) tokens per round; the published order came out."),
        (
            [3] * 8,
            "dspark - dflash = -1.000 (-1.000 to -1.000) tokens per round; the published order did NOT come out.",
        ),
        ([0, 4] * 4, "this run does not decide the order."),
    ],
)
def test_the_page_says_whether_the_published_order_came_out(dflash: list[int], says: str) -> None:
    report = report_of(dflash)
    (line,) = findings(report)
    assert line.startswith("Held-out prompts, temperature 0: ") and line.endswith(says)
    page = document(report)
    assert f"- {line}" in page
    assert (
        "| math | " in page
        and "| dflash | 50.0% | – |" in page
        and "| dflash | 12 | 0.50 | 4.000 |" in page
        and "| dspark | – | 0.50 |" in page
    )
    assert "make bench-drafters ARGS='--benchmarks FOLDER --record'" in page and "/some/where" not in page
