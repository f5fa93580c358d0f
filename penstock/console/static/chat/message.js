// One message: yours, which can be edited, or an answer with its reasoning, sources, facts and what can be done with it.

import { copy, duration, money, number } from "../format.js";
import RichText from "./text.js";

// What ended an answer: the limits of a server by their names, then other reasons.
const LIMITS = { time_limit: "stopped by the server's time limit", context_window: "the context window is full", context_tokens: "reached the context limit of this key", default_max_tokens: "reached the server's limit of tokens", max_tokens: "reached the server's limit of tokens", "sampling.max_tokens": "reached the model's limit of tokens" };
const ENDS = { length: "reached the token limit", stopped: "stopped", tool_calls: "calls a tool", content_filter: "cut by a content filter", broken: "broken off" };

export default {
  name: "ChatMessage",
  components: { RichText },
  props: { message: { type: Object, required: true }, versions: { type: Array, required: true }, running: Boolean, busy: Boolean, cost: { type: Number, default: null } },
  emits: ["edit", "again", "more", "choose", "cite", "rate"],
  template: `
    <article class="message" :class="message.role" :aria-label="who">
      <div class="who">{{ who }}</div>
      <template v-if="message.role === 'user'">
        <div v-if="edited === null" class="text">{{ message.content }}</div>
        <div v-else class="editing">
          <q-input v-model="edited" type="textarea" autogrow outlined dense autofocus aria-label="Edited text" @keydown.enter.exact.prevent="save" @keydown.esc.stop="edited = null" />
          <div class="row q-gutter-sm q-mt-xs"><q-btn dense no-caps unelevated color="primary" class="q-px-sm" label="Send" :disable="!edited.trim() || busy" @click="save" /><q-btn flat dense no-caps label="Cancel" @click="edited = null" /></div>
        </div>
      </template>
      <template v-else>
        <details v-if="message.reasoning" class="reasoning"><summary>{{ thinking ? 'Thinking…' : message.thought ? 'Thought for ' + duration(message.thought) : 'Reasoning' }}</summary><rich-text :source="message.reasoning" /></details>
        <rich-text v-if="message.content" :source="message.content" :context="context" @cite="(n) => $emit('cite', n)" />
        <div v-else-if="running && !message.reasoning" class="dots" role="status" aria-label="Waiting for the answer"><i></i><i></i><i></i></div>
        <div v-for="tool in message.tools" :key="tool.id" class="chunk"><strong>{{ tool.name }}</strong> {{ tool.arguments }}</div>
        <div v-if="cited.length" class="sources" aria-label="Sources"><button v-for="one in cited" :key="one.n" type="button" @click="$emit('cite', one.n)"><b>{{ one.n }}</b> {{ one.title }}</button></div>
        <div v-if="message.problem" class="trouble" role="alert"><q-icon name="error_outline" /> <span>{{ message.problem }}</span><q-btn flat dense no-caps size="sm" label="Try again" :disable="busy" @click="$emit('again')" /></div>
        <div v-if="message.facts" class="facts" data-test="facts">
          <span v-if="message.facts.ttft != null" title="Time to first token">TTFT {{ duration(message.facts.ttft) }}</span>
          <span v-if="message.facts.rate != null">{{ number(message.facts.rate) }} tokens/s</span>
          <span v-if="message.facts.usage">{{ message.facts.usage.prompt_tokens }} in ({{ message.facts.usage.prompt_tokens_details?.cached_tokens || 0 }} cached), {{ message.facts.usage.completion_tokens }} out</span>
          <span v-else-if="!running && message.facts.pieces">about {{ message.facts.pieces }} out</span>
          <span v-if="cost !== null" data-test="cost">{{ money(cost) }}</span>
          <span v-if="message.facts.recalled">from the response cache</span>
          <span v-if="message.facts.route">route {{ message.facts.route }}<template v-if="message.facts.replica">, replica {{ message.facts.replica }}</template></span>
          <span v-if="end" class="end">{{ end }}</span>
        </div>
      </template>
      <div v-if="!running && edited === null" class="actions">
        <template v-if="versions.length > 1">
          <q-btn flat dense round size="sm" icon="chevron_left" aria-label="Previous version" :disable="busy || place === 0" @click="$emit('choose', versions[place - 1])" /><span class="muted">{{ place + 1 }} / {{ versions.length }}</span><q-btn flat dense round size="sm" icon="chevron_right" aria-label="Next version" :disable="busy || place === versions.length - 1" @click="$emit('choose', versions[place + 1])" />
        </template>
        <q-btn flat dense round size="sm" :icon="copied ? 'check' : 'content_copy'" title="Copy" aria-label="Copy text" @click="copyAll" />
        <q-btn v-if="message.role === 'user'" flat dense round size="sm" icon="edit" title="Edit" aria-label="Edit" :disable="busy" @click="begin" />
        <template v-else>
          <q-btn v-if="unfinished" flat dense round size="sm" icon="play_arrow" title="Continue" aria-label="Continue" :disable="busy" @click="$emit('more')" />
          <q-btn flat dense round size="sm" icon="refresh" title="Regenerate" aria-label="Regenerate" :disable="busy" @click="$emit('again')" />
          <template v-if="message.response">
            <q-btn flat dense round size="sm" icon="thumb_up" title="Good answer" aria-label="Good answer" :aria-pressed="message.rating === 'up'" :color="message.rating === 'up' ? 'positive' : null" @click="$emit('rate', 'up')" />
            <q-btn flat dense round size="sm" icon="thumb_down" title="Bad answer" aria-label="Bad answer" :aria-pressed="message.rating === 'down'" :color="message.rating === 'down' ? 'negative' : null" @click="$emit('rate', 'down')" />
          </template>
        </template>
      </div>
    </article>`,
  data: () => ({ edited: null, copied: false }),
  computed: {
    who() {
      return this.message.role === "user" ? "You" : this.message.facts?.model || this.message.model || "Model";
    },
    thinking() {
      return this.running && !this.message.content;
    },
    place() {
      return this.versions.findIndex((one) => one.id === this.message.id);
    },
    context() {
      const { sources, citations } = this.message;
      const known = new Set((sources.length ? sources : citations).map((one) => one.n));
      return known.size ? { cite: (n) => known.has(n) } : {};
    },
    // It broke off before its end, and can go on.
    unfinished() {
      return ["length", "stopped", "broken"].includes(this.message.facts?.finish) && Boolean(this.message.content) && !this.message.tools.length;
    },
    cited() {
      const found = new Map();
      for (const one of this.message.citations) found.set(one.n, { n: one.n, title: one.url_citation?.title || one.document || one.chunk_id });
      return [...found.values()].sort((a, b) => a.n - b.n);
    },
    end() {
      const { finish, limit } = this.message.facts;
      return (finish === "length" && limit && (LIMITS[limit] || `ended by the limit ${limit}`)) || ENDS[finish] || "";
    },
  },
  methods: {
    duration,
    money,
    number,
    begin() {
      this.edited = this.message.content;
    },
    save() {
      if (!this.edited.trim() || this.busy) return;
      this.$emit("edit", this.edited.trim());
      this.edited = null;
    },
    async copyAll() {
      try {
        await copy(this.message.content);
        this.copied = true;
        setTimeout(() => (this.copied = false), 1500);
      } catch (error) {
        this.$fail(error);
      }
    },
  },
};
