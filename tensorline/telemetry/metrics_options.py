"""Which of the model families are exposed: the keys of Triton's `--metrics-config`.

Source: observability.md §1.3.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from tensorline.errors import ConfigError

__all__ = ["MetricsOptions", "metrics_options"]

_QUANTILES_LIMIT: Final = 32
_KEYS: Final = ("counter_latencies", "summary_latencies", "histogram_latencies", "summary_quantiles")
_TRUE: Final = frozenset({"true", "True", "1"})
_FALSE: Final = frozenset({"false", "False", "0"})


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """Model families beside the plain counts."""

    counter_latencies: bool = True
    """Cumulative durations, `nv_inference_*_duration_us`."""
    summary_latencies: bool = False
    """Quantiles of the last minute, `nv_inference_*_summary_us`."""
    histogram_latencies: bool = False
    """Time to the first response of decoupled models, `nv_inference_first_response_histogram_ms`."""
    quantiles: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)


def metrics_options(lines: Iterable[str]) -> MetricsOptions:
    """Read `key=value` lines.

    Raises:
        ConfigError: no such key (with the nearest one), or a value that it cannot have.
    """
    options = MetricsOptions()
    for line in lines:
        key, equals, value = line.strip().partition("=")
        if not equals or key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(_KEYS)}"
            raise ConfigError(f"metrics_config '{line}' is no key=value that is known{hint}")
        match key:
            case "counter_latencies":
                options = replace(options, counter_latencies=_switch(key, value))
            case "summary_latencies":
                options = replace(options, summary_latencies=_switch(key, value))
            case "histogram_latencies":
                options = replace(options, histogram_latencies=_switch(key, value))
            case "summary_quantiles":
                options = replace(options, quantiles=_quantiles(value))
    return options


def _switch(key: str, value: str) -> bool:
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ConfigError(f"metrics_config {key} is '{value}', true or false is wanted")


def _quantiles(value: str) -> tuple[float, ...]:
    """`quantile:error` pairs, with commas between them. Ours are exact: the errors are checked and not needed."""
    quantiles = []
    for pair in value.strip('"').split(","):
        quantile, colon, error = pair.partition(":")
        try:
            numbers = (float(quantile), float(error or "0"))
        except ValueError:
            numbers = (-1.0, 0.0)
        if not all(0 <= number <= 1 for number in numbers) or (colon and not error):
            raise ConfigError(
                f"metrics_config summary_quantiles has '{pair}', quantile:error is wanted, both from 0 to 1"
            )
        quantiles.append(numbers[0])
    if len(quantiles) > _QUANTILES_LIMIT:
        raise ConfigError(f"metrics_config summary_quantiles has {len(quantiles)}, at most {_QUANTILES_LIMIT} are kept")
    return tuple(sorted(set(quantiles)))
