"""The attribution estimate is the gradient times the difference, says that it is an estimate, and its misses are listed."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from notelens.cache.kv import KVCache
from notelens.circuits.note_map import compare
from notelens.errors import NonFiniteError, PatchError
from notelens.intervene.attribution import attribution_effects
from notelens.intervene.engine import Reader, Site, swap_effects
from tests.contracts import models as contract
from tests.tiny import READ_KV_HEAD, READ_LAYER, TOKEN_IDS, tiny_margin, tiny_pair

ANSWERS = (TOKEN_IDS["deny"], TOKEN_IDS["approve"])
PAIR = tiny_pair(n_notes=1)
NOTE = PAIR.old.tokens.index(";")
SIGN = 1.0 if PAIR.old.answer == "approve" else -1.0


def moved(
    recipient: KVCache, donor: KVCache, share: float, layer: int | None = None, row: int | None = None
) -> KVCache:
    """The recipient a share of the way to the donor, everywhere or in one row of one layer."""

    def mix(i: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = a.clone()
        rows = slice(None) if row is None else slice(row, row + 1)
        if layer in (None, i):
            out[:, rows] += share * (b - a)[:, rows]
        return out

    keys, values = (
        tuple(mix(i, a, b) for i, (a, b) in enumerate(zip(x, y, strict=True)))
        for x, y in ((recipient.keys, donor.keys), (recipient.values, donor.values))
    )
    return recipient.replace_tensors(keys, values, history=("moved",))


@torch.no_grad()
def margin(hf: Any, cache: KVCache, reader: Reader) -> float:
    """Margin behind the reader, with plain transformers."""
    store = DynamicCache()
    for layer, (k, v) in enumerate(zip(cache.keys, cache.values, strict=True)):
        store.update(k[None, :, : reader.start].clone(), v[None, :, : reader.start].clone(), layer)
    positions = torch.arange(reader.start, reader.start + len(reader.token_ids))[None]
    out = hf(input_ids=torch.tensor([reader.token_ids]), position_ids=positions, past_key_values=store, use_cache=True)
    a, b = out.logits[0, -1, list(reader.answer_ids)]
    return float(b - a)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("n_reader", [1, 3])
def test_it_is_the_derivative_towards_the_donor(name: str, n_reader: int) -> None:
    """Central differences, extrapolated to step 0, for every layer of a few rows. (Norms, rotations and the softmax of
    these models stay float32 whatever the weights are, so steps are large and the rounding is that of float32.)"""
    model = contract.note_model(name)
    ids, donors = contract.contract_ids(name)
    recipient, donor = model.prefill(ids).cache, model.prefill(donors[0]).cache
    reader = Reader.last(recipient, contract.ANSWERS[:2], n_reader)
    found = attribution_effects(model, recipient, donor, reader)

    def slope(layer: int, row: int, step: float) -> float:
        up, down = (margin(model.hf, moved(recipient, donor, s, layer, row), reader) for s in (step, -step))
        return (up - down) / (2 * step)

    for row in (3, 8, reader.start - 1):
        for layer in range(model.geometry.n_layers):
            expected = (4 * slope(layer, row, 0.05) - slope(layer, row, 0.1)) / 3
            assert float(found.effects[layer, row]) == pytest.approx(expected, rel=5e-3, abs=1e-4)
    assert float(found.effects.abs().max()) > 0.02
    assert not bool(found.effects[:, :3].any()), "rows in front of the first difference are the same on both sides"
    assert torch.equal(found.positions, found.effects.sum(0))
    assert found.mode == "attribution" and found.effects.shape == (model.geometry.n_layers, reader.start)


def test_it_is_linear_in_the_difference() -> None:
    model = contract.note_model("qwen3")
    ids, donors = contract.contract_ids("qwen3")
    recipient, donor = model.prefill(ids).cache, model.prefill(donors[0]).cache
    reader = Reader.last(recipient, contract.ANSWERS[:2])
    full = attribution_effects(model, recipient, donor, reader).effects
    for share in (-1.0, 0.5, 3.0):
        part = attribution_effects(model, recipient, moved(recipient, donor, share), reader).effects
        torch.testing.assert_close(part, share * full, atol=1e-5, rtol=1e-4)
    turned = Reader(reader.start, reader.token_ids, reader.answer_ids[::-1])
    torch.testing.assert_close(attribution_effects(model, recipient, donor, turned).effects, -full, atol=1e-6, rtol=0)


def test_known_value_on_the_hand_set_decoder(tiny: Any) -> None:
    """The note is a value that enters the margin through one read of weight 1: slope of the closed form times 2."""
    recipient, donor = (tiny.prefill(p.token_ids).cache for p in (PAIR.old, PAIR.new))
    found = attribution_effects(tiny, recipient, donor, Reader.last(recipient, ANSWERS))
    slope = (tiny_margin(SIGN + 1e-4) - tiny_margin(SIGN - 1e-4)) / 2e-4
    assert float(found.effects[READ_LAYER, NOTE]) == pytest.approx(-2 * SIGN * slope, rel=1e-3)
    rest = found.effects.clone()
    rest[READ_LAYER, NOTE] = 0.0
    assert float(rest.abs().max()) <= 1e-6


def test_a_saturated_key_is_missed_and_listed(tiny: Any) -> None:
    """The note's key does not match in the recipient, so its weight underflows to 0 and so does every gradient through
    it; swapping the row in moves the whole decision."""
    donor = tiny.prefill(PAIR.old.token_ids).cache
    keys = [k.clone() for k in donor.keys]
    keys[READ_LAYER][READ_KV_HEAD, NOTE] = 0.0
    recipient = donor.replace_tensors(keys, donor.values, history=("note hidden",))
    reader = Reader.last(recipient, ANSWERS)
    rows = range(PAIR.old.decision)
    exact = swap_effects(tiny, recipient, [donor], [Site((p,)) for p in rows], reader)
    shift = (exact.logits[:, 1] - exact.logits[:, 0]) - float(exact.baseline[1] - exact.baseline[0])
    assert float(shift[NOTE]) == pytest.approx(tiny_margin(SIGN) - tiny_margin(0.0), abs=1e-4)
    estimate = attribution_effects(tiny, recipient, donor, reader).positions
    assert float(estimate[NOTE]) == 0.0
    towards = 1.0 if float(shift[NOTE]) > 0 else -1.0
    _, missed = compare(towards * estimate, towards * shift, list(rows), 0.1)
    assert missed == (NOTE,)


def test_estimates_are_compared_by_rank_and_misses() -> None:
    exact = torch.tensor([9.0, 0.5, 0.3, 0.2, 0.05])
    assert compare(exact * 3, exact, [1, 2, 3, 4], 0.1) == (pytest.approx(1.0), ())
    assert compare(-exact, exact, [1, 2, 3], 1.0)[0] == pytest.approx(-1.0)
    assert compare(exact, exact, [1, 2], 0.1)[0] is None, "two rows have no rank correlation worth the name"
    assert compare(torch.zeros(5), exact, [1, 2, 3, 4], 0.1) == (None, (1, 2, 3))
    estimate = torch.tensor([0.0, 0.051, 0.029, -2.0, 0.0])
    assert compare(estimate, exact, [1, 2, 3, 4], 0.1)[1] == (2, 3)
    assert compare(estimate, exact, [1, 2, 3, 4], 0.25)[1] == (2,)


def test_nothing_is_left_behind(tiny: Any) -> None:
    recipient, donor = (tiny.prefill(p.token_ids).cache for p in (PAIR.old, PAIR.new))
    digests = recipient.digest(), donor.digest()
    with torch.no_grad():
        found = attribution_effects(tiny, recipient, donor, Reader.last(recipient, ANSWERS))
        assert not torch.is_grad_enabled()
    assert not found.effects.requires_grad and (recipient.digest(), donor.digest()) == digests
    assert all(p.grad is None and not p.requires_grad for p in tiny.hf.parameters())
    assert tiny.attention_kernel == "sdpa"


def test_what_does_not_fit_is_refused(tiny: Any) -> None:
    recipient, donor = (tiny.prefill(p.token_ids).cache for p in (PAIR.old, PAIR.new))
    n = len(recipient)

    def refused(
        message: str, reader: Reader, base: KVCache = recipient, other: KVCache = donor, **options: Any
    ) -> None:
        with pytest.raises(PatchError, match=message):
            attribution_effects(tiny, base, other, reader, **options)

    last = Reader.last(recipient, ANSWERS)
    refused(r"margin between two answers, the reader reads 3", Reader.last(recipient, (1, 2, 3)))
    refused(rf"starts behind {n + 1} rows of a cache that has {n}", Reader(n + 1, (1,), ANSWERS))
    refused(r"starts behind 0 rows", Reader(0, (1,), ANSWERS))
    refused(r"at least one token", Reader(5, (), ANSWERS))
    refused(r"different prefixes", last, prefix=n)
    foreign = contract.note_model("llama").prefill(PAIR.old.token_ids).cache
    refused(r"the cache has 3 layers, the model 2", last, foreign, foreign)
    values = [v.clone() for v in donor.values]
    values[READ_LAYER][READ_KV_HEAD, NOTE, 0] = float("inf")
    bad = donor.replace_tensors(donor.keys, values, history=("poisoned",))
    with pytest.raises(NonFiniteError, match="gradients are not finite"):
        attribution_effects(tiny, recipient, bad, last)
