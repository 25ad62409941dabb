"""Compares engines with several stages with one; prints the results as JSON.

`test_pipeline.py` runs it with four CPU devices, like `child.py`.
"""

import json
import sys
import tempfile
from pathlib import Path

from child import short_stories, with_layers

from forge_jax import LLM, SamplingParams
from forge_jax.config import EngineConfig
from forge_jax.grammar import GrammarSpec
from forge_jax.testing import core_of, drafts_always_pay, failing_steps
from forge_jax.tools.convert import convert
from forge_kernels import cpu

FIXTURES = Path(__file__).parent.parent / "fixtures"
GOLDENS = FIXTURES / "goldens"
EXACT = {"deterministic": True, "kernels": "xla", "dtype": "float32"}
# 17 blocks of 8 tokens: sequences are preempted.
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 8, "num_blocks": 17}
LAYOUTS = {"1": {}, "3 stages": {"pipeline_parallel": 3}}
SPLIT = {
    "2 devices": {"tensor_parallel": 2},
    "2 stages of 2 devices": {"tensor_parallel": 2, "pipeline_parallel": 2},
}


def requests(seed=0):
    greedy = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    drawn = {"max_tokens": 24, "temperature": 0.9, "seed": seed, "ignore_eos": True}
    return [
        ("Once upon a time", SamplingParams(**greedy, logprobs=2)),
        ("Once upon a time there was a dog. " * 3, SamplingParams(**drawn, n=2)),
        ("The dog", SamplingParams(**greedy, presence_penalty=0.6, logit_bias={5: 2.0})),
        ("A girl and a boy went to the park. " * 4, SamplingParams(**greedy, prompt_logprobs=1)),
        ("Lily", SamplingParams(**drawn, structured_outputs=GrammarSpec("regex", "[a-z ]{20,40}"))),
        ("The cat sat. The cat sat. The cat", SamplingParams(**greedy | {"max_tokens": 80})),
    ]


def outputs(llm):
    prompts, params = zip(*requests(), strict=True)
    found = llm.generate(list(prompts), list(params), progress=False)
    texts = [
        [each.prompt_logprobs, [(o.token_ids, o.logprobs, o.finish_reason) for o in each.outputs]]
        for each in found
    ]
    return json.loads(json.dumps(texts, default=repr))


def run(model, *, drafts=False, **options):
    """Return everything that an engine outputs, and how it got there."""
    speculation = {"speculation": "ngram", "max_draft_tokens": 3} if drafts else {}
    llm = LLM(str(model), max_model_len=128, **SIZES | speculation | options)
    core = core_of(llm)
    if drafts:
        drafts_always_pay(core.speculator.policy)
    found = outputs(llm)
    again = outputs(llm)  # with cached prefixes
    assert again == found, "cached prefixes change a text"
    fails_at = {"dispatch": 13, "read": 17}
    with failing_steps(core, lambda plan, where: plan.step % fails_at[where] == 3):
        recovered = outputs(llm)
    runner = core.device
    result = {
        "outputs": found,
        "recovered": recovered == found,
        "recoveries": core.num_recoveries,
        "preemptions": core.scheduler.num_preemptions,
        "accepted": 0 if core.speculator is None else core.speculator.stats().num_accepted_tokens,
        "stages": [stage.model.stage.layers[-1] for stage in runner.options.stages],
        "bytes": [stage.model.param_bytes for stage in runner.options.stages],
        "whole_bytes": runner.model.param_bytes,
        "devices": sorted({d.id for leaf in runner.leaves for d in leaf.devices()}),
        "executables": sorted(runner.compiled()),
    }
    llm.close()
    return result


def engines():
    model = short_stories()
    return {name: run(model, drafts=True, **EXACT, **layout) for name, layout in LAYOUTS.items()}


def split():
    return {name: run(short_stories(), **EXACT, **layout) for name, layout in SPLIT.items()}


def families():
    """Run models whose layers differ, with two stages and without."""
    found = {}
    for name, layers, options in (
        ("glm4_moe", (0, 1), {}),  # a dense layer, then experts
        ("qwen3_next", (2, 3, 2, 3), {}),  # layers with state; both stages have attention
        ("qwen2", (0, 1), {"kv_dtype": "int8"}),  # a head that is also the embedding
    ):
        model = with_layers(GOLDENS / name, layers)
        whole, parts = (tokens(model, **options, pipeline_parallel=count) for count in (1, 2))
        found[name] = whole == parts
    return found


def tokens(model, **options):
    llm = LLM(str(model), max_model_len=64, **EXACT, **SIZES, **options)
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2, ignore_eos=True)
    found = llm.generate([[3, 4, 5, 6] * 5, [7, 8, 9], [4] * 30], params, progress=False)
    llm.close()
    return [repr(each.outputs[0]) for each in found]


def files():
    """Run packed matrices, from a checkpoint and from a converted folder."""
    if not cpu.available():
        return None
    options = {"backend": "cpu", "deterministic": True, "dtype": "bfloat16"}
    folder = Path(tempfile.mkdtemp()) / "converted"
    config = EngineConfig.from_options(model=str(short_stories()), backend="cpu", dtype="bfloat16")
    convert(config, folder, progress=False)
    llms = {
        "whole": (short_stories(), {}),
        "stages": (short_stories(), {"pipeline_parallel": 2}),
        "converted": (folder, {"pipeline_parallel": 2}),
    }
    found = {}
    for name, (model, layout) in llms.items():
        llm = LLM(str(model), max_model_len=128, **SIZES, **options, **layout)
        found[name] = outputs(llm)
        llm.close()
    return found


if __name__ == "__main__":
    parts = {part: globals()[part]() for part in sys.argv[1:]}
    print(json.dumps(parts))
