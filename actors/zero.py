"""DeepSpeed as this project uses it: one engine around the objective, with fp32 master weights and reductions."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actors.deepspeed_alone import DeepSpeedEngine, deepspeed
from actors.stages import stage_of
from dspark.learning import LossSettings, TrainSettings
from dspark.training.kinds import AnyObjective


def engine_settings(train: TrainSettings) -> dict[str, Any]:
    """DeepSpeed's configuration for the settings of a run.

    Gradients are accumulated in fp32, but for bf16 under ZeRO 0, where DeepSpeed has no such optimizer: there they are
    accumulated in bf16 (master weights stay fp32), so stage 1 is the better choice with one rank too.
    """
    accumulated = "bf16" if train.precision == "bf16" and train.zero_stage == 0 else "fp32"
    return {
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_accumulation_steps": train.accumulation,
        "gradient_clipping": train.clip,
        "steps_per_print": 10**9,
        "bf16": {"enabled": train.precision == "bf16"},
        "data_types": {"grad_accum_dtype": accumulated},
        "communication_data_type": "fp32",
        "zero_optimization": {"stage": stage_of(train), "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
        # Its clock would wait for the device before and after every micro-batch.
        "timers": {"throughput": {"enabled": False}},
    }


def learning_rate(steps: int, warmup: float) -> Callable[[int], float]:
    """Factor of the base rate at each optimizer step: linear from 0 over the warm-up, then cosine to 0 at `steps`."""
    rising = max(1, round(steps * warmup))

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - rising) / max(1, steps - rising))))

    return factor


def make_engine(objective: AnyObjective, train: TrainSettings, steps: int) -> DeepSpeedEngine:
    """The engine of this rank: AdamW with warm-up and cosine, ZeRO stage and precision from the settings."""
    optimizer = torch.optim.AdamW(
        objective.parameters(), lr=train.lr, betas=train.betas, weight_decay=train.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate(steps, train.warmup))
    engine, *_ = deepspeed.initialize(
        model=objective,
        optimizer=optimizer,
        lr_scheduler=schedule,
        config=engine_settings(train),
        dist_init_required=False,
    )
    return engine


def take_step(engine: DeepSpeedEngine) -> None:
    """`engine.step()`, after which `engine.get_global_grad_norm()` is the norm before clipping at any ZeRO stage.

    Under ZeRO 0 in fp32 DeepSpeed clips the gradients, which then are whole on every rank, but forgets their norm.
    """
    forgets = engine.zero_optimization_stage() == 0 and not engine.bfloat16_enabled()
    if forgets and engine.is_gradient_accumulation_boundary():
        gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
        engine._global_grad_norm = torch.nn.utils.get_total_norm(gradients)
    engine.step()


def backward_scale(train: TrainSettings, loss: LossSettings) -> int:
    """What a loss is multiplied with before `engine.backward`, which divides by ranks and by accumulation steps.

    Global denominators already span the step, so both divisions are undone. Denominators per micro-batch want the mean
    over the accumulation steps, so only the division by ranks is.
    """
    return train.workers * (train.accumulation if loss.denominator == "global" else 1)


def whole_state(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """The drafter's full state dict on the CPU, by canonical names; collective under ZeRO stage 3."""
    drafter = engine.module.drafter
    with deepspeed.zero.GatheredParameters(list(drafter.parameters()), enabled=engine.zero_optimization_stage() == 3):
        return {name: tensor.detach().cpu().clone() for name, tensor in drafter.state_dict().items()}
