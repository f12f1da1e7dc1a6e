"""Processes that write into one library at once and are killed on the way: ``python -m tests.skill_writers KILLS FOLDER``.

The library is imported once and children are forked, so that a kill costs milliseconds. A child reports each finished write
through a pipe; whatever was reported must be in the library after the kill, whole.
"""

import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from notelens.cache.artefact import ModelTag, SkillFile, SkillHeader
from notelens.cache.library import SkillLibrary

TAG = ModelTag("toy", "a" * 64, "b" * 64, "float32", ((1, 4, 2), (1, 4, 2)), ((1.0, 0.01),), (0, 0))


def toy_skill(name: str, *, n: int = 3, seed: int = 0, tag: ModelTag = TAG) -> SkillFile:
    """A skill of a two-layer model with a few random rows."""
    generator = torch.Generator().manual_seed(seed)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[tag.dtype]

    def rows(which: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(s[0], n, s[which], generator=generator).to(dtype) for s in tag.shapes)

    header = SkillHeader(
        name, tuple(range(n)), "c" * 64, 0, "rotated", "isolated", (), True, (), {"passed": True}, False, tag
    )
    return SkillFile(header, rows(1), rows(2))


def child(work: Callable[[Callable[[str], None]], None]) -> tuple[int, int]:
    """Fork a child that reports names through a pipe; its process id and the end to read from."""
    read, write = os.pipe()
    process = os.fork()
    if process:
        os.close(write)
        return process, read
    os.close(read)
    try:
        work(lambda name: os.write(write, f"{name}\n".encode()) and None)
    finally:
        os._exit(0)
    raise AssertionError("not reached")


def drain(read: int) -> list[str]:
    """Names reported by a child that has ended; a torn last line was not reported."""
    found = b""
    while block := os.read(read, 65536):
        found += block
    os.close(read)
    return [line.decode() for line in found.split(b"\n")[:-1]]


def check(folder: Path, reported: set[str]) -> None:
    """The library is readable, holds everything reported, whole, and no part is left."""
    library = SkillLibrary(folder)
    names = {entry.name for entry in library.entries()}
    assert reported <= names, f"lost {sorted(reported - names)[:5]}"
    assert all(wrong is None for wrong in library.verify().values()), library.verify()
    assert not list(folder.glob(".*.part")), list(folder.iterdir())
    json.loads((folder / "index.json").read_text())


def kill_writers(folder: Path, kills: int, seed: int = 0) -> int:
    """Kill a writer ``kills`` times at random moments; how many writes were reported."""
    rng, reported = random.Random(seed), set[str]()
    for round_ in range(kills):

        def write(report: Callable[[str], None], round_: int = round_) -> None:
            library = SkillLibrary(folder)
            for i in range(10_000):
                name = f"s{round_ % 7}-{i % 9}"
                library.put(toy_skill(name, n=64, seed=round_ * 10_000 + i), replace=True)
                report(name)

        process, read = child(write)
        if round_ % 2:  # half of them right behind a report, where the next write is under way
            select.select([read], [], [], 10.0)
        time.sleep(rng.uniform(0.0, 0.01))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        reported.update(drain(read))
        check(folder, reported)
    return len(reported)


def write_together(folder: Path, writers: int, each: int) -> None:
    """Writers that start at once, each with names of its own and one name that all of them want."""
    started = []
    for writer in range(writers):

        def write(report: Callable[[str], None], writer: int = writer) -> None:
            library = SkillLibrary(folder)
            for i in range(each):
                library.put(toy_skill(f"w{writer}-{i}", seed=writer * 1000 + i))
                report(f"w{writer}-{i}")
                library.put(toy_skill("shared", seed=writer * 1000 + i), replace=True)
                report("shared")

        started.append(child(write))
    reported: set[str] = set()
    for process, read in started:
        reported.update(drain(read))
        os.waitpid(process, 0)
    assert len(reported) == writers * each + 1, len(reported)
    check(folder, reported)


if __name__ == "__main__":
    torch.set_num_threads(1)
    target = Path(sys.argv[2])
    write_together(target / "together", 2, 20)
    print(f"{kill_writers(target / 'kills', int(sys.argv[1]))} writes reported, none lost")
