// The audit chain as a whole, for admins: does it still hold?

import { command, read } from "./api.js";
import { card, empty, h, pill, table } from "./dom.js";
import { count, moment } from "./format.js";

let result = null, busy = false;

async function verify(state) {
  busy = true;
  state.redraw();
  const began = performance.now();
  try {
    result = { ...(await command("data/verify")), at: new Date(), took: performance.now() - began };
  } catch (error) {
    result = { ok: false, failed: true, message: error.message, at: new Date() };
  }
  busy = false;
  state.redraw();
}

function outcome() {
  if (result === null) return h("p", { class: "muted" }, "Not verified since this page was opened.");
  const text = result.failed ? "Could not be verified" : result.ok ? "The chain holds" : `Broken at entry ${result.first_bad_seq}`;
  return h("div", { class: "verdict " + (result.ok ? "good" : "broken"), role: "status" },
    h("strong", {}, text),
    h("span", {}, result.failed ? result.message : `${count(result.rows)} entries read in ${(result.took / 1000).toFixed(2)} s`),
    h("span", { class: "fine" }, `${moment(result.at)} UTC`), !result.ok && !result.failed && h("span", {}, result.message));
}

export const audit = {
  title: "Audit",
  every_ms: 15000,
  load: () => read("log", { limit: 20 }),
  draw: ({ data }, state) => [
    card("Hash chain", "each entry holds the hash of the one before it",
      h("p", { class: "story" }, "Verifying reads every entry from the first one and recomputes its hash. A changed, removed or inserted entry shows."),
      h("div", { class: "actions" }, h("button", { type: "button", class: "primary", id: "verify", disabled: busy, onclick: () => verify(state) }, busy ? "Verifying…" : "Verify the chain"), outcome())),
    card("Newest entries", "times in UTC", data.length ? table([
      { name: "Number", cell: (row) => String(row.seq) }, { name: "Time", cell: (row) => moment(row.time) }, { name: "Kind", cell: (row) => pill(row.kind) }, { name: "Tenant", cell: (row) => row.tenant || "–" },
      { name: "Hash", cell: (row) => h("span", { class: "mono" }, row.hash.slice(0, 24) + "…") }, { name: "Follows", cell: (row) => h("span", { class: "mono" }, (row.prev_hash || "").slice(0, 24) + "…") },
    ], data, { caption: "Newest audit entries" }) : empty("The chain has no entries yet.")),
  ],
};
