// The view of a report of `forge-jax compare`, in the page and in the files of --html. It imports nothing,
// because those files contain it. Text of a model is inserted as text nodes, never as HTML.

const FORMAT = "forge-jax-comparison";
const VERSION = 1;
const LEVELS = [0.001, 0.01, 0.1, 1]; // lower bounds of the shades, in nats
const LARGEST = 10; // rows of the table of differences
const MOST_BARS = 320; // per chart, so that each bar is visible on a phone
const FLOOR = 1e-4; // nats at the bottom of the charts
const CEILING = 10;
const SVG = "http://www.w3.org/2000/svg";

/** Return the report of a file. Throws `TypeError` or `SyntaxError` if it is invalid. */
export function readComparison(text) {
  const report = JSON.parse(text);
  if (report?.format !== FORMAT || report.version !== VERSION) {
    throw new TypeError(`The file has no "format": "${FORMAT}" of version ${VERSION}. Write one with compare --json.`);
  }
  check(Array.isArray(report.sides) && report.sides.length === 2, "sides must be a list of two");
  for (const [i, side] of report.sides.entries()) {
    strings(side, ["name", "label", "model"], `sides[${i}]`);
    if (side.weight_bytes !== null) numbers(side, ["weight_bytes"], `sides[${i}]`);
  }
  check(["answers", "prompts"].includes(report.settings?.scored), "settings.scored must be answers or prompts");
  numbers(report.summary, ["mean_kl", "median_kl", "p90_kl", "p99_kl", "max_kl", "same_top", "positions", "prompts",
    "same_answers", "rms_probability_change"], "summary");
  pair(report.summary, "perplexity", "summary");
  strings(report, ["forge_jax", "date"], "file");
  check(Array.isArray(report.prompts), "prompts must be a list");
  for (const [i, entry] of report.prompts.entries()) checkEntry(entry, `prompts[${i}]`);
  return report;
}

function checkEntry(entry, where) {
  strings(entry, ["prompt"], where);
  check(entry.divergence === null || Number.isFinite(entry.divergence), `${where}.divergence must be a number or null`);
  check(Array.isArray(entry.answers) && entry.answers.length === 2, `${where}.answers must be a list of two`);
  for (const answer of entry.answers) {
    const { pieces } = answer ?? {};
    const valid = Array.isArray(pieces) && pieces.every((piece) => typeof piece === "string");
    check(valid, `${where}.answers must have lists of strings as pieces`);
  }
  check(Array.isArray(entry.positions), `${where}.positions must be a list`);
  for (const [i, found] of entry.positions.entries()) {
    const at = `${where}.positions[${i}]`;
    numbers(found, ["kl"], at);
    strings(found, ["piece", "text"], at);
    for (const name of ["logprobs", "ranks"]) pair(found, name, at);
    if (found.entropies !== null) pair(found, "entropies", at);
    const valid = Array.isArray(found.top) && found.top.length === 2 && found.top.every((list) => list?.every?.(isToken));
    check(valid, `${at}.top must be two lists of tokens`);
  }
}

const isToken = (each) => Array.isArray(each) && typeof each[1] === "string" && Number.isFinite(each[2]);

function check(holds, message) {
  if (!holds) throw new TypeError(`${message}.`);
}

function numbers(value, names, where) {
  for (const name of names) check(Number.isFinite(value?.[name]), `${where}.${name} must be a number`);
}

function strings(value, names, where) {
  for (const name of names) check(typeof value?.[name] === "string", `${where}.${name} must be a string`);
}

function pair(value, name, where) {
  const list = value?.[name];
  check(Array.isArray(list) && list.length === 2 && list.every(Number.isFinite), `${where}.${name} must be two numbers`);
}

// ---- formats ---------------------------------------------------------------------------------------------

const level = (kl) => LEVELS.filter((bound) => kl >= bound).length;

function nats(value) {
  if (value === 0) return "0";
  return value < 1e-4 ? value.toExponential(1) : value.toPrecision(3).replace(/e\+.*/, "");
}

function percent(logprob) {
  const part = 100 * Math.exp(logprob);
  return part < 0.05 ? "<0.1 %" : `${part.toFixed(part >= 99.95 ? 0 : 1)} %`;
}

const visible = (token) =>
  token === "" ? "∅" : token.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");

const count = (number, name) => `${number.toLocaleString("en")} ${name}${number === 1 ? "" : "s"}`;

// ---- elements --------------------------------------------------------------------------------------------

function make(name, className = "", ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function draw(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Return the text of a divergence in nats. A live comparison only has a lower bound. */
const divergenceOf = (report) => (report.settings.kl_lower_bound ? (kl) => `≥ ${nats(kl)}` : nats);

/** Return the view of a report. `heading` is the level of its title. Below another title, it has none. */
export function comparisonView(report, heading = 1) {
  const view = make("div", "comparison");
  const tip = new Tip(view, divergenceOf(report));
  view.append(sides(report, heading), figures(report), legend(report));
  const tokens = report.prompts.map((entry, i) => {
    const { article, box } = prompt(report, entry, i, heading + 1, tip);
    view.append(article);
    return box;
  });
  const largest = differences(report, tokens, heading + 1);
  if (largest) view.append(largest);
  view.append(footnote(report), tip.element, tip.spoken);
  return view;
}

function sides(report, heading) {
  const list = make("div", "sides");
  for (const side of report.sides) {
    const flags = side.label.startsWith(side.model) ? side.label.slice(side.model.length).trim() : side.label;
    const name = make("p", "side-name", make("b", `side ${side.name === "A" ? "a" : "b"}`, side.name), side.model);
    const text = flags.replaceAll(" --", "\n--"); // one flag per line
    const box = make("div", "", name, ...(text ? [make("code", "flags", text)] : []));
    if (side.weight_bytes !== null) {
      const megabytes = (side.weight_bytes / 1e6).toLocaleString("en", { maximumFractionDigits: 1 });
      box.append(make("p", "quiet", `${megabytes} MB of weights`));
    }
    list.append(box);
  }
  return heading === 1 ? make("div", "", make("h1", "", "Comparison, token by token"), list) : list;
}

function figures(report) {
  const { summary } = report;
  const kl = divergenceOf(report);
  const list = make("dl", "figures");
  const add = (name, value, unit = "", title = "") => {
    const term = make("dt", "", name);
    if (title) term.title = title;
    list.append(make("div", "", term, make("dd", "", value, ...(unit ? [make("small", "", ` ${unit}`)] : []))));
  };
  const share = (value, digits) => (100 * value).toFixed(digits);
  add("mean KL(A‖B)", kl(summary.mean_kl), "nats", "mean KL divergence of the next-token distributions");
  add("median", kl(summary.median_kl), "nats");
  add("p99", kl(summary.p99_kl), "nats", "99th percentile of the KL divergence");
  add("maximum", kl(summary.max_kl), "nats");
  add("same top token", share(summary.same_top, 1), "%", "positions at which both sides have the same most likely token");
  add("RMS probability change", share(summary.rms_probability_change, 2), "%", "of the scored tokens");
  add("perplexity A", summary.perplexity[0].toPrecision(4), "", `of ${report.settings.scored === "answers" ? "A's answers" : "the prompts"}`);
  add("perplexity B", summary.perplexity[1].toPrecision(4), "", `of ${report.settings.scored === "answers" ? "A's answers" : "the prompts"}`);
  return list;
}

function legend(report) {
  const items = LEVELS.map((bound, i) => make("li", "", make("i", `shade kl-${i + 1}`), `≥ ${bound}`));
  const answered = report.settings.scored === "answers";
  const shaded = report.settings.kl_lower_bound ? "lower bound of the KL divergence in nats" : "KL divergence in nats";
  return make("ul", "legend", make("li", "quiet", shaded), ...items,
    make("li", "", make("span", "differs", "top token differs")),
    ...(answered ? [make("li", "", make("span", "parted", "first different token of B"))] : []));
}

function prompt(report, entry, index, heading, tip) {
  const answered = report.settings.scored === "answers";
  const name = answered ? `${index + 1}. ${entry.prompt}` : `${index + 1}. ${count(entry.positions.length, "scored token")}`;
  const box = new Tokens(entry, answered ? `A’s answer to prompt ${index + 1}` : `prompt ${index + 1}`, tip);
  const article = make("article", "", make(`h${heading}`, "", name), chart(entry.positions, box));
  if (answered) {
    article.append(make("div", "answers",
      make("div", "", make("p", "of", make("b", "side a", "A"), ending(entry, 0)), box.element),
      make("div", "", make("p", "of", make("b", "side b", "B"), ending(entry, 1)), other(entry))));
  } else article.append(box.element);
  return { article, box };
}

function ending(entry, side) {
  const answer = entry.answers[side];
  const same = entry.divergence === null;
  const parted = same ? "the same answer" : `differs from token ${entry.divergence}`;
  return make("span", "quiet", side ? `${count(answer.pieces.length, "token")}, ${parted}` : count(answer.pieces.length, "token"));
}

function other(entry) {
  const { pieces } = entry.answers[1];
  const split = entry.divergence ?? pieces.length;
  const box = make("div", "passage", make("span", "common", pieces.slice(0, split).join("")));
  if (split < pieces.length) box.append(make("span", "parted", pieces[split]), pieces.slice(split + 1).join(""));
  box.tabIndex = 0; // it can scroll
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", "B’s answer");
  return box;
}

/** Return a chart with one bar per token, or per group of tokens with its maximum. The scale is logarithmic. */
function chart(positions, box) {
  const each = Math.ceil(positions.length / MOST_BARS); // tokens per bar
  const bars = [];
  for (const [i, { kl }] of positions.entries()) {
    if (i % each === 0) bars.push(i);
    else if (kl > positions[bars.at(-1)].kl) bars[bars.length - 1] = i;
  }
  const width = Math.max(bars.length, 40);
  const height = (kl) => Math.max(0, Math.min(1, Math.log(kl / FLOOR) / Math.log(CEILING / FLOOR)));
  const svg = draw("svg", { viewBox: `0 0 ${width} 100`, preserveAspectRatio: "none", "aria-hidden": "true" });
  for (const bound of LEVELS) {
    const y = 100 - 100 * height(bound);
    svg.append(draw("line", { x1: 0, x2: width, y1: y, y2: y, class: "grid" }));
  }
  const rects = bars.map((index, x) => {
    const { kl } = positions[index];
    const tall = Math.max(1, 100 * height(kl));
    return draw("rect", { x: x + 0.1, width: 0.8, y: 100 - tall, height: tall, class: `bar kl-${level(kl)}` });
  });
  svg.append(...rects);
  const cursor = draw("rect", { width: 1, height: 100, y: 0, class: "cursor" });
  svg.append(cursor);
  box.onShow = (index) => cursor.setAttribute("x", index < 0 ? -2 : Math.floor(index / each));
  box.onShow(-1);
  const at = (event) => {
    const { left, width: wide } = svg.getBoundingClientRect();
    const x = Math.floor((width * (event.clientX - left)) / wide);
    if (!rects[x]) return;
    box.scrollTo(bars[x]);
    box.show(bars[x], rects[x]);
  };
  svg.addEventListener("pointermove", at);
  svg.addEventListener("pointerdown", at);
  svg.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && box.show(-1));
  const labels = LEVELS.map((bound) => {
    const label = make("span", "", String(bound));
    label.style.bottom = `${100 * height(bound)}%`;
    return label;
  });
  const scale = make("div", "scale", ...labels);
  scale.setAttribute("aria-hidden", "true");
  return make("div", "chart", scale, svg);
}

function differences(report, boxes, heading) {
  const rows = report.prompts.flatMap((entry, i) => entry.positions.map((found, at) => ({ i, at, found })));
  const largest = rows.filter(({ found }) => found.kl > 0).sort((one, two) => two.found.kl - one.found.kl).slice(0, LARGEST);
  if (!largest.length) return null;
  const head = ["prompt", "token", report.settings.kl_lower_bound ? "KL ≥, nats" : "KL, nats", "p by A", "p by B", "A’s top", "B’s top"].map((name) => {
    const cell = make("th", "", name);
    cell.scope = "col";
    return cell;
  });
  const body = largest.map(({ i, at, found }) => {
    const button = make("button", "", visible(found.text));
    button.type = "button";
    button.addEventListener("click", () => boxes[i].reveal(at));
    const cells = [nats(found.kl), percent(found.logprobs[0]), percent(found.logprobs[1])].map((text) => make("td", "", text));
    const tops = found.top.map(([first]) => make("td", "word", make("code", "", visible(first[1]))));
    return make("tr", "", make("td", "", String(i + 1)), make("td", "word", button), ...cells, ...tops);
  });
  const table = make("table", "", make("thead", "", make("tr", "", ...head)), make("tbody", "", ...body));
  const region = make("div", "wide", table);
  region.tabIndex = 0;
  region.setAttribute("role", "region");
  region.setAttribute("aria-label", "Largest differences");
  return make("section", "", make(`h${heading}`, "", "Largest differences"), region);
}

function footnote(report) {
  const { settings, summary } = report;
  const bound = settings.kl_lower_bound
    ? ` KL ≥ is a lower bound from the ${settings.top_logprobs} most likely tokens of each side.`
    : "";
  const scored = settings.scored === "answers" ? "Both sides score A’s answers." : "Both sides score the prompts.";
  const drawn = settings.temperature === 0 ? ", greedy" : `, temperature ${settings.temperature}, seed ${settings.seed}`;
  const how = settings.temperature === null ? "" : drawn; // null: each side has its own
  const same = settings.scored === "answers" ? ` ${summary.same_answers} of ${summary.prompts} answers are the same.` : "";
  return make("footer", "quiet", `${count(summary.positions, "token")}${how}. ${scored}${bound}${same} forge-jax ${report.forge_jax}, ${report.date.slice(0, 10)}.`);
}

// ---- tokens ----------------------------------------------------------------------------------------------

/** The scored tokens of one prompt, as a text whose tokens have a tooltip. */
class Tokens {
  constructor(entry, label, tip) {
    this.positions = entry.positions;
    this.active = -1;
    this.onShow = () => {};
    this._tip = tip;
    this.spans = entry.positions.map((found, i) => {
      const differs = found.top[0][0]?.[0] !== found.top[1][0]?.[0];
      // A token that ends within a character adds no text.
      const span = make("span", `scored kl-${level(found.kl)}${differs ? " differs" : ""}`, found.piece || "·");
      span.dataset.index = i;
      return span;
    });
    this.element = make("div", "passage", ...this.spans);
    this.element.tabIndex = 0;
    this.element.setAttribute("role", "group");
    this.element.setAttribute("aria-label", `${label}; arrow keys move between tokens`);
    const over = (event) => {
      const span = event.target.closest(".scored");
      if (span) this.show(Number(span.dataset.index));
    };
    this.element.addEventListener("pointerover", over);
    this.element.addEventListener("pointerdown", over); // touch screens cannot hover
    this.element.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.show(-1));
    this.element.addEventListener("focusout", () => this.show(-1));
    this.element.addEventListener("keydown", (event) => this._key(event));
  }

  _key(event) {
    const last = this.spans.length - 1;
    const to = {
      ArrowRight: Math.min(this.active + 1, last),
      ArrowLeft: this.active < 0 ? last : Math.max(this.active - 1, 0),
      Home: 0,
      End: last,
      Escape: -1,
    }[event.key];
    if (to === undefined || (event.key === "Escape" && this.active < 0)) return;
    event.preventDefault();
    event.stopPropagation();
    if (to >= 0) this.spans[to].scrollIntoView({ block: "nearest" });
    this.show(to);
    this._tip.speak(to < 0 ? null : this.positions[to]);
  }

  /** Scroll to a token and show its tooltip. */
  reveal(index) {
    this.element.focus({ preventScroll: true });
    this.spans[index].scrollIntoView({ block: "center" });
    this.show(index);
    this._tip.speak(this.positions[index]);
  }

  /** Scroll the text, but not the page, to a token. */
  scrollTo(index) {
    const text = this.element.getBoundingClientRect();
    const span = this.spans[index].getBoundingClientRect();
    if (span.top < text.top || span.bottom > text.bottom) this.element.scrollTop += span.top - text.top - 40;
  }

  /** Show the tooltip of a token next to the token, or to another element. With -1, hide it. */
  show(index, anchor = this.spans[index]) {
    if (index >= 0) this._tip.take(this);
    this.spans[this.active]?.classList.remove("active");
    this.active = index;
    this.onShow(index);
    if (index < 0) return this._tip.hide();
    this.spans[index].classList.add("active");
    this._tip.show(this.positions[index], index, anchor);
  }
}

function describe(found, kl) {
  const [a, b] = found.logprobs.map(percent);
  const tops = found.top.map(([first]) => visible(first[1]));
  return `${visible(found.text)}: KL ${kl(found.kl)} nats, ${a} by A, ${b} by B, top tokens ${tops.join(" and ")}`;
}

class Tip {
  /** `kl` returns the text of a divergence. */
  constructor(view, kl) {
    this._kl = kl;
    this.element = make("div", "comparison-tip");
    this.element.setAttribute("role", "tooltip");
    this.element.hidden = true;
    this.spoken = make("p", "spoken");
    this.spoken.setAttribute("aria-live", "polite");
    this._owner = null;
    this._view = view;
    this._anchor = null;
  }

  /** Remove the tooltip from the text that has it. */
  take(owner) {
    if (this._owner && this._owner !== owner) this._owner.show(-1);
    this._owner = owner;
  }

  /** Announce a position, or null for none. */
  speak(found) {
    this.spoken.textContent = found ? describe(found, this._kl) : "";
  }

  hide() {
    this.element.hidden = true;
    if (current === this) current = null;
  }

  /** Keep the tooltip next to its anchor. */
  follow() {
    place(this.element, this._anchor);
  }

  /** Hide the tooltip if the user points outside of tokens and charts. */
  leave(target) {
    if (!this._view.contains(target) || !target.closest(".passage, .chart, td button")) this._owner?.show(-1);
  }

  show(found, index, anchor) {
    const token = make("code", "", visible(found.text));
    const head = make("p", "tip-head", make("span", "", token, ` token ${index}`), make("b", "", `KL ${this._kl(found.kl)} nats`));
    const columns = ["A", "B"].map((name, side) => {
      const chance = `${percent(found.logprobs[side])}, rank ${found.ranks[side].toLocaleString("en")}`;
      const list = make("ol", "", ...found.top[side].map((other) => alternative(other, found)));
      const entropy = found.entropies ? [make("p", "quiet", `entropy ${nats(found.entropies[side])} nats`)] : [];
      return make("div", "", make("p", "of", make("b", `side ${name.toLowerCase()}`, name), chance), list, ...entropy);
    });
    this.element.replaceChildren(head, make("div", "columns", ...columns));
    this.element.hidden = false;
    this._anchor = anchor;
    current = this;
    this.follow();
  }
}

let current = null; // the visible tooltip

document.addEventListener("scroll", () => current?.follow(), { capture: true, passive: true });
document.addEventListener("pointerdown", (event) => current?.leave(event.target));

function alternative([id, text, logprob], found) {
  const bar = make("i");
  bar.style.width = `${100 * Math.exp(logprob)}%`;
  const chosen = id === found.token ? "chosen" : "";
  return make("li", chosen, bar, make("code", "", visible(text)), make("span", "", percent(logprob)));
}

function place(tip, anchor) {
  // The space before a word can be at the end of the previous line.
  const [widest] = [...anchor.getClientRects()].sort((one, two) => two.width - one.width);
  const at = widest ?? anchor.getBoundingClientRect();
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - width - 8))}px`;
  const below = at.bottom + 6;
  tip.style.top = `${below + height > innerHeight - 8 ? Math.max(8, at.top - height - 6) : below}px`;
}
