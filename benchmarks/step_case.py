"""One side of one case of `benchmarks/train_step.py`, measured in this process: `python benchmarks/step_case.py JSON`.

Weights, states and tokens are random; the shapes are what counts. Prints one JSON object.
"""

import gc
import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.products import products_of
from benchmarks.textbook import textbook_loss
from dspark.learning import LossSettings, TrainSettings
from dspark.model.config import DSparkConfig
from dspark.model.drafter import Drafter, new_drafter
from dspark.model.vocabulary import Vocabulary
from dspark.target_files import DTYPES, default_device
from dspark.training.activations import Load
from dspark.training.batch import Batch
from dspark.training.blocks import Blocks, draw_anchors, make_blocks
from dspark.training.memory import step_peak
from dspark.training.objective import DraftObjective, step_weight
from dspark.training.transfer import with_tensors

HIDDEN, TAPS, BLOCK, RANK = 576, (1, 8, 15, 22, 28), 7, 256


@dataclass(frozen=True)
class Problem:
    """A drafter and one batch for it, on the device."""

    drafter: Drafter
    vocabulary: Vocabulary
    batch: Batch
    blocks: Blocks


def config_of(layers: int, vocab: int, length: int) -> DSparkConfig:
    """SmolLM2-135M's layer in the Qwen3 form."""
    return DSparkConfig(
        hidden=HIDDEN,
        intermediate=1536,
        heads=9,
        kv_heads=3,
        head_dim=64,
        vocab=vocab,
        draft_vocab=vocab,
        norm_eps=1e-5,
        max_positions=length,
        rope={"rope_type": "default", "rope_theta": 100_000.0},
        target_layers=30,
        layers=layers,
        block=BLOCK,
        taps=TAPS,
        mask_token_id=0,
        markov_rank=RANK,
        markov_head="vanilla",
        confidence=True,
        confidence_with_markov=True,
    )


def loss_mask(length: int, span: int | None) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """All ones, or 30 % of the positions in spans of `span` tokens."""
    mask = np.ones(length, np.uint8)
    if span is not None:
        mask = (np.arange(length) % round(span / 0.3) < span).astype(np.uint8)
    return mask


def problem_of(case: dict[str, Any], anchors: int) -> Problem:
    """The case with `anchors` blocks, or as many as its spans allow."""
    device, dtype, length = default_device(), DTYPES[case["dtype"]], case["length"]
    torch.manual_seed(0)
    mask = loss_mask(length, case["span"])
    drafter = new_drafter(config_of(case["layers"], case["vocab"], length), seed=0).to(device, dtype)
    embedding = (torch.randn(case["vocab"], HIDDEN) / 10).to(device, dtype)
    ids_BS = torch.randint(case["vocab"], (1, length))
    mask_BS = torch.from_numpy(mask)[None].bool()
    states = torch.randn(1, length, HIDDEN * (1 + len(TAPS)))
    batch = Batch(ids_BS, mask_BS, states[..., HIDDEN:].to(dtype), states[..., :HIDDEN].to(dtype))
    columns = draw_anchors(mask, anchors, seed=0, epoch=0, sample_id="case")
    blocks = make_blocks(ids_BS, mask_BS, [columns], BLOCK, gamma=4.0)
    host = Problem(drafter, Vocabulary(embedding, embedding), batch, blocks)
    return with_tensors(host, lambda tensor: tensor.to(device))


def step_of(problem: Problem, side: str) -> Callable[[], torch.Tensor | None]:
    """Forward, loss and backward of a side; None for the bare products."""
    settings = LossSettings()
    if side == "c":
        return products_of(problem.drafter, problem.vocabulary, problem.blocks)
    objective = DraftObjective(problem.drafter, settings)

    def step() -> torch.Tensor:
        # Gradients of the step before are dropped, as an optimizer drops them.
        problem.drafter.zero_grad(set_to_none=True)
        weight = step_weight(problem.blocks)
        if side == "a":
            loss = objective(problem.vocabulary, problem.batch, problem.blocks, weight).loss
        else:
            loss = textbook_loss(problem.drafter, problem.vocabulary, problem.batch, problem.blocks, settings)
        loss.backward()
        return loss.detach()

    return step


def estimate_of(problem: Problem, dtype: str) -> int:
    """What `dspark train --dry-run` would say of the project's step, in bytes above the model's own."""
    train = TrainSettings.model_validate({"precision": dtype})
    drafter, blocks = problem.drafter, problem.blocks
    rows, groups = blocks.anchors_BA.shape
    slots = blocks.used
    load = Load(rows, blocks.reach, groups, blocks.block, len(slots.index_N), len(slots.place_P))
    weights = sum(parameter.numel() for parameter in drafter.parameters())
    return step_peak(drafter.config, train, load, weights, default_device().type == "cuda")


class Peak:
    """Most memory that the process held since `restart`, above what it held then, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.before = 0

    def restart(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the highest resident size so far
            self.before = _status("VmRSS")

    def bytes(self) -> int:
        return (torch.cuda.max_memory_allocated() if self.cuda else _status("VmHWM")) - self.before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def main() -> None:
    case = json.loads(sys.argv[1])
    torch.set_num_threads(case["threads"])
    problem = problem_of(case, case["anchors"])
    # torch imports these modules in its first step: tens of MB that are no memory of the step.
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    step, peak, device = step_of(problem, case["side"]), Peak(default_device()), default_device()
    peak.restart()
    seconds, loss = [], None
    # The first step makes buffers that the later ones use; its memory counts, its time does not.
    for _ in range(case["repetitions"] + 1):
        started = time.perf_counter()
        loss = step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    print(
        json.dumps(
            {
                "seconds": seconds[1:],
                "peak": peak.bytes(),
                "estimate": estimate_of(problem, case["dtype"]),
                "loss": None if loss is None else float(loss),
                "blocks": int(problem.blocks.keep_BA.sum()),
                "slots": int(problem.blocks.valid_BAK.sum()),
            }
        )
    )


if __name__ == "__main__":
    main()
