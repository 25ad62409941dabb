"""Compares models with gated DeltaNet on several devices with one, and with transformers.

`test_parallel_state.py` runs it, like `child.py`.
"""

import json
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
from child import GOLDENS, SHARDS, collectives, compare, run, run_on_one, with_layers
from delta_net_zoo import write_wide
from forms_child import as_served, bits
from gguf_writer import write_gguf
from lora_files import write_adapter
from test_recurrent_engine import GREEDY, Oracle

from forge_jax import LLM, SamplingParams
from forge_jax.checkpoint.safetensors import read_header
from forge_jax.config import EngineConfig
from forge_jax.errors import CheckpointError
from forge_jax.speculate.drafter import OneByOne
from forge_jax.testing import core_of, drafts_always_pay, failing_steps
from forge_jax.tools.convert import convert
from forge_jax.weights.formats import WeightFormats
from forge_kernels import cpu

# 10 blocks of 16 tokens for three sequences that finally need 6 each.
OPTIONS = {
    **{"block_size": 16, "num_blocks": 10, "max_model_len": 96, "max_num_batched_tokens": 32},
    "max_num_seqs": 3,
}
SHARDS_OF = {"qwen3_next": 2, "qwen3_5_text": SHARDS}  # qwen3_next has two key heads


def logits():
    """Compare a layer of each kind in each family, also whole experts and rounded matrices."""
    rounded = WeightFormats(rounded="int8")
    dense_first = with_layers(GOLDENS / "qwen3_next", (1, 3))
    experts = with_layers(GOLDENS / "qwen3_5_moe_text", (0, 3))
    return {
        "qwen3_next": compare(dense_first, 2, layers=2),
        "qwen3_next rounded": compare(dense_first, 2, layers=2, formats=rounded),
        "qwen3_5_text": compare("qwen3_5_text", layers=2),
        "qwen3_5_moe_text": compare(experts, layers=2),
        "qwen3_5_moe_text whole": compare(experts, layers=2, expert_parallel=True),
    }


def packed():
    """Measure the error of int8 packed for the C++ kernels, on one device and several."""
    if not cpu.available():
        return None
    cpu.load()
    exact = run_on_one("qwen3_5_text", layers=2)
    formats = WeightFormats(layers="int8", head="int8")
    options = {"layers": 2, "dtype": "bfloat16", "formats": formats}
    far = [run("qwen3_5_text", n, **options)[0] - exact for n in (1, SHARDS)]
    return [float(np.sqrt((each**2).mean())) for each in (*far, exact)]


def read_golden(name):
    stored = read_header(GOLDENS / name / "golden.safetensors")
    return (np.array(stored[key].read()).tolist() for key in ("input_ids", "greedy_ids"))


def plain():
    """Return the results of an engine without drafts, which preempts and recovers."""
    prompts, want = read_golden("qwen3_next")
    with LLM(str(GOLDENS / "qwen3_next"), tensor_parallel=2, **OPTIONS) as llm:
        core = core_of(llm)
        found = [tokens_of(llm.generate(prompts, GREEDY))]
        with failing_steps(core, lambda plan, where: plan.step % 10 == 0):
            found.append(tokens_of(llm.generate(prompts, GREEDY)))
        return {
            "same": found == [want, want],
            "preemptions": core.scheduler.num_preemptions,
            "recoveries": core.num_recoveries,
            "steps": sorted(name for name in core.device.compiled() if "[" in name),
        }


def tokens_of(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def scores_of(outputs):
    return [[each.logprob for each in output.outputs[0].logprobs] for output in outputs]


def gguf():
    """Return the tokens from a GGUF file with value heads in another order, and those wanted."""
    name = "qwen3_5_moe"
    file = write_gguf(GOLDENS / name, Path(tempfile.mkdtemp()) / "model.gguf")
    prompts, want = read_golden(name)
    with LLM(str(file), tensor_parallel=2, dtype="float32", deterministic=True, **OPTIONS) as llm:
        return [tokens_of(llm.generate(prompts, GREEDY)), want]


def blocks():
    """Compare two devices with one on a file in blocks, whose columns are in another order.

    Convert it for one device and for two, with and without rounding, and load the folders.
    """
    file = write_wide(GOLDENS / "qwen3_5", Path(tempfile.mkdtemp()) / "model.gguf")
    found = {"logits": compare(file, 2, layers=3, dtype="float32")}
    for options in ({"kernels": "xla"}, {"quantization": "int8", "kernels": "xla"}):
        model, leaves = as_served(file, 2, **options)
        for shards in (1, 2):
            key = f"{options.get('quantization')} of {shards}"
            out = Path(tempfile.mkdtemp()) / "out"
            config = EngineConfig.from_options(model=str(file), tensor_parallel=shards, **options)
            folder = convert(config, out, progress=False).folder
            try:
                again, ours = as_served(folder, 2, kernels="xla")
            except CheckpointError as error:
                found[key] = str(error).split(": ")[-1]
            else:
                found[key] = again.names == model.names and same_bits(ours, leaves)
    return found


def same_bits(ours, theirs):
    return all(
        a.sharding == b.sharding and np.array_equal(bits(a), bits(b))
        for a, b in zip(ours, theirs, strict=True)
    )


def adapted():
    """Return the tokens of a prompt with an adapter and without, on one device and on four."""
    folder = with_layers(GOLDENS / "qwen3_5_text", (0, 1))
    adapter = write_adapter(Path(tempfile.mkdtemp()) / "adapter", folder, seed=1)
    prompts, _ = read_golden("qwen3_5_text")
    found = {}
    for shards in (1, SHARDS):
        options = {**OPTIONS, "deterministic": True, "lora": (f"adapter={adapter}",)}
        with LLM(str(folder), tensor_parallel=shards, **options) as llm:
            outputs = llm.generate(prompts[:1] * 2, GREEDY, lora=[None, "adapter"])
            found[shards] = tokens_of(outputs)
    return found


def drafted():
    """Return the results of deterministic engines that verify drafts."""
    return {name: drafted_on(name, shards) for name, shards in SHARDS_OF.items()}


def drafted_on(name, shards):
    prompts, want = read_golden(name)
    options = {**OPTIONS, "speculation": "ngram", "max_draft_tokens": 5, "deterministic": True}
    with LLM(str(GOLDENS / name), tensor_parallel=shards, **options) as llm:
        core = core_of(llm)
        speculator = core.speculator
        drafts_always_pay(speculator.policy)
        speculator.policy.acceptance.reach = lambda confidence, _: [1.0] * len(confidence)
        texts = [prompt + output for prompt, output in zip(prompts, want, strict=True)]
        speculator._drafter = OneByOne(Oracle(texts))
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
        together = llm.generate(prompts, params)
        alone = [llm.generate([prompt], params)[0] for prompt in prompts]
        stats = speculator.stats()
        return {
            "same": tokens_of(together) == tokens_of(alone) == want,
            "same bits": scores_of(together) == scores_of(alone),
            "preemptions": core.scheduler.num_preemptions,
            "accepted": stats.num_accepted_tokens / stats.num_draft_tokens,
            "collectives": {
                step: len(collectives(each))
                for step, each in core.device.compiled().items()
                if "[" in step
            },
        }


def converted():
    """Check that folders for one device and for two give the model's bits on two devices."""
    source, options = GOLDENS / "qwen3_next", {"quantization": "fp8"}
    model, leaves = as_served(source, 2, **options)
    found = {"split": sum(".delta." in name for name in model.names)}
    for shards in (1, 2):
        out = Path(tempfile.mkdtemp()) / "out"
        config = EngineConfig.from_options(model=str(source), tensor_parallel=shards, **options)
        again, ours = as_served(convert(config, out, progress=False).folder, 2)
        found[f"of {shards}"] = again.names == model.names and same_bits(ours, leaves)
    return found


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    assert len(jax.devices()) == SHARDS
    every = (logits, packed, plain, adapted, drafted, converted, gguf, blocks)
    parts = {each.__name__: each for each in every}
    print(json.dumps({name: parts[name]() for name in sys.argv[1:]}))
