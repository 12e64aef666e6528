// Formats values for people.

const TIME = new Intl.DateTimeFormat(undefined, {
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  hour12: false,
});
const DATE_TIME = new Intl.DateTimeFormat(undefined, {
  year: "numeric",
  month: "short",
  day: "2-digit",
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  hour12: false,
});
const NUMBER = new Intl.NumberFormat();

/** Formats a number of bytes, such as `1.5 GiB`. */
export function bytes(value) {
  if (value == null) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit++;
  }
  return `${value >= 100 || unit === 0 || Number.isInteger(value) ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

/** Formats a number of megabytes. */
export const megabytes = (value) => (value == null ? "–" : bytes(value * 1024 * 1024));

export const number = (value) => (value == null ? "–" : NUMBER.format(value));

/** Formats a Unix time: the time of day for today, else date and time. */
export function time(seconds) {
  if (!seconds) return "–";
  const date = new Date(seconds * 1000);
  return date.toDateString() === new Date().toDateString() ? TIME.format(date) : DATE_TIME.format(date);
}

export const fullTime = (seconds) => (seconds ? DATE_TIME.format(new Date(seconds * 1000)) : "–");

/** Formats the time since a Unix time, such as `5 min`. */
export function age(seconds, now = Date.now() / 1000) {
  return seconds ? duration(Math.max(1, now - seconds)) : "–";
}

export function duration(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d`;
}

export const shortId = (id) => (id ?? "").slice(0, 8);

export const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
