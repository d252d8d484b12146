"""What a run leaves behind for people: results, report, numbers, MLflow artifacts and a registered model version."""

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from actors.tracking import Tracker
from dspark.config import Settings
from dspark.evaluation.metrics import DEFINITIONS, PromptResult, summarise
from dspark.evaluation.report import ReportData, write_report
from dspark.target import fingerprint, resolve
from jobs.config import dump_settings
from jobs.rows import Rows

RESULT, RESULTS = "result.json", "results.jsonl"


def write_results(
    folder: Path,
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    results: Sequence[PromptResult],
    history: Sequence[Mapping[str, Any]],
    result: Mapping[str, Any],
    facts: Mapping[str, str],
) -> Path:
    """Writes `results.jsonl` (one prompt a line), `result.json` and the report; returns the report's path."""
    (folder / RESULTS).write_text("".join(json.dumps(asdict(one)) + "\n" for one in results))
    command = " ".join(["dspark", *sys.argv[1:]])
    (folder / RESULT).write_text(json.dumps({**result, "command": command}, indent=1) + "\n")
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


def register_drafter(
    tracker: Tracker, settings: Settings, drafter: Path, results: Sequence[PromptResult], facts: Mapping[str, str]
) -> int | None:
    """Registers the drafter with its identity and acceptance as tags; None where `tracking.register_model` is off."""
    if not settings.tracking.register_model:
        return None
    tags = {key.replace(" ", "_"): value for key, value in facts.items()}
    for name, summary in summarise(results).items():
        length = summary["overall"]["acceptance_length"]
        if length is not None:
            tags[f"acceptance_length.{name}"] = f"{length:.4f}"
    return tracker.register(settings.tracking.model_name or settings.name, drafter, tags)


def track_results(tracker: Tracker, folder: Path, result: Mapping[str, Any], report: Path, step: int) -> None:
    """Final numbers as metrics, and everything readable as artifacts."""
    numbers = {name: value for name, value in _numbers(result).items() if name != "model_version"}
    tracker.records([{"step": step, **numbers}])
    for path in (folder / "settings.yaml", folder / RESULT, folder / RESULTS, report):
        tracker.artifact(path)
    if (folder / "plots").is_dir():
        tracker.artifact(folder / "plots", "plots")


def _numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    flat: dict[str, float] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= _numbers(value, f"{name}.")
        elif isinstance(value, list):
            flat |= _numbers({str(i): item for i, item in enumerate(value)}, f"{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[name] = float(value)
    return flat


def print_results(console: Console, result: Mapping[str, Any]) -> None:
    """The table at the end of a run, with the definition of its main number under it."""
    table = Table(title="speculative decoding against plain decoding of the same target", title_justify="left")
    table.add_column("prompts", no_wrap=True)
    for column in ("n", "acceptance length", "accepted", "plain tok/s", "spec. tok/s", "speed-up"):
        table.add_column(column, justify="right")
    for part in (result["held_out"], result["benchmarks"]):
        for summary in part.values():
            name = f"T={summary['temperature']:g}"
            for domain, row in summary["by_domain"].items():
                table.add_row(f"{name}, {domain}", *_cells(row))
            table.add_row(f"{name}, all", *_cells(summary["overall"]), style="bold", end_section=True)
    console.print(table)
    console.print(f"[dim]acceptance length: {DEFINITIONS['acceptance_length']}")
    if result["identical"] is not None:
        console.print("identical to plain decoding at temperature 0: {} of {}".format(*result["identical"]))


def _cells(row: Mapping[str, Any]) -> list[str]:
    values = (
        (row["prompts"], "d"),
        (row["acceptance_length"], ".3f"),
        (row["accepted_per_proposed"], ".1%"),
        (row["tokens_per_second"]["plain"], ".1f"),
        (row["tokens_per_second"]["speculative"], ".1f"),
        (row["speedup"], ".2f"),
    )
    return ["-" if value is None else format(value, form) for value, form in values]
