"""Reference cases: stored weights, inputs and blocks, and the outputs, losses and gradients that must follow from them.

config.json, weights --> drafter --inputs, blocks--> outputs, loss terms, gradients --> differences to the stored ones
"""

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dspark.errors import InputError
from dspark.learning import LossSettings
from dspark.model.checkpoints import CONFIG, assemble, read_json
from dspark.model.drafter import Drafter
from dspark.model.layout import config_from_json
from dspark.model.vocabulary import Vocabulary
from dspark.sections import Precision
from dspark.target_files import DTYPES
from dspark.training.batch import Batch
from dspark.training.blocks import Blocks, make_blocks
from dspark.training.objective import (
    DraftObjective,
    Objective,
    draft_logits,
    run_drafter,
    step_weight,
    target_logits,
)

CASE = "case.safetensors"
TERMS = ("ce", "l1", "confidence")

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Bounds:
    """Largest relative differences that rounding explains, in units of the rounding error u of one number.

    fp32, u = 2^-24: outputs and losses of the tested cases lie within 20 u of the same formulas in float64, gradients
    of three layers within 100 u; 1e-5 is 168 u. Five layers of wide random weights reach 250 u in a gradient: such a
    case has to be stored from better conditioned weights.

    bf16 keeps 8 bits, u = 2^-8. Each bound is about twice what the stored cases of three layers show, for another order
    of sums or two more layers; behind it the largest that was seen. The target's logits are one product of given
    states. Some forty tensors are rounded on the way to the drafter's, and the largest of many entries lies four
    deviations out; the confidence adds up a whole state, and has few large values to be measured by. Losses are means
    in fp32 over slots whose errors have either sign. Gradients are measured as whole tensors, by their Euclidean norms,
    for the L1 term has a kink: where q lies within rounding of p, the derivative's sign is chance, so that single
    entries may be anywhere. Those of `norm` and of the heads, which stand behind the layers, have come back through one
    or two products, all others through the layers too. In cases of a few slots the kink alone may exceed the bounds.
    """

    target_logits: float
    draft_logits: float
    confidence: float
    losses: float
    head_gradients: float
    layer_gradients: float
    whole_gradients: bool  # compare norms of gradient tensors, not their largest entries


_U = 2**-8
BOUNDS: dict[Precision, Bounds] = {
    "fp32": Bounds(
        target_logits=1e-5,
        draft_logits=1e-5,
        confidence=1e-5,
        losses=1e-5,
        head_gradients=1e-5,
        layer_gradients=1e-5,
        whole_gradients=False,
    ),
    "bf16": Bounds(
        target_logits=2.5 * _U,  # 1.2 u
        draft_logits=24 * _U,  # 11.4 u
        confidence=34 * _U,  # 16.6 u
        losses=1.5 * _U,  # 0.6 u
        head_gradients=24 * _U,  # 12.9 u
        layer_gradients=36 * _U,  # 18.1 u
        whole_gradients=True,
    ),
}
# Modules behind the layers, whose gradients do not pass through them.
_BEHIND = ("norm", "markov_head", "confidence_head")


@dataclass(frozen=True)
class Difference:
    """How far one computed tensor lies from the stored one."""

    group: str  # outputs, losses, or the module whose gradients these are
    name: str
    absolute: float  # largest |computed - stored|, or its norm
    scale: float  # largest |stored|, or its norm
    bound: float  # largest relative difference that is one of rounding; 0 for whole numbers

    @property
    def relative(self) -> float:
        """The absolute difference over the scale; 0 where both are 0."""
        return self.absolute / self.scale if self.scale else (float("inf") if self.absolute else 0.0)

    @property
    def within(self) -> bool:
        """Whether the difference is one of rounding. False where anything is not a number."""
        return self.absolute <= self.bound * self.scale


@dataclass(frozen=True)
class _Case:
    bounds: Bounds
    drafter: Drafter
    vocabulary: Vocabulary
    batch: Batch
    blocks: Blocks
    settings: LossSettings
    stored_keep_BA: Tensor
    outputs: Tensors
    losses: Tensors
    gradients: Tensors


def compare_case(folder: Path, dtype: Precision = "fp32") -> list[Difference]:
    """Recomputes a stored case on the CPU and compares what it stores of outputs, losses and gradients.

    `dtype` is the type of weights and states in the computation, whatever the case stores (see `Bounds`). Slots of
    dummy blocks and slots without a supervised label are not compared: what they hold means nothing.

    Raises:
        InputError: the folder is no case, or its weights do not fit its configuration.
    """
    try:
        case = _read(folder, dtype)
        masks = _output(case, "eval_mask", case.blocks.valid_BAK[case.blocks.keep_BA], _kept(case, "eval_mask"))
        # With other slots supervised, no further tensor has its counterpart.
        if not masks.within:
            return [masks]
        return [masks, *_compare_outputs(case), *_compare_training(case)]
    except KeyError as error:
        raise InputError(f"{folder / CASE} lacks the tensor or the metadata {error}") from error


def _compare_outputs(case: _Case) -> list[Difference]:
    slots = case.blocks.valid_BAK
    stored = _kept(case, "eval_mask").bool()
    with torch.no_grad():
        output = run_drafter(case.drafter, case.vocabulary, case.batch, case.blocks)
        distinct_PV, row_N = target_logits(case.vocabulary, case.batch, case.blocks, slots)
        found = {
            "target_ids": case.blocks.labels_BAK[slots],
            "draft_logits": draft_logits(case.drafter, case.vocabulary, output, slots),
            "aligned_target_logits": distinct_PV[row_N],
        }
        if output.confidence_BAK is not None:
            found["confidence_logits"] = output.confidence_BAK[slots]
    return [_output(case, name, value, _kept(case, name)[stored]) for name, value in found.items()]


def _compare_training(case: _Case) -> list[Difference]:
    """Loss terms, their weighted sum and the gradients of that sum, with the batch as one whole optimizer step."""
    objective = DraftObjective(case.drafter, case.settings)(
        case.vocabulary, case.batch, case.blocks, step_weight(case.blocks)
    )
    objective.loss.backward()
    computed = {name: _term(objective, name) for name in TERMS if not _left_out(case, name)}
    computed["total"] = objective.loss.detach()
    differences = [
        _difference("losses", name, value, case.losses[name], case.bounds.losses) for name, value in computed.items()
    ]
    parameters = dict(case.drafter.named_parameters())
    if unknown := sorted(case.gradients.keys() - parameters.keys()):
        raise InputError(f"the case stores gradients of {unknown}, which the drafter does not have")
    for name, parameter in parameters.items():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        stored = case.gradients.get(name, torch.zeros_like(gradient))
        bounds, module = case.bounds, _module(name)
        bound = bounds.head_gradients if module in _BEHIND else bounds.layer_gradients
        differences.append(_difference(f"gradients {module}", name, gradient, stored, bound, bounds.whole_gradients))
    return differences


def _left_out(case: _Case, term: str) -> bool:
    """A term of weight zero may be stored as zero without ever having been computed."""
    stored = case.losses.get(term)
    return getattr(case.settings, term) == 0 and (stored is None or not stored.any())


def _term(objective: Objective, name: str) -> Tensor:
    mean = objective.means.get(f"loss_{name}")
    return torch.zeros(()) if mean is None else mean.total / mean.weight.clamp(min=1e-9)


def _module(parameter: str) -> str:
    """`layers.0` of `layers.0.mlp.up_proj.weight`, `fc` of `fc.weight`."""
    parts = parameter.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def _kept(case: _Case, name: str) -> Tensor:
    """A stored output of the blocks that are no dummies [N, K, ...], in the order of the case's own blocks."""
    return case.outputs[name][case.stored_keep_BA]


def _output(case: _Case, name: str, computed: Tensor, stored: Tensor) -> Difference:
    """Whole numbers, such as tokens and masks, must be equal in any type."""
    bounds = {
        "aligned_target_logits": case.bounds.target_logits,
        "draft_logits": case.bounds.draft_logits,
        "confidence_logits": case.bounds.confidence,
    }
    return _difference("outputs", name, computed, stored, bounds.get(name, 0.0))


def _difference(
    group: str, name: str, computed: Tensor, stored: Tensor, bound: float, whole: bool = False
) -> Difference:
    """`whole`: of the tensors' Euclidean norms, not of their largest entries."""
    if computed.shape != stored.shape:
        raise InputError(f"{name} of the case has shape {list(stored.shape)}, the drafter's has {list(computed.shape)}")
    if not stored.numel():
        return Difference(group, name, 0.0, 0.0, bound)
    order = 2 if whole else math.inf
    off, scale = (torch.linalg.vector_norm(x, order).item() for x in (computed.double() - stored, stored.double()))
    return Difference(group, name, off, scale, bound)


def _read(folder: Path, dtype: Precision) -> _Case:
    try:
        with safe_open(folder / CASE, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            names: list[str] = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder / CASE} cannot be read ({error}): give the folder of a reference case") from error
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        parts.setdefault(part, {})[rest] = tensor
    config = config_from_json(read_json(folder / CONFIG))
    drafter, vocabulary = assemble(parts["weights"], config)
    assert isinstance(drafter, Drafter)
    inputs, kind = parts["inputs"], DTYPES[dtype]
    batch = Batch(
        inputs["input_ids"].long(),
        inputs["loss_mask"].bool(),
        inputs["target_hidden_states"].to(kind),
        inputs["target_last_hidden_states"].to(kind),
    )
    settings = _loss_settings(metadata)
    keep_BA = parts["blocks"]["keep"].bool()
    positions = [row.numpy().astype(np.int64) for row in parts["blocks"]["anchor_positions"]]
    anchors = [row[keep.numpy()] for row, keep in zip(positions, keep_BA, strict=True)]
    blocks = make_blocks(batch.input_ids_BS, batch.loss_mask_BS, anchors, config.block, settings.gamma)
    return _Case(
        BOUNDS[dtype],
        drafter.to(kind),
        vocabulary.to(torch.device("cpu"), kind),
        batch,
        blocks,
        settings,
        keep_BA,
        parts["outputs"],
        parts["loss"],
        parts.get("grads", {}),
    )


def _loss_settings(metadata: Mapping[str, str]) -> LossSettings:
    """The weights of the terms, a list or a mapping by name, and the decay: none if 0, infinite, null or left out."""
    text, written = metadata["alphas"], metadata.get("gamma", "null").strip().lower()
    try:
        alphas = ast.literal_eval(text.replace("null", "None"))
        ce, l1, confidence = [alphas[name] for name in TERMS] if isinstance(alphas, dict) else alphas
        weights = [float(weight or 0) for weight in (ce, l1, confidence)]
        gamma = 0.0 if written in ("null", "none", "") else float(written)
        if not all(math.isfinite(weight) for weight in weights) or math.isnan(gamma):
            raise ValueError("not a number")
    except (ValueError, TypeError, SyntaxError, KeyError) as error:
        raise InputError(f"the case's metadata {dict(metadata)} needs alphas=[ce, l1, confidence] and gamma") from error
    # Unchecked: a case may weigh the confidence alone.
    return LossSettings.model_construct(
        ce=weights[0],
        l1=weights[1],
        confidence=weights[2],
        gamma=gamma if 0 < gamma < math.inf else None,
        denominator="global",
    )
