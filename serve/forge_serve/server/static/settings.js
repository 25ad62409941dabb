// Settings: the look of the page, and fields of a chat completion request. They are kept in localStorage.

import { by, say } from "./dom.js";
import { tools } from "./tools.js";

const SAVED = "forge-jax.settings";
const THEME = "forge-jax.theme"; // read by theme.js

/** Return the schema, or null if its box is empty. Throws `SyntaxError` if it is not a JSON object. */
function schema() {
  const text = by("schema").value.trim();
  if (!text) return null;
  const value = JSON.parse(text);
  if (typeof value !== "object" || value === null || Array.isArray(value)) {
    throw new SyntaxError("it must be a JSON object");
  }
  return value;
}

const BOXES = {
  schema: { read: schema, name: "schema", good: "Answers will follow this schema.", empty: "Leave empty for any text." },
  tools: {
    read: tools,
    name: "tools",
    good: "The model may call these tools.",
    empty: "A list of functions. You answer their calls in the chat.",
  },
};

/** Return the request fields. If a box is invalid, report it, focus it and return null. */
export function fields() {
  const form = by("options");
  const wrong = [...form.elements].find((each) => each.willValidate && !each.validity.valid);
  if (wrong) return complain(wrong, () => wrong.reportValidity());
  const found = numbers(form);
  const stop = by("stop").value.split("\n").filter((line) => line !== "");
  if (stop.length) found.stop = stop;
  const boxes = {};
  for (const [id, { read }] of Object.entries(BOXES)) {
    try {
      boxes[id] = read();
    } catch {
      return complain(by(id), () => check(id));
    }
  }
  if (boxes.schema) {
    found.response_format = { type: "json_schema", json_schema: { name: "answer", schema: boxes.schema } };
  }
  if (boxes.tools) found.tools = boxes.tools;
  if (by("logprobs").checked) {
    found.logprobs = true;
    const alternatives = by("top_logprobs").value;
    if (alternatives !== "") found.top_logprobs = Number(alternatives);
  }
  return found;
}

/** Return the fields of the inputs with numbers, without empty ones. */
export function numbers(form) {
  const filled = [...form.querySelectorAll("[data-field]")].filter(({ value }) => value !== "");
  return Object.fromEntries(filled.map(({ dataset, value }) => [dataset.field, asNumber(value)]));
}

// A 64-bit seed does not fit a double, so large integers are sent as strings.
const asNumber = (text) => (Number.isSafeInteger(Number(text)) || /[.eE]/.test(text) ? Number(text) : text);

function complain(input, report) {
  say("show-panel", "settings");
  input.closest("details")?.setAttribute("open", "");
  report();
  input.focus();
  return null;
}

/** Report whether a box has valid JSON. */
function check(id) {
  const { read, name, good, empty } = BOXES[id];
  const note = by(`${id}-note`);
  let wrong = "";
  try {
    note.textContent = read() ? good : empty;
  } catch (error) {
    wrong = `Invalid ${name}: ${error.message}`;
    note.textContent = wrong;
  }
  note.classList.toggle("wrong", wrong !== "");
  by(id).setAttribute("aria-invalid", String(wrong !== ""));
}

const controls = () => [...by("options").elements].filter((each) => each.id && each.matches("input, select, textarea"));
const valueOf = (control) => (control.type === "checkbox" ? control.checked : control.value);

function setValue(control, value) {
  if (control.type === "checkbox") control.checked = value === true;
  else control.value = String(value);
}

function load() {
  let saved = {};
  try {
    saved = JSON.parse(localStorage.getItem(SAVED)) ?? {};
  } catch {
    // The stored settings cannot be read, so keep the defaults.
  }
  for (const control of controls()) {
    if (Object.hasOwn(saved, control.id)) setValue(control, saved[control.id]);
  }
}

/** Store the settings that differ from the defaults. */
function keep() {
  const changed = controls().filter((each) =>
    each.type === "checkbox" ? each.checked !== each.defaultChecked : each.value !== defaultOf(each),
  );
  localStorage.setItem(SAVED, JSON.stringify(Object.fromEntries(changed.map((each) => [each.id, valueOf(each)]))));
}

const defaultOf = (control) => (control instanceof HTMLSelectElement ? control.options[0].value : control.defaultValue);

function apply() {
  const theme = by("theme").value;
  if (theme === "system") {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem(THEME);
  } else {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem(THEME, theme);
  }
  document.body.classList.toggle("shaded", by("shade").checked);
  Object.keys(BOXES).forEach(check);
  say("theme-changed");
}

export function beginSettings() {
  load();
  apply();
  by("options").addEventListener("input", () => {
    apply();
    keep();
  });
  by("options").addEventListener("submit", (event) => event.preventDefault());
  // No button of type "reset": its event fires before the controls change.
  by("reset").addEventListener("click", () => {
    by("options").reset();
    localStorage.removeItem(SAVED);
    apply();
  });
}
