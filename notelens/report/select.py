"""From lines of a table and rows of records to what the figures draw. Knows names of metrics, draws nothing."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from notelens.report.recovery import Bar
from notelens.report.reference import reference_rows
from notelens.report.strip import Strip, readable
from notelens.report.style import number
from notelens.report.topk import Curve, Share

Line = Mapping[str, Any]
DIRECTIONS = ("denoising", "noising")
TOP = 8

Entry = tuple[str, str, Mapping[str, Any]]
MEASURES: tuple[tuple[str, str, tuple[Entry, ...]], ...] = (
    (
        "locality",
        "Locality (the field changes)",
        (
            ("field_only_recovery", "field only", {}),
            ("full_downstream_recovery", "full downstream", {}),
        ),
    ),
    (
        "dissociation",
        "Dissociation (the rule changes)",
        (
            ("trigger_only_recovery", "trigger only", {}),
            ("rule_only_recovery", "rule only", {}),
            ("notes_recovery", "notes (behind the trigger)", {}),
            ("notes_after_rule_recovery", "notes (behind the rule)", {}),
        ),
    ),
    (
        "specificity",
        "Specificity",
        (
            ("topk_recovery", f"top {TOP}, own ranking", {"k": TOP, "ranking": "own"}),
            ("topk_recovery", f"top {TOP}, ranked on others", {"k": TOP, "ranking": "split_half"}),
            ("randk_recovery", f"random {TOP}", {"k": TOP}),
        ),
    ),
    (
        "injection",
        "Injection of false notes",
        (
            ("recovery", "from the other value", {}),
            ("recovery", "same, field and rule live", {"notes": "after_rule"}),
            ("recovery", "from the other rule", {"donor": "trigger", "notes": "after_rule"}),
            ("same_conclusion_shift", "same conclusion (control)", {}),
        ),
    ),
    (
        "placebo",
        "Placebo (nothing new)",
        (
            ("recovery", "other filler", {"donor": "other_filler"}),
            ("recovery", "prefilled again", {"donor": "rerun"}),
            ("recovery", "same conclusion", {"donor": "same_conclusion"}),
        ),
    ),
)
REGIONS = ("template", "system", "record", "field", "filler", "rule", "trigger", "request")
FORM_NAMES = {
    "two_clause": "two clauses",
    "polarity": "one trigger",
    "swapped": "actions swapped",
    "negated": "negated trigger",
}


def as_lines(aggregates: Iterable[Any]) -> list[Line]:
    """Aggregates of a probe result as the lines that a run would record of them (without facts of the model)."""
    names = ("experiment", "metric", "method", "params", "n_excluded", "swap", "unit")
    return [
        {name: getattr(a, name) for name in names}
        | {name: getattr(a.estimate, name) for name in ("value", "lo", "hi", "n")}
        for a in aggregates
    ]


def lines_of(lines: Sequence[Line], experiment: str, metric: str, params: Mapping[str, Any]) -> dict[str, Line]:
    """Lines with exactly these params, by method."""
    return {
        str(line["method"]): line
        for line in lines
        if line["experiment"] == experiment and line["metric"] == metric and line["params"] == params
    }


def paper_range(experiment: str, metric: str, params: Mapping[str, Any]) -> tuple[float, float] | None:
    """Smallest and largest value that the paper's records hold over its models; unusable ones are left out.

    The paper ranks positions on the pair itself and injects all rows behind the field: other variants have no range.
    """
    if params.get("ranking", "own") != "own" or {"notes", "donor"} & set(params):
        return None
    values = [row.value for row in reference_rows(experiment, metric, dict(params)) if row.unusable is None]
    return (min(values), max(values)) if values else None


def flat(line: Line) -> bool:
    """Whether the interval has no width although n > 1."""
    return line["n"] > 1 and line["lo"] is not None and line["lo"] == line["hi"]


def select_bars(lines: Sequence[Line]) -> list[Bar]:
    """Recoveries of all probes, both directions where there are two, dissociation also by rule form."""
    bars: list[Bar] = []
    for experiment, group, entries in MEASURES:
        for metric, label, params in entries:
            found = lines_of(lines, experiment, metric, params)
            bars += _bars(group, label, found, paper_range(experiment, metric, params))
        if experiment == "dissociation":
            bars += _bars_by_form(lines)
    return bars


def _bars_by_form(lines: Sequence[Line]) -> list[Bar]:
    """Trigger and notes of every rule form, where there are several."""
    used = {str(x["params"]["form"]) for x in lines if x["experiment"] == "dissociation" and "form" in x["params"]}
    forms = [form for form in FORM_NAMES if form in used] + sorted(used - set(FORM_NAMES))
    bars: list[Bar] = []
    for form in forms if len(forms) > 1 else ():
        for metric, label in (("trigger_only_recovery", "trigger only"), ("notes_recovery", "notes")):
            found = lines_of(lines, "dissociation", metric, {"form": form})
            bars += _bars("Dissociation by rule form", f"{FORM_NAMES.get(form, form)}: {label}", found, None)
    return bars


def _bars(group: str, label: str, found: Mapping[str, Line], paper: tuple[float, float] | None) -> list[Bar]:
    methods = [m for m in DIRECTIONS if m in found] or [m for m in ("both",) if m in found]
    return [
        Bar(group, label, m, x["value"], x["lo"], x["hi"], x["n"], x["n_excluded"], paper, flat(x))
        for m in methods
        for x in (found[m],)
    ]


CURVES = (
    ("topk_recovery", "own", "own", "ranked on the same pair and direction"),
    ("topk_recovery", "split_half", "split", "ranked on the other half of the instances"),
    ("topk_recovery", "cross_direction", "cross", "ranked on the opposite direction"),
    ("randk_recovery", None, "random", "random positions"),
)


def select_topk(lines: Sequence[Line], method: str = "both") -> list[Curve]:
    """Recovery over k for every ranking and for random positions; a k without rows is left out."""
    curves: list[Curve] = []
    for metric, ranking, role, label in CURVES:
        points = sorted(
            (
                x
                for x in lines
                if (x["experiment"], x["metric"], x["method"]) == ("specificity", metric, method)
                and x["params"].get("ranking") == ranking
                and x["value"] is not None
            ),
            key=lambda x: x["params"]["k"],
        )
        if points:
            columns = {c: tuple(p[c] for p in points) for c in ("value", "lo", "hi")}
            ks = tuple(float(p["params"]["k"]) for p in points)
            counts = {p["n"] for p in points}
            n = str(max(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
            curves.append(Curve(f"{label} (n = {n})", role, ks, columns["value"], columns["lo"], columns["hi"]))
    return curves


def select_shares(lines: Sequence[Line]) -> list[Share]:
    """Aggregators, repeated words and regions: share of the strongest positions against share of all positions."""
    kinds = [("aggregators", "aggregator", {}), ("repeated words", "repetition", {})]
    regions = sorted({str(x["params"]["region"]) for x in lines if x["metric"] == "region_share"}, key=_reading_order)
    kinds += [(f"in: {region}", "region", {"region": region}) for region in regions]
    shares: list[Share] = []
    for label, kind, params in kinds:
        top = lines_of(lines, "specificity", f"{kind}_share", {**params, "among": f"top{TOP}"}).get("both")
        base = lines_of(lines, "specificity", f"{kind}_base_rate", params).get("both")
        if top is not None and base is not None and top["value"] is not None and base["value"] is not None:
            shares.append(Share(label, top["value"], base["value"], top["lo"], top["hi"]))
    return shares


def _reading_order(region: str) -> tuple[int, str]:
    return (REGIONS.index(region) if region in REGIONS else len(REGIONS), region)


def select_strips(rows: Sequence[Line], direction: str = "denoising") -> list[Strip]:
    """The first pair of every rule form, by id, whose effects could be measured."""
    first: dict[str, Line] = {}
    maps = [r for r in rows if r["stage"] == "map" and r["direction"] == direction and r["excluded"] is None]
    for row in sorted(maps, key=lambda r: str(r["item"])):
        first.setdefault(str(row["meta"]["form"]), row)
    return [_strip(form, row) for form, row in first.items()]


def _strip(form: str, row: Line) -> Strip:
    values, meta = row["values"], row["meta"]
    effects: list[float | None] = [None] * len(values["tokens"])
    for where, what in (("field_positions", "field_effects"), ("positions", "effects")):
        for position, effect in zip(values[where], values[what], strict=True):
            effects[position] = effect
    known = [(e, p) for p, e in enumerate(effects) if e is not None]
    top = sorted(known, key=lambda pair: (-pair[0], pair[1]))[:4]
    strongest = "   ".join(f"\u201c{readable(values['tokens'][p]).strip()}\u201d {number(e, 2)}" for e, p in top)
    return Strip(
        title=f"{FORM_NAMES.get(form, form)}: {row['item']}",
        tokens=tuple(values["tokens"]),
        effects=tuple(effects),
        field=frozenset(values["field_positions"]),
        trigger=frozenset(values["trigger_positions"]),
        rule=frozenset(values["rule_positions"]),
        note=f"field {meta['v0']} to {meta['v1']};  strongest alone: {strongest}",
    )
