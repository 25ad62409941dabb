// A state of the engine in a file or a link, for example for a bug report. It has no text and no tokens.

const FORMAT = "forge-jax-engine-state";
const VERSION = 1;

const COUNTS = ["time_s", "num_running", "num_waiting", "num_slots", "generation_tokens", "preemptions",
  "prefix_cache_hits", "prefix_cache_queries"];
const BLOCK_COUNTS = ["num_blocks", "num_free", "num_cached", "num_shared", "num_owned", "blocks_per_cell"];
const SEQUENCE_COUNTS = ["prompt", "sample", "prompt_tokens", "output_tokens", "blocks", "shared_blocks",
  "draft_tokens", "accepted_tokens"];
const STEP_COUNTS = ["step", "seconds", "sequences", "rows", "tokens", "draft_tokens", "accepted_tokens"];
const DRAFT_COUNTS = ["num_drafts", "num_draft_tokens"];
const GPU_COUNTS = ["index", "memory_used_bytes", "memory_total_bytes"];
const MOST_CELLS = 2048; // the server's limit
const MOST_BYTES = 4 << 20; // size of a link's recording, decompressed
export const LINK = "#state="; // start of the address's fragment

/** Return a state of `/engine_state`, with all steps that the page has, as the text of a file. */
export function recordingText(state, steps) {
  return JSON.stringify({ format: FORMAT, version: VERSION, recorded: Date.now(), state: { ...state, steps } });
}

/** Return a link to this page that contains a recording, compressed and in base64url. */
export async function recordingLink(text) {
  const bytes = await converted(new Blob([text]), new CompressionStream("deflate-raw"), Infinity);
  const code = btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
  const { origin, pathname } = location;
  return origin + pathname + LINK + code.replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

/** Return the recording in the page's address. Throws `TypeError` or `DOMException` if it is invalid. */
export async function linkedRecording() {
  const code = location.hash.slice(LINK.length).replaceAll("-", "+").replaceAll("_", "/");
  const packed = Uint8Array.from(atob(code), (char) => char.charCodeAt(0));
  const bytes = await converted(new Blob([packed]), new DecompressionStream("deflate-raw"), MOST_BYTES);
  return new TextDecoder().decode(bytes);
}

async function converted(blob, conversion, most) {
  const chunks = [];
  let size = 0;
  for await (const chunk of blob.stream().pipeThrough(conversion)) {
    size += chunk.length;
    if (size > most) throw new TypeError(`The recording must have at most ${most} bytes.`);
    chunks.push(chunk);
  }
  return new Uint8Array(await new Blob(chunks).arrayBuffer());
}

/** Return the time and the state of a file. Throws `TypeError` or `SyntaxError` if it is invalid. */
export function readRecording(text) {
  const file = JSON.parse(text);
  if (file?.format !== FORMAT || file.version !== VERSION) {
    throw new TypeError(`The file has no "format": "${FORMAT}" of version ${VERSION}.`);
  }
  const { state } = file;
  numbers(file, ["recorded"], "file");
  numbers(state, COUNTS, "state");
  numbers(state.blocks, BLOCK_COUNTS, "state.blocks");
  for (const name of ["sequences", "steps"]) list(state, name, "state");
  for (const [i, sequence] of state.sequences.entries()) numbers(sequence, SEQUENCE_COUNTS, `state.sequences[${i}]`);
  for (const [i, step] of state.steps.entries()) numbers(step, STEP_COUNTS, `state.steps[${i}]`);
  list(state.blocks, "runs", "state.blocks");
  for (const [i, run] of state.blocks.runs.entries()) {
    if (!Array.isArray(run) || !Number.isFinite(run[0])) throw new TypeError(`state.blocks.runs[${i}] must be a run`);
  }
  const cells = state.blocks.runs.reduce((sum, [count]) => sum + count, 0);
  if (cells > MOST_CELLS) throw new TypeError(`state.blocks.runs must have at most ${MOST_CELLS} cells`);
  if (state.speculation) {
    numbers(state.speculation, DRAFT_COUNTS, "state.speculation");
    list(state.speculation, "accepted_per_position", "state.speculation");
  }
  if (state.gpus) {
    list(state, "gpus", "state");
    for (const [i, gpu] of state.gpus.entries()) numbers(gpu, GPU_COUNTS, `state.gpus[${i}]`);
  }
  return { recorded: file.recorded, state };
}

function numbers(value, names, where) {
  if (typeof value !== "object" || value === null) throw new TypeError(`${where} must be an object`);
  for (const name of names) {
    if (!Number.isFinite(value[name])) throw new TypeError(`${where}.${name} must be a number`);
  }
}

function list(value, name, where) {
  if (!Array.isArray(value[name])) throw new TypeError(`${where}.${name} must be a list`);
}
