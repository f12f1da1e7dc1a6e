"""The diagnostic as an experiment: two decoders mixed in one run, fitted on one half, judged on the other, and across runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.diagnostic import (
    CALIBRATION,
    HELD_OUT,
    DiagnosticConfig,
    DiagnosticExperiment,
    across,
    command,
    mixed_cases,
    other_values,
)
from experiments.edit_cases import Case, instance_case
from experiments.edit_harness import Stage, run
from notelens.errors import ConfigError
from notelens.report.calibration import draw_calibration, select_reliability
from notelens.runs.records import read_records
from notelens.zoo.organisms import organism_tokenizer
from tests.tiny import FORMS, broken_direct, tiny_instance, tiny_model

CONFIGS = Path(__file__).parents[1] / "experiments" / "configs"
CONFIG = DiagnosticConfig(name="d", model="tiny", task="tiny", n=4, sources={"notes": {}, "direct": {}})


class Either:
    """Runs a case on the decoder that its source names, so that one run holds fields of both kinds."""

    def __init__(self) -> None:
        self.experiment = DiagnosticExperiment()
        self.name, self.stages, self.aggregate = "diagnostic", self.experiment.stages, self.experiment.aggregate

    def measure(self, model: Any, config: Any, stage: Stage, case: Case) -> Any:
        reader = broken_direct() if case.meta["source"] == "direct" else tiny_model()
        return self.experiment.measure(reader, config, stage, case)


def source(model: Any, config: Any, stage: Stage) -> list[Case]:
    found: list[Case] = []
    for part, families in ((CALIBRATION, ("parcel", "visit")), (HELD_OUT, ("claim", "loan", "seat"))):
        for name in config.sources:
            for family in families:
                for form in FORMS:
                    case = instance_case(tiny_instance(form, family))
                    meta = {"part": part, "source": name, "others": ("w1 w2", "f2")}  # the first has another length
                    found.append(replace(case, id=f"{part}/{name}/{case.id}", meta=meta))
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("diagnostic")
    lines = run(Either(), CONFIG, folder, tiny_model(), source=source)
    return folder, {(r["metric"], r["method"], r["params"].get("bin")): r for r in lines}


def test_held_out_prompts_are_ranked_right(finished: tuple[Path, dict[Any, Any]]) -> None:
    _, found = finished
    for level in ("one_token", "mapped"):
        line = found["rank_correlation", level, None]
        assert line["value"] > 0.8 and line["lo"] is not None and line["n"] == 24 and line["n_clusters"] == 3
        assert line["params"]["n_calibration"] == 16 and line["fitted"]["n"] == 16
        assert found["needs_more_accuracy", level, None]["value"] == 1.0
        assert found["refresh_suffices", level, None]["value"] == 0.5
        assert (
            found["absolute_error", level, None]["value"] < 0.1 < found["absolute_error_of_mean", level, None]["value"]
        )
    assert found["rank_correlation_of_feature", "note_mass", None]["value"] < -0.8
    low, high = (found["calibration", "mapped", b] for b in ("0.0-0.2", "0.8-1.0"))
    assert low["n"] == high["n"] == 12 and low["predicted"] < 0.2 < 0.8 < high["predicted"]
    assert low["value"] == pytest.approx(0.0, abs=1e-3) and high["value"] == pytest.approx(1.0, abs=1e-3)
    assert found["competence", "full_prefill", None]["value"] == 1.0


def test_the_reference_is_never_the_value_that_is_set(finished: tuple[Path, dict[Any, Any]]) -> None:
    rows = [r for rows in read_records(finished[0]).items.values() for r in rows if "signs" in r]
    assert len(rows) == 40 and {r["signs"]["reference"] for r in rows} == {"f2"}
    assert all(r["sign_tokens"] >= r["signs"]["tokens"] > 0 for r in rows)


def test_one_model_s_diagnostic_is_judged_on_another(
    finished: tuple[Path, dict[Any, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, own = finished
    other = CONFIG.model_copy(update={"model": "other"})
    run(Either(), other, tmp_path / "b", tiny_model(), source=source)
    lines = across(folder, tmp_path / "b")
    found = {(r["metric"], r["method"]): r for r in lines if r["metric"] != "calibration"}
    line = found["rank_correlation", "mapped"]
    assert line["params"]["fitted_on"] == "tiny" and line["model"] == "other"
    assert line["value"] == own["rank_correlation", "mapped", None]["value"]
    command(["--across", str(folder), str(tmp_path / "b")])
    assert "rank_correlation" in capsys.readouterr().out
    written = (tmp_path / "b" / "across-tiny.jsonl").read_text().splitlines()
    assert [json.loads(x)["metric"] for x in written] == [x["metric"] for x in lines]
    with pytest.raises(ConfigError, match="no finished run"):
        across(folder, tmp_path)


def test_the_figure_shows_what_the_lines_say(finished: tuple[Path, dict[Any, Any]], tmp_path: Path) -> None:
    folder, found = finished
    records = read_records(folder)
    (mapped,) = [x for x in select_reliability(records.all_aggregates()) if x.level == "mapped"]
    assert mapped.n == (12, 12) and mapped.correlation == found["rank_correlation", "mapped", None]["value"]
    figure = draw_calibration(records)
    assert any("Spearman" in t.get_text() for legend in figure.legends for t in legend.get_texts())
    empty = draw_calibration(read_records(tmp_path))
    assert any("no calibration was measured" in t.get_text() for t in empty.texts)


def test_too_few_calibration_prompts_give_an_empty_line(tmp_path: Path) -> None:
    def few(model: Any, config: Any, stage: Stage) -> list[Case]:
        return [c for c in source(model, config, stage) if c.meta["part"] == HELD_OUT][:4]

    lines = run(Either(), CONFIG, tmp_path, tiny_model(), source=few)
    empty = [r for r in lines if r["metric"] == "rank_correlation"]
    assert len(empty) == 3 and all(r["value"] is None and r["flags"] for r in empty)


def test_prompts_are_mixed_and_kept_apart(smollm2_tokenizer: Any) -> None:
    class Model:
        tokenizer: Any = organism_tokenizer()

    config = DiagnosticConfig.read(CONFIGS / "diagnostic-organisms.yaml", n=3)
    model: Any = Model()
    found = mixed_cases(model, config, Stage("all", {}, {}))
    assert len(found) == len({c.id for c in found}) == 2 * 5 * 3
    for case in found:
        assert case.meta["others"] and not set(case.meta["others"]) & set(case.values)
    parts = {p: {c.values for c in found if c.meta["part"] == p} for p in (CALIBRATION, HELD_OUT)}
    assert parts[CALIBRATION] and parts[HELD_OUT]
    model.tokenizer = smollm2_tokenizer
    real = DiagnosticConfig.read(CONFIGS / "diagnostic-smollm2.yaml", n=2)
    cases = mixed_cases(model, real, Stage("all", {}, {}))
    families = {p: {c.family for c in cases if c.meta["part"] == p} for p in (CALIBRATION, HELD_OUT)}
    assert not families[CALIBRATION] & families[HELD_OUT] and len(cases) == 12
    assert all(sorted(other_values("gated", c)) == sorted(c.meta["others"]) for c in cases[:2])
    with pytest.raises(ConfigError, match="both from split 'eval'"):
        mixed_cases(model, real.model_copy(update={"calibration_split": "eval"}), Stage("all", {}, {}))
