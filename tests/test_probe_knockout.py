"""Hidden rows in the engine, and the knockout probe: oracle, known answers on the tiny decoder, refusals."""

from typing import Any

import pytest
import torch

from notelens.context import ContextStore
from notelens.errors import InputError, PatchError
from notelens.intervene.engine import Reader, Site, swap_effects
from notelens.probes.base import DIRECTIONS, ProbeResult
from notelens.probes.knockout import BANDS, FRACTIONS, Knockout, band_layers
from tests.oracle.swap import loop_hidden
from tests.probe_cases import assert_rows_make_the_table, case, grid, run
from tests.tiny import FORMS

ALL = Knockout(bands=("all",))


@pytest.fixture(scope="module")
def result() -> ProbeResult:
    return run(ALL, instances=grid(6, FORMS))


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", "llama"])
def test_hidden_rows_equal_rows_taken_out_of_the_cache(name: str) -> None:
    model, hf, instances = case(name)
    pair, store = instances[0].pair("field"), ContextStore(case(name)[0])
    old, new = store.get(pair.old).cache, store.get(pair.new).cache
    n, field = len(old), pair.old.positions("field")
    sites = [
        Site((), hide=(1, n - 2)),
        Site(field, hide=(n - 2, n - 3)),
        Site((n - 2,), hide=tuple(range(1, n - 3))),
        Site(field, hide=(n - 3, n - 3), hide_layers=(1, 2)),
        Site((), hide=tuple(range(n - 1))),
    ]
    found = swap_effects(model, old, [new], sites, Reader.last(old, pair.answer_ids))
    for site, logits in zip(sites, found.logits, strict=True):
        ids = (pair.old.token_ids, pair.new.token_ids)
        expected = loop_hidden(hf, *ids, site.positions, site.hide, pair.answer_ids, site.hide_layers)
        torch.testing.assert_close(logits, expected.cpu(), atol=2e-4, rtol=0)
    assert float((found.logits - found.baseline).abs().max()) > 0.01, "nothing was hidden"


def test_what_cannot_be_hidden_is_refused() -> None:
    model, _, instances = case("tiny")
    pair, store = instances[0].pair("field"), ContextStore(model)
    cache = store.get(pair.old).cache
    reader = Reader.last(cache, pair.answer_ids)
    for site, words in (
        (Site((1,), hide=(1,)), "replaced and hidden"),
        (Site((), hide=(len(cache) - 1,)), "outside the rows"),
        (Site((), hide=(1,), hide_layers=(1, 1)), "empty or out of range"),
    ):
        with pytest.raises(PatchError, match=words):
            swap_effects(model, cache, [cache], [site], reader)
    with pytest.raises(PatchError, match="isolated"):
        swap_effects(model, cache, [cache], [Site((), hide=(1,))], reader, mode="in_forward")


# --- the probe --------------------------------------------------------------------------------------------------------


def test_without_its_note_the_tiny_decoder_is_undecided(result: ProbeResult) -> None:
    """One note decides; with it hidden the margin is what a prompt without a note has, in both states."""
    for row in result.rows:
        assert row.excluded is None
        assert row.values["refreshed_safe"] is False, "the field alone decides nothing"
        shifts = [row.values["kept_shift"][at] for at in range(len(FRACTIONS))]  # type: ignore[index]
        assert all(abs(float(s)) > 0.2 for s in shifts), "the strongest row is the note"
    kept = result.get("p_kept_by_masked_fraction_shift", at_masked_fraction=0.1).estimate.value
    assert kept > 0.2


def test_random_rows_hardly_matter_at_small_shares(result: ProbeResult) -> None:
    line = result.get("p_kept_by_masked_fraction_random", at_masked_fraction=0.1)
    assert line.estimate.value > 0.7
    assert {r.direction for r in result.rows} == set(DIRECTIONS)


def test_the_table_comes_from_rows(result: ProbeResult) -> None:
    assert_rows_make_the_table(ALL, result)


def test_bands_are_thirds() -> None:
    assert [band_layers(b, 30) for b in BANDS] == [(0, 10), (10, 20), (20, 30), None]
    with pytest.raises(InputError, match="no thirds"):
        band_layers("mid", 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"fractions": (0.5, 0.1)}, "must rise"),
        ({"fractions": (0.0,)}, "must rise"),
        ({"bands": ("top",)}, "distinct bands"),
        ({"bands": ("all", "all")}, "distinct bands"),
        ({"n_draws": 1}, "n_draws is 1"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Knockout(**arguments)
