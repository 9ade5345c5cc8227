// Shaping the usage answer for charts.

const OWN_COLOURS = 7;

// How often to read usage again: the longer the range, the more rows a read costs and the less it moves.
const EVERY_MS = { "1h": 15000, "24h": 30000, "7d": 60000, "30d": 120000 };
export const usageEvery = ({ range }) => EVERY_MS[range];

// All bar starts (ms) of a range, empty ones included: a gap in use must look like one.
export function bucketStarts({ since, until, bucket_s }) {
  const starts = [];
  for (let at = Math.floor(since / bucket_s) * bucket_s; at < until; at += bucket_s) starts.push(at * 1000);
  return starts;
}

// Sums `value(row)` per name and bar. The biggest names get a colour each, the rest one together.
export function stack(rows, range, nameOf, value, tones = "s") {
  const starts = bucketStarts(range), at = new Map(starts.map((start, i) => [start, i]));
  const sums = new Map();
  for (const row of rows) {
    const i = at.get(Date.parse(row.start)), name = nameOf(row);
    if (i === undefined || !name) continue;
    if (!sums.has(name)) sums.set(name, new Array(starts.length).fill(0));
    sums.get(name)[i] += value(row);
  }
  const total = (values) => values.reduce((a, b) => a + b, 0);
  const ranked = [...sums].filter(([, values]) => total(values) > 0).sort((a, b) => total(b[1]) - total(a[1]));
  const shown = ranked.slice(0, OWN_COLOURS).sort((a, b) => (a[0] < b[0] ? -1 : 1));
  const series = shown.map(([name, values], i) => ({ name, values, tone: tones + i }));
  const rest = ranked.slice(OWN_COLOURS);
  if (rest.length) series.push({
    name: `${rest.length} others`, tone: "s7", values: starts.map((_, i) => rest.reduce((sum, [, values]) => sum + values[i], 0)),
  });
  return { starts, series };
}
