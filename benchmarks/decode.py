"""Decoding with a drafter and without, at several batch sizes: `make bench-decode`.

real prompts --plain, speculative--> tokens per second at batch 1, 8, 16 (temperature 0, one request id each)
passes of the engine at batch 1 <-> the matrix products in them alone, with the models' own weights

Prints a table and, as its last line, one JSON object; exits with 1 where a number misses its bound. Figures of a draft
pass count the products of its layers and heads over K slots; the context rows that a round adds are left out of them.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dspark.decoding.engine import Engine, Generation, Request, Sampling
from dspark.errors import InputError
from dspark.model.drafter import Drafter
from dspark.model.exchange import load_for_target
from dspark.model.kinds import AnyDrafter
from dspark.target import Target, load_target
from dspark.target_files import DTYPES, load_tokenizer
from jobs.config import load_settings
from jobs.rows import prepare_prompts

PRESET = Path("platform/presets/smollm2_135m.yaml")
BATCHES = (1, 8, 16)
BOUNDS = {
    "round_in_plain_tokens": ("<=", 1.8),
    "plain_pass_over_products": ("<=", 1.3),
    "verify_pass_over_products": ("<=", 1.3),
    "draft_pass_over_products": ("<=", 1.3),
    "outside_share": ("<=", 0.1),
    "plain_8_over_1": (">=", 4.5),
    "speculative_8_over_1": (">=", 2.5),
}


class Side(NamedTuple):
    """What one engine made of all prompts: seconds by part, of this run alone."""

    results: list[Generation]
    seconds: dict[str, float]

    @property
    def tokens(self) -> int:
        return sum(len(result.tokens) for result in self.results)

    @property
    def rounds(self) -> int:
        return sum(len(result.rounds) for result in self.results)

    @property
    def in_rounds(self) -> float:
        return self.seconds["total"] - self.seconds["prefill"]


def decoded(target: Target, drafter: AnyDrafter | None, batch: int, requests: Sequence[Request]) -> Side:
    """All requests through an engine of its own, whose buffers are made before the clock starts."""
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    engine = Engine(target, drafter, batch, longest)
    engine.generate(requests[:batch])
    before = asdict(engine.seconds)
    results = engine.generate(requests)
    return Side(results, {name: value - before[name] for name, value in asdict(engine.seconds).items()})


def products(weights: Sequence[Tensor], rows: int, repeats: int) -> float:
    """Median seconds of `rows` rows times each of these weights, one behind the other, into memory that is there."""
    inputs = {weight.shape[1]: torch.randn(rows, weight.shape[1]).to(weight) for weight in weights}
    outputs = {weight.shape[0]: torch.empty(rows, weight.shape[0]).to(weight) for weight in weights}

    def once() -> float:
        since = time.perf_counter()
        for weight in weights:
            torch.mm(inputs[weight.shape[1]], weight.t(), out=outputs[weight.shape[0]])
        if weights[0].is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - since

    once()
    return statistics.median(once() for _ in range(repeats))


def linear_weights(module: nn.Module, wanted: Callable[[str], bool] = lambda _: True) -> list[Tensor]:
    """Weights of the module's linear layers."""
    found = [part.weight for name, part in module.named_modules() if isinstance(part, nn.Linear) and wanted(name)]
    return [weight.detach() for weight in found]


def measure(target: Target, drafter: Drafter, requests: Sequence[Request], repeats: int) -> dict[str, Any]:
    """Every number of the table."""
    found: dict[str, Any] = {}
    sides = {
        (name, batch): decoded(target, used, batch, requests)
        for batch in BATCHES
        for name, used in (("plain", None), ("speculative", drafter))
    }
    for (name, batch), side in sides.items():
        found[f"{name}_{batch}_tokens_per_s"] = side.tokens / side.seconds["total"]
    plain, drafted = sides["plain", 1], sides["speculative", 1]
    texts = [[result.tokens for result in side.results] for side in sides.values()]
    found["identical"] = all(text == texts[0] for text in texts)
    kept = sum(one.kept for result in drafted.results for one in result.rounds)
    found["acceptance_length"] = kept / drafted.rounds
    plain_token = plain.in_rounds / plain.rounds
    found["plain_token_ms"] = 1e3 * plain_token
    found["round_ms"] = 1e3 * drafted.in_rounds / drafted.rounds
    found["round_in_plain_tokens"] = drafted.in_rounds / drafted.rounds / plain_token
    block = drafter.config.block
    head = [target.vocabulary.head_VH]
    whole = [*linear_weights(target.decoder), *head]
    own = target.vocabulary.narrowed(drafter.kept).draft_head_DH
    draft = [*linear_weights(drafter, lambda name: name.startswith("layers")), own]
    found["plain_pass_over_products"] = plain.seconds["verify"] / plain.rounds / products(whole, 1, repeats)
    verify = drafted.seconds["verify"] / drafted.rounds
    found["verify_pass_over_products"] = verify / products(whole, block + 1, repeats)
    proposing = drafted.seconds["draft"] / drafted.rounds
    found["draft_pass_over_products"] = proposing / products(draft, block, repeats)
    found["outside_share"] = drafted.seconds["other"] / drafted.seconds["total"]
    for name in ("plain", "speculative"):
        found[f"{name}_8_over_1"] = found[f"{name}_8_tokens_per_s"] / found[f"{name}_1_tokens_per_s"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("drafter", type=Path, nargs="?", default=Path("runs/latest/drafter"))
    parser.add_argument(
        "--prompts", type=int, default=32, help="held-out prompts of the quickstart, or of --benchmarks"
    )
    parser.add_argument(
        "--benchmarks", type=Path, help="folder of NAME.jsonl with `turns`, in the place of the held-out"
    )
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="fp32", choices=sorted(DTYPES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=30, help="of the bare products")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if not arguments.drafter.is_dir():
        print(f"error: there is no drafter in {arguments.drafter}: run `make demo`, or name one", file=sys.stderr)
        return 2
    overrides = [f"target.dtype={arguments.dtype}", f"evaluate.prompts_t0={min(48, arguments.prompts)}"]
    if arguments.benchmarks is not None:
        overrides.append(f"evaluate.benchmarks={arguments.benchmarks}")
    settings = load_settings(PRESET, overrides)
    rows = prepare_prompts(settings, load_tokenizer(settings.target))
    ids = rows.ids[-arguments.prompts :] if arguments.benchmarks is not None else rows.ids[: arguments.prompts]
    requests = [
        Request(f"{place}", tuple(prompt), arguments.new_tokens, Sampling(temperature=0.0))
        for place, prompt in enumerate(ids)
    ]
    target = load_target(settings.target)
    dtype = DTYPES[arguments.dtype]
    drafter = load_for_target(arguments.drafter, settings.target, target.device, dtype).drafter
    if not isinstance(drafter, Drafter):
        raise InputError(f"{arguments.drafter} drafts one token per pass: this benchmark measures block drafters")
    found = measure(target, drafter, requests, arguments.repeats)
    missed = [name for name, (sign, bound) in BOUNDS.items() if (found[name] > bound) == (sign == "<=")]
    table = Table("number", "found", "bound")
    for name, value in found.items():
        bound = " ".join(map(str, BOUNDS.get(name, ())))
        table.add_row(name, str(value) if isinstance(value, bool) else f"{value:,.4g}", bound)
    Console().print(table)
    facts = {"dtype": arguments.dtype, "threads": arguments.threads, "prompts": len(requests), "missed": missed}
    rounded = {name: value if isinstance(value, bool) else round(value, 4) for name, value in found.items()}
    print(json.dumps(rounded | facts))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
