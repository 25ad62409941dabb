"""Which LoRA adapters an engine has, by name, and where they lie on its device.

Knows neither requests nor threads: who loads one says how something is done between two steps, and
who unloads one, whether it is in use. What the files hold is `checkpoint/adapter.py`'s matter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from forge_jax.config import LORA_NAME
from forge_jax.config.suggest import did_you_mean
from forge_jax.errors import ModelError, RequestError
from forge_jax.schedule.request import LoraRef

Run = Callable[[Callable[[], None]], None]  # does something between two steps


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
    """The adapters of one engine. Safe to use from several threads.

    A place that an unloaded adapter has left is given to the next, and never its identity.

    Args:
      places: how many adapters there may be at once.
      install: reads the adapter in a folder and puts it at its place; `run` is what does something
        between two steps.
      loaded: those that are there.
    """

    def __init__(self, places: int, install: Install, loaded: Iterable[LoadedAdapter] = ()):
        self.places = places
        self._install = install
        self._lock = threading.Lock()
        self._load_ended = threading.Condition(self._lock)
        self._loaded = {adapter.name: adapter for adapter in loaded}
        self._loading: dict[str, LoraRef] = {}
        self._num_loads = len(self._loaded)

    def all(self) -> list[LoadedAdapter]:
        with self._lock:
            return list(self._loaded.values())

    def settled(self) -> list[LoadedAdapter]:
        """Return all, once no load is under way: none is left out that is about to be there."""
        with self._load_ended:
            self._load_ended.wait_for(lambda: not self._loading)
            return list(self._loaded.values())

    def find(self, name: str) -> LoraRef:
        """Raises `RequestError` if there is no adapter of the name."""
        with self._lock:
            if name not in self._loaded:
                raise RequestError(
                    f"there is no LoRA adapter of this name{did_you_mean(name, self._loaded)}",
                    param="lora",
                )
            return self._loaded[name].ref

    def check(self, ref: LoraRef) -> None:
        """Raises `RequestError` if the adapter has been unloaded since it was found."""
        with self._lock:
            found = self._loaded.get(ref.name)
        if found is None or found.ref != ref:
            raise RequestError("the LoRA adapter has been unloaded", param="lora")

    def load(self, name: str, path: str, run: Run, *, ref: LoraRef | None = None) -> LoadedAdapter:
        """Reads an adapter and puts it on the device; requests find it from then on. Blocks.

        Args:
          ref: where it has to be, and as what; default: at a free place, as a new adapter.

        Raises:
          RequestError: the name is no name or in use, there is no place left, or the adapter cannot
            be served; nothing has changed then.
        """
        ref = self._begin(name, ref)
        try:
            loaded = self._install(ref, path, run)
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
        """Loads what an engine before this one had, from the same folders; nothing runs yet.

        Returns:
          Why not, by the names of those that are lost: their files are not what they were.
        """
        lost: dict[str, str] = {}
        for before in adapters:
            try:
                now = self.load(before.name, before.path, lambda put: put(), ref=before.ref)
            except RequestError as error:
                lost[before.name] = str(error)
                continue
            if now.digest != before.digest:
                self.drop(before.name)
                lost[before.name] = "its files have changed since it was loaded"
        return lost

    def drop(self, name: str) -> None:
        """Forgets an adapter that is lost, whoever takes it."""
        with self._lock:
            self._loaded.pop(name, None)

    def unload(self, name: str, in_use: Callable[[LoraRef], int]) -> None:
        """Forgets an adapter; its place is free for another.

        Args:
          in_use: how many requests that have not ended take it.

        Raises:
          RequestError: there is none of the name, or requests take it.
        """
        with self._lock:
            if name not in self._loaded:
                raise RequestError(
                    f"there is no LoRA adapter of this name{did_you_mean(name, self._loaded)}",
                    param="lora_name",
                )
            count = in_use(self._loaded[name].ref)
            if count:
                raise RequestError(
                    f"{count} requests take this LoRA adapter: unload it when they have ended",
                    param="lora_name",
                )
            del self._loaded[name]

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
