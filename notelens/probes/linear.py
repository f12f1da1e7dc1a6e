"""Linear read-out of labels from residuals, with folds that never share a group.

One ridge regression reads several labels at once: every class of every label is a column of +-1, and all columns
share one closed-form solution, so that a conclusion, the field's value and a dozen shuffled controls cost one fit. A
sample is scored by the larger of two columns, those of the two classes it could have (chance is 1/2; ties count one
half). The features are standardised inside the pipeline, on the training fold only.

Ridge and not logistic regression: a timing probe needs layers x anchors x families x forms x folds fits (about 10,000
on a 30-layer model), a closed form takes 2 to 5 ms where an iterative solver takes 50, and nothing has to converge.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import sklearn
from sklearn.linear_model import Ridge
from sklearn.model_selection import GroupKFold
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import ThreadpoolController

from notelens.errors import InputError, NonFiniteError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Fold = tuple[Ints, Ints]
TIE = 1e-9
"""Scores (of order 1) closer than this are equal: constant features leave differences of 1e-16."""


@dataclass(frozen=True)
class Label:
    """What is read out.

    Attributes:
        truth: class of every sample.
        other: the class it is told apart from.
    """

    truth: tuple[Hashable, ...]
    other: tuple[Hashable, ...]

    @classmethod
    def binary(cls, bits: Sequence[int]) -> "Label":
        """A label with the classes 0 and 1."""
        return cls(tuple(int(b) for b in bits), tuple(1 - int(b) for b in bits))


@dataclass(frozen=True)
class Tally:
    """How often a label was read right on held-out samples.

    Attributes:
        correct: hits; a tie counts one half.
        total: samples that could be scored.
        skipped: samples that could not, by reason.
    """

    correct: float
    total: int
    skipped: Mapping[str, int]


@cache
def _threads() -> ThreadpoolController:
    """Thread pools of the linear algebra libraries; looking for them takes as long as a fit, so they are looked for once."""
    return ThreadpoolController()


def make_readout(alpha: float) -> Pipeline:
    """Standardisation and ridge regression; ``alpha`` is for one feature, so the penalty grows with their number."""
    return make_pipeline(StandardScaler(), Ridge(alpha=alpha, solver="cholesky"))


def group_folds(groups: Sequence[Hashable], n_folds: int) -> list[Fold]:
    """Folds of samples that split no group.

    Raises:
        InputError: fewer than 2 folds, or fewer groups than folds; the message names both.
    """
    names = sorted({str(g) for g in groups})
    if n_folds < 2:
        raise InputError(f"{n_folds} folds: at least 2 are needed")
    if len(names) < n_folds:
        raise InputError(
            f"{len(names)} groups ({', '.join(names[:6])}) cannot be split into {n_folds} folds; "
            "measure more instances or use fewer folds"
        )
    codes = np.array([names.index(str(g)) for g in groups])
    folds = list(GroupKFold(n_folds).split(np.zeros((len(codes), 1)), groups=codes))
    for train, test in folds:
        check_disjoint(groups, train, test)
    return [(np.asarray(train), np.asarray(test)) for train, test in folds]


def check_disjoint(groups: Sequence[Hashable], train: Sequence[int] | Ints, test: Sequence[int] | Ints) -> None:
    """Check that no group stands on both sides of a fold.

    Raises:
        InputError: one does; it is named.
    """
    shared = {groups[i] for i in train} & {groups[i] for i in test}
    if shared:
        raise InputError(f"group {min(map(str, shared))!r} is in the training and in the test fold")


class ReadOut:
    """Cross-validated read-out of labels that stay the same while the features change (layers, anchors).

    What can be scored depends on labels and folds only and is settled before anything is fitted: a label with one class
    in a training fold, or a sample whose classes are not both among the training samples, is skipped and counted.

    Attributes:
        converged: every fit so far was a closed-form solution.

    Args:
        labels: what to read, by name.
        groups: group of every sample.
        folds: (training, test) indices.
        alpha: penalty for one feature.

    Raises:
        InputError: lengths differ, ``alpha`` is not positive, or a group is on both sides of a fold.
    """

    def __init__(
        self, labels: Mapping[str, Label], groups: Sequence[Hashable], folds: Sequence[Fold], *, alpha: float
    ) -> None:
        if not alpha > 0:
            raise InputError(f"alpha is {alpha}; it must be positive")
        self.n, self.alpha, self.folds = len(groups), alpha, list(folds)
        for name, label in labels.items():
            if len(label.truth) != self.n or len(label.other) != self.n:
                raise InputError(f"label {name!r} has {len(label.truth)} samples, the groups {self.n}")
        for train, test in self.folds:
            check_disjoint(groups, train, test)
        self.labels = dict(labels)
        self.converged = True
        columns = [(name, c) for name, label in labels.items() for c in sorted(set(label.truth), key=str)]
        self._column = {key: i for i, key in enumerate(columns)}
        self._targets = np.full((self.n, len(columns)), -1.0)
        for name, label in labels.items():
            for i, c in enumerate(label.truth):
                self._targets[i, self._column[name, c]] = 1.0
        self._plan = [{name: self._usable(label, *fold) for name, label in labels.items()} for fold in self.folds]

    @staticmethod
    def _usable(label: Label, train: Ints, test: Ints) -> tuple[list[int], dict[str, int]]:
        """Positions within ``test`` that can be scored, and why the others cannot."""
        seen = {label.truth[i] for i in train}
        if len(seen) < 2:
            return [], {f"training fold has {len(seen)} class": len(test)}
        kept = [at for at, i in enumerate(test) if label.truth[i] in seen and label.other[i] in seen]
        unseen = len(test) - len(kept)
        return kept, {"class not in the training fold": unseen} if unseen else {}

    def score(self, features: Floats) -> dict[str, Tally]:
        """Read every label from ``features`` ``[sample, feature]``. Cost: one closed-form fit per fold.

        Raises:
            InputError: the number of samples is not that of the labels.
            NonFiniteError: a feature is NaN or infinite.
        """
        if features.ndim != 2 or features.shape[0] != self.n:
            raise InputError(f"features have shape {features.shape}; {self.n} samples are needed")
        if not np.isfinite(features).all():
            raise NonFiniteError("residuals are not finite; check the model's dtype for overflow")
        correct = dict.fromkeys(self.labels, 0.0)
        total = dict.fromkeys(self.labels, 0)
        skipped: dict[str, dict[str, int]] = {name: {} for name in self.labels}
        # matrices this small take 6 times longer when two threads share them (measured: 22 against 3.7 ms a fit)
        with sklearn.config_context(assume_finite=True, skip_parameter_validation=True), _threads().limit(limits=1):
            for (train, test), plan in zip(self.folds, self._plan, strict=True):
                for name, (_, reasons) in plan.items():
                    for reason, count in reasons.items():
                        skipped[name][reason] = skipped[name].get(reason, 0) + count
                if not any(kept for kept, _ in plan.values()):
                    continue
                readout = make_readout(self.alpha * features.shape[1])
                scores = readout.fit(features[train], self._targets[train]).predict(features[test])
                self.converged &= (
                    readout.steps[-1][1].n_iter_ is None
                )  # a closed form, no iterations that could stop early
                for name, (kept, _) in plan.items():
                    label = self.labels[name]
                    mine = [self._column[name, label.truth[test[at]]] for at in kept]
                    others = [self._column[name, label.other[test[at]]] for at in kept]
                    lead = scores[kept, mine] - scores[kept, others]
                    correct[name] += float((lead > TIE).sum() + 0.5 * (abs(lead) <= TIE).sum())
                    total[name] += len(kept)
        return {name: Tally(correct[name], total[name], skipped[name]) for name in self.labels}
