"""Acceptance and speed on held-out prompts: evaluator actors decode, the driver collects."""

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pyarrow as pa
from rich.console import Console

from actors.evaluator import EvaluationTask, EvaluatorActor
from actors.pipelines import evaluated
from dspark.config import Settings
from dspark.errors import InputError
from dspark.evaluation.benchmarks import is_benchmark
from dspark.evaluation.metrics import PromptResult, acceptance_length, identical
from jobs.progress import stage
from jobs.rows import PromptRows


def evaluate_drafter(settings: Settings, drafter: Path, prompts: PromptRows, console: Console) -> list[PromptResult]:
    """Decodes every prompt at temperature 0 and the first `prompts_t1` held-out ones at `temperature` as well.

    The results are sorted and do not depend on the number of actors.
    """
    evaluate = settings.evaluate
    requests = _requests(settings, prompts)
    batches = [pa.Table.from_pylist(batch) for batch in _batches(requests, evaluate.batch)]
    longest = max(len(ids) for ids in prompts.ids) + evaluate.max_new_tokens
    task = EvaluationTask(settings.target, drafter, evaluate, longest, settings.seed)
    results: list[PromptResult] = []
    with (
        stage(console, "evaluate", len(requests)) as bar,
        closing(evaluated(EvaluatorActor, (task,), batches, settings)) as rows,
    ):
        for row in rows:
            results.append(PromptResult(**json.loads(row["result"])))
            bar.update(len(results), _note(results))
    return sorted(results, key=lambda result: (result.temperature, result.domain, result.id))


def _requests(settings: Settings, prompts: PromptRows) -> list[dict[str, object]]:
    evaluate = settings.evaluate
    rows = [
        {
            "id": prompt.id,
            "domain": prompt.domain,
            "prompt": prompt.messages[-1].content,
            "ids": ids,
            "temperature": 0.0,
        }
        for prompt, ids in zip(prompts.prompts, prompts.ids, strict=True)
    ]
    held_out = [row for row in rows if not is_benchmark(str(row["id"]), str(row["domain"]))]
    benchmarks = [row for row in rows if row not in held_out]
    warm = [{**row, "temperature": evaluate.temperature} for row in held_out[: evaluate.prompts_t1]]
    return held_out[: evaluate.prompts_t0] + warm + benchmarks


def _batches(requests: Sequence[dict[str, object]], size: int) -> list[list[dict[str, object]]]:
    """Requests of one temperature and domain together, since a batch's seconds are shared by its rows."""
    groups: dict[tuple[object, object], list[dict[str, object]]] = {}
    for request in requests:
        groups.setdefault((request["temperature"], request["domain"]), []).append(request)
    return [group[at : at + size] for group in groups.values() for at in range(0, len(group), size)]


def _note(results: Sequence[PromptResult]) -> str:
    rounds = [one for result in results for one in result.rounds]
    length = acceptance_length(rounds)
    return "" if length is None else f"acceptance length {length:.3f}"


def check_identical(settings: Settings, results: Sequence[PromptResult]) -> None:
    """Speculative decoding at temperature 0 must give the target's own tokens; exact only where rounding is fp32's.

    Raises:
        InputError: an output differs although both were computed in fp32: nothing measured with it can be believed.
    """
    counts = identical(results)
    if settings.evaluate.dtype != "fp32" or counts is None or counts[0] == counts[1]:
        return
    wrong = [result.id for result in results if result.temperature == 0 and not result.identical]
    raise InputError(
        f"only {counts[0]} of {counts[1]} outputs at temperature 0 equal plain decoding in fp32 (first: {wrong[0]}): "
        "the drafter was not verified correctly, or two tokens tie within rounding; see the prompt in results.jsonl"
    )
