"""What docs/security.md says is trusted, and nothing else: what the code must never do, and what a local Ray opens."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from jobs.config import load_settings
from jobs.session import ray_session
from tests.conftest import tiny_preset

ROOT = Path(__file__).parents[1]
# Calls that may run what they read, and the arguments that make them safe.
NEEDS: dict[str, tuple[str, bool]] = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}
FORBIDDEN = {
    "pickle.load", "pickle.loads", "cloudpickle.load", "cloudpickle.loads", "eval", "exec", "os.system",
    "yaml.full_load", "yaml.unsafe_load",
}  # fmt: skip


def calls(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(dotted name, constant keyword arguments) of every call."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            named = {word.arg: word.value for word in node.keywords if word.arg}
            found = {name: value.value for name, value in named.items() if isinstance(value, ast.Constant)}
            found |= {name: ast.unparse(value) for name, value in named.items() if name == "Loader"}
            yield dotted(node.func), found


def dotted(node: ast.expr) -> str:
    """`a` or `a.b`; empty for anything longer, such as `self.model.eval`."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id=before), attr=name):
            return f"{before}.{name}"
    return ""


def unsafe(source: str) -> list[str]:
    """Calls that could run code of a file, a model or a shell line."""
    found = []
    for name, constants in calls(source):
        key, value = NEEDS.get(name, ("", None))
        wrong = (key and constants.get(key) is not value) or name in FORBIDDEN
        wrong = wrong or (name == "yaml.load" and constants.get("Loader") != "_Loader")
        if wrong or constants.get("trust_remote_code") or constants.get("shell"):
            found.append(name)
    return found


def test_no_code_of_a_file_a_model_or_a_shell_line_is_run() -> None:
    files = [file for package in ("dspark", "actors", "jobs") for file in (ROOT / package).rglob("*.py")]
    assert {str(file): names for file in files if (names := unsafe(file.read_text(encoding="utf-8")))} == {}
    source = "torch.load(f); yaml.load(t, Loader=L); pickle.load(f); run(c, shell=True); f(trust_remote_code=True)"
    assert unsafe(source) == ["torch.load", "yaml.load", "pickle.load", "run", "f"]
    assert unsafe("torch.load(f, weights_only=True); np.load(f, allow_pickle=False)") == []


def test_the_loader_of_settings_is_a_safe_one() -> None:
    text = (ROOT / "jobs" / "config.py").read_text()
    assert "class _Loader(yaml.SafeLoader):" in text


@pytest.mark.parametrize(("port", "served"), [(None, False), (8299, True)])
def test_a_local_ray_serves_no_dashboard_unless_asked_and_then_on_loopback_alone(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, port: int | None, served: bool
) -> None:
    class Stop(Exception):
        pass

    def init(**options: Any) -> None:
        raise Stop(options)

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    settings = load_settings(tiny_preset(tmp_path, tiny_target), [f"ray.dashboard_port={port or 'null'}"])
    mode = os.environ.get("RAY_AUTH_MODE")
    with pytest.raises(Stop) as stopped, ray_session(settings):
        pass
    (options,) = stopped.value.args
    assert (options["include_dashboard"], options["dashboard_host"]) == (served, "127.0.0.1")
    # Whether Ray asks for a token stays what it is by default: it does.
    assert os.environ.get("RAY_AUTH_MODE") == mode
