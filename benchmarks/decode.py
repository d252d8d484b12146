"""Decoding with a drafter and without, at several batch sizes: `make bench-decode`.

    prompts --plain, speculative--> tokens per second at batch 1, 8, 16 (temperature 0, every prompt once)
    passes of the engine at batch 1 <-> the matrix products in them alone, with the models' own weights, in turn

Without a drafter it trains one first, in minutes, which later calls use again. Prints a table and, as its last line,
one JSON object; exits with 1 where a number misses its bound; `--record` writes them into docs/decoding.md.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from benchmarks.decode_products import draft_products, measured, target_products
from benchmarks.decode_record import BOUNDS, record, table
from benchmarks.performance_record import machine
from dspark.decoding.differences import first_difference
from dspark.decoding.engine import Engine, Generation, Request, Sampling
from dspark.errors import InputError
from dspark.model.drafter import Drafter
from dspark.model.exchange import load_for_target
from dspark.model.kinds import AnyDrafter
from dspark.sections import Precision
from dspark.target import Target, load_target
from dspark.target_files import DTYPES, load_tokenizer, native_precision
from jobs.config import load_settings
from jobs.rows import prepare_prompts

PRESET = Path("platform/presets/smollm2_135m.yaml")
OWN = Path("runs/bench-decode")
BATCHES = (1, 8, 16)


class Side(NamedTuple):
    """What one engine made of all prompts, and its seconds: PARTS of the engine, `other` and `total` by the clock."""

    results: list[Generation]
    seconds: dict[str, float]

    @property
    def tokens(self) -> int:
        return sum(len(result.tokens) for result in self.results)

    @property
    def kept(self) -> int:
        """Without each text's first token, which its prompt's pass gives."""
        return self.tokens - len(self.results)

    @property
    def rounds(self) -> int:
        """Of all requests; at batch 1 these are the rounds of the engine."""
        return sum(len(result.rounds) for result in self.results)

    @property
    def round_seconds(self) -> float:
        """One round at batch 1, whatever it does; no prompts."""
        return (self.seconds["total"] - self.seconds["prefill"]) / self.rounds


def decoded(target: Target, drafter: AnyDrafter | None, batch: int, requests: Sequence[Request]) -> Side:
    """All requests through an engine of its own, whose buffers are made before the clock starts."""
    longest = max(requests, key=lambda request: len(request.prompt))
    engine = Engine(target, drafter, batch, len(longest.prompt) + longest.max_new_tokens)
    engine.generate([longest])
    engine.generate([replace(one, prompt=one.prompt[:8], max_new_tokens=3) for one in requests[:batch]])
    before, since = asdict(engine.seconds), time.perf_counter()
    results = engine.generate(requests)
    seconds = {name: value - before[name] for name, value in asdict(engine.seconds).items()}
    seconds["total"] = time.perf_counter() - since
    seconds["other"] = seconds["total"] - seconds["prefill"] - seconds["draft"] - seconds["verify"]
    return Side(results, seconds)


def measure(target: Target, drafter: Drafter, requests: Sequence[Request], cycles: int) -> dict[str, Any]:
    """Every number of one compute type."""
    sides: dict[tuple[str, int], Side] = {}
    for batch in [batch for batch in BATCHES if batch <= len(requests)]:
        for name, used in (("plain", None), ("speculative", drafter)):
            side = sides[name, batch] = decoded(target, used, batch, requests)
            print(f"{target.dtype}, {name}, batch {batch}: {side.seconds['total']:.1f} s", flush=True)
    found: dict[str, Any] = {}
    for (name, batch), side in sides.items():
        found[f"{name}_{batch}_tokens_per_s"] = side.kept / (side.seconds["total"] - side.seconds["prefill"])
        found[f"{name}_{batch}_with_prompts"] = side.tokens / side.seconds["total"]
    plain, drafted = sides["plain", 1], sides["speculative", 1]
    for name in ("plain", "speculative"):
        for batch in BATCHES[1:]:
            if (name, batch) in sides:
                found[f"{name}_{batch}_over_1"] = (
                    found[f"{name}_{batch}_tokens_per_s"] / found[f"{name}_1_tokens_per_s"]
                )
    kept = sum(one.kept for result in drafted.results for one in result.rounds) / drafted.rounds
    found["acceptance_length"] = kept
    found["plain_token_ms"], found["round_ms"] = 1e3 * plain.round_seconds, 1e3 * drafted.round_seconds
    found["round_in_plain_tokens"] = drafted.round_seconds / plain.round_seconds
    passes = {
        "plain": (plain.seconds["verify"] / plain.rounds, target_products(target, 1)),
        "verify": (drafted.seconds["verify"] / drafted.rounds, target_products(target, 1 + drafter.config.block)),
        "draft": (
            drafted.seconds["draft"] / drafted.rounds,
            draft_products(drafter, target.decoding_vocabulary, round(kept)),
        ),
    }
    bare = measured({name: products for name, (_, products) in passes.items()}, cycles)
    for name, (seconds, _) in passes.items():
        found[f"{name}_pass_ms"], found[f"{name}_products_ms"] = 1e3 * seconds, 1e3 * bare[name]
        found[f"{name}_pass_over_products"] = seconds / bare[name]
    found["outside_share"] = max(side.seconds["other"] / side.seconds["total"] for side in sides.values())
    found["prefill_share"] = max(side.seconds["prefill"] / side.seconds["total"] for side in sides.values())
    found["differences"] = differences(target, requests, sides)
    found["identical"] = not found["differences"]
    return found


def differences(
    target: Target, requests: Sequence[Request], sides: dict[tuple[str, int], Side]
) -> list[dict[str, Any]]:
    """Each answer that is not that of plain decoding at batch 1: where it differs, and how nearly two tokens tied."""
    found = []
    for (name, batch), side in sides.items():
        for request, plain, other in zip(requests, sides["plain", 1].results, side.results, strict=True):
            difference = first_difference(target, request.prompt, plain.tokens, other.tokens)
            if difference is not None:
                found.append({"prompt": request.id, "side": name, "batch": batch} | asdict(difference))
    return found


def own_drafter(steps: int) -> Path:
    """A drafter of the quickstart's preset, trained now or by an earlier call."""
    output = OWN.absolute() / f"{steps}-steps"
    folder = output / "latest" / "drafter"
    if (folder / "config.json").is_file():
        print(f"drafter: {folder}, trained by an earlier call")
        return folder
    print(f"drafter: none is named; training one for {steps} steps into {output}", flush=True)
    options = [f"train.max_steps={steps}", f"output={output}", "tracking.register_model=false"]
    code = subprocess.run([sys.executable, "-m", "jobs.train", str(PRESET), *options], check=False).returncode
    if code:
        raise SystemExit(f"the training of a drafter failed with exit code {code}: name one that exists")
    return folder


def prompts(count: int, benchmarks: Path | None, new_tokens: int) -> list[Request]:
    """The first held-out prompts of the quickstart, or as many of each benchmark in a folder, as token ids."""
    overrides = [f"evaluate.prompts_t0={count}", "evaluate.prompts_t1=0"]
    if benchmarks is not None:
        files = len(list(benchmarks.glob("*.jsonl")))
        overrides = ["evaluate.prompts_t0=1", "evaluate.prompts_t1=0", f"evaluate.benchmarks={benchmarks.absolute()}",
                     f"evaluate.benchmark_prompts={-(-count // max(1, files))}"]  # fmt: skip
    settings = load_settings(PRESET, [*overrides, f"evaluate.max_new_tokens={new_tokens}"])
    rows = prepare_prompts(settings, load_tokenizer(settings.target))
    named = [(prompt.id, ids) for prompt, ids in zip(rows.prompts, rows.ids, strict=True)]
    chosen = named[:count] if benchmarks is None else named[1:][:count]
    return [Request(name, tuple(ids), new_tokens, Sampling(temperature=0.0)) for name, ids in chosen]


def loaded(folder: Path, dtype: Precision) -> tuple[Target, Drafter]:
    settings = load_settings(PRESET, [f"target.dtype={dtype}"])
    target = load_target(settings.target)
    drafter = load_for_target(folder, settings.target, target.device, DTYPES[dtype]).drafter
    if not isinstance(drafter, Drafter):
        raise InputError(f"{folder} drafts one token per pass: this benchmark measures block drafters")
    return target, drafter


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", type=Path, nargs="?", help="folder of a block drafter; none: trains its own")
    parser.add_argument("--steps", type=int, default=200, help="of its own drafter's training")
    parser.add_argument("--benchmarks", type=Path, help="folder of NAME.jsonl with `turns`; none: held-out prompts")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--small", type=int, nargs=2, default=(8, 16), metavar=("PROMPTS", "TOKENS"),
                        help="sizes in bf16 on a machine that does not multiply it natively")  # fmt: skip
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cycles", type=int, default=20, help="of the bare products")
    parser.add_argument("--record", action="store_true", help="write the figures into docs/decoding.md")
    return parser.parse_args()


def main() -> int:
    asked = arguments()
    torch.set_num_threads(asked.threads)
    folder = own_drafter(asked.steps) if asked.drafter is None else asked.drafter
    requests = prompts(asked.prompts, asked.benchmarks, asked.new_tokens)
    report: dict[str, Any] = {"command": command_of(sys.argv[1:]), "machine": machine(asked.threads)}
    for dtype in ("fp32", "bf16"):
        target, drafter = loaded(folder, dtype)
        small = dtype == "bf16" and native_precision(torch.cuda.is_available()) != "bf16"
        count, tokens = asked.small if small else (asked.prompts, asked.new_tokens)
        chosen = [replace(request, max_new_tokens=min(tokens, asked.new_tokens)) for request in requests[:count]]
        sizes = {"prompts": len(chosen), "new_tokens": chosen[0].max_new_tokens,
                 "prompt_tokens": sum(len(request.prompt) for request in chosen)}  # fmt: skip
        report["drafter"] = {"name": str(drafter.config), "steps": training_steps(folder)}
        report[dtype] = sizes | measure(target, drafter, chosen, asked.cycles)
    exact = report["fp32"]
    # Fewer prompts than a batch has rows leave its numbers out.
    bounds = {name: rule for name, rule in BOUNDS.items() if name in exact}
    report["missed"] = [name for name, (sign, bound) in bounds.items() if (exact[name] > bound) == (sign == "<=")]
    if not exact["identical"]:
        report["missed"].append("identical")
    Console().print(table(report))
    if asked.record:
        record(report)
    print(json.dumps(report))
    return int(bool(report["missed"]))


def training_steps(folder: Path) -> int | None:
    """Optimizer steps of a drafter that this project trained."""
    facts = json.loads((folder / "config.json").read_text()).get("dspark", {})
    return facts.get("steps")


def command_of(given: list[str]) -> str:
    """The call without the places of this machine."""
    shown = ["FOLDER" if "/" in text else text for text in given]
    return f"make bench-decode ARGS='{' '.join(shown)}'" if shown else "make bench-decode"


if __name__ == "__main__":
    sys.exit(main())
