"""The share of a GPU's memory that an engine uses, by arithmetic on a described device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from forge_jax.config import EngineConfig
from forge_jax.engine.sizes import Residents, Sizes
from forge_jax.errors import ConfigError
from forge_jax.models import build_model
from forge_jax.models.spec import ModelSpec, RopeSpec
from forge_jax.telemetry.memory import reserve_device_memory, share_of_device

OLD, NEW = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
GIB = 2**30
L4_BYTES = 24_152_899_584
LLAMA_3_1_8B = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    norm_eps=1e-5,
    rope=RopeSpec(theta=500000.0),
    tie_word_embeddings=False,
    dtype="bfloat16",
    bos_token_id=128000,
    eos_token_ids=(128001,),
)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in (OLD, NEW):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_allocator_gets_the_configured_fraction(environment):
    environment.setenv(NEW, "")  # restored after the test
    reserve_device_memory(0.9)
    assert share_of_device(int(0.9 * L4_BYTES), 0.9) == int(0.9 * L4_BYTES)
    # A second engine in this process shares the allocator of the first one.
    reserve_device_memory(0.5)
    assert share_of_device(int(0.9 * L4_BYTES), 0.5) == pytest.approx(0.5 * L4_BYTES, rel=1e-6)


@pytest.mark.parametrize("name", [OLD, NEW])
def test_users_own_allocator_fraction_is_kept(name, environment):
    environment.setenv(name, "0.6")
    reserve_device_memory(0.9)
    assert share_of_device(600, 0.9) == 600  # no more than the allocator has
    assert share_of_device(600, 0.3) == 300


def test_fraction_is_of_the_device_if_jax_has_already_started():
    assert share_of_device(750, 0.9) == 750
    assert share_of_device(750, 0.6) == 600


def test_8b_model_in_bfloat16_fits_a_card_of_24_gb(environment):
    """Weights take 15 of 20.2 GiB, and the rest serves several long contexts."""
    environment.setenv(NEW, "")
    reserve_device_memory(0.9)
    stats = {"bytes_limit": int(0.9 * L4_BYTES), "bytes_in_use": 0}
    device = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    model = build_model(LLAMA_3_1_8B)
    sizes = Sizes.choose(Residents(config=EngineConfig(), model=model, device=device))
    assert model.param_bytes > 14.9 * GIB
    assert 2.5 * GIB < sizes.kv.total_bytes < stats["bytes_limit"] - model.param_bytes
    assert sizes.max_model_len >= 16_384
    # JAX's own 75% would leave less than a GiB.
    assert int(0.75 * L4_BYTES) - model.param_bytes < 2 * GIB


def test_weights_that_exceed_the_device_are_rejected():
    stats = {"bytes_limit": 12 * GIB, "bytes_in_use": 0}
    device = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    residents = Residents(config=EngineConfig(), model=build_model(LLAMA_3_1_8B), device=device)
    with pytest.raises(ConfigError, match=r"weights \(14\.96 GiB\) .* smaller or quantized"):
        Sizes.choose(residents)
