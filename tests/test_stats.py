"""Intervals and tests against closed forms, reference implementations and simulated data."""

import math
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests

from notelens import stats
from notelens.errors import InputError

FINITE = st.floats(-1e3, 1e3, allow_nan=False, width=32)
SAMPLES = st.lists(st.tuples(FINITE, st.sampled_from("abcdef")), min_size=2, max_size=20)
N_FAST = 400


def simulate(rng: np.random.Generator, n_clusters: int, size: int) -> tuple[np.ndarray, list[int]]:
    """Normal data of mean 0 with intracluster correlation 1/2."""
    values = np.repeat(rng.normal(size=n_clusters), size) + rng.normal(size=n_clusters * size)
    return values, np.repeat(np.arange(n_clusters), size).tolist()


class TestClusterBootstrap:
    def test_mean_and_interval_on_two_clusters_by_hand(self):
        """Two clusters of mean 0 and 1: resampled means are 0, 1/2, 1 with probability 1/4, 1/2, 1/4."""
        got = stats.cluster_bootstrap([0.0, 0.0, 1.0, 1.0], list("aabb"), method="percentile")
        assert (got.value, got.lo, got.hi, got.n, got.n_clusters) == (0.5, 0.0, 1.0, 4, 2)
        assert got.flags == (stats.FEW_CLUSTERS,)

    def test_larger_clusters_weigh_more(self):
        got = stats.cluster_bootstrap([0.0, 1.0, 1.0, 1.0], list("abbb"))
        assert got.value == 0.75

    @pytest.mark.parametrize("method", ["bca", "percentile"])
    @pytest.mark.parametrize("statistic", ["mean", "median"])
    def test_singleton_clusters_equal_scipy(self, method, statistic):
        x = np.random.default_rng(3).exponential(size=41)
        got = stats.cluster_bootstrap(x, statistic=statistic, method=method, n_resamples=20_000)
        reference = scipy_stats.bootstrap(
            (x,),
            getattr(np, statistic),
            n_resamples=20_000,
            method="BCa" if method == "bca" else "percentile",
            rng=np.random.default_rng(4),
        )
        low, high = reference.confidence_interval
        # Both ends are Monte Carlo quantiles: at 20,000 draws their standard error is below 2 % of the standard error.
        tolerance = 0.1 * reference.standard_error
        assert got.lo == pytest.approx(low, abs=tolerance)
        assert got.hi == pytest.approx(high, abs=tolerance)
        assert got.method == method

    def test_bca_shifts_towards_the_long_tail(self):
        x = np.random.default_rng(3).exponential(size=30)
        bca, percentile = (stats.cluster_bootstrap(x, method=m) for m in ("bca", "percentile"))
        assert bca.lo > percentile.lo
        assert bca.hi > percentile.hi

    def test_median_of_resampled_clusters_equals_a_plain_loop(self):
        values, clusters = [3.0, 1.0, 4.0, 1.5, 9.0, 2.0, 6.0], list("aabbbcd")
        got = stats.cluster_bootstrap(values, clusters, "median", n_resamples=300, method="percentile")
        groups = [[v for v, c in zip(values, clusters, strict=True) if c == label] for label in "abcd"]
        draws = np.random.default_rng(0).integers(4, size=(300, 4))
        loop = [np.median([v for j in row for v in groups[j]]) for row in draws]
        assert got.lo == pytest.approx(np.quantile(loop, 0.025), abs=1e-12)
        assert got.hi == pytest.approx(np.quantile(loop, 0.975), abs=1e-12)

    @pytest.mark.parametrize(("n_clusters", "expected"), [(6, 0.855), (12, 0.90), (30, 0.93)])
    @pytest.mark.parametrize("method", ["bca", "percentile"])
    def test_coverage_on_clustered_data(self, n_clusters, expected, method):
        """300 simulations have a standard error of at most 0.021; the expected values were simulated with 1,000."""
        rng = np.random.default_rng(11)
        covered = 0
        for seed in range(300):
            values, clusters = simulate(rng, n_clusters, 4)
            got = stats.cluster_bootstrap(values, clusters, n_resamples=600, seed=seed, method=method)
            covered += got.lo <= 0.0 <= got.hi
        assert covered / 300 == pytest.approx(expected, abs=3 * 0.021)

    def test_ignoring_clusters_would_cover_far_less(self):
        """The reason for resampling clusters; guards against the labels being dropped."""
        rng = np.random.default_rng(12)
        covered = 0
        for seed in range(200):
            values, _ = simulate(rng, 12, 8)
            got = stats.cluster_bootstrap(values, n_resamples=N_FAST, seed=seed)
            covered += got.lo <= 0.0 <= got.hi
        assert covered / 200 < 0.75

    def test_seed_determines_the_interval(self):
        values, clusters = simulate(np.random.default_rng(0), 8, 3)
        one, same, other = (stats.cluster_bootstrap(values, clusters, n_resamples=N_FAST, seed=s) for s in (1, 1, 2))
        assert one == same
        assert (one.lo, one.hi) != (other.lo, other.hi)

    def test_blocks_do_not_change_the_draws(self, monkeypatch):
        values, clusters = simulate(np.random.default_rng(0), 8, 3)
        whole = stats.cluster_bootstrap(values, clusters, n_resamples=N_FAST)
        monkeypatch.setattr("notelens.stats.bootstrap._CHUNK", 100)
        assert stats.cluster_bootstrap(values, clusters, n_resamples=N_FAST) == whole

    @given(SAMPLES, st.randoms(use_true_random=False), st.sampled_from(["mean", "median"]), st.booleans())
    @settings(max_examples=40, deadline=None)
    def test_order_of_instances_does_not_matter(self, samples, random, statistic, clustered):
        shuffled = samples.copy()
        random.shuffle(shuffled)

        def run(rows: Sequence[tuple[float, str]]) -> stats.Estimate:
            clusters = [c for _, c in rows] if clustered else None
            return stats.cluster_bootstrap([v for v, _ in rows], clusters, statistic, n_resamples=100)

        assert run(samples) == run(shuffled)

    def test_order_does_not_matter_to_the_last_bit(self):
        """Sums of these values depend on their order unless they are rounded once."""
        rng = np.random.default_rng(6)
        values, clusters = rng.normal(size=40), np.repeat(list("abcd"), 10)
        orders = [rng.permutation(40) for _ in range(20)]
        assert len({sum(values[o]) for o in orders}) > 1
        assert len({stats.cluster_bootstrap(values[o], clusters[o], n_resamples=50) for o in orders}) == 1

    @given(SAMPLES, st.floats(0.5, 4, width=16), st.floats(-8, 8, width=16))
    @settings(max_examples=40, deadline=None)
    def test_interval_follows_a_change_of_unit(self, samples, scale, shift):
        values, clusters = np.array([v for v, _ in samples]), [c for _, c in samples]
        plain = stats.cluster_bootstrap(values, clusters, n_resamples=100, method="percentile")
        moved = stats.cluster_bootstrap(scale * values + shift, clusters, n_resamples=100, method="percentile")
        for a, b in ((plain.value, moved.value), (plain.lo, moved.lo), (plain.hi, moved.hi)):
            assert b == pytest.approx(scale * a + shift, abs=1e-9 * (1 + abs(values).max() * scale))

    @given(SAMPLES)
    @settings(max_examples=40, deadline=None)
    def test_interval_lies_inside_the_data(self, samples):
        values = [v for v, _ in samples]
        got = stats.cluster_bootstrap(values, [c for _, c in samples], n_resamples=100)
        slack = 1e-9 * (1 + max(map(abs, values)))
        assert min(values) - slack <= got.lo <= got.hi <= max(values) + slack

    def test_zero_width_is_flagged(self):
        constant = stats.cluster_bootstrap([0.1] * 7, list("aabbbcc"))
        assert (constant.lo, constant.hi) == (constant.value, constant.value)
        assert stats.ZERO_WIDTH in constant.flags
        equal_means = stats.cluster_bootstrap([0.0, 1.0] * 6, [c for c in "abcdef" for _ in range(2)])
        assert equal_means.lo == equal_means.hi == 0.5
        assert equal_means.flags == (stats.ZERO_WIDTH,)

    def test_a_non_degenerate_sample_has_no_flags(self):
        values, clusters = simulate(np.random.default_rng(0), 8, 3)
        assert stats.cluster_bootstrap(values, clusters, n_resamples=N_FAST).flags == ()

    def test_nothing_is_undefined_and_never_nan(self):
        got = stats.cluster_bootstrap([], [])
        assert (got.value, got.lo, got.hi, got.n) == (None, None, None, 0)
        assert got.flags == (stats.UNDEFINED,)
        assert str(got) == "undefined (n=0)"

    def test_one_instance_has_a_value_and_no_interval(self):
        got = stats.cluster_bootstrap([0.3], ["a"])
        assert (got.value, got.lo, got.hi, got.flags) == (0.3, None, None, (stats.SINGLE_INSTANCE,))

    def test_one_cluster_resamples_instances_and_says_so(self):
        x = np.random.default_rng(5).normal(size=20)
        got = stats.cluster_bootstrap(x, ["a"] * 20)
        independent = stats.cluster_bootstrap(x)
        assert (got.lo, got.hi) == (independent.lo, independent.hi)
        assert set(got.flags) == {stats.FEW_CLUSTERS, stats.ONE_CLUSTER}
        assert got.n_clusters == 1

    def test_where_bca_does_not_exist_the_method_says_percentile(self):
        """Medians of leave-one-cluster-out samples all equal 1, while resampled medians do not."""
        values, clusters = [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 9.0], list("abcdefg")
        got = stats.cluster_bootstrap(values, clusters, "median", n_resamples=5_000)
        assert got.method == "percentile"
        assert stats.BCA_UNDEFINED in got.flags

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
    def test_values_that_are_not_finite_are_named(self, bad):
        with pytest.raises(ValueError, match=r"values\[2\]"):
            stats.cluster_bootstrap([0.0, 1.0, bad], list("abc"))

    def test_bad_arguments(self):
        with pytest.raises(InputError, match="values has 2, clusters has 1"):
            stats.cluster_bootstrap([0.0, 1.0], ["a"])
        with pytest.raises(InputError, match="2 dimensions"):
            stats.cluster_bootstrap(np.zeros((2, 2)))
        with pytest.raises(InputError, match="level is 95"):
            stats.cluster_bootstrap([0.0, 1.0], level=95)
        with pytest.raises(InputError, match="n_resamples is 0"):
            stats.cluster_bootstrap([0.0, 1.0], n_resamples=0)
        with pytest.raises(InputError, match="statistic is 'mode'"):
            stats.cluster_bootstrap([0.0, 1.0], statistic="mode")  # pyright: ignore[reportArgumentType]  # on purpose
        with pytest.raises(InputError, match="method is 'normal'"):
            stats.cluster_bootstrap([0.0, 1.0], method="normal")  # pyright: ignore[reportArgumentType]  # on purpose
        with pytest.raises(InputError, match=r"clusters\[1\]"):
            stats.cluster_bootstrap([0.0, 1.0], ["a", math.nan])

    def test_an_estimate_refuses_nan(self):
        with pytest.raises(InputError, match="lo = nan"):
            stats.Estimate(0.0, math.nan, 1.0, 2, 2, "bca")


class TestClusterStatistic:
    def test_a_ratio_of_totals_is_the_mean(self):
        values, clusters = simulate(np.random.default_rng(1), 8, 3)
        totals = [[float(values[3 * j : 3 * j + 3].sum()), 3.0] for j in range(8)]
        got = stats.cluster_statistic(totals, lambda t: t[:, 0] / t[:, 1], 24, n_resamples=N_FAST)
        mean = stats.cluster_bootstrap(values, clusters, method="percentile", n_resamples=N_FAST)
        for name in ("value", "lo", "hi"):
            assert getattr(got, name) == pytest.approx(getattr(mean, name), abs=1e-12)
        assert (got.n, got.n_clusters, got.flags) == (24, 8, ())

    def test_first_column_above_a_threshold(self):
        """Cluster 0 passes from column 1 on, cluster 1 never: defined unless only cluster 1 is drawn (1 of 4)."""

        def first(totals: np.ndarray) -> np.ndarray:
            hit = totals > 0.5
            return np.where(hit.any(axis=1), hit.argmax(axis=1).astype(float), np.nan)

        got = stats.cluster_statistic([[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]], first, 2, n_resamples=1_000)
        assert (got.value, got.lo, got.hi) == (1.0, 1.0, 1.0)
        assert {stats.ZERO_WIDTH, stats.DEGENERATE_RESAMPLES, stats.FEW_CLUSTERS} == set(got.flags)
        undefined = int(got.method.split("undefined in ")[1].split(" of ")[0])
        assert undefined == pytest.approx(250, abs=4 * 14)  # binomial standard error of 1,000 draws at 1/4: 13.7

    def test_limits(self):
        def total(t: np.ndarray) -> np.ndarray:
            return t[:, 0]

        assert stats.cluster_statistic(np.zeros((0, 1)), total, 0).flags == (stats.UNDEFINED,)
        one = stats.cluster_statistic([[2.0]], total, 3)
        assert (one.value, one.lo, one.n_clusters) == (2.0, None, 1)
        nowhere = stats.cluster_statistic([[1.0]] * 6, lambda t: np.full(len(t), np.nan), 6)
        assert (nowhere.value, nowhere.flags) == (None, (stats.UNDEFINED,))
        for bad in ([1.0, 2.0], [[math.nan]]):
            with pytest.raises(InputError, match="totals have shape"):
                stats.cluster_statistic(bad, total, 2)  # pyright: ignore[reportArgumentType]  # on purpose


class TestPairedDifference:
    def test_equals_the_bootstrap_of_differences(self):
        a, clusters = simulate(np.random.default_rng(1), 8, 3)
        b = a - 0.25 - 0.1 * np.sin(np.arange(24))
        got = stats.paired_difference(a, b, clusters, n_resamples=N_FAST)
        assert got == stats.cluster_bootstrap(a - b, clusters, n_resamples=N_FAST)
        assert got.lo < 0.25 < got.hi

    def test_bad_input_names_the_column(self):
        with pytest.raises(InputError, match="a has 2, b has 1"):
            stats.paired_difference([0.0, 1.0], [0.0])
        with pytest.raises(InputError, match=r"b\[0\]"):
            stats.paired_difference([0.0], [math.nan])


class TestRates:
    @pytest.mark.parametrize(("k", "n"), [(0, 10), (1, 10), (7, 10), (10, 10), (30, 30), (81, 263)])
    @pytest.mark.parametrize("level", [0.9, 0.95])
    def test_wilson_equals_scipy(self, k, n, level):
        got = stats.wilson(k, n, level)
        reference = scipy_stats.binomtest(k, n).proportion_ci(level, method="wilson")
        assert got.value == k / n
        assert got.lo == pytest.approx(reference.low, abs=1e-12)
        assert got.hi == pytest.approx(reference.high, abs=1e-12)

    def test_wilson_equals_the_published_example(self):
        """Newcombe 1998, table I: 81 of 263 has the interval 0.2553 to 0.3662."""
        got = stats.wilson(81, 263)
        assert (round(got.lo, 4), round(got.hi, 4)) == (0.2553, 0.3662)

    def test_wilson_limits(self):
        assert stats.wilson(0, 0).flags == (stats.UNDEFINED,)
        assert stats.wilson(5, 5).hi == 1.0
        assert stats.wilson(0, 5).lo == 0.0
        for k, n in ((-1, 3), (4, 3)):
            with pytest.raises(InputError, match="successes out of"):
                stats.wilson(k, n)

    def test_cluster_rate_with_independent_instances_is_wilson(self):
        got = stats.cluster_rate([True, False, True, True, False], list("abcde"))
        plain = stats.wilson(3, 5)
        assert (got.value, got.lo, got.hi) == (plain.value, plain.lo, plain.hi)

    def test_cluster_rate_of_identical_instances_counts_clusters(self):
        """Correlation 1 inside clusters: the effective n is the number of clusters."""
        got = stats.cluster_rate(
            [c in "abcd" for c in "abcdef" for _ in range(5)], [c for c in "abcdef" for _ in range(5)]
        )
        plain = stats.wilson(4, 6)
        assert got.lo == pytest.approx(plain.lo, abs=1e-12)
        assert got.hi == pytest.approx(plain.hi, abs=1e-12)
        assert (got.n, got.n_clusters) == (30, 6)

    def test_cluster_rate_flags_what_it_cannot_estimate(self):
        equal = stats.cluster_rate([True] * 12, [c for c in "abcdef" for _ in range(2)])
        assert (equal.value, equal.lo) == (1.0, stats.wilson(12, 12).lo)
        assert equal.flags == (stats.ICC_UNDEFINED,)
        assert stats.ICC_UNDEFINED in stats.cluster_rate([True, False], ["a", "a"]).flags
        assert stats.cluster_rate([], []).flags == (stats.UNDEFINED,)
        with pytest.raises(InputError, match=r"outcomes\[1\] is 0\.5"):
            stats.cluster_rate([1, 0.5], ["a", "b"])  # pyright: ignore[reportArgumentType]  # on purpose

    def test_cluster_rate_covers_where_wilson_does_not(self):
        """Rates that vary between 30 clusters of 10; the standard error of 300 simulations is 0.0126 at 95 %."""
        rng = np.random.default_rng(7)
        clusters = np.repeat(np.arange(30), 10).tolist()
        adjusted = plain = 0
        for _ in range(300):
            outcomes = rng.random(300) < np.repeat(rng.beta(1.5, 1.5, size=30), 10)
            got, naive = stats.cluster_rate(outcomes.tolist(), clusters), stats.wilson(int(outcomes.sum()), 300)
            adjusted += got.lo <= 0.5 <= got.hi
            plain += naive.lo <= 0.5 <= naive.hi
        assert adjusted / 300 == pytest.approx(0.95, abs=3 * 0.0126)
        assert plain / 300 < 0.85

    @given(st.integers(0, 60), st.integers(1, 60))
    @settings(max_examples=60, deadline=None)
    def test_wilson_contains_the_rate_and_mirrors(self, k, n):
        k = min(k, n)
        got, mirror = stats.wilson(k, n), stats.wilson(n - k, n)
        assert 0.0 <= got.lo <= got.value <= got.hi <= 1.0
        assert got.lo == pytest.approx(1 - mirror.hi, abs=1e-12)


class TestSignificance:
    @pytest.mark.parametrize(("b", "c"), [(0, 0), (0, 5), (1, 9), (6, 6), (30, 12), (400, 300)])
    def test_mcnemar_equals_statsmodels(self, b, c):
        reference = mcnemar([[7, b], [c, 9]], exact=True).pvalue if b + c else 1.0
        assert stats.mcnemar_exact(b, c) == pytest.approx(reference, rel=1e-9)

    def test_mcnemar_by_hand_and_bad_counts(self):
        assert stats.mcnemar_exact(0, 5) == 2 / 32
        with pytest.raises(InputError, match="negative"):
            stats.mcnemar_exact(-1, 2)

    @given(st.integers(0, 200), st.integers(0, 200))
    @settings(max_examples=40, deadline=None)
    def test_mcnemar_is_symmetric(self, b, c):
        assert stats.mcnemar_exact(b, c) == stats.mcnemar_exact(c, b) <= 1.0

    def test_tost_equals_two_t_tests(self):
        x = np.random.default_rng(2).normal(0.02, 0.1, size=25)
        got = stats.tost_paired(x, 0.08)
        above = scipy_stats.ttest_1samp(x, -0.08, alternative="greater").pvalue
        below = scipy_stats.ttest_1samp(x, 0.08, alternative="less").pvalue
        low, high = scipy_stats.ttest_1samp(x, 0.0).confidence_interval(0.90)
        assert got.p_above == pytest.approx(above, rel=1e-9)
        assert got.p_below == pytest.approx(below, rel=1e-9)
        assert got.p == max(got.p_above, got.p_below)
        assert (got.lo, got.hi) == (pytest.approx(low, abs=1e-12), pytest.approx(high, abs=1e-12))

    def test_tost_with_equal_clusters_is_tost_of_cluster_means(self):
        values, clusters = simulate(np.random.default_rng(2), 9, 4)
        got = stats.tost_paired(values, 2.0, clusters)
        means = stats.tost_paired(values.reshape(9, 4).mean(axis=1), 2.0)
        assert got.p == pytest.approx(means.p, rel=1e-9)
        assert (got.lo, got.hi) == (pytest.approx(means.lo, abs=1e-12), pytest.approx(means.hi, abs=1e-12))

    @given(st.lists(st.floats(-1, 1, width=16), min_size=3, max_size=12), st.floats(0.125, 2, width=16))
    @settings(max_examples=60, deadline=None)
    def test_equivalence_agrees_with_its_interval(self, diffs, margin):
        got = stats.tost_paired(diffs, margin)
        near_the_edge = min(abs(got.lo + margin), abs(got.hi - margin)) < 1e-9
        assert near_the_edge or got.equivalent == (-margin < got.lo and got.hi < margin)

    def test_tost_limits(self):
        constant = stats.tost_paired([0.5] * 6, 1.0)
        assert (constant.p, constant.equivalent, constant.flags) == (0.0, True, (stats.ZERO_WIDTH,))
        assert stats.tost_paired([1.5] * 6, 1.0).p == 1.0
        for undefined in (stats.tost_paired([], 1.0), stats.tost_paired([0.1, 0.2], 1.0, ["a", "a"])):
            assert (undefined.p, undefined.lo, undefined.equivalent) == (None, None, False)
            assert stats.UNDEFINED in undefined.flags
        for margin in (0.0, -1.0, math.inf, math.nan):
            with pytest.raises(InputError, match="margin"):
                stats.tost_paired([0.1, 0.2], margin)
        with pytest.raises(InputError, match="alpha"):
            stats.tost_paired([0.1, 0.2], 1.0, alpha=0.7)
        with pytest.raises(InputError, match=r"diffs\[1\]"):
            stats.tost_paired([0.1, math.nan], 1.0)

    @given(st.lists(st.floats(0, 1), min_size=2, max_size=30))
    @settings(max_examples=15, deadline=None)  # statsmodels takes 0.1 s a call
    def test_corrections_equal_statsmodels(self, pvalues):
        for ours, name in ((stats.holm, "holm"), (stats.benjamini_hochberg, "fdr_bh")):
            reference = multipletests(pvalues, method=name)[1]
            np.testing.assert_allclose(ours(pvalues), reference, rtol=1e-9, atol=1e-300)

    def test_corrections_by_hand(self):
        assert stats.holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
        assert stats.benjamini_hochberg([0.04, 0.01, 0.03]) == pytest.approx([0.04, 0.03, 0.04])
        assert stats.holm([]) == stats.benjamini_hochberg([]) == []
        for correction in (stats.holm, stats.benjamini_hochberg):
            with pytest.raises(InputError, match=r"pvalues\[1\] is 1\.5"):
                correction([0.1, 1.5])
            with pytest.raises(InputError, match=r"pvalues\[0\]"):
                correction([math.nan])


class TestRankCorrelation:
    @given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=3, max_size=25))
    @settings(max_examples=60, deadline=None)
    def test_value_equals_scipy_with_ties(self, pairs):
        x, y = ([float(p[i]) for p in pairs] for i in (0, 1))
        got = stats.rank_correlation(x, y, n_resamples=20)
        if len(set(x)) == 1 or len(set(y)) == 1:
            assert (got.value, got.lo, got.flags) == (None, None, (stats.UNDEFINED,))
        else:
            assert got.value == pytest.approx(scipy_stats.spearmanr(x, y).statistic, abs=1e-12)

    def test_resampled_ranks_equal_a_plain_loop(self):
        rng = np.random.default_rng(9)
        x = np.sort(rng.integers(0, 9, size=15)).astype(float)
        y = x + rng.normal(0, 3, size=15)
        clusters = [c for c in "abcde" for _ in range(3)]
        got = stats.rank_correlation(x, y, clusters, n_resamples=200)
        draws = np.random.default_rng(0).integers(5, size=(200, 5))
        rows = [np.concatenate([np.arange(3 * j, 3 * j + 3) for j in row]) for row in draws]
        loop = [scipy_stats.spearmanr(x[r], y[r]).statistic for r in rows]
        assert got.lo == pytest.approx(np.quantile(loop, 0.025), abs=1e-12)
        assert got.hi == pytest.approx(np.quantile(loop, 0.975), abs=1e-12)

    def test_order_of_instances_does_not_matter(self):
        rng = np.random.default_rng(9)
        x, y, order = rng.normal(size=20), rng.normal(size=20), rng.permutation(20)
        clusters = np.repeat(list("abcde"), 4)
        for labels in (None, clusters):
            one = stats.rank_correlation(x, y, labels, n_resamples=N_FAST)
            other = stats.rank_correlation(
                x[order], y[order], None if labels is None else labels[order], n_resamples=N_FAST
            )
            assert (one.lo, one.hi) == (pytest.approx(other.lo, abs=1e-12), pytest.approx(other.hi, abs=1e-12))

    def test_monotone_data_and_degenerate_resamples(self):
        got = stats.rank_correlation([1.0, 2.0, 3.0], [1.0, 4.0, 9.0], n_resamples=N_FAST)
        assert (got.value, got.lo, got.hi) == (1.0, 1.0, 1.0)
        assert {stats.ZERO_WIDTH, stats.DEGENERATE_RESAMPLES} <= set(got.flags)

    def test_bad_input(self):
        with pytest.raises(InputError, match="x has 1, y has 2"):
            stats.rank_correlation([0.0], [0.0, 1.0])
        with pytest.raises(InputError, match=r"y\[0\]"):
            stats.rank_correlation([0.0], [math.inf])


def test_import_loads_neither_torch_nor_scipy():
    code = "import sys, notelens.stats; print(sorted({'torch', 'scipy', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
