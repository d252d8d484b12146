"""The objective against the plain float64 formulas, and its metrics against numbers one can check by hand."""

from dataclasses import replace

import pytest
import torch
from torch import tensor

from dspark.learning import LossSettings
from dspark.training.blocks import draw_anchors
from dspark.training.means import add_means, stack_means, values_of
from dspark.training.objective import (
    DraftObjective,
    Objective,
    acceptance_means,
    confidence_means,
    draft_logits,
    run_drafter,
    step_weight,
    target_logits,
)
from tests.dspark.plain import plain_blocks, plain_losses, weights_of
from tests.dspark.small import (
    HEADS,
    positions,
    small_batch,
    small_blocks,
    small_config,
    small_drafter,
    small_vocabulary,
)

MASKS = [[0, 1, 1, 1, 1, 0, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1]]
ANCHORS = positions([1, 2, 3, 7], [0, 3, 4])


def objective_of(head: str, gamma: float | None = 4.0, rows: slice = slice(None)) -> tuple[DraftObjective, Objective]:
    """The objective of some rows of the example, its denominator that of all of them."""
    config = small_config(head)
    batch = small_batch(config, MASKS)
    whole = step_weight(small_blocks(config, batch, ANCHORS, gamma))
    batch = replace(
        batch,
        input_ids_BS=batch.input_ids_BS[rows],
        loss_mask_BS=batch.loss_mask_BS[rows],
        taps_BSLH=batch.taps_BSLH[rows],
        final_BSH=batch.final_BSH[rows],
    )
    blocks = small_blocks(config, batch, ANCHORS[rows], gamma)
    module = DraftObjective(small_drafter(config), settings_of(head))
    return module, module(small_vocabulary(config), batch, blocks, whole)


def settings_of(head: str) -> LossSettings:
    return LossSettings(ce=0.3, l1=0.8, confidence=0.0 if head == "none" else 0.7)


def gradients(module: DraftObjective, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradient of every parameter; raises where the loss does not reach one."""
    names, parameters = zip(*module.drafter.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("gamma", [4.0, None])
def test_losses_and_gradients_equal_the_plain_formulas_in_float64(head: str, gamma: float | None) -> None:
    config, settings = small_config(head), settings_of(head)
    module, objective = objective_of(head, gamma)
    weights = weights_of(module.drafter, small_vocabulary(config))
    plain = plain_losses(plain_blocks(weights, config, small_batch(config, MASKS), ANCHORS), gamma)
    total = settings.ce * plain["ce"] + settings.l1 * plain["l1"] + settings.confidence * plain["confidence"]
    expected = dict(zip(weights, torch.autograd.grad(total, list(weights.values()), allow_unused=True), strict=True))

    values = values_of(list(objective.means), stack_means(objective.means))
    for name in ["ce", "l1"] + (["confidence"] if config.confidence else []):
        assert values[f"loss_{name}"] == pytest.approx(plain[name].item(), rel=1e-5)
    assert objective.loss.item() == pytest.approx(total.item(), rel=1e-5)
    assert values["loss"] == pytest.approx(total.item(), rel=1e-5)
    for name, gradient in gradients(module, objective.loss).items():
        plain_gradient = expected[name]
        assert plain_gradient is not None
        largest = plain_gradient.abs().max().item()
        torch.testing.assert_close(gradient.double(), plain_gradient, rtol=0, atol=1e-5 * largest)


def test_acceptance_metrics_of_two_blocks_of_two_slots() -> None:
    config = small_config(block=2)
    batch = small_batch(config, [[1, 1, 1, 1, 0]])
    blocks = small_blocks(config, batch, positions([0, 2]))
    assert blocks.valid_BAK.tolist() == [[[True, True], [True, False]]]

    means = acceptance_means(
        blocks.valid_BAK, tensor([[[0.5, 0.4], [0.8, 0]]]), tensor([[[True, False], [True, False]]])
    )

    assert values_of(list(means), stack_means(means)) == pytest.approx(
        {
            "accept_rate_0": (0.5 + 0.8) / 2,
            "accept_rate_1": 0.4,
            "tau_probabilistic": ((1 + 0.5 + 0.5 * 0.4) + (1 + 0.8)) / 2,
            "tau_greedy": ((1 + 1 + 0) + (1 + 1)) / 2,
            "supervised_per_block": (2 + 1) / 2,
        }
    )


def test_confidence_metrics_of_two_blocks_of_two_slots() -> None:
    config = small_config(block=2)
    batch = small_batch(config, [[1, 1, 1, 1, 0]])
    blocks = small_blocks(config, batch, positions([0, 2]), gamma=None)
    says = tensor([[[0.9, 0.5], [0.6, 0.99]]])

    means = confidence_means(blocks, says.logit(), tensor([[[0.5, 0.4], [0.8, 0]]]))

    assert values_of(list(means), stack_means(means)) == pytest.approx(
        {
            "confidence_abs_error": (0.4 + 0.1 + 0.2) / 3,
            "confidence_bias": (0.4 + 0.1 - 0.2) / 3,
            "confidence_cumulative_bias": (0.4 + (0.9 * 0.5 - 0.5 * 0.4) - 0.2) / 3,
        },
        rel=1e-5,
    )


def test_a_dummy_block_counts_in_no_metric() -> None:
    config = small_config(block=2)
    lonely, pair = [[1, 1, 1]], [[1, 1, 1], [0, 1, 1]]
    both = (
        small_blocks(config, small_batch(config, lonely), positions([0])),
        small_blocks(config, small_batch(config, pair), positions([0], [])),
    )
    few, padded = (acceptance_means(blocks.valid_BAK, blocks.valid_BAK / 2, blocks.valid_BAK) for blocks in both)
    assert torch.equal(stack_means(few), stack_means(padded))


def test_distributions_that_agree_are_accepted_and_disjoint_ones_are_two_apart() -> None:
    config = small_config("none", block=1)
    batch = small_batch(config, [[1, 1, 1]])
    blocks = small_blocks(config, batch, positions([0]))
    vocabulary = small_vocabulary(config)
    drafter = small_drafter(config)
    settings = LossSettings(confidence=0.0)
    plain = plain_blocks(weights_of(drafter, vocabulary), config, batch, positions([0]))

    same = replace(batch, final_BSH=plain[0].hidden_KH.detach().float().expand(1, 3, -1))
    means = DraftObjective(drafter, settings)(vocabulary, same, blocks, step_weight(blocks)).means
    assert means["loss_l1"].total.item() == pytest.approx(0, abs=1e-5)
    assert means["accept_rate_0"].total.item() == pytest.approx(1, abs=1e-5)

    apart = replace(batch, final_BSH=-300 * same.final_BSH)
    sharp = replace(vocabulary, head_VH=vocabulary.head_VH * 100)
    means = DraftObjective(drafter, settings)(sharp, apart, blocks, step_weight(blocks)).means
    assert means["loss_l1"].total.item() == pytest.approx(2, abs=1e-5)
    assert means["accept_rate_0"].total.item() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("head", HEADS)
def test_a_batch_without_anchors_gives_every_parameter_a_finite_zero_gradient(head: str) -> None:
    config = small_config(head)
    batch = small_batch(config, [[0, 0, 0, 0], [1, 0, 1, 0]])
    anchors = [draw_anchors(mask.numpy(), 4, seed=0, epoch=0, sample_id="x") for mask in batch.loss_mask_BS]
    blocks = small_blocks(config, batch, anchors)
    module = DraftObjective(small_drafter(config), settings_of(head))

    objective = module(small_vocabulary(config), batch, blocks, step_weight(blocks))

    assert objective.loss.item() == 0
    assert all(not gradient.any() for gradient in gradients(module, objective.loss).values())
    assert values_of(list(objective.means), stack_means(objective.means)) == {}


@pytest.mark.parametrize("head", HEADS)
def test_a_row_of_nan_without_anchors_leaks_into_neither_loss_nor_gradient(head: str) -> None:
    config = small_config(head)
    clean = small_batch(config, [MASKS[0], [0] * 6])
    broken = replace(clean, taps_BSLH=clean.taps_BSLH.clone(), final_BSH=clean.final_BSH.clone())
    # A whole row without blocks, and what lies behind the last anchor of the row with blocks.
    broken.taps_BSLH[1], broken.final_BSH[1] = float("nan"), float("nan")
    broken.taps_BSLH[0, 7:] = float("nan")
    blocks = small_blocks(config, clean, positions([1, 2, 3, 7], []))
    found = []
    for batch in (clean, broken):
        module = DraftObjective(small_drafter(config), settings_of(head))
        objective = module(small_vocabulary(config), batch, blocks, step_weight(blocks))
        found.append((objective, gradients(module, objective.loss)))
    (expected, expected_gradients), (objective, computed_gradients) = found
    assert torch.equal(stack_means(objective.means), stack_means(expected.means))
    assert all(torch.equal(computed_gradients[name], value) for name, value in expected_gradients.items())


@pytest.mark.parametrize("head", HEADS)
def test_the_sums_of_a_padded_batch_are_the_sums_of_its_rows_alone(head: str) -> None:
    module, together = objective_of(head)
    config = small_config(head)
    alone = DraftObjective(small_drafter(config), settings_of(head))
    whole = small_batch(config, MASKS)
    denominator = step_weight(small_blocks(config, whole, ANCHORS))
    parts = []
    for row, mask in enumerate(MASKS):
        size = len(mask)
        batch = replace(
            whole,
            input_ids_BS=whole.input_ids_BS[row : row + 1, :size],
            loss_mask_BS=whole.loss_mask_BS[row : row + 1, :size],
            taps_BSLH=whole.taps_BSLH[row : row + 1, :size],
            final_BSH=whole.final_BSH[row : row + 1, :size],
        )
        blocks = small_blocks(config, batch, ANCHORS[row : row + 1])
        parts.append(alone(small_vocabulary(config), batch, blocks, denominator))

    total = torch.stack([part.loss for part in parts]).sum()
    assert total.item() == pytest.approx(together.loss.item(), rel=1e-5)
    sums = add_means([part.means for part in parts])
    assert sums.keys() == together.means.keys()
    torch.testing.assert_close(stack_means(sums), stack_means(together.means), rtol=1e-5, atol=1e-6)
    expected = gradients(module, together.loss)
    for name, gradient in gradients(alone, total).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_a_step_does_not_depend_on_how_rows_are_dealt_to_micro_batches() -> None:
    _, whole = objective_of("gated")
    parts = [objective_of("gated", rows=slice(row, row + 1))[1] for row in range(2)]
    assert parts[0].loss.item() + parts[1].loss.item() == pytest.approx(whole.loss.item(), rel=1e-5)


def test_the_confidence_term_does_not_pull_the_drafted_distribution_towards_its_target() -> None:
    config = small_config("vanilla")
    settings = LossSettings.model_construct(ce=0.0, l1=0.0, confidence=1.0, gamma=4.0, denominator="global")
    batch = small_batch(config, MASKS)
    blocks = small_blocks(config, batch, ANCHORS)
    module = DraftObjective(small_drafter(config), settings)
    loss = module(small_vocabulary(config), batch, blocks, step_weight(blocks)).loss
    # W2 touches the drafted distribution alone, which reaches this loss only through the detached acceptance.
    found = gradients(module, loss)
    assert not found["markov_head.markov_w2.weight"].any()
    assert found["confidence_head.proj.weight"].any()
    assert found["fc.weight"].any()


def test_neither_embedding_nor_head_receives_a_gradient() -> None:
    config = small_config()
    vocabulary = small_vocabulary(config)
    before = [vocabulary.embedding_VH.clone(), vocabulary.head_VH.clone()]
    batch = small_batch(config, MASKS)
    blocks = small_blocks(config, batch, ANCHORS)
    module = DraftObjective(small_drafter(config), LossSettings())
    module(vocabulary, batch, blocks, step_weight(blocks)).loss.backward()
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    assert torch.equal(vocabulary.embedding_VH, before[0]) and torch.equal(vocabulary.head_VH, before[1])
    assert not any("embed_tokens" in name or "lm_head" in name for name in module.state_dict())


def test_losses_of_a_bf16_drafter_are_summed_in_fp32() -> None:
    config = small_config()
    batch = small_batch(config, MASKS)
    low = replace(batch, taps_BSLH=batch.taps_BSLH.bfloat16(), final_BSH=batch.final_BSH.bfloat16())
    blocks = small_blocks(config, batch, ANCHORS)
    module = DraftObjective(small_drafter(config).bfloat16(), LossSettings())
    vocabulary = small_vocabulary(config).to(torch.device("cpu"), torch.bfloat16)
    objective = module(vocabulary, low, blocks, step_weight(blocks))
    assert objective.loss.dtype == torch.float32
    assert all(mean.total.dtype == torch.float32 for mean in objective.means.values())
    # Only the states are rounded: the loss stays near the one in fp32.
    assert objective.loss.item() == pytest.approx(_loss_in_fp32(), rel=0.03)


def _loss_in_fp32() -> float:
    config = small_config()
    batch = small_batch(config, MASKS)
    blocks = small_blocks(config, batch, ANCHORS)
    module = DraftObjective(small_drafter(config), LossSettings())
    loss: float = module(small_vocabulary(config), batch, blocks, step_weight(blocks)).loss.item()
    return loss


def test_a_reduced_vocabulary_counts_the_target_s_mass_outside_it_and_skips_labels_there() -> None:
    whole = small_config()
    kept = torch.arange(0, 30, 2)
    config = replace(whole, draft_vocab=len(kept))
    drafter = small_drafter(config)
    drafter.keep(kept)
    vocabulary = small_vocabulary(config).narrowed(kept)
    batch = small_batch(config, MASKS)
    blocks = small_blocks(config, batch, ANCHORS)
    objective = DraftObjective(drafter, LossSettings(ce=0.3, l1=0.8, confidence=0.7))(
        vocabulary, batch, blocks, step_weight(blocks)
    )
    # The same drafter with every token, where those outside are made impossible.
    wide = small_drafter(whole)
    wide.load_state_dict({**drafter.state_dict(), "markov_head.markov_w2.weight": torch.zeros(30, 5)}, strict=False)
    assert wide.markov_head is not None and drafter.markov_head is not None
    wide.markov_head.markov_w2.weight.data[kept] = drafter.markov_head.markov_w2.weight.data
    output, slots = run_drafter(wide, vocabulary, batch, blocks), blocks.valid_BAK
    q = vocabulary.spread(vocabulary.of_kept(draft_logits(wide, vocabulary.narrowed(None), output, slots))).softmax(-1)
    distinct, row = target_logits(vocabulary, batch, blocks, slots)
    l1 = (distinct.softmax(-1)[row] - q).abs().sum(-1)
    labels = blocks.labels_BAK[slots]
    inside = labels % 2 == 0
    assert 0 < inside.sum() < len(inside)
    ce = torch.where(inside, -q.gather(1, labels[:, None])[:, 0].log(), 0)
    weights = blocks.weights_BAK[slots]
    values = values_of(list(objective.means), stack_means(objective.means))
    assert values["loss_l1"] == pytest.approx(((l1 * weights).sum() / weights.sum()).item(), rel=1e-5)
    assert values["loss_ce"] == pytest.approx(((ce * weights).sum() / weights.sum()).item(), rel=1e-5)
    accept = (1 - l1 / 2) * torch.ones(len(l1))
    first = torch.zeros(slots.shape).index_put((slots,), accept.detach())[..., 0]
    assert values["accept_rate_0"] == pytest.approx((first.sum() / slots[..., 0].sum()).item(), rel=1e-5)
    found = torch.autograd.grad(objective.loss, list(drafter.parameters()))
    assert all(bool(gradient.isfinite().all()) for gradient in found)
