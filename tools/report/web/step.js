"use strict";
// Where the time of a step goes, predicted and measured.

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
  if (!now?.seconds) return [make("p", { class: "dimmed" }, now?.unknown_time ?? now?.refused ?? "not computed"), ...measured, ...byAxis(now)];
  const parts = Object.entries(now.seconds).filter(([, value]) => value > 1e-9).map(([kind, value]) => [...named(kind), value]).map(([name, paint, value]) => [name, value, paint]);
  const ideal = now.mfu * now.step_time_s;
  return [make("p", {}, "At the device's peak the step would take ", figure(seconds(ideal), "mfu"), "; predicted: ", figure(`${seconds(now.step_time_s)}, ${percent(now.mfu)} MFU, ${count(now.tokens_per_s_per_gpu)} tokens/s a GPU`, "step"), "."),
    waterfall(parts, now.step_time_s), ...measured, ...byAxis(now)];
});

function named(kind) { return TIMES[kind] ?? [kind, "--dim"]; }

/** Bytes sent and seconds waited in a step by axis: the forecast, and each run as measured on rank 0. */
function byAxis(now) {
  const runs = DATA.runs, forecast = (rank) => now?.sent_bytes?.[rank] ?? {}, mine = pipelineRank();
  const places = [...new Set(runs.length ? [0, mine] : [mine])]; // rank 0, which logs, is in pp 0
  const axes = [...new Set([...places.map(forecast), ...runs.map((run) => run.sent_bytes), ...runs.map((run) => run.exposed_s)].flatMap(Object.keys))];
  const cell = (value, text, source) => make("td", {}, value === undefined ? "–" : figure(text(value), source));
  const line = (name, cells) => make("tr", {}, make("td", {}, name), ...cells);
  const table = (heads, rows) => rows.length ? make("div", { class: "scroll" }, make("table", {}, make("tr", {}, ...heads.map((head) => make("th", {}, head))), ...rows)) : null;
  const sent = axes.filter((axis) => places.some((rank) => forecast(rank)[axis]) || runs.some((run) => run.sent_bytes[axis])).map((axis) => line(chip(axis),
    [...places.map((rank) => cell(forecast(rank)[axis], bytes, "sent")), ...runs.map((run) => cell(run.sent_bytes[axis], bytes, "run"))]));
  // The forecast has waits by dimension, a run by axis: axes of one dimension share a row.
  const dimension = (axis) => /^(e?dp|world)/.test(axis) ? "dp" : /^e/.test(axis) ? "ep" : axis === "cp_tp" ? "tp" : axis.split("_")[0];
  const waits = runs.map((run) => run.exposed_s), kinds = { tp: ["tp"], cp: ["cp"], ep: ["ep"], pp: ["p2p", "bubble"], dp: ["dp"] };
  const waited = (run, name) => { const own = Object.entries(run).filter(([axis]) => dimension(axis) === name).map(([, value]) => value); return own.length ? own.reduce((a, b) => a + b) : undefined; };
  const exposed = Object.entries(kinds).map(([name, parts]) => [name, now?.seconds && parts.reduce((all, part) => all + (now.seconds[part] ?? 0), 0), waits.map((run) => waited(run, name))])
    .filter(([, told, found]) => told > 1e-9 || found.some((value) => value !== undefined)).map(([name, told, found]) => line(chip(name), [cell(told, seconds, "step"), ...found.map((value) => cell(value, seconds, "run"))]));
  return [table(["sent in a step by a rank of", ...places.map((rank) => `pp ${rank}, forecast`), ...runs.map((run) => `rank 0 of ${run.name}, measured`)], sent),
    runs.length ? table(["exposed communication and waits", "forecast, busiest rank", ...runs.map((run) => `rank 0 of ${run.name}, measured`)], exposed) : null];
}
