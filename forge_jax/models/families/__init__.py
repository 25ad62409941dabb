"""The families of models: how each reads its config, and which tensors make up its weights.

A family that differs only in known parts is one small file and one line here.
"""

from forge_jax.models.families import (
    ernie4_5,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    glm4,
    gpt2,
    gpt_oss,
    granite,
    granitemoe,
    hyperclovax,
    internlm3,
    iquestcoder,
    llama,
    minicpm,
    mistral,
    mixtral,
    multimodal,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
)
from forge_jax.models.families.architecture import Architecture

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": llama.ARCHITECTURE,
    "MistralForCausalLM": mistral.ARCHITECTURE,
    "MixtralForCausalLM": mixtral.ARCHITECTURE,
    "Qwen2ForCausalLM": qwen2.ARCHITECTURE,
    "Qwen3ForCausalLM": qwen3.ARCHITECTURE,
    "Qwen3MoeForCausalLM": qwen3_moe.ARCHITECTURE,
    "Gemma2ForCausalLM": gemma2.ARCHITECTURE,
    "Gemma3ForCausalLM": gemma3.ARCHITECTURE,
    "Phi3ForCausalLM": phi3.ARCHITECTURE,
    "Olmo2ForCausalLM": olmo2.ARCHITECTURE,
    "GraniteForCausalLM": granite.ARCHITECTURE,
    "SmolLM3ForCausalLM": smollm3.ARCHITECTURE,
    "GemmaForCausalLM": gemma.ARCHITECTURE,
    "Exaone4ForCausalLM": exaone4.ARCHITECTURE,
    "SeedOssForCausalLM": seed_oss.ARCHITECTURE,
    "OlmoeForCausalLM": olmoe.ARCHITECTURE,
    "GraniteMoeForCausalLM": granitemoe.ARCHITECTURE,
    "HyperCLOVAXForCausalLM": hyperclovax.ARCHITECTURE,
    "MiniCPMForCausalLM": minicpm.ARCHITECTURE,
    "InternLM3ForCausalLM": internlm3.ARCHITECTURE,
    "IQuestCoderForCausalLM": iquestcoder.ARCHITECTURE,
    "GlmForCausalLM": glm4.GLM,
    "Glm4ForCausalLM": glm4.GLM4,
    "Ernie4_5ForCausalLM": ernie4_5.ARCHITECTURE,
    "Olmo3ForCausalLM": olmo3.ARCHITECTURE,
    **multimodal.ARCHITECTURES,
    "GPT2LMHeadModel": gpt2.ARCHITECTURE,
    "GptOssForCausalLM": gpt_oss.ARCHITECTURE,
}

__all__ = ["ARCHITECTURES", "Architecture"]
