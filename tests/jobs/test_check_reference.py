"""`dspark check-reference`: one line per group of tensors, and an exit code that tells."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dspark.errors import InputError
from jobs.check_reference import check_reference
from jobs.cli import app

GOLDEN = Path("tests/golden")


def broken_case(tmp_path: Path) -> Path:
    """A copy of a case with one wrong gradient."""
    case = Path(shutil.copytree(GOLDEN / "dspark_gated", tmp_path / "broken"))
    tensors = load_file(case / "case.safetensors")
    tensors["grads.layers.1.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, case / "case.safetensors", metadata={"alphas": "[0.1, 0.9, 1.0]", "gamma": "4.0"})
    return case


def test_the_stored_cases_pass_each_group_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_reference([GOLDEN / "dspark_vanilla", GOLDEN / "dspark_gated"])
    printed = capsys.readouterr().out
    for group in ("outputs", "losses", "gradients fc", "gradients layers.2", "gradients markov_head"):
        lines = [line for line in printed.splitlines() if line.startswith(f"│ {group}")]
        assert len(lines) == 2 and all("ok" in line for line in lines), group
    assert "FAILED" not in printed
    assert "2 cases, 0 beyond the tolerance" in printed


def test_a_wrong_gradient_fails_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not check_reference([broken_case(tmp_path), GOLDEN / "dspark_vanilla"])
    printed = capsys.readouterr().out
    assert "FAILED" in printed and "up_proj" in printed
    assert "2 cases, 1 beyond the tolerance" in printed


def test_a_folder_of_cases_stands_for_its_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_reference([GOLDEN])
    assert "2 cases, 0 beyond" in capsys.readouterr().out


def test_a_folder_without_a_case_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no reference case.*case\.safetensors"):
        check_reference([tmp_path])


def test_the_command_exits_0_only_when_every_case_holds(tmp_path: Path) -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["check-reference", str(GOLDEN / "dspark_vanilla")]).exit_code == 0
    assert runner.invoke(app, ["check-reference", str(broken_case(tmp_path))]).exit_code == 1


def test_the_type_of_the_computation_is_an_option_and_its_bounds_are_printed() -> None:
    result = CliRunner().invoke(app, ["check-reference", str(GOLDEN), "--dtype", "bf16"])
    assert result.exit_code == 0
    assert "2 cases, 0 beyond the tolerance (bf16" in result.output
    assert "target logits 0.00977, draft logits 0.0938, confidence 0.133, losses 0.00586" in result.output
    assert "gradients 0.141, behind the layers 0.0938 of the largest stored magnitude, for gradients" in result.output


def test_cases_are_found_at_any_depth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(GOLDEN / "dspark_gated", tmp_path / "more" / "heads" / "gated")
    assert check_reference([tmp_path])
    assert "1 cases, 0 beyond" in capsys.readouterr().out
