// One answer as it streams in: its text, reasoning, tool calls and citations, and what it took.

import { ApiError, call, events, Unreachable } from "../api.js";

const REFRESH_MS = 40; // how often the page sees what arrived
const PAUSES_MS = [0, 500, 1000, 2000, 4000]; // before each try to resume; the engine keeps an answer for 10 s
const OPEN = "<think>";
const CLOSE = "</think>";

export const newAnswer = () => ({ role: "assistant", content: "", reasoning: "", tools: [], citations: [], sources: [], collection: null, facts: null, problem: "", rating: null, response: null });

// Splits what a reasoning model writes before its answer from the answer. Some templates open the tag in the prompt, so
// that only its end appears.
export function split(text) {
  const end = text.indexOf(CLOSE);
  const begins = text.trimStart().startsWith(OPEN);
  if (end >= 0) return { reasoning: text.slice(begins ? text.indexOf(OPEN) + OPEN.length : 0, end).trim(), content: text.slice(end + CLOSE.length).trimStart() };
  if (begins) return { reasoning: text.trimStart().slice(OPEN.length).trimStart(), content: "" };
  return { reasoning: "", content: OPEN.startsWith(text.trimStart()) ? "" : text };
}

// Dollars; cached prompt tokens have a price of their own, which everything costs that came from the response cache.
export function cost(usage, pricing, recalled = false) {
  if (!usage || pricing?.input_per_million == null) return null;
  const cachedPrice = pricing.cached_input_per_million ?? pricing.input_per_million;
  const cached = usage.prompt_tokens_details?.cached_tokens || 0;
  const prices = recalled ? [cachedPrice, cachedPrice, cachedPrice] : [pricing.input_per_million, cachedPrice, pricing.output_per_million];
  return ((usage.prompt_tokens - cached) * prices[0] + cached * prices[1] + usage.completion_tokens * prices[2]) / 1e6;
}

// The events of an answer. Where the server can resume it, a broken connection is made anew and nothing is lost.
async function* chunks(body, signal, resumable, opened) {
  let last = resumable ? "new" : null;
  let tries = 0;
  while (true) {
    try {
      const response = await call("POST", "/v1/chat/completions", body, { signal, more: last ? { "last-event-id": last } : {} });
      opened(response);
      for await (const one of events(response)) {
        if (one.id) {
          last = one.id;
          tries = 0;
        }
        yield one;
      }
      return;
    } catch (error) {
      if (error instanceof ApiError && tries) throw new Error("the connection was lost, and the server no longer has the rest.");
      const broken = error instanceof TypeError || error instanceof Unreachable;
      if (!broken || !last || last === "new" || tries === PAUSES_MS.length) throw error;
      await new Promise((resolve) => setTimeout(resolve, PAUSES_MS[tries++]));
      signal.throwIfAborted();
    }
  }
}

// Adds what streams in to `answer`, after the text that it may have already. `shown` is called whenever the page sees
// something new.
export async function stream(body, answer, { signal, resumable = false, shown = () => {} }) {
  const began = performance.now();
  let facts = null;
  const opened = ({ headers }) => {
    const header = (name) => headers.get(`x-penstock-${name}`);
    facts ??= { model: header("model") || body.model, route: header("route"), recalled: ["exact", "semantic"].includes(header("cache")), limit: null, usage: null, finish: null };
    facts.replica = header("replica");
  };
  let text = answer.content;
  let thought = "";
  let first = null;
  let pieces = 0;
  let timer = null;
  const show = () => {
    timer = null;
    if (!facts) return;
    const parts = split(text);
    answer.content = parts.content;
    answer.reasoning = thought || parts.reasoning;
    const seconds = first === null ? null : (performance.now() - first) / 1000;
    const tokens = facts.usage?.completion_tokens ?? pieces;
    answer.facts = { ...facts, pieces, ttft: first === null ? null : (first - began) / 1000, rate: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null };
    shown();
    if (parts.content && answer.reasoning && answer.thought === undefined) answer.thought = seconds;
  };
  try {
    const asked = { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    for await (const { data, comment } of chunks(asked, signal, resumable, opened)) {
      facts.limit = /^x-penstock-limit: (\S+)/.exec(comment)?.[1] ?? facts.limit;
      if (data.error) throw new Error(data.error.message);
      if (data.id) answer.response = data.id;
      if (data.usage) facts.usage = data.usage;
      if (data.rag) Object.assign(answer, { sources: data.rag.sources || [], collection: data.rag.collection });
      const choice = data.choices?.[0];
      if (!choice) continue;
      if (choice.finish_reason) facts.finish = choice.finish_reason;
      if (choice.stop_reason === "time_limit") facts.limit = choice.stop_reason;
      const { delta = {} } = choice;
      if (delta.annotations) answer.citations.push(...delta.annotations);
      for (const part of delta.tool_calls || []) {
        const tool = (answer.tools[part.index] ??= { id: part.index, name: "", arguments: "" });
        tool.name += part.function?.name || "";
        tool.arguments += part.function?.arguments || "";
      }
      const reasoned = delta.reasoning_content ?? delta.reasoning ?? "";
      if (!delta.content && !reasoned) continue;
      first ??= performance.now();
      pieces++;
      text += delta.content || "";
      thought += reasoned;
      timer ??= setTimeout(show, REFRESH_MS);
    }
  } finally {
    clearTimeout(timer);
    show();
  }
}
