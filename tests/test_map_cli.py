"""``notelens map`` from the command line: what it writes and prints, and one line and an exit code for everything else."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from notelens.models import load as loading
from notelens.report import style
from notelens.runs import cli, files, maps
from tests.tiny import broken_blind, tiny_model

TEXT = "start parcel is {{status}} , w1 w2 , if t0 then , ; w3 , please decide . : ?\n"
CHAT = """Record: parcel 12
Status: {{status}}
Notes: the box is blue; it weighs two kilos.
Rule: if the status is paid, ship it; otherwise hold it.
Should it be shipped? Answer yes or no.
"""


@pytest.fixture
def prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A prompt file; the working directory is empty and private."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    file = tmp_path / "prompt.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """``load`` gives the hand-set decoder; the list fills with what it was called with."""
    calls: list[dict[str, Any]] = []

    def load(name: str, **options: Any) -> Any:
        calls.append({"name": name, **options})
        return tiny_model()

    monkeypatch.setattr(loading, "load", load)
    return calls


@pytest.fixture
def unsaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn but not saved, which takes most of the time."""
    monkeypatch.setattr(style, "save", lambda *_: [])


def invoke(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    code = cli.main(["map", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def failed(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 2) -> str:
    """The one error line of a command that must fail."""
    got, out, err = invoke(capsys, *arguments)
    assert got == code, (out, err)
    assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err
    return err.removeprefix("error: ").strip()


def options(prompt: Path, *more: Any, old: str = "f0", new: str = "f1", rendering: str = "raw") -> list[Any]:
    return [
        "tiny",
        "--prompt",
        prompt,
        "--field",
        "status",
        "--old",
        old,
        "--new",
        new,
        "--rendering",
        rendering,
        *more,
    ]


# --- what it does -----------------------------------------------------------------------------------------------------


def test_a_map_is_written_and_summed_up(
    capsys: pytest.CaptureFixture[str], prompt: Path, loads: list[dict[str, Any]]
) -> None:
    code, out, err = invoke(capsys, *options(prompt))
    assert (code, err) == (0, "")
    folder = Path("maps/status-f0-f1")
    assert sorted(p.name for p in folder.iterdir()) == ["map.json", "map.png", "map.safetensors", "map.svg"]
    data = json.loads((folder / "map.json").read_text())
    assert data["old"] == TEXT.strip().replace("{{status}}", "f0"), (
        "the newline that ends the file is not in the prompt"
    )
    assert data["answers"] == ["approve", "deny"] and data["minimal_set"]["tokens"] == [";"]
    lines = out.splitlines()
    assert lines[0].startswith("denoising: margin ") and "flips the decision (1.000)" in out
    assert lines[-1] == f"written: {', '.join(str(folder / f'map.{k}') for k in ('json', 'safetensors', 'png', 'svg'))}"
    defaults = {"dtype": "float32", "device": "cpu", "attention": None, "revision": None, "dry_run": False}
    assert loads == [{"name": "tiny", **defaults}]


def test_options_arrive(
    capsys: pytest.CaptureFixture[str], prompt: Path, loads: list[dict[str, Any]], unsaved: None
) -> None:
    more = ("--answers", "deny", "approve", "--out", "my map", "--no-layers", "--dtype", "bfloat16", "--device", "cuda")
    code, out, err = invoke(
        capsys, *options(prompt, *more, "--attention", "eager", "--revision", "abc", old="f1", new="f0")
    )
    assert (code, err) == (0, "")
    data = json.loads(Path("my map/map.json").read_text())
    assert data["answers"] == ["deny", "approve"] and data["new"].split()[3] == "f0"
    given = {"dtype": "bfloat16", "device": "cuda", "attention": "eager", "revision": "abc", "dry_run": False}
    assert loads == [{"name": "tiny", **given}]
    from safetensors.torch import load_file

    assert "layers" not in load_file("my map/map.safetensors")
    assert "my map/map.json" in out


def test_an_incompetent_model_gives_its_map_and_code_3(
    capsys: pytest.CaptureFixture[str], prompt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load", lambda *_, **__: broken_blind())
    code, out, err = invoke(capsys, *options(prompt, "--answers", "approve", "deny"))
    assert code == 3 and err.count("\n") == 1
    assert err.startswith(
        "error: tiny does not decide this prompt well enough for recoveries (denoising: donor wrong; "
    )
    assert "recovery not defined: donor wrong" in out and "written: maps/status-f0-f1/map.json" in out
    data = json.loads(Path("maps/status-f0-f1/map.json").read_text())
    assert set(data["recovery"]["denoising"]) == {None} and data["excluded"]["noising"] == "recipient wrong"


def test_progress_is_shown_on_a_terminal_only(
    capsys: pytest.CaptureFixture[str], prompt: Path, loads: Any, unsaved: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = invoke(capsys, *options(prompt, "--no-layers"))
    steps: list[str] = []
    real = maps.make_map

    def watched(*arguments: Any, on_step: Any, **rest: Any) -> Any:
        return real(*arguments, on_step=lambda step: (steps.append(step), on_step(step)), **rest)

    monkeypatch.setattr(maps, "make_map", watched)
    monkeypatch.setattr(cli.sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    shown = invoke(capsys, *options(prompt, "--no-layers"))
    assert quiet[2] == "" and shown[:2] == quiet[:2]
    assert steps[:3] == ["load the model", "prefill", "position map"] and len(steps) == 6


def test_a_dry_run_keeps_nothing_unless_told_where(
    capsys: pytest.CaptureFixture[str], prompt: Path, loads: list[dict[str, Any]], unsaved: None
) -> None:
    answers = ("--answers", "approve", "deny")
    code, out, err = invoke(capsys, *options(prompt, "--dry-run", *answers))
    assert (code, err) == (0, "") and loads[0]["dry_run"] is True
    assert out.endswith("dry run: nothing was kept\n") and not list(Path().iterdir())
    assert invoke(capsys, *options(prompt, "--dry-run", *answers, "--out", "kept"))[0] == 0
    assert sorted(p.name for p in Path("kept").iterdir()) == ["map.json", "map.safetensors"]


@pytest.mark.slow
def test_a_dry_run_maps_a_random_model_of_the_same_architecture(
    capsys: pytest.CaptureFixture[str], prompt: Path
) -> None:
    """End to end, nothing replaced: the embedded tokenizer, a chat template, a random model, the gate."""
    prompt.write_text(CHAT)
    arguments = options(prompt, "--dry-run", "--out", "kept", old="paid", new="open", rendering="chat")
    code, out, err = invoke(capsys, "smollm2", *arguments[1:])
    assert (code, err) == (0, ""), err
    assert "written: kept/map.json" in out
    data = json.loads(Path("kept/map.json").read_text(), parse_constant=lambda c: pytest.fail(f"{c} is no JSON"))
    assert data["model"]["name"] == "random:smollm2" and data["answers"] == ["yes", "no"]
    assert [data["tokens"][i] for i in data["changed_rows"]] == [" paid"]
    assert len(data["shift"]["denoising"]) == len(data["tokens"]) - 1
    assert (Path("kept") / "map.png").read_bytes()[:4] == b"\x89PNG"


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": TEXT.replace("{{status}}", "f0")}, "the prompt has no field {{status}}; fields it has: none"),
        ({"text": TEXT.replace("w1", "{{size}}")}, "the prompt has further fields: size"),
        ({"text": " \n\n"}, "is empty; write a prompt with one field such as {{status}}"),
        ({"new": ""}, "a value of field 'status' is empty"),
        ({"new": "f0"}, "both values of field 'status' are 'f0'"),
        ({"rendering": "html"}, "unknown rendering 'html'; known: chat, plain, raw"),
    ],
)
def test_bad_input_is_refused_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], prompt: Path, loads: list[Any], change: dict[str, str], message: str
) -> None:
    prompt.write_text(change.get("text", TEXT))
    assert message in failed(capsys, *options(prompt, **{k: v for k, v in change.items() if k != "text"}))
    assert loads == [] and not list(Path().iterdir())


@pytest.mark.parametrize(
    ("change", "more", "message"),
    [
        ({"new": "f0 f1"}, (), "with 'f0' the prompt has 20 tokens, with 'f0 f1' it has 21"),
        ({"text": TEXT.replace("t0", "w4")}, (), "continues both prompts with '"),
        ({"rendering": "chat"}, (), "has no chat template"),
        ({}, ("--answers", "deny", "deny"), "share their first token"),
    ],
)
def test_pairs_that_cannot_be_made_are_refused(
    capsys: pytest.CaptureFixture[str], prompt: Path, loads: list[Any], change: Any, more: Any, message: str
) -> None:
    prompt.write_text(change.get("text", TEXT))
    assert message in failed(capsys, *options(prompt, *more, **{k: v for k, v in change.items() if k != "text"}))
    assert len(loads) == 1 and not list(Path().iterdir())


def test_prompt_files_that_cannot_be_read_are_refused(
    capsys: pytest.CaptureFixture[str], prompt: Path, loads: list[Any]
) -> None:
    assert "cannot be read (no such file or directory)" in failed(capsys, *options(Path("missing.txt")))
    assert "cannot be read (is a directory)" in failed(capsys, *options(prompt.parent))
    prompt.write_bytes(b"caf\xe9 {{status}}")
    assert "is not UTF-8 text" in failed(capsys, *options(prompt))
    assert loads == []
    prompt.write_text("\ufeff" + TEXT, encoding="utf-8")
    assert maps.read_prompt(prompt) == TEXT.strip(), "a byte order mark is not part of the prompt"


def test_usage_errors_are_one_line(capsys: pytest.CaptureFixture[str], prompt: Path, loads: list[Any]) -> None:
    for arguments in (
        ("tiny",), (), ("tiny", "--prompt", prompt), options(prompt, "--answers", "one"), options(prompt, "--nope"),
        options(prompt, "extra"),
    ):  # fmt: skip
        failed(capsys, *arguments)
    assert loads == []
    code, out, _ = invoke(capsys, "--help")
    assert code == 0 and "--dry-run" in out and "--answers" in out


def test_models_that_do_not_exist_are_refused(capsys: pytest.CaptureFixture[str], prompt: Path) -> None:
    assert "unknown model 'tiny'" in failed(capsys, *options(prompt))
    assert "unknown dtype 'int4'" in failed(capsys, *options(prompt, "--dtype", "int4"))
    assert "not known without a download" in failed(capsys, *options(prompt, "--dry-run"))
    assert not list(Path().iterdir())


def test_folders_that_cannot_be_used_are_refused_first(
    capsys: pytest.CaptureFixture[str], prompt: Path, loads: list[Any]
) -> None:
    assert "is a file, or lies below one" in failed(capsys, *options(prompt, "--out", prompt))
    assert "is a file, or lies below one" in failed(capsys, *options(prompt, "--out", prompt / "below"))
    assert loads == []


def test_a_full_disk_is_said_and_leaves_nothing_half_written(
    capsys: pytest.CaptureFixture[str], prompt: Path, loads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    message = failed(capsys, *options(prompt), code=1)
    assert "could not be written (no space left on device)" in message
    assert list(Path("maps/status-f0-f1").iterdir()) == []
