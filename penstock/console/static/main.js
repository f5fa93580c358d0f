// Starts the console: loads the UI library, then the shell with its sign-in, then the page named after the # in the URL.

import * as Vue from "./lib/vue.js";
import { ApiError, call, get, session, signIn, Unreachable } from "./api.js";
import { connection, lost, probe } from "./connection.js";
import { clock } from "./format.js";
import { install } from "./widgets.js";

// `needs`: endpoints, one of which the key must be allowed to read for the page to be shown.
const INFERENCE = "/v1/models";
const ADMIN = "/v1/admin/tenants";
const PAGES = [
  { name: "playground", label: "Playground", icon: "chat", needs: [INFERENCE] },
  { name: "collections", label: "Collections", icon: "library_books", needs: [INFERENCE] },
  { name: "batches", label: "Batches", icon: "inventory_2", needs: [INFERENCE] },
  { name: "requests", label: "Requests", icon: "list_alt", needs: [INFERENCE, ADMIN], group: "Account" },
  { name: "usage", label: "Usage and cost", icon: "payments", needs: [INFERENCE], group: "Account" },
  { name: "account", label: "Limits and keys", icon: "account_circle", needs: [INFERENCE], group: "Account", keyed: true },
  { name: "live", label: "Live", icon: "insights", needs: ["/metrics"], group: "Operation" },
  { name: "plan", label: "Plan", icon: "trending_up", needs: ["/v1/admin/plan"], group: "Operation" },
  { name: "machines", label: "Machines", icon: "dns", needs: ["/v1/admin/fleet"], group: "Operation" },
  { name: "models", label: "Models", icon: "memory", needs: [INFERENCE, ADMIN], group: "Operation" },
  { name: "adapters", label: "Adapters", icon: "extension", needs: [ADMIN], group: "Operation" },
  { name: "routes", label: "Routes", icon: "alt_route", needs: [ADMIN], group: "Operation" },
  { name: "experiments", label: "Experiments", icon: "science", needs: [ADMIN], group: "Operation" },
  { name: "feedback", label: "Feedback", icon: "thumbs_up_down", needs: [ADMIN], group: "Operation" },
  { name: "caches", label: "Caches", icon: "cached", needs: [INFERENCE, ADMIN], group: "Operation" },
  { name: "tools", label: "Tools", icon: "build", needs: [ADMIN], group: "Operation" },
  { name: "keys", label: "Tenants and keys", icon: "vpn_key", needs: [ADMIN], group: "Operation" },
  { name: "webhooks", label: "Webhooks", icon: "campaign", needs: ["/v1/admin/webhooks"], group: "Operation" },
  { name: "audit", label: "Audit log", icon: "policy", needs: ["/v1/admin/audit"], group: "Operation" },
];

function loadScript(source) {
  return new Promise((resolve, reject) => {
    document.head.append(Object.assign(document.createElement("script"), { src: source, onload: resolve, onerror: reject }));
  });
}

// Whether this key may read a path; 404 means that it is served on another port, 503 that the feature is off.
async function allowed(path) {
  try {
    await call("GET", path);
    return true;
  } catch (error) {
    if (error instanceof ApiError && [401, 403, 404, 503].includes(error.status)) return false;
    throw error;
  }
}

const scopeOf = (path) => (path === "/metrics" ? "metrics" : path.startsWith("/v1/admin/") ? "admin" : "inference");

// The scopes of the key; all, where the server does not tell: then it shows when they are used.
async function scopes() {
  try {
    return (await get("/v1/account")).scopes;
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) return [];
    if (error instanceof ApiError && [403, 404, 503].includes(error.status)) return ["inference", "admin", "metrics"];
    throw error;
  }
}

// The pages that this key opens; none: it is not valid. A server without keys opens all.
async function openPages() {
  const held = await scopes();
  const paths = [...new Set(PAGES.flatMap((page) => page.needs))].filter((path) => held.includes(scopeOf(path)));
  const may = Object.fromEntries(await Promise.all(paths.map(async (path) => [path, await allowed(path)])));
  session.admin = Boolean(may[ADMIN]);
  return PAGES.filter((page) => page.needs.some((path) => may[path]) && (!page.keyed || session.key));
}

const SignIn = {
  template: `
    <main class="page" style="max-width: 420px; margin-top: 12vh">
      <h1 class="brand"><img src="icon.svg" alt="" /> Penstock</h1>
      <p class="muted">This server requires an API key. Any key shows the playground and what belongs to its tenant: usage, limits, keys, requests, batches and collections. The scope <code>admin</code> adds administration, <code>metrics</code> the live view. The key is stored in this tab only.</p>
      <q-form @submit="enter">
        <q-input v-model="key" type="password" outlined autofocus label="API key" autocomplete="off" :error="!!problem" :error-message="problem" />
        <q-btn class="q-mt-sm full-width" type="submit" color="primary" label="Sign in" :loading="busy" :disable="!key" no-caps />
      </q-form>
    </main>`,
  emits: ["entered"],
  data: () => ({ key: "", problem: "", busy: false }),
  methods: {
    async enter() {
      this.busy = true;
      this.problem = "";
      signIn(this.key.trim());
      try {
        const pages = await openPages();
        if (pages.length) return this.$emit("entered", pages);
        this.problem = "This key is not valid: it may have been mistyped, revoked, or have expired.";
      } catch (error) {
        this.problem = error.message;
      } finally {
        this.busy = false;
      }
      signIn("");
    },
  },
};

const Shell = {
  components: { SignIn },
  template: `
    <main v-if="connection.down && state !== 'inside'" class="away" role="alert">
      <q-icon name="cloud_off" size="48px" class="muted" />
      <h1>The server does not answer</h1>
      <p class="muted">The console asks it again every two seconds and opens by itself when it is back.</p>
      <q-btn outline no-caps color="primary" label="Ask now" @click="probe" />
    </main>
    <sign-in v-else-if="state === 'outside'" @entered="open" />
    <main v-else-if="state === 'broken'" class="away" role="alert">
      <q-icon name="error_outline" size="48px" class="muted" />
      <h1>The server cannot be used</h1><p class="muted">{{ problem }}</p>
      <q-btn outline no-caps color="primary" label="Try again" @click="begin" />
    </main>
    <q-layout v-else-if="state === 'inside'" view="hHh LpR lFf">
      <q-header bordered :class="$q.dark.isActive ? 'bg-dark' : 'bg-white text-dark'">
        <q-toolbar style="min-height: 50px">
          <q-btn flat dense round icon="menu" aria-label="Menu" class="lt-md" @click="menu = !menu" />
          <div class="brand q-ml-sm"><img src="icon.svg" alt="" /><span>Penstock</span></div>
          <q-space />
          <span class="muted gt-xs q-mr-md">{{ current.label }}</span>
          <q-btn flat dense round :icon="$q.dark.isActive ? 'light_mode' : 'dark_mode'" :aria-label="$q.dark.isActive ? 'Light colours' : 'Dark colours'" @click="toggle" />
          <q-btn flat dense round icon="description" aria-label="API documentation" href="/docs" target="_blank" />
          <q-btn v-if="signedIn" flat dense round icon="logout" aria-label="Sign out" @click="leave" />
        </q-toolbar>
        <div v-if="connection.down" class="server-away" role="alert"><q-spinner size="16px" /> <span>The server has not answered since {{ clock(connection.since) }}. This page continues by itself when it is back.</span><q-btn flat dense no-caps size="sm" label="Ask now" @click="probe" /></div>
      </q-header>
      <q-drawer v-model="menu" show-if-above bordered :width="210" :breakpoint="1023">
        <q-list padding role="navigation" aria-label="Pages">
          <template v-for="(page, index) in pages" :key="page.name">
            <q-item-label v-if="page.group && page.group !== pages[index - 1]?.group" header class="menu-group">{{ page.group }}</q-item-label>
            <q-item dense clickable :href="'#' + page.name" :active="page.name === current.name" :aria-current="page.name === current.name ? 'page' : null">
              <q-item-section avatar style="min-width: 40px"><q-icon :name="page.icon" size="20px" /></q-item-section>
              <q-item-section>{{ page.label }}</q-item-section>
            </q-item>
          </template>
        </q-list>
      </q-drawer>
      <q-page-container :class="{ stale: connection.down && current.name !== 'playground' }">
        <keep-alive include="Playground"><component :is="view" v-if="view" :key="current.name" /></keep-alive>
      </q-page-container>
    </q-layout>`,
  setup: () => ({ view: Vue.shallowRef(null), connection, probe, clock }),
  data: () => ({
    state: "starting",
    problem: "",
    menu: window.innerWidth > 1023,
    current: PAGES[0],
    pages: PAGES,
    signedIn: Boolean(session.key),
  }),
  async mounted() {
    const stored = localStorage.getItem("penstock.dark");
    this.$q.dark.set(stored === null ? "auto" : stored === "1");
    window.addEventListener("hashchange", () => this.show());
    window.addEventListener("penstock:online", () => (this.state === "inside" ? this.view || location.reload() : this.begin()));
    // The key was revoked or has expired, or the first key was made: but not while the only copy of a new key is shown.
    window.addEventListener("penstock:refused", () => {
      if (this.state === "inside" && !session.holdsKey) this.state = "outside";
    });
    await this.begin();
  },
  methods: {
    async begin() {
      try {
        const pages = await openPages();
        if (pages.length) await this.open(pages);
        else this.state = "outside";
      } catch (error) {
        if (error instanceof Unreachable) return;
        this.state = "broken";
        this.problem = error.message;
      }
    },
    async open(pages) {
      this.signedIn = Boolean(session.key);
      this.pages = pages;
      await this.show();
      this.state = "inside";
      // A page that is already here opens even when the server is away.
      for (const page of pages) import(`./pages/${page.name}.js`).catch(() => {});
    },
    async show() {
      const wanted = location.hash.slice(1).split("/")[0];
      this.current = this.pages.find((page) => page.name === wanted) || this.pages[0];
      document.title = `${this.current.label} · Penstock`;
      try {
        this.view = (await import(`./pages/${this.current.name}.js`)).default;
      } catch (error) {
        if (!(error instanceof TypeError)) throw error;
        // A file that did not arrive cannot be asked for again in the same document: it is reloaded when the server is back.
        this.view = null;
        lost();
      }
    },
    toggle() {
      this.$q.dark.toggle();
      localStorage.setItem("penstock.dark", this.$q.dark.isActive ? "1" : "0");
    },
    leave() {
      signIn("");
      location.hash = "";
      location.reload();
    },
  },
};

window.Vue = Vue; // the library expects it there
await loadScript("lib/quasar.js");
const app = Vue.createApp(Shell);
app.use(window.Quasar, { plugins: { Notify: window.Quasar.Notify, Dialog: window.Quasar.Dialog }, config: { brand: { primary: "#0f766e", dark: "#15191e", "dark-page": "#101317" } } });
install(app);
app.mount("#app");
