// Parses Prometheus text: counters become rates between two scrapes, histograms become quantiles.

export function parse(text) {
  const series = new Map();
  for (const line of text.split("\n")) {
    if (!line || line[0] === "#") continue;
    const found = /^([^\s{]+)(?:\{(.*)\})?\s+(\S+)/.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] || "").matchAll(/([^=,]+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value;
    if (!series.has(found[1])) series.set(found[1], []);
    series.get(found[1]).push({ labels, value: Number(found[3]) });
  }
  return series;
}

export const total = (reading, name, where = () => true) =>
  (reading.get(name) || []).filter((one) => where(one.labels)).reduce((sum, one) => sum + one.value, 0);

// A counter that fell was reset because its process restarted.
export function grown(before, after, name, where) {
  return Math.max(0, total(after, name, where) - total(before, name, where));
}

export function quantile(before, after, name, q) {
  const counts = new Map();
  for (const [reading, sign] of [[after, 1], [before, -1]])
    for (const { labels, value } of reading.get(`${name}_bucket`) || []) {
      const edge = labels.le === "+Inf" ? Infinity : Number(labels.le);
      counts.set(edge, (counts.get(edge) || 0) + sign * value);
    }
  const edges = [...counts].sort((a, b) => a[0] - b[0]);
  const all = edges.length ? edges[edges.length - 1][1] : 0;
  if (all <= 0) return null;
  let low = 0;
  let below = 0;
  for (const [edge, count] of edges) {
    if (count >= q * all) return edge === Infinity ? low : low + ((edge - low) * (q * all - below)) / Math.max(count - below, 1e-9);
    low = edge;
    below = count;
  }
  return low;
}
