// The Vercel AI SDK, over OpenAI's protocol and Anthropic's.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, Output, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

import { model, url } from './server.mjs';

const prompt = 'Tell me a story about a dog.';
const baseURL = `${url}/v1`;
const forge = createOpenAICompatible({
  name: 'forge', baseURL, apiKey: 'none', supportsStructuredOutputs: true, includeUsage: true,
});
const providers = { openai: forge(model), anthropic: createAnthropic({ baseURL, apiKey: 'none' })(model) };

for (const [name, provider] of Object.entries(providers)) {
  const asked = { model: provider, prompt, temperature: 0, maxRetries: 0 };

  test(`${name}: a stream adds up to a text`, async () => {
    const whole = await generateText({ ...asked, maxOutputTokens: 16 });
    const stream = streamText({ ...asked, maxOutputTokens: 16 });
    let text = '';
    for await (const piece of stream.textStream) text += piece;
    assert.equal(text, whole.text);
    assert.equal(await stream.finishReason, 'length');
    assert.equal((await stream.usage).outputTokens, 16);
  });

  test(`${name}: a tool is called, and its result sent`, async () => {
    const cities = [];
    const weather = tool({
      description: 'The weather of a city.',
      inputSchema: z.object({ city: z.string().max(12) }),
      execute: async ({ city }) => {
        cities.push(city);
        return 'sunny';
      },
    });
    const { steps } = await generateText({
      ...asked, maxOutputTokens: 120, tools: { weather }, toolChoice: 'required',
      stopWhen: stepCountIs(2),
    });
    assert.equal(steps.length, 2);
    assert.equal(steps[0].finishReason, 'tool-calls');
    assert.equal(steps[0].toolResults[0].output, 'sunny');
    assert.equal(typeof cities[0], 'string');
  });
}

test('openai: an output follows a schema', async () => {
  const schema = z.object({ name: z.string().max(12), age: z.int().max(99) });
  const { output } = await generateText({
    model: providers.openai, prompt, temperature: 0, maxOutputTokens: 200, maxRetries: 0,
    output: Output.object({ schema }),
  });
  assert.equal(typeof output.age, 'number');
});
