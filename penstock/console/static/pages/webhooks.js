// Webhooks: the endpoints of all tenants with the state of their deliveries; test, disable, and send again.

import { get, list, patch, post, remove } from "../api.js";
import { number } from "../format.js";
import { refreshed } from "../widgets.js";

const COLOURS = { delivering: "positive", failing: "negative", disabled: "grey", unused: "grey" };
const COLUMNS = [
  { name: "id", label: "Endpoint", main: true },
  { name: "state", label: "State" },
  { name: "tenant", label: "Tenant" },
  { name: "last_delivery_at", label: "Last delivery" },
  { name: "failures", label: "Failures" },
  { name: "waiting", label: "Not told yet" },
  { name: "actions", label: "" },
];
const EVENTS = [
  { name: "event", label: "Event", main: true },
  { name: "type", label: "Type" },
  { name: "status", label: "State" },
  { name: "attempts", label: "Attempts" },
  { name: "created_at", label: "Happened" },
  { name: "again", label: "" },
];

export default {
  name: "Webhooks",
  mixins: [refreshed(3)],
  template: `
    <q-page class="page">
      <div class="head"><h1>Webhooks</h1></div>
      <page-state :page="page" />
      <data-table v-if="loaded" label="Webhook endpoints" :columns="columns" :rows="endpoints">
        <template #id="{ row }"><div><b>{{ row.name }}</b> <copy-id :value="row.id" what="endpoint id" /><div class="muted" style="overflow-wrap: anywhere; font-size: 0.82rem">{{ row.url }}</div></div></template>
        <template #state="{ row }"><q-badge outline :color="colours[row.state]" :label="row.state" /><div v-if="row.last_problem" class="text-negative" style="font-size: 0.78rem; overflow-wrap: anywhere">{{ row.last_problem }}</div></template>
        <template #tenant="{ row }">{{ row.tenant }}<span v-if="row.user" class="muted"> / {{ row.user }}</span></template>
        <template #last_delivery_at="{ row }"><when v-if="row.last_delivery_at" :at="row.last_delivery_at" /><span v-else class="muted">never</span></template>
        <template #failures="{ row }"><span :class="{ 'text-negative': row.failures }">{{ number(row.failures) }}</span></template>
        <template #waiting="{ row }">{{ number(row.waiting) }} waiting<span v-if="row.given_up" class="text-negative">, {{ number(row.given_up) }} given up</span></template>
        <template #actions="{ row }"><div class="row no-wrap justify-end">
          <q-btn flat dense no-caps size="sm" label="Test" :aria-label="'Test ' + row.name" @click="test(row)" />
          <q-btn v-if="row.waiting || row.given_up" flat dense no-caps size="sm" label="Events" :aria-label="'Events of ' + row.name" @click="open(row)" />
          <q-btn v-if="!row.disabled && (row.waiting || row.given_up)" flat dense no-caps size="sm" label="Resend" :aria-label="'Resend to ' + row.name" @click="resend(row)" />
          <q-btn flat dense no-caps size="sm" :label="row.disabled ? 'Enable' : 'Disable'" :aria-label="(row.disabled ? 'Enable ' : 'Disable ') + row.name" @click="change(row)" />
          <q-btn flat dense no-caps size="sm" color="negative" label="Delete" :aria-label="'Delete ' + row.name" @click="remove(row)" /></div></template>
        <template #empty>No tenant has registered a webhook endpoint: <code>client.webhooks.create(…)</code> does.</template>
      </data-table>
      <div v-if="more" class="text-center q-mt-sm"><q-btn flat no-caps color="primary" label="Older endpoints" @click="most += 100; refresh()" /></div>
      <q-dialog :model-value="!!shown" @update:model-value="shown = null"><q-card v-if="shown" style="width: 860px; max-width: 96vw"><q-card-section class="text-subtitle1">What {{ shown.name }} was not told of</q-card-section>
        <q-card-section class="scroll" style="max-height: 60vh"><data-table label="Events" :columns="eventColumns" :rows="shown.deliveries" row-key="event">
          <template #event="{ row }"><copy-id :value="row.event" what="event id" /><div class="muted" style="font-size: 0.78rem">{{ row.data.id }}</div></template>
          <template #status="{ row }"><q-badge outline :color="row.status === 'given_up' ? 'negative' : 'warning'" :label="row.status.replace('_', ' ')" /></template>
          <template #created_at="{ row }"><when :at="row.created_at" /></template>
          <template #again="{ row }"><q-btn v-if="!shown.disabled" flat dense no-caps size="sm" label="Resend" @click="resend(shown, row.event)" /></template>
          <template #empty>It was told of everything.</template></data-table></q-card-section>
        <q-card-actions align="right"><q-btn v-close-popup flat no-caps label="Close" /></q-card-actions></q-card></q-dialog>
    </q-page>`,
  data: () => ({ endpoints: [], most: 100, more: false, shown: null, columns: COLUMNS, eventColumns: EVENTS, colours: COLOURS }),
  methods: {
    number,
    async read() {
      const found = await list("/v1/admin/webhooks", this.most);
      [this.endpoints, this.more] = [found.data, found.more];
      const shown = this.shown;
      const again = shown && (await get(this.path(shown)));
      if (this.shown === shown) this.shown = again; // else it was closed meanwhile
    },
    path: (row) => `/v1/admin/webhooks/${encodeURIComponent(row.id)}`,
    async open(row) {
      try {
        this.shown = await get(this.path(row));
      } catch (error) {
        this.$fail(error);
      }
    },
    async test(row) {
      try {
        const reply = await post(`${this.path(row)}/test`, {});
        const said = `${row.name} replied with status ${reply.status_code}`;
        if (reply.success) this.$done(said);
        else this.$fail(new Error(said));
      } catch (error) {
        this.$fail(error);
      }
    },
    async resend(row, event) {
      await this.act(() => post(`${this.path(row)}/resend`, event ? { event } : {}), "Sent again");
    },
    async change(row) {
      if (row.disabled || (await this.$confirm(`Disable ${row.name}?`, "Nothing is sent to it any more. What waits is kept, events from now on are not.", "Disable"))) await this.act(() => patch(this.path(row), { disabled: !row.disabled }), row.disabled ? "Enabled" : "Disabled");
    },
    async remove(row) {
      if (await this.$confirm(`Delete ${row.name}?`, `Tenant ${row.tenant} is not told of anything at ${row.url} any more; what waits is deleted too.`, "Delete")) await this.act(() => remove(this.path(row)), "Deleted");
    },
  },
};
