// Timelines of requests: a row per sequence, with its waits, prefill chunks, decodes and drafts.

import { Chart, color, count, milliseconds } from "./charts.js";

const MOST_ROWS = 24;
const MOST_SPANS = 65; // as the server, with the current wait
const MOST_ENDED = 64;
const LONGEST_S = 30; // longest time that is shown
const SHORTEST_S = 0.05;

const KINDS = {
  queued: "queued",
  preempted: "preempted",
  loading: "loading blocks from host memory",
  prefill: "prefill chunk",
  decode: "decode",
  draft: "draft verification",
};
export const SPAN_KINDS = Object.keys(KINDS);
const HINT = "Point at a span, or use the arrow keys.";
const WAITS = { queued: "cached", preempted: "preempted", loading: "loading" }; // kind -> color
const WORK = { prefill: "prompt", decode: "decode", draft: "proposed" };

const ended = (row) => row.status !== "running" && row.status !== "waiting";
const endOf = (row) => {
  const last = row.spans.at(-1);
  return row.arrival_s + (last ? last[1] + last[2] : 0);
};

/** The sequences of the latest states, with all of their spans. */
export class Timelines {
  constructor() {
    this._rows = new Map(); // in order of first sight
  }

  clear() {
    this._rows.clear();
  }

  /** Add a state of `/engine_state`. States of older versions have no timelines. */
  add(state) {
    const listed = [...state.sequences, ...(state.finished ?? [])].filter((seq) => seq.spans);
    const seen = new Set(listed.map((seq) => this._merge(seq)));
    for (const [key, row] of this._rows) if (!seen.has(key) && !ended(row)) row.status = "gone";
    const over = [...this._rows].filter(([, row]) => ended(row)).slice(0, -MOST_ENDED);
    for (const [key] of over) this._rows.delete(key);
  }

  _merge(seq) {
    const key = keyOf(seq);
    const before = this._rows.get(key);
    const spans = withNews(before?.spans ?? [], seq.spans);
    if (spans.length > MOST_SPANS) spans.splice(1, spans.length - MOST_SPANS);
    this._rows.set(key, { ...before, ...seq, spans });
    return key;
  }

  get rows() {
    return [...this._rows.values()];
  }

  /** Return a state with all known spans and finished sequences, for a recording. */
  complete(state) {
    const sequences = state.sequences.map((seq) => this._rows.get(keyOf(seq)) ?? seq);
    return { ...state, sequences, finished: this.rows.filter(ended) };
  }
}

/** Return spans with the latest ones replaced by `news`, whose first span may be known. Spans may take no time. */
function withNews(spans, news) {
  if (!news.length) return spans;
  const [kind, start] = news[0];
  const known = spans.findIndex((span) => span[0] === kind && span[1] === start);
  const older = known < 0 ? spans.filter((span) => span[1] <= start) : spans.slice(0, known);
  return [...older, ...news];
}

const keyOf = (seq) => `${seq.arrival_s} ${seq.prompt} ${seq.sample}`;

function duration(seconds) {
  return seconds < 1 ? milliseconds(seconds) : `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

function spanText([kind, , seconds, steps, tokens, drafts, accepted]) {
  const parts = [KINDS[kind]];
  if (kind === "draft") parts.push(`${accepted} of ${count(drafts, "draft")} accepted`);
  const inSteps = kind === "draft" ? ` in ${count(steps, "step")}` : "";
  if (tokens) parts.push(count(tokens, "token") + inSteps);
  return [...parts, duration(seconds)].join(", ");
}

const ENDS = { stop: "finished", length: "finished at the token limit", abort: "aborted", error: "failed" };

const STATUSES = { gone: "no longer listed" }; // the server listed other sequences

/** Return the figures of a sequence as text. */
function figures(row) {
  const parts = [`${row.prompt_tokens} + ${count(row.output_tokens, "token")}`];
  if (row.cached_tokens) parts.push(`${row.cached_tokens} cached`);
  if (row.queue_s !== undefined) parts.push(`queued ${duration(row.queue_s)}`);
  if (row.ttft_s !== undefined) parts.push(`first token after ${duration(row.ttft_s)}`);
  const rate = outputRate(row.spans);
  if (rate) parts.push(`${rate < 10 ? rate.toFixed(1) : Math.round(rate)} tokens/s`);
  if (row.preemptions) parts.push(count(row.preemptions, "preemption"));
  parts.push(ENDS[row.finish_reason] ?? STATUSES[row.status] ?? row.status);
  return parts.join(" · ");
}

/** Return the output tokens per second from the first to the last recorded decode, waits included. */
function outputRate(spans) {
  const decodes = spans.filter(([kind]) => kind === "decode" || kind === "draft");
  if (!decodes.length) return 0;
  const [, start, seconds] = decodes.at(-1);
  const tokens = decodes.reduce((sum, span) => sum + span[4], 0);
  return tokens / Math.max(start + seconds - decodes[0][1], 1e-4);
}

/** Return about four round times that divide a window. */
function ticks(seconds) {
  const unit = 10 ** Math.floor(Math.log10(seconds / 4));
  const pitch = [1, 2, 5, 10].map((each) => each * unit).find((each) => seconds / each <= 5);
  return Array.from({ length: Math.floor(seconds / pitch) + 1 }, (_, i) => i * pitch);
}

function tickText(seconds) {
  if (seconds === 0) return "0";
  return seconds < 1 ? `−${Math.round(1000 * seconds)} ms` : `−${Number(seconds.toFixed(1))} s`;
}

export class TimelineChart extends Chart {
  /** `probe` shows the selected span, `figures` its sequence. Screen readers read a new selection in `live`. */
  constructor(canvas, probe, figures, live) {
    super(canvas, probe);
    this._figures = figures;
    this._live = live;
    this._all = [];
    this._boxes = []; // the drawn spans, by row and time
    this._chosen = ""; // the selected span
    this._longest = 0; // seconds that are shown; 0: all, at most `LONGEST_S`
  }

  get count() {
    return this._boxes.length;
  }

  /** Show rows of `Timelines`. `name` returns a sequence's name, `now_s` is the time of the state. */
  show(rows, name, now_s) {
    this._all = rows;
    this._name = name;
    this._now = rows.every(ended) ? Math.max(...rows.map(endOf)) : now_s;
    this.draw();
  }

  zoom(seconds) {
    this._longest = seconds;
    this.draw();
  }

  /** Choose the rows of the window, and its length. */
  _choose() {
    const from = this._now - (this._longest || LONGEST_S);
    const visible = this._all.filter((row) => endOf(row) >= from);
    const open = visible.filter((row) => !ended(row)).sort(byArrival).slice(0, MOST_ROWS);
    const done = visible.filter(ended).sort((one, other) => endOf(other) - endOf(one));
    this._rows = [...open, ...done.slice(0, MOST_ROWS - open.length)].sort(byArrival);
    this._omitted = visible.length - this._rows.length;
    const first = Math.min(...this._rows.map((row) => row.arrival_s));
    this._seconds = this._longest || Math.max(SHORTEST_S, Math.min(LONGEST_S, this._now - first));
  }

  draw() {
    if (!this._all.length || !this.canvas.clientWidth) return;
    this._choose();
    const font = parseFloat(getComputedStyle(this.canvas).fontSize);
    this._pitch = Math.round(1.6 * font);
    this._top = Math.round(1.9 * font);
    this._left = Math.round(6.2 * font);
    const { context, width } = this.begin(this._top + this._rows.length * this._pitch + 1);
    this._width = width - this._left - 2;
    context.font = `${font}px system-ui, sans-serif`;
    this._axis(context, font);
    this._boxes = this._rows.flatMap((row, i) => this._layout(row, i));
    this._marked = this._boxes.findIndex((box) => box.key === this._chosen);
    for (const [i, row] of this._rows.entries()) this._drawRow(context, row, i);
    for (const box of this._boxes) this._drawSpan(context, box);
    for (const [i, row] of this._rows.entries()) this._drawEnd(context, row, i);
    this._outline(context);
    this._label();
    this.tell();
  }

  _x(time_s) {
    return this._left + Math.max(0, 1 - (this._now - time_s) / this._seconds) * this._width;
  }

  _axis(context, font) {
    const bottom = this._top + this._rows.length * this._pitch;
    context.textBaseline = "top";
    for (const ago of ticks(this._seconds)) {
      const x = Math.round(this._x(this._now - ago));
      context.fillStyle = color("line");
      context.fillRect(x, this._top - 3, 1, bottom - this._top + 3);
      const text = tickText(ago);
      const size = context.measureText(text).width;
      context.fillStyle = color("muted");
      const left = Math.min(x - size / 2, this._left + this._width - size);
      if (left > this._left - font) context.fillText(text, left, 2);
    }
  }

  _layout(row, i) {
    const top = this._top + i * this._pitch;
    const from = this._now - this._seconds;
    return row.spans
      .filter(([, start, seconds]) => row.arrival_s + start + seconds >= from)
      .map((span) => {
        const x = this._x(row.arrival_s + span[1]);
        const width = Math.max(1, this._x(row.arrival_s + span[1] + span[2]) - x);
        return { key: `${keyOf(row)} ${span[0]} ${span[1]}`, row, span, x, width, top, line: i };
      });
  }

  _drawRow(context, row, i) {
    const middle = Math.round(this._top + (i + 0.5) * this._pitch);
    const chosen = this._marked >= 0 && this._boxes[this._marked].line === i;
    context.save();
    context.beginPath();
    context.rect(0, middle - this._pitch / 2, this._left - 6, this._pitch);
    context.clip();
    context.textBaseline = "middle";
    context.fillStyle = color(chosen || !ended(row) ? "ink" : "muted");
    context.fillText(this._name(row), 0, middle);
    context.restore();
    context.fillStyle = color("edge");
    const x = this._x(row.arrival_s);
    context.fillRect(x, middle, this._x(endOf(row)) - x, 1);
  }

  _drawSpan(context, { span, x, width, top }) {
    const [kind, , , , , drafts, accepted] = span;
    const high = Math.round(this._pitch * (WAITS[kind] ? 0.3 : 0.7));
    const y = top + Math.round((this._pitch - high) / 2);
    const shown = kind === "prefill" && width > 3 ? width - 1 : width; // chunks stay apart
    context.fillStyle = color(WAITS[kind] ?? WORK[kind]);
    context.fillRect(x, y, shown, high);
    if (kind !== "draft" || !drafts) return;
    const part = Math.round((high * accepted) / drafts);
    context.fillStyle = color("accepted");
    context.fillRect(x, y + high - part, shown, part);
  }

  _drawEnd(context, row, i) {
    if (row.status !== "finished") return;
    const good = row.finish_reason === "stop" || row.finish_reason === "length";
    context.fillStyle = color(good ? "ink" : "wrong");
    context.fillRect(this._x(endOf(row)), this._top + i * this._pitch + 2, 2, this._pitch - 4);
  }

  _outline(context) {
    if (this._marked < 0) return;
    const { x, width, top } = this._boxes[this._marked];
    context.strokeStyle = color("ink");
    context.lineWidth = 1.5;
    context.strokeRect(x - 1, top + 1, width + 2, this._pitch - 2);
  }

  _label() {
    const number = (status) => this._rows.filter((row) => row.status === status).length;
    const omitted = this._omitted ? `, ${this._omitted} more not shown` : "";
    this.canvas.setAttribute(
      "aria-label",
      `Timelines of ${count(this._rows.length, "request")} over ${duration(this._seconds)}: ` +
        `${number("running")} running, ${number("waiting")} waiting, ` +
        `${this._rows.filter(ended).length} finished${omitted}`,
    );
  }

  at(x, y) {
    const line = Math.floor((y - this._top) / this._pitch);
    const distance = ({ x: left, width }) => Math.max(left - x, x - left - width, 0);
    let nearest = -1;
    for (const [i, box] of this._boxes.entries()) {
      if (box.line !== line) continue;
      if (nearest < 0 || distance(box) <= distance(this._boxes[nearest])) nearest = i;
    }
    return nearest;
  }

  /** Left, right, Home and End move within a row, up and down between rows to the nearest span. */
  moved(key, from) {
    if (key === "Escape") return -1;
    if (from < 0) return /^Arrow|^Home$|^End$/.test(key) ? this._last(0) : undefined;
    const { line, x, width } = this._boxes[from];
    const first = this._boxes.findIndex((box) => box.line === line);
    const middle = Math.max(x, Math.min(x + width / 2, x + width - 1));
    const onto = (other) => {
      const found = this.at(middle, this._top + (other + 0.5) * this._pitch);
      return found < 0 ? from : found;
    };
    switch (key) {
      case "ArrowLeft": return Math.max(from - 1, first);
      case "ArrowRight": return Math.min(from + 1, this._last(line));
      case "ArrowUp": return onto(line - 1);
      case "ArrowDown": return onto(line + 1);
      case "Home": return first;
      case "End": return this._last(line);
      default: return undefined;
    }
  }

  _last(line) {
    return this._boxes.findLastIndex((box) => box.line === line);
  }

  _mark(index) {
    const chosen = this._boxes[index]?.key ?? "";
    const changed = chosen !== this._chosen;
    this._chosen = chosen;
    this.draw();
    if (changed) this._live.textContent = this._marked < 0 ? "" : this.describe(this._marked);
  }

  describe(i) {
    const { row, span } = this._boxes[i];
    return `${this._name(row)}: ${spanText(span)}`;
  }

  tell() {
    super.tell();
    const text = this._marked < 0 ? HINT : figures(this._boxes[this._marked].row);
    if (this._figures.textContent !== text) this._figures.textContent = text;
  }
}

function byArrival(one, other) {
  return one.arrival_s - other.arrival_s || one.prompt - other.prompt || one.sample - other.sample;
}
