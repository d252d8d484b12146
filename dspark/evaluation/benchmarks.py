"""Prompts that drafters are measured on: held-out conversations and the nine benchmarks that publications use."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from dspark.data.conversations import Conversation, Conversations, Message, read_conversations
from dspark.errors import InputError

# Benchmark -> the domain group over which tables average.
BENCHMARKS = {
    "gsm8k": "math",
    "math500": "math",
    "aime25": "math",
    "humaneval": "code",
    "mbpp": "code",
    "livecodebench": "code",
    "mt-bench": "chat",
    "alpaca": "chat",
    "arena-hard-v2": "chat",
}
NO_DOMAIN = "other"


@dataclass(frozen=True)
class EvaluationPrompt:
    """Messages for the target to answer, the last one a user's. Tables have one row per `domain`."""

    id: str
    domain: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)


def held_out_prompts(conversations: Conversations, limit: int) -> list[EvaluationPrompt]:
    """At most `limit` distinct prompts: each conversation up to its last user turn.

    The domains take turns, in the order of their first row, so that every prefix of the list holds them evenly. A
    conversation without a domain counts for `other`; one without a user turn gives no prompt. InputError if none does.
    """
    distinct: dict[tuple[Message, ...], EvaluationPrompt] = {}
    for prompt in _prompts(conversations):
        distinct.setdefault(prompt.messages, prompt)
    by_domain: dict[str, list[EvaluationPrompt]] = {}
    for prompt in distinct.values():
        by_domain.setdefault(prompt.domain, []).append(prompt)
    if not by_domain:
        raise InputError(
            f"none of the {len(conversations.rows)} held-out conversations has a user turn, so there is nothing to "
            "answer: set data.held_out to a file of conversations with user turns"
        )
    turns = zip_longest(*by_domain.values())
    return [prompt for prompt in chain.from_iterable(turns) if prompt is not None][:limit]


def benchmark_prompts(folder: Path, limit: int) -> list[EvaluationPrompt]:
    """At most `limit` prompts of every NAME.jsonl in `folder`, evenly spaced over its rows; the first of the `turns`.

    NAME is one of BENCHMARKS and becomes the domain; ids read NAME/ROW. Raises InputError for a folder without such
    files, for other names, and for a file with an unusable row: a benchmark with rows left out is another one.
    """
    files = {file.stem: file for file in sorted(folder.glob("*.jsonl"))}
    known = f"the known benchmarks are {', '.join(BENCHMARKS)}"
    if not files:
        found = "has no NAME.jsonl" if folder.is_dir() else "is no folder"
        raise InputError(f"evaluate.benchmarks: {folder} {found}; {known}")
    unknown = [file.name for name, file in files.items() if name not in BENCHMARKS]
    if unknown:
        raise InputError(
            f"evaluate.benchmarks: {folder} holds {', '.join(unknown)}; {known}: move or rename the others"
        )
    prompts: list[EvaluationPrompt] = []
    for name in (name for name in BENCHMARKS if name in files):
        rows = read_conversations(files[name], {}, max_bad_fraction=0.0).rows
        # Some files are sorted by topic or difficulty: the first rows would not stand for the whole.
        chosen = [rows[i * len(rows) // limit] for i in range(limit)] if limit < len(rows) else rows
        prompts += [EvaluationPrompt(f"{name}/{row.row}", name, _question(row)) for row in chosen]
    return prompts


def is_benchmark(prompt_id: str, domain: str) -> bool:
    """Whether a prompt came from `benchmark_prompts`, and not from held-out rows that happen to use the same label."""
    return domain in BENCHMARKS and prompt_id.startswith(f"{domain}/")


def _prompts(conversations: Conversations) -> Iterator[EvaluationPrompt]:
    for row in conversations.rows:
        messages = _question(row)
        if messages:
            yield EvaluationPrompt(row.id, row.domain or NO_DOMAIN, messages, row.tools)


def _question(row: Conversation) -> tuple[Message, ...]:
    """Messages up to and including the last user turn; () without one."""
    turns = [i for i, message in enumerate(row.messages) if message.role == "user"]
    return row.messages[: turns[-1] + 1] if turns else ()
