"""The blinded false-effect check: controls come out clean, whatever is passed off as a control is found."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import notelens
from experiments.false_effects import (
    Arm,
    FalseEffects,
    Metric,
    Rule,
    ShuffledDonors,
    codes,
    judge,
    main,
    make_model,
    run,
    show,
)
from notelens.errors import ConfigError, TaskError
from notelens.probes.injection import Injection
from notelens.probes.locality import Locality
from notelens.tasks.organism import OrganismLanguage
from tests.contracts.models import random_hf
from tests.tiny import broken_direct, tiny_instances, tiny_model, wrapped

FORMS = ("polarity", "swapped", "negated")
METRICS = (
    Metric(experiment="locality", metric="full_downstream_recovery"),
    Metric(experiment="dissociation", metric="notes_recovery"),
    Metric(experiment="specificity", metric="topk_recovery", params={"k": 8, "ranking": "split_half"}),
    Metric(experiment="injection", metric="follow_rate"),
)
N = 12
SHUFFLED = Arm(name="shuffled", model="tiny", donors="shuffled", expect="no effect")
NOTES_FREE = Arm(name="notes-free", model="direct", expect="no effect")
RANDOM = Arm(name="random", model="random", expect="no effect")
REAL = Arm(name="real", model="tiny", expect="effect")


def check(*arms: Arm, bound: float = 0.15, seed: int = 0) -> FalseEffects:
    return FalseEffects(name="t", n=N, seed=seed, task="tiny", arms=arms, rule=Rule(bound=bound, metrics=METRICS))


def make(arm: Arm) -> Any:
    """The tiny decoder that takes notes, one whose decision reads the field, and random weights."""
    if arm.model == "random":
        torch.manual_seed(3)
        return wrapped(random_hf("llama"), "random", gate=False)
    return tiny_model() if arm.model == "tiny" else broken_direct()


FAKE = REAL.model_copy(update={"name": "fake", "expect": "no effect"})
"""The model that takes notes, passed off as a control."""
CONFIG = check(SHUFFLED, NOTES_FREE, RANDOM, REAL, FAKE)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, list[str]]:
    """Rows by arm, the folder, what was said on the way."""
    said: list[str] = []
    folder = tmp_path_factory.mktemp("blind")
    rows = run(CONFIG, folder, maker=make, instances=tiny_instances(N, FORMS), tell=said.append)
    return {row["arm"]: row for row in rows}, folder, said


def test_controls_show_nothing_and_the_real_model_does(done: tuple[dict[str, Any], Path, list[str]]) -> None:
    rows, _, said = done
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "shuffled": "no effect", "notes-free": "no effect", "random": "no effect", "real": "effect", "fake": "effect",
    }  # fmt: skip
    tables = {name: {x["metric"]: x for x in row["table"]} for name, row in rows.items()}
    assert tables["real"]["full_downstream_recovery"]["value"] == pytest.approx(1.0, abs=1e-3)
    assert tables["real"]["follow_rate"]["value"] == 1.0
    # the same donors, handed to the other pair: as many rows, nothing moves
    for metric in ("full_downstream_recovery", "notes_recovery", "topk_recovery"):
        assert tables["shuffled"][metric]["value"] == pytest.approx(0.0, abs=1e-3)
        assert tables["shuffled"][metric]["n"] == tables["real"][metric]["n"] > N
    assert tables["shuffled"]["follow_rate"]["value"] == 0.0
    assert tables["notes-free"]["full_downstream_recovery"]["value"] == pytest.approx(0.0, abs=1e-3)
    assert all(line["n"] == 0 and "does not decide this task" in line["reason"] for line in tables["random"].values())
    assert all(" measured" in text and not any(name in text for name in rows) for text in said)  # code names only


def test_a_real_model_passed_off_as_a_control_is_flagged(done: tuple[dict[str, Any], Path, list[str]]) -> None:
    rows, _, _ = done
    assert [name for name, row in rows.items() if row["flagged"]] == ["fake"]
    assert show(list(rows.values())).count("FLAGGED") == 1


def test_verdicts_are_on_disk_under_code_names_before_the_key(
    done: tuple[dict[str, Any], Path, list[str]],
) -> None:
    rows, folder, _ = done
    text = (folder / "blind.json").read_text()
    blind = json.loads(text)
    assert not any(word in json.dumps(blind["arms"]) for word in ("shuffled", "real", "fake", "tiny", "expect"))
    assert {a["code"]: a["verdict"] for a in blind["arms"]} == {row["code"]: row["verdict"] for row in rows.values()}
    unblinded = json.loads((folder / "unblinded.json").read_text())
    assert unblinded["blind_sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert {row["arm"]: row["code"] for row in unblinded["arms"]} == codes(CONFIG)


def test_code_names_do_not_follow_the_order_of_the_file() -> None:
    orders = {tuple(codes(check(SHUFFLED, NOTES_FREE, RANDOM, REAL, seed=s)).values()) for s in range(30)}
    assert len(orders) > 10


def line(low: float | None, high: float | None, n: int = 9) -> dict[str, Any]:
    return {"lo": low, "hi": high, "n": n}


@pytest.mark.parametrize(
    ("lines", "verdict"),
    [
        ([line(-0.05, 0.05)], "no effect"),
        ([line(0.2, 0.4)], "effect"),
        ([line(-0.4, -0.2)], "effect"),
        ([line(0.05, 0.2)], "undecided"),
        ([line(-0.3, 0.3)], "undecided"),
        ([line(None, None, 0)], "no effect"),
        ([line(-0.05, 0.05), line(0.5, 0.6)], "effect"),
        ([line(-0.05, 0.05), line(-0.3, 0.3)], "undecided"),
        ([line(-0.05, 0.1)], "undecided"),
    ],
)
def test_the_rule_reads_bounds_only(lines: list[dict[str, Any]], verdict: str) -> None:
    assert judge(lines, Rule(bound=0.1, metrics=METRICS)) == verdict


def test_shuffling_needs_two_versions_of_the_rule() -> None:
    with pytest.raises(TaskError, match=r"form two_clause.*polarity, swapped and negated"):
        ShuffledDonors(tiny_model(), tiny_instances(2, ("two_clause",)))


@pytest.mark.parametrize("probe", [Locality(), Injection()], ids=lambda p: p.name)
def test_a_store_that_gives_the_real_donor_changes_no_row(probe: Any) -> None:
    """The door through which shuffled donors come in is closed by default."""
    from notelens.context import ContextStore

    class Explicit(ContextStore):
        def donor(self, recipient: Any, prompt: Any) -> Any:
            return self.get(prompt).cache

    instances = tiny_instances(4, FORMS)
    found = [probe.run(s(tiny_model()), instances).rows for s in (ContextStore, Explicit)]
    assert found[0] == found[1]
    assert probe.run(ShuffledDonors(tiny_model(), instances), instances).rows != found[0]


GOOD = """
name: x
n: 4
task: organism
arms:
  - {name: a, model: m, expect: effect}
  - {name: b, model: m, donors: shuffled, expect: no effect}
rule: {bound: 0.1, metrics: [{experiment: locality, metric: flip_rate}]}
"""


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("name: b", "name: a", "two arms have one name"),
        ("experiment: locality", "experiment: localty", "no probe 'localty'; did you mean 'locality'"),
        ("bound: 0.1", "bound: 0", "rule.bound"),
        ("donors: shuffled", "donors: mixed", "arms.1.donors"),
        ("n: 4", "n: 4\nm: 4", "m: Extra inputs"),
    ],
)
def test_a_bad_configuration_says_what_is_wrong(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError, match=says):
        FalseEffects.read(path)


def test_a_line_that_no_table_has_is_refused(tmp_path: Path) -> None:
    rule = Rule(bound=0.1, metrics=(Metric(experiment="locality", metric="full_downstream_recoverx"),))
    config = check(SHUFFLED, REAL).model_copy(update={"rule": rule})
    with pytest.raises(ConfigError, match="locality has no line full_downstream_recoverx"):
        run(config, tmp_path, maker=make, instances=tiny_instances(4, FORMS))


def test_the_shipped_configuration_is_valid() -> None:
    found = FalseEffects.read(Path(__file__).parents[1] / "experiments/configs/false-effects.yaml")
    assert found.n >= 48 and {a.expect for a in found.arms} == {"effect", "no effect"}
    assert any(a.donors == "shuffled" for a in found.arms) and any(a.model.startswith("random:") for a in found.arms)


def test_random_weights_read_the_same_prompts_as_the_organisms() -> None:
    found = FalseEffects.read(Path(__file__).parents[1] / "experiments/configs/false-effects.yaml")
    blank = make_model(next(a for a in found.arms if a.model.startswith("random:")))
    trained = notelens.load("organism-qwen3")
    language = OrganismLanguage(**found.params)
    first, second = (language.instances(m.tokenizer, 1, found.seed)[0].cells[0, 0] for m in (blank, trained))
    assert first == second
    assert [p.shape for p in blank.hf.parameters()] == [p.shape for p in trained.hf.parameters()]
    assert not torch.equal(next(blank.hf.parameters()), next(trained.hf.parameters()))


def test_the_exit_code_is_one_where_an_arm_is_flagged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from experiments import false_effects

    path = tmp_path / "x.yaml"
    path.write_text(GOOD)
    rows = [{"arm": "a", "code": "arm-A", "model": "m", "donors": "real", "verdict": "no effect", "expect": "effect",
             "flagged": True, "table": [{"experiment": "locality", "metric": "flip_rate", "params": {}, "n": 0}]}]  # fmt: skip
    monkeypatch.setattr(false_effects, "run", lambda *_, **__: rows)
    assert main([str(path), "--out", str(tmp_path)]) == 1
    assert "| arm-A | a | m | real | not measurable | no effect | effect | FLAGGED |" in capsys.readouterr().out
