// Collections: upload files, watch them being indexed, search, and inspect the chunks.

import { get, list, post, remove, upload } from "../api.js";
import { bytes, number } from "../format.js";
import { refreshed } from "../widgets.js";

const TYPES = { md: "text/markdown", markdown: "text/markdown", html: "text/html", htm: "text/html", pdf: "application/pdf" };
const typeOf = (name) => TYPES[name.split(".").pop().toLowerCase()] || "text/plain";
const DOCUMENTS = [
  { name: "name", label: "Document", main: true },
  { name: "status", label: "State" },
  { name: "bytes", label: "Size", number: true },
  { name: "chunks", label: "Chunks", number: true },
  { name: "tokens", label: "Tokens", number: true },
  { name: "created_at", label: "Added" },
  { name: "actions", label: "" },
];
const PAGE = 100;
const ofChat = (one) => one.metadata?.console === "chat";

export default {
  name: "Collections",
  mixins: [refreshed(1.5)],
  template: `
    <q-page class="page">
      <div class="head"><h1>Collections</h1></div>
      <q-form v-if="loaded" class="row q-col-gutter-sm items-start" @submit="create">
        <q-input class="col-8 col-sm-4" v-model="fresh" label="New collection" outlined dense />
        <div class="col-4"><q-btn type="submit" color="primary" no-caps label="Create" :disable="!fresh" /></div>
      </q-form>
      <page-state :page="page" />
      <template v-if="loaded">
      <q-toggle v-if="collections.some(ofChat)" v-model="withChats" dense class="q-mt-sm" :label="'Show files of chats (' + collections.filter(ofChat).length + ')'" />
      <q-tabs v-if="shown.length" v-model="chosen" dense align="left" no-caps class="q-mt-md" aria-label="Collections"><q-tab v-for="one in shown" :key="one.id" :name="one.name" :label="ofChat(one) ? one.description || 'of a chat' : one.name" /></q-tabs>
      <p v-else class="empty q-mt-md">No collections yet. Create one and drop files into it, or run <code>penstock ingest FOLDER</code>. Models then answer from it: choose it in the playground's settings, or send <code>rag</code> with a request.</p>
      <template v-if="about">
        <div class="tiles q-mt-md">
          <div class="tile"><div class="value">{{ number(about.documents.total) }}</div><div class="name">documents</div></div>
          <div class="tile"><div class="value" data-test="ready">{{ number(about.documents.ready) }}</div><div class="name">ready</div></div>
          <div class="tile"><div class="value">{{ number(about.chunks) }}</div><div class="name">chunks</div></div>
          <div class="tile"><div class="value">{{ number(about.tokens) }}</div><div class="name">tokens</div></div>
        </div>
        <label class="drop block q-mt-md" :class="{ over }" @dragover.prevent="over = true" @dragleave="over = false" @drop.prevent="drop">
          <q-icon name="upload_file" size="sm" /> Drop text, Markdown, HTML or PDF files here, or
          <span class="text-primary" style="text-decoration: underline">choose files</span>
          <input type="file" multiple style="position: absolute; opacity: 0; width: 1px" aria-label="Files" accept=".txt,.md,.markdown,.html,.htm,.pdf,.rst,.py" @change="pick" />
        </label>
        <div v-for="one in uploads" :key="one.name" class="q-mt-sm" data-test="upload">
          <div class="row no-wrap" style="font-size: 0.85rem"><span class="ellipsis">{{ one.name }}</span><q-space /><span :class="one.problem ? 'text-negative' : 'muted'">{{ one.problem || (one.share < 1 ? Math.round(100 * one.share) + '% sent' : 'sent') }}</span><q-btn v-if="one.problem" flat dense round size="xs" icon="close" aria-label="Dismiss" @click="uploads = uploads.filter((each) => each !== one)" /></div>
          <q-linear-progress :value="one.share" :color="one.problem ? 'negative' : 'primary'" :aria-label="one.name + ', ' + Math.round(100 * one.share) + '% sent'" />
        </div>
        <h2>Search</h2>
        <q-form class="row no-wrap q-gutter-sm items-start" @submit="search"><q-input class="col" v-model="query" outlined dense label="Search this collection" clearable @clear="hits = null" /><q-btn type="submit" color="primary" unelevated icon="search" aria-label="Search" style="height: 40px" :loading="searching" :disable="!query" /></q-form>
        <q-banner v-if="searchProblem" dense rounded class="problem q-mt-sm" role="alert">{{ searchProblem }}</q-banner>
        <div v-if="hits" role="region" aria-label="Results">
          <p v-if="!hits.length" class="muted q-mt-sm">Nothing was found. {{ about.documents.ready ? 'Try other words.' : 'No document is ready yet.' }}</p>
          <div v-for="(hit, index) in hits" :key="hit.chunk_id" class="q-mt-sm" data-test="hit">
            <div class="facts"><strong>{{ index + 1 }}. {{ hit.document }}</strong><span v-if="hit.heading">{{ hit.heading }}</span><span v-if="hit.position?.page != null">page {{ hit.position.page }}</span><span>characters {{ number(hit.position.start) }} to {{ number(hit.position.end) }}</span><span>score {{ number(hit.score) }}</span><span v-for="(score, name) in hit.scores" :key="name">{{ name }} {{ number(score) }}</span><span>{{ hit.tokens }} tokens</span></div>
            <div class="chunk" tabindex="0">{{ hit.text }}</div>
            <copy-id :value="hit.chunk_id" what="chunk id" />
          </div>
        </div>
        <h2>Documents</h2>
        <data-table label="Documents" :columns="columns" :rows="documents">
          <template #status="{ row }"><q-badge :color="row.status === 'failed' ? 'negative' : row.status === 'ready' ? 'positive' : 'warning'" outline :label="row.status === 'ready' || row.status === 'failed' || !row.chunks ? row.status : row.status + ' ' + row.chunks_done + '/' + row.chunks" /><div v-if="row.error" class="text-negative" style="font-size: 0.78rem">{{ row.error }}</div><div v-if="row.duplicate_of" class="muted" style="font-size: 0.78rem">the same as another</div></template>
          <template #bytes="{ row }">{{ bytes(row.bytes) }}</template>
          <template #created_at="{ row }"><when :at="row.created_at" /></template>
          <template #actions="{ row }"><div class="row no-wrap justify-end"><q-btn flat dense no-caps size="sm" label="Chunks" @click="showChunks(row)" /><q-btn flat dense no-caps size="sm" color="negative" label="Delete" @click="removeDocument(row)" /></div></template>
          <template #empty>No documents yet: drop files above.</template>
        </data-table>
        <div v-if="more" class="text-center q-mt-sm"><q-btn flat no-caps color="primary" label="More documents" @click="most += ${PAGE}; run(() => {})" /></div>
        <q-btn class="q-mt-md" flat dense no-caps color="negative" label="Delete this collection" @click="removeCollection" />
      </template>
      </template>
      <q-dialog v-model="viewing"><q-card style="width: 760px; max-width: 94vw"><q-card-section class="row items-center"><span class="text-subtitle1">Chunks of {{ viewed }}</span><q-space /><q-btn v-close-popup flat round dense icon="close" aria-label="Close" /></q-card-section>
        <q-card-section class="scroll" style="max-height: 70vh"><div v-for="chunk in chunks" :key="chunk.id"><div class="facts"><span v-if="chunk.heading">{{ chunk.heading }}</span><span>{{ chunk.tokens }} tokens</span><copy-id :value="chunk.id" what="chunk id" /></div><div class="chunk" tabindex="0">{{ chunk.text }}</div></div></q-card-section></q-card></q-dialog>
    </q-page>`,
  data: () => ({ collections: [], withChats: false, chosen: null, about: null, documents: [], most: PAGE, more: false, fresh: "", query: "", hits: null, searching: false, searchProblem: "", over: false, uploads: [], viewing: false, viewed: "", chunks: [], columns: DOCUMENTS }),
  computed: {
    shown() {
      return this.withChats ? this.collections : this.collections.filter((one) => !ofChat(one));
    },
  },
  watch: {
    chosen() {
      [this.hits, this.searchProblem, this.most] = [null, "", PAGE];
      return this.open().catch(this.$fail);
    },
    shown() {
      if (!this.shown.some((one) => one.name === this.chosen)) this.chosen = this.shown[0]?.name ?? null;
    },
  },
  methods: {
    bytes,
    number,
    ofChat,
    at(rest = "") {
      return `/v1/collections/${encodeURIComponent(this.chosen)}${rest}`;
    },
    async read() {
      // While documents are being indexed, every time; otherwise only the first.
      if (this.loaded && this.about && this.about.documents.total === this.about.documents.ready + this.about.documents.failed) return;
      if (!this.loaded) await this.list();
      else await this.open();
    },
    async list() {
      this.collections = (await list("/v1/collections")).data;
    },
    async open() {
      if (!this.chosen) return (this.about = null);
      const [about, documents] = await Promise.all([get(this.at()), list(this.at("/documents"), this.most)]);
      [this.about, this.documents, this.more] = [about, documents.data, documents.more];
    },
    async create() {
      try {
        const made = await post("/v1/collections", { name: this.fresh });
        this.fresh = "";
        await this.list();
        this.chosen = made.name;
      } catch (error) {
        this.$fail(error);
      }
    },
    async removeDocument(row) {
      if (!(await this.$confirm(`Delete ${row.name}?`, "Its chunks are no longer found; the file itself is not kept here.", "Delete"))) return;
      await this.run(() => remove(this.at(`/documents/${encodeURIComponent(row.id)}`)));
    },
    async removeCollection() {
      if (!(await this.$confirm("Delete this collection?", `${this.chosen} and all its documents will be deleted.`, "Delete"))) return;
      await this.run(async () => {
        await remove(this.at());
        this.about = null;
        await this.list();
      });
    },
    async run(work) {
      try {
        await work();
        await this.open();
      } catch (error) {
        this.$fail(error);
      }
    },
    drop(event) {
      this.over = false;
      return this.send([...event.dataTransfer.files]);
    },
    async pick(event) {
      await this.send([...event.target.files]);
      event.target.value = "";
    },
    async send(files) {
      for (const file of files) {
        this.uploads = [...this.uploads.filter((one) => one.name !== file.name), { name: file.name, share: 0, problem: "" }];
        const one = this.uploads[this.uploads.length - 1];
        try {
          await upload(this.at(`/documents?name=${encodeURIComponent(file.name)}`), file, { type: typeOf(file.name), onProgress: (share) => (one.share = share) });
          one.share = 1;
          setTimeout(() => (this.uploads = this.uploads.filter((each) => each !== one)), 3000);
        } catch (error) {
          one.problem = error.message;
        }
        await this.open().catch(this.$fail);
      }
    },
    async search() {
      if (!this.query) return;
      this.searching = true;
      this.searchProblem = "";
      try {
        this.hits = (await post(this.at("/search"), { query: this.query })).data;
      } catch (error) {
        [this.hits, this.searchProblem] = [null, error.message];
      } finally {
        this.searching = false;
      }
    },
    async showChunks(one) {
      try {
        this.chunks = (await get(this.at(`/documents/${encodeURIComponent(one.id)}/chunks`))).data;
        [this.viewed, this.viewing] = [one.name, true];
      } catch (error) {
        this.$fail(error);
      }
    },
  },
};
