// One request explained: what was asked, what was weighed, what was given, what it took.

import { read } from "./api.js";
import { card, empty, h, pill, table } from "./dom.js";
import { NONE, count, moment, ms, ofNs, percent, usd } from "./format.js";
import { notGiven, place, pressures, summary } from "./view_log.js";

const facts = (rows) => h("dl", { class: "facts" }, rows.filter(([, value]) => value !== "" && value !== null && value !== undefined)
  .map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));

const same = (a, b) => a && b && JSON.stringify(a) === JSON.stringify(b);

// The decision in a sentence.
function story(row, d) {
  const asked = `${row.tenant} asked for ${row.model}.`;
  if (!d.given) return `${asked} It was refused: ${row.code || row.outcome}.`;
  if (!row.degraded) return `${asked} The best offer, ${place(d.given)}, was given.`;
  return `${asked} The best offer was ${place(d.best)}; ${place(d.given)} was given at rung ${row.rung} (${row.degraded.replaceAll(",", ", ")}), because of ${row.reason.replaceAll("_", " ")}.`;
}

function offers(d) {
  const list = [...(d.offers || [])];
  for (const one of [d.best, d.given]) if (one && !list.some((other) => same(one, other))) list.push(one);
  list.sort((a, b) => (b.net_value_usd || 0) - (a.net_value_usd || 0));
  if (!list.length) return empty("No offer was made.");
  const marks = (offer) => [same(offer, d.best) && pill("best"), same(offer, d.given) && pill("given", "info")];
  return table([
    { name: "Offer", cell: (o) => h("div", { class: "named" }, place(o), h("span", {}, marks(o))) },
    { name: "Net value", num: true, cell: (o) => usd(o.net_value_usd, 6) },
    { name: "P(good answer)", num: true, cell: (o) => percent(o.p_ok) },
    { name: "Price", num: true, cell: (o) => usd((o.price_nusd || 0) / 1e9, 6) },
    { name: "Time", num: true, cell: (o) => ms(o.time_ms) },
    { name: "Prompt", num: true, cell: (o) => count(o.prompt_tokens) },
    { name: "Output bound", num: true, cell: (o) => count(o.max_tokens) },
    { name: "Gives up", cell: (o) => (o.degraded || []).join(", ") || "nothing" },
  ], list, { caption: "Offers that were weighed" });
}

function draw({ request: row, audit }) {
  const d = row.decision || {};
  const met = row.slo_met === null ? null : row.slo_met ? "met" : "missed";
  const tone = row.outcome === "refused" || row.outcome === "error" ? "bad" : row.degraded ? "warn" : "ok";
  const table_of = pressures(d), refused = notGiven(d.rejected || []);
  return [
    h("section", { class: "card lead" }, h("header", {}, h("h2", { class: "mono" }, row.request_id), pill(row.outcome, tone)), h("p", { class: "story" }, story(row, d))),
    h("div", { class: "trio" },
      card("Asked", null, facts([["At", `${moment(ofNs(row.started_wall_ns))} UTC`], ["Tenant", row.tenant], ["Key", row.key_id], ["Class", row.tenant_class], ["Model", row.model],
        ["Endpoint", row.endpoint], ["Risk", row.risk], ["Action", row.action], ["Session", row.session], ["Deadline", d.ask?.deadline_ms ? ms(d.ask.deadline_ms) : null]])),
      card("Given", null, facts([["Served by", [row.tier, row.version].filter(Boolean).join("/") || NONE], ["Rung", String(row.rung)], ["Downgraded by", row.degraded || "nothing"], ["Reason", row.reason],
        ["Code", row.code], ["Replica", row.replica_id], ["Attempts", String(row.attempts)], ["Cache", row.cache], ["Configuration", (d.config || "").slice(0, 12)]])),
      card("Measured", null, facts([["Ended", `${moment(ofNs(row.ended_wall_ns))} UTC`], ["Waited", ms(row.queue_wait_ms)], ["First token", ms(row.ttft_ms)], ["Per token", ms(row.tpot_ms)], ["Whole answer", ms(row.e2e_ms)], ["Objective", met],
        ["Input tokens", `${count(row.prompt_tokens)} (${count(row.cached_tokens)} cached)`], ["Output tokens", count(row.output_tokens)], ["Wasted tokens", row.wasted_tokens ? count(row.wasted_tokens) : null], ["Cost", usd(row.cost_nusd / 1e9, 9)]]))),
    card("Offers", "by net value, as reckoned when it was decided", offers(d)),
    h("div", { class: "pair" },
      card("Pressure and rung", "when it was decided", table_of || empty("Not recorded.")),
      card("Not given", "and the limit that stood in the way", refused || empty("Every offer that was looked at stood open."))),
    card("On record", "its entries in the audit chain", audit.length ? table([
      { name: "Number", cell: (one) => String(one.seq) }, { name: "Time (UTC)", cell: (one) => moment(one.time) }, { name: "Kind", cell: (one) => pill(one.kind) },
      { name: "What", cell: (one) => summary(one) }, { name: "Hash", cell: (one) => h("span", { class: "mono", title: one.hash }, one.hash.slice(0, 16) + "…") },
    ], audit, { caption: "Audit entries" }) : empty("No entry: the best offer was given.")),
  ];
}

export const request = {
  title: "Request",
  load: ({ arg }) => read("decision", { request_id: arg }),
  draw,
};
