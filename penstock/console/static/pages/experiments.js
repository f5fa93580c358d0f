// Experiments: the arms of each side by side, every figure with its interval; promote a canary or roll it back.

import { get, post } from "../api.js";
import { duration, money, number, percent } from "../format.js";
import { refreshed } from "../widgets.js";

const COLUMNS = [
  { name: "arm", label: "Arm", main: true },
  { name: "share", label: "Share", number: true },
  { name: "requests", label: "Requests", number: true },
  { name: "errors", label: "Errors", number: true, show: percent },
  { name: "ttft", label: "First token", number: true, show: duration },
  { name: "latency", label: "Whole answer", number: true, show: duration },
  { name: "speed", label: "Tokens a second", number: true, show: number },
  { name: "grades", label: "Grade", number: true, show: number },
  { name: "dislikes", label: "Votes down", number: true, show: percent },
  { name: "cost", label: "Cost per answer", number: true, show: money },
  { name: "actions", label: "" },
];
const FIGURES = COLUMNS.filter((column) => column.show);
const COLORS = { running: "primary", promoted: "positive", "rolled back": "negative" };

export default {
  name: "Experiments",
  mixins: [refreshed(5)],
  template: `
    <q-page class="page">
      <div class="head"><h1>Experiments</h1></div>
      <page-state :page="page" />
      <template v-if="loaded">
        <section v-for="one in experiments" :key="one.id" class="q-mb-lg" :data-test="'experiment ' + one.id">
          <div class="row items-center q-gutter-x-sm q-mb-sm">
            <h2 class="q-my-none"><copy-id :value="one.id" what="experiment" /></h2>
            <q-badge :color="colors[one.status] || 'grey-7'" :label="one.status" />
            <span class="muted">stage {{ one.stage }}, since <when :at="one.stage_since" />{{ one.figures_of < one.stage ? ' (figures of stage ' + one.figures_of + ')' : '' }}; by {{ one.sticky }}; {{ one.rollback ? 'rolls back by itself, confidence ' + percent(one.confidence) : 'is not rolled back by itself' }}</span>
          </div>
          <data-table :label="'Arms of ' + one.id" :columns="columns" :rows="one.arms.map((arm) => ({ ...arm, id: arm.kind + arm.arm, of: one }))">
            <template #arm="{ row }">{{ row.arm }}<span class="muted">{{ row.kind === 'control' ? ' ' + row.model : row.kind === 'shadow' ? ' shadow' : '' }}</span>
              <q-badge v-if="!row.served" color="negative" label="not served" class="q-ml-xs" />
              <div v-if="row.rolled_back" class="text-negative reason">{{ row.rolled_back }}</div></template>
            <template #share="{ row }">{{ percent(row.share) }}</template>
            <template #requests="{ row }">{{ row.requests.toLocaleString('en') }}</template>
            <template v-for="column in figures" :key="column.name" #[column.name]="{ row }">
              <template v-if="row[column.name].mean == null">–</template>
              <template v-else>{{ column.show(row[column.name].mean) }}<div v-if="row[column.name].low != null" class="muted interval" :title="row[column.name].n + ' values'">{{ column.show(row[column.name].low) }} to {{ column.show(row[column.name].high) }}</div></template>
            </template>
            <template #actions="{ row }">
              <div v-if="row.kind === 'canary'" class="row no-wrap q-gutter-xs">
                <q-btn dense no-caps no-wrap outline color="primary" label="Promote" :aria-label="'Promote ' + row.arm" @click="ask(row, 'promote')" />
                <q-btn dense no-caps no-wrap outline color="negative" label="Roll back" :aria-label="'Roll back ' + row.arm" :disable="!row.share" @click="ask(row, 'rollback')" />
              </div>
            </template>
          </data-table>
          <details class="q-mt-sm"><summary>Changes ({{ one.events.length }})</summary>
            <ul class="changes"><li v-for="event in one.events" :key="event.at"><when :at="event.at" /> <b>{{ event.what }}</b> <span class="muted">{{ event.who }}</span><span v-if="event.why">: {{ event.why }}</span></li></ul>
          </details>
        </section>
        <p v-if="!experiments.length" class="empty">No experiments are configured. An experiment sends a share of the requests to another model and compares: add one under <code>experiments</code> in the configuration.</p>
        <p v-else class="muted">Figures are of the current stage; after a rollback, of the one before. Intervals hold at all times at once, however often you look.</p>
      </template>
      <q-dialog v-model="asking" aria-label="Change an experiment">
        <q-card class="ask" v-if="row">
          <q-card-section class="text-h6">{{ what === 'promote' ? 'Promote' : 'Roll back' }} {{ row.arm }}</q-card-section>
          <q-card-section class="q-pt-none">
            <template v-if="what === 'promote'">
              <div>Share of the requests: <b>{{ percent(to) }}</b></div>
              <q-slider v-model="to" :min="0.01" :max="1" :step="0.01" aria-label="Share" />
              <p class="muted">Users who are in it stay in it; new ones come from the control. Figures begin anew.</p>
            </template>
            <p v-else>{{ row.of.control }} answers everything that {{ row.arm }} gets now ({{ percent(row.share) }}).</p>
            <q-input v-model="why" label="Why (optional)" outlined dense maxlength="1000" />
          </q-card-section>
          <q-card-actions align="right"><q-btn flat no-caps label="Cancel" v-close-popup />
            <q-btn unelevated no-caps :color="what === 'promote' ? 'primary' : 'negative'" :label="what === 'promote' ? 'Give it ' + percent(to) : 'Roll back now'" @click="change" /></q-card-actions>
        </q-card>
      </q-dialog>
    </q-page>`,
  data: () => ({ experiments: [], asking: false, row: null, what: "", to: 1, why: "", columns: COLUMNS, figures: FIGURES, colors: COLORS }),
  methods: {
    percent,
    async read() {
      this.experiments = (await get("/v1/admin/experiments")).data;
    },
    ask(row, what) {
      const next = row.of.stages.find((stage) => stage > row.share);
      Object.assign(this, { row, what, why: "", asking: true, to: next ?? 1 });
    },
    async change() {
      const { row, what, to, why } = this;
      const body = { arm: row.arm, why, ...(what === "promote" ? { to: Number(to.toFixed(4)) } : {}) };
      this.asking = false;
      await this.act(() => post(`/v1/admin/experiments/${encodeURIComponent(row.of.id)}/${what}`, body), what === "promote" ? "Promoted" : "Rolled back");
    },
  },
};
