// Collections: upload files, watch them being indexed, search, and inspect the chunks.

import { call, get, post, remove } from "../api.js";
import { number } from "../format.js";

const TYPES = { md: "text/markdown", markdown: "text/markdown", html: "text/html", htm: "text/html", pdf: "application/pdf" };
const typeOf = (name) => TYPES[name.split(".").pop().toLowerCase()] || "text/plain";

export default {
  name: "Collections",
  template: `
    <q-page class="page">
      <h1>Collections</h1>
      <q-form class="row q-col-gutter-sm items-start" @submit="create">
        <q-input class="col-8 col-sm-4" v-model="fresh" label="New collection" outlined dense />
        <div class="col-4"><q-btn type="submit" color="primary" no-caps label="Create" :disable="!fresh" /></div>
      </q-form>
      <q-tabs v-if="collections.length" v-model="chosen" dense align="left" no-caps class="q-mt-md" aria-label="Collections"><q-tab v-for="one in collections" :key="one.id" :name="one.name" :label="one.name" /></q-tabs>
      <p v-else class="muted q-mt-md">No collections yet. Create one and drop files into it, or run <code>penstock ingest FOLDER</code>.</p>
      <template v-if="about">
        <div class="tiles q-mt-md">
          <div class="tile"><div class="value">{{ number(about.documents.total) }}</div><div class="name">documents</div></div>
          <div class="tile"><div class="value">{{ number(about.documents.ready) }}</div><div class="name">ready</div></div>
          <div class="tile"><div class="value">{{ number(about.chunks) }}</div><div class="name">chunks</div></div>
          <div class="tile"><div class="value">{{ number(about.tokens) }}</div><div class="name">tokens</div></div>
        </div>
        <label class="drop block q-mt-md" :class="{ over }" @dragover.prevent="over = true" @dragleave="over = false" @drop.prevent="drop">
          <q-icon name="upload_file" size="sm" /> Drop text, Markdown, HTML or PDF files here, or
          <span class="text-primary" style="text-decoration: underline">choose files</span>
          <input type="file" multiple class="sr-only" style="position: absolute; opacity: 0; width: 1px" accept=".txt,.md,.markdown,.html,.htm,.pdf,.rst,.py" @change="pick" />
        </label>
        <q-linear-progress v-if="sending" :value="sent / sending" class="q-mt-sm" :aria-label="sent + ' of ' + sending + ' files uploaded'" />
        <h2>Search</h2>
        <q-form @submit="search"><q-input v-model="query" outlined dense label="Search this collection" clearable><template #append><q-btn round dense flat icon="search" type="submit" aria-label="Search" :loading="searching" /></template></q-input></q-form>
        <div v-for="hit in hits" :key="hit.chunk_id || hit.id" class="q-mt-sm">
          <div class="facts"><strong>{{ hit.document?.name || hit.document_name || hit.document }}</strong><span>score {{ number(hit.score) }}</span></div>
          <div class="chunk" tabindex="0">{{ hit.text }}</div>
        </div>
        <h2>Documents</h2>
        <div class="wide-table"><table>
          <thead><tr><th>Name</th><th>State</th><th class="number">Chunks</th><th class="number">Tokens</th><th></th></tr></thead>
          <tbody><tr v-for="one in documents" :key="one.id"><td>{{ one.name }}</td><td><q-badge :color="one.status === 'failed' ? 'negative' : one.status === 'ready' ? 'positive' : 'warning'" outline :label="one.status" :title="one.error || ''" /></td><td class="number">{{ one.chunks ?? '–' }}</td><td class="number">{{ one.tokens ?? '–' }}</td>
            <td><q-btn flat dense no-caps size="sm" label="Chunks" @click="showChunks(one)" /><q-btn flat dense no-caps size="sm" color="negative" label="Delete" @click="act(remove(at('/documents/' + encodeURIComponent(one.id))))" /></td></tr>
            <tr v-if="!documents.length"><td colspan="5" class="muted">No documents yet.</td></tr></tbody>
        </table></div>
        <q-btn class="q-mt-md" flat dense no-caps color="negative" label="Delete this collection" @click="removeCollection" />
      </template>
      <q-dialog v-model="viewing"><q-card style="width: 760px; max-width: 94vw"><q-card-section class="text-subtitle1">Chunks</q-card-section>
        <q-card-section class="scroll" style="max-height: 70vh"><div v-for="chunk in chunks" :key="chunk.id" class="chunk" tabindex="0">{{ chunk.text }}</div></q-card-section></q-card></q-dialog>
    </q-page>`,
  data: () => ({ collections: [], chosen: null, about: null, documents: [], fresh: "", query: "", hits: [], searching: false, over: false, sending: 0, sent: 0, viewing: false, chunks: [] }),
  watch: {
    chosen() {
      this.hits = [];
      return this.open();
    },
  },
  mounted() {
    this.timer = setInterval(() => this.about && this.about.documents.total !== this.about.documents.ready && this.open(), 1500);
    return this.read();
  },
  beforeUnmount() {
    clearInterval(this.timer);
  },
  methods: {
    number,
    remove,
    at(rest = "") {
      return `/v1/collections/${encodeURIComponent(this.chosen)}${rest}`;
    },
    async read() {
      try {
        this.collections = (await get("/v1/collections")).data;
        if (!this.collections.some((one) => one.name === this.chosen)) this.chosen = this.collections[0]?.name ?? null;
      } catch (error) {
        this.$fail(error);
      }
    },
    async open() {
      if (!this.chosen) return (this.about = null);
      try {
        const [about, documents] = await Promise.all([get(this.at()), get(this.at("/documents?limit=100"))]);
        this.about = about;
        this.documents = documents.data;
      } catch (error) {
        this.$fail(error);
      }
    },
    async act(work) {
      try {
        await work;
      } catch (error) {
        this.$fail(error);
      }
      await this.open();
    },
    async create() {
      try {
        const made = await post("/v1/collections", { name: this.fresh });
        this.fresh = "";
        await this.read();
        this.chosen = made.name;
      } catch (error) {
        this.$fail(error);
      }
    },
    removeCollection() {
      this.$q.dialog({ title: "Delete this collection?", message: `${this.chosen} and all its documents will be deleted.`, cancel: true }).onOk(async () => {
        await this.act(remove(this.at()));
        this.chosen = null;
        await this.read();
      });
    },
    drop(event) {
      this.over = false;
      return this.send([...event.dataTransfer.files]);
    },
    pick(event) {
      return this.send([...event.target.files]);
    },
    async send(files) {
      this.sent = 0;
      this.sending = files.length;
      for (const file of files) {
        try {
          await call("POST", this.at(`/documents?name=${encodeURIComponent(file.name)}`), file, { type: typeOf(file.name) });
        } catch (error) {
          this.$fail(new Error(`${file.name}: ${error.message}`));
        }
        this.sent++;
      }
      this.sending = 0;
      await this.open();
    },
    async search() {
      if (!this.query) return;
      this.searching = true;
      try {
        this.hits = (await post(this.at("/search"), { query: this.query })).data;
      } catch (error) {
        this.$fail(error);
      } finally {
        this.searching = false;
      }
    },
    async showChunks(one) {
      try {
        this.chunks = (await get(this.at(`/documents/${encodeURIComponent(one.id)}/chunks`))).data;
        this.viewing = true;
      } catch (error) {
        this.$fail(error);
      }
    },
  },
};
