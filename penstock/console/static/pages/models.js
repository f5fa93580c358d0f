// Models: their capabilities, their state, and the number of replicas.

import { get, post } from "../api.js";
import { number } from "../format.js";

export default {
  name: "Models",
  template: `
    <q-page class="page">
      <h1>Models</h1>
      <q-card v-for="model in models" :key="model.id" flat bordered class="q-mb-md">
        <q-card-section>
          <div class="row items-center q-gutter-sm">
            <div class="text-subtitle1">{{ model.id }}</div>
            <q-badge :color="model.ready ? (model.state === 'awake' ? 'positive' : 'warning') : 'grey'" :label="model.state" />
            <q-badge v-for="(can, name) in model.capabilities" :key="name" v-show="can" outline color="primary" :label="name.replace('_', ' ')" />
            <q-space />
            <template v-if="!model.parent && model.capabilities.completions">
              <q-btn v-if="model.state === 'awake'" outline no-caps size="sm" icon="bedtime" label="Sleep" :loading="busy === model.id" @click="act(model, 'sleep')" />
              <q-btn v-else-if="model.ready" outline no-caps size="sm" icon="wb_sunny" label="Wake" :loading="busy === model.id" @click="act(model, 'wake')" />
              <q-btn outline no-caps size="sm" icon="restart_alt" label="Restart" :loading="busy === model.id" @click="act(model, 'restart', {})" />
            </template>
          </div>
          <div class="facts q-mt-sm">
            <span v-if="model.context_window">context {{ number(model.context_window) }} tokens</span>
            <span v-if="model.dimensions">{{ model.dimensions }} dimensions</span>
            <span v-if="model.aliases?.length">aliases: {{ model.aliases.join(', ') }}</span>
            <span v-if="model.parent">adapter of {{ model.parent }}</span>
            <span v-if="model.routes_to">routes to {{ model.routes_to.join(' or ') }}</span>
            <span v-if="model.pricing">{{ priced(model.pricing) }}</span>
          </div>
          <div v-if="replicas[model.id]" class="row items-center q-gutter-sm q-mt-sm">
            <span>{{ replicas[model.id].length }} {{ replicas[model.id].length === 1 ? 'replica' : 'replicas' }}</span>
            <q-btn v-if="!autoscale[model.id]" round dense outline size="xs" icon="remove" aria-label="Remove a replica" :disable="replicas[model.id].length < 2" @click="act(model, 'scale', { replicas: replicas[model.id].length - 1 })" />
            <q-btn v-if="!autoscale[model.id]" round dense outline size="xs" icon="add" aria-label="Add a replica" @click="act(model, 'scale', { replicas: replicas[model.id].length + 1 })" />
            <q-badge v-for="one in replicas[model.id]" :key="one.id" :color="one.ready ? 'positive' : 'grey'" outline :label="one.replica + ' ' + (one.leaving ? 'draining' : one.state)" />
          </div>
          <div v-if="autoscale[model.id]" class="text-grey-7 q-mt-sm">
            autoscale {{ autoscale[model.id].min }} to {{ autoscale[model.id].max }}: {{ autoscale[model.id].desired }} wanted,
            {{ autoscale[model.id].ready }} ready, {{ autoscale[model.id].starting }} starting; {{ autoscale[model.id].detail }}
          </div>
        </q-card-section>
      </q-card>
    </q-page>`,
  data: () => ({ models: [], replicas: {}, autoscale: {}, busy: "" }),
  mounted() {
    this.timer = setInterval(() => this.read(), 3000);
    return this.read();
  },
  beforeUnmount() {
    clearInterval(this.timer);
  },
  methods: {
    number,
    priced: (price) => `$${price.input_per_million} input, $${price.output_per_million ?? 0} output per million tokens`,
    async read() {
      try {
        const [models, replicas] = await Promise.all([get("/v1/models"), get("/v1/admin/replicas")]);
        this.models = models.data;
        this.replicas = Object.groupBy(replicas.data, (one) => one.model);
        this.autoscale = Object.fromEntries(replicas.autoscale.map((one) => [one.id, one]));
      } catch (error) {
        this.$fail(error);
      }
    },
    async act(model, verb, body) {
      this.busy = model.id;
      try {
        await post(`/v1/admin/models/${model.id}/${verb}`, body);
        this.$done("Done");
      } catch (error) {
        this.$fail(error);
      } finally {
        this.busy = "";
        await this.read();
      }
    },
  },
};
