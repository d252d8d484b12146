"""Reference cases: stored weights, inputs and blocks, and the outputs, losses and gradients that must follow from them.

config.json, weights --> drafter --inputs, blocks--> outputs, loss terms, gradients --> differences to the stored ones
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dspark.config import LossSettings
from dspark.errors import InputError
from dspark.model.checkpoints import CONFIG, assemble, read_json
from dspark.model.drafter import Drafter
from dspark.model.layout import config_from_json
from dspark.model.vocabulary import Vocabulary
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
TOLERANCE = 1e-5
TERMS = ("ce", "l1", "confidence")

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """How far one computed tensor lies from the stored one."""

    group: str  # outputs, losses, or the module whose gradients these are
    name: str
    absolute: float  # largest |computed - stored|
    scale: float  # largest |stored|

    @property
    def relative(self) -> float:
        """The absolute difference over the scale; 0 where both are 0."""
        return self.absolute / self.scale if self.scale else (float("inf") if self.absolute else 0.0)

    @property
    def within(self) -> bool:
        """Whether the difference is one of rounding. False where anything is not a number."""
        return self.absolute <= TOLERANCE * self.scale


@dataclass(frozen=True)
class _Case:
    drafter: Drafter
    vocabulary: Vocabulary
    batch: Batch
    blocks: Blocks
    settings: LossSettings
    stored_keep_BA: Tensor
    outputs: Tensors
    losses: Tensors
    gradients: Tensors


def compare_case(folder: Path) -> list[Difference]:
    """Recomputes a stored case on the CPU in fp32 and compares what it stores of outputs, losses and gradients.

    Slots of dummy blocks and slots without a supervised label are not compared: what they hold means nothing.

    Raises:
        InputError: the folder is no case, or its weights do not fit its configuration.
    """
    try:
        case = _read(folder)
        masks = _difference(
            "outputs", "eval_mask", case.blocks.valid_BAK[case.blocks.keep_BA], _kept(case, "eval_mask")
        )
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
    return [_difference("outputs", name, value, _kept(case, name)[stored]) for name, value in found.items()]


def _compare_training(case: _Case) -> list[Difference]:
    """Loss terms, their weighted sum and the gradients of that sum, with the batch as one whole optimizer step."""
    objective = DraftObjective(case.drafter, case.settings)(
        case.vocabulary, case.batch, case.blocks, step_weight(case.blocks)
    )
    objective.loss.backward()
    differences = [
        _difference("losses", name, _term(objective, name), case.losses[name])
        for name in TERMS
        if not _left_out(case, name)
    ]
    differences.append(_difference("losses", "total", objective.loss.detach(), case.losses["total"]))
    parameters = dict(case.drafter.named_parameters())
    if unknown := sorted(case.gradients.keys() - parameters.keys()):
        raise InputError(f"the case stores gradients of {unknown}, which the drafter does not have")
    for name, parameter in parameters.items():
        computed = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        stored = case.gradients.get(name, torch.zeros_like(computed))
        differences.append(_difference(f"gradients {_module(name)}", name, computed, stored))
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


def _difference(group: str, name: str, computed: Tensor, stored: Tensor) -> Difference:
    if computed.shape != stored.shape:
        raise InputError(f"{name} of the case has shape {list(stored.shape)}, the drafter's has {list(computed.shape)}")
    if not stored.numel():
        return Difference(group, name, 0.0, 0.0)
    stored = stored.double()
    return Difference(group, name, (computed.double() - stored).abs().max().item(), stored.abs().max().item())


def _read(folder: Path) -> _Case:
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
    inputs = parts["inputs"]
    batch = Batch(
        inputs["input_ids"].long(),
        inputs["loss_mask"].bool(),
        inputs["target_hidden_states"],
        inputs["target_last_hidden_states"],
    )
    settings = _loss_settings(metadata)
    keep_BA = parts["blocks"]["keep"].bool()
    positions = [row.numpy().astype(np.int64) for row in parts["blocks"]["anchor_positions"]]
    anchors = [row[keep.numpy()] for row, keep in zip(positions, keep_BA, strict=True)]
    blocks = make_blocks(batch.input_ids_BS, batch.loss_mask_BS, anchors, config.block, settings.gamma)
    return _Case(
        drafter, vocabulary, batch, blocks, settings, keep_BA, parts["outputs"], parts["loss"], parts.get("grads", {})
    )


def _loss_settings(metadata: Mapping[str, str]) -> LossSettings:
    written = metadata["gamma"]
    try:
        ce, l1, confidence = json.loads(metadata["alphas"])
        gamma = None if written.lower() in ("null", "none") else float(written)
    except ValueError as error:
        raise InputError(f"the case's metadata {dict(metadata)} needs alphas=[ce, l1, confidence] and gamma") from error
    # Unchecked: a case may weigh the confidence alone, and it writes "no decay" as 0 too.
    return LossSettings.model_construct(
        ce=ce, l1=l1, confidence=confidence, gamma=gamma if gamma and gamma > 0 else None, denominator="global"
    )
