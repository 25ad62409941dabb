// Files that are sent with the next message: texts, and PDFs, whose text the server extracts.

import { sizeOf } from "./conversation.js";
import { by, element, iconButton, say } from "./dom.js";

const MOST_TEXT_MB = 1; // per file
const MOST_PDF_MB = 5; // per file; its base64 fits the server's default limit on a body
const PDF_START = "%PDF-";
const START_BYTES = 1024; // PDF readers search for the start in this part of a file

let attached = []; // {name, text}, or {name, data} with a PDF in base64

function show() {
  by("attachments").replaceChildren(...attached.map(chip));
}

function chip(file) {
  const remove = iconButton("close", `Remove ${file.name}`, () => {
    attached = attached.filter((each) => each !== file);
    show();
    by("prompt").focus();
  });
  const size = element("small", "note", sizeOf(file));
  return element("li", "chip", element("span", "", file.name), size, remove);
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
  for (const file of [...files]) { // a copy, because the browser empties the list
    try {
      attached.push({ name: file.name, ...(await contentOf(file)) });
    } catch (error) {
      say("failed", error.message);
    }
  }
  show();
}

async function contentOf(file) {
  const start = new TextDecoder("latin1").decode(await file.slice(0, START_BYTES).arrayBuffer());
  const pdf = start.includes(PDF_START);
  const most = pdf ? MOST_PDF_MB : MOST_TEXT_MB;
  if (file.size > most * 1e6) throw new Error(`${file.name} is larger than ${most} MB. Attach a smaller file.`);
  return pdf ? { data: await base64Of(file) } : { text: await textOf(file) };
}

function base64Of(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result.split(",")[1]));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

async function textOf(file) {
  const bytes = await file.arrayBuffer();
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (!text.includes("\0")) return text;
  } catch {
    // The file is not UTF-8.
  }
  throw new Error(`${file.name} is neither a PDF nor a text file in UTF-8. Attach its text.`);
}

export function beginAttachments() {
  const input = by("files");
  by("attach").addEventListener("click", () => input.click());
  input.addEventListener("change", () => {
    attach(input.files);
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
