// Builds a request from the playground's settings, and shows it as code. Only what the user set is sent.

export class Wrong extends Error {}

function parsed(text, what) {
  if (!text.trim()) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Wrong(`${what} is not JSON: ${error.message}`);
  }
}

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "frequency_penalty", "presence_penalty", "seed"];

export function build(model, settings, messages, collection = settings.collection) {
  const body = { model, messages: settings.system.trim() ? [{ role: "system", content: settings.system }, ...messages] : messages };
  for (const name of NUMBERS) if (settings[name] != null && settings[name] !== "") body[name] = Number(settings[name]);
  const schema = parsed(settings.schema, "The JSON schema");
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
  const tools = parsed(settings.tools, "The list of tools");
  if (tools) body.tools = tools;
  if (collection) body.rag = { collection };
  return body;
}

const quoted = (value) => `'${value.replaceAll("'", `'\\''`)}'`;

export function asCurl(body, origin, withKey) {
  const key = withKey ? ` \\\n  -H "authorization: Bearer $PENSTOCK_API_KEY"` : "";
  return `curl ${origin}/v1/chat/completions${key} \\\n  -H 'content-type: application/json' \\\n  -d ${quoted(JSON.stringify(body, null, 2))}`;
}

function python(value, depth) {
  const pad = "    ".repeat(depth + 1);
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return value.length ? `[\n${value.map((one) => `${pad}${python(one, depth + 1)},\n`).join("")}${"    ".repeat(depth)}]` : "[]";
  if (typeof value === "object")
    return `{\n${Object.entries(value).map(([name, one]) => `${pad}${JSON.stringify(name)}: ${python(one, depth + 1)},\n`).join("")}${"    ".repeat(depth)}}`;
  return JSON.stringify(value);
}

const OWN = new Set(["rag", "top_k", "min_p"]); // fields that the OpenAI SDK does not know

export function asPython(body, origin, withKey) {
  const known = Object.entries(body).filter(([name]) => !OWN.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => OWN.has(name)));
  const lines = known.map(([name, value]) => `    ${name}=${python(value, 1)},\n`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${python(extra, 1)},\n`);
  const key = withKey ? `os.environ["PENSTOCK_API_KEY"]` : `"none"`;
  return `${withKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${origin}/v1", api_key=${key})
stream = client.chat.completions.create(
${lines.join("")}    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
`;
}
