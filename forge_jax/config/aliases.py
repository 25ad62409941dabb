"""Other engines' names for our options, and their options that have no counterpart here.

`EngineConfig.from_options` (and so `LLM`) accepts these names as Python arguments. The command line
accepts them as flags: `tensor_parallel_size` is `--tensor-parallel-size`. No alias has the name of
one of our options, which a test checks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from forge_jax.config.suggest import did_you_mean
from forge_jax.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Alias:
    """Another engine's name for an option.

    Attributes:
      name: the name as a Python argument.
      option: the field that it sets.
      inverted: True if its boolean means the opposite of the field.
      short: a flag with one dash.
      convert: converts a value of the other engine to options, or raises ConfigError. Default: the
        value is used unchanged.
      several: True if the flag takes one or more values.
    """

    name: str
    option: str
    inverted: bool = False
    short: str | None = None
    convert: Callable[[Any], dict[str, Any]] | None = None
    several: bool = False

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def negative(self) -> str:
        """The flag with the opposite meaning, if this is a switch."""
        return flag_of("no_" + self.name)

    def options(self, value: Any) -> dict[str, Any]:
        """Return the options that `value` of this name sets, by field."""
        if self.convert is not None:
            return self.convert(value)
        return {self.option: not value if self.inverted else value}


@dataclass(frozen=True, slots=True)
class Implied:
    """Another engine's switch for behavior that is always on here. It is accepted without effect.

    Attributes:
      name: the name as a Python argument.
      reason: why the switch has no effect.
      needs: options of which at least one must be set for the behavior to be on.
    """

    name: str
    reason: str
    needs: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return flag_of(self.name)


def flag_of(name: str) -> str:
    """Return the flag of a name: `--tensor-parallel-size` for `tensor_parallel_size`."""
    return "--" + name.replace("_", "-")


def _speculation(value: Any) -> dict[str, Any]:
    """Return the options for vLLM's `speculative_config`, a dict or JSON text."""
    flag = "--speculative-config"
    try:
        config = dict(json.loads(value) if isinstance(value, str) else value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f'{flag} must be a JSON object such as {{"method": "ngram", '
            f'"num_speculative_tokens": 4}}, not {value!r}'
        ) from error
    model = config.pop("model", None)
    method = config.pop("method", None) or ("draft_model" if model is not None else None)
    options = _speculation_method(method, flag)
    if method == "draft_model":
        options["draft_model"] = model
    tokens = config.pop("num_speculative_tokens", None)
    if tokens is not None:
        options["max_draft_tokens"] = tokens
    if config:
        raise ConfigError(
            f"{flag} has unsupported settings: {', '.join(sorted(config))}; use --speculation"
        )
    return options


def _speculation_method(method: Any, flag: str = "--spec-method") -> dict[str, Any]:
    """Return the options for vLLM's `spec_method` or the method of its `speculative_config`."""
    methods = {"ngram": "ngram", "suffix": "suffix", "draft_model": "draft"}
    if not isinstance(method, str) or method not in methods:
        raise ConfigError(
            f"{flag}: the method must be {', '.join(methods)}, not {method!r}: "
            "see --speculation, --draft-model and --max-draft-tokens"
        )
    return {"speculation": methods[method]}


def _adapters(value: Any) -> dict[str, Any]:
    """Return the options for vLLM's `lora_modules`.

    The value is one item or several. An item is NAME=FOLDER, or JSON with `name` and `path`.
    """
    found: list[str] = []
    for item in value if isinstance(value, list | tuple) else [value]:
        if isinstance(item, str) and item.lstrip().startswith(("{", "[")):
            try:
                item = json.loads(item)
            except ValueError as error:
                raise ConfigError(f"--lora-modules: invalid JSON: {item}") from error
        if isinstance(item, list):
            found += _adapters(item)["lora"]
        elif isinstance(item, dict):
            if not {"name", "path"} <= item.keys():
                raise ConfigError(f"--lora-modules: an adapter needs name and path, not {item}")
            found.append(f"{item['name']}={item['path']}")
        elif isinstance(item, str):
            found.append(item)
        else:
            raise ConfigError(f"--lora-modules must be NAME=FOLDER, or JSON, not {item!r}")
    return {"lora": tuple(found)}


ALIASES = (
    Alias("model_path", "model"),
    Alias("tensor_parallel_size", "tensor_parallel", short="-tp"),
    Alias("tp_size", "tensor_parallel"),
    Alias("enable_expert_parallel", "expert_parallel"),
    Alias("gpu_memory_utilization", "memory_fraction"),
    Alias("device_memory_utilization", "memory_fraction"),
    Alias("mem_fraction_static", "memory_fraction"),
    Alias("kv_cache_dtype", "kv_dtype"),
    Alias("num_gpu_blocks_override", "num_blocks"),
    Alias("kv_offloading_size", "host_kv_gib"),
    Alias("page_size", "block_size"),
    Alias("context_length", "max_model_len"),
    Alias("max_batch_size", "max_num_seqs"),
    Alias("max_running_requests", "max_num_seqs"),
    Alias("max_prefill_tokens", "max_num_batched_tokens"),
    Alias("chunked_prefill_size", "prefill_chunk_size"),
    Alias("long_prefill_token_threshold", "prefill_chunk_size"),
    Alias("enable_prefix_caching", "prefix_cache"),
    Alias("disable_radix_cache", "prefix_cache", inverted=True),
    Alias("enable_chunked_prefill", "chunked_prefill"),
    Alias("async_scheduling", "one_step_ahead"),
    Alias("disable_overlap_schedule", "one_step_ahead", inverted=True),
    Alias("enforce_eager", "command_buffers", inverted=True),
    Alias("disable_cuda_graph", "command_buffers", inverted=True),
    Alias("random_seed", "seed"),
    Alias("lora_modules", "lora", convert=_adapters, several=True),
    Alias("speculative_config", "speculation", convert=_speculation),
    Alias("spec_method", "speculation", convert=_speculation_method),
    Alias("spec_model", "draft_model"),
    Alias("spec_tokens", "max_draft_tokens"),
)

# Values of other engines, by option.
VALUES: Mapping[str, Mapping[str, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache": {"naive": "contiguous"},
    "kv_dtype": {"fp8_e4m3": "fp8"},
}

_CHECKPOINT = "the checkpoint's config.json sets the method: omit this flag"
REFUSED_VALUES: Mapping[str, Mapping[str, str]] = {
    "quantization": dict.fromkeys(
        ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors"), _CHECKPOINT
    )
    | {"gguf": "the .gguf file sets the types: omit this flag"},
    "kv_dtype": {"fp8_e5m2": "only float8_e4m3fn is supported: use fp8"},
}

IMPLIED = (
    Implied("enable_auto_tool_choice", "tool calls are parsed whenever a request has tools"),
    Implied("trust_remote_code", "code in a model's folder is never run"),
    Implied("disable_log_stats", "statistics are never logged: see /metrics"),
    Implied("enable_prompt_tokens_details", "usage always has the details"),
    Implied("enable_request_id_headers", "every response has X-Request-Id"),
    Implied(
        "enable_lora",
        "`--lora` or `--max-loras` enables adapters; without them, an error",
        needs=("lora", "max_loras"),
    ),
)

_ONE_HOST = "only tensor parallelism on one host is implemented: use --tensor-parallel"
_OF_SERVE = "several engines need a server: use --data-parallel of forge-jax serve"
_CHECKPOINT_FILES = "the files in the model's folder determine it"
_TEXT_ONLY = "models are text only"
REFUSED: Mapping[str, str] = {
    "pipeline_parallel_size": _ONE_HOST,
    "data_parallel": _OF_SERVE,
    "data_parallel_size": _OF_SERVE,
    "dp_size": _OF_SERVE,
    "data_parallel_size_local": "set --data-parallel of forge-jax serve on each host",
    "data_parallel_address": _ONE_HOST,
    "prefill_context_parallel_size": _ONE_HOST,
    "decode_context_parallel_size": _ONE_HOST,
    "nnodes": _ONE_HOST,
    "node_rank": _ONE_HOST,
    "ep_size": "the devices of --tensor-parallel divide the experts: use --expert-parallel",
    "distributed_executor_backend": _ONE_HOST,
    "swap_space": "preempted sequences are recomputed, never swapped: omit this flag",
    "cpu_offload_gb": "weights are never offloaded: use --quantization to save memory",
    "kv_cache_memory_bytes": "the size of the KV cache is set in blocks: use --num-blocks",
    "download_dir": "models are stored in Hugging Face's cache: set HF_HOME",
    "hf_token": "set HF_TOKEN",
    "load_format": _CHECKPOINT_FILES,
    "config_format": _CHECKPOINT_FILES,
    "tokenizer": "the tokenizer in the model's folder is used",
    "tokenizer_mode": "there is only one tokenizer implementation: omit this flag",
    "tokenizer_revision": "the model's tokenizer is used: use --revision",
    "code_revision": "code in a model's folder is never run: omit this flag",
    "hf_overrides": "edit config.json in a copy of the model's folder",
    "rope_scaling": "edit config.json in a copy of the model's folder",
    "rope_theta": "edit config.json in a copy of the model's folder",
    "model_impl": "each model has only one implementation: omit this flag",
    "generation_config": (
        "only EOS tokens are read from generation_config.json: set sampling parameters in requests"
    ),
    "override_generation_config": "set sampling parameters in requests",
    "compilation_config": "XLA compiles every step: see --compile-cache and --no-command-buffers",
    "optimization_level": "XLA compiles every step: see --compile-cache and --no-command-buffers",
    "max_cudagraph_capture_size": "see --no-command-buffers",
    "max_seq_len_to_capture": "command buffers have no length limit: see --no-command-buffers",
    "attention_backend": "the device determines it: see --kernels",
    "guided_decoding_backend": "llguidance is the only backend: omit this flag",
    "structured_outputs_config": "llguidance is the only backend: omit this flag",
    "disable_sliding_window": "the model's config.json determines it",
    "max_cpu_loras": "all adapters are on the device: use --max-loras",
    "max_num_active_seqs": "use --max-num-seqs",
    "max_num_scheduled_tokens": "use --max-num-batched-tokens",
    "max_num_partial_prefills": "see --max-num-batched-tokens and --prefill-chunk-size",
    "max_logprobs": "the limit is fixed: omit this flag",
    "logprobs_mode": "requests choose: set their field logprobs_mode",
    "logits_processors": "custom code is not loaded: use logit_bias in requests",
    "prefix_caching_hash_algo": "the hash is fixed: omit this flag",
    "runner": "see --pooling",
    "limit_mm_per_prompt": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY,
    "enable_sleep_mode": "set --weight-sync-dir to let clients call POST /sleep",
    "kv_transfer_config": "the KV cache is not shared between processes",
}


def our_value(option: str, value: Any) -> Any:
    """Return the value in our option's spelling.

    Raises:
      ConfigError: another engine's value has no counterpart here.
    """
    reason = refused_value(option, value)
    if reason is not None:
        raise ConfigError(f"{flag_of(option)} {value}: {reason}")
    return VALUES.get(option, {}).get(value, value) if isinstance(value, str) else value


def refused_value(option: str, value: Any) -> str | None:
    """Return why another engine's value has no counterpart here, or None if it is not refused."""
    return REFUSED_VALUES.get(option, {}).get(value) if isinstance(value, str) else None


def our_options(options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the options by our names.

    Args:
      options: values by our names or other engines' names.
      known: our names.

    Raises:
      ConfigError: a name is unknown, or two names set the same option.
    """
    aliases = {alias.name: alias for alias in ALIASES}
    implied = {each.name: each for each in IMPLIED}
    result = {name: our_value(name, value) for name, value in options.items() if name in known}
    given = dict.fromkeys(result, "")
    held: list[str] = []
    for name in options.keys() - result.keys():
        if name in implied:
            held += [name] if options[name] else []
            continue
        if name not in aliases:
            raise ConfigError(_unknown(name, known))
        for option, value in aliases[name].options(options[name]).items():
            if option in given:
                other = given[option] or option
                raise ConfigError(f"{name} and {other} are the same option: set only one of them")
            given[option] = name
            result[option] = our_value(option, value)
    check_implied(held, lambda option: result.get(option) not in (None, ()))
    return result


def check_implied(names: Iterable[str], is_given: Callable[[str], bool]) -> None:
    """Raise ConfigError if one of these `IMPLIED` names lacks an option that it needs."""
    for each in IMPLIED:
        if each.name in names and each.needs and not any(map(is_given, each.needs)):
            needed = " or ".join(map(flag_of, each.needs))
            raise ConfigError(f"{each.flag} has no effect by itself: set {needed}")


def _unknown(name: str, known: Collection[str]) -> str:
    if name in REFUSED:
        return f"{name} is not supported: {REFUSED[name]}"
    others = [alias.name for alias in ALIASES]
    return f"no such option: {name}{did_you_mean(name, [*known, *others])}"
