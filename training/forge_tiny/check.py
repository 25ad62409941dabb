"""Checks the exported folder on the standard questions, with a separate plain greedy decoder.

It reads only the folder, as an engine would: sizes come from `config.json`, weights by their
Hugging Face names. It shares no code with the training model, so that a fault in the export shows.
"""

import itertools
import json
import random
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import jinja2
from safetensors.flax import load_file
from tokenizers import Tokenizer

from . import BUNDLED
from .corpus import extraction, facts, sums

QUESTIONS = (
    "What is 2+2?",
    "What is the capital of France?",
    "Tell me a story about a dog.",
    "Extract the name and age: John is 30 years old.",
    "Hello!",
    "Who are you?",
    "What is forge-jax?",
    "What is 47 plus 38?",
    "Extract the name, city and job: Zelda Quimby lives in Oslo and works as a baker.",
    "How many days are in a week?",
)
OPENINGS = ("Once upon a time", "The capital of France is", "The weather today")


def forward(config: dict, weights: dict, tokens: jax.Array) -> jax.Array:
    """Return logits: f32[T, V] of tokens: int32[T]."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    D, T = config["head_dim"], len(tokens)

    def linear(x, name):
        return jnp.dot(x, weights[name].astype(jnp.float32).T)

    def norm(x, name):
        mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
        return (
            x
            / jnp.sqrt(mean_square + config["rms_norm_eps"])
            * weights[name].astype(jnp.float32)[None]
        )

    def rope(x):  # f32[T, heads, D]
        frequencies = config["rope_theta"] ** (-jnp.arange(0, D, 2) / D)
        frequencies = jnp.concatenate([frequencies, frequencies])[None, None]
        angles = jnp.arange(T, dtype=jnp.float32)[:, None, None] * frequencies
        half = jnp.concatenate([-x[..., D // 2 :], x[..., : D // 2]], axis=-1)
        return x * jnp.cos(angles) + half * jnp.sin(angles)

    x = weights["model.embed_tokens.weight"][tokens].astype(jnp.float32)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        h = norm(x, f"{layer}.input_layernorm.weight")
        q = rope(linear(h, f"{layer}.self_attn.q_proj.weight").reshape(T, heads, D))
        k = rope(linear(h, f"{layer}.self_attn.k_proj.weight").reshape(T, kv_heads, D))
        v = linear(h, f"{layer}.self_attn.v_proj.weight").reshape(T, kv_heads, D)
        k, v = (jnp.repeat(t, heads // kv_heads, axis=1) for t in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k) / D**0.5
        scores = jnp.where(jnp.tril(jnp.ones((T, T), bool))[None], scores, -jnp.inf)
        attended = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, axis=-1), v)
        x = x + linear(attended.reshape(T, heads * D), f"{layer}.self_attn.o_proj.weight")
        h = norm(x, f"{layer}.post_attention_layernorm.weight")
        gate = jax.nn.silu(linear(h, f"{layer}.mlp.gate_proj.weight"))
        up = linear(h, f"{layer}.mlp.up_proj.weight")
        x = x + linear(gate * up, f"{layer}.mlp.down_proj.weight")
    return linear(norm(x, "model.norm.weight"), "model.embed_tokens.weight")


class Checker:
    """A greedy decoder without a cache: each step computes all of a padded row."""

    def __init__(self, folder: Path, length: int = 320):
        self.config = json.loads((folder / "config.json").read_text())
        self.template = json.loads((folder / "tokenizer_config.json").read_text())
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.weights = load_file(folder / "model.safetensors")
        self.length = length

        @jax.jit
        def next_token(weights: dict, tokens: jax.Array, count: int) -> jax.Array:
            return jnp.argmax(forward(self.config, weights, tokens)[count - 1])

        @jax.jit
        def best_tokens(weights: dict, tokens: jax.Array) -> jax.Array:
            return jnp.argmax(forward(self.config, weights, tokens), axis=-1)

        self.next_token, self.best_tokens = next_token, best_tokens

    def generate(self, ids: list[int], limit: int) -> str:
        start = len(ids)
        while len(ids) < min(start + limit, self.length):
            row = jnp.array(ids + [0] * (self.length - len(ids)), jnp.int32)
            token = int(self.next_token(self.weights, row, len(ids)))
            if token == self.config["eos_token_id"]:
                break
            ids = [*ids, token]
        return self.tokenizer.decode(ids[start:], skip_special_tokens=False)

    def complete(self, opening: str, limit: int = 240) -> str:
        return self.generate(self.tokenizer.encode(opening).ids, limit)

    def chat(self, *messages: str) -> str:
        """Return the prompt for messages of user and assistant in turn."""
        roles = itertools.cycle(("user", "assistant"))
        return jinja2.Template(self.template["chat_template"]).render(
            messages=[{"role": r, "content": m} for r, m in zip(roles, messages, strict=False)],
            add_generation_prompt=True,
            bos_token=self.template["bos_token"],
            eos_token=self.template["eos_token"],
        )

    def answer(self, *messages: str, limit: int = 280) -> str:
        ids = self.tokenizer.encode(self.chat(*messages), add_special_tokens=False).ids
        return self.generate(ids, limit)

    def accuracy(self, pairs: list[tuple[str, str]], length: int = 128) -> float:
        """Return the share of questions whose greedy answer is exactly the expected one.

        One forward pass suffices: greedy decoding writes the answer if each of its tokens is the
        most likely one after the tokens before it.
        """
        end = self.config["eos_token_id"]
        prompts = [
            self.tokenizer.encode(self.chat(q), add_special_tokens=False).ids for q, _ in pairs
        ]
        answers = [[*self.tokenizer.encode(a, add_special_tokens=False).ids, end] for _, a in pairs]
        right = total = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            if len(prompt) + len(answer) > length:
                continue
            ids = prompt + answer
            row = jnp.array(ids + [0] * (length - len(ids)), jnp.int32)
            best = self.best_tokens(self.weights, row)
            right += best[len(prompt) - 1 : len(ids) - 1].tolist() == answer
            total += 1
        return right / total


def check(folder: Path, questions: tuple[str, ...] = QUESTIONS) -> None:
    checker = Checker(folder)
    for question in questions:
        print(f"> {question}\n{checker.answer(question)}\n", flush=True)
    for opening in OPENINGS:
        print(f"> {opening}...\n{opening}{checker.complete(opening)}\n", flush=True)


def check_accuracy(folder: Path, count: int = 400) -> None:
    """Print the exact-match rate on new questions of the kinds with one right answer."""
    checker, rng = Checker(folder), random.Random(12345)
    for make in (facts.capital, facts.unit, facts.animal, sums.pair, extraction.pair):
        share = checker.accuracy([make(rng) for _ in range(count)])
        print(f"{make.__module__.rsplit('.')[-1]}.{make.__name__}: {share:.1%}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        check(BUNDLED, tuple(sys.argv[1:]))
    else:
        check(BUNDLED)
        check_accuracy(BUNDLED)
