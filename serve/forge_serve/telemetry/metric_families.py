"""Metric families whose values are computed at each scrape."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

Values = dict[tuple[str, ...], float]  # the keys are the values of the further labels


def gauge(name: str, doc: str, labels: dict[str, str], values: Values, *more: str) -> Metric:
    """Return a gauge with `labels` and the further labels `more`."""
    family = GaugeMetricFamily(name, doc, labels=[*labels, *more])
    for key, value in values.items():
        family.add_metric([*labels.values(), *key], value)
    return family


def counter(name: str, doc: str, labels: dict[str, str], values: Values, *more: str) -> Metric:
    """Return a counter with `labels` and the further labels `more`."""
    family = CounterMetricFamily(name, doc, labels=[*labels, *more])
    for key, value in values.items():
        family.add_metric([*labels.values(), *key], value)
    return family


def histogram(
    name: str,
    doc: str,
    labels: dict[str, str],
    bounds: Sequence[float],
    values: Sequence[tuple[tuple[str, ...], Sequence[int], float]],
    *more: str,
) -> Metric:
    """Return a histogram with `labels` and the further labels `more`.

    Args:
      name: name of the metric.
      doc: help text of the metric.
      labels: labels that all values share.
      bounds: upper bounds of the buckets, without infinity.
      values: (values of the further labels, counts by bucket, sum).
      more: names of the further labels.
    """
    family = HistogramMetricFamily(name, doc, labels=[*labels, *more])
    names = [floatToGoString(float(bound)) for bound in (*bounds, math.inf)]
    for key, counts, total in values:
        buckets = list(zip(names, itertools.accumulate(counts), strict=True))
        family.add_metric([*labels.values(), *key], buckets, total)
    return family
