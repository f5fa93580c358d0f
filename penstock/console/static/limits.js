// The limits that a tenant or a key can have: how they are called and shown, and the form that changes them.

import { money } from "./format.js";

const count = (value) => value.toLocaleString("en");
export const LIMITS = {
  requests_per_minute: { label: "Requests a minute", show: count },
  tokens_per_minute: { label: "Tokens a minute", show: count },
  concurrent_requests: { label: "Requests at one time", show: count },
  daily_budget: { label: "Budget a day", show: money },
  monthly_budget: { label: "Budget a month", show: money },
};

// The model is what is set now (null: no limit of its own); `inherited`: what applies where nothing is set.
export const LimitForm = {
  props: { modelValue: Object, inherited: { type: Object, default: () => ({}) } },
  emits: ["update:modelValue"],
  template: `
    <div class="row q-col-gutter-sm">
      <q-input v-for="(limit, name) in kinds" :key="name" class="col-6" type="number" min="0" step="any" outlined dense clearable :prefix="name.endsWith('budget') ? '$' : ''" stack-label :label="limit.label" :placeholder="inherited[name] == null ? 'no limit' : String(inherited[name])" :model-value="modelValue[name] ?? null" @update:model-value="(value) => set(name, value)" />
    </div>`,
  data: () => ({ kinds: LIMITS }),
  methods: {
    set(name, value) {
      this.$emit("update:modelValue", { ...this.modelValue, [name]: value === null || value === "" ? null : Number(value) });
    },
  },
};

export const given = (limits) => Object.fromEntries(Object.entries(limits).filter(([, value]) => value != null));
