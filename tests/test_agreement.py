"""Agreement, logit distances and gaps closed, against closed forms."""

import math

import numpy as np
import pytest

from notelens.errors import InputError
from notelens.stats import CONSTANT_ANSWER, CONSTANT_REFERENCE, agreement, gap_recovered, logit_distance, wilson


class TestAgreement:
    def test_overall_and_where_the_reference_is_right(self):
        found = agreement("aabbab", "aabbba", "aabaaa")
        assert found.overall.value == 4 / 6 and (found.overall.lo, found.overall.hi) == _interval(4, 6)
        assert found.reference_right.value == 4 / 6 and found.method_right.value == 4 / 6
        assert (found.given_right.value, found.given_right.n) == (3 / 4, 4)
        assert found.by_chance == pytest.approx(0.5) and not found.empty

    def test_shared_failures_do_not_count_as_agreement_given_right(self):
        """Both always wrong in the same varied way: overall 1.0, conditional undefined."""
        found = agreement([0, 1, 2, 0], [0, 1, 2, 0], [9, 9, 9, 9])
        assert found.overall.value == 1.0 and found.given_right.value is None and found.given_right.n == 0
        assert found.reference_right.value == 0.0

    @pytest.mark.parametrize(
        ("reference", "method", "flags"),
        [
            ("aaaa", "aaaa", {CONSTANT_REFERENCE, CONSTANT_ANSWER}),
            ("aaaa", "abab", {CONSTANT_REFERENCE}),
            ("abab", "aaaa", {CONSTANT_ANSWER}),
            ("abab", "abab", set()),
        ],
    )
    def test_constant_cells_are_empty(self, reference, method, flags):
        found = agreement(reference, method, "abab")
        assert set(found.flags) == flags and found.empty == bool(flags)
        assert flags <= set(found.overall.flags) and flags <= set(found.given_right.flags)

    def test_unrelated_answers_agree_by_chance(self):
        rng = np.random.default_rng(0)
        a, b = rng.integers(0, 3, 3000).tolist(), rng.integers(0, 3, 3000).tolist()
        found = agreement(a, b)
        assert found.by_chance == pytest.approx(1 / 3, abs=0.01)
        assert found.overall.lo < found.by_chance < found.overall.hi

    def test_clusters_widen_the_interval(self):
        same = [1] * 5 + [0] * 5 + [1] * 5 + [0] * 5
        alone, grouped = agreement([1] * 20, same), agreement([1] * 20, same, clusters=[i // 5 for i in range(20)])
        assert grouped.overall.lo < alone.overall.lo and grouped.overall.n_clusters == 4

    def test_nothing_and_unequal_lengths(self):
        assert agreement([], []).empty and agreement([], []).by_chance is None
        for bad in (([1], [1, 2]), ([1, 2], [1, 2], [1]), ([1, 2], [1, 2], None, ["a"])):
            with pytest.raises(InputError, match="unequal lengths"):
                agreement(*bad)


class TestLogits:
    def test_a_constant_moves_nothing(self):
        x = np.array([1.0, 3.0, -2.0, 0.5])
        found = logit_distance(x, x + 100.0)
        assert found.cosine == pytest.approx(1.0) and found.kl == pytest.approx(0.0, abs=1e-12) and found.top1
        assert found.max_abs == pytest.approx(0.0, abs=1e-12)

    def test_an_uncentred_cosine_would_hide_the_opposite(self):
        x = np.array([1.0, -1.0])
        found = logit_distance(100 + x, 100 - x)
        assert found.cosine == pytest.approx(-1.0) and not found.top1

    def test_divergence_of_two_coins(self):
        p, q = 0.8, 0.3
        found = logit_distance([math.log(p), math.log(1 - p)], [math.log(q), math.log(1 - q)])
        assert found.kl == pytest.approx(p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)))

    @pytest.mark.parametrize(
        ("a", "b", "message"),
        [
            ([1.0, 2.0], [1.0], "unequal lengths"),
            ([1.0], [1.0], "have no direction"),
            ([1.0, float("nan")], [1.0, 2.0], "nan"),
            ([1.0, 1.0], [1.0, 2.0], "all logits of a vector are equal"),
        ],
    )
    def test_bad_vectors(self, a, b, message):
        with pytest.raises(InputError, match=message):
            logit_distance(a, b)


class TestGap:
    def test_share_of_the_gap(self):
        floor, ceiling = [True] * 2 + [False] * 8, [True] * 10
        method = [True] * 8 + [False] * 2
        found = gap_recovered(floor, method, ceiling)
        assert found.value == pytest.approx(0.75) and found.lo < 0.75 < found.hi and found.n == 10

    def test_floor_and_ceiling_themselves(self):
        floor, ceiling = [False, True] * 10, [True] * 20
        assert gap_recovered(floor, floor, ceiling).value == 0.0
        assert gap_recovered(floor, ceiling, ceiling).value == 1.0

    def test_no_gap(self):
        assert gap_recovered([True, False], [True, True], [False, True]).value is None
        with pytest.raises(InputError, match="unequal lengths"):
            gap_recovered([True], [True, False], [True])


def _interval(k, n):
    found = wilson(k, n)
    return found.lo, found.hi
