"""From settings to token rows, plan and architecture: all that can be known before a weight is loaded."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from dspark.config import Settings
from dspark.data.captures import Origin
from dspark.data.conversations import Dropped, read_conversations
from dspark.data.plan import Plan, make_plan
from dspark.data.prepared import check_prepared
from dspark.data.render import Renderer, render
from dspark.data.rows import rows_table, samples_fingerprint, supervised_counts
from dspark.errors import InputError
from dspark.evaluation.benchmarks import EvaluationPrompt, benchmark_prompts, held_out_prompts
from dspark.model.config import drafter_config
from dspark.model.inherit import read_start
from dspark.model.kinds import AnyConfig
from dspark.model.vocabulary import keep_tokens
from dspark.target import fingerprint, load_config, load_tokenizer, resolve, special_tokens


@dataclass(frozen=True)
class Rows:
    """Training rows in a table, their order, and what is needed to train on them."""

    table: pa.Table
    dropped: tuple[Dropped, ...]
    plan: Plan
    draft: AnyConfig
    origin: Origin
    kept: NDArray[np.int64] | None  # ids of the tokens that the drafter may propose, ascending; None: all
    start: str | None = None  # fingerprint of the checkpoint that the drafter starts from

    @property
    def sample_ids(self) -> tuple[str, ...]:
        return tuple(self.table.column("sample_id").to_pylist())

    @property
    def fingerprint(self) -> str:
        """Hash of the sample ids in their order."""
        return samples_fingerprint(self.sample_ids)

    @property
    def tokens(self) -> int:
        """Tokens of all rows, without padding."""
        return sum(len(ids) for ids in self.table.column("input_ids"))


@dataclass(frozen=True)
class PromptRows:
    """Evaluation prompts as token ids, up to and including the generation prompt."""

    prompts: list[EvaluationPrompt]
    ids: list[list[int]]


def prepare_rows(settings: Settings) -> Rows:
    """Reads, renders and plans the training rows.

    Raises:
        InputError: unreadable data, too many dropped rows, a drafter that does not fit the target or its checkpoint,
            too many positions.
    """
    config = load_config(settings.target)
    draft = drafter_config(config, settings)
    start = None
    if settings.drafter.start_from is not None:
        read_start(settings.drafter.start_from, draft)
        start = fingerprint(settings.drafter.start_from)
    data = settings.data
    if data.max_length > config.max_position_embeddings:
        raise InputError(
            f"data.max_length={data.max_length} exceeds the {config.max_position_embeddings} positions of the target"
        )
    tokenizer = load_tokenizer(settings.target)
    renderer = Renderer(tokenizer, data.max_length, data.thinking)
    mark = fingerprint(resolve(settings.target))
    check_prepared(data.conversations, renderer, mark)
    conversations = read_conversations(data.conversations, data.roles, data.max_bad_fraction)
    rendered = render(renderer, conversations, data.max_bad_fraction)
    train = settings.train
    plan = make_plan(len(rendered.samples), settings.seed, train.epochs, train.global_batch, train.max_steps)
    origin = Origin(
        target=settings.target.model,
        revision=settings.target.revision or "main",
        fingerprint=mark,
        render=renderer.settings_hash,
        taps=draft.taps,
        hidden=draft.hidden,
        dtype=settings.target.dtype,
    )
    table = rows_table(rendered.samples)
    kept = None
    if draft.draft_vocab < draft.vocab:
        counts = supervised_counts(table, draft.vocab)
        kept = keep_tokens(counts, draft.draft_vocab, special_tokens(config, tokenizer))
    return Rows(table, conversations.dropped + rendered.dropped, plan, draft, origin, kept, start)


def prepare_prompts(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> PromptRows:
    """Held-out prompts, and those of the benchmark folder if one is set.

    Raises:
        InputError: unreadable files, or fewer held-out prompts than the settings ask for.
    """
    evaluate, data = settings.evaluate, settings.data
    conversations = read_conversations(data.held_out, data.roles, data.max_bad_fraction)
    wanted = max(evaluate.prompts_t0, evaluate.prompts_t1)
    prompts = held_out_prompts(conversations, wanted)
    if len(prompts) < wanted:
        raise InputError(
            f"{data.held_out} has {len(prompts)} usable prompts, evaluate asks for {wanted}: lower evaluate.prompts_t0 "
            "and evaluate.prompts_t1, or add prompts"
        )
    if evaluate.benchmarks is not None:
        prompts = prompts + benchmark_prompts(evaluate.benchmarks, evaluate.benchmark_prompts)
    renderer = Renderer(tokenizer, data.max_length, data.thinking)
    check_prepared(data.held_out, renderer, fingerprint(resolve(settings.target)))
    return PromptRows(prompts, [renderer.prompt(prompt.messages, prompt.tools) for prompt in prompts])
