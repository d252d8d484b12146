"""A drafter that starts as another one, read from a checkpoint of any layout (`drafter.start_from`).

Both must compute the same with what they share: decoder sizes, taps, target layers, rotary parameters, mask token. The
block may have another size, since no tensor depends on it, and the checkpoint may be a DFlash one, whose slots predict
the token of their own place. A head that only the new drafter has starts as in `new_drafter`.
"""

from pathlib import Path

import torch

from dspark.errors import InputError
from dspark.model.config import DraftConfig
from dspark.model.drafter import Drafter
from dspark.model.exchange import Checkpoint, read_checkpoint

# Fields of both configurations, and the setting or the property of the target that decides each.
_EQUAL = {
    "layers": "drafter.layers",
    "taps": "drafter.taps",
    "mask_token_id": "drafter.mask_token_id",
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
}
_MAPS = ("d2t", "t2d")


def read_start(folder: Path, config: DraftConfig) -> Checkpoint:
    """The checkpoint that a drafter of `config` is to start from.

    Raises:
        InputError: no drafter that can be read, or one that differs in more than its block and missing heads; names
            everything that differs.
    """
    checkpoint = read_checkpoint(folder, target_layers=config.target_layers)
    theirs = checkpoint.config
    faults = [
        f"{label} is {getattr(config, field)}, the checkpoint has {getattr(theirs, field)}"
        for field, label in _EQUAL.items()
        if getattr(config, field) != getattr(theirs, field)
    ]
    faults += _head_faults(config, theirs)
    if faults:
        raise InputError(f"drafter.start_from={folder} does not fit this drafter: {'; '.join(faults)}")
    return checkpoint


def _head_faults(config: DraftConfig, theirs: DraftConfig) -> list[str]:
    """Heads that both have must be the same kind; none of the checkpoint's may be lost."""
    pairs = []
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
def start_from_checkpoint(drafter: Drafter, folder: Path) -> None:
    """Overwrites every tensor of a fresh drafter that the checkpoint has too, in place.

    Raises:
        InputError: as `read_start`, or both have a Markov head and propose from different tokens.
    """
    checkpoint = read_start(folder, drafter.config)
    found, ours = checkpoint.stored.tensors, drafter.state_dict()
    if checkpoint.config.markov_rank and any(
        not torch.equal(found[name], ours[name]) for name in _MAPS if name in ours
    ):
        raise InputError(
            f"drafter.start_from={folder} proposes from other {drafter.config.draft_vocab} tokens than this run's rows "
            "ask for: set drafter.vocab=null in both, or train on the same rows"
        )
    for name, tensor in ours.items():
        if name in found and name not in _MAPS:
            tensor.copy_(found[name])
