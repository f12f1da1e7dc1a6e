"""Which tokens carry the effect: shares by kind of token and by region of the prompt, against their base rates.

Claim: delimiters and template tokens hold more of the effect than their number explains.

Falsifier: a share of the effect at or below the share of such tokens.

The map is that of the specificity probe: every row behind the field is exchanged on its own, in both directions, and a
share is the part of the summed positive effects. The published record gives shares without base rates; on its Qwen models
delimiters hold less than content tokens do, which says nothing until one knows how many of them there are. So every share
stands beside the share of tokens (``..._base_rate``), and ``enrichment`` is the ratio of the two.

Cost for each pair: 2 prefills and 2 x (positions + 1) one-token readers.
"""

from collections.abc import Sequence
from dataclasses import replace

from notelens.probes.base import Aggregate, Json, Row, ends_lines, mean_lines, rate_lines
from notelens.probes.ranking import numbers, ranked
from notelens.probes.specificity import Specificity

NO_EFFECT = "no position has a positive effect"


class TokenStats(Specificity):
    """Shares of the effect by token class and region.

    Args:
        pairs_per_instance: 1 uses the first version of the rule only, 2 both where the instance has them.

    Raises:
        InputError: ``pairs_per_instance`` is neither 1 nor 2.
    """

    name = "token_stats"
    paper_ref = "sec:mechanism (token statistics)"
    claim = "Delimiters and template tokens hold more of the effect than their number explains."
    falsifier = "Their share of the effect is at or below their share of the tokens."
    stages = ("map",)

    def __init__(self, *, pairs_per_instance: int = 1) -> None:
        super().__init__(pairs_per_instance=pairs_per_instance)

    def aggregate(self, rows: Sequence[Row], *, seed: int = 0) -> list[Aggregate]:
        """Shares of delimiters, of every class and of every region; where the strongest row is; ends of the pairs."""
        cells = [_cells(r) if r.excluded is None else None for r in rows]
        names = sorted({key for found in cells if found is not None for key in found[0]})
        shares = [r if c is None else _shares(r, *c, names) for r, c in zip(rows, cells, strict=True)]
        lines: list[Aggregate] = []

        def mean(key: str, metric: str, unit: str, control: str | None, params: dict[str, Json]) -> None:
            lines.extend(
                mean_lines(self.name, shares, {key: metric}, unit=unit, params=params, control=control, seed=seed)
            )

        mean("effect/delimiter", "delimiter_mass", "share", "delimiter_base_rate", {})
        mean("base/delimiter", "delimiter_base_rate", "share", None, {})
        mean("enrichment/delimiter", "delimiter_enrichment", "ratio", None, {})
        for name in (n for n in names if n != "delimiter"):
            kind, _, value = name.partition("=")
            params: dict[str, Json] = {f"at_{kind}": value}
            mean(f"effect/{name}", f"{kind}_mass", "share", f"{kind}_base_rate", params)
            mean(f"base/{name}", f"{kind}_base_rate", "share", None, params)
            top = rate_lines(self.name, shares, {f"top/{name}": f"top_token_{kind}"}, params=params)
            lines += top
        lines += rate_lines(self.name, rows, {"all_flipped": "flip_rate"})
        return lines + ends_lines(self.name, rows, seed=seed)


def _cells(row: Row) -> tuple[dict[str, list[int]], list[float], int]:
    """Indices of positions by what they are; their positive effects; the index of the strongest."""
    positions, effects = numbers(row, "positions"), [float(e) for e in numbers(row, "effects")]
    regions, kinds, inside = numbers(row, "regions"), numbers(row, "kinds"), numbers(row, "aggregator")
    found: dict[str, list[int]] = {"delimiter": [i for i, hit in enumerate(inside) if hit]}
    for i, p in enumerate(positions):
        found.setdefault(f"region={regions[p]}", []).append(i)
        found.setdefault(f"class={kinds[i]}", []).append(i)
    strongest = positions.index(ranked(positions, effects)[0])
    return found, [max(e, 0.0) for e in effects], strongest


def _shares(row: Row, cells: dict[str, list[int]], gains: list[float], strongest: int, names: Sequence[str]) -> Row:
    """Shares of one map row under every name, 0 where the prompt has no such token."""
    total = sum(gains)
    if total == 0.0:
        return replace(row, excluded=NO_EFFECT)
    values: dict[str, Json] = {}
    for name in names:
        mine = cells.get(name, [])
        effect, base = sum(gains[i] for i in mine) / total, len(mine) / len(gains)
        values |= {f"effect/{name}": effect, f"base/{name}": base, f"top/{name}": strongest in mine}
        values[f"enrichment/{name}"] = effect / base if base else 0.0
    return replace(row, values=values)
