// The charts of the engine: blocks and steps. timeline.js has a third one. Each describes itself in its aria-label, and
// the cell or bar under the pointer, or selected by the arrow keys, in its probe element.

const resolved = new Map(); // name of a color -> its value in the current theme
const probe = document.createElement("span");

/** Return a color of page.css. Its custom properties have a value for each theme, which only a property of an element
 *  resolves. */
export function color(name) {
  if (!resolved.has(name)) {
    if (!probe.isConnected) document.documentElement.append(probe);
    probe.style.color = `var(--${name})`;
    resolved.set(name, getComputedStyle(probe).color);
  }
  return resolved.get(name);
}

const forgetColors = () => resolved.clear();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", forgetColors);
document.addEventListener("theme-changed", forgetColors);

export class Chart {
  constructor(canvas, probe) {
    this.canvas = canvas;
    this._probe = probe;
    this._marked = -1;
    for (const kind of ["pointermove", "pointerdown"]) {
      canvas.addEventListener(kind, (event) => this._mark(this.at(event.offsetX, event.offsetY)));
    }
    canvas.addEventListener("pointerleave", (event) => {
      if (event.pointerType !== "touch") this._mark(-1); // a finger leaves at the end of a tap
    });
    canvas.addEventListener("blur", () => this._mark(-1));
    canvas.addEventListener("keydown", (event) => {
      const from = this._marked;
      const to = this.moved(event.key, from);
      if (to === undefined || !this.count) return;
      event.preventDefault();
      if (from >= 0) event.stopPropagation();
      this._mark(to);
    });
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    document.addEventListener("theme-changed", () => this.draw());
  }

  /** Return the index to which a key moves the selection; undefined for other keys. */
  moved(key, from) {
    const last = this.count - 1;
    return { ArrowRight: Math.min(from + 1, last), ArrowLeft: from < 0 ? last : Math.max(from - 1, 0),
      Home: 0, End: last, Escape: -1 }[key];
  }

  _mark(index) {
    this._marked = index < this.count ? index : -1;
    this.draw();
  }

  /** Clear the canvas and return its context. `height` is in CSS pixels. */
  begin(height) {
    const { canvas } = this;
    const width = canvas.clientWidth;
    const scale = devicePixelRatio;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    return { context, width };
  }

  tell() {
    const text = this._marked < 0 ? "" : this.describe(this._marked);
    if (this._probe.textContent !== text) this._probe.textContent = text;
  }
}

const KINDS = { free: "free", cached: "cached", shared: "shared", other: "owned by another sequence" };

export class BlockChart extends Chart {
  constructor(canvas, probe) {
    super(canvas, probe);
    this._cells = [];
    this._blocks = null;
    this._names = () => "";
  }

  get count() {
    return this._cells.length;
  }

  /** Show a state's blocks. `colors` is an array and `names` a function, both by index of the sequence. */
  show(blocks, colors, names) {
    this._blocks = blocks;
    this._colors = colors;
    this._names = names;
    this._cells = blocks.runs.flatMap(([cells, what]) => Array(cells).fill(what));
    const { num_blocks, num_free, num_cached, num_shared, num_owned } = blocks;
    this.canvas.setAttribute(
      "aria-label",
      `Map of ${num_blocks} KV blocks: ${num_owned} owned, ${num_shared} shared, ${num_cached} cached, ` +
        `${num_free} free`,
    );
    this.draw();
  }

  draw() {
    if (!this._blocks) return;
    const width = this.canvas.clientWidth;
    if (!width) return;
    const fits = (pitch) => Math.ceil(this.count / Math.floor(width / pitch)) * pitch <= 190;
    this._pitch = [14, 12, 10, 8, 7, 6, 5].find(fits) ?? 4;
    this._columns = Math.floor(width / this._pitch);
    const size = this._pitch - (this._pitch > 5 ? 2 : 1);
    const { context } = this.begin(Math.ceil(this.count / this._columns) * this._pitch);
    for (const [i, what] of this._cells.entries()) {
      const x = (i % this._columns) * this._pitch;
      const y = Math.floor(i / this._columns) * this._pitch;
      context.fillStyle = typeof what === "number" ? color(this._colors[what]) : color(what);
      context.fillRect(x, y, size, size);
      if (i === this._marked) {
        context.strokeStyle = color("ink");
        context.lineWidth = 2;
        context.strokeRect(x - 0.5, y - 0.5, size + 1, size + 1);
      }
    }
    this.tell();
  }

  at(x, y) {
    const column = Math.floor(x / this._pitch);
    if (column < 0 || column >= this._columns || y < 0) return -1;
    return Math.floor(y / this._pitch) * this._columns + column;
  }

  describe(i) {
    const each = this._blocks.blocks_per_cell;
    const what = this._cells[i];
    const from = i * each;
    const to = Math.min(from + each, this._blocks.num_blocks) - 1;
    const name = from === to ? `Block ${from}` : `Blocks ${from} to ${to}, mostly`;
    return `${name}: ${typeof what === "number" ? this._names(what) : KINDS[what]}`;
  }
}

const CUT = 4; // clip at this many medians, so that one slow step does not flatten all others

export const milliseconds = (seconds) => {
  const ms = 1000 * seconds;
  return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
};

export const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;

export class StepChart extends Chart {
  static HEIGHT = 96;
  static LANE = 16; // height of the drafts
  static PITCH = 4;

  constructor(canvas, probe) {
    super(canvas, probe);
    this._all = [];
    this._steps = [];
  }

  get count() {
    return this._steps.length;
  }

  show(steps) {
    this._all = steps;
    this.draw();
  }

  draw() {
    const { HEIGHT, LANE, PITCH } = StepChart;
    const { context, width } = this.begin(HEIGHT);
    if (!width) return;
    this._steps = this._all.slice(-Math.floor(width / PITCH));
    this._left = width - this._steps.length * PITCH;
    const times = this._steps.map((step) => step.seconds).sort((one, other) => one - other);
    const longest = times.at(-1) ?? 0;
    const top = Math.max(0.001, Math.min(longest, CUT * times[times.length >> 1])); // time at the top edge
    const mostDrafts = Math.max(1, ...this._steps.map((step) => step.draft_tokens));
    const base = HEIGHT - LANE - 2;
    context.fillStyle = color("line");
    context.fillRect(0, base, width, 1);
    for (const [i, step] of this._steps.entries()) {
      const x = this._left + i * PITCH;
      const height = Math.max(1, ((base - 14) * Math.min(step.seconds, top)) / top);
      context.fillStyle = color(i === this._marked ? "ink" : step.tokens > step.rows ? "prompt" : "decode");
      context.fillRect(x, base - height, PITCH - 1, height);
      const drafts = (LANE * step.draft_tokens) / mostDrafts;
      const accepted = (LANE * step.accepted_tokens) / mostDrafts;
      context.fillStyle = color("proposed");
      context.fillRect(x, HEIGHT - drafts, PITCH - 1, drafts);
      context.fillStyle = color("accepted");
      context.fillRect(x, HEIGHT - accepted, PITCH - 1, accepted);
    }
    if (this.count) {
      context.fillStyle = color("muted");
      context.font = "11px system-ui, sans-serif";
      context.textBaseline = "top";
      context.fillText(milliseconds(top), 0, 0);
    }
    const last = this._steps.at(-1);
    this.canvas.setAttribute(
      "aria-label",
      last
        ? `Timeline of the last ${this.count} steps, at most ${milliseconds(longest)}. ${this._words(last)}`
        : "Timeline of steps: none yet",
    );
    this.tell();
  }

  at(x) {
    const i = Math.floor((x - this._left) / StepChart.PITCH);
    return i < this.count ? i : -1;
  }

  describe(i) {
    const { step, seconds, rows, tokens, draft_tokens, accepted_tokens } = this._steps[i];
    const drafts = draft_tokens ? `, ${accepted_tokens}/${draft_tokens} drafts` : "";
    return `${step}: ${milliseconds(seconds)}, ${count(rows, "row")}, ${count(tokens, "token")}${drafts}`;
  }

  _words(step) {
    const drafts = step.draft_tokens ? `, ${step.accepted_tokens} of ${step.draft_tokens} drafts accepted` : "";
    return (
      `Step ${step.step}: ${milliseconds(step.seconds)}, ${count(step.sequences, "sequence")}, ` +
      `${count(step.tokens, "token")}, ${count(step.rows, "row")}${drafts}`
    );
  }
}
