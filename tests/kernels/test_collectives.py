"""The collectives of a sum. `tests/parallel/test_several_hosts.py` tests its bits."""

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from forge_kernels.collectives import ordered_sum, sums_in_order
from forge_kernels.devices import HOPPER, described


@pytest.mark.parametrize(
    ("devices", "size", "in_order", "collectives"),
    [
        (4, 64, True, {"all_to_all", "all_gather"}),
        (4, 63, True, {"all_gather"}),
        (4, 64, False, {"psum"}),
        (2, 64, True, {"psum"}),  # a + b is b + a
    ],
)
def test_sums_over_gpus_have_an_order_if_it_matters(devices, size, in_order, collectives):
    mesh = AbstractMesh((devices,), ("x",), axis_types=(AxisType.Auto,))
    add = jax.shard_map(
        lambda part: ordered_sum(part, "x"),
        **{"mesh": mesh, "in_specs": PartitionSpec("x"), "out_specs": PartitionSpec("x")},
    )
    with described(HOPPER), sums_in_order(in_order):
        traced = str(jax.make_jaxpr(add)(jax.ShapeDtypeStruct((devices, size), "bfloat16")))
    assert {name for name in ("psum", "all_gather", "all_to_all") if name in traced} == collectives
