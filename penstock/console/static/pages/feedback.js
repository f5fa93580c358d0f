// Feedback: users' votes on answers, as totals by model and route, and one by one.

import { get } from "../api.js";
import { number, percent } from "../format.js";
import { refreshed } from "../widgets.js";

const PERIODS = [
  { label: "Last 24 hours", value: "24h" },
  { label: "Last 7 days", value: "7d" },
  { label: "Last 30 days", value: "30d" },
  { label: "All time", value: "" },
];
const TOTALS = [
  { name: "model", label: "Model", main: true },
  { name: "route", label: "Route" },
  { name: "share", label: "Votes up", text: true },
  { name: "up", label: "Up", number: true },
  { name: "down", label: "Down", number: true },
];
const VOTES = [
  { name: "rating", label: "Vote", main: true },
  { name: "created_at", label: "Time" },
  { name: "model", label: "Model" },
  { name: "tenant", label: "Tenant / user" },
  { name: "comment", label: "Comment", text: true },
  { name: "response_id", label: "Answer" },
];

export default {
  name: "Feedback",
  mixins: [refreshed(10)],
  template: `
    <q-page class="page">
      <div class="head"><h1>Feedback</h1></div>
      <div class="row q-col-gutter-sm q-mb-md">
        <q-select class="col-6 col-sm-3" v-model="since" :options="periods" emit-value map-options label="Period" outlined dense options-dense @update:model-value="refresh" />
        <q-select class="col-6 col-sm-3" v-model="rating" :options="['up', 'down']" clearable label="Vote" outlined dense options-dense @update:model-value="refresh" />
      </div>
      <page-state :page="page" />
      <template v-if="loaded">
        <p v-if="!votes.length" class="empty">No votes {{ rating || since ? 'match' : 'yet' }}. Clients vote with <code>POST /v1/feedback</code>, users of the playground with the thumbs below an answer.</p>
        <template v-else>
          <data-table label="Totals" :columns="totalColumns" :rows="totals.map((one, index) => ({ ...one, id: index }))">
            <template #model="{ row }">{{ row.adapter || row.model }}</template>
            <template #share="{ row }"><q-linear-progress :value="row.share_up" size="10px" color="positive" track-color="negative" rounded :aria-label="percent(row.share_up) + ' up'" /><span class="muted" style="font-size: 0.78rem">{{ percent(row.share_up) }}</span></template>
          </data-table>
          <h2>Votes</h2>
          <data-table label="Votes" :columns="voteColumns" :rows="votes" row-key="response_id">
            <template #rating="{ row }"><q-icon :name="row.rating === 'up' ? 'thumb_up' : 'thumb_down'" :color="row.rating === 'up' ? 'positive' : 'negative'" :aria-label="row.rating" /></template>
            <template #created_at="{ row }"><when :at="row.created_at" /></template>
            <template #model="{ row }">{{ row.adapter || row.model }}</template>
            <template #tenant="{ row }">{{ row.tenant }}<span v-if="row.user" class="muted"> / {{ row.user }}</span></template>
            <template #comment="{ row }">{{ row.comment || '–' }}</template>
            <template #response_id="{ row }"><copy-id :value="row.response_id" what="answer id" /><q-btn flat dense round icon="timeline" :aria-label="'Request of ' + row.response_id" :href="'#requests/' + row.response_id" /></template>
          </data-table>
        </template>
      </template>
    </q-page>`,
  data: () => ({ votes: [], totals: [], since: "7d", rating: null, periods: PERIODS, totalColumns: TOTALS, voteColumns: VOTES }),
  methods: {
    number,
    percent,
    async read() {
      const query = new URLSearchParams({ limit: 100, ...(this.since ? { since: this.since } : {}), ...(this.rating ? { rating: this.rating } : {}) });
      const found = await get(`/v1/admin/feedback?${query}`);
      [this.votes, this.totals] = [found.data, found.totals];
    },
  },
};
