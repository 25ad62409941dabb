"""Compares mixtures whose experts several devices divide (`--expert-parallel`) with one device.

`test_expert_parallel.py` runs it, like `child.py`.
"""

import json
import os
import re
import shutil
import sys
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import jax
import numpy as np
from child import GOLDENS, SHARDS, collectives, compare_each, run, run_on_one, spec_of, with_layers
from forms_child import as_served, bits, compared, write
from gguf_zoo import LAYERS, write_zoo
from safetensors.numpy import load_file, save_file

from forge_jax import LLM, SamplingParams
from forge_jax.checkpoint.load import check_weights
from forge_jax.config import EngineConfig
from forge_jax.errors import ForgeError
from forge_jax.models import build_model
from forge_jax.testing import core_of, drafts_always_pay, failing_steps
from forge_jax.tools.convert import convert
from forge_jax.weights.formats import WeightFormats
from forge_jax.weights.stored import StoredTensor
from forge_kernels import cpu

COUNTS = (2, SHARDS)
FORMS = (  # one of each kind, and those that tensor parallelism cannot split or must combine
    *("fp8_matrix_dynamic", "fp8_matrix_static", "fp8_blocks", "int8_rows", "w4a16"),
    *("w4a16_zeros", "gptq_ordered", "gptq_v2_rows"),
)
WEIGHTS = "model.safetensors"
compare_experts = partial(compare_each, expert_parallel=True)


def new_folder():
    return Path(tempfile.mkdtemp())


def zoo():
    return write_zoo(new_folder() / "zoo.gguf", LAYERS[:1], experts=4)


def changed(golden, change):
    """Return a copy of a golden's folder with changed tensors."""
    folder = new_folder()
    shutil.copy(GOLDENS / golden / "config.json", folder)
    save_file(change(load_file(GOLDENS / golden / "model.safetensors")), folder / WEIGHTS)
    return folder


def fused(tensors):
    """Return the tensors with the matrices of all experts of a layer in one."""
    found, names = dict(tensors), [n for n in tensors if ".experts.0.gate_proj" in n]
    for name in names:
        moe = name.partition(".experts.")[0]
        each = [
            [found.pop(f"{moe}.experts.{e}.{part}_proj.weight") for part in ("gate", "up", "down")]
            for e in range(12)
        ]
        found[f"{moe}.experts.gate_up_proj"] = np.stack([np.concatenate(e[:2]) for e in each])
        found[f"{moe}.experts.down_proj"] = np.stack([down for *_, down in each])
    return found


def first_experts_only(tensors):
    """Return the tensors with a router that chooses experts 0 and 1; the others are not numbers."""
    found = {}
    for name, tensor in tensors.items():
        if re.search(r"block_sparse_moe\.gate\.", name):
            tensor = np.zeros_like(tensor)  # ties go to the lower number
        elif re.search(r"\.experts\.[23]\.", name):
            tensor = np.full_like(tensor, np.nan)
        found[name] = tensor
    return found


def families():
    """Compare the first layers of models; Qwen's second layer has no experts."""
    sources = {
        "mixtral": ("mixtral", 1, COUNTS),
        "qwen3_moe": ("qwen3_moe", 2, (2,)),
        "glm4_moe": ("glm4_moe", 2, (2,)),
        "gpt_oss_mxfp4": ("gpt_oss_mxfp4", 1, (SHARDS,)),  # biases, of experts and of their outputs
        "qwen3_moe, fused": (changed("qwen3_moe", fused), 1, (SHARDS,)),
        "blocks": (zoo(), 1, (SHARDS,)),
    }
    found = {}
    for name, (source, layers, counts) in sources.items():
        each = compare_experts(source, counts, layers=layers, dtype="float32")
        found |= {f"{name} on {n}": one for n, one in zip(counts, each, strict=True)}
    return found


def uneven():
    """Compare a model of which one device computes every row of the experts."""
    folder = changed("mixtral", first_experts_only)
    return compare_experts(folder, COUNTS)


def forms_on_two():
    return forms(2)


def forms(count=SHARDS):
    sources = {name: (write(name, experts=True), WeightFormats()) for name in FORMS}
    for values in ("int8", "fp8", "int4"):
        sources[f"rounded {values}"] = GOLDENS / "mixtral", WeightFormats(rounded=values)
    return compared(sources, (count,), expert_parallel=True)[count]


def packed():
    """Compare experts for the C++ kernels in bfloat16, and return their formats on a device."""
    if not cpu.available():
        return None
    cpu.load()
    sources = {
        "bf16": (GOLDENS / "qwen3_moe", WeightFormats(layers="bf16")),
        "int8": (GOLDENS / "qwen3_moe", WeightFormats(layers="int8")),
        "int4": (GOLDENS / "mixtral", WeightFormats(layers="int4")),
        "int8_rows": (write("int8_rows", experts=True), WeightFormats(layers="bf16")),
        "w4a16": (write("w4a16", experts=True), WeightFormats(layers="bf16")),
    }
    found = compared(sources, COUNTS, dtype="bfloat16", expert_parallel=True)
    found["formats"] = {
        name: format_of(folder, formats) for name, (folder, formats) in sources.items()
    }
    file, formats = zoo(), WeightFormats(layers="bf16", head="bf16")
    exact = run_on_one(file, dtype="float32")
    each = partial(run, file, formats=formats, dtype="bfloat16", expert_parallel=True)
    far = [each(count)[0] - exact for count in (1, *COUNTS)]
    found["blocks"] = [float(np.sqrt((part**2).mean())) for part in (*far, exact)]
    found["formats"]["blocks"] = format_of(file, formats)
    return found


def format_of(folder, formats):
    spec = spec_of(folder, SHARDS, expert_parallel=True)
    model = build_model(spec, "bfloat16", formats, SHARDS)
    return model.packings["layers.0.mlp.down.weight"].format


@contextmanager
def counting():
    """Yield a list of the bytes that are read from files or mapped."""
    preadv, mapped, read = os.preadv, StoredTensor.read, []

    def count(*args):
        read.append(preadv(*args))
        return read[-1]

    def count_mapped(tensor):
        view = mapped(tensor)
        read.append(view.nbytes)
        return view

    os.preadv, StoredTensor.read = count, count_mapped
    try:
        yield read
    finally:
        os.preadv, StoredTensor.read = preadv, mapped


def reads():
    """Count the bytes that the devices read of a model, and those of all its experts."""
    converted = EngineConfig.from_options(model=str(GOLDENS / "mixtral"), kernels="xla")
    sources = {
        "separate": (GOLDENS / "mixtral", r"\.experts\."),
        "fused": (changed("qwen3_moe", fused), r"\.experts\."),
        "int8_rows": (write("int8_rows", experts=True), r"\.experts\."),
        "converted": (convert(converted, new_folder(), progress=False).folder, r"mlp\.(gate|down)"),
    }
    found = {}
    for name, (folder, experts) in sources.items():
        spec = spec_of(folder, SHARDS, expert_parallel=True)
        checked = check_weights(build_model(spec, "float32", shards=SHARDS), folder)
        stored = getattr(checked, "stored", None) or checked.tensors.stored
        sizes = {n: int(np.prod(t.shape)) * t.dtype.itemsize for n, t in stored.items()}
        each = []
        for index in range(SHARDS):
            with counting() as read:
                assert {shard.index for shard in checked.shards([index])} == {index}
            each.append(sum(read))
        found[name] = {
            "each": each,
            "all": sum(sizes.values()),
            "experts": sum(size for n, size in sizes.items() if re.search(experts, n)),
        }
    return found


def converted():
    """Check that folders for one device and for four give the model's bits on four devices.

    The result includes the errors of folders with the other division.
    """
    sources = {
        "plain": (GOLDENS / "qwen3_moe", {"dtype": "float32"}),
        "rounded": (GOLDENS / "qwen3_moe", {"quantization": "fp8"}),
        "mxfp4": (GOLDENS / "gpt_oss_mxfp4", {}),
        "gptq_ordered": (write("gptq_ordered", experts=True), {}),
        "fp8_matrix_static": (write("fp8_matrix_static", experts=True), {}),
    }
    if cpu.available():
        sources["packed"] = GOLDENS / "qwen3_moe", {"dtype": "bfloat16", "quantization": "int8"}
    four = {"tensor_parallel": SHARDS, "expert_parallel": True}
    found = {}
    for name, (source, options) in sources.items():
        model, leaves = as_served(source, SHARDS, expert_parallel=True, **options)
        for division in ({}, four):
            config = EngineConfig.from_options(model=str(source), **division, **options)
            folder = convert(config, new_folder() / "out", progress=False).folder
            of = f"{name} of {SHARDS if division else 1}"
            try:
                again, ours = as_served(folder, SHARDS, expert_parallel=True)
            except ForgeError as error:
                found[of] = str(error).replace(str(folder), "OUT")
                continue
            found[of] = again.names == model.names and all(
                a.sharding == b.sharding and np.array_equal(bits(a), bits(b))
                for a, b in zip(ours, leaves, strict=True)
            )
        if name == "plain":
            found["divided"] = refusal(folder, SHARDS)
            cut = EngineConfig.from_options(model=str(source), tensor_parallel=SHARDS, **options)
            folder = convert(cut, new_folder() / "out", progress=False).folder
            found["cut"] = refusal(folder, SHARDS, expert_parallel=True)
    return found


def refusal(folder, shards, **options):
    try:
        as_served(folder, shards, **options)
    except ForgeError as error:
        return str(error).replace(str(folder), "OUT")
    return None


PROMPTS = np.random.default_rng(3).integers(3, 300, (4, 20)).tolist()
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "num_blocks": 32,
    "deterministic": True,
}


def engine():
    """Return the tokens of engines, whether bits depend on the batch, and their fingerprints."""
    division = {"tensor_parallel": SHARDS}
    engines = {
        "one": {},
        "two": {"tensor_parallel": 2, "expert_parallel": True},
        "four": {**division, "expert_parallel": True},
        "cut": division,
    }
    return {name: engine_with(options, drafts=name == "four") for name, options in engines.items()}


def engine_with(options, *, drafts):
    """Return the results of an engine, which verifies drafts of its first layer if `drafts`."""
    model = with_layers(GOLDENS / "mixtral", (0, 1))
    if drafts:
        options = {**options, "speculation": "draft", "draft_model": "self", "draft_layers": 1}
    llm = LLM(str(model), **OPTIONS, **options)
    core = core_of(llm)
    if drafts:
        drafts_always_pay(core.speculator.policy)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=4)
    drawn = SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True)

    def outputs(prompts, params=greedy):
        done = [output.outputs[0] for output in llm.generate(prompts, params, progress=False)]
        return [[list(each.token_ids), str(each.logprobs)] for each in done]

    together, drawn_tokens = outputs(PROMPTS), [ids for ids, _ in outputs(PROMPTS, drawn)]
    alone = [outputs([prompt])[0] for prompt in PROMPTS]
    with failing_steps(core, lambda plan, where: plan.step % 10 == 0):
        recovered = outputs(PROMPTS)
    assert core.num_recoveries
    [step] = [each for name, each in core.device.compiled().items() if "[" in name]
    found = {
        "model": str(model),
        "prompts": PROMPTS,
        "tokens": [ids for ids, _ in together],
        "drawn": drawn_tokens,
        "alone": alone == together,
        "recovered": recovered == together,
        "collectives": collectives(step),
        "fingerprint": llm.system_fingerprint,
        "layers": core.device.model.spec.num_hidden_layers,
    }
    llm.close()
    return found


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    assert len(jax.devices()) == SHARDS
    parts = {
        p.__name__: p
        for p in (families, uneven, forms, forms_on_two, packed, reads, converted, engine)
    }
    print(json.dumps({name: parts[name]() for name in sys.argv[1:]}))
