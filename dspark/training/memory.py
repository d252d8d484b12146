"""Memory of one trainer rank, computed from settings and shapes before anything is loaded.

sizes of the largest micro-batch (`Load`) --> what is alive at four moments of a step, by part --> the largest

the loss              all activations, a chunk of logits, the gradient of W2 in fp32
the loss's backward   the same, and the gradient of W2 twice, for it is scaled
the layers' backward  all activations still, gradients of both Markov tables, those that pass through the last layer
the optimizer step    all gradients and the optimizer's copy of its own; on a CPU also what the heap does not return
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dspark.config import Settings
from dspark.learning import TrainSettings
from dspark.model.config import DraftConfig, DSparkConfig, Eagle3Config
from dspark.model.kinds import AnyConfig
from dspark.training.activations import Load, block_bytes, chain_bytes, context_bytes, passing_bytes
from dspark.training.slots import logit_bytes

Parts = dict[str, int]
OPTIMIZER_STEP = "the optimizer step"
SIZES = {"fp32": 4, "bf16": 2}
# Interpreter, torch, Ray and DeepSpeed of one process, as resident memory before any weight is loaded.
PROCESS_BYTES = 490_000_000
# What a process maps and keeps when it first computes: code of kernels, packed operands of products.
FIRST_STEP_BYTES = 45_000_000
# On a CPU the C library's heap keeps holes between tensors: of what layers compute, a share that was measured. Layers
# that are computed once more leave half as much again, so on a CPU `recompute` saves less than it drops.
_HOLES, _HOLES_RECOMPUTED = 0.5, 0.75
# DeepSpeed's own figures: elements of its bucket of gradients, and of the parameters that ZeRO 3 gathers at most.
_BUCKET, _GATHERED = 500_000_000, 1_000_000_000


@dataclass(frozen=True)
class Estimate:
    """Bytes of a rank at the worst moment of a step, by part, and which moment that is."""

    moment: str
    parts: Parts

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Held:
    """What an engine holds of a drafter's parameters, in bytes for one rank."""

    parameters: int
    gradients: int  # accumulated over micro-batches
    bucket: int  # what stands ready for gradients while a backward runs
    optimizer: int  # master weights and moments
    step: int  # gradients of all kinds from the end of the last backward to the end of the step, at most


def largest_load(draft: AnyConfig, settings: Settings, lengths: Sequence[int]) -> Load:
    """The largest micro-batch that the settings make of rows with so many tokens each.

    Rows have as many blocks as `train.anchors` says: on a GPU idle ones fill them, elsewhere short rows have fewer.
    """
    train, longest = settings.train, max(lengths)
    rows, columns, documents = train.micro_batch, longest, 1
    if train.pack_tokens is not None:
        columns = max(train.pack_tokens, longest)
        tokens = train.micro_batch * sum(lengths) / len(lengths)
        rows = min(rows, math.ceil(tokens / columns))
        documents = math.ceil(train.micro_batch / rows)
    if isinstance(draft, Eagle3Config):
        groups, slots = max(1, columns - 1), draft.ttt_length
    else:
        groups, slots = max(train.anchors, min(documents * train.anchors, columns)), draft.block
    used = rows * groups * slots
    return Load(rows, columns, groups, slots, used, min(used, rows * columns))


def rank_memory(
    draft: AnyConfig, settings: Settings, load: Load, weights: int, tied: bool, gpu: bool = False
) -> Estimate:
    """One rank that trains a drafter of `weights` parameters; `tied`: the target's head is its embedding.

    On a GPU the bytes are the device's, and the process has no part in them.
    """
    train, size = settings.train, SIZES[settings.train.precision]
    held = held_by_engine(train, weights, gpu)
    kept = draft.draft_vocab if draft.draft_vocab < draft.vocab else 0
    tokens = draft.vocab * (1 if tied else 2) + kept
    batch = load.positions * ((len(draft.taps) + 1) * draft.hidden * size + 17)
    common = {
        "process": 0 if gpu else PROCESS_BYTES + FIRST_STEP_BYTES,
        "vocabulary": tokens * draft.hidden * size,
        "parameters": held.parameters,
        "optimizer": held.optimizer + averages_bytes(train, weights),
        "micro-batches": (train.prefetch + 1) * batch,
    }
    before = held.bucket + (held.gradients if train.accumulation > 1 else 0)
    found = []
    for name, parts in step_moments(draft, train, load, weights, gpu).items():
        gradients = held.step if name == OPTIMIZER_STEP else before + parts["gradients"]
        found.append(Estimate(name, common | parts | {"gradients": gradients}))
    return max(found, key=lambda one: one.total)


def step_moments(
    draft: AnyConfig, train: TrainSettings, load: Load, weights: int, gpu: bool = False
) -> dict[str, Parts]:
    """What forward and backward of a micro-batch add to what a rank holds anyway, by moment and part."""
    size = SIZES[train.precision]
    if isinstance(draft, DSparkConfig):
        activations = block_bytes(draft, size, load, train.recompute, gpu)
        whole = block_bytes(draft, 4, load, False, gpu)
        rank = draft.markov_rank
    else:
        activations = chain_bytes(draft, size, load, train.recompute, gpu)
        whole = chain_bytes(draft, 4, load, False, gpu)
        rank = 0
    context = context_bytes(draft, size, load)
    w1, w2 = (tokens * rank * size for tokens in (draft.vocab, draft.draft_vocab))
    # In bf16 the sum over chunks is fp32, and a chunk's part and the rounded result stand beside it.
    summed = w2 if size == 4 else 3 * w2
    arena = arena_bytes(draft, train.logits_mb, load, size)
    # Of the projected slots: states, their gradient, and that scaled or at its place; of columns, states and features.
    states = size * (3 * load.used * draft.hidden + load.places * (draft.hidden + 2 * rank))
    live = {"context": context, "activations": activations}
    free = {"context": 0, "activations": 0}
    fresh = weights * size
    if not gpu:
        # What is computed in between is fp32 whatever the type of the weights.
        holes = (_HOLES_RECOMPUTED if train.recompute else _HOLES) * whole
        live["activations"] += int(holes)
        # The heap keeps what activations leave; only gradients find room in it, but for those of the large tables.
        free, fresh = live, w1 + w2 + max(0, fresh - w1 - w2 - sum(live.values()))
    last = live | {"activations": live["activations"] + passing_bytes(draft, size, load)}
    return {
        "the loss": live | {"gradients": 0, "objective": arena + summed + states},
        "the loss's backward": live | {"gradients": w2, "objective": arena + w2 + states},
        "the layers' backward": last | {"gradients": w1 + w2, "objective": arena},
        OPTIMIZER_STEP: free | {"gradients": fresh, "objective": arena},
    }


def step_peak(draft: AnyConfig, train: TrainSettings, load: Load, weights: int, gpu: bool = False) -> int:
    """Most bytes that forward and backward need above parameters and batch, the process's first step included."""
    most = max(sum(parts.values()) for parts in step_moments(draft, train, load, weights, gpu).values())
    return most + (0 if gpu else FIRST_STEP_BYTES)


def arena_bytes(draft: DraftConfig, logits_mb: int, load: Load, size: int) -> int:
    """The chunks' arena: what all slots need, at most the budget, at least one column with its slots."""
    bias: Literal["column", "slot"] | None = None
    if isinstance(draft, DSparkConfig) and draft.markov_rank:
        # A bias of the token alone is one for all slots of a column; gates and states make it each slot's own.
        bias = "column" if draft.markov_head == "vanilla" else "slot"
    slot, column = logit_bytes(
        draft.draft_vocab,
        draft.vocab,
        size,
        reduced=draft.draft_vocab < draft.vocab,
        capped=draft.soft_cap is not None,
        bias=bias,
    )
    most = slot * load.used + column * load.places
    least = column + slot * math.ceil(load.used / max(1, load.places))
    return max(least, min(most, logits_mb * 2**20))


def averages_bytes(train: TrainSettings, weights: int) -> int:
    """The moving averages of `train.ema`, dealt out as the master weights are."""
    if train.ema is None:
        return 0
    return 4 * (weights if train.zero_stage == 0 else math.ceil(weights / train.workers))


def held_by_engine(train: TrainSettings, weights: int, gpu: bool) -> Held:
    """DeepSpeed's share of a rank (`actors.zero`): AdamW with fp32 master weights, dealt out by the ZeRO stage."""
    size, stage = SIZES[train.precision], train.zero_stage
    whole, part = 4 * weights, math.ceil(weights / train.workers) * 4
    low, touched = weights * size, min(weights, _BUCKET) * size
    # A GPU has the bucket in full while it stands ready, a CPU as far as it is written to, when a backward has ended.
    bucket, ready = (_BUCKET * size, _BUCKET * size) if gpu else (touched, 0)
    if stage == 0:
        # Plain fp32 has no master weights beside the parameters; bf16 gets its gradients in fp32 for the step.
        return Held(low, low, 0, 8 * weights, low) if size == 4 else Held(low, low, 0, 3 * whole, low + whole)
    if stage == 1 and size == 2:
        return Held(low, whole, 0, 3 * part, whole + low)
    if stage == 1:
        return Held(low, whole, ready, 3 * part, max(bucket, whole) + part)
    if stage == 2:
        return Held(low, part, ready, 3 * part, part + max(bucket, part))
    gathered = min(weights, _GATHERED) * size if train.workers > 1 else 0
    return Held(part * size // 4 + gathered, part, bucket, 3 * part, 2 * part + bucket)
