"""What keeps the package readable: imports go down, imports are cheap, files are short, the library is silent."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 400
IMPORT_SECONDS = 1.0
"""``import notelens`` in a fresh process, beyond the start of the interpreter."""

LIBRARY = sorted((ROOT / "notelens").rglob("*.py"))
EXPERIMENTS = sorted((ROOT / "experiments").rglob("*.py"))
FIGURES = sorted((ROOT / "paper_figures").rglob("*.py"))


def relative(paths: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in paths]


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of every imported module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module


def calls(tree: ast.AST, name: str) -> list[int]:
    return [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == name]


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r}); {code}"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.fixture
def package_copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "notelens", tmp_path / "notelens", ignore=lambda _, names: [n for n in names if n == "data"])
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


class TestImports:
    def test_imports_go_down_only(self):
        done = lint_imports(ROOT)
        assert done.returncode == 0, done.stdout + done.stderr

    @pytest.mark.parametrize(
        ("file", "line"),
        [
            ("errors.py", "import notelens.registry"),
            ("cache/kv.py", "from notelens.models.base import NoteModel"),
            ("models/base.py", "def f():\n    from notelens.models.gate import run_gate"),
            ("intervene/engine.py", "import notelens.models.gate"),
            ("stats/rates.py", "def f():\n    from notelens.probes import PROBES"),
            ("report/reference.py", "import notelens.models"),
        ],
    )
    def test_an_import_that_goes_up_is_found(self, package_copy, file, line):
        with (package_copy / "notelens" / file).open("a", encoding="utf-8") as handle:
            handle.write(f"\n{line}\n")
        done = lint_imports(package_copy)
        assert done.returncode != 0
        assert "is not allowed to import" in done.stdout, done.stdout + done.stderr

    @pytest.mark.parametrize("path", LIBRARY + EXPERIMENTS, ids=relative(LIBRARY + EXPERIMENTS))
    def test_nothing_imports_tests_and_the_library_imports_no_experiment(self, path):
        forbidden = {"tests"} | ({"experiments", "paper_figures"} if path in LIBRARY else set())
        found = [
            (line, name) for line, name in imported(ast.parse(path.read_text())) if name.split(".")[0] in forbidden
        ]
        assert found == []

    def test_figures_never_import_torch(self):
        found = [
            (path.name, line)
            for path in FIGURES
            for line, name in imported(ast.parse(path.read_text()))
            if name.split(".")[0] in ("torch", "transformers", "transformer_lens")
        ]
        assert found == []


class TestCost:
    def test_import_is_cheap_and_leaves_torch_alone(self):
        """The fastest of three processes: others may be busy on this machine."""
        code = (
            "import sys, time; t = time.perf_counter(); import notelens; t = time.perf_counter() - t; "
            "print(t, sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
        )
        runs = [
            subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)
        ]
        seconds, modules = zip(*(run.stdout.strip().split(" ", 1) for run in runs), strict=True)
        assert set(modules) == {"[]"}
        assert min(map(float, seconds)) < IMPORT_SECONDS


class TestFiles:
    @pytest.mark.parametrize("path", LIBRARY + EXPERIMENTS, ids=relative(LIBRARY + EXPERIMENTS))
    def test_no_file_is_longer_than_two_ideas(self, path):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES

    @pytest.mark.parametrize("path", LIBRARY, ids=relative(LIBRARY))
    def test_the_library_prints_nothing(self, path):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert [*calls(tree, "print"), *calls(tree, "sys.stdout.write")] == []

    @pytest.mark.parametrize("path", LIBRARY, ids=relative(LIBRARY))
    def test_the_environment_is_read_by_runs_only(self, path):
        if "runs" in path.relative_to(ROOT).parts:
            return
        names = {ast.unparse(n) for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
        assert not names & {"os.environ", "os.getenv"}

    def test_the_checks_see_what_they_look_for(self):
        tree = ast.parse("def f():\n    print(1)\nimport tests.tiny\nfrom experiments import x")
        assert calls(tree, "print") == [2]
        assert sorted(imported(tree)) == [(3, "tests.tiny"), (4, "experiments")]

    def test_every_package_has_an_init(self):
        folders = {path.parent for path in LIBRARY}
        assert [f for f in sorted(folders) if not (f / "__init__.py").is_file()] == []


def test_every_skip_is_listed():
    pattern = re.compile(r"pytest\.(skip|importorskip)\(|mark\.skip(if)?\(")
    files = {p.relative_to(ROOT / "tests").as_posix() for p in (ROOT / "tests").rglob("*.py") if p != Path(__file__)}
    skipping = {name for name in files if pattern.search((ROOT / "tests" / name).read_text(encoding="utf-8"))}
    listed = set(re.findall(r"^\| `([^`]+)`", (ROOT / "tests" / "SKIPS.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == skipping
