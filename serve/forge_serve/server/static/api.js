// Requests to the server of this page, with the API key if one is set.

const KEY = "forge-jax.api-key";

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

export class ServerError extends Error {
  constructor(message, status, param) {
    super(message);
    this.status = status; // 0: no response
    this.param = param ?? null;
  }
}

/** Return an error's message with the name of the field. */
export function errorText({ message, param }) {
  return !param || message.includes(param) ? message : `${message} (${param})`;
}

/** Send a request and return the response. Paths are relative, so the page works below any prefix.
 *  Throws `ServerError` with the server's message. */
export async function request(path, { body, signal } = {}) {
  const headers = {};
  const key = apiKey.get();
  if (key) headers["Authorization"] = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("Cannot reach the server.", 0);
  }
  if (response.ok) return response;
  throw await refusal(response);
}

async function refusal(response) {
  let error;
  try {
    error = (await response.json()).error;
  } catch {
    error = undefined; // not this server's format, for example a proxy's error page
  }
  const message = error?.message ?? `The server returned status ${response.status}.`;
  return new ServerError(message, response.status, error?.param);
}

function broken(error) {
  if (error?.name === "AbortError") throw error;
  throw new ServerError("The connection closed before the answer was complete.", 0);
}

/** Yield the JSON of each event of a stream. Throws `ServerError` for an error event. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(broken);
      if (done) broken();
      held += value;
      const lines = held.split("\n");
      held = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ")) continue; // a blank line or a keep-alive comment
        const data = line.slice("data: ".length);
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ServerError(event.error.message, response.status, event.error.param);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // rejects if the request was aborted
  }
}
