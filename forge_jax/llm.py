"""`LLM`: the offline API, which runs `EngineCore` in the caller's thread."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_jax.config import EngineConfig, Pooling, python_names
from forge_jax.config.kv_events import read_kv_events
from forge_jax.engine.adapters import Adapters, LoadedAdapter
from forge_jax.engine.builder import assemble
from forge_jax.engine.parts import EngineParts
from forge_jax.engine.validation import check_in_flight, new_version, versioned
from forge_jax.errors import ConfigError, ModelError, RequestError
from forge_jax.host.progress import bar_of
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.activations import Activations, joined
from forge_jax.schedule.outputs import Completion, Delta, RequestOutput
from forge_jax.schedule.plan import TokenLogprobs
from forge_jax.schedule.pooled import normalized, stacked
from forge_jax.schedule.request import LoraRef, Request, TokenIds

if TYPE_CHECKING:
    from tqdm import tqdm

    from forge_jax.engine.validation import InFlightRequests
    from forge_jax.engine.weights import EngineWeights, NewWeights
    from forge_jax.models import Leaves, Model
    from forge_jax.scoring import ChunkedLogits, ScoreOptions

Prompt = str | Seq[int]
Messages = Seq[Mapping[str, Any]]
Lora = str | Seq[str | None] | None  # one adapter name for all prompts, or one per prompt
_Mailbox = list[tuple[str, list[Delta]]]  # (request ID, its new deltas) for one call


class LLM:
    """A model for offline generation.

    >>> llm = LLM("forge-tiny")
    >>> [output] = llm.generate("Once upon a time", SamplingParams(max_tokens=32, temperature=0))
    >>> output.text

    Args:
      model: a folder, a .gguf file, a Hugging Face ID, or "forge-tiny", the bundled model.
      options: any field of `EngineConfig`'s sections: `LLM("forge-tiny", dtype="float32")`. vLLM's
        option names are also accepted: `tensor_parallel_size=2`.

    Raises:
      ModelError: if the model cannot be served. The message names the reason.
      ConfigError: if an option is wrong or does not fit the model.
    """

    def __init__(self, model: str = "forge-tiny", **options: Any):
        with python_names():
            # Offline calls have no inter-token latency to protect.
            options.setdefault("itl_target_ms", 0)
            config = EngineConfig.from_options(model=str(model), **options)
            if read_kv_events(config.cache.kv_events_config) is not None:
                raise ConfigError(
                    "--kv-events-config: LLM does not publish events: omit it, or use a server"
                )
            self._start(assemble(config))

    @classmethod
    def from_pretrained(cls, model: str, **options: Any) -> LLM:
        """Return `LLM(model, **options)`. The name matches Hugging Face's constructors."""
        return cls(model, **options)

    @classmethod
    def from_parts(cls, parts: EngineParts) -> LLM:
        """Return an `LLM` for engine parts that the caller assembled, for example a fake device."""
        llm = cls.__new__(cls)
        llm._start(parts)
        return llm

    def _start(self, parts: EngineParts) -> None:
        parts.finish_compiling()
        self._parts = parts
        self._core = parts.core
        self._adapters = parts.adapters or Adapters.none()
        self._adapters.bind(
            num_requests_with=parts.core.num_requests_with, between_steps=self._between_steps
        )
        self._num_requests = 0
        self._mailboxes: dict[str, _Mailbox] = {}  # by request id
        self._lock = threading.Lock()  # held during a step; acquired before the adapters' own lock

    def close(self) -> None:
        """Stop the grammar compiler. Later requests with grammars are rejected."""
        if self._core.grammars is not None:
            self._core.grammars.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        return self._parts.name

    @property
    def max_model_len(self) -> int:
        return self._parts.max_model_len

    @property
    def system_fingerprint(self) -> str | None:
        """Hash of everything that determines the logits' bits; None unless `deterministic=True`."""
        return versioned(self._parts.system_fingerprint, self.weight_version)

    @property
    def tokenizer(self) -> Any:
        return self._parts.tokenizer

    @property
    def chat_template(self) -> Any:
        """The `ChatTemplate` of the model; None if it has no tokenizer."""
        return self._parts.chat_template

    # ---- weights, for training -------------------------------------------------------------------

    @property
    def model(self) -> Model:
        """The architecture, for `forge_jax.score` and other pure functions."""
        return self._weights.model

    @property
    def leaves(self) -> Leaves:
        """The current weights on the device, in the order of `model.names`.

        They are the engine's own arrays. Copy them before a step that donates them.
        """
        return self._weights.leaves

    @property
    def score_options(self) -> ScoreOptions:
        """The options with which `forge_jax.score` returns this engine's bits.

        Raises:
          ModelError: if the engine is not deterministic.
        """
        return self._weights.score_options

    def chunked_logits(self, max_len: int, *, lora: str | None = None) -> ChunkedLogits:
        """Return a source of the logits of given tokens, with this engine's bits.

        It uses the current weights and has its own KV cache of one sequence.

        Args:
          max_len: tokens of the longest sequence.
          lora: the name of a LoRA adapter. None uses the base model.

        Raises:
          ModelError: if the engine is not deterministic.
          RequestError: if no adapter has this name.
          ValueError: if `max_len` exceeds `max_model_len`.
        """
        place = 0 if lora is None else self._find_lora(lora).place
        return self._weights.chunked_logits(max_len, place)

    @property
    def weight_version(self) -> int:
        """The version of the current weights; 0 until `update_weights`."""
        return self._core.weight_version

    def update_weights(
        self,
        weights: NewWeights,
        version: int | None = None,
        *,
        in_flight: InFlightRequests = "keep",
    ) -> None:
        """Replace the weights between two steps, without compiling anything.

        The arrays are copied. The prefix cache is emptied, and LoRA adapters stay. Tokens carry the
        version of the weights that they were sampled with: see `Completion.weight_versions`.

        Args:
          weights: the leaves in the order of `model.names`, a mapping of arrays by name, or the
            path of a folder or GGUF file. Names are those of `model.names`, with floats as in an
            unpacked model, or those of the checkpoint. Arrays in a mapping are cast and packed as
            in loading. Files must describe the same model.
          version: the new weights' version, above the current one. Default: the next number.
          in_flight: "keep" continues unfinished requests with the new weights, after computing
            the keys and values of their tokens again. "restart" drops their output and starts them
            again with the same seeds. "abort" ends them.

        Raises:
          ModelError: if a leaf or tensor is missing or unknown, or has the wrong shape or type.
            Nothing has changed then.
          RequestError: if `version` or `in_flight` is invalid.
        """
        with python_names():
            check_in_flight(in_flight)
            new_version(version, self.weight_version)  # before anything is copied
            leaves = self._weights.prepare(weights)
            self._between_steps(
                lambda: self._weights.update(self._core, leaves, version, in_flight)
            )

    @property
    def _weights(self) -> EngineWeights:
        weights = self._parts.weights
        if weights is None:
            raise ModelError("this engine runs on a fake device, which has no weights")
        return weights

    # ---- LoRA adapters ---------------------------------------------------------------------------

    @property
    def loras(self) -> list[LoadedAdapter]:
        """The adapters that requests can use."""
        return self._adapters.all()

    def load_lora(self, name: str, path: str) -> None:
        """Load a LoRA adapter in PEFT's format, without compiling anything.

        The option `max_loras` must be set.

        Raises:
          RequestError: if the name is in use, no adapter slot is free, or the adapter does not fit
            the model.
        """
        with python_names():
            self._adapters.load(name, str(path))

    def unload_lora(self, name: str) -> None:
        """Unload a LoRA adapter.

        Raises:
          RequestError: if no adapter has this name, or an unfinished request uses it.
        """
        with python_names(), self._lock:
            self._adapters.unload(name)

    def _find_lora(self, name: str) -> LoraRef:
        with python_names():
            return self._adapters.find(name)

    def _between_steps(self, call: Callable[[], None]) -> None:
        with self._lock, self._parts.guard():
            call()

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        lora: Lora = None,
        progress: bool | tqdm[Any] = True,
    ) -> list[RequestOutput]:
        """Generate a continuation of each prompt.

        Args:
          prompts: one prompt or many, each a text or a list of token IDs. They run together.
          params: one for all prompts, or one per prompt. Default: `SamplingParams()`.
          lora: the name of a LoRA adapter for all prompts, or one name per prompt. None uses the
            base model.
          progress: show a progress bar, or update this one by one per finished prompt.

        Returns:
          One output per prompt, in the order of the prompts.

          A sample whose logits are not finite has the finish reason "error". Other samples are
          unaffected.

        Raises:
          RequestError: if a prompt or parameter cannot be served. In this case, no prompt runs.
        """
        batch: list[Any] = [prompts] if _is_prompt(prompts) else list(prompts)
        return self._run([self._encode(p) for p in batch], batch, params, lora, progress)

    def embed(
        self,
        prompts: Prompt | Seq[Prompt],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
        lora: Lora = None,
        progress: bool = True,
    ) -> np.ndarray:
        """Return the pooled final hidden states of prompts, f32[len(prompts), d].

        Prompts are texts or lists of token IDs. The first call compiles the pooling steps.

        Args:
          pooling: "last" for the last token's hidden state, "mean" for the mean over all tokens.
            Default: the option `pooling`.
          normalize: scale each vector to an L2 norm of 1.
          lora: as in `generate`.

        Raises:
          RequestError: if a prompt cannot be served. In this case, no prompt runs.
          ForgeError: the error that ended a request, for example hidden states that are not finite.
        """
        batch: list[Any] = [prompts] if _is_prompt(prompts) else list(prompts)
        pooling = self._parts.pooling if pooling is None else pooling
        params = SamplingParams(max_tokens=0, temperature=0.0, detokenize=False)
        requests = [
            replace(self._request(self._encode(prompt), params, name), pooling=pooling)
            for prompt, name in zip(batch, _for_each(lora, len(batch)), strict=True)
        ]
        for request in requests:
            self._check(request)
        self._prepare_pooling()
        collected = {r.request_id: _Collected(r) for r in requests}
        with _Interrupts() as interrupts, self._running(requests) as mailbox:
            self._collect(mailbox, collected, progress, interrupts)
        vectors = stacked([collected[r.request_id].pooled() for r in requests])
        return normalized(vectors) if normalize else vectors

    def chat(
        self,
        messages: Messages | Seq[Messages],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        lora: Lora = None,
        progress: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or many, using the model's chat template.

        `template_options` are passed to the chat template. See `generate` for the rest.
        """
        one = bool(messages) and isinstance(messages[0], Mapping)
        batch: list[Any] = [messages] if one else list(messages)
        ids = [self._encode_chat(conversation, **template_options) for conversation in batch]
        return self._run(ids, [None] * len(ids), params, lora, progress)

    def stream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        lora: str | None = None,
    ) -> Iterator[Delta]:
        """Yield the deltas of one prompt (text, token IDs or chat messages) as they are generated.

        Several streams can be read concurrently, even from other threads or while `generate` runs.

        Closing the iterator early aborts the request. If the request fails, its error is raised
        after the last delta.
        """
        if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], Mapping):
            ids = self._encode_chat(prompt)  # type: ignore[arg-type]
        else:
            ids = self._encode(prompt)  # type: ignore[arg-type]
        request = self._request(ids, params or SamplingParams(), lora)
        self._check(request)
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[Delta]:
        unfinished = request.params.n
        with self._running([request]) as mailbox:
            while unfinished:
                for _, deltas in self._updates(mailbox):
                    for delta in deltas:
                        unfinished -= delta.finish_reason is not None
                        yield delta
                        if delta.error is not None:
                            raise delta.error

    def _run(
        self,
        ids: list[list[int]],
        prompts: list[Any],
        params: SamplingParams | Seq[SamplingParams] | None,
        lora: Lora,
        progress: bool | tqdm[Any],
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            all_params = [params or SamplingParams()] * len(ids)
        else:
            all_params = list(params)
            if len(all_params) != len(ids):
                raise RequestError(
                    f"{len(ids)} prompts but {len(all_params)} SamplingParams", param="params"
                )
        names = _for_each(lora, len(ids))
        requests = [self._request(*each) for each in zip(ids, all_params, names, strict=True)]
        for request in requests:
            self._check(request)
        collected = {r.request_id: _Collected(r) for r in requests}
        with _Interrupts() as interrupts, self._running(requests) as mailbox:
            self._collect(mailbox, collected, progress, interrupts)
        return [
            collected[r.request_id].output(p if isinstance(p, str) else None)
            for r, p in zip(requests, prompts, strict=True)
        ]

    def _collect(
        self,
        mailbox: _Mailbox,
        collected: dict[str, _Collected],
        progress: bool | tqdm[Any],
        interrupts: _Interrupts,
    ) -> None:
        unfinished = sum(c.request.params.n for c in collected.values())
        tokens = 0
        with bar_of(progress, total=len(collected), unit="prompts") as bar:
            while unfinished:
                for request_id, deltas in self._updates(mailbox):
                    for delta in deltas:
                        tokens += len(delta.token_ids)
                        if collected[request_id].take(delta):
                            bar.update()
                        unfinished -= delta.finish_reason is not None
                interrupts.check()
                if bar is not progress:  # the caller's bar may count several calls
                    bar.set_postfix_str(f"{tokens} tokens", refresh=False)

    @contextmanager
    def _running(self, requests: Seq[Request]) -> Generator[_Mailbox]:
        """Queue requests; on exit, abort the unfinished ones."""
        mailbox: _Mailbox = []
        try:
            with self._lock:
                for request in requests:
                    if request.lora is not None:  # it may have been unloaded since it was resolved
                        self._adapters.check(request.lora)
                    self._mailboxes[request.request_id] = mailbox
                    self._core.add(request)
            yield mailbox
        finally:
            with self._lock:
                for request in requests:
                    self._core.abort(request.request_id)
                    self._mailboxes.pop(request.request_id, None)

    def _updates(self, mailbox: _Mailbox) -> _Mailbox:
        """Return and clear a mailbox's updates. If it is empty, run a step first.

        A step serves every request of this engine. Updates for other callers wait in their
        mailboxes.
        """
        with self._lock:
            if not mailbox:
                self._tick()
            updates = mailbox.copy()
            mailbox.clear()
            return updates

    def _tick(self) -> None:
        with _Interrupts() as interrupts, self._parts.guard():
            for request_id, deltas in self._core.tick().items():
                mailbox = self._mailboxes.get(request_id)
                if mailbox is not None:
                    mailbox.append((request_id, deltas))
        interrupts.check()

    def _prepare_pooling(self) -> None:
        pooler = self._parts.pooler
        if pooler is None or pooler.can_pool:
            return
        pooler.compile_pooling()
        with self._lock:
            pooler.activate_pooling()

    def _check(self, request: Request) -> None:
        """Raise if a request cannot be served. Compile its grammar, if it has one."""
        self._core.check(request)
        self._core.compile_grammar(request)

    def _request(self, ids: list[int], params: SamplingParams, lora: str | None = None) -> Request:
        self._num_requests += 1
        rng = self._parts.rng
        seed = params.seed if params.seed is not None else rng.getrandbits(64)
        return Request(
            request_id=f"llm-{self._num_requests}",
            prompt_token_ids=ids,
            params=params,
            arrival_s=self._parts.clock(),
            seed=seed % 2**64,
            lora=None if lora is None else self._find_lora(lora),
        )

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(TokenIds.of(prompt))
        if self._parts.tokenizer is None:
            raise RequestError(
                "this model has no tokenizer.json: pass token IDs instead of text", param="prompt"
            )
        self._parts.tokenizer.check_fits([prompt], self.max_model_len, "prompt")
        return self._parts.tokenizer.encode(prompt)

    def _encode_chat(self, messages: Messages, **options: Any) -> list[int]:
        tokenizer, template = self._parts.tokenizer, self._parts.chat_template
        if tokenizer is None or template is None:
            raise RequestError(
                "this model has no chat template: pass chat_template=...", param="messages"
            )

        def encode(text: str, encode_all: Callable[[str], list[int]]) -> list[int]:
            tokenizer.check_fits([text], self.max_model_len, "messages")
            return encode_all(text)

        return template.encode(list(messages), tokenizer, encode, **options)


def _for_each(lora: Lora, count: int) -> list[str | None]:
    if lora is None or isinstance(lora, str):
        return [lora] * count
    names = list(lora)
    if len(names) != count:
        raise RequestError(f"{count} prompts but {len(names)} LoRA adapters", param="lora")
    return names


def _is_prompt(prompts: Any) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and hasattr(prompts[0], "__index__"))


class _Interrupts:
    """A context that defers Ctrl-C until `check`. Outside the main thread it has no effect.

    An interrupted step cannot be undone, and a KeyboardInterrupt that is raised inside a
    garbage-collector callback is lost.
    """

    def __enter__(self) -> _Interrupts:
        self._arrived: list[tuple[Any, ...]] = []
        self._in_main = threading.current_thread() is threading.main_thread()
        if self._in_main:
            self._before = signal.signal(signal.SIGINT, self._arrive)
        return self

    def _arrive(self, *args: Any) -> None:
        self._arrived.append(args)

    def __exit__(self, *_: object) -> None:
        if self._in_main:
            signal.signal(signal.SIGINT, self._before or signal.default_int_handler)

    def check(self) -> None:
        """Run the deferred SIGINT handler, which raises KeyboardInterrupt by default."""
        if self._arrived:
            args, self._arrived = self._arrived[0], []
            if callable(self._before):
                self._before(*args)


@dataclass(slots=True)
class _Sample:
    text: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    versions: dict[int, int] = field(default_factory=dict[int, int])  # tokens by weight version
    activations: list[Activations] = field(default_factory=list[Activations])
    last: Delta | None = None


class _Collected:
    """The accumulated deltas of one request."""

    def __init__(self, request: Request):
        self.request = request
        self._samples = [_Sample() for _ in range(request.params.n)]
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self._num_cached_tokens = 0

    def take(self, delta: Delta) -> bool:
        """Add a delta. Return True once the request is complete."""
        if delta.restarted:
            self._samples[delta.index] = _Sample()
        sample = self._samples[delta.index]
        if delta.token_ids:
            version = delta.weight_version
            sample.versions[version] = sample.versions.get(version, 0) + len(delta.token_ids)
        sample.text.append(delta.text)
        sample.token_ids.extend(delta.token_ids)
        sample.logprobs.extend(delta.logprobs or ())
        if delta.activations is not None:
            sample.activations.append(delta.activations)
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        self._num_cached_tokens = max(self._num_cached_tokens, delta.num_cached_tokens)
        if delta.finish_reason is not None:
            sample.last = delta
            return all(s.last is not None for s in self._samples)
        return False

    def pooled(self) -> bytes:
        """Return the pooled vector as bytes of f32[d], or raise the request's error."""
        last = self._samples[0].last
        assert last is not None
        if last.error is not None:
            raise last.error
        assert last.pooled is not None
        return last.pooled

    def output(self, prompt: str | None) -> RequestOutput:
        asked = self.request.params.logprobs is not None
        completions: list[Completion] = []
        for index, s in enumerate(self._samples):
            assert s.last is not None and s.last.finish_reason is not None
            completions.append(
                Completion(
                    index=index,
                    text="".join(s.text),
                    token_ids=tuple(s.token_ids),
                    logprobs=tuple(s.logprobs) if asked else None,
                    finish_reason=s.last.finish_reason,
                    stop_reason=s.last.stop_reason,
                    error=s.last.error,
                    num_draft_tokens=s.last.num_draft_tokens,
                    num_accepted_tokens=s.last.num_accepted_tokens,
                    weight_versions=tuple(s.versions.items()),
                    activations=joined(s.activations) if s.activations else None,
                )
            )
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=prompt,
            prompt_token_ids=tuple(self.request.prompt_token_ids),
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=self._num_cached_tokens,
            outputs=tuple(completions),
        )
