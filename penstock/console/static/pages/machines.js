// The machines of a fleet: what each runs and how busy it is, its gateways and engines, and letting a machine leave.

import { get, post } from "../api.js";
import { refreshed } from "../widgets.js";

const MACHINES = [
  { name: "name", label: "Machine", main: true },
  { name: "state", label: "State" },
  { name: "engines", label: "Engines", number: true },
  { name: "running", label: "Running", number: true },
  { name: "waiting", label: "Waiting", number: true },
  { name: "zone", label: "Zone" },
  { name: "hardware", label: "Hardware", text: true },
  { name: "version", label: "Version" },
  { name: "actions", label: "" },
];
const MODELS = [
  { name: "name", label: "Model", main: true },
  { name: "ready", label: "Ready", number: true },
  { name: "wanted", label: "Wanted", number: true },
  { name: "rollout", label: "New settings", text: true },
  { name: "problem", label: "Problem", text: true },
];
const ENGINES = [
  { name: "id", label: "Engine", main: true },
  { name: "state", label: "State" },
  { name: "running", label: "Running", number: true },
  { name: "waiting", label: "Waiting", number: true },
  { name: "device", label: "Device" },
  { name: "zone", label: "Zone" },
  { name: "version", label: "Version" },
];
const GATEWAYS = [
  { name: "url", label: "Gateway", main: true },
  { name: "machine", label: "Machine" },
  { name: "state", label: "State" },
  { name: "zone", label: "Zone" },
  { name: "version", label: "Version" },
];

const GIB = 2 ** 30;
const COLOURS = { ready: "positive", starting: "warning", leaving: "warning", draining: "warning" };

export default {
  name: "Machines",
  mixins: [refreshed(2)],
  template: `
    <q-page class="page">
      <div class="head"><h1>Machines</h1></div>
      <page-state :page="page" />
      <template v-if="loaded">
        <p class="muted">Fleet <b>{{ fleet.name }}</b>: {{ fleet.machines.length }} {{ fleet.machines.length === 1 ? 'machine' : 'machines' }}, {{ fleet.engines.length }} {{ fleet.engines.length === 1 ? 'engine' : 'engines' }}. <span data-test="controller">{{ fleet.controller ? 'The controller is ' + fleet.controller + '.' : 'Nobody is the controller at the moment: what runs goes on, and nothing is replaced.' }}</span></p>
        <data-table label="Machines" row-key="name" :columns="machineColumns" :rows="machines">
          <template #name="{ row }"><copy-id :value="row.name" what="machine name" /><q-badge v-if="row.controller" class="q-ml-xs" outline color="primary" label="controller" /><div v-for="(why, model) in row.problems" :key="model" class="text-negative" style="font-size: 0.78rem">{{ model }}: {{ why }}</div></template>
          <template #state="{ row }"><q-badge :color="colour(row.state)" outline :label="row.state" /><q-badge v-for="label in row.labels" :key="label" class="q-ml-xs" outline color="grey" :label="label" /></template>
          <template #engines="{ row }">{{ row.engines }} of {{ row.room }}</template>
          <template #zone="{ row }">{{ [row.region, row.zone].filter(Boolean).join(' / ') || '–' }}</template>
          <template #actions="{ row }"><q-btn flat dense no-caps size="sm" color="negative" label="Drain" :aria-label="'Drain ' + row.name" :disable="row.state !== 'ready'" @click="drain(row)" /></template>
        </data-table>
        <h2>Models</h2>
        <data-table label="Models of the fleet" row-key="name" :columns="modelColumns" :rows="fleet.models">
          <template #problem="{ row }"><span :class="{ 'text-negative': row.problem }">{{ row.problem || '–' }}</span></template>
        </data-table>
        <h2>Engines</h2>
        <data-table label="Engines of the fleet" :columns="engineColumns" :rows="engines">
          <template #state="{ row }"><q-badge :color="colour(row.state)" outline :label="row.state" /></template>
        </data-table>
        <h2>Gateways</h2>
        <data-table label="Gateways of the fleet" row-key="url" :columns="gatewayColumns" :rows="fleet.gateways">
          <template #state="{ row }"><q-badge :color="colour(row.state)" outline :label="row.state" /></template>
        </data-table>
        <p class="muted q-mt-md">Another machine: <code>penstock join redis://… --secret-file FILE</code>. Running and waiting are the engines' own figures, with the requests of all gateways.</p>
      </template>
    </q-page>`,
  data: () => ({
    fleet: { machines: [], engines: [], gateways: [], models: [] },
    replicas: [],
    machineColumns: MACHINES,
    modelColumns: MODELS,
    engineColumns: ENGINES,
    gatewayColumns: GATEWAYS,
  }),
  computed: {
    engines() {
      const loads = Object.fromEntries(this.replicas.map((replica) => [replica.id, replica]));
      return this.fleet.engines.map((engine) => ({ ...engine, running: loads[engine.id]?.running, waiting: loads[engine.id]?.waiting }));
    },
    machines() {
      const sum = (name, key) => this.engines.filter((engine) => engine.machine === name).reduce((total, engine) => total + (engine[key] ?? 0), 0);
      return this.fleet.machines.map((machine) => ({
        ...machine,
        running: sum(machine.name, "running"),
        waiting: sum(machine.name, "waiting"),
        hardware: machine.devices.length ? `${machine.devices.length} × ${machine.devices[0]}` : `${machine.cpus} cores, ${Math.round(machine.memory / GIB)} GiB`,
      }));
    },
  },
  methods: {
    colour: (state) => COLOURS[state] ?? "grey",
    async read() {
      const [fleet, replicas] = await Promise.all([get("/v1/admin/fleet"), get("/v1/admin/replicas")]);
      this.fleet = fleet;
      this.replicas = replicas.data;
    },
    async drain(row) {
      const sure = await this.$confirm(`Drain ${row.name}?`, "Its replicas are started on other machines first, if there is room. Then it finishes its requests and stops.", "Drain");
      if (sure) await this.act(() => post(`/v1/admin/fleet/machines/${encodeURIComponent(row.name)}/drain`, {}), `${row.name} is leaving`);
    },
  },
};
