"""The command line: exit codes, one line per error, and 500 malformed configurations."""

import inspect
import json
import random
import re
import resource
import string
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from notelens.errors import CompetenceError, GateError, MissingPackageError, NonFiniteError, RecordError
from notelens.models import FAMILIES
from notelens.probes import PROBES
from notelens.runs import cli, runner
from notelens.runs.tables import make_table
from notelens.tasks import TASKS

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"

FACTS = {"name": "m", "revision": "r", "dtype": "float32", "attention_kernel": "sdpa", "device": "cpu"}
MANIFEST = {
    "manifest_version": 1, "name": "demo", "config_hash": "0" * 64, "config": {"probes": []}, "seed": 0,
    "model": {**FACTS, "gate": {"passed": True}}, "sessions": [{"commit": None}], "state": "finished",
}  # fmt: skip
ROW = {
    "experiment": "locality", "metric": "flip_rate", "method": "both", "params": {}, "value": 1.0, "lo": 0.9, "hi": 1.0,
    "n": 8, "n_excluded": 0, "swap": "isolated", "unit": "fraction", "flags": [],
}  # fmt: skip


def invoke(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def failed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """The one error line of a command that must fail."""
    got, out, err = invoke(capsys, *arguments)
    assert got == code, (out, err)
    assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err
    return err.removeprefix("error: ").strip()


def result(*incompetent: str) -> runner.RunResult:
    table = make_table(MANIFEST, [ROW], (), incompetent)
    return runner.RunResult(Path("runs/demo"), table, 3, 0, incompetent, "passed")


def executes(monkeypatch: pytest.MonkeyPatch, outcome: Any) -> list[tuple[Any, ...]]:
    """Replace the runner by one that returns or raises ``outcome``; the list fills with what it was called with."""
    calls: list[tuple[Any, ...]] = []

    def execute(config: Any, out: Path, **options: Any) -> runner.RunResult:
        calls.append((config, out, options))
        options["progress"].stage("locality", "measure", 2, 0)
        options["progress"].item()
        options["progress"].note("locality: 2 rows")
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(runner, "execute", execute)
    return calls


# --- what there is ----------------------------------------------------------------------------------------------------


def test_lists_say_what_every_thing_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = invoke(capsys, "list", "probes")
    assert (code, err) == (0, "")
    listed = [line.split(maxsplit=1) for line in out.splitlines()]
    assert [words[0] for words in listed] == PROBES.names() and all(len(words) == 2 for words in listed)
    assert re.match(r"gated +Gated decisions", invoke(capsys, "list", "tasks")[1])
    models = invoke(capsys, "list", "models")[1]
    assert "smollm2" in models and ", ".join(FAMILIES.names()) in models


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    import notelens

    assert invoke(capsys, "--version")[:2] == (0, f"notelens {notelens.__version__}\n")
    code, out, _ = invoke(capsys, "--help")
    assert code == 0 and all(word in out for word in ("run", "list", "gate", "table"))
    assert invoke(capsys, "run", "--help")[0] == 0


def test_usage_errors_are_one_line_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ("run",), ("fly",), ("list",), ("list", "dogs"), ("table",), ("run", "a", "b"), ("run", "--nope"), ("gate",),
        ("--nope",), ("run", "x.yaml", "--set"), ("table", "x", "--format"),
    ):  # fmt: skip
        failed(capsys, *arguments)


def test_the_command_line_does_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(MANIFEST))
    script = textwrap.dedent(
        """
        import sys
        from notelens.runs.cli import main
        codes = [main(a.split()) for a in sys.argv[1:]]
        heavy = {"torch", "transformers", "numpy", "matplotlib", "pandas"} & set(sys.modules)
        sys.exit(f"{codes} {heavy}" if any(codes) or heavy else 0)
        """
    )
    commands = ["list probes", "list tasks", "list models", "--help", "--version", f"table {tmp_path} --format json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", script, *commands], capture_output=True, text=True, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 2.0  # of processor time for all six commands (0.5 s seen), so that a busy machine does not decide


# --- run --------------------------------------------------------------------------------------------------------------


def test_run_goes_to_its_own_folder_and_prints_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = executes(monkeypatch, result())
    code, out, err = invoke(capsys, "run", str(QUICKSTART))
    assert code == 0 and "| flip_rate" in out and "records, tables and figures: runs" in out
    assert err == "locality: 2 rows\n"
    config, folder, options = calls[0]
    assert folder == Path("runs/quickstart") and config.name == "quickstart" and options["dry_run"] is False
    invoke(capsys, "run", str(QUICKSTART), "--out", "else/where", "--set", "task.n=3", "--set", "seed=5", "--dry-run")
    config, folder, options = calls[1]
    assert (folder, config.task.n, config.seed, options["dry_run"]) == (Path("else/where"), 3, 5, True)


def test_run_shows_bars_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    executes(monkeypatch, result())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    code, _, err = invoke(capsys, "run", str(QUICKSTART))
    assert code == 0 and "locality (measure)" in err and "1/2" in err and "locality: 2 rows" in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GateError("m failed its gate at x"), 3),
        (CompetenceError("the model does not decide"), 3),
        (MissingPackageError("install notelens[gemma]"), 2),
        (RecordError("disk full"), 1),
        (NonFiniteError("the recipient margin is nan\nsecond line\x1b[31m"), 1),
    ],
)
def test_errors_are_one_line_with_their_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    executes(monkeypatch, error)
    monkeypatch.setattr(cli, "_Lines", cli.Silent)
    message = failed(capsys, "run", str(QUICKSTART), code=code)
    assert message.split()[:2] == str(error).split()[:2] and "\x1b" not in message


def test_incompetence_shows_the_table_and_exits_with_3(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    executes(monkeypatch, result("locality: none of 4 rows", "timing: none of 2 rows"))
    code, out, err = invoke(capsys, "run", str(QUICKSTART))
    assert code == 3 and "NOT COMPETENT" in out
    assert err.splitlines()[-2:] == ["timing: none of 2 rows", "error: locality: none of 4 rows"]
    assert invoke(capsys, "run", str(QUICKSTART), "--dry-run")[0] == 0


def test_ctrl_c_says_how_to_go_on(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    executes(monkeypatch, KeyboardInterrupt())
    code, _, err = invoke(capsys, "run", str(QUICKSTART))
    assert code == 130
    assert (
        err.splitlines()[-1] == "stopped: what is measured is kept in runs/quickstart; run the same command to continue"
    )


def test_unknown_names_and_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "no such file" in failed(capsys, "run", str(tmp_path / "no.yaml"))
    assert "is a folder" in failed(capsys, "run", str(tmp_path))
    assert "did you mean 'locality'" in failed(capsys, "run", str(QUICKSTART), "--set", "probes.0.name=localty")
    assert "write it as --set key=value" in failed(capsys, "run", str(QUICKSTART), "--set", "task.n")
    assert "is a file" in failed(capsys, "run", str(CONFIGS / "smoke/locality.yaml"), "--out", str(QUICKSTART))


# --- gate and table ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passed", [True, False])
def test_gate_shows_every_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, passed: bool
) -> None:
    from notelens.models import load, support

    gate = SimpleNamespace(
        passed=passed, lines=lambda: ["ok   cached decode", "FAIL identity patch"], notes=("no hooks",)
    )
    asked: list[Any] = []

    def fake(name: str, **options: Any) -> Any:
        asked.append((name, options))
        return SimpleNamespace(gate=gate)

    monkeypatch.setattr(load, "load", fake)
    monkeypatch.setattr(support, "support_lines", lambda _: ["layers 0-2: gqa"])
    code, out, err = invoke(capsys, "gate", "smollm2", "--dtype", "bfloat16")
    lines = "ok   cached decode\nFAIL identity patch\nnote no hooks\nlayers 0-2: gqa\n"
    assert code == (0 if passed else 3) and lines in out
    assert err == ("" if passed else "error: smollm2 failed its gate\n")
    assert asked[0][0] == "smollm2" and asked[0][1]["dtype"] == "bfloat16" and asked[0][1]["allow_ungated"] is True


def test_gate_of_an_unknown_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown model 'smolm2'; did you mean 'smollm2'" in failed(capsys, "gate", "smolm2")


def test_table_prints_every_format(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(MANIFEST))
    for format in ("md", "csv", "tex", "json"):
        code, out, err = invoke(capsys, "table", str(tmp_path), "--format", format)
        assert (code, err) == (0, "") and out
    assert json.loads(out) == []
    assert "did you mean 'json'" in failed(capsys, "table", str(tmp_path), "--format", "jsn")
    assert "holds no run" in failed(capsys, "table", str(tmp_path / "nothing"))


# --- fuzz -------------------------------------------------------------------------------------------------------------

RICH = """\
name: rich
description: "uses every key"
model:
  name: Qwen/Qwen3-4B
  revision: abc123
  dtype: bfloat16
  device: cuda
  attention: eager
  competence: true
  allow_ungated: false
task:
  name: gated
  n: 12
  seed: 3
  params:
    split: eval
    forms: [polarity, swapped]
    length: 200
    order: value_first
    rendering: chat
probes:
  - name: locality
    params: {pairs_per_instance: 1}
  - name: dissociation
  - name: specificity
    params:
      ks: [1, 2, 8]
      n_draws: 20
    task:
      n: 4
      seed: 1
      params: {length: 150}
seed: 7
figures: false
"""
WRONG_VALUES = (
    "[]", "{}", "null", "~", "-1", "0", "1e999", ".nan", "-.inf", "true", "3.5", "'4'", '"x"', "yes", "2026-01-01",
    "1:30", "!!python/object/apply:os.system ['true']", "*alias", "&anchor x", "@x", "`x", "[1, 2", "{a: 1",
    "1000000000000000000000", "100001", "4294967296", "'\\n'", '"\\x07"', "|", "> text", "a: b", "[[[[]]]]", "0x1F",
    "text", "Ω", "''", "../x", "- a",
)  # fmt: skip
JUNK = (
    "---", "...", "%YAML 3.1", "\t", "<<: {a: 1}", "? [a]", ": :", "- -", "extra: 1", "  indented: 1", "}", "]", "'",
    '"', "model: {name: other}", "\x00", "\x1b[31m", "\ufeff", "# comment", "", "probes: []", "1: 2", "~: 2", "seed: 9",
)  # fmt: skip


def mutate(text: str, rng: random.Random) -> bytes:
    """One to three random damages."""
    raw = text.encode()
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        raw = rng.choice(MUTATIONS)(raw, rng)
    return raw


def _lines(raw: bytes, change: Callable[[list[bytes], int], None], rng: random.Random) -> bytes:
    lines = raw.split(b"\n")
    change(lines, rng.randrange(len(lines)))
    return b"\n".join(lines)


def flip_bit(raw: bytes, rng: random.Random) -> bytes:
    if not raw:
        return raw
    at = rng.randrange(len(raw))
    return raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :]


def delete_line(raw: bytes, rng: random.Random) -> bytes:
    return _lines(raw, lambda lines, i: lines.__delitem__(i), rng)


def duplicate_line(raw: bytes, rng: random.Random) -> bytes:
    return _lines(raw, lambda lines, i: lines.insert(rng.randrange(len(lines)), lines[i]), rng)


def move_line(raw: bytes, rng: random.Random) -> bytes:
    return _lines(raw, lambda lines, i: lines.insert(rng.randrange(len(lines)), lines.pop(i)), rng)


def misspell_word(raw: bytes, rng: random.Random) -> bytes:
    words = list(re.finditer(rb"[A-Za-z_0-9]{2,}", raw))
    if not words:
        return raw
    word = rng.choice(words)
    text = bytearray(word.group())
    at = rng.randrange(len(text))
    letter = rng.choice(string.ascii_lowercase).encode()
    choice = rng.randrange(4)
    if choice == 0:
        del text[at]
    elif choice == 1:
        text[at:at] = letter
    elif choice == 2:
        text[at : at + 1] = letter
    else:
        text = text[::-1]
    return raw[: word.start()] + bytes(text) + raw[word.end() :]


def replace_value(raw: bytes, rng: random.Random) -> bytes:
    def change(lines: list[bytes], i: int) -> None:
        key, colon, _ = lines[i].partition(b":")
        if colon:
            lines[i] = key + b": " + rng.choice(WRONG_VALUES).encode()

    return _lines(raw, change, rng)


def indent_line(raw: bytes, rng: random.Random) -> bytes:
    def change(lines: list[bytes], i: int) -> None:
        body = lines[i].lstrip()
        now = len(lines[i]) - len(body)
        lines[i] = rng.choice((b"\t" + body, b" " * rng.randrange(9) + body, b" " * max(0, now - 2) + body))

    return _lines(raw, change, rng)


def truncate(raw: bytes, rng: random.Random) -> bytes:
    return raw[: rng.randrange(len(raw) + 1)]


def insert_junk(raw: bytes, rng: random.Random) -> bytes:
    return _lines(raw, lambda lines, i: lines.insert(i, rng.choice(JUNK).encode()), rng)


def nest(raw: bytes, rng: random.Random) -> bytes:
    lines = raw.split(b"\n")
    start = rng.randrange(len(lines))
    body = [b"  " + line if line else line for line in lines[start:]]
    return b"\n".join([*lines[:start], rng.choice((b"config:", b"-", b"params:")), *body])


MUTATIONS = (
    flip_bit, delete_line, duplicate_line, move_line, misspell_word, misspell_word, replace_value, replace_value,
    indent_line, truncate, insert_junk, nest,
)  # fmt: skip

# What follows decides on its own, from YAML nodes, whether a file is a valid configuration. It shares no code with
# notelens.runs.

MODELS = {
    "smollm2", "Qwen/Qwen3-8B", "Qwen/Qwen3-4B", "meta-llama/Llama-3.1-8B-Instruct", "google/gemma-2-9b-it",
    "mistralai/Mistral-7B-Instruct-v0.3", *FAMILIES.names(),
}  # fmt: skip


class Invalid(Exception):
    pass


def need(condition: bool, why: str = "") -> None:
    if not condition:
        raise Invalid(why)


def value_of(node: Any, depth: int = 0) -> Any:
    """Plain value of a node by the rules of YAML 1.2; raises :class:`Invalid`."""
    need(depth < 30)
    if isinstance(node, yaml.MappingNode):
        keys = [value_of(k, depth + 1) for k, _ in node.value]
        need(all(isinstance(k, str) for k in keys) and len(set(keys)) == len(keys), "keys")
        return {k: value_of(v, depth + 1) for k, (_, v) in zip(keys, node.value, strict=True)}
    if isinstance(node, yaml.SequenceNode):
        return [value_of(v, depth + 1) for v in node.value]
    text = node.value
    if node.style is not None:
        return text
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    for pattern, read in (
        (r"[-+]?[0-9]+", int),
        (r"0x[0-9a-fA-F]+", lambda t: int(t, 16)),
        (r"0o[0-7]+", lambda t: int(t, 8)),
    ):
        if re.fullmatch(pattern, text):
            return read(text)
    if re.fullmatch(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", text):
        need(abs(float(text)) < float("inf"), "infinite")
        return float(text)
    need(not re.fullmatch(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", text), "not finite")
    return text


def check(raw: bytes) -> None:
    """Raise :class:`Invalid` unless ``raw`` is a configuration that a dry run can carry out."""
    try:
        text = raw.decode("utf-8-sig")
        events = list(yaml.parse(text, Loader=yaml.SafeLoader))
        need(not any(isinstance(e, yaml.AliasEvent) for e in events), "alias")
        need(not any(getattr(e, "tag", None) for e in events), "tag")
        need(sum(isinstance(e, yaml.DocumentStartEvent) for e in events) == 1, "documents")
        node = yaml.compose(text, Loader=yaml.BaseLoader)
        data = value_of(node)
        json.dumps(data, ensure_ascii=False).encode()
    except (yaml.YAMLError, ValueError, OverflowError) as e:
        raise Invalid(str(e)) from e
    closed(data, {"name", "model", "task", "probes"}, {"description", "seed", "figures"})
    name(data["name"])
    need(isinstance(data.get("description", ""), str))
    need(isinstance(data.get("figures", True), bool))
    whole(data.get("seed", 0), 0, 2**32 - 1)
    check_model(data["model"])
    closed(data["task"], {"name", "n"}, {"seed", "params"})
    check_task(data["task"])
    need(isinstance(data["probes"], list) and data["probes"] != [], "probes")
    for probe in data["probes"]:
        closed(probe, {"name"}, {"params", "task"})
        need(isinstance(probe["name"], str) and probe["name"] in PROBES.names(), "probe")
        check_params(PROBES.get(probe["name"]), probe.get("params", {}))
        own = probe.get("task")
        if own is not None:
            closed(own, set(), {"name", "n", "seed", "params"})
            need(own.get("name") in (None, "gated"))
            kept = {k: v for k, v in own.items() if v is not None or k == "params"}
            need(isinstance(kept.get("params", {}), dict))
            check_task(data["task"] | kept | {"params": data["task"].get("params", {}) | kept.get("params", {})})
    names = [p["name"] for p in data["probes"]]
    need(len(set(names)) == len(names), "twice")


def closed(data: Any, required: set[str], optional: set[str]) -> None:
    need(isinstance(data, dict) and required <= set(data) <= required | optional, f"keys of {data}")


def name(value: Any) -> None:
    need(isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", value) is not None, "name")


def whole(value: Any, low: int, high: int) -> None:
    need(isinstance(value, int) and not isinstance(value, bool) and low <= value <= high, f"whole {value}")


def check_model(model: Any) -> None:
    closed(model, {"name"}, {"revision", "dtype", "device", "attention", "competence", "allow_ungated"})
    need(isinstance(model["name"], str) and model["name"] in MODELS, "model")
    revision, dtype, device = model.get("revision"), model.get("dtype", "float32"), model.get("device", "cpu")
    if revision is not None:
        name(revision)
        need(model["name"] != "smollm2")
    need(dtype in ("float32", "bfloat16", "float16") and isinstance(dtype, str))
    need(isinstance(device, str) and re.fullmatch(r"cpu|cuda(:[0-9]{1,2})?", device) is not None)
    need(not (dtype == "float16" and device == "cpu"))
    need(model.get("attention") in (None, "sdpa", "eager"))
    need(all(isinstance(model.get(k, True), bool) for k in ("competence", "allow_ungated")))


def check_task(task: Any) -> None:
    need(task["name"] == "gated")
    whole(task["n"], 1, 100_000)
    if task.get("seed") is not None:
        whole(task["seed"], 0, 2**32 - 1)
    check_params(TASKS.get("gated"), task.get("params", {}))


def strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)


def integers(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int for v in value)


def integer(value: Any) -> bool:
    return type(value) is int


def text(value: Any) -> bool:
    return isinstance(value, str)


TYPES: dict[str, Callable[[Any], bool]] = {
    "forms": strings, "ks": integers, "n_draws": integer, "pairs_per_instance": integer, "seed": integer, "split": text,
    "order": text, "rendering": text, "length": lambda v: v is None or integer(v),
    "families": lambda v: v is None or strings(v), "scenario_file": lambda v: v is None or text(v),
    "doses": integers, "donors": strings, "form_sets": strings, "groupings": strings, "n_folds": integer,
    "anchors": lambda v: v is None or strings(v), "n_shuffles": integer, "alpha": lambda v: type(v) in (int, float),
    "threshold": lambda v: type(v) in (int, float), "fixed_words": lambda v: type(v) is bool, "phrasing": text,
    "between": lambda v: v is None or type(v) in (int, float), "bands": lambda v: v is None or strings(v),
    "shares": lambda v: isinstance(v, list) and all(type(x) in (int, float) for x in v),
    "fractions": lambda v: isinstance(v, list) and all(type(x) in (int, float) for x in v),
}  # fmt: skip


def check_params(cls: type, params: Any) -> None:
    need(isinstance(params, dict) and set(params) <= set(inspect.signature(cls).parameters), f"params {params}")
    need(all(TYPES[key](value) for key, value in params.items()), f"types of {params}")
    reason = refusal(cls, json.dumps(params, sort_keys=True))
    need(reason is None, str(reason))


@cache
def refusal(cls: type, params: str) -> str | None:
    """What the class itself says against parameters of the right types."""
    try:
        cls(**json.loads(params))
    except ValueError as e:
        return str(e)
    return None


@pytest.mark.slow
def test_500_malformed_configurations_end_in_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything runs up to the loading of weights, which only looks the name up, as the dry path does."""
    from notelens.models.random import architecture

    def loader(name: str, **_: Any) -> Any:
        architecture(name)
        return SimpleNamespace(tokenizer=None, facts=lambda: {"name": name, "gate": {"passed": True}})

    monkeypatch.setattr(runner, "default_loader", lambda: loader)
    monkeypatch.setattr(runner, "_measure_all", lambda *_: 0)
    monkeypatch.setattr(runner, "_report", lambda *_, **__: result())
    monkeypatch.setattr("notelens.runs.manifest.commit", lambda: {"commit": None, "dirty": None})
    monkeypatch.chdir(tmp_path)
    shipped = [p.read_text() for p in sorted(CONFIGS.rglob("*.yaml")) if p.parent.name != "bench"]
    sources = [text for text in shipped if "\nsweep:" not in text] + [RICH] * 12
    rng = random.Random(20260101)
    path = tmp_path / "fuzz.yaml"
    n_refused = n_accepted = 0
    for source in sources:
        path.write_text(source)
        check(source.encode())
        assert invoke(capsys, "run", str(path), "--dry-run")[0] == 0
    while n_refused < 500:
        raw = mutate(rng.choice(sources), rng)
        path.write_bytes(raw)
        code, out, err = invoke(capsys, "run", str(path), "--dry-run")
        try:
            check(raw)
            valid, why = True, ""
        except Invalid as e:
            valid, why = False, str(e)
        assert code == (0 if valid else 2), f"{err}{why}\n{raw.decode(errors='replace')}"
        if valid:
            n_accepted += 1
            continue
        n_refused += 1
        assert out == "" and err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1
        assert "Traceback" not in err and 15 < len(err) < 1000 and err[:-1].isprintable()
    assert n_accepted > 20  # the mutations are not all fatal: acceptance is tested as well
