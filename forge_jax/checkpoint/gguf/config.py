"""The contents of `config.json` and `generation_config.json`, from the metadata of a GGUF file.

The keys are those of llama.cpp's converter (`gguf-py/gguf/constants.py`). The converter omits
values that llama.cpp hard-codes. They are added here: which of Gemma's layers have a sliding
window, and Gemma's attention scales.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from forge_jax.checkpoint.gguf import delta_net, gemma4, latent, mamba
from forge_jax.checkpoint.gguf.experts import MOE, expert_fields
from forge_jax.checkpoint.gguf.families import has_layer_norm, own_fields
from forge_jax.checkpoint.gguf.metadata import Metadata
from forge_jax.checkpoint.gguf.names import MAX_LAYERS, ROPE_FREQS, ROPE_LONG, ROPE_SHORT
from forge_jax.checkpoint.gguf.reader import GGUFFile
from forge_jax.checkpoint.gguf.tensors import weights_of
from forge_jax.checkpoint.gguf.weights import GGUFWeight
from forge_jax.errors import CheckpointError
from forge_jax.host.files import short_repr
from forge_jax.weights.ggml_types import KEY, of_all_experts

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "phi2": "PhiForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "command-r": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "chatglm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "mistral3": "Ministral3ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "gptneox": "GPTNeoXForCausalLM",
    "minicpm": "MiniCPMForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "deepseek2": "DeepseekV2ForCausalLM",  # or V3, by the router
    "gemma4": "Gemma4ForCausalLM",
    # Text models of multimodal checkpoints. Their other models are in separate files.
    "qwen2vl": "Qwen2ForCausalLM",
    "qwen3vl": "Qwen3ForCausalLM",
    "qwen3vlmoe": "Qwen3MoeForCausalLM",
    "qwen3next": "Qwen3NextForCausalLM",
    "qwen35": "Qwen3_5ForConditionalGeneration",
    "qwen35moe": "Qwen3_5MoeForConditionalGeneration",
    "gpt2": "GPT2LMHeadModel",
    "gpt-oss": "GptOssForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "falcon": "FalconForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    mamba.ARCH: "GraniteMoeHybridForCausalLM",
    "ernie4_5-moe": "Ernie4_5_MoeForCausalLM",
}
_LOG = "rope.scaling.yarn_log_multiplier"
# Every Nth layer has full attention.
_PERIODS = {"gemma2": 2, "gemma3": 6, "cohere2": 4, "exaone4": 4, "olmo2": 4} | {
    "gpt-oss": 2,
    "gemma4": 6,
}
_PARTIAL_ROPE = (
    *("phi2", "phi3", "stablelm", "chatglm", "glm4", "glm4moe", "gptneox"),
    *delta_net.ARCHES,
)
_SOME_MOE = ("llama", gemma4.ARCH, mamba.ARCH)  # with experts in some models
# Their text model is a section of `config.json`, without these fields.
_TEXT_SIDES = ("qwen35", "qwen35moe")
_WHOLE = ("architectures", "dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id", KEY)
_EXCEED_FLOAT16 = ("gemma", "gpt-oss")  # their activations exceed its range
# The model with this many layers has a different attention scale.
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}
# llama.cpp treats each of these as an EOS token, whatever the file declares (`llama-vocab.cpp`).
_END_TEXTS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"}
    | {"<|end_of_text|>", *("<|return|>", "<|call|>"), *("<turn|>", "<|tool_response>")}
)
# With both, `<|end|>` ends only a message of the Harmony format.
_HARMONY = frozenset({"<|return|>", "<|call|>"})
_CONTROL, _USER_DEFINED = 3, 4  # token types


def config_of(gguf: GGUFFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of `config.json` and of `generation_config.json`.

    Raises:
      UnsupportedModelError: an architecture or option is not implemented; the message names it.
      CheckpointError: a key is missing or wrong.
    """
    metadata = gguf.view
    arch = metadata.string("general.architecture")
    if arch not in ARCHITECTURES:
        raise metadata.unsupported(
            f"the architecture {short_repr(arch)} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}. Use the model's safetensors "
            "checkpoint, if that is supported"
        )
    if metadata.integer(f"{arch}.expert_count", 0) and arch not in (*_SOME_MOE, *MOE):
        raise metadata.unsupported(f"{arch}.expert_count: {arch} with experts is not supported")
    config = _Reader(gguf, metadata, arch).config()
    if arch in _TEXT_SIDES:
        text = {name: value for name, value in config.items() if name not in _WHOLE}
        config = {name: config[name] for name in _WHOLE} | {"text_config": text}
    return config, {"eos_token_id": _end_ids(metadata)}


class _Reader:
    def __init__(self, gguf: GGUFFile, metadata: Metadata, arch: str):
        self.gguf, self.metadata, self.arch = gguf, metadata, arch
        unused = self.integer("nextn_predict_layers", 0)  # layers for multi-token prediction
        self.layers = self.integer("block_count", low=1 + unused, high=MAX_LAYERS) - unused
        last = f"blk.{self.layers - 1}.attn_output.weight"
        # Check this before a model with this many layers is created.
        if last not in gguf.tensors and not delta_net.is_layer(gguf, self.layers - 1):
            raise metadata.error(
                f"{arch}.block_count", f"the number of layers (the tensor {last} is missing)"
            )
        self.hidden_size = self.integer("embedding_length", low=1)
        self.heads = self.integer("attention.head_count", low=1)
        self.positions = self.integer("context_length", low=1)
        self.head_dim = self.read_head_dim()

    def integer(self, name: str, default: int | None = None, **limits: int) -> int:
        return self.metadata.integer(f"{self.arch}.{name}", default, **limits)

    def number(self, name: str, default: float | None = None) -> float:
        return self.metadata.number(f"{self.arch}.{name}", default)

    def boolean(self, name: str, default: bool) -> bool:
        return self.metadata.boolean(f"{self.arch}.{name}", default)

    def by_layer(self, name: str) -> list[int]:
        return self.metadata.integers(f"{self.arch}.{name}", self.layers)

    def has(self, name: str) -> bool:
        return self.metadata.has(f"{self.arch}.{name}")

    def read_head_dim(self) -> int:
        head_dim = self.integer("attention.key_length", self.hidden_size // self.heads, low=1)
        self.rotated = self.integer("rope.dimension_count", head_dim)
        if self.arch == latent.ARCH:  # the other sizes are read by `own_fields`
            return self.rotated
        is_partial = self.arch in _PARTIAL_ROPE and 0 < self.rotated < head_dim
        rotation = () if is_partial else ("rope.dimension_count",)
        for name in ("attention.value_length", *rotation):
            if self.integer(name, head_dim) != head_dim:
                raise self.metadata.unsupported(
                    f"{self.arch}.{name} must be the head dim {head_dim}, got "
                    f"{self.integer(name)}, which is not supported"
                )
        return head_dim

    def config(self) -> dict[str, Any]:
        embedding = self.gguf.tensors.get("token_embd.weight")
        if embedding is None:
            raise CheckpointError(f"{self.gguf.file}: the tensor token_embd.weight is missing")
        return {
            "architectures": [ARCHITECTURES[self.arch]],
            "vocab_size": embedding.shape[0],
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.positions,
            **self.norms(),
            "rope_theta": self.number("rope.freq_base", 10000.0),
            **self.partial_rotation(),
            "tie_word_embeddings": "output.weight" not in self.gguf.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self.gguf.tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in self.gguf.tensors,
            "dtype": self.dtype(),
            KEY: self.types(),
            "bos_token_id": _token_id(self.metadata, "bos"),
            "eos_token_id": _token_id(self.metadata, "eos"),
            **self.windows(),
            **(gemma4.fields_of(self) if self.arch == gemma4.ARCH else self.usual()),
        }

    def usual(self) -> dict[str, Any]:
        """Return the fields of architectures whose layers have the same sizes."""
        # Files with experts in all layers may not have the size of an MLP.
        inner = self.integer("expert_feed_forward_length", 1) if self.arch == "qwen35moe" else None
        return {
            "intermediate_size": self.integer("feed_forward_length", inner, low=1),
            "num_key_value_heads": self.kv_heads(),
            "rope_scaling": self.rope_scaling(),
            **self.original_positions(),
            **self.gemma(),
            **expert_fields(self.arch, self),
            **own_fields(self.arch, self),
        }

    def kv_heads(self) -> int:
        if self.arch == mamba.ARCH:
            return mamba.kv_heads(self.metadata, self.layers)[0]
        return self.integer("attention.head_count_kv", self.heads, low=1)

    def norms(self) -> dict[str, float]:
        if has_layer_norm(self.arch):
            return {}
        return {"rms_norm_eps": self.number("attention.layer_norm_rms_epsilon")}

    def types(self) -> dict[str, str]:
        """Return the GGML type of each matrix in blocks; a layer's experts share one name.

        Matrices that turn latents into keys and values are decoded, and so is the embedding of
        the layers' own inputs.
        """
        return {
            of_all_experts(name): weight.stored.format.name
            for name, weight in weights_of(self.gguf).items()
            if isinstance(weight, GGUFWeight)
            and weight.stored.format.blocks is not None
            and len(weight.shape) == 2
            and not name.endswith((latent.BOTH, "embed_tokens_per_layer.weight"))
        }

    def dtype(self) -> str:
        """Return the type of the matrices if they are all F32 or F16, else bfloat16."""
        matrices = [t for t in self.gguf.tensors.values() if len(t.shape) > 1]
        formats = {tensor.format.name for tensor in matrices}
        if formats == {"F32"}:
            return "float32"
        half = formats <= {"F16", "F32"} and not self.arch.startswith(_EXCEED_FLOAT16)
        return "float16" if half else "bfloat16"

    # ---- positions -------------------------------------------------------------------------------

    def rope_scaling(self) -> dict[str, Any] | None:
        tensors = self.gguf.tensors
        if self.has_long_factors():
            original = self.original_positions()["original_max_position_embeddings"]
            factor = self.positions / original
            return {
                "rope_type": "longrope",
                "long_factor": self.factors(ROPE_LONG),
                "short_factor": self.factors(ROPE_SHORT),
                "attention_factor": self.number(
                    "rope.scaling.attn_factor",
                    math.sqrt(1 + math.log(factor) / math.log(max(original, 2)))
                    if factor > 1
                    else 1.0,
                ),
            }
        if ROPE_FREQS in tensors:  # Llama 3.1's RoPE scaling, as one factor per pair
            factors = self.factors(ROPE_FREQS)
            return {
                **{"rope_type": "longrope", "long_factor": factors, "short_factor": factors},
                **{"factor": 1.0, "attention_factor": 1.0},
            }
        kind = self.metadata.string(f"{self.arch}.rope.scaling.type", "none")
        factor = self.number("rope.scaling.factor", self.number("rope.scale_linear", 1.0))
        if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
            return None
        if kind == "yarn":
            return self.yarn(factor)
        return {"rope_type": kind, "factor": factor}

    def yarn(self, factor: float) -> dict[str, Any]:
        """Return YaRN. llama.cpp's attention factor is transformers' default."""
        unusual = {"yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_log_multiplier": 0.0}
        mscale: dict[str, float] = {}
        if self.arch == latent.ARCH:
            tenth = self.number(_LOG, unusual.popitem()[1])
            if tenth:  # the converter multiplies by 0.1
                mscale = dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * tenth, 6))
        elif self.arch == "mistral3":
            mscale = {"mscale": 1.0, "mscale_all_dim": self.number(_LOG, unusual.popitem()[1])}
        for name, usual in {**unusual, "attn_factor": 1.0}.items():
            value = self.number(f"rope.scaling.{name}", usual)
            if value != usual:
                raise self.metadata.unsupported(
                    f"{self.arch}.rope.scaling.{name} is {value:g}, which is not supported with "
                    f"YaRN; supported: {usual:g}"
                )
        original = "rope.scaling.original_context_length"
        return {
            **{"rope_type": "yarn", "factor": factor},
            "original_max_position_embeddings": self.integer(original, self.positions, low=2),
            "beta_fast": self.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": self.number("rope.scaling.yarn_beta_slow", 1.0),
            **mscale,
        }

    def partial_rotation(self) -> dict[str, float]:
        if self.arch not in _PARTIAL_ROPE:
            return {}
        if self.rotated == self.head_dim:
            return {"partial_rotary_factor": 1.0}
        # `int(head_dim * share)` must not be one less because of rounding.
        return {"partial_rotary_factor": math.nextafter(self.rotated / self.head_dim, 1.0)}

    def has_long_factors(self) -> bool:
        return ROPE_LONG in self.gguf.tensors or ROPE_SHORT in self.gguf.tensors

    def original_positions(self) -> dict[str, int]:
        """Return the field next to `rope_scaling`, where transformers looks for it first."""
        if not self.has_long_factors():
            return {}
        name = "rope.scaling.original_context_length"
        return {"original_max_position_embeddings": self.integer(name, self.positions, low=1)}

    def factors(self, name: str) -> list[float]:
        tensor = self.gguf.tensors.get(name)
        want = (self.rotated // 2,)
        if tensor is None or tensor.shape != want:
            has = "is missing" if tensor is None else f"has shape {tensor.shape}, not {want}"
            raise CheckpointError(f"{self.gguf.file}: the tensor {name} {has}")
        return tensor.read().tolist()

    def windows(self) -> dict[str, Any]:
        default = 4096 if self.arch == "gemma2" else 0
        window = self.integer("attention.sliding_window", default)
        if self.arch == "olmo2" and not window:
            return {}
        if self.arch in _PERIODS:
            windowed = self.windowed_layers() if window else [False] * self.layers
            kinds = ["sliding_attention" if w else "full_attention" for w in windowed]
            none = None if self.arch == "exaone4" else 4096  # unused, but may not be null
            found = {"sliding_window": window or none, "layer_types": kinds}
            return found | (self.olmo3() if self.arch == "olmo2" else {})
        if not window or window >= self.positions:
            return {}
        if self.arch == "llama" and self.integer("expert_count", 0):
            return {"sliding_window": window}
        if self.arch == "llama" and "blk.0.attn_q.bias" not in self.gguf.tensors:
            return {"architectures": ["MistralForCausalLM"], "sliding_window": window}
        if self.arch == "phi3":
            return {"sliding_window": window}
        raise self.metadata.unsupported(
            f"{self.arch}.attention.sliding_window is {window}, but {self.arch} with a sliding "
            "window is not supported"
        )

    def olmo3(self) -> dict[str, Any]:
        """Return the fields of OLMo 3. Its layers with a window do not have YaRN."""
        theta = {"rope_theta": self.number("rope.freq_base", 10000.0)}
        default = {"rope_type": "default", **theta}
        full = {**default, **(self.rope_scaling() or {})}
        return {
            "architectures": ["Olmo3ForCausalLM"],
            "rope_scaling": None,
            "rope_parameters": {"full_attention": full, "sliding_attention": default},
        }

    def windowed_layers(self) -> list[bool]:
        key = f"{self.arch}.attention.sliding_window_pattern"
        pattern = self.metadata.values.get(key)
        if isinstance(pattern, np.ndarray) and pattern.dtype == np.bool_:
            if len(pattern) != self.layers:
                raise self.metadata.error(key, f"an array of {self.layers} booleans")
            return pattern.tolist()
        period = self.metadata.integer(key, _PERIODS[self.arch], low=1)
        return [layer % period < period - 1 for layer in range(self.layers)]

    # ---- Gemma -----------------------------------------------------------------------------------

    def gemma(self) -> dict[str, Any]:
        if self.arch not in _GEMMA_27B:
            return {}
        scaled_by = float(self.head_dim)
        if self.layers == _GEMMA_27B[self.arch]:
            scaled_by = self.hidden_size / self.heads
        if self.has("attention.scale"):
            scale = self.number("attention.scale")
            if not scale > 0:
                raise self.metadata.error(f"{self.arch}.attention.scale", "above 0")
            scaled_by = scale**-2
        caps = {
            name: self.number(name)
            for name in ("attn_logit_softcapping", "final_logit_softcapping")
            if self.has(name)
        }
        return {
            "query_pre_attn_scalar": scaled_by,
            "rope_local_base_freq": self.number("rope.freq_base_swa", 10000.0),
            **caps,
        }


def _token_id(metadata: Metadata, name: str) -> int | None:
    return metadata.token_id(f"tokenizer.ggml.{name}_token_id", 2**31)


def _end_ids(metadata: Metadata) -> list[int]:
    """Return all EOS token ids, from the file and from llama.cpp's own list."""
    ids = [_token_id(metadata, name) for name in ("eos", "eot", "eom")]
    tokens = metadata.values.get("tokenizer.ggml.tokens")
    types = metadata.values.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and types is not None:
        types = metadata.numbers("tokenizer.ggml.token_type", len(tokens))
        special = np.flatnonzero((types == _CONTROL) | (types == _USER_DEFINED)).tolist()
        found = {tokens[i]: i for i in special if tokens[i] in _END_TEXTS}
        if found.keys() >= _HARMONY:
            found.pop("<|end|>", None)
        ids += found.values()
    return list(dict.fromkeys(i for i in ids if i is not None))
