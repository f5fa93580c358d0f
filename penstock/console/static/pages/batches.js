// Batches: create one from a file of requests, follow its progress, cancel it, and download its output and errors.

import { call, list, post, upload } from "../api.js";
import { bytes, number, save } from "../format.js";
import { refreshed } from "../widgets.js";

const ENDPOINTS = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"];
const WINDOWS = [
  { label: "an hour", value: "1h" },
  { label: "24 hours", value: "24h" },
  { label: "7 days", value: "7d" },
];
const OVER = ["completed", "failed", "expired", "cancelled"];
const COLOURS = { completed: "positive", failed: "negative", expired: "negative", cancelled: "grey" };
const COLUMNS = [
  { name: "id", label: "Batch", main: true },
  { name: "status", label: "State" },
  { name: "progress", label: "Progress" },
  { name: "endpoint", label: "Endpoint" },
  { name: "created_at", label: "Created" },
  { name: "actions", label: "" },
];

export default {
  name: "Batches",
  mixins: [refreshed(2)],
  template: `
    <q-page class="page">
      <div class="head"><h1>Batches</h1></div>
      <div class="panel q-mb-md">
        <label class="drop block" :class="{ over }" @dragover.prevent="over = true" @dragleave="over = false" @drop.prevent="drop">
          <q-icon name="upload_file" size="sm" /> <template v-if="file"><b>{{ file.name }}</b>, {{ bytes(file.size) }}, {{ number(lines) }} {{ lines === 1 ? 'request' : 'requests' }}</template>
          <template v-else>Drop a file of requests here (JSON lines), or <span class="text-primary" style="text-decoration: underline">choose a file</span></template>
          <input type="file" style="position: absolute; opacity: 0; width: 1px" accept=".jsonl,.ndjson,.json,.txt" aria-label="File of requests" @change="pick" />
        </label>
        <div class="row q-col-gutter-sm items-center q-mt-xs">
          <q-select class="col-12 col-sm-4" v-model="endpoint" :options="endpoints" label="Endpoint" outlined dense options-dense />
          <q-select class="col-6 col-sm-3" v-model="within" :options="windows" emit-value map-options label="Done within" outlined dense options-dense />
          <div class="col-6 col-sm-3"><q-btn color="primary" no-caps label="Create batch" :disable="!file" :loading="sending !== null" @click="create" /></div>
        </div>
        <q-linear-progress v-if="sending !== null" :value="sending" class="q-mt-sm" :aria-label="'Upload, ' + Math.round(100 * sending) + '%'" />
        <q-banner v-if="wrong" dense rounded class="problem q-mt-sm" role="alert">{{ wrong }}</q-banner>
        <p class="muted q-mt-sm q-mb-none" style="font-size: 0.82rem">One request per line: <code>{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {…}}</code>. Batches run when nobody waits.</p>
      </div>
      <page-state :page="page" />
      <data-table v-if="loaded" label="Batches" :columns="columns" :rows="batches">
        <template #id="{ row }"><copy-id :value="row.id" what="batch id" /></template>
        <template #status="{ row }"><q-badge outline :color="colours[row.status] || 'warning'" :label="row.status.replace('_', ' ')" /></template>
        <template #progress="{ row }"><div style="min-width: 150px"><q-linear-progress :value="done(row)" :color="row.request_counts.failed ? 'warning' : 'primary'" :aria-label="'Progress, ' + Math.round(100 * done(row)) + '%'" />
          <span class="muted" style="font-size: 0.78rem">{{ row.request_counts.completed }} of {{ row.request_counts.total }} done<span v-if="row.request_counts.failed" class="text-negative">, {{ row.request_counts.failed }} failed</span></span></div></template>
        <template #created_at="{ row }"><when :at="row.created_at" /></template>
        <template #actions="{ row }"><div class="row no-wrap justify-end">
          <q-btn v-if="row.output_file_id" flat dense no-caps size="sm" icon="download" label="Output" @click="download(row.output_file_id, row.id + '-output.jsonl')" />
          <q-btn v-if="row.error_file_id" flat dense no-caps size="sm" icon="download" label="Errors" color="negative" @click="download(row.error_file_id, row.id + '-errors.jsonl')" />
          <q-btn v-if="row.errors" flat dense no-caps size="sm" label="Why" color="negative" @click="problems = row.errors.data" />
          <q-btn v-if="!over_.includes(row.status) && row.status !== 'cancelling'" flat dense no-caps size="sm" color="negative" label="Cancel" @click="cancel(row)" /></div></template>
        <template #empty>No batches yet. Drop a file of requests above, or send one with <code>client.batches.create(…)</code>.</template>
      </data-table>
      <div v-if="more" class="text-center q-mt-sm"><q-btn flat no-caps color="primary" label="Older batches" @click="most += 100; refresh()" /></div>
      <q-dialog :model-value="!!problems" @update:model-value="problems = null"><q-card style="width: 640px; max-width: 94vw"><q-card-section class="text-subtitle1">Why the batch was refused</q-card-section>
        <q-card-section class="scroll" style="max-height: 60vh"><p v-for="(one, index) in problems" :key="index"><b v-if="one.line">Line {{ one.line }}: </b>{{ one.message }}</p></q-card-section>
        <q-card-actions align="right"><q-btn v-close-popup flat no-caps label="Close" /></q-card-actions></q-card></q-dialog>
    </q-page>`,
  data: () => ({ batches: [], most: 100, more: false, file: null, lines: 0, endpoint: ENDPOINTS[0], within: "24h", sending: null, wrong: "", over: false, problems: null, endpoints: ENDPOINTS, windows: WINDOWS, columns: COLUMNS, colours: COLOURS, over_: OVER }),
  methods: {
    bytes,
    number,
    done: (row) => (row.request_counts.total ? (row.request_counts.completed + row.request_counts.failed) / row.request_counts.total : row.status === "completed" ? 1 : 0),
    async read() {
      const found = await list("/v1/batches", this.most);
      [this.batches, this.more] = [found.data, found.more];
    },
    drop(event) {
      this.over = false;
      return this.take(event.dataTransfer.files[0]);
    },
    async pick(event) {
      const file = event.target.files[0];
      event.target.value = ""; // so that the same file can be chosen again, once it is mended
      await this.take(file);
    },
    async take(file) {
      if (!file) return;
      this.wrong = "";
      const lines = (await file.text()).split("\n").filter((line) => line.trim());
      try {
        const url = JSON.parse(lines[0] || "null")?.url;
        if (ENDPOINTS.includes(url)) this.endpoint = url;
      } catch (error) {
        this.wrong = `The first line of ${file.name} is not JSON: ${error.message}`;
        return;
      }
      [this.file, this.lines] = [file, lines.length];
    },
    async create() {
      const form = new FormData();
      form.append("purpose", "batch");
      form.append("file", this.file, this.file.name);
      this.sending = 0;
      this.wrong = "";
      try {
        const sent = await upload("/v1/files", form, { onProgress: (share) => (this.sending = share) });
        const made = await post("/v1/batches", { input_file_id: sent.id, endpoint: this.endpoint, completion_window: this.within });
        this.file = null;
        this.$done(`Batch ${made.id} created`);
        await this.refresh();
      } catch (error) {
        this.wrong = error.message;
      } finally {
        this.sending = null;
      }
    },
    async cancel(row) {
      if (await this.$confirm("Cancel this batch?", "Requests that are answered stay answered and are charged; the others are not sent.", "Cancel the batch")) await this.act(() => post(`/v1/batches/${row.id}/cancel`, undefined), "Cancelled");
    },
    async download(file, name) {
      try {
        save(name, await (await call("GET", `/v1/files/${file}/content`)).text(), "application/jsonl");
      } catch (error) {
        this.$fail(error);
      }
    },
  },
};
