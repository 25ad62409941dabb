// The server that the tests run against, as `test_client_node.py` names it.

export const { FORGE_URL: url, FORGE_MODEL: model } = process.env;
export const messages = [{ role: 'user', content: 'Tell me a story about a dog.' }];
export const city = {
  type: 'object',
  properties: { city: { type: 'string', maxLength: 12 } },
  required: ['city'],
  additionalProperties: false,
};

// A `fetch` that keeps what was sent to which path, and the status of each answer.
export function recorded() {
  const seen = [];
  const send = async (address, init) => {
    const response = await fetch(address, init);
    seen.push({ body: JSON.parse(init.body), status: response.status });
    return response;
  };
  return { seen, fetch: send };
}
