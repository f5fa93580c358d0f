// Starts the console: loads the UI library, then the shell with its sign-in, then the page named after the # in the URL.

import * as Vue from "./lib/vue.js";
import { ApiError, call, session, signIn } from "./api.js";

// `needs`: an endpoint that the key must be allowed to read for the page to be shown.
const PAGES = [
  { name: "playground", label: "Playground", icon: "chat", needs: "/v1/models" },
  { name: "live", label: "Live", icon: "insights", needs: "/metrics" },
  { name: "plan", label: "Plan", icon: "trending_up", needs: "/v1/admin/plan" },
  { name: "usage", label: "Usage and cost", icon: "payments", needs: "/v1/models" },
  { name: "keys", label: "Tenants and keys", icon: "vpn_key", needs: "/v1/admin/tenants" },
  { name: "models", label: "Models", icon: "memory", needs: "/v1/models" },
  { name: "adapters", label: "Adapters", icon: "extension", needs: "/v1/models" },
  { name: "collections", label: "Collections", icon: "library_books", needs: "/v1/models" },
];

function loadScript(source) {
  return new Promise((resolve, reject) => {
    document.head.append(Object.assign(document.createElement("script"), { src: source, onload: resolve, onerror: reject }));
  });
}

// Whether this key may read a path; 404 means that it is served on another port.
async function allowed(path) {
  try {
    await call("GET", path);
    return true;
  } catch (error) {
    if (error instanceof ApiError && [401, 403, 404].includes(error.status)) return false;
    throw error;
  }
}

// A server without keys is open; otherwise the console needs a key with the scope admin.
const admitted = () => allowed("/v1/admin/tenants");

const SignIn = {
  template: `
    <main class="page" style="max-width: 420px; margin-top: 12vh">
      <h1 class="brand"><img src="icon.svg" alt="" /> Penstock</h1>
      <p class="muted">This server requires an API key. Sign in with a key that has the scope <code>admin</code> (the scopes <code>inference</code> and <code>metrics</code> also give access to the playground and the live view). The key is stored in this tab only.</p>
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
        if (await admitted()) return this.$emit("entered");
        this.problem = "This key is not valid, or does not have the scope admin.";
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
    <sign-in v-if="state === 'outside'" @entered="open" />
    <q-banner v-else-if="state === 'broken'" class="bg-negative text-white" role="alert">{{ problem }}
      <template #action><q-btn flat label="Try again" @click="begin" /></template></q-banner>
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
      </q-header>
      <q-drawer v-model="menu" show-if-above bordered :width="210" :breakpoint="1023">
        <q-list padding role="navigation" aria-label="Pages">
          <q-item v-for="page in pages" :key="page.name" clickable :href="'#' + page.name" :active="page.name === current.name" :aria-current="page.name === current.name ? 'page' : null">
            <q-item-section avatar style="min-width: 40px"><q-icon :name="page.icon" /></q-item-section>
            <q-item-section>{{ page.label }}</q-item-section>
          </q-item>
        </q-list>
      </q-drawer>
      <q-page-container>
        <keep-alive include="Playground"><component :is="view" v-if="view" :key="current.name" /></keep-alive>
      </q-page-container>
    </q-layout>`,
  setup: () => ({ view: Vue.shallowRef(null) }),
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
    await this.begin();
  },
  methods: {
    async begin() {
      try {
        if (await admitted()) await this.open();
        else this.state = "outside";
      } catch (error) {
        this.state = "broken";
        this.problem = `The server cannot be reached: ${error.message}`;
      }
    },
    async open() {
      this.signedIn = Boolean(session.key);
      const may = Object.fromEntries(await Promise.all([...new Set(PAGES.map((page) => page.needs))].map(async (path) => [path, await allowed(path)])));
      this.pages = PAGES.filter((page) => may[page.needs]);
      await this.show();
      this.state = "inside";
    },
    async show() {
      const wanted = location.hash.slice(1).split("/")[0];
      this.current = this.pages.find((page) => page.name === wanted) || this.pages[0];
      const module = await import(`./pages/${this.current.name}.js`);
      this.view = module.default;
      document.title = `${this.current.label} · Penstock`;
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
app.config.globalProperties.$fail = (error) => window.Quasar.Notify.create({ type: "negative", message: error.message, timeout: 6000 });
app.config.globalProperties.$done = (message) => window.Quasar.Notify.create({ type: "positive", message, timeout: 2500 });
app.mount("#app");
