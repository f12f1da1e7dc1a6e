"""Sweep configurations: every mistake is one sentence with its line; every cell is the configuration of an ordinary run."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notelens.errors import ConfigError
from notelens.probes import PROBES
from notelens.runs.config import config_hash, read_config, validate
from notelens.runs.plan import plan
from notelens.runs.sweep_config import MAX_CELLS, Sweep, is_sweep, load_sweep
from notelens.runs.yamlfile import parse_document
from notelens.tasks import TASKS

CONFIGS = Path(__file__).parents[1] / "configs"
SHIPPED = [p for p in sorted(CONFIGS.rglob("*.yaml")) if p.parent.name != "bench" and is_sweep(read_config(p))]
GOOD = """\
name: demo
description: words
task:
  name: gated
  n: 12
  params: {split: eval}
sweep:
  models:
    - smollm2
    - name: Qwen/Qwen3-4B
      dtype: bfloat16
      task: {n: 5, params: {length: 100}}
      probes:
        - name: placebo
  tasks:
    - {label: plain, params: {rendering: plain}}
    - label: long
      n: 20
      params:
        length: 300
  seeds: [0, 7]
probes:
  - name: locality
  - name: specificity
    params: {ks: [1, 8]}
figures: false
"""


def read(text: str) -> Sweep:
    return load_sweep(parse_document(text, "x.yaml"))


def error(old: str, new: str) -> str:
    assert old in GOOD
    with pytest.raises(ConfigError) as caught:
        for cell in read(GOOD.replace(old, new, 1)).cells:
            plan(cell.config, cell.document)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_grid_is_every_combination_with_models_outermost() -> None:
    keys = [cell.key for cell in read(GOOD).cells]
    tail = [f"{task}/seed-{seed}" for task in ("plain", "long") for seed in (0, 7)]
    assert keys == [f"{model}/{rest}" for model in ("smollm2", "Qwen_Qwen3-4B") for rest in tail]


def test_a_cell_is_the_configuration_of_an_ordinary_run() -> None:
    alone = """\
name: other
model: {name: Qwen/Qwen3-4B, dtype: bfloat16}
task: {name: gated, n: 20, params: {split: eval, length: 300}}
probes: [{name: placebo}]
seed: 7
"""
    cell = next(c for c in read(GOOD).cells if c.key == "Qwen_Qwen3-4B/long/seed-7")
    assert config_hash(cell.config) == config_hash(validate(parse_document(alone, "y.yaml")))
    assert cell.config.name == "demo-Qwen_Qwen3-4B-long-seed-7" and cell.config.figures is False
    first = read(GOOD).cells[0].config
    assert first.task.n == 12 and first.task.params == {"split": "eval", "rendering": "plain"}
    assert [p.name for p in first.probes] == ["locality", "specificity"]
    mixed = next(c for c in read(GOOD).cells if c.key == "Qwen_Qwen3-4B/plain/seed-0").config.task
    assert mixed.n == 5 and mixed.params == {"split": "eval", "length": 100, "rendering": "plain"}


def test_axes_that_are_not_listed_come_from_the_rest_of_the_file() -> None:
    text = "name: a\nmodel: {name: smollm2}\ntask: {name: gated, n: 3}\nsweep: {seeds: [1, 2]}\nprobes: [{name: locality}]\n"
    assert [c.key for c in read(text).cells] == ["smollm2/gated/seed-1", "smollm2/gated/seed-2"]
    assert all(c.config.task_for(c.config.probes[0]).seed == c.seed for c in read(text).cells)
    text = text.replace("sweep: {seeds: [1, 2]}", "seed: 4\nsweep: {tasks: [{label: x}]}")
    assert [c.key for c in read(text).cells] == ["smollm2/x/seed-4"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  seeds: [0, 7]", "  sedes: [0, 7]", r"x.yaml:21: unknown key 'sedes'; did you mean 'seeds'"),
        ("dtype: bfloat16", "dtyp: bfloat16", r"x.yaml:11: unknown key 'dtyp'; did you mean 'dtype'"),
        ("dtype: bfloat16", "dtype: bfloat61", r"x.yaml:11: 'sweep.models.1.dtype' is 'bfloat61'; did you mean 'bfloat16'"),
        ("    - label: long", "    - labl: long", r"x.yaml:17: unknown key 'labl'; did you mean 'label'"),
        ("    - label: long\n      n: 20", "    - n: 20", r"x.yaml:17: 'sweep.tasks.1.label' is missing"),
        ("label: long", "label: a/b", r"x.yaml:17: 'sweep.tasks.1.label' must be at most 100 letters"),
        ("label: long", "label: Plain", r"x.yaml:7: task 'Plain' is listed twice in 'sweep'; give each its own 'label'"),
        ("    - smollm2", "    - Qwen/Qwen3-4B", r"x.yaml:7: model 'Qwen_Qwen3-4B' is listed twice"),
        ("    - smollm2", "    - 3", r"x.yaml:9: 'sweep.models.0' must be a mapping of keys to values, not 3"),
        ("    - smollm2", "    - ''", r"x.yaml:9: 'sweep.models.0.name' must be the name of an embedded model"),
        ("seeds: [0, 7]", "seeds: [7, 7]", r"x.yaml:7: seed '7' is listed twice in 'sweep'; remove one"),
        ("seeds: [0, 7]", "seeds: []", r"x.yaml:21: 'sweep.seeds' must not be empty"),
        ("seeds: [0, 7]", "seeds: [0, -1]", r"x.yaml:21: 'sweep.seeds.1' must be at least 0, not -1"),
        ("seeds: [0, 7]", "seeds: 7", r"x.yaml:21: 'sweep.seeds' must be a list, not 7"),
        ("{split: eval}\nsweep", "{splt: eval}\nsweep", r"x.yaml:6: .*no parameter 'splt'; did you mean 'split'"),
        ("        length: 300", "        lenth: 300", r"x.yaml:20: .*no parameter 'lenth'; did you mean 'length'"),
        ("params: {length: 100}", "params: {lngth: 100}", r"x.yaml:12: task 'gated' has no parameter 'lngth'"),
        ("        - name: placebo", "        - name: placbo", r"x.yaml:14: unknown probe 'placbo'; did you mean 'placebo'"),
        ("    params: {ks: [1, 8]}", "    params: {kss: [1, 8]}", r"x.yaml:25: probe 'specificity' has no parameter 'kss'"),
        ("      n: 20", "      name: gatd", r"x.yaml:18: unknown task 'gatd'; did you mean 'gated'"),
        ("      n: 20", "      seed: 1", r"the task has a seed of its own, so every cell would measure the same instances"),
        ("  n: 12", "  n: 12\n  seed: 3", r"remove 'task.seed' or 'sweep.seeds'"),
        ("figures: false", "seed: 3", r"the seed is given twice; write either 'seed' or 'sweep.seeds'"),
        ("figures: false", "model: {name: smollm2}", r"the model is given twice; write either 'model' or 'sweep.models'"),
        ("figures: false", "figurs: false", r"x.yaml:26: unknown key 'figurs'; did you mean 'figures'"),
        ("params: {rendering: plain}", "params: {}", None),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence_with_their_line(old: str, new: str, message: str | None) -> None:
    if message is None:
        assert len(read(GOOD.replace(old, new, 1)).cells) == 8
        return
    found = error(old, new)
    assert re.search(message, found), found


def test_a_sweep_that_varies_nothing_or_has_no_model() -> None:
    text = "name: a\ntask: {name: gated, n: 3}\nsweep: {}\nprobes: [{name: locality}]\n"
    with pytest.raises(ConfigError, match=r"x.yaml:3: 'sweep' lists nothing to vary; give models, tasks or seeds"):
        read(text)
    with pytest.raises(ConfigError, match="the model is missing"):
        read(text.replace("{}", "{seeds: [1]}"))
    many = "{seeds: [" + ", ".join(map(str, range(MAX_CELLS + 1))) + "]}"
    with pytest.raises(ConfigError, match=f"has {MAX_CELLS + 1} cells, above the limit"):
        read(text.replace("{}", many).replace("name: a\n", "name: a\nmodel: {name: smollm2}\n"))


def test_two_cells_of_one_configuration_are_refused() -> None:
    with pytest.raises(ConfigError, match="smollm2/a/seed-0 and smollm2/b/seed-0 are the same configuration"):
        read(
            "name: a\nmodel: {name: smollm2}\ntask: {name: gated, n: 3}\nprobes: [{name: locality}]\n"
            "sweep: {tasks: [{label: a}, {label: b, n: 3}]}\n"
        )


def test_a_misspelled_section_is_recognised() -> None:
    with pytest.raises(ConfigError, match="unknown key 'sweeep'; did you mean 'sweep'"):
        validate(parse_document(GOOD.replace("sweep:", "sweeep:"), "x.yaml"))


@pytest.fixture
def every_task(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stands in for tasks that come with other models, where they are not installed."""

    class Open:
        def __init__(self, **_: Any) -> None:
            pass

    if "organism" not in TASKS:
        monkeypatch.setattr(TASKS, "_targets", {**TASKS._targets, "organism": "x:Open"})
        real = TASKS.get
        monkeypatch.setattr(TASKS, "get", lambda name: Open if name == "organism" else real(name))
    yield


@pytest.mark.usefixtures("every_task")
@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: str(p.relative_to(CONFIGS)))
def test_shipped_sweeps_are_valid_down_to_their_parameters(path: Path) -> None:
    found = load_sweep(read_config(path))
    for cell in found.cells:
        planned = plan(cell.config, cell.document)
        assert [p.probe.name for p in planned] == [p.name for p in cell.config.probes]
    assert len({config_hash(c.config) for c in found.cells}) == len(found.cells) > 1


@pytest.mark.usefixtures("every_task")
def test_the_cross_family_sweep_measures_every_headline_on_48_or_more_instances() -> None:
    found = load_sweep(read_config(CONFIGS / "paper" / "cross_family.yaml"))
    labels = {cell.model for cell in found.cells}
    assert {"organism-llama", "organism-qwen3", "smollm2"} <= labels and len(labels) >= 9
    wanted = {"locality", "dissociation", "timing", "specificity", "injection", "placebo"}
    for cell in found.cells:
        assert {p.name for p in cell.config.probes} == wanted <= set(PROBES.names())
        assert all(cell.config.task_for(p).n >= 48 for p in cell.config.probes)
