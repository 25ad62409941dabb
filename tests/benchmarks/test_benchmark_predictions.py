"""Predicted decode steps: bytes and operations read from HLO, and the times that follow."""

import dataclasses
import subprocess
import sys

import pytest

from benchmarks.aot import costs
from benchmarks.aot.attention import decode_attention
from benchmarks.aot.hlo import Kernel, kernels
from benchmarks.gpu import predictions
from benchmarks.gpu.__main__ import main
from forge_jax.errors import ConfigError
from forge_jax.step.targets import FOLDER, TARGETS, Target
from forge_kernels.attention.shapes import LLAMA_3_1_8B

H200 = costs.Device.of(Target.read("h200"))
NO_ATTENTION = costs.NO_ATTENTION

# One layer of a step, as XLA prints it: embedding, product, cache write, attention, condition.
HLO = """\
HloModule jit_decode_4, is_scheduled=true

%fused_gather (p0: bf16[1000,64], p1: s32[4,1]) -> bf16[4,64] {
  %p0 = bf16[1000,64]{1,0} parameter(0)
  %p1 = s32[4,1]{1,0} parameter(1)
  %gather.1 = bf16[4,64]{1,0} gather(%p0, %p1), offset_dims={1}, slice_sizes={1,64}
  ROOT %multiply.1 = bf16[4,64]{1,0} multiply(%gather.1, %gather.1)
}

%fused_dot (p2: bf16[4,64], p3: s4[32,64], p4: f32[32,1]) -> bf16[4,32] {
  %p3 = s4[32,64]{1,0:E(4)} parameter(1)
  %convert.1 = f32[32,64]{1,0} convert(%p3)
  %p4 = f32[32,1]{1,0} parameter(2)
  %broadcast.1 = f32[32,64]{1,0} broadcast(%p4), dimensions={0,1}
  %multiply.2 = f32[32,64]{1,0} multiply(%convert.1, %broadcast.1)
  %p2 = bf16[4,64]{1,0} parameter(0)
  %dot.1 = f32[4,32]{1,0} dot(%p2, %multiply.2), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  ROOT %convert.2 = bf16[4,32]{1,0} convert(%dot.1)
}

%fused_scatter (p5: bf16[500,32], p6: s32[4,1], p7: bf16[4,32]) -> bf16[500,32] {
  %p5 = bf16[500,32]{1,0} parameter(0)
  %p6 = s32[4,1]{1,0} parameter(1)
  %p7 = bf16[4,32]{1,0} parameter(2)
  ROOT %scatter.1 = bf16[500,32]{1,0} scatter(%p5, %p6, %p7), update_window_dims={1}
}

%asked (p8: bf16[4,32]) -> bf16[4,32] {
  %p8 = bf16[4,32]{1,0} parameter(0)
  ROOT %sort.1 = bf16[4,32]{1,0} sort(%p8), dimensions={1}
}

%not_asked (p9: bf16[4,32]) -> bf16[4,32] {
  %p9 = bf16[4,32]{1,0} parameter(0)
  ROOT %copy.1 = bf16[4,32]{1,0} copy(%p9)
}

ENTRY %main (embedding: bf16[1000,64], w: s4[32,64], s: f32[32,1], kv: bf16[500,32]) -> bf16[4,32] {
  %embedding = bf16[1000,64]{1,0} parameter(0)
  %w = s4[32,64]{1,0:E(4)} parameter(1)
  %s = f32[32,1]{1,0} parameter(2)
  %kv = bf16[500,32]{1,0} parameter(3)
  %ids = s32[4,1]{1,0} parameter(4)
  %flag = pred[] parameter(5)
  %x = bf16[4,64]{1,0} fusion(%embedding, %ids), kind=kLoop, calls=%fused_gather, metadata={op_name="jit(decode_4)/embed/gather"}
  %y = bf16[4,32]{1,0} fusion(%x, %w, %s), kind=kCustom, calls=%fused_dot, metadata={op_name="jit(decode_4)/layer_0/qkv/product/dot_general"}
  %new = bf16[500,32]{1,0} fusion(%kv, %ids, %y), kind=kInput, calls=%fused_scatter, metadata={op_name="jit(decode_4)/layer_0/rope_write/scatter"}
  %attend = f32[4,32]{1,0} custom-call(%y, %new), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(decode_4)/layer_0/attention/forge_attention/mpmd_map"}
  %out = bf16[4,32]{1,0} custom-call(%attend), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(decode_4)/layer_0/attention/forge_attention_sum/mpmd_map"}
  %start = (bf16[4,32]{1,0}, bf16[4,32]{1,0}) all-reduce-start(%out), metadata={op_name="jit(decode_4)/layer_0/down/psum"}
  %done = bf16[4,32]{1,0} all-reduce-done(%start), metadata={op_name="jit(decode_4)/layer_0/down/psum"}
  ROOT %result = bf16[4,32]{1,0} conditional(%flag, %done, %done), true_computation=%asked, false_computation=%not_asked, metadata={op_name="jit(decode_4)/sample/cond"}
}
"""  # noqa: E501
CACHE_BYTES = 500 * 32 * 2


@pytest.fixture(scope="module")
def found() -> dict[str, Kernel]:
    names = ("embed", "product", "write", "attend", "sum", "reduce", "condition", "asked", "copy")
    return dict(zip(names, kernels(HLO, CACHE_BYTES), strict=True))


def test_a_gather_reads_only_its_rows(found):
    rows, ids = 4 * 64 * 2, 4 * 4
    assert sum(found["embed"].reads.values()) == rows + ids
    assert found["embed"].computed == 4 * 64


def test_a_product_reads_packed_values_and_counts_operations(found):
    product = found["product"]
    x, values, scale = 4 * 64 * 2, 32 * 64 / 2, 32 * 4
    assert sum(product.reads.values()) == x + values + scale
    assert sum(product.writes.values()) == 4 * 32 * 2
    assert product.multiplied == 2 * 4 * 32 * 64
    assert product.computed == 2 * 32 * 64 + 4 * 32  # convert and scale, round the result
    assert (product.layer, product.matrices) == (0, True)


@pytest.mark.parametrize(
    ("matrix", "factors", "minima", "operations"),
    [
        ("s4", ["f32[64,4]"], False, 2.7),
        ("s4", ["f16[64,16]", "f16[64,16]"], True, 3.3),
        ("s8", ["f16[64,16]"], False, 4.0),
        ("s8", ["f16[64,16]", "f16[64,16]"], True, 4.6),
        ("s8", ["f16[64,2]", "s8[64,32]"], False, 5.3),
        ("s8", ["f16[64,2]", "s8[64,16]", "f16[64,2]", "s8[64,16]"], True, 5.6),
    ],
)
@pytest.mark.parametrize("residual", [False, True])
def test_operations_of_the_kernel_for_few_rows_follow_from_its_operands(
    matrix, factors, minima, operations, residual
):
    operands = ["bf16[8,512]", f"{matrix}[64,512]", *factors, *["bf16[8,64]"] * residual]
    lines = [f"  %p{n} = {shape} parameter({n})" for n, shape in enumerate(operands)]
    names = ", ".join(f"%p{n}" for n in range(len(operands)))
    call = f'custom-call({names}), metadata={{op_name="jit(f)/forge_linear_few_rows/mpmd_map"}}'
    hlo = "\n".join(["ENTRY %main () -> x {", *lines, f"  ROOT %y = bf16[8,64] {call}", "}"])
    values = 64 * 512
    (kernel,) = kernels(hlo, layer_bytes=values / 4)
    assert max(kernel.reads.values()) == values * (0.5 if matrix == "s4" else 1)
    assert kernel.multiplied == 2 * 8 * values * (1 + minima)
    assert kernel.computed == operations * values


def test_a_kernel_without_a_name_belongs_to_the_layer_before_it():
    name = ', metadata={op_name="jit(decode_4)/layer_0/rope_write/scatter"}'
    assert name in HLO
    layers = [kernel.layer for kernel in kernels(HLO.replace(name, ""), CACHE_BYTES)]
    assert layers == [kernel.layer for kernel in kernels(HLO, CACHE_BYTES)]
    assert layers[:4] == [None, 0, 0, 0]


def test_a_scatter_writes_only_its_updates(found):
    assert sum(found["write"].writes.values()) == 4 * 32 * 2
    assert sum(found["write"].reads.values()) == 4 * 4 + 4 * 32 * 2


def test_attention_does_not_read_the_whole_cache(found):
    assert sum(found["attend"].reads.values()) == 4 * 32 * 2


def test_the_end_of_a_collective_is_no_kernel(found):
    reduce = found["reduce"]
    assert (reduce.collective, sum(reduce.reads.values())) == ("all-reduce", 4 * 32 * 2)


def test_only_the_true_branch_runs_on_demand(found):
    assert [name for name, kernel in found.items() if kernel.asked] == ["asked"]


def test_the_cost_of_a_kernel_is_its_slowest_resource():
    def cost(moved: float, multiplied: float, computed: float) -> costs.Totals:
        kernel = Kernel("", None, False, {"x": moved}, {}, "fusion", "", multiplied, computed)
        return costs.kernel_cost(kernel, H200, NO_ATTENTION)

    assert cost(4.8e9, 0, 0).busy_s == pytest.approx(1e-3 / costs.BANDWIDTH_PART)
    products = H200.products * 1e-2
    assert cost(4.8e9, products, 0).busy_s == pytest.approx(1e-2 / costs.PRODUCT_PART)
    assert cost(4.8e9, products, H200.operations).busy_s == pytest.approx(1.0)
    assert cost(0, 0, 0).seconds == pytest.approx(costs.GRAPH_GAP_S + costs.MEMORY_WAIT_S)


@pytest.mark.parametrize(
    ("key", "peak"),
    [("h200", 1070e12), ("a100", 312e12), ("l4", 121e12), ("b200", 2382e12), ("rtx5090", 210e12)],
)
def test_matrix_throughput_is_the_published_one_at_the_listed_clock(key, peak):
    assert costs.Device.of(Target.read(key)).products == pytest.approx(peak, rel=0.01)


def test_a_collective_is_slower_on_more_gpus_and_over_pcie(found):
    l4 = costs.Device.of(Target.read("l4"))
    times = [
        costs.kernel_cost(found["reduce"], device, NO_ATTENTION, shards).collective_s
        for device, shards in ((H200, 2), (H200, 8), (l4, 8))
    ]
    assert times == sorted(set(times))
    two, sent = times[0], 4 * 32 * 2
    wire = sent / (costs.COLLECTIVE_PART * 450e9)
    assert two == pytest.approx(costs.COLLECTIVE_S + 2 * costs.NVLINK_STEP_S + wire)


def test_attention_kernels_cost_what_their_plan_reads(found):
    plan = costs.Attention(read=4.8e9, written=0, sum_read=9.6e9, sum_written=0, multiplied=0)
    attend = costs.kernel_cost(found["attend"], H200, plan)
    add_up = costs.kernel_cost(found["sum"], H200, plan)
    assert (attend.moved, add_up.moved) == (4.8e9, 9.6e9)


def test_kernels_on_demand_cost_nothing(found):
    assert costs.kernel_cost(found["asked"], H200, NO_ATTENTION) == costs.Totals()


@pytest.mark.parametrize("unit", [1, 2])
@pytest.mark.parametrize("layers", [8, 32])
def test_extrapolated_step_equals_one_with_all_layers(unit, layers):
    def step(count: int) -> list[Kernel]:
        found = [Kernel("embed", None, False, {"table": 1e6}, {})]
        for layer in range(count):
            finer = 2.0 if layer % unit == 0 else 1.0
            found.append(Kernel("product", layer, False, {"w": finer * 1e8}, {"y": 1e5}))
            if layer:  # joins the sum of the layer before
                found.append(Kernel("norm", layer, False, {"y": 1e5}, {"z": 1e5}))
        found.append(Kernel("head", None, False, {"w": 1e9}, {}))
        return found

    exact = costs.Totals()
    for kernel in step(layers):
        exact = exact.plus(costs.kernel_cost(kernel, H200, NO_ATTENTION))
    short = costs.step_cost(
        step(3 * unit), H200, NO_ATTENTION, layers=layers, compiled=3 * unit, unit=unit
    )
    assert dataclasses.astuple(short) == pytest.approx(dataclasses.astuple(exact))


@pytest.mark.parametrize("key", TARGETS)
@pytest.mark.parametrize(("kv_dtype", "row"), [("bfloat16", 256), ("int8", 132)])
def test_attention_reads_each_key_once(key, kv_dtype, row):
    work = decode_attention(
        LLAMA_3_1_8B, Target.read(key).gpu, batch=3, context=1024, tokens=4, kv_dtype=kv_dtype
    )
    queries = 4 * 32 * 8 * 128 // 4 * 2  # a slice of eight rows per key/value head and token
    assert work.read - queries == 3 * 1024 * 2 * 8 * row
    assert work.sum_read == work.written


def test_attention_reads_whole_tiles():
    read = [
        decode_attention(LLAMA_3_1_8B, Target.read("l4").gpu, batch=1, context=context).read
        for context in (64, 65, 128)
    ]
    assert read[0] < read[1] == read[2]


def test_devices_are_recognized_by_their_name():
    a100 = costs.device_named("NVIDIA A100-SXM4-80GB")
    assert a100 is not None and a100.key == "a100"
    assert costs.device_named("NVIDIA H100 80GB HBM3") is None


def test_any_target_configuration_is_read_from_a_file(tmp_path):
    file = tmp_path / "h800.txtpb"
    file.write_text((FOLDER / "h200.txtpb").read_text().replace("132", "114", 1))
    target = Target.read(str(file))
    assert (target.key, target.cores, target.bandwidth) == ("h800", 114, 4.8e12)


def test_a_target_without_a_field_is_rejected(tmp_path):
    file = tmp_path / "odd.txtpb"
    file.write_text((FOLDER / "h200.txtpb").read_text().replace("memory_bandwidth", "speed"))
    with pytest.raises(ConfigError, match=r"odd\.txtpb: .* no field memory_bandwidth"):
        Target.read(str(file))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("h201", "llama-3.1-8b"), "no description of the GPU 'h201': use one of h200"),
        (("h200.txtpb", "llama-3.1-8b"), "no description of the GPU 'h200.txtpb'"),
        (("h200", "llama-3"), "no model 'llama-3': use llama-3.2-1b"),
        (("h200", ","), "at least one device and one model"),
        (("h200", "llama-3.1-8b", "--quantization", "Q9"), "no type 'Q9': use none, int8"),
    ],
)
def test_invalid_arguments_are_named_in_the_error(arguments, message, capsys):
    assert main(["--predict", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_gpu_that_the_kernels_do_not_support_is_rejected(tmp_path, capsys):
    file = tmp_path / "t4.txtpb"
    file.write_text((FOLDER / "l4.txtpb").read_text().replace("major: 8", "major: 7", 1))
    assert main(["--predict", str(file), "llama-3.1-8b"]) == 1
    assert "compute capability 7.9: use a GPU with 8.0 or newer" in capsys.readouterr().err


def test_a_missing_compiler_is_named_with_its_installation(monkeypatch, capsys):
    monkeypatch.setattr(predictions, "has_compiler", lambda: False)
    assert main(["--predict", "h200", "llama-3.1-8b"]) == 1
    assert "make .venv-aot/.aot" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "1000000"])
def test_batches_and_contexts_have_limits(value, capsys):
    with pytest.raises(SystemExit):
        main(["--predict", "h200", "llama-3.1-8b", "--batch", value])
    assert f"'{value}' is not a number from 1 to 1024" in capsys.readouterr().err


def test_the_command_does_not_import_jax_before_a_process_sets_it_up():
    code = "import sys, benchmarks.gpu.__main__; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
