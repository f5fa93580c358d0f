// The what-if form of the page Plan: another load, other hardware, and what it would take.

import { post } from "./api.js";
import { duration, money, number, percent } from "./format.js";

const SHOWN = 8;
const CURVES = [
  { label: "the evening", value: "consumer" },
  { label: "office hours", value: "office" },
  { label: "every hour alike", value: "flat" },
];

export default {
  name: "Calculator",
  props: { model: String, mix: Object, devices: Array },
  template: `
    <h2>What if</h2>
    <p class="muted">GPUs, latency and money for a load that you imagine: the same arithmetic as <code>penstock plan</code>.</p>
    <q-form class="row q-col-gutter-sm items-start" @submit="calculate">
      <q-input class="col-12 col-sm-3" v-model="form.model" label="Model" :placeholder="model" stack-label outlined dense :hint="model ? 'served here, or for example llama-3-70b' : 'for example llama-3-70b'" />
      <q-select class="col-12 col-sm-3" v-model="form.device" :options="choices" emit-value map-options label="Hardware" outlined dense options-dense />
      <q-input class="col-6 col-sm-2" v-model.number="form.users" type="number" min="1" step="any" label="Users a day" outlined dense />
      <q-input class="col-6 col-sm-2" v-model.number="form.requests" type="number" min="0" step="any" label="Requests per user" outlined dense />
      <q-select class="col-12 col-sm-2" v-model="form.curve" :options="curves" emit-value map-options label="Busy in" outlined dense options-dense />
      <q-input class="col-6 col-sm-2" v-model.number="form.input" type="number" min="1" step="any" label="Prompt tokens" outlined dense />
      <q-input class="col-6 col-sm-2" v-model.number="form.output" type="number" min="1" step="any" label="Output tokens" outlined dense />
      <q-input class="col-6 col-sm-2" v-model.number="form.peak" type="number" min="1" step="any" label="Peak factor" outlined dense />
      <q-input class="col-6 col-sm-2" v-model.number="form.ttft" type="number" min="0" step="any" label="TTFT p95, ms" outlined dense hint="0: any" />
      <q-input class="col-6 col-sm-2" v-model.number="form.itl" type="number" min="0" step="any" label="Per token, ms" outlined dense hint="0: any" />
      <div class="col-6 col-sm-2"><q-btn type="submit" color="primary" no-caps label="Calculate" :loading="busy" /></div>
    </q-form>
    <q-banner v-if="problem" dense rounded class="q-mt-sm bg-negative text-white" role="alert">{{ problem }}</q-banner>
    <template v-if="plan">
      <q-banner rounded class="q-mt-sm" style="background: var(--soft)" role="status" data-test="best">
        <template v-if="plan.best">The cheapest: <b>{{ plan.best.replicas }} {{ plan.best.replicas === 1 ? 'replica' : 'replicas' }}, {{ plan.best.deployment }}</b> ({{ number(plan.best.devices) }} {{ plan.best.devices === 1 ? 'device' : 'devices' }}), {{ monthly(plan.best.monthly) }} per month.
          The peak has {{ number(plan.workload.peak.requests_per_s) }} requests and {{ number(plan.workload.peak.output_tokens_per_s) }} output tokens per second.</template>
        <template v-else>{{ plan.why_none }}.</template>
      </q-banner>
      <div v-if="shown.length" class="wide-table q-mt-sm"><table>
        <thead><tr><th>Deployment</th><th class="number">Replicas</th><th class="number">Devices</th><th class="number">TTFT p95</th><th class="number">Per token</th><th class="number">Used, day's mean</th><th class="number">Per month</th><th class="number">Autoscaled</th></tr></thead>
        <tbody><tr v-for="one in shown" :key="one.deployment"><td>{{ one.deployment }}</td><td class="number">{{ one.replicas }}</td><td class="number">{{ one.devices }}</td><td class="number">{{ duration(one.at_peak.ttft_s) }}</td><td class="number">{{ duration(one.at_peak.itl_s) }}</td><td class="number">{{ percent(one.utilisation) }}</td><td class="number">{{ monthly(one.static.total) }}</td><td class="number">{{ monthly(one.autoscaled.total) }}</td></tr></tbody>
      </table></div>
      <p v-if="plan.candidates.length > shown.length" class="muted">The {{ shown.length }} cheapest of {{ plan.candidates.length }}; <code>penstock plan</code> shows all, with the assumptions and a comparison with APIs.</p>
    </template>`,
  data: () => ({ form: { model: "", device: "", users: 1000, requests: 10, input: null, output: null, peak: 3, curve: "consumer", ttft: 500, itl: 50 }, plan: null, problem: "", busy: false, curves: CURVES }),
  computed: {
    choices() {
      const price = (one) => (one.price_per_hour == null ? "" : `, ${money(one.price_per_hour)}/h`);
      return [{ label: "every GPU of the catalogue", value: "" }, ...this.devices.map((one) => ({ label: `${one.title}${price(one)}`, value: one.id }))];
    },
    shown() {
      return this.plan ? this.plan.candidates.slice(0, SHOWN) : [];
    },
  },
  created() {
    // The present mix of requests is the best first guess.
    this.form.input = Math.max(Math.round(this.mix?.prompt_tokens ?? 500), 1);
    this.form.output = Math.max(Math.round(this.mix?.output_tokens ?? 250), 1);
  },
  methods: {
    duration,
    number,
    percent,
    monthly: (dollars) => `$${number(Math.round(dollars))}`,
    async calculate() {
      const { model, device, users, requests, input, output, peak, curve, ttft, itl } = this.form;
      this.busy = true;
      try {
        this.plan = await post("/v1/admin/plan", {
          model: model || this.model || "",
          devices: device ? [device] : [],
          users,
          requests_per_user: requests,
          input_tokens: input,
          output_tokens: output,
          peak_factor: peak,
          curve,
          ttft_ms: ttft || null,
          itl_ms: itl || null,
        });
        this.problem = "";
      } catch (error) {
        this.plan = null;
        this.problem = error.message;
      } finally {
        this.busy = false;
      }
    },
  },
};
