"""Decoding of prompts in a Ray process: plainly by the target, then with each drafter, on the same prompts.

batch of prompts --plain--> answers --each drafter--> results --prompts with a further turn, behind the answer--> again
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch

from actors.gauges import PLAIN, Gauges
from dspark.data.conversations import Message
from dspark.data.render import Renderer
from dspark.decoding.differences import first_difference
from dspark.decoding.engine import Engine, Generation, Request, Sampling
from dspark.decoding.policies import choose_policy
from dspark.errors import InputError
from dspark.evaluation.benchmarks import EvaluationPrompt
from dspark.evaluation.metrics import PARTS, PromptResult, acceptance_length
from dspark.model.exchange import load_for_target
from dspark.model.kinds import AnyDrafter
from dspark.sections import EvaluateSettings, TargetSettings
from dspark.target import Target, load_target
from dspark.target_files import DTYPES


@dataclass(frozen=True)
class EvaluationTask:
    """What every evaluator needs: target, folders of the drafters by name, settings, and how prompts are rendered."""

    target: TargetSettings
    drafters: Mapping[str, Path]
    evaluate: EvaluateSettings
    max_length: int  # of a training row: part of the rendering, no limit to prompts
    thinking: bool | None
    seed: int
    run: str  # name of the folder that gets the results


@dataclass(frozen=True)
class Asked:
    """A prompt to decode, as token ids, at one temperature, `batch` of them together."""

    prompt: EvaluationPrompt
    ids: Sequence[int]
    temperature: float
    batch: int


class _Decoded(NamedTuple):
    generations: list[Generation]
    seconds: dict[str, float]  # PARTS and total, of one prompt


def packed(batch: Sequence[Asked]) -> pa.Table:
    """Prompts on their way to an evaluator, one JSON text each: their parts have no common schema."""
    return pa.table({"asked": [json.dumps(asdict(one)) for one in batch]})


class EvaluatorActor:
    """One target and the drafters on one device; each call decodes one batch of prompts, and returns one row."""

    def __init__(self, task: EvaluationTask) -> None:
        torch.set_num_threads(task.evaluate.threads)
        self.task = task
        self.target = load_target(task.target.model_copy(update={"dtype": task.evaluate.dtype}))
        self.drafters = {name: _drafter(folder, task, self.target) for name, folder in task.drafters.items()}
        self.renderer = Renderer(self.target.tokenizer, task.max_length, task.thinking)
        self.gauges = Gauges(task.run)
        self.batch = 0
        self.plain: Engine | None = None
        self.speculative: dict[str, Engine] = {}
        evaluate = task.evaluate
        self.policy = choose_policy(evaluate.policy, evaluate.slots, evaluate.threshold, evaluate.calibration)

    def __call__(self, prompts: pa.Table) -> pa.Table:
        asked = [_unpacked(text) for text in prompts.column("asked").to_pylist()]
        self._prepare(asked[0].batch)
        results: list[PromptResult] = []
        while asked:
            plain = self._decoded(self.plain, asked)
            self._show(PLAIN, plain)
            for name, engine in self.speculative.items():
                drafted = self._decoded(engine, asked)
                self._show(name, drafted)
                results += self._results(name, asked, plain, drafted)
            asked = self._following(asked, plain.generations)
        return pa.table({"results": [json.dumps([asdict(result) for result in results])]})

    def _prepare(self, batch: int) -> None:
        """Engines for `batch` requests at a time; those of another size go, with their stores."""
        if batch == self.batch:
            return
        length = self.target.config.max_position_embeddings
        self.batch, self.plain, self.speculative = batch, None, {}
        self.plain = Engine(self.target, None, batch, length)
        self.speculative = {
            name: Engine(self.target, drafter, batch, length, *self.policy) for name, drafter in self.drafters.items()
        }
        for engine in (self.plain, *self.speculative.values()):
            engine.generate([Request("warm-up", (1, 2, 3), 4, Sampling())])

    def _decoded(self, engine: Engine | None, asked: Sequence[Asked]) -> _Decoded:
        assert engine is not None, "engines are made before they decode"
        requests = [
            Request(
                one.prompt.id,
                tuple(one.ids),
                self.task.evaluate.max_new_tokens,
                self._sampling(one.temperature),
            )
            for one in asked
        ]
        before, since = asdict(engine.seconds), time.perf_counter()
        generations = engine.generate(requests)
        spent = {name: value - before[name] for name, value in asdict(engine.seconds).items()}
        spent["total"] = time.perf_counter() - since
        return _Decoded(generations, {name: value / len(asked) for name, value in spent.items()})

    def _show(self, drafter: str, decoded: _Decoded) -> None:
        prompts, rounds = decoded.generations, [{"kept": one.kept} for row in decoded.generations for one in row.rounds]
        self.gauges.add("dspark_decoded_tokens", sum(len(found.tokens) for found in prompts), drafter=drafter)
        self.gauges.add("dspark_decode_seconds", decoded.seconds["total"] * len(prompts), drafter=drafter)
        if drafter != PLAIN and (length := acceptance_length(rounds)) is not None:
            self.gauges.set("dspark_acceptance_length", length, drafter=drafter)

    def _results(self, drafter: str, asked: Sequence[Asked], plain: _Decoded, drafted: _Decoded) -> list[PromptResult]:
        return [
            PromptResult(
                id=one.prompt.id,
                domain=one.prompt.domain,
                temperature=one.temperature,
                prompt_tokens=len(one.ids),
                tokens=list(speculative.tokens),
                drafted=list(speculative.drafted),
                finish=speculative.finish,
                rounds=[asdict(record) for record in speculative.rounds],
                plain_tokens=list(reference.tokens),
                identical=speculative.tokens == reference.tokens,
                plain_seconds=plain.seconds["total"],
                speculative_seconds=drafted.seconds["total"],
                seconds={part: drafted.seconds[part] for part in PARTS},
                text=self._text(speculative),
                prompt=one.prompt.messages[-1].content,
                drafter=drafter,
                batch=one.batch,
                turn=one.prompt.turn,
                difference=self._difference(one, reference, speculative),
            )
            for one, reference, speculative in zip(asked, plain.generations, drafted.generations, strict=True)
        ]

    def _difference(self, one: Asked, plain: Generation, speculative: Generation) -> dict[str, Any] | None:
        if one.temperature > 0:
            return None
        found = first_difference(self.target, one.ids, plain.tokens, speculative.tokens)
        return None if found is None else asdict(found)

    def _following(self, asked: Sequence[Asked], answers: Sequence[Generation]) -> list[Asked]:
        """The next turns, each behind the target's own answer, which is the same for every drafter."""
        turns = [(one, one.prompt.following(self._text(answer))) for one, answer in zip(asked, answers, strict=True)]
        return [
            Asked(prompt, self.renderer.prompt(prompt.messages, prompt.tools), one.temperature, one.batch)
            for one, prompt in turns
            if prompt is not None
        ]

    def _sampling(self, temperature: float) -> Sampling:
        evaluate = self.task.evaluate
        return Sampling(temperature, evaluate.top_k, evaluate.top_p, self.task.seed)

    def _text(self, generation: Generation) -> str:
        return str(self.target.tokenizer.decode(list(generation.tokens), skip_special_tokens=True))


def _drafter(folder: Path, task: EvaluationTask, target: Target) -> AnyDrafter:
    loaded = load_for_target(folder, task.target, target.device, DTYPES[task.evaluate.dtype])
    if loaded.config.vocab != target.vocab_size or loaded.config.hidden != target.hidden:
        raise InputError(
            f"drafter {folder} has vocabulary {loaded.config.vocab} and width {loaded.config.hidden}, its target "
            f"{target.vocab_size} and {target.hidden}: they do not belong together"
        )
    return loaded.drafter


def _unpacked(text: str) -> Asked:
    fields: dict[str, Any] = json.loads(text)
    prompt = fields.pop("prompt")
    messages = tuple(Message(**message) for message in prompt.pop("messages"))
    tools, later = (tuple(prompt.pop(name)) for name in ("tools", "later"))
    return Asked(EvaluationPrompt(messages=messages, tools=tools, later=later, **prompt), **fields)
