"""What drafters of every kind hold: the projection of the taps, the last norm, and which tokens they may propose."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dspark.model.config import DraftConfig
from dspark.model.layers import RotaryTable, norm_of


class Backbone(nn.Module):
    """The common part of a drafter. The target's embedding and head come as a `Vocabulary`."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        # Whether the backward computes each draft layer once more, in place of keeping what it needs of them.
        self.recompute = False
        self.rotary = RotaryTable(config)
        self.fc = nn.Linear(len(config.taps) * config.hidden, config.hidden, bias=False)
        self.norm = norm_of(config, config.hidden)
        if config.draft_vocab < config.vocab:
            # Offsets from draft ids to token ids, and which tokens are kept: the form of the EAGLE-3 layouts.
            self.register_buffer("d2t", torch.zeros(config.draft_vocab, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(config.vocab, dtype=torch.bool))

    @property
    def kept(self) -> Tensor | None:
        """Ids [D] of the tokens that may be proposed, ascending; None: all."""
        if self.config.draft_vocab == self.config.vocab:
            return None
        return torch.arange(self.config.draft_vocab, device=self.d2t.device) + self.d2t

    def keep(self, kept_D: Tensor) -> None:
        """Sets the ids [D], ascending, of the tokens that may be proposed."""
        self.d2t.copy_(kept_D - torch.arange(len(kept_D)))
        self.t2d.zero_()[kept_D] = True

    def run(self, layer: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """layer(*inputs), of which only the inputs are kept for the backward where `recompute` is set."""
        if not self.recompute:
            return layer(*inputs)
        # Draft layers draw no random numbers.
        states: Tensor = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
        return states

    def randomise(self) -> None:
        """Linear weights become normal with the target's deviation, biases zero; norms are one from the start."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self.config.init_std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
