"use strict";
// Memory of every pipeline rank by kind, compared with the device.

// From the bottom: name, color, kinds of a forecast, kinds that stay during a step, kinds that pass, what a name stands for.
const KINDS = [
  ["weights", "--weights", ["weights"], ["weights"], []],
  ["gradients", "--gradients", ["gradients"], ["gradients"], []],
  ["optimizer state", "--optimizer", ["optimizer"], ["optimizer"], []],
  ["buffers", "--buffers", ["buffers", "inputs", "libraries", "setup", "boxes"], ["buffers", "inputs", "library", "symmetric"], [], "inputs and libraries, too"],
  ["overhead", "--outside", ["fragmentation", "outside"], ["margin", "outside"], [], "fragmentation, CUDA context, NCCL"],
  ["activations", "--activations", ["activations"], [], ["activations"]],
  ["stash", "--stash", ["stash"], [], ["stash"], "for deferred weight gradients"],
  ["messages", "--pp", ["messages"], [], ["messages"], "between stages"],
  ["in transit", "--dp", ["units"], [], ["units"], "gathered weights, gradients to reduce"],
  ["temporary", "--workspace", ["workspace", "end of step"], [], ["workspace"], "tensors of the running phase or the update"],
];

/** Name of a kind -> bytes. */
function merged(kinds) {
  const sums = {};
  for (const [kind, value] of Object.entries(kinds)) {
    const [name] = KINDS.find(([, , members]) => members.includes(kind.split("/")[0])) ?? KINDS[KINDS.length - 1];
    sums[name] = (sums[name] ?? 0) + value;
  }
  return sums;
}

const totalOf = (kinds) => Object.values(kinds).reduce((a, b) => a + b, 0);
const memoryLegend = (names) => legendOf(KINDS.filter(([name]) => names.has(name)).map(([name, paint, , , , note]) => [note ? `${name} (${note})` : name, paint]));

/** One bar for each pipeline rank; its total stands at the right. */
function memoryBars(now, capacity) {
  const totals = now.memory.map(totalOf), row = 24, left = 52, width = paneWidth(), right = 78;
  const most = Math.max(capacity, ...totals), scale = (width - left - right) / most;
  const svg = drawing(width, row * totals.length + 22, "Memory of every pipeline rank");
  now.memory.forEach((kinds, rank) => {
    const sums = merged(kinds), y = rank * row, isSelected = rank === pipelineRank();
    let x = left;
    const bar = acts(make("g", { "data-pp": rank, "data-key": `pp ${rank}`, class: isSelected ? "own" : "" }), `pipeline rank ${rank}: ${gib(totals[rank])}`, () => change({ rank: withPipelineRank(rank) }));
    bar.append(make("rect", { x: 0, y, width, height: row, fill: "transparent" }), make("text", { x: 0, y: y + 16, "font-weight": isSelected ? 700 : 400 }, `pp ${rank}`));
    for (const [name, paint, members] of KINDS) {
      const value = sums[name] ?? 0;
      if (value <= 0) continue;
      const detail = Object.entries(kinds).filter(([kind, size]) => size && members.includes(kind.split("/")[0]));
      const block = make("rect", { x, y: y + 3, width: value * scale, height: row - 6, fill: `var(${paint})` });
      block.addEventListener("mousemove", (event) => showTip(event, `pp ${rank}: ${name} ${gib(value)}\n` + detail.map(([kind, size]) => `${kind} ${gib(size)}`).join("\n")));
      block.addEventListener("mouseleave", hideTip);
      bar.append(block);
      x += value * scale;
    }
    if (isSelected) bar.append(make("rect", { x: left, y: y + 2, width: x - left, height: row - 4, fill: "none", stroke: "var(--ink)", "stroke-width": 1.5 }));
    bar.append(make("text", { x: width, y: y + 16, "text-anchor": "end", "font-weight": isSelected ? 700 : 400 }, gib(totals[rank])));
    svg.append(bar);
  });
  const at = left + capacity * scale;
  if (capacity) svg.append(make("line", { x1: at, x2: at, y1: 0, y2: row * totals.length, stroke: "var(--bad)", "stroke-width": 2 }),
    make("text", { x: Math.max(at, 190), y: row * totals.length + 16, "text-anchor": "end" }, `${layout().device.name}: ${gib(capacity)}`));
  return svg;
}

pane("memory", "Memory", "What every pipeline rank needs at its worst moment; the line is the device. It follows the switches.", () => {
  const now = variant();
  if (!now.memory) return make("p", { class: "dimmed" }, now.refused);
  const capacity = layout().device.memory_bytes ?? 0, spare = capacity - now.needed_bytes;
  const verdict = !capacity ? `Needs ${gib(now.needed_bytes)} per rank` : spare >= 0 ? `Fits with ${gib(spare)} to spare` : `Does not fit: ${gib(-spare)} too much`;
  const stages = layout().zero_stages.map((stage) => [make("span", {}, chip("zero"), ` ${stage.stage}${stage.stage === layout().sizes.zero ? " (this layout)" : ""}`),
    stage.refused ?? gib(stage.needed_bytes), stage.step_time_s ? seconds(stage.step_time_s) : "–"]);
  const used = new Set(now.memory.flatMap((kinds) => Object.keys(merged(kinds))));
  const drawn = [make("p", {}, figure(verdict, "memory"), `; pipeline rank ${now.worst_rank} needs most${now.moment ? `, ${now.moment}` : ""}.`), memoryBars(now, capacity)];
  if (state.off.length) return [...drawn, memoryLegend(used), make("p", { class: "dimmed" }, "ZeRO's stages and memory over a step are shown with every dimension on.")];
  const [curve, kinds] = overTime(layout().memory_over_time, capacity);
  return [...drawn, ...curve, memoryLegend(new Set([...used, ...kinds])), make("h3", {}, "The stages of ZeRO"), tableOf(["ZeRO", "memory of a rank", "step time"], stages)];
});

/** All kinds of memory of the selected pipeline rank over a step of the layout as it is, stacked; and their names. */
function overTime(record, capacity) {
  const rank = pipelineRank(), { staying, passing, start, end, end_of_step: after } = record.ranks[rank];
  const width = paneWidth(), height = 260, left = 70, base = height - 24, right = width - 62;
  const bands = KINDS.map(([name, paint, , always, passes]) => {
    const flat = always.reduce((sum, kind) => sum + (staying[kind] ?? 0), 0), [kind] = passes;
    return { name, paint, at: [...start.map((_, place) => flat + (passing[kind]?.[place] ?? 0)), flat + (kind === "workspace" ? after : 0)] };
  }).filter((band) => band.at.some((value) => value > 0));
  const sums = start.concat(0).map((_, place) => bands.reduce((sum, band) => sum + band.at[place], 0));
  const peak = Math.max(...sums), isAbove = capacity > 2.5 * peak, most = isAbove ? 1.25 * peak : 1.04 * Math.max(capacity, peak), py = (value) => base - (value / most) * (base - 20);
  // The passes take the width up to `right`; the end of the step, which is not to scale, the remainder.
  const px = (tick) => left + (tick / 100000) * (right - left), edges = [...start.map((tick, place) => [px(tick), px(end[place])]), [right, width]];
  const svg = drawing(width, height, `Memory of pipeline rank ${rank} over a step`);
  let floor = sums.map(() => 0);
  for (const band of bands) {
    const top = floor.map((value, place) => value + band.at[place]);
    const outline = (values) => edges.flatMap(([a, b], place) => [a, b].map((x) => `${x.toFixed(1)} ${py(values[place]).toFixed(1)}`));
    svg.append(make("path", { d: `M${outline(top).join("L")}L${outline(floor).reverse().join("L")}Z`, fill: `var(${band.paint})` }));
    floor = top;
  }
  const limit = isAbove ? 18 : py(capacity); // far above what is needed it is drawn at the top, dashed
  if (capacity) svg.append(make("line", { x1: left, x2: width, y1: limit, y2: limit, stroke: "var(--bad)", "stroke-width": 2, "stroke-dasharray": isAbove ? "8 5" : null }),
    make("text", { x: width, y: limit - 5, "text-anchor": "end" }, `${layout().device.name}: ${gib(capacity)}${isAbove ? ", above this scale" : ""}`));
  for (const value of [0, peak / 2, peak]) svg.append(make("text", { x: left - 6, y: py(value) + 4, "text-anchor": "end" }, gib(value)));
  svg.append(make("line", { x1: right, x2: right, y1: 20, y2: base, stroke: "var(--ink)", "stroke-dasharray": "2 3" }), make("text", { x: left, y: height - 6 }, "0"),
    make("text", { x: right - 6, y: height - 6, "text-anchor": "end" }, `passes end: ${span(record, record.makespan)}`), make("text", { x: width, y: height - 6, "text-anchor": "end" }, "update"));
  svg.addEventListener("mousemove", (event) => {
    const x = event.offsetX, place = edges.findIndex(([a, b]) => x >= a && x < b);
    showTip(event, place < 0 ? "" : `pipeline rank ${rank}${place < start.length ? ` from ${span(record, (start[place] / 100000) * record.makespan)}` : ", end of the step"}: ${gib(sums[place])}\n` + bands.filter((band) => band.at[place]).map((band) => `${band.name} ${gib(band.at[place])}`).join("\n"));
  });
  svg.addEventListener("mouseleave", hideTip);
  const lead = `At most ${gib(peak)}: each pass at its worst moment, then what is kept until the next; at the right the end of the step, not to scale.`;
  return [[make("h3", {}, `Pipeline rank ${rank} over a step`), make("p", { class: "lead" }, lead), svg], bands.map((band) => band.name)];
}
