"use strict";
// Memory of every pipeline rank by kind, compared with the device.

const KINDS = [["weights", "--tp"], ["gradients", "--dp"], ["optimizer", "--pp"], ["activations", "--cp"], ["messages", "--ep"],
  ["workspace", "--w"], ["fragmentation", "--idle"], ["outside", "--host"], ["other", "--dim"]];

// From the bottom: persistent memory, then temporary memory.
const STACK = [["weights", "weights", "--tp"], ["gradients", "gradients", "--dp"], ["optimizer", "optimizer state", "--pp"],
  ["buffers", "buffers, inputs, libraries", "--dim", "inputs", "library", "symmetric"], ["outside", "fragmentation, CUDA context, NCCL", "--host", "margin"],
  ["activations", "activations", "--cp"], ["stash", "kept for weight gradients", "--i"], ["messages", "messages between stages", "--ep"],
  ["units", "gathered weights, gradients in transit", "--sp"], ["workspace", "temporary buffers", "--w"]];

function merged(kinds) {
  const sums = {};
  for (const [kind, value] of Object.entries(kinds)) {
    const name = kind.split("/")[0];
    const known = KINDS.some(([each]) => each === name) ? name : "other";
    sums[known] = (sums[known] ?? 0) + value;
  }
  return sums;
}

pane("memory", "Memory", "What every pipeline rank needs at its worst moment; the line is the device. It follows the switches of the layer.", () => {
  const now = variant();
  if (!now?.memory) return make("p", { class: "dimmed" }, "no forecast");
  const have = layout().device.memory_bytes ?? 0, row = 22, left = 52, width = 900;
  const totals = now.memory.map((kinds) => Object.values(kinds).reduce((a, b) => a + b, 0));
  const most = Math.max(have, ...totals) * 1.02, scale = (width - left) / most;
  const svg = make("svg", { viewBox: `0 0 ${width} ${row * totals.length + 24}`, role: "img", "aria-label": "Memory of every pipeline rank" });
  now.memory.forEach((kinds, rank) => {
    const sums = merged(kinds), y = rank * row, own = rank === pipelineRank();
    let x = left;
    const bar = acts(make("g", { "data-pp": rank, class: own ? "own" : "" }), `pipeline rank ${rank}: ${gib(totals[rank])}`, () => change({ rank: withPipelineRank(rank) }));
    bar.append(make("text", { x: 0, y: y + 15, "font-size": 12, "font-weight": own ? 700 : 400 }, `pp ${rank}`));
    for (const [kind, paint] of KINDS) {
      const value = sums[kind] ?? 0;
      if (value <= 0) continue;
      const detail = Object.entries(kinds).filter(([name]) => name.split("/")[0] === kind || (kind === "other" && !KINDS.some(([each]) => each === name.split("/")[0])));
      const part = make("rect", { x, y: y + 2, width: value * scale, height: row - 5, fill: `var(${paint})`, stroke: own ? "var(--ink)" : "none", "stroke-width": 1 });
      part.addEventListener("mousemove", (event) => showTip(event, `pp ${rank}: ${kind} ${gib(value)}\n` + detail.filter(([, each]) => each).map(([name, each]) => `${name} ${gib(each)}`).join("\n")));
      part.addEventListener("mouseleave", hideTip);
      bar.append(part);
      x += value * scale;
    }
    bar.append(make("text", { x: Math.min(x + 5, width - 60), y: y + 15, "font-size": 11 }, gib(totals[rank])));
    svg.append(bar);
  });
  const at = left + have * scale;
  if (have) svg.append(make("line", { x1: at, x2: at, y1: 0, y2: row * totals.length, stroke: "var(--bad)", "stroke-width": 2 }),
    make("text", { x: Math.min(at, width - 4), y: row * totals.length + 16, "font-size": 12, "text-anchor": "end" }, `${layout().device.name}: ${gib(have)}`));
  const used = KINDS.filter(([kind]) => now.memory.some((kinds) => merged(kinds)[kind] > 0));
  const spare = have - now.needed_bytes;
  const said = !have ? `${gib(now.needed_bytes)} a rank at most` : spare >= 0 ? `Fits with ${gib(spare)} to spare` : `Does not fit: ${gib(-spare)} too much`;
  const stages = layout().zero_stages.map((each) => make("tr", {}, make("td", {}, chip("dp"), ` ZeRO ${each.stage}`, each.stage === layout().sizes.zero ? " (this layout)" : ""),
    make("td", {}, each.refused ?? gib(each.needed_bytes)), make("td", {}, each.step_time_s ? seconds(each.step_time_s) : "–")));
  const byStage = make("table", {}, make("tr", {}, ...["with", "memory a rank", "step time"].map((name) => make("th", {}, name))), ...stages);
  return [make("p", {}, figure(said, "memory"), `; pipeline rank ${now.worst_rank} needs most${now.moment ? `, ${now.moment}` : ""}.`),
    make("div", { class: "scroll" }, svg), make("div", { class: "legend" }, ...used.map(([kind, paint]) => make("span", {}, make("i", { style: `--c:var(${paint})` }), kind))), make("div", { class: "scroll" }, byStage),
    ...overTime(layout().memory_over_time)];
});

/** All kinds of memory of the selected pipeline rank over a step of the layout as it is, stacked. */
function overTime(record) {
  const rank = pipelineRank(), { staying, passing, start, end, end_of_step: after } = record.ranks[rank];
  const have = layout().device.memory_bytes ?? 0, width = 900, height = 260, left = 64, base = height - 22, right = width - 46;
  const bands = STACK.map(([kind, name, paint, ...more]) => {
    const flat = [kind, ...more].reduce((all, each) => all + (staying[each] ?? 0), 0);
    return { name, paint, at: [...start.map((_, place) => flat + (passing[kind]?.[place] ?? 0)), flat + (kind === "workspace" ? after : 0)] };
  }).filter((band) => band.at.some((value) => value > 0));
  const sums = start.concat(0).map((_, place) => bands.reduce((all, band) => all + band.at[place], 0));
  const peak = Math.max(...sums), above = have > 2.5 * peak, most = above ? 1.25 * peak : 1.04 * Math.max(have, peak), py = (value) => base - (value / most) * (base - 14);
  // the passes take the width to `right`; the end of the step, which is not to scale, the rest
  const px = (tick) => left + (tick / 100000) * (right - left), edges = [...start.map((tick, place) => [px(tick), px(end[place])]), [right, width]];
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Memory of pipeline rank ${rank} over a step` });
  let floor = sums.map(() => 0);
  for (const band of bands) {
    const top = floor.map((value, place) => value + band.at[place]);
    const line = (values) => edges.flatMap(([a, b], place) => [a, b].map((x) => `${x.toFixed(1)} ${py(values[place]).toFixed(1)}`));
    svg.append(make("path", { d: `M${line(top).join("L")}L${line(floor).reverse().join("L")}Z`, fill: `var(${band.paint})` }));
    floor = top;
  }
  const limit = above ? 14 : py(have); // far above what is needed it is drawn at the top, dashed
  if (have) svg.append(make("line", { x1: left, x2: width, y1: limit, y2: limit, stroke: "var(--bad)", "stroke-width": 2, "stroke-dasharray": above ? "8 5" : null }),
    make("text", { x: width, y: limit - 3, "font-size": 12, "text-anchor": "end" }, `${layout().device.name}: ${gib(have)}${above ? ", above this scale" : ""}`));
  for (const value of [0, peak / 2, peak]) svg.append(make("text", { x: left - 6, y: py(value) + 4, "font-size": 11, "text-anchor": "end" }, gib(value)));
  svg.append(make("line", { x1: right, x2: right, y1: 14, y2: base, stroke: "var(--ink)", "stroke-dasharray": "2 3" }), make("text", { x: left, y: height - 6, "font-size": 11 }, "0"),
    make("text", { x: right - 6, y: height - 6, "font-size": 11, "text-anchor": "end" }, `the passes end: ${span(record, record.makespan)}`), make("text", { x: width, y: height - 6, "font-size": 11, "text-anchor": "end" }, "update"));
  svg.addEventListener("mousemove", (event) => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) * (width / box.width), place = edges.findIndex(([a, b]) => x >= a && x < b);
    showTip(event, place < 0 ? "" : `pipeline rank ${rank}${place < start.length ? ` from ${span(record, (start[place] / 100000) * record.makespan)}` : ", end of the step"}: ${gib(sums[place])}\n` + bands.filter((band) => band.at[place]).map((band) => `${band.name} ${gib(band.at[place])}`).join("\n"));
  });
  svg.addEventListener("mouseleave", hideTip);
  return [make("h3", {}, `Pipeline rank ${rank} over a step`), make("p", { class: "lead" }, `The layout as it is, at most ${gib(peak)}: each pass at its worst moment, then what is held until the next; at the right the end of the step, not to scale.`),
    make("div", { class: "scroll" }, svg), make("div", { class: "legend" }, ...bands.map((band) => make("span", {}, make("i", { style: `--c:var(${band.paint})` }), band.name)))];
}
