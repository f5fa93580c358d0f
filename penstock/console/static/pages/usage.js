// Usage and cost from the ledger, by the chosen grouping and period.

import { get } from "../api.js";
import Chart from "../chart.js";
import { money, number, save } from "../format.js";

const PERIODS = [
  { label: "Last hour", value: 3600 },
  { label: "Last 24 hours", value: 86400 },
  { label: "Last 7 days", value: 604800 },
  { label: "Last 30 days", value: 2592000 },
  { label: "All time", value: null },
];
const FIGURES = ["requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost"];

export default {
  name: "Usage",
  components: { Chart },
  template: `
    <q-page class="page">
      <h1>Usage and cost</h1>
      <div class="row q-col-gutter-sm items-center">
        <q-select class="col-12 col-sm-5" v-model="by" :options="['tenant', 'user', 'model', 'adapter', 'feature']" multiple use-chips dense outlined options-dense label="Group by" @update:model-value="read" />
        <q-select class="col-8 col-sm-3" v-model="period" :options="periods" emit-value map-options dense outlined options-dense label="Period" @update:model-value="read" />
        <div class="col-4 col-sm-4"><q-btn outline no-caps icon="download" label="CSV" :disable="!rows.length" @click="csv" /></div>
      </div>
      <div class="tiles q-mt-md">
        <div class="tile" v-for="figure in figures" :key="figure"><div class="value">{{ shown(figure, sum(figure)) }}</div><div class="name">{{ figure.replace('_', ' ') }}</div></div>
      </div>
      <div v-if="rows.length" class="charts" :key="$q.dark.isActive">
        <chart title="Tokens" :option="bars(['prompt_tokens', 'completion_tokens'])" label="Bar chart of prompt and completion tokens per group" />
        <chart title="Cost" :option="bars(['cost'])" label="Bar chart of cost per group" />
      </div>
      <div class="wide-table q-mt-md"><table>
        <thead><tr><th v-for="name in by" :key="name">{{ name }}</th><th v-for="figure in figures" :key="figure" class="number">{{ figure.replace('_', ' ') }}</th></tr></thead>
        <tbody><tr v-for="(row, index) in rows" :key="index"><td v-for="name in by" :key="name">{{ row[name] || '–' }}</td><td v-for="figure in figures" :key="figure" class="number">{{ shown(figure, Number(row[figure])) }}</td></tr>
          <tr v-if="!rows.length"><td :colspan="by.length + figures.length" class="muted">No usage in this period.</td></tr></tbody>
      </table></div>
    </q-page>`,
  data: () => ({ by: ["tenant", "model"], period: 86400, periods: PERIODS, rows: [], figures: FIGURES }),
  mounted() {
    return this.read();
  },
  methods: {
    shown: (figure, value) => (figure === "cost" ? money(value) : number(value)),
    sum(figure) {
      return this.rows.reduce((sum, row) => sum + Number(row[figure]), 0);
    },
    async read() {
      if (!this.by.length) this.by = ["model"];
      const since = this.period === null ? "" : `&since=${encodeURIComponent(new Date(Date.now() - this.period * 1000).toISOString())}`;
      try {
        this.rows = (await get(`/v1/usage?by=${this.by.join(",")}${since}`)).data;
      } catch (error) {
        this.$fail(error);
      }
    },
    bars(figures) {
      const names = this.rows.map((row) => this.by.map((name) => row[name] || "–").join(" · "));
      return {
        backgroundColor: "transparent",
        grid: { left: 8, right: 16, top: 28, bottom: 4, containLabel: true },
        legend: { top: 0, right: 0, itemHeight: 8 },
        tooltip: { trigger: "axis" },
        xAxis: { type: "value" },
        yAxis: { type: "category", data: names, inverse: true },
        series: figures.map((figure) => ({ name: figure.replace("_", " "), type: "bar", stack: "all", data: this.rows.map((row) => Number(row[figure])) })),
      };
    },
    csv() {
      const head = [...this.by, ...FIGURES];
      // A spreadsheet would evaluate a cell that begins like a formula.
      const cell = (value) => `"${String(value ?? "").replace(/^[=+\-@\t]/, "'$&").replaceAll('"', '""')}"`;
      save("usage.csv", [head, ...this.rows.map((row) => head.map((name) => row[name]))].map((line) => line.map(cell).join(",")).join("\r\n"), "text/csv");
    },
  },
};
