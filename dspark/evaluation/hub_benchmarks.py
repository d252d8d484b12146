"""The nine benchmarks on the hub: where each lies, and how a row becomes the turns that a user would write.

The prompts are those that publications on drafters measure with, so that numbers can be compared.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dspark.data.hub import streamed
from dspark.errors import InputError

Row = Mapping[str, Any]

_BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
_FILES = "hf://datasets/"


@dataclass(frozen=True)
class Source:
    """A dataset on the hub; with `files`, JSON lines of it that are read as they are."""

    dataset: str
    split: str
    turns: Callable[[Row], list[str]]
    subset: str | None = None
    files: str | None = None


def _column(name: str, behind: str = "") -> Callable[[Row], list[str]]:
    return lambda row: [row[name] + behind]


def _humaneval(row: Row) -> list[str]:
    task = "Write a solution to the following problem and make sure that it passes the tests:"
    return [f"{task}\n```python\n{row['prompt']}\n```"]


def _livecodebench(row: Row) -> list[str]:
    task = (
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
        "correct Python program that matches the specification and passes all tests."
    )
    if row.get("starter_code"):
        form = "You will use the following starter code to write the solution to the problem and enclose your code"
        code = row["starter_code"]
    else:
        form = "Read the inputs from stdin, solve the problem and write the answer to stdout. Enclose your code"
        code = "# YOUR CODE HERE"
    question = f"### Question:\n{row['question_content']}"
    answer = "### Answer: (use the provided format with backticks)"
    return [f"{task}\n\n{question}\n\n### Format: {form} within delimiters.\n```python\n{code}\n```\n\n{answer}"]


def _alpaca(row: Row) -> list[str]:
    return [f"{row['instruction']}\n\nInput:\n{row['input']}" if row.get("input") else row["instruction"]]


SOURCES: Mapping[str, Source] = {
    "gsm8k": Source("openai/gsm8k", "test", _column("question", _BOXED), subset="main"),
    "math500": Source("HuggingFaceH4/MATH-500", "test", _column("problem", _BOXED)),
    "aime25": Source("MathArena/aime_2025", "train", _column("problem", _BOXED)),
    "humaneval": Source("openai/openai_humaneval", "test", _humaneval),
    "mbpp": Source("google-research-datasets/mbpp", "test", _column("prompt"), subset="sanitized"),
    # The newest release alone: all six are 4.5 GB, nearly all of it tests that are not run here.
    "livecodebench": Source("livecodebench/code_generation_lite", "train", _livecodebench, files="test6.jsonl"),
    "mt-bench": Source("HuggingFaceH4/mt_bench_prompts", "train", lambda row: list(row["prompt"])),
    "alpaca": Source("tatsu-lab/alpaca", "train", _alpaca),
    "arena-hard-v2": Source(
        "lmarena-ai/arena-hard-auto", "train", _column("prompt"), files="data/arena-hard-v2.0/question.jsonl"
    ),
}


def hub_turns(name: str) -> Iterator[tuple[int, dict[str, list[str]]]]:
    """(row number, {"turns": texts}) of a benchmark, read as it streams in.

    Raises:
        InputError: the package `datasets` is not installed, the hub does not answer, or the dataset has other columns.
    """
    source = SOURCES[name]
    asked = f"evaluate.benchmark_names: {name} (dataset {source.dataset})"
    remedy = f"put its prompts into a file {name}.jsonl with `turns`, and name the folder in evaluate.benchmarks"
    if source.files is None:
        rows = streamed(asked, remedy, source.dataset, source.subset, split=source.split)
    else:
        address = f"{_FILES}{source.dataset}/{source.files}"
        rows = streamed(asked, remedy, "json", data_files=address, split=source.split)
    for number, row in rows:
        try:
            yield number, {"turns": source.turns(row)}
        except (KeyError, TypeError) as error:
            raise InputError(
                f"{asked}: row {number} holds {sorted(row)} and no usable {error}, so the dataset has changed; {remedy}"
            ) from None
