"""The LoRA adapters of an engine: loaded, named by requests and unloaded.

`LLM`, `Engine` and `EngineProcess` share this one implementation. `bind` gives it the two things
that differ: how to do something between two steps, and which requests take an adapter.
`checkpoint/adapter.py` reads the files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from forge_jax.config import LORA_NAME
from forge_jax.config.suggest import did_you_mean
from forge_jax.errors import ModelError, RequestError
from forge_jax.schedule.request import LoraRef

Run = Callable[[Callable[[], None]], None]  # calls a function between two steps and waits for it


@dataclass(frozen=True, kw_only=True)
class LoadedAdapter:
    """An adapter that requests may take."""

    ref: LoraRef
    path: str
    digest: str  # of its files
    rank: int

    @property
    def name(self) -> str:
        return self.ref.name


Install = Callable[[LoraRef, str, Run], LoadedAdapter]


class Adapters:
    """The adapters of one engine. Thread-safe.

    The place of an unloaded adapter is given to the next one, its identity never.

    Args:
      places: how many adapters there can be at once; 0: everything about adapters is refused.
      install: reads the adapter in a folder and puts it at its place on the device, by its last
        argument between two steps.
      loaded: adapters that are on the device already.
    """

    def __init__(self, places: int, install: Install, loaded: Iterable[LoadedAdapter] = ()):
        self.places = places
        self._install = install
        self._between_steps: Run = _at_once
        self._num_requests_with: Callable[[LoraRef], int] = lambda _: 0
        self._lock = threading.Lock()
        self._load_ended = threading.Condition(self._lock)
        self._loaded = {adapter.name: adapter for adapter in loaded}
        self._loading: dict[str, LoraRef] = {}
        self._num_loads = len(self._loaded)

    @classmethod
    def none(cls) -> Adapters:
        """Return the adapters of an engine that was built without places for any."""

        def install(ref: LoraRef, path: str, run: Run) -> LoadedAdapter:
            raise AssertionError("an adapter got a place where there is none")

        return cls(0, install)

    def bind(
        self, *, num_requests_with: Callable[[LoraRef], int], between_steps: Run | None = None
    ) -> None:
        """Serve an engine that runs from now on. Before, no request takes an adapter.

        Args:
          num_requests_with: how many requests that have not ended take an adapter. Called with
            this object's lock held.
          between_steps: calls a function when no step is running, and returns after it; None: at
            once, for an engine whose process takes care of it.
        """
        self._num_requests_with = num_requests_with
        self._between_steps = between_steps or _at_once

    def all(self) -> list[LoadedAdapter]:
        with self._lock:
            return list(self._loaded.values())

    def settled(self) -> list[LoadedAdapter]:
        """Return all, once no load is under way: none is left out that is about to be there."""
        with self._load_ended:
            self._load_ended.wait_for(lambda: not self._loading)
            return list(self._loaded.values())

    def find(self, name: str) -> LoraRef:
        """Return the adapter of a name. Raises `RequestError` if there is none."""
        self._check_places()
        with self._lock:
            if name not in self._loaded:
                raise RequestError(
                    f"there is no LoRA adapter of this name{did_you_mean(name, self._loaded)}",
                    param="lora",
                )
            return self._loaded[name].ref

    def check(self, ref: LoraRef) -> None:
        """Raise `RequestError` if the adapter has been unloaded since it was found."""
        self._check_places()
        with self._lock:
            found = self._loaded.get(ref.name)
        if found is None or found.ref != ref:
            raise RequestError("the LoRA adapter has been unloaded", param="lora")

    def load(self, name: str, path: str, *, ref: LoraRef | None = None) -> LoadedAdapter:
        """Read an adapter and put it on the device; requests can name it afterwards. Blocks.

        Args:
          ref: its place and identity; default: a free place and a new identity.

        Raises:
          RequestError: the name is invalid or in use, there is no place left, or the adapter does
            not fit the model. Nothing has changed then.
        """
        self._check_places()
        ref = self._begin(name, ref)
        try:
            loaded = self._install(ref, path, self._between_steps)
            with self._lock:
                self._loaded[name] = loaded
            return loaded
        except ModelError as error:
            raise RequestError(str(error), param="lora_path") from error
        finally:
            with self._load_ended:
                del self._loading[name]
                self._load_ended.notify_all()

    def restore(self, adapters: Iterable[LoadedAdapter]) -> dict[str, str]:
        """Load the adapters of an engine before this one from the same folders.

        Returns:
          The reason for each adapter that is lost, by its name: its files have changed, say.
        """
        lost: dict[str, str] = {}
        for before in adapters:
            try:
                now = self.load(before.name, before.path, ref=before.ref)
            except RequestError as error:
                lost[before.name] = str(error)
                continue
            if now.digest != before.digest:
                self.drop(before.name)
                lost[before.name] = "its files have changed since it was loaded"
        return lost

    def drop(self, name: str) -> None:
        """Forget an adapter without looking for requests that take it."""
        with self._lock:
            self._loaded.pop(name, None)

    def unload(self, name: str) -> None:
        """Forget an adapter; its place is free for another.

        Raises:
          RequestError: there is none of the name, or a request that has not ended takes it.
        """
        self._check_places()
        with self._lock:
            if name not in self._loaded:
                raise RequestError(
                    f"there is no LoRA adapter of this name{did_you_mean(name, self._loaded)}",
                    param="lora_name",
                )
            count = self._num_requests_with(self._loaded[name].ref)
            if count:
                raise RequestError(
                    f"{count} requests take this LoRA adapter: unload it when they have ended",
                    param="lora_name",
                )
            del self._loaded[name]

    def _check_places(self) -> None:
        if not self.places:
            raise RequestError("this engine has no LoRA adapters: set --max-loras", param="lora")

    def _begin(self, name: str, ref: LoraRef | None) -> LoraRef:
        with self._lock:
            if not LORA_NAME.fullmatch(name):
                raise RequestError(
                    "the name of a LoRA adapter has 1 to 128 letters, digits and any of ._:/@+-",
                    param="lora_name",
                )
            if name in self._loaded or name in self._loading:
                raise RequestError(
                    "a LoRA adapter of this name has been loaded already", param="lora_name"
                )
            if ref is not None:
                self._loading[name] = ref
                return ref
            refs = [*(loaded.ref for loaded in self._loaded.values()), *self._loading.values()]
            free = set(range(1, self.places + 1)) - {ref.place for ref in refs}
            if not free:
                raise RequestError(
                    f"there are {self.places} LoRA adapters already (--max-loras): unload one",
                    param="lora_name",
                )
            self._num_loads += 1
            ref = LoraRef(name=name, place=min(free), identity=str(self._num_loads))
            self._loading[name] = ref
            return ref


def _at_once(call: Callable[[], None]) -> None:
    """Call a function of an engine that does not run yet."""
    call()
