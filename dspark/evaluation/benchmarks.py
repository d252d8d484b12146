"""Prompts that drafters are measured on: held-out conversations and the nine benchmarks that publications use."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from dspark.data.conversations import Conversation, Conversations, Message, conversations_of
from dspark.data.files import numbered
from dspark.errors import InputError
from dspark.evaluation.hub_benchmarks import hub_turns
from dspark.sections import BENCHMARKS

NO_DOMAIN = "other"


@dataclass(frozen=True)
class EvaluationPrompt:
    """Messages for the target to answer, the last one a user's. Tables have one row per `domain`.

    `later` are user turns that follow, each behind the target's own answer to the turn before.
    """

    id: str
    domain: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    later: tuple[str, ...] = ()
    turn: int = 1

    def following(self, answer: str) -> "EvaluationPrompt | None":
        """The prompt of the next turn after this `answer`; None if this is the last one."""
        if not self.later:
            return None
        turn = self.turn + 1
        messages = (*self.messages, Message("assistant", answer), Message("user", self.later[0]))
        name = f"{conversation_of(self.id, self.turn)}/turn-{turn}"
        return replace(self, id=name, messages=messages, later=self.later[1:], turn=turn)


def conversation_of(prompt_id: str, turn: int) -> str:
    """The id of the first turn of a prompt's conversation."""
    return prompt_id.removesuffix(f"/turn-{turn}") if turn > 1 else prompt_id


def held_out_prompts(conversations: Conversations, limit: int) -> list[EvaluationPrompt]:
    """At most `limit` distinct prompts: each conversation up to its last user turn.

    The domains take turns, in the order of their first row, so that every prefix of the list holds them evenly. A
    conversation without a domain counts for `other`; one without a user turn gives no prompt. InputError if none does,
    or if two prompts have one id.
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
    chosen = [prompt for prompt in chain.from_iterable(turns) if prompt is not None][:limit]
    if twice := [name for name, count in Counter(prompt.id for prompt in chosen).items() if count > 1]:
        raise InputError(
            f"{len(twice)} ids stand for several held-out prompts, such as {twice[0]!r}, and results are kept by id: "
            "make the ids of data.held_out distinct, or leave them out"
        )
    return chosen


def benchmark_prompts(
    folder: Path | None, names: Sequence[str], limit: int | None, all_turns: bool
) -> list[EvaluationPrompt]:
    """Prompts of benchmarks from the NAME.jsonl files of `folder`, or from the hub where there is none.

    Args:
        names: of BENCHMARKS; empty: every file of the folder.
        limit: at most so many of each, evenly spaced over its rows; None: all.
        all_turns: the `turns` behind the first one come as `later`.

    The name becomes the domain; ids read NAME/ROW. Raises InputError for a folder without such files, for files of
    other names, and for a benchmark with an unusable row: one with rows left out is another benchmark.
    """
    files = {} if folder is None else _files(folder, names)
    prompts: list[EvaluationPrompt] = []
    for name in (name for name in BENCHMARKS if name in (names or files)):
        rows = numbered([files[name]]) if name in files else hub_turns(name)
        prompts += _spaced(name, str(files.get(name, name)), rows, limit, all_turns)
    return prompts


def _files(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    """The files of the wanted benchmarks; each is there."""
    files = {file.stem: file for file in sorted(folder.glob("*.jsonl"))}
    known = f"the known benchmarks are {', '.join(BENCHMARKS)}"
    if not files:
        found = "has no NAME.jsonl" if folder.is_dir() else "is no folder"
        raise InputError(f"evaluate.benchmarks: {folder} {found}; {known}")
    if missing := [name for name in names if name not in files]:
        raise InputError(
            f"evaluate.benchmark_names asks for {', '.join(missing)}, and evaluate.benchmarks={folder} holds "
            f"{', '.join(files)}: add NAME.jsonl, or set evaluate.benchmarks=null to take all from the hub"
        )
    unknown = [file.name for name, file in files.items() if name not in BENCHMARKS]
    if unknown and not names:
        raise InputError(
            f"evaluate.benchmarks: {folder} holds {', '.join(unknown)}; {known}: move or rename the others, or say "
            "which to measure in evaluate.benchmark_names"
        )
    return files


def _spaced(
    name: str, source: str, rows: Iterable[tuple[int, Any]], limit: int | None, all_turns: bool
) -> Iterator[EvaluationPrompt]:
    raws = dict(rows)
    found = conversations_of(source, raws.items(), {}, max_bad_fraction=0.0).rows
    # Some files are sorted by topic or difficulty: the first rows would not stand for the whole.
    count = min(limit or len(found), len(found))
    for row in (found[i * len(found) // count] for i in range(count)):
        later = raws[row.row].get("turns", [])[1:] if all_turns else []
        if not all(isinstance(turn, str) and turn for turn in later):
            raise InputError(f"{source}, row {row.row}: a later one of its `turns` is no text: repair the row")
        yield EvaluationPrompt(f"{name}/{row.row}", name, _question(row), later=tuple(later))


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
