"""Head and write effects: the read head and the writing layer of the hand-set decoder, and equality with hooked forwards."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from notelens.circuits.heads import Head, head_effects, head_map, read_heads
from notelens.circuits.writes import WriteEffects, component_outputs, write_effects
from notelens.context import Context, prefill
from notelens.errors import CompetenceError, NonFiniteError, PatchError
from notelens.intervene.engine import Reader
from tests.contracts import models as contract
from tests.oracle.components import head_outputs, swap_component, swap_heads
from tests.tiny import READ_HEAD, READ_LAYER, broken_blind, tiny_pair

PAIR = tiny_pair(n_notes=1)
ANSWERS = PAIR.answer_ids
N = len(PAIR.old)
NOTE = PAIR.old.tokens.index(";")
N_HEADS = 4


def caches(model: Any, pair: Any = PAIR) -> list[Any]:
    return [model.prefill(p.token_ids).cache for p in (pair.old, pair.new)]


# --- heads: known values ----------------------------------------------------------------------------------------------


def test_one_head_reads_the_note(tiny: Any) -> None:
    recipient, donor = caches(tiny)
    found = head_map(tiny, recipient, donor, Reader.last(recipient, ANSWERS), [NOTE], ks=(1, 2, 4, 8, 16), n_random=6)
    expected = torch.zeros(2, N_HEADS)
    expected[READ_LAYER, READ_HEAD] = 1.0
    torch.testing.assert_close(found.recovery, expected, atol=1e-5, rtol=0)
    assert found.mode == "isolated" and found.ks == (1, 2, 4, 8), "there are eight heads, so 16 is left out"
    assert found.joint_top == pytest.approx([1.0] * 4, abs=1e-5)
    assert [len(row) for row in found.joint_random] == [6] * 4
    assert {round(v, 4) for row in found.joint_random for v in row} <= {0.0, 1.0}
    assert found.joint_random[-1] == pytest.approx([1.0] * 6, abs=1e-5), "eight random heads are all heads"


def test_attention_mass_on_the_notes(tiny: Any) -> None:
    """Heads without a query of their own spread evenly over all rows and the decision; others look at ``start``."""
    pair = tiny_pair(n_notes=2)
    notes = [i for i, word in enumerate(pair.old.tokens) if word == ";"]
    recipient, donor = caches(tiny, pair)
    found = head_map(tiny, recipient, donor, Reader.last(recipient, ANSWERS), notes, ks=(1,), n_random=1)
    even = 2 / len(pair.old)
    expected = torch.tensor([[0.0, 0.0, even, 0.0], [even, even, 1.0, even]])
    torch.testing.assert_close(found.note_mass, expected, atol=1e-5, rtol=0)


def test_draws_depend_on_the_seed_alone(tiny: Any) -> None:
    recipient, donor = caches(tiny)
    reader = Reader.last(recipient, ANSWERS)

    def drawn(seed: int) -> Any:
        return head_map(tiny, recipient, donor, reader, [NOTE], ks=(1, 4), n_random=12, seed=seed).joint_random

    torch.manual_seed(7)
    first = drawn(0)
    torch.manual_seed(8)
    assert drawn(0) == first != drawn(1)


def test_a_recovery_needs_two_competent_ends() -> None:
    model = broken_blind()
    recipient, donor = caches(model)
    with pytest.raises(CompetenceError, match=r"head recoveries are not defined: .*wrong \(margins"):
        head_map(model, recipient, donor, Reader.last(recipient, ANSWERS), [NOTE])
    contexts = [prefill(model, p) for p in (PAIR.old, PAIR.new)]
    with pytest.raises(CompetenceError, match="write effects are not defined"):
        write_effects(model, contexts[0], contexts[1], [NOTE], ANSWERS)


def test_heads_that_do_not_exist_are_refused(tiny: Any) -> None:
    recipient, donor = caches(tiny)
    reader = Reader.last(recipient, ANSWERS)

    def refused(message: str, sets: Sequence[Sequence[Head]], used: Reader = reader) -> None:
        with pytest.raises(PatchError, match=message):
            head_effects(tiny, recipient, donor, sets, used)

    refused(r"head 0.4 does not exist: 2 layers of 4 query heads", [[(0, 3)], [(0, 4)]])
    refused(r"head 2.0 does not exist", [[(2, 0)]])
    refused(r"head 0.-1 does not exist", [[(0, -1)]])
    refused(r"a set of heads is empty", [[]])
    refused(rf"starts behind {N + 1} rows", [[(0, 0)]], Reader(N + 1, (1,), ANSWERS))
    with pytest.raises(PatchError, match=rf"note row {N - 1} is outside the rows that the reader sees"):
        head_map(tiny, recipient, donor, reader, [N - 1])
    with pytest.raises(PatchError, match="two answers, the reader reads 1"):
        head_map(tiny, recipient, donor, Reader.last(recipient, (1,)), [NOTE])
    values = [v.clone() for v in donor.values]
    values[READ_LAYER][1, NOTE] = float("nan")
    bad = donor.replace_tensors(donor.keys, values, history=("poisoned",))
    with pytest.raises(NonFiniteError):
        head_effects(tiny, recipient, bad, [[(READ_LAYER, READ_HEAD)]], reader)
    assert tiny.attention_kernel == "sdpa"


# --- heads: the slow way ----------------------------------------------------------------------------------------------

FAMILIES = ("llama", "qwen3", "mixtral", "gemma2", "gpt_oss")


@pytest.mark.parametrize("name", FAMILIES)
def test_heads_equal_a_forward_with_hooks(name: str) -> None:
    model = contract.note_model(name)
    ids, other = contract.random_ids(), contract.random_ids(changed=[3, 15])
    recipient, donor = model.prefill(ids).cache, model.prefill(other).cache
    n_layers, width = model.geometry.n_layers, model.geometry.layers[0].d_value
    every = [(layer, head) for layer in range(n_layers) for head in range(N_HEADS)]
    sets = [[head] for head in every] + [[(0, 1), (2, 3), (2, 0)], [(1, 0), (1, 3)], every]
    found = head_effects(model, recipient, donor, sets, Reader.last(recipient, contract.ANSWERS))
    source = head_outputs(model.hf, other)
    read = read_heads(model, donor, Reader.last(donor, contract.ANSWERS))
    for layer in range(n_layers):
        gap = float((read.outputs[layer].flatten() - source[layer]).abs().max())
        assert gap <= contract.SWAP_TOLERANCE
        mass = read.attention[layer].sum(-1)
        assert bool((mass > 0).all() and (mass < 1).all()), "the rest is on the reader itself, and on the sink"
    for heads, logits in zip(sets, found, strict=True):
        slow = swap_heads(model.hf, ids, source, heads, width)[list(contract.ANSWERS)]
        assert float((logits - slow).abs().max()) <= contract.SWAP_TOLERANCE, heads
    gap = float((found[-1] - read.logits).abs().max())
    assert gap <= contract.SWAP_TOLERANCE, "all heads of all layers are the donor's decision"
    assert float((found - found[0]).abs().max()) > 1e-2


# --- writes -----------------------------------------------------------------------------------------------------------


def test_layer_0_writes_the_note(tiny: Any) -> None:
    """At the delimiter, attention of layer 0 fetches the field and its MLP concludes: either one from the donor is
    enough. Layer 1 and other rows write nothing that is read."""
    contexts = [prefill(tiny, p) for p in (PAIR.old, PAIR.new)]
    other = PAIR.old.anchors["before_decision"]
    found = write_effects(tiny, contexts[0], contexts[1], [NOTE, other], ANSWERS)
    expected = torch.zeros(2, 2, 2)
    expected[0, :, 0] = 1.0
    torch.testing.assert_close(found.recovery, expected, atol=1e-5, rtol=0)
    assert found.rows == (NOTE, other) and found.mode == "in_forward"


def flipping_answers(old: Tensor, new: Tensor) -> tuple[int, int]:
    """Two ids that the two prompts order differently, as far apart as possible."""
    before, after = old[None, :] - old[:, None], new[None, :] - new[:, None]  # [a, b]: logit b minus logit a
    gap = torch.where((before < -0.1) & (after > 0.1), after - before, torch.tensor(0.0))
    a, b = divmod(int(gap.argmax()), len(old))
    assert float(gap[a, b]) >= 1.0, "these prompts do not differ enough"
    return a, b


@pytest.mark.parametrize("name", FAMILIES)
def test_writes_equal_a_forward_with_hooks(name: str) -> None:
    model = contract.note_model(name)
    ids, other = contract.random_ids(), contract.random_ids(changed=[3, 12, 16, 17])
    runs = [model.prefill(i) for i in (ids, other)]
    answers = flipping_answers(*(model.next_logits(r.hidden) for r in runs))
    contexts = [Context(p, r.cache, r.hidden, {}) for p, r in zip(prompts(ids, other), runs, strict=True)]
    rows = (12, 18)
    found = write_effects(model, contexts[0], contexts[1], rows, answers)
    low, high = (float(model.next_logits(r.hidden)[answers[1]] - model.next_logits(r.hidden)[answers[0]]) for r in runs)
    for i, row in enumerate(rows):
        for component in range(2):
            for layer in range(model.geometry.n_layers):
                logits = swap_component(model.hf, ids, other, layer, component, row)
                slow = (float(logits[answers[1]] - logits[answers[0]]) - low) / (high - low)
                assert float(found.recovery[i, component, layer]) == pytest.approx(slow, abs=1e-4)
    assert float(found.recovery.abs().max()) > 1e-2
    parts = write_effects(model, contexts[0], contexts[1], rows, answers, budget_bytes=1)
    torch.testing.assert_close(parts.recovery, found.recovery, atol=1e-5, rtol=0)
    assert isinstance(parts, WriteEffects)


def prompts(*many: Sequence[int]) -> list[Any]:
    from notelens.prompt import Prompt

    return [Prompt("random", "", tuple(i), ("",) * len(i), {}, ("x",) * len(i), {}, "") for i in many]


def test_rows_that_cannot_be_written_are_refused(tiny: Any) -> None:
    contexts = [prefill(tiny, p) for p in (PAIR.old, PAIR.new)]
    for rows, message in (
        ([N - 1], rf"row {N - 1} is not between"),
        ([0], "row 0"),
        ([], r"row \(none\)"),
        ([N], "row"),
    ):
        with pytest.raises(PatchError, match=message):
            write_effects(tiny, contexts[0], contexts[1], rows, ANSWERS)
    shorter = prefill(tiny, tiny_pair(n_notes=2).old)
    with pytest.raises(PatchError, match="equal token length"):
        write_effects(tiny, contexts[0], shorter, [NOTE], ANSWERS)
    with pytest.raises(PatchError, match="different prefixes"):
        write_effects(tiny, contexts[0], contexts[1], [NOTE], ANSWERS, prefix=N)


class Stop(Exception):
    """Raised in the middle of a run."""


def test_hooks_come_off_after_an_exception(tiny: Any) -> None:
    def stop(*_: Any) -> None:
        raise Stop

    handle = tiny.hf.model.layers[1].mlp.register_forward_pre_hook(stop)
    try:
        with pytest.raises(Stop):
            component_outputs(tiny, PAIR.old.token_ids, [NOTE])
    finally:
        handle.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in tiny.hf.modules())
