"use strict";
// Memory: what every pipeline rank needs by kind, against the device.

const KINDS = [["weights", "--tp"], ["gradients", "--dp"], ["optimizer", "--pp"], ["activations", "--cp"], ["messages", "--ep"],
  ["workspace", "--w"], ["fragmentation", "--idle"], ["outside", "--host"], ["other", "--dim"]];

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
    make("div", { class: "scroll" }, svg), make("div", { class: "legend" }, ...used.map(([kind, paint]) => make("span", {}, make("i", { style: `--c:var(${paint})` }), kind))), make("div", { class: "scroll" }, byStage)];
});
