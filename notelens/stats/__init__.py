"""Intervals and tests, written once and used by every table.

All intervals are two-sided. An instance belongs to a *cluster* (the scenario family): instances inside a cluster
resemble each other, so clusters are what is resampled. With few clusters every bootstrap interval is too short: on
normal data a nominal 95 % interval of the mean covers about 85 % with 6 clusters, 90 % with 12 and 93 % with 30
(simulated in ``tests/test_stats.py``). Report the number of clusters beside n.

Nothing here returns NaN. What is undefined is ``None`` and carries a flag; each flag is a constant of this package.
numpy is the only import; scipy is loaded by the functions that need a t distribution.
"""

from notelens.stats.agreement import (
    CONSTANT_ANSWER,
    CONSTANT_REFERENCE,
    Agreement,
    LogitDistance,
    agreement,
    gap_recovered,
    logit_distance,
)
from notelens.stats.blocks import block_statistic
from notelens.stats.bootstrap import cluster_bootstrap, cluster_statistic, paired_difference, rank_correlation
from notelens.stats.estimate import (
    BCA_UNDEFINED,
    DEGENERATE_RESAMPLES,
    FEW_CLUSTERS,
    ICC_UNDEFINED,
    MIN_CLUSTERS,
    N_RESAMPLES,
    ONE_CLUSTER,
    SINGLE_INSTANCE,
    UNDEFINED,
    ZERO_WIDTH,
    Estimate,
)
from notelens.stats.rates import cluster_rate, wilson
from notelens.stats.significance import Equivalence, benjamini_hochberg, holm, mcnemar_exact, tost_paired
from notelens.stats.trend import cluster_slope

__all__ = [
    "BCA_UNDEFINED",
    "CONSTANT_ANSWER",
    "CONSTANT_REFERENCE",
    "DEGENERATE_RESAMPLES",
    "FEW_CLUSTERS",
    "ICC_UNDEFINED",
    "MIN_CLUSTERS",
    "N_RESAMPLES",
    "ONE_CLUSTER",
    "SINGLE_INSTANCE",
    "UNDEFINED",
    "ZERO_WIDTH",
    "Agreement",
    "Equivalence",
    "Estimate",
    "LogitDistance",
    "agreement",
    "benjamini_hochberg",
    "block_statistic",
    "cluster_bootstrap",
    "cluster_rate",
    "cluster_slope",
    "cluster_statistic",
    "gap_recovered",
    "holm",
    "logit_distance",
    "mcnemar_exact",
    "paired_difference",
    "rank_correlation",
    "tost_paired",
    "wilson",
]
