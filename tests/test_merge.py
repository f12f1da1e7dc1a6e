"""Merging sweeps made in parts: everything that was measured once, nothing that does not belong together."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notelens.errors import ConfigError, InputError
from notelens.probes import PROBES
from notelens.runs import manifest as m
from notelens.runs import runner
from notelens.runs.files import held
from notelens.runs.merge import merge
from notelens.runs.records import FILE, read_records
from notelens.runs.sweep import run_sweep
from notelens.runs.sweep_config import load_sweep
from notelens.runs.sweep_folder import read_sweep_folder
from notelens.runs.yamlfile import parse_document
from notelens.tasks import TASKS
from tests import sweep_cases as cases


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for registry in (PROBES, TASKS):
        monkeypatch.setattr(registry, "_targets", dict(registry._targets))
    monkeypatch.setattr(runner, "default_loader", runner.default_loader)
    cases.install()
    yield


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "run.lock"
    }


def edit_manifest(cell: Path, change: Any) -> None:
    manifest = m.read_manifest(cell)
    assert manifest is not None
    change(manifest)
    m.write_manifest(cell, manifest)


def test_two_halves_are_the_whole(tmp_path: Path) -> None:
    whole = cases.sweep("[good, better, ungated]")
    run_sweep(whole, tmp_path / "whole")
    run_sweep(cases.sweep("[good]"), tmp_path / "a")
    run_sweep(cases.sweep("[better, ungated]"), tmp_path / "b")
    before = snapshot(tmp_path / "a") | snapshot(tmp_path / "b")
    done = merge(tmp_path / "out", [tmp_path / "a", tmp_path / "b"])
    assert (done.n_cells, done.n_finished, done.n_copied, done.twice) == (12, 8, 8, ())
    assert snapshot(tmp_path / "a") | snapshot(tmp_path / "b") == before
    for name in ("table.md", "table.csv", "table.tex", "table.json", "wide.md", "wide.csv", "wide.json", "marks.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    cases.LOADED.clear()
    assert run_sweep(cases.sweep("[good, better]"), tmp_path / "out").n_measured == 0 and cases.LOADED == []


def test_a_merge_can_be_repeated_and_added_to(tmp_path: Path) -> None:
    run_sweep(cases.sweep("[good]"), tmp_path / "a")
    run_sweep(cases.sweep("[better]"), tmp_path / "b")
    assert merge(tmp_path / "out", [tmp_path / "a"]).n_copied == 4
    done = merge(tmp_path / "out", [tmp_path / "b"])
    assert (done.n_cells, done.n_finished, done.n_copied) == (8, 8, 4)
    before = snapshot(tmp_path / "out")
    again = merge(tmp_path / "out", [tmp_path / "b"])
    assert again.n_copied == 0 and again.twice == tuple(f"better/{t}/seed-{s}" for t in ("low", "high") for s in (0, 1))
    assert snapshot(tmp_path / "out") == before


def test_the_part_that_finished_a_cell_wins_and_an_unfinished_one_is_continued(tmp_path: Path) -> None:
    run_sweep(cases.sweep("[good]"), tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for name, share in (("a", 3), ("b", 2)):
        cell = tmp_path / name / "cells" / "good" / "low" / "seed-0"
        raw = (cell / FILE).read_bytes()
        (cell / FILE).write_bytes(raw[: len(raw) // share])
        edit_manifest(cell, lambda manifest: manifest.update(state="running"))
    other = tmp_path / "b" / "cells" / "good" / "high" / "seed-1"
    edit_manifest(other, lambda manifest: manifest.update(state="running"))
    n_kept = len(read_records(tmp_path / "b" / "cells" / "good" / "low" / "seed-0").items)
    done = merge(tmp_path / "out", [tmp_path / "b", tmp_path / "a"])
    assert done.n_finished == 3 and n_kept > len(read_records(tmp_path / "a" / "cells/good/low/seed-0").items)
    assert len(read_records(tmp_path / "out" / "cells/good/low/seed-0").items) == n_kept
    assert read_sweep_folder(tmp_path / "out").state(read_sweep_folder(tmp_path / "a").entries[3]) == "finished"
    rows = json.loads((tmp_path / "out" / "table.json").read_text())
    assert [r["cell"] for r in rows if r["metric"] == "marked"] == ["good/low/seed-0"]
    result = run_sweep(cases.sweep("[good]"), tmp_path / "out")
    assert (result.n_read, result.n_measured) == (n_kept, 8 - n_kept)


def test_other_tasks_probes_or_cells_are_refused(tmp_path: Path) -> None:
    run_sweep(cases.sweep("[good]"), tmp_path / "a")
    changed = load_sweep(parse_document(cases.text("[better]").replace("n: 8", "n: 9"), "x.yaml"))
    run_sweep(changed, tmp_path / "b")
    with pytest.raises(ConfigError, match=r"b: was begun with another configuration \(task.n: 8 -> 9\)"):
        merge(tmp_path / "out", [tmp_path / "a", tmp_path / "b"])
    shifted = load_sweep(parse_document(cases.text("[good]").replace("0.05", "0.5"), "x.yaml"))
    run_sweep(shifted, tmp_path / "c")
    with pytest.raises(
        ConfigError, match=r"high/seed-0: has another configuration than .*\(task.params.shift: 0.05 -> 0.5\)"
    ):
        merge(tmp_path / "out", [tmp_path / "a", tmp_path / "c"])
    assert not (tmp_path / "out" / "sweep.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x: x["sessions"][0]["versions"].update(torch="9.9"),
            r"was made with other software than .*\(torch .* -> 9.9\)",
        ),
        (lambda x: x["model"].update(weights_hash="w2"), r"other model than .*\(weights_hash hash-of-good -> w2\)"),
        (lambda x: x["model"].update(dtype="bfloat16"), r"other model than .*\(dtype float32 -> bfloat16\)"),
    ],
)
def test_other_software_or_weights_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    run_sweep(load_sweep(parse_document(cases.text("[good]").replace("[0, 1]", "[0]"), "x.yaml")), tmp_path / "a")
    run_sweep(load_sweep(parse_document(cases.text("[good]").replace("[0, 1]", "[1]"), "x.yaml")), tmp_path / "b")
    edit_manifest(tmp_path / "b" / "cells" / "good" / "high" / "seed-1", change)
    with pytest.raises(ConfigError, match=message) as caught:
        merge(tmp_path / "out", [tmp_path / "a", tmp_path / "b"])
    assert "\n" not in str(caught.value)


def test_folders_that_cannot_be_merged(tmp_path: Path) -> None:
    run_sweep(cases.sweep("[good]"), tmp_path / "a")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no sweep"):
        merge(tmp_path / "out", [tmp_path / "a", tmp_path / "empty"])
    assert list((tmp_path / "empty").iterdir()) == []
    with pytest.raises(InputError, match="is given twice"):
        merge(tmp_path / "out", [tmp_path / "a", tmp_path / "." / "a"])
    with pytest.raises(InputError, match="is given twice"):
        merge(tmp_path / "a", [tmp_path / "a"])
    with pytest.raises(InputError, match="give at least one folder"):
        merge(tmp_path / "out", [])
    with held(tmp_path / "a"), pytest.raises(InputError, match="another run"):
        merge(tmp_path / "out", [tmp_path / "a"])
    with held(tmp_path / "a" / "cells/good/low/seed-0"), pytest.raises(InputError, match="another run"):
        merge(tmp_path / "out2", [tmp_path / "a"])
    assert merge(tmp_path / "out2", [tmp_path / "a"]).n_finished == 4  # the same call goes on
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(InputError, match="is not empty and holds no sweep"):
        merge(tmp_path / "full", [tmp_path / "a"])
