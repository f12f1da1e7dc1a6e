"""Properties that hold for every input: of swaps, of cache operations, of recoveries."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from notelens.cache.kv import KVCache
from notelens.cache.ops import concat, replace_rows, select_rows, slice_rows
from notelens.intervene.engine import Reader, Site, swap_effects
from notelens.readout import MIN_GAP, Recovery, exclusion
from tests.contracts import models as contract

BATCH_TOLERANCE = 1e-5
"""Another number of readers means another order of summation in the matrix products: seen 4e-6 on logits of size 3."""
N = 14
NAMES = ("llama", "mistral", "gemma2")
run_model = settings(max_examples=8, deadline=None, derandomize=True, database=None)
run_fast = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def sites(n_layers: int = 3) -> st.SearchStrategy[Site]:
    bands = [(low, high) for low in range(n_layers) for high in range(low + 1, n_layers + 1)]
    return st.builds(
        Site,
        positions=st.lists(st.integers(0, N - 2), min_size=1, max_size=6).map(tuple),
        layers=st.sampled_from([None, *bands]),
        kv_heads=st.sampled_from([None, (0,), (1,), (0, 1)]),
        parts=st.sampled_from(["kv", "k", "v"]),
        donor=st.integers(0, 1),
    )


@pytest.fixture(scope="module", params=NAMES)
def prefilled(request: pytest.FixtureRequest) -> tuple[Any, KVCache, list[KVCache]]:
    model = contract.note_model(request.param)
    recipient = model.prefill(contract.random_ids(N)).cache
    donors = [model.prefill(contract.random_ids(N, changed=[c])).cache for c in (2, 5)]
    return model, recipient, donors


# --- swaps ------------------------------------------------------------------------------------------------------------


@run_model
@given(chosen=st.lists(sites(), min_size=1, max_size=4), n_reader=st.integers(1, 3))
def test_a_patch_with_itself_is_nothing(prefilled: Any, chosen: list[Site], n_reader: int) -> None:
    model, recipient, _ = prefilled
    assume(all(p < N - n_reader for s in chosen for p in s.positions))
    found = swap_effects(model, recipient, [recipient] * 2, chosen, Reader.last(recipient, contract.ANSWERS, n_reader))
    assert torch.equal(found.logits, found.baseline.expand(len(chosen), -1)) and found.n_readers == 1


@run_model
@given(chosen=st.lists(sites(), min_size=2, max_size=6), data=st.data())
def test_the_order_of_patches_does_not_matter(prefilled: Any, chosen: list[Site], data: st.DataObject) -> None:
    model, recipient, donors = prefilled
    order = data.draw(st.permutations(range(len(chosen))))
    reader = Reader.last(recipient, contract.ANSWERS)
    found = swap_effects(model, recipient, donors, chosen, reader)
    shuffled = swap_effects(model, recipient, donors, [chosen[i] for i in order], reader)
    assert float((shuffled.logits - found.logits[list(order)]).abs().max()) <= BATCH_TOLERANCE
    assert torch.equal(shuffled.baseline, found.baseline)


@run_model
@given(chosen=st.lists(sites(), min_size=2, max_size=9), budget=st.sampled_from([1, 30_000, 10**9]))
def test_who_else_is_in_the_batch_does_not_matter(prefilled: Any, chosen: list[Site], budget: int) -> None:
    model, recipient, donors = prefilled
    reader = Reader.last(recipient, contract.ANSWERS)
    together = swap_effects(model, recipient, donors, chosen, reader, budget_bytes=budget)
    for site, logits in list(zip(chosen, together.logits, strict=True))[:3]:
        alone = swap_effects(model, recipient, donors, [site], reader)
        assert float((alone.logits[0] - logits).abs().max()) <= BATCH_TOLERANCE


@run_model
@given(site=sites())
def test_order_and_repetition_of_rows_do_not_matter(prefilled: Any, site: Site) -> None:
    model, recipient, donors = prefilled
    again = Site(site.positions[::-1] + site.positions, site.layers, site.kv_heads, site.parts, site.donor)
    found = swap_effects(model, recipient, donors, [site, again], Reader.last(recipient, contract.ANSWERS))
    assert float((found.logits[0] - found.logits[1]).abs().max()) <= BATCH_TOLERANCE


@run_model
@given(site=sites())
def test_a_swap_equals_running_from_replaced_rows(prefilled: Any, site: Site) -> None:
    """Two paths of the library: the engine on a shared cache, and decode from a patched copy."""
    model, recipient, donors = prefilled
    found = swap_effects(model, recipient, donors, [site], Reader.last(recipient, contract.ANSWERS))
    base, donor = (slice_rows(c, 0, N - 1) for c in (recipient, donors[site.donor]))
    copy = replace_rows(base, donor, site.positions, layers=site.layers, kv_heads=site.kv_heads, parts=site.parts)
    hidden = model.prefill(recipient.token_ids[-1:], copy).hidden
    assert (
        float((model.answer_logits(hidden, contract.ANSWERS) - found.logits[0]).abs().max()) <= contract.SWAP_TOLERANCE
    )


@run_model
@given(rows=st.lists(st.integers(0, N - 2), min_size=1, max_size=8, unique=True))
def test_swapping_all_but_some_back_is_the_reverse_swap(prefilled: Any, rows: list[int]) -> None:
    """Rows R of the donor in the recipient = all other rows of the recipient in the donor, read by the same token."""
    model, recipient, donors = prefilled
    rest = tuple(p for p in range(N - 1) if p not in rows)
    reader = Reader.last(recipient, contract.ANSWERS)  # the last token is the same in recipient and donors
    there = swap_effects(model, recipient, [donors[0]], [Site(tuple(rows))], reader)
    back = swap_effects(model, donors[0], [recipient], [Site(rest)], reader)
    assert float((there.logits - back.logits).abs().max()) <= contract.SWAP_TOLERANCE


# --- cache operations -------------------------------------------------------------------------------------------------

ROWS = 7


def random_cache(seed: int) -> KVCache:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (tuple(torch.randn(2, ROWS, 3, generator=generator) for _ in range(2)) for _ in range(2))
    positions = torch.cumsum(1 + torch.randint(0, 3, (ROWS,), generator=generator), 0)
    return KVCache(keys, values, positions, tuple(torch.randint(0, 50, (ROWS,), generator=generator).tolist()))


def twins(seed: int) -> tuple[KVCache, KVCache]:
    a, b = random_cache(seed), random_cache(seed + 1)
    return a, KVCache(b.keys, b.values, a.positions, a.token_ids)


seeds = st.integers(0, 10_000)
row_sets = st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS, unique=True)
options = st.fixed_dictionaries(
    {
        "layers": st.sampled_from([None, (0, 1), (1, 2), (0, 2)]),
        "kv_heads": st.sampled_from([None, (0,), (1,), (1, 0)]),
        "parts": st.sampled_from(["kv", "k", "v"]),
    }
)


@run_fast
@given(seed=seeds, rows=row_sets, where=options)
def test_replacing_twice_is_replacing_once(seed: int, rows: list[int], where: Any) -> None:
    base, donor = twins(seed)
    once = replace_rows(base, donor, rows, **where)
    assert replace_rows(once, donor, rows, **where).digest() == once.digest()
    assert replace_rows(base, base, rows, **where).digest() == base.digest()
    assert replace_rows(once, base, rows, **where).digest() == base.digest()


@run_fast
@given(seed=seeds, first=row_sets, second=row_sets, where=options)
def test_replacing_in_parts_is_replacing_the_union(seed: int, first: list[int], second: list[int], where: Any) -> None:
    base, donor = twins(seed)
    union = replace_rows(base, donor, sorted({*first, *second}), **where).digest()
    for a, b in ((first, second), (second, first)):
        assert replace_rows(replace_rows(base, donor, a, **where), donor, b, **where).digest() == union


@run_fast
@given(seed=seeds)
def test_parts_heads_and_layers_add_up_to_the_donor(seed: int) -> None:
    base, donor = twins(seed)
    out = base
    for layer in (0, 1):
        for head in (0, 1):
            for parts in ("k", "v"):
                out = replace_rows(out, donor, range(ROWS), layers=(layer, layer + 1), kv_heads=[head], parts=parts)  # type: ignore[arg-type]  # literals
    assert out.digest() == donor.digest() == replace_rows(base, donor, range(ROWS)).digest()
    assert not out.exact


@run_fast
@given(seed=seeds, cut=st.integers(1, ROWS - 1), again=st.integers(1, ROWS - 1))
def test_cutting_and_joining_is_nothing(seed: int, cut: int, again: int) -> None:
    cache = random_cache(seed)
    parts = slice_rows(cache, 0, cut), slice_rows(cache, cut, ROWS)
    joined = concat(*parts, history=())
    assert joined.digest() == cache.digest() and joined.exact
    assert parts[0].exact and not parts[1].exact
    if again < cut:
        assert slice_rows(parts[0], 0, again).digest() == slice_rows(cache, 0, again).digest()
    assert parts[0].next_position <= int(parts[1].positions[0])


@run_fast
@given(seed=seeds, rows=row_sets)
def test_selection_is_what_indexing_says(seed: int, rows: list[int]) -> None:
    cache, rows = random_cache(seed), sorted(rows)
    chosen = select_rows(cache, rows)
    assert chosen.token_ids == tuple(cache.token_ids[r] for r in rows)
    assert chosen.positions.tolist() == [int(cache.positions[r]) for r in rows]
    assert chosen.exact == (rows == list(range(len(rows))))
    pieces = [slice_rows(cache, r, r + 1) for r in rows]
    joined = pieces[0]
    for piece in pieces[1:]:
        joined = concat(joined, piece, history=("joined",))
    assert joined.digest() == chosen.digest()
    inner = list(range(0, len(rows), 2))
    assert select_rows(chosen, inner).digest() == select_rows(cache, [rows[i] for i in inner]).digest()


@run_fast
@given(seed=seeds, rows=row_sets, cut=st.integers(1, ROWS - 1))
def test_replacing_and_slicing_commute(seed: int, rows: list[int], cut: int) -> None:
    base, donor = twins(seed)
    kept = [r for r in rows if r < cut]
    assume(kept)
    late = slice_rows(replace_rows(base, donor, rows), 0, cut)
    early = replace_rows(slice_rows(base, 0, cut), slice_rows(donor, 0, cut), kept)
    assert late.digest() == early.digest()


# --- recoveries -------------------------------------------------------------------------------------------------------

margins = st.floats(-40, 40, allow_nan=False).filter(lambda x: x == 0 or abs(x) > 1e-6)


def near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)


@run_fast
@given(low=margins, high=margins, patched=margins, scale=st.floats(0.1, 10))
def test_recovery_is_affine(low: float, high: float, patched: float, scale: float) -> None:
    assume(abs(high - low) > 0.1)
    value = Recovery(low, high, patched).value
    assert Recovery(low, high, low).value == 0.0 and Recovery(low, high, high).value == 1.0
    assert near(Recovery(high, low, patched).value, 1 - value)
    assert near(Recovery(-low, -high, -patched).value, value)
    assert near(Recovery(low * scale, high * scale, patched * scale).value, value)
    middle = Recovery(low, high, (low + high) / 2)
    assert near(middle.value, 0.5)


@run_fast
@given(low=margins, high=margins, patched=margins)
def test_a_flip_is_a_change_of_sign_from_the_recipients(low: float, high: float, patched: float) -> None:
    flipped = Recovery(low, high, patched).flipped
    assert flipped == (low < 0 and patched > 0)
    assert not Recovery(low, high, low).flipped
    if exclusion(low, high) is None:
        assert Recovery(low, high, high).flipped


@run_fast
@given(low=margins, high=margins, min_gap=st.floats(0, 5))
def test_exclusion_is_complete_and_symmetric(low: float, high: float, min_gap: float) -> None:
    reason = exclusion(low, high, min_gap)
    assert (reason is None) == (low < 0 < high and high - low >= min_gap)
    swapped = exclusion(-high, -low, min_gap)
    mirrored = {"recipient wrong": "donor wrong", "donor wrong": "recipient wrong"}
    assert swapped == mirrored.get(str(reason), reason)
    wrong: dict[str | None, Callable[[], bool]] = {
        "both wrong": lambda: low >= 0 and high <= 0,
        "recipient wrong": lambda: low >= 0 and high > 0,
        "donor wrong": lambda: low < 0 and high <= 0,
        "gap too small": lambda: low < 0 < high and high - low < min_gap,
        None: lambda: low < 0 < high,
    }
    assert wrong[reason]()


def test_the_default_gap_is_one_logit() -> None:
    assert MIN_GAP == 1.0
    assert exclusion(-0.5, 0.5) is None and exclusion(-0.5, 0.4999) == "gap too small"
    assert exclusion(0.0, 1.0) == "recipient wrong" and exclusion(-1.0, 0.0) == "donor wrong"
