// Anthropic's own client.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import Anthropic from '@anthropic-ai/sdk';
import { betaTool } from '@anthropic-ai/sdk/helpers/beta/json-schema';

import { city, messages, model, recorded, url } from './server.mjs';

const client = new Anthropic({ baseURL: url, apiKey: 'none', maxRetries: 0 });
const asked = { model, messages, max_tokens: 24 };
const weather = { name: 'get_weather', description: 'The weather.', input_schema: city };

test('a stream adds up to a message', async () => {
  const stream = client.messages.stream({ ...asked, temperature: 0, system: 'You are a poet.' });
  let text = '';
  stream.on('text', (piece) => (text += piece));
  const final = await stream.finalMessage();
  const whole = await client.messages.create({
    ...asked, temperature: 0, system: 'You are a poet.',
  });
  assert.match(whole.id, /^msg_/);
  assert.equal(whole.stop_reason, 'max_tokens');
  assert.equal(final.usage.output_tokens, 24);
  assert.equal(text, whole.content[0].text);
  assert.equal(text, final.content[0].text);
});

for (const stream of [false, true]) {
  test(`the tool runner sends the whole conversation, stream: ${stream}`, async () => {
    const { seen, fetch } = recorded();
    const asking = new Anthropic({ baseURL: url, apiKey: 'none', maxRetries: 0, fetch });
    const cities = [];
    const tool = betaTool({
      name: 'get_weather',
      description: 'The weather of a city.',
      inputSchema: city,
      run: (input) => {
        cities.push(input.city);
        return 'sunny';
      },
    });
    const runner = asking.beta.messages.toolRunner({
      model, messages, stream, max_tokens: 120, max_iterations: 2, tools: [tool],
      system: 'You are a poet.', tool_choice: { type: 'any', disable_parallel_tool_use: true },
    });
    const last = await runner.runUntilDone();
    assert.equal(last.stop_reason, 'tool_use');
    assert.match(last.content[0].id, /^toolu_/);
    assert.deepEqual(seen.map((each) => each.status), [400, 200, 200]);
    assert.deepEqual(seen[0].body.thread, { type: 'create' });
    const { thread, system, tools, messages: sent } = seen[2].body;
    assert.equal(thread, undefined);
    assert.equal(system, 'You are a poet.');
    assert.equal(tools.length, 1);
    assert.deepEqual(sent.map((each) => each.role), ['user', 'assistant', 'user']);
    assert.equal(sent[2].content[0].tool_use_id, sent[1].content[0].id);
    assert.equal(cities[0], sent[1].content[0].input.city);
  });
}

test('a call that is cut off has the input so far', async () => {
  const cut = { ...asked, max_tokens: 28, temperature: 0, tools: [weather],
    tool_choice: { type: 'any' } };
  const final = await client.messages.stream(cut).finalMessage();
  const whole = await client.messages.create(cut);
  for (const message of [final, whole]) {
    assert.equal(message.stop_reason, 'max_tokens');
    assert.equal(message.content.length, 1);
    assert.equal(message.content[0].type, 'tool_use');
    assert.equal(typeof message.content[0].input, 'object');
    assert.equal(message.content[0].input.city?.length ?? 0, 0, 'no token of the city came');
  }
});

test('a system message among the others reaches the model', async () => {
  const note = { role: 'system', content: 'Speak of cats.' };
  const count = async (given) =>
    (await client.messages.countTokens({ model, messages: given })).input_tokens;
  assert.ok((await count([...messages, note])) > (await count(messages)));
  const answer = await client.messages.create({ ...asked, messages: [...messages, note] });
  assert.equal(answer.role, 'assistant');
});

test('an error is the client\'s own', async () => {
  await assert.rejects(client.messages.create({ ...asked, model: 'another' }), Anthropic.NotFoundError);
});
