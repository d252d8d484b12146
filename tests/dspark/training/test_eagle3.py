"""The EAGLE-3 objective against the plain float64 steps, and its metrics beside those of blocks."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark.learning import Eagle3Settings
from dspark.model.config import Eagle3Config
from dspark.model.vocabulary import Vocabulary
from dspark.training.batch import Batch
from dspark.training.chains import Chains, chain_anchors, make_chains
from dspark.training.eagle3 import Eagle3Objective, run_chains
from dspark.training.means import add_means, stack_means, values_of
from dspark.training.objective import Objective
from tests.dspark.plain import weights_of
from tests.dspark.plain_eagle3 import PlainStep, carries, plain_chain, plain_loss
from tests.dspark.small import EAGLE3_FORMS, SMALL_EAGLE3, small_batch, small_eagle3, small_vocabulary

MASKS = [[0, 1, 1, 1, 1, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1], [1, 0, 1, 0]]
KEPT = torch.arange(0, 30, 2)
DEFAULT = Eagle3Settings(ttt_length=4, step_loss_decay=0.5)


def case(
    config: Eagle3Config = SMALL_EAGLE3, settings: Eagle3Settings = DEFAULT, masks: list[list[int]] = MASKS
) -> tuple[Eagle3Objective, Vocabulary, Batch, Chains]:
    drafter = small_eagle3(config)
    if config.draft_vocab < config.vocab:
        drafter.keep(KEPT)
    batch = small_batch(config, masks)
    anchors = [chain_anchors(np.array(mask, np.uint8), settings) for mask in masks]
    chains = make_chains(batch, anchors, [len(mask) for mask in masks], settings)
    return Eagle3Objective(drafter), small_vocabulary(config).narrowed(drafter.kept), batch, chains


def gradients(module: Eagle3Objective, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of every parameter; raises where the loss does not reach one."""
    names, parameters = zip(*module.drafter.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def values(objective: Objective) -> dict[str, float]:
    return values_of(list(objective.means), stack_means(objective.means))


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(
    ("form", "changes"),
    [
        *((form, {}) for form in EAGLE3_FORMS),
        *(("qwen3", {key: "published"}) for key in ("mask_alignment", "normaliser")),
    ],
)
def test_loss_and_gradients_equal_the_plain_steps_in_float64(form: str, changes: dict[str, Any], reduced: bool) -> None:
    config = EAGLE3_FORMS[form]
    config = replace(config, draft_vocab=len(KEPT)) if reduced else config
    settings = Eagle3Settings(ttt_length=4, step_loss_decay=0.5, **changes)
    module, vocabulary, batch, chains = case(config, settings)
    weights = {
        name: tensor for name, tensor in weights_of(module.drafter, vocabulary).items() if name not in ("d2t", "t2d")
    }
    expected = plain_loss(weights, config, batch, MASKS, settings, KEPT if reduced else None)
    grads = dict(zip(weights, torch.autograd.grad(expected, list(weights.values())), strict=True))

    objective = module(vocabulary, batch, chains, chains.divisor)
    assert objective.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert values(objective)["loss"] == pytest.approx(expected.item(), rel=1e-5)
    for name, gradient in gradients(module, objective.loss).items():
        largest = grads[name].abs().max().item()
        torch.testing.assert_close(gradient.double(), grads[name], rtol=0, atol=2e-5 * largest)


def plain_accepts(module: Eagle3Objective, vocabulary: Vocabulary, batch: Batch, kept: Tensor) -> list[list[float]]:
    """Per row that starts a round, sum of min(p, q) over all tokens at each of its supervised steps."""
    weights = {name: tensor.detach() for name, tensor in weights_of(module.drafter, vocabulary).items()}
    found = []
    for number, mask in enumerate(MASKS):
        text = (batch.input_ids_BS[number].tolist(), batch.taps_BSLH[number], batch.final_BSH[number])
        for row in range(len(mask)):
            steps = [step for step in range(4) if carries(mask, row, step, "aligned")]
            if steps:
                chain = plain_chain(weights, module.drafter.config, *text, row, len(steps))
                found.append([_accept(one, kept) for one in chain])
    return found


def _accept(one: PlainStep, kept: Tensor) -> float:
    q = torch.zeros_like(one.draft_V)
    q[kept] = one.draft_V[kept].softmax(0)
    return torch.minimum(one.target_V.softmax(0), q).sum().item()


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("alignment", ["aligned", "published"])
def test_acceptance_is_that_of_the_whole_target_over_the_steps_that_a_round_drafts(
    reduced: bool, alignment: str
) -> None:
    config = replace(SMALL_EAGLE3, draft_vocab=len(KEPT)) if reduced else SMALL_EAGLE3
    settings = Eagle3Settings.model_validate({"ttt_length": 4, "mask_alignment": alignment})
    module, vocabulary, batch, chains = case(config, settings)
    found = values(module(vocabulary, batch, chains, chains.divisor))
    rounds = plain_accepts(module, vocabulary, batch, KEPT if reduced else torch.arange(30))
    for step in range(4):
        at_step = [one[step] for one in rounds if len(one) > step]
        assert found[f"accept_rate_{step}"] == pytest.approx(np.mean(at_step), abs=3e-7)
    # A round drafts three tokens; the fourth step is trained, and no round gets so far.
    tau = np.mean([1 + np.cumprod(one[:3]).sum() for one in rounds])
    assert found["tau_probabilistic"] == pytest.approx(tau, rel=1e-5)
    assert found["supervised_per_block"] == pytest.approx(np.mean([len(one[:3]) for one in rounds]))
    assert 1 <= found["tau_greedy"] <= 4


def test_a_drafter_that_says_what_its_target_says_is_always_accepted() -> None:
    module, vocabulary, batch, chains = case(masks=[[1] * 8])
    with torch.no_grad():
        states_BAKH = run_chains(module.drafter, vocabulary, batch, chains)
    # Only steps of the first chain are left, and the target's state at token t+1+j becomes the drafter's own.
    one = replace(chains, valid_BAK=chains.valid_BAK.clone(), weights_BAK=chains.weights_BAK.clone())
    one.valid_BAK[:, 1:], one.weights_BAK[:, 1:] = False, 0
    final_BSH = batch.final_BSH.clone()
    final_BSH[0, 1:5] = states_BAKH[0, 0]
    found = values(module(vocabulary, replace(batch, final_BSH=final_BSH), one, one.divisor))
    assert [found[f"accept_rate_{step}"] for step in range(4)] == pytest.approx([1] * 4, abs=1e-5)
    assert found["tau_greedy"] == 4


def test_rows_weigh_the_same_however_they_are_dealt_to_micro_batches() -> None:
    module, vocabulary, batch, chains = case()
    whole = module(vocabulary, batch, chains, chains.divisor)
    parts = []
    for mask, row in zip(MASKS, range(len(MASKS)), strict=True):
        size = len(mask)
        alone = Batch(
            batch.input_ids_BS[row : row + 1, :size], batch.loss_mask_BS[row : row + 1, :size],
            batch.taps_BSLH[row : row + 1, :size], batch.final_BSH[row : row + 1, :size],
        )  # fmt: skip
        own = make_chains(alone, [chain_anchors(np.array(mask, np.uint8), DEFAULT)], [size], DEFAULT)
        parts.append(module(vocabulary, alone, own, chains.divisor))
    total = torch.stack([part.loss for part in parts]).sum()
    assert total.item() == pytest.approx(whole.loss.item(), rel=1e-5)
    sums = add_means([part.means for part in parts])
    expected_means = stack_means({name: whole.means[name] for name in sums})
    torch.testing.assert_close(stack_means(sums), expected_means, rtol=1e-5, atol=1e-5)
    expected = gradients(module, whole.loss)
    for name, gradient in gradients(module, total).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_a_batch_without_rows_gives_every_parameter_a_finite_zero_gradient() -> None:
    module, vocabulary, batch, chains = case(masks=[[0, 0, 0, 0], [1, 0, 1, 0]])
    objective = module(vocabulary, batch, chains, chains.divisor)
    assert objective.loss.item() == 0
    assert all(not gradient.any() for gradient in gradients(module, objective.loss).values())
    assert values(objective) == {}


def test_losses_of_a_bf16_drafter_are_summed_in_fp32() -> None:
    module, vocabulary, batch, chains = case()
    exact = module(vocabulary, batch, chains, chains.divisor)
    low = replace(batch, taps_BSLH=batch.taps_BSLH.bfloat16(), final_BSH=batch.final_BSH.bfloat16())
    rounded = module.bfloat16()(vocabulary.to(torch.device("cpu"), torch.bfloat16), low, chains, chains.divisor)
    assert rounded.loss.dtype == torch.float32
    assert all(mean.total.dtype == torch.float32 for mean in rounded.means.values())
    assert rounded.loss.item() == pytest.approx(exact.loss.item(), rel=0.03)


def test_what_is_not_a_number_where_no_chain_looks_reaches_neither_loss_nor_gradients() -> None:
    """A row without chains, and columns behind a row's last chain while another row reaches further."""
    module, vocabulary, batch, chains = case(masks=[[0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1]])
    found = []
    for filler in (0.0, float("nan")):
        taps_BSLH = batch.taps_BSLH.clone()
        taps_BSLH[0], taps_BSLH[1, 3:] = filler, filler
        objective = module(vocabulary, replace(batch, taps_BSLH=taps_BSLH), chains, chains.divisor)
        found.append((objective.loss, *gradients(module, objective.loss).values()))
    assert all(torch.equal(one, other) and other.isfinite().all() for one, other in zip(*found, strict=True))
