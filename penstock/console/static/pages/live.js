// Live view: the metrics that operators look at first, scraped from /metrics once a second.

import { get, text } from "../api.js";
import Chart, { lines } from "../chart.js";
import { clock, duration, number, percent } from "../format.js";
import { grown, parse, quantile, total } from "../metrics.js";

const KEPT = 120;
const PHASES = { queue: "#d97706", prefill: "#0284c7", decode: "#0f766e", stream: "#65a30d", prepare: "#be185d", admission: "#4f46e5" };

export default {
  name: "Live",
  components: { Chart },
  template: `
    <q-page class="page">
      <h1>Live</h1>
      <q-banner v-if="problem" dense rounded class="bg-negative text-white q-mb-md" role="alert">{{ problem }}</q-banner>
      <div class="tiles">
        <div class="tile" v-for="tile in tiles" :key="tile.name"><div class="value" :data-test="tile.name">{{ tile.value }}</div><div class="name">{{ tile.name }}</div></div>
      </div>
      <div class="charts" :key="$q.dark.isActive">
        <chart title="Tokens per second" :option="charts.tokens" label="Chart of prompt and output tokens per second over the last two minutes" />
        <chart title="Time to first token" :option="charts.ttft" label="Chart of median and 95th percentile time to first token" />
        <chart title="Inter-token latency" :option="charts.itl" label="Chart of median and 95th percentile inter-token latency" />
        <chart title="Requests" :option="charts.requests" label="Chart of running and waiting requests" />
        <chart title="KV cache usage" :option="charts.kv" label="Chart of KV cache usage" />
        <chart title="Engine steps" :option="charts.steps" label="Chart of engine steps per second and tokens per step" />
      </div>
      <h2>Replicas</h2>
      <div class="wide-table"><table>
        <thead><tr><th>Replica</th><th>Role</th><th>State</th><th>Breaker</th><th class="number">Running</th><th class="number">Waiting</th><th class="number">In flight</th><th>Device</th></tr></thead>
        <tbody><tr v-for="replica in replicas" :key="replica.id"><td>{{ replica.id }}</td><td>{{ replica.role || '–' }}</td>
          <td><q-badge :color="replica.ready ? 'positive' : 'warning'" :label="replica.leaving ? 'draining' : replica.state" /></td>
          <td><q-badge :color="replica.breaker === 'closed' ? 'positive' : 'negative'" outline :label="replica.breaker" /></td>
          <td class="number">{{ replica.running }}</td><td class="number">{{ replica.waiting }}</td><td class="number">{{ replica.in_flight }}</td><td>{{ replica.device || '–' }}</td></tr></tbody>
      </table></div>
      <h2>Latest requests</h2>
      <div class="wide-table"><table>
        <thead><tr><th>Time</th><th>Tenant</th><th>Model</th><th class="number">Tokens</th><th class="number">TTFT</th><th class="number">Total</th><th>Phases <span v-for="(colour, phase) in phaseColours" :key="phase" :style="{ color: colour }">■ {{ phase }} </span></th></tr></thead>
        <tbody><tr v-for="trace in traces" :key="trace.request_id" :title="trace.request_id"><td>{{ clock(trace.timestamp) }}</td><td>{{ trace.tenant }}</td><td>{{ trace.model_version }}</td>
          <td class="number">{{ trace.prompt_tokens }} → {{ trace.completion_tokens }}</td><td class="number">{{ duration(trace.ttft_ms == null ? null : trace.ttft_ms / 1000) }}</td><td class="number">{{ duration(trace.total_latency_ms / 1000) }}</td>
          <td><div class="phases"><span v-for="(phase, index) in trace.phases" :key="index" :style="bar(trace, phase)" :title="phase.name + ' ' + phase.duration_ms + ' ms'"></span></div></td></tr>
          <tr v-if="!traces.length"><td colspan="7" class="muted">No requests yet.</td></tr></tbody>
      </table></div>
    </q-page>`,
  data: () => ({ history: [], replicas: [], traces: [], problem: "", phaseColours: PHASES }),
  computed: {
    now() {
      return this.history[this.history.length - 1] || {};
    },
    tiles() {
      const now = this.now;
      return [
        { name: "output tokens/s", value: number(now.output) },
        { name: "TTFT p95", value: duration(now.ttft95) },
        { name: "ITL p50", value: duration(now.itl50) },
        { name: "running", value: number(now.running) },
        { name: "waiting", value: number(now.waiting) },
        { name: "KV cache", value: percent(now.kv) },
        { name: "prefix hits", value: percent(now.hits) },
        { name: "errors/s", value: number(now.errors) },
      ];
    },
    charts() {
      const times = this.history.map((point) => point.time);
      const of = (name, scale = 1) => this.history.map((point) => (point[name] == null ? null : point[name] * scale));
      const draw = (series, options) => lines(times, series.map(([name, key, scale]) => ({ name, data: of(key, scale) })), options);
      return {
        tokens: draw([["output", "output"], ["prompt", "prompt"]]),
        ttft: draw([["p50", "ttft50", 1000], ["p95", "ttft95", 1000]], { unit: " ms" }),
        itl: draw([["p50", "itl50", 1000], ["p95", "itl95", 1000]], { unit: " ms" }),
        requests: draw([["running", "running"], ["waiting", "waiting"]]),
        kv: draw([["in use", "kv", 100]], { unit: "%", max: 100 }),
        steps: draw([["steps/s", "steps"], ["tokens/step", "perStep"]]),
      };
    },
  },
  async mounted() {
    this.alive = true;
    while (this.alive) {
      await this.read();
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  },
  beforeUnmount() {
    this.alive = false;
  },
  methods: {
    clock,
    duration,
    bar(trace, phase) {
      const total = Math.max(trace.total_latency_ms, 0.001);
      return { left: `${(100 * phase.start_ms) / total}%`, width: `${(100 * phase.duration_ms) / total}%`, background: PHASES[phase.name] || "#94a3b8" };
    },
    async read() {
      try {
        const [exposed, replicas, traces] = await Promise.allSettled([text("/metrics"), get("/v1/admin/replicas"), get("/v1/traces?limit=12")]);
        if (exposed.status === "rejected") throw exposed.reason;
        this.replicas = replicas.value?.data || [];
        this.traces = traces.value?.data || [];
        this.add(parse(exposed.value), performance.now() / 1000);
        this.problem = "";
      } catch (error) {
        this.problem = error.message;
      }
    },
    add(reading, at) {
      const before = this.last;
      this.last = { reading, at };
      if (!before) return;
      const seconds = at - before.at;
      const rate = (name, where) => grown(before.reading, reading, name, where) / seconds;
      const kv = (reading.get("vllm:kv_cache_usage_perc") || []).map((one) => one.value);
      const queries = grown(before.reading, reading, "vllm:prefix_cache_queries_total");
      const output = rate("vllm:generation_tokens_total");
      const steps = rate("penstock_engine_steps_total");
      this.history = [
        ...this.history.slice(1 - KEPT),
        {
          time: new Date().toLocaleTimeString("en-GB"),
          output,
          prompt: rate("vllm:prompt_tokens_total"),
          ttft50: quantile(before.reading, reading, "vllm:time_to_first_token_seconds", 0.5),
          ttft95: quantile(before.reading, reading, "vllm:time_to_first_token_seconds", 0.95),
          itl50: quantile(before.reading, reading, "vllm:inter_token_latency_seconds", 0.5),
          itl95: quantile(before.reading, reading, "vllm:inter_token_latency_seconds", 0.95),
          running: total(reading, "vllm:num_requests_running"),
          waiting: total(reading, "vllm:num_requests_waiting"),
          kv: kv.length ? Math.max(...kv) : null,
          hits: queries ? grown(before.reading, reading, "vllm:prefix_cache_hits_total") / queries : null,
          errors: rate("penstock_http_requests_total", (labels) => Number(labels.status) >= 500),
          steps,
          perStep: steps ? output / steps : null,
        },
      ];
    },
  },
};
