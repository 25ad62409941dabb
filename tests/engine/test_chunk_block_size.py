"""The block sizes of a model that attends in chunks of 16 positions."""

from pathlib import Path

import pytest

from forge_jax import LLM
from forge_jax.errors import ConfigError

GOLDEN = Path(__file__).parent.parent / "fixtures" / "goldens" / "llama4"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 24}, r"does not divide attention_chunk_size \(16\).*: use block_size=16"),
        ({"kv_cache": "contiguous"}, "omit the option, or set max_model_len to at most 16"),
    ],
)
def test_blocks_that_do_not_fit_chunks_are_rejected(options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(str(GOLDEN), **options)
