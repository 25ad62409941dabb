// OpenAI's own client.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import OpenAI from 'openai';
import { zodResponseFormat } from 'openai/helpers/zod';
import { z } from 'zod';

import { city, messages, model, recorded, url } from './server.mjs';

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0 });
const asked = { model, messages, temperature: 0, max_completion_tokens: 24 };
const weather = { name: 'get_weather', description: 'The weather of a city.', parameters: city };

test('a stream adds up to a chat', async () => {
  const whole = await client.chat.completions.create(asked);
  const stream = await client.chat.completions.create({
    ...asked, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true },
  });
  let text = '';
  const counts = [];
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? '';
    counts.push(chunk.usage.completion_tokens);
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(counts[0], 0);
  assert.equal(counts.at(-1), 24);
  assert.deepEqual(counts, [...counts].sort((a, b) => a - b));
});

test('the tool runner calls the tool and sends its result', async () => {
  const { seen, fetch } = recorded();
  const asking = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0, fetch });
  const cities = [];
  const run = ({ city }) => {
    cities.push(city);
    return 'sunny';
  };
  const runner = asking.chat.completions.runTools(
    {
      ...asked, max_completion_tokens: 120, parallel_tool_calls: false, tool_choice: 'required',
      tools: [{ type: 'function', function: { ...weather, function: run, parse: JSON.parse } }],
    },
    { maxChatCompletions: 2 },
  );
  await runner.done();
  assert.equal(seen.length, 2);
  assert.deepEqual(seen[1].body.messages.map((each) => each.role), ['user', 'assistant', 'tool']);
  assert.equal(typeof cities[0], 'string');
});

test('a stream that is cut in a call has the arguments so far', async () => {
  const cut = {
    ...asked, max_completion_tokens: 28, tool_choice: 'required',
    tools: [{ type: 'function', function: weather }],
  };
  const whole = await client.chat.completions.create(cut);
  let args = '';
  for await (const chunk of await client.chat.completions.create({ ...cut, stream: true })) {
    args += chunk.choices[0].delta.tool_calls?.[0].function.arguments ?? '';
    assert.ok(!chunk.choices[0].delta.content);
  }
  const [choice] = whole.choices;
  assert.equal(choice.finish_reason, 'length');
  assert.equal(choice.message.content, null);
  assert.equal(choice.message.tool_calls[0].function.arguments, args);
  assert.ok(args.startsWith('{"city": "') && !args.endsWith('}'));
});

test('an answer is parsed with a schema', async () => {
  const Person = z.object({ name: z.string().max(12), age: z.int() });
  const answer = await client.chat.completions.parse({
    ...asked, max_completion_tokens: 200, response_format: zodResponseFormat(Person, 'person'),
  });
  assert.equal(typeof answer.choices[0].message.parsed.age, 'number');
});

test('an error is the client\'s own', async () => {
  await assert.rejects(client.models.retrieve('another'), OpenAI.NotFoundError);
});
