"""Numbers quoted in the documentation are those of committed tables; and the checker notices when they are not."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def load_checker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_claims", ROOT / "paper_figures" / "check_claims.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pydantic looks annotations up there
    spec.loader.exec_module(module)
    return module


checker = load_checker()
ROW = {"experiment": "locality", "metric": "field_only_recovery", "method": "both", "model": "m", "params": {}}


def test_every_quoted_number_holds() -> None:
    problems = {claim.id: checker.problem(claim) for claim in checker.load_claims()}
    assert {name: text for name, text in problems.items() if text is not None} == {}


def test_tables_in_records_have_the_promised_columns() -> None:
    needed = {
        "experiment",
        "metric",
        "model",
        "method",
        "params",
        "value",
        "lo",
        "hi",
        "n",
        "n_excluded",
        "swap",
        "unit",
    }
    for path in sorted((ROOT / "paper_figures" / "records").glob("*.json")):
        rows = json.loads(path.read_text(encoding="utf-8"))
        assert rows and all(needed <= set(row) for row in rows), path.name


def claim(**changes: object) -> object:
    entry: dict[str, object] = {
        "id": "a",
        "file": "README.md",
        "text": "field only -0.002",
        "records": "table.json",
        "row": {"experiment": "locality", "metric": "field_only_recovery"},
        "value": -0.002,
        "tolerance": 0.0005,
    }
    return checker.Claim.model_validate(entry | changes)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "README.md").write_text("Measured: field only\n-0.002, as expected.", encoding="utf-8")
    rows = [
        ROW | {"value": -0.0021, "lo": -0.01, "hi": 0.006, "n": 24},
        ROW | {"method": "noising", "value": 0.4, "n": 12},
        ROW | {"params": {"form": "polarity"}, "value": 0.1, "n": 6},
        ROW | {"metric": "undefined", "value": None, "n": 0},
    ]
    (tmp_path / "table.json").write_text(json.dumps(rows), encoding="utf-8")
    return tmp_path


def test_a_true_claim_holds(root: Path) -> None:
    assert checker.problem(claim(), root) is None
    assert checker.problem(claim(column="n", value=24, tolerance=0), root) is None
    row = {"experiment": "locality", "metric": "field_only_recovery", "params": {"form": "polarity"}}
    assert checker.problem(claim(row=row, value=0.1), root) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"value": 0.002}, "quoted 0.002, but table.json has -0.0021"),
        ({"text": "field only -0.003"}, "does not contain"),
        ({"file": "GONE.md"}, "GONE.md does not exist"),
        ({"records": "gone.json"}, "gone.json does not exist"),
        ({"row": {"experiment": "locality", "metric": "other"}}, "0 rows"),
        ({"row": {"experiment": "locality", "metric": "field_only_recovery", "model": "x"}}, "0 rows"),
        ({"row": {"experiment": "locality", "metric": "undefined"}}, "value is None"),
    ],
)
def test_a_false_claim_is_noticed(root: Path, changes: dict[str, object], says: str) -> None:
    found = checker.problem(claim(**changes), root)
    assert found is not None and says in found


def test_malformed_claims_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "claims.yaml"
    good = "{id: a, file: f, text: t, records: r, row: {experiment: e, metric: m}, value: 1, tolerance: 0}"
    path.write_text(f"claims:\n  - {good}\n  - {good}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="id 'a' is used twice"):
        checker.load_claims(path)
    path.write_text(f"claims:\n  - {good.replace('value', 'valeu')}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"claim 1: (value|valeu)"):
        checker.load_claims(path)
