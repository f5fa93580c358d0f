// Settings of a conversation. An empty field is not sent, so the model's own default applies; it is shown as placeholder.

const NUMBERS = [
  { name: "temperature", label: "Temperature", step: 0.1, min: 0, max: 2 },
  { name: "top_p", label: "Top p", step: 0.05, min: 0, max: 1 },
  { name: "top_k", label: "Top k", step: 1, min: 0 },
  { name: "min_p", label: "Min p", step: 0.05, min: 0, max: 1 },
  { name: "max_tokens", label: "Max tokens", step: 1, min: 1 },
  { name: "frequency_penalty", label: "Frequency penalty", step: 0.1, min: -2, max: 2 },
  { name: "presence_penalty", label: "Presence penalty", step: 0.1, min: -2, max: 2 },
  { name: "seed", label: "Seed", step: 1 },
];

export const EMPTY = { system: "", schema: "", tools: "", collection: null, ...Object.fromEntries(NUMBERS.map(({ name }) => [name, null])) };
export const changed = (settings) => Object.keys(EMPTY).filter((name) => (settings[name] ?? "") !== "" && settings[name] !== EMPTY[name]);

export default {
  name: "ChatSettings",
  props: { settings: { type: Object, required: true }, defaults: { type: Object, default: () => ({}) }, collections: { type: Array, required: true }, files: { type: Number, default: 0 } },
  emits: ["close", "reset"],
  template: `
    <section class="settings" aria-label="Settings">
      <header class="row items-center"><h2 class="q-ma-none">Settings</h2><q-space /><q-btn flat dense no-caps size="sm" label="Reset" :disable="!count" @click="$emit('reset')" /><q-btn flat round dense icon="close" aria-label="Close settings" @click="$emit('close')" /></header>
      <div class="fields">
        <label class="field">System prompt<textarea v-model="settings.system" rows="4" placeholder="None"></textarea></label>
        <div class="pair"><label v-for="one in numbers" :key="one.name" class="field">{{ one.label }}<input type="number" inputmode="decimal" :value="settings[one.name]" @input="set(one.name, $event.target.value)" :step="one.step" :min="one.min" :max="one.max" :placeholder="placeholder(one.name)" /></label></div>
        <label class="field">Answer from a collection<select :value="settings.collection || ''" @change="settings.collection = $event.target.value || null" :disabled="files > 0 || !collections.length"><option value="">None</option><option v-for="name in collections" :key="name">{{ name }}</option></select>
          <small v-if="files" class="muted">This chat answers from its attached files.</small><small v-else-if="!collections.length" class="muted">No collections yet: see the page Collections.</small></label>
        <label class="field">JSON schema of the answer<textarea v-model="settings.schema" rows="4" class="mono" spellcheck="false" placeholder='{"type": "object", "properties": {…}}'></textarea></label>
        <label class="field">Tools (JSON list)<textarea v-model="settings.tools" rows="4" class="mono" spellcheck="false" placeholder='[{"type": "function", "function": {"name": …}}]'></textarea></label>
      </div>
    </section>`,
  data: () => ({ numbers: NUMBERS }),
  computed: {
    count() {
      return changed(this.settings).length;
    },
  },
  methods: {
    set(name, value) {
      this.settings[name] = value === "" ? null : Number(value);
    },
    placeholder(name) {
      const value = this.defaults[name];
      return value == null ? "default" : `default ${value}`;
    },
  },
};
