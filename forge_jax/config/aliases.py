"""Names that other engines give to our options, and their options that have no counterpart here.

`EngineConfig.from_options` (and so `LLM`) takes these names as Python arguments. The command line
takes them as flags: `tensor_parallel_size` is `--tensor-parallel-size`. An alias never has the name
of an option of ours; a test checks it.
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
    """Another name of an option.

    Attributes:
      name: as a Python argument.
      option: the field that it sets.
      inverted: a boolean that means the opposite of the field.
      short: a one-dash flag for it.
      convert: makes options of a value in the other engine's form; raises ConfigError. Default: the
        value is the field's.
      several: on the command line it takes one or more values.
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
        """The opposite, if it is a switch."""
        return flag_of("no_" + self.name)

    def options(self, value: Any) -> dict[str, Any]:
        """Return the options that this name sets to `value`, by field."""
        if self.convert is not None:
            return self.convert(value)
        return {self.option: not value if self.inverted else value}


@dataclass(frozen=True, slots=True)
class Implied:
    """A switch of other engines for what always holds here: accepted, without effect.

    `needs` are options of which one must be given for it to hold.
    """

    name: str
    reason: str
    needs: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return flag_of(self.name)


def flag_of(name: str) -> str:
    """tensor_parallel_size -> --tensor-parallel-size"""
    return "--" + name.replace("_", "-")


def _speculation(value: Any) -> dict[str, Any]:
    """vLLM's `speculative_config`: a dict, or its JSON text."""
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
            f"{flag}: {', '.join(sorted(config))}: there is no such setting here; use --speculation"
        )
    return options


def _speculation_method(method: Any, flag: str = "--spec-method") -> dict[str, Any]:
    """vLLM's `spec_method`, also in its `speculative_config`."""
    methods = {"ngram": "ngram", "suffix": "suffix", "draft_model": "draft"}
    if not isinstance(method, str) or method not in methods:
        raise ConfigError(
            f"{flag}: the method must be {', '.join(methods)}, not {method!r}: "
            "see --speculation, --draft-model and --max-draft-tokens"
        )
    return {"speculation": methods[method]}


def _adapters(value: Any) -> dict[str, Any]:
    """vLLM's `lora_modules`: NAME=FOLDER, or JSON with `name` and `path`, one or several."""
    found: list[str] = []
    for item in value if isinstance(value, list | tuple) else [value]:
        if isinstance(item, str) and item.lstrip().startswith(("{", "[")):
            try:
                item = json.loads(item)
            except ValueError as error:
                raise ConfigError(f"--lora-modules: not JSON: {item}") from error
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
    Alias("gpu_memory_utilization", "memory_fraction"),
    Alias("device_memory_utilization", "memory_fraction"),
    Alias("mem_fraction_static", "memory_fraction"),
    Alias("kv_cache_dtype", "kv_dtype"),
    Alias("num_gpu_blocks_override", "num_blocks"),
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

_CHECKPOINT = "a quantized checkpoint needs no flag: its config.json says how; leave it out"
REFUSED_VALUES: Mapping[str, Mapping[str, str]] = {
    "quantization": dict.fromkeys(
        ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "gguf"), _CHECKPOINT
    ),
    "kv_dtype": {"fp8_e5m2": "8-bit floats are float8_e4m3fn here: use fp8"},
}

IMPLIED = (
    Implied("enable_auto_tool_choice", "tool calls are parsed whenever a request has tools"),
    Implied("trust_remote_code", "no code of a model's folder is ever run"),
    Implied("disable_log_stats", "statistics are not logged; /metrics has them"),
    Implied("enable_prompt_tokens_details", "usage always has them"),
    Implied("enable_request_id_headers", "every response has X-Request-Id"),
    Implied(
        "enable_lora",
        "adapters are on with `--lora` or `--max-loras`; one of them must be given",
        needs=("lora", "max_loras"),
    ),
)

_ONE_HOST = "only tensor parallelism on one host is implemented: use --tensor-parallel"
_CHECKPOINT_FILES = "the files in the model's folder decide it"
_TEXT_ONLY = "models are text only"
REFUSED: Mapping[str, str] = {
    "pipeline_parallel_size": _ONE_HOST,
    "data_parallel_size": _ONE_HOST,
    "data_parallel_size_local": _ONE_HOST,
    "data_parallel_address": _ONE_HOST,
    "prefill_context_parallel_size": _ONE_HOST,
    "decode_context_parallel_size": _ONE_HOST,
    "nnodes": _ONE_HOST,
    "node_rank": _ONE_HOST,
    "enable_expert_parallel": _ONE_HOST,
    "distributed_executor_backend": _ONE_HOST,
    "swap_space": "preempted sequences are recomputed, never swapped: leave it out",
    "cpu_offload_gb": "weights are never offloaded: use --quantization for less memory",
    "kv_offloading_size": "blocks that leave the KV cache are recomputed: leave it out",
    "kv_cache_memory_bytes": "give the size of the KV cache in blocks: use --num-blocks",
    "download_dir": "models are in Hugging Face's cache: set HF_HOME",
    "hf_token": "set HF_TOKEN",
    "load_format": _CHECKPOINT_FILES,
    "config_format": _CHECKPOINT_FILES,
    "tokenizer": "the tokenizer is the one in the model's folder",
    "tokenizer_mode": "there is one tokenizer implementation: leave it out",
    "tokenizer_revision": "the tokenizer is the model's: use --revision",
    "code_revision": "no code of a model's folder is ever run: leave it out",
    "hf_overrides": "edit config.json in a copy of the model's folder",
    "rope_scaling": "edit config.json in a copy of the model's folder",
    "rope_theta": "edit config.json in a copy of the model's folder",
    "model_impl": "there is one implementation of each model: leave it out",
    "generation_config": "requests set the sampling; the model's file gives only the end tokens",
    "override_generation_config": "requests set the sampling fields",
    "compilation_config": "XLA compiles every step: see --compile-cache and --no-command-buffers",
    "optimization_level": "XLA compiles every step: see --compile-cache and --no-command-buffers",
    "max_cudagraph_capture_size": "see --no-command-buffers",
    "max_seq_len_to_capture": "command buffers have no length limit: see --no-command-buffers",
    "attention_backend": "the device decides it: see --kernels",
    "guided_decoding_backend": "llguidance is the only back end: leave it out",
    "structured_outputs_config": "llguidance is the only back end: leave it out",
    "disable_sliding_window": "the model's config.json decides it",
    "max_cpu_loras": "all adapters are on the device: use --max-loras",
    "max_num_active_seqs": "use --max-num-seqs",
    "max_num_scheduled_tokens": "use --max-num-batched-tokens",
    "max_num_partial_prefills": "see --max-num-batched-tokens and --prefill-chunk-size",
    "max_logprobs": "the limit is fixed: leave it out",
    "logprobs_mode": "logprobs are those of the model, before temperature and penalties",
    "logits_processors": "no code is loaded into the server: see logit_bias in a request",
    "prefix_caching_hash_algo": "the hash is fixed: leave it out",
    "runner": "see --pooling",
    "limit_mm_per_prompt": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY,
    "enable_sleep_mode": "there is no sleep mode: stop the server",
    "kv_transfer_config": "the KV cache is not shared between processes",
}


def our_value(option: str, value: Any) -> Any:
    """Return the value as our option spells it.

    Raises:
      ConfigError: for a value of other engines that has no counterpart here.
    """
    reason = refused_value(option, value)
    if reason is not None:
        raise ConfigError(f"{flag_of(option)} {value}: {reason}")
    return VALUES.get(option, {}).get(value, value) if isinstance(value, str) else value


def refused_value(option: str, value: Any) -> str | None:
    """Return why a value of other engines has no counterpart here; None if it may have one."""
    return REFUSED_VALUES.get(option, {}).get(value) if isinstance(value, str) else None


def our_options(options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the options under our names.

    Args:
      options: by our names or those of other engines.
      known: our names.

    Raises:
      ConfigError: for a name that is neither, or two names of the same option.
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
                raise ConfigError(f"{name} and {other} are the same option: give one of them")
            given[option] = name
            result[option] = our_value(option, value)
    check_implied(held, lambda option: result.get(option) not in (None, ()))
    return result


def check_implied(names: Iterable[str], is_given: Callable[[str], bool]) -> None:
    """Raise ConfigError if one of these `IMPLIED` names does not hold with the options given."""
    for each in IMPLIED:
        if each.name in names and each.needs and not any(map(is_given, each.needs)):
            needed = " or ".join(map(flag_of, each.needs))
            raise ConfigError(f"{each.flag} has no effect by itself: give {needed}")


def _unknown(name: str, known: Collection[str]) -> str:
    if name in REFUSED:
        return f"{name} has no counterpart: {REFUSED[name]}"
    others = [alias.name for alias in ALIASES]
    return f"no such option: {name}{did_you_mean(name, [*known, *others])}"
