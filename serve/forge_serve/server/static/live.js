// The live comparison: two streamed answers to one prompt, and the next-token distributions of both sides on A's answer.

import { errorText, events, request } from "./api.js";
import { question } from "./chat.js";
import { comparisonView } from "./comparison.js";
import { requestMessages } from "./conversation.js";
import { differing, divergence, liveReport } from "./differences.js";
import { by, download, element, say } from "./dom.js";
import { Meter } from "./meter.js";
import { numbers } from "./settings.js";
import { AnswerText, beginTips } from "./tokens.js";

const SHOWN = 5; // alternatives per token of an answer
const SCORED = 20; // alternatives per scored token, the server's maximum

const SAME =
  "Both sides are the same model with the same prompt. Sampling settings change which tokens are drawn, not the " +
  "model’s distributions, so KL = 0.";

let sides = []; // made when the dialog is first opened
let running = null; // AbortController of the current run
let report = null; // result of the last run, which can be saved

// ---- the form --------------------------------------------------------------------------------------------

/** The model and settings of one side. */
class Side {
  constructor(name) {
    this.name = name;
    const id = `live-${name.toLowerCase()}`;
    this.model = by("model").cloneNode();
    this.model.id = `${id}-model`;
    const modelLabel = element("label", "", "Model");
    modelLabel.htmlFor = this.model.id;
    const system = copyField(by("system"), id);
    this._system = system.querySelector("textarea");
    this._system.rows = 2;
    const grid = element("div", "grid", ...settings().map((input) => copyField(input, id)));
    this._summary = element("summary");
    const badge = element("b", `side ${name.toLowerCase()}`, name);
    this.fieldset = element("fieldset", "", element("legend", "", badge), element("div", "field", modelLabel, this.model), system,
      element("details", "", this._summary, grid));
    this.fieldset.addEventListener("input", () => this._sum());
    this.useSettings();
  }

  /** Set the fields to those of the settings panel. */
  useSettings() {
    this.listModels();
    this.model.value = by("model").value;
    this._system.value = by("system").value;
    const inputs = this.fieldset.querySelectorAll("[data-field]");
    settings().forEach(({ value }, i) => (inputs[i].value = value));
    this._sum();
  }

  /** Update the list of models, which may have loaded since. */
  listModels() {
    const { value } = this.model;
    this.model.replaceChildren(...[...by("model").options].map((option) => option.cloneNode(true)));
    this.model.disabled = by("model").disabled;
    if ([...this.model.options].some((option) => option.value === value)) this.model.value = value;
  }

  get system() {
    return this._system.value;
  }

  get numbers() {
    return numbers(this.fieldset);
  }

  /** Return the request's fields that a report records. */
  get options() {
    return { ...this.numbers, ...(this.system.trim() ? { system: this.system } : {}) };
  }

  _sum() {
    const set = Object.entries(this.numbers).map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`);
    this._summary.textContent = `Sampling: ${set.join(", ") || "server’s defaults"}`;
  }
}

const settings = () => [...by("options").querySelectorAll("[data-field]")];

/** Return a copy of a field of the settings panel. */
function copyField(control, prefix) {
  const field = control.closest(".field").cloneNode(true);
  const copy = field.querySelector("input, textarea");
  copy.id = `${prefix}-${control.id}`;
  field.querySelector("label").htmlFor = copy.id;
  return field;
}

/** Prepare the form for the models and the chat of now. */
export function openLive() {
  if (!sides.length) {
    sides = ["A", "B"].map((name) => new Side(name));
    by("live-sides").append(...sides.map(({ fieldset }) => fieldset));
  }
  for (const side of sides) side.listModels();
  by("live-chat").disabled = !question().length;
  if (by("live-chat").disabled) by("live-chat").checked = false;
  choosePrompt();
  (by("live-prompt").disabled ? by("live-run") : by("live-prompt")).focus();
}

function choosePrompt() {
  by("live-prompt").disabled = by("live-chat").checked;
}

// ---- the answers -------------------------------------------------------------------------------------------

/** One side's streamed answer. */
class Answer {
  constructor(side) {
    this.name = side.name;
    this.model = side.model.value;
    this.options = side.options;
    this.promptIds = null;
    this.ids = [];
    this.entries = []; // entries of `logprobs.content`, one per ID
    this._fields = side.numbers;
    this._system = side.system;
    this._meter = new Meter();
    const box = element("div", "passage tokens");
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", `${this.name}’s answer; arrow keys move between tokens`);
    box.setAttribute("aria-describedby", "tip");
    this._shown = new AnswerText(box);
    this._meta = element("p", "quiet", "…");
    const head = element("p", "of", element("b", `side ${this.name.toLowerCase()}`, this.name), this.model);
    this.article = element("article", "", head, box, this._meta);
  }

  get text() {
    return this._shown.text;
  }

  get reason() {
    return this._meter.reason;
  }

  /** Request the answer and show it until it ends. Throws the error that ended it. */
  async stream(messages, signal, changed) {
    const body = {
      model: this.model,
      messages: requestMessages(messages, this._system),
      stream: true,
      stream_options: { include_usage: true },
      return_token_ids: true,
      logprobs: true,
      top_logprobs: SHOWN,
      ...this._fields,
    };
    try {
      for await (const event of events(await request("v1/chat/completions", { body, signal }))) {
        this._take(event);
        changed();
      }
      this._meta.textContent = this._meter.text();
    } catch (error) {
      const stopped = error.name === "AbortError";
      this._meta.textContent = stopped ? this._meter.text("stopped") : errorText(error);
      this._meta.classList.toggle("wrong", !stopped);
      throw error;
    }
  }

  _take(event) {
    this._meter.take(event);
    this.promptIds ??= event.prompt_token_ids ?? null;
    const choice = event.choices[0];
    if (!choice) return;
    const entries = choice.logprobs?.content ?? [];
    entries.forEach((entry, i) => (entry.at = this.ids.length + i));
    this.ids.push(...(choice.token_ids ?? []));
    this.entries.push(...entries);
    const { content = "", reasoning = "" } = choice.delta;
    this._shown.push(reasoning + content, entries);
  }

  /** Color tokens. `flags` has true for each token that differs, and `first` is the index of the first of them. */
  color(flags, first) {
    this._shown.spans.forEach((span, i) => {
      const { at } = this._shown.entries[i];
      span.classList.toggle("changed", flags[at] === true);
      span.classList.toggle("first", at === first);
    });
  }

  /** Return the logprobs of another answer's tokens after this side's prompt. */
  async score(ids, signal) {
    const body = { model: this.model, prompt: [...this.promptIds, ...ids], max_tokens: 0, prompt_logprobs: SCORED };
    const { choices } = await (await request("v1/completions", { body, signal })).json();
    return choices[0].prompt_logprobs;
  }
}

/** Color the answers while they stream, as far as both have arrived. */
function colorSoFar(answers) {
  const shorter = Math.min(...answers.map(({ ids }) => ids.length));
  const first = divergence(...answers.map(({ ids }) => ids.slice(0, shorter)));
  if (first === null) return;
  for (const answer of answers) answer.color(answer.ids.map((_, i) => i >= first), first);
}

/** Color the tokens that differ, and return a sentence about them. */
function colorAll(answers) {
  const ids = answers.map((answer) => answer.ids);
  const first = divergence(...ids);
  const flags = differing(...ids);
  answers.forEach((answer, i) => answer.color(flags[i], first));
  return first === null ? "The answers have the same tokens." : `The answers differ from token ${first}.`;
}

// ---- a run -------------------------------------------------------------------------------------------------

function status(text, wrong = false) {
  by("live-status").textContent = text;
  by("live-status").classList.toggle("wrong", wrong);
}

function setRunning(controller) {
  running = controller;
  const focused = document.activeElement;
  by("live-run").hidden = running !== null;
  by("live-stop").hidden = running === null;
  if (focused?.hidden) by(running ? "live-stop" : "live-run").focus();
}

function setReport(made) {
  report = made;
  by("live-save").hidden = report === null;
  by("live-report").replaceChildren(...(report ? [comparisonView(report, 2)] : []));
}

function fail(error, text = errorText(error)) {
  const stopped = error.name === "AbortError";
  status(stopped ? "Stopped." : text, !stopped);
  if (error.status === 401) say("needs-key", error.message);
}

async function run() {
  const typed = by("live-prompt").value;
  const messages = by("live-chat").checked ? question() : [{ role: "user", content: typed }];
  if (running || !messages.at(-1)?.content.trim()) return by("live-prompt").focus();
  const answers = sides.map((side) => new Answer(side));
  by("live-answers").replaceChildren(...answers.map(({ article }) => article));
  setReport(null);
  status("Both sides are answering.");
  setRunning(new AbortController());
  await compare(answers, messages, running).catch((error) => fail(error));
  setRunning(null);
}

async function compare(answers, messages, { signal }) {
  let frame = 0;
  const changed = () => (frame ||= requestAnimationFrame(() => ((frame = 0), colorSoFar(answers))));
  const ends = await Promise.allSettled(answers.map((answer) => answer.stream(messages, signal, changed)));
  cancelAnimationFrame(frame);
  const failed = ends.find(({ reason }) => reason);
  if (failed) {
    colorSoFar(answers);
    return fail(failed.reason, "The answers were not compared, because a request failed.");
  }
  const told = colorAll(answers);
  const [a, b] = answers;
  if (a.model === b.model && divergence(a.promptIds, b.promptIds) === null) return status(`${told} ${SAME}`);
  if (!a.ids.length) return status("A’s answer is empty, so there is nothing to score.");
  status(`${told} Both sides are scoring A’s answer.`);
  const scores = await Promise.all(answers.map((answer) => answer.score(a.ids, signal)));
  const { version } = await (await request("version", { signal })).json();
  const date = new Date().toISOString();
  setReport(liveReport({ sides: answers, scores, prompt: messages.at(-1).content, alternatives: SCORED, version, date }));
  status(told);
}

/** Stop the current run. The server aborts requests whose connection closes. */
export function stopLive() {
  running?.abort();
}

export function beginLive() {
  by("live-form").addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  // The browser cannot focus an invalid field of closed details.
  by("live-form").addEventListener("invalid", ({ target }) => target.closest("details")?.setAttribute("open", ""), true);
  by("live-stop").addEventListener("click", stopLive);
  by("comparison-dialog").addEventListener("close", stopLive);
  by("live-chat").addEventListener("change", choosePrompt);
  by("live-settings").addEventListener("click", () => sides.forEach((side) => side.useSettings()));
  by("live-save").addEventListener("click", () => download(JSON.stringify(report), "comparison.json"));
  beginTips(by("comparison-dialog"));
}
