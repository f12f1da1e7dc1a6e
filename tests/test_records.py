"""Records: whole groups or nothing, whatever happens while they are written."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from notelens.errors import InputError, RecordError
from notelens.runs import records as r
from notelens.runs.files import LOCK, held, write_atomic


def group(item: str, n: int = 2, **values: object) -> list[dict[str, object]]:
    rows = [
        {"kind": "instance", "experiment": "fake", "stage": "measure", "item": item, "values": {"i": i, **values}}
        for i in range(n)
    ]
    return [*rows, {"kind": "item", "experiment": "fake", "stage": "measure", "item": item, "n_lines": n}]


def probe_group(value: float = 0.5) -> list[dict[str, object]]:
    return [
        {"kind": "aggregate", "experiment": "fake", "metric": "recovery", "value": value},
        {"kind": "probe", "experiment": "fake", "n_lines": 1, "n_rows": 4, "incompetent": None},
    ]


def write(path: Path, *groups: list[dict[str, object]]) -> None:
    with r.RecordWriter(path) as writer:
        for lines in groups:
            writer.write(lines)


# --- values -----------------------------------------------------------------------------------------------------------


def test_numbers_of_other_libraries_become_json_numbers() -> None:
    import torch

    value, nulls = r.plain(
        {
            "f32": np.float32(0.5), "f64": np.float64(0.25), "i": np.int64(7), "b": np.bool_(True), "s": np.str_("x"),
            "t": torch.tensor(1.5, dtype=torch.bfloat16), "ti": torch.tensor(3), "zero_d": np.array(2.0),
            "proxy": MappingProxyType({"k": (1, 2)}),
        }
    )  # fmt: skip
    assert json.loads(json.dumps(value)) == {
        "f32": 0.5, "f64": 0.25, "i": 7, "b": True, "s": "x", "t": 1.5, "ti": 3, "zero_d": 2.0, "proxy": {"k": [1, 2]},
    }  # fmt: skip
    assert type(value["b"]) is bool
    assert type(value["i"]) is int
    assert nulls == {}


def test_nan_and_infinity_are_null_with_a_reason_and_the_rest_is_kept(tmp_path: Path) -> None:
    path = tmp_path / r.FILE
    write(path, group("a", 1, good=0.8, bad=float("nan"), list=[1.0, float("-inf")], np=np.float32("inf")))
    row = r.read_records(path).rows()[0]
    assert row["values"] == {"i": 0, "good": 0.8, "bad": None, "list": [1.0, None], "np": None}
    assert row["nulls"] == {"values.bad": "nan", "values.list.1": "-inf", "values.np": "inf"}
    assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()


def test_a_tensor_is_stored_as_shape_and_type_only() -> None:
    import torch

    value, _ = r.plain({"t": torch.zeros(1, 32, 4096, 8, dtype=torch.float16), "a": np.zeros((3, 2)), "e": np.zeros(0)})
    assert value == {
        "t": {"shape": [1, 32, 4096, 8], "dtype": "float16"},
        "a": {"shape": [3, 2], "dtype": "float64"},
        "e": {"shape": [0], "dtype": "float64"},
    }


@pytest.mark.parametrize("value", [{1: 2}, {"a": object()}, {"a": {1, 2}}, {"a": b"x"}, {"a": [1j]}])
def test_what_json_does_not_know_is_refused_before_the_file_is_touched(tmp_path: Path, value: dict) -> None:
    path = tmp_path / r.FILE
    write(path, group("a"))
    before = path.read_bytes()
    with r.RecordWriter(path) as writer, pytest.raises(RecordError, match="a record holds"):
        writer.write(group("b", 1, value=value))
    assert path.read_bytes() == before


def test_a_line_above_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / r.FILE
    with r.RecordWriter(path) as writer, pytest.raises(RecordError, match="above the limit"):
        writer.write(group("b", 1, value=[0.123456789] * 500_000))
    assert path.read_bytes() == b""


def test_text_of_any_kind_survives(tmp_path: Path) -> None:
    path = tmp_path / r.FILE
    odd = ["\n", "\u2028", "\ud800", "\x00", '"\\', "Ġdeny", "日本", "\r\n"]
    write(path, group("a", 1, tokens=odd))
    assert r.read_records(path).rows()[0]["values"]["tokens"] == odd
    assert path.read_bytes().count(b"\n") == 2


# --- whole groups -----------------------------------------------------------------------------------------------------


def test_a_file_cut_at_any_byte_gives_whole_groups_and_is_completed_to_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / r.FILE
    groups = [group("a"), group("b", 0), group("c", 1), probe_group()]
    write(path, *groups)
    whole = path.read_bytes()
    ends = [0]
    for lines in groups:
        ends.append(ends[-1] + len(r.encode(lines)))
    assert ends[-1] == len(whole)
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        n_whole = sum(end <= cut for end in ends) - 1
        found = r.read_records(path)
        assert (found.offset, found.dropped) == (ends[n_whole], cut - ends[n_whole])
        assert len(found.items) == min(n_whole, 3) and len(found.probes) == max(n_whole - 3, 0)
        write(path, *groups[n_whole:])
        assert path.read_bytes() == whole


def test_garbage_behind_the_last_group_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / r.FILE
    write(path, group("a"))
    whole = path.read_bytes()
    for garbage in (
        b"\x00\x00\x00",
        b"{",
        b"[1]\n",
        b'{"kind": "item"}\n',
        b"null\n\n",
        b"\xff\n",
        r.encode(group("b"))[:-9],
    ):
        path.write_bytes(whole + garbage)
        assert list(r.read_records(path).items) == [("fake", "measure", "a")]
        write(path, group("b"))
        assert path.read_bytes() == whole + r.encode(group("b"))


def test_damage_in_the_middle_is_an_error_and_nothing_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / r.FILE
    write(path, group("a"), group("b"))
    lines = path.read_bytes().split(b"\n")
    lines[1] = lines[1][:20]
    path.write_bytes(b"\n".join(lines))
    before = path.read_bytes()
    with pytest.raises(RecordError, match=r"records.jsonl:2: this line is damaged although whole records follow"):
        r.RecordWriter(path)
    assert path.read_bytes() == before


def test_a_lost_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / r.FILE
    write(path, group("a"), group("b"))
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(lines[1:]))
    with pytest.raises(RecordError, match=r"records.jsonl:2: the group that ends with item 'a' is incomplete"):
        r.read_records(path)


def test_an_item_twice_is_an_error_before_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / r.FILE
    with r.RecordWriter(path) as writer:
        writer.write(group("a"))
        with pytest.raises(RecordError, match="recorded twice"):
            writer.write(group("a"))
        writer.write(probe_group())
        with pytest.raises(RecordError, match="recorded twice"):
            writer.write(probe_group())
        with pytest.raises(RecordError, match="incomplete"):
            writer.write([*group("c"), *group("d")])
    assert path.read_bytes() == r.encode([*group("a"), *probe_group()])


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / r.FILE
    path.write_text(json.dumps({"schema_version": 99, "kind": "run"}) + "\n")
    with pytest.raises(RecordError, match="schema version 99"):
        r.read_records(path)


def test_a_missing_file_is_an_empty_one_and_a_folder_is_searched(tmp_path: Path) -> None:
    assert r.read_records(tmp_path).items == {}
    write(tmp_path / r.FILE, group("a"))
    assert len(r.read_records(tmp_path).rows("fake")) == 2
    assert r.read_records(tmp_path).rows("other") == []


def test_lines_come_back_as_a_reader_sees_them(tmp_path: Path) -> None:
    with r.RecordWriter(tmp_path / r.FILE) as writer:
        lines = writer.write(group("a", 1, x=np.float32(0.1), y=(1, 2)))
    assert lines[:-1] == r.read_records(tmp_path).rows()


# --- the disk is full -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails_at", ["write", "fsync"])
def test_a_full_disk_takes_back_the_half_written_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    path = tmp_path / r.FILE
    real_write, real_fsync = os.write, os.fsync
    full = {"now": False}

    def fake_write(handle: int, data: memoryview) -> int:
        if full["now"] and fails_at == "write":
            if len(data) > 40:
                return real_write(handle, data[:40])  # a short write, then the error
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(handle, data)

    def fake_fsync(handle: int) -> None:
        if full["now"] and fails_at == "fsync":
            raise OSError(errno.ENOSPC, "No space left on device")
        real_fsync(handle)

    monkeypatch.setattr(os, "write", fake_write)
    monkeypatch.setattr(os, "fsync", fake_fsync)
    with r.RecordWriter(path) as writer:
        writer.write(group("a"))
        before = path.read_bytes()
        full["now"] = True
        with pytest.raises(
            RecordError, match=r"could not be written \(no space left on device\); all 1 finished items"
        ):
            writer.write(group("b"))
        assert path.read_bytes() == before
        full["now"] = False
        writer.write(group("b"))  # room again: the same writer goes on
    assert path.read_bytes() == before + r.encode(group("b"))


def test_a_real_file_size_limit(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import resource, sys
        from notelens.errors import RecordError
        from notelens.runs.records import RecordWriter
        from pathlib import Path
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        def group(i):
            e = {"experiment": "fake", "stage": "measure", "item": str(i)}
            return [{"kind": "instance", **e, "values": {}}, {"kind": "item", **e, "n_lines": 1}]
        with RecordWriter(Path(sys.argv[1])) as writer:
            try:
                for i in range(100):
                    writer.write(group(i))
            except RecordError as e:
                print(i, e)
        """
    )
    path = tmp_path / r.FILE
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    n = int(done.stdout.split()[0])
    assert "file too large" in done.stdout and f"all {n} finished items are kept" in done.stdout
    found = r.read_records(path)
    assert [key[2] for key in found.items] == [str(i) for i in range(n)]
    assert n >= 3 and found.dropped == 0


def test_an_atomic_file_is_old_or_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "manifest.json"
    write_atomic(path, "old")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        with pytest.raises(RecordError, match="what was there before is intact"):
            write_atomic(path, "new")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["manifest.json"]
    write_atomic(path, "new")
    assert path.read_text() == "new"


# --- one run at a time ------------------------------------------------------------------------------------------------


def test_a_second_run_on_one_folder_is_refused_and_a_killed_one_does_not_block(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    script = "import sys, time\nfrom pathlib import Path\nfrom notelens.runs.files import held\n"
    script += "with held(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(600)\n"
    holder = subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=rf"another run \(process {holder.pid}\) is writing here"), held(folder):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    with held(folder) as here:
        assert here == folder and (folder / LOCK).read_text().strip() == str(os.getpid())
        with pytest.raises(InputError, match=str(os.getpid())), held(folder):
            pass
    with held(folder):
        pass


def test_a_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(InputError, match="is a file, or lies below one"), held(folder):
            pass
