"""Acceptance while a drafter is trained: one more actor decodes with the newest weights, and the trainers never wait.

trainers, every `evaluate.every` steps -> the newest drafter -> `StepEvaluator` -> `eval_acceptance_length` at that step

Waits for: nothing. Bounded by: one drafter that is measured and one that is next; a newer one takes the place of that.
"""

from collections.abc import Mapping
from typing import Any

import ray
from rich.console import Console
from torch import Tensor

from actors.gauges import Gauges
from actors.placement import target_place
from actors.step_evaluator import StepEvaluator, StepTask
from dspark.config import Settings
from dspark.redaction import redacted
from dspark.target_files import load_tokenizer
from jobs.evaluating import chosen_policy
from jobs.experiment import Training
from jobs.rows import Rows, prepare_prompts

# What a measurement that runs when training ends may still take.
_LAST_S = 600.0
# The label of its acceptance; a finished drafter has its name.
WHILE_TRAINED = "in training"


class Following:
    """Drafters that are offered and their measurements; without `evaluate.every` it is never offered any.

    Raises InputError if the actor has no place on any node, or the drafter cannot serve `evaluate.policy`.
    """

    def __init__(self, training: Training, rows: Rows, console: Console) -> None:
        self.training, self.console = training, console
        self.task: StepTask | None = None
        self.place: Mapping[str, Any] = {}
        settings = training.settings
        if settings.evaluate.every is not None:
            self.task = step_task(settings, rows)
            self.place = target_place("evaluate", settings.evaluate, settings.ray.target_labels)
        self.actor: Any = None
        self.next: tuple[int, Mapping[str, Tensor]] | None = None
        self.running: tuple[int, Any] | None = None
        self.measured, self.skipped = 0, 0

    def offer(self, step: int, drafter: Mapping[str, Tensor]) -> None:
        """Takes the tensors of the drafter of a step, in the place of one that still waits."""
        self.skipped += self.next is not None
        self.next = (step, drafter)

    def look(self, wait_s: float = 0.0) -> None:
        """Logs a measurement that is finished, and begins the next one; waits no longer than `wait_s`."""
        if self.running is not None:
            step, length = self.running
            if not ray.wait([length], timeout=wait_s)[0]:
                return
            self.running = None
            self._log(step, length)
        if self.next is not None and self.task is not None:
            if self.actor is None:
                self.actor = ray.remote(**self.place)(StepEvaluator).remote(self.task)
            step, drafter = self.next
            self.next, self.running = None, (step, self.actor.acceptance.remote(drafter))

    def finish(self, wait: bool) -> None:
        """Waits for the measurement that runs, if it may; says how many there were, and lets the actor go."""
        self.skipped += self.next is not None
        self.next = None
        self.look(_LAST_S if wait else 0.0)
        self.running = self.actor = None
        if self.measured + self.skipped:
            self.console.print(f"measured at {self.measured} steps while training, {self.skipped} more were skipped")

    def _log(self, step: int, length: Any) -> None:
        try:
            found = ray.get(length)
        except ray.exceptions.RayError as error:
            # Training goes on without: what could not be measured is measured again at the end.
            reason = redacted(str(error).strip().splitlines()[-1])
            self.console.print(f"the drafter of step {step} could not be measured ({reason}); training goes on")
            self.actor = None
            return
        self.measured += 1
        if found is not None:
            self.training.log.records([{"step": step, "eval_acceptance_length": found}])
            Gauges(self.training.folder.name).set("dspark_acceptance_length", found, drafter=WHILE_TRAINED)


def step_task(settings: Settings, rows: Rows) -> StepTask:
    """What the actor measures, and by which policy.

    Raises:
        InputError: held-out prompts that cannot be decoded, or a policy that the drafter cannot serve.
    """
    evaluate, draft = settings.evaluate, rows.draft
    policy, temperatures = chosen_policy(evaluate, draft)
    prompts = prepare_prompts(settings, load_tokenizer(settings.target))
    by_id = {prompt.id: ids for prompt, ids in zip(prompts.prompts, prompts.ids, strict=True)}
    held_out = dict(list(by_id.items())[: evaluate.prompts_t0])
    return StepTask(settings.target, draft, rows.kept, evaluate, held_out, settings.seed, policy, temperatures)
