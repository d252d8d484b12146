"""Acceptance and speed on held-out prompts: evaluator actors decode, the driver collects and writes as results arrive.

prompts -> batches, a pure function of prompts and settings -> evaluator actors -> results.jsonl, a batch at a time
A run that is resumed decodes the batches that are not in the file whole, and no others.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from rich.console import Console

from actors.evaluator import Asked, EvaluationTask, EvaluatorActor, packed
from actors.pools import evaluated
from dspark.config import Settings
from dspark.decoding.policies import Policy, check_policy, choose_policy
from dspark.errors import InputError
from dspark.evaluation.benchmarks import conversation_of, is_benchmark
from dspark.evaluation.metrics import PromptResult, acceptance_length, identical
from dspark.model.config import DSparkConfig
from dspark.model.kinds import AnyConfig
from dspark.sections import BENCHMARKS, EvaluateSettings
from jobs.progress import Stage, stage
from jobs.results import ResultsFile
from jobs.rows import PromptRows, prompt_thinking

Key = tuple[str, float, int]  # conversation, temperature, batch size


def evaluate_drafters(
    settings: Settings, drafters: Mapping[str, Path], prompts: PromptRows, results: ResultsFile, console: Console
) -> list[PromptResult]:
    """Decodes every prompt at temperature 0 and the first `prompts_t1` held-out ones at `temperature` as well.

    All of it at each batch size, plainly once and then with each of the `drafters`. What `results` holds is not decoded
    again. The results are sorted and do not depend on the number of actors.
    """
    batches = planned(settings, prompts)
    found = _complete(results.read(), batches, list(drafters))
    results.begin(found)
    done = {_key(result) for result in found}
    missing = [batch for batch in batches if _asked_key(batch[0]) not in done]
    task = EvaluationTask(
        settings.target, dict(drafters), settings.evaluate, settings.data.max_length, prompt_thinking(settings),
        settings.seed, results.path.parent.name,
    )  # fmt: skip
    with stage(console, "evaluate", sum(map(len, batches))) as bar:
        _show(bar, found, done)
        if missing:
            with closing(evaluated(EvaluatorActor, (task,), [packed(batch) for batch in missing], settings)) as rows:
                for row in rows:
                    fresh = [PromptResult(**result) for result in json.loads(row["results"])]
                    results.add(fresh)
                    found += fresh
                    done |= {_key(result) for result in fresh}
                    _show(bar, found, done)
    found.sort(key=_place(settings, list(drafters)))
    results.begin(found)  # in this order, whoever was faster
    return found


def chosen_policy(evaluate: EvaluateSettings, draft: AnyConfig) -> tuple[Policy, tuple[float, ...] | None]:
    """The verification policy of the settings, and the temperatures of the confidences.

    Raises:
        InputError: a drafter of this architecture cannot serve it.
    """
    policy, temperatures = choose_policy(evaluate.policy, evaluate.slots, evaluate.threshold, evaluate.calibration)
    check_policy(policy, temperatures, draft.block, isinstance(draft, DSparkConfig) and draft.confidence)
    return policy, temperatures


def _place(settings: Settings, drafters: Sequence[str]) -> Callable[[PromptResult], tuple[object, ...]]:
    """Where a result stands among the others: batch sizes and drafters as given, benchmarks as tables list them."""
    sizes, benchmarks = settings.evaluate.batch, list(BENCHMARKS)

    def place(one: PromptResult) -> tuple[object, ...]:
        domain = benchmarks.index(one.domain) if one.domain in benchmarks else -1
        return one.temperature, sizes.index(one.batch), drafters.index(one.drafter), domain, one.domain, one.id

    return place


def planned(settings: Settings, prompts: PromptRows) -> list[list[Asked]]:
    """The batches, at every batch size: prompts of one temperature and domain, since they share a batch's seconds."""
    return [batch for size in settings.evaluate.batch for batch in _batches(_asked(settings, prompts, size), size)]


def _asked(settings: Settings, prompts: PromptRows, size: int) -> list[Asked]:
    evaluate = settings.evaluate
    rows = [Asked(prompt, ids, 0.0, size) for prompt, ids in zip(prompts.prompts, prompts.ids, strict=True)]
    held_out = [row for row in rows if not is_benchmark(row.prompt.id, row.prompt.domain)]
    benchmarks = [row for row in rows if is_benchmark(row.prompt.id, row.prompt.domain)]
    warm = [Asked(row.prompt, row.ids, evaluate.temperature, size) for row in held_out[: evaluate.prompts_t1]]
    return held_out[: evaluate.prompts_t0] + warm + benchmarks


def _batches(rows: Sequence[Asked], size: int) -> list[list[Asked]]:
    groups: dict[tuple[float, str], list[Asked]] = {}
    for row in rows:
        groups.setdefault((row.temperature, row.prompt.domain), []).append(row)
    return [group[at : at + size] for group in groups.values() for at in range(0, len(group), size)]


def _complete(
    found: Sequence[PromptResult], batches: Sequence[Sequence[Asked]], drafters: Sequence[str]
) -> list[PromptResult]:
    """Of results on disk, those of batches that are there whole: every prompt and turn, with every drafter."""
    held = {(_key(result), result.turn, result.drafter) for result in found}
    whole: set[Key] = set()
    for batch in batches:
        wanted = {
            (_asked_key(one), turn, name)
            for one in batch
            for turn in range(1, len(one.prompt.later) + 2)
            for name in drafters
        }
        if wanted <= held:
            whole |= {_asked_key(one) for one in batch}
    return [result for result in found if _key(result) in whole]


def _key(result: PromptResult) -> Key:
    return conversation_of(result.id, result.turn), result.temperature, result.batch


def _asked_key(asked: Asked) -> Key:
    return asked.prompt.id, asked.temperature, asked.batch


def _show(bar: Stage, results: Sequence[PromptResult], done: set[Key]) -> None:
    by_drafter: dict[str, list[PromptResult]] = {}
    for result in results:
        by_drafter.setdefault(result.drafter, []).append(result)
    lengths = [
        f"{name} {length:.3f}" if len(by_drafter) > 1 else f"{length:.3f}"
        for name, chosen in by_drafter.items()
        if (length := acceptance_length([one for result in chosen for one in result.rounds])) is not None
    ]
    bar.update(len(done), f"acceptance length {', '.join(lengths)}" if lengths else "")


def check_identical(settings: Settings, results: Sequence[PromptResult]) -> None:
    """Speculative decoding at temperature 0 must give the target's own tokens; exact only where rounding is fp32's.

    Raises:
        InputError: an output differs although both were computed in fp32: nothing measured with it can be believed.
    """
    counts = identical(results)
    if settings.evaluate.dtype != "fp32" or counts is None or counts[0] == counts[1]:
        return
    wrong = [result for result in results if result.temperature == 0 and not result.identical]
    raise InputError(
        f"only {counts[0]} of {counts[1]} outputs at temperature 0 equal plain decoding in fp32 (first: {wrong[0].id} "
        f"with {wrong[0].drafter}): the drafter was not verified correctly, or two tokens tie within rounding; see the "
        "prompt in results.jsonl"
    )
