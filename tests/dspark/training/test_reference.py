"""Reference cases: the stored ones hold, cases of the plain formulas hold for every head, and each fault is found."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config

from dspark.errors import InputError
from dspark.model.config import DSparkConfig
from dspark.model.layout import config_to_json
from dspark.sections import Precision
from dspark.training.reference import Difference, compare_case
from tests.dspark.plain import PlainBlock, plain_blocks, plain_losses, weights_of
from tests.dspark.small import HEADS, small_batch, small_config, small_drafter, small_vocabulary

GOLDEN = Path("tests/golden")
MASKS = [[0, 1, 1, 1, 1, 0, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 1]]
ANCHORS = [[1, 2, 3, 7], [0, 4], []]


def write_case(
    folder: Path,
    config: DSparkConfig,
    alphas: Sequence[float] = (0.1, 0.9, 1.0),
    gamma: str = "4.0",
    anchors: Sequence[Sequence[int]] = ANCHORS,
    seed: int = 0,
) -> Path:
    """A case as the plain float64 formulas have it; unused outputs hold rubbish, dummy blocks stand at position 0."""
    batch = small_batch(config, MASKS)
    weights = weights_of(small_drafter(config, seed), small_vocabulary(config))
    blocks = plain_blocks(weights, config, batch, anchors)
    losses = plain_losses(blocks, float(gamma) if gamma[0].isdigit() and float(gamma) else None)
    total = torch.stack([alpha * losses[name] for alpha, name in zip(alphas, losses, strict=True)]).sum()
    leaves = {name: weight for name, weight in weights.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True) if blocks else [None] * len(leaves)
    width = 5
    keep = torch.tensor([[block < len(row) for block in range(width)] for row in anchors])
    tensors = {
        "inputs.input_ids": batch.input_ids_BS.int(),
        "inputs.loss_mask": batch.loss_mask_BS.byte(),
        "inputs.target_hidden_states": batch.taps_BSLH,
        "inputs.target_last_hidden_states": batch.final_BSH,
        "blocks.keep": keep.byte(),
        "blocks.anchor_positions": torch.tensor([[*row, *[0] * (width - len(row))] for row in anchors]).int(),
        **{f"outputs.{name}": value for name, value in _outputs(blocks, keep, config).items()},
        **{f"loss.{name}": value.detach().float() for name, value in losses.items()},
        "loss.total": total.detach().float(),
    }
    tensors |= {f"weights.{name}": weight.detach().float() for name, weight in weights.items()}
    found = zip(leaves, gradients, strict=True)
    tensors |= {f"grads.{name}": gradient.float() for name, gradient in found if gradient is not None}
    folder.mkdir()
    metadata = {"alphas": json.dumps(list(alphas)), "gamma": gamma}
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "case.safetensors", metadata=metadata)
    values = config_to_json(config, Qwen3Config(), 5, torch.float32)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def _outputs(blocks: Sequence[PlainBlock], keep: Tensor, config: DSparkConfig) -> dict[str, Tensor]:
    shape = (*keep.shape, config.block)
    found = {
        "eval_mask": torch.zeros(shape).byte(),
        "target_ids": torch.full(shape, 7).int(),
        "draft_logits": torch.full((*shape, config.vocab), float("nan")),
        "aligned_target_logits": torch.full((*shape, config.vocab), float("nan")),
    }
    if config.confidence:
        found["confidence_logits"] = torch.full(shape, float("nan"))
    for place, block in zip(keep.nonzero().tolist(), blocks, strict=True):
        own = (*place, slice(len(block.labels)))
        found["eval_mask"][own] = 1
        found["target_ids"][own] = torch.tensor(block.labels).int()
        found["draft_logits"][own] = block.draft_nV.detach().float()
        found["aligned_target_logits"][own] = block.target_nV.detach().float()
        if block.confidence_n is not None:
            found["confidence_logits"][own] = block.confidence_n.detach().float()
    return found


def failures(folder: Path, dtype: Precision = "fp32") -> list[str]:
    return [difference.name for difference in compare_case(folder, dtype) if not difference.within]


@pytest.mark.parametrize("case", ["dspark_vanilla", "dspark_gated"])
def test_the_published_cases_hold(case: str) -> None:
    differences = compare_case(GOLDEN / case)
    assert [difference.name for difference in differences if not difference.within] == []
    names = {difference.name for difference in differences}
    assert names > {"eval_mask", "target_ids", "draft_logits", "aligned_target_logits", "confidence_logits"}
    assert names > {"ce", "l1", "confidence", "total", "fc.weight", "markov_head.markov_w1.weight"}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("gamma", ["4.0", "null", "None", "0.0"])
def test_cases_of_every_head_hold_with_and_without_decay(tmp_path: Path, head: str, gamma: str) -> None:
    alphas = (0.1, 0.9, 0.0 if head == "none" else 1.0)
    assert failures(write_case(tmp_path / "case", small_config(head), alphas, gamma)) == []


@pytest.mark.parametrize("alphas", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)])
def test_cases_with_one_term_alone_hold(tmp_path: Path, alphas: tuple[float, float, float]) -> None:
    assert failures(write_case(tmp_path / "case", small_config("gated"), alphas)) == []


@pytest.mark.parametrize(
    "changes", [{"taps": (0,)}, {"taps": (-1, 0, 3)}, {"block": 1}, {"block": 6}, {"layers": 1}, {"kv_heads": 4}]
)
def test_cases_of_other_shapes_hold(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert failures(write_case(tmp_path / "case", small_config("rnn", **changes))) == []


def test_a_case_of_dummy_blocks_alone_holds(tmp_path: Path) -> None:
    assert failures(write_case(tmp_path / "case", small_config(), anchors=[[], [], []])) == []


def tamper(folder: Path, change: Callable[[dict[str, Tensor]], object], metadata: dict[str, str] | None = None) -> Path:
    with safe_open(folder / "case.safetensors", framework="pt") as file:
        metadata = metadata or file.metadata()
        tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    change(tensors)
    save_file(tensors, folder / "case.safetensors", metadata=metadata)
    return folder


def golden_copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "dspark_vanilla", tmp_path / "case"))


@pytest.mark.parametrize(
    "name",
    [
        "outputs.draft_logits",
        "outputs.aligned_target_logits",
        "outputs.confidence_logits",
        "outputs.target_ids",
        "loss.ce",
        "loss.l1",
        "loss.confidence",
        "loss.total",
        "grads.fc.weight",
        "grads.layers.2.self_attn.k_norm.weight",
        "grads.markov_head.markov_w2.weight",
        "grads.confidence_head.proj.bias",
    ],
)
@pytest.mark.parametrize("fault", ["slightly off", "not a number"])
def test_one_wrong_number_is_found_in_its_tensor(tmp_path: Path, name: str, fault: str) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        value = tensors[name].view(-1)
        if fault == "not a number" and value.is_floating_point():
            value[0] = float("nan")
        elif value.is_floating_point():
            value[0] += 1e-4 * value.abs().max()
        else:
            value[0] += 1

    assert failures(tamper(golden_copy(tmp_path), change)) == [name.partition(".")[2]]


def test_other_supervised_slots_are_a_failure_of_their_own(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["outputs.eval_mask"][0, 0, -1] = 0

    assert failures(tamper(golden_copy(tmp_path), change)) == ["eval_mask"]


def test_other_weights_fail_in_outputs_losses_and_gradients(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["weights.layers.0.mlp.up_proj.weight"][0] += 0.1

    assert {"draft_logits", "total", "fc.weight"} <= set(failures(tamper(golden_copy(tmp_path), change)))


def test_another_decay_or_another_weight_of_a_term_fails(tmp_path: Path) -> None:
    case = golden_copy(tmp_path)
    tamper(case, lambda _: None, {"alphas": "[0.1, 0.9, 1.0]", "gamma": "5.0"})
    assert {"ce", "l1", "confidence", "total"} <= set(failures(case))
    tamper(case, lambda _: None, {"alphas": "[0.1, 0.91, 1.0]", "gamma": "4.0"})
    assert "total" in failures(case) and "l1" not in failures(case)


def test_a_gradient_that_the_case_does_not_store_must_be_zero(tmp_path: Path) -> None:
    case = tamper(golden_copy(tmp_path), lambda tensors: tensors.pop("grads.norm.weight"))
    assert failures(case) == ["norm.weight"]


def test_a_term_of_weight_zero_may_be_stored_as_zero(tmp_path: Path) -> None:
    case = write_case(tmp_path / "case", small_config("none"), (1.0, 0.0, 0.0))

    def never_computed(tensors: dict[str, Tensor]) -> None:
        tensors["loss.l1"].zero_()
        del tensors["loss.confidence"]

    assert failures(tamper(case, never_computed)) == []
    tamper(case, lambda tensors: tensors["loss.l1"].add_(0.5))
    assert failures(case) == ["l1"]


def test_a_term_that_weighs_something_may_not_be_stored_as_zero(tmp_path: Path) -> None:
    assert failures(tamper(golden_copy(tmp_path), lambda tensors: tensors["loss.l1"].zero_())) == ["l1"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("weights.fc.weight"), r"fc\.weight is missing"),
        (lambda t: t.update({"weights.x": torch.zeros(1)}), "tensor x is unexpected"),
        (lambda t: t.update({"grads.x": torch.zeros(1)}), r"gradients of \['x'\]"),
        (lambda t: t.pop("inputs.loss_mask"), "lacks the tensor.*loss_mask"),
        (lambda t: t.pop("loss.total"), "lacks the tensor.*total"),
        (lambda t: t.update({"grads.norm.weight": torch.zeros(3)}), r"norm\.weight of the case has shape \[3\]"),
    ],
)
def test_a_case_that_does_not_fit_its_config_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        compare_case(tamper(golden_copy(tmp_path), change))


def test_unreadable_cases_and_metadata_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere.*cannot be read"):
        compare_case(tmp_path / "nowhere")
    case = golden_copy(tmp_path)
    with pytest.raises(InputError, match="needs alphas"):
        compare_case(tamper(case, lambda _: None, {"alphas": "many", "gamma": "4.0"}))
    for alphas, gamma in (("[1, 0]", "4"), ("[1, 0, 0]", "nan"), ("[1, 0, 0]", "four"), ('{"ce": 1}', "4")):
        with pytest.raises(InputError, match=r"needs alphas.*gamma"):
            compare_case(tamper(case, lambda _: None, {"alphas": alphas, "gamma": gamma}))
    with pytest.raises(InputError, match="lacks the tensor or the metadata 'alphas'"):
        compare_case(tamper(case, lambda _: None, {"gamma": "4"}))


def test_the_relative_difference_is_taken_of_the_largest_stored_magnitude() -> None:
    assert Difference("outputs", "x", 1e-5, 2.0, 1e-5).relative == pytest.approx(5e-6)
    assert Difference("outputs", "x", 2e-5, 2.0, 1e-5).within
    assert not Difference("outputs", "x", 2.1e-5, 2.0, 1e-5).within
    assert not Difference("outputs", "x", float("nan"), 2.0, 1e-5).within
    assert Difference("outputs", "x", 0.0, 0.0, 1e-5).within
    assert not Difference("outputs", "x", 1e-12, 0.0, 1e-5).within


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("rank", [1, 12])
def test_cases_of_any_rank_hold_with_a_confidence_that_reads_the_state_alone(
    tmp_path: Path, head: str, rank: int
) -> None:
    config = small_config(head, markov_rank=rank, confidence_with_markov=False, taps=(-1, 0, 4))
    assert failures(write_case(tmp_path / "case", config)) == []


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_cases_without_a_confidence_head_hold(tmp_path: Path, head: str) -> None:
    config = small_config(head, confidence=False, confidence_with_markov=False)
    assert failures(write_case(tmp_path / "case", config, (0.1, 0.9, 0.0), "null")) == []


def test_a_confidence_head_of_weight_zero_has_no_gradient(tmp_path: Path) -> None:
    case = write_case(tmp_path / "case", small_config(), (0.1, 0.9, 0.0))
    assert failures(case) == []
    tamper(case, lambda tensors: tensors["grads.fc.weight"].zero_())
    assert failures(case) == ["fc.weight"]


def test_a_drafter_of_three_layers_stays_within_the_bounds(tmp_path: Path) -> None:
    assert failures(write_case(tmp_path / "case", small_config("none", layers=3), (0.1, 0.9, 0.0))) == []


@pytest.mark.parametrize("alphas", ["(0.1, 0.9, 1.0)", '{"confidence": 1, "l1": 0.9, "ce": 0.1}', "[0.1, 0.9, 1]"])
def test_loss_weights_may_be_written_as_any_list_or_by_name(tmp_path: Path, alphas: str) -> None:
    assert failures(tamper(golden_copy(tmp_path), lambda _: None, {"alphas": alphas, "gamma": "4"})) == []


@pytest.mark.parametrize("metadata", [{}, {"gamma": ""}, {"gamma": "inf"}, {"gamma": "-1"}, {"gamma": "0"}])
def test_no_decay_may_be_written_in_several_ways_or_left_out(tmp_path: Path, metadata: dict[str, str]) -> None:
    case = write_case(tmp_path / "case", small_config(), gamma="null")
    assert failures(tamper(case, lambda _: None, {"alphas": "[0.1, 0.9, 1.0]", **metadata})) == []


def test_a_case_may_be_stored_in_a_wider_type(tmp_path: Path) -> None:
    def widen(tensors: dict[str, Tensor]) -> None:
        tensors |= {name: value.double() for name, value in tensors.items() if value.is_floating_point()}

    assert failures(tamper(golden_copy(tmp_path), widen)) == []
