// The limits that a tenant or a key can have: how they are called and shown, and the form that changes them.

import { money, span } from "./format.js";

const CLASSES = ["premium", "standard", "batch"].map((label, value) => ({ label, value }));
const count = (value) => value.toLocaleString("en");
export const LIMITS = {
  requests_per_minute: { label: "Requests a minute", show: count },
  tokens_per_minute: { label: "Tokens a minute", show: count },
  concurrent_requests: { label: "Requests at one time", show: count },
  daily_budget: { label: "Budget a day", show: money },
  monthly_budget: { label: "Budget a month", show: money },
  context_tokens: { label: "Tokens of context in a request", show: count },
  output_tokens: { label: "Tokens of an answer", show: count },
  time_limit_s: { label: "Seconds for a request", show: span },
  choices: { label: "Choices of a request", show: count },
  tools: { label: "Tools of a request", show: count },
  tool_rounds: { label: "Rounds of tool calls", show: count },
  priority: { label: "Priority", show: (rank) => CLASSES[rank].label, options: CLASSES },
  watermark: { label: "Watermark", show: (when) => when, options: ["never", "asked", "default", "always"].map((value) => ({ label: value, value })) },
};

// The model is what is set now (null: no limit of its own); `inherited`: what applies where nothing is set.
export const LimitForm = {
  props: { modelValue: Object, inherited: { type: Object, default: () => ({}) } },
  emits: ["update:modelValue"],
  template: `
    <div class="row q-col-gutter-sm">
      <template v-for="(limit, name) in kinds" :key="name"><q-select v-if="limit.options" class="col-6" outlined dense clearable emit-value map-options stack-label :label="limit.label" :options="limit.options" :model-value="modelValue[name] ?? null" @update:model-value="(value) => choose(name, value)" />
      <q-input v-else class="col-6" type="number" min="0" step="any" outlined dense clearable :prefix="name.endsWith('budget') ? '$' : ''" stack-label :label="limit.label" :placeholder="inherited[name] == null ? 'no limit' : String(inherited[name])" :model-value="modelValue[name] ?? null" @update:model-value="(value) => set(name, value)" /></template>
    </div>`,
  data: () => ({ kinds: LIMITS }),
  methods: {
    choose(name, value) {
      this.$emit("update:modelValue", { ...this.modelValue, [name]: value ?? null });
    },
    set(name, value) {
      this.$emit("update:modelValue", { ...this.modelValue, [name]: value === null || value === "" ? null : Number(value) });
    },
  },
};

export const given = (limits) => Object.fromEntries(Object.entries(limits).filter(([, value]) => value != null));
