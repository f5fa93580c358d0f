// The passage that a citation refers to.

import { safe } from "../markdown/inline.js";
import { chunk } from "./attachments.js";

export default {
  name: "SourceDialog",
  template: `
    <q-dialog v-model="open"><q-card class="source" role="dialog" aria-label="Source">
      <q-card-section class="row items-start no-wrap"><div class="col"><div class="text-subtitle1">{{ n }}. {{ title }}</div><div class="muted">{{ where }}</div></div><q-btn v-close-popup flat round dense icon="close" aria-label="Close" /></q-card-section>
      <q-card-section class="scroll" style="max-height: 60vh">
        <div v-if="problem" class="trouble" role="alert">{{ problem }}</div>
        <q-spinner v-else-if="text === null" size="sm" />
        <div v-else class="passage" tabindex="0">{{ text }}</div>
      </q-card-section>
      <q-card-actions v-if="link" align="right"><q-btn flat no-caps icon="open_in_new" label="Open the document" :href="link" target="_blank" rel="noreferrer noopener" /></q-card-actions>
    </q-card></q-dialog>`,
  data: () => ({ open: false, n: 0, title: "", where: "", text: null, problem: "", link: null }),
  methods: {
    async show(message, n) {
      const about = message.citations.find((one) => one.n === n) || message.sources.find((one) => one.n === n);
      if (!about) return;
      Object.assign(this, { open: true, n, title: about.url_citation?.title || about.document || about.heading || about.chunk_id, where: "", text: null, problem: "", link: safe(about.url_citation?.url || "") });
      try {
        const found = await chunk(message.collection, about.chunk_id);
        this.text = found.text;
        const page = found.position?.page ?? about.position?.page;
        this.where = [found.heading, page ? `page ${page}` : ""].filter(Boolean).join(" · ");
      } catch (error) {
        this.problem = error.status === 404 ? "This passage is no longer there: its document was changed or deleted." : error.message;
      }
    },
  },
};
