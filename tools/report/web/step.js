"use strict";
// The step's time: from the device's peak down to what is left, predicted and measured.

const TIMES = { gemms: ["GEMMs", "--tp"], products: ["GEMMs", "--tp"], attention: ["attention", "--sp"], memory: ["norms, activations, copies", "--cp"], tp: ["exposed tp", "--dp"],
  cp: ["exposed cp", "--dp"], ep: ["exposed ep", "--ep"], p2p: ["waits for stages", "--pp"], bubble: ["pipeline bubble", "--pp"], dp: ["exposed dp and ZeRO", "--dp"],
  host: ["host copies", "--host"], optimizer: ["optimizer", "--b"], muon: ["Muon iterations", "--b"], muon_sent: ["Muon all-to-alls", "--b"] };

function waterfall(parts, total) {
  const width = 900, row = 24, left = 210, scale = (width - left - 130) / total;
  const svg = make("svg", { viewBox: `0 0 ${width} ${row * (parts.length + 1)}`, role: "img", "aria-label": "Where the time of a step goes" });
  let at = left;
  parts.forEach(([name, value, paint], place) => {
    const y = place * row;
    svg.append(make("text", { x: 0, y: y + 16, "font-size": 13 }, name),
      make("rect", { x: at, y: y + 4, width: Math.max(1, value * scale), height: row - 8, fill: `var(${paint})` }),
      make("line", { x1: at + value * scale, x2: at + value * scale, y1: y + 4, y2: y + row + 4, stroke: "var(--edge)" }),
      make("text", { x: at + value * scale + 6, y: y + 16, "font-size": 12 }, `${seconds(value)} · ${percent(value / total)}`));
    at += value * scale;
  });
  svg.append(make("text", { x: 0, y: parts.length * row + 16, "font-size": 13, "font-weight": 700 }, "a step"),
    make("rect", { x: left, y: parts.length * row + 4, width: total * scale, height: row - 8, fill: "none", stroke: "var(--ink)" }),
    make("text", { x: left + total * scale + 6, y: parts.length * row + 16, "font-size": 12, "font-weight": 700 }, seconds(total)));
  return make("div", { class: "scroll" }, svg);
}

pane("step", "The step's time", "Where the time of one step goes on the busiest pipeline rank. It follows the switches of the layer.", () => {
  const now = variant();
  const measured = DATA.runs.flatMap((run) => [make("p", {}, make("b", {}, run.name), ", measured: ", figure(`${seconds(run.step_time_s)} a step`, "run")), waterfall(run.breakdown.map(([name, value]) => [name, value, "--tp"]), run.step_time_s)]);
  if (!now?.seconds) return [make("p", { class: "dimmed" }, now?.unknown_time ?? now?.refused ?? "not computed"), ...measured];
  const parts = Object.entries(now.seconds).filter(([, value]) => value > 1e-9).map(([kind, value]) => [...named(kind), value]).map(([name, paint, value]) => [name, value, paint]);
  const ideal = now.mfu * now.step_time_s;
  const rows = Object.entries(now.sent_bytes[pipelineRank()] ?? {}).filter(([, value]) => value).map(([axis, value]) => make("tr", {}, make("td", {}, chip(axis)), make("td", {}, figure(bytes(value), "sent"))));
  return [make("p", {}, "At the device's peak the step would take ", figure(seconds(ideal), "mfu"), "; predicted: ", figure(`${seconds(now.step_time_s)}, ${percent(now.mfu)} MFU, ${count(now.tokens_per_s_per_gpu)} tokens/s a GPU`, "step"), "."),
    waterfall(parts, now.step_time_s), ...measured,
    rows.length ? make("table", {}, make("tr", {}, make("th", {}, "axis"), make("th", {}, `sent in a step by a rank of pp ${pipelineRank()}`)), ...rows) : null];
});

function named(kind) { return TIMES[kind] ?? [kind, "--dim"]; }
