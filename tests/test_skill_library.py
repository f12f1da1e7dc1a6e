"""The library of skills: nothing lost or half-written by concurrent or dying writers, oldest out first, and its commands."""

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from notelens.cache import library as module
from notelens.cache.artefact import dump
from notelens.cache.library import SkillLibrary
from notelens.errors import ArtefactError, RecordError, UnknownNameError
from notelens.runs import cli
from tests.skill_writers import TAG, toy_skill

ROOT = Path(__file__).parents[1]
KILLS = 200
"""Seconds of work; ``python -m tests.skill_writers 2000 FOLDER`` runs more."""


def names(library: SkillLibrary) -> list[str]:
    return [entry.name for entry in library.entries()]


class TestUse:
    def test_put_get_remove(self, tmp_path: Path) -> None:
        library = SkillLibrary(tmp_path / "new" / "skills")
        entry = library.put(toy_skill("a"))
        assert entry.n_bytes == library.path("a").stat().st_size and entry.n_tokens == 3 and len(library) == 1
        assert dump(library.get("a", TAG)) == dump(toy_skill("a")) and "a" in library and "b" not in library
        assert SkillLibrary(library.folder).entries() == [entry]
        library.remove("a")
        assert names(library) == [] and not library.path("a").exists()
        with pytest.raises(UnknownNameError, match="no skill 'a'"):
            library.get("a")
        with pytest.raises(UnknownNameError, match="no skill 'a'"):
            library.remove("a")

    def test_a_taken_name(self, tmp_path: Path) -> None:
        library = SkillLibrary(tmp_path)
        first = library.put(toy_skill("a"))
        assert library.put(toy_skill("a")) == first  # the same rows: no change
        with pytest.raises(ArtefactError, match="holds another skill 'a'"):
            library.put(toy_skill("a", seed=1))
        assert dump(library.get("a")) == dump(toy_skill("a"))
        assert library.put(toy_skill("a", seed=1), replace=True) != first
        assert dump(library.get("a")) == dump(toy_skill("a", seed=1)) and library.verify() == {"a": None}

    def test_another_model(self, tmp_path: Path) -> None:
        library = SkillLibrary(tmp_path)
        library.put(toy_skill("a"))
        with pytest.raises(ArtefactError, match="cannot be used here"):
            library.get("a", replace(TAG, weights_sha256="d" * 64))

    def test_the_least_recently_used_goes_first(self, tmp_path: Path) -> None:
        size = len(dump(toy_skill("a")))
        library = SkillLibrary(tmp_path, budget_bytes=3 * size)
        for name in "abc":
            library.put(toy_skill(name))
        library.get("a")
        library.put(toy_skill("d"))
        assert names(library) == ["a", "c", "d"]
        SkillLibrary(tmp_path, budget_bytes=size).put(toy_skill("e"))
        assert names(library) == ["e"] and [p.name for p in tmp_path.glob("*.skill")] == ["e.skill"]

    def test_one_that_never_fits(self, tmp_path: Path) -> None:
        library = SkillLibrary(tmp_path, budget_bytes=100)
        with pytest.raises(ArtefactError, match="the library may hold 100"):
            library.put(toy_skill("a"))
        assert list(tmp_path.iterdir()) == []

    def test_bad_folders(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        with pytest.raises(ArtefactError, match="is a file"):
            SkillLibrary(tmp_path / "file")
        with pytest.raises(RecordError, match="could not be created"):
            SkillLibrary(tmp_path / "file" / "below")
        with pytest.raises(ArtefactError, match="holds nothing"):
            SkillLibrary(tmp_path, budget_bytes=0)


class TestDamage:
    def test_a_damaged_file_is_named_and_does_not_hide_the_others(self, tmp_path: Path) -> None:
        library = SkillLibrary(tmp_path)
        for name in "abc":
            library.put(toy_skill(name))
        raw = bytearray(library.path("b").read_bytes())
        raw[-1] ^= 1
        library.path("b").write_bytes(bytes(raw))
        found = library.verify()
        assert found["a"] is None and found["c"] is None and "do not match its digest" in str(found["b"])
        with pytest.raises(ArtefactError, match="do not match its digest"):
            library.get("b")
        library.remove("b")
        assert names(library) == ["a", "c"]

    def test_a_file_under_another_name(self, tmp_path: Path) -> None:
        library = SkillLibrary(tmp_path)
        library.put(toy_skill("a"))
        library.path("b").write_bytes(library.path("a").read_bytes())
        with pytest.raises(ArtefactError, match="holds skill 'a'"):
            library.get("b")
        assert names(library) == ["a"] and "holds skill 'a'" in str(library.verify()["b"])

    def test_a_whole_file_that_was_exchanged(self, tmp_path: Path) -> None:
        library = SkillLibrary(tmp_path)
        library.put(toy_skill("a"))
        library.path("a").write_bytes(dump(toy_skill("a", seed=9)))
        assert "not the one that the index lists" in str(library.verify()["a"])

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"schema": 1}', b"\xff"], ids=repr)
    def test_a_damaged_index_is_made_again(
        self, tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        library = SkillLibrary(tmp_path)
        before = [library.put(toy_skill(name)) for name in "ab"]
        (tmp_path / "index.json").write_bytes(content)
        with caplog.at_level(logging.WARNING, module.__name__):
            assert library.entries() == before
        assert "is made again from the files" in caplog.text
        assert json.loads((tmp_path / "index.json").read_text())["entries"].keys() == {"a", "b"}

    def test_a_changed_line_of_the_index_is_not_believed(self, tmp_path: Path) -> None:
        library = SkillLibrary(tmp_path)
        before = library.put(toy_skill("a"))
        text = (tmp_path / "index.json").read_text()
        (tmp_path / "index.json").write_text(text.replace('"n_tokens": 3', '"n_tokens": 4'))
        assert library.entries() == [before]

    def test_what_a_dead_writer_left(self, tmp_path: Path) -> None:
        """A part is removed, a finished file that the index lacks is taken in, an entry without a file is dropped."""
        library = SkillLibrary(tmp_path)
        library.put(toy_skill("gone"))
        (tmp_path / ".x.skill.1.ab.part").write_bytes(b"half")
        library.path("late").write_bytes(dump(toy_skill("late")))
        library.path("gone").unlink()
        assert names(library) == ["late"] and not list(tmp_path.glob(".*.part"))

    def test_a_full_disk_leaves_everything_as_it_was(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        library = SkillLibrary(tmp_path)
        before = library.put(toy_skill("a"))

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(RecordError, match="no space left on device"):
                library.put(toy_skill("b"))
        assert library.entries() == [before] and library.verify() == {"a": None} and not list(tmp_path.glob(".*.part"))


def test_killed_and_concurrent_writers_lose_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.skill_writers", str(KILLS), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "none lost" in done.stdout and int(done.stdout.split()[0]) > 0
    assert len(SkillLibrary(tmp_path / "together")) == 41


# --- commands ---------------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["skill", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


class TestCommands:
    @pytest.fixture(autouse=True)
    def tiny_loads(self, monkeypatch: pytest.MonkeyPatch, tiny: Any) -> None:
        from notelens.models import load

        monkeypatch.setattr(load, "load", lambda name, **options: tiny)

    def test_compile_list_verify_rm(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        text, folder = tmp_path / "policy.txt", str(tmp_path / "lib")
        text.write_text("if t0 then , ;")
        code, out, err = run(capsys, "compile", "tiny", str(text), "--library", folder)
        assert (code, err) == (0, "") and "policy: 5 tokens" in out
        code, out, err = run(
            capsys, "compile", "tiny", str(text), "--library", folder, "--name", "other", "--scheme", "unrotated",
            "--condition", "neutral", "--prefix", str(text),
        )  # fmt: skip
        assert (code, err) == (0, "")
        code, out, _ = run(capsys, "list", "--library", folder)
        assert code == 0 and "isolated, rotated, exact" in out and "neutral, unrotated, approximate" in out
        assert run(capsys, "verify", "--library", folder, "--model", "tiny")[:2] == (
            0,
            "ok    other\nok    policy\n2 skills, all whole\n",
        )
        assert run(capsys, "rm", "other", "--library", folder)[:2] == (0, "removed other\n")
        assert run(capsys, "rm", "other", "--library", folder)[0] == 2

    def test_verify_fails_on_damage_and_on_another_model(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        library = SkillLibrary(tmp_path)
        library.put(toy_skill("a"))
        code, out, err = run(capsys, "verify", "--library", str(tmp_path), "--model", "tiny")
        assert code == 1 and "FAIL  a: skill 'a' cannot be used here" in out and "1 of 1 skills cannot be used" in err
        library.path("a").write_bytes(library.path("a").read_bytes()[:-1])
        code, out, err = run(capsys, "verify", "--library", str(tmp_path))
        assert code == 1 and "FAIL  a" in out and err.startswith("error: ")

    def test_bad_input_leaves_nothing(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        text, empty, folder = tmp_path / "policy.txt", tmp_path / "empty.txt", tmp_path / "lib"
        text.write_text("if t0 then , ;")
        empty.write_text("")
        for arguments, message in (
            ((str(tmp_path / "none.txt"),), "cannot be read"),
            ((str(empty),), "is empty"),
            ((str(text), "--name", "a/b"), "skill name 'a/b'"),
            ((str(text), "--condition", "prefix"), "needs the prefix"),
            ((str(text), "--prefix", str(text)), "attends to no prefix"),
            ((str(text), "--condition", "sideways"), "sideways"),
        ):
            code, _, err = run(capsys, "compile", "tiny", *arguments, "--library", str(folder))
            assert code == 2 and message in err and err.startswith("error: "), (arguments, err)
        assert not folder.exists()
        assert run(capsys, "list", "--library", str(folder))[0] == 2
        code, out, _ = run(capsys, "compile", "tiny", str(text), "--dry-run", "--library", str(folder))
        assert code == 0 and "nothing was kept" in out and not folder.exists()

    def test_a_taken_name_and_an_empty_library(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        text = tmp_path / "a.txt"
        text.write_text("if t0 then , ;")
        SkillLibrary(tmp_path / "lib")
        assert run(capsys, "list", "--library", str(tmp_path / "lib"))[1].startswith("no skills in")
        assert run(capsys, "compile", "tiny", str(text), "--library", str(tmp_path / "lib"))[0] == 0
        text.write_text("if t1 then , ;")
        code, _, err = run(capsys, "compile", "tiny", str(text), "--library", str(tmp_path / "lib"))
        assert code == 2 and "choose another name, or replace it" in err
        assert run(capsys, "compile", "tiny", str(text), "--library", str(tmp_path / "lib"), "--replace")[0] == 0
