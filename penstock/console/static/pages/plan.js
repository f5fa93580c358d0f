// Plan: headroom of the running server, when it is full, what the next replica costs, and a calculator for other loads.

import { get } from "../api.js";
import Chart, { FRAME } from "../chart.js";
import { money, number, percent, span } from "../format.js";
import Calculator from "../calculator.js";
import { refreshed } from "../widgets.js";

const RESOURCES = { slots: "slots", kv_cache: "KV cache", compute: "compute" };
const SOURCES = {
  measured: "measured: the replicas have been full",
  fitted: "fitted to minutes with different loads",
  extrapolated: "extrapolated: the load varied too little to show how a fuller batch slows down, so the range is wide",
};

const range = (estimate) => (estimate == null ? "–" : `${number(estimate.likely)} (${number(estimate.low)} to ${number(estimate.high)})`);

export default {
  name: "Plan",
  components: { Chart, Calculator },
  mixins: [refreshed(5)],
  template: `
    <q-page class="page">
      <div class="row items-center q-gutter-sm"><h1 class="col">Plan</h1>
        <q-select v-if="plans.length > 1" v-model="chosen" :options="plans.map((one) => one.id)" dense outlined options-dense label="Model" style="min-width: 180px" /></div>
      <page-state :page="page" />
      <p v-if="loaded && !plan" class="muted">This server runs no model of its own.</p>
      <template v-if="plan">
        <div class="tiles">
          <div class="tile" v-for="card in cards" :key="card.name" :data-test="card.test"><div class="name">{{ card.name }}</div><div class="value wrapped">{{ card.value }}</div><div class="note">{{ card.note }}</div></div>
        </div>
        <q-banner v-if="plan.next_replica.spare_replicas" dense rounded class="q-mt-sm" style="background: var(--soft)" role="status">{{ spare }}</q-banner>
        <div class="charts" :key="$q.dark.isActive">
          <chart title="Requests per second against capacity" :option="load" label="Chart of arriving requests, refused requests and capacity over the recorded history" />
          <chart title="Slots and KV cache in use" :option="use" label="Chart of the shares of slots and KV cache in use over the recorded history" />
        </div>
        <h2>What the figures rest on</h2>
        <div class="wide-table"><table><tbody>
          <tr v-for="row in facts" :key="row[0]"><th scope="row">{{ row[0] }}</th><td style="white-space: normal">{{ row[1] }}</td></tr>
        </tbody></table></div>
      </template>
      <calculator v-if="loaded" :model="plan?.id" :mix="plan?.mix" :devices="devices" />
    </q-page>`,
  data: () => ({ plans: [], devices: [], chosen: null }),
  computed: {
    plan() {
      return this.plans.find((one) => one.id === this.chosen) || this.plans[0] || null;
    },
    cards() {
      const { headroom, next_replica: next, cost } = this.plan;
      const free = headroom?.free_requests;
      return [
        {
          test: "headroom",
          name: "Headroom",
          value: free ? `${number(free.likely)} requests/s` : "–",
          note: headroom ? `${percent(headroom.utilisation)} of the capacity is in use; ${RESOURCES[headroom.first_full]} will be full first` : "Unknown until requests have been answered.",
        },
        { test: "full", name: "Full", ...this.full(this.plan.full) },
        {
          test: "next",
          name: "Next replica",
          value: next.per_hour == null ? "no price" : `${money(next.per_hour)} per hour`,
          note: this.adds(next),
        },
        {
          test: "cost",
          name: "Cost of a million tokens",
          value: cost.per_million_tokens == null ? "–" : money(cost.per_million_tokens),
          note: this.costs(cost),
        },
      ];
    },
    spare() {
      const { next_replica: next, replicas } = this.plan;
      const saved = next.per_hour == null ? "" : ` and save ${money(next.per_hour * next.spare_replicas)} per hour`;
      return `${replicas - next.spare_replicas} of ${replicas} replicas would carry the present load at no more than 70%${saved}.`;
    },
    load() {
      const points = this.plan.history;
      const of = (value) => points.map((point) => [1000 * (point.at + point.seconds / 2), value(point)]);
      return this.draw([
        { name: "arriving", data: of((point) => point.requests), areaStyle: { opacity: 0.12 } },
        { name: "refused", data: of((point) => point.refused) },
        { name: "capacity", data: of((point) => point.capacity_requests), lineStyle: { type: "dashed" } },
      ]);
    },
    use() {
      const { history, slots } = this.plan;
      const of = (value) => history.map((point) => [1000 * (point.at + point.seconds / 2), value(point)]);
      const busy = (point) => (slots && point.replicas ? (100 * point.running) / (slots * point.replicas) : null);
      return this.draw(
        [
          { name: "slots", data: of(busy) },
          { name: "KV cache", data: of((point) => 100 * point.kv_use) },
        ],
        "%",
      );
    },
    facts() {
      const { headroom, mix, full, autoscaler, device, slots, kv_tokens: kv, replicas, price_source: source } = this.plan;
      const rows = [["Replicas", `${replicas}${device ? ` on ${device}` : ""}${slots ? `, ${number(slots)} slots each` : ""}${kv ? `, ${number(kv)} KV tokens each` : ""}`]];
      if (headroom) {
        rows.push(["Capacity, requests/s", range(headroom.capacity_requests)]);
        rows.push(["Capacity, output tokens/s", `${range(headroom.capacity_output_tokens)}; now ${number(headroom.output_tokens)}`]);
        rows.push(["Where it is from", SOURCES[headroom.source]]);
        rows.push(["Time per output token", `${headroom.token_time == null ? "–" : `${number(1000 * headroom.token_time)} ms now, `}${number(1000 * headroom.token_time_full)} ms when full, prefill included`]);
      }
      if (mix) rows.push(["A request", `${number(mix.prompt_tokens)} prompt and ${number(mix.output_tokens)} output tokens (mean)`]);
      if (full.growth_per_hour)
        rows.push(["Growth per hour", `${range(full.growth_per_hour)} requests/s, over ${span(full.observed_s)}${full.seasonal ? ", with the shape of a day" : ""}`]);
      if (source) rows.push(["Price", source === "configuration" ? "cost_per_hour of the model's configuration" : source]);
      const wish = autoscaler.replicas == null ? "" : ` ${autoscaler.replicas} ${autoscaler.replicas === 1 ? "replica" : "replicas"} (${autoscaler.min} to ${autoscaler.max})`;
      rows.push([autoscaler.enabled ? "Automatic scaling wants" : "Automatic scaling (off) would want", `${wish}${wish ? ": " : ""}${autoscaler.detail}`.trim()]);
      return rows;
    },
  },
  methods: {
    full(found) {
      const growth = found.growth_per_hour ? `${number(found.growth_per_hour.likely)} requests/s more each hour` : "";
      switch (found.outlook) {
        case "full":
          return { value: "now", note: "More requests arrive than the replicas can answer." };
        case "filling": {
          const sooner = found.earliest_s == null ? "" : `${span(found.earliest_s)} at the earliest, `;
          const later = found.latest_s == null ? `perhaps not within ${span(found.horizon_s)}` : `${span(found.latest_s)} at the latest`;
          return { value: `in ${span(found.in_s)}`, note: `${sooner}${later}${found.seasonal ? "" : `; ${growth}`}` };
        }
        case "not_within_horizon":
          return { value: `not within ${span(found.horizon_s)}`, note: `${found.earliest_s == null ? "" : `${span(found.earliest_s)} at the earliest; `}${growth}; observed for ${span(found.observed_s)}` };
        case "not_growing":
          return { value: "not growing", note: `Arrivals show no growth over ${span(found.observed_s)}.` };
        default:
          return { value: "–", note: "Ten minutes of measurements are needed." };
      }
    },
    adds(next) {
      if (next.adds_requests == null) return next.per_hour == null ? "Set cost_per_hour of the model for costs." : "What it adds is known once requests have been answered.";
      if (next.shares_machine) return "On this machine it shares the cores of the others: at best it adds what they leave idle.";
      const then = next.utilisation == null ? "" : `; then ${percent(next.utilisation)} used`;
      return `adds ${number(next.adds_requests.likely)} requests/s${then}`;
    },
    costs(cost) {
      if (cost.per_hour == null) return "No price is known for this device; set cost_per_hour of the model.";
      if (cost.per_million_tokens == null) return `${money(cost.per_hour)} per hour; no tokens in the last two minutes`;
      return `${money(cost.per_hour)} per hour for all replicas${cost.per_million_tokens_full == null ? "" : `; ${money(cost.per_million_tokens_full)} when full`}`;
    },
    draw(series, unit = "") {
      return {
        ...FRAME,
        tooltip: { trigger: "axis", valueFormatter: (v) => (v == null ? "–" : `${Number(v.toPrecision(3))}${unit}`) },
        xAxis: { type: "time", axisLabel: { fontSize: 10, hideOverlap: true } },
        yAxis: { type: "value", min: 0, max: unit === "%" ? 100 : undefined, axisLabel: { fontSize: 10, formatter: (v) => `${v}${unit}` }, splitNumber: 3, interval: unit === "%" ? 25 : undefined },
        series: series.map((one) => ({ type: "line", showSymbol: one.data.length < 3, connectNulls: false, ...one })),
      };
    },
    async read() {
      const found = await get("/v1/admin/plan");
      this.plans = found.data;
      this.devices = found.devices;
    },
  },
};
