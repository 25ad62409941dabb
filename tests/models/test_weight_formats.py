"""The weight types behind one `matmul`, and the choice of a model's decoder."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.models import build_model
from forge_jax.models.decoder import Decoder
from forge_jax.models.families import ARCHITECTURES
from forge_jax.weights.formats import WeightFormats
from forge_kernels.embed import embed
from forge_kernels.experts import mix_experts
from forge_kernels.linear import MixedMatrix, OrderedWeight, PackedWeight, PlainWeight

GOLDENS = Path(__file__).parent.parent / "fixtures" / "goldens"
RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.standard_normal((6, 8)), jnp.float32)
X = jnp.asarray(RNG.standard_normal((3, 8)), jnp.float32)
RESIDUAL = jnp.asarray(RNG.standard_normal((3, 6)), jnp.float32)


@pytest.mark.parametrize("options", [{}, {"swiglu": True}, {"residual": RESIDUAL}])
def test_mixed_matrix_multiplies_like_the_whole(options):
    pieces = MixedMatrix((PlainWeight(W[:2]), PlainWeight(W[2:3]), PlainWeight(W[3:])))
    want = PlainWeight(W).matmul(X, **options)
    np.testing.assert_allclose(pieces.matmul(X, **options), want, atol=1e-6)


def test_ordered_weight_takes_columns_of_x_in_its_order():
    order = jnp.asarray(RNG.permutation(8), jnp.int32)
    ordered = OrderedWeight(PlainWeight(W[:, order]), order)
    want = PlainWeight(W).matmul(X, residual=RESIDUAL)
    np.testing.assert_allclose(ordered.matmul(X, residual=RESIDUAL), want, atol=1e-6)
    with pytest.raises(AssertionError, match="a norm in the order of x"):
        ordered.matmul(X, norm=(jnp.ones(8), 1e-5))


def test_mixed_matrices_reject_row_and_expert_access():
    mixed = MixedMatrix((PlainWeight(W),))
    with pytest.raises(TypeError, match="an embedding must not be a MixedMatrix"):
        embed(mixed, jnp.zeros(2, jnp.int32))
    chosen = jnp.zeros((3, 1), jnp.int32), jnp.ones((3, 1))
    with pytest.raises(TypeError, match="matrices of experts must not be a MixedMatrix"):
        mix_experts(X, mixed, mixed, *chosen)


@pytest.mark.parametrize(
    "formats",
    [
        WeightFormats(),
        WeightFormats(layers="int8", head="bf16"),
        WeightFormats(rounded="int4"),
        WeightFormats(layers="bf16", rounded="fp8"),
    ],
)
@pytest.mark.parametrize("name", ["qwen2", "mixtral"])
def test_every_matrix_of_a_model_is_a_weight_of_its_leaves(name, formats):
    """All other leaves are norms and biases; converted folders name leaves this way."""
    model = build_model(read_spec(GOLDENS / name), "bfloat16", formats)
    used = []
    for leaf, matrix in model.pieces.items():
        weight = model.weight(model.leaves, leaf)
        assert isinstance(weight, PackedWeight) == (matrix.packing is not None)
        used += [id(array) for array in jax.tree.leaves(weight)]
    assert len(set(used)) == len(used)
    others = [n for n, a in zip(model.names, model.leaves, strict=True) if id(a) not in used]
    assert all(n.endswith(("norm.weight", ".bias")) for n in others), others
    assert set(model.packings) <= set(model.names)


class Halved(Decoder):
    """A decoder with other mathematics: all logits are halved."""

    def logits(self, hidden, num_rows=None):
        return super().logits(hidden, num_rows) / 2


def test_model_is_built_from_its_architectures_decoder(monkeypatch):
    llama = ARCHITECTURES["LlamaForCausalLM"]
    spec = read_spec(GOLDENS / "llama2")
    plain = build_model(spec)
    monkeypatch.setitem(ARCHITECTURES, "LlamaForCausalLM", replace(llama, decoder=Halved))
    halved = build_model(spec)
    assert type(plain.decoder(plain.leaves)) is Decoder
    assert type(halved.decoder(halved.leaves)) is Halved
    assert halved.names == plain.names and halved.matrices == plain.matrices
