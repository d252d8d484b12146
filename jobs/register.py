"""`dspark register`: a drafter becomes a version in the registry, whole, and says which run made it.

checkpoint, its run, an evaluation of it -> files and tags -> the next version of a name
"""

import re
from pathlib import Path

from rich.console import Console

from actors.registry import FINGERPRINT, Registry, parse_reference
from actors.tracking import Tracker, sqlite_file
from dspark.errors import InputError
from dspark.evaluation.gate import TARGET
from dspark.evaluation.model_card import NOT_STATED
from dspark.evaluation.recorded import LENGTH, LOSSLESS
from dspark.model.checkpoints import read_json
from dspark.redaction import HIDDEN, redacted
from dspark.sections import NAME_PATTERN, REGISTERED, TrackingSettings
from dspark.target_files import fingerprint
from jobs.checkpoints import is_registered, local_checkpoint, store_of
from jobs.experiment import RECORD, Experiment
from jobs.facts import print_facts
from jobs.measured import Measured, measured_in
from jobs.registration import Registration, registration_of
from jobs.results import DESCRIPTION

_TRAINED_BY = "trained_by"


def register(checkpoint: Path, name: str, evaluation: Path | None, uri: str | None, dry_run: bool) -> int | None:
    """Registers a drafter as the next version of `name`, and returns its number; with `dry_run` only says what it is.

    Args:
        evaluation: run folder with an evaluation of it; None: the one that the checkpoint lies in, if it has any.
        uri: MLflow store, also of a `checkpoint` that is registered; None: the one that its run is in, or that of
            `jobs.checkpoints.store_of`.

    Raises:
        InputError: no drafter, no evaluation of it where one was named, a name that cannot be one, or no store.
    """
    console = Console(highlight=False)
    if not re.match(NAME_PATTERN, name):
        raise InputError(f"--name {name!r}: needed are letters, digits, and `_`, `.` or `-` behind the first one")
    folder = local_checkpoint(checkpoint, uri=uri)
    run = _run_folder(folder)
    # A link in the folder of an evaluation leads to the drafter of another run.
    beside = [place for place in (folder.absolute().parent, folder.resolve().parent) if (place / DESCRIPTION).is_file()]
    if evaluation is None and beside:
        evaluation = beside[0]
    measured = None if evaluation is None else measured_in(evaluation, fingerprint(folder))
    made = registration_of(name, folder, run, measured)
    registry = Registry(uri or _store_of_run(run) or store_of(), create=not dry_run)
    trained_by = _trained_by(checkpoint, run, registry)
    _print_plan(console, name, folder, made, registry, trained_by, evaluation)
    if dry_run:
        return None
    version = _add(registry, name, made, trained_by)
    console.print(f"{REGISTERED}{name}/{version}", soft_wrap=True)
    return version


def register_run(experiment: Experiment, measured: Measured) -> int:
    """Registers the drafter that a run has trained and measured; returns the version's number.

    A run that has registered it before it was resumed keeps that version, with the evaluation that is recorded there.
    """
    settings, tracker, registry = experiment.settings, experiment.tracker, Registry(experiment.tracker.uri)
    name = settings.tracking.model_name or settings.name
    made = registration_of(name, experiment.drafter, experiment.folder, measured)
    own = {_TRAINED_BY: tracker.run_id, FINGERPRINT: made.tags[FINGERPRINT]}
    for entry in registry.entries(name) if name in registry.names() else []:
        if own.items() <= entry.tags.items():
            return entry.version
    return _add(registry, name, made, tracker.run_id)


def _add(registry: Registry, name: str, made: Registration, trained_by: str | None) -> int:
    """The version's number. A run of another store, or none at all, is stood in for by one that holds the files."""
    if trained_by is not None and registry.has_run(trained_by):
        return registry.add(name, made.files, made.texts, {**made.tags, _TRAINED_BY: trained_by}, trained_by)
    said = NOT_STATED if trained_by is None else f"{trained_by}, in another store"
    output = sqlite_file(registry.uri).parent if registry.uri.startswith("sqlite:") else Path("runs")
    with Tracker(TrackingSettings(uri=registry.uri), output, f"register-{name}") as tracker:
        tracker.tags({_TRAINED_BY: said})
        return registry.add(name, made.files, made.texts, {**made.tags, _TRAINED_BY: said}, tracker.run_id)


def _run_folder(checkpoint: Path) -> Path | None:
    """The folder of the run that trained a checkpoint, if it still lies in it."""
    folder = checkpoint.resolve().parent
    return folder if (folder / RECORD).is_file() else None


def _store_of_run(run: Path | None) -> str | None:
    """The store that a run was tracked in; None where its address had a password, which no file holds."""
    uri = None if run is None else read_json(run / RECORD).get("mlflow_uri")
    return uri if isinstance(uri, str) and HIDDEN not in uri else None


def _trained_by(checkpoint: Path, run: Path | None, registry: Registry) -> str | None:
    """The MLflow run that trained it; a registered one lies in the same `registry`."""
    if is_registered(checkpoint):
        reference = parse_reference(str(checkpoint))
        return registry.run_of(reference.name, reference.which)
    found = None if run is None else read_json(run / RECORD).get("mlflow_run_id")
    return None if found is None else str(found)


def _print_plan(
    console: Console,
    name: str,
    checkpoint: Path,
    made: Registration,
    registry: Registry,
    trained_by: str | None,
    evaluation: Path | None,
) -> None:
    lengths = [f"{tag.removeprefix(LENGTH)} {text}" for tag, text in made.tags.items() if tag.startswith(LENGTH)]
    advice = "none: `dspark registry record` adds one, which a promotion needs"
    size = sum(file.stat().st_size for file in made.files)
    lines = {
        "version": f"the next of {name}",
        "store": str(redacted(registry.uri)),
        "from": f"{checkpoint}, {len(made.files)} files with {size / 1e6:,.1f} MB, and {', '.join(made.texts)}",
        "run": trained_by or "not known: the checkpoint lies in no run folder",
        "drafter": made.tags["drafter"],
        "target": f"{made.tags.get('target', NOT_STATED)}, {made.tags.get(TARGET, NOT_STATED)}",
        "evaluation": advice if evaluation is None else f"{evaluation}: {', '.join(lengths)}",
        "lossless": made.tags.get(LOSSLESS, "not checked"),
    }
    print_facts(console, lines)


if __name__ == "__main__":
    from jobs.cli import command_main

    command_main("register")
