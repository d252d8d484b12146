"""Each check of `dspark doctor` on a machine that is well and on one that is not."""

import socket
from pathlib import Path

import pytest

from jobs import doctor


def test_an_old_python_fails() -> None:
    assert doctor.python_version((3, 11, 0)).ok is True
    assert doctor.python_version((3, 10, 14)).ok is False


def test_a_missing_compiler_fails_and_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    check = doctor.compiler({"CXX": "clang++"})
    assert check.ok is False
    assert check.found == "neither clang++ nor g++"
    assert "install g++" in check.advice


def test_a_compiler_without_the_headers_of_python_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    assert "no " + str(tmp_path / "Python.h") in doctor.compiler({}).found
    (tmp_path / "Python.h").touch()
    assert doctor.compiler({}) == doctor.Check("C++ compiler", True, str(compiler))


def test_too_little_disk_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert doctor.disk(tmp_path).found.endswith(f"GB at {tmp_path}")
    monkeypatch.setattr(doctor, "DISK_GB", 10**9)
    assert doctor.disk(tmp_path).ok is False


def test_the_limit_of_a_container_counts_as_memory(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text("500000000\n", encoding="utf-8")
    check = doctor.memory(limit)
    assert (check.ok, check.found) == (False, "0.5 GB available")
    limit.write_text("max\n", encoding="utf-8")
    assert doctor.memory(limit).found != "0.5 GB available"


def test_the_core_packages_are_pinned_as_installed() -> None:
    assert doctor.versions(Path(doctor.__file__).parents[1] / "constraints.txt").ok is True


def test_another_version_than_the_pinned_one_is_a_note(tmp_path: Path) -> None:
    pinned = "".join(f"{name}==0.0.1\n" for name in doctor.CORE_PACKAGES)
    (tmp_path / "constraints.txt").write_text(pinned, encoding="utf-8")
    check = doctor.versions(tmp_path / "constraints.txt")
    assert check.ok is None
    assert ", not 0.0.1" in check.found


def test_a_missing_package_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "CORE_PACKAGES", ("numpy", "no-such-package"))
    check = doctor.versions(tmp_path / "constraints.txt")
    assert (check.ok, check.found) == (False, "missing: no-such-package")


@pytest.mark.parametrize(
    ("environment", "ok", "found"),
    [
        ({}, True, "RAY_AUTH_MODE is not set: a Ray that a job starts makes a token and asks for it"),
        ({"RAY_AUTH_MODE": "disabled"}, None, "RAY_AUTH_MODE=disabled"),
        ({"RAY_AUTH_MODE": "none"}, False, "RAY_AUTH_MODE=none"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "abc"}, True, "RAY_AUTH_MODE=token, token from RAY_AUTH_TOKEN"),
        ({"RAY_AUTH_MODE": "token"}, None, "RAY_AUTH_MODE=token, no token yet"),
        (
            {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/none"},
            False,
            "RAY_AUTH_MODE=token, no token in /none",
        ),
    ],
)
def test_the_token_settings_are_told(environment: dict[str, str], ok: bool | None, found: str, tmp_path: Path) -> None:
    check = doctor.ray_token(environment, tmp_path)
    assert (check.ok, check.found) == (ok, found)


def test_a_token_is_named_by_its_place_and_never_shown(tmp_path: Path) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret", encoding="utf-8")
    check = doctor.ray_token({"RAY_AUTH_MODE": "token"}, tmp_path)
    assert check.ok is True
    assert str(tmp_path / ".ray" / "auth_token") in check.found
    assert "secret" not in check.found + check.advice


def test_a_ray_that_answers_is_noted_and_a_dead_one_is_not(tmp_path: Path) -> None:
    current = tmp_path / "ray_current_cluster"
    assert doctor.ray_cluster({}, current).ok is True
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        current.write_text(f"127.0.0.1:{port}", encoding="utf-8")
        assert doctor.ray_cluster({}, current).found == f"127.0.0.1:{port}"
    assert doctor.ray_cluster({}, current).ok is True
    assert doctor.ray_cluster({"RAY_ADDRESS": "head:6379"}, current).found == "RAY_ADDRESS=head:6379"


def test_a_dashboard_port_in_use_is_noted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert doctor.dashboard_port(port).ok is None
    assert doctor.dashboard_port(port).ok is True


def test_the_dense_copy_is_enough_for_the_quickstart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from dspark.quickstart import dense_folder

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("dspark.quickstart.WHEEL", "no-such-wheel")
    assert doctor.target_files().ok is False
    assert "no-such-wheel" in doctor.target_files().advice
    dense_folder().mkdir(parents=True)
    assert str(tmp_path) in doctor.target_files().found
    assert doctor.target_files().ok is True


@pytest.mark.parametrize(
    ("flags", "ok"), [("flags : fpu avx512_bf16 sse", True), ("flags : fpu sse", None), ("Features : asimd bf16", True)]
)
def test_bf16_instructions_are_read_from_the_cpu(flags: str, ok: bool | None, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(flags, encoding="utf-8")
    assert doctor.bf16_instructions(tmp_path / "cpuinfo").ok is ok


def test_a_package_named_platform_fails(tmp_path: Path) -> None:
    (tmp_path / "platform").mkdir()
    assert doctor.platform_folder(tmp_path).ok is True
    (tmp_path / "platform" / "__init__.py").touch()
    assert doctor.platform_folder(tmp_path).ok is False


def test_one_failed_check_fails_the_doctor_and_a_note_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "DISK_GB", 0)
    monkeypatch.setattr(doctor, "MEMORY_GB", 0)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert doctor.doctor() is True
    monkeypatch.setenv("RAY_AUTH_MODE", "none")
    assert doctor.doctor() is False
    assert "failed" in capsys.readouterr().out
