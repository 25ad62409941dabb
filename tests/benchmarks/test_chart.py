"""The chart of the README, and the reports that it is made from."""

import pytest

from benchmarks import chart


@pytest.fixture(scope="module")
def reports():
    return {shape: chart.newest(shape) for shape in chart.SHAPES}


def test_committed_chart_matches_the_newest_reports(reports):
    expected = "run `python -m benchmarks.chart`"
    assert chart.CHART.read_text() == chart.chart(reports), expected


@pytest.mark.parametrize("shape", chart.SHAPES)
@pytest.mark.parametrize("peer", chart.PEERS)
def test_bars_have_the_medians_of_the_report(reports, shape, peer):
    report = reports[shape]
    medians = report["shapes"][shape]["batches"]["ratio"][f"{chart.OURS} / {peer}"]
    for name, requests, workload, figure in chart.COLUMNS:
        column = name if name == "prefill" else f"{name} {requests.split()[0]}"
        bar = chart.bar(chart.runs_of(report), peer, workload, figure)
        assert bar.median == pytest.approx(medians[column])
        assert bar.low <= bar.median <= bar.high < chart.MAX_RATIO
