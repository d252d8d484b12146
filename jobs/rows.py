"""From settings to token rows, plan and architecture: all that can be known before a weight is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from dspark.config import Settings
from dspark.data.cache_reader import CacheReader
from dspark.data.codecs import Codec
from dspark.data.conversations import Conversation, Dropped, read_conversations
from dspark.data.origin import Origin
from dspark.data.plan import Plan, make_plan
from dspark.data.prepared import check_prepared
from dspark.data.render import Rendered, Renderer, render
from dspark.data.rows import rows_table, samples_fingerprint, supervised_counts
from dspark.errors import InputError
from dspark.evaluation.benchmarks import EvaluationPrompt, benchmark_prompts, held_out_prompts
from dspark.model.config import drafter_config
from dspark.model.inherit import read_start
from dspark.model.kinds import AnyConfig
from dspark.model.vocabulary import keep_tokens
from dspark.target import check_one_device, special_tokens
from dspark.target_files import fingerprint, load_config, load_tokenizer, resolve


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
    validation: pa.Table | None = None  # rows that are measured and never trained, as `table`

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
    draft, start = _drafter_of(config, settings)
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
    origin = Origin(
        target=settings.target.model,
        revision=settings.target.revision or "main",
        fingerprint=mark,
        render=renderer.settings_hash,
        taps=draft.taps,
        hidden=draft.hidden,
        dtype=settings.target.dtype,
        codec=Codec(taps=settings.cache.taps).in_origin if data.source == "cache" else "plain",
    )
    dropped = conversations.dropped + rendered.dropped
    if data.source != "live":
        rendered = replace(rendered, samples=rendered.samples[: settings.cache.limit])
    if data.source == "cache":
        address = settings.cache.address(settings.output, settings.name)
        rendered, unusable = held_by_cache(address, origin, rendered, conversations.rows)
        dropped += unusable
    table = rows_table(rendered.samples)
    measured = None if data.validation is None else _validation_rows(settings, renderer, mark, table)
    kept = _kept_tokens(config, tokenizer, draft, table)
    return Rows(table, dropped, _plan_of(settings, table), draft, origin, kept, start, measured)


def replanned(rows: Rows, settings: Settings) -> Rows:
    """The same rows for another drafter or training: `settings` differ in nothing that rows are made from.

    Raises:
        InputError: the drafter does not fit the target or its checkpoint.
    """
    config = load_config(settings.target)
    draft, start = _drafter_of(config, settings)
    kept = rows.kept
    if draft.draft_vocab != rows.draft.draft_vocab:
        kept = _kept_tokens(config, load_tokenizer(settings.target), draft, rows.table)
    return replace(
        rows,
        plan=_plan_of(settings, rows.table),
        draft=draft,
        origin=replace(rows.origin, taps=draft.taps),
        kept=kept,
        start=start,
    )


def _drafter_of(config: Any, settings: Settings) -> tuple[AnyConfig, str | None]:
    """The architecture, and the fingerprint of the checkpoint that it starts from."""
    draft, start = drafter_config(config, settings), settings.drafter.start_from
    if start is None:
        return draft, None
    read_start(start, draft)
    return draft, fingerprint(start)


def _plan_of(settings: Settings, table: pa.Table) -> Plan:
    train = settings.train
    return make_plan(table.num_rows, settings.seed, train.epochs, train.global_batch, train.max_steps)


def _kept_tokens(
    config: Any, tokenizer: PreTrainedTokenizerBase, draft: AnyConfig, table: pa.Table
) -> NDArray[np.int64] | None:
    if draft.draft_vocab == draft.vocab:
        return None
    return keep_tokens(supervised_counts(table, draft.vocab), draft.draft_vocab, special_tokens(config, tokenizer))


def _validation_rows(settings: Settings, renderer: Renderer, mark: str, trained: pa.Table) -> pa.Table:
    """The rows of `data.validation`, rendered as those for training are.

    Raises:
        InputError: unreadable data, too many dropped rows, none left, or rows that are trained too.
    """
    data = settings.data
    assert data.validation is not None
    check_prepared(data.validation, renderer, mark)
    conversations = read_conversations(data.validation, data.roles, data.max_bad_fraction)
    table = rows_table(render(renderer, conversations, data.max_bad_fraction).samples)
    shared = set(table.column("sample_id").to_pylist()) & set(trained.column("sample_id").to_pylist())
    if shared:
        raise InputError(
            f"{len(shared)} of the {table.num_rows} rows of data.validation={data.validation} are training rows too: "
            "what is measured must not be trained, take them out of one of the files"
        )
    return table


def held_by_cache(
    address: str, origin: Origin, rendered: Rendered, rows: Sequence[Conversation]
) -> tuple[Rendered, tuple[Dropped, ...]]:
    """The samples without those that the capture skipped, and these with the reason.

    Raises:
        InputError: there is no such cache, or it has another origin, lacks taps, or lacks samples.
    """
    reader = CacheReader(address, origin.taps)
    reader.origin.check_fits(origin, f"the cache {address}")
    held, skipped = set(reader.sample_ids), set(reader.manifest.skipped)
    known = held | skipped
    lacking = [sample for sample in rendered.samples if sample.sample_id not in known]
    if lacking:
        limit = reader.manifest.settings.get("cache.limit")
        raise InputError(
            f"the cache {address} lacks {len(lacking)} of {len(rendered.samples)} samples, such as that of the "
            f"conversation {lacking[0].conversation_id}: capture these conversations into a new folder, or "
            + ("train on the others alone" if limit is None else f"set cache.limit={limit}, as its capture did")
        )
    samples = tuple(sample for sample in rendered.samples if sample.sample_id in held)
    if not samples:
        raise InputError(f"the cache {address} skipped all of these samples: their states were not finite")
    numbers = {row.id: row.row for row in rows}
    unusable = tuple(
        Dropped(sample.conversation_id, numbers[sample.conversation_id], "its states were not finite")
        for sample in rendered.samples
        if sample.sample_id in skipped
    )
    return replace(rendered, samples=samples), unusable


def prompt_thinking(settings: Settings) -> bool | None:
    """`enable_thinking` of the prompts that drafters are measured on."""
    asked = settings.evaluate.thinking
    return settings.data.thinking if asked is None else asked


def prepare_prompts(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> PromptRows:
    """Held-out prompts, and those of the benchmarks that are asked for.

    Raises:
        InputError: unreadable files, fewer held-out prompts than the settings ask for, a prompt that is too long, or a
            target that evaluators cannot decode with.
    """
    evaluate, data = settings.evaluate, settings.data
    check_one_device(settings.target, evaluate.gpus, "evaluate.gpus")
    conversations = read_conversations(data.held_out, data.roles, data.max_bad_fraction)
    wanted = max(evaluate.prompts_t0, evaluate.prompts_t1)
    prompts = held_out_prompts(conversations, wanted)
    if len(prompts) < wanted:
        raise InputError(
            f"{data.held_out} has {len(prompts)} usable prompts, evaluate asks for {wanted}: lower evaluate.prompts_t0 "
            "and evaluate.prompts_t1, or add prompts"
        )
    if evaluate.benchmarks is not None or evaluate.benchmark_names:
        prompts = prompts + benchmark_prompts(
            evaluate.benchmarks, evaluate.benchmark_names, evaluate.benchmark_prompts, evaluate.turns == "all"
        )
    trained = Renderer(tokenizer, data.max_length, data.thinking)
    check_prepared(data.held_out, trained, fingerprint(resolve(settings.target)))
    renderer = Renderer(tokenizer, data.max_length, prompt_thinking(settings))
    ids = [renderer.prompt(prompt.messages, prompt.tools) for prompt in prompts]
    _check_room(settings, prompts, ids)
    return PromptRows(prompts, ids)


def _check_room(settings: Settings, prompts: Sequence[EvaluationPrompt], ids: Sequence[Sequence[int]]) -> None:
    limit, answer = load_config(settings.target).max_position_embeddings, settings.evaluate.max_new_tokens
    longest = max(range(len(ids)), key=lambda place: len(ids[place]))
    if len(ids[longest]) + answer > limit:
        raise InputError(
            f"prompt {prompts[longest].id} has {len(ids[longest])} tokens, with evaluate.max_new_tokens={answer} more "
            f"than the {limit} positions of the target: lower evaluate.max_new_tokens, or leave such prompts out"
        )
