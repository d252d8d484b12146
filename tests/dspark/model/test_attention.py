"""Attention of groups over ranges: every way of computing it against plain sums in float64, values and gradients."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from dspark.model.attention import KeyValues, Sight, attend, dense, fused, tiled
from dspark.model.tiles import TiledAttention, tiles_of

SCALE = 0.3
Ranges = list[list[tuple[int, int]]]


@dataclass(frozen=True)
class Case:
    """Queries, keys and values as a draft layer gives them: positions stand before heads in memory."""

    ranges: Ranges
    queries: Tensor
    context: KeyValues
    own: KeyValues

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.queries, *self.context, *self.own

    @property
    def sight(self) -> Sight:
        starts_BA, limits_BA = torch.tensor(self.ranges, device=self.queries.device).unbind(-1)
        return Sight(starts_BA, limits_BA)


def case_of(
    ranges: Ranges, columns: int, slots: int = 3, own: int = 3, heads: tuple[int, int] = (4, 2), width: int = 6,
    dtype: torch.dtype = torch.float32, device: str = "cpu",
) -> Case:  # fmt: skip
    """Random inputs for the ranges, which lie in `columns` columns; `own` keys for each group."""
    generator = torch.Generator().manual_seed(7)

    def draw(length: int, count: int) -> Tensor:
        values = torch.randn(len(ranges), length, count, width, generator=generator).to(device, dtype)
        return values.transpose(1, 2).requires_grad_()

    groups = len(ranges[0])
    queries = draw(groups * slots, heads[0])
    pairs = [KeyValues(draw(length, heads[1]), draw(length, heads[1])) for length in (columns, groups * own)]
    return Case(ranges, queries, *pairs)


def plain(case: Case) -> Tensor:
    """[B, Q, N, D] in float64, group by group and head by head."""
    queries, *rest = (tensor.double() for tensor in case.inputs)
    out = 0 * queries  # what a group that sees nothing reads
    for row, ranges in enumerate(case.ranges):
        slots, extra = queries.shape[2] // len(ranges), rest[2].shape[2] // len(ranges)
        for group, (start, limit) in enumerate(ranges):
            mine, own = slice(group * slots, (group + 1) * slots), slice(group * extra, (group + 1) * extra)
            for head in range(queries.shape[1]):
                shared = head * rest[0].shape[1] // queries.shape[1]
                keys, values = (
                    torch.cat((context[row, shared, start : max(start, limit)], added[row, shared, own]))
                    for context, added in ((rest[0], rest[2]), (rest[1], rest[3]))
                )
                if len(keys):
                    out[row, head, mine] = (SCALE * queries[row, head, mine] @ keys.T).softmax(-1) @ values
    return out.transpose(1, 2)


def in_small_tiles(case: Case, cost: int = 0, most: int = 40) -> Tensor:
    """Tiles as they are cut where the number of cells is large."""
    groups = len(case.ranges[0])
    rows = case.queries.shape[1] * case.queries.shape[2] // groups
    own = (part.unflatten(2, (groups, part.shape[2] // groups)) for part in case.own)
    tiles = tiles_of(case.ranges, rows, case.queries.device, cost, most)
    mixed: Tensor = TiledAttention.apply(case.queries, *case.context, *own, tiles, SCALE)  # type: ignore[no-untyped-call]
    return mixed


def gradients(case: Case, mixed: Tensor) -> tuple[Tensor, ...]:
    """Of a fixed random sum of the outputs, by every input."""
    weights = torch.randn(mixed.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    total = (mixed.double() * weights.to(mixed.device)).sum()
    return torch.autograd.grad(total, case.inputs, allow_unused=True, materialize_grads=True)


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-5)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Sorted anchors of packed documents with dummies behind, or any ranges at all; few or many heads and slots."""
    batch, groups, columns = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 19))
    ranges: Ranges = []
    for _ in range(batch):
        pairs = draw(st.lists(st.tuples(st.integers(0, columns), st.integers(0, columns)), max_size=groups))
        if draw(st.booleans()):
            border = draw(st.integers(0, columns))
            pairs = [(border if limit >= border else 0, limit) for limit in sorted(limit for _, limit in pairs)]
        ranges.append(pairs + [(0, 0)] * (groups - len(pairs)))
    slots = draw(st.integers(1, 4))
    own = draw(st.sampled_from([slots, 0, 2]))
    shared = draw(st.integers(1, 3))
    heads = shared * draw(st.integers(1, 4)), shared
    return case_of(ranges, columns, slots, own, heads, width=draw(st.sampled_from([1, 4, 8])))


@settings(deadline=None, max_examples=40)
@given(cases())
def test_every_way_gives_the_plain_sums_and_their_gradients(case: Case) -> None:
    expected = plain(case)
    slopes = gradients(case, expected)
    ways = [tiled(case.queries, case.context, case.own, case.sight, SCALE), in_small_tiles(case)]
    empty = any(limit <= start for row in case.ranges for start, limit in row) and not case.own.keys.numel()
    if not empty:
        ways.append(dense(case.queries, case.context, case.own, case.sight, SCALE))
    for found in ways:
        assert_close(found, expected)
        for slope, wanted in zip(gradients(case, found), slopes, strict=True):
            assert_close(slope, wanted)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("slots", "own"), [(3, 3), (1, 0)])
def test_the_block_mask_has_the_ranges_and_the_own_keys(slots: int, own: int) -> None:
    """On a CPU flex attention runs without a kernel and without gradients; the mask is the same."""
    case = case_of([[(0, 0), (0, 1), (0, 130)], [(0, 2), (5, 5), (5, 9)]], 131, slots, own)
    with torch.no_grad():
        found = fused(case.queries, case.context, case.own, case.sight, SCALE, flex_attention)
        assert_close(found, plain(case))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("slots", "own"), [(7, 7), (1, 3), (1, 0)])
def test_on_a_cuda_device_the_compiled_kernel_gives_the_plain_sums_and_their_gradients(slots: int, own: int) -> None:
    ranges = [
        [(0, limit) for limit in range(0, 300, 15)],
        [(100 * (limit // 100), limit) for limit in range(0, 200, 10)],
    ]
    case = case_of(ranges, 300, slots, own, heads=(6, 2), width=64, device="cuda")
    found = attend(case.queries, case.context, case.own, case.sight, SCALE)
    expected = plain(case)
    assert_close(found, expected)
    for slope, wanted in zip(gradients(case, found), gradients(case, expected), strict=True):
        assert_close(slope, wanted)


@pytest.mark.parametrize("own", [2, 0])
def test_gradients_are_exact_in_float64(own: int) -> None:
    case = case_of([[(0, 1), (0, 5), (2, 2), (2, 6)]], 6, 2, own, width=2, dtype=torch.float64)

    def mixed(*inputs: Tensor) -> Tensor:
        return in_small_tiles(Case(case.ranges, inputs[0], KeyValues(*inputs[1:3]), KeyValues(*inputs[3:])), most=30)

    assert torch.autograd.gradcheck(mixed, case.inputs)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 7.0])
def test_a_column_that_no_group_of_its_document_sees_has_no_effect_whatever_it_holds(value: float) -> None:
    # Two documents, 0..5 and 6..11, whose last anchors are 4 and 9.
    case = case_of([[(0, 1), (0, 4), (6, 6), (6, 8), (6, 9)]], 12)
    expected = in_small_tiles(case)
    slopes = gradients(case, expected)
    with torch.no_grad():
        for part in case.context:
            part[:, :, [4, 5, 9, 10, 11]] = value
    for found in (in_small_tiles(case), attend(case.queries, case.context, case.own, case.sight, SCALE)):
        assert_close(found, expected)
        for slope, wanted in zip(gradients(case, found), slopes, strict=True):
            assert_close(slope, wanted)


def test_bf16_inputs_are_rounded_once_behind_sums_in_fp32() -> None:
    case = case_of([[(0, limit) for limit in range(0, 200, 20)]], 200, dtype=torch.bfloat16, width=16)
    found = in_small_tiles(case)
    assert found.dtype == torch.bfloat16
    # Half a step of bf16: nothing but the result has been rounded.
    expected = plain(case)
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-6)
    for slope, wanted in zip(gradients(case, found), gradients(case, expected), strict=True):
        assert (slope.double() - wanted.double()).norm() < 2**-8 * wanted.double().norm()


def test_only_inputs_outputs_and_one_number_per_query_row_are_kept_for_the_backward() -> None:
    case = case_of([[(0, limit) for limit in range(0, 500, 10)]], 500)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        mixed = attend(case.queries, case.context, case.own, case.sight, SCALE)
    rows = case.queries.numel() // case.queries.shape[-1]
    assert sum(tensor.numel() for tensor in kept) == sum(t.numel() for t in case.inputs) + mixed.numel() + rows


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), min_size=1, max_size=30), st.integers(1, 9))
def test_tiles_cover_every_group_once_and_every_column_that_it_sees(ranges: list[tuple[int, int]], rows: int) -> None:
    tiles = tiles_of([ranges], rows, cost=50, most=400)
    assert [group for tile in tiles for group in range(tile.first, tile.last)] == list(range(len(ranges)))
    for tile in tiles:
        columns = range(tile.start, tile.limit)
        assert tile.last - tile.first == 1 or (tile.last - tile.first) * rows * len(columns) <= 400
        for number, (start, limit) in enumerate(ranges[tile.first : tile.last]):
            behind = [] if tile.hidden is None else tile.hidden[number, 0].tolist()
            seen = [c for c in columns if c < tile.even or behind[c - tile.even] == 0]
            assert seen == list(range(start, limit))


def test_early_anchors_do_not_pay_for_the_whole_sequence() -> None:
    """64 blocks of 7 slots and 9 heads at evenly spread anchors: half of all cells are seen, and few more computed."""
    ranges = [[(0, limit) for limit in range(8, 513, 8)]]
    computed = sum((tile.last - tile.first) * (tile.limit - tile.start) for tile in tiles_of(ranges, rows=63))
    seen = sum(limit for _, limit in ranges[0])
    assert seen < computed < 1.15 * seen
