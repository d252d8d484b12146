"""The command line: help, exit codes, order of options, and what it imports."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayTaskError
from typer.testing import CliRunner

from dspark.errors import InputError, bad_input
from jobs import cli
from jobs.file_commands import commands as file_commands
from tests.conftest import tiny_preset

ROOT = Path(__file__).parents[2]
COMMANDS = [
    "run",
    "prepare",
    "capture",
    "train",
    "tune",
    "evaluate",
    "calibrate",
    "simulate",
    "inspect",
    "generate",
    "export",
    "register",
    "check-reference",
    "doctor",
    "submit",
]


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dspark", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    code = stopped.value.code
    assert isinstance(code, int)
    return code


def raising(error: BaseException) -> None:
    raise error


def test_the_list_of_commands_is_complete() -> None:
    shown = CliRunner().invoke(cli.app, ["--help"]).output
    assert all(f" {command} " in shown for command in COMMANDS)
    assert len(cli.app.registered_commands) + len(file_commands.registered_commands) == len(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    result = CliRunner().invoke(cli.app, [command, "--help"])
    assert result.exit_code == 0
    assert f"Usage: root {command}" in result.output


@pytest.mark.parametrize("command", ["run", "prepare", "capture", "train", "evaluate", "calibrate"])
def test_the_help_of_a_command_on_a_preset_lists_every_setting_and_default(command: str) -> None:
    rows = [line.split() for line in CliRunner().invoke(cli.app, [command, "--help"]).output.splitlines()]
    assert ["train.weight_decay", "0.0"] in [row[:2] for row in rows]
    assert ["train.zero_stage", "1"] in [row[:2] for row in rows]


def test_the_help_of_the_other_commands_shows_their_defaults() -> None:
    inspect = CliRunner().invoke(cli.app, ["inspect", "--help"]).output
    assert all(f"[default: {value}]" in inspect for value in ("4096", "512", "42", "(all)"))
    generate = CliRunner().invoke(cli.app, ["generate", "--help"]).output
    assert all(f"[default: {value}]" in generate for value in ("512", "0.0", "fixed", "fp32"))


def test_the_command_line_imports_neither_torch_nor_ray() -> None:
    program = "import jobs.cli, sys; print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_bad_input_exits_2_and_says_why_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    preset = tmp_path / "[bold].yaml"
    preset.write_text("- 1\n", encoding="utf-8")
    assert exit_code(monkeypatch, "train", str(preset)) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"error: the preset {preset} holds [1], ")


def test_overrides_and_options_may_come_in_any_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    preset = tmp_path / "preset.yaml"
    preset.write_text("name: x\n", encoding="utf-8")
    assert exit_code(monkeypatch, "train", str(preset), "loss.x1=0.9", "--dry-run", "seed=a") == 2
    message = capsys.readouterr().err
    assert "loss.x1: unknown key" in message
    assert 'seed: found "a"' in message


def test_drafters_to_evaluate_and_overrides_may_come_in_any_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[Any] = []
    monkeypatch.setattr("jobs.evaluate.evaluate", lambda *arguments: given.extend(arguments))
    preset = str(tiny_preset(tmp_path, tiny_target))
    assert exit_code(monkeypatch, "evaluate", preset, "runs/a", "evaluate.batch=[1, 8]", "./b=c", "--resume", "r") == 0
    settings, folders, resume, dry_run = given
    assert settings.evaluate.batch == (1, 8)
    assert (folders, resume, dry_run) == ([Path("runs/a"), Path("b=c")], Path("r"), False)
    assert exit_code(monkeypatch, "evaluate", preset, "seed=1") == 2
    assert "needs at least one DRAFTER" in capsys.readouterr().err


def test_an_option_that_is_not_there_exits_2(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exit_code(monkeypatch, "train", "preset.yaml", "--dry") == 2


def test_an_interrupted_command_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.doctor.doctor", lambda: raising(KeyboardInterrupt()))
    assert exit_code(monkeypatch, "doctor") == 130


@pytest.mark.parametrize(("healthy", "code"), [(True, 0), (False, 1)])
def test_a_failed_check_exits_1(monkeypatch: pytest.MonkeyPatch, healthy: bool, code: int) -> None:
    monkeypatch.setattr("jobs.doctor.doctor", lambda: healthy)
    assert exit_code(monkeypatch, "doctor") == code


def test_bad_input_found_in_an_actor_is_told_without_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task_error: Any = RayTaskError
    error = task_error("capture", "Traceback: a long text", InputError("tap 30 is out of range")).as_instanceof_cause()
    assert "a long text" in str(error)
    monkeypatch.setattr("jobs.doctor.doctor", lambda: raising(error))
    assert exit_code(monkeypatch, "doctor") == 2
    assert capsys.readouterr().err == "error: tap 30 is out of range\n"


class Refusing:
    """An actor that finds bad input: where it starts, or in its work."""

    def __init__(self, at_start: bool) -> None:
        if at_start:
            raise InputError("tap 30 is out of range")

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        raise InputError("tap 30 is out of range")


def test_bad_input_is_found_in_whatever_ray_makes_of_it(local_ray: None) -> None:
    dead: Any = ray.remote(num_cpus=0)(Refusing).remote(at_start=True)
    with pytest.raises(ray.exceptions.RayActorError) as caught:
        ray.get(dead.__call__.remote({}))
    assert bad_input(caught.value) == "tap 30 is out of range"
    working: Any = ray.remote(num_cpus=0)(Refusing).remote(at_start=False)
    with pytest.raises(ray.exceptions.RayTaskError) as failed:
        ray.get(working.__call__.remote({}))
    assert bad_input(failed.value) == "tap 30 is out of range"
    mapped = ray.data.range(1).map_batches(Refusing, fn_constructor_args=(False,), concurrency=1, num_cpus=1)
    with pytest.raises(Exception) as stopped:  # its type is Ray Data's own affair
        mapped.take_all()
    assert bad_input(stopped.value) == "tap 30 is out of range"
    assert bad_input(KeyError("dspark.errors.InputError: not from Ray")) is None


def test_a_module_run_by_itself_is_its_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jobs.doctor", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "Usage: dspark doctor" in done.stdout
