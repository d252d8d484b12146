"""The DSpark drafter: a whole block of tokens from one parallel pass over mask tokens (paper section 3.1).

    taps --fc, hidden_norm--> context feature --k_proj, v_proj of each layer--> keys and values, once per text
    [anchor, mask, mask, ...] --draft layers over context prefix + own block--> h --head, Markov head--> K distributions

Training runs A blocks per text, decoding one block per request: both through `context` and `forward`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dspark.model.attention import KeyValues, Room, Sight
from dspark.model.backbone import Backbone
from dspark.model.config import DSparkConfig
from dspark.model.heads import ConfidenceHead, MarkovHead
from dspark.model.layers import DraftLayer, norm_of

MARKOV_STD = 0.5


class Drafter(Backbone):
    """Everything of a drafter that is trained.

    Shape suffixes: B batch, S context positions, Q block positions, L taps, H hidden width.
    """

    config: DSparkConfig

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.hidden_norm = norm_of(config, config.hidden)
        self.layers: Any = nn.ModuleList(DraftLayer(config) for _ in range(config.layers))
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence else None

    def context(self, taps_BSLH: Tensor, positions_BS: Tensor) -> list[KeyValues]:
        """Context keys and values of every layer, from concatenated taps [B, S, L*H] at positions [B, S]."""
        feature_BSH = self.hidden_norm(self.fc(taps_BSLH))
        rotary = self.rotary.at(positions_BS)
        return [layer.self_attn.key_values(feature_BSH, rotary) for layer in self.layers]

    def forward(
        self, embeddings_BQH: Tensor, positions_BQ: Tensor, context: Sequence[KeyValues | Room], sight: Sight
    ) -> Tensor:
        """Normed states [B, Q, H] of block positions; `sight` has the range of the context that each block sees."""
        x = embeddings_BQH
        rotary = self.rotary.at(positions_BQ)
        for layer, layer_context in zip(self.layers, context, strict=True):
            x = self.run(layer, x, rotary, layer_context, sight)
        return self.norm(x)


def new_drafter(config: DSparkConfig, seed: int, kept: Tensor | None = None) -> Drafter:
    """A freshly initialised drafter, equal for equal seeds; `kept` [D] are the ids of a reduced vocabulary.

    Linear weights are normal with the target's deviation, norms are one and biases zero. W2 starts at zero, so that the
    drafter begins as its own DFlash; W1 starts wide, since the bias W2 e moves at the pace of e.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Drafter(config)
        drafter.randomise()
        if drafter.markov_head is not None:
            nn.init.normal_(drafter.markov_head.markov_w1.weight, std=MARKOV_STD)
            nn.init.zeros_(drafter.markov_head.markov_w2.weight)
    if kept is not None:
        drafter.keep(kept)
    return drafter
