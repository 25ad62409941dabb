"""Prometheus histogram for frequent observations, five times cheaper than the library's.

The library takes a lock for the bucket and another for the sum, 1 us in total. This histogram
needs none, because the event loop's thread both observes values and answers scrapes.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class ModelHistogram(Collector):
    """Histogram with the labels of a model. It is not exported until there are labels.

    Args:
      name: name of the metric.
      doc: help text of the metric.
      bounds: upper bounds of the buckets, without infinity.
      labels: returns the labels; empty until the model is loaded.
      last_bound: returns the largest bound to export. Larger values count in the bucket +Inf.
    """

    def __init__(
        self,
        name: str,
        doc: str,
        bounds: Sequence[float],
        labels: Callable[[], dict[str, str]],
        last_bound: Callable[[], float] = lambda: math.inf,
    ):
        self._name = name
        self._doc = doc
        self._bounds = [float(bound) for bound in bounds]
        self._counts = [0] * (len(bounds) + 1)  # the last one counts values above all bounds
        self._sum = 0.0
        self._labels = labels
        self._last_bound = last_bound

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def describe(self) -> list[Metric]:
        return [HistogramMetricFamily(self._name, self._doc)]

    def collect(self) -> Iterator[Metric]:
        labels, last = self._labels(), self._last_bound()
        if not labels:
            return
        bounds = (*self._bounds, math.inf)
        counts = zip(bounds, itertools.accumulate(self._counts), strict=True)
        buckets = [(floatToGoString(b), n) for b, n in counts if b <= last or b == math.inf]
        family = HistogramMetricFamily(self._name, self._doc, labels=list(labels))
        family.add_metric(list(labels.values()), buckets, self._sum)
        yield family
