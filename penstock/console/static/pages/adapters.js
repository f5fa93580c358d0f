// LoRA adapters: their state, and loading, pinning and unloading them while the server runs.

import { get, patch, post, remove } from "../api.js";

export default {
  name: "Adapters",
  template: `
    <q-page class="page">
      <h1>Adapters</h1>
      <q-form class="row q-col-gutter-sm items-start" @submit="load">
        <q-select class="col-12 col-sm-3" v-model="fresh.model" :options="models" label="Base model" outlined dense options-dense />
        <q-input class="col-12 col-sm-3" v-model="fresh.name" label="Name" outlined dense />
        <q-input class="col-12 col-sm-4" v-model="fresh.source" label="Source" hint="a folder, hf:org/name or s3://…" outlined dense />
        <div class="col-12 col-sm-2"><q-btn type="submit" color="primary" no-caps label="Load" :loading="busy" :disable="!fresh.name || !fresh.source" /></div>
      </q-form>
      <div class="wide-table q-mt-md"><table>
        <thead><tr><th>Adapter</th><th>Model</th><th>State</th><th class="number">Rank</th><th>Pinned</th><th>Source</th><th></th></tr></thead>
        <tbody><tr v-for="one in adapters" :key="one.id || one.name"><td>{{ one.id || one.name }}</td><td>{{ one.model || one.base || '–' }}</td><td><q-badge :color="one.state === 'failed' ? 'negative' : 'positive'" outline :label="one.state" /></td><td class="number">{{ one.rank ?? '–' }}</td>
          <td><q-toggle dense :model-value="!!one.pinned" :aria-label="'Pin ' + (one.id || one.name)" @update:model-value="(pinned) => act(patch(path(one), { pinned }))" /></td><td>{{ one.source || '–' }}</td>
          <td><q-btn flat dense no-caps size="sm" color="negative" label="Unload" @click="act(remove(path(one)))" /></td></tr>
          <tr v-if="!adapters.length"><td colspan="7" class="muted">No adapters loaded. A model needs <code>adapter_slots</code> in its configuration to accept adapters.</td></tr></tbody>
      </table></div>
    </q-page>`,
  data: () => ({ adapters: [], models: [], fresh: { model: null, name: "", source: "" }, busy: false }),
  mounted() {
    return this.read();
  },
  methods: {
    patch,
    remove,
    path: (one) => `/v1/admin/adapters/${one.id || one.name}`,
    async read() {
      try {
        const [adapters, models] = await Promise.all([get("/v1/admin/adapters"), get("/v1/models")]);
        this.adapters = adapters.data;
        this.models = models.data.filter((model) => model.capabilities.completions && !model.parent).map((model) => model.id);
        this.fresh.model ??= this.models[0] ?? null;
      } catch (error) {
        this.$fail(error);
      }
    },
    async act(work) {
      this.busy = true;
      try {
        await work;
        this.$done("Done");
      } catch (error) {
        this.$fail(error);
      } finally {
        this.busy = false;
        await this.read();
      }
    },
    load() {
      return this.act(post("/v1/admin/adapters", { ...this.fresh }));
    },
  },
};
