"""The engine and what people use instead of it, each as ``method(prepared, sites) -> margins``.

A margin is the second answer's logit minus the first one's. Isolated swaps: ``engine``, ``loop`` and ``native_*`` give the
same numbers. In-forward swaps: ``hook_loop`` and ``nnsight_loop`` give the same numbers as the engine's ``in_forward`` mode;
they are here for what they cost, because a full forward per site is how most people ask the question. ``attribution`` is an
estimate of margin *changes*. Baselines call the model as their users do, whole vocabulary included; the engine computes the
answer rows only. What a method may prepare once per prompt (:func:`set_up`) is outside its clock.
"""

import copy
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.workbench import BATCHES, Prepared
from notelens.cache.hf import to_transformers
from notelens.cache.ops import slice_rows
from notelens.intervene.attribution import attribution_effects
from notelens.intervene.engine import Site, swap_effects
from notelens.intervene.patch import KEY_HOOK, VALUE_HOOK

Method = Callable[[Prepared, Sequence[Site]], Tensor]


def engine(prepared: Prepared, sites: Sequence[Site]) -> Tensor:
    """The patch engine: all sites in batches over one base cache."""
    logits = swap_effects(prepared.model, prepared.recipient, [prepared.donor], sites, prepared.reader).logits
    return logits[:, 1] - logits[:, 0]


@torch.no_grad()
def loop(prepared: Prepared, sites: Sequence[Site]) -> Tensor:
    """One site at a time: deep-copied transformers cache, overwritten row, one-token forward (the paper's code)."""
    base, donor, model = prepared.extras["base"], prepared.donor, prepared.model
    last = torch.tensor([[prepared.case.recipient_ids[-1]]], device=model.device)
    margins = []
    for site in sites:
        cache = copy.deepcopy(base)
        rows = list(site.positions)
        for layer in range(*(site.layers or (0, donor.n_layers))):
            cache.layers[layer].keys[0, :, rows] = donor.keys[layer][:, rows]
            cache.layers[layer].values[0, :, rows] = donor.values[layer][:, rows]
        margins.append(_margin(prepared, model.hf(input_ids=last, past_key_values=cache, use_cache=True).logits[0, -1]))
    return torch.stack(margins).cpu()


def native(batch: int) -> Method:
    """Native batching: ``batch`` copies of the cache, a row overwritten in each, one forward of one token each."""

    @torch.no_grad()
    def run(prepared: Prepared, sites: Sequence[Site]) -> Tensor:
        base, donor, model = prepared.extras["base"], prepared.donor, prepared.model
        margins = []
        for start in range(0, len(sites), batch):
            part = sites[start : start + batch]
            cache = copy.deepcopy(base)
            cache.batch_repeat_interleave(len(part))
            for layer in range(donor.n_layers):
                at = [(i, p) for i, s in enumerate(part) if _in_band(s, layer) for p in s.positions]
                if at:
                    index, rows = torch.tensor(at, device=model.device).T
                    cache.layers[layer].keys[index, :, rows] = donor.keys[layer][:, rows].transpose(0, 1)
                    cache.layers[layer].values[index, :, rows] = donor.values[layer][:, rows].transpose(0, 1)
            last = torch.full((len(part), 1), prepared.case.recipient_ids[-1], device=model.device)
            logits = model.hf(input_ids=last, past_key_values=cache, use_cache=True).logits[:, -1]
            margins.append(_margin(prepared, logits))
        return torch.cat(margins).cpu()

    return run


def hook_loop(prepared: Prepared, sites: Sequence[Site]) -> Tensor:
    """One site at a time: a full forward through TransformerBridge with the donor's keys and values hooked in."""
    model, donor = prepared.model, prepared.extras["hooked"]
    ids = torch.tensor([list(prepared.case.recipient_ids)], device=model.device)
    margins = []
    for site in sites:
        band = range(*(site.layers or (0, model.geometry.n_layers)))
        names = [hook.format(layer=i) for i in band for hook in (KEY_HOOK, VALUE_HOOK)]
        hooks = [(name, _put(donor[name], list(site.positions))) for name in names]
        with torch.no_grad():
            margins.append(_margin(prepared, model.bridge.run_with_hooks(ids, fwd_hooks=hooks)[0, -1]))
    return torch.stack(margins).cpu()


def nnsight_loop(prepared: Prepared, sites: Sequence[Site]) -> Tensor:
    """One site at a time: a full forward through nnsight with the donor's key and value projections put in place."""
    import nnsight

    traced, keys, values = prepared.extras["nnsight"]
    ids = torch.tensor([list(prepared.case.recipient_ids)], device=prepared.model.device)
    margins = []
    for site in sites:
        rows = list(site.positions)
        band = range(*(site.layers or (0, len(keys))))
        with torch.no_grad(), traced.trace(input_ids=ids, use_cache=False):
            for i in band:
                attention = traced.model.layers[i].self_attn
                attention.k_proj.output[:, rows] = keys[i][:, rows]
                attention.v_proj.output[:, rows] = values[i][:, rows]
            logits = nnsight.save(traced.output.logits[0, -1])
        margins.append(_margin(prepared, logits))
    return torch.stack(margins).cpu()


def attribution(prepared: Prepared, sites: Sequence[Site]) -> Tensor:
    """AtP: one forward and one backward estimate every layer and position; returns *changes* of the margin.

    Raises:
        ValueError: a site has several positions.
    """
    found = attribution_effects(prepared.model, prepared.recipient, prepared.donor, prepared.reader).effects.double()
    if any(len(site.positions) != 1 for site in sites):
        raise ValueError("the benchmark reads attribution estimates of single positions only")
    below = torch.cat([torch.zeros_like(found[:1]), found.cumsum(0)])
    bands = torch.tensor([site.layers or (0, len(found)) for site in sites])
    rows = torch.tensor([site.positions[0] for site in sites])
    return below[bands[:, 1], rows] - below[bands[:, 0], rows]


def prefill(prepared: Prepared, sites: Sequence[Site]) -> Tensor:
    """An ordinary prefill of the recipient, the head on the last row only: the unit of ``cost_in_prefills``."""
    model = prepared.model
    return _answer_margin(
        model.answer_logits(model.prefill(prepared.case.recipient_ids).hidden, prepared.case.answer_ids)
    )


METHODS: dict[str, Method] = {
    "prefill": prefill,
    "engine": engine,
    "loop": loop,
    **{f"native_{b}": native(b) for b in BATCHES},
    "hook_loop": hook_loop,
    "nnsight_loop": nnsight_loop,
    "attribution": attribution,
}
ISOLATED = ("engine", "loop", *(f"native_{b}" for b in BATCHES))
IN_FORWARD = ("hook_loop", "nnsight_loop")


def available(name: str) -> bool:
    """Whether what a method needs is installed (nnsight comes with the extra ``bench``)."""
    return name != "nnsight_loop" or importlib.util.find_spec("nnsight") is not None


def set_up(name: str, prepared: Prepared) -> None:
    """What a method prepares once per prompt, before its clock starts; nothing where it is there already."""
    extras = prepared.extras
    if (name == "loop" or name.startswith("native")) and "base" not in extras:
        extras["base"] = to_transformers(slice_rows(prepared.recipient, 0, prepared.reader.start))
    if name == "hook_loop" and "hooked" not in extras:
        every = range(prepared.model.geometry.n_layers)
        names = {hook.format(layer=i) for i in every for hook in (KEY_HOOK, VALUE_HOOK)}
        ids = torch.tensor([list(prepared.case.donor_ids)], device=prepared.model.device)
        with torch.no_grad():
            extras["hooked"] = prepared.model.bridge.run_with_cache(ids, names_filter=lambda hook: hook in names)[1]
    if name == "nnsight_loop" and "nnsight" not in extras:
        extras["nnsight"] = _traced(prepared)


def _put(donor: Tensor, rows: list[int]) -> Callable[[Tensor, Any], Tensor]:
    """A hook that overwrites rows with the donor's."""

    def swap(tensor: Tensor, hook: Any) -> Tensor:
        tensor[:, rows] = donor[:, rows]
        return tensor

    return swap


def _in_band(site: Site, layer: int) -> bool:
    return site.layers is None or site.layers[0] <= layer < site.layers[1]


def _margin(prepared: Prepared, logits: Tensor) -> Tensor:
    return _answer_margin(logits[..., list(prepared.case.answer_ids)])


def _answer_margin(answers: Tensor) -> Tensor:
    return (answers[..., 1] - answers[..., 0]).float()


def _traced(prepared: Prepared) -> tuple[Any, list[Tensor], list[Tensor]]:
    """An nnsight model over a second module tree on the same parameters, and the donor's key and value projections."""
    import nnsight

    hf = prepared.model.hf
    twin = copy.deepcopy(hf, {id(t): t for t in [*hf.parameters(), *hf.buffers()]})
    traced = nnsight.NNsight(twin)
    ids = torch.tensor([list(prepared.case.donor_ids)], device=prepared.model.device)
    with torch.no_grad(), traced.trace(input_ids=ids, use_cache=False):
        keys, values = nnsight.save([]), nnsight.save([])
        for i in range(prepared.model.geometry.n_layers):
            attention = traced.model.layers[i].self_attn
            keys.append(attention.k_proj.output)
            values.append(attention.v_proj.output)
    return traced, keys, values
