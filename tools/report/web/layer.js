"use strict";
// The layer: the phases of a block as tensors that the layout cuts, and a switch for every dimension.

function switches() {
  const { switches: on, sizes } = layout();
  const buttons = on.map((name) => make("button", {
    type: "button", "data-switch": name, "aria-pressed": String(!state.off.includes(name)), style: `--c:${color(name)}`,
    onclick: () => change({ off: on.filter((each) => (each === name) !== state.off.includes(each)) }),
  }, `${NAMES[name]} ${name === "zero" ? sizes.zero : name === "sp" ? "" : sizes[name]}`.trim()));
  return make("div", { class: "bar", role: "group", "aria-label": "Dimensions" }, ...buttons);
}

/** Memory and step time without the dimensions that are off, relative to the layout. */
function comparison() {
  const now = variant(), before = asIs();
  if (!now) return make("p", { class: "warn" }, "This combination was not computed: switch one dimension back on.");
  if (now.refused) return make("p", { class: "warn" }, `Not a valid layout: ${now.refused}`);
  const facts = [figure(`${gib(now.needed_bytes)} a rank`, "memory")];
  if (now.step_time_s) facts.push(" · ", figure(`${seconds(now.step_time_s)} a step`, "step"), " · ", figure(`${percent(now.mfu)} MFU`, "mfu"));
  if (!state.off.length) return make("p", {}, ...facts);
  const names = state.off.map((name) => NAMES[name]).join(", ");
  const memory = now.needed_bytes / before.needed_bytes, time = now.step_time_s / before.step_time_s;
  const verdict = `Without ${names}${now.changed ? ` (and ${now.changed})` : ""}, on the same ranks: memory × ${trim(memory)}`;
  return make("p", {}, ...facts, make("br"), verdict + (now.step_time_s && before.step_time_s ? `, step time × ${trim(time)}.` : "."));
}

/** A tensor as a rectangle; the selected rank's part is filled. */
function tensorPicture(entry) {
  const shape = entry.whole ?? entry.local;
  const matrix = shape.length > 1 ? [shape[0], shape[shape.length - 1]] : [shape[0], 1];
  const dims = shape.length > 1 ? [0, shape.length - 1] : [0];
  const width = 66, height = 38;
  const log = matrix.map((size) => 4 + Math.log2(Math.max(1, size)));
  const scale = Math.min(width / log[1], height / log[0]);
  const w = log[1] * scale, h = log[0] * scale;
  let [x, y, partW, partH] = [0, 0, w, h];
  for (const dim of dims) {
    const share = Math.min(1, entry.local[dim] / shape[dim]);
    const parts = Math.max(1, Math.round(1 / share));
    const along = (entry.cut ?? []).filter(([at]) => at === dim).map(([, name]) => name);
    const place = placeAlong(along, entry.expert) % parts;
    if (dim === 0) { y = (h * place) / parts; partH = h * share; } else { x = (w * place) / parts; partW = w * share; }
  }
  const first = entry.cut?.[0]?.[1];
  return make("svg", { viewBox: `-2 -2 ${width + 6} ${height + 6}`, "aria-hidden": "true" },
    make("rect", { x: 0, y: 0, width: w, height: h, fill: "none", stroke: "var(--dim)", "stroke-dasharray": "2 2" }),
    make("rect", { x, y, width: Math.max(1.5, partW), height: Math.max(1.5, partH), fill: first ? color(first) : "var(--dim)", opacity: 0.85 }));
}

/** The place of the selected rank among the parts that several dimensions cut together. */
function placeAlong(names, expert) {
  const { dense, expert: experts } = layout().grid;
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
  const cut = [...new Set((entry.cut ?? []).map(([, name]) => name))];
  const whole = entry.whole && String(entry.whole) !== String(entry.local) ? `[${entry.whole.join(", ")}] → ` : "";
  return make("div", { class: "tensor" }, tensorPicture(entry), make("div", {}, entry.name, " ", ...cut.map(chip),
    make("br"), make("span", { class: "dimmed" }, `${whole}[${entry.local.join(", ")}]${cut.length ? "" : entry.bytes === undefined ? "" : " on every rank"}`)));
}

function sentRows(phase) {
  const rows = phase.sent.map((entry) => make("li", {}, make("span", {}, entry.pass === "F" ? "forward " : "backward ", chip(entry.axis),
    ` ${entry.calls > 1 ? `${entry.calls} × ` : ""}${entry.operation}`), figure(bytes(entry.bytes), "sent")));
  return rows.length ? make("ul", { class: "sent" }, ...rows) : make("p", { class: "dimmed" }, "nothing is sent");
}

/** Memory and step time with each dimension, relative to the layout without it. */
function effects() {
  const before = asIs();
  const rows = layout().switches.map((name) => {
    const without = layout().variants[name];
    if (!without || without.refused) return make("tr", {}, make("td", {}, chip(name)), make("td", { colspan: 3 }, without?.refused ?? "not computed"));
    const ratio = (key) => (before[key] && without[key] ? `× ${trim(before[key] / without[key])}` : "–");
    return make("tr", {}, make("td", {}, chip(name)), make("td", {}, ratio("needed_bytes")), make("td", {}, ratio("step_time_s")), make("td", { class: "dimmed" }, without.changed ?? ""));
  });
  return rows.length ? make("table", {}, make("tr", {}, ...["with it", "memory a rank", "step time", "compared with"].map((name) => make("th", {}, name))), ...rows) : null;
}

pane("layer", "The layer", "One block of this model, as the selected rank holds it. Switch a dimension off to see what it cuts, sends, saves and costs.", () => {
  const now = variant();
  const cards = (now?.layer ?? []).map((phase) => make("div", { class: "card" }, make("h3", {}, phase.name),
    make("h4", {}, "weights"), ...(phase.weights.length ? phase.weights.map(tensorRow) : [make("p", { class: "dimmed" }, "none")]),
    make("h4", {}, "activations [s, b, h]"), ...phase.tensors.map(tensorRow),
    make("h4", {}, "sent by a rank for a micro-batch"), sentRows(phase)));
  return [switches(), comparison(), make("div", { class: "cards" }, ...cards), make("div", { class: "scroll" }, effects() ?? "")];
});
