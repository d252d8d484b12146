"""The target in a Ray process that answers: conversations in, outcomes out; by the engine here, or by vLLM."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import pyarrow as pa
import torch

from dspark.answering import PrepareSettings
from dspark.data.conversations import Conversation, Message
from dspark.data.ledger import Outcome, outcome_of
from dspark.data.render import Renderer
from dspark.decoding.answers import Asking, Respond, answer_all, engine_respond
from dspark.decoding.engine import Engine
from dspark.decoding.sampling import Sampling
from dspark.decoding.vllm_respond import vllm_respond
from dspark.errors import InputError
from dspark.sections import TargetSettings
from dspark.target import load_target
from dspark.target_files import load_tokenizer


@dataclass(frozen=True)
class AnswerTask:
    """What every responder needs; `max_length` is the longest prompt plus answer, in tokens."""

    target: TargetSettings
    prepare: PrepareSettings
    thinking: bool | None
    sampling: Sampling
    max_length: int


class ResponderActor:
    """One target on one device; each call answers one task of conversations."""

    def __init__(self, task: AnswerTask) -> None:
        torch.set_num_threads(task.prepare.threads)
        self.tokenizer = load_tokenizer(task.target)
        renderer = Renderer(self.tokenizer, task.max_length, task.thinking)
        self.asking = Asking(renderer, task.sampling, task.prepare.max_tokens, task.max_length)
        # An error here would reach the driver as the death of an actor, so it is handed over as a result.
        self.fault: str | None = None
        try:
            self.respond = _respond(task)
        except InputError as error:
            self.fault = str(error)

    def __call__(self, conversations: pa.Table) -> pa.Table:
        if self.fault is not None:
            return pa.table({"fault": [self.fault]})
        rows = [_unpacked(text) for text in conversations.column("conversation").to_pylist()]
        outcomes = answer_all(rows, self.asking, self.respond, self.tokenizer)
        return pa.table({"outcome": [outcome.line() for outcome in outcomes]})


def _respond(task: AnswerTask) -> Respond:
    if task.prepare.via == "vllm":
        return vllm_respond(task.target, task.max_length, devices=max(1, int(task.prepare.gpus)))
    return engine_respond(Engine(load_target(task.target), None, task.prepare.batch, task.max_length))


def task_table(rows: Sequence[Conversation]) -> pa.Table:
    """Conversations as a responder takes them."""
    return pa.table({"conversation": [json.dumps(asdict(row)) for row in rows]})


def outcomes_in(table: pa.Table) -> list[Outcome]:
    """The outcomes that a responder returned.

    Raises:
        InputError: it could not begin.
    """
    if "fault" in table.column_names:
        raise InputError(table.column("fault")[0].as_py())
    return [outcome_of(line) for line in table.column("outcome").to_pylist()]


def _unpacked(text: str) -> Conversation:
    values = json.loads(text)
    messages = tuple(Message(**message) for message in values["messages"])
    return Conversation(**values | {"messages": messages, "tools": tuple(values["tools"])})
