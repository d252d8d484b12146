"""Where a command takes the folder of a drafter, it takes a registered one as well, which becomes a folder here."""

from pathlib import Path

from dspark.config import Settings
from dspark.sections import REGISTERED, TrackingSettings


def local_checkpoint(checkpoint: Path, settings: Settings | None = None, uri: str | None = None) -> Path:
    """The folder of a checkpoint; of `models:/NAME@ALIAS` and `models:/NAME/NUMBER` the copy in the user's cache.

    The store is `uri`, or that of the `settings` where a command has any, or else of MLFLOW_TRACKING_URI or
    `runs/mlflow.db`.

    Raises:
        InputError: there is no such version, or it cannot be read.
    """
    if not is_registered(checkpoint):
        return checkpoint
    # MLflow takes seconds to import, and most commands here need none of it.
    from actors.registry import Registry, parse_reference

    reference = parse_reference(str(checkpoint))
    folder, _ = Registry(uri or store_of(settings)).copy_of(reference)
    return folder


def with_local_start(settings: Settings) -> Settings:
    """The settings with the folder of the drafter that training starts from, if that one is registered."""
    start = settings.drafter.start_from
    if start is None or not is_registered(start):
        return settings
    drafter = settings.drafter.model_copy(update={"start_from": local_checkpoint(start, settings)})
    return settings.model_copy(update={"drafter": drafter})


def is_registered(checkpoint: Path | str) -> bool:
    """Whether a checkpoint is named by its place in the registry."""
    return str(checkpoint).startswith(REGISTERED)


def store_of(settings: Settings | None = None) -> str:
    """The MLflow store of the settings; without settings, that of a command which is given none."""
    from actors.tracking import tracking_uri

    if settings is not None:
        return tracking_uri(settings.tracking, settings.output)
    return tracking_uri(TrackingSettings(), Path(str(Settings.model_fields["output"].default)))
