"""What an engine does not count is unavailable, never 0; a hit rate is that of a window."""

import pytest

from notelens.serving.metrics import Counters, Settings, parse, read_counters, read_settings, shown, window

LABELS = '{engine="0",model_name="a } b\\"c"}'


def text(hits: float | None = 30.0, queries: float | None = 40.0, name: str = "vllm:prefix_cache_{}_total") -> str:
    """Metrics with these counters."""
    lines = ["# HELP vllm:prefix_cache_hits_total Hits.", "# TYPE vllm:prefix_cache_hits_total counter", "not a sample"]
    for what, value in (("hits", hits), ("queries", queries)):
        if value is not None:
            lines.append(f"{name.format(what)}{LABELS} {value}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "name",
    [
        "vllm:prefix_cache_{}_total",
        "vllm:prefix_cache_{}",
        "vllm:gpu_prefix_cache_{}_total",
        "vllm:gpu_prefix_cache_{}",
    ],
)
def test_every_spelling_of_the_counters_is_read(name: str) -> None:
    found = read_counters(text(name=name))
    assert (found.hits, found.queries) == (30.0, 40.0)
    assert window(Counters(queries=20.0, hits=20.0), found).hit_rate == 0.5


def test_labels_may_hold_braces_and_quotes_and_all_engines_are_added() -> None:
    assert parse(f"a{LABELS} 1.5 1700000000\n")["a"][0] == ({"engine": "0", "model_name": 'a } b\\"c'}, 1.5)
    many = text() + text(hits=1.0, queries=2.0)
    assert (read_counters(many).hits, read_counters(many).queries) == (31.0, 42.0)


def test_the_newer_of_two_names_counts_and_nothing_is_added_twice() -> None:
    both = (
        text() + text(hits=7.0, queries=8.0, name="vllm:gpu_prefix_cache_{}_total") + text(name="vllm:prefix_cache_{}")
    )
    assert (read_counters(both).hits, read_counters(both).queries) == (30.0, 40.0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no counter of prefix cache queries and hits"),
        ("", "no counter of prefix cache queries and hits"),
        (text(queries=None), "no counter of prefix cache queries"),
        (text(hits=None), "no counter of prefix cache hits"),
        (text(hits=float("nan")), "no counter of prefix cache hits"),
        ("vllm:gpu_prefix_cache_hit_rate 0.0\n", "no counter of prefix cache queries and hits"),
    ],
)
def test_a_missing_counter_is_unavailable_and_not_zero(content: str | None, said: str) -> None:
    found = window(read_counters(content), read_counters(content))
    assert found.hit_rate is None and said in found.reason
    assert str(found).startswith("unavailable (the engine's metrics have no counter")


def test_only_what_happened_in_the_window_counts() -> None:
    """A warm-up of 1,000 tokens without a hit does not lower the rate of the timed window."""
    warm, after = read_counters(text(0.0, 1000.0)), read_counters(text(90.0, 1100.0))
    found = window(warm, after)
    assert found.hit_rate == 0.9 and str(found) == "0.900 (90 of 100 tokens)"
    assert window(after, after).hit_rate is None and "no token was looked up" in window(after, after).reason
    none = window(warm, read_counters(text(0.0, 1100.0)))
    assert none.hit_rate == 0.0 and str(none) == "0.000 (0 of 100 tokens)", "a true zero stays one"


def test_a_counter_that_went_back_is_no_hit_rate() -> None:
    found = window(read_counters(text(90.0, 1100.0)), read_counters(text(10.0, 20.0)))
    assert found.hit_rate is None and "started anew" in found.reason


def test_the_time_in_the_queue_is_a_mean_of_the_window() -> None:
    a, b = (Counters(1.0, 1.0, None, s, n) for s, n in ((1.0, 10.0), (1.5, 20.0)))
    assert window(a, b).queue_ms == pytest.approx(50.0)
    assert window(Counters(), b).queue_ms is None


def test_settings_are_read_back() -> None:
    info = 'vllm:cache_config_info{block_size="16",cache_dtype="fp8",enable_prefix_caching="False",num_gpu_blocks="None"} 1.0\n'
    assert read_settings(info) == Settings(16, False, "fp8", None)
    assert read_settings(info.replace("False", "True").replace("None", "512")) == Settings(16, True, "fp8", 512)
    assert read_settings("") == read_settings(None) == Settings()
    assert shown(None) == "unavailable" and shown(0.0) == "0.000"
