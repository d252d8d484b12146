"""From settings to what `dspark prepare` will do: conversations, splits, sampling rule, and what was done already."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from dspark.config import Settings
from dspark.data.conversations import Conversation, Dropped, conversations_of, main_reasons, refuse_bad_rows
from dspark.data.dialogue import answered_turns
from dspark.data.files import SUFFIXES, files_of, numbered
from dspark.data.hub import hub_rows
from dspark.data.ledger import Ledger
from dspark.data.prepared import Making, split_counts
from dspark.data.render import Renderer
from dspark.data.splits import SAME_QUESTION, askable
from dspark.decoding.recommended import KEYS, read_recommendation, recommended_sampling
from dspark.decoding.sampling import Sampling
from dspark.errors import InputError
from dspark.target import check_one_device
from dspark.target_files import fingerprint, load_config, load_tokenizer, native_precision, resolve
from jobs.facts import print_facts


@dataclass(frozen=True)
class Work:
    """All that is known before the first answer."""

    settings: Settings  # with the precision of the target settled
    folder: Path
    source: str
    rows: Sequence[Conversation]
    dropped: Sequence[Dropped]
    sampling: Sampling
    max_length: int
    making: Making
    target: Mapping[str, Any]

    @property
    def parallel(self) -> int:
        """Conversations that are worked on at a time, as the ledger counts seconds."""
        prepare = self.settings.prepare
        if prepare.via == "endpoint":
            return prepare.endpoint.concurrency * len(prepare.endpoint.addresses)
        return prepare.actors

    def missing(self, ledger: Ledger | None) -> list[Conversation]:
        """Conversations that are still to be answered."""
        return [row for row in self.rows if ledger is None or row.digest not in ledger]


def plan_work(settings: Settings, resume: Path | None) -> Work:
    """Reads the source and the target's configuration.

    Raises:
        InputError: no source, rows that cannot be used, or a target that cannot be loaded.
    """
    prepare, data = settings.prepare, settings.data
    config = load_config(settings.target)
    limit = int(config.max_position_embeddings)
    max_length = prepare.max_context or limit
    if max_length > limit:
        raise InputError(f"prepare.max_context={max_length} exceeds the {limit} positions of the target")
    if prepare.via == "actors":
        check_one_device(settings.target, prepare.gpus, "prepare.gpus")
    settings = _settled(settings)
    model = resolve(settings.target)
    sampling = recommended_sampling(prepare, read_recommendation(model), settings.seed)
    renderer = Renderer(load_tokenizer(settings.target), data.max_length, data.thinking)
    source, numbered_rows = _source(settings)
    found = conversations_of(source, numbered_rows, data.roles, data.max_bad_fraction, prepare.limit)
    rows, dropped = askable(found.rows)
    bad = [one for one in dropped if one.reason != SAME_QUESTION]
    refuse_bad_rows(source, len(found.rows), bad, data.max_bad_fraction)
    if not rows:
        raise InputError(f"{source} holds no conversation that can be answered: a row needs a user turn")
    target = {
        "name": settings.target.model,
        "revision": settings.target.revision or "main",
        "fingerprint": fingerprint(model),
        "dtype": None if prepare.via == "endpoint" else settings.target.dtype,
    }
    identity = _identity(settings, sampling, max_length, renderer, target)
    return Work(
        settings=settings,
        folder=(resume or prepare.folder or settings.output / "prepared" / settings.name).resolve(),
        source=source,
        rows=rows,
        dropped=[*found.dropped, *dropped],
        sampling=sampling,
        max_length=max_length,
        making=Making(identity, renderer, prepare.validation, prepare.held_out, prepare.keep_cut),
        target=target,
    )


def _settled(settings: Settings) -> Settings:
    target = settings.target
    if target.dtype == "auto":
        target = target.model_copy(update={"dtype": native_precision(settings.prepare.gpus > 0)})
    return settings.model_copy(update={"target": target})


def _source(settings: Settings) -> tuple[str, Any]:
    """The source's name for messages, and its numbered raw rows."""
    prepare = settings.prepare
    if prepare.source is None:
        raise InputError(
            "prepare.source is not set: give a file or folder of conversations, or a dataset on the hub, such as "
            "prepare.source=conversations.jsonl"
        )
    if "://" in prepare.source:
        raise InputError(
            f"prepare.source={prepare.source} is an address: copy the conversations to a disk that this machine "
            "mounts, or name a dataset on the hub as owner/name"
        )
    path = Path(prepare.source).expanduser()
    if path.exists() or path.name.endswith(SUFFIXES) or path.is_absolute():
        return str(path), numbered(files_of(path))
    return prepare.source, hub_rows(prepare.source, prepare.subset, prepare.split)


def _identity(
    settings: Settings, sampling: Sampling, max_length: int, renderer: Renderer, target: Mapping[str, Any]
) -> dict[str, Any]:
    """What decides a row's text or its split, by dotted key. Who answers how fast is not in it, nor `keep_cut`."""
    prepare = settings.prepare
    identity: dict[str, Any] = {"seed": settings.seed, "target.fingerprint": target["fingerprint"]}
    identity |= {f"prepare.{key}": getattr(sampling, key) for key in KEYS}
    identity |= {f"prepare.{key}": getattr(prepare, key) for key in ("max_tokens", "validation", "held_out", "via")}
    identity["prepare.max_context"] = max_length
    if prepare.via == "endpoint":
        identity["prepare.endpoint.api"] = prepare.endpoint.api
        identity["prepare.endpoint.model"] = prepare.endpoint.model or settings.target.model
    else:
        identity["target.dtype"] = settings.target.dtype
    facts = {key: value for key, value in renderer.facts.items() if key not in ("max_length", "thinking")}
    return identity | {"data.thinking": settings.data.thinking} | {f"render.{key}": facts[key] for key in facts}


def print_work(
    console: Console, work: Work, missing: Sequence[Conversation], lengths: Sequence[int], ledger: Ledger | None
) -> None:
    """The plan on the screen; `lengths` are those of the missing conversations' first prompts."""
    settings, prepare = work.settings, work.settings.prepare
    answers = sum(len(answered_turns(row.messages)) for row in missing)
    splits = split_counts(work.rows, prepare.validation, prepare.held_out)
    rule = ", ".join(f"{key} {getattr(work.sampling, key):g}" for key in KEYS)
    lines = {
        "source": f"{work.source}: {len(work.rows):,} conversations; {len(work.dropped):,} dropped"
        f"{main_reasons(work.dropped)}",
        "rows": ", ".join(f"{count:,} {split}" for split, count in splits.items()),
        "answers": f"{answers:,} to write in {len(missing):,} conversations, {sum(lengths):,} tokens in the "
        f"first prompts, at most {answers * prepare.max_tokens:,} new ones",
        "sampling": f"{rule}, seed {settings.seed}, at most {prepare.max_tokens:,} tokens",
        "by": _who(settings),
        "folder": str(work.folder),
    }
    if ledger is not None and len(ledger):
        seconds = ledger.seconds / len(ledger) * len(missing) / work.parallel
        per_answer = ledger.tokens / max(1, ledger.answers)
        lines["done"] = f"{len(ledger):,} conversations, {per_answer:,.0f} tokens an answer"
        lines["time"] = f"about {seconds / 60:,.1f} minutes at the rate so far"
    else:
        lines["time"] = "unknown before the first answers"
    print_facts(console, lines)


def first_prompt_lengths(work: Work, rows: Sequence[Conversation]) -> list[int]:
    """Tokens of each conversation's first context; 0 where the template refuses it."""
    lengths = []
    for row in rows:
        try:
            context = row.messages[: answered_turns(row.messages)[0]]
            lengths.append(len(work.making.renderer.prompt(context, row.tools)))
        except InputError:
            lengths.append(0)
    return lengths


def _who(settings: Settings) -> str:
    prepare = settings.prepare
    if prepare.via == "endpoint":
        endpoint = prepare.endpoint
        return f"{len(endpoint.addresses)} addresses, {endpoint.concurrency} requests each, {endpoint.api}"
    name = "vLLM" if prepare.via == "vllm" else f"batches of {prepare.batch}"
    return f"{prepare.actors} actors, {name}, {settings.target.dtype}, {prepare.gpus:g} GPUs each"
