// Vercel's `ai` with one provider: text, streams, tools over several steps, objects.
// Arguments: PROVIDER URL MODEL; prints one JSON object.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { createOllama } from "ollama-ai-provider-v2";
import { z } from "zod";

const [provider, url, name] = process.argv.slice(2);
const apiKey = "none";
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey });
const compatible = createOpenAICompatible({
  name: "penstock",
  baseURL: `${url}/v1`,
  apiKey,
  supportsStructuredOutputs: true,
  includeUsage: true,
});
const model = {
  chat: () => openai.chat(name),
  responses: () => openai.responses(name),
  compatible: () => compatible(name),
  anthropic: () => createAnthropic({ baseURL: `${url}/v1`, apiKey })(name),
  ollama: () => createOllama({ baseURL: `${url}/api` })(name),
}[provider]();

const tools = {
  weather: tool({
    description: "The weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => `It rains in ${city}.`,
  }),
  clock: tool({
    description: "The time.",
    inputSchema: z.object({}),
    execute: async () => "It is noon.",
  }),
};
const warnings = [];
const heard = (result) => warnings.push(...(result.warnings ?? []).map((one) => JSON.stringify(one)));

async function streamed(options) {
  const problems = [];
  const result = streamText({ ...options, onError: ({ error }) => problems.push(String(error)) });
  const pieces = [];
  for await (const piece of result.textStream) pieces.push(piece);
  if (problems.length) throw new Error(problems.join("; "));
  const steps = await result.steps;
  return { pieces: pieces.length, text: pieces.join(""), steps: steps.length, usage: await result.totalUsage };
}

const plain = await generateText({ model, system: "Be kind.", prompt: "Say hello." });
heard(plain);
const stream = await streamed({ model, prompt: "Say hello." });
const asked = { model, tools, prompt: "What is the weather in Paris, and the time?", stopWhen: stepCountIs(5) };
const looped = await generateText(asked);
heard(looped);
const loopedStream = await streamed(asked);
const schema = z.object({ name: z.string(), age: z.number().int() });
const object = (await generateObject({ model, schema, prompt: "Make a person." })).object;
const result = {
  text: plain.text,
  usage: plain.usage,
  stream,
  loop: { text: looped.text, steps: looped.steps.length, results: looped.steps.flatMap((step) => step.toolResults.map((one) => one.output)) },
  loopedStream,
  object,
  warnings,
};
console.log(JSON.stringify(result));
