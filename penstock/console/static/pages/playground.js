// Playground: chat with any served model and see the latency, tokens and cost of each request.

import { ApiError, call, events, get, session } from "../api.js";
import { copy, duration, money, number } from "../format.js";
import { markdown } from "../markdown.js";
import { asCurl, asPython, build, Wrong } from "../request.js";

const FRESH = { model: "", system: "", temperature: 0.7, top_p: null, max_tokens: 512, seed: null, schema: "", tools: "", collection: null };

export default {
  name: "Playground",
  template: `
    <q-page class="talk">
      <div class="messages" ref="log" role="log" aria-live="polite" aria-label="Conversation">
        <div v-if="!messages.length" class="muted text-center" style="margin-top: 18vh">
          <img src="icon.svg" alt="" width="44" height="44" />
          <p class="q-mt-md">Send a message to <strong>{{ settings.model || 'a model' }}</strong>.</p>
          <div class="row justify-center q-gutter-sm">
            <q-btn v-for="idea in ideas" :key="idea" outline no-caps size="sm" color="primary" :label="idea" @click="send(idea)" />
          </div>
        </div>
        <div v-for="(message, index) in messages" :key="index" class="message" :class="message.role">
          <div class="who">{{ message.role === 'user' ? 'You' : message.facts?.model || settings.model }}</div>
          <div v-if="message.role === 'user'" class="text">{{ message.content }}</div>
          <template v-else>
            <div class="text" v-html="message.html"></div>
            <div v-for="tool in message.tools" :key="tool.id" class="chunk"><strong>{{ tool.name }}</strong> {{ tool.arguments }}</div>
            <div v-if="message.citations?.length" class="q-mb-sm">
              <div v-for="(cited, number) in message.citations" :key="number" class="chunk">[{{ cited.n }}] <strong>{{ cited.url_citation.title }}</strong></div>
            </div>
            <q-banner v-if="message.problem" dense rounded class="bg-negative text-white q-mb-sm" role="alert">{{ message.problem }}</q-banner>
            <div v-if="message.facts" class="facts" data-test="facts">
              <span>TTFT {{ duration(message.facts.ttft) }}</span>
              <span>{{ number(message.facts.rate) }} tokens/s</span>
              <span v-if="message.facts.usage">{{ message.facts.usage.prompt_tokens }} in ({{ message.facts.usage.prompt_tokens_details?.cached_tokens || 0 }} cached), {{ message.facts.usage.completion_tokens }} out</span>
              <span v-if="message.facts.usage">{{ money(cost(message.facts)) }}</span>
              <span v-if="message.facts.route">route {{ message.facts.route }}, replica {{ message.facts.replica }}</span>
              <span v-if="message.facts.finish">{{ message.facts.finish }}</span>
            </div>
          </template>
        </div>
      </div>
      <div class="composer">
        <q-input v-model="draft" type="textarea" autogrow outlined dense :input-style="{ maxHeight: '30vh' }" label="Message" aria-label="Message" @keydown.enter.exact.prevent="send()" ref="box">
          <template #append>
            <q-btn v-if="running" round dense flat icon="stop" color="negative" aria-label="Stop" @click="stop" />
            <q-btn v-else round dense flat icon="send" color="primary" aria-label="Send" :disable="!draft.trim() || !settings.model" @click="send()" />
          </template>
        </q-input>
        <div class="below">
          <q-select v-model="settings.model" :options="models" dense options-dense borderless emit-value map-options label="Model" style="min-width: 150px" />
          <q-space />
          <q-btn flat dense no-caps size="sm" icon="tune" label="Settings" @click="tuning = true" />
          <q-btn flat dense no-caps size="sm" icon="code" label="Code" :disable="!settings.model" @click="showCode" />
          <q-btn flat dense no-caps size="sm" icon="delete_sweep" label="Clear" :disable="!messages.length || running" @click="messages = []" />
        </div>
      </div>
      <q-dialog v-model="tuning" position="right" full-height>
        <q-card style="width: 380px; max-width: 94vw" class="column no-wrap">
          <q-card-section class="row items-center"><div class="text-subtitle1">Settings</div><q-space /><q-btn v-close-popup flat round dense icon="close" aria-label="Close" /></q-card-section>
          <q-card-section class="q-gutter-sm scroll col">
            <q-input v-model="settings.system" label="System prompt" type="textarea" autogrow outlined dense />
            <div class="row q-col-gutter-sm">
              <q-input class="col-6" v-model="settings.temperature" label="Temperature" type="number" step="0.1" min="0" max="2" outlined dense clearable />
              <q-input class="col-6" v-model="settings.top_p" label="Top p" type="number" step="0.05" min="0" max="1" outlined dense clearable />
              <q-input class="col-6" v-model="settings.max_tokens" label="Max tokens" type="number" min="1" outlined dense clearable />
              <q-input class="col-6" v-model="settings.seed" label="Seed" type="number" outlined dense clearable />
            </div>
            <q-select v-model="settings.collection" :options="collections" label="Answer from collection (RAG)" outlined dense options-dense clearable :disable="!collections.length" :hint="collections.length ? '' : 'No collections yet: see the page Collections'" />
            <q-input v-model="settings.schema" label="JSON schema of the answer" type="textarea" outlined dense input-class="code" placeholder='{"type": "object", "properties": {...}}' />
            <q-input v-model="settings.tools" label="Tools (JSON list)" type="textarea" outlined dense input-class="code" placeholder='[{"type": "function", "function": {"name": ...}}]' />
          </q-card-section>
        </q-card>
      </q-dialog>
      <q-dialog v-model="coding">
        <q-card style="width: 760px; max-width: 94vw">
          <q-tabs v-model="language" dense align="left" no-caps><q-tab name="curl" label="curl" /><q-tab name="python" label="Python" /></q-tabs>
          <q-card-section><pre class="code" tabindex="0" style="max-height: 60vh">{{ code[language] }}</pre></q-card-section>
          <q-card-actions align="right"><q-btn flat no-caps icon="content_copy" label="Copy" @click="copied(code[language])" /><q-btn v-close-popup flat no-caps label="Close" /></q-card-actions>
        </q-card>
      </q-dialog>
    </q-page>`,
  data: () => ({
    settings: { ...FRESH },
    described: [],
    collections: [],
    messages: [],
    draft: "",
    running: null,
    tuning: false,
    coding: false,
    language: "curl",
    code: {},
    ideas: ["What is the capital of France?", "Write a haiku about rivers.", "List three uses of a paper clip."],
  }),
  computed: {
    models() {
      return this.described.filter((model) => model.capabilities?.chat).map((model) => ({ value: model.id, label: model.parent ? `${model.id} (adapter)` : model.id }));
    },
  },
  watch: {
    "settings.model"(name) {
      const window = this.described.find((model) => model.id === name)?.context_window;
      if (window && this.settings.max_tokens > window / 2) this.settings.max_tokens = Math.floor(window / 2);
    },
  },
  async activated() {
    await this.refresh();
  },
  methods: {
    copied(text) {
      copy(text).then(() => this.$done("Copied"), this.$fail);
    },
    duration,
    money,
    number,
    async refresh() {
      try {
        this.described = (await get("/v1/models")).data;
        if (!this.models.some((model) => model.value === this.settings.model)) this.settings.model = this.models[0]?.value || "";
        this.collections = (await get("/v1/collections")).data.map((one) => one.name);
      } catch (error) {
        if (!(error instanceof ApiError && [404, 503].includes(error.status))) this.$fail(error);
      }
    },
    history() {
      return this.messages.filter((message) => message.content && !message.problem).map(({ role, content }) => ({ role, content }));
    },
    cost(facts) {
      const price = this.described.find((model) => model.id === facts.model)?.pricing;
      return price && facts.usage ? (facts.usage.prompt_tokens * price.input_per_million + facts.usage.completion_tokens * price.output_per_million) / 1e6 : null;
    },
    request(messages) {
      return build(this.settings, messages);
    },
    showCode() {
      try {
        const body = this.request([...this.history(), { role: "user", content: this.draft || "Hello" }]);
        this.code = { curl: asCurl(body, location.origin, Boolean(session.key)), python: asPython(body, location.origin, Boolean(session.key)) };
        this.coding = true;
      } catch (error) {
        this.$fail(error);
      }
    },
    stop() {
      this.running?.abort();
    },
    async send(text = this.draft) {
      text = text.trim();
      if (!text || this.running || !this.settings.model) return;
      let body;
      try {
        body = this.request([...this.history(), { role: "user", content: text }]);
      } catch (error) {
        if (error instanceof Wrong) return this.$fail(error);
        throw error;
      }
      this.draft = "";
      this.messages.push({ role: "user", content: text }, { role: "assistant", content: "", html: "<p class='muted'>…</p>", tools: [], citations: [], facts: null, problem: "" });
      const answer = this.messages[this.messages.length - 1];
      this.running = new AbortController();
      try {
        await this.stream({ ...body, stream: true, stream_options: { include_usage: true } }, answer);
      } catch (error) {
        if (error.name === "AbortError") answer.facts = { ...answer.facts, finish: "stopped" };
        else answer.problem = error.message;
      } finally {
        this.running = null;
        this.$nextTick(() => this.$refs.box?.focus());
      }
    },
    async stream(body, answer) {
      const began = performance.now();
      const response = await call("POST", "/v1/chat/completions", body, { signal: this.running.signal });
      const facts = (answer.facts = {
        model: response.headers.get("x-penstock-model") || body.model,
        route: response.headers.get("x-penstock-route"),
        replica: response.headers.get("x-penstock-replica"),
      });
      let tokens = 0;
      let first = null;
      let waiting = false;
      const draw = () => {
        waiting = false;
        answer.html = markdown(answer.content) || "<p class='muted'>…</p>";
        const now = performance.now();
        answer.facts = { ...facts, ttft: first === null ? null : (first - began) / 1000, rate: tokens > 1 ? (tokens - 1) / ((now - first) / 1000) : null };
        const log = this.$refs.log;
        if (log && log.scrollHeight - log.scrollTop - log.clientHeight < 160) this.$nextTick(() => (log.scrollTop = log.scrollHeight));
      };
      for await (const { data } of events(response)) {
        if (data.error) throw new Error(data.error.message);
        if (data.usage) facts.usage = data.usage;
        const choice = data.choices?.[0];
        if (choice?.finish_reason) facts.finish = choice.finish_reason;
        if (choice?.delta?.annotations) answer.citations = [...answer.citations, ...choice.delta.annotations];
        for (const part of choice?.delta?.tool_calls || []) {
          const tool = (answer.tools[part.index] ??= { id: part.index, name: "", arguments: "" });
          tool.name += part.function?.name || "";
          tool.arguments += part.function?.arguments || "";
        }
        const delta = choice?.delta?.content;
        if (!delta) continue;
        first ??= performance.now();
        tokens++;
        answer.content += delta;
        if (!waiting) {
          waiting = true;
          requestAnimationFrame(draw);
        }
      }
      draw();
    },
  },
};
