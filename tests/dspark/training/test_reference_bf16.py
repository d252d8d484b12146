"""Reference cases in bf16: the bounds lie near what the stored cases show, and a fault of twice a bound is found."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from dspark.training.reference import BOUNDS, compare_case
from tests.dspark.small import HEADS, small_config
from tests.dspark.training.test_reference import GOLDEN, failures, golden_copy, tamper, write_case


@pytest.mark.parametrize("case", ["dspark_vanilla", "dspark_gated"])
def test_the_published_cases_hold_in_bf16_and_only_within_its_bounds(case: str) -> None:
    differences = compare_case(GOLDEN / case, "bf16")
    assert [difference.name for difference in differences if not difference.within] == []
    by_name = {difference.name: difference for difference in differences}
    assert by_name["target_ids"].absolute == by_name["eval_mask"].absolute == 0
    # It is bf16 that was computed: the differences are beyond what fp32 explains.
    assert by_name["draft_logits"].relative > 100 * BOUNDS["fp32"].draft_logits
    assert by_name["fc.weight"].relative > 100 * BOUNDS["fp32"].layer_gradients


def test_the_bounds_of_bf16_are_at_most_four_times_what_the_published_cases_show() -> None:
    found = [difference for case in GOLDEN.iterdir() for difference in compare_case(case, "bf16")]
    largest: dict[tuple[str, float], float] = {}
    for one in found:
        kind = (one.group.split()[0], one.bound)
        largest[kind] = max(largest.get(kind, 0.0), one.relative)
    bounds = {bound: seen for (_, bound), seen in largest.items() if bound}
    assert len(largest) == 7 and len(bounds) == 5  # draft logits and gradients of the heads have equal bounds
    assert all(bound / 4 < seen <= bound for bound, seen in bounds.items())


@pytest.mark.parametrize("case", ["dspark_vanilla", "dspark_gated"])
def test_every_tensor_that_is_off_by_twice_its_bound_fails_in_bf16(tmp_path: Path, case: str) -> None:
    copy = Path(shutil.copytree(GOLDEN / case, tmp_path / "case"))
    bounds = {one.name: one.bound for one in compare_case(copy, "bf16") if one.bound}

    def stretch(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            if part in ("outputs", "loss", "grads") and rest in bounds:
                tensor *= 1 + 2 * bounds[rest]

    assert failures(tamper(copy, stretch), "bf16") == list(bounds)


@pytest.mark.parametrize("head", HEADS)
def test_cases_of_every_head_hold_in_bf16(tmp_path: Path, head: str) -> None:
    alphas = (0.1, 0.9, 0.0 if head == "none" else 1.0)
    # With the weights of seed 0 the kink of the L1 term lies within rounding: its gradient alone differs by all of it.
    assert failures(write_case(tmp_path / "case", small_config(head), alphas, seed=1), "bf16") == []


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        (lambda t: t["outputs.target_ids"].view(-1)[:1].add_(1), "target_ids"),
        (lambda t: t["outputs.draft_logits"].copy_(t["outputs.draft_logits"].roll(1, 2)), "draft_logits"),
        (lambda t: t["loss.l1"].mul_(0.5), "l1"),  # a distance halved
        (lambda t: t["grads.fc.weight"].mul_(2), "fc.weight"),
        (lambda t: t["grads.norm.weight"].neg_(), "norm.weight"),
    ],
)
def test_a_fault_is_beyond_the_bounds_of_bf16(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], failed: str
) -> None:
    assert failures(tamper(golden_copy(tmp_path), change), "bf16") == [failed]


def test_context_that_a_block_may_not_see_is_found_in_bf16(tmp_path: Path) -> None:
    def shift(tensors: dict[str, Tensor]) -> None:
        tensors["inputs.target_hidden_states"] = tensors["inputs.target_hidden_states"].roll(1, 1)

    assert "draft_logits" in failures(tamper(golden_copy(tmp_path), shift), "bf16")
