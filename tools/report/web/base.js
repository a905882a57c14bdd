"use strict";
// Shared by all panes: the data, elements, numbers as text, and the state.
const DATA = JSON.parse(document.getElementById("data").textContent);
const NAMES = { zero: "ZeRO", tp: "tensor", sp: "sequence", cp: "context", pp: "pipeline", ep: "expert" };

function make(tag, attributes = {}, ...children) {
  const drawn = ["svg", "g", "rect", "line", "path", "polyline", "text", "title", "defs", "pattern", "circle"].includes(tag);
  const node = drawn ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

const color = (name) => `var(--${name})`;
const axisColor = (axis) => color(dimensionOfAxis(axis));
const chip = (axis) => make("span", { class: "chip", style: `--c:${axisColor(axis)}` }, axis);

function bytes(value) {
  const unit = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]].find(([, size]) => Math.abs(value) >= size);
  return unit ? `${trim(value / unit[1])} ${unit[0]}` : `${Math.round(value)} B`;
}
const gib = (value) => (Math.abs(value) >= 2 ** 28 ? `${(value / 2 ** 30).toFixed(1)} GiB` : `${(value / 2 ** 20).toFixed(1)} MiB`);
const trim = (value) => (Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(2));
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const seconds = (value) => (value >= 1 ? `${trim(value)} s` : value >= 1e-3 ? `${trim(1e3 * value)} ms` : `${trim(1e6 * value)} µs`);
const span = (record, value) => (record.in_seconds ? seconds(value) : `${trim(value)} F`); // F: the time of a forward through one stage
const count = (value) => Math.round(value).toLocaleString("en-US");
const microBatches = (number) => `${count(number)} micro-batch${number === 1 ? "" : "es"}`;

/** A number that opens its formula and its file. */
function figure(text, source) {
  return make("button", { class: "figure", type: "button", onclick: () => showSource(source), title: "Where this comes from" }, text);
}

function showSource(name) {
  const source = DATA.sources[name];
  document.getElementById("source-name").textContent = source.name;
  document.getElementById("source-text").textContent = source.formula;
  document.getElementById("source-file").textContent = source.file;
  document.getElementById("source").showModal();
}

const tip = document.getElementById("tip");
function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = !text;
  const left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8);
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 6)}px`;
}
const hideTip = () => { tip.hidden = true; };

/** Collectives run on axes, some of them joined; the dimension that an axis belongs to has its color. */
const dimensionOfAxis = (axis) => (/^(e?dp|world)/.test(axis) ? "dp" : /^e/.test(axis) ? "ep" : axis === "cp_tp" ? "tp" : axis.split("_")[0]);

/** Dimension -> sum of the values of its axes. */
function sumByDimension(byAxis) {
  const sums = {};
  for (const [axis, value] of Object.entries(byAxis)) sums[dimensionOfAxis(axis)] = (sums[dimensionOfAxis(axis)] ?? 0) + value;
  return sums;
}

/** A table; on a narrow screen each row becomes a list of its cells with their headings. */
function tableOf(heads, rows) {
  const cells = (row) => row.map((cell, column) => make("td", { "data-head": column ? heads[column] : null }, cell ?? "–"));
  return make("table", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head))), ...rows.map((row) => make("tr", {}, ...cells(row))));
}
const legendOf = (entries) => make("div", { class: "legend" }, ...entries.map(([name, paint, mark]) => make("span", {}, make("i", { style: `--c:var(${paint})`, class: mark }), name)));
const halves = (...sides) => make("div", { class: "halves" }, ...sides.filter(Boolean).map((side) => make("div", {}, ...[side].flat())));

// State: the layout shown, the dimensions switched off, the rank selected. Every change redraws all panes.
const state = { layout: 0, off: [], rank: 0 };
const panes = [];
const layout = () => DATA.layouts[state.layout];
const keyOf = (off) => layout().switches.filter((name) => off.includes(name) && !(name === "sp" && off.includes("tp"))).join(" "); // without tp there is no sp
const variant = () => layout().variants[keyOf(state.off)];
const asIs = () => layout().variants[""];
const isOff = (name) => state.off.includes(name) || (name === "sp" && state.off.includes("tp"));
const sizesAndGrids = () => variant().microbatch ?? layout();
const grids = () => sizesAndGrids().grid;
const paneWidth = () => document.getElementById("panes").clientWidth || 900; // 0 in a window that is not shown yet
const isNarrow = () => paneWidth() < 600;

/** The timeline of the variant's own schedule; undefined without a pipeline. */
function ownTimeline() {
  const { pipeline } = variant();
  return pipeline === 0 ? layout().pipeline[0] : pipeline;
}

const CONTROLS = "button, select, input, [tabindex]";

/** Changes the state and redraws; the focus stays on the same control. */
function change(values) {
  const before = document.activeElement, home = before?.closest("section, nav"), at = home ? [...home.querySelectorAll(CONTROLS)].indexOf(before) : -1;
  Object.assign(state, values);
  for (const redraw of panes) redraw();
  if (at < 0 || before.isConnected) return;
  const controls = [...home.querySelectorAll(CONTROLS)], { key } = before.dataset;
  (controls.find((control) => key && control.dataset.key === key) ?? controls[Math.min(at, controls.length - 1)])?.focus({ preventScroll: true });
}

let drawnWidth = 0;
addEventListener("resize", () => {
  if (drawnWidth !== paneWidth()) change({});
  drawnWidth = paneWidth();
});

/** The place of a rank along an axis of a grid, whose ranks lie row-major along its axes, slowest first. */
function axisPlace(grid, name, rank) {
  const axis = sizeOf(grid, name), place = grid.ranks ? grid.ranks.indexOf(rank) : rank;
  return axis === 1 ? 0 : Math.floor(place / strideOf(grid, name)) % axis;
}
const sizeOf = (grid, name) => grid?.axes.find((axis) => axis.name === name)?.size ?? 1;
const strideOf = (grid, name) => grid.axes.slice(grid.axes.findIndex((axis) => axis.name === name) + 1).reduce((all, axis) => all * axis.size, 1);

/** All ranks that differ from `rank` in their places along some axes alone. */
function groupOf(grid, names, rank) {
  let places = [grid.ranks ? grid.ranks.indexOf(rank) : rank];
  for (const name of names) {
    const size = sizeOf(grid, name), stride = strideOf(grid, name);
    if (size > 1) places = places.flatMap((place) => {
      const first = place - (Math.floor(place / stride) % size) * stride;
      return Array.from({ length: size }, (_, at) => first + at * stride);
    });
  }
  return grid.ranks ? places.map((place) => grid.ranks[place]) : places;
}
const pipelineRank = (rank = state.rank) => axisPlace(grids().dense, "pp", rank);

/** The global rank that differs from the selected one in its place along pp alone. */
function withPipelineRank(place) {
  return groupOf(grids().dense, ["pp"], state.rank)[place];
}

/** A section with its heading; `draw` fills its body whenever the state changes. */
function pane(id, title, lead, draw) {
  const body = make("div");
  const section = make("section", { id, "aria-labelledby": `${id}-title` }, make("h2", { id: `${id}-title` }, title), make("p", { class: "lead" }, lead), body);
  document.getElementById("panes").append(section);
  const redraw = () => {
    const drawn = [draw()].flat().filter(Boolean);
    if (drawn.length !== 1 || drawn[0] !== body.firstChild) body.replaceChildren(...drawn); // a pane that keeps its nodes keeps the focus
  };
  panes.push(redraw);
  redraw();
}

/** Makes a drawing act on click, Enter and Space. */
function acts(node, label, act) {
  node.setAttribute("tabindex", "0");
  node.setAttribute("role", "button");
  node.setAttribute("aria-label", label);
  node.addEventListener("click", act);
  node.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(event); }
  });
  return node;
}

/** A drawing in pixels, so that its text has the size that it says. */
function drawing(width, height, label) {
  return make("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
}

const HATCH = make("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
  make("rect", { width: 6, height: 6, fill: "var(--idle)" }), make("rect", { width: 2, height: 6, fill: "var(--hatch)" }));
document.body.append(make("svg", { width: 0, height: 0, style: "position: absolute", "aria-hidden": "true" }, make("defs", {}, HATCH)));
