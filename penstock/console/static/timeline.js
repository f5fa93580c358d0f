// Draws where the time of a request went: one bar of everything, and a lane for each phase.

import { duration } from "./format.js";

export const PHASES = {
  receive: "#64748b",
  authenticate: "#94a3b8",
  prepare: "#be185d",
  retrieve: "#9333ea",
  cache: "#7c3aed",
  limits: "#a16207",
  admission: "#4f46e5",
  queue: "#d97706",
  prefill: "#0284c7",
  engine: "#0369a1",
  decode: "#0f766e",
  encode: "#0f766e",
  stream: "#4d7c0f",
  reply: "#78716c",
};
const MEANING = {
  receive: "the request arrives",
  authenticate: "its key is checked",
  prepare: "template and tokenizer",
  retrieve: "passages are searched",
  cache: "the response cache is asked",
  limits: "limits and budget are reserved",
  admission: "waits in the gateway",
  queue: "waits in the engine",
  prefill: "the prompt is computed",
  engine: "the other server works",
  decode: "tokens are generated",
  encode: "the texts are encoded",
  stream: "tokens go to the client",
  reply: "the answer is sent",
};
export const colour = (name) => PHASES[name] || "#64748b";
const byEngine = (phase) => Boolean(phase.detail?.engine);

function place(phase, total) {
  const left = Math.min((100 * phase.start_ms) / total, 100);
  return { left: `${left}%`, width: `${Math.min((100 * phase.duration_ms) / total, 100 - left)}%`, background: colour(phase.name) };
}
const length = (trace) => Math.max(trace.total_latency_ms, ...trace.phases.map((phase) => phase.start_ms + phase.duration_ms), 0.001);

// One thin bar, for a row of a table.
export const MiniBar = {
  props: { trace: Object },
  template: `<div class="phases" aria-hidden="true"><span v-for="(phase, index) in layered" :key="index" :style="place(phase, total)" :title="phase.name + ' ' + phase.duration_ms + ' ms'"></span></div>`,
  computed: {
    total() {
      return length(this.trace);
    },
    layered() {
      return [...this.trace.phases.filter((phase) => !byEngine(phase)), ...this.trace.phases.filter(byEngine)];
    },
  },
  methods: { place },
};

export const PhaseLegend = {
  props: { names: { type: Array, default: () => ["queue", "prefill", "decode", "stream", "admission", "prepare"] } },
  template: `<div class="legend"><span v-for="name in names" :key="name"><i :style="{ background: colour(name) }"></i>{{ name }}<span v-if="meaning[name]" class="muted">, {{ meaning[name] }}</span></span></div>`,
  setup: () => ({ colour, meaning: MEANING }),
};

export const TimelineChart = {
  components: { PhaseLegend },
  props: { trace: Object },
  template: `
    <div data-test="timeline">
      <div class="whole-bar" role="img" :aria-label="said"><span v-for="(phase, index) in layered" :key="index" :style="place(phase, total)" :title="phase.name + ' ' + took(phase)">{{ share(phase) > 0.09 ? phase.name : '' }}</span></div>
      <div class="axis"><span v-for="tick in ticks" :key="tick">{{ tick }}</span></div>
      <div class="spans q-mt-md">
        <template v-for="(phase, index) in shown" :key="index">
          <span>{{ phase.name }}<span v-if="phase.detail?.choice" class="muted"> {{ phase.detail.choice + 1 }}</span></span>
          <div class="lane"><span :style="place(phase, total)"></span></div>
          <span class="took">{{ took(phase) }}</span>
        </template>
      </div>
      <p class="muted q-mt-sm q-mb-sm" style="font-size: 0.8rem">{{ shown.some(byEngine) ? 'queue, prefill and decode are by the engine\\'s own clock; the other phases are the gateway\\'s.' : 'By the gateway\\'s clock.' }} Phases may overlap; a gap before queue is the way to the engine.</p>
      <phase-legend :names="[...new Set(shown.map((phase) => phase.name))]" />
    </div>`,
  computed: {
    shown() {
      return this.trace.phases;
    },
    // What the engine does is drawn over what the gateway does meanwhile.
    layered() {
      return [...this.shown.filter((phase) => !byEngine(phase)), ...this.shown.filter(byEngine)];
    },
    total() {
      return length(this.trace);
    },
    ticks() {
      return [0, 0.25, 0.5, 0.75, 1].map((part) => (part ? duration((part * this.total) / 1000) : "0"));
    },
    said() {
      return this.shown.map((phase) => `${phase.name} ${this.took(phase)}`).join(", ");
    },
  },
  methods: {
    place,
    byEngine,
    took: (phase) => duration(phase.duration_ms / 1000),
    share(phase) {
      return phase.duration_ms / this.total;
    },
  },
};
