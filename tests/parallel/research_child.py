"""Steers and returns activations on two devices and with the research API; prints differences.

`test_parallel_research.py` runs it with two CPU devices.
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import forge_jax
from forge_jax import LLM, ReturnActivations, SamplingParams, SteeringVector
from forge_jax.errors import ConfigError

STORIES = Path(__file__).parent.parent / "fixtures" / "stories260k-hf"
WIDTH, LAYERS = 64, 5
OPTIONS = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "dtype": "float32", "num_blocks": 16}
SERVED = ("embed", "layers.*.attn.out", "layers.*.mlp.out", "layers.*.resid", "final_norm")
IDS = [1, 403, 407, 261, 378]
ONE = SteeringVector(name="one", scale=1.5, layers=[1])
EACH = SteeringVector(name="each", scale=-0.75)


def edits(values, chosen):
    """Return the argument `edit` that adds the chosen vectors."""

    def add(layer):
        vectors = [each for each in chosen if each.layers is None or layer in each.layers]
        total = sum(np.float32(each.scale) * values[each.name][layer][None] for each in vectors)
        return lambda x: x + total

    return {f"layers.{layer}.resid": add(layer) for layer in range(LAYERS)}


def differences():
    """Return the largest difference of an activation, by its kind and the steering."""
    random = np.random.default_rng(1)
    values = {
        name: random.normal(size=(LAYERS, WIDTH)).astype(np.float32) for name in ("one", "each")
    }
    model = forge_jax.load(STORIES, dtype="float32")
    returned = ReturnActivations(names=["*"], tokens="all")
    params = SamplingParams(
        max_tokens=8, temperature=0, ignore_eos=True, return_activations=returned
    )
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        options = []
        for name, value in values.items():
            save_file({"vector": value}, Path(folder) / name)
            options.append(f"{name}={folder}/{name}")
        options = {**OPTIONS, "steering_vectors": tuple(options), "activations": SERVED}
        with LLM(STORIES, tensor_parallel=2, **options) as llm:
            for chosen in ((), (ONE,), (ONE, EACH)):
                steered = replace(params, steering_vectors=chosen)
                [output] = llm.generate([IDS], steered, progress=False)
                [completion] = output.outputs
                tokens = [*IDS, *completion.token_ids[:-1]]
                logits, taps = model(tokens, taps=SERVED, edit=edits(values, chosen))
                greedy = np.asarray(logits).argmax(-1)[len(IDS) - 1 :]
                for name, array in completion.activations.arrays.items():
                    assert array.shape == taps[name].shape, name
                    difference = float(np.abs(array - np.asarray(taps[name])).max())
                    key = f"{len(chosen)} {name.split('.', 2)[-1]}"
                    found[key] = max(found.get(key, 0.0), difference)
                assert tuple(greedy) == completion.token_ids
    return found


def rejected():
    """Return the error of an activation that a device has only a part of."""
    try:
        LLM(STORIES, tensor_parallel=2, **OPTIONS, activations=("layers.0.attn.q",))
    except ConfigError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    print(json.dumps({"differences": differences(), "rejected": rejected()}))
