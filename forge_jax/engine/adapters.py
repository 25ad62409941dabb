"""The LoRA adapters of an engine: load, find and unload them.

`LLM`, `Engine` and `EngineProcess` share this implementation. `bind` provides what differs: how to
call a function between two steps, and how many requests use an adapter. `checkpoint/adapter.py`
reads the files.
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
    """A loaded LoRA adapter, which requests can select by name."""

    ref: LoraRef
    path: str
    digest: str  # hash of the adapter's files
    rank: int

    @property
    def name(self) -> str:
        return self.ref.name


Install = Callable[[LoraRef, str, Run], LoadedAdapter]


class Adapters:
    """The adapters of one engine. Thread-safe.

    The slot of an unloaded adapter is reused, but its identity is not.

    Args:
      places: maximum number of adapters at once. 0: adapters are disabled.
      install: reads the adapter in a folder and writes it to its slot on the device. The last
        argument runs a function between two steps.
      loaded: adapters that are already on the device.
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
        """Return the adapters of an engine that was built without slots for them."""

        def install(ref: LoraRef, path: str, run: Run) -> LoadedAdapter:
            raise AssertionError("an adapter got a place where there is none")

        return cls(0, install)

    def bind(
        self, *, num_requests_with: Callable[[LoraRef], int], between_steps: Run | None = None
    ) -> None:
        """Serve an engine that runs from now on. Before this, no request uses an adapter.

        Args:
          num_requests_with: returns how many unfinished requests use an adapter. Called with this
            object's lock held.
          between_steps: calls a function while no step is running, and returns after it. None: call
            it at once, for an engine whose process handles this.
        """
        self._num_requests_with = num_requests_with
        self._between_steps = between_steps or _at_once

    def all(self) -> list[LoadedAdapter]:
        with self._lock:
            return list(self._loaded.values())

    def settled(self) -> list[LoadedAdapter]:
        """Return all adapters once no load is in progress, so that none is missed."""
        with self._load_ended:
            self._load_ended.wait_for(lambda: not self._loading)
            return list(self._loaded.values())

    def find(self, name: str) -> LoraRef:
        """Return the adapter with a name. Raise `RequestError` if there is none."""
        self._check_places()
        with self._lock:
            if name not in self._loaded:
                raise RequestError(
                    f"no LoRA adapter with this name is loaded{did_you_mean(name, self._loaded)}",
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
        """Read an adapter and write it to the device. Requests can use it afterwards. Blocks.

        Args:
          ref: its slot and identity. Default: a free slot and a new identity.

        Raises:
          RequestError: if the name is invalid or in use, no slot is free, or the adapter does not
            fit the model. No state has changed then.
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
        """Load the adapters of a previous engine from the same folders.

        Returns:
          The reason for each lost adapter by its name, for example that its files have changed.
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

    def adopt(self, adapter: LoadedAdapter) -> None:
        """Record an adapter for the next process of an engine that has none."""
        with self._lock:
            self._loaded[adapter.name] = adapter

    def drop(self, name: str) -> None:
        """Remove an adapter without checking for requests that use it."""
        with self._lock:
            self._loaded.pop(name, None)

    def unload(self, name: str) -> None:
        """Remove an adapter and free its slot.

        Raises:
          RequestError: if no adapter has this name, or an unfinished request uses it.
        """
        self._check_places()
        with self._lock:
            if name not in self._loaded:
                raise RequestError(
                    f"no LoRA adapter with this name is loaded{did_you_mean(name, self._loaded)}",
                    param="lora_name",
                )
            count = self._num_requests_with(self._loaded[name].ref)
            if count:
                raise RequestError(
                    f"{count} requests use this LoRA adapter: retry after they finish",
                    param="lora_name",
                )
            del self._loaded[name]

    def _check_places(self) -> None:
        if not self.places:
            raise RequestError("LoRA adapters are disabled: set --max-loras", param="lora")

    def _begin(self, name: str, ref: LoraRef | None) -> LoraRef:
        with self._lock:
            if not LORA_NAME.fullmatch(name):
                raise RequestError(
                    "the name of a LoRA adapter must have 1 to 128 letters, digits or ._:/@+-",
                    param="lora_name",
                )
            if name in self._loaded or name in self._loading:
                raise RequestError(
                    "a LoRA adapter with this name is already loaded", param="lora_name"
                )
            if ref is not None:
                self._loading[name] = ref
                return ref
            refs = [*(loaded.ref for loaded in self._loaded.values()), *self._loading.values()]
            free = set(range(1, self.places + 1)) - {ref.place for ref in refs}
            if not free:
                raise RequestError(
                    f"all {self.places} LoRA adapter slots are in use (--max-loras): unload one",
                    param="lora_name",
                )
            self._num_loads += 1
            ref = LoraRef(name=name, place=min(free), identity=str(self._num_loads))
            self._loading[name] = ref
            return ref


def _at_once(call: Callable[[], None]) -> None:
    """Call a function of an engine that is not running yet."""
    call()
