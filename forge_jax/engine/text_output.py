"""The text of live sequences: token ids in, `Delta`s with text that is safe to send out."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING

from forge_jax.errors import EngineError, NumericalError
from forge_jax.schedule.activations import Activations, joined
from forge_jax.schedule.outputs import Delta
from forge_jax.schedule.plan import SequenceResult, TokenLogprobs
from forge_jax.schedule.request import Request, Sequence
from forge_jax.text import Detokenizer, StopStrings

if TYPE_CHECKING:
    from forge_jax.engine.constraints import Constraints
    from forge_jax.schedule.scheduler import Scheduler, SequenceUpdate
    from forge_jax.text import Tokenizer

log = logging.getLogger(__name__)

Outputs = dict[str, list[Delta]]  # by request id


class SequenceText:
    """The text of one sequence, converted from token ids and safe to send."""

    __slots__ = ("_detokenizer", "_min_tokens", "_stops", "push_plain")

    def __init__(self, tokenizer: Tokenizer, request: Request, stops: StopStrings | None):
        self._detokenizer = Detokenizer(
            tokenizer,
            request.prompt_token_ids,
            skip_special_tokens=request.params.skip_special_tokens,
        )
        self._stops = stops
        self._min_tokens = request.params.min_tokens
        # Converts tokens to text; None if there are stop strings to search for.
        self.push_plain = self._detokenizer.push if stops is None else None

    def push(self, token_ids: tuple[int, ...], num_before: int) -> tuple[str, str | None, int]:
        """Add the output tokens that follow the first `num_before`.

        Returns:
          The text to send, the stop string that matched, and the number of tokens used.
        """
        if self._stops is None:
            return self._detokenizer.push(token_ids), None, len(token_ids)
        text = ""
        for taken, token in enumerate(token_ids, start=1):
            piece = self._detokenizer.push((token,))
            may_stop = num_before + taken > self._min_tokens
            safe, matched = self._stops.push(piece, may_stop=may_stop)
            text += safe
            if matched is not None:
                return text, matched, taken
        return text, None, len(token_ids)

    def flush(self) -> tuple[str, str | None]:
        """Return the text that was held back, and the stop string that matched in it."""
        tail = self._detokenizer.flush()
        if self._stops is None:
            return tail, None
        safe, matched = self._stops.push(tail)
        return (safe, matched) if matched is not None else (safe + self._stops.flush(), None)


class TextOutput:
    """The text of each live sequence, and the logprobs and activations of unfinished prompts.

    Args:
      scheduler: finishes sequences that reach a stop string.
      constraints: constraints of the same sequences. They are dropped together.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        scheduler: Scheduler,
        constraints: Constraints,
    ):
        self._tokenizer = tokenizer
        self._scheduler = scheduler
        self._constraints = constraints
        self._texts: dict[Sequence, SequenceText] = {}
        self._prompt_logprobs: dict[Sequence, tuple[TokenLogprobs, ...]] = {}
        self._prompt_activations: dict[Sequence, list[Activations]] = {}
        self.weight_version = 0  # version for the tokens in the next updates

    def new_texts(self, request: Request) -> list[SequenceText]:
        """Return the text of each sample; empty without a tokenizer or `detokenize`."""
        params = request.params
        if self._tokenizer is None or not params.detokenize:
            return []
        stops = None
        if params.stop and not params.constrained:
            stops = StopStrings(params.stop, params.include_stop_str_in_output)
        if request.outputs is None:
            return [
                SequenceText(self._tokenizer, request, copy.copy(stops)) for _ in range(params.n)
            ]
        texts = []
        for output in request.outputs.values():
            text = SequenceText(self._tokenizer, request, copy.copy(stops))
            text.push(tuple(output), 0)  # already sent
            texts.append(text)
        return texts

    def begin(self, seqs: list[Sequence], texts: list[SequenceText]) -> None:
        """Start the output of new sequences with texts from `new_texts`."""
        self._texts.update(zip(seqs, texts, strict=False))

    def forget(self, seq: Sequence) -> None:
        """Drop a sequence that has ended, and its constraints."""
        self._constraints.end(seq)
        self._texts.pop(seq, None)
        self.forget_prompt(seq)

    def forget_prompt(self, seq: Sequence) -> None:
        """Drop the logprobs and activations of a prompt that is computed again."""
        self._prompt_logprobs.pop(seq, None)
        self._prompt_activations.pop(seq, None)

    def add_deltas(self, updates: list[SequenceUpdate], outputs: Outputs) -> int:
        """Add each sequence's delta to `outputs`. Return the number of generated tokens.

        An error in the text of one sequence ends only that sequence.
        """
        texts, prompt_logprobs = self._texts, self._prompt_logprobs
        version = self.weight_version
        num_tokens = 0
        for seq, got in updates:
            token_ids = got.token_ids
            num_tokens += len(token_ids)
            try:
                state = texts.get(seq)
                if (  # fast path of nearly every row: a token in the middle of an output
                    state is not None
                    and seq.finish_reason is None
                    and got.logprobs is None
                    and got.prompt_logprobs is None
                    and got.activations is None
                    and not prompt_logprobs
                    and (push := state.push_plain) is not None
                ):
                    delta = Delta(seq.index, push(token_ids), token_ids)
                    if not seq.told:
                        seq.told = True
                        delta.num_cached_tokens, delta.queue_s = seq.num_cached, seq.queue_s
                else:
                    delta = self._delta(seq, got)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # a panic inside tokenizers is not an Exception
                delta = self._without_text(seq)
            if delta is None:
                continue
            delta.weight_version = version
            request_id = seq.key[0]
            if request_id in outputs:
                outputs[request_id].append(delta)
            else:
                outputs[request_id] = [delta]
        return num_tokens

    def _without_text(self, seq: Sequence) -> Delta:
        log.exception("request %s: the output could not be converted to text", seq.request_id)
        self.forget(seq)
        self._scheduler.finish(seq, "error")
        error = EngineError("the output could not be converted to text")
        return Delta(seq.index, finish_reason="error", error=error)

    def _delta(self, seq: Sequence, got: SequenceResult) -> Delta | None:
        token_ids = got.token_ids
        prompt_logprobs = got.prompt_logprobs
        if self._prompt_logprobs and seq in self._prompt_logprobs:
            prompt_logprobs = self._prompt_logprobs.pop(seq) + (prompt_logprobs or ())
        activations = [] if got.activations is None else [got.activations]
        if seq in self._prompt_activations:
            activations = self._prompt_activations.pop(seq) + activations
        if not token_ids and seq.finish_reason is None:  # the prompt is not complete
            if prompt_logprobs is not None:
                self._prompt_logprobs[seq] = prompt_logprobs
            if activations:
                self._prompt_activations[seq] = activations
            return None
        if got.fault:
            self.forget(seq)
            error = NumericalError("the model computed non-finite logits for this request")
            return Delta(seq.index, finish_reason="error", error=error)
        text, logprobs = "", got.logprobs
        state = self._texts.get(seq)
        if state is not None:
            if state.push_plain is not None and seq.finish_reason is None:
                text = state.push_plain(token_ids)
            else:
                text, num_taken = self._text_to_an_end(seq, token_ids, state)
                token_ids = token_ids[:num_taken]
                logprobs = None if logprobs is None else logprobs[:num_taken]
        num_dropped = len(got.token_ids) - len(token_ids)
        return Delta(
            seq.index,
            text,
            token_ids,
            logprobs,
            prompt_logprobs,
            seq.finish_reason,
            seq.stop_reason,
            None,
            seq.num_cached,
            seq.num_drafted,
            seq.num_accepted,
            got.pooled,
            seq.queue_s,
            seq.num_preemptions,
            activations=_without_last(activations, num_dropped),
        )

    def _text_to_an_end(
        self, seq: Sequence, token_ids: tuple[int, ...], state: SequenceText
    ) -> tuple[str, int]:
        """Return the text of tokens that may end the sequence, and the number of tokens used.

        A stop string ends the sequence. At the end, the text that was held back is added.
        """
        # The token that ended the output is not part of its text.
        ended = seq.finish_reason == "stop" and token_ids and token_ids[-1] in seq.stop_ids
        visible = token_ids[:-1] if ended else token_ids
        text, matched, num_taken = state.push(visible, seq.num_output - len(token_ids))
        if matched is None:
            num_taken = len(token_ids)
            if seq.finish_reason is not None:
                tail, matched = state.flush()
                text += tail
        if matched is not None:
            self._scheduler.finish(seq, "stop", matched)
        if seq.finish_reason is not None:
            self.forget(seq)
        return text, num_taken


def _without_last(parts: list[Activations], num_dropped: int) -> Activations | None:
    """Return all rows except for the last `num_dropped`; None if there are none."""
    if not parts:
        return None
    whole = joined(parts)
    return whole.part(whole.start, whole.end - num_dropped)
