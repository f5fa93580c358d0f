// Models: what each can do, what it holds in memory, its replicas and their breakers, automatic scaling; loading and
// unloading while the server runs. A key without the scope admin sees what it may use.

import { ApiError, get, post, remove, session } from "../api.js";
import { bytes, money, number, percent, span } from "../format.js";
import { refreshed } from "../widgets.js";

const REPLICAS = [
  { name: "replica", label: "Replica", main: true },
  { name: "state", label: "State" },
  { name: "breaker", label: "Breaker" },
  { name: "load", label: "Running / waiting", number: true },
  { name: "device", label: "Where" },
  { name: "memory", label: "Memory", text: true },
  { name: "actions", label: "" },
];
// The limits of the caller, as /v1/models has them.
const SAID = {
  tier: (name) => `tier ${name}`,
  requests_per_minute: (count) => `${number(count)} requests a minute`,
  tokens_per_minute: (count) => `${number(count)} tokens a minute`,
  concurrent_requests: (count) => `${number(count)} requests at one time`,
  context_tokens: (count) => `${number(count)} tokens of context`,
  time_limit_s: (seconds) => `${span(seconds)} for an answer`,
  output_tokens: (count) => `${number(count)} tokens of an answer`,
  choices: (count) => `${number(count)} choices`,
  tools: (count) => `${number(count)} tools`,
  tool_rounds: (count) => `${number(count)} rounds of tool calls`,
  daily_budget: (dollars) => `${money(dollars)} a day`,
  monthly_budget: (dollars) => `${money(dollars)} a month`,
};
const can = (model) => Object.entries(model.capabilities || {}).filter(([, yes]) => yes).map(([name]) => name.replace("_", " "));

export default {
  name: "Models",
  mixins: [refreshed(2)],
  template: `
    <q-page class="page">
      <div class="head"><h1>Models</h1><q-space /><q-btn v-if="admin" color="primary" no-caps icon="add" label="Load a model" @click="adding = !adding" /></div>
      <q-form v-if="adding" class="panel q-mb-md" @submit="load">
        <div class="row q-col-gutter-sm">
          <q-input class="col-12 col-sm-6" v-model="fresh.source" label="Source" hint="a folder, hf:org/name (fetched first), s3://…" outlined dense autofocus />
          <q-input class="col-6 col-sm-3" v-model="fresh.name" label="Name (optional)" outlined dense />
          <q-input class="col-6 col-sm-3" v-model.number="fresh.replicas" label="Replicas" type="number" min="1" outlined dense />
          <q-input class="col-12 col-sm-9" v-model="fresh.options" label="Options (JSON, optional)" outlined dense input-class="mono" placeholder='{"max_model_len": 4096}' hint="further keys of an entry under models in the configuration" />
          <div class="col-12 col-sm-3"><q-btn type="submit" color="primary" no-caps label="Load" :disable="!fresh.source" /></div>
        </div>
      </q-form>
      <q-banner v-for="(failure, index) in failures" :key="index" rounded class="problem q-mb-sm" role="alert">{{ failure }}<template #action><q-btn flat no-caps label="Dismiss" @click="failures.splice(index, 1)" /></template></q-banner>
      <div v-for="one in loading" :key="one.id" class="panel q-mb-sm" data-test="loading"><b>{{ one.id }}</b> <span class="muted">{{ one.phase || 'starting' }}{{ one.fraction ? ' ' + percent(one.fraction) : '' }}</span>
        <q-linear-progress class="q-mt-xs" :value="one.fraction || 0" :indeterminate="!one.fraction" :aria-label="'Loading ' + one.id" /></div>
      <page-state :page="page" />
      <div v-for="model in models" :key="model.id" class="panel q-mb-md" :data-test="'model ' + model.id">
        <div class="row items-center q-gutter-sm">
          <span class="text-subtitle1"><copy-id :value="model.id" what="model name" /></span>
          <q-badge :color="model.ready ? (model.state === 'awake' || model.state === 'on' ? 'positive' : 'warning') : 'grey'" :label="model.state" />
          <q-badge v-if="model.owned_by === 'remote'" outline color="warning" label="on another server" />
          <q-space />
          <template v-if="admin && own(model)">
            <q-btn v-if="model.state === 'awake'" outline no-caps size="sm" icon="bedtime" label="Sleep" :loading="busy === model.id" @click="order(model, 'sleep')" />
            <q-btn v-else-if="model.ready" outline no-caps size="sm" icon="wb_sunny" label="Wake" :loading="busy === model.id" @click="order(model, 'wake')" />
            <q-btn outline no-caps size="sm" icon="restart_alt" label="Restart" :loading="busy === model.id" @click="restart(model)" />
            <q-btn outline no-caps size="sm" color="negative" icon="eject" label="Unload" :loading="busy === model.id" @click="unload(model)" />
          </template>
        </div>
        <div class="facts q-mt-sm">
          <span v-if="model.context_window">context {{ number(model.context_window) }} tokens</span>
          <span v-if="model.max_output_tokens">answers up to {{ number(model.max_output_tokens) }} tokens</span>
          <span v-if="model.dimensions">{{ model.dimensions }} dimensions</span>
          <span v-if="model.aliases?.length">aliases: {{ model.aliases.join(', ') }}</span>
          <span v-if="model.parent">adapter of {{ model.parent }}</span>
          <span v-if="model.routes_to">routes to {{ model.routes_to.join(' or ') }}</span>
          <span v-if="model.pricing">{{ priced(model.pricing) }}</span>
        </div>
        <div class="facts q-mt-xs"><span v-if="can(model).length">can: {{ can(model).join(', ') }}</span>
          <span v-if="model.sampling" data-test="sampling">samples by default with {{ sampled(model.sampling) }}</span>
          <span v-if="model.limits">your limits: {{ limited(model.limits) }}</span></div>
        <template v-if="replicas[model.id]">
          <div v-if="own(model)" class="row items-center q-gutter-sm q-mt-xs">
            <span>{{ replicas[model.id].length }} {{ replicas[model.id].length === 1 ? 'replica' : 'replicas' }}</span>
            <template v-if="!autoscale[model.id]">
              <q-btn round dense outline size="xs" icon="remove" aria-label="Remove a replica" :disable="replicas[model.id].length < 2 || busy === model.id" @click="order(model, 'scale', { replicas: replicas[model.id].length - 1 })" />
              <q-btn round dense outline size="xs" icon="add" aria-label="Add a replica" :disable="busy === model.id" @click="order(model, 'scale', { replicas: replicas[model.id].length + 1 })" />
            </template>
            <template v-else><span class="muted">scaled automatically, {{ autoscale[model.id].min }} to {{ autoscale[model.id].max }}: {{ autoscale[model.id].desired }} wanted, {{ autoscale[model.id].ready }} ready, {{ autoscale[model.id].starting }} starting. {{ autoscale[model.id].detail }}</span><q-btn flat dense no-caps size="sm" color="primary" label="Change" @click="scale(autoscale[model.id])" /></template>
          </div>
          <data-table class="q-mt-xs" :label="'Replicas of ' + model.id" :columns="columns" :rows="replicas[model.id]">
            <template #state="{ row }"><q-badge :color="row.ready ? 'positive' : 'grey'" :label="row.leaving ? 'draining' : row.state" /></template>
            <template #breaker="{ row }"><q-badge :color="row.breaker === 'closed' ? 'positive' : 'negative'" outline :label="row.breaker" :title="row.breaker === 'closed' ? 'Requests pass' : 'It failed too often; requests go elsewhere until it answers again'" /></template>
            <template #load="{ row }">{{ row.running }} / {{ row.waiting }}{{ row.kv_usage == null ? '' : ', KV ' + percent(row.kv_usage) }}</template>
            <template #device="{ row }">{{ row.memory?.product || row.device || '–' }}</template>
            <template #memory="{ row }">{{ row.state === 'sleeping' && row.memory ? 'when awake: ' : '' }}{{ held(row.memory) }}</template>
            <template #actions="{ row }"><q-btn v-if="!row.remote && replicas[model.id].length > 1" flat dense no-caps size="sm" color="negative" label="Drain" @click="drain(model, row)" /></template>
          </data-table>
        </template>
      </div>
      <p v-if="loaded && !models.length && !loading.length" class="empty">No model is served yet. Load one, or start the server with <code>penstock serve MODEL</code>.</p>
      <q-dialog :model-value="!!scaling" @update:model-value="scaling = null"><q-card v-if="scaling" style="width: 380px; max-width: 94vw"><q-card-section class="text-subtitle1">Automatic scaling of {{ scaling.id }}</q-card-section>
        <q-card-section class="row q-col-gutter-sm"><q-input class="col-6" v-model.number="scaling.min" type="number" min="0" label="At least" outlined dense /><q-input class="col-6" v-model.number="scaling.max" type="number" min="1" label="At most" outlined dense /><p class="col-12 muted q-mb-none">Until the server stops; the configuration stays as it is.</p></q-card-section>
        <q-card-actions align="right"><q-btn v-close-popup flat no-caps label="Cancel" /><q-btn unelevated no-caps color="primary" label="Save" @click="saveScaling" /></q-card-actions></q-card></q-dialog>
    </q-page>`,
  data: () => ({ models: [], pending: [], started: [], replicas: {}, autoscale: {}, busy: "", adding: false, fresh: { source: "", name: "", replicas: null, options: "" }, failures: [], scaling: null, columns: REPLICAS, admin: session.admin }),
  computed: {
    // What the server says it loads, and what was asked for here and has not begun.
    loading() {
      return [...this.pending, ...this.started.filter((name) => !this.pending.some((one) => one.id === name)).map((id) => ({ id }))];
    },
  },
  methods: {
    can,
    number,
    percent,
    own: (model) => model.owned_by === "penstock" && !model.parent && !model.routes_to && Boolean(model.capabilities?.completions),
    priced: (price) => `$${price.input_per_million} input${price.output_per_million == null ? "" : `, $${price.output_per_million} output`} per million tokens`,
    sampled: (values) => Object.entries(values).map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`).join(", ") || "the engine's defaults",
    limited: (limits) => Object.entries(SAID).filter(([name]) => limits[name] != null).map(([name, say]) => say(limits[name])).join(", "),
    held: (memory) => (memory ? [memory.weights_bytes && `${bytes(memory.weights_bytes)} weights`, memory.kv_cache_bytes && `${bytes(memory.kv_cache_bytes)} KV cache`, memory.kv_cache_tokens && `room for ${number(memory.kv_cache_tokens)} tokens in ${memory.sequences} sequences`, memory.dtype && memory.dtype !== "none" && `computes in ${memory.dtype}`, memory.devices > 1 && `on each of ${memory.devices} devices`].filter(Boolean).join(", ") : "–"),
    async read() {
      const nothing = { data: [], autoscale: [] };
      const optional = (work) => work.catch((error) => {
        if (error instanceof ApiError && [401, 403, 404].includes(error.status)) return nothing;
        throw error;
      });
      const [models, running, replicas] = await Promise.all([optional(get("/v1/models")), this.admin ? optional(get("/v1/admin/models")) : nothing, this.admin ? optional(get("/v1/admin/replicas")) : nothing]);
      this.models = models.data.length ? models.data : running.data.filter((one) => one.state !== "loading");
      this.pending = running.data.filter((one) => one.state === "loading");
      this.replicas = Object.groupBy(replicas.data, (one) => one.model);
      this.autoscale = Object.fromEntries(replicas.autoscale.filter((one) => !one.pool).map((one) => [one.id, one]));
    },
    async order(model, verb, body) {
      this.busy = model.id;
      try {
        await post(`/v1/admin/models/${model.id}/${verb}`, body);
        this.$done("Done");
      } catch (error) {
        this.fail(`${model.id}: ${error.message}`);
      } finally {
        this.busy = "";
        await this.refresh();
      }
    },
    fail(message) {
      this.failures = [message, ...this.failures.filter((one) => one !== message)].slice(0, 5);
    },
    async load() {
      const { source, name, replicas, options } = this.fresh;
      let more = {};
      try {
        more = options?.trim() ? JSON.parse(options) : {};
      } catch (error) {
        return this.fail(`The options are not JSON: ${error.message}`);
      }
      const called = name || source.split(/[/:]/).filter(Boolean).pop();
      this.started = [...this.started, called];
      this.adding = false;
      // The server replies when the model is ready, which may be after a download: meanwhile the page shows its progress.
      try {
        await post("/v1/admin/models", { source, ...(name ? { name } : {}), options: replicas ? { ...more, replicas } : more });
        this.$done(`${called} is ready`);
        this.fresh = { source: "", name: "", replicas: null, options: "" };
      } catch (error) {
        this.fail(`${called} was not loaded: ${error.message}`);
        this.adding = true;
      } finally {
        this.started = this.started.filter((one) => one !== called);
        await this.refresh();
      }
    },
    async unload(model) {
      if (!(await this.$confirm(`Unload ${model.id}?`, "New requests for it are refused at once; those that run may finish. Its memory is freed.", "Unload"))) return;
      this.busy = model.id;
      try {
        await remove(`/v1/admin/models/${model.id}`);
        this.$done(`${model.id} is unloaded`);
      } catch (error) {
        this.fail(`${model.id}: ${error.message}`);
      } finally {
        this.busy = "";
        await this.refresh();
      }
    },
    async restart(model) {
      if (await this.$confirm(`Restart ${model.id}?`, "Its replicas restart one after the other; each finishes its requests first. With one replica, requests wait meanwhile.", "Restart")) await this.order(model, "restart", {});
    },
    async drain(model, row) {
      if (await this.$confirm(`Drain ${row.id}?`, "It finishes its requests, then stops.", "Drain")) await this.order(model, "drain", { replica: row.replica });
    },
    scale(one) {
      this.scaling = { id: one.id, min: one.min, max: one.max };
    },
    async saveScaling() {
      const { id, min, max } = this.scaling;
      if (await this.act(() => post(`/v1/admin/models/${id}/autoscale`, { min, max }), "Saved")) this.scaling = null;
    },
  },
};
