"""What a run leaves behind for people: results, report, numbers and MLflow artifacts."""

import csv
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from actors.tracking import Tracker
from dspark.config import Settings
from dspark.evaluation.metrics import PromptResult
from dspark.evaluation.report import ReportData, write_report
from dspark.evaluation.summary import SECTIONS
from dspark.redaction import redacted
from dspark.target_files import fingerprint, resolve
from jobs.config import dump_settings
from jobs.results import RESULTS
from jobs.rows import Rows

RESULT, TABLE = "result.json", "results.csv"
# Numbers of a domain in the table for spreadsheets; lists and pairs stay in `result.json`.
_KEYS = ("drafter", "batch", "section", "temperature", "domain")
_COLUMNS = (
    "prompts", "rounds", "tokens", "plain_tokens", "acceptance_length", "published_length", "verify_rate",
    "accepted_per_proposed", "speedup",
)  # fmt: skip
_INTERVAL = ("acceptance_length_low", "acceptance_length_high")
_SPEEDS = ("plain_tokens_per_second", "speculative_tokens_per_second")


def write_results(
    folder: Path,
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    results: Sequence[PromptResult],
    history: Sequence[Mapping[str, Any]],
    result: Mapping[str, Any],
    facts: Mapping[str, str],
) -> Path:
    """Writes `result.json`, `results.csv` and the report beside `results.jsonl`; returns the report's path."""
    command = typed_command()
    (folder / RESULT).write_text(json.dumps({**result, "command": command}, indent=1) + "\n")
    with (folder / TABLE).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow((*_KEYS, *_COLUMNS, *_INTERVAL, *_SPEEDS))
        writer.writerows(_lines(result))
    return write_report(
        folder,
        ReportData(
            title=settings.name,
            settings_yaml=dump_settings(settings),
            facts={**facts, **machine_facts()},
            history=history,
            results=results,
            result=result,
            token_texts=lambda ids: [str(tokenizer.decode([token])) for token in ids],
            commands=[command],
        ),
    )


def typed_command() -> str:
    """The command that made this process, without secrets."""
    command: str = redacted(" ".join(["dspark", *sys.argv[1:]]))
    return command


def _lines(result: Mapping[str, Any]) -> Iterator[list[Any]]:
    """One line for each drafter, temperature and domain, means over benchmarks and totals included.

    All at the first batch size; of the others the totals, whose tokens are the same and whose speeds are not.
    """
    for name, drafter in result["drafters"].items():
        first = next((row["batch"] for row in drafter["batches"]), None)
        for section in SECTIONS:
            for key, part in drafter[section].items():
                means = {f"mean {group}": row for group, row in part["by_group"].items()}
                scopes = result["comparison"][section][key]["scopes"]
                for domain, row in {**part["by_domain"], **means, "all": part["overall"]}.items():
                    interval = scopes.get(domain, {"lengths": {}})["lengths"].get(name, {})
                    yield _line([name, first, section, part["temperature"], domain], row, interval)
        for row in drafter["batches"]:
            if row["batch"] != first:
                yield _line([name, row["batch"], row["prompts_of"], row["temperature"], "all"], row, {})


def _line(keys: Sequence[Any], row: Mapping[str, Any], interval: Mapping[str, float | None]) -> list[Any]:
    speed = row.get("tokens_per_second", {})
    bounds = [interval.get("low"), interval.get("high")]
    return [*keys, *map(row.get, _COLUMNS), *bounds, speed.get("plain"), speed.get("speculative")]


def target_facts(settings: Settings) -> dict[str, str]:
    """Which weights were decoded, and how."""
    target = settings.target
    return {
        "target": target.model,
        "target revision": target.revision or "main",
        "target fingerprint": fingerprint(resolve(target)),
        "decoded in": settings.evaluate.dtype,
    }


def run_facts(settings: Settings, rows: Rows) -> dict[str, str]:
    """Identity of target and data, and what was trained on them."""
    return {
        **target_facts(settings),
        "data": f"{rows.table.num_rows} rows, {rows.tokens} tokens",
        "data fingerprint": rows.fingerprint,
        "render hash": rows.origin.render,
        "drafter": str(rows.draft),
        "steps": f"{rows.plan.steps} of {rows.plan.global_batch} rows",
    }


def machine_facts() -> dict[str, str]:
    """What the numbers were measured on."""
    devices: list[str] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "machine": ", ".join(devices) or f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "software": f"Python {platform.python_version()}, torch {torch.__version__}",
    }


def track_results(tracker: Tracker, folder: Path, result: Mapping[str, Any], report: Path, step: int) -> None:
    """Final numbers as metrics, and everything readable as artifacts."""
    numbers = {name: value for name, value in _numbers(result).items() if name != "model_version"}
    tracker.results(numbers, step)
    for path in (folder / "settings.yaml", folder / RESULT, folder / RESULTS, folder / TABLE, report):
        tracker.artifact(path)
    if (folder / "plots").is_dir():
        tracker.artifact(folder / "plots", "plots")


# For pictures; as metrics they would bury the others.
_NO_METRICS = ("bins", "thresholds")


def _numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    flat: dict[str, float] = {}
    for key, value in values.items():
        if key in _NO_METRICS:
            continue
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= _numbers(value, f"{name}.")
        elif isinstance(value, list):
            flat |= _numbers({str(i): item for i, item in enumerate(value)}, f"{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[name] = float(value)
    return flat
