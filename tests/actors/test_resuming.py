"""A run that goes on from a checkpoint makes the steps that the undisturbed run made."""

from typing import Any

import pytest
import torch

from actors.stages import check_resizable
from dspark.data.epoch_ledger import Tally
from dspark.errors import InputError
from dspark.learning import TrainSettings
from tests.actors.resumed import RESIZED, SAVED, STAGES, STEPS, Outcome, run_all


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return run_all(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("workers", [1, 2])
def test_steps_after_a_resume_in_mid_epoch_are_those_of_the_undisturbed_run_bit_for_bit(
    outcomes: dict[str, Outcome], workers: int, stage: int
) -> None:
    whole, resumed = outcomes[f"0/{workers}/{stage}"], outcomes[f"{workers}/{workers}/{stage}"]
    assert len(whole.losses) == STEPS and len(set(whole.losses)) == STEPS
    assert resumed.losses == whole.losses[SAVED:]
    assert resumed.norms == whole.norms[SAVED:]
    # The averages, too, and the undisturbed run was validated on the way while the resumed one was not.
    assert all(torch.equal(value, whole.averaged[name]) for name, value in resumed.averaged.items())


@pytest.mark.parametrize("stage", RESIZED)
@pytest.mark.parametrize("workers", [1, 2])
def test_another_number_of_ranks_goes_on_with_the_same_losses_but_for_rounding(
    outcomes: dict[str, Outcome], workers: int, stage: int
) -> None:
    expected, resized = outcomes[f"0/{workers}/{stage}"], outcomes[f"{3 - workers}/{workers}/{stage}"]
    assert resized.losses == pytest.approx(expected.losses[SAVED:], rel=1e-5)
    assert resized.norms == pytest.approx(expected.norms[SAVED:], rel=1e-4)


def test_ledgers_of_all_ranks_and_of_the_part_before_the_resume_add_up(outcomes: dict[str, Outcome]) -> None:
    # Three steps of eight rows: all sixteen of the first epoch, half of those of the second.
    assert {outcome.ledger for outcome in outcomes.values()} == {Tally(expected=24, trained=24)}


def test_every_deal_measures_the_same_validation(outcomes: dict[str, Outcome]) -> None:
    first = outcomes["0/1/0"].measured
    assert first["val_tau_probabilistic"] > 1 and "val_accept_rate_1" in first and first["val_loss_l1"] > 0
    for stage in STAGES:
        for workers in (1, 2):
            assert outcomes[f"0/{workers}/{stage}"].measured == pytest.approx(first, rel=1e-4)


def test_averages_follow_the_weights_by_their_decay(outcomes: dict[str, Outcome]) -> None:
    averaged = [outcomes[f"0/1/{stage}"].averaged for stage in STAGES]
    plain = outcomes["2/1/0"].averaged  # resumed without averages: the weights themselves
    assert any(not torch.allclose(averaged[0][name], plain[name], atol=1e-6) for name in plain)
    for other in averaged[1:]:
        assert all(torch.allclose(other[name], value, atol=1e-6) for name, value in averaged[0].items())


@pytest.mark.parametrize("changes", [{"zero_stage": 3}, {"ema": 0.9}, {"zero_stage": 0, "precision": "bf16"}])
def test_ranks_that_cannot_change_are_refused_with_both_numbers(changes: dict[str, Any]) -> None:
    train = TrainSettings(workers=2, global_batch=8, **{"precision": "fp32", **changes})
    check_resizable(2, train)
    with pytest.raises(InputError, match=r"made by 4 ranks, this run has train\.workers=2, and"):
        check_resizable(4, train)
