"""Parameters of Tunix's models by the names of a checkpoint, without Tunix."""

import numpy as np
import pytest

from forge_jax.errors import ModelError
from forge_jax.integrations.tunix_weights import checkpoint_weights, flat_names

D, HEADS, HEAD_DIM = 6, 2, 4


def projection(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_projections_are_transposed_with_their_heads_in_order():
    q, o = projection(D, HEADS, HEAD_DIM), projection(HEADS, HEAD_DIM, D)
    found = checkpoint_weights({"layers": {11: {"attn": {"q_proj": {"w": q}, "o_proj": {"w": o}}}}})
    x, y = np.ones(D, np.float32), np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    q_weight = found["model.layers.11.self_attn.q_proj.weight"]
    o_weight = found["model.layers.11.self_attn.o_proj.weight"]
    assert np.array_equal(q_weight @ x, np.einsum("d,dhk->hk", x, q).reshape(-1))
    heads = y.reshape(HEADS, HEAD_DIM)
    assert np.array_equal(o_weight @ y, np.einsum("hk,hkd->d", heads, o))


def test_names_of_all_parameters_are_those_of_a_checkpoint():
    params = {
        "embedder": {"input_embedding": projection(9, D)},
        "final_norm": {"w": projection(D)},
        "lm_head": {"w": projection(D, 9)},
        "layers": {
            0: {
                "input_layernorm": {"w": projection(D)},
                "post_attention_layernorm": {"w": projection(D)},
                "attn": {"k_bias": projection(HEADS, HEAD_DIM), "q_norm": {"w": projection(4)}},
                "mlp": {"down_proj": {"kernel": projection(8, D)}},
            }
        },
    }
    shapes = {name: array.shape for name, array in checkpoint_weights(params).items()}
    layer = "model.layers.0."
    assert shapes == {
        "model.embed_tokens.weight": (9, D),
        "model.norm.weight": (D,),
        "lm_head.weight": (9, D),
        layer + "input_layernorm.weight": (D,),
        layer + "post_attention_layernorm.weight": (D,),
        layer + "self_attn.k_proj.bias": (HEADS * HEAD_DIM,),
        layer + "self_attn.q_norm.weight": (4,),
        layer + "mlp.down_proj.weight": (D, 8),
    }
    assert set(flat_names({"a": {0: {"w": 1}}, "b": 2})) == {"a.0.w", "b"}


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"layers": {0: {"attn": {"q_proj": {"w_lora_a": projection(D, 2)}}}}}, "LoRA parameter"),
        (
            {"layers": {0: {"mlp": {"router": {"kernel": projection(D, 4)}}}}},
            "router.kernel is",
        ),
        ({"layers": {0: {"attn": {"q_proj": {"w": projection(D, 8)}}}}}, "expects 3 axes"),
    ],
)
def test_other_parameters_are_named_in_the_error(params, match):
    with pytest.raises(ModelError, match=match):
        checkpoint_weights(params)
