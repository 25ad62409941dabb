// Tools: their definitions in the settings, and the calls in answers.

import { by, element } from "./dom.js";

/** Return the tools of the settings, or null if there are none. Throws `SyntaxError` if they are invalid. */
export function tools() {
  const text = by("tools").value.trim();
  if (!text) return null;
  const value = JSON.parse(text);
  if (!Array.isArray(value)) throw new SyntaxError("it must be a list of tools");
  return value.map((tool, i) => {
    if (typeof tool !== "object" || tool === null) throw new SyntaxError(`tool ${i} must be an object`);
    const wrapped = tool.type === "function" ? tool : { type: "function", function: tool };
    if (typeof wrapped.function?.name !== "string") throw new SyntaxError(`tool ${i} has no function name`);
    return wrapped;
  });
}

/** Add the parts of calls in an event of a stream to the calls of a message. */
export function addCalls(message, parts) {
  message.calls ??= [];
  for (const part of parts) {
    const call = (message.calls[part.index] ??= { id: "", name: "", arguments: "" });
    if (part.id) call.id = part.id;
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // still incomplete
  }
}

/** Return an element with the calls of a message. If `answer` is a function, it has boxes for their results, and
 *  calls `answer` with a list of the texts. */
export function callsView(message, answer) {
  const view = element("div", "calls");
  const boxes = [];
  for (const [i, call] of message.calls.entries()) {
    const code = element("pre", "", element("code", "", indented(call.arguments)));
    code.tabIndex = 0;
    const block = element("div", "call", element("p", "call-name", "Call of ", element("code", "", call.name)), code);
    if (answer) {
      const box = element("textarea", "code");
      box.id = `result-${message.id}-${i}`;
      box.rows = 2;
      const label = element("label", "", `Result of ${call.name}`);
      label.htmlFor = box.id;
      boxes.push(box);
      block.append(element("div", "field", label, box));
    }
    view.append(block);
  }
  if (answer) {
    const send = element("button", "main", "Send results");
    send.type = "button";
    send.addEventListener("click", () => answer(boxes.map((box) => box.value)));
    view.append(send);
  }
  return view;
}
