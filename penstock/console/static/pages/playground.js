// Playground: chat with any served model. Conversations are kept in the browser; each answer shows what it took.

import { ApiError, get, list, post, session } from "../api.js";
import { cost, newAnswer, stream } from "../chat/answer.js";
import { ACCEPTED, attach, detach, discard, finished, usable } from "../chat/attachments.js";
import ChatHistory from "../chat/history.js";
import ChatMessage from "../chat/message.js";
import ChatSettings, { changed, EMPTY } from "../chat/settings.js";
import SourceDialog from "../chat/source.js";
import { Store } from "../chat/store.js";
import { add, asMarkdown, asMessages, branch, choose, drop, newConversation, titleOf, versions } from "../chat/thread.js";
import { copy, money, number, save } from "../format.js";
import { asCurl, asPython, build } from "../request.js";

const LAST = "penstock.chat"; // the model and settings of the newest chat, for the next one
const DRAFT = "penstock.draft";
const AT_END = 8; // pixels
const SAVE_MS = 1500;

function remembered() {
  try {
    return JSON.parse(localStorage.getItem(LAST)) || {};
  } catch {
    return {};
  }
}

export default {
  name: "Playground",
  components: { ChatHistory, ChatMessage, ChatSettings, SourceDialog },
  template: `
    <q-page class="chat" :style-fn="(offset, height) => ({ height: height - offset + 'px' })" @dragover.prevent="over = true" @dragleave.self="over = false" @drop.prevent="dropped">
      <chat-history v-if="listing && wide" v-bind="historyOf" v-on="historyActs" />
      <section class="talk">
        <div class="top">
          <q-btn flat dense round icon="history" aria-label="Conversations" :aria-expanded="listing" @click="listing = !listing" />
          <div class="title ellipsis" :title="chat.title">{{ chat.title || 'New chat' }}</div>
          <q-space />
          <q-btn v-if="!wide || !listing" flat dense :round="narrow" no-caps icon="add" :label="narrow ? '' : 'New chat'" aria-label="New chat" @click="create" />
          <q-btn flat dense :round="narrow" no-caps icon="code" :label="narrow ? '' : 'Code'" aria-label="Code" :disable="!chat.model" @click="showCode" />
          <q-btn flat dense :round="narrow" no-caps icon="tune" :label="narrow ? '' : 'Settings'" aria-label="Settings" :aria-expanded="tuning" @click="tuning = !tuning"><q-badge v-if="changes" floating rounded color="primary" :label="changes" :aria-label="changes + ' changed'" /></q-btn>
        </div>
        <div class="messages" ref="log" role="log" aria-live="polite" :aria-busy="!!running" aria-label="Conversation" tabindex="-1" @scroll.passive="scrolled">
          <div v-if="!messages.length" class="welcome">
            <img src="icon.svg" alt="" width="44" height="44" />
            <p>Send a message to <strong>{{ chat.model || 'a model' }}</strong>.</p>
            <div class="ideas"><q-btn v-for="idea in ideas" :key="idea" outline no-caps size="sm" color="primary" :label="idea" :disable="!chat.model" @click="send(idea)" /></div>
          </div>
          <div ref="inner"><chat-message v-for="message in messages" :key="message.id" :ref="'message-' + message.id" :message="message" :versions="versionsOf(message)" :running="running?.answer === message.id" :busy="!!running" :cost="costOf(message)"
            @edit="(text) => edit(message, text)" @again="again(message)" @more="more(message)" @choose="pick" @cite="(n) => $refs.source.show(message, n)" @rate="(rating) => rate(message, rating)" /></div>
        </div>
        <q-btn v-if="!following && messages.length" class="jump" round dense unelevated color="primary" icon="arrow_downward" aria-label="Go to the end" @click="follow" />
        <div class="composer">
          <div v-if="problem" class="trouble" role="alert"><q-icon name="error_outline" /><span>{{ problem }}</span><q-btn v-if="retry" flat dense no-caps size="sm" label="Try again" :disable="!!running" @click="retry()" /><q-btn flat dense round size="sm" icon="close" aria-label="Dismiss" @click="problem = ''" /></div>
          <div class="box" :class="{ over }">
            <div v-if="chat.files.length" class="files"><span v-for="file in chat.files" :key="file.key" class="file" :class="file.status" :title="file.error || ''"><q-spinner v-if="!ended(file)" size="14px" /><q-icon v-else :name="file.status === 'failed' ? 'error_outline' : 'description'" />
              <span class="name">{{ file.name }}</span><small>{{ progress(file) }}</small><button type="button" :aria-label="'Remove ' + file.name" @click="unattach(file)">×</button></span></div>
            <q-input v-model="draft" type="textarea" autogrow borderless dense :input-style="{ maxHeight: '30vh', minHeight: '24px' }" :placeholder="chat.model ? 'Message ' + chat.model : 'Message'" aria-label="Message" @keydown="pressed" ref="input" />
            <div class="below">
              <q-btn flat dense round icon="attach_file" aria-label="Attach files" :disable="!canAttach" :title="canAttach ? 'Attach files: answers will cite them' : 'This server has no collections, so no files'" @click="$refs.files.click()" />
              <input ref="files" type="file" multiple hidden :accept="accepted" @change="chosen" />
              <q-select v-model="chat.model" :options="models" dense options-dense borderless emit-value map-options class="model" aria-label="Model" :label="chat.model ? undefined : 'Model'" />
              <q-space />
              <small v-if="spent" class="muted spent gt-xs" title="This chat, with all its versions">{{ spent }}</small>
              <q-btn v-if="running" round dense unelevated icon="stop" color="negative" aria-label="Stop" title="Stop (Esc)" @click="stop" />
              <q-btn v-else round dense unelevated icon="arrow_upward" color="primary" aria-label="Send" :disable="!draft.trim() || !chat.model || reading" :title="reading ? 'The attached files are being read' : 'Send (Enter)'" @click="send()" />
            </div>
          </div>
        </div>
      </section>
      <chat-settings v-if="tuning && roomy" v-bind="settingsOf" v-on="settingsActs" />
      <q-dialog v-if="!wide" v-model="listing" position="left" full-height><div class="chat-sheet side"><chat-history v-bind="historyOf" v-on="historyActs" /></div></q-dialog>
      <q-dialog v-if="!roomy" v-model="tuning" :position="narrow ? 'bottom' : 'right'" :full-height="!narrow" :full-width="narrow"><div class="chat-sheet" :class="narrow ? 'bottom' : 'side'"><chat-settings v-bind="settingsOf" v-on="settingsActs" /></div></q-dialog>
      <q-dialog v-model="coding">
        <q-card style="width: 760px; max-width: 94vw">
          <q-tabs v-model="language" dense align="left" no-caps><q-tab name="curl" label="curl" /><q-tab name="python" label="Python" /></q-tabs>
          <q-card-section><pre class="code" tabindex="0" style="max-height: 60vh">{{ code[language] }}</pre></q-card-section>
          <q-card-actions align="right"><q-btn flat no-caps icon="content_copy" label="Copy" @click="copied(code[language])" /><q-btn v-close-popup flat no-caps label="Close" /></q-card-actions>
        </q-card>
      </q-dialog>
      <source-dialog ref="source" />
    </q-page>`,
  data() {
    const { model = "", settings = {} } = remembered();
    return {
      chat: newConversation(model, { ...EMPTY, ...settings }),
      list: [],
      search: "",
      described: [],
      collections: [],
      canAttach: false,
      draft: sessionStorage.getItem(DRAFT) || "",
      running: null,
      problem: "",
      retry: null,
      following: true,
      listing: window.innerWidth > 1023 && localStorage.getItem("penstock.history") !== "0",
      tuning: false,
      over: false,
      coding: false,
      language: "curl",
      code: {},
      accepted: ACCEPTED,
      ideas: ["What is the capital of France?", "Write a haiku about rivers.", "List three uses of a paper clip."],
    };
  },
  computed: {
    wide() {
      return this.$q.screen.width > 1023;
    },
    roomy() {
      return this.$q.screen.width > 1279;
    },
    narrow() {
      return this.$q.screen.width < 600;
    },
    models() {
      return this.described.filter((model) => model.capabilities?.chat).map((model) => ({ value: model.id, label: model.parent ? `${model.id} (adapter)` : model.id }));
    },
    messages() {
      return branch(this.chat);
    },
    changes() {
      return changed(this.chat.settings).length;
    },
    reading() {
      return this.chat.files.some((file) => !finished(file));
    },
    // Models of other servers, and routes that may lead to one, cannot go on after a broken connection.
    resumable() {
      const model = this.about(this.chat.model);
      return model?.owned_by === "penstock" && !model.routes_to;
    },
    collection() {
      return this.chat.files.some(usable) ? this.chat.collection : this.chat.settings.collection;
    },
    spent() {
      const all = Object.values(this.chat.messages);
      const tokens = all.reduce((sum, one) => sum + (one.facts?.usage?.total_tokens || 0), 0);
      return tokens ? `${number(tokens)} tokens, ${money(all.reduce((sum, one) => sum + (this.costOf(one) || 0), 0))}` : "";
    },
    historyOf() {
      return { list: this.list, current: this.chat.id, search: this.search };
    },
    settingsOf() {
      return { settings: this.chat.settings, defaults: this.about(this.chat.model)?.sampling || {}, collections: this.collections, files: this.chat.files.length };
    },
  },
  watch: {
    draft(text) {
      sessionStorage.setItem(DRAFT, text);
    },
    listing(shown) {
      if (this.wide) localStorage.setItem("penstock.history", shown ? "1" : "0");
    },
    wide() {
      this.listing = this.wide && localStorage.getItem("penstock.history") !== "0";
    },
    search() {
      return this.relist();
    },
    "chat.settings": { deep: true, handler: "remember" },
    "chat.model": "remember",
  },
  created() {
    this.store = new Store();
    this.historyActs = { open: this.open, create: this.create, rename: this.rename, export: this.exported, remove: this.removed, clear: this.clear, "update:search": (text) => (this.search = text) };
    this.settingsActs = { close: () => (this.tuning = false), reset: () => (this.chat.settings = { ...EMPTY }) };
  },
  async mounted() {
    window.addEventListener("penstock:online", this.online);
    this.growth = new ResizeObserver(() => this.following && this.follow());
    this.growth.observe(this.$refs.inner);
    const wanted = location.hash.split("/")[1];
    const stored = wanted && (await this.store.get(wanted));
    if (stored) this.use(stored);
    await this.relist();
  },
  async activated() {
    this.remark();
    await this.refresh();
  },
  beforeUnmount() {
    this.growth.disconnect();
    window.removeEventListener("penstock:online", this.online);
  },
  methods: {
    // ---- models, collections, the connection
    about(name) {
      return this.described.find((model) => model.id === name);
    },
    async refresh() {
      try {
        this.described = (await get("/v1/models")).data;
        if (!this.models.some((model) => model.value === this.chat.model)) this.chat.model = this.models[0]?.value || "";
      } catch (error) {
        return this.failed(error, this.refresh);
      }
      try {
        const found = (await list("/v1/collections")).data;
        this.collections = found.map((one) => one.name).filter((name) => !name.startsWith("chat-"));
        this.canAttach = true;
      } catch (error) {
        if (!(error instanceof ApiError && [403, 404, 503].includes(error.status))) this.failed(error, this.refresh);
      }
    },
    async online() {
      if (!this.running) this.problem = "";
      await this.refresh();
    },
    failed(error, retry = null) {
      this.problem = error.message;
      this.retry = retry;
    },

    // ---- conversations
    use(conversation) {
      conversation.settings = { ...EMPTY, ...conversation.settings };
      // An answer that was still streaming when the page was closed.
      for (const one of Object.values(conversation.messages)) if (one.role === "assistant" && !one.facts?.finish) one.facts = { ...one.facts, finish: "broken" };
      this.chat = conversation;
      this.problem = "";
      this.following = true;
      this.remark();
      this.$nextTick(this.follow);
    },
    remark() {
      const hash = Object.keys(this.chat.messages).length ? `#playground/${this.chat.id}` : "#playground";
      if (location.hash.split("/")[0] === "#playground" || !location.hash) history.replaceState(null, "", hash);
    },
    remember() {
      const { model, settings } = this.chat;
      localStorage.setItem(LAST, JSON.stringify({ model, settings: { ...settings, collection: null } }));
      if (this.messages.length) this.keep();
    },
    keep() {
      this.saving ??= setTimeout(() => this.saved(), SAVE_MS);
    },
    async saved(conversation = this.chat) {
      clearTimeout(this.saving);
      this.saving = null;
      if (!Object.keys(conversation.messages).length) return;
      try {
        await this.store.put(conversation);
        await this.relist();
      } catch (error) {
        this.failed(new Error(`This conversation cannot be stored in the browser: ${error.message}`));
      }
    },
    async relist() {
      this.list = await this.store.list(this.search);
    },
    async create() {
      this.stop();
      this.use(newConversation(this.chat.model, { ...this.chat.settings, collection: null }));
      if (!this.wide) this.listing = false;
      this.$nextTick(() => this.$refs.input?.focus());
    },
    async open(id) {
      if (id !== this.chat.id) {
        this.stop();
        await this.saved();
        const stored = await this.store.get(id);
        if (stored) this.use(stored);
      }
      if (!this.wide) this.listing = false;
    },
    rename(one) {
      this.$q.dialog({ title: "Rename", prompt: { model: one.title, type: "text", "aria-label": "Title", isValid: (text) => Boolean(text.trim()) }, cancel: true }).onOk(async (title) => {
        const conversation = one.id === this.chat.id ? this.chat : await this.store.get(one.id);
        conversation.title = title.trim();
        await this.store.put(conversation);
        await this.relist();
      });
    },
    async exported(one) {
      save(`${one.title.replace(/[^\w -]+/g, "").trim() || "chat"}.md`, asMarkdown(await this.store.get(one.id)), "text/markdown");
    },
    removed(one) {
      this.$q.dialog({ title: "Delete this conversation?", message: `${one.title}${one.files ? " and its attached files" : ""}`, cancel: true, ok: { label: "Delete", color: "negative", noCaps: true } }).onOk(() => this.forget([one]));
    },
    clear() {
      this.$q.dialog({ title: "Delete all conversations?", message: "The conversations of this key in this browser, and their attached files.", cancel: true, ok: { label: "Delete all", color: "negative", noCaps: true } }).onOk(async () => this.forget(await this.store.list()));
    },
    async forget(list) {
      try {
        for (const { id } of list) {
          if (id === this.chat.id) this.stop();
          await discard(id === this.chat.id ? this.chat : await this.store.get(id));
          await this.store.remove(id);
          if (id === this.chat.id) this.use(newConversation(this.chat.model, { ...this.chat.settings }));
        }
      } catch (error) {
        this.failed(error, () => this.forget(list));
      }
      await this.relist();
    },

    // ---- one turn
    versionsOf(message) {
      return versions(this.chat, message);
    },
    costOf(message) {
      return message.facts ? cost(message.facts.usage, this.about(message.facts.model)?.pricing, message.facts.recalled) : null;
    },
    request(messages) {
      return build(this.chat.model, this.chat.settings, asMessages(messages), this.collection);
    },
    async send(text = this.draft) {
      text = text.trim();
      if (!text || this.running || !this.chat.model || this.reading) return;
      const typed = text === this.draft.trim();
      const before = this.chat.head;
      const question = add(this.chat, { role: "user", content: text });
      if (typed) this.draft = "";
      this.chat.title ||= titleOf(text);
      const answered = await this.answer(question, before);
      if (answered) return;
      if (this.draft.trim()) {
        this.chat.head = question.id; // the next message is being written already
        this.retry = () => this.answer(question, question.id);
        return;
      }
      // Refused before it began: as if it had not been sent.
      drop(this.chat, question, before);
      this.draft = text;
      this.retry = () => this.send();
      if (!this.messages.length) this.chat.title = "";
    },
    async edit(message, text) {
      const before = this.chat.head;
      const question = add(this.chat, { role: "user", content: text }, message.parent);
      if (!(await this.answer(question, before))) {
        drop(this.chat, question, before);
        this.retry = () => this.edit(message, text);
      }
    },
    async again(message) {
      const question = this.chat.messages[message.parent];
      if (!question || this.running) return;
      const before = this.chat.head;
      if (!(await this.answer(question, before))) this.retry = () => this.again(message);
    },
    // Goes on where an answer broke off, as another version of it.
    async more(message) {
      if (this.running) return;
      if (!(await this.answer(this.chat.messages[message.parent], this.chat.head, message.content))) this.retry = () => this.more(message);
    },
    // Answers a question, or goes on with `begun`; false when the server refused it: then nothing is left of the attempt.
    async answer(question, before, begun = "") {
      this.problem = "";
      this.retry = null;
      let body;
      try {
        body = this.request([...branch(this.chat, question.id), { role: "assistant", content: begun }]);
        if (begun) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
      } catch (error) {
        this.chat.head = before;
        this.failed(error);
        return false;
      }
      const chat = this.chat;
      const answer = add(chat, { ...newAnswer(), content: begun, model: chat.model }, question.id);
      const controller = new AbortController();
      this.running = { controller, answer: answer.id };
      this.following = true;
      this.remark();
      this.$nextTick(this.follow);
      this.keep();
      try {
        await stream(body, answer, { signal: controller.signal, resumable: this.resumable, shown: this.keep });
      } catch (error) {
        if (error.name === "AbortError") answer.facts = { ...answer.facts, finish: "stopped" };
        else if (!answer.facts) {
          drop(chat, answer, before);
          this.failed(error);
          return false;
        } else {
          answer.problem = `The answer broke off: ${error.message}`;
          answer.facts.finish = "broken";
          this.failed(error, () => this.again(answer));
        }
      } finally {
        this.running = null;
        this.saved(chat); // tells by itself when it fails
        this.$nextTick(() => {
          if (this.following) this.follow();
          if (!this.narrow) this.$refs.input?.focus();
        });
      }
      return true;
    },
    stop() {
      this.running?.controller.abort();
    },
    pick(message) {
      choose(this.chat, message);
      this.keep();
    },
    async rate(message, rating) {
      try {
        await post("/v1/feedback", { response_id: message.response, rating });
        message.rating = rating;
        this.keep();
      } catch (error) {
        this.failed(error);
      }
    },

    // ---- files
    chosen(event) {
      const files = [...event.target.files];
      event.target.value = "";
      return this.take(files);
    },
    dropped(event) {
      this.over = false;
      if (this.canAttach) return this.take([...event.dataTransfer.files]);
    },
    async take(files) {
      const { chat } = this;
      for (const file of files) {
        chat.files.push({ key: `${Date.now()}-${chat.files.length}`, id: null, name: file.name, status: "sending", error: null, sent: 0, chunks: 0, read: 0 });
        await attach(chat, file, chat.files[chat.files.length - 1]);
      }
      await this.saved(chat);
    },
    async unattach(file) {
      try {
        await detach(this.chat, file);
        this.chat.files = this.chat.files.filter((one) => one !== file);
        await this.saved();
      } catch (error) {
        this.failed(error, () => this.unattach(file));
      }
    },
    ended: finished,
    progress(file) {
      if (file.status === "failed") return file.error || "failed";
      if (usable(file)) return "";
      return file.chunks ? `${Math.round((100 * file.read) / file.chunks)}%` : file.status === "sending" ? `sending ${Math.round(100 * file.sent)}%` : "reading";
    },

    // ---- view and keyboard
    // The view follows the answer until the reader scrolls up, and again once the reader is back at the end.
    scrolled() {
      const log = this.$refs.log;
      const below = log.scrollHeight - log.scrollTop - log.clientHeight;
      if (below <= AT_END) this.following = true;
      else if (log.scrollTop < this.top) this.following = false;
      this.top = log.scrollTop;
    },
    follow() {
      const log = this.$refs.log;
      if (!log) return;
      log.scrollTop = log.scrollHeight;
      this.top = log.scrollTop;
      this.following = true;
    },
    pressed(event) {
      if (event.isComposing) return;
      if (event.key === "Enter" && !event.shiftKey && !event.ctrlKey && !event.altKey && !event.metaKey) {
        event.preventDefault();
        this.send();
      } else if (event.key === "Escape" && this.running) {
        event.preventDefault();
        this.stop();
      } else if (event.key === "ArrowUp" && !this.draft && !this.running) {
        const mine = this.messages.filter((message) => message.role === "user").pop();
        if (!mine) return;
        event.preventDefault();
        this.$refs[`message-${mine.id}`][0].begin();
      }
    },
    copied(text) {
      copy(text).then(() => this.$done("Copied"), this.$fail);
    },
    showCode() {
      try {
        const body = this.request([...this.messages, { role: "user", content: this.draft || "Hello" }]);
        this.code = { curl: asCurl(body, location.origin, Boolean(session.key)), python: asPython(body, location.origin, Boolean(session.key)) };
        this.coding = true;
      } catch (error) {
        this.failed(error);
      }
    },
  },
};
