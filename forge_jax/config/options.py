"""The engine's configuration: frozen dataclasses with keyword-only fields.

Each field has its default, help text and command-line flag. `forge-jax serve --help`,
docs/cli.md and docs/configuration.md are generated from them.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from forge_jax.config.aliases import ALIASES, IMPLIED, our_options
from forge_jax.config.kv_events import read_kv_events
from forge_jax.config.suggest import did_you_mean
from forge_jax.errors import ConfigError, ForgeError

DType = Literal["auto", "bfloat16", "float16", "float32"]
MAX_NUM_SEQS = 4096  # each sequence is a row of the largest decode executable
KVDType = Literal["auto", "fp8", "int8"]
Policy = Literal["fcfs", "priority", "prefix"]
Speculation = Literal["off", "ngram", "suffix", "draft"]
Verification = Literal["coupled", "rejection"]
SELF = "self"  # draft model: the first layers of the model itself
LORA_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}", re.ASCII)
MAX_LORAS = 64  # every row is multiplied by each adapter
MAX_LORA_RANK = 512
MAX_STEERING_FILES = 64
MAX_ACTIVATION_PATTERNS = 64
MAX_ENGINE_TIMEOUT_S = 24 * 3600
MAX_ITL_TARGET_MS = 60_000
MAX_DRAFT_TOKENS = 31  # each draft token is a row of the verification executables
Rounding = Literal["none", "int8", "fp8", "int4"]  # applied to weights while they are read
GGUFWeights = Literal["packed", "packed-exact", "decoded"]
# The names after "xla" are instruction sets, as in `forge_kernels.cpu.build`.
Kernels = Literal["auto", "xla", "amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2"]
Batching = Literal["continuous", "static"]
Pooling = Literal["last", "mean"]  # pooling of hidden states for embeddings


def option(default: Any, doc: str, *, secret: bool = False, **metadata: Any) -> Any:
    """Return a configuration field with its default, help text and command-line flag.

    Args:
      default: the default value.
      doc: the help text.
      secret: leaves the value out of the section's repr.
      metadata: `flag=None` keeps the field off the command line, and `flag="--no-x"` makes a switch
        that turns it off. `metavar` names the value in the help; default: by type. `essential=True`
        shows the flag in the short `--help`. `--help-all` shows every flag.
    """
    return field(default=default, repr=not secret, metadata={"doc": doc, **metadata})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Options of the model: checkpoint, data types, kernels and LoRA adapters."""

    model: str = option(
        "forge-tiny", "a folder, a .gguf file, a Hugging Face ID, or forge-tiny", flag=None
    )
    revision: str | None = option(
        None, "branch, tag or commit of a Hugging Face repository; default: main"
    )
    dtype: DType = option(
        "auto", "data type of weights and activations; auto: the checkpoint's", essential=True
    )
    quantization: Rounding = option(
        "none",
        "quantize the weight matrices to this type while loading the checkpoint",
        essential=True,
    )
    gguf_weights: GGUFWeights = option(
        "packed",
        'storage of a .gguf file\'s matrices. "packed" keeps weights at 4 to 8 bits, rounds '
        'activations to int8 and multiplies integers. "packed-exact" does not round activations. '
        '"decoded" dequantizes the matrices to floats, which uses more memory',
    )
    kernels: Kernels = option(
        "auto",
        'CPU kernels. "auto" uses the C++ kernels for the instruction set that measured fastest. '
        '"xla" uses only code that XLA generates. The name of an instruction set selects its C++ '
        'kernels. "amx" uses AMX tiles wherever possible',
    )
    mmap: bool = option(
        False,
        "on CPU, memory-map the weights of a converted folder if the page cache holds them in huge "
        "pages. Startup is faster, but steps slow down if the system evicts the pages",
    )
    max_model_len: int | None = option(
        None,
        "context length: maximum number of tokens of prompt plus output, at least 1; auto: the "
        "model's limit, or less if the KV cache is smaller",
        essential=True,
    )
    chat_template: str | None = option(
        None,
        "Jinja chat template: a file, the template text, or the name of one of the model's "
        "templates; default: the model's own template",
    )
    deterministic: bool = option(
        False,
        "give a request bit-identical results with any batch composition and schedule; slower",
    )
    pooling: Pooling = option(
        "last",
        "embedding of a text: the final hidden state of its last token, or the mean over all "
        "tokens",
    )
    lora: tuple[str, ...] = option(
        (),
        "LoRA adapter in PEFT's format, as NAME=FOLDER. Requests select it by NAME. May be "
        "repeated, up to 64 times",
        essential=True,
    )
    max_loras: int | None = option(
        None,
        "maximum number of LoRA adapters loaded at the same time, from the number of --lora "
        "adapters to 64; auto: the number of --lora adapters",
    )
    max_lora_rank: int = option(
        16,
        "maximum LoRA rank, 1 to 512; every adapter takes as much memory as one of this rank",
    )
    steering_vectors: tuple[str, ...] = option(
        (),
        "steering vector as NAME=FILE.safetensors, with one tensor of shape [d] or [layers, d]. "
        "Requests select it by NAME. May be repeated, up to 64 times",
        essential=True,
    )
    activations: tuple[str, ...] = option(
        (),
        "activations that requests may return, as a name or pattern such as layers.*.resid. May be "
        "repeated, up to 64 times",
        essential=True,
    )
    max_activation_mib: int = option(
        64, "maximum MiB of activations that a request can return, 1 to 128"
    )
    seed: int = option(0, "random seed that determines the seeds of requests without a seed")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Options of the KV cache."""

    block_size: int | None = option(
        None, "tokens per KV cache block, a multiple of 8; auto: 64 on GPU, 16 on CPU"
    )
    num_blocks: int | None = option(
        None,
        "number of KV cache blocks, at least 1; auto: as many as memory allows",
        essential=True,
    )
    kv_dtype: KVDType = option(
        "auto",
        'data type of the KV cache. "auto" is the model\'s type. "fp8" and "int8" store one scale '
        "per token and head, and take about half the memory of a 16-bit type",
        essential=True,
    )
    memory_fraction: float = option(
        0.9,
        "fraction of GPU memory to use, above 0 and at most 1. No effect on CPU: there, the KV "
        "cache is sized for 1,024 tokens per sequence, but at least 0.5 and at most 2 GiB. To "
        "change it, set --num-blocks",
        essential=True,
    )
    kv_cache: Literal["paged", "contiguous"] = option(
        "paged",
        'layout of the KV cache. "paged" uses blocks of --block-size tokens. "contiguous" gives '
        "each sequence one block of --max-model-len tokens",
    )
    prefix_cache: bool = option(
        True,
        "disable prefix caching: do not share KV cache blocks between prompts with the same prefix",
        flag="--no-prefix-cache",
    )
    eviction: Literal["lru", "fifo"] = option(
        "lru",
        "eviction policy of the prefix cache: least recently used block first (lru), or the block "
        "cached first (fifo)",
    )
    host_kv_gib: float = option(
        0.0,
        "GiB of host memory per engine for KV cache blocks that the prefix cache evicts, shared by "
        "the engine's devices. Requests with the same prefix load these blocks instead of "
        "computing them. 0: off",
        essential=True,
    )
    kv_events_config: str | None = option(
        None,
        "publish prefix cache events to routers over ZeroMQ. vLLM's settings as JSON, such as "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}. Requires the extra events. '
        "Default: off",
    )


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Options of the scheduler: batch size, prompt chunks and admission order."""

    max_num_seqs: int = option(
        256, "maximum number of sequences that run at the same time, 1 to 4096", essential=True
    )
    max_num_batched_tokens: int | None = option(
        None,
        "maximum number of tokens per step, prompts and decodes together, at least 1; auto: 2048 "
        "on GPU, 512 on CPU",
    )
    prefill_chunk_size: int | None = option(
        None,
        "maximum number of tokens of one prompt per step, at least 1; auto: as many as fit",
    )
    scheduling_policy: Policy = option(
        "fcfs",
        'order in which waiting requests are admitted: "fcfs" by arrival, "priority" by the '
        'request\'s priority, "prefix" by cached prefix, longest first',
    )
    one_step_ahead: bool = option(
        True,
        "read each step's result before scheduling the next step; the device then waits for the "
        "host",
        flag="--no-one-step-ahead",
    )
    chunked_prefill: bool = option(
        True,
        "compute each prompt in one step. Only prompts longer than --max-num-batched-tokens are "
        "still split",
        flag="--no-chunked-prefill",
    )
    itl_target_ms: float | None = option(
        None,
        "target inter-token latency of running requests in milliseconds, 1 to 60000, or 0 for "
        "none. Prompts are computed in smaller steps to reach it. Auto: 200 for a server on CPU, "
        "else none",
    )
    batching: Batching = option(
        "continuous",
        '"continuous" admits requests as soon as there is room. "static" admits the next batch '
        "only after all running requests finish, with as many requests as fit into one step",
    )


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Options of speculative decoding."""

    speculation: Speculation = option(
        "off",
        "speculative decoding: propose draft tokens and verify several in one step. "
        '"ngram" drafts from repetitions within the text. "suffix" also uses earlier outputs of '
        'the same tenant. "draft" uses a draft model',
        essential=True,
    )
    max_draft_tokens: int = option(
        7,
        "maximum number of draft tokens per sequence and step, 1 to 31; the actual number adapts "
        "at each step",
    )
    draft_model: str | None = option(
        None,
        "model that drafts with --speculation draft: a folder, a .gguf file, a Hugging Face ID, "
        "or self for the model's first layers. It must have the model's vocabulary",
        essential=True,
    )
    draft_layers: int | None = option(
        None,
        "number of the model's first layers that --draft-model self uses, at least 1; required "
        "with --draft-model self",
    )
    draft_verification: Verification = option(
        "coupled",
        '"coupled" gives the same tokens as decoding without drafts. "rejection" preserves only '
        "their distribution, but accepts more tokens of a draft model at temperatures above 0",
    )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Options of devices, compilation and the engine process."""

    backend: Literal["auto", "cuda", "cpu"] = option(
        "auto", "device type to run on; auto: a GPU if there is one, else the CPU", essential=True
    )
    device: int = option(
        0, "index of the device, or of the first device with --tensor-parallel; from 0"
    )
    tensor_parallel: int = option(
        1,
        "number of consecutive devices, starting at --device, that share the model; each stores a "
        "part of every matrix",
        essential=True,
    )
    expert_parallel: bool = option(
        False,
        "give each device of --tensor-parallel whole experts, instead of a part of every expert. "
        "The number of devices must divide the number of experts",
    )
    pipeline_parallel: int = option(
        1,
        "number of stages, which divide the layers of the model. Each stage has --tensor-parallel "
        "devices",
    )
    num_hosts: int = option(
        1,
        "number of hosts that share the model, at least 1; it must divide the number of devices, "
        "--tensor-parallel times --pipeline-parallel. Each host runs forge-jax serve with the same "
        "options and its own --host-rank",
    )
    host_rank: int = option(
        0,
        "index of this host, from 0 to --num-hosts - 1. Host 0 schedules and serves HTTP. The "
        "others compute their parts of each step and serve /health",
    )
    coordinator: str | None = option(
        None,
        "address at which host 0 accepts connections from the other hosts; required with "
        "--num-hosts above 1. Only the hosts must be able to reach it, because it has no "
        "authentication",
        metavar="HOST:PORT",
    )
    command_buffers: bool = option(
        True,
        "run without XLA's command buffers (CUDA graphs); no effect on CPU",
        flag="--no-command-buffers",
    )
    compile_cache_dir: str | None = option(
        None,
        "folder for compiled executables, or a bundle that forge-jax compile wrote. Restrict "
        "write access to trusted users, because cached executables are loaded and run. Default: "
        "$JAX_COMPILATION_CACHE_DIR, or ~/.cache/forge-jax/xla",
        flag="--compile-cache",
        essential=True,
    )
    compile_cache: bool = option(
        True,
        "compile at every start, without reading or writing a cache",
        flag="--no-compile-cache",
    )
    saved_executables: bool = option(
        False,
        "load executables that an earlier process saved in the compile cache, without tracing, and "
        "save new ones. It does not notice functions that were replaced at run time",
        flag=None,
    )
    engine_timeout_s: float = option(
        120.0,
        "seconds until the process of --engine-process is replaced, if it sends no heartbeat or "
        "completes no pending step, 1 to 86400; 0: never",
        flag="--engine-timeout",
    )

    @property
    def num_devices(self) -> int:
        """Number of devices that share the model, on all hosts together."""
        return self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The configuration of an engine, in five sections."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        with python_names():
            self._check()

    def _check(self) -> None:
        for section in dataclasses.fields(self):
            _check_types(getattr(self, section.name))
        positive = (
            ("--max-model-len", self.model.max_model_len),
            ("--block-size", self.cache.block_size),
            ("--num-blocks", self.cache.num_blocks),
            ("--max-num-seqs", self.batch.max_num_seqs),
            ("--max-num-batched-tokens", self.batch.max_num_batched_tokens),
            ("--prefill-chunk-size", self.batch.prefill_chunk_size),
            ("--max-draft-tokens", self.speculation.max_draft_tokens),
            ("--draft-layers", self.speculation.draft_layers),
            ("--tensor-parallel", self.parallel.tensor_parallel),
            ("--pipeline-parallel", self.parallel.pipeline_parallel),
            ("--num-hosts", self.parallel.num_hosts),
        )
        for flag, value in positive:
            if value is not None and value < 1:
                raise ConfigError(f"{flag} must be at least 1, not {value}")
        if self.batch.max_num_seqs > MAX_NUM_SEQS:
            raise ConfigError(
                f"--max-num-seqs must be at most {MAX_NUM_SEQS}, not {self.batch.max_num_seqs}"
            )
        if self.speculation.max_draft_tokens > MAX_DRAFT_TOKENS:
            raise ConfigError(
                f"--max-draft-tokens must be at most {MAX_DRAFT_TOKENS}, not "
                f"{self.speculation.max_draft_tokens}"
            )
        _check_draft_model(self.speculation)
        _check_verification(self)
        _check_lora(self.model)
        _check_steering(self.model)
        _check_activations(self.model)
        if self.batch.prefill_chunk_size is not None and not self.batch.chunked_prefill:
            raise ConfigError(
                "--prefill-chunk-size splits prompts, which --no-chunked-prefill forbids: "
                "remove one of them"
            )
        _check_itl_target(self)
        _check_kv_events(self.cache)
        _check_host_kv(self)
        block_size = self.cache.block_size
        if block_size is not None and block_size % 8:
            raise ConfigError(f"--block-size must be a multiple of 8, not {block_size}")
        _check_parallel(self.parallel)
        _check_hosts(self)
        _check_pipeline(self)
        if not 0.0 < self.cache.memory_fraction <= 1.0:
            raise ConfigError(
                f"--memory-fraction must be in (0, 1], not {self.cache.memory_fraction}"
            )

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Return a config from flat field names: `from_options(dtype="float32", max_num_seqs=8)`.

        Names of other engines are also accepted: `tensor_parallel_size=2`.

        Raises:
          ConfigError: a name is unknown, or a value is invalid.
        """
        with python_names():
            options = our_options(options, _fields())
        sections: dict[str, Any] = {}
        for section in dataclasses.fields(cls):
            section_type = section.default_factory
            names = {f.name for f in dataclasses.fields(section_type)}  # type: ignore[arg-type]
            given = {name: options.pop(name) for name in sorted(names & options.keys())}
            sections[section.name] = section_type(**given)  # type: ignore[operator]
        assert not options, f"options of no section: {options}"
        return cls(**sections)


@contextmanager
def python_names() -> Generator[None]:
    """Rewrite flags in the body's errors as Python arguments.

    `--no-prefix-cache` becomes `prefix_cache=False`. `ForgeError.on_command_line` keeps the message
    with flags.
    """
    try:
        yield
    except ForgeError as error:
        if error.on_command_line is None and error.args:
            error.on_command_line = str(error)
            error.args = (in_python(error.on_command_line), *error.args[1:])
        raise


def in_python(message: str) -> str:
    """Return the message with `EngineConfig` flags written as Python arguments."""
    return _FLAG.sub(_as_argument, message)


_FLAG = re.compile(r"(?<![\w-])(?P<flag>--[a-z][a-z0-9-]*)(?: (?P<value>-?\d+(?:\.\d+)?\b|\w+))?")


def _as_argument(found: re.Match[str]) -> str:
    flag, value = found["flag"], found["value"]
    names = {other.flag: other.name for other in (*ALIASES, *IMPLIED)}
    fields = {_flag_of(known): known for known in _fields().values()}
    if flag not in fields:
        return found[0].replace(flag, names.get(flag, flag), 1)
    known = fields[flag]
    if isinstance(known.default, bool):
        return found[0].replace(flag, f"{known.name}={not known.default}", 1)
    choices = get_args(_hints()[known.name])
    if value is None:
        return known.name
    if value in choices or (known.name == "draft_model" and value == SELF):
        return f'{known.name}="{value}"'
    numeric = not isinstance(known.default, str) and value.lstrip("-").replace(".", "").isdigit()
    return f"{known.name}{'=' if numeric else ' '}{value}"


@cache
def _fields() -> dict[str, dataclasses.Field[Any]]:
    """Return every field of the engine's sections, by name."""
    sections = [section.default_factory for section in dataclasses.fields(EngineConfig)]
    return {
        known.name: known
        for section in sections
        for known in dataclasses.fields(section)  # type: ignore[arg-type]
    }


@cache
def _hints() -> dict[str, Any]:
    sections = [section.default_factory for section in dataclasses.fields(EngineConfig)]
    return {name: hint for each in sections for name, hint in get_type_hints(each).items()}


def _flag_of(known: dataclasses.Field[Any]) -> str:
    return known.metadata.get("flag") or "--" + known.name.replace("_", "-")


def flags_of(*sections: Any) -> list[str]:
    """Return the flags of all values that differ from their default, without secrets."""
    words: list[str] = []
    for section in sections:
        for known in dataclasses.fields(section):
            value = getattr(section, known.name)
            flag = known.metadata.get("flag", "--" + known.name.replace("_", "-"))
            if flag is None or not known.repr or value == known.default:
                continue
            for each in cast(tuple[Any, ...], value if isinstance(value, tuple) else (value,)):
                words += [flag] if isinstance(each, bool) else [flag, str(each)]
    return words


def _check_draft_model(speculation: SpeculationConfig) -> None:
    model, layers = speculation.draft_model, speculation.draft_layers
    if speculation.speculation == "draft":
        if model is None:
            raise ConfigError(
                "--speculation draft requires --draft-model: a folder, a .gguf file, a Hugging "
                "Face ID, or self"
            )
        if (model == SELF) != (layers is not None):
            raise ConfigError(
                "--draft-model self requires --draft-layers"
                if model == SELF
                else "--draft-layers requires --draft-model self: remove it"
            )
        return
    for flag, value in (("--draft-model", model), ("--draft-layers", layers)):
        if value is not None:
            raise ConfigError(f"{flag} requires --speculation draft")


def _check_verification(config: EngineConfig) -> None:
    if config.speculation.draft_verification == "coupled":
        return
    if config.speculation.speculation == "off":
        raise ConfigError(
            "--draft-verification rejection has no effect without drafts: set --speculation, or "
            "remove it"
        )
    if config.model.deterministic:
        raise ConfigError(
            "--draft-verification rejection can change tokens, which --deterministic forbids: "
            "use --draft-verification coupled, or remove --deterministic"
        )


def _check_parallel(parallel: ParallelConfig) -> None:
    if parallel.expert_parallel and parallel.tensor_parallel == 1:
        raise ConfigError(
            "--expert-parallel divides experts among the devices of --tensor-parallel: set "
            "--tensor-parallel to at least 2, or omit --expert-parallel"
        )
    if parallel.compile_cache_dir is not None and not parallel.compile_cache:
        raise ConfigError(
            "--compile-cache and --no-compile-cache cannot be combined: remove one of them"
        )
    timeout_s = parallel.engine_timeout_s
    if timeout_s != 0.0 and not 1.0 <= timeout_s <= MAX_ENGINE_TIMEOUT_S:
        raise ConfigError(
            f"--engine-timeout must be from 1 to {MAX_ENGINE_TIMEOUT_S} seconds, or 0 to turn "
            f"it off, not {timeout_s}"
        )


def _check_hosts(config: EngineConfig) -> None:
    parallel = config.parallel
    hosts, rank = parallel.num_hosts, parallel.host_rank
    if not 0 <= rank < hosts:
        raise ConfigError(
            f"--host-rank must be from 0 to {hosts - 1} (--num-hosts {hosts}), not {rank}"
        )
    if hosts == 1:
        if parallel.coordinator is not None:
            raise ConfigError("--coordinator needs --num-hosts of at least 2: set it, or omit both")
        return
    if parallel.coordinator is None:
        raise ConfigError(
            f"--num-hosts {hosts} needs --coordinator HOST:PORT, an address of host 0"
        )
    split_address(parallel.coordinator)
    stages = parallel.pipeline_parallel
    if parallel.num_devices % hosts:
        times = f" times --pipeline-parallel {stages}" if stages > 1 else ""
        raise ConfigError(
            f"--tensor-parallel {parallel.tensor_parallel}{times} is the number of devices of all "
            f"{hosts} hosts, and must be a multiple of --num-hosts"
        )
    if config.speculation.draft_model is not None:
        raise ConfigError("--draft-model does not work with --num-hosts: use --speculation ngram")


def _check_pipeline(config: EngineConfig) -> None:
    """Reject options that do not work with several stages."""
    if config.parallel.pipeline_parallel == 1:
        return
    model = config.model
    conflicts = (
        ("--draft-model", config.speculation.draft_model is not None),
        ("--lora", bool(model.lora)),
        ("--max-loras", bool(model.max_loras)),
        ("--steering-vectors", bool(model.steering_vectors)),
        ("--activations", bool(model.activations)),
        ("--host-kv-gib", bool(config.cache.host_kv_gib)),
    )
    for flag, is_set in conflicts:
        if is_set:
            raise ConfigError(
                f"{flag} does not work with --pipeline-parallel: omit one of them, or use "
                "--tensor-parallel"
            )


def _check_host_kv(config: EngineConfig) -> None:
    gib = config.cache.host_kv_gib
    if not 0.0 <= gib < math.inf:
        raise ConfigError(f"--host-kv-gib must be a number of GiB, or 0 to turn it off, not {gib}")
    if not gib:
        return
    if not config.cache.prefix_cache:
        raise ConfigError(
            "--host-kv-gib keeps blocks of the prefix cache: omit --no-prefix-cache, or omit "
            "--host-kv-gib"
        )
    if config.cache.kv_cache == "contiguous":
        raise ConfigError(
            "--host-kv-gib keeps blocks of the paged KV cache: omit --kv-cache contiguous, or "
            "omit --host-kv-gib"
        )
    if config.speculation.draft_model is not None:
        raise ConfigError(
            "--host-kv-gib does not keep the KV cache of a --draft-model: use --speculation ngram, "
            "or omit --host-kv-gib"
        )
    if config.parallel.num_hosts > 1:
        raise ConfigError("--host-kv-gib does not work with --num-hosts: omit one of them")


def split_address(address: str) -> tuple[str, int]:
    """Return the host and port of `--coordinator`; an IPv6 address is in brackets.

    Raises:
      ConfigError: if it is not HOST:PORT.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--coordinator must be HOST:PORT, not {address!r}")
    return host, int(port)


def _check_itl_target(config: EngineConfig) -> None:
    target_ms = config.batch.itl_target_ms
    if target_ms is None or target_ms == 0:
        return
    if not 1 <= target_ms <= MAX_ITL_TARGET_MS:
        raise ConfigError(
            f"--itl-target-ms must be from 1 to {MAX_ITL_TARGET_MS} milliseconds, or 0 to turn it "
            f"off, not {target_ms}"
        )
    if config.model.deterministic:
        raise ConfigError(
            "--itl-target-ms varies the size of steps, which --deterministic fixes: remove one of "
            "them"
        )
    if not config.batch.chunked_prefill:
        raise ConfigError(
            "--itl-target-ms splits prompts, which --no-chunked-prefill forbids: remove one of them"
        )


def _check_lora(model: ModelConfig) -> None:
    if isinstance(model.lora, str):
        raise ConfigError("lora must be a tuple of strings")
    names = [split_lora(option)[0] for option in model.lora]
    _check_unique(names, "--lora", "adapters")
    places = model.max_loras
    if places is not None and not len(names) <= places <= MAX_LORAS:
        raise ConfigError(
            f"--max-loras must be at least the number of --lora ({len(names)}) and at most "
            f"{MAX_LORAS}, not {places}"
        )
    if len(names) > MAX_LORAS:
        raise ConfigError(
            f"--lora can be set at most {MAX_LORAS} times, but is set {len(names)} times"
        )
    if not 1 <= model.max_lora_rank <= MAX_LORA_RANK:
        raise ConfigError(
            f"--max-lora-rank must be from 1 to {MAX_LORA_RANK}, not {model.max_lora_rank}"
        )


def split_lora(option: str) -> tuple[str, str]:
    """Return the name and folder of NAME=FOLDER.

    Raises:
      ConfigError: the option does not have this form.
    """
    return _split_name(option, "--lora", "FOLDER")


def _check_steering(model: ModelConfig) -> None:
    if isinstance(model.steering_vectors, str):
        raise ConfigError("steering_vectors must be a tuple of strings")
    names = [split_steering(option)[0] for option in model.steering_vectors]
    _check_unique(names, "--steering-vectors", "steering vectors")
    if len(names) > MAX_STEERING_FILES:
        raise ConfigError(
            f"--steering-vectors can be set at most {MAX_STEERING_FILES} times, but is set "
            f"{len(names)} times"
        )


def _check_activations(model: ModelConfig) -> None:
    if isinstance(model.activations, str):
        raise ConfigError("activations must be a tuple of strings")
    if len(model.activations) > MAX_ACTIVATION_PATTERNS:
        raise ConfigError(
            f"--activations can be set at most {MAX_ACTIVATION_PATTERNS} times, but is set "
            f"{len(model.activations)} times"
        )
    if not 1 <= model.max_activation_mib <= 128:
        raise ConfigError(
            f"--max-activation-mib must be between 1 and 128, not {model.max_activation_mib}"
        )


def split_steering(option: str) -> tuple[str, str]:
    """Return the name and file of NAME=FILE.

    Raises:
      ConfigError: the option does not have this form.
    """
    return _split_name(option, "--steering-vectors", "FILE")


def _check_unique(names: list[str], flag: str, what: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{flag} {name}: two {what} have this name; rename one")


def _split_name(option: str, flag: str, what: str) -> tuple[str, str]:
    name, _, path = option.partition("=")
    if not LORA_NAME.fullmatch(name) or not path:
        raise ConfigError(
            f"{flag} must be NAME={what}, where NAME has at most 128 letters, digits and any of "
            f"._:/@+-, not {option!r}"
        )
    return name, path


def _check_kv_events(cache: CacheConfig) -> None:
    if read_kv_events(cache.kv_events_config) is None:
        return
    if not cache.prefix_cache or cache.kv_cache != "paged":
        raise ConfigError(
            "--kv-events-config publishes the prefix cache: omit --no-prefix-cache and "
            "--kv-cache contiguous, or omit this flag"
        )


def _check_types(section: Any) -> None:
    """Raise ConfigError if a field of the section has a value of the wrong type.

    The command line checks types itself. Python callers depend on this check.
    """
    for name, kind in get_type_hints(section.__class__).items():
        value, flag = getattr(section, name), "--" + name.replace("_", "-")
        if get_origin(kind) is Literal and value not in get_args(kind):
            choices = get_args(kind)
            raise ConfigError(
                f"{flag} must be one of {', '.join(choices)}, not {value!r}"
                f"{did_you_mean(value, choices) if isinstance(value, str) else ''}"
            )
        kinds = (kind, *(get_args(kind) if value is not None else ()))
        if int in kinds and type(value) is not int:
            raise ConfigError(f"{flag} must be a whole number, not {value!r}")
        if float in kinds and type(value) not in (int, float):
            raise ConfigError(f"{flag} must be a number, not {value!r}")
        if kind is bool and type(value) is not bool:
            raise ConfigError(f"{name} must be True or False, not {value!r}")
