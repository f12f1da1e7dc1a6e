"""The paper's numbers in the package against the collection they were taken from, and what is printed from them."""

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from notelens.errors import InputError
from notelens.report import reference
from notelens.report.reference import discrepancy, reference_range, reference_rows

COLLECTION = Path(__file__).parents[1].parent / "shared" / "reference" / "paper_numbers.yaml"
needs_collection = pytest.mark.skipif(
    not COLLECTION.is_file(),
    reason="the collection of reference numbers lies outside the repository; see tests/SKIPS.md",
)

# (experiment, metric) of the collection -> ours
NAMES = {
    ("locality", "field_only"): ("locality", "field_only_recovery"),
    ("locality", "full_downstream"): ("locality", "full_downstream_recovery"),
    ("locality", "instances_with_sign_flip"): ("locality", "competence"),
    ("dissociation", "trigger_only"): ("dissociation", "trigger_only_recovery"),
    ("dissociation", "notes"): ("dissociation", "notes_recovery"),
    ("dissociation", "instances_with_sign_flip"): ("dissociation", "competence"),
    ("timing", "write_depth"): ("timing", "write_depth"),
    ("timing", "commit_depth"): ("timing", "commit_depth"),
    ("specificity", "topk"): ("specificity", "topk_recovery"),
    ("specificity", "randomk"): ("specificity", "randk_recovery"),
    ("token_stats", "delimiter_mass"): ("specificity", "aggregator_share"),
    ("injection", "full_recovery"): ("injection", "recovery"),
    ("injection", "dose_recovery"): ("injection", "recovery"),
    ("injection", "follow_rate"): ("injection", "follow_rate"),
    ("injection", "dose_follow_rate"): ("injection", "follow_rate"),
    ("injection", "flip_rate"): ("injection", "flip_rate"),
    ("cross_family", "field_only"): ("locality", "field_only_recovery"),
    ("cross_family", "full_downstream"): ("locality", "full_downstream_recovery"),
    ("cross_family", "trigger_only"): ("dissociation", "trigger_only_recovery"),
    ("cross_family", "notes"): ("dissociation", "notes_recovery"),
    ("cross_family", "top8"): ("specificity", "topk_recovery"),
    ("cross_family", "random8"): ("specificity", "randk_recovery"),
    ("cross_family", "injection_recovery"): ("injection", "recovery"),
    ("cross_family", "injection_follow_rate"): ("injection", "follow_rate"),
    ("cross_family", "write_depth"): ("timing", "write_depth"),
    ("cross_family", "commit_depth"): ("timing", "commit_depth"),
}


@cache
def collection() -> dict[str, Any]:
    return yaml.load(COLLECTION.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@cache
def sources() -> dict[str, dict[str, Any]]:
    return {entry["id"]: entry for entry in collection()["entries"]}


def rows() -> tuple[reference.ReferenceRow, ...]:
    return reference._rows()


def expected_points(entry: dict[str, Any]) -> dict[int | None, dict[str, Any]]:
    """What our rows of one entry of the collection must hold, by k (``None``: no condition)."""
    boot = tuple(entry["ci_boot"]) if entry.get("ci_boot") else None
    series, k = entry.get("series"), 8 if entry["metric"] in ("top8", "random8") else None
    if series is None:
        value = entry["value"]
        if entry["metric"] == "instances_with_sign_flip":
            value = round(value / entry["n"], 3)
        released = tuple(entry["ci"]) if entry["ci"] else None
        return {k: {"value": value, "released": released, "printed": entry.get("paper_value"), "resampled": boot}}
    bounds = list(zip(series["lo"], series["hi"], strict=True)) if "lo" in series else [None] * len(series["k"])
    printed = series.get("paper") or [None] * len(series["k"])
    return {
        k: {
            "value": series["y"][i],
            "released": bounds[i],
            "printed": printed[i],
            "resampled": boot if k == entry["params"]["at_k"] else None,
        }
        for i, k in enumerate(series["k"])
    }


@needs_collection
class TestAgainstTheCollection:
    def test_every_entry_of_the_needed_kinds_is_there(self):
        wanted = {id for id, e in sources().items() if (e["experiment"], e["metric"]) in NAMES}
        assert {row.source for row in rows()} == wanted

    def test_every_number_is_that_of_its_source(self):
        for source in {row.source for row in rows()}:
            entry, ours = sources()[source], [row for row in rows() if row.source == source]
            points = expected_points(entry)
            assert {row.params.get("k") for row in ours} == set(points), source
            for row in ours:
                got = {name: getattr(row, name) for name in ("value", "released", "printed", "resampled")}
                assert got == points[row.params.get("k")], (source, row.params)

    def test_names_records_and_discrepancies_are_those_of_their_source(self):
        methods = collection()["ci_methods"]
        stride, resampled = methods["stride_index"], methods["bootstrap_with_replacement"]
        for row in rows():
            entry = sources()[row.source]
            assert (row.experiment, row.metric) == NAMES[entry["experiment"], entry["metric"]]
            assert (row.model, row.n, row.record) == (entry["model"], entry["n"], entry["source_record"])
            assert row.ref == entry["paper_ref"]
            assert row.discrepancies == tuple(entry.get("discrepancy", ()))
            assert row.model_ids[0] == collection()["models"][row.model]
            if row.released is not None:
                stem = Path(row.record).stem
                names = stride if row.released_method == "stride_index" else resampled
                assert any(stem.startswith(name) for name in names), row.record

    def test_unusable_rows_are_those_whose_identity_check_fails(self):
        failed = {
            e["model"]
            for e in sources().values()
            if (e["experiment"], e["metric"]) == ("locality", "full_downstream") and abs(e["value"] - 1) > 0.02
        }
        assert {row.model for row in rows() if row.unusable} == failed


class TestLookUp:
    def test_rows_by_condition(self):
        assert [row.params["k"] for row in reference_rows("specificity", "topk_recovery", model="Qwen/Qwen3-8B")] == [
            1, 2, 4, 8, 16, 32, 64,
        ]  # fmt: skip
        (row,) = reference_rows("specificity", "topk_recovery", {"k": 8, "draws": 20}, "qwen/qwen3-8b")
        assert (row.value, row.printed, row.n, row.resampled) == (0.78, 0.78, 9, (0.697, 0.861))
        assert row.released_method == "stride_index"
        assert reference_rows("specificity", "topk_recovery", {"k": 3}) == []

    def test_rows_without_a_condition_do_not_mix_with_the_dose_curve(self):
        (full,) = reference_rows("injection", "recovery", {}, "Qwen/Qwen3-8B")
        (dose,) = reference_rows("injection", "recovery", {"k": 8}, "Qwen/Qwen3-8B")
        assert (full.value, dose.value) == (0.99, 0.615)
        assert reference_rows("injection", "recovery", {"k": None}, "Qwen/Qwen3-8B") == [full]

    def test_conditions_that_the_paper_does_not_vary_are_ignored(self):
        with_k = reference_rows("specificity", "aggregator_share", {"k": 8})
        assert with_k == reference_rows("specificity", "aggregator_share")
        assert len(with_k) == 3

    def test_a_measured_model_gets_its_own_value_under_every_id(self):
        for name in ("meta-llama/Llama-3.1-8B-Instruct", "unsloth/meta-llama-3.1-8b-instruct", "llama31_8b"):
            assert reference_range("specificity", "topk_recovery", {"k": 8}, name) == "0.793"
        both = reference_range("locality", "field_only_recovery", model="mistralai/Mistral-7B-Instruct-v0.3")
        assert both == "0.004 / 0.137"

    def test_another_model_gets_the_range(self):
        assert reference_range("dissociation", "trigger_only_recovery", {}, "smollm2") == "-0.007..0.007 (5 models)"
        assert reference_range("locality", "full_downstream_recovery") == "1.0 (9 models, 2 unusable left out)"

    def test_what_the_paper_does_not_report_is_empty(self):
        assert reference_rows("placebo", "recovery") == []
        assert reference_range("placebo", "recovery") == ""
        assert reference_range("timing", "shuffled_accuracy", {}, "Qwen/Qwen3-8B") == ""

    def test_discrepancies_have_text(self):
        for name in {d for row in rows() for d in row.discrepancies}:
            assert discrepancy(name).endswith(".")
        with pytest.raises(InputError, match="D01"):
            discrepancy("D99")

    def test_rows_cannot_be_changed(self):
        row = rows()[0]
        with pytest.raises(TypeError):
            row.params["k"] = 1  # type: ignore[index]  # on purpose

    def test_a_mistyped_file_is_refused(self):
        file = yaml.safe_load(Path(reference.__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
        file["entries"][0]["vaule"] = 1.0
        with pytest.raises(ValueError, match="vaule"):
            reference._File.model_validate(file)


def test_import_does_not_load_torch():
    code = (
        "import sys, notelens.report.reference as r; r.reference_range('timing', 'write_depth'); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
