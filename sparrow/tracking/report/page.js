"use strict";
// Read-outs: hovering, tapping or the arrow keys on a chart; hovering a token. Text only ever enters as textContent.
const charts = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");

function place(x, y) {
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 16 + box.width < innerWidth ? x + 16 : x - 16 - box.width;
  const top = y + 16 + box.height < innerHeight ? y + 16 : y - 16 - box.height;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, top) + "px";
}

function row(text, color) {
  const line = document.createElement(color ? "span" : "b");
  line.textContent = text;
  if (color) line.className = color;
  return line;
}

function nearest(xs, value) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < value) low = middle; else high = middle;
  }
  return Math.abs(xs[low] - value) <= Math.abs(xs[high] - value) ? low : high;
}

function stops(chart) {
  if (!chart.stops) chart.stops = [...new Set(chart.s.flatMap((s) => s.x))].sort((a, b) => a - b);
  return chart.stops;
}

function reading(series, i) {
  const value = series.v[i] === null ? "not finite" : String(series.v[i]);
  const range = series.lo && series.lo[i] !== series.hi[i] ? ` (${series.lo[i]} to ${series.hi[i]})` : "";
  return `${series.n}: ${value}${range}`;
}

// The series that have a value at this stop, to within half the distance to the next one.
function show(svg, chart, at, x, y) {
  const all = stops(chart), here = all[at];
  const reach = all.length > 1 ? (all[all.length - 1] - all[0]) / (all.length - 1) / 2 : 0.5;
  const rows = [row(`${chart.over} ${Math.round(here)}`)];
  for (const series of chart.s) {
    if (!series.x.length) continue;
    const i = nearest(series.x, here);
    if (Math.abs(series.x[i] - here) <= reach) rows.push(row(reading(series, i), series.c));
  }
  tip.replaceChildren(...rows);
  const share = (here - chart.low) / (chart.high - chart.low);
  const cursor = svg.querySelector(".cursor"), place_x = chart.left + share * (chart.right - chart.left);
  cursor.setAttribute("x1", place_x);
  cursor.setAttribute("x2", place_x);
  svg.at = at;
  const box = svg.getBoundingClientRect();
  place(x ?? box.left + place_x * box.width / svg.viewBox.baseVal.width, y ?? box.top + box.height / 3);
}

function hide(svg) {
  tip.hidden = true;
  for (const end of ["x1", "x2"]) svg.querySelector(".cursor").setAttribute(end, -9);
}

for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const chart = charts[svg.dataset.chart];
  const point = (event) => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    const value = chart.low + (x - chart.left) / (chart.right - chart.left) * (chart.high - chart.low);
    show(svg, chart, nearest(stops(chart), value), event.clientX, event.clientY);
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", () => hide(svg));
  svg.addEventListener("blur", () => hide(svg));
  svg.addEventListener("keydown", (event) => {
    const last = stops(chart).length - 1, now = svg.at ?? last;
    const page = Math.max(1, Math.round(last / 10));
    const target = { ArrowLeft: now - 1, ArrowRight: now + 1, PageUp: now - page, PageDown: now + page, Home: 0, End: last }[event.key];
    if (event.key === "Escape") hide(svg);
    if (target === undefined) return;
    event.preventDefault();
    show(svg, chart, Math.min(last, Math.max(0, target)));
  });
}

document.addEventListener("pointerover", (event) => {
  const token = event.target.closest("[data-a]");
  if (!token) {
    if (!event.target.closest("svg[data-chart]")) tip.hidden = true;
    return;
  }
  const parent = token.parentElement;
  const position = Number(parent.dataset.first) + Array.prototype.indexOf.call(parent.children, token);
  const alpha = token.dataset.a === "-1" ? "not measured" : (token.dataset.a / 1000).toFixed(3);
  tip.replaceChildren(row(`token ${position}: alpha ${alpha}`), row(JSON.stringify(token.textContent), "grey"));
  place(event.clientX, event.clientY);
});
