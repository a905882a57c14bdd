"use strict";
// The data, the ranks and the costs of the picture, and its clock and controls.

// ---------- the data: batch, sequence, hidden ----------
const SLIVERS = 32, MOST_SLABS = 8;
/** The part `at` of `n` equal parts of some intervals. */
function cutOf(pieces, at, n) {
  const total = pieces.reduce((sum, [a, b]) => sum + b - a, 0), [low, high] = [(total * at) / n, (total * (at + 1)) / n], cut = [];
  let before = 0;
  for (const [a, b] of pieces) {
    const from = Math.max(low, before), to = Math.min(high, before + b - a);
    if (to > from + 1e-9) cut.push([a + from - before, a + to - before]);
    before += b - a;
  }
  return cut;
}
function spread(pieces, n) {
  const total = pieces.reduce((sum, [a, b]) => sum + b - a, 0), parts = [];
  pieces.forEach(([a, b], at) => {
    const m = at === pieces.length - 1 ? n - parts.length : Math.round((n * (b - a)) / total);
    for (let j = 0; j < m; j += 1) parts.push([a + ((b - a) * j) / m, a + ((b - a) * (j + 1)) / m]);
  });
  return parts;
}
/** The batch as slabs: one for each micro-batch of each data-parallel rank, or fewer. */
function slabsOf(micro) {
  const dp = Math.min(MOST_SLABS, micro.sizes.dp), { gbs, mbs } = layout().model, m = Math.max(1, Math.round(gbs / (mbs * micro.sizes.dp)));
  return { dp, each: Math.max(1, Math.min(m, Math.floor(MOST_SLABS / dp))), m };
}
/** The slivers of the data that a rank has in one form. */
function slivers(micro, form, rank) {
  const { tp, sp } = micro.sizes, at = { tp: placeOf(micro, "tp", rank), cp: placeOf(micro, "cp", rank) }, { dp, each } = slabsOf(micro);
  const slab = (of) => { const first = (placeOf(micro, "dp", of) % dp) / dp; return [first, first + 1 / (dp * each)]; };
  const pieces = micro.pieces[at.cp], full = (list, hidden) => spread(list, SLIVERS).map((sequence) => ({ sequence, hidden, batch: slab(rank) }));
  if (form === "none") return full(sp ? cutOf(pieces, at.tp, tp) : pieces, [0, 0]).map((sliver) => ({ ...sliver, off: true }));
  if (form === "sp") return full(cutOf(pieces, at.tp, tp), [0, 1]);
  if (form === "cp") return full(pieces, [0, 1]);
  if (form === "ulysses") {
    const inner = groupOver(micro, "cp_inner", rank), cuts = tp * inner.length, cut = at.tp * inner.length + inner.indexOf(rank);
    return full(inner.flatMap((of) => micro.pieces[placeOf(micro, "cp", of)]).sort((a, b) => a[0] - b[0]), [1 - (cut + 1) / cuts, 1 - cut / cuts]);
  }
  if (form !== "routed") return full(pieces, [1 - (at.tp + 1) / tp, 1 - at.tp / tp]);
  const group = groupOver(micro, "ep", rank).slice(0, SLIVERS), count = Math.floor(SLIVERS / group.length), stride = Math.max(1, Math.round(group.length / 2));
  return full(pieces, [0, 1]).map((sliver, n) => {
    const of = group[Math.min(group.length - 1, Math.floor(n / count))], list = sp ? cutOf(micro.pieces[placeOf(micro, "cp", of)], placeOf(micro, "tp", of), tp) : micro.pieces[placeOf(micro, "cp", of)];
    return { sequence: spread(list, count * stride)[((n % count) * stride + ((n * 7 + rank * 5) % stride)) % (count * stride)], hidden: [0, 1], batch: slab(of) };
  });
}
function dataItems(now, scene) {
  const { micro, step, rank, present, part } = now, { sizes } = micro, width = scene.width(252), items = [];
  const left = 24, wide = Math.min(width - left - 100, 288), tall = 132, depth = [84, -50], base = 52 + tall + 24, all = [0, 1], { dp, each } = slabsOf(micro);
  const point = (s, h, b) => [left + s * wide + b * depth[0], base - h * tall + b * depth[1]];
  const faces = {
    right: ([, c], [d, e], [b, f]) => [...point(c, d, b), ...point(c, d, f), ...point(c, e, f), ...point(c, e, b)],
    top: ([a, c], [, e], [b, f]) => [...point(a, e, b), ...point(c, e, b), ...point(c, e, f), ...point(a, e, f)],
    front: ([a, c], [d, e], [b]) => [...point(a, d, b), ...point(c, d, b), ...point(c, e, b), ...point(a, e, b)],
  };
  for (const [face, draw] of Object.entries(faces)) items.push(shape(`whole ${face}`, draw(all, all, all), face === "front" ? "var(--ghost)" : "var(--ghost-side)"));
  const edge = (key, from, to, paint, size = 1.5) => items.push(line(key, ...from, ...to, paint, size));
  for (let at = 1; at < dp * each; at += 1) {
    const b = at / (dp * each), isRank = at % each === 0, paint = isRank ? color("dp") : "var(--edge)";
    edge(`batch ${at}/${dp * each}`, point(0, 1, b), point(1, 1, b), paint, isRank ? 1.5 : 1);
    edge(`batch side ${at}/${dp * each}`, point(1, 1, b), point(1, 0, b), paint, isRank ? 1.5 : 1);
  }
  const moves = present && step.axis && !step.weights, form = !present || step.weights || step.dir === "u" ? "none" : moves && part < 0.62 && step.what !== "all_gather" ? step.before ?? step.state ?? "sp" : (moves && part < 0.62 ? step.before : step.state) ?? (sizes.sp ? "sp" : "cp");
  const dim = step.axis && dimensionOf(step.axis), glass = [];
  if (moves && dim !== "pp") for (const of of now.group.slice(0, 16)) if (of !== rank) {
    const other = slivers(micro, form === "routed" ? (sizes.sp ? "sp" : "cp") : form === "cp" && sizes.sp ? "sp" : form, of), first = other[0];
    if (!first.off) cutOf(mergedPieces(other), 0, 1).forEach((sequence) => glass.push({ sequence, hidden: first.hidden, batch: first.batch, glass: true }));
  }
  const solid = slivers(micro, form, rank), order = (a, b) => b.batch[0] - a.batch[0] || a.sequence[0] - b.sequence[0];
  for (const [at, { sequence, hidden, batch, off, glass: isGlass }] of [...glass.map((item, at) => [at, item]), ...solid.map((item, at) => [at, item])].sort((a, b) => order(a[1], b[1])))
    for (const [face, paint, opacity] of [["right", "use", 0.6], ["top", "held-side", 0.6], ["front", "use-side", 0.4]])
      items.push(isGlass ? shape(`glass ${face} ${at}`, faces[face](sequence, hidden, batch), color(dim), opacity / Math.max(1, glass.length / 5)) : shape(`${face} ${at}`, faces[face](sequence, hidden, batch), `var(--${paint})`, off ? 0 : 1, { stroke: `var(--${paint})`, "stroke-width": 0.7 }));
  // cuts, drawn over the pieces
  const cuts = [...new Set(micro.pieces.flat(2).map((at) => at.toFixed(6)))].map(Number).filter((at) => at > 0 && at < 1);
  if (cuts.length < 40) for (const at of cuts) { edge(`cp ${at}`, point(at, 0, 0), point(at, 1, 0), color("cp")); edge(`cp top ${at}`, point(at, 1, 0), point(at, 1, 1), color("cp")); }
  const pieces = micro.pieces.flatMap((list, at) => list.map(([a, b]) => [at, a, b]));
  if (pieces.length <= wide / 30) for (const [at, a, b] of pieces) items.push(label(`cp name ${a}`, point((a + b) / 2, 0, 0)[0], base + 15, sizes.cp > 1 ? `cp ${at}` : "one context rank", "", "middle", sizes.cp > 1 ? inColor("cp") : {}));
  if (sizes.tp > 1 && sizes.tp <= 16 && ["heads", "logits"].includes(form)) for (let at = 1; at < sizes.tp; at += 1) edge(`tp ${at}/${sizes.tp}`, point(0, at / sizes.tp, 0), point(1, at / sizes.tp, 0), color("tp"), 1);
  if (form === "sp" && sizes.tp <= 8) micro.pieces.forEach((list, cp) => range(1, sizes.tp - 1).forEach((at) => { const cut = cutOf(list, at, sizes.tp)[0][0]; edge(`sp ${cp} ${at}`, point(cut, 0, 0), point(cut, 1, 0), color("sp"), 1); }));
  const { seq_len: length, gbs } = layout().model, corner = point(1, 1, 1);
  items.push(label("sequence", ...point(0, 1, 1).map((x, at) => x - 8 * at), `sequence ${count(length)}`), label("batch", corner[0], corner[1] - 8, `batch ${count(gbs)}`, "", "end"));
  items.push(label("height", 0, 0, form === "logits" ? "vocabulary" : "hidden", "", "middle", { transform: `translate(${left - 9} ${base - tall / 2}) rotate(-90)` }));
  if (dp > 1 && dp < 5) for (let at = 0; at < dp; at += 1) { const [x, y] = point(1, 0, (at + 0.5) / dp); items.push(label(`dp ${at}`, x + 7, y + 10, `dp ${at}`, "", "start", inColor("dp"))); }
  return items;
}
function mergedPieces(slivers) {
  const merged = [];
  for (const { sequence: [a, b] } of slivers) if (merged.length && Math.abs(merged.at(-1)[1] - a) < 1e-6) merged.at(-1)[1] = b; else merged.push([a, b]);
  return merged;
}

// ---------- the ranks ----------
/** At most 64 ranks: windows of places along pp, dp, cp and tp around the selected rank. */
function windowOf(now) {
  const { micro, rank, step } = now, size = { pp: micro.sizes.pp, dp: micro.sizes.dp, cp: micro.sizes.cp, tp: micro.sizes.tp }, shown = { ...size };
  const most = innerWidth < 700 ? 32 : 64, total = () => Object.values(shown).reduce((a, b) => a * b, 1), from = {};
  if (total() > most) shown.pp = Math.min(4, shown.pp);
  while (total() > most) { const name = ["dp", "pp", "cp", "tp"].reduce((a, b) => (shown[b] > shown[a] ? b : a)); shown[name] = Math.ceil(shown[name] / 2); }
  for (const name in size) {
    let first = Math.floor(placeOf(micro, name, rank) / shown[name]) * shown[name];
    if (name === "pp" && size.pp > shown.pp) first = Math.floor(Math.min(now.place, micro.routes[0][step.axis === "pp" ? Math.min(step.stage, step.to) : step.stage] ?? now.place) / Math.max(1, shown.pp - 1)) * Math.max(1, shown.pp - 1);
    from[name] = Math.max(0, Math.min(size[name] - shown[name], first));
  }
  return { size, shown, from };
}
function ranksOf(now) {
  const { micro } = now, { shown, from } = windowOf(now), ranks = [];
  const along = (name) => range(from[name], from[name] + shown[name] - 1), grid = micro.grid.dense, shards = sizeOf(grid, "dp_shard");
  const stride = (name) => strideOf(grid, name);
  for (const pp of along("pp")) for (const dp of along("dp")) for (const cp of along("cp")) for (const tp of along("tp")) {
    const place = pp * stride("pp") + Math.floor(dp / shards) * stride("dp_replicate") + (dp % shards) * stride("dp_shard") + cp * stride("cp") + tp * stride("tp");
    ranks.push({ rank: grid.ranks ? grid.ranks[place] : place, pp: pp - from.pp, dp: dp - from.dp, cp: cp - from.cp, tp: tp - from.tp });
  }
  return ranks;
}
function gridPlaces(now, width) {
  const ranks = ranksOf(now), { shown } = windowOf(now), near = ranks.length > 32 ? 10 : 14, far = innerWidth < 700 ? 18 : 30, { node } = layout().device;
  let across = Math.min(shown.dp, Math.max(1, Math.floor(8 / shown.tp)));
  while (across > 1 && (width - 28 - (across - 1) * far) / across < shown.tp * (30 + near)) across = Math.ceil(across / 2);
  const perRow = across, down = Math.ceil(shown.dp / perRow), inRow = across * shown.cp * shown.tp;
  const above = (row) => range(1, row).reduce((sum, at) => sum + ((at * inRow) % node ? near + 2 : 42), 0); // a new node needs room for its name
  const fits = (blocks) => ((width + 12) / blocks - 40 - (across - 1) * far - across * (shown.tp - 1) * near) / (across * shown.tp); // width of a rank with so many stages side by side
  const size = Math.max(22, Math.min(ranks.length > 32 ? 36 : 46, [4, 2, 1].map(fits).find((most, at) => most >= 34 && [4, 2, 1][at] <= shown.pp) ?? fits(1)));
  const w = shown.tp * size + (shown.tp - 1) * near, h = shown.cp * size + (shown.cp - 1) * near, block = [across * w + (across - 1) * far + 28, down * h + above(down - 1) + 56];
  const inLine = Math.max(1, Math.min(shown.pp, Math.floor((width + 12) / (block[0] + 12)))), at = new Map();
  for (const { rank, pp, dp, cp, tp } of ranks) at.set(rank, [13 + (pp % inLine) * (block[0] + 12) + (dp % perRow) * (w + far) + tp * (size + near), 32 + Math.floor(pp / inLine) * block[1] + Math.floor(dp / perRow) * h + above(Math.floor(dp / perRow)) + cp * (size + near)]);
  return { at, size, height: 32 + Math.ceil(shown.pp / inLine) * block[1] - 40 };
}
function nodeFrames(at, size) {
  const nodes = new Map(), { node } = layout().device, items = [];
  for (const [rank, place] of at) nodes.set(Math.floor(rank / node), [...(nodes.get(Math.floor(rank / node)) ?? []), place]);
  const boxes = [...nodes].map(([name, places]) => [name, Math.min(...places.map(([x]) => x)) - 12, Math.min(...places.map(([, y]) => y)) - 11, Math.max(...places.map(([x]) => x)) + size + 12, Math.max(...places.map(([, y]) => y)) + size + 11]);
  const overlap = boxes.some((a, i) => boxes.some((b, j) => i < j && a[1] < b[3] && b[1] < a[3] && a[2] < b[4] && b[2] < a[4]));
  if (!overlap) for (const [name, x0, y0, x1, y1] of boxes) items.push(rect(`node ${name}`, x0, y0, x1 - x0, y1 - y0, "none", { rx: 9 }, { stroke: "var(--edge)" }), label(`node name ${name}`, x1 - 2, y0 - 5, `node ${name}`, "", "end"));
  return items;
}
const DIMENSIONS = [["tp", "tp"], ["cp", "cp"], ["ep", "ep"], ["dp", "dp"], ["pp", "pp"]];
function gridItems(now, scene) {
  const { micro, rank, step } = now, { at, size, height } = gridPlaces(now, scene.svg.clientWidth || 560), node = layout().device.node;
  const groups = Object.fromEntries(DIMENSIONS.map(([name, axis]) => [name, name === "ep" && !micro.grid.expert ? [rank] : groupOver(micro, axis, rank)]));
  const hidden = at.size < worldOf(micro), width = scene.width(height + 30 + 22 * 5 + (hidden ? 22 : 0)), items = nodeFrames(at, size), peers = new Map();
  for (const name of ["dp", "cp", "tp", "pp"]) for (const other of groups[name]) if (other !== rank) peers.set(other, name);
  for (const [other, [x, y]] of at) {
    const axis = peers.get(other), self = other === rank, expert = groups.ep.includes(other) && !self, big = size >= 34, fill = self ? "var(--use)" : axis ? color(axis) : expert ? color("ep") : "var(--ghost-side)";
    items.push(rect(`rank ${other}`, x, y, size, size, fill, { rx: 6, opacity: self || !(axis || expert) ? 1 : axis ? 0.28 : 0.16 }, { style: "cursor: pointer", "data-rank": other }, () => selectRank(other)));
    if (axis || expert) items.push(rect(`rim ${other}`, x + 0.75, y + 0.75, size - 1.5, size - 1.5, "none", { rx: 5.5 }, { stroke: color(axis ?? "ep"), "stroke-width": 1.5, class: "quiet" }));
    items.push(label(`number ${other}`, big ? x + 5 : x + size / 2, y + (big ? 15 : size / 2 + 4), `${other}`, self ? "strong quiet paper" : "ink quiet", big ? "start" : "middle"));
    if (big && axis) items.push(label(`axis ${other}`, x + 5, y + size - 7, axis, "strong quiet", "start", inColor(axis)));
    if (expert && axis && size < 44) items.push({ key: `expert ${other}`, tag: "circle", n: { cx: x + size - 7, cy: y + size - 11, r: 3.5 }, a: { fill: color("ep"), class: "quiet" } });
    else if (big && expert) items.push(label(`expert ${other}`, x + size - 5, y + size - 7, "ep", "strong quiet", "end", inColor("ep")));
  }
  const { all } = sentBy(now);
  let y = height + 34;
  if (hidden) { const { shown, size: sizes } = windowOf(now); items.push(label("hidden", 0, y, `${at.size} of ${count(worldOf(micro))} ranks: ${Object.keys(sizes).filter((name) => shown[name] < sizes[name]).map((name) => `${shown[name]} of ${sizes[name]} along ${name}`).join(", ")}`)); y += 22; }
  for (const [name] of DIMENSIONS) {
    const group = groups[name], alone = group.length < 2, far = group.some((other) => Math.floor(other / node) !== Math.floor(rank / node));
    items.push(rect(`row ${name}`, 0, y - 9, 10, 10, color(name), { rx: 2, opacity: alone ? 0.25 : 1 }), label(`row name ${name}`, 18, y, name, alone ? "" : "strong", "start", alone ? {} : inColor(name)),
      label(`row group ${name}`, 48, y, alone ? "alone" : `${count(group.length)} ranks, with ${few(group.filter((other) => other !== rank))}`, alone ? "" : "ink"));
    if (!alone && width > 420) items.push(label(`row link ${name}`, width, y, `${far ? "between nodes" : "inside the node"}${all[name] ? `, ${bytes(all[name])}` : ""}`, "", "end"));
    y += 22;
  }
  return step.axis ? [...items, ...messageItems(now, at, size)] : items;
}
const worldOf = (micro) => micro.grid.dense.axes.reduce((all, axis) => all * axis.size, 1);

/** The messages of the step: those of the selected rank's group strong, others faint. */
function messageItems(now, at, size) {
  const { micro, step, rank, group, actor, part } = now, dim = dimensionOf(step.axis), paint = color(dim), items = [], done = new Set(), all = step.what === "all_to_all";
  const middle = (of) => at.get(of)?.map((x) => x + size / 2), travel = 0.1 + 0.8 * (part < 0.5 ? 2 * part * part : 1 - 2 * (1 - part) ** 2), shift = step.axis === "pp" ? group[1] - actor : 0;
  const most = Math.max(...now.steps.map((each) => each.size ?? 0)), weight = Math.max(0.5, 1 + 0.25 * Math.log10(Math.max(1e-4, sizeOn(now) / most))); // of a link, by its bytes
  const stageOf = (of) => pipelinePlace(micro, of);
  const arcs = [];
  for (const of of at.keys()) {
    if (step.dir !== "u" && stageOf(of) !== stageOf(actor)) continue;
    const members = step.axis === "pp" ? [of, groupOf(micro.grid.dense, ["pp"], of)[stageOf(group[1])]] : groupOver(micro, step.axis, of), key = members.join();
    if (done.has(key) || members.length < 2) continue;
    done.add(key);
    const own = members.includes(rank), near = members.filter((member) => at.has(member));
    if (all) for (const other of near) { if (own && other !== rank) arcs.push([rank, other, own], ...(near.length > 6 ? [] : [[other, rank, own]])); }
    else if (step.axis === "pp") arcs.push([...members, own]);
    else near.forEach((member, place) => { if (near.length > 1) arcs.push([member, near[(place + 1) % near.length], own]); });
    if (all && near.length > 1 && !own) for (const [place, member] of near.entries()) if (place) arcs.push([near[0], member, false]);
  }
  for (const [a, b, own] of arcs.sort((x, y) => x[2] - y[2])) {
    if (!middle(a) || !middle(b) || a === b) continue;
    const [ax, ay] = middle(a), [bx, by] = middle(b), far = Math.hypot(bx - ax, by - ay), [dx, dy] = [(bx - ax) / far, (by - ay) / far], trim = size * 0.4;
    const [x1, y1, x2, y2] = [ax + dx * trim, ay + dy * trim, bx - dx * trim, by - dy * trim], bow = Math.min(20, 3 + far * 0.12), [cx, cy] = [(x1 + x2) / 2 + dy * bow * 2, (y1 + y2) / 2 - dx * bow * 2];
    const curve = (t, p, c, q) => (1 - t) ** 2 * p + 2 * t * (1 - t) * c + t * t * q, faint = all && !own;
    items.push(path(`way ${step.axis} ${a} ${b}`, `M${x1.toFixed(1)} ${y1.toFixed(1)}Q${cx.toFixed(1)} ${cy.toFixed(1)} ${x2.toFixed(1)} ${y2.toFixed(1)}`, { stroke: paint, "stroke-width": own ? (all ? 1.5 : 2.75) * weight : 1, class: "quiet" }, own ? (all ? 0.45 : 0.9) : faint ? 0.12 : 0.28));
    if (!faint) items.push({ key: `dot ${step.axis} ${a} ${b}`, tag: "circle", n: { cx: curve(travel, x1, cx, x2), cy: curve(travel, y1, cy, y2), r: own ? (all ? 3.5 : 5.5) : 2.5, opacity: own ? 1 : 0.5 }, a: { fill: paint, stroke: "var(--paper)", "stroke-width": own ? 1 : 0, class: "quiet" }, raw: true });
  }
  const own = group.includes(rank) ? group.filter((of) => at.has(of)) : [];
  if (own.length) {
    const xs = own.map((of) => at.get(of)[0]), ys = own.map((of) => at.get(of)[1]), x = Math.max(42, (Math.min(...xs) + Math.max(...xs) + size) / 2), top = Math.min(...ys) - 2;
    items.push(rect("pill", x - 41, top - 20, 82, 20, "var(--paper)", { rx: 10 }, { stroke: paint, "stroke-width": 1.5, class: "quiet" }), label("pill text", x, top - 6, bytes(sizeOn(now)), "strong quiet", "middle", inColor(dim)));
  }
  return items;
}
const sizeOn = ({ micro, step, rank }) => step.size ?? step.sizeOn?.(pipelinePlace(micro, rank)) ?? 0;

// ---------- what it costs ----------
function costItems(now, scene) {
  const { micro, place } = now, width = scene.width(394), memory = merged(variant()?.memory?.[place] ?? asIs().memory[place] ?? {}), items = [];
  const left = 96, bar = width - left - 76, most = Math.max(1, ...Object.values(memory));
  let y = 16;
  const head = (key, big, small) => { items.push(label(`${key} big`, 0, y + 4, big, "big"), label(`${key} small`, width, y + 4, small, "", "end")); y += 28; };
  const row = (key, all, solid, paint, value) => {
    items.push(label(`${key} name`, 0, y + 4, key), rect(`${key} all`, left, y - 5, bar * all, 10, paint, { rx: 2, opacity: 0.25 }), rect(`${key} now`, left, y - 5, bar * solid, 10, paint, { rx: 2 }), label(`${key} value`, width, y + 4, value, "ink", "end"));
    y += 23;
  };
  head("memory", gib(Object.values(memory).reduce((a, b) => a + b, 0)), `memory of pp ${place}`);
  for (const [kind] of KINDS) if (memory[kind] / most > 0.002) row(kind, 0, memory[kind] / most, "var(--use-side)", gib(memory[kind]));
  y += 14;
  const { all, sent } = sentBy(now), names = { tp: "tensor", cp: "context", ep: "expert", pp: "pipeline", dp: micro.sizes.zero > 1 ? "data" : "data, a step" };
  head("sent", bytes(["tp", "cp", "ep", "pp"].reduce((sum, dim) => sum + (all[dim] ?? 0), 0)), "sent for a micro-batch");
  const top = Math.max(1, ...Object.values(all));
  for (const [dim, name] of Object.entries(names)) row(name, (all[dim] ?? 0) / top, (sent[dim] ?? 0) / top, color(dim), all[dim] ? bytes(all[dim]) : "–");
  return items;
}
/** Bytes that the selected rank sends, by dimension: of the whole step, and until now. */
function sentBy(now) {
  const { micro, steps, place, at, part } = now, all = {}, sent = {};
  steps.forEach((step, index) => {
    const byStage = Object.entries(step.byStage ?? { [step.stage]: step.sums }).filter(([stage]) => micro.routes[0][stage] === place);
    const sums = step.dir !== "u" ? byStage.map(([, own]) => own) : step.sizeOn ? [{ [dimensionOf(step.axis)]: step.sizeOn(place) }] : [];
    for (const [dim, size] of sums.flatMap(Object.entries)) {
      all[dim] = (all[dim] ?? 0) + size;
      if (index < at || (index === at && part > 0.6)) sent[dim] = (sent[dim] ?? 0) + size;
    }
  });
  return { all, sent };
}
