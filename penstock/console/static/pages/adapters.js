// LoRA adapters: their state, and loading, pinning and unloading them while the server runs.

import { ApiError, get, patch, post, remove } from "../api.js";
import { refreshed } from "../widgets.js";

const COLUMNS = [
  { name: "id", label: "Adapter", main: true },
  { name: "model", label: "Model" },
  { name: "state", label: "State" },
  { name: "kind", label: "Kind" },
  { name: "rank", label: "Rank", number: true },
  { name: "pinned", label: "Pinned" },
  { name: "source", label: "Source", text: true },
  { name: "actions", label: "" },
];

export default {
  name: "Adapters",
  mixins: [refreshed(5)],
  template: `
    <q-page class="page">
      <div class="head"><h1>Adapters</h1></div>
      <q-form class="row q-col-gutter-sm items-start" @submit="load">
        <q-select class="col-12 col-sm-3" v-model="fresh.model" :options="models" label="Base model" outlined dense options-dense />
        <q-input class="col-12 col-sm-3" v-model="fresh.name" label="Name" outlined dense />
        <q-input class="col-12 col-sm-4" v-model="fresh.source" label="Source" hint="a folder, hf:org/name or s3://…" outlined dense />
        <div class="col-12 col-sm-2"><q-btn type="submit" color="primary" no-caps label="Load" :loading="busy" :disable="!fresh.name || !fresh.source" /></div>
      </q-form>
      <q-banner v-if="wrong" dense rounded class="problem q-mt-sm" role="alert">{{ wrong }}</q-banner>
      <page-state :page="page" />
      <data-table v-if="loaded" class="q-mt-md" label="Adapters" :columns="columns" :rows="adapters">
        <template #id="{ row }"><copy-id :value="row.id" what="adapter name" /></template>
        <template #state="{ row }"><q-badge :color="row.state === 'failed' ? 'negative' : 'positive'" outline :label="row.state" /><div v-if="row.problem" class="text-negative" style="font-size: 0.78rem">{{ row.problem }}</div></template>
        <template #pinned="{ row }"><q-toggle dense :model-value="!!row.pinned" :aria-label="'Pin ' + row.id" @update:model-value="(pinned) => act(() => patch(path(row), { pinned }))" /></template>
        <template #actions="{ row }"><q-btn flat dense no-caps size="sm" color="negative" label="Unload" @click="unload(row)" /></template>
        <template #empty>No adapters loaded. A model needs <code>adapter_slots</code> in its configuration to accept adapters.</template>
      </data-table>
    </q-page>`,
  data: () => ({ adapters: [], models: [], fresh: { model: null, name: "", source: "" }, busy: false, wrong: "", columns: COLUMNS }),
  methods: {
    patch,
    path: (one) => `/v1/admin/adapters/${one.id}`,
    async read() {
      const [adapters, models] = await Promise.all([get("/v1/admin/adapters"), get("/v1/admin/models")]);
      this.adapters = adapters.data;
      this.models = models.data.filter((model) => model.capabilities?.completions && !model.parent).map((model) => model.id);
      this.fresh.model ??= this.models[0] ?? null;
    },
    async load() {
      this.busy = true;
      this.wrong = "";
      try {
        await post("/v1/admin/adapters", { ...this.fresh });
        this.$done(`${this.fresh.name} is loaded`);
        this.fresh = { ...this.fresh, name: "", source: "" };
      } catch (error) {
        this.wrong = error instanceof ApiError ? error.message : "";
      } finally {
        this.busy = false;
        await this.refresh();
      }
    },
    async unload(row) {
      if (await this.$confirm(`Unload ${row.id}?`, "Requests for it are refused from now on.", "Unload")) await this.act(() => remove(this.path(row)), "Unloaded");
    },
  },
};
