"""Terms in chunks against the plain formulas: values, gradients, memory."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dspark.learning import LossSettings
from dspark.model.vocabulary import Vocabulary
from dspark.training.objective import DraftObjective, step_weight
from dspark.training.slots import chunks, slots_of
from dspark.training.terms import Judged, MarkovBias, Terms, judge
from dspark.training.workspace import Workspace
from tests.dspark.small import positions, small_batch, small_blocks, small_config, small_drafter, small_vocabulary

H, V, R, LENGTH = 6, 19, 4, 8
KEPT = torch.tensor([0, 2, 3, 5, 8, 13, 17])
# Slots on columns 0 to 5 of two rows: several on a column, columns without any, an order that is not theirs.
WANTED = torch.tensor([[[1, 1, 1], [1, 1, 0], [0, 0, 0]], [[1, 0, 0], [1, 1, 1], [1, 1, 0]]]).bool()
ANCHORS = torch.tensor([[0, 1, 0], [5, 1, 2]])
COLUMNS = ANCHORS[..., None] + torch.arange(3)
SLOTS = slots_of(WANTED, COLUMNS, LENGTH)
N, P = len(SLOTS.index_N), len(SLOTS.place_P)
BIASES = ["none", "by column", "by slot"]


def case(
    bias: str, kept: bool, cap: float | None, labelled: bool, dtype: torch.dtype = torch.float64
) -> tuple[tuple[Tensor, ...], Judged]:
    """States, features and W2 that want gradients, and what judges them."""
    torch.manual_seed(0)
    head = torch.randn(V, H, dtype=dtype)
    vocabulary = Vocabulary(torch.randn(V, H, dtype=dtype), head, soft_cap=cap).narrowed(KEPT if kept else None)
    judged = Judged(
        vocabulary=vocabulary,
        final_PH=torch.randn(P, H, dtype=dtype),
        slots=SLOTS,
        labels_N=torch.randint(V, (N,)) if labelled else None,
        weights_N=torch.rand(N),
        ce=0.3,
        l1=0.9 if labelled else 0.0,
        budget=1,
    )
    drafted = len(vocabulary.draft_head_DH)
    inputs = [torch.randn(N, H, dtype=dtype)]
    if bias != "none":
        inputs += [torch.randn(P if bias == "by column" else N, R, dtype=dtype), torch.randn(drafted, R, dtype=dtype)]
    return tuple(value.requires_grad_() for value in inputs), judged


def bias_of(factors: Sequence[Tensor], bias: str) -> MarkovBias | None:
    if bias == "none":
        return None
    features, weight = factors
    return MarkovBias(features, weight, bias == "by column")


def judged_by(judged: Judged, bias: str) -> Callable[..., Terms]:
    def terms(hidden: Tensor, *factors: Tensor) -> Terms:
        return judge(hidden, bias_of(factors, bias), judged, Workspace())

    return terms


def plain_terms(judged: Judged, hidden: Tensor, *factors: Tensor) -> Terms:
    """The formulas of design section 4 and 5 as they stand, over all logits."""
    vocabulary, row_N = judged.vocabulary, judged.slots.row_N
    logits = vocabulary.draft_logits(hidden)
    if factors:
        features = factors[0] if len(factors[0]) == N else factors[0][row_N]
        logits = logits + features @ factors[1].t()
    target = vocabulary.logits(judged.final_PH)[row_N]
    q, p = vocabulary.spread(logits).softmax(-1), target.softmax(-1)
    l1 = (p - q).abs().sum(-1)
    if judged.labels_N is None:
        ce = -(vocabulary.of_kept(target).softmax(-1) * logits.log_softmax(-1)).sum(-1)
    else:
        places, kept = vocabulary.draft_ids(judged.labels_N)
        ce = -logits.log_softmax(-1).gather(1, places[:, None])[:, 0] * kept
    total = ((judged.ce * ce + judged.l1 * l1) * judged.weights_N).sum()
    return Terms(total, ce, l1, q.argmax(-1) == p.argmax(-1))


CASES = [
    pytest.param(
        bias, kept, cap, labelled, id=f"{bias}-{'kept' if kept else 'all'}-{cap}-{'hard' if labelled else 'soft'}"
    )
    for bias in BIASES
    for kept, cap, labelled in ((False, None, True), (True, 3.0, True), (True, None, False), (False, 3.0, False))
]


@pytest.mark.parametrize(("bias", "kept", "cap", "labelled"), CASES)
def test_gradients_are_those_of_finite_differences(bias: str, kept: bool, cap: float | None, labelled: bool) -> None:
    inputs, judged = case(bias, kept, cap, labelled)
    assert torch.autograd.gradcheck(lambda *values: judged_by(judged, bias)(*values).total, inputs)


@pytest.mark.parametrize(("bias", "kept", "cap", "labelled"), CASES)
def test_terms_and_gradients_are_those_of_the_plain_formulas(
    bias: str, kept: bool, cap: float | None, labelled: bool
) -> None:
    inputs, judged = case(bias, kept, cap, labelled, torch.float32)
    found = judged_by(judged, bias)(*inputs)
    exact = tuple(value.detach().double().requires_grad_() for value in inputs)
    in_double = replace(
        judged, vocabulary=judged.vocabulary.to(torch.device("cpu"), torch.float64), final_PH=judged.final_PH.double()
    )
    expected = plain_terms(in_double, *exact)
    assert found.greedy_N.tolist() == expected.greedy_N.tolist()
    compared = [*zip(found[:3], expected[:3], strict=True)]
    compared += zip(torch.autograd.grad(found.total, inputs), torch.autograd.grad(expected.total, exact), strict=True)
    for value, wanted in compared:
        # A capped logit's derivative 1 - tanh^2 loses half a digit more.
        assert (value.double() - wanted).norm() <= (1e-6 if cap is None else 3e-6) * wanted.norm()


@pytest.mark.parametrize("bias", BIASES)
def test_neither_chunks_nor_a_used_workspace_change_anything(bias: str) -> None:
    inputs, judged = case(bias, True, 3.0, True)
    workspace, outcomes = Workspace(), []
    for budget in (1, 700, 2**30, 1500):
        terms = judge(inputs[0], bias_of(inputs[1:], bias), replace(judged, budget=budget), workspace)
        outcomes.append((terms[:3], torch.autograd.grad(terms.total, inputs)))
    for outcome in outcomes[1:]:
        torch.testing.assert_close(outcome, outcomes[0], rtol=1e-12, atol=1e-12)


def test_without_gradients_the_terms_are_the_same_and_nothing_is_kept_for_a_backward() -> None:
    inputs, judged = case("by column", False, None, True)
    expected = judged_by(judged, "by column")(*inputs)
    with torch.no_grad():
        found = judged_by(judged, "by column")(*inputs)
    assert found.total.grad_fn is None
    torch.testing.assert_close(found[:3], tuple(value.detach() for value in expected[:3]))


@given(
    wanted=st.lists(st.booleans(), min_size=12, max_size=12),
    anchors=st.lists(st.integers(0, 5), min_size=4, max_size=4),
    budget=st.integers(1, 60),
    rows=st.integers(1, 6),
)
def test_slots_are_grouped_by_column_and_chunks_and_tiles_hold_each_once(
    wanted: list[bool], anchors: list[int], budget: int, rows: int
) -> None:
    wanted_BAK = torch.tensor(wanted).view(2, 2, 3)
    columns_BAK = torch.tensor(anchors).view(2, 2, 1) + torch.arange(3)
    slots = slots_of(wanted_BAK, columns_BAK, LENGTH)
    places = (columns_BAK + LENGTH * torch.arange(2)[:, None, None]).flatten().tolist()
    on = Counter(places[slot] for slot in range(12) if wanted[slot])
    expected = sorted((on[places[slot]], places[slot], slot) for slot in range(12) if wanted[slot])
    assert slots.index_N.tolist() == [slot for _, _, slot in expected]
    assert slots.place_P[slots.row_N].tolist() == [place for _, place, _ in expected]
    assert slots.place_P.tolist() == sorted(on, key=lambda place: (on[place], place))
    assert slots.counts == tuple(on[place] for place in slots.place_P.tolist())
    assert [slots.row_N.tolist().index(place) for place in range(len(slots.counts))] == slots.first_P.tolist()

    covered: list[int] = []
    for chunk in chunks(slots, slot_bytes=3, place_bytes=5, budget=budget):
        columns, within = range(len(slots.counts))[chunk.places], range(len(slots.index_N))[chunk.slots]
        assert len(columns) == 1 or 5 * len(columns) + 3 * len(within) <= budget
        assert set(slots.row_N[chunk.slots].tolist()) == set(columns)
        covered += within
        tiles = list(chunk.tiles(rows))
        assert [place for tile in tiles for place in columns[tile.places]] == list(columns)
        assert [slot for tile in tiles for slot in within[tile.slots]] == list(within)
        for tile in tiles:
            own = [[row] * tile.each for row in columns[tile.places]]
            assert slots.row_N[chunk.slots][tile.slots].view(-1, tile.each).tolist() == own
            assert len(own) == 1 or len(own) * tile.each <= rows
    assert covered == list(range(len(expected)))


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.bytes = max([self.bytes, *(leaf.nbytes for leaf in tree_leaves(made) if isinstance(leaf, Tensor))])
        return made


def test_no_tensor_of_all_slots_and_tokens_is_ever_made() -> None:
    config = replace(small_config("vanilla"), vocab=20_000, draft_vocab=20_000)
    vocabulary, drafter = small_vocabulary(config), small_drafter(config)
    batch = small_batch(config, [[1] * 120])
    blocks = small_blocks(config, batch, positions(range(119)))
    allowed = max(vocabulary.head_VH.nbytes, 2**20)  # weights, gradients of weights, and chunks
    logits = int(blocks.valid_BAK.sum()) * config.vocab * 4
    with Largest() as largest:
        objective = DraftObjective(drafter, LossSettings(), logits_mb=1)
        objective(vocabulary, batch, blocks, step_weight(blocks)).loss.backward()
    assert largest.bytes <= allowed
    assert logits > 20 * allowed


def test_a_target_that_leaves_nothing_to_the_kept_tokens_gives_numbers_all_the_same() -> None:
    inputs, judged = case("none", True, None, False, torch.float32)
    head_VH = torch.zeros(V, H)
    head_VH[1, 0] = 300.0  # token 1 is not kept, and its logit is beyond what exp can hold beside the others'
    final_PH = torch.ones(P, H)
    vocabulary = Vocabulary(judged.vocabulary.embedding_VH, head_VH).narrowed(KEPT)
    terms = judged_by(replace(judged, vocabulary=vocabulary, final_PH=final_PH), "none")(*inputs)
    assert terms.accept_N.tolist() == [0] * N and not terms.greedy_N.any()
    # Among the kept tokens the target is uniform, and so is the draft.
    torch.testing.assert_close(terms.ce_N, torch.full((N,), float(len(KEPT))).log())
    (gradient,) = torch.autograd.grad(terms.total, inputs)
    assert gradient.isfinite().all()


def test_gradients_of_bf16_states_are_scaled_by_the_whole_factor() -> None:
    inputs, judged = case("by column", False, None, True, torch.bfloat16)
    one, other = (
        torch.autograd.grad(judged_by(judged, "by column")(*inputs).total / divisor, inputs) for divisor in (1.0, 120.0)
    )
    for whole, part in zip(one, other, strict=True):
        assert (part.double() * 120 / whole.double()).mean().item() == pytest.approx(1, abs=1e-3)
