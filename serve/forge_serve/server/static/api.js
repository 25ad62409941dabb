// Requests to this page's own server, with the API key if there is one.

const KEY = "forge-jax.api-key";

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

export class ServerError extends Error {
  constructor(message, status, param) {
    super(message);
    this.status = status; // 0: no answer at all
    this.param = param ?? null;
  }
}

/** The response to a request; paths are relative, so that the page may lie below any prefix.
 *  Throws `ServerError` with the server's own message. */
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
    throw new ServerError("The server cannot be reached.", 0);
  }
  if (response.ok) return response;
  throw await refusal(response);
}

async function refusal(response) {
  let error;
  try {
    error = (await response.json()).error;
  } catch {
    error = undefined; // not this server's form: a proxy's page, say
  }
  const message = error?.message ?? `The server answered ${response.status}.`;
  return new ServerError(message, response.status, error?.param);
}

function broken(error) {
  if (error?.name === "AbortError") throw error;
  throw new ServerError("The connection broke off before the answer was complete.", 0);
}

/** The JSON of each event of a stream. Throws `ServerError` for an event that is an error. */
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
        if (!line.startsWith("data: ")) continue; // blank, or a comment that keeps the line alive
        const data = line.slice("data: ".length);
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ServerError(event.error.message, response.status, event.error.param);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have been aborted: then there is nothing to cancel
  }
}
