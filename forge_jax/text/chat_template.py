"""A model's chat template, which renders messages as the text or ids the model was trained on.

Templates are Jinja programs that come with checkpoints. They are rendered in Jinja's sandbox, with
the same environment, variables and result as in Hugging Face's libraries. `encode` keeps clients'
text from becoming special tokens.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from forge_jax.errors import CheckpointError, ConfigError, RequestError
from forge_jax.host.files import MAX_BYTES
from forge_jax.text.sandbox import MAX_ERROR, OverLimitError, Sandbox, budget
from forge_jax.text.template_files import DEFAULT, folder_templates, given_template
from forge_jax.text.tokenizer import Tokenizer

MAX_RENDERED_CHARS = 4 * 1024 * 1024
SHORT_CHARS, SLOW_S = 16 * 1024, 0.02  # a text this short usually takes 1% of that time
MAX_NESTING = 64
MAX_TAGS = 4096  # tags per template; published ones have a few hundred
MAX_DATE_FORMAT = 256
LONG_PIECE = 1024  # characters; longer pieces may have been slow to make

_TRIAL = "qwxz"  # occurs in no template
_TRIAL_CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "f", "arguments": {}},
}
_SPEAKERS = ("system", "user", "assistant")
_TRIAL_SHARE = 1 / 64  # share of a rendering's budget
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# Exceptions that a template can raise if messages have an unexpected shape.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """The compiled chat templates of a model.

    Args:
      templates: Jinja sources by name. `"tool_use"` is for requests with tools, and `"default"` for
        all others. Other names are never used. If there is no template, every rendering is
        rejected, so that a base model can be served for completions.
      special_tokens: variables of the template: `{"bos_token": "<s>", ...}`.
      now: the clock of `strftime_now`.

    Raises:
      CheckpointError: a template is not valid Jinja.
    """

    def __init__(
        self,
        templates: str | Mapping[str, str] | None,
        special_tokens: Mapping[str, str] | None = None,
        *,
        now: Callable[[], datetime] = datetime.now,
    ):
        if isinstance(templates, str):
            templates = {DEFAULT: templates}
        self.sources = dict(templates or {})
        self.special_tokens = dict(special_tokens or {})
        self._shown: dict[tuple[int, str, int], bool] = {}
        self.slow = False  # True once a short rendering was too slow to run on an event loop
        environment = _environment(now)
        self._compiled = {
            name: _compile(environment, source) for name, source in self.sources.items()
        }

    @classmethod
    def from_folder(
        cls, path: str | Path, tokenizer: Tokenizer, override: str | Path | None = None
    ) -> ChatTemplate:
        """Return the templates of a model folder, or the given one; see `template_files`.

        Args:
          override: the value of `--chat-template`.

        Raises:
          ConfigError: the override is invalid.
          CheckpointError: a template of the folder is invalid.
        """
        folder = Path(path)
        named = folder_templates(folder) if override is None else given_template(folder, override)
        try:
            return cls(named, tokenizer.special_tokens)
        except CheckpointError as error:
            if override is None:
                raise
            raise ConfigError(f"--chat-template: {error}") from error

    @property
    def available(self) -> bool:
        return bool(self._compiled)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the conversation as text.

        Args:
          messages: messages in OpenAI's format. Content is text or a list of text parts. If the
            template does not support lists, their texts are joined. If it supports only lists,
            a text becomes a list of one part. Other parts are rejected.
          add_generation_prompt: ends with the beginning of the assistant's turn.
          continue_final_message: leaves the last message open, for the model to continue it.
          kwargs: further variables of the template (`enable_thinking=False`).

        Raises:
          RequestError: the messages cannot be rendered. The template rejects them, they are not
            plain JSON, or the text exceeds `MAX_RENDERED_CHARS`. `param` names the field.
        """
        variables = _variables(messages, tools, documents, kwargs)
        return self._render(variables, add_generation_prompt, continue_final_message)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        encode_text: Callable[[str, Callable[[str], list[int]]], list[int]] | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_special_tokens: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """Return the ids of the rendered conversation, with the template's special tokens.

        Special tokens in messages, tools, documents or kwargs are encoded as plain text. An
        exception is a template that assembles a special token from pieces of a message. The other
        arguments are those of `render`.

        Args:
          encode_text: receives the rendered text and a function that encodes a part of it, and
            returns the ids. Default: encodes the whole text.
          add_special_tokens: adds the tokenizer's special tokens (BOS) to the template's.

        Raises:
          RequestError: as `render`.
        """
        variables = _variables(messages, tools, documents, kwargs)
        hidden: dict[str, str] | None = None
        if any(map(tokenizer.spells_special_token, _strings(variables))):
            hidden = self._placeholders(variables, tokenizer)
            marks = {token: mark for mark, token in hidden.items()}
            variables = _replaced(variables, tokenizer.special_pattern, marks)
        text = self._render(variables, add_generation_prompt, continue_final_message)
        plain_text = None if hidden is None else _with_escapes(hidden)

        def encode(part: str) -> list[int]:
            return tokenizer.encode_template(
                part, plain_text, add_special_tokens=add_special_tokens
            )

        return encode(text) if encode_text is None else encode_text(text, encode)

    def _render(
        self, variables: dict[str, Any], add_generation_prompt: bool, continue_final_message: bool
    ) -> str:
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message cannot be combined: set "
                "add_generation_prompt to false",
                param="continue_final_message",
            )
        template = self._template_for(variables["tools"])
        for message in variables["messages"]:
            self._adapt_content(template, message)
            self._adapt_reasoning(template, message)
        final_text = ""
        if continue_final_message:
            final_text = _mark_final_message(variables["messages"])
        # Request variables may replace the model's special tokens, as with Hugging Face.
        context = {"add_generation_prompt": add_generation_prompt}
        context |= self.special_tokens | variables
        pieces: list[str] = []
        size, begin_s = 0, time.thread_time()
        try:
            with budget() as used:
                for piece in template.generate(context):
                    size += len(piece)
                    if len(piece) > LONG_PIECE:
                        used.charge(len(piece))
                    if size > MAX_RENDERED_CHARS:
                        raise RequestError(
                            f"the rendered chat is longer than {MAX_RENDERED_CHARS} characters",
                            param="messages",
                        )
                    pieces.append(piece)
        except (_Refusal, OverLimitError) as error:
            raise RequestError(_short(error), param="messages") from error
        except _TEMPLATE_FAULTS as error:
            raise RequestError(  # without the cause's text, which may contain any value's repr
                f"the chat template cannot render these messages ({type(error).__name__})",
                param="messages",
            ) from error
        finally:
            if size < SHORT_CHARS and time.thread_time() - begin_s > SLOW_S:
                self.slow = True
        text = "".join(pieces)
        return _cut_at_final_message(text, final_text) if continue_final_message else text

    def _template_for(self, tools: Any) -> jinja2.Template:
        template = self._compiled.get("tool_use") if tools is not None else None
        template = template or self._compiled.get(DEFAULT)
        if template is not None:
            return template
        if self._compiled:
            raise RequestError(
                "this model has no default chat template: start the server with --chat-template "
                f"and one of the names {', '.join(sorted(self._compiled))}",
                param="messages",
            )
        raise RequestError(
            "this model has no chat template: use the completions endpoint, or start the "
            "server with --chat-template FILE",
            param="messages",
        )

    def _adapt_content(self, template: jinja2.Template, message: dict[str, Any]) -> None:
        """Convert the content of a message to the form that the template renders.

        If the template renders lists, a list is kept, because the template chooses the separator of
        its parts, as in Hugging Face's libraries. Templates for images may render only lists.
        """
        role, content = message["role"], message.get("content")
        if isinstance(content, list) and not self._shows(template, role, 2):
            message["content"] = content = "".join(part["text"] for part in content)
        if (
            isinstance(content, str)
            and role in _SPEAKERS
            and not self._shows(template, role, 0)
            and self._shows(template, role, 1)
        ):
            message["content"] = [_part(content)]

    def _adapt_reasoning(self, template: jinja2.Template, message: dict[str, Any]) -> None:
        """Append the content of a message with calls to its reasoning if the template demands it.

        gpt-oss's template rejects messages with calls that have both, but shows either of them.
        """
        reasoning, content = message.get("thinking"), message.get("content")
        if not (message.get("tool_calls") and isinstance(reasoning, str) and reasoning):
            return
        if isinstance(content, str) and content and not self._takes_both(template):
            message["thinking"] = message["reasoning_content"] = f"{reasoning}\n\n{content}"
            message["content"] = ""

    def _takes_both(self, template: jinja2.Template) -> bool:
        """Return False if content is what makes the template reject a call with reasoning."""
        key = (id(template), "calls", 0)
        if key not in self._shown:

            def rejected(content: str) -> bool:
                texts = {"content": content, "thinking": _TRIAL, "reasoning_content": _TRIAL}
                asked = {"role": "assistant", "tool_calls": [_TRIAL_CALL], **texts}
                messages = [{"role": "user", "content": "x"}, asked]
                return self._rendered(template, messages) is None

            self._shown[key] = not rejected(_TRIAL) or rejected("")
        return self._shown[key]

    def _shows(self, template: jinja2.Template, role: str, parts: int) -> bool:
        """Return True if the template renders content of this role and form.

        The result comes from one trial per role and form. A list that is printed as a Python or
        JSON list does not count.

        Args:
          parts: the number of parts of a list, or 0 for a text.
        """
        key = (id(template), role, parts)
        if key not in self._shown:
            self._shown[key] = role in (*_SPEAKERS, "tool") and self._tried(template, role, parts)
        return self._shown[key]

    def _tried(self, template: jinja2.Template, role: str, parts: int) -> bool:
        texts = [f"{_TRIAL}{i}{_TRIAL}" for i in range(parts or 1)]

        def said(text: str) -> Any:
            return [_part(text)] if parts else text

        user = {"role": "user", "content": said("x")}
        tried: dict[str, Any] = {"role": role, "content": list(map(_part, texts))}
        if not parts:
            tried["content"] = texts[0]
        conversation = {"user": [tried], "system": [tried, user], "assistant": [user, tried, user]}
        if role == "tool":
            asked = {"role": "assistant", "content": "", "tool_calls": [_TRIAL_CALL]}
            result = {**tried, "tool_call_id": _TRIAL_CALL["id"], "name": "f"}
            conversation["tool"] = [user, asked, result]
        text = self._rendered(template, conversation[role])
        if text is None:
            return False
        ends = [text.partition(each)[1:] for each in texts]
        return all(found and not rest.startswith(("'}", '"}')) for found, rest in ends)

    def _rendered(self, template: jinja2.Template, messages: list[dict[str, Any]]) -> str | None:
        """Return the text of a trial conversation; None: the template rejects it."""
        context = {"messages": messages, "tools": None, "documents": None}
        try:
            with budget(_TRIAL_SHARE):
                return template.render(
                    context | {"add_generation_prompt": False} | self.special_tokens
                )
        except (OverLimitError, *_TEMPLATE_FAULTS):
            return None

    def _placeholders(self, variables: dict[str, Any], tokenizer: Tokenizer) -> dict[str, str]:
        """Return a private-use character for each special token that occurs in the variables.

        Neither these characters nor their escapes occur in the variables or in the template.
        """
        strings = _strings(variables)
        found = {
            token: None for text in strings for token in tokenizer.special_pattern.findall(text)
        }
        taken = "\0".join([*strings, *self.sources.values(), *self.special_tokens.values()])
        free = (
            chr(code)
            for code in range(0xE000, 0xF900)
            if chr(code) not in taken and f"u{code:04x}" not in taken
        )
        marks = dict(zip(free, found, strict=False))
        if len(marks) < len(found):
            raise RequestError("the messages use all private-use characters", param="messages")
        return marks


class _Refusal(jinja2.TemplateError):
    """An error that the template raised with `raise_exception`."""


class _GenerationTag(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks the model's output for training; no effect here.

    It is a call block as in Hugging Face's tag, so that the scopes of variables are the same.
    """

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_unchanged")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _unchanged(self, caller: Callable[[], str]) -> str:
        return caller()


def _compile(environment: Sandbox, source: str) -> jinja2.Template:
    limit = MAX_BYTES["chat_template.jinja"]
    try:
        if len(source) > limit or source.count("{{") + source.count("{%") > MAX_TAGS:
            raise ValueError(f"it has more than {limit} characters or {MAX_TAGS} tags")
        with budget():
            return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(
            f"the chat template is not valid Jinja: {_short(error)} (line {error.lineno}); "
            "pass another one with --chat-template"
        ) from error
    # Jinja and Python raise these for their own limits of nesting, arguments and recursion.
    except (SyntaxError, *_TEMPLATE_FAULTS) as error:
        raise CheckpointError(
            f"the chat template cannot be compiled: {type(error).__name__}: {_short(error)}; "
            "pass another one with --chat-template"
        ) from error


def _short(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= MAX_ERROR else f"{text[:MAX_ERROR]}..."


def _environment(now: Callable[[], datetime]) -> Sandbox:
    def raise_exception(message: object) -> None:
        raise _Refusal(str(message)[:MAX_ERROR])

    def strftime_now(format: str) -> str:
        if len(format) > MAX_DATE_FORMAT:
            raise ValueError(f"strftime_now takes at most {MAX_DATE_FORMAT} characters")
        return now().strftime(format)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes <, > and & for HTML, which no model was trained on.
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.add_filter("tojson", tojson)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _variables(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    documents: Sequence[Mapping[str, Any]] | None,
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    if "messages" in kwargs:
        raise RequestError("a template argument cannot be named messages", param="messages")
    variables = _plain_json(dict(kwargs), "chat_template_kwargs")
    variables["messages"] = [_message(m) for m in _plain_json(messages, "messages")]
    variables["tools"] = _plain_json(tools, "tools")
    variables["documents"] = _plain_json(documents, "documents")
    return variables


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError("each message must be an object with a role", param="messages")
    if isinstance(message.get("content"), list):
        message["content"] = [_part(_part_text(part)) for part in message["content"]]
    # Clients use several names for reasoning. Templates read the first; gpt-oss's reads the second.
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    if reasoning is not None:
        return {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _part_text(part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)} if kind != "text":
            raise RequestError(
                f"content of type {kind!r} is not supported: use text", param="messages"
            )
    raise RequestError(
        'a content part must look like {"type": "text", "text": "..."}', param="messages"
    )


def _plain_json(value: Any, param: str, depth: int = 0) -> Any:
    """Return a copy of the value that has only plain JSON types.

    Templates call methods of their variables, so these must be pure data.
    """
    if depth > MAX_NESTING:
        raise RequestError(f"{param} is nested deeper than {MAX_NESTING} levels", param=param)
    if value is None or type(value) in (bool, int, float):
        return value
    # Instances of subclasses lose overridden methods such as __str__.
    if isinstance(value, str):
        return _unicode(str.__str__(value), param)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise RequestError(f"{param}: the keys of an object must be strings", param=param)
        return {
            _plain_json(key, param): _plain_json(item, param, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain_json(item, param, depth + 1) for item in value]
    raise RequestError(f"{param} has a {type(value).__name__}, not plain JSON", param=param)


def _unicode(text: str, param: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{param} must be valid Unicode, but it has a lone surrogate", param=param
        ) from error
    return text


def _strings(value: Any) -> list[str]:
    """Return every string in a JSON value, including keys."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    if isinstance(value, dict):
        return [*value, *(text for item in value.values() for text in _strings(item))]
    return []


def _replaced(value: Any, pattern: re.Pattern[str], marks: Mapping[str, str]) -> Any:
    """Return the JSON value with each match of the pattern replaced, including keys."""
    if isinstance(value, str):
        return pattern.sub(lambda match: marks[match[0]], value)
    if isinstance(value, list):
        return [_replaced(item, pattern, marks) for item in value]
    if isinstance(value, dict):
        return {
            _replaced(key, pattern, marks): _replaced(item, pattern, marks)
            for key, item in value.items()
        }
    return value


def _with_escapes(hidden: Mapping[str, str]) -> dict[str, str]:
    """Add the marks' escapes, which a template prints for a dict or ASCII JSON."""
    return {**hidden, **{f"\\u{ord(mark):04x}": token for mark, token in hidden.items()}}


def _mark_final_message(messages: list[dict[str, Any]]) -> str:
    """Append the tag to the last message's text or last part, and return the original text."""
    content = messages[-1].get("content") if messages else None
    holder, key = (messages[-1], "content") if messages else ({}, "content")
    if isinstance(content, list) and content:
        holder, key = content[-1], "text"
        content = content[-1]["text"]
    if not isinstance(content, str):
        raise RequestError(
            "continue_final_message requires a last message with text",
            param="continue_final_message",
        )
    holder[key] = content + _CONTINUE_TAG
    return content


def _cut_at_final_message(text: str, final_text: str) -> str:
    """Return the rendered text up to the end of the final message, without the end of its turn."""
    tag = _CONTINUE_TAG.strip()
    if final_text.strip() not in text or tag not in text:
        raise RequestError(
            "continue_final_message: the chat template does not render the last message unchanged",
            param="continue_final_message",
        )
    end = text.rindex(tag)
    if text.startswith(_CONTINUE_TAG, end):
        return text[:end]
    # The tag has lost its space, so the template trims messages. Trim this one as well.
    return text[:end].rstrip()
