// The rendered text of a message. It is drawn as it grows; the slower a drawing was, the longer the next one waits.

import { copy } from "../format.js";
import { Rendered } from "../markdown/render.js";

export default {
  name: "RichText",
  props: { source: { type: String, required: true }, context: { type: Object, default: () => ({}) } },
  emits: ["cite"],
  template: `<div class="text rich" ref="at" @click="clicked"></div>`,
  watch: {
    source: "soon",
    context: "soon",
  },
  mounted() {
    this.rendered = new Rendered(this.$refs.at, this.context);
    this.draw();
  },
  beforeUnmount() {
    clearTimeout(this.timer);
  },
  methods: {
    soon() {
      this.timer ??= setTimeout(() => this.draw(), this.pause || 0);
    },
    draw() {
      this.timer = null;
      const began = performance.now();
      this.rendered.show(this.source, this.context);
      this.pause = Math.min(4 * (performance.now() - began), 1000);
    },
    async clicked(event) {
      const cited = event.target.closest("[data-cite]");
      if (cited) return this.$emit("cite", Number(cited.dataset.cite));
      const button = event.target.closest("[data-copy]");
      if (!button) return;
      try {
        await copy(button.closest(".codeblock").querySelector("code").textContent);
        button.textContent = "Copied";
        setTimeout(() => (button.textContent = "Copy"), 1500);
      } catch (error) {
        this.$fail(error);
      }
    },
  },
};
