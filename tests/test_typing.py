"""The types that a type checker sees in a user's script: nothing is unknown or `Any`."""

import inspect
import json
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import forge_jax
from forge_jax import LoadedModel

ROOT = Path(__file__).parent.parent
RIGHT = """
from typing import assert_type

import jax

import forge_jax
from forge_jax import LLM, GrammarSpec, LoadedModel, RequestOutput, SamplingParams

model = forge_jax.load("forge-tiny", dtype="float32")
assert_type(model, LoadedModel)
ids = jax.numpy.arange(3)
assert_type(model(ids), jax.Array)
assert_type(model([[1, 2], [3, 4]], lengths=[2, 1], edit={"embed": lambda x: 2 * x}), jax.Array)
assert_type(model([1], taps=["embed"]), tuple[jax.Array, dict[str, jax.Array]])
assert_type(model(inputs_embeds=model.embed([1, 2]), leaves=model.leaves), jax.Array)
assert_type(model.unembed(model.leaf("norm.weight")), jax.Array)
assert_type(model.tap_names(), tuple[str, ...])
assert_type(model.with_module(model.module()).with_leaves(model.leaves), LoadedModel)
assert_type(model.leaves, tuple[jax.Array, ...])
assert_type(model.spec.hidden_size, int)
assert_type(model.model.names, tuple[str, ...])

kv = forge_jax.new_kv(model, num_blocks=2, block_size=16, dtype="int8")
kv, tokens, scores = forge_jax.decode_step(model, model.leaves, kv, ids, ids, ids, ids[None])
assert_type(tokens, jax.Array)
rest = (ids, ids, ids, ids[None], ids, ids, 1)
kv, hidden = forge_jax.forward(model, model.leaves, kv, *rest)
assert_type(hidden, jax.Array)
_, _, stream = forge_jax.forward(model, model.leaves, kv, *rest, return_hidden_states=True)
assert_type(stream, tuple[jax.Array, ...])
_, _, taps = forge_jax.forward(model, model.leaves, kv, *rest, taps=("layers.*.resid",))
assert_type(taps, dict[str, jax.Array])
assert_type(forge_jax.logits(model, model.leaves, hidden), jax.Array)

llm = LLM("forge-tiny", max_num_seqs=4)
params = SamplingParams(temperature=0, structured_outputs=GrammarSpec.json_object())
outputs = llm.generate(["Once"], params)
assert_type(outputs, list[RequestOutput])
assert_type(outputs[0].text, str)
"""
WRONG = """
import forge_jax

model = forge_jax.load("forge-tiny")
model(taps=3)
model(token_idz=[1])
model([1]).shape_
forge_jax.new_kv(model, "2", 16)
forge_jax.decode_step(model, model.leaves)
forge_jax.forward(model, model.leaves, (), return_hidden_states=1)
"""


@pytest.fixture(scope="module")
def messages(tmp_path_factory):
    """Return pyright's messages about both scripts: (file, line, rule, message)."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "right.py").write_text(RIGHT)
    (folder / "wrong.py").write_text(WRONG)
    config = {
        "include": ["."],
        "extraPaths": [str(ROOT / part) for part in (".", "kernels", "serve")],
        "pythonVersion": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "typeCheckingMode": "strict",
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    command = ["pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, timeout=200
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    return [
        (Path(each["file"]).name, each["range"]["start"]["line"], each.get("rule"), each["message"])
        for each in found
    ]


def test_types_of_a_script_are_known(messages):
    # JAX does not annotate all of its functions.
    found = [
        each
        for each in messages
        if each[0] == "right.py" and not re.search(r'Type of "arange" is', each[3])
    ]
    assert not found


def test_wrong_lines_of_a_script_are_found(messages):
    lines = {line for file, line, _, _ in messages if file == "wrong.py"}
    assert lines == set(range(4, 10))


FUNCTIONS = [
    *(forge_jax.load, forge_jax.new_kv, forge_jax.forward, forge_jax.logits, forge_jax.decode_step),
    forge_jax.register,
    *(each for name, each in inspect.getmembers(LoadedModel, inspect.isfunction) if name[0] != "_"),
    LoadedModel.__call__,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_parameters_are_named_and_typed(function):
    hints = typing.get_type_hints(function)
    assert "return" in hints and typing.Any not in hints.values()
    for parameter in inspect.signature(function).parameters.values():
        assert parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        assert parameter.name in hints or parameter.name == "self"
