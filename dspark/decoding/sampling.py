"""How tokens are drawn and draft tokens judged, so that speculative text has the law of the target's own.

`distribution` gives the drafter's q and the target's p alike; a draft token is drawn from the very tensor that its
acceptance test reads. Random numbers are counted, not streamed: (seed, request, position, purpose) names each one, so a
result does not depend on batch, slot or order. Shape suffixes: R active rows, N rows of one rule, K draft slots,
Q = K + 1 verified positions, V vocabulary.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.errors import InputError
from dspark.model.vocabulary import Vocabulary

Purpose = Literal["draft", "accept", "next"]
# Each purpose reads its own 8 bytes of one hash; "next" is the residual or bonus token, of which a position has one.
_WORDS: dict[Purpose, int] = {"draft": 0, "accept": 8, "next": 16}


@dataclass(frozen=True)
class Sampling:
    """Temperature, top-k, top-p, min-p, in this order. Temperature 0 takes the likeliest token and draws nothing."""

    temperature: float = 0.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0  # smallest set of likeliest tokens that reaches this mass
    seed: int = 0
    min_p: float = 0.0  # tokens below this share of the likeliest one's probability are left out

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature {self.temperature}: it must be 0 or a positive number")
        if self.top_k < 0:
            raise InputError(f"top_k {self.top_k}: it must be 0 (all tokens) or a positive number of tokens")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p {self.top_p}: it must be above 0 and at most 1 (all tokens)")
        if not 0 <= self.min_p <= 1:
            raise InputError(f"min_p {self.min_p}: it must be from 0 (all tokens) to 1 (the likeliest ones alone)")

    @property
    def rule(self) -> tuple[float, int, float, float]:
        """All but the seed: rows with equal rules have equal distributions."""
        return self.temperature, self.top_k, self.top_p, self.min_p


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [..., V] in fp32 of logits [..., V] under a sampling rule."""
    vocabulary = logits.shape[-1]
    if sampling.temperature == 0:
        return F.one_hot(logits.argmax(-1), vocabulary).float()
    scaled = logits.float() / sampling.temperature
    if sampling.rule[1:] == (0, 1.0, 0.0):
        return scaled.softmax(-1)
    values, tokens = scaled.topk(min(sampling.top_k or vocabulary, vocabulary), dim=-1)
    probs = values.softmax(-1)
    if sampling.top_p < 1:
        mass_before = probs.cumsum(-1) - probs
        probs = probs.masked_fill(mass_before >= sampling.top_p, 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    if sampling.min_p > 0:
        probs = probs.masked_fill(probs < sampling.min_p * probs[..., :1], 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return torch.zeros_like(scaled).scatter_(-1, tokens, probs)


def uniform(seed: int, request_id: str, position: int, purpose: Purpose) -> float:
    """The random number in [0, 1) that decides about the token at `position` of a request, for one purpose.

    52 bits, one fewer than a double holds: times any total it stays below that total, which `draw` relies on.
    """
    digest = hashlib.sha256(f"{seed}/{position}/{request_id}".encode()).digest()
    word = _WORDS[purpose]
    return float(int.from_bytes(digest[word : word + 8], "little") >> 12) / 2.0**52


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Token ids [...] by inverse CDF from weights [..., V] with any positive total; uniforms [...] in [0, 1), fp64.

    A token of weight 0 is never drawn.
    """
    # fp64: in fp32 the running sum over a large vocabulary loses the tail.
    cdf = weights.double().cumsum(-1)
    return torch.searchsorted(cdf, (uniforms * cdf[..., -1]).unsqueeze(-1), right=True).squeeze(-1)


class Place(NamedTuple):
    """Where a row draws: its rule, its request, and the position of its last token, the anchor."""

    sampling: Sampling
    request_id: str
    anchor: int


class Verdict(NamedTuple):
    """How many draft tokens of each row hold, and the token that follows them; both [R], int64."""

    accepted: Tensor
    following: Tensor


@dataclass
class _Group:
    """Rows of one sampling rule above temperature 0, and the q of their drafts, slot by slot."""

    sampling: Sampling
    rows: list[int] | slice
    places: list[Place]
    drafted: list[Tensor] = field(default_factory=list)


class Sampler:
    """The draws of one round: drafts are chosen slot by slot, then judged against the target's logits.

    Rows at temperature 0 need no probabilities; the others are handled together for each sampling rule.
    """

    def __init__(self, places: Sequence[Place], device: torch.device) -> None:
        self.places = places
        self.device = device
        members: dict[tuple[float, int, float, float], list[int]] = {}
        for row, (sampling, _, _) in enumerate(places):
            if sampling.temperature > 0:
                members.setdefault(sampling.rule, []).append(row)
        self.groups = [
            # A slice is a view: the logits of a batch with one rule are not copied.
            _Group(
                places[rows[0]].sampling, slice(None) if len(rows) == len(places) else rows, [places[i] for i in rows]
            )
            for rows in members.values()
        ]
        self.greedy = sum(map(len, members.values())) < len(places)

    def choose(self, logits_RD: Tensor, slot: int, vocabulary: Vocabulary) -> Tensor:
        """Draft tokens [R] of one slot, from draft logits over the tokens that the drafter may propose."""
        if not self.groups:
            return vocabulary.tokens(logits_RD.argmax(-1))
        logits_RV = vocabulary.spread(logits_RD)
        tokens_R = logits_RV.argmax(-1) if self.greedy else logits_RV.new_empty(len(self.places), dtype=torch.int64)
        for group in self.groups:
            q_NV = distribution(logits_RV[group.rows], group.sampling)
            tokens_R[group.rows] = draw(q_NV, self._uniforms(group, [slot], "draft")[:, 0])
            group.drafted.append(q_NV)
        return tokens_R

    def judge(self, logits_RQV: Tensor, drafts_RK: Tensor, proposed_R: Sequence[int]) -> Verdict:
        """The longest accepted prefix of each row's first `proposed` drafts, and the corrected or bonus token."""
        slots = drafts_RK.shape[1]
        offered_RK = torch.arange(slots, device=self.device) < torch.tensor(proposed_R, device=self.device)[:, None]
        if self.greedy:
            best_RQ = logits_RQV.argmax(-1)
            accepted_R = _prefix((drafts_RK == best_RQ[:, :slots]) & offered_RK)
            following_R = best_RQ.gather(1, accepted_R[:, None])[:, 0]
        else:
            accepted_R = torch.empty(len(self.places), dtype=torch.int64, device=self.device)
            following_R = torch.empty_like(accepted_R)
        for group in self.groups:
            verdict = self._judge_group(group, logits_RQV, drafts_RK, offered_RK)
            accepted_R[group.rows], following_R[group.rows] = verdict
        return Verdict(accepted_R, following_R)

    def _judge_group(self, group: _Group, logits_RQV: Tensor, drafts_RK: Tensor, offered_RK: Tensor) -> Verdict:
        """Accept with probability min(1, p/q); after a rejection draw from the positive part of p - q, else from p."""
        slots = drafts_RK.shape[1]
        drafts_NK, offered_NK = drafts_RK[group.rows], offered_RK[group.rows]
        p_NQV = distribution(logits_RQV[group.rows], group.sampling)
        following_NQ = self._uniforms(group, range(slots + 1), "next")
        if not slots:
            return Verdict(drafts_NK.new_zeros(len(group.places)), draw(p_NQV[:, 0], following_NQ[:, 0]))
        q_NKV = torch.stack(group.drafted[:slots], dim=1)
        accept_NK = self._uniforms(group, range(slots), "accept")
        p_NK = p_NQV[:, :slots].gather(2, drafts_NK[..., None])[..., 0].double()
        q_NK = q_NKV.gather(2, drafts_NK[..., None])[..., 0].double()
        accepted_N = _prefix((accept_NK * q_NK < p_NK) & offered_NK)

        each_N = torch.arange(len(accepted_N), device=self.device)
        p_NV, q_NV = p_NQV[each_N, accepted_N], q_NKV[each_N, accepted_N.clamp(max=slots - 1)]
        rejected_N1 = (accepted_N < offered_NK.sum(-1))[:, None]
        residual_NV = (p_NV - q_NV).clamp(min=0)
        # p and q that differ by rounding alone may leave no residual.
        rejected_N1 = rejected_N1 & (residual_NV.sum(-1, keepdim=True) > 0)
        weights_NV = torch.where(rejected_N1, residual_NV, p_NV)
        return Verdict(accepted_N, draw(weights_NV, following_NQ[each_N, accepted_N]))

    def _uniforms(self, group: _Group, slots: Sequence[int], purpose: Purpose) -> Tensor:
        """fp64 [N, slots]; slot k decides about the token at anchor + k + 1."""
        numbers = [
            [uniform(place.sampling.seed, place.request_id, place.anchor + slot + 1, purpose) for slot in slots]
            for place in group.places
        ]
        return torch.tensor(numbers, dtype=torch.float64, device=self.device)


def _prefix(holds_RK: Tensor) -> Tensor:
    return holds_RK.long().cumprod(-1).sum(-1)
