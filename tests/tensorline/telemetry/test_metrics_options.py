"""Triton's --metrics-config, line by line."""

import pytest

from tensorline.errors import ConfigError
from tensorline.telemetry.metrics_options import MetricsOptions, metrics_options


def test_nothing_said_is_tritons_default() -> None:
    assert metrics_options([]) == MetricsOptions(
        counter_latencies=True,
        summary_latencies=False,
        histogram_latencies=False,
        quantiles=(0.5, 0.9, 0.95, 0.99, 0.999),
    )


def test_each_key_does_what_it_says() -> None:
    lines = [
        "counter_latencies=false",
        "summary_latencies=true",
        "histogram_latencies=1",
        "summary_quantiles=0.9:0.01,0.5:0.05",
    ]
    assert metrics_options(lines) == MetricsOptions(False, True, True, (0.5, 0.9))


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("summary_latency=true", "did you mean summary_latencies"),
        ("nonsense", "there are counter_latencies"),
        ("summary_latencies=maybe", "is 'maybe', true or false"),
        ("summary_quantiles=0.5:0.05,2:0.1", "'2:0.1'"),
        ("summary_quantiles=half", "'half'"),
        ("summary_quantiles=0.5:", "'0.5:'"),
        ("summary_quantiles=nan:0", "'nan:0'"),
    ],
)
def test_what_cannot_be_is_named(line: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        metrics_options([line])


def test_quantiles_are_bounded() -> None:
    with pytest.raises(ConfigError, match="at most 32"):
        metrics_options(["summary_quantiles=" + ",".join(f"0.{n}:0.1" for n in range(10, 60))])
