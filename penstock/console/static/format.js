// Formats numbers, money and times for people.

export const number = (value, digits = 3) =>
  value == null || Number.isNaN(value) ? "–" : value >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits)));
export const percent = (share) => (share == null ? "–" : `${Number((100 * share).toPrecision(3))}%`);
export const money = (dollars) => (dollars == null ? "–" : dollars === 0 ? "$0" : dollars < 0.01 ? `$${dollars.toPrecision(2)}` : `$${dollars.toFixed(2)}`);
export const duration = (seconds) => (seconds == null ? "–" : seconds < 1 ? `${number(seconds * 1000)} ms` : `${number(seconds)} s`);
export function bytes(count) {
  if (count == null) return "–";
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (count >= size) return `${Number((count / size).toPrecision(3))} ${unit}`;
  return `${count} B`;
}
// How long ago, or how far ahead, a moment is.
export function relative(stamp, now = Date.now() / 1000) {
  if (stamp == null) return "–";
  const seconds = now - stamp;
  if (Math.abs(seconds) < 5) return "now";
  return seconds > 0 ? `${span(seconds)} ago` : `in ${span(-seconds)}`;
}
// A time span of any length, to one or two digits.
export function span(seconds) {
  if (seconds == null) return "–";
  for (const [unit, size] of [["day", 86400], ["h", 3600], ["min", 60]])
    if (seconds >= 1.5 * size) {
      const count = Number((seconds / size).toPrecision(2));
      return unit === "day" ? `${count} days` : `${count} ${unit}`;
    }
  return `${Math.round(seconds)} s`;
}
export const clock = (stamp) => new Date(stamp * 1000).toLocaleTimeString("en-GB");
export const day = (stamp) => (stamp == null ? "–" : new Date(stamp * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" }));

// Browsers offer the clipboard over https and on this machine only; elsewhere the old way still works.
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = Object.assign(document.createElement("textarea"), { value: text });
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  if (!copied) throw new Error("This browser does not let the page copy.");
}

export function save(name, content, type) {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(new Blob([content], { type })), download: name });
  link.click();
  URL.revokeObjectURL(link.href);
}
