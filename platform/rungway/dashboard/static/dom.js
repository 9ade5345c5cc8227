// Building the page. Everything that comes from data becomes a text node or an attribute; no markup is ever parsed.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "vars") for (const [key, v] of Object.entries(value)) element.style.setProperty(key, v);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(9)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

export const h = (tag, props, ...children) => fill(document.createElement(tag), props, children);
export const s = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

export const card = (title, note, ...children) =>
  h("section", { class: "card" },
    title && h("header", {}, h("h2", {}, title), note && h("span", { class: "note" }, note)), ...children);

export const empty = (text, more) => h("div", { class: "empty" }, h("p", {}, text), more && h("p", { class: "fine" }, more));

export const pill = (text, tone) => h("span", { class: "pill " + (tone || "") }, text);

// A horizontal bar. `share` is 0..1 of the track, `tail` a second part after it, `mark` a line on the track.
export function meter(share, { tail = 0, mark = null, tone = "", label = "" } = {}) {
  const width = (value) => `${Math.max(0, Math.min(1, value)) * 100}%`;
  return h("span", { class: "meter " + tone, role: "img", "aria-label": label },
    h("span", { class: "fill", vars: { width: width(share) } }),
    tail > 0 && h("span", { class: "tail", vars: { left: width(share), width: width(Math.min(tail, 1 - share)) } }),
    mark !== null && h("span", { class: "mark", vars: { left: width(mark) } }));
}

// A table. `columns`: [{ name, num, cell(row) }]; `foot` is a row of its own.
export function table(columns, rows, { caption, foot, id } = {}) {
  const kind = (column) => (column.num ? "num" : column.wide ? "wide" : null);
  const line = (row) => h("tr", {}, columns.map((c, i) => h(i === 0 ? "th" : "td",
    { class: kind(c), scope: i === 0 ? "row" : null }, c.cell(row))));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", { id },
      h("caption", { class: "hidden" }, caption),
      h("thead", {}, h("tr", {}, columns.map((c) => h("th", { class: kind(c), scope: "col" }, c.name)))),
      h("tbody", {}, rows.map(line)),
      foot && h("tfoot", {}, line(foot))));
}
