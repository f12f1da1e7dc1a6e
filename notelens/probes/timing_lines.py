"""Table lines of the timing probe: depths, accuracies and the shuffled control, from rows only."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from notelens.probes.lines import excluded_reasons, mean_lines, rate_lines
from notelens.probes.rows import Aggregate, Json, Row
from notelens.stats import Estimate, cluster_rate, cluster_statistic

Floats = npt.NDArray[np.float64]
DEPTHS = (0.25, 0.5, 0.75, 1.0)
ROUNDING = 1e-9


def timing_lines(name: str, rows: Sequence[Row], threshold: float, *, seed: int) -> list[Aggregate]:
    """All lines; the write depth of the first read-out row comes first, the commit depth of all pairs second."""
    commits = [r for r in rows if r.stage == "commit"]
    cells: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.stage == "read_out":
            key = (str(row.meta["grouping"]), str(row.meta["form"]), str(row.meta["anchor"]))
            cells.setdefault(key, []).append(row)
    blocks = [_Block(name, *key, members, commits, threshold, seed) for key, members in cells.items()]
    lines = [line for block in blocks[:1] for line in block.depth_lines()]
    lines += mean_lines(name, commits, {"commit_depth": "commit_depth"}, unit="depth", swap="none", seed=seed)
    lines += [line for block in blocks[1:] for line in block.depth_lines()]
    for form in dict.fromkeys(b.form for b in blocks):
        chosen = _of_form(commits, form)
        metrics = {"commit_depth": "commit_depth"}
        lines += mean_lines(name, chosen, metrics, unit="depth", swap="none", params={"form": form}, seed=seed)
    lines += [line for block in blocks for line in block.control_lines()]
    lines += [line for block in blocks for line in block.accuracy_lines()]
    for form, block in {b.form: b for b in blocks}.items():
        lines += block.agreement_lines(form)
    kept = [r for r in commits if r.excluded is None]
    for depth in DEPTHS:
        done = [cast(float, r.values["commit_depth"]) <= depth for r in kept]
        estimate = cluster_rate(done, [r.cluster for r in kept])
        lines.append(_line(name, "committed_share", {"depth": depth}, estimate, commits, "fraction"))
    metrics = {"competent": "competence", "flipped": "flip_rate"}
    lines += rate_lines(name, commits, metrics, include_excluded=True, swap="none")
    return lines + mean_lines(name, commits, {"margin_gap": "margin_gap"}, unit="logit", swap="none", seed=seed)


def stays_above(accuracies: Floats, threshold: float) -> Floats:
    """First index of each row from which all entries are at least ``threshold``; NaN where there is none."""
    high = accuracies >= threshold - ROUNDING
    for_good = np.logical_and.accumulate(high[:, ::-1], axis=1)[:, ::-1]
    return np.where(for_good.any(axis=1), for_good.argmax(axis=1).astype(np.float64), np.nan)


class _Block:
    """Read-out rows of one grouping, form set and anchor: one row per family, which is what is resampled."""

    def __init__(
        self, name: str, grouping: str, form: str, anchor: str, rows: list[Row], commits: list[Row],
        threshold: float, seed: int,
    ) -> None:  # fmt: skip
        self.name, self.form, self.rows, self.threshold, self.seed = name, form, rows, threshold, seed
        self.kept = sorted((r for r in rows if r.excluded is None), key=lambda r: r.cluster)
        self.params: dict[str, Json] = {"anchor": anchor, "form": form, "grouping": grouping}
        self.commits = [r for r in _of_form(commits, form) if r.excluded is None]
        self.all_commits = _of_form(commits, form)
        self.n_layers = int(cast(int, rows[0].values["n_layers"]))
        write = self._depth("conclusion").value
        self.layer = None if write is None else round(write * self.n_layers)

    def _table(self, label: str) -> tuple[Floats, int]:
        """Hits per layer and trials of every family, and the number of trials."""
        kept = [r for r in self.kept if r.values.get(f"{label}_total")]
        table = [[*cast(Sequence[float], r.values[f"{label}_correct"]), r.values[f"{label}_total"]] for r in kept]
        totals = np.asarray(table, dtype=np.float64).reshape(len(kept), self.n_layers + 2)
        return totals, int(totals[:, -1].sum())

    def _estimate(self, totals: Floats, n: int, statistic: Callable[[Floats], Floats]) -> Estimate:
        return cluster_statistic(totals, statistic, n, seed=self.seed)

    def _depth(self, label: str) -> Estimate:
        totals, n = self._table(label)
        return self._estimate(totals, n, lambda t: stays_above(t[:, :-1] / t[:, -1:], self.threshold) / self.n_layers)

    def depth_lines(self) -> list[Aggregate]:
        """``write_depth``, ``field_depth``, ``repetition_depth`` and ``commit_minus_write``."""
        lines = [self._line("write_depth", self._depth("conclusion"), "depth", control="shuffled_accuracy")]
        lines += [
            self._line(f"{label}_depth", self._depth(label), "depth")
            for label in ("field", "repetition")
            if any(f"{label}_total" in r.values for r in self.rows)
        ]
        families = sorted({r.cluster for r in (*self.kept, *self.commits)})
        totals, _ = self._table("conclusion")
        read = dict(zip([r.cluster for r in self.kept if r.values.get("conclusion_total")], totals, strict=True))
        empty = np.zeros(self.n_layers + 2)
        table: list[Floats] = []
        for family in families:
            depths = [cast(float, r.values["commit_depth"]) for r in self.commits if r.cluster == family]
            table.append(np.concatenate([read.get(family, empty), [sum(depths), len(depths)]]))

        def difference(t: Floats) -> Floats:
            with np.errstate(invalid="ignore", divide="ignore"):
                write = stays_above(t[:, :-3] / t[:, -3:-2], self.threshold) / self.n_layers
                return np.where(t[:, -3] > 0, t[:, -2] / t[:, -1] - write, np.nan)

        width = self.n_layers + 4
        estimate = self._estimate(np.asarray(table).reshape(len(table), width), len(self.commits), difference)
        return [*lines, self._line("commit_minus_write", estimate, "depth", self.all_commits)]

    def control_lines(self) -> list[Aggregate]:
        """``shuffled_accuracy`` at the write layer (or the best one), and its mean maximum over layers."""
        kept = [r for r in self.kept if all(cast(Sequence[int], r.values["shuffled_total"]))]
        hits = np.asarray([r.values["shuffled_correct"] for r in kept], dtype=np.float64)  # [family, shuffle, layer]
        trials = np.asarray([r.values["shuffled_total"] for r in kept], dtype=np.float64)
        if not kept:
            hits, trials = np.zeros((0, 1, self.n_layers + 1)), np.zeros((0, 1))
        n_shuffles, width = hits.shape[1], hits.shape[2]
        n = int(trials.sum() / n_shuffles)
        layer = self._best_layer()
        at_layer = np.stack([hits[:, :, layer].sum(axis=1), trials.sum(axis=1)], axis=1)
        everywhere = np.concatenate([hits.reshape(len(kept), -1), trials], axis=1)

        def highest(t: Floats) -> Floats:
            by_layer = t[:, : n_shuffles * width].reshape(len(t), n_shuffles, width)
            return (by_layer.max(axis=2) / t[:, n_shuffles * width :]).mean(axis=1)

        where = "write_layer" if self.layer is not None else "best_layer"
        mean = self._estimate(at_layer, n, lambda t: t[:, 0] / t[:, 1])
        most = self._estimate(everywhere, n, highest)
        return [
            self._line("shuffled_accuracy", mean, "accuracy", at=where, layer=layer),
            self._line("shuffled_accuracy", most, "accuracy", at="max_over_layers"),
        ]

    def accuracy_lines(self) -> list[Aggregate]:
        """Accuracy of every label at the write layer, or at the layer where the conclusion is read best."""
        layer = self._best_layer()
        lines: list[Aggregate] = []
        for label in ("conclusion", "field", "repetition"):
            if any(f"{label}_total" in r.values for r in self.rows):
                totals, n = self._table(label)
                estimate = self._estimate(totals[:, [layer, -1]], n, lambda t: t[:, 0] / t[:, 1])
                lines.append(self._line(f"{label}_accuracy", estimate, "accuracy", layer=layer))
        return lines

    def _best_layer(self) -> int:
        if self.layer is not None:
            return self.layer
        totals, _ = self._table("conclusion")
        return int(totals[:, :-1].sum(axis=0).argmax())

    def agreement_lines(self, form: str) -> list[Aggregate]:
        """Different answer words per family, and how far repetition and conclusion coincide in a form set."""
        words = [[cast(float, r.values["answer_pairs"]), 1.0] for r in self.rows if "answer_pairs" in r.values]
        varied = self._estimate(np.asarray(words).reshape(-1, 2), len(words), lambda t: t[:, 0] / t[:, 1])
        lines = [_line(self.name, "answer_pairs", {"form": form}, varied, [], "count")]
        kept = [r for r in self.kept if r.values.get("repetition_agreement") is not None]
        if not kept:
            return lines
        pairs = [[cast(float, r.values["repetition_agreement"]), cast(float, r.values["n_prompts"])] for r in kept]
        estimate = self._estimate(np.asarray(pairs), len(kept), lambda t: t[:, 0] / t[:, 1])
        return [*lines, _line(self.name, "repetition_agreement", {"form": form}, estimate, self.rows, "share")]

    def _line(
        self, metric: str, estimate: Estimate, unit: str, rows: Sequence[Row] | None = None,
        control: str | None = None, **params: Any,
    ) -> Aggregate:  # fmt: skip
        return _line(self.name, metric, self.params | params, estimate, rows or self.rows, unit, control)


def _of_form(rows: Sequence[Row], form: str) -> list[Row]:
    return [r for r in rows if r.meta["form"] in form.split("+")]


def _line(
    name: str, metric: str, params: dict[str, Json], estimate: Estimate, rows: Sequence[Row], unit: str,
    control: str | None = None,
) -> Aggregate:  # fmt: skip
    reasons = excluded_reasons(rows)
    return Aggregate(name, metric, "both", params, estimate, sum(reasons.values()), reasons, "none", unit, control)
