// Tool servers: APIs and MCP servers whose functions the gateway calls for models.

import { get, post, remove } from "../api.js";
import { refreshed } from "../widgets.js";

const COLUMNS = [
  { name: "name", label: "Server", main: true },
  { name: "kind", label: "Kind" },
  { name: "url", label: "Address" },
  { name: "functions", label: "Functions", text: true },
  { name: "tenants", label: "Tenants" },
  { name: "from", label: "From" },
  { name: "actions", label: "" },
];

// `Name: value` lines as an object. A line that is neither that nor empty must not get lost: it may be the key.
function parsed(lines) {
  const pairs = lines.split("\n").map((line) => line.trim()).filter(Boolean).map((line) => {
    const at = line.indexOf(":");
    if (at < 1) throw new Error(`A header is "Name: value", one per line; this is not: ${line.slice(0, 12)}${line.length > 12 ? "…" : ""}`);
    return [line.slice(0, at).trim(), line.slice(at + 1).trim()];
  });
  return Object.fromEntries(pairs);
}

export default {
  name: "Tools",
  mixins: [refreshed(15)],
  template: `
    <q-page class="page">
      <div class="head"><h1>Tool servers</h1></div>
      <q-form class="panel q-mb-md" @submit="register">
        <div class="row q-col-gutter-sm items-start">
          <q-input class="col-12 col-sm-3" v-model="fresh.name" label="Name" outlined dense />
          <q-select class="col-12 col-sm-3" v-model="fresh.kind" :options="kinds" emit-value map-options label="Kind" outlined dense options-dense />
          <q-input class="col-12 col-sm-6" v-model="fresh.url" :label="fresh.kind === 'mcp' ? 'URL of the MCP server' : 'Base URL (optional)'" outlined dense />
          <q-input v-if="fresh.kind === 'http'" class="col-12" v-model="fresh.openapi" type="textarea" autogrow label="OpenAPI document (JSON)" outlined dense input-class="mono" />
          <q-input class="col-12 col-sm-9" v-model="fresh.headers" label="Headers (optional)" hint="Name: value, one per line; stored and never shown again" type="textarea" autogrow outlined dense />
          <div class="col-12 col-sm-3"><q-btn type="submit" color="primary" no-caps label="Register" :loading="busy" :disable="!fresh.name" /></div>
        </div>
        <q-banner v-if="wrong" dense rounded class="problem q-mt-sm" role="alert">{{ wrong }}</q-banner>
      </q-form>
      <page-state :page="page" />
      <data-table v-if="loaded" label="Tool servers" :columns="columns" :rows="servers" row-key="name">
        <template #kind="{ row }"><q-badge outline color="primary" :label="row.kind" /></template>
        <template #functions="{ row }">{{ (functions[row.name] || row.allow).join(', ') || '–' }}</template>
        <template #tenants="{ row }">{{ row.tenants.join(', ') || 'all' }}</template>
        <template #actions="{ row }"><q-btn v-if="row.from === 'api'" flat dense no-caps size="sm" color="negative" label="Remove" @click="drop(row)" /></template>
        <template #empty>No tool servers. Register an MCP server or an HTTP API above, or add one under <code>tool_servers</code> in the configuration; requests name it in <code>server_tools</code>.</template>
      </data-table>
    </q-page>`,
  data: () => ({ servers: [], functions: {}, fresh: { name: "", kind: "mcp", url: "", openapi: "", headers: "" }, busy: false, wrong: "", columns: COLUMNS, kinds: [{ label: "MCP server", value: "mcp" }, { label: "HTTP API", value: "http" }] }),
  methods: {
    async read() {
      const [servers, usable] = await Promise.all([get("/v1/admin/tools"), get("/v1/tools").catch(() => ({ data: [] }))]);
      this.servers = servers.data;
      this.functions = Object.fromEntries(usable.data.map((one) => [one.name, one.functions.map((each) => each.name)]));
    },
    async register() {
      const { name, kind, url, openapi, headers } = this.fresh;
      this.wrong = "";
      this.busy = true;
      try {
        const sent = { name, headers: parsed(headers || "") };
        await post("/v1/admin/tools", kind === "mcp" ? { ...sent, mcp_url: url } : { ...sent, url, openapi: JSON.parse(openapi || "null") });
        this.fresh = { name: "", kind, url: "", openapi: "", headers: "" };
        this.$done(`${name} is registered`);
        await this.refresh();
      } catch (error) {
        this.wrong = error.message;
      } finally {
        this.busy = false;
      }
    },
    async drop(row) {
      if (await this.$confirm(`Remove ${row.name}?`, "Models can no longer call its functions.", "Remove")) await this.act(() => remove(`/v1/admin/tools/${encodeURIComponent(row.name)}`), "Removed");
    },
  },
};
