"""What a user installs is whole: packages, native sources, entry points, declared dependencies."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Each import of these copes with their absence.
OPTIONAL = {"matplotlib", "triton", "flash_attn", "cutlass", "quack", "cuda"}


def package_folders() -> list[Path]:
    return sorted(
        path.parent for top in ("magi_flex", "inductor_lowering") for path in (ROOT / top).rglob("__init__.py")
    )


def tracked(*patterns: str) -> list[str]:
    """Tracked files, and those about to be."""
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns)
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.split("\n") if name and (ROOT / name).exists()]


def test_every_package_is_listed() -> None:
    found = {".".join(folder.relative_to(ROOT).parts) for folder in package_folders()}
    assert found == set(PROJECT["tool"]["setuptools"]["packages"]) - {"magi_flex._csrc"}


def test_imports_are_declared() -> None:
    declared = {"torch", "sympy", "numpy"}
    for folder in package_folders():
        for path in folder.glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names: list[str] = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    names = [node.module or ""]
                for name in names:
                    top = name.partition(".")[0]
                    known = top in sys.stdlib_module_names or top in declared | OPTIONAL
                    assert known or (ROOT / top).is_dir(), f"{path}:{node.lineno} imports {name}, which is not declared"


def test_no_module_of_the_package_imports_tests_examples_or_benchmarks() -> None:
    for folder in package_folders():
        for path in folder.glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom):
                    assert (node.module or "").partition(".")[0] not in ("tests", "examples", "benchmarks"), path


def floors() -> dict[str, int]:
    """Module or package -> floor, from the table in docs/design.md."""
    found: dict[str, int] = {}
    for floor, cell in re.findall(r"^\| (\d) \| (.*?) \|", (ROOT / "docs/design.md").read_text(), re.M):
        for folder, names in re.findall(r"`([a-z_/]+)/`(?:: ((?:`\w+`(?:, )?)+))?", cell):
            package = folder.replace("/", ".")
            for module in re.findall(r"\w+", names) or [""]:
                found[f"{package}.{module}".rstrip(".")] = int(floor)
    return found


def floor_of(module: str, table: dict[str, int]) -> int | None:
    """The floor of a module: its own, or its package's."""
    while module and module not in table:
        module = module.rpartition(".")[0]
    return table.get(module)


def test_no_file_imports_upward() -> None:
    table = floors()
    assert table["magi_flex.intervals"] == 0 and table["magi_flex.kernels"] == 2 and table["magi_flex"] == 7
    for name in table:
        path = ROOT / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").exists(), f"docs/design.md names {name}, which is not there"
    for folder in package_folders():
        for path in folder.glob("*.py"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            for node in ast.walk(ast.parse(path.read_text())):
                imported: list[str] = []
                if isinstance(node, ast.Import):
                    imported = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    imported = [f"{node.module}.{alias.name}" for alias in node.names]
                for target in imported:
                    floor = floor_of(target, table)
                    assert floor is None or floor <= floor_of(module, table), (
                        f"{path}:{node.lineno} imports {target} from floor {floor}; docs/design.md has the floors "
                        f"(what it does not name belongs to its package's floor)"
                    )


@pytest.mark.parametrize(
    "entry",
    [*PROJECT["project"]["scripts"].values(), *PROJECT["project"]["entry-points"]["torch_dynamo_backends"].values()],
)
def test_entry_points_resolve(entry: str) -> None:
    module, _, name = entry.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.fixture(scope="module")
def unpacked_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content, built from a copy so that the checkout stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in tracked("magi_flex", "inductor_lowering", "csrc", "pyproject.toml", "README.md", "LICENSE"):
        copy = folder / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    command = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir")
    subprocess.run((*command, str(folder / "out"), str(folder / "source")), check=True, timeout=300)
    (wheel,) = (folder / "out").glob("magi_flex-*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def test_the_wheel_has_every_module_and_native_source(unpacked_wheel: Path) -> None:
    modules = tracked("magi_flex/**.py", "inductor_lowering/**.py")
    sources = [name for name in tracked("csrc") if Path(name).suffix in (".cpp", ".c", ".h", ".cu", ".cuh")]
    wanted = [*modules, *("magi_flex/_csrc/" + name.removeprefix("csrc/") for name in sources)]
    assert modules and sources
    assert [name for name in wanted if not (unpacked_wheel / name).is_file()] == []


def test_an_installed_package_finds_its_native_sources(unpacked_wheel: Path) -> None:
    """Not the checkout's: the subprocess runs elsewhere and sees the wheel's content only."""
    code = (
        "import magi_flex; from magi_flex.kernels.sources import native_sources as native;"
        "print(magi_flex.__file__, native('cpu'), native('cuda'), sep='\\n')"
    )
    done = subprocess.run(
        (sys.executable, "-c", code),
        cwd=unpacked_wheel.parent,
        env={"PYTHONPATH": str(unpacked_wheel), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for found in done.stdout.split():
        assert Path(found).is_relative_to(unpacked_wheel) and Path(found).exists(), found
