// What several pages are made of: tables that stack on a phone, ids with a copy button, relative times, bars of a limit,
// and the states of a page that has not loaded or cannot.

import { h, reactive, watch } from "./lib/vue.js";
import { Unreachable } from "./api.js";
import { connection } from "./connection.js";
import { copy, relative } from "./format.js";

const clock = reactive({ now: Date.now() / 1000 });
setInterval(() => (clock.now = Date.now() / 1000), 5000);

const When = {
  props: { at: Number },
  setup: (props) => () =>
    props.at == null
      ? h("span", "–")
      : h("time", { datetime: new Date(props.at * 1000).toISOString(), title: new Date(props.at * 1000).toLocaleString() }, relative(props.at, clock.now)),
};

const CopyId = {
  props: { value: String, what: { type: String, default: "id" } },
  template: `<span class="id"><code>{{ value }}</code><q-btn flat dense round size="xs" :icon="copied ? 'done' : 'content_copy'" :aria-label="'Copy ' + what" @click.stop.prevent="take" /></span>`,
  data: () => ({ copied: false }),
  methods: {
    async take() {
      try {
        await copy(this.value);
        this.copied = true;
        setTimeout(() => (this.copied = false), 2000);
      } catch (error) {
        this.$fail(error);
      }
    },
  },
};

// How much of a limit is used.
const LimitBar = {
  props: { name: String, used: Number, most: Number, show: { type: Function, default: (value) => value.toLocaleString("en") } },
  computed: {
    share() {
      return this.most > 0 ? Math.min(this.used / this.most, 1) : this.used > 0 ? 1 : 0;
    },
    state() {
      return this.share >= 1 ? "full" : this.share >= 0.8 ? "tight" : "";
    },
  },
  template: `
    <div class="limit-bar" role="meter" :aria-label="name" :aria-valuenow="used" aria-valuemin="0" :aria-valuemax="most">
      <div class="row no-wrap items-baseline"><span class="name">{{ name }}</span><q-space /><span class="figures">{{ show(used) }} of {{ show(most) }}</span></div>
      <div class="track"><div :class="state" :style="{ width: (100 * share) + '%' }"></div></div>
    </div>`,
};

// columns: {name, label, number, main}; a slot of the column's name draws its cells. On a phone every row is a card.
const DataTable = {
  props: { columns: Array, rows: Array, rowKey: { type: String, default: "id" }, opens: Boolean, label: String },
  emits: ["open"],
  template: `
    <div class="sheet"><table role="table" :aria-label="label">
      <thead role="rowgroup"><tr role="row"><th v-for="column in columns" :key="column.name" role="columnheader" scope="col" :class="{ number: column.number }">{{ column.label }}</th></tr></thead>
      <tbody role="rowgroup">
        <tr v-for="(row, index) in rows" :key="row[rowKey] ?? index" role="row" :class="{ opens }" :tabindex="opens ? 0 : null" @click="opens && $emit('open', row)" @keydown.enter.self="opens && $emit('open', row)">
          <td v-for="column in columns" :key="column.name" role="cell" :class="{ number: column.number, main: column.main, text: column.text }" :data-label="column.label"><slot :name="column.name" :row="row">{{ column.label ? row[column.name] ?? '–' : '' }}</slot></td>
        </tr>
        <tr v-if="!rows.length" role="row" class="none"><td role="cell" :colspan="columns.length"><slot name="empty">Nothing yet.</slot></td></tr>
      </tbody>
    </table></div>`,
};

// Shown in place of a page's content until that can be read.
const PageState = {
  props: { page: Object },
  setup: () => ({ connection }),
  template: `
    <q-banner v-if="page.problem" rounded inline-actions class="problem q-my-md" role="alert"><q-icon name="error_outline" size="20px" class="q-mr-sm" />{{ page.problem }}
      <template #action><q-btn flat no-caps label="Try again" @click="page.refresh()" /></template></q-banner>
    <div v-else-if="!page.loaded" class="waiting" role="status">
      <q-spinner size="28px" color="primary" /><span>{{ connection.down ? 'Waiting for the server.' : 'Loading' }}</span>
    </div>`,
};

// A page that reads the server when it is opened, every so many seconds (none: never again), and when a server that was
// away is back. The page has a method `read`.
export const refreshed = (seconds = null) => ({
  data: () => ({ loaded: false, problem: "" }),
  computed: {
    page() {
      return this;
    },
  },
  mounted() {
    const again = async () => {
      if (!connection.down && !document.hidden) await this.refresh();
      if (seconds !== null && !this.gone) this.timer = setTimeout(again, seconds * 1000);
    };
    this.unwatch = watch(() => connection.restored, () => this.refresh());
    return again();
  },
  beforeUnmount() {
    this.gone = true;
    clearTimeout(this.timer);
    this.unwatch();
  },
  methods: {
    async refresh() {
      try {
        await this.read();
        this.problem = "";
        this.loaded = true;
      } catch (error) {
        if (!(error instanceof Unreachable)) this.problem = error.message;
      }
    },
    // Does something, says that it is done or why not, and reads the page again.
    async act(work, said = "Done") {
      try {
        const result = await work();
        if (said) this.$done(said);
        await this.refresh();
        return result ?? true;
      } catch (error) {
        this.$fail(error);
        return false;
      }
    },
  },
});

export function install(app) {
  for (const [name, component] of Object.entries({ When, CopyId, LimitBar, DataTable, PageState })) app.component(name, component);
  const notify = window.Quasar.Notify;
  const said = { position: "top", multiLine: false, classes: "toast" };
  app.config.globalProperties.$done = (message) => notify.create({ ...said, type: "positive", message, timeout: 2500 });
  // The shell itself says that the server is away.
  app.config.globalProperties.$fail = (error) =>
    error instanceof Unreachable || notify.create({ ...said, type: "negative", message: error.message, timeout: 10_000, actions: [{ icon: "close", color: "white", round: true, "aria-label": "Dismiss" }] });
  app.config.globalProperties.$confirm = (title, message, verb) =>
    new Promise((resolve) =>
      window.Quasar.Dialog.create({ title, message, cancel: { flat: true, noCaps: true, label: "Cancel" }, ok: { label: verb, color: "negative", unelevated: true, noCaps: true }, focus: "cancel" })
        .onOk(() => resolve(true))
        .onCancel(() => resolve(false)),
    );
}
