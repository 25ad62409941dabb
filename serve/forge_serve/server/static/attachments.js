// Text files that are sent with the next message.

import { by, element, iconButton, say } from "./dom.js";

const MOST_BYTES = 1_000_000; // per file

let attached = []; // {name, text}

function show() {
  by("attachments").replaceChildren(...attached.map(chip));
}

function chip(file) {
  const remove = iconButton("close", `Remove ${file.name}`, () => {
    attached = attached.filter((each) => each !== file);
    show();
    by("prompt").focus();
  });
  return element("li", "chip", element("span", "", file.name), remove);
}

export function setAttachments(files) {
  attached = files;
  show();
}

/** Return the attached files and detach them. */
export function takeAttachments() {
  const taken = attached;
  setAttachments([]);
  return taken;
}

export const anyAttached = () => attached.length > 0;

export async function attach(files) {
  for (const file of files) {
    try {
      attached.push({ name: file.name, text: await textOf(file) });
    } catch (error) {
      say("failed", error.message);
    }
  }
  show();
}

async function textOf(file) {
  if (file.size > MOST_BYTES) throw new Error(`${file.name} is larger than 1 MB. Attach a smaller file.`);
  const bytes = await file.arrayBuffer();
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (!text.includes("\0")) return text;
  } catch {
    // The file is not UTF-8.
  }
  throw new Error(`${file.name} is not a text file in UTF-8. Attach its text.`);
}

export function beginAttachments() {
  const input = by("files");
  by("attach").addEventListener("click", () => input.click());
  input.addEventListener("change", async () => {
    await attach(input.files);
    input.value = ""; // so that the same file can be attached again
  });
  const chat = by("chat");
  chat.addEventListener("dragover", (event) => {
    if (event.dataTransfer.types.includes("Files")) event.preventDefault();
  });
  chat.addEventListener("drop", (event) => {
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    attach(event.dataTransfer.files);
  });
  by("prompt").addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    attach(event.clipboardData.files);
  });
}
