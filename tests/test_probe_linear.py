"""Linear read-outs: folds that keep groups together, scaling inside the fold, labels that cannot be read."""

import numpy as np
import pytest

from notelens.errors import InputError, NonFiniteError
from notelens.probes.linear import Label, ReadOut, check_disjoint, group_folds, make_readout
from notelens.stats import DEGENERATE_RESAMPLES, cluster_bootstrap, cluster_statistic
from tests.oracle import timing as oracle

BITS = [0, 1, 1, 0]


def samples(n_groups: int = 6, per_group: int = 4, n_features: int = 5, signal: float = 3.0, seed: int = 0):
    """Features with a signal in the first column, labels balanced in every group, and groups."""
    rng = np.random.default_rng(seed)
    bits = (BITS * n_groups)[: n_groups * per_group]
    x = rng.normal(size=(n_groups * per_group, n_features))
    x[:, 0] += signal * (2 * np.array(bits) - 1)
    return x, bits, [f"g{i // per_group}" for i in range(len(bits))]


def accuracy(x, label: Label, groups, n_folds: int = 3, alpha: float = 1.0) -> float:
    tally = ReadOut({"y": label}, groups, group_folds(groups, n_folds), alpha=alpha).score(x)["y"]
    return tally.correct / tally.total


def test_paraphrases_of_a_question_stay_together() -> None:
    groups = [f"q{i}" for i in range(20) for _ in range(4)]
    folds = group_folds(groups, 5)
    tested = np.concatenate([test for _, test in folds])
    assert sorted(tested.tolist()) == list(range(80))
    for train, test in folds:
        assert not {groups[i] for i in train} & {groups[i] for i in test}


def test_a_group_on_both_sides_is_an_error() -> None:
    with pytest.raises(InputError, match="'b'"):
        check_disjoint(["a", "b", "b"], [0, 1], [2])
    with pytest.raises(InputError, match="'b'"):
        ReadOut({"y": Label.binary([0, 1, 1])}, ["a", "b", "b"], [(np.array([0, 1]), np.array([2]))], alpha=1.0)


def test_fewer_groups_than_folds_is_an_error_that_names_them() -> None:
    with pytest.raises(InputError, match=r"3 groups \(a, b, c\) cannot be split into 5 folds"):
        group_folds(["a", "a", "b", "c"], 5)
    with pytest.raises(InputError, match="1 folds"):
        group_folds(["a", "b"], 1)


def test_a_fold_with_one_class_is_settled_before_fitting() -> None:
    groups = [f"g{i}" for i in range(6)]
    label = Label.binary([0, 0, 0, 0, 0, 1])
    folds = group_folds(groups, 3)
    alone = next(test for _, test in folds if 5 in test)
    tally = ReadOut({"y": label}, groups, folds, alpha=1.0).score(np.random.default_rng(0).normal(size=(6, 3)))["y"]
    assert dict(tally.skipped) == {"training fold has 1 class": len(alone)}
    assert tally.total == 6 - len(alone)


def test_an_outlier_in_the_test_fold_moves_no_scale() -> None:
    x, bits, groups = samples()
    train, test = group_folds(groups, 3)[0]
    shifted = x.copy()
    shifted[test[0]] = 1e3
    plain, outlier = (make_readout(1.0).fit(v[train], 2.0 * np.array(bits)[train] - 1) for v in (x, shifted))
    assert np.array_equal(plain[0].mean_, outlier[0].mean_) and np.array_equal(plain[0].scale_, outlier[0].scale_)
    assert np.array_equal(plain.predict(x[test[1:]]), outlier.predict(shifted[test[1:]]))
    whole = ReadOut({"y": Label.binary(bits)}, groups, [(train, test)], alpha=1.0)
    assert abs(whole.score(x)["y"].correct - whole.score(shifted)["y"].correct) <= 1


def test_features_of_other_scale_count_the_same_and_the_fit_says_it_converged() -> None:
    x, bits, groups = samples()
    readout = ReadOut({"y": Label.binary(bits)}, groups, group_folds(groups, 3), alpha=1.0)
    before = readout.score(x)["y"]
    after = readout.score(x * np.array([1.0, 1e4, 1.0, 1e-4, 1.0]))["y"]
    assert before == after
    assert readout.converged is True


def test_reads_what_a_logistic_regression_reads() -> None:
    x, bits, groups = samples(signal=4.0)
    assert accuracy(x, Label.binary(bits), groups) == oracle.probe_accuracy(x, bits, groups, 3) == 1.0
    noise = samples(n_groups=30, signal=0.0)
    assert abs(accuracy(noise[0], Label.binary(noise[1]), noise[2]) - 0.5) < 0.15


def test_several_labels_in_one_fit_equal_each_alone() -> None:
    x, bits, groups = samples(signal=0.7)
    flipped = Label.binary([1 - b for b in bits])
    other = Label.binary([int(v > 0) for v in x[:, 1]])
    folds = group_folds(groups, 3)
    together = ReadOut({"a": Label.binary(bits), "b": flipped, "c": other}, groups, folds, alpha=1.0).score(x)
    for name, label in (("a", Label.binary(bits)), ("b", flipped), ("c", other)):
        assert together[name] == ReadOut({name: label}, groups, folds, alpha=1.0).score(x)[name]
    assert together["a"].correct == together["b"].correct


def test_features_that_say_nothing_are_ties_at_one_half() -> None:
    _, bits, groups = samples()
    tally = ReadOut({"y": Label.binary(bits)}, groups, group_folds(groups, 3), alpha=1.0).score(np.ones((24, 4)))["y"]
    assert tally.correct == tally.total / 2


def test_values_are_told_apart_among_their_own_two_classes() -> None:
    truth = ("red", "blue", "green", "red") * 3
    other = ("blue", "red", "red", "green") * 3
    x = np.array([[{"red": 0, "blue": 1, "green": 2}[t] == c for c in range(3)] for t in truth], dtype=float)
    groups = [f"g{i // 4}" for i in range(12)]
    tally = ReadOut({"v": Label(truth, other)}, groups, group_folds(groups, 3), alpha=1.0).score(x)["v"]
    assert (tally.correct, tally.total) == (12.0, 12)


def test_a_value_that_was_never_trained_on_is_skipped_and_counted() -> None:
    truth = ("red", "blue", "red", "blue", "red", "grey")
    other = ("blue", "red", "blue", "red", "grey", "red")
    groups = ["a", "a", "b", "b", "c", "c"]
    x = np.random.default_rng(0).normal(size=(6, 2))
    tally = ReadOut({"v": Label(truth, other)}, groups, group_folds(groups, 3), alpha=1.0).score(x)["v"]
    assert tally.total == 4 and dict(tally.skipped) == {"class not in the training fold": 2}


def test_bad_arguments() -> None:
    x, bits, groups = samples()
    folds = group_folds(groups, 3)
    with pytest.raises(InputError, match="alpha is 0"):
        ReadOut({"y": Label.binary(bits)}, groups, folds, alpha=0.0)
    with pytest.raises(InputError, match="23 samples"):
        ReadOut({"y": Label.binary(bits[1:])}, groups, folds, alpha=1.0)
    readout = ReadOut({"y": Label.binary(bits)}, groups, folds, alpha=1.0)
    with pytest.raises(InputError, match="24 samples"):
        readout.score(x[1:])
    x[3, 2] = np.inf
    with pytest.raises(NonFiniteError):
        readout.score(x)


# --- statistics of summed totals --------------------------------------------------------------------------------------


def test_a_ratio_of_totals_is_the_bootstrapped_mean() -> None:
    rng = np.random.default_rng(3)
    values, clusters = rng.normal(size=60), [f"c{i % 12:02d}" for i in range(60)]
    table = [[sum(v for v, c in zip(values, clusters, strict=True) if c == k), 5.0] for k in sorted(set(clusters))]
    mean = cluster_bootstrap(values, clusters, method="percentile")
    ratio = cluster_statistic(table, lambda t: t[:, 0] / t[:, 1], 60)
    for name in ("value", "lo", "hi"):
        assert getattr(ratio, name) == pytest.approx(getattr(mean, name), abs=1e-12)
    assert (ratio.n, ratio.n_clusters) == (60, 12)


def test_resamples_without_the_statistic_are_counted() -> None:
    table = [[1.0]] * 6 + [[0.0]] * 2
    found = cluster_statistic(table, lambda t: np.where(t[:, 0] >= 5, t[:, 0], np.nan), 8, n_resamples=1000)
    assert found.value == 6.0 and found.lo is not None and found.lo >= 5
    assert DEGENERATE_RESAMPLES in found.flags and "of 1000 resamples" in found.method
    never = cluster_statistic(table, lambda t: np.full(len(t), np.nan), 8)
    assert (never.value, never.lo, never.n) == (None, None, 8)


def test_totals_are_checked() -> None:
    with pytest.raises(InputError, match="finite"):
        cluster_statistic([[np.nan]], lambda t: t[:, 0], 1)
    assert cluster_statistic(np.zeros((0, 2)), lambda t: t[:, 0], 0).value is None
    alone = cluster_statistic([[2.0, 4.0]], lambda t: t[:, 0] / t[:, 1], 4)
    assert (alone.value, alone.lo, alone.hi) == (0.5, None, None)
