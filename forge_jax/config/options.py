"""The engine's configuration: frozen, keyword-only, every default written once.

Each field carries its own one-line documentation and command-line flag; `forge-jax serve --help`
and the table in docs/configuration.md are made from them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from forge_jax.config.aliases import ALIASES, IMPLIED, our_options
from forge_jax.config.suggest import did_you_mean
from forge_jax.errors import ConfigError, ForgeError

DType = Literal["auto", "bfloat16", "float16", "float32"]
MAX_NUM_SEQS = 4096  # each is a row of the largest decode executable
KVDType = Literal["auto", "fp8", "int8"]
Policy = Literal["fcfs", "priority", "prefix"]
Speculation = Literal["off", "ngram", "suffix", "draft"]
Verification = Literal["coupled", "rejection"]
SELF = "self"  # as a draft model: the first layers of the model itself
LORA_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}", re.ASCII)
MAX_LORAS = 64  # each is multiplied with every row
MAX_LORA_RANK = 512
MAX_ENGINE_TIMEOUT_S = 24 * 3600
MAX_ITL_TARGET_MS = 60_000
MAX_DRAFT_TOKENS = 31  # each is a row of the executables that verify
Rounding = Literal["none", "int8", "fp8", "int4"]  # of weights, as they are read
GGUFWeights = Literal["packed", "packed-exact", "decoded"]
# Or the name of an instruction set, as in `forge_kernels.cpu.build`.
Kernels = Literal["auto", "xla", "amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2"]
Batching = Literal["continuous", "static"]
Pooling = Literal["last", "mean"]  # of hidden states, for an embedding


def option(default: Any, doc: str, *, secret: bool = False, **metadata: Any) -> Any:
    """A configuration field: its default, its documentation, and how the command line spells it.

    `flag=None` keeps it off the command line; `flag="--no-x"` is a switch that turns it off.
    `essential=True` puts it into the short `--help`; `--help-all` has every flag. A `secret` is in
    no repr.
    """
    return field(default=default, repr=not secret, metadata={"doc": doc, **metadata})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    model: str = option(
        "forge-tiny", "a folder, a .gguf file, a Hugging Face id, or forge-tiny", flag=None
    )
    revision: str | None = option(None, "branch, tag or commit of a Hugging Face id")
    dtype: DType = option(
        "auto", "type of weights and activations; auto: the checkpoint's", essential=True
    )
    quantization: Rounding = option(
        "none",
        "store the matrices in fewer bits, rounded as they are read",
        essential=True,
    )
    gguf_weights: GGUFWeights = option(
        "packed",
        "matrices of a .gguf file: packed ones stay in 4 or 8 bits, and the C++ kernels multiply "
        "them as whole numbers with activations rounded to int8; packed-exact rounds no "
        "activations; decoded ones are floats, and take the memory of these",
    )
    kernels: Kernels = option(
        "auto",
        "xla: do not use the C++ kernels on a CPU, only what XLA makes itself; auto: the C++ "
        "kernels for the instructions that are measured to be the fastest; or for named ones; amx: "
        "tiles wherever they can be used",
    )
    mmap: bool = option(
        False,
        "on a CPU, leave the weights of converted folders in the page cache if that has them in "
        "huge pages: a fast start, but slower steps where the system evicts them",
    )
    max_model_len: int | None = option(
        None,
        "longest prompt plus output; auto: the model's, or what the KV cache has room for",
        essential=True,
    )
    chat_template: str | None = option(
        None, "a Jinja chat template: a file, its text, or the name of one of the model's own"
    )
    deterministic: bool = option(
        False, "equal bits for a request whatever else runs and however it is scheduled; slower"
    )
    pooling: Pooling = option(
        "last",
        "what an embedding is made of: the last token's final hidden state, or the mean of all",
    )
    lora: tuple[str, ...] = option(
        (),
        "a LoRA adapter in PEFT's form, as NAME=FOLDER: requests name it; may be repeated",
        essential=True,
    )
    max_loras: int | None = option(
        None, "LoRA adapters at once, and so room to load more later; auto: as many as --lora names"
    )
    max_lora_rank: int = option(16, "largest rank of a LoRA adapter; all take as much memory")
    seed: int = option(0, "seed of the random source that seeds requests without a seed")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    block_size: int | None = option(None, "tokens per KV block; auto: 64 on GPU, 16 on CPU")
    num_blocks: int | None = option(None, "KV blocks; auto: what the memory allows", essential=True)
    kv_dtype: KVDType = option(
        "auto",
        "type of keys and values; auto: the model's; fp8 and int8, with a scale for each token and "
        "head, take about half the memory of a 16-bit type",
        essential=True,
    )
    memory_fraction: float = option(
        0.9,
        "part of a GPU's memory to use; on CPU the KV cache has room for 1,024 tokens of each "
        "sequence, in 0.5 to 2 GiB, see num-blocks",
        essential=True,
    )
    kv_cache: Literal["paged", "contiguous"] = option(
        "paged", "contiguous gives each sequence one block of max-model-len tokens"
    )
    prefix_cache: bool = option(
        True, "do not reuse the KV of common prefixes", flag="--no-prefix-cache"
    )
    eviction: Literal["lru", "fifo"] = option("lru", "which cached block to give up first")


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    max_num_seqs: int = option(256, "sequences that run at the same time", essential=True)
    max_num_batched_tokens: int | None = option(
        None, "tokens of one step, prompts and decodes together; auto: 2048 on GPU, 512 on CPU"
    )
    prefill_chunk_size: int | None = option(
        None, "most tokens of one prompt in one step; auto: all that fit"
    )
    scheduling_policy: Policy = option("fcfs", "order in which waiting requests are admitted")
    one_step_ahead: bool = option(
        True,
        "read each step before the next is scheduled: the device waits for the host",
        flag="--no-one-step-ahead",
    )
    chunked_prefill: bool = option(
        True,
        "compute each prompt in one step, or let it wait; only a prompt that no step can hold, "
        "one longer than max-num-batched-tokens, is still cut",
        flag="--no-chunked-prefill",
    )
    itl_target_ms: float | None = option(
        None,
        "inter-token latency in ms that running requests keep while prompts are computed, in "
        "smaller steps; 0 turns it off; auto: 200 for a server on CPU, else off",
    )
    batching: Batching = option(
        "continuous",
        "static admits requests only when none runs, as many as fit the tokens of one step",
    )


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    speculation: Speculation = option(
        "off",
        "guess tokens and verify several in one step: from what the text itself repeats (ngram), "
        "from that and earlier outputs of the same tenant (suffix), with a smaller model (draft)",
        essential=True,
    )
    max_draft_tokens: int = option(
        7, "most guessed tokens of one sequence in one step; how many is decided from step to step"
    )
    draft_model: str | None = option(
        None,
        "model that guesses, with the same vocabulary: a folder, a .gguf file, a Hugging Face id, "
        "or self for the first layers of the model",
        essential=True,
    )
    draft_layers: int | None = option(None, "how many layers --draft-model self has")
    draft_verification: Verification = option(
        "coupled",
        "coupled: the tokens are those without drafts; rejection: only their distribution is, and "
        "more drafts of a model are accepted at temperatures above 0",
    )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    backend: Literal["auto", "cuda", "cpu"] = option("auto", "where the model runs", essential=True)
    device: int = option(0, "index of the device")
    tensor_parallel: int = option(
        1,
        "devices that share the model, from --device on: each has a part of every matrix",
        essential=True,
    )
    command_buffers: bool = option(
        True,
        "run without XLA's command buffers (CUDA graphs); they are for CUDA only",
        flag="--no-command-buffers",
    )
    compile_cache_dir: str | None = option(
        None,
        "folder that keeps compiled executables, which are run when they are read: nobody else may "
        "write there; default: $JAX_COMPILATION_CACHE_DIR, or ~/.cache/forge-jax/xla",
        flag="--compile-cache",
    )
    compile_cache: bool = option(
        True, "compile at every start, and keep nothing", flag="--no-compile-cache"
    )
    engine_timeout_s: float = option(
        120.0,
        "with --engine-process: seconds without a heartbeat, or without a completed step while "
        "there is work, after which the process is killed and replaced; at least 1, or 0: never",
        flag="--engine-timeout",
    )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
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
        if self.batch.prefill_chunk_size is not None and not self.batch.chunked_prefill:
            raise ConfigError(
                "--prefill-chunk-size cuts prompts, which --no-chunked-prefill forbids: "
                "leave one of them out"
            )
        _check_itl_target(self)
        block_size = self.cache.block_size
        if block_size is not None and block_size % 8:
            raise ConfigError(f"--block-size must be a multiple of 8, not {block_size}")
        if self.parallel.compile_cache_dir is not None and not self.parallel.compile_cache:
            raise ConfigError("--compile-cache and --no-compile-cache: leave one of them out")
        timeout_s = self.parallel.engine_timeout_s
        if timeout_s != 0.0 and not 1.0 <= timeout_s <= MAX_ENGINE_TIMEOUT_S:
            raise ConfigError(
                f"--engine-timeout must be from 1 to {MAX_ENGINE_TIMEOUT_S} seconds, or 0, which "
                f"turns it off, not {timeout_s}"
            )
        if not 0.0 < self.cache.memory_fraction <= 1.0:
            raise ConfigError(
                f"--memory-fraction must be in (0, 1], not {self.cache.memory_fraction}"
            )

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Makes a config from flat field names: `from_options(dtype="float32", max_num_seqs=8)`.

        Names of other engines are accepted, too: `tensor_parallel_size=2`.

        Raises:
          ConfigError: for a name that no section has, or a value that cannot be.
        """
        with python_names():
            options = our_options(options, _fields())
        sections: dict[str, Any] = {}
        for section in dataclasses.fields(cls):
            section_type = section.default_factory
            names = {f.name for f in dataclasses.fields(section_type)}  # type: ignore[arg-type]
            given = {name: options.pop(name) for name in sorted(names & options.keys())}
            sections[section.name] = section_type(**given)  # type: ignore[operator]
        assert not options, f"not of any section: {options}"
        return cls(**sections)


@contextmanager
def python_names() -> Generator[None]:
    """Has errors of the body name options as Python arguments: `--no-prefix-cache` is
    `prefix_cache=False`. The message with flags stays in `on_command_line`.
    """
    try:
        yield
    except ForgeError as error:
        if error.on_command_line is None and error.args:
            error.on_command_line = str(error)
            error.args = (in_python(error.on_command_line), *error.args[1:])
        raise


def in_python(message: str) -> str:
    """The message with options of `EngineConfig` as Python arguments instead of flags."""
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
    """Every field of the engine's sections, by name."""
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
    """What is not its default, in the words of the command line; nothing that is secret."""
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
                "--speculation draft needs a --draft-model: a folder, a Hugging Face id, or self"
            )
        if (model == SELF) != (layers is not None):
            raise ConfigError(
                "--draft-model self needs --draft-layers"
                if model == SELF
                else "--draft-layers is for --draft-model self only: leave it out"
            )
        return
    for flag, value in (("--draft-model", model), ("--draft-layers", layers)):
        if value is not None:
            raise ConfigError(f"{flag} is for --speculation draft only")


def _check_verification(config: EngineConfig) -> None:
    if config.speculation.draft_verification == "coupled":
        return
    if config.speculation.speculation == "off":
        raise ConfigError(
            "--draft-verification rejection is for drafts, and there are none: choose a "
            "--speculation, or leave it out"
        )
    if config.model.deterministic:
        raise ConfigError(
            "--draft-verification rejection gives other tokens than there are without drafts, and "
            "--deterministic promises the same: use --draft-verification coupled, or leave "
            "--deterministic out"
        )


def _check_itl_target(config: EngineConfig) -> None:
    target_ms = config.batch.itl_target_ms
    if target_ms is None or target_ms == 0:
        return
    if not 1 <= target_ms <= MAX_ITL_TARGET_MS:
        raise ConfigError(
            f"--itl-target-ms must be from 1 to {MAX_ITL_TARGET_MS} milliseconds, or 0, which "
            f"turns it off, not {target_ms}"
        )
    if config.model.deterministic:
        raise ConfigError(
            "--itl-target-ms chooses the size of steps, and with --deterministic there is one "
            "size: leave one of them out"
        )
    if not config.batch.chunked_prefill:
        raise ConfigError(
            "--itl-target-ms cuts prompts, which --no-chunked-prefill forbids: leave one of them "
            "out"
        )


def _check_lora(model: ModelConfig) -> None:
    if isinstance(model.lora, str):
        raise ConfigError("lora must be a tuple of strings")
    names = [split_lora(option)[0] for option in model.lora]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--lora {name}: two adapters cannot have one name")
    places = model.max_loras
    if places is not None and not len(names) <= places <= MAX_LORAS:
        raise ConfigError(
            f"--max-loras must be at least the number of --lora ({len(names)}) and at most "
            f"{MAX_LORAS}, not {places}"
        )
    if len(names) > MAX_LORAS:
        raise ConfigError(f"--lora: at most {MAX_LORAS} adapters, not {len(names)}")
    if not 1 <= model.max_lora_rank <= MAX_LORA_RANK:
        raise ConfigError(
            f"--max-lora-rank must be from 1 to {MAX_LORA_RANK}, not {model.max_lora_rank}"
        )


def split_lora(option: str) -> tuple[str, str]:
    """NAME=FOLDER -> (name, folder). Raises ConfigError if it is not of this form."""
    name, _, folder = option.partition("=")
    if not LORA_NAME.fullmatch(name) or not folder:
        raise ConfigError(
            f"--lora must be NAME=FOLDER, the name of at most 128 letters, digits and any of "
            f"._:/@+-, not {option!r}"
        )
    return name, folder


def _check_types(section: Any) -> None:
    """Choices, numbers and switches; the command line has checked its own, Python has not."""
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
