"""A drafter that starts as another one, read from a checkpoint of any layout (`drafter.start_from`).

Both must be of one kind and compute the same with what they share: decoder sizes, form, taps, target layers, rotary
parameters, mask token. The block may have another size, since no tensor depends on it, nor on the chained steps of an
EAGLE-3 drafter; and the checkpoint may be a DFlash one, whose slots predict the token of their own place. A head that
only the new drafter has starts as in `new_drafter`.
"""

from pathlib import Path
from typing import Any

import torch

from dspark.errors import InputError
from dspark.model.config import DSparkConfig, Eagle3Config
from dspark.model.exchange import Checkpoint, read_checkpoint
from dspark.model.kinds import AnyConfig, AnyDrafter

# Fields of both configurations, and the setting or the property of the target that decides each.
_EQUAL = {
    "layers": "drafter.layers",
    "taps": "drafter.taps",
    "form": "drafter.family",
    "target_layers": "the target's layers",
    "hidden": "the target's width",
    "intermediate": "the target's MLP width",
    "heads": "the target's attention heads",
    "kv_heads": "the target's key and value heads",
    "head_dim": "the target's head width",
    "vocab": "the target's vocabulary",
    "norm_eps": "the target's norm epsilon",
    "rope": "the target's rotary parameters",
    "activation": "the target's activation",
    "shared_kv": "the target's use of keys as values",
    "soft_cap": "the target's soft cap",
}
_MAPS = ("d2t", "t2d")


def read_start(folder: Path, config: AnyConfig) -> Checkpoint:
    """The checkpoint that a drafter of `config` is to start from.

    Raises:
        InputError: no drafter that can be read, one of another kind, or one that differs in more than its block and
            missing heads; names everything that differs.
    """
    name = config.target_name if isinstance(config, Eagle3Config) else None
    checkpoint = read_checkpoint(folder, None, config.target_layers, name)
    theirs = checkpoint.config
    if type(theirs) is not type(config):
        raise InputError(
            f"drafter.start_from={folder} is of another kind ({theirs}) than this drafter ({config}): choose one of "
            "its kind, or change drafter.kind"
        )
    faults = [
        f"{label} is {getattr(config, field)}, the checkpoint has {getattr(theirs, field)}"
        for field, label in _EQUAL.items()
        if getattr(config, field) != getattr(theirs, field)
    ]
    if isinstance(config, DSparkConfig) and isinstance(theirs, DSparkConfig):
        faults += _block_faults(config, theirs)
    if faults:
        raise InputError(f"drafter.start_from={folder} does not fit this drafter: {'; '.join(faults)}")
    return checkpoint


def _block_faults(config: DSparkConfig, theirs: DSparkConfig) -> list[str]:
    """Blocks read one mask token; heads that both have must be the same kind, and none of the checkpoint's be lost."""
    pairs: list[tuple[str, Any, Any]] = [("drafter.mask_token_id", config.mask_token_id, theirs.mask_token_id)]
    if theirs.markov_rank:
        pairs += [
            ("drafter.markov_rank", config.markov_rank, theirs.markov_rank),
            ("drafter.markov_head", config.markov_head, theirs.markov_head),
            ("drafter.vocab", config.draft_vocab, theirs.draft_vocab),
        ]
    if theirs.confidence:
        pairs += [
            ("drafter.confidence", config.confidence, True),
            ("drafter.confidence_with_markov", config.confidence_with_markov, theirs.confidence_with_markov),
        ]
    return [f"{label} is {ours}, the checkpoint has {other}" for label, ours, other in pairs if ours != other]


@torch.no_grad()
def start_from_checkpoint(drafter: AnyDrafter, folder: Path) -> None:
    """Overwrites every tensor of a fresh drafter that the checkpoint has too, in place.

    Raises:
        InputError: as `read_start`, or both have a Markov head and propose from different tokens.
    """
    checkpoint = read_start(folder, drafter.config)
    found, ours, theirs = checkpoint.stored.tensors, drafter.state_dict(), checkpoint.config
    biased = isinstance(theirs, DSparkConfig) and theirs.markov_rank > 0
    if biased and any(not torch.equal(found[name], ours[name]) for name in _MAPS if name in ours):
        raise InputError(
            f"drafter.start_from={folder} proposes from other {drafter.config.draft_vocab} tokens than this run's rows "
            "ask for: set drafter.vocab=null in both, or train on the same rows"
        )
    for name, tensor in ours.items():
        if name in found and name not in _MAPS:
            tensor.copy_(found[name])
