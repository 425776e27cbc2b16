// As ask.py, with the clients of npm: node ask.mjs CLIENT URL IMAGE
import { readFileSync } from "node:fs";

const MODEL = "model";
const QUESTION = "What is 17 + 4?";
const INSTRUCTION = "Answer briefly.";
const ASK = [{ role: "user", content: QUESTION }];
const BRIEF = [{ role: "system", content: INSTRUCTION }, ...ASK];
const NOTHING = { type: "object", properties: {} };

async function openai(url, image) {
  const { default: OpenAI } = await import("openai");
  const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
  const ask = (messages = ASK, more = {}) =>
    client.chat.completions.create({ model: MODEL, messages, temperature: 0, max_tokens: 12, ...more });
  const text = async (...given) => (await ask(...given)).choices[0].message.content;
  const content = [{ type: "image_url", image_url: { url: image } }, { type: "text", text: QUESTION }];
  const stream = async () => {
    let whole = "";
    for await (const part of await ask(ASK, { stream: true })) whole += part.choices[0].delta.content ?? "";
    return whole;
  };
  return {
    chat: () => text(),
    stream,
    "log-probabilities": async () =>
      (await ask(ASK, { logprobs: true })).choices[0].logprobs.content.map((token) => token.logprob),
    system: () => text(BRIEF),
    image: () => text([{ role: "user", content }]),
    tools: () => ask(ASK, { tools: [{ type: "function", function: { name: "add", parameters: NOTHING } }] }),
    error: () => ask(ASK, { model: "nobody" }),
  };
}

async function ai(url, image) {
  const { generateText, streamText, tool, jsonSchema } = await import("ai");
  const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
  const provider = createOpenAICompatible({ name: "whet", baseURL: url, apiKey: "none" });
  const settings = { model: provider(MODEL), temperature: 0, maxOutputTokens: 12, maxRetries: 0 };
  const ask = (more = { prompt: QUESTION }) => generateText({ ...settings, ...more });
  const content = [{ type: "file", mediaType: "image/png", data: image }, { type: "text", text: QUESTION }];
  const stream = async () => {
    let whole = "";
    for await (const part of streamText({ ...settings, prompt: QUESTION }).textStream) whole += part;
    return whole;
  };
  return {
    chat: async () => (await ask()).text,
    stream,
    system: async () => (await ask({ system: INSTRUCTION, prompt: QUESTION })).text,
    image: async () => (await ask({ messages: [{ role: "user", content }] })).text,
    tools: () => ask({ prompt: QUESTION, tools: { add: tool({ inputSchema: jsonSchema(NOTHING) }) } }),
    error: () => ask({ prompt: QUESTION, model: provider("nobody") }),
  };
}

const [name, url, image] = process.argv.slice(2);
const answers = {};
for (const [feature, question] of Object.entries(await { openai, ai }[name](url, image))) {
  try {
    answers[feature] = await question();
  } catch (error) {
    answers[feature] = { error: String(error?.message ?? error) };
  }
}
answers.version = JSON.parse(readFileSync(new URL(`./node_modules/${name}/package.json`, import.meta.url))).version;
console.log(JSON.stringify(answers));
