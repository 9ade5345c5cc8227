// Overview: the numbers of a range at a glance, cost over time, objectives, and the newest downgrades.

import { read } from "./api.js";
import { card, empty, h, meter, table } from "./dom.js";
import { NONE, compact, count, ms, percent, usd } from "./format.js";
import { usageEvery } from "./series.js";
import { budgetCell, costChart } from "./view_cost.js";
import { logRows } from "./view_log.js";

const NEWEST = 6;

async function load({ range, tenant }) {
  const [usage, newest] = await Promise.all([read("usage", { range, tenant }), read("log", { tenant, kind: "downgrade", limit: NEWEST })]);
  return { ...usage, newest: newest.data };
}

const sum = (of) => Object.values(of).reduce((a, b) => a + b, 0);
const tile = (name, value, note, tone) => h("div", { class: "tile " + (tone || "") }, h("dt", {}, name), h("dd", {}, value), h("p", {}, note));

function tiles({ usage }) {
  const { totals, latency } = usage;
  const refused = sum(usage.refused), degraded = sum(usage.degraded);
  const answered = totals.requests - refused;
  const fresh = totals.input_tokens - totals.cached_tokens;
  return h("dl", { class: "tiles" },
    tile("Requests", compact(totals.requests), `${count(answered)} answered`),
    tile("Cost", usd(totals.cost_usd), answered ? `${usd((totals.cost_usd / answered) * 1000, 2)} per 1,000` : "nothing billed"),
    tile("Tokens in", compact(fresh), `+ ${compact(totals.cached_tokens)} cached`),
    tile("Tokens out", compact(totals.output_tokens), totals.wasted_tokens ? `${compact(totals.wasted_tokens)} wasted, not billed` : "none wasted"),
    tile("Downgraded", answered ? percent(degraded / answered) : NONE, `${count(degraded)} answers`, degraded ? "warn" : ""),
    tile("Refused", totals.requests ? percent(refused / totals.requests) : NONE, `${count(refused)} requests`, refused ? "bad" : ""),
    tile("TTFT p50", ms(latency.ttft_ms_p50), "time to first token"),
    tile("TTFT p99", ms(latency.ttft_ms_p99), `answer ${ms(latency.e2e_ms_p99)}`));
}

// How much of the misses that an objective allows has been used up: 1 - target is the allowance.
function objective(value, target, terms) {
  if (value === undefined || target === undefined) return h("span", { class: "fine" }, "no answers");
  const allowed = 1 - target;
  const used = allowed > 0 ? (1 - value) / allowed : value < 1 ? 2 : 0;
  const met = value >= target;
  const places = target >= 0.999 ? 2 : 1;
  return h("div", { class: "slo" },
    h("span", {}, h("b", {}, percent(value, places)), h("span", { class: met ? "ok" : "missed" }, met ? "target met" : "target missed")),
    meter(used, { tone: met ? (used > 0.8 ? "warn" : "") : "bad", label: `${Math.round(used * 100)} % of the allowed misses used` }),
    h("span", { class: "fine" }, terms));
}

function objectives({ usage, tenants }, state) {
  const rows = Object.keys(tenants).filter((name) => tenants[name].models.length && (!state.tenant || state.tenant === name)).sort()
    .map((name) => ({ name, terms: tenants[name].slo, shares: usage.slo[name] || {}, kind: tenants[name].class }));
  const at = (limit) => `99 % within ${ms(limit)}`;
  return card("Objectives", "bar = share of the allowed misses that is used up",
    rows.length ? table([
      { name: "Tenant", cell: ({ name, kind }) => h("div", { class: "named" }, name, h("span", { class: "fine" }, kind)) },
      { name: "First token", wide: true, cell: ({ shares, terms }) => objective(shares.ttft, 0.99, at(terms.ttft_ms_p99)) },
      { name: "Each further token", wide: true, cell: ({ shares, terms }) => objective(shares.tpot, 0.99, at(terms.tpot_ms_p99)) },
      { name: "Availability", wide: true, cell: ({ shares, terms }) => objective(shares.availability, terms.availability, `target ${percent(terms.availability, 1)}`) },
    ], rows, { caption: "Objectives by tenant", id: "slo-table" }) : empty("No tenants."));
}

function newest({ newest: rows }) {
  return h("section", { class: "card" }, h("header", {}, h("h2", {}, "Newest downgrades"), h("a", { class: "note", href: "#/decisions" }, "All decisions")),
    rows.length ? logRows(rows, true) : empty("No downgrades are on record.", "Every answer that is worse than the best offer is written down here before its first byte leaves."));
}

export const overview = {
  title: "Overview",
  filters: ["tenant", "range"],
  every_ms: usageEvery,
  load,
  draw: (data, state) => [
    tiles(data),
    costChart(data, (row) => row.tenant, "Cost by tenant"),
    h("div", { class: "pair wide-left" }, objectives(data, state), newest(data)),
    state.session.admin ? null : card("Budget", "", budgetCell(data.tenants[state.session.tenant]?.budget)),
  ],
};
