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
    """One histogram with the label `model_name`; there is none as long as the name is empty."""

    def __init__(self, name: str, doc: str, bounds: Sequence[float], model_name: Callable[[], str]):
        self._name = name
        self._doc = doc
        self._bounds = [float(bound) for bound in bounds]
        self._counts = [0] * (len(bounds) + 1)  # the last: above all bounds
        self._sum = 0.0
        self._model_name = model_name

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def describe(self) -> list[Metric]:
        return [HistogramMetricFamily(self._name, self._doc)]

    def collect(self) -> Iterator[Metric]:
        model_name = self._model_name()
        if not model_name:
            return
        bounds = map(floatToGoString, (*self._bounds, math.inf))
        buckets = list(zip(bounds, itertools.accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(self._name, self._doc, labels=["model_name"])
        family.add_metric([model_name], buckets, self._sum)
        yield family
