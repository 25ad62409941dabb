"""Compares models on several devices with the same on one; prints the results as JSON.

`test_tensor_parallel.py` runs it with four CPU devices (`--xla_force_host_platform_device_count=4`)
and checks the results.
"""

import functools
import gc
import json
import re
import sys
import tempfile
import tracemalloc
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import model_folders
import numpy as np
from lora_files import write_adapter

from forge_jax import LLM, SamplingParams
from forge_jax.checkpoint.hub import resolve
from forge_jax.checkpoint.load import load_weights
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.grammar import GrammarSpec
from forge_jax.models import build_model
from forge_jax.models.kv import element_dtype, first_paged
from forge_jax.step.kv_cache import kv_shape
from forge_jax.step.mesh import TensorMesh
from forge_jax.testing import core_of, drafts_always_pay, failing_steps
from forge_jax.weights.formats import WeightFormats
from forge_jax.weights.partition import shard_spec, with_whole_experts
from forge_kernels import cpu

FIXTURES = Path(__file__).parent.parent / "fixtures"
GOLDENS = FIXTURES / "goldens"
STORIES = FIXTURES / "stories260k-hf"
SHARDS, BLOCK, BLOCKS = 4, 8, 8
ON_ONE = {}  # the results of `run_on_one`
LAYERS = {
    "llama31": 1,  # two query heads of a key/value head on a device, each of those on two devices
    "llama_bias": 1,
    "qwen2": 1,  # biases of queries, keys and values; the head is tied
    "phi3": 1,  # fused queries, keys and values, and fused gates and ups
    "phi3_partial": 1,  # heads that are rotated in part
    "olmo2": 1,  # norms over all heads
    "gemma2": 2,  # a layer with a window, and one without
    "gemma4_shared": 5,  # layers of two sizes, and layers that share the keys of others
    "gemma4_moe": 2,  # experts in addition to an MLP; keys that are values
    "mixtral": 1,
    "glm4_moe": 2,  # a dense layer, and one with shared experts
    "gpt_neox": 1,  # attention and MLP in parallel; queries, keys and values of a head together
    "phi": 1,  # a head with a bias
    "cohere": 1,  # a norm with separate weights per head
    "deepseek_v2": 2,  # the heads of latent attention; every device has the latents
    "gpt2": 1,  # an MLP without a gate; biases of the output projections are added once
}
KINDS = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast"


@functools.cache
def with_layers(model, layers):
    """Return a folder with these layers of a model, in this order. It is written once."""
    return model_folders.with_layers(model, layers, Path(tempfile.mkdtemp()))


def short_stories():
    """Return three of the five layers of `STORIES`, whose texts repeat less than other threes'."""
    return with_layers(STORIES, (0, 3, 4))


def mesh_of(shards):
    return None if shards == 1 else TensorMesh.of(jax.devices()[:shards])


def collectives(executable):
    """Return the collectives of the optimized program in order, each with its origin."""
    found = []
    for line in executable.as_text().splitlines():
        kind = re.search(rf" ({KINDS})(?:-start)?\(", line)
        if kind is not None:
            scope = re.search(r'op_name="jit\(\w+\)/shard_map/([^"]*)/\w+"', line)
            parts = (scope[1] if scope else "").removesuffix("/add_up").split("/")
            found.append(f"{kind[1]} {'/'.join(part for part in parts if '(' not in part)}")
    return found


def spec_of(folder, shards, *, expert_parallel=False):
    spec = read_spec(folder)
    return with_whole_experts(spec) if expert_parallel and shards > 1 else spec


def run(
    name,
    shards,
    *,
    layers=None,
    formats=None,
    dtype="auto",
    kv_dtype="auto",
    expert_parallel=False,
):
    """Return (f32[T, V] of a prompt in two chunks, the collectives of a step)."""
    folder = GOLDENS / name  # a golden's name, or any folder
    spec, mesh = spec_of(folder, shards, expert_parallel=expert_parallel), mesh_of(shards)
    spec = replace(spec, num_hidden_layers=layers or LAYERS.get(name, 1))
    model = build_model(spec, dtype, formats, shards)
    leaves = load_weights(model, folder, mesh=mesh, progress=False)
    shape = kv_shape(
        shard_spec(spec, shards),
        num_blocks=BLOCKS,
        block_size=BLOCK,
        dtype=element_dtype(kv_dtype, model.dtype),
        platform="cpu",
    )

    def step(leaves, kv, tokens, start):
        count = len(tokens)
        positions = start + jnp.arange(count)
        lens = (start + count)[None]
        table = jnp.arange(BLOCKS)[None]
        cu = jnp.array([0, count], jnp.int32)
        kv, hidden = model.forward(
            leaves, kv, tokens, positions, positions, table, lens, cu, jnp.int32(1)
        )
        return kv, model.logits(leaves, hidden)

    kv = shape.empty()
    if mesh is not None:
        step = mesh.shard_step(model, step)
        kv = jax.device_put(mesh.kv_shape(shape).empty(), mesh.kv(model))
        paged = jax.tree.leaves(first_paged(kv))[0]
        parts = {part.data.shape[2] for part in paged.addressable_shards}
        assert parts == {max(1, spec.num_key_value_heads // shards)}
    tokens = np.random.default_rng(0).integers(3, spec.vocab_size, 24).astype(np.int32)
    compiled = jax.jit(step).lower(leaves, kv, tokens[:12], jnp.int32(0)).compile()
    rows = []
    for start, end in ((0, 12), (12, 24)):
        kv, scores = compiled(leaves, kv, tokens[start:end], jnp.int32(start))
        rows.append(np.asarray(scores))
    return np.concatenate(rows), collectives(compiled)


def run_on_one(name, *, expert_parallel=False, **options):
    """Return f32[T, V] of one device, which has no experts to divide. Each model runs once."""
    key = repr((name, sorted(options.items())))
    if key not in ON_ONE:
        ON_ONE[key], none = run(name, 1, **options)
        assert not none, none
    return ON_ONE[key]


def compare(name, shards=SHARDS, **options):
    [found] = compare_each(name, (shards,), **options)
    return found


def compare_each(name, counts, **options):
    """Return how the logits on each number of devices compare with those on one device."""
    one = run_on_one(name, **options)
    found = []
    for shards in counts:
        several, between = run(name, shards, **options)
        found.append(
            {
                "difference": float(np.abs(one - several).max()),
                "scale": float(np.abs(one).max()),
                "same_choice": float((one.argmax(axis=1) == several.argmax(axis=1)).mean()),
                "collectives": between,
            }
        )
    return found


def families():
    return {name: compare(name) for name in LAYERS}


def two_devices():
    """Compare two devices, also with an 8-bit cache."""
    return compare("llama31", 2, kv_dtype="int8")


def packed():
    """Measure the C++ kernels' error in bfloat16 and fewer bits, on one device and several."""
    if not cpu.available():
        return None
    cpu.load()
    formats = {
        ("qwen3_moe", "bf16"): WeightFormats(layers="bf16", head="bf16"),
        ("qwen2", "int8"): WeightFormats(layers="int8", head="int8"),
        ("llama31", "int4"): WeightFormats(layers="int4", head="int8", embedding="int8"),
    }
    found = {}
    for (name, form), weight_formats in formats.items():
        exact = run_on_one(name)
        far = [
            run(name, n, formats=weight_formats, dtype="bfloat16")[0] - exact for n in (1, SHARDS)
        ]
        found[form] = [float(np.sqrt((each**2).mean())) for each in (*far, exact)]
    return found


PROMPTS = [
    "Once upon a time",
    "The dog",
    "Lily and Tom went to the park, and there they saw a " * 2,
]


REQUESTS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24),
    "drawn": SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=16),
    "penalized": SamplingParams(
        temperature=0.0, presence_penalty=1.5, logit_bias={426: -100.0}, max_tokens=16
    ),
    "structured": SamplingParams(
        temperature=0.0, structured_outputs=GrammarSpec.regex("[a-z]{2,9}(, [a-z]{2,9}){3}")
    ),
}


def speculation(shards):
    """Return an engine's options: none, or a draft model, whole on each device or sharded.

    N-gram drafts use the same steps as these.
    """
    drafts = {"speculation": "draft", "max_draft_tokens": 2}
    return {
        1: {},
        2: {**drafts, "draft_model": str(short_stories())},
        4: {**drafts, "draft_model": "self", "draft_layers": 2},
    }[shards]


def engine():
    """Return an engine's outputs, its cache hits, and the collectives of its steps."""
    adapter = write_adapter(Path(tempfile.mkdtemp()) / "adapter", short_stories(), seed=1)
    return {shards: engine_on(shards, adapter) for shards in (1, 2, SHARDS)}


def engine_on(shards, adapter):
    llm = LLM(
        str(short_stories()),
        tensor_parallel=shards,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        deterministic=True,
        max_loras=2,
        max_lora_rank=4,
        **speculation(shards),
    )
    core = core_of(llm)
    if shards > 1:
        drafts_always_pay(core.speculator.policy)

    def tokens(prompts, params, lora=None):
        nonlocal outputs
        outputs = llm.generate(prompts, params, lora=lora, progress=False)
        return [output.outputs[0].token_ids for output in outputs]

    outputs = []
    found = {name: tokens(PROMPTS, params) for name, params in REQUESTS.items() if name != "greedy"}
    llm.load_lora("other", str(adapter))
    llm.load_lora("adapter", str(adapter))
    llm.unload_lora("other")  # the second place is taken, the first is not
    found["adapted"] = tokens(PROMPTS, REQUESTS["greedy"], [None, "adapter", "adapter"])
    found["greedy"] = tokens(PROMPTS, REQUESTS["greedy"])
    accepted = [output.outputs[0].num_accepted_tokens for output in outputs]
    assert tokens(PROMPTS[2], REQUESTS["greedy"]) == found["greedy"][2:], "company changes a text"
    cached = outputs[0].num_cached_tokens
    runner = core.device
    with failing_steps(core, lambda plan, where: plan.step % 10 == 0):
        answers = tokens(PROMPTS, REQUESTS["greedy"])
    assert answers == found["greedy"], "a step that raised changes it"
    steps = {name: each for name, each in runner.compiled().items() if "[" in name}
    assert steps
    pooled = None if shards == 2 else llm.embed(PROMPTS[:2], pooling="mean").tolist()
    result = {
        "tokens": found,
        "cached": cached,
        "accepted": sum(accepted),
        "recoveries": core.num_recoveries,
        "collectives": {name: collectives(step) for name, step in steps.items()},
        "drafting": draft_collectives(core.speculator),
        "layers": runner.model.spec.num_hidden_layers,
        "settings": runner.settings.get("shards"),
        "fingerprint": llm.system_fingerprint,
        "pooled": pooled,
    }
    llm.close()
    return result


def host_kv():
    """Compare outputs with and without copies in host memory, each from the model's shards."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 500, 49).tolist() for _ in range(6)]
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=1, ignore_eos=True)
    result = {}
    for gib in (0.0, 0.001):
        llm = LLM(
            str(short_stories()),
            tensor_parallel=2,
            num_blocks=18,
            host_kv_gib=gib,
            max_num_seqs=2,
            max_num_batched_tokens=32,
            max_model_len=64,
            block_size=8,
            deterministic=True,
        )
        found = [llm.generate(prompts, params) for _ in range(2)]
        host = core_of(llm).scheduler.pool.host
        result[str(gib)] = {
            "outputs": [[repr(o.outputs[0]) for o in each] for each in found],
            "loaded": 0 if host is None else host.num_loaded,
            "collectives": [
                collectives(core_of(llm).device.compiled()[name])
                for name in ("save_blocks", "load_blocks")
                if host is not None
            ],
        }
    return result


def draft_collectives(speculator):
    """Return the collectives of a draft model's executables; None without one."""
    if speculator is None:
        return None
    model = speculator._drafter._model
    assert model.background.complete and model.can_draft
    return {name.split("[")[0]: collectives(each) for name, each in model.compiled().items()}


def peak():
    """Return the peak of host memory while weights are read, and their bytes.

    CPU devices use the host's own buffers, so the weights' buffers count.
    """
    folder, mesh = resolve("forge-tiny"), mesh_of(SHARDS)
    model = build_model(read_spec(folder), "float32", shards=SHARDS)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in mesh.leaves(model))
    whole = build_model(read_spec(folder), "float32")
    largest = max(leaf.size * leaf.dtype.itemsize for leaf in whole.leaves)
    gc.collect()
    tracemalloc.start()
    leaves = load_weights(model, folder, mesh=mesh, progress=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    on_each = {
        device.id: sum(
            shard.data.nbytes
            for leaf in leaves
            for shard in leaf.addressable_shards
            if shard.device == device
        )
        for device in mesh.devices
    }
    return {
        "peak": peak,
        "total": total,
        "largest": largest,
        "of_a_device": sorted(set(on_each.values())),
        "param_bytes": model.param_bytes,
    }


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    assert len(jax.devices()) == SHARDS
    parts = {each.__name__: each for each in (families, two_devices, packed, peak, engine, host_kv)}
    print(json.dumps({name: parts[name]() for name in sys.argv[1:]}))
