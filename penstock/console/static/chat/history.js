// The list of conversations: search, open, rename, export, delete.

const DAY = 86_400_000;

export default {
  name: "ChatHistory",
  props: { list: { type: Array, required: true }, current: { type: String, default: "" }, search: { type: String, default: "" } },
  emits: ["open", "create", "rename", "export", "remove", "clear", "update:search"],
  template: `
    <nav class="history" aria-label="Conversations">
      <div class="row items-center no-wrap q-gutter-x-xs">
        <q-btn class="col" outline dense no-caps color="primary" icon="add" label="New chat" @click="$emit('create')" />
        <q-btn flat dense round icon="more_vert" aria-label="More"><q-menu auto-close><q-list dense><q-item clickable :disable="!list.length" @click="$emit('clear')"><q-item-section>Delete all conversations</q-item-section></q-item></q-list></q-menu></q-btn>
      </div>
      <q-input class="q-mt-sm" :model-value="search" @update:model-value="(text) => $emit('update:search', text || '')" dense outlined clearable debounce="150" placeholder="Search" aria-label="Search conversations"><template #prepend><q-icon name="search" size="xs" /></template></q-input>
      <div class="entries">
        <template v-for="group in groups" :key="group.name">
          <div class="when">{{ group.name }}</div>
          <div v-for="one in group.list" :key="one.id" class="entry" :class="{ active: one.id === current }">
            <button type="button" class="open" :aria-current="one.id === current ? 'true' : null" :title="one.title" @click="$emit('open', one.id)"><q-icon v-if="one.files" name="attach_file" size="xs" />{{ one.title || 'New chat' }}</button>
            <q-btn flat dense round size="sm" icon="more_horiz" :aria-label="'Actions of ' + one.title"><q-menu auto-close><q-list dense style="min-width: 130px">
              <q-item clickable @click="$emit('rename', one)"><q-item-section>Rename</q-item-section></q-item>
              <q-item clickable @click="$emit('export', one)"><q-item-section>Export</q-item-section></q-item>
              <q-item clickable class="text-negative" @click="$emit('remove', one)"><q-item-section>Delete</q-item-section></q-item>
            </q-list></q-menu></q-btn>
          </div>
        </template>
        <p v-if="!list.length" class="muted q-pa-sm">{{ search ? 'Nothing contains these words.' : 'Conversations are kept in this browser.' }}</p>
      </div>
    </nav>`,
  computed: {
    groups() {
      const today = new Date().setHours(0, 0, 0, 0);
      const groups = [["Today", today], ["Yesterday", today - DAY], ["Last 7 days", today - 7 * DAY], ["Last 30 days", today - 30 * DAY], ["Older", 0]].map(([name, from]) => ({ name, from, list: [] }));
      for (const one of this.list) groups.find((group) => one.updated >= group.from).list.push(one);
      return groups.filter((group) => group.list.length);
    },
  },
};
