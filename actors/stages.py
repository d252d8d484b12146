"""Which ZeRO stage runs, and between which numbers of ranks it can be resumed. Without torch: drivers ask."""

from dspark.errors import InputError
from dspark.learning import TrainSettings


def stage_of(train: TrainSettings) -> int:
    """The stage under which DeepSpeed runs the one that is set.

    Stage 1 in bf16 runs as stage 2 if gradients accumulate: DeepSpeed 0.19.8 adds the fp32 gradient of a micro-batch
    once more for each that follows it in the step. Stage 2 also deals the gradients to the ranks, at the price of a
    reduction per micro-batch.
    """
    return 2 if train.zero_stage == 1 and train.precision == "bf16" and train.accumulation > 1 else train.zero_stage


def check_resizable(workers: int, train: TrainSettings) -> None:
    """Raises InputError that names both numbers if this run's ranks cannot go on from a checkpoint of `workers`."""
    if workers == train.workers:
        return
    reason = None
    if train.ema is not None:
        reason = "the moving averages of train.ema are cut for the ranks that made them"
    elif stage_of(train) == 3:
        # DeepSpeed 0.19.8 loads that form, and then cannot gather parameters in the first forward.
        reason = "a universal checkpoint of ZeRO 3 cannot be trained on"
    elif stage_of(train) == 0 and train.precision == "bf16":
        reason = "DeepSpeed has no universal form of ZeRO 0 in bf16"
    if reason is not None:
        raise InputError(
            f"the checkpoint was made by {workers} ranks, this run has train.workers={train.workers}, and {reason}: "
            f"resume with train.workers={workers}, or start a new run"
        )
