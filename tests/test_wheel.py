"""The wheel as a user gets it: all modules, the report's template, the licence and the command, and nothing else."""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("actors", "dspark", "jobs")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, so that the build leaves nothing in it."""
    copy = tmp_path_factory.mktemp("wheel") / "dspark"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "shared")
    return Path(shutil.copytree(ROOT, copy, ignore=ignored))


@pytest.fixture(scope="module")
def installed(tree: Path) -> Path:
    """A folder with the unpacked wheel, built offline, as on a node that has only the dependencies."""
    arguments = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", "out", "."]
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = (tree / "out").glob("*.whl")
    folder = tree / "installed"
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder)
    return folder


def distribution(folder: Path) -> Distribution:
    (info,) = folder.glob("*.dist-info")
    return PathDistribution(info)


def test_the_wheel_holds_every_module_of_the_three_packages_and_no_other(tree: Path, installed: Path) -> None:
    wanted = {file.relative_to(tree) for package in PACKAGES for file in (tree / package).rglob("*.py")}
    assert {file.relative_to(installed) for file in installed.rglob("*.py")} == wanted


def test_the_wheel_holds_every_template_of_the_report(tree: Path, installed: Path) -> None:
    templates = {file.relative_to(tree) for file in (tree / "dspark" / "evaluation").glob("*.j2")}
    assert templates
    assert {file.relative_to(installed) for file in installed.rglob("*.j2")} == templates


def test_the_wheel_holds_neither_tests_nor_platform_files(installed: Path) -> None:
    (info,) = installed.glob("*.dist-info")
    assert {entry.name for entry in installed.iterdir()} == {*PACKAGES, info.name}


def test_the_wheel_carries_its_licence(installed: Path) -> None:
    found = distribution(installed)
    assert found.metadata["License-Expression"] == "Apache-2.0"
    assert found.read_text("licenses/LICENSE") == (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_the_wheel_brings_the_command(installed: Path) -> None:
    found = distribution(installed)
    assert [(point.name, point.value) for point in found.entry_points] == [("dspark", "jobs.cli:main")]
    assert "torch==2.13.0" in (found.requires or [])


def test_the_installed_command_runs_far_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    program = "import sys, jobs.cli; sys.argv = ['dspark', '--help']; print(jobs.cli.__file__); jobs.cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(installed))
    assert "Usage: dspark" in done.stdout
