// The frame: which view, which filters, when to read again. A view is { title, filters, every_ms, load(state), draw(data, state) };
// the address after # names it, so that links, the back button and bookmarks work.

import { command, read } from "./api.js";
import { h } from "./dom.js";
import { clock } from "./format.js";
import { audit } from "./view_audit.js";
import { cost } from "./view_cost.js";
import { live } from "./view_live.js";
import { log } from "./view_log.js";
import { overview } from "./view_overview.js";
import { request } from "./view_request.js";

const VIEWS = { overview, cost, live, decisions: log, audit, request };
const TABS = { overview: "Overview", cost: "Cost", live: "Live", decisions: "Decisions", audit: "Audit" };
const RANGES = { "1h": "1 h", "24h": "24 h", "7d": "7 d", "30d": "30 d" };

const byId = (id) => document.getElementById(id);
const state = { session: null, view: "overview", arg: "", range: "24h", tenant: "", kind: "", redraw, reload: () => refresh() };
let turn = 0, timer = 0, last = null;

function route() {
  const [, name, arg] = location.hash.match(/^#\/([a-z]+)(?:\/([\w.-]{1,100}))?$/) || [];
  const known = name in VIEWS && (name !== "audit" || state.session.admin);
  state.view = known ? name : "overview";
  state.arg = arg || "";
  last = null;
  for (const tab of byId("tabs").children) {
    const here = tab.dataset.view === state.view || (state.view === "request" && tab.dataset.view === "decisions");
    if (here) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
  const view = VIEWS[state.view];
  byId("title").textContent = view.title;
  document.title = `${view.title} · Rungway`;
  byId("stamp").textContent = "";
  byId("view").replaceChildren(h("div", { class: "loading", "aria-label": "Loading" }));
  filters();
  refresh();
}

function filters() {
  const wanted = VIEWS[state.view].filters || [];
  const parts = [];
  if (wanted.includes("kind")) parts.push(select("Kind", "kind", [["", "All kinds"], ...state.session.kinds.map((k) => [k, k])]));
  if (wanted.includes("tenant") && state.session.admin)
    parts.push(select("Tenant", "tenant", [["", "All tenants"], ...state.session.tenants.map((t) => [t, t])]));
  if (wanted.includes("range"))
    parts.push(h("div", { class: "segments", role: "group", "aria-label": "Time range" }, Object.entries(RANGES).map(([value, text]) =>
      h("button", { type: "button", "data-range": value, "aria-pressed": String(state.range === value), onclick: () => choose("range", value) }, text))));
  byId("filters").replaceChildren(...parts);
}

function select(label, name, options) {
  const box = h("select", { id: `pick-${name}`, onchange: (event) => choose(name, event.target.value) },
    options.map(([value, text]) => h("option", { value, selected: state[name] === value }, text)));
  return h("label", { class: "pick" }, h("span", { class: "hidden" }, label), box);
}

function choose(name, value) {
  state[name] = value;
  for (const button of document.querySelectorAll("[data-range]")) button.setAttribute("aria-pressed", String(button.dataset.range === state.range));
  refresh();
}

async function refresh() {
  clearTimeout(timer);
  const mine = ++turn, view = VIEWS[state.view];
  try {
    const data = await view.load(state);
    if (mine !== turn) return;
    last = data;
    redraw();
    byId("stamp").textContent = `${clock(new Date())} UTC`;
    byId("stamp").classList.remove("late");
  } catch (error) {
    if (mine !== turn) return;
    failed(error);
  }
  const wait_ms = typeof view.every_ms === "function" ? view.every_ms(state) : view.every_ms;
  if (wait_ms && !document.hidden) timer = setTimeout(refresh, wait_ms);
}

// Old numbers stay, marked as old; an empty page says what is wrong.
function failed(error) {
  const stamp = byId("stamp");
  stamp.textContent = last === null ? "no data" : `${error.message.replace(/\.$/, "")} · showing ${stamp.textContent.slice(-12)}`;
  stamp.classList.add("late");
  if (last === null) byId("view").replaceChildren(h("div", { class: "empty" }, h("p", {}, error.message.replace(/\.?$/, ".")),
    h("button", { type: "button", onclick: refresh }, "Try again")));
}

// Draw anew without taking anything from under the reader: focus and sideways scrolling stay where they are.
function redraw() {
  if (last === null) return;
  const view = byId("view"), find = (what) => [...view.querySelectorAll(what)];
  const nodes = [VIEWS[state.view].draw(last, state)].flat().filter(Boolean);
  if (nodes.length === 1 && nodes[0].isConnected) return;
  const left = find(".scroll").map((box) => box.scrollLeft), at = find("a, button, [tabindex]").indexOf(document.activeElement);
  view.replaceChildren(...nodes);
  find(".scroll").forEach((box, i) => (box.scrollLeft = left[i] || 0));
  if (at >= 0) find("a, button, [tabindex]")[at]?.focus({ preventScroll: true });
}

async function start() {
  state.session = await read("session");
  const { admin, tenant, key, cell } = state.session;
  byId("who").replaceChildren(h("b", {}, admin ? "All tenants" : tenant), h("span", {}, `${key} · cell ${cell}`));
  byId("tabs").replaceChildren(...Object.entries(TABS).filter(([name]) => name !== "audit" || admin).map(([name, text]) =>
    h("a", { href: `#/${name}`, "data-view": name }, text)));
  byId("out").addEventListener("click", async () => {
    await command("logout");
    location.replace("/dashboard");
  });
  addEventListener("hashchange", route);
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) clearTimeout(timer);
    else refresh();
  });
  route();
}

start().catch((error) => byId("view").replaceChildren(h("div", { class: "empty" }, h("p", {}, error.message),
  h("button", { type: "button", onclick: () => location.reload() }, "Try again"))));
