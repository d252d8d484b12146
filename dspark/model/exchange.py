"""Drafters in the file layouts of serving engines, read and written.

folder -> config.json and tensors -> its layout -> published names, checked -> another layout -> folder

The published layout is the middle: another one is a value with the way to it and back (`dspark.model.stored.Layout`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.errors import InputError
from dspark.model.checkpoints import (
    CONFIG,
    DTYPES,
    EMBEDDING,
    HEAD,
    RUN_KEY,
    LoadedDrafter,
    assemble,
    check_tensors,
    check_types,
    config_of,
    load_drafter,
    read_json,
    read_tensors,
    write_folder,
)
from dspark.model.config import DraftConfig, DSparkConfig, Eagle3Config
from dspark.model.eagle3_specforge import EAGLE3_SPECFORGE
from dspark.model.eagle3_speculators import EAGLE3_SPECULATORS
from dspark.model.families import LLAMA_FORM
from dspark.model.kinds import AnyConfig
from dspark.model.layout import check_servable, dtype_name, rope_keys
from dspark.model.specforge import MODELOPT, SPECFORGE
from dspark.model.speculators import SPECULATORS
from dspark.model.stored import ARCHITECTURE, Layout, Stored, Verifier
from dspark.model.vocabulary import Vocabulary
from dspark.sections import TargetSettings
from dspark.target_files import fingerprint, load_config, load_vocabulary, resolve

# A folder is of the first layout that matches: vLLM's files name their kind under one key, and ModelOpt's exports have
# the section of SpecForge's too.
_OTHERS = (EAGLE3_SPECULATORS, SPECULATORS, MODELOPT, SPECFORGE, EAGLE3_SPECFORGE)


def _is_published(values: Mapping[str, Any]) -> bool:
    return "target_layer_ids" in values and not any(other.matches(values) for other in _OTHERS)


def _published_refusals(config: DraftConfig) -> list[str]:
    if isinstance(config, Eagle3Config) and config.form == LLAMA_FORM:
        return ["its layer has the Llama form, for which engines have no published name: export it to another layout"]
    return []


DEEPSPEC = Layout(
    "deepspec",
    DraftConfig,
    matches=_is_published,
    read=lambda stored: stored,
    write=lambda stored, _verifier: stored,
    refusals=_published_refusals,
    vocabulary="whole",
)
LAYOUTS = (DEEPSPEC, *_OTHERS)


def layout_named(name: str, kind: type[DraftConfig]) -> Layout:
    """The layout of this name for drafters of this kind."""
    return next(layout for layout in LAYOUTS if layout.name == name and issubclass(kind, layout.kind))


@dataclass(frozen=True)
class Checkpoint:
    """A drafter's folder under published names, complete and without contradiction, in the layout that it came in."""

    stored: Stored
    config: AnyConfig
    layout: Layout

    @property
    def facts(self) -> dict[str, Any]:
        """What the run that made it remembers."""
        found = self.stored.values.get(RUN_KEY)
        return found if isinstance(found, dict) else {}

    @property
    def dtype(self) -> torch.dtype:
        """The type of every tensor but the maps."""
        return DTYPES[self.stored.values["dtype"]]

    def fills(self, layout: Layout) -> bool:
        """Whether it holds what `layout` wants of the target's embedding and head."""
        head = self.stored.tensors.get(HEAD)
        if layout.vocabulary == "none":
            return True
        if head is None or (EMBEDDING not in self.stored.tensors and layout.vocabulary != "rows"):
            return False
        return layout.vocabulary != "whole" or len(head) == self.config.vocab


def read_checkpoint(
    folder: Path, name: str | None = None, target_layers: int | None = None, target_name: str | None = None
) -> Checkpoint:
    """Reads a drafter in the layout `name`, None: whichever its config.json has.

    `target_layers` and `target_name` stand in where a layout need not say how many layers the target has and what it
    is called, and a target that is so known stands in for an embedding and head that the folder lacks.

    Raises:
        InputError: no layout matches, or one other than `name` does; else names every key and tensor that is missing,
            unexpected or wrong.
    """
    try:
        values = read_json(folder / CONFIG)
        layout = _layout_of(values, name)
        if target_layers is not None and layout is not DEEPSPEC:
            values.setdefault("num_target_layers", target_layers)
        if target_name is not None and layout.kind is Eagle3Config:
            values.setdefault("target_model_name_or_path", target_name)
        stored = layout.read(Stored(values, read_tensors(folder)))
        config = config_of(stored.values)
        check_tensors(_with_stand_ins(stored.tensors, config, layout, target_layers is not None), config)
        dtype = stored.values.get("dtype") or dtype_name(stored.tensors["fc.weight"].dtype)
        check_types(stored.tensors, dtype)
    except InputError as error:
        raise InputError(f"{folder} holds no drafter that can be read: {error}") from error
    values = stored.values | rope_keys(config) | {"dtype": dtype}
    return Checkpoint(replace(stored, values=values), config, layout)


def _layout_of(values: Mapping[str, Any], name: str | None) -> Layout:
    found = next((layout for layout in LAYOUTS if layout.matches(values)), None)
    if found is None and name is not None:
        found = layout_named(name, DSparkConfig)  # it will name the keys that are missing
    if found is None:
        known = ", ".join(dict.fromkeys(layout.name for layout in LAYOUTS))
        raise InputError(
            f"{CONFIG} is of no layout known here ({known}): it has none of the keys target_layer_ids, dflash_config, "
            "speculators_model_type, and no architectures of an EAGLE-3 layout"
        )
    if name is not None and found.name != name:
        raise InputError(f"it is of the layout {found.name}, not {name}: leave --from out or correct it")
    return found


def _with_stand_ins(
    tensors: Mapping[str, Tensor], config: DraftConfig, layout: Layout, has_target: bool
) -> Mapping[str, Tensor]:
    """The tensors, with stand-ins without memory for the parts of embedding and head that the folder may leave out.

    Raises:
        InputError: the head has another number of rows than the layout wants.
    """
    if layout.vocabulary == "whole":
        return tensors
    table = torch.empty(config.vocab, config.hidden, device="meta")
    absent = {"none": (EMBEDDING, HEAD), "rows": (EMBEDDING,), "kept": ()}[layout.vocabulary]
    filled = {**dict.fromkeys((EMBEDDING, HEAD) if has_target else absent, table), **tensors}
    if layout.vocabulary == "none" or HEAD not in tensors:
        return filled
    rows = [config.draft_vocab, config.hidden]
    if list(tensors[HEAD].shape) != rows:
        raise InputError(f"tensor {HEAD} has shape {list(tensors[HEAD].shape)}, needed {rows}")
    return {**filled, HEAD: table}


def with_vocabulary(checkpoint: Checkpoint, vocabulary: Vocabulary) -> Checkpoint:
    """The checkpoint with the target's embedding and full head, in its own type.

    Raises:
        InputError: the target's are of another shape, or are not those that the checkpoint holds.
    """
    config, tensors = checkpoint.config, dict(checkpoint.stored.tensors)
    theirs = {EMBEDDING: vocabulary.embedding_VH, HEAD: vocabulary.head_VH}
    theirs = {name: tensor.to("cpu", checkpoint.dtype) for name, tensor in theirs.items()}
    if theirs[HEAD].shape != (config.vocab, config.hidden):
        raise InputError(
            f"the drafter is for a target with {config.vocab} tokens and width {config.hidden}, this target has "
            f"{' and '.join(map(str, theirs[HEAD].shape))}: name the target that it was made for"
        )
    kept_D = torch.arange(config.draft_vocab) + tensors["d2t"].cpu() if config.draft_vocab < config.vocab else None
    for name, tensor in theirs.items():
        held = tensors.get(name)
        expected = tensor if held is None or len(held) == len(tensor) or kept_D is None else tensor[kept_D]
        if held is not None and not torch.equal(held.cpu(), expected):
            raise InputError(
                f"tensor {name} of the drafter is not the target's: name the target that it was made for (one that was "
                "trained apart from its target's has no place in a drafter here)"
            )
    stored = replace(checkpoint.stored, tensors=tensors | theirs)
    return replace(checkpoint, stored=stored)


_OWN_PLACE = (
    "slot k predicts the token of its own place, as in DFlash, and no drafter here does: such a checkpoint can start a "
    "training run (drafter.start_from)"
)


def check_expressible(checkpoint: Checkpoint, name: str) -> None:
    """Refuses what the layout `name` cannot hold, or its engine would compute otherwise.

    Raises:
        InputError: names every key that stands in the way.
    """
    config, layout, stored = checkpoint.config, layout_named(name, type(checkpoint.config)), checkpoint.stored
    faults = layout.refusals(config)
    if isinstance(config, DSparkConfig):
        check_servable(config)
        if stored.values["architectures"] != [ARCHITECTURE] and layout is not DEEPSPEC:
            faults.append(f"architectures={stored.values['architectures']}, needed {[ARCHITECTURE]}")
    if not stored.next_token:
        faults.append(_OWN_PLACE)
    if faults:
        raise InputError(f"the layout {name} cannot express this drafter: {'; '.join(faults)}")


def load_for_target(folder: Path, target: TargetSettings, device: torch.device, dtype: torch.dtype) -> LoadedDrafter:
    """A drafter of any layout, to decode with its target, which stands in for what the folder leaves out.

    Raises:
        InputError: the folder is no such drafter, or holds another target's embedding or head; names what is wrong.
    """
    if not _of_another_layout(folder):
        return load_drafter(folder, device, dtype)
    found = read_checkpoint(folder, None, load_config(target).num_hidden_layers, target.model)
    if not found.stored.next_token:
        raise InputError(f"{folder} holds no drafter to decode with: {_OWN_PLACE}")
    found = with_vocabulary(found, load_vocabulary(target, torch.device("cpu"), found.dtype))
    drafter, vocabulary = assemble(found.stored.tensors, found.config)
    extra = {RUN_KEY: found.facts}
    return LoadedDrafter(drafter.to(device=device, dtype=dtype), vocabulary.to(device, dtype), found.config, extra)


def target_facts_of(folder: Path) -> dict[str, Any]:
    """What a drafter that this project made says of its target (name, revision, fingerprint); else nothing."""
    found: dict[str, Any] = read_json(folder / CONFIG).get(RUN_KEY, {}).get("target", {})
    return found


def check_made_for(target: TargetSettings, folder: Path) -> None:
    """A drafter that this project made says which weights it was made for.

    Raises:
        InputError: the target has others.
    """
    made_for = target_facts_of(folder)
    wanted = made_for.get("fingerprint")
    if wanted is not None and wanted != (found := fingerprint(resolve(target))):
        raise InputError(
            f"drafter {folder} was trained for target weights {wanted} ({made_for['name']}), the target "
            f"{target.model!r} has {found}: name the target that it was trained for"
        )


def _of_another_layout(folder: Path) -> bool:
    try:
        values = read_json(folder / CONFIG)
    except InputError:
        return False  # which is for the reader of the published layout to explain
    return any(layout.matches(values) for layout in _OTHERS)


def write_checkpoint(
    folder: Path, checkpoint: Checkpoint, name: str, verifier: Verifier | None, texts: Mapping[str, str]
) -> None:
    """Writes a drafter that `check_expressible` let pass as a new folder in the layout `name`, with further text files.

    Raises:
        InputError: the folder holds something already, or the disk refuses.
    """
    layout = layout_named(name, type(checkpoint.config))
    assert layout.write is not None, f"{name} is only read"
    stored = layout.write(checkpoint.stored, verifier)
    write_folder(folder, stored.values, stored.tensors, checkpoint.dtype, texts)
