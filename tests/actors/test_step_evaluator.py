"""What measures a drafter while it is trained, run without Ray."""

from pathlib import Path

import torch

from actors.step_evaluator import StepEvaluator, StepTask
from dspark.decoding.policies import WHOLE_BLOCK, Fixed, Policy, Threshold
from dspark.sections import EvaluateSettings, TargetSettings
from tests.dspark.decoding.decoders import BLOCK, requests, trained_drafter
from tests.dspark.decoding.decoders import tiny_target as loaded_target


def test_a_drafter_is_measured_by_the_policy_that_is_asked_for(tiny_target: Path) -> None:
    drafter = trained_drafter()
    settings = EvaluateSettings(max_new_tokens=40, batch=(3,), threads=torch.get_num_threads())
    prompts = {request.id: request.prompt for request in requests(loaded_target(), 4, 40)}

    def length(policy: Policy) -> float:
        target = TargetSettings(model=str(tiny_target), dtype="fp32")
        task = StepTask(target, drafter.config, None, settings, prompts, 0, policy, None)
        found = StepEvaluator(task).acceptance(drafter.state_dict())
        assert found is not None
        return found

    assert 2 < length(WHOLE_BLOCK) <= BLOCK + 1
    assert 1 < length(Fixed(1)) <= 2
    assert length(Threshold(1.0)) == 1, "no confidence reaches it, so nothing is verified"
