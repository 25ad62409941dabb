"""Quantized checkpoints of every recent family compute the logits of their dequantized weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quant_writer as writer
from paged import PagedRun
from safetensors.numpy import load_file
from test_quantized_config import args, compressed

import forge_jax

GOLDENS = Path(__file__).parent.parent / "fixtures" / "goldens"
# By model: its form with 4 bits.
MODELS = {
    **{"ernie4_5": "gptq", "exaone4": "awq", "gemma": "int4", "gemma4": "gptq"},
    **{"gemma4_shared": "awq", "glm4": "gptq", "granitemoe": "int4", "internlm3": "awq"},
    "granitemoehybrid": "int4",
    **{"minicpm": "gptq", "olmo3": "int4", "olmoe": "gptq", "qwen2_moe": "awq"},
    **{"seed_oss": "gptq", "llama4": "int4"},
}
CASES = [(name, form) for name, four_bits in MODELS.items() for form in ("fp8", four_bits)]
GROUP = 8  # divides the inner size of every model's experts
RNG = np.random.default_rng


def _config(form: str, kept: list[str]) -> dict[str, Any]:
    """Return the section of `config.json`; `kept` are the modules that are not quantized."""
    if form == "fp8":
        return compressed("float-quantized", args(type="float"), ignore=kept)
    if form == "int4":
        weights = args(num_bits=4, strategy="group", group_size=GROUP)
        return compressed("pack-quantized", weights, ignore=kept)
    if form == "awq":
        return {
            **{"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
            "modules_to_not_convert": kept,
        }
    return {  # GPTQ quantizes all matrices of layers except routers
        **{"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False},
        "sym": True,
    }


def _quantize(form: str, w: np.ndarray):
    match form:
        case "fp8":
            return writer.fp8(w, rows=1, columns=999)
        case "int4":
            return writer.packed4(w, group=GROUP, rng=RNG(0))
        case "awq":
            return writer.awq(w, group=GROUP, rng=RNG(0))
    return writer.gptq(w, group=GROUP, rng=RNG(0))


def _separate(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with one for each expert and matrix, as in quantized checkpoints."""
    found = {}
    for name, values in tensors.items():
        part, _, matrix = name.rpartition(".")
        if not part.endswith(".experts"):
            found[name] = values
            continue
        if ".feed_forward." in part:  # Llama 4 stores [E, K_in, N_out]
            values = values.swapaxes(1, 2)
        for expert, each in enumerate(values):
            pieces = np.split(each, 2) if matrix == "gate_up_proj" else [each]
            names = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else ("down_proj",)
            for piece, own in zip(pieces, names, strict=True):
                found[f"{part}.{expert}.{own}.weight"] = np.ascontiguousarray(piece)
    return found


def _write(name: str, form: str, folder: Path) -> tuple[Path, Path, int]:
    """Write the quantized model and the one that it represents, and return their folders."""
    config = json.loads((GOLDENS / name / "config.json").read_text())
    plain = _separate(load_file(GOLDENS / name / "model.safetensors"))
    stored, exact, kept = {}, {}, []
    for tensor, w in plain.items():
        module = tensor.removesuffix(".weight")
        if module.endswith("_proj") and w.ndim == 2:
            parts, values = _quantize(form, w.astype(np.float64))
            stored |= {f"{module}.{part}": array for part, array in parts.items()}
            exact[tensor] = values.astype(np.float32)
        else:
            stored[tensor] = exact[tensor] = w
            if w.ndim > 1 and "embed_tokens" not in module:
                kept.append(module)
    quantized, decoded = folder / "quantized", folder / "decoded"
    for path, tensors, section in (
        (quantized, stored, {"quantization_config": _config(form, kept)}),
        (decoded, exact, {}),
    ):
        path.mkdir()
        writer.save(tensors, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps({**config, **section}))
    return quantized, decoded, len(stored) - len(exact)


@pytest.mark.parametrize(("name", "form"), CASES)
@pytest.mark.quick_cases(2)
@pytest.mark.ci_cases(16)
def test_quantized_family_computes_the_logits_of_its_decoded_weights(name, form, tmp_path):
    quantized, decoded, more = _write(name, form, tmp_path)
    assert more > 0
    ids = RNG(1).integers(3, 160, (2, 40)).tolist()
    found, want = (
        np.stack(PagedRun(forge_jax.load(str(path), progress=False), 2).step(ids))
        for path in (quantized, decoded)
    )
    assert np.abs(want).max() > 0.5
    np.testing.assert_allclose(found, want, atol=2e-4, rtol=0)
