"""`ForgeRollout`: Tunix's interface of a rollout engine, on an `LLM`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from forge_jax.errors import ConfigError, EngineError, RequestError
from forge_jax.integrations.tunix.policy import ForgePolicy
from forge_jax.integrations.tunix_weights import checkpoint_weights
from forge_jax.llm import LLM
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.outputs import Completion, RequestOutput
from forge_jax.scoring import score

try:
    from tunix.rl import common  # pyright: ignore[reportMissingImports]
    from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(
        f"forge_jax.integrations.tunix requires Tunix ({error}): run "
        "pip install --upgrade google-tunix"
    ) from error

# Fields of Tunix's RolloutConfig with an effect here. All others must have their defaults.
_USED = {
    *("max_tokens_to_generate", "max_prompt_length", "temperature", "top_p", "top_k", "seed"),
    *("eos_tokens", "data_type", "tensor_parallel_size", "rollout_vllm_logprobs_mode"),
}
_WITHOUT_EFFECT = {"kv_cache_size", "return_logprobs"}
_SAME_AS_DEFAULT = {"data_parallel_size": 1}  # values that mean the default
_CHECKED_TOKENS = 16
_LARGE_DIFFERENCE = 0.1  # nats; bfloat16 differs by a few hundredths

log = logging.getLogger(__name__)


class ForgeRollout(base_rollout.BaseRollout):
    """Rollouts of `ClusterConfig(rollout_engine=partial(ForgeRollout, model=...))`.

    Tunix passes `rollout_actor`, `tokenizer`, `mesh` and `rollout_config`.

    Args:
      rollout_actor: the trainer's model, whose parameters replace the engine's: a `ForgePolicy`, or
        Tunix's dense Llama 3, Qwen 2 or Qwen 3.
      tokenizer: encodes prompts and decodes completions.
      mesh: ignored. The engine's devices are options of `LLM`.
      rollout_config: the sampling parameters.
      model: the model, as for `LLM`, or an `LLM` with `deterministic=True`.
      options: other options of `LLM`.

    Raises:
      ConfigError: `model` is missing, or a field or option has no equivalent or does not fit.
      ModelError: the model cannot be served, or the actor's parameters do not fit it.
    """

    def __init__(
        self,
        *,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: jax.sharding.Mesh,
        rollout_config: base_rollout.RolloutConfig,
        model: str | LLM | None = None,
        **options: Any,
    ):
        if model is None:
            raise ConfigError(
                "model: ForgeRollout requires the model that it serves: set "
                "rollout_engine=functools.partial(ForgeRollout, model=MODEL)"
            )
        _check_fields(rollout_config)
        self._tokenizer, self._config = tokenizer, rollout_config
        self._llm = _engine(model, rollout_config, options)
        _check_length(rollout_config, self._llm)
        self._num_calls = 0
        score_options = self._llm.score_options
        self._score = jax.jit(
            partial(score, self._llm.model, options=score_options),
            compiler_options=score_options.compiler_options,
        )
        # Fail before training if the configuration cannot be sampled.
        self._sampling_params(rollout_config, 1)
        self.update_params(nnx.state(rollout_actor, nnx.Param))
        if not isinstance(rollout_actor, ForgePolicy):
            self._warn_if_models_differ(rollout_actor, mesh)

    @property
    def llm(self) -> LLM:
        """The engine."""
        return self._llm

    @property
    def mesh(self) -> None:
        """None, because the engine has its own devices."""

    # ---- sampling --------------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[str], rollout_config: base_rollout.RolloutConfig, **kwargs: Any
    ) -> base_rollout.RolloutOutput:
        """Sample one completion of each prompt.

        Returns:
          Tokens with their log-probabilities of the distribution that they were drawn from. The
          stop token is included. Prompts are padded on the left to `max_prompt_length`.

        Raises:
          ConfigError: a field of `rollout_config` has no equivalent.
          RequestError: a prompt is longer than `max_prompt_length`, or contains the padding token.
          EngineError: a completion failed, for example because its logits are not finite.
        """
        if kwargs:
            raise ConfigError(f"{', '.join(kwargs)}: not a parameter of ForgeRollout.generate")
        _check_fields(rollout_config)
        _check_length(rollout_config, self._llm)
        ids = [self._encode(i, str(prompt), rollout_config) for i, prompt in enumerate(prompts)]
        params = self._sampling_params(rollout_config, len(ids))
        self._num_calls += 1
        outputs = self._llm.generate(ids, params, progress=False)
        answers = [_answer(i, output) for i, output in enumerate(outputs)]
        stops = self._stops(rollout_config)
        return base_rollout.RolloutOutput(
            text=[self._text(answer.token_ids, stops) for answer in answers],
            logits=None,  # pyright: ignore[reportArgumentType]  # as the other engines of Tunix
            tokens=[np.array(answer.token_ids, np.int32) for answer in answers],
            left_padded_prompt_tokens=_padded_left(
                ids, rollout_config.max_prompt_length, self.pad_id()
            ),
            logprobs=[_logprobs(answer) for answer in answers],
        )

    def _encode(self, index: int, prompt: str, config: base_rollout.RolloutConfig) -> list[int]:
        ids = [int(each) for each in self._tokenizer.encode(prompt)]
        if not ids:
            raise RequestError(f"prompt {index} has no tokens", param="prompt")
        if len(ids) > config.max_prompt_length:
            raise RequestError(
                f"prompt {index} has {len(ids)} tokens: set rollout_config.max_prompt_length="
                f"{len(ids)} or higher, not {config.max_prompt_length}",
                param="prompt",
            )
        if self.pad_id() in ids:
            raise RequestError(
                f"prompt {index} contains token {self.pad_id()}, which Tunix masks as padding: "
                "use a tokenizer with another pad_id",
                param="prompt",
            )
        return ids

    def _stops(self, config: base_rollout.RolloutConfig) -> tuple[int, ...]:
        # Tunix masks the padding token in completions, so a sample of it must be the last token.
        eos = config.eos_tokens or [self.eos_id()]
        return tuple(dict.fromkeys((*(int(each) for each in eos), self.pad_id())))

    def _sampling_params(
        self, config: base_rollout.RolloutConfig, count: int
    ) -> list[SamplingParams]:
        """Return the parameters of `count` prompts, which have different seeds."""
        seeds: list[int | None] = [None] * count
        if config.seed is not None:
            key = (*_words(config.seed), self._num_calls)
            seeds = [int(each) for each in np.random.SeedSequence(key).generate_state(count)]
        top_k = 0 if config.top_k is None or config.top_k == -1 else config.top_k
        greedy = config.temperature == 0
        params = SamplingParams(
            max_tokens=config.max_tokens_to_generate,
            temperature=config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=top_k,
            logprobs=0,
            logprobs_mode="raw_logprobs" if greedy else config.rollout_vllm_logprobs_mode,
            stop_token_ids=self._stops(config),
            detokenize=False,
        )
        return [dataclasses.replace(params, seed=seed) for seed in seeds]

    def _text(self, ids: Sequence[int], stops: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids[:-1] if ids and ids[-1] in stops else ids))

    # ---- the trainer -----------------------------------------------------------------------------

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array
    ) -> jax.Array:
        """Return the log-probability of each completion token under the engine's weights.

        The bits equal those of the rollouts if they have no top-p or top-k.

        Args:
          prompt_tokens: i32[B, P], padded on the left.
          completion_tokens: i32[B, C], padded on the right.

        Returns:
          f32[B, C], 0 for padding, and for a sampled padding token at the end.

        Raises:
          ValueError: P + C is larger than the engine's context.
        """
        with jax.transfer_guard("allow"):
            prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
            pad, columns = self.pad_id(), np.arange(completions.shape[1])
            tokens = np.zeros((len(prompts), prompts.shape[1] + completions.shape[1]), np.int32)
            begins, ends = [], []
            for row, prompt, completion in zip(tokens, prompts, completions, strict=True):
                first = int(np.argmax(prompt != pad)) if (prompt != pad).any() else len(prompt)
                used = len(np.trim_zeros(completion != pad, "b"))
                begins.append(len(prompt) - first)
                ends.append(begins[-1] + used)
                row[: ends[-1]] = [*prompt[first:], *completion[:used]]
            scores = np.asarray(self._scores(tokens, np.array(ends, np.int32)))
            place = np.minimum(np.array(begins)[:, None] + columns, tokens.shape[1] - 1)
            exists = np.array(begins)[:, None] + columns < np.array(ends)[:, None]
            return jnp.asarray(np.where(exists, np.take_along_axis(scores, place, 1), 0.0))

    def _scores(self, tokens: np.ndarray, lengths: np.ndarray) -> jax.Array:
        raw = self._config.rollout_vllm_logprobs_mode == "raw_logprobs"
        temperature = 1.0 if raw or not self._config.temperature else self._config.temperature
        scale = jnp.full(len(tokens), temperature, jnp.float32)
        return self._score(self._llm.leaves, tokens, lengths, temperature=scale)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Replace the engine's weights without compiling, and count their version.

        Args:
          params: the `nnx.State` of all parameters of the actor.
          filter_types: ignored, because `params` are already filtered.

        Raises:
          ModelError: a parameter is missing, unknown or a LoRA adapter, or has the wrong shape.
        """
        del filter_types
        with jax.transfer_guard("allow"):  # Tunix forbids transfers while it synchronizes weights
            tree = nnx.to_pure_dict(params)
            own = set(tree) == {"weights"}  # True for a ForgePolicy
            self._llm.update_weights(tree["weights"] if own else checkpoint_weights(tree))

    def _warn_if_models_differ(self, actor: Any, mesh: jax.sharding.Mesh) -> None:
        """Warn if the actor's function differs from the engine's, for example in its RoPE."""
        length = min(_CHECKED_TOKENS, self._llm.max_model_len)
        pad, rng = self.pad_id(), np.random.default_rng(0)
        tokens = rng.integers(self._llm.model.spec.vocab_size - 1, size=(1, length)).astype(
            np.int32
        )
        tokens += tokens >= pad
        graphdef, state = nnx.split(actor)
        with mesh:
            trainer = common.compute_per_token_logps(
                *(graphdef, state, tokens[:, :1], tokens[:, 1:], pad, self.eos_id())
            )
        engine = self._score(self._llm.leaves, tokens, np.full(1, length, np.int32))
        difference = float(np.abs(np.asarray(trainer) - np.asarray(engine)[:, 1:]).max())
        if not difference <= _LARGE_DIFFERENCE:
            log.warning(
                "the trainer's model and the served model are different functions: "
                "log-probabilities of the same tokens differ by up to %.3g. Compare rope_theta, "
                "norm_eps and head_dim of the trainer's configuration with config.json, or train "
                "a ForgePolicy",
                difference,
            )

    # ---- tokens ----------------------------------------------------------------------------------

    def pad_id(self) -> int:
        """Return the token of padding."""
        return int(self._tokenizer.pad_id())

    def eos_id(self) -> int:
        """Return the EOS token."""
        return int(self._tokenizer.eos_id())

    def model(self) -> None:
        """Return None, because the engine shares no weights with the trainer.

        Tunix then synchronizes the weights after each step.
        """


def _engine(model: str | LLM, config: base_rollout.RolloutConfig, options: dict[str, Any]) -> LLM:
    given: dict[str, Any] = {}
    if config.data_type is not None:
        given["dtype"] = jnp.dtype(config.data_type).name
    if config.tensor_parallel_size not in (-1, 1):
        given["tensor_parallel"] = config.tensor_parallel_size
    if not isinstance(model, LLM):
        length = config.max_prompt_length + config.max_tokens_to_generate
        return LLM(
            str(model), **{"deterministic": True, "max_model_len": length, **given, **options}
        )
    if given or options:
        raise ConfigError(
            f"{', '.join({**given, **options})}: cannot change an LLM; set it when you create "
            "the LLM"
        )
    return model


def _check_fields(config: base_rollout.RolloutConfig) -> None:
    """Reject fields of other engines, so that none is ignored silently."""
    for field in dataclasses.fields(config):
        if field.name in _USED | _WITHOUT_EFFECT:
            continue
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        value = getattr(config, field.name)
        if value != default and value != _SAME_AS_DEFAULT.get(field.name, default):
            raise ConfigError(
                f"rollout_config.{field.name}={value!r} has no effect on ForgeRollout: remove it, "
                "and pass options of LLM to functools.partial(ForgeRollout, ...)"
            )


def _check_length(config: base_rollout.RolloutConfig, llm: LLM) -> None:
    length = config.max_prompt_length + config.max_tokens_to_generate
    if length > llm.max_model_len:
        raise ConfigError(
            f"rollout_config: max_prompt_length + max_tokens_to_generate is {length}, but the "
            f"context length of the engine is {llm.max_model_len}: set max_model_len={length}"
        )


def _answer(index: int, output: RequestOutput) -> Completion:
    [answer] = output.outputs
    if answer.error is not None:
        raise EngineError(f"prompt {index}: {answer.error}") from answer.error
    return answer


def _logprobs(answer: Completion) -> np.ndarray:
    return np.array([each.logprob for each in answer.logprobs or ()], np.float32)


def _padded_left(ids: Sequence[Sequence[int]], length: int, pad: int) -> np.ndarray:
    padded = np.full((len(ids), length), pad, np.int32)
    for row, each in zip(padded, ids, strict=True):
        row[length - len(each) :] = each
    return padded


def _words(seed: Any) -> tuple[int, ...]:
    """Return the numbers of a seed: an integer, or a key of `jax.random`."""
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    words = tuple(int(each) for each in np.asarray(seed).reshape(-1))
    if any(each < 0 for each in words):
        raise ConfigError(f"rollout_config.seed must not be negative, not {seed}")
    return words
