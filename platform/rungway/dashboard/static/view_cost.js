// Cost: over time by tenant and by tier, tokens by tier, and the table that finance takes along.

import { read } from "./api.js";
import { stackedBars } from "./charts.js";
import { card, empty, h, meter, table } from "./dom.js";
import { compact, count, digits, duration, usd, usdTick } from "./format.js";
import { stack, usageEvery } from "./series.js";

const PERIOD = { day: "today", week: "this week", month: "this month" };
const money = (row) => row.cost_usd;

export const load = ({ range, tenant }) => read("usage", { range, tenant });

export function costChart({ usage, range }, nameOf, title, tones) {
  const { starts, series } = stack(usage.series, range, nameOf, money, tones);
  const places = digits(Math.max(0, ...series.flatMap((one) => one.values)));
  return card(title, "US dollars, bars in UTC",
    series.length ? stackedBars({
      label: `${title}: ${usd(usage.totals.cost_usd)} in all, in ${starts.length} bars`,
      buckets: starts, width_s: range.bucket_s, series, format: (v) => usd(v, places), axis: usdTick,
    }) : empty("No cost in this range.", "Requests appear here as soon as they have ended."));
}

function tokenChart({ usage, range }) {
  const kinds = [["cached input", (row) => row.cached_tokens], ["input", (row) => row.input_tokens - row.cached_tokens], ["output", (row) => row.output_tokens]];
  const tiers = [...new Set(usage.series.map((row) => row.tier).filter(Boolean))].sort();
  const rows = usage.series.flatMap((row) => kinds.map(([kind, of]) => ({ start: row.start, name: row.tier && `${row.tier} · ${kind}`, value: of(row) })));
  const { starts, series } = stack(rows, range, (row) => row.name, (row) => row.value);
  for (const one of series) {
    const [tier, kind] = one.name.split(" · ");
    const k = kinds.findIndex(([name]) => name === kind);
    if (k >= 0 && tiers.indexOf(tier) < 3) one.tone = `t${tiers.indexOf(tier)}k${k}`;
  }
  return card("Tokens by tier", "cached input, input and output",
    series.length ? stackedBars({ label: "Tokens by tier and kind over time", buckets: starts, width_s: range.bucket_s, series, format: compact, axis: compact })
      : empty("No tokens in this range."));
}

export function budgetCell(budget) {
  if (!budget) return "";
  const { limit_usd: limit, spent_usd: spent, held_usd: held, per } = budget;
  const when = PERIOD[per] || per;
  if (limit === null) return h("div", { class: "budget" }, h("span", {}, `${usd(spent, 2)} ${when}`), h("span", { class: "fine" }, "no limit"));
  const used = limit ? spent / limit : 1;
  const tone = used >= 1 ? "bad" : used >= 0.8 ? "warn" : "";
  const more = held > 0 ? ` + ${held < 0.01 ? "<$0.01" : usd(held, 2)} held` : "";
  return h("div", { class: "budget", title: `next window in ${duration(budget.resets_in_s)}; at the limit: ${budget.at_limit}` },
    h("span", {}, `${usd(spent, 2)}${more} of ${usd(limit, limit % 1 ? 2 : 0)} ${when}`),
    meter(used, { tail: limit ? held / limit : 0, tone, label: `${Math.round(used * 100)} % of the budget used` }));
}

function costTable({ usage, tenants }, state) {
  const names = [...new Set([...Object.keys(usage.tenants), ...Object.keys(tenants).filter((name) => tenants[name].models.length)])]
    .filter((name) => !state.tenant || name === state.tenant).sort();
  const zero = { requests: 0, input_tokens: 0, cached_tokens: 0, output_tokens: 0, cost_usd: 0 };
  const rows = names.map((name) => ({ name, ...zero, ...usage.tenants[name], refused: usage.refused[name] || 0, degraded: usage.degraded[name] || 0, budget: tenants[name]?.budget }));
  const sum = (of) => Object.values(of).reduce((a, b) => a + b, 0);
  const foot = { name: "Total", ...zero, ...usage.totals, refused: sum(usage.refused), degraded: sum(usage.degraded) };
  const places = Math.max(2, digits(foot.cost_usd));
  const num = (name, of) => ({ name, num: true, cell: of });
  const link = h("a", { class: "button", id: "csv", download: "", href: `/dashboard/data/usage.csv?${new URLSearchParams({ range: state.range, tenant: state.tenant })}` }, "Download CSV");
  return h("section", { class: "card" }, h("header", {}, h("h2", {}, "By tenant"), link),
    rows.length ? table([
      { name: "Tenant", cell: (row) => row.name },
      num("Requests", (row) => count(row.requests)), num("Refused", (row) => count(row.refused)), num("Downgraded", (row) => count(row.degraded)),
      num("Input tokens", (row) => count(row.input_tokens)), num("of it cached", (row) => count(row.cached_tokens)), num("Output tokens", (row) => count(row.output_tokens)),
      num("Cost", (row) => usd(row.cost_usd, places)),
      { name: "Budget", wide: true, cell: (row) => budgetCell(row.budget) },
    ], rows, { caption: "Use and cost by tenant", foot: rows.length > 1 ? foot : null, id: "cost-table" }) : empty("No tenants."));
}

export const cost = {
  title: "Cost",
  filters: ["tenant", "range"],
  every_ms: usageEvery,
  load,
  draw: (data, state) => [
    costTable(data, state),
    h("div", { class: "pair" }, costChart(data, (row) => row.tenant, "Cost by tenant"), costChart(data, (row) => row.tier, "Cost by tier", "t")),
    tokenChart(data),
    h("p", { class: "fine foot" }, "Counted when a request ends. The first and the last bar cover only the part of them that lies in the range."),
  ],
};
