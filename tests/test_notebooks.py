"""Every notebook runs from top to bottom in a fresh kernel, and is stored without outputs.

Notebooks hold their own claims as ``assert``; a false one fails here.
"""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from notelens.runs.serve import execute_serve
from notelens.runs.tables import render
from tests import serve_cases
from tests.test_serve_skill import lines_of

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SECONDS_PER_CELL = 600
"""A stop for a kernel that hangs, far above what a cell takes on a busy machine."""


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


def test_stored_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.id for cell in cells if cell.outputs or cell.execution_count is not None] == []
    assert any("assert " in cell.source for cell in cells), "a notebook asserts what it claims"


def executed(path: Path) -> Any:
    """The notebook with its outputs.

    Raises:
        CellExecutionError: a cell raised.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=SECONDS_PER_CELL, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the kernel's own machinery; the code runs in another process
        client.execute()
    return notebook


def test_runs_from_top_to_bottom(path: Path) -> None:
    notebook = executed(path)
    errors = [
        output
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "error"
    ]
    assert errors == []


# --- serving: without an engine, with one, and with records of either kind --------------------------------------------------

SERVING = FOLDER / "06_serving.ipynb"
BENCH, SKILLS = "serve-smollm2.json", "serve-skill-smollm2.json"


def told(notebook: Any) -> str:
    """Everything that the cells of a notebook put out, as text."""
    outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    return "\n".join(o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A benchmark and a run of skills on fake engines, as ``notelens table --format json`` writes them."""
    folder = tmp_path_factory.mktemp("records")
    arms = ["in_prefix", "hoisted", "erratum", "erratum_mid", "full"]
    done = execute_serve(serve_cases.parsed(options={"us": 45}, arms=arms), folder / "bench")
    (folder / BENCH).write_text(render(done.table, "json"), encoding="utf-8")
    lines_of(folder)
    shutil.copy(folder / "run" / "table.json", folder / SKILLS)
    return folder


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Executes the notebook with these records and this engine."""

    def execute(folder: Path, url: str | None = None) -> Any:
        monkeypatch.setenv("NOTELENS_RECORDS", str(folder))
        monkeypatch.delenv("NOTELENS_ENGINE_URL", raising=False)
        if url is not None:
            monkeypatch.setenv("NOTELENS_ENGINE_URL", url)
        return executed(SERVING)

    return execute


class TestServing:
    def test_without_engine_and_record_it_says_so(self, serving: Callable[..., Any], tmp_path: Path) -> None:
        text = told(serving(tmp_path, "http://127.0.0.1:9"))
        assert "No engine: nothing answers at http://127.0.0.1:9" in text
        assert text.count("NO RECORD") == 2 and text.count("No record, so no") == 2
        assert "REPLAY" not in text and "n=" not in text, "what was not measured has no number"

    def test_an_engine_is_asked_and_records_are_replayed(
        self, serving: Callable[..., Any], records: Path, tmp_path: Path
    ) -> None:
        with serve_cases.engine(tmp_path, us=40) as engine:
            notebook = serving(records, engine.url)
        text = told(notebook)
        assert "Live: fake, version fake-1" in text and "No engine" not in text and "NO RECORD" not in text
        rows = json.loads((records / BENCH).read_text(encoding="utf-8"))
        row = next(r for r in rows if r["metric"] == "p50_ttft_ratio" and r["method"] == "erratum")
        assert row["params"] == {"load": "below"} and f"first token comes {row['value']:.3f} [{row['lo']:.3f}, " in text
        assert "REPLAY of serve-skill-smollm2.json, model llama3" in text and "at least 0.95: fell short (0.000" in text
        assert any("image/png" in o.get("data", {}) for c in notebook.cells if c.cell_type == "code" for o in c.outputs)

    def test_a_record_that_says_otherwise_stops_it(
        self, serving: Callable[..., Any], records: Path, tmp_path: Path
    ) -> None:
        rows = json.loads((records / BENCH).read_text(encoding="utf-8"))
        for row in rows:
            if row["metric"] == "prefix_hit_rate" and row["method"] == "erratum":
                row["value"] = 0.4
        (tmp_path / BENCH).write_text(json.dumps(rows), encoding="utf-8")
        with pytest.raises(CellExecutionError, match="leave the policy reusable"):
            serving(tmp_path)
