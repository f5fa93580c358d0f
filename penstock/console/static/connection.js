// Whether the server answers. Every call reports here; while it does not, a probe asks until it does again.

import { reactive } from "./lib/vue.js";

const PROBE_MS = 2000;

export const connection = reactive({ down: false, since: null, restored: 0 });

let timer = null;

export async function probe() {
  clearTimeout(timer);
  try {
    const reply = await fetch("/health/live", { cache: "no-store", signal: AbortSignal.timeout(10_000) });
    if (reply.ok) return answered();
  } catch {
    // still away
  }
  if (connection.down) timer = setTimeout(probe, PROBE_MS);
}

export function lost() {
  if (connection.down) return;
  connection.down = true;
  connection.since = Date.now() / 1000;
  timer = setTimeout(probe, PROBE_MS / 2);
}

export function answered() {
  if (!connection.down) return;
  clearTimeout(timer);
  connection.down = false;
  connection.restored++;
  window.dispatchEvent(new Event("penstock:online"));
}
