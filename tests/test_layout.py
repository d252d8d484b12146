"""The shape of the tree, read from its syntax: who imports whom, sizes, annotations, files that must not be there."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[1]
PACKAGES = ("dspark", "actors", "jobs")
# What a package must not import; jobs may import everything.
FORBIDDEN = {"dspark": {"ray", "deepspeed", "mlflow", "rich", "typer", "actors", "jobs"}, "actors": {"jobs"}}
LONGEST_FILE, LONGEST_TEST_FILE = 300, 350
LONGEST_FUNCTION = 60

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def imports(module: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, first part of the name) of every import, also of those inside functions."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"line {node.lineno}: imports are absolute"
            yield node.lineno, node.module.partition(".")[0]


def functions(module: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(module) if isinstance(node, Function))


def unannotated(function: Function, in_class: bool) -> list[str]:
    """What a function leaves untyped: names of parameters, and `return`."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in function.decorator_list)
    rest = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    typed = [*positional[1 if in_class and not static else 0 :], *arguments.kwonlyargs, *rest]
    missing = [argument.arg for argument in typed if argument.annotation is None]
    return missing + ["return"] * (function.returns is None)


def methods(module: ast.AST) -> set[Function]:
    classes = (node for node in ast.walk(module) if isinstance(node, ast.ClassDef))
    return {node for owner in classes for node in owner.body if isinstance(node, Function)}


def place(file: Path, line: int) -> str:
    return f"{file.relative_to(ROOT)}:{line}"


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_imports_go_one_way(package: str) -> None:
    found = [
        f"{place(file, line)} imports {name}"
        for file in sources(package)
        for line, name in imports(tree(file))
        if name in FORBIDDEN[package]
    ]
    assert found == []


def test_deepspeed_is_imported_in_one_place_which_leaves_mlflow_out() -> None:
    found = {
        file.name
        for file in sources(*PACKAGES)
        for node in tree(file).body
        if not isinstance(node, Function) and "deepspeed" in {name for _, name in imports(node)}
    }
    assert found == {"deepspeed_alone.py"}


def test_no_file_is_too_long() -> None:
    found = [
        place(file, length)
        for folders, longest in ((PACKAGES, LONGEST_FILE), (("tests", "benchmarks"), LONGEST_TEST_FILE))
        for file in sources(*folders)
        if (length := len(file.read_text(encoding="utf-8").splitlines())) > longest
    ]
    assert found == []


def test_no_function_is_too_long() -> None:
    found = [
        place(file, node.lineno)
        for file in sources(*PACKAGES, "tests")
        for node in functions(tree(file))
        if (node.end_lineno or node.lineno) - node.lineno + 1 > LONGEST_FUNCTION
    ]
    assert found == []


def test_every_function_is_annotated() -> None:
    found: list[str] = []
    for file in sources(*PACKAGES):
        module = tree(file)
        own = methods(module)
        for node in functions(module):
            found += [f"{place(file, node.lineno)} {name}" for name in unannotated(node, node in own)]
    assert found == []


def test_no_module_is_a_box_for_leftovers() -> None:
    names = {"utils.py", "common.py", "helpers.py", "manager.py"}
    assert [file for file in sources(*PACKAGES, "tests") if file.name in names] == []


def test_platform_holds_no_python_file() -> None:
    assert list((ROOT / "platform").rglob("*.py")) == []
    assert not (ROOT / "platform.py").exists()


def test_platform_is_pythons_own_module_in_the_repository() -> None:
    program = "import platform; print(platform.system() != '', platform.__file__)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    known, file = done.stdout.split(maxsplit=1)
    assert known == "True"
    assert not Path(file.strip()).is_relative_to(ROOT / "platform")


def test_the_cluster_file_is_one_that_ray_accepts() -> None:
    ray = find_spec("ray")
    assert ray is not None and ray.origin is not None
    schema = json.loads((Path(ray.origin).parent / "autoscaler" / "ray-schema.json").read_text(encoding="utf-8"))
    cluster = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    jsonschema.validate(cluster, schema)
    kinds = cluster["available_node_types"]
    assert cluster["head_node_type"] in kinds
    assert {"target", "trainer"} <= {name for kind in kinds.values() for name in kind["resources"]}


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("def f(a: int, *b: int, c: int, **d: int) -> int: ...", []),
        ("def f(a, *b, c, **d): ...", ["a", "c", "b", "d", "return"]),
        ("class A:\n def f(self) -> None: ...", []),
        ("class A:\n @staticmethod\n def f(a) -> None: ...", ["a"]),
    ],
)
def test_the_reading_of_annotations_misses_nothing(source: str, missing: list[str]) -> None:
    module = ast.parse(source)
    own = methods(module)
    assert [name for node in functions(module) for name in unannotated(node, node in own)] == missing


def test_the_reading_of_imports_sees_those_inside_functions() -> None:
    module = ast.parse("import os.path\ndef f():\n    from ray.data import x\n")
    assert list(imports(module)) == [(1, "os"), (3, "ray")]
