"""Markov heads (a bias from the token before) and the confidence head (will this slot be accepted).

Shape suffixes: ... any leading dimensions, K slots of a block, r Markov rank, H hidden width, D draft tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dspark.model.config import DSparkConfig


class MarkovStep(NamedTuple):
    """Low-rank features [..., r] whose product with W2 is the bias, and the state carried to the next slot."""

    features: Tensor
    state: Tensor | None


class MarkovOutput(nn.Linear):
    """W2: features [..., r] to a bias [..., D]."""

    def __init__(self, rank: int, drafted: int) -> None:
        super().__init__(rank, drafted, bias=False)

    def forward(self, features: Tensor | None = None) -> Tensor:
        """The bias of features; without them W2 [D, r] itself.

        Asked for by a call, for an engine that deals parameters to ranks gathers them for calls alone.
        """
        return self.weight.view_as(self.weight) if features is None else super().forward(features)


class MarkovHead(nn.Module):
    """bias = W2 f(e, h, s) with e = W1[previous token] (paper section 3.1, equations 5 and 6; gated: its variant).

    vanilla: f = e. gated: f = sigmoid(Wg [h; e] + b) * e. rnn: a gated state s runs over the slots of a block from 0.
    The three share W1, W2 and the step-by-step interface; training runs the same steps that decoding runs.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.kind = config.markov_head
        self.markov_w1 = nn.Embedding(config.vocab, config.markov_rank)
        self.markov_w2 = MarkovOutput(config.markov_rank, config.draft_vocab)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(config.hidden + config.markov_rank, config.markov_rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * config.markov_rank + config.hidden, 3 * config.markov_rank)

    def embed(self, previous: Tensor) -> Tensor:
        """e [..., r] of the tokens before the predicted ones [...]."""
        return self.markov_w1(previous)

    def step(self, e: Tensor, h: Tensor, state: Tensor | None) -> MarkovStep:
        """Features of one slot: e [..., r], h [..., H], state [..., r] of the slot before, None at slot 0."""
        if self.kind == "vanilla":
            return MarkovStep(e, None)
        if self.kind == "gated":
            return MarkovStep(torch.sigmoid(self.gate_proj(torch.cat((h, e), dim=-1))) * e, None)
        state = torch.zeros_like(e) if state is None else state
        gate, candidate, out = self.joint_proj(torch.cat((state, e, h), dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return MarkovStep(torch.tanh(out), gate * state + (1 - gate) * torch.tanh(candidate))

    def block_features(self, e_AKr: Tensor, h_AKH: Tensor) -> Tensor:
        """Features [..., K, r] of whole blocks, teacher-forced; equal to `step` slot by slot."""
        if self.kind != "rnn":
            return self.step(e_AKr, h_AKH, None).features
        features, state = [], None
        for slot in range(e_AKr.shape[-2]):
            step = self.step(e_AKr[..., slot, :], h_AKH[..., slot, :], state)
            features.append(step.features)
            state = step.state
        return torch.stack(features, dim=-2)

    def bias(self, features: Tensor) -> Tensor:
        """The bias [..., D] that is added to the base logits."""
        return self.markov_w2(features)


class ConfidenceHead(nn.Module):
    """Logit that a slot is accepted given that the slots before it were (paper section 3.2.1, equation 7)."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_with_markov
        self.proj = nn.Linear(config.hidden + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, h: Tensor, e: Tensor | None) -> Tensor:
        """Logits [...] from states h [..., H] and, where the head was built so, Markov embeddings e [..., r]."""
        if self.with_markov:
            assert e is not None, "a confidence head with Markov embedding needs a Markov head"
            h = torch.cat((h, e), dim=-1)
        return self.proj(h).squeeze(-1)
