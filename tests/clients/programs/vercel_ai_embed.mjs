// Vercel's `ai` against a served model: text, a stream, embeddings with each provider that has them.
// Arguments: URL MODEL EMBEDDING_MODEL; prints one JSON object.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { cosineSimilarity, embed, embedMany, generateText, streamText } from "ai";
import { createOllama } from "ollama-ai-provider-v2";

const [url, name, embedder] = process.argv.slice(2);
const apiKey = "none";
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey });
const compatible = createOpenAICompatible({ name: "penstock", baseURL: `${url}/v1`, apiKey });
const ollama = createOllama({ baseURL: `${url}/api` });
const result = { texts: [], dimensions: [] };
const limits = { maxOutputTokens: 16, temperature: 0 };
const inOptions = { providerOptions: { ollama: { options: { num_predict: 16, temperature: 0 } } } };
const models = [openai.chat(name), openai.responses(name), compatible(name), ollama(name)];
for (const model of models) {
  const options = { model, prompt: "Say hello.", ...(model === models[3] ? inOptions : limits) };
  const stream = streamText(options);
  let streamed = "";
  for await (const piece of stream.textStream) streamed += piece;
  result.texts.push([(await generateText(options)).text, streamed]);
}
for (const provider of [openai, compatible, ollama]) {
  const model = provider.textEmbeddingModel(embedder);
  const { embedding } = await embed({ model, value: "The weather is good." });
  const { embeddings } = await embedMany({ model, values: ["The sun is shining.", "He sold the company."] });
  const [near, far] = embeddings.map((other) => cosineSimilarity(embedding, other));
  result.dimensions.push([embedding.length, near > far]);
}
console.log(JSON.stringify(result));
