"""Slopes against statsmodels and closed forms."""

import numpy as np
import pytest

from notelens.errors import InputError
from notelens.stats import UNDEFINED, ZERO_WIDTH, cluster_slope, holm, mcnemar_exact, tost_paired


def sessions(n: int, turns: int, slope: float, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = np.tile(np.arange(turns, dtype=float), n)
    level = np.repeat(rng.normal(0, 0.3, n), turns)
    return x, 0.5 + slope * x + level + rng.normal(0, 0.2, n * turns), np.repeat(np.arange(n), turns)


def test_slope_and_interval_are_those_of_statsmodels() -> None:
    import statsmodels.api as sm

    x, y, clusters = sessions(60, 28, -0.004, 1)
    found = cluster_slope(x, y, clusters.tolist())
    fit = sm.OLS(y, sm.add_constant(x)).fit(cov_type="cluster", cov_kwds={"groups": clusters})
    lo, hi = fit.conf_int()[1]
    assert found.value == pytest.approx(fit.params[1], rel=1e-10)
    assert (found.lo, found.hi) == (pytest.approx(lo, abs=2e-4), pytest.approx(hi, abs=2e-4))
    assert (found.n, found.n_clusters) == (60 * 28, 60)


def test_intervals_cover() -> None:
    hits = 0
    for seed in range(150):
        x, y, clusters = sessions(25, 10, 0.01, 1000 + seed)
        found = cluster_slope(x, y, clusters.tolist(), seed=seed)
        assert found.lo is not None and found.hi is not None
        hits += found.lo <= 0.01 <= found.hi
    assert 0.88 <= hits / 150 <= 0.99, "nominal 0.95; simulated"


def test_closed_forms() -> None:
    line = cluster_slope([0, 1, 2, 0, 1, 2], [1, 3, 5, 1, 3, 5], ["a"] * 3 + ["b"] * 3)
    assert line.value == pytest.approx(2.0) and ZERO_WIDTH in line.flags
    assert cluster_slope([1, 1, 1], [1, 2, 3]).value is None
    assert UNDEFINED in cluster_slope([], []).flags
    one = cluster_slope([0, 1], [0, 1], ["a", "a"])
    assert one.value == pytest.approx(1.0) and one.lo is None
    shifted = cluster_slope([1e6, 1e6 + 1, 1e6 + 2], [0.0, 0.5, 1.0])
    assert shifted.value == pytest.approx(0.5)
    with pytest.raises(InputError):
        cluster_slope([1, 2], [1])


def test_the_tests_of_the_agent_experiments_against_other_implementations() -> None:
    from scipy import stats
    from statsmodels.stats.contingency_tables import mcnemar
    from statsmodels.stats.multitest import multipletests
    from statsmodels.stats.weightstats import ttost_paired

    assert mcnemar_exact(3, 11) == pytest.approx(mcnemar([[5, 3], [11, 7]], exact=True).pvalue)
    assert mcnemar_exact(3, 11) == pytest.approx(stats.binomtest(3, 14).pvalue)
    p = [0.01, 0.04, 0.03, 0.2]
    assert holm(p) == pytest.approx(multipletests(p, method="holm")[1].tolist())
    rng = np.random.default_rng(0)
    a, b = rng.normal(0, 1, 40), rng.normal(0.02, 1, 40)
    ours = tost_paired((a - b).tolist(), 0.5)
    assert ours.p == pytest.approx(ttost_paired(a, b, -0.5, 0.5)[0])
