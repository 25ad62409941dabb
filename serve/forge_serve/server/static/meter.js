// Times and token counts of one streamed answer, measured in the browser.

export class Meter {
  constructor() {
    this.reason = null; // the finish reason
    this._begin = performance.now();
    this._first = null;
    this._usage = null;
  }

  /** True once a part of the answer has arrived. */
  get arrived() {
    return this._first !== null;
  }

  /** Read an event of a chat completion. */
  take(event) {
    if (event.usage) this._usage = event.usage;
    const choice = event.choices[0];
    if (!choice) return;
    const { content, reasoning, tool_calls: calls } = choice.delta;
    if (content || reasoning || calls) this._first ??= performance.now();
    this.reason = choice.finish_reason ?? this.reason;
  }

  /** Return the figures up to now as a text. `reason` is why the answer ended. */
  text(reason = this.reason) {
    const seconds = (performance.now() - this._begin) / 1000;
    const told = [];
    const tokens = this._usage?.completion_tokens;
    if (tokens !== undefined) {
      const since = (performance.now() - this._first) / 1000;
      told.push(`${tokens} tokens`);
      if (tokens > 1 && since > 0) told.push(`${Math.round((tokens - 1) / since)} tokens/s`);
    }
    if (this.arrived) told.push(`first token after ${Math.round(this._first - this._begin)} ms`);
    told.push(`${seconds.toFixed(1)} s total`);
    const cached = this._usage?.prompt_tokens_details.cached_tokens;
    if (cached) told.push(`${cached} of ${this._usage.prompt_tokens} prompt tokens cached`);
    const accepted = this._usage?.completion_tokens_details.accepted_prediction_tokens;
    if (accepted) told.push(`${accepted} from drafts`);
    if (reason === "length") told.push("cut off at the token limit");
    if (reason === "stopped" || reason === "interrupted") told.push(reason);
    return told.join(" · ");
  }
}
