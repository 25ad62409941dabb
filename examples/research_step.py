"""Decode greedily with the pure functions, and print the next token that each layer predicts.

    python examples/research_step.py [MODEL] [PROMPT]

MODEL is forge-tiny, a folder or a Hugging Face ID. The logit lens (nostalgebraist, 2020) applies
the final norm and the head to the residual stream after each layer.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

import forge_jax
from forge_jax.research import LoadedModel

BLOCK_SIZE = 16
NEW_TOKENS = 24


def generate(model: LoadedModel, prompt: list[int], new_tokens: int) -> list[int]:
    """Return the greedy continuation of `prompt`: one prefill step, then one step per token."""
    num_blocks = -(-(len(prompt) + new_tokens) // BLOCK_SIZE)
    kv = forge_jax.new_kv(model, num_blocks, BLOCK_SIZE)
    table = jnp.arange(num_blocks, dtype=jnp.int32)[None]  # one sequence: blocks 0, 1, 2, ...
    step = jax.jit(partial(forge_jax.decode_step, model), donate_argnums=1)

    tokens, length = jnp.asarray(prompt, jnp.int32), len(prompt)
    output: list[int] = []
    while len(output) < new_tokens:
        cu_q_lens = jnp.asarray([0, tokens.shape[0]], jnp.int32)
        kv_lens = jnp.asarray([length], jnp.int32)
        kv, tokens, _ = step(model.leaves, kv, tokens, cu_q_lens, kv_lens, table)
        output.append(int(tokens[0]))
        length += 1
        if output[-1] in model.spec.eos_token_ids:
            break
    return output


def logit_lens(model: LoadedModel, tokens: list[int]) -> np.ndarray:
    """Return the most likely next token after the embedding and after each layer, i32[L + 1]."""
    T = len(tokens)
    num_blocks = -(-T // BLOCK_SIZE)
    positions = jnp.arange(T, dtype=jnp.int32)
    forward = jax.jit(partial(forge_jax.forward, model, return_hidden_states=True))
    _, _, stream = forward(
        model.leaves,
        forge_jax.new_kv(model, num_blocks, BLOCK_SIZE),
        jnp.asarray(tokens, jnp.int32),
        positions,
        positions,  # with blocks 0, 1, 2, ... a token's slot is its position
        jnp.arange(num_blocks, dtype=jnp.int32)[None],
        jnp.asarray([T], jnp.int32),
        jnp.asarray([0, T], jnp.int32),
        jnp.int32(1),
    )
    last = jnp.stack([x[-1] for x in stream])  # [L + 1, d]
    normed = model.model.final_norm(model.leaves, last)
    return np.asarray(forge_jax.logits(model, model.leaves, normed).argmax(axis=-1))


def main(name: str = "forge-tiny", prompt: str = "Once upon a time") -> str:
    model = forge_jax.load(name)
    tokenizer = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
    ids = tokenizer.encode(prompt).ids
    bos = model.spec.bos_token_id
    if bos is not None and ids[:1] != [bos]:
        ids = [bos, *ids]

    text = tokenizer.decode([*ids, *generate(model, ids, NEW_TOKENS)])
    print(text)
    print("\nafter the prompt, layer by layer:")
    for layer, token in enumerate(logit_lens(model, ids)):
        print(f"  {layer:3d}  {tokenizer.decode([int(token)], skip_special_tokens=False)!r}")
    return text


if __name__ == "__main__":
    main(*sys.argv[1:])
