"""The figures of a run, as functions of its records. Imports no torch and no probe; draws what the run holds.

Four figures: ``recovery`` (what every set of patched rows recovers), ``topk`` (how few positions suffice), ``layers``
(when the conclusion is written and the decision settled) and ``strip`` (the prompt's tokens coloured by effect).
"""

import argparse
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from notelens.errors import InputError, NotelensError
from notelens.registry import nearest
from notelens.report import style
from notelens.report.layers import draw_layers
from notelens.report.recovery import draw_recovery
from notelens.report.select import MEASURES, select_bars, select_shares, select_strips, select_topk
from notelens.report.select_layers import select_panels
from notelens.report.strip import draw_strips
from notelens.report.topk import draw_topk
from notelens.runs.records import FILE, Records, read_records

FOLDER = "figures"
LINE_WIDTH = 96
"""Characters of a sentence that stands in place of a picture."""


@dataclass(frozen=True)
class FigureSpec:
    """One figure.

    Attributes:
        title: its heading.
        probes: experiments it can show; it is drawn when the run has finished at least one of them.
        draw: from records, or ``None`` where they hold nothing to draw.
    """

    title: str
    probes: tuple[str, ...]
    draw: Callable[[Records, str], Figure | None]


def _recovery(records: Records, title: str) -> Figure | None:
    bars = select_bars(records.all_aggregates())
    if all(bar.value is None for bar in bars):
        return None
    return draw_recovery(bars, title, _subtitle(records, "isolated swaps", "95 % intervals over scenario families"))


def _topk(records: Records, title: str) -> Figure | None:
    lines = records.all_aggregates()
    curves = select_topk(lines)
    if not curves:
        return None
    subtitle = _subtitle(records, "isolated swaps", "both directions pooled", "95 % intervals over scenario families")
    return draw_topk(curves, select_shares(lines), title, subtitle, "the 8 strongest positions")


def _layers(records: Records, title: str) -> Figure | None:
    panels, n_layers = select_panels(records.rows("timing"), records.aggregates.get("timing", []))
    if not panels:
        return None
    return draw_layers(panels, n_layers, title, _subtitle(records, "linear probes on the residual stream"))


def _strip(records: Records, title: str) -> Figure | None:
    strips = select_strips(records.rows("specificity"))
    if not strips:
        return None
    subtitle = _subtitle(records, "isolated swap of one position at a time, denoising", "first pair of each form by id")
    return draw_strips(strips, title, subtitle)


FIGURES: Mapping[str, FigureSpec] = {
    "recovery": FigureSpec("Recovery by patched rows", tuple(name for name, _, _ in MEASURES), _recovery),
    "topk": FigureSpec("Recovery by number of patched positions", ("specificity",), _topk),
    "layers": FigureSpec("Conclusion and commitment by layer", ("timing",), _layers),
    "strip": FigureSpec("Effect of every single position", ("specificity",), _strip),
}


def draw_figure(name: str, run_dir: Path) -> Figure:
    """One figure of a run; where its rows are missing or all excluded, a figure that says so.

    Args:
        name: key of :data:`FIGURES`.
        run_dir: folder of the run.

    Raises:
        InputError: unknown name, or the folder holds no records.
        RecordError: the records cannot be read.
    """
    if name not in FIGURES:
        raise InputError(f"unknown figure {name!r}; {nearest(name, list(FIGURES))}")
    return _draw(name, _records(run_dir))


def write_figures(run_dir: Path, out: Path | None = None) -> list[Path]:
    """Write every figure that the run's probes allow, as PNG and SVG; a run without records gives none.

    Args:
        run_dir: folder of the run.
        out: folder for the files; ``figures`` inside the run's folder by default.

    Raises:
        RecordError: records cannot be read, or a file cannot be written; earlier files are intact.
    """
    records = read_records(run_dir)
    written: list[Path] = []
    for name, spec in FIGURES.items():
        if any(probe in records.probes for probe in spec.probes):
            written += style.save(_draw(name, records), out if out is not None else run_dir / FOLDER, name)
    return written


def figure_command(name: str, description: str | None) -> list[Path]:
    """Body of a script that draws one figure: reads ``RUN [--out DIR]`` from the command line, writes the files.

    Bad input ends the process with exit code 2 and one sentence.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run, as written by 'notelens run'")
    parser.add_argument("--out", type=Path, default=None, help="folder for the files (default: RUN/figures)")
    given = parser.parse_args()
    try:
        figure = draw_figure(name, given.run)
        return style.save(figure, given.out if given.out is not None else given.run / FOLDER, name)
    except NotelensError as error:
        parser.error(str(error))


def _records(run_dir: Path) -> Records:
    records = read_records(run_dir)
    if not records.runs and not records.items:
        raise InputError(f"{run_dir}: holds no records ({FILE}); give the folder that 'notelens run' wrote to")
    return records


def _draw(name: str, records: Records) -> Figure:
    spec = FIGURES[name]
    figure = spec.draw(records, spec.title)
    return figure if figure is not None else style.message(spec.title, _why_nothing(records, spec.probes))


def _subtitle(records: Records, *parts: str) -> str:
    line = next(iter(records.all_aggregates()), {})
    model = str(line.get("model") or "unknown model")
    ungated = "" if line.get("gate") == "passed" else " (UNGATED)"
    return " · ".join((model + ungated, *parts))


def _why_nothing(records: Records, probes: tuple[str, ...]) -> list[str]:
    """One sentence per probe, wrapped."""
    sentences: list[str] = []
    for probe in probes:
        rows = records.rows(probe)
        reasons = Counter(str(row["excluded"]) for row in rows if row["excluded"] is not None)
        if probe not in records.probes:
            sentences.append(f"{probe}: not measured in this run")
        elif records.probes[probe].get("incompetent"):
            sentences.append(str(records.probes[probe]["incompetent"]))
        elif reasons:
            counts = ", ".join(f"{reason}: {n}" for reason, n in sorted(reasons.items()))
            sentences.append(f"{probe}: {sum(reasons.values())} of {len(rows)} rows are excluded ({counts})")
        else:
            sentences.append(f"{probe}: {len(rows)} rows hold nothing that this figure shows")
    return [line for sentence in sentences for line in textwrap.wrap(sentence, LINE_WIDTH)]
