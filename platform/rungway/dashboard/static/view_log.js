// Decisions: the audit chain, newest first. A row opens to what was weighed: best against given, pressure against threshold.

import { read } from "./api.js";
import { card, empty, h, pill, table } from "./dom.js";
import { NONE, clock, count, day, ms, percent, usd } from "./format.js";

const PAGE = 100, ROWS_MAX = 500;
const TONES = { downgrade: "warn", refusal: "bad", eviction: "warn", rung: "info", override: "info", reload: "", rollout: "" };
const open = new Set();
let limit = PAGE;

export const requestLink = (id) => (id ? h("a", { href: `#/request/${encodeURIComponent(id)}`, class: "mono" }, id) : null);
export const place = (offer) => (offer ? [offer.tier, offer.version].filter(Boolean).join("/") || offer.kind : NONE);

// One line in words for a row of any kind; unknown details fall back to nothing rather than to guesses.
export function summary({ kind, detail: d }) {
  if (typeof d !== "object" || d === null) return "";
  if (kind === "downgrade") return `${place(d.best)} → ${place(d.given)} · ${(d.degraded || []).join(", ")}`;
  if (kind === "refusal") return [d.code, d.model && `asked for ${d.model}`, d.retry_after_s && `retry after ${d.retry_after_s} s`].filter(Boolean).join(" · ");
  if (kind === "rung") return `${d.pool} ${d.tenant_class} (${d.side}): ${d.rung_from} → ${d.rung_to} · pressure ${d.pressure} from ${d.signal}`;
  if (kind === "override") return [d.action, d.pool || "all pools", d.tenant_class || "all classes", d.ttl_s && `for ${d.ttl_s} s`, d.who && `by ${d.who}`, d.why].filter(Boolean).join(" · ");
  if (kind === "reload") return d.refused ? `refused: ${d.refused.length} mistakes` : `configuration ${String(d.config_to || "").slice(0, 12)}`;
  return "";
}

function compared(best, given) {
  const facts = [
    ["Served by", place], ["Kind", (o) => o.kind], ["Expected price", (o) => usd((o.price_nusd || 0) / 1e9)], ["P(good answer)", (o) => percent(o.p_ok)],
    ["Expected time", (o) => ms(o.time_ms)], ["Net value", (o) => usd(o.net_value_usd, 6)], ["Prompt tokens", (o) => count(o.prompt_tokens)],
    ["Output bound", (o) => count(o.max_tokens)], ["Best of", (o) => count(o.best_of)], ["Rung", (o) => count(o.rung)],
  ];
  const rows = facts.map(([name, of]) => ({ name, best: best ? of(best) : NONE, given: given ? of(given) : NONE }));
  return table([
    { name: "", cell: (row) => row.name },
    { name: "Best offer", num: true, cell: (row) => row.best },
    { name: "Given", num: true, cell: (row) => (row.best === row.given ? row.given : h("mark", {}, row.given)) },
  ], rows, { caption: "Best offer and given offer" });
}

// Pressure and rung of each tier at that moment, and the threshold that the pressure stood against.
export function pressures({ pressure = {}, rungs = {}, thresholds }) {
  const enter = thresholds?.enter || {};  // its members are stored in the order of their names, not of the rungs
  const names = thresholds?.names || Object.keys(enter).sort((one, other) => enter[one] - enter[other]);
  const rows = Object.entries(pressure).map(([tier, value]) => {
    const [level, signal] = Array.isArray(value) ? value : [value, ""];
    const at = rungs[tier] ?? 0;
    return { tier, level, signal, name: names[at] ?? String(at), from: enter[names[at]] };
  });
  if (!rows.length) return null;
  return table([
    { name: "Tier", cell: (row) => row.tier },
    { name: "Pressure", num: true, cell: (row) => String(row.level) },
    { name: "From", cell: (row) => row.signal },
    { name: "Rung", cell: (row) => row.name },
    { name: "Entered at", num: true, cell: (row) => (row.from === undefined ? NONE : String(row.from)) },
  ], rows, { caption: "Pressure against thresholds" });
}

export function notGiven(list) {
  const rows = list.map((entry) => (Array.isArray(entry) ? { tier: entry[0], kind: entry[1], why: entry[2] } : entry));
  if (!rows.length) return null;
  return table([{ name: "Offer", cell: (row) => row.tier || NONE }, { name: "Kind", cell: (row) => row.kind }, { name: "Why not", cell: (row) => row.why }],
    rows, { caption: "Offers not given" });
}

function detail(row) {
  const d = typeof row.detail === "object" && row.detail !== null ? row.detail : { text: row.detail };
  return h("div", { class: "detail" },
    row.kind === "downgrade" && h("div", {}, h("h3", {}, "Best against given"), compared(d.best, d.given)),
    h("div", {},
      pressures(d) && h("div", {}, h("h3", {}, "Pressure at that moment"), pressures(d)),
      notGiven(d.tried || []) && h("div", {}, h("h3", {}, "Offers not given"), notGiven(d.tried || [])),
      h("h3", {}, "On record"),
      h("dl", { class: "facts" }, h("dt", {}, "Number"), h("dd", {}, row.seq), h("dt", {}, "Hash"), h("dd", { class: "mono" }, row.hash)),
      h("details", {}, h("summary", {}, "All recorded fields"), h("pre", {}, JSON.stringify(d, null, 2)))));
}

function entry(row) {
  const body = h("div", { class: "fold", id: `fold-${row.seq}` });
  const button = h("button", { type: "button", class: "more", "aria-controls": `fold-${row.seq}`, "aria-label": `Details of entry ${row.seq}` });
  const show = (shown) => {
    button.setAttribute("aria-expanded", String(shown));
    body.replaceChildren(...(shown ? [detail(row)] : []));
    body.hidden = !shown;
    open[shown ? "add" : "delete"](row.seq);
  };
  button.addEventListener("click", () => show(!open.has(row.seq)));
  show(open.has(row.seq));
  return h("li", { class: "entry" }, h("div", { class: "line" }, button,
    h("time", { datetime: row.time }, h("span", {}, day(row.time)), " ", clock(row.time)),
    pill(row.kind, TONES[row.kind]), h("span", { class: "tenant" }, row.tenant || NONE),
    h("span", { class: "what" }, summary(row)), h("span", { class: "id" }, requestLink(row.request_id))), body);
}

function small(row) {
  return h("li", {}, h("div", {}, h("time", { datetime: row.time }, clock(row.time)), h("b", {}, row.tenant), pill((row.detail?.degraded || []).join(", ") || row.kind, "warn")),
    h("div", {}, h("span", { class: "what" }, `${row.detail?.best?.tier || NONE} → ${row.detail?.given?.tier || row.detail?.given?.kind || NONE}`), requestLink(row.request_id)));
}

export const logRows = (rows, brief) => h("ol", { class: brief ? "brief" : "log" }, rows.map(brief ? small : entry));

// Redrawn only when something is new, so that reading on is not disturbed.
let drawn = { key: "", node: null };

export const log = {
  title: "Decisions",
  filters: ["kind", "tenant"],
  every_ms: 10000,
  load: ({ kind, tenant }) => read("log", { kind, tenant, limit }),
  draw({ data }, state) {
    const key = JSON.stringify([state.kind, state.tenant, limit, data[0]?.seq, data.length]);
    if (key === drawn.key && drawn.node.isConnected) return drawn.node;
    const more = data.length >= limit && limit < ROWS_MAX;
    const node = card("Audit log, newest first", "times in UTC; an entry is committed before the answer it is about leaves",
      data.length ? logRows(data) : empty("Nothing is recorded here.", state.kind || state.tenant ? "Try without a filter." : "Downgrades, refusals, moves of the ladder and operators' commands appear here."),
      more && h("button", { type: "button", class: "wide-button", onclick: () => { limit = Math.min(ROWS_MAX, limit + PAGE); state.reload(); } }, "Show more"),
      !more && data.length >= ROWS_MAX && h("p", { class: "fine foot" }, `The newest ${ROWS_MAX} entries. Older ones: rungway audit.`));
    drawn = { key, node };
    return node;
  },
};
