"""Writes a folder in Hugging Face format as GGUF, by the conventions of llama.cpp's converter."""

import json
import math
from pathlib import Path

import gguf
import numpy as np

from forge_jax.checkpoint.safetensors import read_header

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "llama",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "OlmoeForCausalLM": "olmoe",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "GemmaForCausalLM": "gemma",
    "GPTNeoXForCausalLM": "gptneox",
    "PhiForCausalLM": "phi2",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
    "CohereForCausalLM": "command-r",
    "Cohere2ForCausalLM": "cohere2",
    "GraniteForCausalLM": "granite",
    "MiniCPMForCausalLM": "minicpm",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "Exaone4ForCausalLM": "exaone4",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "GlmForCausalLM": "chatglm",
    "Glm4ForCausalLM": "glm4",
    "Ministral3ForCausalLM": "mistral3",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Glm4MoeForCausalLM": "glm4moe",
    "Ernie4_5_MoeForCausalLM": "ernie4_5-moe",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeHybridForCausalLM": "granitehybrid",
    "GPT2LMHeadModel": "gpt2",
    "GptOssForCausalLM": "gpt-oss",
    "Llama4ForCausalLM": "llama4",
    "FalconForCausalLM": "falcon",
    "Qwen2VLForConditionalGeneration": "qwen2vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2vl",
    "Qwen3VLForConditionalGeneration": "qwen3vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3vlmoe",
    "Gemma4ForCausalLM": "gemma4",
    "Qwen3NextForCausalLM": "qwen3next",
    "Qwen3_5ForConditionalGeneration": "qwen35",
    "Qwen3_5MoeForConditionalGeneration": "qwen35moe",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
}
PAIRED_ROWS = (
    *("llama", "mistral3", "granite", "granitemoe", "granitehybrid", "minicpm", "smollm3"),
)
WINDOWS = {
    "gemma2",
    "gemma3",
    "phi3",
    "llama",
    "cohere2",
    "exaone4",
    "olmo2",
    "gpt-oss",
}  # written to files
Q = gguf.GGMLQuantizationType
MODEL_ARCHES = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}


def interleaved(rows, num_heads):
    """Reorder rows from halves to neighbors, like LlamaModel.permute."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def llama3_factors(rope, theta, head_dim):
    """Return the factors of LlamaModel.generate_extra_tensors."""
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(rope["factor"])
        else:
            smooth = rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]
            smooth /= rope["high_freq_factor"] - rope["low_freq_factor"]
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def ggml_mxfp4(blocks, scales):
    """Return OpenAI's MXFP4, u8[E, N, G, 16] and u8[E, N, G], in ggml's blocks, u8[E, N, 17 G]."""
    values = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    packed = values[..., :16] | values[..., 16:] << 4
    found = np.concatenate([scales[..., None], packed], axis=-1)
    return found.reshape(*blocks.shape[:2], -1)


def of_gpt_oss(tensors):
    """Split gates from ups, like GptOssModel; MXFP4 becomes blocks in uint8."""
    for name, values in tensors.items():
        module, _, kind = name.rpartition("_proj")
        if ".experts." not in name:
            yield name.replace("self_attn.sinks", "self_attn.sinks.weight"), values
            continue
        if kind == "_scales":
            continue
        if kind == "_blocks":
            values = ggml_mxfp4(values, tensors[f"{module}_proj_scales"])
        elif not kind:
            values = values.swapaxes(1, 2)
        kind = "bias" if kind == "_bias" else "weight"
        if module.endswith("down"):
            yield f"{module}_proj.{kind}", np.ascontiguousarray(values)
            continue
        for start, part in enumerate(("gate", "up")):
            own = f"{module.removesuffix('gate_up')}{part}_proj.{kind}"
            yield own, np.ascontiguousarray(values[:, start::2])


def of_llama4(tensors):
    """Split gates from ups and transpose experts, like Llama4Model."""
    for name, values in tensors.items():
        if ".experts." not in name:
            yield name, values
            continue
        values = np.ascontiguousarray(values.swapaxes(1, 2))
        if name.endswith("down_proj"):
            yield f"{name}.weight", values
            continue
        for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
            yield f"{name.removesuffix('gate_up_proj')}{part}_proj.weight", half


def merged(tensors):
    """Merge the experts of a layer into one tensor, like the converters of Mixtral and Qwen."""
    experts = {}
    for name, values in tensors.items():
        if name.endswith(".block_sparse_moe.input_linear.weight"):  # Granite's
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                yield (
                    name.replace("block_sparse_moe.input_linear", f"mlp.experts.{part}_proj"),
                    half,
                )
            continue
        if name.endswith(".experts.gate_up_proj"):  # saved by transformers 5
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                yield f"{name.removesuffix('gate_up_proj')}{part}_proj.weight", half
            continue
        if name.endswith(".experts.down_proj"):
            yield f"{name}.weight", values
            continue
        parts = name.split(".experts.")
        if len(parts) == 1:
            yield name, values
            continue
        number, rest = parts[1].split(".", 1)
        experts.setdefault(f"{parts[0]}.experts.{rest}", {})[int(number)] = values
    for name, matrices in experts.items():
        yield name, np.stack([matrices[number] for number in range(len(matrices))])


def add_glm4_moe(writer, config):
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_nextn_predict_layers(config["num_nextn_predict_layers"])
    unused = config["num_hidden_layers"]  # the number of a layer for multi-token prediction
    for name, width in (("nextn.eh_proj", 2 * config["hidden_size"]), ("attn_output", 7)):
        values = np.zeros((config["hidden_size"], width), np.float32)
        writer.add_tensor(f"blk.{unused}.{name}.weight", values)


def add_ernie_moe(writer, config):
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["moe_num_shared_experts"])
    shared = config["intermediate_size"] // config["num_key_value_heads"]  # as the converter does
    writer.add_expert_shared_feed_forward_length(shared)
    writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    writer.add_leading_dense_block_count(config["moe_layer_start_index"])


def add_gpt_oss(writer, config):
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def add_llama4(writer, config):
    writer.add_expert_feed_forward_length(config["intermediate_size_moe"])
    writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])


def add_deepseek2(writer, config):
    rope = config["rope_parameters"]
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["n_group"]:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    if config["architectures"] != ["DeepseekV2ForCausalLM"]:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    if rope.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def add_delta_net(writer, config):
    values = config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(values)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * values)
    if "num_experts" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def add_mamba(writer, config):
    """Add the metadata of GraniteHybridModel, which replaces the key/value heads."""
    linear = [kind == "linear_attention" for kind in config["layer_types"]]
    key = "granitehybrid.attention.head_count_kv"
    del writer.kv_data[0][key]
    writer.add_head_count_kv([0 if each else config["num_key_value_heads"] for each in linear])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])


def of_mamba(tensors, config):
    """Change tensors like Mamba2Model, and split shared MLPs like GraniteMoeModel."""
    groups = config["mamba_n_groups"]
    module = "mlp.shared_experts" if config["num_local_experts"] else "mlp"
    for name, values in tensors.items():
        if "shared_mlp.input_linear" in name:
            for part, half in zip(("gate", "up"), np.split(values, 2), strict=True):
                own = f"{module}.{part}_proj"
                yield name.replace("shared_mlp.input_linear", own), half
            continue
        if name.endswith("mamba.A_log"):
            values = -np.exp(values)
        if name.endswith(("mamba.A_log", "mamba.D")):
            values = values[:, None]
        elif name.endswith("mamba.norm.weight"):
            values = values.reshape(groups, -1)
        elif name.endswith("conv1d.weight"):
            values = values[:, 0]
        name = name.replace("shared_mlp.output_linear", f"{module}.down_proj")
        yield name.replace("dt_bias", "dt_proj.bias"), values


def tiled(values, config, width, axis=0):
    """Put the first value head of each key head before the second ones, like ggml's broadcast."""
    keys = config["linear_num_key_heads"]
    by_head = np.moveaxis(values, axis, 0)
    by_head = by_head.reshape(keys, -1, width, *by_head.shape[1:]).swapaxes(0, 1)
    shape = np.moveaxis(values, axis, 0).shape
    return np.ascontiguousarray(np.moveaxis(by_head.reshape(shape), 0, axis))


def tiled_part(name, values, config):
    """Reorder the value heads of a tensor of gated DeltaNet, like Qwen 3.5's converter."""
    width = config["linear_value_head_dim"]
    first = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    part = name.split(".linear_attn.")[1]
    if part.startswith(("in_proj_qkv", "conv1d")):
        return np.concatenate([values[:first], tiled(values[first:], config, width)])
    if part.startswith("out_proj"):
        return tiled(values, config, width, axis=1)
    if part.startswith("in_proj_z"):
        return tiled(values, config, width)
    return values if part.startswith("norm") else tiled(values, config, 1)


def of_text(tensors):
    """Return the tensors of a text model; those for images are in a separate file."""
    return {
        name.replace("language_model.", ""): values
        for name, values in tensors.items()
        if ".visual." not in name and not name.startswith("visual.")
    }


def of_delta_net(tensors, config, arch):
    """Change tensors like the converters of Qwen3-Next and Qwen 3.5."""
    keys, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    for name, values in tensors.items():
        if name.endswith("in_proj_qkvz.weight"):
            by_head = values.reshape(keys, -1, values.shape[-1])
            group = (by_head.shape[1] - 2 * key_dim) // 2
            parts = np.split(by_head, np.cumsum([key_dim, key_dim, group]), axis=1)
            flat = [part.reshape(-1, values.shape[-1]) for part in parts]
            yield name.replace("qkvz", "qkv"), np.concatenate(flat[:3])
            yield name.replace("qkvz", "z"), flat[3]
            continue
        if name.endswith("conv1d.weight"):
            values = values[:, 0]
        if arch != "qwen3next" and ".linear_attn." in name:
            values = tiled_part(name, values, config)
        if name.endswith("A_log"):
            values = -np.exp(values)
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            values = values + 1
        yield name.replace("dt_bias", "dt_proj.bias"), values


def add_latent_sizes(writer, config, *, split):
    """Add the sizes of heads; files with split matrices also have those of latents."""
    key = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    rank = config["kv_lora_rank"]
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    if not split:
        writer.add_head_count_kv(config["num_attention_heads"])
        writer.add_key_length(key)
        writer.add_value_length(config["v_head_dim"])
        return
    writer.add_head_count_kv(1)
    writer.add_key_length(rank + config["qk_rope_head_dim"])
    writer.add_value_length(rank)
    writer.add_key_length_mla(key)
    writer.add_value_length_mla(config["v_head_dim"])


def split_latent(tensors, config):
    """Split the matrix for keys and values and transpose the keys' part, like DeepseekV2Model."""
    heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
    for name, values in tensors.items():
        if not name.endswith("kv_b_proj.weight"):
            yield name, values
            continue
        by_head = values.reshape(heads, -1, values.shape[-1])
        keys = np.ascontiguousarray(by_head[:, :plain].swapaxes(1, 2))
        yield name.replace("kv_b_proj", "k_b_proj"), keys
        yield name.replace("kv_b_proj", "v_b_proj"), np.ascontiguousarray(by_head[:, plain:])


# The metadata of routers with additional options, and what depends on them.
ROUTERS = {
    "glm4moe": add_glm4_moe,
    "ernie4_5-moe": add_ernie_moe,
    "gpt-oss": add_gpt_oss,
    "llama4": add_llama4,
    "deepseek2": add_deepseek2,
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), add_delta_net),
    "granitehybrid": add_mamba,
}


def add_falcon(writer, config):
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_tensor_data_layout("jploski")
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(4 * config["hidden_size"])  # as the converter does
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_kv_heads"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def of_falcon(tensors, config):
    """Put queries before keys and values, like FalconModel."""
    kv_heads = config["num_kv_heads"]
    queries = config["num_attention_heads"] // kv_heads
    for name, values in tensors.items():
        if "query_key_value" in name:
            groups = values.reshape(kv_heads, queries + 2, -1, values.shape[-1])
            parts = groups[:, :-2], groups[:, [-2]], groups[:, [-1]]
            values = np.concatenate([part.reshape(-1, values.shape[-1]) for part in parts])
        if name != "lm_head.weight":  # tied
            yield name, values


def add_gpt2(writer, config):
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_block_count(config["n_layer"])
    writer.add_feed_forward_length(4 * config["n_embd"])  # as the converter does
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def add_gemma4(writer, config):
    """Add the metadata of Gemma4Model; layers of the two types differ."""
    kinds = config["layer_types"]
    full = config["per_layer_config"][str(kinds.index("full_attention"))]
    ropes = config["rope_parameters"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    inner, shared = config["intermediate_size"], config["num_kv_shared_layers"]
    if config["use_double_wide_mlp"]:
        own = config["num_hidden_layers"] - shared
        writer.add_feed_forward_length([inner] * own + [2 * inner] * shared)
    else:
        writer.add_feed_forward_length(inner)
    writer.add_head_count(config["num_attention_heads"])
    kv_heads = config["num_key_value_heads"]
    if "num_key_value_heads" in full:
        counts = {"sliding_attention": kv_heads, "full_attention": full["num_key_value_heads"]}
        writer.add_head_count_kv([counts[kind] for kind in kinds])
    else:
        writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for dim, suffix in ((full["head_dim"], ""), (config["head_dim"], "_swa")):
        for add in ("key_length", "value_length", "rope_dimension_count"):
            getattr(writer, f"add_{add}{suffix}")(dim)
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    if config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    pairs = full["head_dim"] // 2
    rotated = int(full["head_dim"] * ropes["full_attention"]["partial_rotary_factor"] / 2)
    factors = np.array([1.0] * rotated + [1e30] * (pairs - rotated), np.float32)
    writer.add_tensor("rope_freqs.weight", factors)


def of_gemma4(tensors):
    """Rename scales, like Gemma4Model."""
    scales = {"scale": "ffn_gate_inp.scale", "per_expert_scale": "ffn_down_exps.scale"}
    for name, values in tensors.items():
        layer, last = name.split(".")[2], name.split(".")[-1]
        if last in scales:
            yield f"blk.{layer}.{scales[last]}", values
            continue
        is_bare = last == "layer_scalar" or ".experts." in name
        yield f"{name}.weight" if is_bare else name, values


def add_usual(writer, arch, config):
    """Add the metadata that most architectures share."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    positions = config["max_position_embeddings"]
    ropes = config.get("rope_parameters") or {}
    rope = ropes.get("full_attention", ropes) or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or config["rope_theta"]

    writer.add_context_length(positions)
    writer.add_embedding_length(config["hidden_size"])
    # The files of GLM-4.5 have layers for multi-token prediction, those of DeepSeek do not.
    unused = config.get("num_nextn_predict_layers", 0) if arch == "glm4moe" else 0
    writer.add_block_count(config["num_hidden_layers"] + unused)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    if arch != "deepseek2":
        writer.add_head_count_kv(kv_heads)
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(config.get("layer_norm_eps") or config["norm_epsilon"])
    writer.add_rope_freq_base(theta)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if arch == "deepseek2":
        pass
    elif arch.startswith("gemma") or head_dim * heads != config["hidden_size"]:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if arch in ("gemma2", "gemma3"):
        if config["query_pre_attn_scalar"] != head_dim:
            writer.add_attention_scale(config["query_pre_attn_scalar"] ** -0.5)
        if config["attn_logit_softcapping"]:
            writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    elif arch != "deepseek2":
        share = rope.get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(head_dim * share))
    if arch in WINDOWS and config.get("sliding_window") is not None:
        writer.add_sliding_window(config["sliding_window"])
    if arch in ("exaone4", "olmo2") and config.get("sliding_window") is not None:
        windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_sliding_window_pattern(windowed)
    if arch in ("command-r", "cohere2"):
        writer.add_logit_scale(config["logit_scale"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if arch in ("granite", "granitemoe", "granitehybrid"):
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if arch == "minicpm":
        writer.add_embedding_scale(config["scale_emb"])
        writer.add_residual_scale(config["scale_depth"] / config["num_hidden_layers"] ** 0.5)
        writer.add_logit_scale(config["hidden_size"] / config["dim_model_base"])
    if arch in ("stablelm", "gptneox"):
        writer.add_parallel_residual(config["use_parallel_residual"])
    if arch == "phi3":
        original = config["original_max_position_embeddings"]
        writer.add_sliding_window(0)
        writer.add_rope_scaling_orig_ctx_len(original)
        if rope.get("rope_type") == "longrope":
            stretch = math.sqrt(1 + math.log(positions / original) / math.log(original))
            writer.add_rope_scaling_attn_factors(stretch)
            for name in ("long", "short"):
                factors = np.array(rope[f"{name}_factor"], np.float32)
                writer.add_tensor(f"rope_factors_{name}.weight", factors)
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if arch == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, theta, head_dim))
    counts = "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"
    for count in [config[name] for name in counts if config.get(name)][:1]:
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.get("num_experts_per_tok") or config["moe_k"])
    if arch in ("qwen3moe", "qwen2moe", "qwen3vlmoe"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if arch == "qwen2moe":
        shared = config["shared_expert_intermediate_size"]
        writer.add_expert_shared_feed_forward_length(shared)
    if arch in ROUTERS:
        ROUTERS[arch](writer, config)


def write_gguf(
    folder: Path, target: Path, kind=Q.F32, *, more=lambda writer: None, split=True
) -> Path:
    """Write a GGUF file.

    Matrices whose rows fit have the type `kind`, and `more` adds metadata. If `split` is false,
    matrices for keys and values are whole, as in older files with latent attention.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["architectures"][0]]
    config = config.get("text_config", {}) | config
    if arch == "llama4":  # renamed like Llama4Model's
        sizes = config["intermediate_size"], config["intermediate_size_mlp"]
        config |= dict(zip(("intermediate_size_moe", "intermediate_size"), sizes, strict=True))
    writer = gguf.GGUFWriter(target, arch)
    if arch == "gpt2":
        add_gpt2(writer, config)
    elif arch == "gemma4":
        add_gemma4(writer, config)
    elif arch == "falcon":
        if not config["new_decoder_architecture"]:
            config["num_kv_heads"] = 1
        add_falcon(writer, config)
    else:
        add_usual(writer, arch, config)
    if arch == "deepseek2":
        add_latent_sizes(writer, config, split=split)
    more(writer)

    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    layers = config.get("num_hidden_layers") or config["n_layer"]
    names = gguf.get_tensor_name_map(MODEL_ARCHES[arch], layers)
    tensors = read_header(folder / "model.safetensors")
    arrays = {name: np.array(stored.read()) for name, stored in tensors.items()}
    if "text_config" in config:
        arrays = of_text(arrays)
    if arch in ("qwen3next", "qwen35", "qwen35moe"):
        arrays = dict(of_delta_net(arrays, config, arch))
    if arch == "granitehybrid":
        arrays = dict(of_mamba(arrays, config))
    arrays = {k: v if v.dtype == np.uint8 else v.astype(np.float32) for k, v in arrays.items()}
    if arch == "deepseek2" and split:
        arrays = dict(split_latent(arrays, config))
    if arch == "falcon":
        arrays = dict(of_falcon(arrays, config))
    own = {"gpt-oss": of_gpt_oss, "gemma4": of_gemma4, "llama4": of_llama4}
    for name, values in own.get(arch, merged)(arrays):
        if arch == "gptneox" and "query_key_value" in name:  # stacked like GPTNeoXModel's
            by_head = values.reshape(heads, 3, -1, *values.shape[1:])
            values = by_head.swapaxes(0, 1).reshape(values.shape)
        if arch in PAIRED_ROWS and name.endswith(("q_proj.weight", "q_proj.bias")):
            values = interleaved(values, heads)
        if arch in PAIRED_ROWS and name.endswith(("k_proj.weight", "k_proj.bias")):
            values = interleaved(values, kv_heads)
        if arch in ("gemma", "gemma2", "gemma3") and name.endswith("norm.weight"):
            values = values + 1
        if name.endswith("shared_expert_gate.weight"):
            values = values[0]
        if arch == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            values = values.T.copy()
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if name.startswith("blk."):
            theirs = name
        if values.dtype == np.uint8:
            writer.add_tensor(theirs, values, raw_dtype=Q.MXFP4)
        elif values.ndim < 2 or values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            writer.add_tensor(theirs, values)
        else:
            writer.add_tensor(theirs, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
