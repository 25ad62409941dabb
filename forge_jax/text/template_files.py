"""The sources of chat templates: a model folder's files and configuration, or `--chat-template`.

The precedence is that of Hugging Face's libraries.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from forge_jax.checkpoint.gguf import is_gguf
from forge_jax.errors import CheckpointError, ConfigError
from forge_jax.host.files import read_text, short_repr
from forge_jax.text.gguf import gguf_templates
from forge_jax.text.tokenizer import read_json_object

DEFAULT = "default"
MAX_TEMPLATES = 16  # published models have up to three
MAX_NAME = 64  # characters
_KIND = "chat_template.jinja"


def folder_templates(folder: Path) -> dict[str, str]:
    """Return the Jinja sources of a model folder or GGUF file, by name.

    `chat_template.jinja` is the default template, and `additional_chat_templates/NAME.jinja` are
    the others. Only if none of these files exists, the `chat_template` of `tokenizer_config.json`
    is used: a source, or a list of `{"name": ..., "template": ...}`. The last choice is
    `chat_template.json`, which processors of multimodal models had before transformers 4.52.

    Raises:
      CheckpointError: a file is invalid or too large, or there are too many templates.
    """
    if is_gguf(folder):
        return gguf_templates(folder)
    found = (
        _from_files(folder)
        or _from_config(folder / "tokenizer_config.json")
        or _from_config(folder / "chat_template.json")
    )
    if len(found) > MAX_TEMPLATES:
        raise CheckpointError(
            f"{folder} has {len(found)} chat templates; at most {MAX_TEMPLATES} are read"
        )
    return found


def given_template(folder: Path, given: str | Path) -> dict[str, str]:
    """Return the template that `--chat-template` selects.

    A text with a brace or a line break is Jinja. Any other value is a file, or the name of one of
    the folder's templates.

    Raises:
      ConfigError: the value is none of these.
      CheckpointError: the value is not a file, and the folder's templates are invalid.
    """
    if isinstance(given, str) and ("{" in given or "\n" in given):
        return {DEFAULT: given}
    try:
        return {DEFAULT: read_text(Path(given), _KIND, root=Path("/"))}  # links may lead anywhere
    except (OSError, CheckpointError) as error:
        named = folder_templates(folder)
        if str(given) in named:
            return {DEFAULT: named[str(given)]}
        names = f"; the model's own templates are {', '.join(sorted(named))}" if named else ""
        raise ConfigError(f"--chat-template: cannot read {given}: {error}{names}") from error


def _from_files(folder: Path) -> dict[str, str]:
    found = {}
    file = folder / _KIND
    with suppress(FileNotFoundError):
        found[DEFAULT] = read_text(file)
    try:
        others = sorted(folder.joinpath("additional_chat_templates").glob("*.jinja"))
    except OSError as error:
        raise CheckpointError(f"{folder}/additional_chat_templates: {error}") from error
    for file in others[: MAX_TEMPLATES + 1]:
        found[_name(file.stem, file)] = read_text(file, _KIND, root=folder)
    return found


def _from_config(file: Path) -> dict[str, str]:
    match read_json_object(file).get("chat_template"):
        case None:
            return {}
        case str(source):
            return {DEFAULT: source}
        case [*entries]:
            named = {}
            for entry in entries:
                match entry:
                    case {"name": str(name), "template": str(source)}:
                        named[_name(name, file)] = source
                    case _:
                        raise CheckpointError(f"{file}: chat_template has a malformed entry")
            return named
    raise CheckpointError(f"{file}: chat_template must be a string or a list of named templates")


def _name(name: str, file: Path) -> str:
    if len(name) > MAX_NAME:
        raise CheckpointError(
            f"{file}: the name of a chat template is too long: {short_repr(name)}"
        )
    return name
