// Tenants and their API keys: create, limit, disable, revoke. A key is shown only once, when it is created.

import { get, patch, post, remove, session } from "../api.js";
import { AllowForm, KINDS, listed } from "../access.js";
import { copy, money } from "../format.js";
import { given, LimitForm, LIMITS } from "../limits.js";
import { refreshed } from "../widgets.js";

const EXPIRIES = [
  { label: "Never", value: null },
  { label: "In a day", value: 86400 },
  { label: "In 30 days", value: 2592000 },
  { label: "In a year", value: 31536000 },
];
const TENANTS = [
  { name: "id", label: "Tenant", main: true },
  { name: "tier", label: "Tier" },
  { name: "used", label: "Used of its limits", text: true },
  { name: "spent", label: "Spent today / this month", number: true },
  { name: "state", label: "State" },
  { name: "actions", label: "" },
];
const KEYS = [
  { name: "id", label: "Key", main: true },
  { name: "tenant", label: "Tenant / user" },
  { name: "name", label: "Name" },
  { name: "scopes", label: "Scopes" },
  { name: "spent", label: "Spent", text: true },
  { name: "created_at", label: "Created" },
  { name: "expires_at", label: "Expires" },
  { name: "actions", label: "" },
];

// A demand as text, `region=eu|ch, external=false`, and back.
const ruleOf = (row) => Object.entries(row.require || {}).map(([name, values]) => `${name}=${values}`).join(", ");
const demand = (text) => Object.fromEntries((text || "").split(",").filter((part) => part.trim()).map((part) => part.split("=", 2).map((word) => word.trim())).map(([name, values]) => [name, values ?? ""]));

export default {
  name: "Keys",
  components: { AllowForm, LimitForm },
  mixins: [refreshed(30)],
  template: `
    <q-page class="page">
      <div class="head"><h1>Tenants and keys</h1></div>
      <page-state :page="page" />
      <template v-if="loaded">
      <q-banner v-if="!keys.length" rounded class="q-mb-md" style="background: var(--soft)">There are no keys, so every user of this machine can use this server. Creating the first key closes it: give that key all three scopes, and store it.</q-banner>
      <q-form class="row q-col-gutter-sm items-start" @submit="createTenant">
        <q-input class="col-6 col-sm-3" v-model="tenant.id" label="New tenant" outlined dense hint="letters, digits, - and _" />
        <q-input class="col-6 col-sm-3" v-model="tenant.tier" label="Tier (optional)" outlined dense />
        <div class="col-12 col-sm-3"><q-btn type="submit" color="primary" no-caps label="Create tenant" :disable="!tenant.id" /></div>
      </q-form>
      <data-table class="q-mt-md" label="Tenants" :columns="tenantColumns" :rows="tenants">
        <template #id="{ row }">{{ row.id }}<div v-if="row.name" class="muted">{{ row.name }}</div><div v-if="listed(row.allow)" class="muted" style="font-size: 0.78rem">{{ listed(row.allow) }}</div><div v-if="ruleOf(row)" class="muted" data-test="rule">requires {{ ruleOf(row) }}</div></template>
        <template #used="{ row }"><limit-bar v-for="one in row.used || []" :key="one.limit" v-bind="bar(one)" /><span v-if="!row.used?.length" class="muted">{{ row.used ? 'no limits' : '–' }}</span></template>
        <template #spent="{ row }">{{ row.spent ? money(row.spent.today) + ' / ' + money(row.spent.month) : '–' }}</template>
        <template #state="{ row }"><q-badge :color="row.disabled ? 'negative' : 'positive'" :label="row.disabled ? 'disabled' : 'active'" /></template>
        <template #actions="{ row }"><div class="row no-wrap justify-end"><q-btn flat dense no-caps size="sm" color="primary" label="Limits" @click="edit('tenant', row)" /><q-btn flat dense no-caps size="sm" color="primary" label="Access" @click="editAccess('tenant', row)" /><q-btn flat dense no-caps size="sm" :color="row.disabled ? 'primary' : 'negative'" :label="row.disabled ? 'Enable' : 'Disable'" @click="setDisabled(row, !row.disabled)" /></div></template>
        <template #empty>No tenants yet. A tenant owns keys, and is what limits and budgets apply to: create one above.</template>
      </data-table>
      <h2>Keys</h2>
      <q-form class="row q-col-gutter-sm items-start" @submit="createKey">
        <q-select class="col-6 col-sm-2" v-model="key.tenant" :options="tenants.map((one) => one.id)" label="Tenant" outlined dense options-dense />
        <q-input class="col-6 col-sm-2" v-model="key.user" label="User (optional)" outlined dense />
        <q-input class="col-6 col-sm-2" v-model="key.name" label="Name (optional)" outlined dense />
        <q-select class="col-6 col-sm-2" v-model="key.scopes" :options="['inference', 'metrics', 'admin']" multiple label="Scopes" outlined dense options-dense />
        <q-select class="col-6 col-sm-2" v-model="key.expires" :options="expiries" emit-value map-options label="Expires" outlined dense options-dense />
        <div class="col-6 col-sm-2"><q-btn type="submit" color="primary" no-caps label="Create key" :disable="!key.tenant || !key.scopes.length" /></div>
        <div class="col-12"><q-expansion-item dense dense-toggle label="Limits of the key" header-class="q-px-none muted" style="max-width: 560px"><limit-form v-model="key.limits" /></q-expansion-item></div>
      </q-form>
      <q-banner v-if="made" rounded class="q-my-sm" style="background: var(--soft); border: 1px solid #0f766e" role="status">
        The new key. It is shown only once; store it now:<br /><code class="mono" data-test="new-key">{{ made }}</code>
        <template #action><q-btn flat no-caps icon="content_copy" label="Copy" @click="copied" /><q-btn flat no-caps label="I have stored it" @click="stored" /></template>
      </q-banner>
      <div class="row q-col-gutter-sm q-mt-xs"><q-select class="col-6 col-sm-3" v-model="only" :options="tenants.map((one) => one.id)" clearable label="Of tenant" outlined dense options-dense /><q-toggle class="col-6 col-sm-4" v-model="withRevoked" label="Revoked ones too" /></div>
      <data-table class="q-mt-sm" label="Keys" :columns="keyColumns" :rows="shownKeys">
        <template #id="{ row }"><copy-id :value="row.id" what="key id" /><div v-if="ruleOf(row)" class="muted">requires {{ ruleOf(row) }}</div></template>
        <template #tenant="{ row }">{{ row.tenant }}<span v-if="row.user" class="muted"> / {{ row.user }}</span></template>
        <template #name="{ row }">{{ row.name || '–' }}<div v-if="listed(row.allow)" class="muted" style="font-size: 0.78rem">{{ listed(row.allow) }}</div></template><template #scopes="{ row }">{{ row.scopes.join(', ') }}</template>
        <template #spent="{ row }"><limit-bar v-if="row.limits.daily_budget != null" name="today" :used="row.spent.today" :most="row.limits.daily_budget" :show="money" /><limit-bar v-if="row.limits.monthly_budget != null" name="month" :used="row.spent.month" :most="row.limits.monthly_budget" :show="money" /><span v-else>{{ money(row.spent.month) }}<span v-if="row.limits.daily_budget != null" class="muted"> this month</span></span>
          <div v-if="rates(row)" class="muted" style="font-size: 0.78rem">{{ rates(row) }}</div></template>
        <template #created_at="{ row }"><when :at="row.created_at" /></template><template #expires_at="{ row }"><span v-if="row.expires_at == null">never</span><when v-else :at="row.expires_at" /></template>
        <template #actions="{ row }"><q-badge v-if="row.revoked_at" color="negative" label="revoked" /><div v-else class="row no-wrap justify-end"><q-btn flat dense no-caps size="sm" color="primary" label="Limits" @click="edit('key', row)" /><q-btn flat dense no-caps size="sm" color="primary" label="Access" @click="editAccess('key', row)" /><q-btn flat dense no-caps size="sm" color="negative" label="Revoke" @click="revoke(row)" /></div></template>
        <template #empty>{{ keys.length ? 'No key matches.' : 'No keys yet: create one above.' }}</template>
      </data-table>
      </template>
      <q-dialog v-model="editing"><q-card style="width: 560px; max-width: 94vw">
        <q-card-section class="text-subtitle1">Limits of {{ target.kind }} <code>{{ target.id }}</code></q-card-section>
        <q-card-section><q-input v-if="target.kind === 'tenant'" v-model="target.tier" class="q-mb-md" label="Tier" outlined dense />
          <limit-form v-model="target.limits" :inherited="target.inherited" />
          <q-input v-model="target.require" class="q-mt-md" label="Data rule: required labels" outlined dense clearable stack-label placeholder="region=eu|ch, external=false" hint="Models, tools and moderators without these labels never get its requests." data-test="require" />
          <p class="muted q-mt-sm q-mb-none" style="font-size: 0.82rem">{{ target.kind === 'tenant' ? 'An empty field takes the limit of the tier.' : 'They apply in addition to those of the tenant; an empty field is no limit.' }} Days and months begin at midnight UTC.</p></q-card-section>
        <q-card-actions align="right"><q-btn v-close-popup flat no-caps label="Cancel" /><q-btn unelevated color="primary" no-caps label="Save" @click="saveLimits" /></q-card-actions>
      </q-card></q-dialog>
      <q-dialog v-model="editingAccess"><q-card style="width: 620px; max-width: 94vw">
        <q-card-section class="text-subtitle1">What {{ target.kind }} <code>{{ target.id }}</code> may use</q-card-section>
        <q-card-section><allow-form v-model="target.allow" />
          <p class="muted q-mt-sm q-mb-none" style="font-size: 0.82rem">Names between commas; * stands for anything. What is not allowed does not exist for {{ target.kind === 'tenant' ? 'its keys' : 'the key' }}. {{ target.kind === 'tenant' ? 'The lists of the tier hold too.' : 'The lists of the tenant and its tier hold too.' }}</p></q-card-section>
        <q-card-actions align="right"><q-btn v-close-popup flat no-caps label="Cancel" /><q-btn unelevated color="primary" no-caps label="Save" @click="saveAccess" /></q-card-actions>
      </q-card></q-dialog>
    </q-page>`,
  data: () => ({ tenants: [], keys: [], tenant: { id: "", tier: "" }, key: { tenant: null, user: "", name: "", scopes: ["inference"], expires: null, limits: {} }, made: "", only: null, withRevoked: false, editing: false, editingAccess: false, target: {}, expiries: EXPIRIES, tenantColumns: TENANTS, keyColumns: KEYS }),
  computed: {
    shownKeys() {
      return this.keys.filter((one) => (!this.only || one.tenant === this.only) && (this.withRevoked || !one.revoked_at));
    },
  },
  beforeUnmount() {
    session.holdsKey = false;
  },
  methods: {
    money,
    ruleOf,
    listed,
    bar: (one) => ({ name: LIMITS[one.limit].label, used: one.used, most: one.most, show: LIMITS[one.limit].show }),
    rates: (row) => ["requests_per_minute", "tokens_per_minute", "concurrent_requests"].filter((name) => row.limits[name] != null).map((name) => `${LIMITS[name].label.toLowerCase()}: ${LIMITS[name].show(row.limits[name])}`).join(", "),
    copied() {
      copy(this.made).then(() => this.$done("Copied"), this.$fail);
    },
    stored() {
      this.made = "";
      session.holdsKey = false;
      return this.refresh();
    },
    async read() {
      const [tenants, keys] = (await Promise.all([get("/v1/admin/tenants"), get("/v1/admin/keys")])).map((list) => list.data);
      // What the others have used is read when one of them is opened.
      const detailed = await Promise.all(tenants.slice(0, 50).map((one) => get(`/v1/admin/tenants/${encodeURIComponent(one.id)}`)));
      this.tenants = [...detailed, ...tenants.slice(50)];
      this.keys = keys;
      this.key.tenant ??= tenants[0]?.id ?? null;
    },
    async createTenant() {
      const { id, tier } = this.tenant;
      if (await this.act(() => post("/v1/admin/tenants", { id, tier: tier || "" }), `Tenant ${id} created`)) this.tenant = { id: "", tier: "" };
    },
    async setDisabled(one, disabled) {
      if (disabled && !(await this.$confirm(`Disable ${one.id}?`, "Requests with any of its keys will be refused until it is enabled again.", "Disable"))) return;
      await this.act(() => patch(`/v1/admin/tenants/${encodeURIComponent(one.id)}`, { disabled }), disabled ? "Disabled" : "Enabled");
    },
    async createKey() {
      const { expires, limits, ...rest } = this.key;
      const expires_at = expires === null ? null : Date.now() / 1000 + expires;
      try {
        session.holdsKey = true;
        this.made = (await post("/v1/admin/keys", { ...rest, limits: given(limits), expires_at })).key;
        this.$done("Key created");
      } catch (error) {
        session.holdsKey = Boolean(this.made);
        return this.$fail(error);
      }
      // After the first key, this session itself has lost its access: it asks for a key once this one is stored.
      if (this.keys.length) await this.refresh();
    },
    async edit(kind, row) {
      try {
        if (kind === "tenant" && !row.allowed) row = await get(`/v1/admin/tenants/${encodeURIComponent(row.id)}`);
      } catch (error) {
        return this.$fail(error);
      }
      this.target = { kind, id: row.id, tier: row.tier, was: row.tier, limits: { ...row.limits }, require: ruleOf(row), inherited: kind === "tenant" ? row.allowed || {} : {} };
      this.editing = true;
    },
    async saveLimits() {
      const { kind, id, tier, was, limits, require } = this.target;
      const change = { limits: Object.fromEntries(Object.keys(LIMITS).map((name) => [name, limits[name] ?? null])), require: demand(require) };
      if (kind === "tenant" && tier !== was) change.tier = tier;
      if (await this.act(() => patch(`/v1/admin/${kind}s/${encodeURIComponent(id)}`, change), "Saved")) this.editing = false;
    },
    editAccess(kind, row) {
      this.target = { kind, id: row.id, allow: { ...row.allow } };
      this.editingAccess = true;
    },
    async saveAccess() {
      const { kind, id, allow } = this.target;
      const change = { allow: Object.fromEntries(Object.keys(KINDS).map((name) => [name, allow[name] ?? null])) };
      if (await this.act(() => patch(`/v1/admin/${kind}s/${encodeURIComponent(id)}`, change), "Saved")) this.editingAccess = false;
    },
    async revoke(one) {
      if (await this.$confirm("Revoke this key?", `Requests with ${one.id} will be refused from now on. This cannot be undone.`, "Revoke")) await this.act(() => remove(`/v1/admin/keys/${encodeURIComponent(one.id)}`), "Revoked");
    },
  },
};
