"""The choice of kernels, the fallbacks with their messages, and equal results of all choices."""

import logging
from types import SimpleNamespace

import pytest

from forge_jax import LLM, SamplingParams
from forge_jax.checkpoint.hub import resolve
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.config import EngineConfig, ModelConfig
from forge_jax.engine.builder import choose_budget, choose_device, choose_kernels
from forge_jax.errors import ConfigError
from forge_jax.testing import core_of
from forge_jax.weights.formats import WeightFormats
from forge_jax.weights.quantized import QuantizedFormat
from forge_kernels import cpu
from forge_kernels.cpu import BuildError, library
from forge_kernels.devices import HOPPER

OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
GREEDY = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "What is 7 plus 5?",
    "Tell me a story about a dog.",
    "The largest ocean is",
    "My name is",
]


@pytest.fixture(scope="module", autouse=True)
def _kernels(compilation_cache):
    if not cpu.available():
        pytest.skip("no CPU kernels on this machine")


@pytest.fixture(scope="module")
def make_llm():
    made: dict[tuple, LLM] = {}

    def make(**options) -> LLM:
        key = tuple(sorted(options.items()))
        if key not in made:
            made[key] = LLM("forge-tiny", **OPTIONS, **options)
        return made[key]

    return make


@pytest.fixture
def no_kernels(monkeypatch):
    """Make the kernels unbuildable, in a process that has not tried yet."""

    def load(**_):
        raise BuildError("no C++ compiler (c++, g++ or clang++): install g++")

    monkeypatch.setattr(library, "load", load)
    monkeypatch.setattr(library, "_why_not", library.functools.cache(library._why_not.__wrapped__))


def choose(model: str, **options):
    config = EngineConfig(model=ModelConfig(model=model, **options))
    return choose_kernels(config, read_spec(resolve(model)), choose_device(config))


def continuations(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, progress=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def same_tokens(a: list[list[int]], b: list[list[int]]) -> int:
    """Count the tokens before the first difference, summed over the prompts."""
    total = 0
    for mine, theirs in zip(a, b, strict=True):
        pairs = zip(mine, theirs, strict=True)
        total += next((i for i, (x, y) in enumerate(pairs) if x != y), len(mine))
    return total


def test_cpu_kernels_are_the_default_and_can_be_disabled(make_llm):
    by_default, plain = make_llm(), make_llm(kernels="xla")
    assert core_of(by_default).device.model.packings
    assert core_of(by_default).device.options.implementation == "cpu"
    assert not core_of(plain).device.model.packings
    assert core_of(plain).device.options.implementation == "xla"


def test_greedy_texts_match_plain_xla(make_llm):
    """Near ties may flip because of another summation order; these prompts have none."""
    total = len(PROMPTS) * GREEDY.max_tokens
    same = same_tokens(continuations(make_llm()), continuations(make_llm(kernels="xla")))
    assert same > 0.8 * total


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.quick_cases(1)
def test_quantized_models_answer(make_llm, quantization):
    llm = make_llm(quantization=quantization)
    packings = core_of(llm).device.model.packings
    assert packings["layers.0.mlp.down.weight"].format == quantization
    assert packings["head.weight"].format == "int8"
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    [answer] = llm.chat([chat], SamplingParams(max_tokens=30, temperature=0), progress=False)
    assert "Paris" in answer.text
    sizes = core_of(make_llm()).device.model.param_bytes, core_of(llm).device.model.param_bytes
    assert sizes[1] < {"int8": 0.53, "int4": 0.36}[quantization] * sizes[0]


def test_missing_kernels_fall_back_to_xla_with_one_warning(no_kernels, caplog):
    with caplog.at_level(logging.WARNING):
        llm = LLM("forge-tiny", **OPTIONS)
        assert choose("forge-tiny").attention == "xla"
    runner = core_of(llm).device
    assert runner.options.implementation == "xla" and not runner.model.packings
    warnings = [
        record.getMessage() for record in caplog.records if "kernels" in record.getMessage()
    ]
    assert len(warnings) == 1 and "install g++" in warnings[0]
    [output] = llm.generate(PROMPTS[:1], GREEDY, progress=False)
    assert len(output.outputs[0].token_ids) == GREEDY.max_tokens


@pytest.mark.parametrize(
    ("quantization", "options"),
    [
        ("fp8", {}),
        ("fp8", {"kernels": "xla"}),
        ("int8", {"dtype": "float32"}),
        ("int4", {"kernels": "xla"}),
    ],
)
@pytest.mark.slow
def test_xla_multiplies_quantized_weights_without_kernel_support(quantization, options):
    llm = LLM("forge-tiny", quantization=quantization, **OPTIONS, **options)
    model, device = core_of(llm).device.model, core_of(llm).device
    assert {format.scheme.values for format in model.in_format(QuantizedFormat).values()} == {
        quantization
    }
    assert (device.options.implementation == "cpu") == (not options)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    [answer] = llm.chat([chat], SamplingParams(max_tokens=30, temperature=0), progress=False)
    assert "Paris" in answer.text


@pytest.mark.slow
def test_quantization_without_a_compiler_uses_plain_xla(no_kernels):
    llm = LLM("forge-tiny", quantization="int8", **OPTIONS)
    model = core_of(llm).device.model
    assert model.in_format(QuantizedFormat) and not model.packings


def test_unknown_kernel_choice_is_named_in_the_error():
    with pytest.raises(ConfigError, match="quantization"):
        LLM("forge-tiny", quantization="int3", **OPTIONS)
    with pytest.raises(ConfigError, match="kernels"):
        LLM("forge-tiny", kernels="fast", **OPTIONS)


def test_unusable_instruction_set_is_named_in_the_error(monkeypatch):
    def available(isa, new_bar):
        raise BuildError(f"this CPU does not run {isa}: name one of avx2")

    monkeypatch.setattr(cpu, "available", available)
    config = EngineConfig(model=ModelConfig(model="forge-tiny", kernels="avx2_vnni"))
    with pytest.raises(ConfigError, match="--kernels avx2_vnni: this CPU does not run avx2_vnni"):
        choose_kernels(config, read_spec(resolve("forge-tiny")), choose_device(config))


def test_float32_models_use_the_kernels_for_sampling_only(stories, caplog):
    """No warning is expected, because the other kernels do not cover float32."""
    with caplog.at_level(logging.WARNING):
        kernels = choose(str(stories))
    assert not caplog.records and kernels.formats == WeightFormats()
    assert (kernels.attention, kernels.sampler) == ("xla", "cpu")
    assert choose(str(stories), kernels="xla").sampler == "xla"


@pytest.mark.parametrize(("capability", "fp8"), [("8.0", False), ("9.0", True), ("12.0", True)])
def test_gpu_converts_quantized_values_inside_its_products(capability, fp8, stories):
    device = SimpleNamespace(platform="gpu", compute_capability=capability)
    config = EngineConfig.from_options(model=str(stories))
    kernels = choose_kernels(config, read_spec(stories), device)
    assert kernels.attention == "auto" and kernels.sampler == "xla"
    assert kernels.formats.fused == {"int8", "int4", *(["fp8"] if fp8 else [])}


def test_cpu_backend_uses_no_gpu_kernel_on_a_gpu_host(monkeypatch):
    """JAX's first device, by which kernels are chosen, is the GPU."""
    monkeypatch.setattr("forge_kernels.devices._first_gpu", lambda: HOPPER)
    llm = LLM("forge-tiny", backend="cpu", kernels="xla", kv_dtype="int8", **OPTIONS)
    [output] = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=4), progress=False)
    assert len(output.outputs[0].token_ids) == 4


@pytest.mark.slow
def test_unsupported_head_size_uses_xla_attention_with_a_warning(stories, caplog):
    with caplog.at_level(logging.WARNING):
        llm = LLM(stories, dtype="bfloat16", **OPTIONS)
    assert "attention uses plain XLA, not the CPU kernels: the head dim must be" in caplog.text
    assert (
        core_of(llm).device.model.packings and core_of(llm).device.options.implementation == "xla"
    )
    [output] = llm.generate("Once upon a time", GREEDY, progress=False)
    assert output.text.startswith(", there was a little girl named Lily.")


def budget_of(platform="cpu", packings=None, **options):
    """Return the token budget of an engine with step sizes 64 and 512."""
    config, sizes = EngineConfig.from_options(**options), None if packings else [64, 512]
    return choose_budget(config, sizes, SimpleNamespace(platform=platform))  # type: ignore[arg-type]


def test_latency_target_is_the_default_only_on_cpu():
    budget = budget_of()
    assert budget is not None and budget.target_s == 0.2
    assert budget_of("gpu") is None
    assert budget_of(deterministic=True) is None
    assert budget_of(chunked_prefill=False) is None
    assert budget_of(itl_target_ms=0) is None
    for platform in ("cpu", "gpu"):
        budget = budget_of(platform, itl_target_ms=50)
        assert budget is not None and budget.target_s == 0.05


def test_kernels_that_skip_unused_rows_allow_any_step_size(caplog):
    caplog.set_level(logging.INFO, logger="forge_jax.engine.builder")
    filled, exact = budget_of(), budget_of(packings={"layers.0.mlp.down.weight": None})
    assert filled is not None and exact is not None
    assert (filled.choose(4, 512), exact.choose(4, 512)) == (64, 12)
    assert [record.getMessage() for record in caplog.records] == [
        "inter-token latency target of 200 ms: while sequences decode, prefill steps are shortened "
        f"to reach it (tokens per step: {sizes})"
        for sizes in ("one of 64, 512", "any number")
    ]
