"""The EAGLE-3 drafter: one decoder layer that drafts token by token, its own outputs as features (design section 5).

    row t: taps of position t --fc--> feature --+
           embedding of token t+1 --------------+--> joined --layer over the rows up to t--> state --norm, head--> t+2
    the next draft: the row's own state as feature, the token just drafted, one position further

Training runs all rows of a text through a few chained steps, decoding one row per request: both through `features`,
`join`, `key_values` and `forward`. Shape suffixes: B batch, Q rows, L taps, H hidden width.
"""

import torch
from torch import Tensor, nn

from dspark.model.attention import KeyValues, Room, Sight
from dspark.model.backbone import Backbone
from dspark.model.config import Eagle3Config
from dspark.model.layers import DraftLayer, Rotary, norm_of


class Eagle3Layer(DraftLayer):
    """A draft layer whose attention reads token and feature side by side, 2H wide, beside a residual of H."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, 2 * config.hidden)
        self.hidden_norm = norm_of(config, config.hidden)

    def step(
        self,
        feature_BQH: Tensor,
        joined_BQ2H: Tensor,
        rotary: Rotary,
        context: KeyValues | Room,
        own: KeyValues,
        sight: Sight,
    ) -> Tensor:
        """States [B, Q, H] of rows, from their features and from what they read."""
        return self.after_attention(feature_BQH, self.self_attn.attend(joined_BQ2H, rotary, context, own, sight))


class Eagle3Drafter(Backbone):
    """Everything of an EAGLE-3 drafter that is trained."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        # A list of one: the layout numbers the layer.
        self.layers = nn.ModuleList([Eagle3Layer(config)])

    @property
    def layer(self) -> Eagle3Layer:
        """The one layer."""
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer)
        return layer

    def features(self, taps_BQLH: Tensor) -> Tensor:
        """Features [B, Q, H] of positions whose target states are known, from concatenated taps [B, Q, L*H]."""
        feature_BQH: Tensor = self.fc(taps_BQLH)
        return feature_BQH

    def join(self, feature_BQH: Tensor, embedding_BQH: Tensor) -> Tensor:
        """The layer's input [B, Q, 2H] from features of rows and embeddings of the tokens behind them."""
        layer = self.layer
        return torch.cat((layer.input_layernorm(embedding_BQH), layer.hidden_norm(feature_BQH)), dim=-1)

    def key_values(self, joined_BQ2H: Tensor, positions_BQ: Tensor) -> KeyValues:
        """Keys and values that rows offer to themselves and to later ones."""
        return self.layer.self_attn.key_values(joined_BQ2H, self.rotary.at(positions_BQ))

    def forward(
        self,
        feature_BQH: Tensor,
        joined_BQ2H: Tensor,
        positions_BQ: Tensor,
        context: KeyValues | Room,
        own: KeyValues,
        sight: Sight,
    ) -> Tensor:
        """States [B, Q, H] before `norm`: the features of the next drafts.

        A row's own key stands in the context, or in `own` [B, G, Q*E, D] with those of its E - 1 earlier drafts.
        """
        rotary = self.rotary.at(positions_BQ)
        return self.run(self.layer.step, feature_BQH, joined_BQ2H, rotary, context, own, sight)


def new_eagle3_drafter(config: Eagle3Config, seed: int, kept: Tensor | None = None) -> Eagle3Drafter:
    """A freshly initialised drafter, equal for equal seeds; `kept` [D] are the ids of a reduced vocabulary."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Eagle3Drafter(config)
        drafter.randomise()
    if kept is not None:
        drafter.keep(kept)
    return drafter
