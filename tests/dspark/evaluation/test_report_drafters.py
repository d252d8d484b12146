"""The page of several drafters: what it compares, and that a browser lays it out cleanly."""

import html
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dspark.evaluation.report import write_report
from tests.dspark.evaluation.test_report import BENCHMARK, HELD_OUT, history_of, page_of, report_of

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of two drafters at two batch sizes. The second one lacks a confidence head and keeps less."""
    rounds = [{"proposed": 2, "accepted": 0, "kept": 1, "confidences": []} for _ in range(6)]
    drafted = [False] * 7
    results = []
    for one in HELD_OUT + BENCHMARK:
        other = replace(one, drafter="runs/<b>other</b>", rounds=rounds, drafted=drafted)
        results += [replace(one, drafter="dspark"), other]
        results += [replace(found, batch=8, plain_seconds=0.1) for found in results[-2:]]
    return write_report(tmp_path_factory.mktemp("several"), report_of(results, history_of(40)))


def test_drafters_stand_side_by_side_with_what_is_noise_and_the_speed_of_each_batch_size(several: Path) -> None:
    words = page_of(several).words
    assert "Of dspark, the first of 2 drafters" in words
    # Every prompt is alike, so the interval has no width, and the difference is no noise.
    assert "math 2.000 2.00 to 2.00 1.000 1.00 to 1.00" in words
    assert "math runs/<b>other</b> − dspark -1.000 -1.000 to -1.000 differs" in words
    assert "gsm8k 2.000 1.000" in words and "mean math 2.000 1.000" in words and "one prompt" in words
    # 56 tokens of eight prompts: 5.6 s plainly and 2.8 s speculatively one by one, 0.8 s plainly in eights.
    assert "dspark held-out 0 1 8 10.0 20.0 2.00× 14% 29% 43% 14%" in words
    assert "dspark held-out 0 8 8 70.0 20.0 0.29× 14% 29% 43% 14%" in words
    # Batch 8 is the same tokens again: not counted twice.
    assert "all 24 unconditional 100% 33% conditional 100% 33%" in words


def test_the_confidence_head_is_shown_where_there_is_one(several: Path) -> None:
    page = page_of(several)
    assert "Confidence head of dspark" in page.words and "Confidence head of runs" not in page.words
    # Thresholds 0, 0.1, ... 0.9: up to 0.8 only rejected slots are cut off, at 0.9 an accepted one.
    assert f"kept per round {9 * '2.00 '}1.67" in page.words
    assert "verified per round 3.00 3.00 3.00 3.00 3.00 2.67 2.67 2.33 2.00 1.67" in page.words
    files = {file.stem for file in (several.parent / "plots").iterdir()}
    assert {"positions", "thresholds_dspark", "slots_runs-b-other-b-_benchmarks"} <= files


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_the_page_without_overflow_or_errors(several: Path, tmp_path: Path, width: int) -> None:
    # The page allows no script, so the measuring one sits in a frame around it.
    measure = """
        const frame = document.querySelector("iframe"), text = document.querySelector("textarea").value
        frame.onload = () => {
          const page = frame.contentDocument, root = page.documentElement
          const broken = [...page.images].filter(image => !image.naturalWidth).length
          document.body.dataset.measured = [root.scrollWidth - root.clientWidth, broken, page.images.length].join("/")
        }
        frame.srcdoc = text
    """
    probe = tmp_path / "probe.html"
    escaped = html.escape(several.read_text(encoding="utf-8"))
    probe.write_text(
        f'<body><textarea hidden>{escaped}</textarea><iframe style="width:{width}px;height:800px"></iframe><script>'
        f"{measure}</script></body>",
        encoding="utf-8",
    )
    done = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--enable-logging=stderr", "--virtual-time-budget=10000", "--dump-dom", probe.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert 'data-measured="0/0/20"' in done.stdout
    assert "CONSOLE" not in done.stderr
