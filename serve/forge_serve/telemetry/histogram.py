"""A Prometheus histogram for what is observed with every event: five times cheaper than the usual.

The library's takes a lock for the bucket and another for the sum, 1 us in all; this one belongs to
one thread, the event loop's, which also answers the scrapes.
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
    """One histogram with the labels of a model; there is none as long as there are no labels.

    Args:
      last_bound: buckets with a larger bound are not shown; what is larger is in the last, +Inf.
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
        self._counts = [0] * (len(bounds) + 1)  # the last: above all bounds
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
