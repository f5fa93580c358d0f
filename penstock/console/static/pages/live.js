// Live view: the metrics that operators look at first, scraped from /metrics once a second.

import { get, session, text } from "../api.js";
import Chart, { lines } from "../chart.js";
import { duration, number, percent } from "../format.js";
import { grown, parse, quantile, total } from "../metrics.js";
import { MiniBar, PhaseLegend } from "../timeline.js";
import { refreshed } from "../widgets.js";

const KEPT = 120;
const WINDOW_S = 10;
const REPLICAS = [
  { name: "id", label: "Replica", main: true },
  { name: "role", label: "Role" },
  { name: "state", label: "State" },
  { name: "breaker", label: "Breaker" },
  { name: "running", label: "Running", number: true },
  { name: "waiting", label: "Waiting", number: true },
  { name: "in_flight", label: "In flight", number: true },
  { name: "device", label: "Where" },
];
const TRACES = [
  { name: "model_version", label: "Model", main: true },
  { name: "timestamp", label: "Time" },
  { name: "tenant", label: "Tenant" },
  { name: "tokens", label: "Tokens", number: true },
  { name: "ttft", label: "First token", number: true },
  { name: "total", label: "Total", number: true },
  { name: "phases", label: "Phases" },
];

export default {
  name: "Live",
  components: { Chart, MiniBar, PhaseLegend },
  mixins: [refreshed(1)],
  template: `
    <q-page class="page">
      <div class="head"><h1>Live</h1></div>
      <page-state :page="page" />
      <template v-if="loaded">
      <div class="tiles">
        <div class="tile" v-for="tile in tiles" :key="tile.name"><div class="value" :data-test="tile.name">{{ tile.value }}</div><div class="name">{{ tile.name }}</div></div>
      </div>
      <div class="charts" :key="$q.dark.isActive">
        <chart title="Tokens per second" :option="charts.tokens" label="Chart of prompt and output tokens per second over the last two minutes" />
        <chart title="Time to first token, last 10 s" :option="charts.ttft" label="Chart of median and 95th percentile time to first token" />
        <chart title="Inter-token latency, last 10 s" :option="charts.itl" label="Chart of median and 95th percentile inter-token latency" />
        <chart title="Requests" :option="charts.requests" label="Chart of running and waiting requests" />
        <chart title="KV cache usage" :option="charts.kv" label="Chart of KV cache usage" />
        <chart title="Engine steps" :option="charts.steps" label="Chart of engine steps per second and tokens per step" />
      </div>
      <h2>Replicas and remotes</h2>
      <data-table label="Replicas" :columns="replicaColumns" :rows="replicas">
        <template #state="{ row }"><q-badge :color="row.ready ? 'positive' : 'warning'" :label="row.leaving ? 'draining' : row.state" /></template>
        <template #breaker="{ row }"><q-badge :color="row.breaker === 'closed' ? 'positive' : 'negative'" outline :label="row.breaker" /></template>
        <template #role="{ row }">{{ row.remote ? 'remote, ' + row.dialect : row.role || '–' }}</template>
        <template #waiting="{ row }">{{ row.waiting }}{{ row.limits?.wait_s ? ', limited for ' + Math.ceil(row.limits.wait_s) + ' s' : row.saturated ? ', full' : '' }}</template>
        <template #empty>{{ admin ? 'No replicas.' : 'Replicas are shown to keys with the scope admin.' }}</template>
      </data-table>
      <h2>Latest requests</h2>
      <phase-legend class="q-mb-sm" />
      <data-table label="Latest requests" :columns="traceColumns" :rows="traces" row-key="request_id" opens @open="(row) => go(row.request_id)">
        <template #model_version="{ row }">{{ row.adapter_id || row.model_version || '–' }}</template>
        <template #timestamp="{ row }"><when :at="row.timestamp" /></template>
        <template #tokens="{ row }">{{ row.prompt_tokens }} → {{ row.completion_tokens }}</template>
        <template #ttft="{ row }">{{ duration(row.ttft_ms == null ? null : row.ttft_ms / 1000) }}</template>
        <template #total="{ row }">{{ duration(row.total_latency_ms / 1000) }}</template>
        <template #phases="{ row }"><mini-bar :trace="row" /></template>
        <template #empty>No requests yet. Send one from the <a href="#playground">playground</a>.</template>
      </data-table>
      </template>
    </q-page>`,
  data: () => ({ history: [], replicas: [], traces: [], replicaColumns: REPLICAS, traceColumns: TRACES, admin: session.admin }),
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
  methods: {
    duration,
    go(id) {
      location.hash = `#requests/${encodeURIComponent(id)}`;
    },
    async read() {
      const [exposed, replicas, traces] = await Promise.allSettled([text("/metrics"), this.admin ? get("/v1/admin/replicas") : null, get("/v1/traces?limit=12")]);
      if (exposed.status === "rejected") throw exposed.reason;
      this.replicas = replicas.value?.data || [];
      this.traces = traces.value?.data || [];
      this.add(parse(exposed.value), performance.now() / 1000);
    },
    add(reading, at) {
      const before = this.readings?.at(-1);
      this.readings = [...(this.readings || []).filter((one) => one.at > at - WINDOW_S), { reading, at }];
      if (!before) return;
      // Quantiles and shares of a single second would be mostly gaps.
      const earlier = this.readings.length > 1 ? this.readings[0].reading : before.reading;
      const seconds = at - before.at;
      const rate = (name, where) => grown(before.reading, reading, name, where) / seconds;
      const kv = (reading.get("vllm:kv_cache_usage_perc") || []).map((one) => one.value);
      const queries = grown(earlier, reading, "vllm:prefix_cache_queries_total");
      const output = rate("vllm:generation_tokens_total");
      const steps = rate("penstock_engine_steps_total");
      this.history = [
        ...this.history.slice(1 - KEPT),
        {
          time: new Date().toLocaleTimeString("en-GB"),
          output,
          prompt: rate("vllm:prompt_tokens_total"),
          ttft50: quantile(earlier, reading, "vllm:time_to_first_token_seconds", 0.5),
          ttft95: quantile(earlier, reading, "vllm:time_to_first_token_seconds", 0.95),
          itl50: quantile(earlier, reading, "vllm:inter_token_latency_seconds", 0.5),
          itl95: quantile(earlier, reading, "vllm:inter_token_latency_seconds", 0.95),
          running: total(reading, "vllm:num_requests_running"),
          waiting: total(reading, "vllm:num_requests_waiting"),
          kv: kv.length ? Math.max(...kv) : null,
          hits: queries ? grown(earlier, reading, "vllm:prefix_cache_hits_total") / queries : null,
          errors: rate("penstock_http_requests_total", (labels) => Number(labels.status) >= 500),
          steps,
          perStep: steps ? output / steps : null,
        },
      ];
    },
  },
};
