"""Makes the quickstart's conversations again: `make quickstart-data`.

    platform/data/prompts.yaml -> training prompts -> the target's own greedy answers -> quickstart.jsonl
                               -> held-out prompts ---------------------------------> quickstart_held_out.jsonl

Answers that the token limit cut off are left out, so that no row teaches an end that the target never wrote.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dspark import quickstart
from dspark.config import TargetSettings
from dspark.data.conversations import Message
from dspark.data.prompts import Prompt, expand_prompts
from dspark.data.render import Renderer
from dspark.decoding.engine import Engine, Request, Sampling
from dspark.target import Target, load_target, native_precision
from jobs.progress import stage

DATA = Path("platform/data")
SEED, TRAIN_PER_DOMAIN, HELD_OUT_PER_DOMAIN = 0, 160, 20
MAX_NEW_TOKENS, BATCH = 320, 16


def main() -> None:
    """Writes both files; the training file only when every answer is there."""
    console = Console()
    train, held_out = expand_prompts(DATA / "prompts.yaml", SEED, TRAIN_PER_DOMAIN, HELD_OUT_PER_DOMAIN)
    _write(DATA / "quickstart_held_out.jsonl", (_row(prompt) for prompt in held_out))
    target = load_target(TargetSettings(model=quickstart.NAME, dtype=native_precision(gpu=torch.cuda.is_available())))
    answered = list(_answered(target, train, console))
    rows = _thirds(answered)
    _write(DATA / "quickstart.jsonl", rows)
    console.print(
        f"{len(rows)} conversations; {len(train) - len(answered)} answers of over {MAX_NEW_TOKENS} tokens left out, "
        f"{len(answered) - len(rows)} to keep the domains equal"
    )


def _answered(target: Target, prompts: list[Prompt], console: Console) -> Iterable[dict[str, Any]]:
    renderer = Renderer(target.tokenizer, target.config.max_position_embeddings, None)
    engine = Engine(target, None, BATCH, target.config.max_position_embeddings)
    with stage(console, "answers", len(prompts)) as bar:
        for at in range(0, len(prompts), 4 * BATCH):
            group = prompts[at : at + 4 * BATCH]
            requests = [
                Request(prompt.id, tuple(renderer.prompt([Message("user", prompt.text)])), MAX_NEW_TOKENS, Sampling())
                for prompt in group
            ]
            for prompt, answer in zip(group, engine.generate(requests), strict=True):
                if answer.finish == "stop":
                    text = str(target.tokenizer.decode(list(answer.tokens), skip_special_tokens=True))
                    yield _row(prompt, text)
            bar.update(at + len(group))


def _thirds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Equally many rows of every domain, the first ones of each."""
    fewest = min(Counter(row["domain"] for row in rows).values())
    seen: Counter[str] = Counter()
    kept = []
    for row in rows:
        seen[row["domain"]] += 1
        if seen[row["domain"]] <= fewest:
            kept.append(row)
    return kept


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
