// The audit log: what data rules decided. Who asked, what was decided about, by which rule, with which outcome; no text.

import { get } from "../api.js";
import { refreshed } from "../widgets.js";

const PERIODS = [
  { label: "Last hour", value: "1h" },
  { label: "Last 24 hours", value: "24h" },
  { label: "Last 7 days", value: "7d" },
  { label: "Last 30 days", value: "30d" },
  { label: "Last year", value: "365d" },
];
const OUTCOMES = ["permitted", "refused", "withheld", "marked", "changed"];
const COLORS = { permitted: "positive", refused: "negative", withheld: "warning", marked: "info", changed: "grey" };
const COLUMNS = [
  { name: "timestamp", label: "Time" },
  { name: "outcome", label: "Outcome" },
  { name: "name", label: "About", main: true },
  { name: "tenant", label: "Tenant / user" },
  { name: "key_id", label: "Key" },
  { name: "rule", label: "Rule", text: true },
  { name: "request_id", label: "Request" },
];
const PAGE = 200;

export default {
  name: "Audit",
  mixins: [refreshed(10)],
  template: `
    <q-page class="page">
      <div class="head"><h1>Audit log</h1></div>
      <p class="muted">Decisions by data rules: which model, tool or moderator got a request, was left out or refused, and by which rule. Texts are never stored.</p>
      <div class="row q-col-gutter-sm items-center q-mb-sm">
        <q-select class="col-6 col-sm-3" v-model="since" :options="periods" emit-value map-options dense outlined options-dense label="Period" @update:model-value="refresh" />
        <q-select class="col-6 col-sm-3" v-model="outcome" :options="outcomes" clearable dense outlined options-dense label="Outcome" @update:model-value="refresh" />
        <q-input class="col-6 col-sm-3" v-model="tenant" clearable dense outlined label="Tenant" debounce="400" @update:model-value="refresh" />
        <q-input class="col-6 col-sm-3" v-model="about" clearable dense outlined label="Model, tool or guardrail" debounce="400" @update:model-value="refresh" />
      </div>
      <page-state :page="page" />
      <data-table v-if="loaded" label="Decisions" :columns="columns" :rows="rows" row-key="id">
        <template #timestamp="{ row }"><when :at="row.timestamp" /></template>
        <template #outcome="{ row }"><q-badge :color="colors[row.outcome]" :label="row.outcome" /></template>
        <template #name="{ row }">{{ row.name }}<div class="muted">{{ row.kind }}</div></template>
        <template #tenant="{ row }">{{ row.tenant || '–' }}<span v-if="row.user_id" class="muted"> / {{ row.user_id }}</span></template>
        <template #key_id="{ row }"><copy-id v-if="row.key_id" :value="row.key_id" what="key id" /><span v-else>–</span></template>
        <template #rule="{ row }">{{ row.rule || '–' }}</template>
        <template #request_id="{ row }"><a v-if="row.request_id" :href="'#requests/' + row.request_id">{{ row.request_id.slice(0, 16) }}…</a><span v-else class="muted">{{ row.path }}</span></template>
        <template #empty>No decisions in this period. Rules are set in the configuration (tiers, guardrails, routing.regions), with tenants and keys, and by the header <code>x-penstock-require</code>.</template>
      </data-table>
    </q-page>`,
  data: () => ({ rows: [], since: "24h", outcome: null, tenant: "", about: "", periods: PERIODS, outcomes: OUTCOMES, colors: COLORS, columns: COLUMNS }),
  methods: {
    async read() {
      const asked = new URLSearchParams({ since: this.since, limit: PAGE });
      if (this.outcome) asked.set("outcome", this.outcome);
      if (this.tenant) asked.set("tenant", this.tenant);
      if (this.about) asked.set("name", this.about);
      this.rows = (await get(`/v1/admin/audit?${asked}`)).data;
    },
  },
};
