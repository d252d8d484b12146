"""Cross-entropy, L1 distance and acceptance of drafted slots, without the logits of more than a chunk of them.

    chunk of columns --head--> target p ------------------------------+
    their slots --head, Markov bias of the column--> draft logits --tiles--> terms, d(loss)/d(logits) in the same buffer
      --head and W2, transposed--> gradients of the states, of the Markov features and of W2

The loss is a weighted sum whose weights are known before, so a chunk's gradient is made while its logits are there, and
no product is made twice. Products run over chunks of `budget` bytes; what is done to each logit runs over tiles that
stay in a processor's cache. Softmax, terms and sums are fp32 (fp64 for fp64 states).

Shape suffixes: N slots, P columns (`dspark.training.slots`), D tokens that may be drafted, V all tokens, H hidden,
r Markov rank; c a chunk's slots, p columns of a chunk or a tile, n a tile's slots, e slots on each of its columns.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dspark.model.vocabulary import Vocabulary
from dspark.training.slots import Chunk, Slots, Tile, chunks, logit_bytes
from dspark.training.verdicts import Judge, judge_tile
from dspark.training.workspace import ALIGNED, Workspace

# Of each thread: a tile and its temporaries fit a core's second-level cache; a GPU wants its kernels large.
_TILE_BYTES = 2**20
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


class _Teacher(NamedTuple):
    """The target at some columns."""

    probs_pD: Tensor  # among the tokens that may be drafted
    mass_p: Tensor | None  # of these, where others exist
    best_p: Tensor  # the likeliest of all tokens


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
        self.bias = None if bias is None else _BiasRun(bias, workspace, self.dtype, differentiate)
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
        vocabulary, workspace = self.judged.vocabulary, self.workspace
        head_DH = vocabulary.draft_head_DH
        teacher_pV = workspace.product(self.judged.final_PH[chunk.places], vocabulary.head_VH, self.dtype)
        reduced_pD = None
        if vocabulary.kept_D is not None:
            reduced_pD = workspace.take((chunk.column_count, len(head_DH)), self.dtype)
        logits_cD = workspace.product(self.hidden_NH[chunk.slots], head_DH, self.dtype)
        slope_cD = None
        if vocabulary.soft_cap is not None:
            slope_cD = workspace.take((chunk.slot_count, len(head_DH)), self.dtype)
            _cap(logits_cD, vocabulary.soft_cap, slope_cD)
        if self.bias is not None:
            self.bias.begin(chunk, logits_cD)
        for tile in chunk.tiles(_tile_rows(logits_cD)):
            reduced = None if reduced_pD is None else reduced_pD[tile.places]
            self._judge_tile(chunk, tile, logits_cD[tile.slots], self._teacher(teacher_pV[tile.places], reduced))
        if self.d_hidden_NH is not None:
            if self.bias is not None:
                self.bias.finish(chunk, logits_cD)
            if slope_cD is not None:
                logits_cD *= slope_cD
            torch.mm(workspace.rounded(logits_cD, head_DH.dtype), head_DH, out=self.d_hidden_NH[chunk.slots])

    def _judge_tile(self, chunk: Chunk, tile: Tile, logits_nD: Tensor, teacher: _Teacher) -> None:
        """Terms of a tile's slots; their logits become gradients."""
        at = slice(chunk.slots.start + tile.slots.start, chunk.slots.start + tile.slots.stop)

        def table(values_N1: Tensor) -> Tensor:
            return values_N1[at].view(-1, tile.each, 1)

        logits_peD = logits_nD.view(-1, tile.each, logits_nD.shape[1])
        if self.bias is not None:
            self.bias.add_to(logits_peD, tile)
        best_p, kept_p = self.judged.vocabulary.draft_ids(teacher.best_p)
        judge = Judge(
            probs_p1D=teacher.probs_pD[:, None],
            mass_p11=None if teacher.mass_p is None else teacher.mass_p[:, None, None],
            best_p11=best_p[:, None, None],
            labels_pe1=None if self.labels_N1 is None else table(self.labels_N1),
            ce_pe1=table(self.ce_N1),
            l1_pe1=None if self.l1_N1 is None else table(self.l1_N1),
        )
        verdict = judge_tile(logits_peD, judge, self.differentiate)
        self.ce_N[at], self.l1_N[at] = verdict.ce_pe.flatten(), verdict.l1_pe.flatten()
        self.greedy_N[at] = (verdict.greedy_pe & kept_p[:, None]).flatten()
        if self.bias is not None and self.differentiate:
            self.bias.gather_from(logits_peD, tile)

    def _teacher(self, logits_pV: Tensor, reduced_pD: Tensor | None) -> _Teacher:
        """What the target's logits say, in their own memory or, among the tokens that may be drafted, in `reduced`."""
        vocabulary = self.judged.vocabulary
        if vocabulary.soft_cap is not None:
            _cap(logits_pV, vocabulary.soft_cap)
        top_p, best_p = logits_pV.max(-1)  # faster than argmax
        if reduced_pD is None or vocabulary.kept_D is None:
            return _Teacher(torch.softmax(logits_pV, -1, out=logits_pV), None, best_p)
        torch.index_select(logits_pV, 1, vocabulary.kept_D, out=reduced_pD)
        all_p = logits_pV.sub_(top_p[:, None]).exp_().sum(-1).log() + top_p
        mass_p = (reduced_pD.logsumexp(-1) - all_p).exp()
        return _Teacher(torch.softmax(reduced_pD, -1, out=reduced_pD), mass_p, best_p)


class _BiasRun:
    """The Markov bias of a chunk: of its columns, or of its slots where a slot's state has a part in it.

    That of columns has memory of its own, with its gradient; that of slots is added to the logits and its gradient is
    theirs.
    """

    def __init__(self, bias: MarkovBias, workspace: Workspace, dtype: torch.dtype, differentiate: bool) -> None:
        self.features, self.weight_Dr, self.by_column = bias
        self.workspace, self.dtype, self.differentiate = workspace, dtype, differentiate
        self.d_features = torch.empty_like(self.features) if differentiate else None
        self.d_weight_Dr: Tensor | None = None

    @property
    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """For features and W2."""
        if not self.differentiate:
            return None, None
        if self.d_weight_Dr is None:
            return self.d_features, torch.zeros_like(self.weight_Dr)
        return self.d_features, self.d_weight_Dr.to(self.weight_Dr.dtype)

    def begin(self, chunk: Chunk, logits_cD: Tensor) -> None:
        """The bias of the chunk's columns, or of its slots, added."""
        if not self.by_column:
            self.workspace.add_product(logits_cD, self.features[chunk.slots], self.weight_Dr)
            return
        self.bias_pD = self.workspace.product(self.features[chunk.places], self.weight_Dr, self.dtype)
        if self.differentiate:
            self.d_bias_pD = self.workspace.take((len(self.bias_pD), len(self.weight_Dr)), self.dtype)

    def add_to(self, logits_peD: Tensor, tile: Tile) -> None:
        if self.by_column:
            logits_peD += self.bias_pD[tile.places, None]

    def gather_from(self, d_logits_peD: Tensor, tile: Tile) -> None:
        if self.by_column:
            torch.sum(d_logits_peD, 1, out=self.d_bias_pD[tile.places])

    def finish(self, chunk: Chunk, d_logits_cD: Tensor) -> None:
        """From the gradient of the bias to those of its factors."""
        assert self.d_features is not None
        own, exact = (chunk.places, self.d_bias_pD) if self.by_column else (chunk.slots, d_logits_cD)
        d_bias = self.workspace.rounded(exact, self.weight_Dr.dtype)
        torch.mm(d_bias, self.weight_Dr, out=self.d_features[own])
        if self.d_weight_Dr is None:
            self.d_weight_Dr = (d_bias.t() @ self.features[own]).to(self.dtype)
        elif d_bias.dtype == self.dtype:
            self.d_weight_Dr.addmm_(d_bias.t(), self.features[own])
        else:
            self.d_weight_Dr += d_bias.t() @ self.features[own]


def _tile_rows(logits_cD: Tensor) -> int:
    """Slots of a tile."""
    cpu = logits_cD.device.type == "cpu"
    size = _TILE_BYTES * torch.get_num_threads() if cpu else _DEVICE_TILE_BYTES
    return max(1, size // max(1, logits_cD.shape[1] * logits_cD.itemsize))


def _cap(logits: Tensor, cap: float, slope: Tensor | None = None) -> None:
    """cap * tanh(logits / cap) in place; `slope` becomes its derivative."""
    logits.div_(cap).tanh_()
    if slope is not None:
        torch.mul(logits, logits, out=slope).neg_().add_(1)
    logits.mul_(cap)
