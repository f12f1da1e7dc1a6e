"""How much sooner comes the first token behind a spliced skill? ``python -m experiments.ttft CONFIG``.

Hypothesis: composing a prompt from a compiled skill costs placing its rows and running the request, so the ratio of a full
prefill's time to it grows with the length: at least 40 at 8,192 tokens on SmolLM2.

Falsifier: a ratio below 40 there, or compiling that does not pay within a few uses (``pays_after_uses``).

A case is one length; both arms are timed in turns on the same prompt in one process. ``same_token`` says whether both choose
the same first token: the skill saw nothing in front of it, so it need not. Times are wall time unless ``clock`` is ``cpu``.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from experiments.compose_cases import Pool, neutral_ids
from experiments.edit_harness import EditConfig, Line, Row, Stage, Sums, main
from notelens.compose import first_token
from notelens.models.base import NoteModel
from notelens.stats import cluster_bootstrap
from notelens.tasks import TASKS

METRICS = ("ttft_ratio", "full_ms", "compose_ms", "compile_ms", "pays_after_uses")


class TtftConfig(EditConfig):
    """Configuration of this experiment.

    Attributes:
        lengths: tokens of the prompts.
        request: tokens behind the skill.
        rounds: how often both arms are timed.
        clock: ``wall``, or ``cpu`` for processor time with one thread.
    """

    n: int = Field(default=1, ge=1, le=1)
    lengths: tuple[int, ...] = Field(min_length=1)
    request: int = Field(default=16, ge=1)
    rounds: int = Field(default=3, ge=1)
    clock: Literal["wall", "cpu"] = "wall"


@dataclass(frozen=True)
class Timed:
    """A prompt to time."""

    id: str
    head: tuple[int, ...]
    body: tuple[int, ...]
    request: tuple[int, ...]


class Ttft:
    """Times by length."""

    name = "ttft"

    def stages(self, config: TtftConfig) -> list[Stage]:
        """One per length."""
        return [Stage(f"length{n}", {"n": n}, {"n": n}) for n in config.lengths]

    def measure(self, model: NoteModel, config: TtftConfig, stage: Stage, case: Timed) -> list[Row]:
        """Both arms, in turns."""
        clock = time.process_time if config.clock == "cpu" else time.perf_counter
        t = first_token(model, case.head, case.body, case.request, rounds=config.rounds, clock=clock)
        base: Row = {
            "item": case.id, "family": case.id, "excluded": None, "method": "shift", "n_tokens": t.n_tokens,
            "n_skill": t.n_skill, "same_token": t.same_token, "clock": config.clock,
        }  # fmt: skip
        return [
            {
                **base, "round": i, "ttft_ratio": ratio, "full_ms": 1e3 * t.full[i], "compose_ms": 1e3 * t.composed[i],
                "compile_ms": 1e3 * t.compiling,
                "pays_after_uses": t.pays_after if t.pays_after < float("inf") else None,
            }
            for i, ratio in enumerate(t.ratios)
        ]  # fmt: skip

    def aggregate(self, config: TtftConfig, stage: Stage, rows: Sequence[Row]) -> list[Line]:
        """Medians over rounds; the interval is over rounds of one prompt."""
        sums = Sums(self.name, config, stage, rows)
        for metric in METRICS:
            found = [r for r in rows if r[metric] is not None]
            lost = ["composing saves nothing"] * (len(rows) - len(found))
            e = cluster_bootstrap([float(r[metric]) for r in found], None, "median", seed=config.seed)
            unit = "ratio" if metric == "ttft_ratio" else "uses" if metric == "pays_after_uses" else "ms"
            sums.add(metric, "shift", e, excluded=lost, unit=unit, clock=config.clock)
        sums.rate("same_token", "shift", "same_token")
        return sums.lines


def timed_cases(model: NoteModel, config: TtftConfig, stage: Stage) -> list[Timed]:
    """One prompt of the stage's length."""
    n = stage.source["n"]
    if config.task == "gated":
        ids = tuple(neutral_ids(model.tokenizer, n))
    else:  # words of the task's own language
        task: Any = TASKS.get(config.task)(split=config.split)
        ids = tuple(Pool(task.instances(model.tokenizer, 16, config.seed), "value_first").filler(None, n, "ttft"))
    return [Timed(f"n{n}", ids[:1], ids[1 : n - config.request], ids[n - config.request :])]


if __name__ == "__main__":
    main(Ttft(), TtftConfig, METRICS, source=timed_cases)
