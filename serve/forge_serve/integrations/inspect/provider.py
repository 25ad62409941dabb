"""Inspect's `ModelAPI` on an engine in this process. Chats run through the server's own code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import msgspec
from inspect_ai.model import (  # pyright: ignore[reportMissingImports]
    ChatMessage,
    GenerateConfig,
    ModelAPI,
    ModelCall,
    ModelOutput,
    RetryDecision,
)
from inspect_ai.tool import ToolChoice, ToolInfo  # pyright: ignore[reportMissingImports]

from forge_jax.config import EngineConfig
from forge_jax.errors import ConfigError, ContextLengthError, EngineError, OverloadedError
from forge_serve.cli.backends import LocalBackend
from forge_serve.config import ServerConfig
from forge_serve.integrations.inspect.messages import chat_body, model_output

_OF_SERVER = ("tool_call_parser", "reasoning_parser")
_STOP_S = 60.0
_CLOSED = "this model is closed: get it again with get_model"


class ForgeAPI(ModelAPI):
    """The provider of the models `forge-jax/MODEL`.

    The model is loaded with the first request. Requests may come from several event loops, because
    the engine has its own event loop.

    Args:
      model_name: the model, as for `LLM`.
      model_args: options of `LLM`, and `tool_call_parser` and `reasoning_parser` of the server.

    Raises:
      ConfigError: an option is wrong.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008
        **model_args: Any,
    ):
        super().__init__(model_name, base_url, api_key, [], config)
        if base_url is not None:
            raise ConfigError(
                "forge-jax models run in this process: omit the base URL, or use the provider "
                "openai-api for a server"
            )
        of_server = {name: model_args.pop(name) for name in _OF_SERVER if name in model_args}
        self._engine_config = EngineConfig.from_options(model=model_name, **model_args)
        self._server_config = ServerConfig(**of_server)
        self._loop = _Loop()
        self._backend: asyncio.Task[LocalBackend] | None = None  # task of the engine's loop

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput | tuple[ModelOutput, ModelCall]:
        """Return the output of a chat, and the request and response for Inspect's log.

        Raises:
          RequestError: the chat cannot be served. `param` names the field.
          ForgeError: the model cannot be loaded, or the engine failed.
        """
        body = chat_body(input, tools, tool_choice, config)
        try:
            response = msgspec.json.decode(await self._loop.run(self._answer(body)))
        except ContextLengthError as error:  # Inspect ends the sample, not the evaluation
            output = ModelOutput.from_content(
                self.model_name, str(error), stop_reason="model_length", error=str(error)
            )
            return output, ModelCall.create(body, None)
        return model_output(response, self.model_name), ModelCall.create(body, response)

    async def _answer(self, body: dict[str, Any]) -> bytes:
        return await (await self._loaded()).whole("chat", body)

    async def _loaded(self) -> LocalBackend:
        """Return the engine, which the first call loads. A call after a failed load tries again."""
        task = self._backend
        if task is None or (task.done() and not _succeeded(task)):
            task = self._backend = asyncio.create_task(self._load())
        # The load runs in a thread, so a caller that is canceled cannot stop it.
        return await asyncio.shield(task)

    async def _load(self) -> LocalBackend:
        backend = await asyncio.to_thread(
            LocalBackend.load, self._engine_config, self._server_config
        )
        # A thread that still compiles would abort the process at its exit.
        await backend.finish_compiling()
        return backend

    async def tokenize(self, text: str) -> list[int]:
        """Return the token IDs of a text, without special tokens.

        Raises:
          ConfigError: the model has no tokenizer.
        """
        tokenizer = (await self._loop.run(self._loaded())).tokenizer
        if tokenizer is None:
            raise ConfigError("this model has no tokenizer.json: its texts cannot be tokenized")
        return tokenizer.encode(text, add_special_tokens=False)

    async def count_text_tokens(self, text: str) -> int:
        return len(await self.tokenize(text))

    def max_connections(self) -> int:
        """Return the number of requests that fill the engine."""
        return self._engine_config.batch.max_num_seqs

    def should_retry(self, ex: Exception) -> bool | RetryDecision:
        return RetryDecision.rate_limit() if isinstance(ex, OverloadedError) else False

    async def aclose(self) -> None:
        """End the engine. If it is loading, wait for that first. Unfinished requests fail.

        Raises:
          TimeoutError: the engine has not stopped after 60 s.
        """
        await asyncio.to_thread(self._loop.close, self._stop)

    async def _stop(self) -> None:
        if self._backend is None:
            return
        await asyncio.wait([self._backend])
        if _succeeded(self._backend):  # otherwise its callers have the error
            async with asyncio.timeout(_STOP_S):
                await self._backend.result().close()


def _succeeded(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


class _Loop:
    """An event loop in a daemon thread, started by the first call. `close` ends both.

    Inspect closes no model at the end of an evaluation, so the thread must not delay the exit.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    async def run[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine. If the caller is canceled, so is the coroutine.

        Raises:
          EngineError: the loop is closed, or the caller does not run in asyncio.
        """
        try:
            task = _current_task()
            future = self._submit(work)
        except BaseException:
            work.close()
            raise
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if task is None or task.cancelling():
                raise
            raise EngineError(_CLOSED) from None  # `close` canceled it, not the caller

    def _submit[T](self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:  # so that `close` finds every coroutine in the loop
            if self._closed:
                raise EngineError(_CLOSED)
            if self._loop is None:
                loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=loop.run_forever, name="forge-jax-inspect", daemon=True
                )
                self._thread.start()
                self._loop = loop
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, stop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run the coroutine function `stop` in the loop, then end the loop. Idempotent.

        The loop also ends if `stop` raises. Unfinished coroutines are canceled.
        """
        with self._lock:
            closed, self._closed = self._closed, True
        if closed or self._loop is None:
            return
        assert self._thread is not None
        try:
            asyncio.run_coroutine_threadsafe(_end(stop), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_STOP_S)
            if not self._thread.is_alive():
                self._loop.close()


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError as error:
        raise EngineError("forge-jax models require Inspect's backend asyncio") from error


async def _end(stop: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `stop`, then cancel all other tasks of the loop, so that their callers return."""
    try:
        await stop()
    finally:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
