"""Flags: names of other engines, files, help, and misspellings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge_jax.config import EngineConfig
from forge_jax.config.aliases import REFUSED_VALUES, VALUES
from forge_serve.cli import aliases
from forge_serve.cli import main as cli
from forge_serve.cli.flags import flags
from forge_serve.cli.options_file import read_options
from forge_serve.config import ServerConfig

Configs = list[tuple[EngineConfig, ServerConfig]]
ALL = "serve --help-all"
OURS = {flag.flag: flag for section in cli.SECTIONS.values() for flag in flags(section)}


@pytest.fixture
def configs(monkeypatch) -> Configs:
    calls: Configs = []

    def serve(engine: EngineConfig, server: ServerConfig, startup: object) -> int:
        calls.append((engine, server))
        return 0

    monkeypatch.setattr("forge_serve.server.process.serve", serve)
    return calls


def flat(configs: Configs) -> dict[str, Any]:
    [(engine, server)] = configs
    sections = [engine.model, engine.cache, engine.batch, engine.speculation, engine.parallel]
    return {name: value for each in [*sections, server] for name, value in vars(each).items()}


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error of a command line that cannot be parsed."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("forge-jax: error: ") and error.count("\n") == 1
    return error


# ---- names of other engines --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--tensor-parallel-size 2", "tensor_parallel", 2),
        ("-tp 2", "tensor_parallel", 2),
        ("--gpu-memory-utilization 0.5", "memory_fraction", 0.5),
        ("--kv-cache-dtype fp8_e4m3", "kv_dtype", "fp8"),
        ("--kv-cache-dtype=int8", "kv_dtype", "int8"),
        ("--no-enable-prefix-caching", "prefix_cache", False),
        ("--no-prefix-cache --enable-prefix-caching", "prefix_cache", True),
        ("--no-enable-chunked-prefill", "chunked_prefill", False),
        ("--enforce-eager", "command_buffers", False),
        ("--no-async-scheduling", "one_step_ahead", False),
        ("--num-gpu-blocks-override 64", "num_blocks", 64),
        ("--max-batch-size 8", "max_num_seqs", 8),
        ("--max-prefill-tokens 256", "max_num_batched_tokens", 256),
        ("--max_num_batched_tokens 256", "max_num_batched_tokens", 256),
        ("--model-path org/other", "model", "org/other"),
        ("--model org/other", "model", "org/other"),
        ("--kv-cache naive", "kv_cache", "contiguous"),
        ("--kv-cache paged", "kv_cache", "paged"),
        ("--dtype half", "dtype", "float16"),
        ("--lora-modules a=x b=y", "lora", ("a=x", "b=y")),
        ('--lora-modules {"name":"a","path":"x"}', "lora", ("a=x",)),
        ("--enable-lora --lora-modules a=x", "lora", ("a=x",)),
        ("--disable-log-requests", "request_log", False),
        ("--ssl-certfile c --ssl-keyfile k", "tls_cert", "c"),
        ('--allowed-origins ["https://a.example"]', "cors_origin", ("https://a.example",)),
        ("--enable-auto-tool-choice --tool-call-parser hermes", "tool_call_parser", "hermes"),
        ("--trust-remote-code --seed 3", "seed", 3),
        (
            '--speculative-config {"method":"ngram","num_speculative_tokens":3}',
            "max_draft_tokens",
            3,
        ),
        ('--speculative-config {"model":"org/small"}', "draft_model", "org/small"),
        ("--spec-method ngram --spec-tokens 5", "max_draft_tokens", 5),
        ("--spec-method draft_model --spec-model org/small", "draft_model", "org/small"),
        ("--device-memory-utilization 0.5", "memory_fraction", 0.5),
        ("--shutdown-timeout 5", "drain_timeout_s", 5.0),
        ("--sse-keep-alive-interval 5", "sse_keep_alive_s", 5.0),
        ("--max-num-queued-tokens 900", "max_queued_tokens", 900),
    ],
)
def test_flag_of_another_engine_sets_the_matching_field(words, field, value, configs):
    assert cli.main(["serve", *words.split()]) == 0
    assert flat(configs)[field] == value


@pytest.mark.parametrize("alias", aliases.ALIASES, ids=lambda alias: alias.name)
def test_alias_names_a_field_and_never_an_existing_flag(alias):
    fields = {flag.name for flag in OURS.values()} | {"model"}
    assert alias.option in fields
    assert {alias.flag, alias.negative}.isdisjoint(OURS)
    assert alias.name not in fields


def test_own_flags_are_not_listed_as_other_engines():
    names = {flag.removeprefix("--").replace("-", "_") for flag in OURS}
    names |= {flag.name for flag in OURS.values()}
    assert names.isdisjoint(aliases.REFUSED)
    assert names.isdisjoint(implied.name for implied in aliases.IMPLIED)


def test_values_of_other_engines_are_rejected():
    choices = {flag.name: flag.choices or () for flag in OURS.values()}
    for option, values in VALUES.items():
        assert set(choices[option]).isdisjoint(values)
        assert set(choices[option]) >= set(values.values())
    for option, values in REFUSED_VALUES.items():
        assert set(choices[option]).isdisjoint(values)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--swap-space 4", "--swap-space is not supported: preempted sequences are recomputed"),
        ("--decode-context-parallel-size 2", "use --tensor-parallel or --pipeline-parallel"),
        ("--kv-cache-memory-bytes 9", "use --num-blocks"),
        ("--ep-size 2", "use --expert-parallel"),
        ("--quantization awq", "--quantization: awq: the checkpoint's config.json sets the method"),
        ("--kv-cache-dtype fp8_e5m2", "use fp8"),
        ('--speculative-config {"method":"eagle"}', "must be ngram, suffix, draft_model"),
        ("--spec-method eagle3", "--spec-method: the method must be ngram, suffix, draft_model"),
        ("--max-num-queued-reqs 4", "use --max-queued-requests"),
        ("--speculative-config eagle", "must be a JSON object"),
        ('--speculative-config {"method":[1]}', "must be ngram, suffix, draft_model, not [1]"),
        ("--lora-modules {", "--lora-modules: invalid JSON"),
        ("--lora-modules [1]", "--lora-modules must be NAME=FOLDER, or JSON, not 1"),
    ],
)
def test_flag_without_a_counterpart_is_rejected_with_the_reason(words, said, capsys):
    assert said in refused(["serve", *words.split()], capsys)


def test_switch_that_needs_another_flag_names_it(configs, capsys):
    assert cli.main(["serve", "--enable-lora"]) == 1
    assert "--enable-lora has no effect by itself: set --lora" in capsys.readouterr().err
    assert configs == []


def test_model_is_given_once(configs, capsys):
    assert cli.main(["serve", "org/a", "--model", "org/b"]) == 1
    assert "MODEL and --model cannot both be set: omit one of them" in capsys.readouterr().err
    assert configs == []


# ---- files of flags ----------------------------------------------------------------------------


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "flags.toml"
    file.write_text(text)
    return str(file)


def test_config_file_sets_flags_and_the_command_line_overrides_it(configs, tmp_path):
    file = write(
        tmp_path,
        """
        model = "org/file"
        port = 8001
        max_num_seqs = 4
        max-model-len = "auto"
        block-size = 32
        no-prefix-cache = true
        request_log = false
        drain_timeout_s = 3
        gpu-memory-utilization = 0.5
        enforce-eager = false
        dtype = "half"
        lora = ["a=x", "b=y"]
        enable-lora = true
        cors-origin = "*"
        speculative-config = {method = "ngram", num_speculative_tokens = 3}
        """,
    )
    expected = {
        "model": "org/file",
        "port": 8001,
        "max_num_seqs": 4,
        "max_model_len": None,
        "block_size": 32,
        "prefix_cache": False,
        "request_log": False,
        "drain_timeout_s": 3.0,
        "memory_fraction": 0.5,
        "command_buffers": True,
        "dtype": "float16",
        "lora": ("a=x", "b=y"),
        "cors_origin": ("*",),
        "speculation": "ngram",
        "max_draft_tokens": 3,
    }
    assert cli.main(["serve", "--config", file]) == 0
    assert {name: flat(configs)[name] for name in expected} == expected
    configs.clear()
    words = (
        "org/line --port 1 --max-num-seqs 5 --block-size auto --enable-prefix-caching --lora c=z"
    )
    assert cli.main(["serve", "--config", file, *words.split()]) == 0
    expected |= {"model": "org/line", "port": 1, "max_num_seqs": 5, "block_size": None}
    expected |= {"prefix_cache": True, "lora": ("c=z",)}
    assert {name: flat(configs)[name] for name in expected} == expected


def test_config_file_accepts_every_flag_and_field(tmp_path):
    serve = cli.subparsers(cli.make_parser())["serve"]
    for flag in OURS.values():
        value: Any = {int: 1024, float: 0.5, str: "text"}.get(flag.type)  # type: ignore[call-overload]
        if flag.switch:
            value = not flag.default
        elif flag.repeated:
            value = ["a=b"]
        elif flag.choices:
            value = flag.choices[-1]
        shown = str(value).lower() if flag.switch else repr(value)
        by_flag = f"{flag.flag.removeprefix('--')} = {'true' if flag.switch else shown}"
        expected = {flag.name: value}
        assert read_options(serve, Path(write(tmp_path, by_flag))) == expected
        if "--" + flag.name.replace("_", "-") in OURS.keys() - {flag.flag}:
            continue  # --compile-cache is a flag of another field than `compile_cache`
        by_field = f"{flag.name} = {shown}"
        assert read_options(serve, Path(write(tmp_path, by_field))) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 1", "prot: not a flag of serve; did you mean port?"),
        ("tensor-paralel-size = 2", "did you mean tensor-parallel-size?"),
        ("in-flight = 2", "in-flight: not a flag of serve"),
        ('port = "8000"', "port: must be a whole number, not '8000'"),
        ("port = true", "port: must be a whole number, not True"),
        ("port = 1.5", "port: must be a whole number, not 1.5"),
        ("host = 1", "host: must be text, not 1"),
        ('memory-fraction = "half"', "memory-fraction: must be a number, not 'half'"),
        ('block-size = "big"', "block-size: must be a whole number or \"auto\", not 'big'"),
        ("deterministic = 1", "deterministic: must be true or false, not 1"),
        ('dtype = "bfloat"', "must be one of auto, bfloat16, float16, float32, not 'bfloat'"),
        ("api-key = [1]", "api-key: must be a string or a list of strings"),
        ("swap-space = 4", "swap-space: is not supported: preempted sequences"),
        ('quantization = "gptq"', "gptq: the checkpoint's config.json sets the method"),
        (
            "tensor-parallel = 1\ntensor_parallel_size = 2",
            "are the same option: set only one of them",
        ),
        ("[server]\nport = 1", "server: unknown table: put keys at the top level"),
        ("port.number = 1", "port: must not be a table: put keys at the top level"),
        ("port = ", "not a TOML file"),
        ('config = "x.toml"', "config: can only be set on the command line"),
        ("debug = true", "debug: can only be set on the command line"),
        ("enable-lora = true", "--enable-lora has no effect by itself"),
        ('model = ""', "no model ''"),
        ("max-num-seqs = 0", "--max-num-seqs must be at least 1"),
    ],
)
def test_invalid_config_file_error_names_file_and_key(text, said, configs, capsys, tmp_path):
    file = write(tmp_path, text)
    assert cli.main(["serve", "--config", file]) == 1
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert f"--config {file}" in error or said.startswith(("--", "no model"))
    assert configs == []


def test_missing_config_file_fails_with_one_line(capsys, tmp_path):
    assert cli.main(["serve", "--config", str(tmp_path / "no.toml")]) == 1
    assert "--config: cannot read" in capsys.readouterr().err


def test_other_commands_accept_a_config_file_of_their_flags(capsys, tmp_path):
    file = write(tmp_path, 'url = "http://127.0.0.1:1"\nmax-num-seqs = 3\nmax-tokens = "auto"')
    assert cli.main(["bench", "--config", file]) == 1
    assert "max-tokens: not a flag of bench" in capsys.readouterr().err
    file = write(tmp_path, 'url = "http://127.0.0.1:1"\nmax-num-seqs = 3')
    assert cli.main(["bench", "--config", file]) == 1
    assert "--max-num-seqs can only be set for an engine" in capsys.readouterr().err


# ---- help --------------------------------------------------------------------------------------


def helped(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


def listed(text: str) -> set[str]:
    return {line.split()[0] for line in text.splitlines() if line.startswith("  --")}


def test_short_help_has_the_essential_flags_and_names_the_long_one(capsys):
    short = helped(["serve", "--help"], capsys)
    everything = helped(["serve", "--help-all"], capsys)
    essential = {flag.flag for flag in OURS.values() if flag.essential}
    assert listed(short) & OURS.keys() == essential
    assert listed(everything) & OURS.keys() == OURS.keys()
    assert 15 <= len(essential) <= 30
    assert f"{len(OURS) - len(essential)} more flags: forge-jax serve --help-all" in short
    assert helped(["serve", "--help=all"], capsys) == everything


def test_new_field_is_only_in_the_long_help_unless_essential(capsys, monkeypatch):
    import dataclasses

    from forge_jax.config import option

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Section:
        shiny: int = option(1, "a new one")
        vital: int = option(2, "another", essential=True)

    monkeypatch.setitem(cli.SECTIONS, "new", Section)
    assert listed(helped(["serve", "--help"], capsys)) & {"--shiny", "--vital"} == {"--vital"}
    assert listed(helped(["serve", "--help-all"], capsys)) >= {"--shiny", "--vital"}


@pytest.mark.parametrize("command", ["serve", "chat", "generate", "batch", "bench", "profile"])
def test_help_never_shows_names_of_other_engines(command, capsys):
    found = listed(helped([command, "--help-all"], capsys))
    assert found.isdisjoint(alias.flag for alias in aliases.ALIASES)
    assert found.isdisjoint(implied.flag for implied in aliases.IMPLIED)


# ---- misspelled --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said", "page"),
    [
        ("serve --max-num-seq 2", "unknown flag --max-num-seq; did you mean --max-num-seqs?", ALL),
        ("serve --gpu-memory-utilisation 1", "did you mean --memory-fraction?", ALL),
        ("serve --zzz", "unknown flag --zzz", ALL),
        ("chat --port 1", "--port is a flag of serve", "chat --help"),
        ("convert a b --dtypo x", "did you mean --dtype?", "convert --help"),
        ("serve --dtype bfloat1", "value 'bfloat1'; did you mean bfloat16?", "serve --help"),
        ("sevre", "unknown command 'sevre'; did you mean serve?", "--help"),
        ("serve a b", "unexpected argument 'b'", "serve --help"),
        ("profile diff a b --pecrent 1", "did you mean --percent?", "profile diff --help"),
    ],
)  # fmt: skip
def test_misspelled_flag_has_a_suggestion_and_its_help_page(arguments, said, page, capsys):
    error = refused(arguments.split(), capsys)
    assert said in error
    assert error.endswith(f"(see: forge-jax {page})\n")


def test_flag_prefix_is_not_accepted(capsys):
    assert "unknown flag --max-model; did you mean --max-model-len?" in refused(
        ["serve", "--max-model", "9"], capsys
    )


@pytest.mark.parametrize(
    "arguments",
    [
        "serve MODEL",
        "chat MODEL",
        "generate MODEL text",
        "bench MODEL",
        "profile MODEL",
        "convert MODEL out",
        "batch in out MODEL",
    ],
)
def test_invalid_model_is_found_before_anything_is_loaded(arguments, capsys, monkeypatch, tmp_path):
    def load(*_: object, **__: object) -> Any:
        raise AssertionError("it was loaded")

    (tmp_path / "llama-mini").mkdir()
    for name in ("forge_serve.server.process.serve", "forge_serve.server.process.load_engine"):
        monkeypatch.setattr(name, load)
    monkeypatch.setattr("forge_serve.cli.commands.chat.read_stdin", lambda: "text")
    words = arguments.replace("MODEL", str(tmp_path / "lama-mini")).split()
    assert cli.main(words) == 1
    error = capsys.readouterr().err
    assert error.startswith("forge-jax: error: no model ") and error.count("\n") == 1
    assert error.endswith(f"; did you mean {tmp_path / 'llama-mini'}?\n")
