"use strict";
// The layer: the phases of a block as tensors that the layout cuts, and a switch for every dimension.

/** Switches of the dimensions; sequence parallelism ends with tensor parallelism. */
function switches() {
  const { switches: on, sizes } = layout();
  const flipped = (name) => on.filter((other) => (other === name) !== state.off.includes(other));
  const buttons = on.map((name) => make("button", {
    type: "button", "data-switch": name, "data-key": name, "aria-pressed": String(!isOff(name)), style: `--c:${color(name)}`,
    disabled: name === "sp" && state.off.includes("tp") ? "" : null, title: name === "sp" && state.off.includes("tp") ? "requires tensor parallelism" : null,
    onclick: () => change({ off: flipped(name) }),
  }, `${NAMES[name]} ${name === "zero" ? sizes.zero : name === "sp" ? "" : sizes[name]}`.trim()));
  const all = make("button", { type: "button", "data-key": "all", disabled: state.off.length ? null : "", onclick: () => change({ off: [] }) }, "all on");
  return on.length ? [...buttons, all] : [];
}

/** Memory and step time without the dimensions that are off, relative to the layout. */
function comparison() {
  const now = variant(), before = asIs();
  if (now.refused) return make("p", { class: "warn" }, `Not a valid layout: ${now.refused}`);
  const numbers = [figure(`${gib(now.needed_bytes)} per rank`, "memory")];
  if (now.step_time_s) numbers.push(" · ", figure(`${seconds(now.step_time_s)} a step`, "step"), " · ", figure(`${percent(now.mfu)} MFU`, "mfu"));
  if (!state.off.length) return make("p", {}, ...numbers);
  const names = layout().switches.filter(isOff).map((name) => NAMES[name]).join(", ");
  const verdict = `Without ${names}, on the same ranks: memory × ${trim(now.needed_bytes / before.needed_bytes)}`;
  const time = timeRatio(now, before);
  return make("p", {}, ...numbers, make("br"), verdict, time ? `, time per token × ${trim(time)}` : "", now.changed ? `. The global batch grows to ${count(now.gbs)}, which the ranks divide.` : ".");
}

const timeRatio = (now, before) => now.step_time_s && before.step_time_s && before.tokens_per_s_per_gpu / now.tokens_per_s_per_gpu;

/** A tensor as a rectangle; the selected rank's piece has the colors of the dimensions that cut it. */
function tensorPicture(entry) {
  const shape = entry.whole ?? entry.local;
  const matrix = shape.length > 1 ? [shape[0], shape[shape.length - 1]] : [shape[0], 1];
  const dims = shape.length > 1 ? [0, shape.length - 1] : [0];
  const width = 66, height = 38;
  const log = matrix.map((size) => 4 + Math.log2(Math.max(1, size)));
  const scale = Math.min(width / log[1], height / log[0]);
  const w = log[1] * scale, h = log[0] * scale;
  let [x, y, pieceW, pieceH] = [0, 0, w, h];
  for (const dim of dims) {
    const fraction = Math.min(1, entry.local[dim] / shape[dim]);
    const pieces = Math.max(1, Math.round(1 / fraction));
    const along = (entry.cut ?? []).filter(([at]) => at === dim).map(([, name]) => name);
    const place = placeAlong(along, entry.expert) % pieces;
    if (dim === 0) { y = (h * place) / pieces; pieceH = h * fraction; } else { x = (w * place) / pieces; pieceW = w * fraction; }
  }
  const cutters = cuttersOf(entry), bands = cutters.length ? cutters.map(color) : [color("dim")];
  pieceW = Math.max(2, pieceW); pieceH = Math.max(2, pieceH);
  const isWide = pieceW >= pieceH, each = (isWide ? pieceW : pieceH) / bands.length;
  return make("svg", { viewBox: `-2 -2 ${width + 6} ${height + 6}`, "aria-hidden": "true" },
    make("rect", { x: 0, y: 0, width: w, height: h, fill: "none", stroke: "var(--dim)", "stroke-dasharray": "2 2" }),
    ...bands.map((fill, band) => make("rect", { x: isWide ? x + band * each : x, y: isWide ? y : y + band * each, width: isWide ? each : pieceW, height: isWide ? pieceH : each, fill })));
}

const cuttersOf = (entry) => [...new Set((entry.cut ?? []).map(([, name]) => name))];

/** The place of the selected rank among the pieces that several dimensions cut together. */
function placeAlong(names, expert) {
  const { dense, expert: experts } = grids();
  let place = 0;
  for (const name of ["cp", "tp", "ep"]) {
    const grid = (name === "ep" || expert) && experts ? experts : dense;
    const axis = name === "tp" && grid === experts ? "etp" : name;
    if (sizeOf(grid, axis) > 1 && (names.includes(name) || (name === "tp" && names.includes("sp"))))
      place = place * sizeOf(grid, axis) + axisPlace(grid, axis, state.rank);
  }
  return place;
}

function tensorRow(entry) {
  const cut = cuttersOf(entry), sizes = (shape) => `[${shape.map(count).join(" × ")}]`;
  const whole = entry.whole && String(entry.whole) !== String(entry.local) ? `${sizes(entry.whole)} → ` : "";
  return make("div", { class: "tensor" }, tensorPicture(entry), make("div", {}, entry.name, " ", ...cut.map(chip),
    make("br"), make("span", { class: "dimmed" }, `${whole}${sizes(entry.local)}${cut.length ? "" : entry.bytes === undefined ? "" : " on every rank"}`)));
}

function sentRows(phase) {
  const rows = phase.sent.map((entry) => make("li", {}, make("span", {}, entry.pass === "F" ? "forward " : "backward ", chip(entry.axis),
    ` ${entry.calls > 1 ? `${entry.calls} × ` : ""}${entry.operation}`), figure(bytes(entry.bytes), "sent")));
  return rows.length ? make("ul", { class: "sent" }, ...rows) : make("p", { class: "dimmed" }, "nothing is sent");
}

/** Memory and time without each dimension alone, relative to the layout as it is. */
function effects() {
  const before = asIs();
  const rows = layout().switches.map((name) => {
    const without = layout().variants[name], time = timeRatio(without, before);
    if (without.refused) return [chip(name), "not valid", "–", without.refused];
    return [chip(name), `× ${trim(without.needed_bytes / before.needed_bytes)}`, time ? `× ${trim(time)}` : "–", without.changed ? `global batch of ${count(without.gbs)}` : ""];
  });
  return rows.length ? tableOf(["without", "memory of a rank", "time per token", "note"], rows) : null;
}

pane("layer", "The layer", "One block of this model, as the selected rank holds it. Switch a dimension off to see what it cuts, sends, saves and costs.", () => {
  const cards = (variant().layer ?? []).map((phase) => make("div", { class: "card" }, make("h3", {}, phase.name),
    make("h4", {}, "weights"), ...(phase.weights.length ? phase.weights.map(tensorRow) : [make("p", { class: "dimmed" }, "none")]),
    make("h4", {}, "activations [s × b × h]"), ...phase.tensors.map(tensorRow),
    make("h4", {}, "sent by a rank for a micro-batch"), sentRows(phase)));
  return [halves(comparison(), effects()), make("div", { class: "cards" }, ...cards)];
});
