// The response cache: how many answers it holds, and forgetting them. An administrator sees all tenants' answers.

import { ApiError, call, get, session } from "../api.js";
import { bytes, number, span } from "../format.js";
import { refreshed } from "../widgets.js";

export default {
  name: "Caches",
  mixins: [refreshed(5)],
  template: `
    <q-page class="page">
      <div class="head"><h1>Response cache</h1></div>
      <page-state :page="page" />
      <p v-if="off" class="empty">This server keeps no answers. With <code>cache.exact: on</code> in the configuration, a request that was answered before is answered from memory; with <code>cache.semantic: on</code>, one that means the same is, too.</p>
      <template v-if="loaded && cache">
        <div class="tiles">
          <div class="tile"><div class="value" data-test="answers">{{ number(cache.answers) }}</div><div class="name">answers{{ admin ? tenant ? ' of ' + tenant : ' of all tenants' : '' }}</div></div>
          <div class="tile"><div class="value">{{ bytes(cache.bytes) }}</div><div class="name">of memory</div></div>
          <div class="tile"><div class="value">{{ cache.ttl_s == null ? 'always' : span(cache.ttl_s) }}</div><div class="name">kept for</div></div>
          <div class="tile"><div class="value wrapped">{{ ['exact', 'semantic'].filter((kind) => cache[kind] !== 'off').map((kind) => kind + (cache[kind] === 'asked' ? ' (when asked for)' : '')).join(', ') }}</div><div class="name">{{ cache.shared ? 'shared by all gateways' : 'of this gateway' }}</div></div>
        </div>
        <div class="row q-col-gutter-sm items-center q-mt-sm">
          <q-select v-if="admin" class="col-6 col-sm-3" v-model="tenant" :options="tenants" clearable label="Tenant" outlined dense options-dense @update:model-value="refresh" />
          <q-select class="col-6 col-sm-3" v-model="model" :options="models" clearable label="Of model" outlined dense options-dense />
          <div class="col-12 col-sm-4"><q-btn outline no-caps color="negative" icon="delete_sweep" label="Forget answers" :disable="!cache.answers" @click="forget" /></div>
        </div>
      </template>
    </q-page>`,
  data: () => ({ cache: null, off: false, tenant: null, model: null, tenants: [], models: [], admin: session.admin }),
  methods: {
    bytes,
    number,
    span,
    path(extra = {}) {
      const query = new URLSearchParams(Object.entries({ ...(this.admin && this.tenant ? { tenant: this.tenant } : {}), ...extra }));
      return `${this.admin ? "/v1/admin/cache" : "/v1/cache"}?${query}`;
    },
    async read() {
      try {
        this.cache = await get(this.path());
        this.off = false;
      } catch (error) {
        if (!(error instanceof ApiError && [404, 503].includes(error.status))) throw error;
        [this.off, this.cache] = [true, null];
      }
      if (this.loaded) return;
      const [models, tenants] = await Promise.allSettled([get("/v1/models"), this.admin ? get("/v1/admin/tenants") : { data: [] }]);
      this.models = (models.value?.data || []).map((one) => one.id);
      this.tenants = (tenants.value?.data || []).map((one) => one.id);
    },
    async forget() {
      const what = [this.model && `of ${this.model}`, this.tenant && `of the tenant ${this.tenant}`].filter(Boolean).join(" ") || (this.admin ? "of all tenants" : "of your tenant");
      if (!(await this.$confirm("Forget answers?", `Every cached answer ${what} is deleted; the next such requests are computed again.`, "Forget"))) return;
      await this.act(() => call("DELETE", this.path(this.model ? { model: this.model } : {})), "Forgotten");
    },
  },
};
