"""Which words make a correction count against a note that says the opposite? ``python -m experiments.wording CONFIG``.

Hypothesis (arXiv:2606.17107, section "mechanism", erratum wording): an appended line that states the new value overrides the
notes. In the published ablation no stale note was present, because every variant prefilled the new value; here the cache
holds the prompt with the *old* value, notes included, and only the line is run.

Falsifier: the new value said of something else (``other_label``, the control) flips as many decisions as said of the field; or
the wording of the adapter's training (``update``), at any distance from the request, is right in less than 0.95 of the cases
that full prefill answers right.

Each wording is followed by 0 to 2,000 tokens of filler and then by the request. ``answer`` states the conclusion too. In the
organisms' language a wording with a word that its tokenizer does not know is refused.
"""

import random
from collections.abc import Sequence
from itertools import islice

from experiments.edit_arms import Arm, Bench, Row
from experiments.edit_cases import Case
from experiments.edit_harness import EditConfig, Line, Stage, Sums, main
from notelens.errors import ConfigError
from notelens.models.base import NoteModel
from notelens.spans import encode
from notelens.tasks.organism import organism_families
from notelens.tasks.scenarios import Family, load_families

WORDINGS = {
    "update": "Update: the {label} is now {value}.\n",
    "upper": "UPDATE: THE {LABEL} IS NOW {value}.\n",
    "override": "Ignore the {label} given above. It is wrong. The {label} is {value}.\n",
    "minimal": "{Label}: {value}\n",
    "value": "{value}\n",
    "question": "Did you see that the {label} is {value} now?\n",
    "twice": "Update: the {label} is now {value}.\nUpdate: the {label} is now {value}.\n",
    "answer": "Update: the {label} is now {value}, so the answer is {answer}.\n",
    "other_label": "Update: the {other} is now {value}.\n",
}
METRICS = ("competence", "p_correct", "stale_rate", "tokens_run", "recovery")


class WordingConfig(EditConfig):
    """Configuration of this experiment.

    Attributes:
        length: tokens of the prompt in front of the line.
        wordings: names of :data:`WORDINGS`.
        fillers: tokens of filler between line and request.
    """

    length: int | None
    wordings: tuple[str, ...]
    fillers: tuple[int, ...]


class Wording:
    """Every wording at every distance from the request."""

    name = "wording"

    def stages(self, config: WordingConfig) -> list[Stage]:
        """One per amount of filler.

        Raises:
            ConfigError: no such wording.
        """
        unknown = sorted(set(config.wordings) - set(WORDINGS))
        if unknown:
            raise ConfigError(f"no wording {unknown[0]!r}; there are {', '.join(WORDINGS)}")
        return [Stage(f"filler{d}", {"filler": d}, {"length": config.length}) for d in config.fillers]

    def measure(self, model: NoteModel, config: WordingConfig, stage: Stage, case: Case) -> list[Row]:
        """All wordings on one case."""
        bench = Bench(model, case)
        first: Row = {**bench.facts(), "method": "full_prefill"}
        if first["excluded"] is not None:
            return [first]
        families = organism_families() if config.task == "organism" else load_families()
        behind = filler(model, case, int(stage.params["filler"]), families)
        rows: list[Row] = []
        for name in config.wordings:
            arm = Arm(name, "erratum", "", {"template": template(WORDINGS[name], case, families) + behind})
            rows.append(bench.row(arm))
        return [first, *rows]

    def aggregate(self, config: WordingConfig, stage: Stage, rows: Sequence[Row]) -> list[Line]:
        """Rates by wording."""
        sums = Sums(self.name, config, stage, rows)
        sums.competence()
        for name in config.wordings:
            sums.rate("p_correct", name, "right")
            sums.rate("stale_rate", name, "stale")
            if sums.of(name)[0]:
                sums.mean("recovery", name, lambda r: r["recovery"], unit="recovery")
                sums.mean("tokens_run", name, lambda r: float(r["tokens_run"]), unit="tokens")
        return sums.lines


def template(wording: str, case: Case, families: Sequence[Family]) -> str:
    """The wording with everything but the value filled in; ``{other}`` is what another family's field is called."""
    label = case.name.replace("_", " ")
    other = random.Random(case.seed).choice([f.label for f in families if f.name != case.family and f.label != label])
    words = {
        "{label}": label, "{LABEL}": label.upper(), "{Label}": label[:1].upper() + label[1:], "{answer}": case.answers[1],
        "{other}": other,
    }  # fmt: skip
    for slot, word in words.items():
        wording = wording.replace(slot, word)
    return wording


def filler(model: NoteModel, case: Case, tokens: int, families: Sequence[Family]) -> str:
    """Lines of the case's family that do not stand in its prompt, up to about ``tokens`` tokens.

    Raises:
        TaskError: the family has not so many lines.
    """
    if tokens == 0:
        return ""
    family = next(f for f in families if f.name == case.family)
    lines = (line for line in family.lines(random.Random(case.seed)) if line not in case.old.text)
    found, have = list[str](), 0
    while have < tokens:
        line = next(islice(lines, 1))
        found.append(f"- {line}\n")
        have += len(encode(model.tokenizer, found[-1], templated=True))
    return "".join(found)


if __name__ == "__main__":
    main(Wording(), WordingConfig, METRICS)
