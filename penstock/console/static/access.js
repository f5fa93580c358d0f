// What a tenant or a key may use: the kinds of things that have a list, and the form that changes the lists.

export const KINDS = {
  models: { label: "Models", hint: "models, encoders and routes; adapters and remotes too, where they have no list" },
  adapters: { label: "Adapters", hint: "the model under an adapter must be allowed too" },
  remotes: { label: "Remotes", hint: "models of other servers" },
  collections: { label: "Collections", hint: "of the tenant's own" },
  tools: { label: "Tools", hint: "servers, or SERVER.FUNCTION" },
};

// The model has a list of names by kind; null: no list, so that everything is allowed.
export const AllowForm = {
  props: { modelValue: Object },
  emits: ["update:modelValue"],
  template: `
    <div v-for="(kind, name) in kinds" :key="name" class="row items-center q-col-gutter-sm q-mb-xs">
      <q-checkbox class="col-4" dense :label="'Only some ' + kind.label.toLowerCase()" :model-value="modelValue[name] != null" @update:model-value="(on) => set(name, on ? [] : null)" />
      <q-input class="col-8" dense outlined :label="kind.label" :hint="kind.hint" :disable="modelValue[name] == null" :placeholder="modelValue[name] == null ? 'everything' : 'nothing'" stack-label :model-value="(modelValue[name] || []).join(', ')" @change="(text) => set(name, parsed(text))" />
    </div>`,
  data: () => ({ kinds: KINDS }),
  methods: {
    parsed: (text) => text.split(",").map((name) => name.trim()).filter(Boolean),
    set(name, names) {
      this.$emit("update:modelValue", { ...this.modelValue, [name]: names });
    },
  },
};

// In words, for a table; empty: everything is allowed.
export const listed = (allow) => Object.entries(allow || {}).filter(([, names]) => names != null).map(([kind, names]) => `${KINDS[kind].label.toLowerCase()}: ${names.join(", ") || "nothing"}`).join("; ");
