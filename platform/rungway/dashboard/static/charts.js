// Two small SVG charts: stacked bars over time and a sparkline. They are drawn at the size of their box and again when
// it changes, so that text stays crisp and nothing around them moves.

import { h, s } from "./dom.js";
import { bucketName, bucketSpan } from "./format.js";

const HEIGHT = 240, LEFT = 58, RIGHT = 20, TOP = 10, BOTTOM = 26;

// Round steps so that about five lines cover 0..max.
function ticks(max) {
  if (!(max > 0)) return [0];
  const raw = max / 5, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((v) => v >= raw);
  const found = [];
  for (let i = 0; i * step < max + step * 0.999; i++) found.push(i * step);
  return found;
}

// `buckets`: start times (ms); `width_s`: seconds a bar covers; `series`: [{ name, tone, values }] in stacking order;
// `format(value)` writes a value, `axis(value, step)` a tick.
export function stackedBars({ label, buckets, width_s, series, format, axis }) {
  const tip = h("div", { class: "tip", hidden: true });
  const plot = h("div", { class: "plot", tabindex: "0", role: "img", "aria-label": label });
  const legend = h("ul", { class: "legend" }, series.map((one) =>
    h("li", {}, h("span", { class: "dot " + one.tone }), one.name)));
  const sums = buckets.map((_, i) => series.reduce((sum, one) => sum + (one.values[i] || 0), 0));
  const steps = ticks(Math.max(...sums, 0));
  const top = steps[steps.length - 1] || 1;
  let at = -1;

  const place = (width) => {
    const step = (width - LEFT - RIGHT) / Math.max(1, buckets.length);
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
    return { step, y, bar: Math.max(1, Math.min(36, step * 0.72)), x: (i) => LEFT + step * (i + 0.5) };
  };

  function draw() {
    const width = plot.clientWidth;
    if (width < 40) return;
    const { step, y, bar, x } = place(width);
    const every = Math.max(1, Math.ceil((width_s < 21600 ? 46 : 62) / step));
    const svg = s("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, "aria-hidden": "true" });
    for (const value of steps) {
      svg.append(s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
        s("text", { class: "tick", x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, axis(value, steps[1])));
    }
    buckets.forEach((start, i) => {
      if (i === at) svg.append(s("rect", { class: "band", x: x(i) - step / 2, y: TOP, width: step, height: HEIGHT - TOP - BOTTOM }));
      let base = 0;
      for (const one of series) {
        const value = one.values[i] || 0;
        if (value > 0) svg.append(s("rect", { class: one.tone, x: x(i) - bar / 2, y: y(base + value), width: bar, height: Math.max(0.5, y(base) - y(base + value)) }));
        base += value;
      }
      if ((buckets.length - 1 - i) % every === 0)
        svg.append(s("text", { class: "tick", x: x(i), y: HEIGHT - 8, "text-anchor": "middle" }, bucketName(start, width_s)));
    });
    plot.replaceChildren(svg);
  }

  function point(i) {
    if (i === at) return;
    at = i;
    draw();
    tip.hidden = i < 0;
    if (i < 0) return;
    const rows = series.filter((one) => one.values[i] > 0).reverse();
    tip.replaceChildren(h("strong", {}, bucketSpan(buckets[i], width_s)), rows.map((one) =>
      h("div", {}, h("span", { class: "dot " + one.tone }), h("span", {}, one.name), h("b", {}, format(one.values[i])))).reduce((all, row) => (all.append(row), all), h("div", { class: "tip-rows" })),
      h("div", { class: "tip-sum" }, h("span", {}, "total"), h("b", {}, format(sums[i]))));
    const { x } = place(plot.clientWidth);
    tip.classList.toggle("left", x(i) > plot.clientWidth / 2);
    tip.style.setProperty("--x", `${x(i)}px`);
  }

  plot.addEventListener("pointermove", (event) => {
    const { step } = place(plot.clientWidth);
    const i = Math.floor((event.clientX - plot.getBoundingClientRect().left - LEFT) / step);
    point(i >= 0 && i < buckets.length ? i : -1);
  });
  plot.addEventListener("pointerleave", () => point(-1));
  plot.addEventListener("blur", () => point(-1));
  plot.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    point(Math.max(0, Math.min(buckets.length - 1, (at < 0 ? buckets.length - (by > 0 ? 1 : 0) : at) + by)));
  });
  new ResizeObserver(draw).observe(plot);
  return h("div", { class: "chart" }, plot, tip, legend);
}

// The last values of something live, newest at the right; 0 is the bottom, `max` the top.
export function spark(values, { max, points = 60, tone = "", label = "" }) {
  const W = 120, H = 28, top = Math.max(max || 0, ...values, 1e-9);
  const x = (i) => W - (values.length - 1 - i) * (W / (points - 1));
  const y = (value) => H - 1 - (H - 3) * (value / top);
  const line = values.map((value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  const first = values.length ? x(0).toFixed(1) : W;
  return s("svg", { class: "spark " + tone, viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    s("polygon", { points: `${first},${H} ${line} ${W},${H}` }), s("polyline", { points: line }));
}
