"""Rows by reference: order, replacement, what is shared and what is not."""

import pytest
import torch

from notelens.cache.kv import KVCache
from notelens.cache.rows import Rows, Segment, merge, runs
from notelens.errors import CacheError


def cache(positions: list[int], *, base: float = 0.0, layers: int = 2) -> KVCache:
    """Row at position p holds the number p + base in every channel; layers and values are told apart by hundreds."""
    rows = torch.tensor(positions, dtype=torch.float32) + base
    keys = tuple((rows + 100 * i)[None, :, None].repeat(2, 1, 3) for i in range(layers))
    values = tuple((rows + 1000 + 100 * i)[None, :, None].repeat(2, 1, 4) for i in range(layers))
    return KVCache(keys, values, torch.tensor(positions), tuple(p + 7 for p in positions))


def numbers(rows: Rows, layer: int = 0) -> list[float]:
    return rows.layer(layer)[0][0, :, 0].tolist()


def test_rows_of_a_cache_are_the_cache() -> None:
    whole = cache([0, 1, 2, 3])
    rows = Rows.of(whole)
    assert len(rows) == 4 and rows.token_ids == (7, 8, 9, 10) and rows.exact
    assert rows.layer(1)[0].data_ptr() == whole.keys[1].data_ptr()
    assert rows.join().digest() == whole.digest()


def test_replaced_rows_stand_in_their_place_and_the_rest_is_shared() -> None:
    whole, new = cache(list(range(8))), cache([2, 3, 6], base=0.5)
    rows = Rows.of(whole).replaced(new, history=("changed",))
    assert numbers(rows) == [0, 1, 2.5, 3.5, 4, 5, 6.5, 7]
    assert numbers(rows, 1) == [100, 101, 102.5, 103.5, 104, 105, 106.5, 107]
    assert rows.layer(0)[1][1, :, 0].tolist() == [1000, 1001, 1002.5, 1003.5, 1004, 1005, 1006.5, 1007]
    assert not rows.exact and rows.join().history == ("changed",)
    assert rows.positions.tolist() == list(range(8))
    own = sum(t.numel() * 4 for t in (*new.keys, *new.values))
    assert rows.bytes_beyond(Rows.of(whole)) == own
    assert Rows.of(whole).bytes_beyond(rows) == 0
    assert numbers(Rows.of(whole)) == list(range(8))


def test_rows_fill_holes_and_follow_the_last_one() -> None:
    whole = cache(list(range(6)))
    holes = Rows(Rows.of(whole).without([2, 3]))
    assert numbers(holes) == [0, 1, 4, 5] and numbers(Rows(merge(holes.segments, cache([3])))) == [0, 1, 3, 4, 5]
    assert numbers(holes.replaced(cache([2, 3, 6, 7], base=0.25), history=())) == [0, 1, 2.25, 3.25, 4, 5, 6.25, 7.25]
    assert numbers(holes.replaced(cache([2, 8], base=0.25), history=())) == [0, 1, 2.25, 4, 5, 8.25]


def test_a_far_pair_of_new_rows_is_split_only_where_old_rows_stand_between() -> None:
    whole = Rows.of(cache([0, 1, 2, 10, 11]))
    assert numbers(whole.replaced(cache([4, 6], base=0.5), history=())) == [0, 1, 2, 4.5, 6.5, 10, 11]
    assert len(whole.replaced(cache([4, 6]), history=()).segments) == 3
    assert numbers(whole.replaced(cache([4, 12], base=0.5), history=())) == [0, 1, 2, 4.5, 10, 11, 12.5]


def test_ranges() -> None:
    assert runs([5, 1, 2, 2, 9, 10]) == [(1, 3), (5, 6), (9, 11)] and runs([]) == []
    rows = Rows.of(cache(list(range(6)))).replaced(cache([2], base=0.5), history=())
    assert numbers(Rows(rows.between(1, 4))) == [1, 2.5, 3] and rows.between(3, 3) == ()
    extra = tuple(t[0][:, :1] for t in (cache([9]).keys, cache([9]).values))
    assert rows.layer(0, extra=extra)[0][0, :, 0].tolist() == [0, 1, 2.5, 3, 4, 5, 9]


def test_what_does_not_fit_is_refused() -> None:
    whole = cache([0, 1, 2])
    with pytest.raises(CacheError, match="at least one segment"):
        Rows(())
    with pytest.raises(CacheError, match="at least one segment"):
        Rows((Segment(whole, 2, 2),))
    with pytest.raises(CacheError, match="position 1 follow a row at 2"):
        Rows((Segment(whole, 0, 3), Segment(whole, 1, 2)))
    with pytest.raises(CacheError, match="one model"):
        Rows((Segment(whole, 0, 3), Segment(cache([5], layers=3), 0, 1)))
