// The live view. It polls /engine_state while it is visible.

import { request } from "./api.js";
import { BlockChart, StepChart } from "./charts.js";
import { by, copyFrom, download, say } from "./dom.js";
import { LINK, linkedRecording, readRecording, recordingLink, recordingText } from "./recording.js";
import { TimelineChart, Timelines } from "./timeline.js";

const BUSY_MS = 200;
const IDLE_MS = 1000;
const WRONG_MS = 2000;
const MOST_STEPS = 512;
const MOST_ROWS = 40; // limit of the table
const COLORS = 8;

const calm = matchMedia("(prefers-reduced-motion: reduce)");

let steps = [];
let before = null; // the previous state
let rate = 0; // tokens per second, smoothed
let answering = false;
let ownId = null; // request id of this page's latest answer
let paused = false;
let replaying = false; // the panel shows a recorded state
let locked = false; // the key is wrong or missing; polling stops until it changes
let timer = null;
let asking = false;
let blockChart;
let stepChart;
let timelineChart;

const timelines = new Timelines();
const colors = new Map(); // sequence -> index of its color while the sequence is in the state

function visible() {
  return document.visibilityState === "visible" && by("engine").checkVisibility();
}

async function look() {
  clearTimeout(timer);
  if (asking || paused || locked || !visible()) return;
  asking = true;
  let wait = WRONG_MS;
  try {
    const after = steps.at(-1)?.step ?? -1;
    const response = await request(after < 0 ? "engine_state" : `engine_state?after_step=${after}`);
    const state = await response.json();
    if (paused) {
      asking = false;
      return;
    }
    if (before && state.generation_tokens < before.generation_tokens) {
      forget(); // the engine was restarted, so its step numbers start again
    } else show(state);
    const busy = answering || state.num_running + state.num_waiting > 0;
    wait = busy && !calm.matches ? BUSY_MS : IDLE_MS;
    note("");
  } catch (error) {
    locked = error.status === 401;
    note(locked ? "An API key is required." : error.message);
  }
  asking = false;
  timer = setTimeout(look, wait);
}

function forget() {
  steps = [];
  before = null;
  timelines.clear();
}

function note(text) {
  if (by("engine-note").textContent !== text) by("engine-note").textContent = text;
}

function show(state) {
  steps = [...steps, ...state.steps].slice(-MOST_STEPS);
  const { blocks, sequences } = state;
  const text = (id, value) => (by(id).textContent = value);
  text("running", `${state.num_running}/${state.num_slots}`);
  text("waiting", state.num_waiting);
  text("rate", tokensPerSecond(state));
  text("held", percent(blocks.num_owned + blocks.num_shared, blocks.num_blocks));
  text("hits", percent(state.prefix_cache_hits, state.prefix_cache_queries));
  text("preemptions", state.preemptions);
  for (const kind of ["owned", "shared", "cached", "free"]) text(`num-${kind}`, blocks[`num_${kind}`]);
  const names = sequences.map(nameOf);
  const tints = paint(sequences);
  table(sequences, names, tints);
  blockChart.show(blocks, tints, (place) => `owned by ${names[place]}`);
  stepChart.show(steps);
  lives(state);
  drafts(state.speculation);
  gpus(state.gpus ?? []); // recordings of older versions have none
  before = state;
}

function lives(state) {
  timelines.add(state);
  const { rows } = timelines;
  by("timeline").hidden = rows.length === 0;
  by("no-timeline").hidden = rows.length > 0;
  const loads = rows.some(({ spans }) => spans.some(([kind]) => kind === "loading"));
  by("engine").classList.toggle("no-loads", !loads);
  timelineChart.show(rows, nameOf, state.time_s);
}

function tokensPerSecond(state) {
  if (before && state.time_s > before.time_s) {
    const now = (state.generation_tokens - before.generation_tokens) / (state.time_s - before.time_s);
    rate = now === 0 ? 0 : rate === 0 ? now : 0.6 * rate + 0.4 * now;
  }
  return rate < 10 ? rate.toFixed(rate ? 1 : 0) : Math.round(rate);
}

const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

function nameOf(seq) {
  if (seq.request_id === null) return "another key";
  const short = seq.request_id.replace(/^[a-z]+[-_]/, "").slice(0, 8);
  const place = seq.prompt + seq.sample ? ` ${seq.prompt}.${seq.sample}` : "";
  return `${seq.request_id === ownId ? "this chat" : short}${place}`;
}

/** Return the colors of sequences. A sequence keeps its color as long as it runs. */
function paint(sequences) {
  const keys = sequences.map((seq, i) =>
    seq.request_id === null ? `? ${i}` : `${seq.request_id} ${seq.prompt} ${seq.sample}`,
  );
  for (const key of colors.keys()) if (!keys.includes(key)) colors.delete(key);
  return keys.map((key) => {
    if (!colors.has(key)) {
      const used = [...colors.values()];
      const free = Array.from({ length: COLORS }, (_, i) => i).find((i) => !used.includes(i));
      colors.set(key, free ?? colors.size % COLORS);
    }
    return `s${colors.get(key)}`;
  });
}

function table(sequences, names, tints) {
  const rows = sequences.slice(0, MOST_ROWS).map((seq, i) => {
    const row = document.createElement("tr");
    if (seq.request_id !== null && seq.request_id === ownId) row.className = "own";
    const cells = [
      names[i],
      `${seq.prompt_tokens} + ${seq.output_tokens}`,
      seq.shared_blocks ? `${seq.blocks} (${seq.shared_blocks} shared)` : seq.blocks,
      seq.draft_tokens ? `${seq.accepted_tokens}/${seq.draft_tokens}` : "–",
    ].map((value) => {
      const cell = document.createElement("td");
      cell.textContent = seq.status === "waiting" && value === seq.blocks ? "waiting" : value;
      return cell;
    });
    if (seq.request_id !== null) cells[0].title = seq.request_id;
    const swatch = document.createElement("i");
    swatch.className = `swatch ${seq.status === "waiting" ? "free" : tints[i]}`;
    cells[0].prepend(swatch);
    row.append(...cells);
    return row;
  });
  by("sequences").replaceChildren(...rows);
  const more = sequences.length - rows.length;
  by("no-sequences").textContent = more > 0 ? `and ${more} more` : "No sequences are running.";
  by("no-sequences").hidden = rows.length > 0 && more <= 0;
}

const gib = (bytes) => (bytes / 2 ** 30).toFixed(1);

/** Show a line for each GPU. Values that a GPU does not report are omitted. */
function gpus(states) {
  const rows = states.map((gpu) => {
    const row = document.createElement("li");
    const name = document.createElement("span");
    name.textContent = `GPU ${gpu.index}`;
    name.title = gpu.name;
    const values = [`${gib(gpu.memory_used_bytes)} of ${gib(gpu.memory_total_bytes)} GiB`];
    if (gpu.utilization !== null) values.push(`${percent(gpu.utilization, 1)} busy`);
    if (gpu.temperature_celsius !== null) values.push(`${gpu.temperature_celsius} °C`);
    if (gpu.power_watts !== null) values.push(`${Math.round(gpu.power_watts)} W`);
    row.append(name, ` ${values.join(" · ")}`);
    return row;
  });
  by("gpus").replaceChildren(...rows);
  by("gpus").hidden = rows.length === 0;
}

function drafts(speculation) {
  const list = by("positions");
  by("engine").classList.toggle("no-drafts", !speculation);
  if (!speculation) {
    by("acceptance").textContent = "speculation is off";
    list.replaceChildren();
    return;
  }
  const { num_drafts, num_draft_tokens, accepted_per_position } = speculation;
  const accepted = accepted_per_position.reduce((sum, each) => sum + each, 0);
  by("acceptance").textContent = num_draft_tokens
    ? `${accepted} of ${num_draft_tokens} tokens, ${percent(accepted, num_draft_tokens)}`
    : "none proposed yet";
  const reached = accepted_per_position.filter((each) => each > 0);
  const rows = reached.map((each) => {
    const row = document.createElement("li");
    const bar = document.createElement("i");
    bar.className = "bar";
    bar.style.width = `${(100 * each) / num_drafts}%`;
    const label = document.createElement("span");
    label.textContent = percent(each, num_drafts);
    row.append(bar, label);
    return row;
  });
  list.replaceChildren(...rows);
}

export function beginEngine() {
  blockChart = new BlockChart(by("blocks"), by("blocks-probe"));
  stepChart = new StepChart(by("steps"), by("steps-probe"));
  timelineChart = new TimelineChart(by("requests"), by("request-span"), by("request-figures"), by("request-live"));
  by("timeline-window").addEventListener("change", (event) => timelineChart.zoom(Number(event.target.value)));
  document.addEventListener("answering", (event) => {
    answering = event.detail;
    look();
  });
  document.addEventListener("answer-id", (event) => (ownId = event.detail));
  document.addEventListener("key-changed", () => {
    locked = false;
    look();
  });
  document.addEventListener("panel-shown", look);
  document.addEventListener("visibilitychange", look);
  addEventListener("resize", () => look());
  by("pause").addEventListener("click", () => setPaused(!paused));
  by("state-save").addEventListener("click", () => {
    if (before) download(recorded(), "engine-state.json");
  });
  by("state-link").addEventListener("click", async () => {
    if (before) copyFrom(by("state-link"), await recordingLink(recorded()), "Copied");
  });
  by("state-open").addEventListener("click", () => by("state-file").click());
  by("state-file").addEventListener("change", async () => {
    for (const file of by("state-file").files) await replay(file.name, () => file.text());
    by("state-file").value = "";
  });
  addEventListener("hashchange", replayLink);
  replayLink();
  look();
}

const recorded = () => recordingText(timelines.complete(before), steps);

/** Show the state in the page's address, if there is one. */
function replayLink() {
  if (!location.hash.startsWith(LINK)) return;
  say("show-panel", "engine");
  replay("The link", linkedRecording);
}

function setPaused(value) {
  paused = value;
  by("pause").setAttribute("aria-pressed", String(paused));
  if (replaying && !paused) {
    replaying = false;
    if (location.hash) history.replaceState(null, "", location.pathname);
    forget();
    note("");
  }
  look();
}

/** Show a recorded state until the user resumes. */
async function replay(name, read) {
  let recording;
  try {
    recording = readRecording(await read());
  } catch (error) {
    say("failed", `${name} was not opened. ${error.message}`);
    return;
  }
  setPaused(true);
  replaying = true;
  forget();
  rate = 0;
  show(recording.state);
  note(`Recorded ${new Date(recording.recorded).toLocaleString()}`);
}
