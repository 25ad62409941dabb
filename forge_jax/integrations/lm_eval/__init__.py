"""The model `forge-jax` of lm-evaluation-harness: an `LLM` in the harness's process.

    python -m forge_jax.integrations.lm_eval run --model forge-jax --model_args pretrained=MODEL ...

The harness has no plug-ins, so this command registers the model and then runs the harness's
command. In Python, importing this module registers it. Tokenization and truncation follow the
harness's own model `hf`, so scores are comparable. Windows are one token shorter than those of `hf`
with the same `max_length`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from forge_jax.errors import ConfigError, EngineError, ForgeError, ModelError, RequestError
from forge_jax.host.progress import progress_bar
from forge_jax.llm import LLM
from forge_jax.sampling_params import (
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    SamplingParams,
)
from forge_jax.schedule.outputs import RequestOutput

try:
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
    from lm_eval.models.utils import (  # pyright: ignore[reportMissingImports]
        maybe_truncate,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
    from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
        get_rolling_token_windows,
        make_disjoint_window,
        simple_parse_args_string,
    )
except ImportError as error:
    raise ImportError(
        f"forge_jax.integrations.lm_eval requires lm-evaluation-harness ({error}): run "
        "pip install --upgrade lm_eval"
    ) from error

__all__ = ["ForgeLM", "cli_evaluate"]

# ((context, continuation) as the key of the harness's cache, or None; their token IDs)
type Pair = tuple[tuple[str, str] | None, list[int], list[int]]

MAX_GEN_TOKS = 256  # the harness's default for tasks that set no limit
# Requests run in slices. After each, its results are in the harness's cache, and the logprobs of
# its prompts (about 130 bytes per token) are freed.
SLICE_REQUESTS = 1024
SLICE_TOKENS = 1 << 20
# The harness's names for sampling, in `generation_kwargs` of a task or `--gen_kwargs`.
_SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams)) - {
    *("n", "max_tokens", "stop", "logprobs", "prompt_logprobs", "detokenize", "structured_outputs")
}
# Options without effect here, and their only accepted value. None accepts any value.
_WITHOUT_EFFECT = {"num_beams": 1, "use_cache": None}

log = logging.getLogger(__name__)


@register_model("forge-jax")
class ForgeLM(TemplateLM):
    """A model of the harness.

    Args:
      pretrained: the model, as for `LLM`, or an `LLM` that is already loaded.
      max_length: tokens of a request; longer ones are truncated. Default: the context length.
      max_gen_toks: output tokens of a task that sets no limit.
      add_bos_token: add the tokenizer's special tokens (BOS) to texts. Default: as the tokenizer
        does for prompts. `local-completions` never adds them.
      prefix_token_id: the token before a text without a context. Default: BOS, otherwise EOS.
      enable_thinking: the chat template's thinking switch.
      think_end_token: the end of the reasoning, for example `</think>`. Only later text is scored,
        and stop strings apply only to it.
      chat_template_args: other variables of the chat template.
      device: an index, as for `LLM`, or `cpu`, `cuda` or `cuda:N`, as in the harness's `--device`.
        Without a GPU, `cuda` means the CPU.
      options: other options of `LLM`. The harness's `batch_size` and `max_batch_size` are ignored,
        because the engine batches all requests.

    Raises:
      ModelError: if the model cannot be served.
      ConfigError: if an option is wrong or does not fit the model.
    """

    def __init__(
        self,
        pretrained: str | LLM = "forge-tiny",
        *,
        max_length: int | None = None,
        max_gen_toks: int = MAX_GEN_TOKS,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | None = None,
        chat_template_args: dict[str, Any] | None = None,
        device: str | int | None = None,
        **options: Any,
    ):
        super().__init__()
        for ignored in ("batch_size", "max_batch_size"):
            options.pop(ignored, None)
        if isinstance(pretrained, LLM):
            if device is not None:
                options["device"] = device
            if options:
                raise ConfigError(
                    f"{', '.join(options)}: cannot change an LLM; set it when you create the LLM"
                )
            self.llm = pretrained
        else:
            self.llm = LLM(str(pretrained), **{**_device_options(device), **options})
        self.max_length = self.llm.max_model_len if max_length is None else max_length
        if not 2 <= self.max_length <= self.llm.max_model_len:
            raise ConfigError(
                f"max_length must be between 2 and {self.llm.max_model_len}, the context length; "
                f"got {self.max_length}"
            )
        if self.llm.tokenizer is None:
            raise ModelError("lm-evaluation-harness requires a model with a tokenizer.json")
        self.max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id
        self._think_end_token = think_end_token
        switch = {"enable_thinking": enable_thinking, "thinking": enable_thinking}
        self._template_args = {
            **({} if enable_thinking is None else switch),
            **(chat_template_args or {}),
        }

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> ForgeLM:
        """Return the model of `--model_args`, which override the harness's `--device`."""
        given = {k: v for k, v in (additional_config or {}).items() if v is not None}
        return cls(**{**given, **arg_dict})

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> ForgeLM:
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    # ---- tokens ----------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        token = self.llm.tokenizer.eos_token_id
        return self.prefix_token_id if token is None else token

    @property
    def prefix_token_id(self) -> int:
        tokenizer = self.llm.tokenizer
        for token in (self._prefix_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id):
            if token is not None:
                return token
        raise ModelError("the tokenizer has neither BOS nor EOS: pass prefix_token_id=ID")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **more: Any
    ) -> list[int]:
        """Return the token IDs of a text, without a second BOS if the text begins with it."""
        bos = self.llm.tokenizer.bos_token
        if add_special_tokens is None and bos and string.startswith(bos):
            add_special_tokens = False
        elif add_special_tokens is None:
            add_special_tokens = self._add_bos_token is not False
        return self.llm.tokenizer.encode(string, add_special_tokens)

    # ---- chats -----------------------------------------------------------------------------------

    @property
    def tokenizer_name(self) -> str:
        return self.llm.name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the chat template, for the harness's record of the run.

        Raises:
          RequestError: if a template other than "default" is named, or the model has no template.
        """
        if chat_template is False:
            return None
        if chat_template not in (True, "default"):
            raise RequestError(
                f"--apply_chat_template {chat_template}: only the default chat template is "
                "supported: omit the name, or set chat_template=FILE in --model_args",
                param="chat_template",
            )
        sources = self._chat_template.sources
        if "default" not in sources:
            raise RequestError(
                f"the model has no default chat template, only {', '.join(sources)}: set "
                "chat_template=FILE in --model_args",
                param="chat_template",
            )
        return sources["default"]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as a prompt.

        If the template rejects it, system messages are dropped, as in the harness's `hf`.

        Raises:
          RequestError: if the template rejects the conversation, or the model has no template.
        """
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
            **self._template_args,
        }
        try:
            return self._chat_template.render(chat_history, **options)
        except RequestError as error:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) in (0, len(chat_history)):
                raise
            text = self._chat_template.render(others, **options)
            log.warning("dropped the system message, which the chat template rejects: %s", error)
            return text

    @property
    def _chat_template(self) -> Any:
        template = self.llm.chat_template
        if template is None or not template.available:
            raise RequestError(
                "this model has no chat template: omit --apply_chat_template, or set "
                "chat_template=FILE in --model_args",
                param="messages",
            )
        return template

    # ---- requests --------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **more: Any
    ) -> list[tuple[float, bool]]:
        """Return the logprob of each continuation, and True if greedy decoding would return it.

        Contexts that do not fit are truncated on the left.
        """
        scores: list[tuple[float, bool]] = []
        for i, score in self._scores(requests, range(len(requests)), disable_tqdm):
            scores.append(score)
            key = requests[i][0]
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, score)
        return scores

    def _scores(
        self, pairs: Sequence[Pair], owners: Sequence[int], disable_tqdm: bool
    ) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Yield (index of the pair, its score). `owners` are as in `_outputs`."""
        prompts: list[list[int]] = []
        for _, context, continuation in pairs:
            if len(context) + len(continuation) > self.max_length:
                log.warning(
                    "context (%d tokens) and continuation (%d) exceed max_length (%d): truncated",
                    *(len(context), len(continuation), self.max_length),
                )
            # The first token of a prompt has no logprob.
            before = context or [self.prefix_token_id]
            prompts.append([*before, *continuation][-self.max_length :])
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, temperature=0, detokenize=False)
        all_params = [params] * len(prompts)
        for i, output in self._outputs(prompts, all_params, owners, disable_tqdm):
            assert output.prompt_logprobs is not None
            num_scored = len(pairs[i][2])
            scored = output.prompt_logprobs[-num_scored:] if num_scored else ()
            yield i, (sum(t.logprob for t in scored), all(t.rank == 1 for t in scored))

    def _outputs(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        owners: Sequence[int],
        disable_tqdm: bool,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yield (index of the prompt, its output), slice by slice, with one progress bar.

        Args:
          owners: the index of the harness's request for each prompt, which errors name.

        Raises:
          EngineError: if a prompt failed. It is raised after the other outputs of the slice.
        """
        with progress_bar(total=len(prompts), unit="prompts", show=not disable_tqdm) as bar:
            for start, stop in _slices(prompts):
                failed: list[tuple[int, ForgeError]] = []
                for i, output in enumerate(
                    self.llm.generate(prompts[start:stop], params[start:stop], progress=bar), start
                ):
                    error = output.outputs[0].error
                    if error is None:
                        yield i, output
                    else:
                        failed.append((i, error))
                if failed:
                    i, error = failed[0]
                    raise EngineError(f"request {owners[i]} of the task: {error}") from error

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the logprob of each text, in disjoint windows of at most `max_length` tokens.

        A window has `max_length - 1` scored tokens and one token of context.
        """
        texts = [request.args[0] for request in requests]
        windows: list[Pair] = []
        owners: list[int] = []
        for owner, text in enumerate(texts):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(owner)
        totals, missing = [0.0] * len(texts), Counter(owners)
        for i, (logprob, _) in self._scores(windows, owners, disable_tqdm):
            owner = owners[i]
            totals[owner] += logprob
            missing[owner] -= 1
            if not missing[owner]:
                key = (texts[owner],)
                self.cache_hook.add_partial("loglikelihood_rolling", key, totals[owner])
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context up to the first stop string.

        Raises:
          RequestError: if a task's `generation_kwargs` are not supported. `param` names the field.
        """
        prompts, params, stops = [], [], []
        for request in requests:
            context, options = request.args
            sampling, until, max_tokens = self._sampling(options)
            if max_tokens >= self.max_length:
                raise RequestError(
                    f"max_gen_toks ({max_tokens}) must be less than max_length "
                    f"({self.max_length}): set it in --gen_kwargs",
                    param="max_gen_toks",
                )
            ids = self.tok_encode(context) or [self.prefix_token_id]
            prompts.append(maybe_truncate(ids, max_tokens, self.max_length)[0])
            params.append(SamplingParams(max_tokens=max_tokens, **sampling))
            stops.append(until)
        texts: list[str] = []
        for i, output in self._outputs(prompts, params, range(len(prompts)), disable_tqdm):
            text = postprocess_generated_text(output.text, stops[i], self._think_end_token)
            texts.append(text)
            self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return texts

    def _sampling(self, options: dict[str, Any]) -> tuple[dict[str, Any], list[str], int]:
        """Return the sampling parameters, stop strings and output limit of `generation_kwargs`."""
        given = dict(normalize_gen_kwargs(options, self.max_gen_toks))
        until = [text for text in given.pop("until") if text]
        max_tokens, samples = int(given.pop("max_gen_toks")), given.pop("do_sample")
        given.setdefault("temperature", 1.0 if samples else 0.0)
        for name, only in _WITHOUT_EFFECT.items():
            if name in given and only in (None, given[name]):
                del given[name]
        for name in given:
            if name not in _SAMPLING:
                raise RequestError(
                    f"generation_kwargs: {name} is not supported; supported are "
                    f"{', '.join(sorted(_SAMPLING))}",
                    param=name,
                )
        # All stop strings apply to the finished text. The engine's stop strings only end it early.
        if self._think_end_token is None:
            short = [text for text in until if len(text) <= MAX_STOP_STRING_CHARS]
            given["stop"] = short[:MAX_STOP_STRINGS]
        else:
            given["skip_special_tokens"] = False
        return given, until, max_tokens

    def get_model_info(self) -> dict[str, Any]:
        """Return what the harness records about the model: its fingerprint, if deterministic."""
        fingerprint = self.llm.system_fingerprint
        return {} if fingerprint is None else {"system_fingerprint": fingerprint}


def _device_options(device: str | int | None) -> dict[str, Any]:
    """Return the options of `LLM` for an index, or a device in PyTorch's notation."""
    if device is None:
        return {}
    if str(device).isdecimal():
        return {"device": int(device)}
    kind, _, index = str(device).partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ConfigError(f"device must be an index, cpu, cuda or cuda:N, got {device!r}")
    # The harness passes cuda:0 by default, also on machines without a GPU.
    return {"backend": "cpu" if kind == "cpu" else "auto", "device": int(index or 0)}


def _slices(prompts: Sequence[list[int]]) -> Iterator[tuple[int, int]]:
    """Yield the (start, stop) of slices with bounded requests and tokens, at least one request."""
    start = tokens = 0
    for i, prompt in enumerate(prompts):
        if i > start and (i - start == SLICE_REQUESTS or tokens + len(prompt) > SLICE_TOKENS):
            yield start, i
            start, tokens = i, 0
        tokens += len(prompt)
    if start < len(prompts):
        yield start, len(prompts)
