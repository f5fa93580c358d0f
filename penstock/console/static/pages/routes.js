// Routes: names that stand for a small or a large model, switched on and off while the server runs.

import { get, patch } from "../api.js";
import { percent } from "../format.js";
import { refreshed } from "../widgets.js";

export default {
  name: "Routes",
  mixins: [refreshed(5)],
  template: `
    <q-page class="page">
      <div class="head"><h1>Routes</h1></div>
      <page-state :page="page" />
      <template v-if="loaded">
        <div class="panels">
          <div v-for="route in routes" :key="route.id" class="panel" :data-test="'route ' + route.id">
            <div class="row items-center"><span class="text-subtitle1"><copy-id :value="route.id" what="route" /></span><q-space /><q-toggle :model-value="route.enabled" :aria-label="'Route ' + route.id" :label="route.enabled ? 'on' : 'off'" @update:model-value="(enabled) => change(route, { enabled })" /></div>
            <dl class="pairs q-mt-sm">
              <dt>Easy requests</dt><dd>{{ route.small }}</dd><dt>Hard requests</dt><dd>{{ route.large }}</dd>
              <dt>Without a verdict</dt><dd>{{ route.default === 'large' ? route.large : route.small }}</dd>
              <dt>Hard from a score of</dt><dd>{{ route.threshold }}</dd><dt>Hard from</dt><dd>{{ route.long_tokens ? route.long_tokens + ' tokens' : route.long_words + ' words' }}</dd>
              <template v-for="(size, tier) in route.tiers" :key="tier"><dt>Tier {{ tier }}</dt><dd>always {{ route[size] }}</dd></template>
            </dl>
            <div class="q-mt-sm">Share of requests that it routes: <b>{{ percent(shares[route.id] ?? route.share) }}</b><span class="muted">; the rest is the control group</span></div>
            <q-slider :model-value="shares[route.id] ?? route.share" :min="0" :max="1" :step="0.05" label :label-value="percent(shares[route.id] ?? route.share)" :aria-label="'Share of ' + route.id" @update:model-value="(share) => (shares = { ...shares, [route.id]: share })" @change="(share) => change(route, { share })" />
          </div>
        </div>
        <p v-if="!routes.length" class="empty">No routes are configured. A route lets clients ask for one name and answers with a small or a large model: add one under <code>routes</code> in the configuration.</p>
        <p v-else class="muted q-mt-md">A route that is off sends every request to its default. Changes are stored and hold for all gateways. How each does: <a href="#feedback">votes by route</a>, and <code>penstock_route_decisions_total</code> in the metrics.</p>
      </template>
    </q-page>`,
  data: () => ({ routes: [], shares: {} }),
  methods: {
    percent,
    async read() {
      this.routes = (await get("/v1/admin/routes")).data;
    },
    async change(route, change) {
      await this.act(() => patch(`/v1/admin/routes/${encodeURIComponent(route.id)}`, change), "Changed");
      const { [route.id]: _, ...rest } = this.shares;
      this.shares = rest;
    },
  },
};
