// Requests: the newest ones with filters, and where the time of one went. `#requests/ID` opens one.

import { ApiError, get, session } from "../api.js";
import { duration, money, number } from "../format.js";
import { MiniBar, TimelineChart } from "../timeline.js";
import { refreshed } from "../widgets.js";

const PERIODS = [
  { label: "Last 15 minutes", value: "15m" },
  { label: "Last hour", value: "1h" },
  { label: "Last 24 hours", value: "24h" },
  { label: "Last 7 days", value: "7d" },
  { label: "Last 30 days", value: "30d" },
];
const ENDS = ["stop", "length", "tool_calls", "content_filter", "timeout", "error", "abort"];
const PAGE = 100;
const ANSWER = /^(chatcmpl-|cmpl-|resp_|msg_)/;
const bad = (end) => ["error", "abort", "timeout"].includes(end);

const Detail = {
  components: { TimelineChart },
  mixins: [refreshed()],
  props: { id: String, known: Object },
  template: `
    <div class="head"><q-btn flat round dense icon="arrow_back" aria-label="All requests" href="#requests" /><h1>Request</h1><copy-id :value="entry?.request_id || id" what="request id" /><q-space />
      <q-badge v-if="entry" :color="bad(entry.finish_reason) ? 'negative' : 'positive'" :label="entry.finish_reason || 'ended'" data-test="end" /><q-badge v-if="trace" outline :color="trace.status < 400 ? 'positive' : 'negative'" :label="'HTTP ' + trace.status" /></div>
    <page-state v-if="!loaded" :page="page" />
    <template v-else>
      <div v-if="trace" class="panel q-mb-md"><timeline-chart :trace="trace" /></div>
      <p v-else-if="entry" class="muted">The timeline of this request is no longer kept: a server keeps those of its newest requests (<code>telemetry.recent_requests</code>). What the request log has:</p>
      <p v-else class="empty">There is no request with this id among those that you may see.</p>
      <div v-if="entry" class="panels">
        <div class="panel"><h2 class="q-mt-none">Tokens and money</h2><dl class="pairs">
          <dt>Prompt</dt><dd data-test="prompt-tokens">{{ number(entry.prompt_tokens) }} tokens, {{ number(entry.cached_tokens) }} of them cached</dd>
          <dt>Answer</dt><dd>{{ number(entry.completion_tokens) }} tokens</dd>
          <dt>Cost</dt><dd data-test="cost">{{ trace?.charge ? money(Number(trace.charge.cost)) : 'not known' }}</dd>
          <dt>First token</dt><dd>{{ entry.ttft_ms == null ? '–' : duration(entry.ttft_ms / 1000) }}</dd>
          <dt>Whole request</dt><dd>{{ duration(entry.total_latency_ms / 1000) }}</dd>
          <dt>Speed</dt><dd>{{ speed == null ? '–' : number(speed) + ' tokens/s after the first' }}</dd>
        </dl></div>
        <div class="panel"><h2 class="q-mt-none">Who answered</h2><dl class="pairs">
          <dt>Model</dt><dd>{{ entry.adapter_id || entry.model_version || '–' }}<span v-if="entry.adapter_id" class="muted"> on {{ entry.model_version }}</span><span v-if="trace?.asked_model && trace.asked_model !== (entry.adapter_id || entry.model_version)" class="muted"> (asked for: {{ trace.asked_model }})</span></dd>
          <dt>Chosen by</dt><dd data-test="selection">{{ trace?.selection || '–' }}</dd>
          <dt>Replica</dt><dd data-test="replica">{{ replicas.join(', ') || '–' }}</dd>
          <dt>Endpoint</dt><dd>{{ entry.route }}</dd>
          <dt>Finish reason</dt><dd>{{ entry.finish_reason || '–' }}</dd>
        </dl></div>
        <div class="panel"><h2 class="q-mt-none">Who asked</h2><dl class="pairs">
          <dt>Time</dt><dd>{{ new Date(entry.timestamp * 1000).toLocaleString() }} (<when :at="entry.timestamp" />)</dd>
          <dt>Tenant</dt><dd>{{ entry.tenant || '–' }}</dd><dt>User</dt><dd>{{ entry.user_id || '–' }}</dd>
          <template v-if="trace?.charge?.key"><dt>Key</dt><dd><copy-id :value="trace.charge.key" what="key id" /></dd></template>
          <template v-if="trace?.charge?.tier"><dt>Tier</dt><dd>{{ trace.charge.tier }}</dd></template>
          <template v-if="trace?.charge?.feature"><dt>Feature</dt><dd>{{ trace.charge.feature }}</dd></template>
          <template v-if="trace?.session"><dt>Session</dt><dd><copy-id :value="trace.session" what="session" /></dd></template>
          <template v-if="trace?.response_id"><dt>Answer</dt><dd><copy-id :value="trace.response_id" what="answer id" /></dd></template>
          <template v-if="trace?.trace_id"><dt>Trace</dt><dd><copy-id :value="trace.trace_id" what="trace id" /></dd></template>
          <template v-for="(value, name) in trace?.metadata || {}" :key="name"><dt>{{ name }}</dt><dd>{{ value }}</dd></template>
        </dl></div>
      </div>
    </template>`,
  data: () => ({ trace: null, logged: null }),
  computed: {
    entry() {
      return this.trace || this.logged;
    },
    replicas() {
      return [...new Set((this.trace?.phases || []).map((phase) => phase.detail?.engine).filter(Boolean))];
    },
    speed() {
      const { completion_tokens: tokens, ttft_ms: first, total_latency_ms: total } = this.entry;
      return first == null || tokens < 2 || total <= first ? null : ((tokens - 1) * 1000) / (total - first);
    },
  },
  methods: {
    bad,
    duration,
    money,
    number,
    async read() {
      try {
        // The id of an answer will do, too.
        const answered = ANSWER.test(this.id) && (await get("/v1/traces?limit=1000")).data.find((one) => one.response_id === this.id);
        this.trace = await get(`/v1/traces/${encodeURIComponent(answered ? answered.request_id : this.id)}`);
      } catch (error) {
        if (!(error instanceof ApiError && [403, 404].includes(error.status))) throw error;
        this.logged = this.known || (await this.find());
      }
    },
    async find() {
      try {
        return (await get(`${session.admin ? "/v1/admin/requests" : "/v1/requests"}?since=30d&limit=1&request_id=${encodeURIComponent(this.id)}`)).data[0] || null;
      } catch (error) {
        if (error instanceof ApiError && error.status === 503) return null;
        throw error;
      }
    },
  },
};

export default {
  name: "Requests",
  components: { Detail, MiniBar },
  mixins: [refreshed(5)],
  template: `
    <q-page class="page">
      <detail v-if="chosen" :key="chosen" :id="chosen" :known="rows.find((row) => row.request_id === chosen)" />
      <template v-else>
        <div class="head"><h1>Requests</h1></div>
        <div class="row q-col-gutter-sm items-center q-mb-sm">
          <q-select class="col-6 col-sm-3 col-md-2" v-model="since" :options="periods" emit-value map-options dense outlined options-dense label="Period" @update:model-value="refresh" />
          <q-select v-if="admin" class="col-6 col-sm-3 col-md-2" v-model="tenant" :options="tenants" clearable dense outlined options-dense label="Tenant" @update:model-value="refresh" />
          <q-select class="col-6 col-sm-3 col-md-2" v-model="model" :options="models" clearable dense outlined options-dense label="Model" @update:model-value="refresh" />
          <q-select class="col-6 col-sm-3 col-md-2" v-model="end" :options="ends" clearable dense outlined options-dense label="Finish reason" @update:model-value="refresh" />
          <q-input class="col-12 col-sm-6 col-md-4" v-model="wanted" dense outlined clearable label="Id of a request or answer" @keydown.enter="wanted && go(wanted)"><template #after><q-btn round dense flat icon="search" aria-label="Open the request" :disable="!wanted" @click="go(wanted)" /></template></q-input>
        </div>
        <page-state :page="page" />
        <template v-if="loaded">
          <p v-if="unlogged" class="muted">This server has no request log that it can read (<code>request_log.url</code>); these are the newest requests in its memory.</p>
          <data-table label="Requests" :columns="columns" :rows="rows" row-key="request_id" opens @open="(row) => go(row.request_id)">
            <template #model="{ row }">{{ row.adapter_id || row.model_version || '–' }}</template>
            <template #timestamp="{ row }"><when :at="row.timestamp" /></template>
            <template #tenant="{ row }">{{ row.tenant }}<span v-if="row.user_id" class="muted"> / {{ row.user_id }}</span></template>
            <template #tokens="{ row }">{{ number(row.prompt_tokens) }} → {{ number(row.completion_tokens) }}</template>
            <template #ttft="{ row }">{{ row.ttft_ms == null ? '–' : duration(row.ttft_ms / 1000) }}</template>
            <template #total="{ row }">{{ duration(row.total_latency_ms / 1000) }}</template>
            <template #end="{ row }"><q-badge outline :color="bad(row.finish_reason) ? 'negative' : 'positive'" :label="row.finish_reason || 'ended'" /></template>
            <template #phases="{ row }"><mini-bar v-if="row.phases" :trace="row" /><span v-else class="muted">–</span></template>
            <template #empty>No requests {{ model || end || tenant ? 'match these filters' : 'in this period' }}. Send one from the <a href="#playground">playground</a>, or choose a longer period.</template>
          </data-table>
          <div v-if="more" class="text-center q-mt-sm"><q-btn flat no-caps color="primary" label="Older requests" @click="limit += 100; refresh()" /></div>
        </template>
      </template>
    </q-page>`,
  data: () => ({ rows: [], chosen: null, since: "1h", tenant: null, model: null, end: null, wanted: "", limit: PAGE, more: false, unlogged: false, tenants: [], models: [], periods: PERIODS, ends: ENDS, admin: session.admin }),
  computed: {
    columns() {
      return [
        { name: "model", label: "Model", main: true },
        { name: "timestamp", label: "Time" },
        ...(this.admin ? [{ name: "tenant", label: "Tenant / user" }] : []),
        { name: "tokens", label: "Tokens", number: true },
        { name: "ttft", label: "First token", number: true },
        { name: "total", label: "Total", number: true },
        { name: "end", label: "End" },
        { name: "phases", label: "Phases" },
      ];
    },
  },
  created() {
    this.locate = () => (this.chosen = location.hash.startsWith("#requests/") ? decodeURIComponent(location.hash.slice("#requests/".length)) : null);
    window.addEventListener("hashchange", this.locate);
    this.locate();
  },
  beforeUnmount() {
    window.removeEventListener("hashchange", this.locate);
  },
  methods: {
    bad,
    duration,
    number,
    go(id) {
      location.hash = `#requests/${encodeURIComponent(id.trim())}`;
    },
    async read() {
      if (this.chosen && this.loaded) return;
      const query = new URLSearchParams({ since: this.since, inference: "true", limit: this.limit });
      for (const [name, value] of [["model", this.model], ["finish_reason", this.end], ["tenant", this.tenant]]) if (value) query.set(name, value);
      const [logged, traces] = await Promise.allSettled([get(`${this.admin ? "/v1/admin/requests" : "/v1/requests"}?${query}`), get(`/v1/traces?limit=${Math.min(this.limit, 1000)}`)]);
      this.unlogged = logged.status === "rejected" && logged.reason instanceof ApiError && logged.reason.status === 503;
      if (logged.status === "rejected" && !this.unlogged) throw logged.reason;
      const kept = (traces.value?.data || []).filter((row) => this.fits(row));
      const timed = new Map(kept.map((row) => [row.request_id, row]));
      const entries = logged.value?.data || [];
      const known = new Set(entries.map((row) => row.request_id));
      // The log is written in batches: what is not there yet is in memory.
      const fresh = kept.filter((row) => !known.has(row.request_id) && (this.unlogged || row.timestamp > (entries[0]?.timestamp ?? 0)));
      this.rows = [...fresh, ...entries.map((row) => timed.get(row.request_id) || row)];
      this.more = entries.length >= this.limit;
      if (!this.loaded) await this.choices();
    },
    fits(row) {
      const seconds = { m: 60, h: 3600, d: 86400 }[this.since.slice(-1)] * parseInt(this.since, 10);
      return row.timestamp > Date.now() / 1000 - seconds && (!this.model || (row.adapter_id || row.model_version) === this.model) && (!this.end || row.finish_reason === this.end) && (!this.tenant || row.tenant === this.tenant);
    },
    async choices() {
      const [models, tenants] = await Promise.allSettled([get("/v1/models"), this.admin ? get("/v1/admin/tenants") : { data: [] }]);
      this.models = (models.value?.data || []).map((one) => one.id);
      this.tenants = (tenants.value?.data || []).map((one) => one.id);
    },
  },
};
