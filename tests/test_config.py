"""Configurations: every mistake is one sentence that names the line and the nearest thing that would be right."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from notelens.errors import ConfigError
from notelens.probes import PROBES
from notelens.runs.config import (
    RunConfig,
    config_hash,
    differences,
    hashed,
    load_config,
    override,
    validate,
)
from notelens.runs.yamlfile import MAX_BYTES, MAX_DEPTH, parse_document, parse_value

CONFIGS = Path(__file__).parents[1] / "configs"
SHIPPED = [
    p for p in sorted(CONFIGS.rglob("*.yaml")) if "\nsweep:" not in p.read_text() and p.parent.name != "bench"
]  # sweeps: test_sweep_config.py; benchmarks of engines: test_serving_bench.py
GOOD = """\
name: demo
model:
  name: smollm2
task:
  name: gated
  n: 12
  params:
    split: eval
probes:
  - name: locality
  - name: specificity
    params: {ks: [1, 8]}
    task: {n: 4}
seed: 0
"""


def read(text: str) -> RunConfig:
    return validate(parse_document(text, "x.yaml"))


def error(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- keys and values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seed: 0", "seeed: 0", "x.yaml:14: unknown key 'seeed'; did you mean 'seed'"),
        ("  n: 12", "  m: 12", "x.yaml:6: unknown key 'm'; known names: n, name, params, seed (1 more problem)"),
        ("  name: smollm2", "  nam: smollm2", "x.yaml:3: unknown key 'nam'; did you mean 'name'? (1 more problem)"),
        ("    task: {n: 4}", "    tasks: {n: 4}", "x.yaml:13: unknown key 'tasks'; did you mean 'task'?"),
        ("    task: {n: 4}", "    task: {n: 4, sed: 1}", "x.yaml:13: unknown key 'sed'; did you mean 'seed'?"),
        ("task:\n", "model:\n", "x.yaml:4: key 'model' is given twice; the first is on line 2"),
        ("  n: 12", "  n: 12\n  n: 13", "x.yaml:7: key 'n' is given twice; the first is on line 6"),
        ("n: 12", "n: 3e-5", "x.yaml:6: 'task.n' must be a whole number, not 3e-05"),
        ("n: 12", "n: 12.5", "x.yaml:6: 'task.n' must be a whole number, not 12.5"),
        ("n: 12", "n: '12'", "x.yaml:6: 'task.n' must be a whole number, not '12'"),
        ("n: 12", "n: true", "x.yaml:6: 'task.n' must be a whole number, not true"),
        ("n: 12", "n:", "x.yaml:6: 'task.n' must be a whole number, not nothing"),
        ("n: 12", "n: 0", "x.yaml:6: 'task.n' must be at least 1, not 0"),
        ("n: 12", "n: 100001", "x.yaml:6: 'task.n' must be at most 100000, not 100001"),
        ("n: 12", "n: [12]", "x.yaml:6: 'task.n' must be a whole number, not a list"),
        ("n: 12", "n: {a: 1}", "x.yaml:6: 'task.n' must be a whole number, not a mapping"),
        ("seed: 0", "seed: -1", "x.yaml:14: 'seed' must be at least 0, not -1"),
        ("seed: 0", "seed: 4294967296", "x.yaml:14: 'seed' must be below 4294967296, not 4294967296"),
        ("name: demo\n", "", "x.yaml:1: 'name' is missing"),
        ("name: demo", "name: a/b", "'name' must be at most 100 letters, digits, dots, dashes and underscores, not 'a"),
        ("name: demo", "name: ..", "x.yaml:1: 'name' must be at most 100 letters"),
        ("name: demo", "name: 3", "x.yaml:1: 'name' must be text, not 3"),
        ("name: locality", "name: localty", "x.yaml:10: unknown probe 'localty'; did you mean 'locality'?"),
        ("name: gated", "name: gate", "x.yaml:5: unknown task 'gate'; did you mean 'gated'?"),
        ("    task: {n: 4}", "    task: {name: gatd}", "x.yaml:13: unknown task 'gatd'; did you mean 'gated'?"),
        ("name: specificity", "name: locality", "probe 'locality' is listed twice; records are kept by probe"),
        ("seed: 0", "figures: yes", "x.yaml:14: 'figures' must be true or false, not 'yes'"),
        ("smollm2", "smollm2\n  dtype: float23", "x.yaml:4: 'model.dtype' is 'float23'; did you mean 'float32'"),
        ("smollm2", "smollm2\n  dtype: 16", "x.yaml:4: 'model.dtype' is 16; known names: float32, bfloat16, float16"),
        ("smollm2", "smollm2\n  attention: flash", "x.yaml:4: 'model.attention' is 'flash'; known names: sdpa, eager"),
        ("smollm2", "smollm2\n  device: tpu", "x.yaml:4: 'model.device' must be cpu, cuda or cuda:<number>, not 'tpu'"),
        ("smollm2", "smollm2\n  dtype: float16", "x.yaml:2: dtype float16 overflows and is slow on a CPU"),
        ("smollm2", "smollm2\n  revision: a1b2", "x.yaml:2: model 'smollm2' comes with its package"),
        ("model:\n  name: smollm2", "model: smollm2", "x.yaml:2: 'model' must be a mapping of keys to values, not"),
        ("    params: {ks: [1, 8]}", "    params: [1, 8]", "x.yaml:12: 'probes.1.params' must be a mapping of keys"),
        ("{ks: [1, 8]}", "{ks: .nan}", "x.yaml:12: .nan is not a finite number"),
        ("{ks: [1, 8]}", "{ks: 1e999}", "x.yaml:12: 1e999 is not a finite number"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_line(old: str, new: str, message: str) -> None:
    assert old in GOOD
    assert message in error(GOOD.replace(old, new, 1))


def test_an_empty_list_of_probes_is_refused() -> None:
    head = GOOD[: GOOD.index("probes:")]
    assert error(head + "probes: []\n") == "x.yaml:9: 'probes' must not be empty"
    assert error(head) == "x.yaml:1: 'probes' is missing"
    assert error(head + "probes: {name: locality}\n") == "x.yaml:9: 'probes' must be a list, not a mapping"


def test_scalars_follow_yaml_1_2() -> None:
    text = "a: 3e-5\nb: 1_000\nc: 010\nd: no\ne: 2026-01-01\nf: 0x1f\ng: 1:30\nh: .5\ni: 1.\nj: ~\nk: '3'\n"
    text += "l: 0o17\nm: -0\nn: on\no: True\np: 1e3\nq: +7\n"
    assert dict(parse_document(text, "x").data) == {
        "a": 0.00003, "b": "1_000", "c": 10, "d": "no", "e": "2026-01-01", "f": 31, "g": "1:30", "h": 0.5, "i": 1.0,
        "j": None, "k": "3", "l": 15, "m": 0, "n": "on", "o": True, "p": 1000.0, "q": 7,
    }  # fmt: skip


def test_small_numbers_reach_parameters_as_numbers() -> None:
    config = read(GOOD.replace("{ks: [1, 8]}", "{rate: 3e-5}"))
    assert config.probes[1].params == {"rate": 0.00003}


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "x.yaml: is empty"),
        (b"# nothing\n", "x.yaml: is empty"),
        (b"---\n", "x.yaml:2: a configuration is a mapping of keys to values, not nothing"),
        (b"- a\n", "x.yaml:1: a configuration is a mapping of keys to values, not a list"),
        (b"3\n", "x.yaml:1: a configuration is a mapping of keys to values, not 3"),
        (b"a: 1\n---\nb: 2\n", "x.yaml:2: a second document begins; a configuration is one document"),
        (b"a:\n\tb: 1\n", "x.yaml:2: not YAML: found character '\\t' that cannot start any token; indent with spaces"),
        (b"a: &x 1\nb: *x\n", "x.yaml:2: alias '*x' is not supported; write the value out"),
        (b"a: !!python/object:os.system 1\n", "x.yaml:1: tag 'tag:yaml.org,2002:python/object:os.syst"),
        (b"1: 2\n", "x.yaml:1: a key must be text, not 1"),
        (b"? [a]\n: 2\n", "x.yaml:1: a key must be text, not a list or mapping"),
        (b"true: 2\n", "x.yaml:1: a key must be text, not true"),
        (b"a: {b: 1\n", "x.yaml:2: not YAML"),
        (b"a: 'b\n", "x.yaml:2: not YAML: found unexpected end of stream"),
        (b"a: b: c\n", "x.yaml:1: not YAML: mapping values are not allowed here"),
        (b"a: @b\n", "x.yaml:1: not YAML: found character '@' that cannot start any token"),
        (b"a: 1\nb: \xff\n", "x.yaml:2: byte 0xff is not UTF-8; save the file as UTF-8"),
        ("name: ü".encode("utf-16"), "x.yaml:1: byte 0xff is not UTF-8"),
        (b"a: \x00\n", "x.yaml:1: character U+0000 is not allowed in YAML"),
        (b"a: 1\nb: \x1b[0m\n", "x.yaml:2: character U+001B is not allowed in YAML"),
        (b'a: "\\uD800"\n', "x.yaml:1: text holds half of a surrogate pair"),
        (b'a: "\\UFFFFFFFF"\n', "x.yaml: not YAML"),
        (b"a: " + b"9" * 5000 + b"\n", "x.yaml:1: a number of 5000 digits"),
        (b"%YAML " + b"9" * 5000 + b".0\n--- a\n", "x.yaml: not YAML"),
        (b"a: " + b"[" * 5000, f"x.yaml:1: nested more than {MAX_DEPTH} levels deep"),
        (b"a:\n" + b"".join(b" " * i + b"b:\n" for i in range(1, 400)), f"nested more than {MAX_DEPTH} levels deep"),
        (b"a0: &a0 [x, x]\n" + b"".join(b"a%d: &a%d [*a%d]\n" % (i, i, i - 1) for i in range(1, 60)), "x.yaml:2"),
        (b"#" * (MAX_BYTES + 1), "x.yaml: larger than 1048576 bytes; this is not a configuration"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bytes, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_bytes(raw)
    with pytest.raises(ConfigError) as caught:
        load_config("x.yaml")
    assert str(caught.value).startswith(message) or message in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "no.yaml", "no such file"), (tmp_path, "is a folder, not a configuration file")):
        with pytest.raises(ConfigError, match=message):
            load_config(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / ("x" * 5000))
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_config(tmp_path / "bom.yaml")[0] == read(GOOD)
    (tmp_path / "crlf.yaml").write_bytes(GOOD.replace("\n", "\r\n").encode())
    assert load_config(tmp_path / "crlf.yaml")[0] == read(GOOD)


# --- overrides --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("seed=3", ("seed",), 3),
        ("task.n=24", ("task", "n"), 24),
        ("model.dtype=bfloat16", ("model", "dtype"), "bfloat16"),
        ("probes.1.params.ks=[1, 2]", ("probes", 1, "params", "ks"), [1, 2]),
        ("probes.0.params.rate=3e-5", ("probes", 0, "params", "rate"), 0.00003),
        ("probes.0.task.n=2", ("probes", 0, "task", "n"), 2),
        ("task.seed=", ("task", "seed"), None),
        ("description=a=b", ("description",), "a=b"),
        ("name='7'", ("name",), "7"),
    ],
)
def test_an_override_is_read_like_the_file(text: str, path: tuple[str | int, ...], value: Any) -> None:
    changed = validate(override(parse_document(GOOD, "x.yaml"), text))
    at: Any = changed.model_dump(mode="json")
    for key in path:
        at = at[key]
    assert at == value and type(at) is type(value)
    assert read(GOOD) == validate(parse_document(GOOD, "x.yaml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seeed=3", "--set seeed=3: unknown key 'seeed'; did you mean 'seed'"),
        ("task.n=twelve", "--set task.n=twelve: 'task.n' must be a whole number, not 'twelve'"),
        ("probes.7.params.k=1", "--set probes.7.params.k=1: 'probes' is a list of 2; '7' is not a number from 0 to 1"),
        ("probes.-1.name=x", "'-1' is not a number from 0 to 1"),
        ("name.x=3", "--set name.x=3: 'name' is 'demo' and has no part 'x'"),
        ("seed", "--set seed: write it as --set key=value"),
        ("=3", "--set =3: write it as --set key=value"),
        ("a..b=3", "write it as --set key=value"),
        ("seed=[1", "--set seed=[1"),
        ("probes.0.name=localty", "--set probes.0.name=localty: unknown probe 'localty'; did you mean 'locality'?"),
        ("task=", "--set task=: 'task' must be a mapping of keys to values, not nothing"),
        ("seed=1\n---\n2", "a second document begins"),
    ],
)
def test_a_wrong_override_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(override(parse_document(GOOD, "x.yaml"), text))
    assert message in str(caught.value)


def test_values_of_overrides() -> None:
    assert parse_value("", "s") is None
    assert parse_value("{a: [1, 2.5, x]}", "s") == {"a": [1, 2.5, "x"]}


# --- hash -------------------------------------------------------------------------------------------------------------


def test_the_hash_covers_what_affects_results_and_nothing_else() -> None:
    base = config_hash(read(GOOD))
    for same in ("name: other", "name: demo\ndescription: text", "name: demo\nfigures: false"):
        assert config_hash(read(GOOD.replace("name: demo", same))) == base
    spelt_out = GOOD.replace("smollm2", "smollm2\n  dtype: float32\n  competence: true\n  revision: null")
    assert config_hash(read(spelt_out)) == base
    shuffled = "seed: 0\n" + GOOD[GOOD.index("probes:") :].replace("seed: 0\n", "") + GOOD[: GOOD.index("probes:")]
    assert config_hash(read(shuffled)) == base


@pytest.mark.parametrize(
    "text",
    [
        "seed=1", "task.n=13", "task.seed=0", "task.params.split=all", "task.params.length=200", "model.dtype=bfloat16",
        "model.name=Qwen/Qwen3-4B", "model.device=cuda", "model.attention=eager", "model.competence=false",
        "model.allow_ungated=true", "probes.0.params.pairs_per_instance=1", "probes.1.params.ks=[8, 1]",
        "probes.1.task.n=5", "probes.0.name=timing", "probes.1.task.params.split=all", "probes.1.params.ks=[1.0, 8]",
    ],
)  # fmt: skip
def test_everything_else_changes_the_hash_and_is_shown(text: str) -> None:
    document = parse_document(GOOD, "x.yaml")
    changed = validate(override(document, text))
    assert config_hash(changed) != config_hash(read(GOOD))
    shown = differences(hashed(read(GOOD)), hashed(changed))
    assert shown and all(line.startswith(text.split("=")[0]) for line in shown), shown


def test_differences_name_both_values() -> None:
    changed = validate(override(override(parse_document(GOOD, "x"), "seed=1"), "probes.0.params.k=[1]"))
    assert differences(hashed(read(GOOD)), hashed(changed)) == [
        "probes.0.params.k.0: (absent) -> 1",
        "seed: 0 -> 1",
    ]
    assert differences(hashed(changed), hashed(changed)) == []


def test_the_hash_does_not_depend_on_the_process() -> None:
    script = "import sys; from notelens.runs.config import *; print(config_hash(load_config(sys.argv[1])[0]))"
    seen = {
        subprocess.run(
            [sys.executable, "-c", script, str(CONFIGS / "quickstart.yaml")],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(CONFIGS.parent)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("0", "1")
    }  # fmt: skip
    assert len(seen) == 1 and len(seen.pop().strip()) == 64


# --- tasks of probes --------------------------------------------------------------------------------------------------


def test_a_probe_may_change_the_task() -> None:
    config = read(GOOD.replace("task: {n: 4}", "task: {n: 4, params: {length: 200}}"))
    own, shared = config.task_for(config.probes[1]), config.task_for(config.probes[0])
    assert (own.n, own.params, own.seed) == (4, {"split": "eval", "length": 200}, 0)
    assert (shared.n, shared.params, shared.seed) == (12, {"split": "eval"}, 0)
    other = read(GOOD.replace("seed: 0", "seed: 5").replace("task: {n: 4}", "task: {seed: 7}"))
    assert [other.task_for(p).seed for p in other.probes] == [5, 7]


# --- parameters -------------------------------------------------------------------------------------------------------


class Fake:
    def __init__(self, *, ks: tuple[int, ...] = (1,), rate: float = 0.1, mode: str, limit: int | None = None) -> None:
        if rate > 1:
            raise ValueError(f"rate {rate} is above 1")
        self.ks, self.rate = ks, rate


class Open:
    def __init__(self, **anything: Any) -> None:
        self.anything = anything


def test_parameters_are_checked_against_the_class() -> None:
    from notelens.runs.plan import construct

    def build(cls: type, **params: Any) -> Any:
        return construct(cls, "probe 'fake'", params, ("probes", 0, "params"), lambda path: ".".join(map(str, path)))

    good = build(Fake, ks=[1, 2], rate=1, mode="x")
    assert good.ks == (1, 2) and good.rate == 1.0
    assert build(Open, a=1).anything == {"a": 1}
    for params, message in (
        ({"mode": "x", "kss": 1}, r"probes.0.params.kss: probe 'fake' has no parameter 'kss'; did you mean 'ks'\?"),
        ({}, "probes.0.params: probe 'fake' needs the parameter 'mode'"),
        ({"mode": "x", "ks": "12"}, "params.ks: parameter 'ks' of probe 'fake' is '12', but should be a valid array"),
        ({"mode": "x", "ks": [1.5]}, "parameter 'ks' of probe 'fake' is a list, but should be a valid integer"),
        ({"mode": 3}, "parameter 'mode' of probe 'fake' is 3, but should be a valid string"),
        ({"mode": "x", "rate": "3"}, "parameter 'rate' of probe 'fake' is '3', but should be a valid number"),
        ({"mode": "x", "limit": True}, "parameter 'limit' of probe 'fake' is true, but should be a valid integer"),
        ({"mode": "x", "rate": 3}, "params.rate: probe 'fake': rate 3.0 is above 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(Fake, **params)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task.params.splt=all", "task 'gated' has no parameter 'splt'; did you mean 'split'?"),
        ("task.params.split=evil", "task 'gated': unknown split 'evil'; did you mean 'eval'?"),
        ("task.params.length=30", "task 'gated': length 30 is not a whole number from 100 to 4000"),
        ("task.params.forms=polarity", "parameter 'forms' of task 'gated' is 'polarity', but should be"),
        ("probes.1.task.params.split=evil", "task 'gated': unknown split 'evil'"),
    ],
)
def test_parameters_of_the_shipped_task(text: str, message: str) -> None:
    from notelens.runs.plan import plan

    document = override(parse_document(GOOD, "x.yaml"), text)
    with pytest.raises(ConfigError) as caught:
        plan(validate(document), document)
    assert message in str(caught.value) and str(caught.value).startswith(f"--set {text}")


# --- shipped configurations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: str(p.relative_to(CONFIGS)))
def test_shipped_configurations_are_valid_down_to_their_parameters(path: Path) -> None:
    from notelens.runs.plan import plan

    config, document = load_config(path)
    planned = plan(config, document)
    assert [p.probe.name for p in planned] == [p.name for p in config.probes]
    assert json.loads(config.model_dump_json())["name"] == config.name


HEADLINE = {"locality", "dissociation", "timing", "specificity", "injection", "placebo"}
"""Probes of the quickstart and of the paper's models; the others have configurations of their own below ``paper/``."""


def test_shipped_configurations_are_complete() -> None:
    from notelens.models.random import KNOWN_ARCHITECTURES

    paper = {p.stem: load_config(p)[0] for p in SHIPPED if p.parent.name == "paper"}
    assert {c.model.name for c in paper.values()} == set(KNOWN_ARCHITECTURES)
    for config in (*paper.values(), load_config(CONFIGS / "quickstart.yaml")[0]):
        assert {p.name for p in config.probes} == HEADLINE
    for config in paper.values():
        assert (config.model.dtype, config.model.device) == ("bfloat16", "cuda")
        assert all(config.task_for(p).n >= 48 for p in config.probes)
        assert all(config.task_for(p).params.get("split") == "eval" for p in config.probes)
    smoke = [load_config(p)[0] for p in SHIPPED if p.parent.name == "smoke"]
    assert sorted(p.name for c in smoke for p in c.probes) == PROBES.names()
    names = [load_config(p)[0].name for p in SHIPPED]
    assert len(names) == len(set(names))
