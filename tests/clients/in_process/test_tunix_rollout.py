"""Rollouts for Tunix: the bits of their log-probabilities, new weights, and one run of GRPO."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("tunix")

from flax import nnx
from safetensors.numpy import load_file
from tunix.models.llama3 import model as llama3
from tunix.models.llama3 import params as llama3_params
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen2 import params as qwen2_params
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params
from tunix.rl import common
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput

from forge_jax import LLM
from forge_jax.errors import ConfigError, ModelError, RequestError
from forge_jax.integrations.tunix import ForgePolicy, ForgeRollout, ForgeTokenizer
from forge_jax.integrations.tunix_weights import checkpoint_weights

ROOT = Path(__file__).parents[3]
GOLDENS = ROOT / "tests/fixtures/goldens"
FAMILIES: dict[str, tuple[Any, Any, str]] = {
    "llama2": (llama3.ModelConfig, llama3_params, "weight_tying"),
    "qwen2": (qwen2.ModelConfig, qwen2_params, "use_tied_embedding"),
    "qwen3": (qwen3.ModelConfig, qwen3_params, "use_tied_embedding"),
}
THETA = 1_000_000  # Tunix's Llama 3 ignores rope_theta and always uses this base
CONFIG = RolloutConfig(max_prompt_length=8, max_tokens_to_generate=8, temperature=1.0)
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 16}
PROMPTS = ["5 6 7", "9", "20 30 40 50", "5 6 7"]
MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("fsdp",))


class Numbers:
    """A tokenizer of decimal token IDs."""

    def encode(self, text: str) -> list[int]:
        return [int(each) for each in text.split()]

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return 2

    def pad_id(self) -> int:
        return 0


def model_folder(name: str, parent: Path, **changes: Any) -> Path:
    folder = parent / name
    folder.mkdir()
    shutil.copy(GOLDENS / name / "model.safetensors", folder)
    config = json.loads((GOLDENS / name / "config.json").read_text())
    config.pop("rope_parameters", None)
    config |= {"rope_theta": float(THETA), "rope_scaling": None, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tunix_model(name: str, folder: Path) -> nnx.Module:
    """Load a model with Tunix's own reader."""
    make, params, tied = FAMILIES[name]
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    sizes = make(
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        embed_dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        num_heads=heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        num_kv_heads=config.get("num_key_value_heads", heads),
        rope_theta=THETA,
        norm_eps=config["rms_norm_eps"],
        **{tied: config.get("tie_word_embeddings", False)},
    )
    return params.create_model_from_safe_tensors(str(folder), sizes, dtype=jnp.float32)


def rollout_of(actor: Any, model: Any, config: RolloutConfig = CONFIG, **more: Any) -> ForgeRollout:
    return ForgeRollout(
        rollout_actor=actor,
        tokenizer=Numbers(),
        mesh=MESH,
        rollout_config=config,
        model=model,
        **more,
    )


def padded(output: RolloutOutput, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the completions i32[B, C] and their log-probabilities f32[B, C]."""
    tokens = np.zeros((len(output.tokens), width), np.int32)
    logprobs = np.zeros(tokens.shape, np.float32)
    assert output.logprobs is not None
    for i, (ids, scores) in enumerate(zip(output.tokens, output.logprobs, strict=True)):
        assert len(ids) == len(scores)
        tokens[i, : len(ids)], logprobs[i, : len(ids)] = ids, scores
    return tokens, logprobs


def trained(actor: Any, prompts: Any, completions: Any, temperature: float = 1.0) -> np.ndarray:
    """Return the trainer's log-probabilities, computed by Tunix."""
    graphdef, state = nnx.split(actor)
    return np.asarray(
        common.compute_per_token_logps(
            *(graphdef, state, prompts, completions, 0, 2), temperature=temperature
        )
    )


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = model_folder("qwen2", tmp_path_factory.mktemp("models"))
    with LLM(str(folder), deterministic=True, **OPTIONS) as llm:
        yield llm


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_policy_and_engine_have_the_bits_of_the_rollouts(llm, temperature):
    policy = ForgePolicy(llm)
    config = dataclasses.replace(CONFIG, temperature=temperature, seed=jax.random.key(3))
    rollout = rollout_of(policy, llm, config)
    output = rollout.generate(PROMPTS, config)
    assert output.left_padded_prompt_tokens[0].tolist() == [0, 0, 0, 0, 0, 5, 6, 7]
    completions, sampled = padded(output, 8)
    assert output.text[1] == Numbers().decode(t for t in output.tokens[1] if t not in (0, 2))
    assert output.tokens[0].tolist() != output.tokens[3].tolist()  # equal prompts, other noise
    prompts, mask = output.left_padded_prompt_tokens, completions != 0
    scored = np.asarray(rollout.get_per_token_logps(jnp.array(prompts), jnp.array(completions)))
    assert np.array_equal(scored, np.where(mask, sampled, 0.0))
    by_tunix = trained(policy, prompts, completions, temperature)
    assert mask.sum() > 20 and np.array_equal(by_tunix[mask], sampled[mask])
    # The comparison detects a change of one weight.
    name = "layers.0.attention.qkv.weight"
    weight = policy.weights[name]
    weight[...] = weight[...].at[0, 0].add(1e-3)
    assert not np.array_equal(
        trained(policy, prompts, completions, temperature)[mask], sampled[mask]
    )


def test_seeds_reproduce_a_run_and_steps_differ(llm):
    config = dataclasses.replace(CONFIG, seed=7)
    runs: list[list[str]] = []
    for _ in range(2):
        rollout = rollout_of(ForgePolicy(llm), llm, config)
        runs.append(
            [*rollout.generate(PROMPTS, config).text, *rollout.generate(PROMPTS, config).text]
        )
    assert runs[0] == runs[1] and runs[0][:4] != runs[0][4:]


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_of_tunix_models_equal_the_checkpoint(name, tmp_path):
    folder = model_folder(name, tmp_path)
    state = nnx.state(tunix_model(name, folder), nnx.Param)
    found = checkpoint_weights(nnx.to_pure_dict(state))
    expected = load_file(folder / "model.safetensors")
    if "lm_head.weight" not in found:
        expected.pop("lm_head.weight", None)  # tied
    assert found.keys() == expected.keys()
    for each, array in expected.items():
        assert np.array_equal(found[each], array.astype(np.float32)), each


@pytest.mark.parametrize("name", FAMILIES)
def test_tunix_models_replace_the_weights_and_agree_up_to_rounding(name, tmp_path, caplog):
    folder = model_folder(name, tmp_path)
    actor = tunix_model(name, folder)
    with caplog.at_level(logging.WARNING, "forge_jax"):
        rollout = rollout_of(actor, str(folder), **OPTIONS)
    assert not [each for each in caplog.messages if "different functions" in each]
    llm = rollout.llm
    state = nnx.state(actor, nnx.Param)
    nnx.update(actor, jax.tree.map(lambda x: x * 1.5, state))
    version = llm.weight_version
    # Tunix forbids transfers. Compiling would be an error.
    with jax.transfer_guard("disallow_explicit"), jax.no_tracing():
        rollout.update_params(nnx.state(actor, (nnx.Param,)), (nnx.Param,))
    assert llm.weight_version == version + 1
    output = rollout.generate(PROMPTS, CONFIG)
    completions, sampled = padded(output, 8)
    by_tunix = trained(actor, output.left_padded_prompt_tokens, completions)
    mask = completions != 0
    np.testing.assert_allclose(by_tunix[mask], sampled[mask], rtol=0, atol=2e-4)
    assert rollout.model() is None  # so Tunix synchronizes the weights


def test_other_rope_than_the_checkpoint_is_reported(tmp_path, caplog):
    folder = model_folder("llama2", tmp_path, rope_theta=100.0)
    with caplog.at_level(logging.WARNING, "forge_jax"):
        rollout_of(tunix_model("llama2", folder), str(folder), **OPTIONS)
    assert [each for each in caplog.messages if "different functions" in each]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rollout_vllm_hbm_utilization": 0.5}, "rollout_vllm_hbm_utilization=0.5 has no effect"),
        ({"data_parallel_size": 2}, "data_parallel_size=2"),
        ({"max_prompt_length": 4096}, "max_model_len=4104"),
        ({"data_type": jnp.bfloat16}, "dtype: cannot change an LLM"),
        ({"seed": -1}, "seed must not be negative"),
    ],
)
def test_fields_without_equivalent_are_named_in_the_error(llm, changes, match):
    with pytest.raises(ConfigError, match=match):
        rollout_of(ForgePolicy(llm), llm, dataclasses.replace(CONFIG, **changes))


def test_wrong_sampling_parameters_are_named_in_the_error(llm):
    with pytest.raises(RequestError, match="top_p"):
        rollout_of(ForgePolicy(llm), llm, dataclasses.replace(CONFIG, top_p=2.0))


@pytest.mark.parametrize(
    ("prompt", "match"),
    [(" ".join("9" * 9), "max_prompt_length=9"), ("5 0 6", "contains token 0"), ("", "no tokens")],
)
def test_wrong_prompts_are_named_in_the_error(llm, prompt, match):
    with pytest.raises(RequestError, match=f"prompt 1 .*{match}"):
        rollout_of(ForgePolicy(llm), llm).generate(["5", prompt], CONFIG)


def test_padding_token_ends_a_completion(llm):
    rollout = rollout_of(ForgePolicy(llm), llm)
    leaves = dict(zip(llm.model.names, llm.leaves, strict=True))
    flat = jnp.zeros_like(leaves["head.weight"])
    llm.update_weights({**leaves, "head.weight": flat})  # all tokens have equal logits
    output = rollout.generate(["5"] * 200, CONFIG)
    assert any(0 in each for each in output.tokens)
    assert not any(0 in each[:-1] for each in output.tokens)
    llm.update_weights(leaves)


def test_model_is_required_and_must_be_deterministic(llm, tmp_path):
    with pytest.raises(ConfigError, match=r"functools\.partial"):
        rollout_of(ForgePolicy(llm), None)
    with (
        LLM(str(model_folder("qwen2", tmp_path)), **OPTIONS) as other,
        pytest.raises(ModelError, match="deterministic=True"),
    ):
        ForgePolicy(other)


def test_policy_rejects_caches_and_packed_sequences(llm):
    tokens = jnp.ones((1, 4), jnp.int32)
    with pytest.raises(ValueError, match="cache"):
        ForgePolicy(llm)(tokens, tokens, {}, None)
    with pytest.raises(ValueError, match="max_seq_token_per_tpu"):
        ForgePolicy(llm)(tokens, tokens, None, None)


@pytest.mark.timeout(600)
def test_grpo_of_the_example_is_exactly_on_policy(capsys):
    path = ROOT / "examples/grpo_tunix.py"
    spec = importlib.util.spec_from_file_location("grpo_tunix", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with LLM("forge-tiny", **example.OPTIONS) as llm:
        original = llm.leaves
        results = example.train(llm, steps=3, count=4, samples=4, learning_rate=1e-4)
        assert [kl for _, kl in results] == [0.0, 0.0, 0.0]
        assert capsys.readouterr().out.count("KL 0.0\n") == 3
        assert llm.weight_version == 4  # the actor's first weights, and three updates
        changed = [not (a == b).all() for a, b in zip(original, llm.leaves, strict=True)]
        assert all(changed)
        # A trainer that is one update ahead of its rollouts is off-policy.
        cluster = example.make_cluster(llm, steps=1, learning_rate=1e-4)
        tokenizer = ForgeTokenizer(llm)
        chat = [{"role": "user", "content": "What is 150+131?"}]
        cluster.generate([tokenizer.apply_chat_template(chat)] * 4)
        assert example.divergence(cluster) == 0.0
        state = nnx.state(cluster.actor_trainer.model)
        cluster._anchor_policy_state = jax.tree.map(lambda x: x * 1.01, state)
        assert example.divergence(cluster) > 0.0
    assert partial(example.reward, None)(["2+3 = 5", "6"], np.array([5, 5])) == [1.0, 0.0]
