"""Memory that grows: rows are written once, what was handed out never changes, and nobody else's rows are written over."""

from typing import Any

import pytest
import torch

from notelens.attention.move import move_rows, move_rows_into
from notelens.cache.kv import KVCache
from notelens.cache.ops import max_difference, slice_rows
from notelens.cache.room import Room, room_behind
from notelens.compose import compile_skill, compose
from notelens.errors import CacheError
from notelens.intervene.run_rows import extend
from notelens.rope import rotate
from tests.contracts.models import note_model, random_ids

IDS = list(random_ids(12, seed=5))


def test_two_caches_grow_from_one_and_keep_their_rows() -> None:
    model = note_model("llama")
    base = model.prefill(IDS).cache
    room, inside = room_behind(base, 3, 40)
    assert room.capacity == 40 and inside.digest() == base.digest() and inside.room is room
    first, hidden = extend(model, inside, [3, 4, 5])
    again, _ = extend(model, inside, [6, 7, 8])  # the memory is filled behind `inside`: these rows need their own
    assert first.room is room and again.room is not room
    assert first.keys[0].data_ptr() == inside.keys[0].data_ptr()
    for found, new in ((first, [3, 4, 5]), (again, [6, 7, 8])):
        wanted = model.prefill([*IDS, *new])
        assert max_difference(found, wanted.cache) <= 1e-5 and found.exact
    assert float((hidden - model.prefill([*IDS, 3, 4, 5]).hidden).abs().max()) <= 1e-5
    assert inside.digest() == base.digest()


def test_memory_that_is_too_small_is_left_for_a_larger_one() -> None:
    model = note_model("llama")
    room, inside = room_behind(model.prefill(IDS).cache, 1)
    assert room.capacity == 13
    grown, _ = extend(model, inside, [3, 4])
    assert grown.room is not room and len(grown) == 14


def test_rows_that_do_not_belong_there_are_refused() -> None:
    cache = note_model("llama").prefill(IDS).cache
    room = Room(cache, 15)
    room.write(cache)
    with pytest.raises(CacheError, match="filled up to 0; 12 rows behind 12"):
        room.grown(cache, cache.positions + 12, cache.token_ids, ())
    room.grown(None, cache.positions, cache.token_ids, ())
    with pytest.raises(CacheError, match="do not belong there"):
        room.grown(cache, torch.arange(12, 16), (1, 2, 3, 4), ())


@pytest.mark.parametrize("name", ["llama3", "gemma3_text", "smollm3", "glm", "phi3", "deepseek_v2", "qwen2_5_vl"])
def test_keys_are_turned_on_the_way_into_place(name: str) -> None:
    """Bit for bit what a move and a copy give, in every representation."""
    model = note_model(name)
    cache = model.prefill(IDS).cache
    for start in (0, 23):
        positions = torch.arange(start, start + len(IDS))
        room = Room(cache, 20)
        move_rows_into(model, cache, positions, room)
        found = room.grown(None, positions, cache.token_ids, ())
        assert found.digest() == move_rows(model, cache, positions).digest()


@pytest.mark.parametrize("scheme", ["rotated", "unrotated"])
def test_a_composition_lies_in_one_piece_of_memory(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = note_model("llama")
    skill = compile_skill(model, IDS, name="s", scheme=scheme)
    made: list[Room] = []
    begin = Room.__init__

    def counted(self: Room, like: KVCache, capacity: int) -> None:
        begin(self, like, capacity)
        made.append(self)

    monkeypatch.setattr(Room, "__init__", counted)
    found = compose(model, [[7, 8], skill, [9], skill, [3, 4, 5]])
    assert len(made) == 1 and made[0].filled == made[0].capacity == len(found) == 30
    assert {k.untyped_storage().data_ptr() for k in found.cache.keys} == {k.data_ptr() for k in made[0].keys}
    assert slice_rows(found.cache, 0, 2).room is None


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("width", [64, 32])
def test_blocks_and_given_memory_do_not_change_a_rotation(
    pairing: Any, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, inv_freq = torch.randn(2, 50, 64), 1e4 ** -(torch.arange(0, width, 2) / width)
    steps = torch.arange(700, 750)
    exact = rotate(keys.double(), steps, inv_freq.double(), pairing=pairing)
    whole = rotate(keys, steps, inv_freq, pairing=pairing)
    assert float((whole.double() - exact).abs().max()) <= 5e-6
    assert torch.equal(rotate(keys, torch.full((50,), 9), inv_freq), rotate(keys, 9, inv_freq))
    monkeypatch.setattr("notelens.rope.BLOCK_BYTES", 2048)
    out = torch.full((2, 60, 64), float("nan"))[:, 5:55]
    found = rotate(keys, steps, inv_freq, pairing=pairing, out=out)
    assert found is out and torch.equal(out, whole)
