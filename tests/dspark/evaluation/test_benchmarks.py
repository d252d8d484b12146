"""Prompts: which are taken, in which order, from what; and what is refused."""

import json
from pathlib import Path

import pytest

from dspark.data.conversations import Conversation, Conversations, Message
from dspark.errors import InputError
from dspark.evaluation.benchmarks import BENCHMARKS, benchmark_prompts, held_out_prompts, is_benchmark


def conversation(name: str, domain: str | None, *turns: str) -> Conversation:
    """Turns as "role text"."""
    messages = tuple(Message(role, content) for role, _, content in (turn.partition(" ") for turn in turns))
    return Conversation(name, messages, domain, row=1)


def held_out(*rows: Conversation) -> Conversations:
    return Conversations(rows, dropped=())


def write(folder: Path, name: str, rows: list[object]) -> None:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def questions(count: int) -> list[object]:
    return [{"turns": [f"question {i}", "and a second turn"]} for i in range(count)]


def test_a_prompt_ends_with_the_last_user_turn() -> None:
    row = conversation("c", "chat", "system be brief", "user hello", "assistant hi", "user why?", "assistant because")
    (prompt,) = held_out_prompts(held_out(row), limit=9)
    assert (prompt.id, prompt.domain) == ("c", "chat")
    assert prompt.messages == row.messages[:4]


def test_every_limit_keeps_the_domains_even() -> None:
    rows = [
        conversation(f"{domain}{i}", domain, f"user {domain}{i}")
        for domain in ("math", "code", "chat")
        for i in range(3)
    ]
    prompts = held_out_prompts(held_out(*rows), limit=7)
    assert [prompt.id for prompt in prompts] == ["math0", "code0", "chat0", "math1", "code1", "chat1", "math2"]
    assert held_out_prompts(held_out(*rows), limit=3) == prompts[:3]


def test_a_domain_that_runs_out_leaves_its_turns_to_the_others() -> None:
    rows = [conversation("a", "math", "user a"), conversation("b", None, "user b"), conversation("c", None, "user c")]
    prompts = held_out_prompts(held_out(*rows), limit=9)
    assert [(prompt.id, prompt.domain) for prompt in prompts] == [("a", "math"), ("b", "other"), ("c", "other")]


def test_several_answers_to_one_question_are_one_prompt() -> None:
    rows = [conversation(name, "math", "user 1 + 1?", f"assistant {name}") for name in ("two", "2")]
    assert [prompt.id for prompt in held_out_prompts(held_out(*rows), limit=9)] == ["two"]


def test_conversations_without_a_question_give_no_prompt() -> None:
    monologue = conversation("m", "chat", "system be brief", "assistant hello")
    question = conversation("q", "chat", "user hello")
    assert [prompt.id for prompt in held_out_prompts(held_out(monologue, question), limit=9)] == ["q"]
    with pytest.raises(InputError, match=r"none of the 1 held-out conversations has a user turn.*data\.held_out"):
        held_out_prompts(held_out(monologue), limit=9)


def test_benchmarks_give_their_first_turns_under_their_own_name(tmp_path: Path) -> None:
    write(tmp_path, "mt-bench.jsonl", questions(2))
    write(tmp_path, "gsm8k.jsonl", questions(1))
    (tmp_path / "README.md").write_text("not a benchmark")
    prompts = benchmark_prompts(tmp_path, limit=5)
    assert [(prompt.id, prompt.domain, prompt.messages) for prompt in prompts] == [
        ("gsm8k/1", "gsm8k", (Message("user", "question 0"),)),
        ("mt-bench/1", "mt-bench", (Message("user", "question 0"),)),
        ("mt-bench/2", "mt-bench", (Message("user", "question 1"),)),
    ]
    assert all(is_benchmark(prompt.id, prompt.domain) for prompt in prompts)
    assert not is_benchmark("a conversation of the user's", "gsm8k")


@pytest.mark.parametrize(("limit", "rows"), [(3, [1, 4, 7]), (10, list(range(1, 11))), (11, list(range(1, 11)))])
def test_a_limit_spreads_over_the_file(tmp_path: Path, limit: int, rows: list[int]) -> None:
    write(tmp_path, "humaneval.jsonl", questions(10))
    assert [prompt.id for prompt in benchmark_prompts(tmp_path, limit)] == [f"humaneval/{row}" for row in rows]


def test_every_benchmark_belongs_to_a_domain_group() -> None:
    groups = list(BENCHMARKS.values())
    assert {group: groups.count(group) for group in groups} == {"math": 3, "code": 3, "chat": 3}


def test_unknown_benchmarks_are_named(tmp_path: Path) -> None:
    write(tmp_path, "gsm8k.jsonl", questions(1))
    write(tmp_path, "mmlu.jsonl", questions(1))
    write(tmp_path, "gsm8k-old.jsonl", questions(1))
    with pytest.raises(InputError, match=r"holds gsm8k-old\.jsonl, mmlu\.jsonl; the known benchmarks are gsm8k, "):
        benchmark_prompts(tmp_path, limit=5)


def test_a_folder_without_benchmarks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no NAME\.jsonl"):
        benchmark_prompts(tmp_path, limit=5)
    with pytest.raises(InputError, match="is no folder"):
        benchmark_prompts(tmp_path / "missing", limit=5)


def test_a_benchmark_with_a_broken_row_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "mbpp.jsonl", [*questions(40), {"turns": []}])
    with pytest.raises(InputError, match=r"mbpp\.jsonl"):
        benchmark_prompts(tmp_path, limit=5)
