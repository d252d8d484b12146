"""`dspark export`: a drafter from one file layout into another, with a model card, and up to a hub.

checkpoint -> published names, checked -> what the layout cannot express is refused -> folder with README.md -> hub
"""

from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import HfApi, get_token
from rich.console import Console

from dspark.errors import InputError
from dspark.evaluation.model_card import CardData, Licences, model_card
from dspark.model.checkpoints import CONFIG, WEIGHTS, check_free, read_json
from dspark.model.exchange import (
    Checkpoint,
    check_expressible,
    layout_named,
    read_checkpoint,
    with_vocabulary,
    write_checkpoint,
)
from dspark.model.layout import dtype_name
from dspark.model.stored import Verifier
from dspark.sections import TargetSettings
from dspark.target_files import load_config, load_vocabulary
from jobs.facts import print_facts
from jobs.reporting import RESULT

CARD = "README.md"


def export(
    checkpoint: Path,
    out: Path,
    to: str,
    source: str | None,
    target: str | None,
    licences: Licences,
    push_to_hub: str | None,
    dry_run: bool,
) -> None:
    """Writes the drafter in `checkpoint` as the new folder `out` in the layout `to`; with `dry_run` only says so.

    `source` names the checkpoint's layout, None: found out. `target` supplies what the checkpoint lacks: embedding and
    head, the number of the target's layers, the target's name.

    Raises:
        InputError: the checkpoint is faulty, `to` cannot express it, something is needed from a target that was not
            named, or the hub refuses.
    """
    console = Console(highlight=False)
    settings = None if target is None else TargetSettings(model=target)
    config = None if settings is None else load_config(settings)
    found = read_checkpoint(checkpoint, source, None if config is None else config.num_hidden_layers, target)
    check_expressible(found, to)
    check_free(out)
    if push_to_hub is not None and get_token() is None:
        raise InputError(
            f"--push-to-hub {push_to_hub}: there is no token for the hub: set HF_TOKEN, or `hf auth login`"
        )
    found = _completed(found, to, settings)
    verifier = _verifier(found, to, target, config)
    card = model_card(_card_data(found, checkpoint, out, to, licences))
    _print_plan(console, found, checkpoint, out, to, push_to_hub)
    if dry_run:
        return
    write_checkpoint(out, found, to, verifier, {CARD: card})
    if push_to_hub is not None:
        console.print(upload(out, push_to_hub), soft_wrap=True)
    console.print(str(out), soft_wrap=True)


def _completed(found: Checkpoint, to: str, target: TargetSettings | None) -> Checkpoint:
    """The checkpoint with the embedding and head that the layout `to` wants."""
    layout = layout_named(to, type(found.config))
    if target is not None and layout.vocabulary != "none":
        return with_vocabulary(found, load_vocabulary(target, torch.device("cpu"), found.dtype))
    if not found.fills(layout):
        raise InputError(
            f"the layout {to} holds more of the target's embedding and head than this checkpoint of the layout "
            f"{found.layout.name}: name the target with --target"
        )
    return found


def _verifier(found: Checkpoint, to: str, target: str | None, config: Any) -> Verifier | None:
    """The target as the layout `speculators` names it: the one given, else the one that the checkpoint remembers."""
    if to != "speculators":
        return None
    if target is not None:
        return Verifier(target, tuple(config.architectures or ()))
    facts = found.facts.get("target")
    facts = facts if isinstance(facts, dict) else {}
    if not facts.get("name") or not facts.get("architectures"):
        raise InputError(
            "the layout speculators names its target with its architectures, this checkpoint does not remember them: "
            "name the target with --target"
        )
    return Verifier(facts["name"], tuple(facts["architectures"]))


def _card_data(found: Checkpoint, checkpoint: Path, out: Path, to: str, licences: Licences) -> CardData:
    # A registered drafter brings settings and numbers along; else they lie in the folder of the run around it.
    own = any((checkpoint / name).is_file() for name in ("settings.yaml", RESULT))
    run = checkpoint if own else checkpoint.absolute().parent
    return CardData(
        title=out.absolute().name,
        layout=to,
        dtype=dtype_name(found.dtype),
        config=found.config,
        vocabulary=layout_named(to, type(found.config)).vocabulary,
        facts=found.facts,
        licences=licences,
        settings=_settings(run / "settings.yaml"),
        result=read_json(run / RESULT) if (run / RESULT).is_file() else None,
    )


def _settings(file: Path) -> dict[str, Any] | None:
    """The settings of the run that the checkpoint lies in, None where there is no such file."""
    if not file.is_file():
        return None
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{file} beside the checkpoint cannot be read ({error}): mend or move it") from error
    if not isinstance(found, dict):
        raise InputError(f"{file} beside the checkpoint holds no settings of a run: mend or move it")
    return found


def _print_plan(console: Console, found: Checkpoint, checkpoint: Path, out: Path, to: str, hub: str | None) -> None:
    tensors = found.stored.tensors.values()
    draft = found.config
    lines = {
        "from": f"{checkpoint}, layout {found.layout.name}",
        "to": f"{out}, layout {to}: {CONFIG}, {WEIGHTS}, {CARD}",
        "drafter": f"{draft}, {sum(tensor.nbytes for tensor in tensors) / 1e6:,.1f} MB in {dtype_name(found.dtype)}",
        "hub": hub or "not uploaded",
    }
    print_facts(console, lines)


def upload(folder: Path, repository: str) -> str:
    """Uploads a folder to a model repository, which is made where it is missing; returns the commit's address.

    Raises:
        InputError: the hub cannot be reached or refuses; says why.
    """
    api = HfApi()
    try:
        api.create_repo(repository, repo_type="model", exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Drafter, with its model card"
        )
    except (OSError, ValueError) as error:  # a wrong name or card is a ValueError to the client
        reason = " ".join(str(error).split())
        raise InputError(
            f"{folder} is written, but was not uploaded to {repository}: {reason}. Once mended: hf upload {repository} "
            f"{folder}"
        ) from error
    return str(commit.commit_url)


if __name__ == "__main__":
    from jobs.cli import command_main

    command_main("export")
