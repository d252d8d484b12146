"""Prompts: which are taken, in which order, from what; and what is refused."""

import json
import sys
from pathlib import Path

import pytest

from dspark.data.conversations import Conversation, Conversations, Message
from dspark.errors import InputError
from dspark.evaluation.benchmarks import EvaluationPrompt, benchmark_prompts, held_out_prompts, is_benchmark
from dspark.evaluation.hub_benchmarks import SOURCES
from dspark.sections import BENCHMARKS


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


def first_turns(folder: Path, limit: int | None) -> list[EvaluationPrompt]:
    return benchmark_prompts(folder, (), limit, all_turns=False)


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
    prompts = first_turns(tmp_path, limit=5)
    assert [(prompt.id, prompt.domain, prompt.messages) for prompt in prompts] == [
        ("gsm8k/1", "gsm8k", (Message("user", "question 0"),)),
        ("mt-bench/1", "mt-bench", (Message("user", "question 0"),)),
        ("mt-bench/2", "mt-bench", (Message("user", "question 1"),)),
    ]
    assert all(is_benchmark(prompt.id, prompt.domain) for prompt in prompts)
    assert not is_benchmark("a conversation of the user's", "gsm8k")


@pytest.mark.parametrize(
    ("limit", "rows"), [(3, [1, 4, 7]), *((limit, list(range(1, 11))) for limit in (10, 11, None))]
)
def test_a_limit_spreads_over_the_file(tmp_path: Path, limit: int | None, rows: list[int]) -> None:
    write(tmp_path, "humaneval.jsonl", questions(10))
    assert [prompt.id for prompt in first_turns(tmp_path, limit)] == [f"humaneval/{row}" for row in rows]


def test_every_benchmark_belongs_to_a_domain_group() -> None:
    groups = list(BENCHMARKS.values())
    assert {group: groups.count(group) for group in groups} == {"math": 3, "code": 3, "chat": 3}


def test_unknown_benchmarks_are_named(tmp_path: Path) -> None:
    write(tmp_path, "gsm8k.jsonl", questions(1))
    write(tmp_path, "mmlu.jsonl", questions(1))
    write(tmp_path, "gsm8k-old.jsonl", questions(1))
    with pytest.raises(InputError, match=r"holds gsm8k-old\.jsonl, mmlu\.jsonl; the known benchmarks are gsm8k, "):
        first_turns(tmp_path, limit=5)


def test_a_folder_without_benchmarks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no NAME\.jsonl"):
        first_turns(tmp_path, limit=5)
    with pytest.raises(InputError, match="is no folder"):
        first_turns(tmp_path / "missing", limit=5)


def test_a_benchmark_with_a_broken_row_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "mbpp.jsonl", [*questions(40), {"turns": []}])
    with pytest.raises(InputError, match=r"mbpp\.jsonl"):
        first_turns(tmp_path, limit=5)


def test_names_choose_among_the_files_and_all_turns_follow_the_targets_own_answers(tmp_path: Path) -> None:
    write(tmp_path, "mt-bench.jsonl", [{"turns": ["one", "two", "three"]}])
    write(tmp_path, "gsm8k.jsonl", questions(1))
    write(tmp_path, "notes.jsonl", questions(1))
    (prompt,) = benchmark_prompts(tmp_path, ("mt-bench",), None, all_turns=True)
    assert (prompt.id, prompt.later) == ("mt-bench/1", ("two", "three"))
    second = prompt.following("an answer")
    assert second is not None
    third = second.following("another")
    assert third is not None and third.following("the end") is None
    assert (second.id, third.id, third.turn) == ("mt-bench/1/turn-2", "mt-bench/1/turn-3", 3)
    assert [(one.role, one.content) for one in third.messages] == [
        ("user", "one"), ("assistant", "an answer"), ("user", "two"), ("assistant", "another"), ("user", "three"),
    ]  # fmt: skip
    with pytest.raises(InputError, match=r"asks for humaneval, and .* holds gsm8k, mt-bench, notes: add NAME\.jsonl"):
        benchmark_prompts(tmp_path, ("mt-bench", "humaneval"), None, all_turns=False)


def test_a_later_turn_that_is_no_text_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "mt-bench.jsonl", [{"turns": ["one", ["two"]]}])
    assert len(first_turns(tmp_path, None)) == 1
    with pytest.raises(InputError, match="row 1: a later one of its `turns` is no text"):
        benchmark_prompts(tmp_path, (), None, all_turns=True)


def test_ids_that_stand_for_two_prompts_are_refused() -> None:
    rows = [conversation("a", "math", "user a"), conversation("a", "math", "user b")]
    with pytest.raises(InputError, match="1 ids stand for several held-out prompts, such as 'a'"):
        held_out_prompts(held_out(*rows), limit=9)


HUB_ROWS: dict[str, tuple[dict[str, object], list[str]]] = {
    "gsm8k": ({"question": "1 + 1?", "answer": "2"}, ["1 + 1?\nPlease reason step by step, and put your final answer "
              "within \\boxed{}."]),
    "math500": ({"problem": "x?"}, ["x?\nPlease reason step by step, and put your final answer within \\boxed{}."]),
    "aime25": ({"problem": "x?"}, ["x?\nPlease reason step by step, and put your final answer within \\boxed{}."]),
    "humaneval": ({"prompt": "def f():\n"}, ["Write a solution to the following problem and make sure that it passes "
                  "the tests:\n```python\ndef f():\n\n```"]),
    "mbpp": ({"prompt": "Write f."}, ["Write f."]),
    "mt-bench": ({"prompt": ["first", "second"]}, ["first", "second"]),
    "alpaca": ({"instruction": "Add.", "input": "1, 1"}, ["Add.\n\nInput:\n1, 1"]),
    "arena-hard-v2": ({"prompt": "Write."}, ["Write."]),
}  # fmt: skip


def test_the_hub_has_the_same_benchmarks_as_folders_and_rows_become_the_published_prompts() -> None:
    assert list(SOURCES) == list(BENCHMARKS)
    assert {name: SOURCES[name].turns(row) for name, (row, _) in HUB_ROWS.items()} == {
        name: turns for name, (_, turns) in HUB_ROWS.items()
    }
    assert SOURCES["alpaca"].turns({"instruction": "Say hi.", "input": ""}) == ["Say hi."]
    code = SOURCES["livecodebench"].turns
    (given,), (free,) = code({"question_content": "Q", "starter_code": "class S:"}), code({"question_content": "Q"})
    assert (
        "### Question:\nQ\n" in given and "```python\nclass S:\n```" in given and "Read the inputs from stdin" in free
    )


def test_benchmarks_from_the_hub_are_read_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)  # a folder with a dataset's name goes before the hub
    for name in ("mt-bench", "aime25"):
        folder = tmp_path / SOURCES[name].dataset
        folder.mkdir(parents=True)
        write(folder, "train.jsonl", [HUB_ROWS["mt-bench"][0], {"prompt": ["third", "fourth"]}])
    prompts = benchmark_prompts(None, ("mt-bench",), 1, all_turns=True)
    assert [(one.id, one.messages[0].content, one.later) for one in prompts] == [("mt-bench/1", "first", ("second",))]
    with pytest.raises(
        InputError, match=r"aime25 \(dataset MathArena/aime_2025\): row 1 holds \['prompt'\] and no usable"
    ):
        benchmark_prompts(None, ("aime25",), 1, all_turns=False)


def test_without_a_way_to_the_hub_the_error_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"gsm8k .*pip install datasets.*or put its prompts into a file gsm8k\.jsonl"):
        benchmark_prompts(None, ("gsm8k",), 1, all_turns=False)
