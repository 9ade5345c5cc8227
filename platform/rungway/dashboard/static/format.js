// Numbers, money and times as people read them. Times are UTC and say so where they stand alone.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });
const MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(" ");
const DAYS = "Sun Mon Tue Wed Thu Fri Sat".split(" ");
export const NONE = "–";

export const count = (n) => (n === null || n === undefined ? NONE : whole.format(n));
export const compact = (n) => (n === null || n === undefined ? NONE : n < 10000 ? whole.format(n) : short.format(n));

// Digits after the point so that the largest of a column still shows something of the smallest.
export const digits = (max) => (max >= 1000 ? 0 : max >= 1 ? 2 : max >= 0.01 ? 4 : 6);

export function usd(value, places) {
  if (value === null || value === undefined) return NONE;
  const fixed = places ?? (value ? digits(Math.abs(value)) : 2);
  return "$" + new Intl.NumberFormat("en-US", { minimumFractionDigits: fixed, maximumFractionDigits: fixed }).format(value);
}

// A tick of an axis, with the digits that its step needs.
export function usdTick(value, step) {
  if (!value) return "$0";
  const short = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return usd(value, Math.abs(step * 10 ** short - Math.round(step * 10 ** short)) > 1e-6 ? short + 1 : short);
}

export function percent(share, places = 1) {
  if (share === null || share === undefined || Number.isNaN(share)) return NONE;
  const shown = share * 100;
  // 99.97 % must not read as 100 %: cut, do not round, towards the worse side.
  const factor = 10 ** places;
  return `${(Math.floor(shown * factor + 1e-9) / factor).toFixed(places)} %`;
}

export function ms(value) {
  if (value === null || value === undefined) return NONE;
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  return `${value >= 100 ? whole.format(value) : value.toFixed(1)} ms`;
}

const two = (n) => String(n).padStart(2, "0");
const date = (value) => (value instanceof Date ? value : new Date(value));
export const ofNs = (ns) => new Date(Number(ns) / 1e6);

export function clock(value) {
  const d = date(value);
  return `${two(d.getUTCHours())}:${two(d.getUTCMinutes())}:${two(d.getUTCSeconds())}`;
}

export function day(value) {
  const d = date(value);
  return `${d.getUTCDate()} ${MONTHS[d.getUTCMonth()]}`;
}

export const moment = (value) => `${day(value)} ${clock(value)}`;
export const minute = (value) => clock(value).slice(0, 5);

// The name of a bar, by its width in seconds.
export function bucketName(start, width) {
  const d = date(start);
  if (width < 6 * 3600) return minute(d);
  return width < 86400 ? `${DAYS[d.getUTCDay()]} ${minute(d)}` : day(d);
}

export function bucketSpan(start, width) {
  const from = date(start), to = new Date(from.getTime() + width * 1000);
  if (width >= 86400) return `${day(from)} UTC`;
  return `${day(from)} ${minute(from)}–${minute(to)} UTC`;
}

export function duration(seconds) {
  if (seconds >= 172800) return `${Math.floor(seconds / 86400)} days`;
  if (seconds >= 7200) return `${Math.floor(seconds / 3600)} h`;
  return seconds >= 120 ? `${Math.floor(seconds / 60)} min` : `${Math.floor(seconds)} s`;
}
