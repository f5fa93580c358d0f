// Tenants and their API keys. A key is shown only once, when it is created.

import { get, patch, post, remove } from "../api.js";
import { copy, day } from "../format.js";

const EXPIRIES = [
  { label: "Never", value: null },
  { label: "In a day", value: 86400 },
  { label: "In 30 days", value: 2592000 },
  { label: "In a year", value: 31536000 },
];

export default {
  name: "Keys",
  template: `
    <q-page class="page">
      <h1>Tenants and keys</h1>
      <q-banner v-if="!loading && !keys.length" rounded class="q-mb-md" style="background: var(--soft)">There are no keys, so every user of this machine can use this server. Creating the first key closes it: give that key all three scopes, and store it.</q-banner>
      <q-form class="row q-col-gutter-sm items-start" @submit="createTenant">
        <q-input class="col-6 col-sm-3" v-model="tenant.id" label="New tenant" outlined dense hint="letters, digits, - and _" />
        <q-input class="col-6 col-sm-3" v-model="tenant.tier" label="Tier (optional)" outlined dense />
        <div class="col-12 col-sm-3"><q-btn type="submit" color="primary" no-caps label="Create tenant" :disable="!tenant.id" /></div>
      </q-form>
      <div class="wide-table q-mt-sm"><table>
        <thead><tr><th>Tenant</th><th>Name</th><th>Tier</th><th>State</th><th></th></tr></thead>
        <tbody><tr v-for="one in tenants" :key="one.id"><td>{{ one.id }}</td><td>{{ one.name || '–' }}</td><td>{{ one.tier }}</td><td><q-badge :color="one.disabled ? 'negative' : 'positive'" :label="one.disabled ? 'disabled' : 'active'" /></td>
          <td><q-btn flat dense no-caps size="sm" :label="one.disabled ? 'Enable' : 'Disable'" @click="setDisabled(one, !one.disabled)" /></td></tr>
          <tr v-if="!tenants.length"><td colspan="5" class="muted">No tenants yet.</td></tr></tbody>
      </table></div>
      <h2>Keys</h2>
      <q-form class="row q-col-gutter-sm items-start" @submit="createKey">
        <q-select class="col-6 col-sm-2" v-model="key.tenant" :options="tenants.map((one) => one.id)" label="Tenant" outlined dense options-dense />
        <q-input class="col-6 col-sm-2" v-model="key.user" label="User (optional)" outlined dense />
        <q-input class="col-6 col-sm-2" v-model="key.name" label="Name (optional)" outlined dense />
        <q-select class="col-6 col-sm-2" v-model="key.scopes" :options="['inference', 'metrics', 'admin']" multiple label="Scopes" outlined dense options-dense />
        <q-select class="col-6 col-sm-2" v-model="key.expires" :options="expiries" emit-value map-options label="Expires" outlined dense options-dense />
        <div class="col-6 col-sm-2"><q-btn type="submit" color="primary" no-caps label="Create key" :disable="!key.tenant || !key.scopes.length" /></div>
      </q-form>
      <q-banner v-if="made" rounded class="q-my-sm" style="background: var(--soft)" role="status">
        The new key, shown only once: <code data-test="new-key">{{ made }}</code>
        <template #action><q-btn flat no-caps icon="content_copy" label="Copy" @click="copied" /></template>
      </q-banner>
      <div class="wide-table q-mt-sm"><table>
        <thead><tr><th>Key</th><th>Tenant</th><th>User</th><th>Name</th><th>Scopes</th><th>Created</th><th>Expires</th><th></th></tr></thead>
        <tbody><tr v-for="one in keys" :key="one.id"><td><code>{{ one.id }}</code></td><td>{{ one.tenant }}</td><td>{{ one.user || '–' }}</td><td>{{ one.name || '–' }}</td><td>{{ one.scopes.join(', ') }}</td><td>{{ day(one.created_at) }}</td><td>{{ day(one.expires_at) }}</td>
          <td><q-badge v-if="one.revoked_at" color="negative" label="revoked" /><q-btn v-else flat dense no-caps size="sm" color="negative" label="Revoke" @click="revoke(one)" /></td></tr></tbody>
      </table></div>
    </q-page>`,
  data: () => ({ tenants: [], keys: [], loading: true, tenant: { id: "", tier: "" }, key: { tenant: null, user: "", name: "", scopes: ["inference"], expires: null }, made: "", expiries: EXPIRIES }),
  mounted() {
    return this.read();
  },
  methods: {
    day,
    copied() {
      copy(this.made).then(() => this.$done("Copied"), this.$fail);
    },
    async read() {
      try {
        [this.tenants, this.keys] = (await Promise.all([get("/v1/admin/tenants"), get("/v1/admin/keys")])).map((list) => list.data);
        this.key.tenant ??= this.tenants[0]?.id ?? null;
        this.loading = false;
      } catch (error) {
        this.$fail(error);
      }
    },
    async act(work, said) {
      try {
        const result = await work;
        this.$done(said);
        await this.read();
        return result;
      } catch (error) {
        this.$fail(error);
      }
    },
    async createTenant() {
      const { id, tier } = this.tenant;
      if (await this.act(post("/v1/admin/tenants", { id, tier }), `Tenant ${id} created`)) this.tenant = { id: "", tier: "" };
    },
    setDisabled(one, disabled) {
      return this.act(patch(`/v1/admin/tenants/${encodeURIComponent(one.id)}`, { disabled }), disabled ? "Disabled" : "Enabled");
    },
    async createKey() {
      const { expires, ...rest } = this.key;
      const expires_at = expires === null ? null : Date.now() / 1000 + expires;
      try {
        this.made = (await post("/v1/admin/keys", { ...rest, expires_at })).key;
        this.$done("Key created");
      } catch (error) {
        return this.$fail(error);
      }
      // After the first key, this session itself may have lost its access.
      await this.read();
    },
    revoke(one) {
      this.$q.dialog({ title: "Revoke this key?", message: `Requests with ${one.id} will be refused from now on.`, cancel: true }).onOk(() => this.act(remove(`/v1/admin/keys/${encodeURIComponent(one.id)}`), "Revoked"));
    },
  },
};
