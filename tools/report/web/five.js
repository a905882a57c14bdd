"use strict";
// One picture of five dimensions: the model, the data and the ranks while a micro-batch passes through them.

const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
const five = { time: 0.5, goal: null, playing: false, follows: true, places: 64 };
const AXES = [["pp", "pipeline", "layers"], ["dp", "data", "batch"], ["cp", "context", "sequence"], ["tp", "tensor", "hidden"], ["sp", "sequence", "tokens, too"], ["ep", "expert", "experts"], ["zero", "ZeRO", "copies"]];

/** A drawing whose numbers move to their targets: items have a key, a tag, numbers `n` and attributes `a`. */
class Scene {
  constructor(id, label) {
    this.svg = make("svg", { id, role: "img", "aria-label": label });
    this.nodes = new Map();
    this.fresh = true;
  }
  width(height) {
    const width = this.svg.clientWidth || 360, box = `0 0 ${width} ${height}`;
    if (this.box !== box) { this.box = box; this.svg.setAttribute("viewBox", box); this.svg.style.height = `${height}px`; }
    return width;
  }
  draw(items, speed) {
    const seen = new Set(), k = this.fresh ? 1 : speed;
    let moving = false;
    items.forEach((item, at) => {
      let entry = this.nodes.get(item.key);
      if (!entry) {
        entry = { node: document.createElementNS("http://www.w3.org/2000/svg", item.tag), now: { opacity: this.fresh ? item.n.opacity ?? 1 : 0 }, set: {} };
        this.nodes.set(item.key, entry);
        entry.node.addEventListener("click", () => entry.click?.());
      }
      seen.add(item.key);
      entry.click = item.click;
      for (const [name, target] of Object.entries({ opacity: 1, ...item.n })) moving = this.move(entry, name, target, item.raw && name !== "opacity" ? 1 : k) || moving;
      for (const [name, value] of Object.entries(item.a)) if (entry.set[name] !== value) { entry.node.setAttribute(name, value); entry.set[name] = value; }
      if (item.text !== undefined && entry.set.text !== item.text) { entry.node.textContent = item.text; entry.set.text = item.text; }
      if (this.svg.children[at] !== entry.node) this.svg.insertBefore(entry.node, this.svg.children[at] ?? null);
    });
    for (const [key, entry] of this.nodes) if (!seen.has(key)) {
      moving = this.move(entry, "opacity", 0, k) || moving;
      if (entry.now.opacity < 0.03) { entry.node.remove(); this.nodes.delete(key); }
    }
    this.fresh = false;
    return moving;
  }
  /** Moves a number, or a list of numbers, a part k of the way; true until it arrives. */
  move(entry, name, target, k) {
    const list = [target].flat(), was = entry.now[name] === undefined ? [] : [entry.now[name]].flat(), near = name === "opacity" ? 0.02 : 0.2;
    const now = list.map((value, at) => (was.length !== list.length || Math.abs(value - was[at]) <= near ? value : was[at] + (value - was[at]) * k));
    const text = now.map((value) => Math.round(value * 100) / 100).join(" ");
    entry.now[name] = now.length > 1 ? now : now[0];
    if (entry.set[name] !== text) { entry.node.setAttribute(name, text); entry.set[name] = text; }
    return now.some((value, at) => value !== list[at]);
  }
}
const rect = (key, x, y, width, height, fill, n = {}, a = {}, click) => ({ key, tag: "rect", n: { x, y, width: Math.max(0, width), height: Math.max(0, height), ...n }, a: { fill, ...a }, click });
const line = (key, x1, y1, x2, y2, stroke, width = 1.5, a = {}) => ({ key, tag: "line", n: { x1, y1, x2, y2 }, a: { stroke, "stroke-width": width, ...a } });
const label = (key, x, y, text, kind = "", anchor = "start", a = {}) => ({ key, tag: "text", n: { x, y }, a: { class: kind, "text-anchor": anchor, ...a }, text });
const shape = (key, points, fill, opacity = 1, a = {}) => ({ key, tag: "polygon", n: { points, opacity }, a: { fill, ...a } });
const path = (key, d, a, opacity = 1) => ({ key, tag: "path", n: { opacity }, a: { d, fill: "none", ...a }, raw: true });
const inColor = (axis) => ({ style: `fill: var(--${axis}-text)` });

function hatch(key, x, y, width, height, gap) {
  let d = "";
  for (let at = -height; at < width; at += gap) {
    const a = Math.max(0, at), b = Math.min(width, at + height);
    if (b > a) d += `M${(x + a).toFixed(1)} ${(y + height - a + at).toFixed(1)}L${(x + b).toFixed(1)} ${(y + height - b + at).toFixed(1)}`;
  }
  return path(key, d, { stroke: "var(--paper)", "stroke-width": 1.5 }, 0.8);
}

// ---------- what is drawn now ----------
/** The layout drawn: that of the switches, or as it is if they make no valid one. */
function drawn() {
  const micro = variant()?.microbatch ?? asIs().microbatch;
  if (drawn.micro !== micro) Object.assign(drawn, { micro, ...journeyOf(micro) });
  const at = Math.min(drawn.steps.length - 1, Math.floor(five.time)), step = drawn.steps[at];
  const holder = step.dir === "u" ? pipelinePlace(micro, state.rank) : micro.routes[0][step.stage];
  const actor = groupOf(micro.grid.dense, ["pp"], state.rank)[holder] ?? 0, rank = five.follows ? actor : state.rank;
  const place = pipelinePlace(micro, rank), present = place === holder;
  const receiver = step.axis === "pp" ? groupOf(micro.grid.dense, ["pp"], actor)[micro.routes[0][step.to]] : null;
  const group = step.axis === "pp" ? [actor, receiver] : step.axis ? groupOver(micro, step.axis, actor) : [];
  const part = still ? 0.5 : five.time % 1;
  return { micro, at, step, steps: drawn.steps, columns: drawn.columns, actor, rank, place, present, group, part };
}
const placeOf = (micro, name, rank) => {
  const grid = ["ep", "etp", "edp"].includes(name) ? micro.grid.expert : micro.grid.dense;
  if (!grid) return 0;
  if (!/dp$/.test(name)) return axisPlace(grid, name, rank);
  return axisPlace(grid, `${name}_replicate`, rank) * sizeOf(grid, `${name}_shard`) + axisPlace(grid, `${name}_shard`, rank);
};
const holds = (now, stage) => now.micro.routes.some((route) => route[stage] === now.place);

// ---------- the model, and below it the steps ----------
function modelItems(now, scene) {
  const { micro, columns, step, rank } = now, { sizes } = micro, narrow = innerWidth < 700, tall = narrow ? 104 : 124, top = narrow ? 40 : 60;
  const lane = { f: top + tall + 26, b: top + tall + 48, u: top + tall + 70 }, width = scene.width(top + tall + 84), items = [];
  const left = narrow ? 18 : 78, right = 12, gap = narrow ? 4 : 12, cut = narrow ? 10 : 30;
  const isCut = (at) => columns[at + 1] && columns[at + 1].stage !== columns[at].stage;
  const weight = ({ units, folded }) => (folded ? 0.8 : /^(embedding|head)/.test(units[0][0]) ? 0.32 : 1);
  const free = width - left - right - columns.reduce((sum, _, at) => sum + (at === columns.length - 1 ? 0 : isCut(at) ? cut : gap), 0);
  const unit = free / columns.reduce((sum, column) => sum + weight(column), 0), places = new Map();
  let x = left;
  columns.forEach((column, at) => {
    const size = unit * weight(column), both = weight(column) === 1, inner = narrow ? 2 : 5;
    const first = both ? (size - inner) * 0.42 : size, second = { x: x + first + inner, width: size - first - inner };
    places.set(`${at} first`, { x, width: first }).set(`${at} second`, both ? second : { x, width: size }).set(`${at} gap`, { x: x + size, width: isCut(at) ? cut : gap });
    const roomy = unit > 120 && !narrow, active = (half) => now.present && step.column === at && (step.at === half || column.folded);
    const own = { held: holds(now, column.stage) || (column.last > column.stage && range(column.stage, column.last).some((stage) => holds(now, stage))) };
    const box = { y: top, tall };
    if (column.folded) items.push(...foldedBlock(now, at, column, { x, width: size, ...box }, own.held, active()));
    else {
      items.push(...weightBlock(now, `${at} a`, { x, width: first, ...box }, own.held, active("first"), false));
      if (both) {
        const experts = hasExperts(micro, column.units[0][1]), shared = experts && hasShared() ? Math.max(3, second.width * 0.12) : 0;
        if (shared) items.push(...weightBlock(now, `${at} s`, { x: second.x, width: shared, ...box }, own.held, active("second") && step.phase === "experts", false));
        const part = { x: second.x + shared + (shared ? 2 : 0), width: second.width - shared - (shared ? 2 : 0), ...box };
        items.push(...(experts ? expertBlock : weightBlock)(now, `${at} b`, part, own.held, active("second"), false));
        if (roomy) items.push(label(`${at} na`, x, top - 8, "attention"), label(`${at} nb`, second.x, top - 8, experts ? `${DATA.layouts[state.layout].model.num_experts} experts${shared ? " + shared" : ""}` : "MLP"));
      }
    }
    const hot = step.column === at && step.at !== "gap", short = column.name.replace(/^layers? |^stages /, "");
    const fits = size > 7 * column.name.length, text = fits ? column.name : size > 7 * short.length ? short : "";
    if (text) items.push(label(`${at} name`, x, top - (roomy && both ? 24 : 8), text, hot ? "ink strong" : ""));
    if (isCut(at)) { const at2 = x + size + cut / 2; items.push(line(`${at} cut`, at2, 6, at2, lane.b + 12, color("pp"))); }
    x += size + (at === columns.length - 1 ? 0 : isCut(at) ? cut : gap);
  });
  columns.forEach((column, at) => {
    if (at && columns[at - 1].stage === column.stage) return;
    let end = at;
    while (columns[end + 1]?.stage === column.stage) end += 1;
    const a = places.get(`${at} first`).x, b = places.get(`${end} gap`).x, one = micro.stages.length === 1;
    const names = column.last > column.stage ? "…" : `stage ${column.stage}`, tag = one ? "one stage: all layers" : b - a > 7 * names.length ? names : `${column.stage}`;
    items.push(line(`${at} stage`, a, 18, b, 18, one ? "var(--edge)" : color("pp")), label(`${at} stage name`, a, 11, tag, "strong", "start", one ? {} : inColor("pp")));
  });
  if (!narrow) items.push(label("hidden", 0, 0, `hidden ${count(DATA.layouts[state.layout].model.hidden_size)}`, "", "middle", { transform: `translate(${left - 20} ${top + tall / 2}) rotate(-90)` }));
  items.push(...laneItems(now, places, lane, left, width - right, narrow, rank));
  Object.assign(modelItems, { places, lane });
  return items;
}
const range = (from, to) => Array.from({ length: to - from + 1 }, (_, at) => from + at);
const hasShared = () => asIs().layer.some((phase) => phase.weights.some(({ name }) => name.startsWith("shared")));
function weightTone({ step }, active, isExpert) {
  const moves = step.weights && (step.dir === "u" ? /^e/.test(step.axis) === isExpert : active);
  return moves ? color(dimensionOf(step.axis)) : (active && !step.weights) || step.what === "optimizer" ? "var(--use)" : "var(--held)";
}

/** Weights that tp cuts; hatched is the slice that ZeRO gives to the rank. */
function weightBlock(now, key, { x, y, width, tall }, held, active) {
  const { micro, rank } = now, { tp, cp, dp, zero } = micro.sizes, items = [rect(`${key} all`, x, y, width, tall, "var(--ghost)")];
  const part = tall / tp, top = y + part * placeOf(micro, "tp", rank), shards = dp * cp, at = placeOf(micro, "dp", rank) * cp + placeOf(micro, "cp", rank);
  const slice = Math.max(2, width / shards), from = Math.min(x + width - slice, x + (at * width) / shards);
  if (held) {
    const lone = zero === 3 && shards > 1 && !active;
    items.push(rect(`${key} held`, lone ? from : x, top, lone ? slice : width, part, weightTone(now, active, false)));
    if (zero && shards > 1) items.push(hatch(`${key} own`, from, top, slice, part, 5));
  }
  if (tp <= 16) for (let cut = 1; cut < tp; cut += 1) items.push(line(`${key} tp ${cut}`, x - 2, y + cut * (tall / tp), x + width + 2, y + cut * (tall / tp), color("tp"), tp > 4 ? 1 : 1.5));
  return items;
}
/** Experts that ep cuts, and their matrices that etp cuts. */
function expertBlock(now, key, { x, y, width, tall }, held, active) {
  const { micro, rank } = now, { ep, etp, zero } = micro.sizes, experts = DATA.layouts[state.layout].model.num_experts, copies = now.micro.grid.expert ? sizeOf(micro.grid.expert, "edp_replicate") * sizeOf(micro.grid.expert, "edp_shard") : 1;
  const cells = Math.min(experts, width > 140 ? 16 : width > 60 ? 8 : 4), space = Math.min(2, (0.3 * width) / cells), cell = (width - (cells - 1) * space) / cells, items = [];
  const from = (placeOf(micro, "ep", rank) / ep) * cells, to = from + cells / ep, part = tall / etp, top = y + part * placeOf(micro, "etp", rank);
  for (let at = 0; at < cells; at += 1) {
    const left = x + at * (cell + space), a = Math.max(from, at) - at, b = Math.min(to, at + 1) - at;
    items.push(rect(`${key} ${at}`, left, y, cell, tall, "var(--ghost)"));
    if (!held || b <= a + 1e-9) continue;
    const own = part / copies, own_y = Math.min(top + part - 2, top + own * placeOf(micro, "edp", rank)), lone = zero === 3 && copies > 1 && !active;
    items.push(rect(`${key} ${at} held`, left + a * cell, lone ? own_y : top, Math.max(1.5, (b - a) * cell), lone ? Math.max(2, own) : part, weightTone(now, active && now.step.phase !== "dispatch", true)));
    if (zero && copies > 1) items.push(hatch(`${key} ${at} own`, left + a * cell, own_y, Math.max(1.5, (b - a) * cell), Math.max(2, own), 5));
  }
  const cuts = Math.min(ep, cells);
  for (let cut = 1; cut < cuts; cut += 1) { const at = x + (cut * cells) / cuts * (cell + space) - space / 2; items.push(line(`${key} ep ${cut}`, at, y - 3, at, y + tall + 3, color("ep"), Math.max(0.75, Math.min(1.5, space)))); }
  for (let cut = 1; cut < Math.min(etp, 16); cut += 1) items.push(line(`${key} etp ${cut}`, x, y + cut * (tall / etp), x + width, y + cut * (tall / etp), color("tp"), 1));
  return items;
}
/** Layers, or stages, that are folded: a stack of slabs. */
function foldedBlock(now, at, column, { x, y, width, tall }, held, active) {
  const slabs = Math.min(8, column.units.length), size = width / slabs, items = [];
  for (let slab = 0; slab < slabs; slab += 1) items.push(rect(`${at} slab ${slab}`, x + slab * size, y, size - Math.min(2, size / 3), tall, active ? "var(--use)" : held ? "var(--held)" : "var(--ghost)", { opacity: held && column.last === column.stage ? 0.75 : 1 }));
  return [...items, label(`${at} times`, x + width / 2, y + tall / 2 + 5, `× ${column.units.length}`, "strong halo", "middle")];
}

/** The lanes of forward, backward and update, with a mark for each step. */
function laneItems(now, places, lane, left, right, narrow, rank) {
  const { step, steps } = now, items = [], bend = 11;
  items.push(path("track", `M${left} ${lane.f}H${right - bend}a${bend} ${bend} 0 0 1 0 22H${left}a${bend} ${bend} 0 0 0 0 22h${narrow ? 88 : 180}`, { stroke: "var(--edge)", "stroke-width": 1.5 }));
  for (const [dir, name] of [["f", narrow ? "→" : "forward"], ["b", narrow ? "←" : "backward"], ["u", narrow ? "" : "update"]]) items.push(label(`lane ${dir}`, 0, lane[dir] + 4, name, step.dir === dir ? "ink strong" : ""));
  steps.forEach((each, at) => {
    const mine = each === step, x = placeOfStep(each, places, left, narrow), tall = each.axis ? (mine ? 18 : 13) : mine ? 12 : each.many ? 9 : 5, wide = (narrow ? 3 : 4) + (mine ? 2 : 0) + (each.many ? 4 : 0);
    const paint = each.axis ? color(dimensionOf(each.axis)) : mine ? "var(--ink)" : "var(--dim)";
    items.push(rect(`step ${at} of ${steps.length}`, x - wide / 2, lane[each.dir] - tall / 2, wide, tall, paint, { opacity: mine || at < now.at ? 1 : 0.4, rx: 1.5 }));
  });
  const x = placeOfStep(step, places, left, narrow), up = step.dir === "f" ? -1 : 1, y = lane[step.dir];
  items.push(shape("head of time", [x, y + 11 * up, x - 5, y + 18 * up, x + 5, y + 18 * up], "var(--ink)"));
  let at = narrow ? left + 120 : right;
  const legend = narrow ? [["now", "use", 44], [`rank ${rank}`, "held", 72]] : [["ZeRO: owned slice", "", 122], ["elsewhere", "ghost", 78], [`held by rank ${rank}`, "held", 118], ["now", "use", 40]];
  for (const [name, fill, wide] of legend) {
    if (!narrow) at -= wide + 18;
    items.push(rect(`key ${name}`, at, lane.u - 5, 12, 12, `var(--${fill || "held"})`, {}, fill === "ghost" ? { stroke: "var(--edge)" } : {}), label(`key name ${fill}`, at + 17, lane.u + 5, name));
    if (!fill) items.push(hatch("key hatch", at, lane.u - 5, 12, 12, 4));
    if (narrow) at += wide + 12;
  }
  return items;
}
function placeOfStep(step, places, left, narrow) {
  if (step.dir === "u") return left + 14 + (step.place + 0.5) * (narrow ? 16 : 28);
  const { x, width } = places.get(`${step.column} ${step.at}`), share = (step.place + 0.5) / step.count;
  return x + width * (step.dir === "f" ? share : 1 - share);
}
