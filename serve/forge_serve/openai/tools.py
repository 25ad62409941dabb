"""The tools in a request, and the choice among them that the model may or must call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forge_jax.errors import RequestError

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}", re.ASCII)

# JSON schemas of the fields, for /openapi.json.
NAME_SCHEMA: dict[str, Any] = {"type": "string", "pattern": f"^{_NAME.pattern}$"}
TOOL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": NAME_SCHEMA,
                "description": {"type": ["string", "null"]},
                "parameters": {
                    "type": ["object", "null"],
                    "description": "The JSON schema of the function's arguments.",
                },
                "strict": {"description": "If true, the arguments must follow the schema."},
            },
        },
    },
}
CHOICE_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"enum": [None, "none", "auto", "required"]},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": {"type": "string"}},
                },
            },
        },
    ]
}


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call.

    Attributes:
      parameters: the JSON schema of its arguments.
      strict: True if the arguments must follow the schema. Otherwise, schema keywords that the
        grammar does not support are ignored.
    """

    name: str
    parameters: dict[str, Any] | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The functions that the model may call. In mode "required" it must call one of them."""

    mode: Literal["none", "auto", "required"]
    functions: tuple[Function, ...] = ()
    named: bool = False  # True if the choice names the function, which is then called once

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)


def tool_choice(tools: Sequence[dict[str, Any]] | None, choice: Any) -> ToolChoice:
    """Return the choice that OpenAI's fields `tools` and `tool_choice` express.

    A named function is required.

    Raises:
      RequestError: a tool is not a function, or the choice names none of the tools.
    """
    functions = tuple(_function(f"tools[{i}]", tool) for i, tool in enumerate(tools or ()))
    match choice:
        case None:
            return ToolChoice("auto" if functions else "none", functions)
        case "none":
            return ToolChoice("none")
        case "auto" | "required" as mode:
            if not functions and mode == "required":
                raise RequestError("tool_choice: required without tools", param="tool_choice")
            return ToolChoice(mode if functions else "none", functions)
        case {"type": "function", "function": {"name": str(name)}}:
            named = tuple(function for function in functions if function.name == name)
            if not named:
                raise RequestError(
                    "tool_choice must name one of the tools",
                    param="tool_choice",
                )
            return ToolChoice("required", named[:1], named=True)
    raise RequestError(
        'tool_choice must be none, auto, required, or {"type": "function", "function": {"name"}}',
        param="tool_choice",
    )


def _function(path: str, tool: dict[str, Any]) -> Function:
    if tool.get("type") != "function":
        raise RequestError(f"{path}.type: only functions are supported", param=f"{path}.type")
    path = f"{path}.function"
    function = tool.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{path} is required", param=path)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{path}.name must be 1 to 128 letters, digits or _ - .",
            param=f"{path}.name",
        )
    if not isinstance(function.get("description", ""), str | None):
        raise RequestError(f"{path}.description must be a string", param=f"{path}.description")
    if not isinstance(parameters, dict | None):
        raise RequestError(f"{path}.parameters must be a JSON schema", param=f"{path}.parameters")
    return Function(name, parameters, function.get("strict") is True)
