// The signed-in key's own account: its limits and how much of each is used, what was spent, and its tenant's keys.

import { get } from "../api.js";
import { money } from "../format.js";
import { LIMITS } from "../limits.js";
import { refreshed } from "../widgets.js";

const COLUMNS = [
  { name: "id", label: "Key", main: true },
  { name: "name", label: "Name" },
  { name: "user", label: "User" },
  { name: "scopes", label: "Scopes" },
  { name: "spent", label: "Spent this month", number: true },
  { name: "limits", label: "Own limits", text: true },
  { name: "state", label: "State" },
];

export default {
  name: "Account",
  mixins: [refreshed(5)],
  template: `
    <q-page class="page">
      <div class="head"><h1>Limits and keys</h1></div>
      <page-state :page="page" />
      <template v-if="loaded">
        <div class="panels">
          <div class="panel"><h2 class="q-mt-none">You</h2><dl class="pairs">
            <dt>Tenant</dt><dd data-test="tenant">{{ account.tenant }}</dd><dt>User</dt><dd>{{ account.user || 'any: the key is shared' }}</dd>
            <dt>Key</dt><dd><copy-id v-if="account.key" :value="account.key" what="key id" /></dd><dt>Scopes</dt><dd>{{ account.scopes.join(', ') }}</dd><dt>Tier</dt><dd>{{ account.tier || '–' }}</dd>
            <dt>Spent today</dt><dd>{{ money(account.spent.today) }}</dd><dt>This month</dt><dd>{{ money(account.spent.month) }}</dd>
          </dl></div>
          <div class="panel"><h2 class="q-mt-none">Limits of {{ account.tenant }}</h2>
            <limit-bar v-for="one in of('tenant')" :key="one.limit" v-bind="bar(one)" />
            <p v-if="!of('tenant').length" class="muted q-mb-none">None: this tenant may send as much as it likes.</p></div>
          <div class="panel"><h2 class="q-mt-none">Limits of this key</h2>
            <limit-bar v-for="one in of('key')" :key="one.limit" v-bind="bar(one)" />
            <p v-if="!of('key').length" class="muted q-mb-none">None of its own: those of the tenant apply.</p></div>
        </div>
        <p class="muted q-mt-sm" style="font-size: 0.82rem">Days and months begin at midnight UTC. An administrator changes limits and makes keys.</p>
        <h2>Keys</h2>
        <data-table label="Keys" :columns="columns" :rows="keys">
          <template #id="{ row }"><copy-id :value="row.id" what="key id" /><q-badge v-if="row.id === account.key" class="q-ml-sm" outline color="primary" label="this one" /></template>
          <template #name="{ row }">{{ row.name || '–' }}</template><template #user="{ row }">{{ row.user || '–' }}</template>
          <template #scopes="{ row }">{{ row.scopes.join(', ') }}</template><template #spent="{ row }">{{ money(row.spent.month) }}</template>
          <template #limits="{ row }">{{ said(row.limits) }}</template>
          <template #state="{ row }"><q-badge v-if="row.revoked_at" color="negative" label="revoked" /><span v-else-if="row.expires_at">ends <when :at="row.expires_at" /></span><q-badge v-else outline color="positive" label="active" /></template>
        </data-table>
      </template>
    </q-page>`,
  data: () => ({ account: null, keys: [], columns: COLUMNS }),
  methods: {
    money,
    of(per) {
      return this.account.used.filter((one) => one.per === per);
    },
    bar: (one) => ({ name: LIMITS[one.limit].label, used: one.used, most: one.most, show: LIMITS[one.limit].show }),
    said: (limits) => Object.entries(limits).filter(([, most]) => most != null).map(([name, most]) => `${LIMITS[name].label}: ${LIMITS[name].show(most)}`).join(", ") || "–",
    async read() {
      const [account, keys] = await Promise.all([get("/v1/account"), get("/v1/keys")]);
      this.account = account;
      this.keys = keys.data;
    },
  },
};
