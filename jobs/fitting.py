"""Training: captured rows stream to Ray Train workers, from targets or a cache; the driver keeps the records."""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.train import Checkpoint, DataConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.util.queue import Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from actors.checkpoint_files import (
    finished_steps,
    newest_checkpoint,
    progress_of,
    read_file,
    recorded,
    resumable_steps,
    settle_storage,
)
from actors.late import late_rank
from actors.pipelines import capture_options, check_store
from actors.retention import LEDGER, checkpoint_rule, thin_out
from actors.stop_actor import StopActor
from actors.target import BigramActor
from actors.task import TrainTask, Validation
from actors.trials import Common
from actors.validation_rows import captured_validation
from dspark.config import Settings
from dspark.data.cache import bytes_per_token
from dspark.data.epoch_ledger import EpochLedger, Tally
from dspark.data.plan import largest_step
from dspark.data.rows import sample_at, supervised_counts
from dspark.errors import InputError, StoppedError
from jobs.config import dump_settings
from jobs.experiment import Experiment, Training
from jobs.exporting import export_drafter
from jobs.following import Following
from jobs.progress import not_finite, stage, which_side
from jobs.records import Records
from jobs.rows import Rows
from jobs.signals import attended_work, stop_signals
from jobs.streams import Streams, step_streams, stream_names


@dataclass(frozen=True)
class Fitted:
    """A trained drafter: where it lies is the experiment's `drafter`; its records, one per logged step."""

    steps: int
    history: list[dict[str, float]]
    ledger: Tally


def fit_drafter(experiment: Experiment, rows: Rows, console: Console) -> Fitted:
    """Trains to the end of the plan, from the newest checkpoint if the run has one, and writes the drafter.

    Raises:
        InputError: a checkpoint of other settings, or the first cause of a failure that a setting can mend.
        StoppedError: a signal asked for it, and the run has saved where it is.
    """
    fitted = train_drafter(experiment, rows, console)
    export_drafter(experiment, rows)
    return fitted


def train_drafter(training: Training, rows: Rows, console: Console, common: Common | None = None) -> Fitted:
    """As `fit_drafter`, but leaves the trained weights in the checkpoint; `common` is given to trials of a sweep."""
    settings, plan = training.settings, rows.plan
    storage = training.checkpoints
    settle_storage(storage)
    # On the driver's node: one that is lost must not take the records or the wish to stop along.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    queue = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
    flag: Any = (
        ray.remote(num_cpus=0)(StopActor).options(scheduling_strategy=here).remote() if common is None else common.stop
    )
    checkpoint = newest_checkpoint(storage)
    done, over = finished_steps(checkpoint), checkpoint is not None and progress_of(checkpoint)["over"]
    if training.resumed:
        console.print(f"resumed at step {done}" if done else "no checkpoint yet: the run begins anew", highlight=False)
    start = None
    if not done and settings.drafter.init == "target":
        start = target_bigrams(settings, rows) if common is None else common.bigrams
    task = TrainTask(
        settings, rows.draft, plan, rows.sample_ids, rows.origin, rows.kept, start, queue, rows.start,
        stream_names(settings), storage, dump_settings(settings), flag, run=training.folder.name,
        places=None if common is None else common.places.queue,
    )  # fmt: skip
    resumable_steps(checkpoint, task)
    check_store(settings, held_bytes(rows))
    targets = () if common is None else common.targets
    if not over and rows.validation is not None:
        task = replace(task, validation=_validation(settings, rows.validation, rows, common))
    with (
        step_streams(settings, rows, storage, training.folder.name, queue, targets) as streams,
        stage(console, "train", plan.steps) as bar,
        Records(training, queue, bar, recorded(checkpoint), Following(training, rows, console)) as records,
        stop_signals(console) as asked,
    ):
        if not over:
            attended_work(_trainer(settings, task, storage, streams).fit, asked, flag.ask.remote)
    if records.error is not None:
        raise InputError(records.error)
    thin_out(storage, settings)
    for said in (which_side(records.history, settings), not_finite(records.history)):
        if said is not None:
            console.print(said, soft_wrap=True)
    return _fitted(training, rows, console, records.history)


def _fitted(training: Training, rows: Rows, console: Console, history: list[dict[str, float]]) -> Fitted:
    """What a training that has ended leaves behind; raises StoppedError if steps are missing."""
    checkpoint = newest_checkpoint(training.checkpoints)
    if checkpoint is None:
        raise RuntimeError(f"training ended without a checkpoint in {training.checkpoints}")
    facts = progress_of(checkpoint)
    if not facts["over"]:
        raise StoppedError(
            f"stopped at step {facts['step']} of {rows.plan.steps}, with a checkpoint", str(training.folder)
        )
    ledger = _balance(training, rows, checkpoint)
    console.print(f"ledger: {ledger}", highlight=False)
    return Fitted(facts["step"], history, ledger)


def _validation(settings: Settings, measured: pa.Table, rows: Rows, common: Common | None) -> Validation:
    if common is None:
        return captured_validation(settings, measured, rows.origin)
    return common.validation[settings.train.workers * settings.train.micro_batch]


def held_bytes(rows: Rows) -> int:
    """Captured rows that the trainers hold at once: of the step that they make, and of the next one."""
    lengths = pc.list_value_length(rows.table.column("input_ids")).to_numpy()
    return 2 * largest_step(rows.plan, lengths) * bytes_per_token(rows.origin)


def _balance(training: Training, rows: Rows, checkpoint: Checkpoint) -> Tally:
    """What was trained beside what was planned, also in `ledger.json`, by epoch.

    Raises:
        RuntimeError: a row was lost or trained twice.
    """
    steps = finished_steps(checkpoint)
    epochs = EpochLedger.load(read_file(checkpoint, LEDGER)).tallies(rows.plan, steps)
    total = sum(epochs.values(), Tally())
    found = {"steps": steps, **asdict(total), "epochs": {epoch: asdict(one) for epoch, one in epochs.items()}}
    (training.folder / "ledger.json").write_text(json.dumps(found, indent=1) + "\n")
    if total.missing or total.repeated:
        raise RuntimeError(f"the ledger does not balance after {steps} steps: {total}")
    return total


def _trainer(settings: Settings, task: TrainTask, storage: str, streams: Streams) -> TorchTrainer:
    parent, _, name = storage.rpartition("/")
    return TorchTrainer(
        late_rank,
        train_loop_config={"task": ray.put(task)},
        scaling_config=ScalingConfig(
            num_workers=settings.train.workers,
            use_gpu=settings.train.gpus > 0,
            resources_per_worker={"CPU": settings.train.cpus, "GPU": settings.train.gpus},
            label_selector=settings.ray.trainer_labels or None,  # type: ignore[call-arg]  # of the class of before
        ),
        run_config=RunConfig(
            name=name,
            storage_path=parent,
            failure_config=FailureConfig(max_failures=settings.train.max_failures),
            checkpoint_config=checkpoint_rule(settings),
        ),
        datasets=dict(streams),
        dataset_config=DataConfig(execution_options=capture_options(settings), enable_shard_locality=False),
    )


def target_bigrams(settings: Settings, rows: Rows) -> Any:
    """A reference to the target's bigrams of the supervised tokens, after the prompt of the first row.

    A target is needed even where the states come from a cache: those stand behind whole texts, and a bigram is what
    the target says when it has seen one token behind the prompt, so neither a cache nor the head alone holds it.
    Computed while the trainers start, but in a place that is taken before: trainers that hold the last free CPU while
    they wait for an actor that has none would hang. The actor goes with its handle, when it has answered.
    """
    first = sample_at(rows.table, 0)
    prompt = first.input_ids[: int(first.loss_mask.argmax())].tolist()
    pool = settings.targets
    counts = supervised_counts(rows.table, rows.draft.vocab)
    actor: Any = ray.remote(num_cpus=pool.cpus, num_gpus=pool.gpus, label_selector=settings.ray.target_labels)(
        BigramActor
    ).remote()
    ray.get(actor.ready.remote())
    return actor.bigrams.remote(settings.target, pool, prompt, counts)
