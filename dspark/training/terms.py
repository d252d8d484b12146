"""Cross-entropy, L1 distance and acceptance of drafted slots, without the logits of more than a chunk of them.

    chunk of columns --head--> target p ------------------------------+
    their slots --head, Markov bias of the column--> draft logits --tiles--> terms, d(loss)/d(logits) in the same buffer
      --head and W2, transposed--> gradients of the states, of the Markov features and of W2

The loss is a weighted sum whose weights are known before, so a chunk's gradient is made while its logits are there, and
no product is made twice. Products run over chunks of `budget` bytes; what is done to each logit runs over tiles that
stay in a processor's cache. Softmax, terms and sums are fp32 (fp64 for fp64 states).

Shape suffixes: N slots, P columns (`dspark.training.slots`), D tokens that may be drafted, V all tokens, H hidden,
r Markov rank; c a chunk's slots, p its columns, n a tile's slots.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dspark.model.vocabulary import Vocabulary
from dspark.training.slots import Chunk, Slots, chunks, logit_bytes
from dspark.training.verdicts import Tile, judge_tile
from dspark.training.workspace import ALIGNED, Workspace

# A tile and its temporaries fit a core's second-level cache; a GPU wants its kernels large.
_TILE_BYTES = {"cpu": 2**19}
_DEVICE_TILE_BYTES = 2**27
# Of a chunk: both distributions, the kept part of one, slope, bias, its gradient, and one in a rounded type.
_BUFFERS = 7


class MarkovBias(NamedTuple):
    """A bias `features @ weight.T` of the draft logits."""

    features: Tensor  # [P, r] where it depends on the column alone, else [N, r]
    weight_Dr: Tensor
    by_column: bool


@dataclass(frozen=True)
class Judged:
    """Which slots are judged, by what, and what their terms weigh in the loss."""

    vocabulary: Vocabulary
    final_PH: Tensor  # the target's normed states at the columns
    slots: Slots
    labels_N: Tensor | None  # tokens; None: cross-entropy against the target's distribution over the kept tokens
    weights_N: Tensor
    ce: float
    l1: float
    budget: int  # bytes of a chunk


class Terms(NamedTuple):
    """What became of the slots. `total` alone carries a gradient.

    With a reduced vocabulary q is 0 outside it: the target's mass there counts in full in the l1 term, and a label
    there, whose cross-entropy is infinite whatever the drafter does, has 0.
    """

    total: Tensor  # sum of weight x (ce x cross-entropy + l1 x distance)
    ce_N: Tensor
    l1_N: Tensor  # |p - q|, summed over all tokens
    greedy_N: Tensor  # bool: the likeliest tokens of both are the same, or one of equally likely ones

    @property
    def accept_N(self) -> Tensor:
        """Probability of acceptance, sum of min(p, q)."""
        return (1 - self.l1_N / 2).clamp(0, 1)


def judge(hidden_NH: Tensor, bias: MarkovBias | None, judged: Judged, workspace: Workspace) -> Terms:
    """The terms of slots with normed draft states `hidden`; gradients reach them and both factors of the bias."""
    features, weight_Dr, by_column = bias or (None, None, False)
    differentiate = torch.is_grad_enabled()
    apply: Any = _Judge.apply
    return Terms(*apply(hidden_NH, features, weight_Dr, by_column, judged, workspace, differentiate))


class _Judge(torch.autograd.Function):
    """Forward makes the gradients as well; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        features: Tensor | None,
        weight_Dr: Tensor | None,
        by_column: bool,
        judged: Judged,
        workspace: Workspace,
        differentiate: bool,
    ) -> tuple[Tensor, ...]:
        bias = None if features is None or weight_Dr is None else MarkovBias(features, weight_Dr, by_column)
        run = _Run(hidden_NH, bias, judged, workspace, differentiate)
        slot, column = run.bytes_per_slot_and_column
        stretches = list(chunks(judged.slots, slot, column, judged.budget))
        sizes = (slot * part.slot_count + column * part.column_count for part in stretches)
        workspace.reserve(max(sizes, default=0) + _BUFFERS * ALIGNED, hidden_NH.device)
        for part in stretches:
            workspace.restart()
            run.judge(part)
        # Saved, not kept as attributes: so they go as soon as they have been used.
        ctx.save_for_backward(*run.gradients)
        terms = run.terms
        ctx.mark_non_differentiable(*terms[1:])
        return terms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        # Not in place: the graph may be walked again.
        scaled = [None if found is None else found * grad_total for found in ctx.saved_tensors]
        return (*scaled, None, None, None, None)


class _Run:
    """One pass over all chunks: what it found, and the gradients that it gathered."""

    def __init__(
        self, hidden_NH: Tensor, bias: MarkovBias | None, judged: Judged, workspace: Workspace, differentiate: bool
    ) -> None:
        self.hidden_NH, self.judged, self.workspace, self.differentiate = hidden_NH, judged, workspace, differentiate
        self.dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        self.ce_N, self.l1_N = (hidden_NH.new_empty(len(hidden_NH), dtype=self.dtype) for _ in range(2))
        self.greedy_N = torch.empty_like(self.ce_N, dtype=torch.bool)
        self.d_hidden_NH = torch.empty_like(hidden_NH) if differentiate else None
        self.bias = None if bias is None else _BiasRun(bias, judged.slots, workspace, self.dtype, differentiate)
        weights_N = judged.weights_N.to(self.dtype)
        self.labels_N1, self.kept_N = None, torch.ones_like(self.greedy_N)
        if judged.labels_N is not None:
            places_N, self.kept_N = judged.vocabulary.draft_ids(judged.labels_N)
            self.labels_N1 = places_N[:, None]
        self.ce_N1 = (judged.ce * weights_N * self.kept_N)[:, None]
        self.l1_N1 = (judged.l1 * weights_N)[:, None] if judged.l1 else None

    @property
    def terms(self) -> tuple[Tensor, ...]:
        """The fields of `Terms`."""
        judged, ce_N = self.judged, self.ce_N * self.kept_N
        return ((judged.ce * ce_N + judged.l1 * self.l1_N) * judged.weights_N).sum(), ce_N, self.l1_N, self.greedy_N

    @property
    def gradients(self) -> tuple[Tensor | None, ...]:
        """Of the total, for states, features and W2."""
        return (self.d_hidden_NH, *((None, None) if self.bias is None else self.bias.gradients))

    @property
    def bytes_per_slot_and_column(self) -> tuple[int, int]:
        """What the buffers of a chunk hold for each of its slots, and for each of its columns."""
        vocabulary, bias = self.judged.vocabulary, self.bias
        return logit_bytes(
            len(vocabulary.draft_head_DH),
            len(vocabulary.head_VH),
            self.hidden_NH.itemsize,
            reduced=vocabulary.kept_D is not None,
            capped=vocabulary.soft_cap is not None,
            bias=None if bias is None else "column" if bias.by_column else "slot",
        )

    def judge(self, chunk: Chunk) -> None:
        """Terms and gradients of a chunk's slots."""
        judged, vocabulary = self.judged, self.judged.vocabulary
        probs_pD, mass_p1, best_p = self._teacher(chunk)
        best_p1, kept_p = (value[:, None] for value in vocabulary.draft_ids(best_p))
        head_DH = vocabulary.draft_head_DH
        logits_cD = self.workspace.product(self.hidden_NH[chunk.slots], head_DH, self.dtype)
        slope_cD = None
        if vocabulary.soft_cap is not None:
            slope_cD = self.workspace.take((len(logits_cD), len(head_DH)), self.dtype)
            _cap(logits_cD, vocabulary.soft_cap, slope_cD)
        if self.bias is not None:
            self.bias.begin(chunk)
        for own in _tiles(logits_cD):
            at = slice(chunk.slots.start + own.start, chunk.slots.start + own.stop)
            logits_nD, row_n = logits_cD[own], judged.slots.row_N[at] - chunk.places.start
            if self.bias is not None:
                self.bias.add_to(logits_nD, at)
            tile = Tile(
                probs_nD=probs_pD.index_select(0, row_n),  # a quarter of the time of probs_pD[row_n]
                best_n1=best_p1[row_n],
                mass_n1=None if mass_p1 is None else mass_p1[row_n],
                labels_n1=None if self.labels_N1 is None else self.labels_N1[at],
                ce_n1=self.ce_N1[at],
                l1_n1=None if self.l1_N1 is None else self.l1_N1[at],
            )
            self.ce_N[at], self.l1_N[at], greedy_n = judge_tile(logits_nD, tile, self.differentiate)
            self.greedy_N[at] = greedy_n & kept_p[row_n, 0]
            if self.bias is not None and self.differentiate:
                self.bias.gather_from(logits_nD, at)
        if self.d_hidden_NH is not None:
            if self.bias is not None:
                self.bias.finish()
            if slope_cD is not None:
                logits_cD *= slope_cD
            torch.mm(self.workspace.rounded(logits_cD, head_DH.dtype), head_DH, out=self.d_hidden_NH[chunk.slots])

    def _teacher(self, chunk: Chunk) -> tuple[Tensor, Tensor | None, Tensor]:
        """The target at a chunk's columns: probabilities [p, D] among the tokens that may be drafted, the mass
        [p, 1] of these where others exist, and the likeliest of all tokens [p]."""
        vocabulary = self.judged.vocabulary
        states_pH = self.judged.final_PH[chunk.places]
        logits_pV = self.workspace.product(states_pH, vocabulary.head_VH, self.dtype)
        if vocabulary.soft_cap is not None:
            _cap(logits_pV, vocabulary.soft_cap)
        top_p, best_p = logits_pV.max(-1)  # faster than argmax
        if vocabulary.kept_D is None:
            return torch.softmax(logits_pV, -1, out=logits_pV), None, best_p
        kept_pD = self.workspace.take((len(logits_pV), len(vocabulary.kept_D)), self.dtype)
        torch.index_select(logits_pV, 1, vocabulary.kept_D, out=kept_pD)
        all_p = logits_pV.sub_(top_p[:, None]).exp_().sum(-1).log() + top_p
        mass_p = (kept_pD.logsumexp(-1) - all_p).exp()
        return torch.softmax(kept_pD, -1, out=kept_pD), mass_p[:, None], best_p


class _BiasRun:
    """The Markov bias of a chunk's rows: of its columns, or of its slots where a slot's state has a part in it."""

    def __init__(
        self, bias: MarkovBias, slots: Slots, workspace: Workspace, dtype: torch.dtype, differentiate: bool
    ) -> None:
        self.features, self.weight_Dr, self.by_column = bias
        self.workspace, self.dtype, self.differentiate = workspace, dtype, differentiate
        count = len(slots.row_N)
        self.row_N = slots.row_N if self.by_column else torch.arange(count, device=slots.row_N.device)
        self.d_features = torch.empty_like(self.features) if differentiate else None
        self.d_weight_Dr = torch.zeros_like(self.weight_Dr, dtype=dtype) if differentiate else None

    @property
    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """For features and W2."""
        return self.d_features, None if self.d_weight_Dr is None else self.d_weight_Dr.to(self.weight_Dr.dtype)

    def begin(self, chunk: Chunk) -> None:
        """The bias of the chunk's rows, and an empty gradient for it."""
        self.own = chunk.places if self.by_column else chunk.slots
        self.bias = self.workspace.product(self.features[self.own], self.weight_Dr, self.dtype)
        if self.differentiate:
            shape = (len(self.bias), len(self.weight_Dr))
            self.d_bias = self.workspace.take(shape, self.dtype).zero_()

    def add_to(self, logits_nD: Tensor, slots: slice) -> None:
        logits_nD += self.bias.index_select(0, self.row_N[slots] - self.own.start)

    def gather_from(self, d_logits_nD: Tensor, slots: slice) -> None:
        self.d_bias.index_add_(0, self.row_N[slots] - self.own.start, d_logits_nD)

    def finish(self) -> None:
        """From the gradient of the bias to those of its factors."""
        assert self.d_features is not None and self.d_weight_Dr is not None
        d_bias = self.workspace.rounded(self.d_bias, self.weight_Dr.dtype)
        torch.mm(d_bias, self.weight_Dr, out=self.d_features[self.own])
        if d_bias.dtype == self.dtype:
            self.d_weight_Dr.addmm_(d_bias.t(), self.features[self.own])
        else:
            self.d_weight_Dr += d_bias.t() @ self.features[self.own]


def _tiles(logits_cD: Tensor) -> Iterator[slice]:
    """Stretches of a chunk's slots."""
    size = _TILE_BYTES.get(logits_cD.device.type, _DEVICE_TILE_BYTES)
    rows = max(1, size // max(1, logits_cD.shape[1] * logits_cD.itemsize))
    for start in range(0, len(logits_cD), rows):
        yield slice(start, min(start + rows, len(logits_cD)))


def _cap(logits: Tensor, cap: float, slope: Tensor | None = None) -> None:
    """cap * tanh(logits / cap) in place; `slope` becomes its derivative."""
    logits.div_(cap).tanh_()
    if slope is not None:
        torch.mul(logits, logits, out=slope).neg_().add_(1)
    logits.mul_(cap)
