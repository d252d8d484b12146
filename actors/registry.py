"""The registry of drafters in MLflow: versions with files and tags, the alias `champion`, and copies on this machine.

files, texts -> artifacts of a run -> version with tags -> alias -> (models:/NAME@ALIAS) -> the user's cache folder

A version is made after its files are stored, so that each one is whole. The alias alone says which version is the
champion; who was it before stands in a tag of the model, oldest first, so that a rollback knows where to go.
"""

import hashlib
import re
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from uuid import uuid4

from mlflow.artifacts import download_artifacts
from mlflow.entities.model_registry import ModelVersion, RegisteredModel
from mlflow.exceptions import MlflowException

from actors.tracking import open_client
from dspark.errors import InputError
from dspark.evaluation.gate import Entry
from dspark.evaluation.recorded import is_recorded
from dspark.quickstart import cache_folder
from dspark.redaction import redacted
from dspark.sections import REGISTERED
from dspark.target_files import fingerprint

CHAMPION = "champion"
FINGERPRINT = "drafter_fingerprint"
# Of the model: versions that were champion, oldest first. Of a version: what happened to it, one line each.
_CHAMPIONS, _HISTORY = "champions", "history"
_KEPT = 100
_FORM = f"{REGISTERED}NAME@ALIAS or {REGISTERED}NAME/NUMBER, such as {REGISTERED}tiny@champion or {REGISTERED}tiny/3"


@dataclass(frozen=True)
class Reference:
    """`models:/NAME@ALIAS` or `models:/NAME/NUMBER`; `which` is the alias or the number."""

    name: str
    which: str


def parse_reference(text: str) -> Reference:
    """
    Raises:
        InputError: the text has another form.
    """
    found = re.fullmatch(rf"{REGISTERED}([A-Za-z0-9][\w.-]*)(?:@([\w.-]+)|/([1-9]\d*))", text, re.ASCII)
    if found is None:
        raise InputError(f"{text!r} names no registered drafter: needed is {_FORM}")
    name, alias, number = found.groups()
    return Reference(name, alias or number)


class Registry:
    """The registered drafters of one MLflow store."""

    def __init__(self, uri: str, create: bool = False) -> None:
        """
        Raises:
            InputError: the store cannot be opened, or is not there and may not be made.
        """
        self.uri = uri
        self.client = open_client(uri, create)

    def names(self) -> list[str]:
        """All registered models."""
        found, page = [], None
        while True:
            models = self.client.search_registered_models(page_token=page)
            found += [str(model.name) for model in models]
            page = models.token
            if not page:
                return sorted(found)

    def entries(self, name: str) -> list[Entry]:
        """All versions, ordered as numbers: 10 stands behind 9.

        Raises:
            InputError: there is no such model.
        """
        self._model(name)
        found, page = [], None
        while True:
            versions = self.client.search_model_versions(f"name = '{name}'", page_token=page)
            found += [_entry(version) for version in versions]
            page = versions.token
            if not page:
                return sorted(found, key=lambda entry: entry.version)

    def aliases(self, name: str) -> dict[str, int]:
        """Versions by alias."""
        return {alias: int(version) for alias, version in self._model(name).aliases.items()}

    def entry(self, name: str, which: str) -> Entry:
        """The version of this number or alias.

        Raises:
            InputError: there is none; says which there are.
        """
        return _entry(self._version(name, which))

    def champion(self, name: str) -> Entry | None:
        """The present champion; None for a model that has none yet, or that is not there."""
        number = self.aliases(name).get(CHAMPION) if name in self.names() else None
        return None if number is None else self.entry(name, str(number))

    def add(self, name: str, files: Iterable[Path], texts: Mapping[str, str], tags: Mapping[str, str], run: str) -> int:
        """Stores files, and texts by file name, with the run and makes them the next version; returns its number."""
        place = f"drafter/{uuid4().hex[:12]}"  # versions of one run must not share files
        for file in files:
            self.client.log_artifact(run, str(file), place)
        for file_name, text in texts.items():
            self.client.log_text(run, text, f"{place}/{file_name}")
        try:
            self.client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        source = f"{self.client.get_run(run).info.artifact_uri}/{place}"
        made = self.client.create_model_version(name, source=source, run_id=run, tags=redacted(dict(tags)))
        return int(made.version)

    def run_of(self, name: str, which: str) -> str:
        """The run that a version came from."""
        return str(self._version(name, which).run_id)

    def has_run(self, run: str) -> bool:
        """Whether the store holds a run."""
        try:
            self.client.get_run(run)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        return True

    def record(self, entry: Entry, tags: Mapping[str, str]) -> None:
        """Replaces the recorded evaluation of a version."""
        number = str(entry.version)
        for tag in entry.tags:
            if is_recorded(tag) and tag not in tags:
                self.client.delete_model_version_tag(entry.name, number, tag)
        for tag, value in tags.items():
            self.client.set_model_version_tag(entry.name, number, tag, redacted(value))

    def promote(self, entry: Entry, note: str) -> None:
        """Makes a version the champion."""
        present = self.aliases(entry.name).get(CHAMPION)
        before = [] if present is None else self._champions_to(entry.name, present)
        self._move(entry, [*before, entry.version], f"promoted: {note}")

    def previous(self, name: str) -> Entry:
        """The champion before the present one, of those that are still there.

        Raises:
            InputError: there is none.
        """
        champions, present = self._before(name)
        there = [number for number in champions if number in {entry.version for entry in self.entries(name)}]
        if not there:
            raise InputError(
                f"no champion of {name} before version {present} is recorded: promote the version that you want with "
                f"`dspark registry promote {name} VERSION`"
            )
        return self.entry(name, str(there[-1]))

    def rollback(self, entry: Entry) -> None:
        """Makes a version that was champion before champion again; those after it are no champions any more."""
        champions, present = self._before(entry.name)
        kept = champions[: len(champions) - champions[::-1].index(entry.version)]
        self._move(entry, kept, f"champion again, rolled back from version {present}")

    def copy_of(self, reference: Reference) -> tuple[Path, int]:
        """A folder with the files of a version in the user's cache, whole or not there; and the version's number.

        Raises:
            InputError: there is no such version, or its files cannot be read or are others than were registered.
        """
        version = self._version(reference.name, reference.which)
        number = int(version.version)
        # A model that is deleted and made anew counts its versions from 1 again.
        identity = f"{redacted(self.uri)} {version.source} {version.creation_timestamp}"
        place = cache_folder() / "registry" / hashlib.sha256(identity.encode()).hexdigest()[:12]
        folder = place / f"{reference.name}-{number}"
        if not folder.is_dir():
            self._download(version, folder)
        return folder, number

    def _download(self, version: ModelVersion, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{folder.name}-", dir=folder.parent, ignore_cleanup_errors=True
        ) as place:
            address = self.client.get_model_version_download_uri(version.name, version.version)
            try:
                partial = Path(download_artifacts(address, dst_path=place, tracking_uri=self.uri))
                found = fingerprint(partial)
            except (OSError, MlflowException) as error:
                raise InputError(
                    f"the files of {REGISTERED}{version.name}/{version.version} cannot be read from "
                    f"{redacted(address)} ({redacted(str(error).splitlines()[0])}): see that the store of artifacts "
                    "can be reached, or register the drafter again"
                ) from None
            if found != (wanted := version.tags.get(FINGERPRINT, found)):
                raise InputError(
                    f"the weights of {REGISTERED}{version.name}/{version.version} have the fingerprint {found}, "
                    f"registered was {wanted}: the stored files were changed or came broken, try again or register "
                    "the drafter again"
                )
            try:
                partial.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was faster
                    raise

    def _before(self, name: str) -> tuple[list[int], int]:
        """Champions before the present one, oldest first, and the present one.

        Raises:
            InputError: there is no champion.
        """
        present = self.aliases(name).get(CHAMPION)
        if present is None:
            raise InputError(f"{name} has no champion: make one with `dspark registry promote {name} VERSION`")
        return [number for number in self._champions_to(name, present)[:-1] if number != present], present

    def _champions_to(self, name: str, present: int) -> list[int]:
        """Versions that were champion, up to the present one; what stands behind it was never made champion whole."""
        found = [int(number) for number in self._model(name).tags.get(_CHAMPIONS, "").split()]
        while found and present in found and found[-1] != present:
            found.pop()
        return found if found and found[-1] == present else [*found, present]

    def _move(self, entry: Entry, champions: list[int], note: str) -> None:
        # The alias moves last: should this end before, the champion is still the one of before, and so is its past.
        number, when = str(entry.version), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.client.set_registered_model_tag(entry.name, _CHAMPIONS, " ".join(map(str, champions[-_KEPT:])))
        lines = [line for line in entry.tags.get(_HISTORY, "").split("\n") if line]
        history = "\n".join([*lines, f"{when} {note}"][-_KEPT:])
        self.client.set_model_version_tag(entry.name, number, _HISTORY, history)
        self.client.set_registered_model_alias(entry.name, CHAMPION, number)

    def _model(self, name: str) -> RegisteredModel:
        try:
            return self.client.get_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            self._refuse(f"there is no registered model {name!r}", self.names())

    def _version(self, name: str, which: str) -> ModelVersion:
        aliases = self._model(name).aliases
        number = aliases.get(which, which)
        try:
            if re.fullmatch(r"[1-9]\d*", str(number)):
                return self.client.get_model_version(name, str(number))
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        numbers = [str(entry.version) for entry in self.entries(name)]
        self._refuse(f"{name} has no version {which!r}", [*numbers, *aliases])

    def _refuse(self, found: str, known: list[str]) -> NoReturn:
        raise InputError(
            f"{found} in {redacted(self.uri)}, which holds {', '.join(known) or 'none'}: correct the name, make it "
            "with `dspark register`, or name another store by tracking.uri, --uri or MLFLOW_TRACKING_URI"
        )


def _entry(version: ModelVersion) -> Entry:
    return Entry(str(version.name), int(version.version), dict(version.tags))
