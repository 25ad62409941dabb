// Settings, as fields of a chat completion request.

const by = (id) => document.getElementById(id);

/** Return the schema, or null if its box is empty. Throws `SyntaxError` if it is not a JSON object. */
export function schema() {
  const text = by("schema").value.trim();
  if (!text) return null;
  const value = JSON.parse(text);
  if (typeof value !== "object" || value === null || Array.isArray(value)) {
    throw new SyntaxError("it must be a JSON object");
  }
  return value;
}

/** Return the request fields. If a box is invalid, report it, focus it and return null. */
export function fields() {
  const form = by("options");
  const wrong = [...form.elements].find((each) => each.willValidate && !each.validity.valid);
  if (wrong) return complain(wrong, () => wrong.reportValidity());
  const found = {};
  for (const input of form.querySelectorAll("[data-field]")) {
    if (input.value !== "") found[input.dataset.field] = asNumber(input.value);
  }
  const stop = by("stop").value.split("\n").filter((line) => line !== "");
  if (stop.length) found.stop = stop;
  try {
    const json = schema();
    if (json) found.response_format = { type: "json_schema", json_schema: { name: "answer", schema: json } };
  } catch {
    return complain(by("schema"), checkSchema);
  }
  if (by("logprobs").checked) {
    found.logprobs = true;
    const alternatives = by("top_logprobs").value;
    if (alternatives !== "") found.top_logprobs = Number(alternatives);
  }
  return found;
}

// A 64-bit seed does not fit a double, so large integers are sent as strings.
const asNumber = (text) => (Number.isSafeInteger(Number(text)) || /[.eE]/.test(text) ? Number(text) : text);

function complain(input, say) {
  document.dispatchEvent(new CustomEvent("show-panel", { detail: "settings" }));
  say();
  input.focus();
  return null;
}

function checkSchema() {
  const note = by("schema-note");
  let wrong = "";
  try {
    note.textContent = schema() ? "Answers will follow this schema." : "Leave empty for any text.";
  } catch (error) {
    wrong = `Invalid schema: ${error.message}`;
    note.textContent = wrong;
  }
  note.classList.toggle("wrong", wrong !== "");
  by("schema").setAttribute("aria-invalid", String(wrong !== ""));
}

export function beginSettings() {
  by("schema").addEventListener("input", checkSchema);
  by("options").addEventListener("submit", (event) => event.preventDefault());
  const shade = () => document.body.classList.toggle("shaded", by("shade").checked);
  by("shade").addEventListener("change", shade);
  shade();
}
