// Live: what waits, what runs, and where on the ladder everybody stands. Read every two seconds while the page is seen.

import { read } from "./api.js";
import { spark } from "./charts.js";
import { card, empty, h, meter, pill, table } from "./dom.js";
import { compact, count, percent, usd } from "./format.js";

const EVERY_MS = 2000, KEPT = 60;
const STATES = { ready: "ok", draining: "warn", stale: "bad", open: "bad" };
const STATE_NOTE = { stale: "no report for a while", open: "breaker open", draining: "finishes what it has" };
const past = new Map();
let declared = null;

// The last two minutes of a number; gaps while the page was hidden close up.
function remember(name, value) {
  const values = past.get(name) || [];
  values.push(value);
  past.set(name, values.slice(-KEPT));
  return past.get(name);
}

// The declared ladder is read once, and again when a rung in force is not on it (the configuration was reloaded).
async function load() {
  const live = await read("live");
  if (!declared || live.ladder.some((scope) => declared.rungs[scope.rung]?.name !== scope.name)) declared = await read("ladder");
  return live;
}

const tile = (name, value, note, chart) => h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, value), h("p", {}, note), chart);

function tiles(live, mine) {
  const waiting = mine.reduce((sum, [, t]) => sum + t.waiting, 0), running = mine.reduce((sum, [, t]) => sum + t.running, 0);
  const worst = live.ladder.reduce((best, scope) => (scope.pressure > best.pressure ? scope : best), { pressure: 0 });
  const deepest = live.ladder.reduce((best, scope) => (scope.rung > best.rung ? scope : best), { rung: 0, name: "full" });
  const where = (scope) => (scope.pool ? `${scope.pool} · ${scope.tenant_class} · ${scope.side} its share` : "nothing waits too long");
  return h("dl", { class: "tiles four" },
    tile("Running", count(running), `${live.gateways} ${live.gateways === 1 ? "gateway" : "gateways"}`, spark(remember("running", running), { max: 4, label: "running, last two minutes" })),
    tile("Waiting", count(waiting), waiting ? "in the controller's queue" : "the queue is empty", spark(remember("waiting", waiting), { max: 4, tone: "warn", label: "waiting, last two minutes" })),
    tile("Pressure", worst.pressure.toFixed(2), where(worst), spark(remember("pressure", worst.pressure), { max: 1, tone: "warn", label: "highest pressure, last two minutes" })),
    tile("Deepest rung", deepest.name, deepest.rung ? where(deepest) : "everybody gets the full offer", spark(remember("rung", deepest.rung), { max: declared.rungs.length - 1, tone: "bad", label: "deepest rung, last two minutes" })));
}

// The ladder as stairs going down; whoever shares a step stands on it. A class whose two sides share a step is one chip.
function stairs(scopes) {
  const standing = declared.rungs.map(() => []);
  for (const kind of [...new Set(scopes.map((scope) => scope.tenant_class))]) {
    const both = scopes.filter((scope) => scope.tenant_class === kind);
    const together = both.every((scope) => scope.rung === both[0].rung);
    for (const scope of together ? both.slice(0, 1) : both) {
      const forced = (together ? both : [scope]).some((one) => one.override);
      standing[scope.rung]?.push(h("span", { class: "chip" + (!together && scope.side === "over" ? " over" : "") },
        together ? kind : `${kind} · ${scope.side}`, forced && h("i", {}, " override")));
    }
  }
  return h("ol", { class: "stairs", vars: { "--n": declared.rungs.length } }, declared.rungs.map((rung, i) =>
    h("li", { class: standing[i].length ? (i ? "taken low" : "taken") : "", vars: { "--i": i } },
      h("div", { class: "stand" }, standing[i]), h("div", { class: "step" }, h("b", {}, breakable(rung.name)), h("span", {}, i ? `from ${rung.enter}` : "no cap")))));
}

// Long names may break behind an underscore rather than inside of a word.
const breakable = (name) => name.split(/(?<=_)/).flatMap((part, i) => (i ? [h("wbr"), part] : [part]));

// Pressure spans 0 to far past 1: a logarithmic track keeps both ends readable.
const track = (value) => Math.log2(1 + value) / Math.log2(1 + 10);

function pressureTable(pool, scopes) {
  const first = declared.rungs[1]?.enter ?? 1;
  return table([
    { name: "Class", cell: (scope) => scope.tenant_class },
    { name: "Side", cell: (scope) => (scope.side === "over" ? "over its share" : "within") },
    { name: "Pressure", num: true, cell: (scope) => scope.pressure.toFixed(2) },
    { name: "", wide: true, cell: (scope) => meter(track(scope.pressure), { mark: track(first), tone: scope.pressure >= first ? "bad" : scope.pressure >= declared.leave ? "warn" : "", label: `pressure ${scope.pressure}` }) },
    { name: "From", cell: (scope) => (scope.signal === "none" || !scope.pressure ? "" : scope.signal.replaceAll("_", " ")) },
    { name: "Rung", cell: (scope) => (scope.rung ? pill(scope.name, "warn") : scope.name) },
  ], scopes, { caption: `Pressure and rungs of ${pool}` });
}

function replicas(pool) {
  if (!pool.replicas.length) return empty("No replica is here.");
  return table([
    { name: "Replica", cell: (one) => h("span", { class: "mono", title: one.replica_id }, one.replica_id.length > 26 ? one.replica_id.slice(0, 24) + "…" : one.replica_id) },
    { name: "Version", cell: (one) => one.version },
    { name: "State", cell: (one) => h("span", { title: STATE_NOTE[one.state] }, pill(one.state, STATES[one.state])) },
    { name: "Running", num: true, cell: (one) => `${one.running} / ${one.max_num_seqs}` },
    { name: "Tokens held", num: true, cell: (one) => compact(one.tokens) },
  ], pool.replicas, { caption: "Replicas" });
}

const gauge = (name, share, text) => h("div", { class: "gauge" }, h("span", {}, name, h("b", {}, text)), meter(share, { tone: share >= 0.9 ? "bad" : share >= 0.7 ? "warn" : "", label: `${name} ${text}` }));

function poolCard(name, pool, scopes) {
  return h("section", { class: "card" }, h("header", {}, h("h2", {}, `Pool ${name}`), pool && h("span", { class: "note" }, `${count(pool.queue_depth)} waiting · ${compact(pool.prefill_tokens_per_s)} prompt tokens/s · ${pool.decode_ms_per_token.toFixed(1)} ms a token`)),
    pool && h("div", { class: "gauges" }, gauge("Sequences ", pool.slots ? pool.in_flight / pool.slots : 0, `${pool.in_flight} of ${pool.slots}`), gauge("KV cache ", pool.kv_use, percent(pool.kv_use)), gauge("Saturation ", pool.saturation, percent(pool.saturation))),
    stairs(scopes), pressureTable(name, scopes), pool && [h("h3", {}, "Replicas"), replicas(pool)]);
}

function queues(mine) {
  const most = Math.max(1, ...mine.map(([, t]) => t.waiting));
  return card("By tenant", "now", mine.length ? table([
    { name: "Tenant", cell: ([name, t]) => h("div", { class: "named" }, name, h("span", { class: "fine" }, t.class)) },
    { name: "Waiting", num: true, cell: ([, t]) => count(t.waiting) },
    { name: "", wide: true, cell: ([name, t]) => meter(t.waiting / most, { tone: "warn", label: `${t.waiting} requests of ${name} wait` }) },
    { name: "Running", num: true, cell: ([, t]) => count(t.running) },
    { name: "Tokens in flight", num: true, cell: ([, t]) => compact(Object.values(t.in_flight_tokens).reduce((a, b) => a + b, 0)) },
    { name: "Requests left", num: true, cell: ([, t]) => (t.requests_remaining === null ? "no limit" : count(t.requests_remaining)) },
    { name: "Tokens left", num: true, cell: ([, t]) => (t.tokens_remaining === null ? "no limit" : compact(t.tokens_remaining)) },
    { name: "Money held", num: true, cell: ([, t]) => usd(t.budget.held_usd) },
    { name: "Breaker", cell: ([, t]) => (t.suspended ? pill("suspended", "bad") : pill(t.breaker, t.breaker === "closed" ? "ok" : "bad")) },
  ], mine, { caption: "Queue and load by tenant", id: "queue-table" }) : empty("No tenants."));
}

function draw(live, state) {
  const shown = state.session.admin ? state.tenant : state.session.tenant;
  const mine = Object.entries(live.tenants).filter(([name, t]) => t.models.length && (!shown || name === shown)).sort();
  const own = shown && live.tenants[shown]?.class;
  const seen = { ...live, ladder: live.ladder.filter((scope) => !own || scope.tenant_class === own) };
  const pools = [...new Set(live.ladder.map((scope) => scope.pool))];
  return [tiles(seen, mine), queues(mine),
    ...pools.map((name) => poolCard(name, live.pools[name], seen.ladder.filter((scope) => scope.pool === name)))];
}

export const live = { title: "Live", filters: ["tenant"], every_ms: EVERY_MS, load, draw };
