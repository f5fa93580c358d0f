// Usage and cost from the ledger, by the chosen grouping and period. A key without the scope admin sees its tenant's.

import { get, session } from "../api.js";
import Chart, { bars, stacks } from "../chart.js";
import { money, number, save } from "../format.js";
import { refreshed } from "../widgets.js";

const PERIODS = [
  { label: "Last hour", value: 3600 },
  { label: "Last 24 hours", value: 86400 },
  { label: "Last 7 days", value: 604800 },
  { label: "Last 30 days", value: 2592000 },
  { label: "All time", value: null },
];
const FIGURES = ["requests", "prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens", "cost"];
const MOST_BARS = 12;
const named = (figure) => figure.replace("_", " ");

export default {
  name: "Usage",
  components: { Chart },
  mixins: [refreshed(15)],
  template: `
    <q-page class="page">
      <div class="head"><h1>Usage and cost</h1></div>
      <div class="row q-col-gutter-sm items-center">
        <q-select class="col-12 col-sm-5" v-model="by" :options="dimensions" multiple use-chips dense outlined options-dense label="Group by" @update:model-value="refresh" />
        <q-select class="col-8 col-sm-3" v-model="period" :options="periods" emit-value map-options dense outlined options-dense label="Period" @update:model-value="refresh" />
        <div class="col-4 col-sm-4"><q-btn outline no-caps icon="download" label="CSV" :disable="!rows.length" @click="csv" /></div>
      </div>
      <page-state :page="page" />
      <template v-if="loaded">
        <div class="tiles five q-mt-md">
          <div class="tile" v-for="figure in figures" :key="figure"><div class="value">{{ shown(figure, sum(figure)) }}</div><div class="name">{{ named(figure) }}</div></div>
        </div>
        <div v-if="rows.length" class="charts" :key="$q.dark.isActive">
          <chart :title="'Tokens ' + per" :option="overTime(['prompt_tokens', 'completion_tokens'])" :label="'Bar chart of tokens ' + per" />
          <chart :title="'Cost ' + per" :option="overTime(['cost'])" :label="'Bar chart of cost ' + per" />
          <chart :title="'Tokens by ' + by.join(', ')" :tall="height" :option="grouped(['prompt_tokens', 'completion_tokens'])" label="Bar chart of prompt and completion tokens per group" />
          <chart :title="'Cost by ' + by.join(', ')" :tall="height" :option="grouped(['cost'])" label="Bar chart of cost per group" />
        </div>
        <data-table class="q-mt-md" label="Usage" :columns="columns" :rows="rows.map((row, index) => ({ ...row, id: index }))">
          <template v-for="name in by" :key="name" #[name]="{ row }">{{ row[name] || '–' }}</template>
          <template v-for="figure in figures" :key="figure" #[figure]="{ row }">{{ shown(figure, Number(row[figure])) }}</template>
          <template #empty>No usage in this period. Send a request from the <a href="#playground">playground</a>, or choose a longer period.</template>
        </data-table>
      </template>
    </q-page>`,
  data: () => ({ by: session.admin ? ["tenant", "model"] : ["model"], period: 86400, periods: PERIODS, rows: [], times: [], figures: FIGURES, dimensions: [...(session.admin ? ["tenant"] : []), "user", "key", "model", "adapter", "feature", "day"] }),
  computed: {
    columns() {
      return [...this.by.map((name, index) => ({ name, label: name, main: index === 0 })), ...FIGURES.map((name) => ({ name, label: named(name), number: true }))];
    },
    unit() {
      return this.period !== null && this.period <= 86400 ? "hour" : "day";
    },
    per() {
      return `per ${this.unit}`;
    },
    height() {
      return Math.max(190, 40 + 26 * Math.min(this.rows.length, MOST_BARS));
    },
  },
  methods: {
    named,
    shown: (figure, value) => (figure === "cost" ? money(value) : number(value)),
    sum(figure) {
      return this.rows.reduce((sum, row) => sum + Number(row[figure]), 0);
    },
    async read() {
      if (!this.by.length) this.by = ["model"];
      const since = this.period === null ? "" : `&since=${encodeURIComponent(new Date(Date.now() - this.period * 1000).toISOString())}`;
      const [rows, times] = await Promise.all([get(`/v1/usage?by=${this.by.join(",")}${since}`), get(`/v1/usage?by=${this.unit}${since}`)]);
      this.rows = rows.data;
      this.times = times.data.sort((a, b) => (a[this.unit] < b[this.unit] ? -1 : 1));
    },
    // The ledger groups by hours and days of UTC; they are shown in local time.
    local(time) {
      const at = new Date(this.unit === "hour" ? `${time.replace(" ", "T")}Z` : `${time}T00:00Z`);
      return this.unit === "hour" ? at.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" }) : time.slice(5);
    },
    overTime(figures) {
      return stacks(this.times.map((row) => this.local(row[this.unit])), figures.map((figure) => ({ name: named(figure), data: this.times.map((row) => Number(row[figure])) })), (value) => this.shown(figures[0], value));
    },
    grouped(figures) {
      const rows = this.rows.slice(0, MOST_BARS);
      return bars(rows.map((row) => this.by.map((name) => row[name] || "–").join(" · ")), figures.map((figure) => ({ name: named(figure), data: rows.map((row) => Number(row[figure])) })), (value) => this.shown(figures[0], value));
    },
    csv() {
      const head = [...this.by, ...FIGURES];
      // A spreadsheet would evaluate a cell that begins like a formula.
      const cell = (value) => `"${String(value ?? "").replace(/^[=+\-@\t]/, "'$&").replaceAll('"', '""')}"`;
      save("usage.csv", [head, ...this.rows.map((row) => head.map((name) => row[name]))].map((line) => line.map(cell).join(",")).join("\r\n"), "text/csv");
    },
  },
};
