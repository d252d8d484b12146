"""Makes the quickstart's conversations again: `make quickstart-data`.

    platform/data/prompts.yaml -> training prompts -> the target's own greedy answers -> quickstart.jsonl
                               -> held-out prompts -> of some, its answers ---------> quickstart_validation.jsonl
                                                   -> the others, prompts alone ----> quickstart_held_out.jsonl

Answers that the token limit cut off are marked (`finish: length`), so that no row teaches an end that the target never
wrote.
"""

import json
import multiprocessing
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dspark import quickstart
from dspark.data.conversations import Message
from dspark.data.prompts import Prompt, expand_prompts
from dspark.data.render import Renderer
from dspark.decoding.engine import Engine, Request, Sampling
from dspark.sections import TargetSettings
from dspark.target import Target, load_target
from jobs.progress import stage

DATA = Path("platform/data")
SEED, TRAIN_PER_DOMAIN, HELD_OUT_PER_DOMAIN, VALIDATION_PER_DOMAIN = 0, 800, 20, 16
DOMAINS = 3
MAX_NEW_TOKENS, BATCH, TASK = 64, 48, 96


def main() -> None:
    """Writes all files; those with answers only when every answer is there."""
    console = Console()
    train, held_out, validation = prompts()
    _write(DATA / "quickstart_held_out.jsonl", (_row(prompt) for prompt in held_out))
    quickstart.ensure_dense_copy()
    for name, asked in (("quickstart_validation", validation), ("quickstart", train)):
        rows = _answered(asked, console)
        _write(DATA / f"{name}.jsonl", rows)
        cut = sum("finish" in row for row in rows)
        console.print(f"{name}: {len(rows)} conversations, {cut} of them cut after {MAX_NEW_TOKENS} tokens")


def prompts() -> tuple[list[Prompt], list[Prompt], list[Prompt]]:
    """(training, held-out, validation); the last two have templates in common, and no text."""
    least = HELD_OUT_PER_DOMAIN + VALIDATION_PER_DOMAIN
    train, others = expand_prompts(DATA / "prompts.yaml", SEED, TRAIN_PER_DOMAIN, least)
    cut = DOMAINS * HELD_OUT_PER_DOMAIN
    named = [replace(prompt, id=prompt.id.replace("held-", "validation-")) for prompt in others[cut:]]
    return train, others[:cut], named


def _answered(asked: list[Prompt], console: Console) -> list[dict[str, Any]]:
    # What is decoded together does not depend on the number of processes, so neither do the answers.
    tasks = [asked[at : at + TASK] for at in range(0, len(asked), TASK)]
    rows: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    with stage(console, "answers", len(asked)) as bar, ProcessPoolExecutor(os.cpu_count(), context) as pool:
        for answered in pool.map(answer, tasks):
            rows += answered
            bar.update(len(rows))
    return rows


@cache
def _target() -> Target:
    """The target of this process."""
    torch.set_num_threads(1)
    return load_target(TargetSettings(model=quickstart.NAME, dtype="fp32"))


def answer(prompts: list[Prompt]) -> list[dict[str, Any]]:
    """Rows of prompts with the target's greedy answers."""
    target = _target()
    limit = target.config.max_position_embeddings
    renderer = Renderer(target.tokenizer, limit, None)
    requests = [
        Request(prompt.id, tuple(renderer.prompt([Message("user", prompt.text)])), MAX_NEW_TOKENS, Sampling())
        for prompt in prompts
    ]
    rows = []
    for prompt, found in zip(prompts, Engine(target, None, BATCH, limit).generate(requests), strict=True):
        text = str(target.tokenizer.decode(list(found.tokens), skip_special_tokens=True))
        if found.finish == "length":
            # The limit may fall inside a character, whose beginning decodes to a replacement.
            rows.append(_row(prompt, text.rstrip("\ufffd")) | {"finish": "length"})
        else:
            rows.append(_row(prompt, text))
    return rows


def _row(prompt: Prompt, answer: str | None = None) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt.text}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    return {"id": prompt.id, "domain": prompt.domain, "messages": messages}


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    main()
