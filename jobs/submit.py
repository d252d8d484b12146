"""`dspark submit`: one of the other commands as a job of a Ray cluster whose nodes have only the dependencies.

checkout -> upload -> `python -m jobs.COMMAND PRESET ... ray.address=auto` on the cluster -> log and exit code here

The cluster's dashboard is asked over HTTP. Waits for: a cluster that still starts, up to `timeout_s`. A submission is
sent under one id, so that trying again never starts the job twice.
"""

import asyncio
import re
import shlex
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console

from dspark.errors import InputError
from dspark.redaction import redacted
from jobs.arguments import is_override
from jobs.checkpoints import is_registered
from jobs.commit import VARIABLE, git_commit
from jobs.config import load_settings
from jobs.uploading import check_inputs, check_outputs, collect_upload

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

_RETRY_S = 2.0
# What Ray gives a job that is stopped before it kills it: its own 3 seconds are too few for a checkpoint. The clean-up
# of what the job had on other nodes comes on top.
_SAVE_S, _STOP_S = 60, 90
# Commands that take drafters, with how many; the others take a preset and settings alone.
_DRAFTERS = {"evaluate": "at least one DRAFTER", "calibrate": "one CHECKPOINT"}
_OPTIONS = {"calibrate": ("--profile",)}
JOB_ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "RAY_JOB_STOP_WAIT_TIME_S": str(_SAVE_S)}
Answer = TypeVar("Answer")


def submit(
    address: str,
    command: str,
    preset: Path,
    words: Sequence[str],
    resume: str | None,
    timeout_s: float,
    dry_run: bool,
) -> int:
    """Submits a command, follows its log and returns the job's exit code; with `dry_run` only says what would go.

    `words` are what follows the preset: drafters, settings, options.

    Raises:
        InputError: settings or paths that mean nothing on the cluster, a secret among the words, too large an upload,
            or no cluster in time.
    """
    console = Console()
    root = Path.cwd().resolve()
    entrypoint = job_entrypoint(root, command, preset, words, resume)
    upload = collect_upload(root)
    check_inputs(load_settings(preset, overrides_in(command, words)), upload)
    if dry_run:
        for path, size in sorted(upload.files.items()):
            console.print(f"{size:>10,}  {path}", highlight=False, soft_wrap=True)
    console.print(f"upload: {len(upload.files)} files, {upload.total:,} bytes", highlight=False)
    console.print(f"entrypoint: {entrypoint}", highlight=False, soft_wrap=True, markup=False)
    if dry_run:
        return 0
    job = f"dspark-{command}-{uuid.uuid4().hex[:12]}"
    client = connect(address, timeout_s)
    _patiently(lambda: _send(client, job, entrypoint, root), address, timeout_s)
    console.print(
        f"job {job}: `dspark submit --stop {job}` ends it, Ctrl-C here only stops following it", soft_wrap=True
    )
    return follow(client, job, console)


def overrides_in(command: str, words: Sequence[str]) -> list[str]:
    """The settings among the words that follow the preset."""
    return [word for word in words if command not in _DRAFTERS or is_override(word)]


def job_entrypoint(root: Path, command: str, preset: Path, words: Sequence[str], resume: str | None) -> str:
    """The shell line that the job runs; the preset by its place in the checkout."""
    for word in [str(preset), *words, *([resume] if resume else [])]:
        _check_open(word)
    place = preset.expanduser().resolve()
    if not place.is_relative_to(root):
        raise InputError(f"preset {preset} lies outside {root}, so it does not go along: copy it into the checkout")
    overrides = overrides_in(command, words)
    settings = load_settings(preset, overrides)
    check_outputs(settings, root)
    others = [word for word in words if word not in overrides]
    options = [word for word in others if word in _OPTIONS.get(command, ())]
    drafters = [word for word in others if word not in options]
    _check_drafters(command, drafters, root)
    if any(override.startswith("ray.address=") for override in overrides) and settings.ray.address != "auto":
        raise InputError(
            f"ray.address={settings.ray.address}: a submitted job uses the cluster that runs it: leave the setting "
            "out, and give the cluster by --address"
        )
    if resume and "://" not in resume:
        _check_folder(resume, f"--resume {resume}", root)
    if resume and command == "calibrate":
        raise InputError(f"--resume {resume}: calibrate begins anew each time, leave it out")
    line = ["python", "-m", f"jobs.{command}", str(place.relative_to(root)), *drafters, *overrides, "ray.address=auto"]
    return shlex.join(line + options + (["--resume", resume] if resume else []))


def _check_open(word: str) -> None:
    if (shown := redacted(word)) != word:
        raise InputError(
            f"`{shown}` holds a secret, and a job's entrypoint stands in lists of processes and on Ray's dashboard: "
            "leave it out, and set it on the cluster's nodes, in an environment variable such as "
            "MLFLOW_TRACKING_PASSWORD, HF_TOKEN or the one that prepare.endpoint.key_variable names"
        )


def _check_drafters(command: str, drafters: Sequence[str], root: Path) -> None:
    if command not in _DRAFTERS:
        return
    if not drafters or (command == "calibrate" and len(drafters) > 1):
        raise InputError(f"`submit {command}` takes {_DRAFTERS[command]} behind the preset, found {len(drafters)}")
    for place in drafters:
        if "://" not in place and not is_registered(place):
            _check_folder(place, f"drafter {place}", root)


def _check_folder(place: str, what: str, root: Path) -> None:
    # Weights stay behind when a checkout is packed.
    if not Path(place).is_absolute() or Path(place).is_relative_to(root):
        raise InputError(f"{what}: the job cannot read it: give the absolute folder, which all nodes see")


def stop(address: str, job: str, timeout_s: float) -> None:
    """Ends a job and waits until it is over: with its driver, its actors end."""
    client = connect(address, timeout_s)
    try:
        client.stop_job(job)
    except RuntimeError as error:
        raise InputError(f"--stop {job}: the cluster at {address} cannot stop it ({_first_line(error)})") from error
    ends = time.monotonic() + _STOP_S
    while not client.get_job_status(job).is_terminal():
        if time.monotonic() > ends:
            raise InputError(f"job {job} still runs {_STOP_S} s after it was stopped: look at `ray job status {job}`")
        time.sleep(0.5)
    Console().print(f"job {job}: {client.get_job_status(job).value}", highlight=False)


def connect(address: str, timeout_s: float) -> "JobSubmissionClient":
    """A client of the dashboard at `address`; a cluster that is still starting is waited for."""
    from ray.job_submission import JobSubmissionClient

    return _patiently(lambda: JobSubmissionClient(address), address, timeout_s)


def follow(client: "JobSubmissionClient", job: str, console: Console) -> int:
    """Prints a job's log until it ends; returns its exit code, 1 where Ray knows none of a job that failed."""

    async def show() -> None:
        async for lines in client.tail_job_logs(job):
            console.file.write(lines)
            console.file.flush()

    asyncio.run(show())
    # The log may close a moment before the status is written.
    while not client.get_job_status(job).is_terminal():
        time.sleep(0.5)
    info = client.get_job_info(job)
    console.print(f"job {job}: {info.status.value}, exit code {info.driver_exit_code}", highlight=False)
    return 0 if info.status.value == "SUCCEEDED" else info.driver_exit_code or 1


def _send(client: "JobSubmissionClient", job: str, entrypoint: str, root: Path) -> None:
    variables = dict(JOB_ENVIRONMENT)
    if (commit := git_commit()) is not None:
        variables[VARIABLE] = commit
    try:
        client.submit_job(
            entrypoint=entrypoint,
            submission_id=job,
            runtime_env={"working_dir": str(root), "env_vars": variables},
        )
    except RuntimeError as error:
        # The try before this one arrived, though its answer did not.
        if "already exists" not in str(error):
            raise


def _patiently(ask: Callable[[], Answer], address: str, timeout_s: float) -> Answer:
    """What `ask` returns, tried again while the cluster is still starting."""
    from ray.exceptions import AuthenticationError

    ends = time.monotonic() + timeout_s
    while True:
        try:
            return ask()
        except AuthenticationError as error:
            raise InputError(
                f"the cluster at {address} refused the token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or "
                f"RAY_AUTH_TOKEN_PATH to the cluster's own, or RAY_AUTH_MODE=disabled where it has none"
            ) from error
        except (OSError, RuntimeError) as error:
            if not _still_starting(error):
                raise InputError(f"the cluster at {address} refused the job: {_first_line(error)}") from error
            if time.monotonic() > ends:
                raise InputError(
                    f"no Ray cluster took the job at {address} within {timeout_s:g} s ({_first_line(error)}): start "
                    "one with `ray start --head`, or correct --address"
                ) from error
        time.sleep(_RETRY_S)


def _still_starting(error: Exception) -> bool:
    return isinstance(error, OSError) or bool(
        re.search(r"No available agent|status code 50[0234]|Failed to connect", str(error))
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
