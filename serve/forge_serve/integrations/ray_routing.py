"""`PrefixRouter`: a request router of Ray Serve that prefers replicas with a cached prefix.

It applies the rule of `--data-parallel` (`forge_jax.engine.process.routing`) to the text of a
prompt, because tokens are not known before a replica has received the request. Four bytes of text
count as one token. A prompt counts as uncomputed until its request ends.
"""

from __future__ import annotations

import json
from array import array
from functools import partial
from itertools import count
from typing import Any

from ray.serve.request_router import (  # pyright: ignore[reportMissingImports]
    PendingRequest,
    ReplicaID,
    ReplicaResult,
    RequestRouter,
    RunningReplica,
)

from forge_jax.engine.process.routing import Route, Router
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.request import Request

BLOCK_SIZE = 16  # tokens per hash
NUM_BLOCKS = 65_536  # hashes stored per replica, for a million tokens
MAX_SAMPLES = 128  # higher values of `n` are invalid
# Fields of requests that determine the prompt, in the order in which templates use them.
PROMPT_FIELDS = ("tools", "system", "instructions", "prompt", "messages", "input")


class PrefixRouter(RequestRouter):  # pyright: ignore[reportUntypedBaseClass]
    """Chooses the replica with the fewest prompt tokens to compute, as `--data-parallel` does."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._rule = Router(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
        self._numbers: dict[ReplicaID, int] = {}  # the rule's index of each replica
        self._next_number = count()
        self._routes: dict[str, Route] = {}  # unfinished requests, by Ray's internal id

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica, and then all others, in case it is full."""
        self._forget_lost_replicas()
        by_number = {self._number(each.replica_id): each for each in candidate_replicas}
        if pending_request is None or not by_number:
            return [candidate_replicas]
        chosen = self._place(pending_request, list(by_number))
        # A request that is cancelled before it is sent to a replica never completes.
        drop = partial(self._drop_if_cancelled, pending_request.metadata.internal_request_id)
        pending_request.future.add_done_callback(drop)
        first = by_number.pop(chosen)
        return [[first], list(by_number.values())]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """Count the request at its replica, if that is not the chosen one."""
        route = self._routes.get(pending_request.metadata.internal_request_id)
        number = self._number(replica_id)
        if route is None or route.engine != number:
            self._place(pending_request, [number])

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._drop(internal_request_id)

    def _place(self, pending: PendingRequest, numbers: list[int]) -> int:
        """Count a request at one of these replicas. Return the number of the replica."""
        request_id = pending.metadata.internal_request_id
        self._drop(request_id)
        route = self._routes[request_id] = self._rule.route(as_request(*pending.args), numbers)
        return route.engine

    def _drop(self, request_id: str) -> None:
        route = self._routes.pop(request_id, None)
        if route is not None:
            self._rule.discard(route)

    def _drop_if_cancelled(self, request_id: str, future: Any) -> None:
        if future.cancelled():
            self._drop(request_id)

    def _number(self, replica_id: ReplicaID) -> int:
        if replica_id not in self._numbers:
            self._numbers[replica_id] = next(self._next_number)
        return self._numbers[replica_id]

    def _forget_lost_replicas(self) -> None:
        for replica_id in self._numbers.keys() - self.curr_replicas.keys():
            self._rule.forget(self._numbers.pop(replica_id))


def as_request(method: str, target: str, headers: list[tuple[str, str]], body: bytes) -> Request:
    """Return an HTTP request as the router's rule sees it: its prompt, samples and namespace.

    The text of its prompt is divided into numbers of four bytes. Equal prefixes have equal numbers.
    Invalid requests are valid here, because the server rejects them.
    """
    try:
        fields = json.loads(body)
    except ValueError:
        fields = {}
    if not isinstance(fields, dict):
        fields = {}
    prompt = [fields[name] for name in PROMPT_FIELDS if name in fields]
    text = json.dumps(prompt, ensure_ascii=False).encode("utf-8", "surrogatepass")
    words = array("I", text + bytes(-len(text) % 4))
    n = fields.get("n")
    key = dict(headers).get("authorization", "")
    return Request(
        request_id="",
        prompt_token_ids=tuple(words),
        params=SamplingParams(n=n if isinstance(n, int) and 1 <= n <= MAX_SAMPLES else 1),
        cache_salt=f"{fields.get('model')} {fields.get('cache_salt')} {key}",
    )
