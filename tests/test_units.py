"""Sizes in the log."""

import pytest

from forge_jax.telemetry.units import bytes_text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (10_200_000, "10 MB"),
        (999_600_000, "1.0 GB"),
        (1_530_000_000, "1.5 GB"),
        (9_960_000_000, "10 GB"),
        (141_000_000_000, "141 GB"),
        (2_500_000_000_000_000, "2500 TB"),
    ],
)
def test_size_is_formatted_in_a_fitting_unit(number, text):
    assert bytes_text(number) == text
