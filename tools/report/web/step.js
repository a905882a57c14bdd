"use strict";
// Where the time of a step goes, predicted and measured side by side.

const COMPUTING = { products: ["GEMMs", "--gemms"], gemms: ["GEMMs", "--gemms"], attention: ["attention", "--core"], memory: ["norms, activations, copies", "--norms"],
  host: ["host copies", "--host"], optimizer: ["optimizer", "--optimizer-time"], muon: ["Muon iterations", "--optimizer-time"], muon_sent: ["Muon all-to-alls", "--dp"] };
const EXPOSED = { tp: "exposed tp", cp: "exposed cp", ep: "exposed ep", dp: "exposed dp and ZeRO", pp: "bubble" };
const KINDS_OF = { tp: ["tp"], cp: ["cp"], ep: ["ep"], dp: ["dp"], pp: ["p2p", "bubble"] };

/** Seconds of each dimension in a prediction, by the names of EXPOSED. */
const exposedOf = (secondsByKind) => Object.fromEntries(Object.entries(KINDS_OF).map(([name, kinds]) => [name, kinds.reduce((sum, kind) => sum + (secondsByKind[kind] ?? 0), 0)]));
const computingOf = (secondsByKind) => Object.entries(secondsByKind).filter(([kind, value]) => COMPUTING[kind] && value > 1e-9).map(([kind, value]) => [...COMPUTING[kind], value]);

/** The rows of a waterfall, `[name, [segments of each series]]`; a segment is `[name, color, seconds]`. */
function waterfallRows(now) {
  const runs = DATA.runs.map((run) => sumByDimension(run.exposed_s)), predicted = now.seconds && exposedOf(now.seconds);
  const series = [...(now.seconds ? [{ name: "predicted", total: now.step_time_s }] : []), ...DATA.runs.map((run) => ({ name: DATA.runs.length > 1 ? run.name : "measured", total: run.step_time_s, isMeasured: true }))];
  const rows = [];
  const computed = now.seconds ? computingOf(now.seconds) : [];
  const remainders = DATA.runs.map((run, place) => run.step_time_s - totalOf(runs[place]));
  if (runs.length) rows.push([now.seconds ? "computing" : "computing and all else", [...(now.seconds ? [computed] : []), ...remainders.map((value) => [["computing and all that was not timed", "--gemms", Math.max(0, value)]])]]);
  else rows.push(...computed.map((segment) => [segment[0], [[segment]]]));
  for (const [name, text] of Object.entries(EXPOSED)) {
    const values = [...(predicted ? [predicted[name]] : []), ...runs.map((run) => run[name] ?? 0)];
    const title = name === "pp" && now.seconds && !runs.length && ownTimeline() ? `bubble of pp ${ownTimeline().busiest}` : text;
    if (values.some((value) => value > 1e-9)) rows.push([title, values.map((value) => [[text, `--${name}`, value]])]);
  }
  return [rows, series];
}

/** Each row begins where the one above ends; a predicted bar is pale where a measured one stands below it. */
function waterfall(rows, series) {
  const isPaired = series.length > 1, width = paneWidth(), bar = 16, gap = 2;
  const left = isNarrow() ? 0 : 210, right = isNarrow() ? 0 : 190, head = isNarrow() ? 20 : 0;
  const row = head * series.length + series.length * (bar + gap) + 8, most = Math.max(...series.map(({ total }) => total));
  const scale = (width - left - right) / most, at = series.map(() => left);
  const svg = drawing(width, row * (rows.length + 1), "Where the time of a step goes");
  const all = [...rows, ["a step", series.map(({ total }) => [["a step", null, total]])]];
  all.forEach(([name, segments], place) => {
    segments.forEach((parts, index) => {
      const { name: who, total, isMeasured } = series[index], value = parts.reduce((sum, [, , time]) => sum + time, 0);
      const y = place * row + index * (bar + gap + head) + head, isTotal = place === rows.length;
      const title = isPaired ? `${index && !isNarrow() ? "" : name}${isNarrow() ? `, ${who}` : ""}` : name;
      svg.append(make("text", { x: 0, y: isNarrow() ? y - 6 : y + 13, "font-weight": isTotal ? 700 : 400 }, title));
      let x = isTotal ? left : at[index];
      for (const [kind, paint, time] of parts) {
        const box = make("rect", { x, y, width: Math.max(1, time * scale), height: bar, fill: isTotal ? "none" : kind === "bubble" ? "url(#hatch)" : `var(${paint})`, stroke: isTotal ? "var(--ink)" : kind === "bubble" ? color("pp") : "none", "stroke-width": isTotal ? 1 : 2, opacity: isPaired && !isMeasured && !isTotal ? 0.55 : 1 });
        box.append(make("title", {}, `${kind}${isPaired ? `, ${who}` : ""}: ${seconds(time)}`));
        svg.append(box);
        x += time * scale;
      }
      if (!isTotal) at[index] = x;
      svg.append(make("text", { x: width, y: isNarrow() ? y - 6 : y + 13, "text-anchor": "end", "font-weight": isTotal ? 700 : 400 }, `${isPaired && !isNarrow() ? `${who} ` : ""}${seconds(value)} · ${percent(value / total)}`));
    });
  });
  return svg;
}

pane("step", "The step's time", "Where the time of one step goes, predicted on the busiest pipeline rank and measured on rank 0. It follows the switches.", () => {
  const now = variant(), unknown = now.unknown_time ?? now.refused, facts = [];
  if (now.seconds) facts.push(make("p", {}, "At the device's peak the step would take ", figure(seconds(now.mfu * now.step_time_s), "mfu"), "; predicted: ", figure(`${seconds(now.step_time_s)}, ${percent(now.mfu)} MFU, ${count(now.tokens_per_s_per_gpu)} tokens/s per GPU`, "step"), "."));
  else facts.push(make("p", { class: "dimmed" }, unknown));
  for (const run of DATA.runs) facts.push(make("p", {}, make("b", {}, run.name), ", measured: ", figure(`${seconds(run.step_time_s)} a step`, "run"), state.off.length ? ", with every dimension on" : ""));
  const [rows, series] = waterfallRows(now), computed = now.seconds && DATA.runs.length ? legendOf(computingOf(now.seconds)) : null;
  return [...facts, series.length ? waterfall(rows, series) : null, computed, byAxis(now)];
});

/** Bytes sent and seconds waited in a step by axis: the forecast, and each run as measured on rank 0. */
function byAxis(now) {
  const runs = DATA.runs, forecast = (rank) => now.sent_bytes?.[rank] ?? {}, own = pipelineRank();
  const places = [...new Set(runs.length ? [0, own] : [own])]; // rank 0, which logs, is in pp 0
  const axes = [...new Set([...places.map(forecast), ...runs.map((run) => run.sent_bytes)].flatMap(Object.keys))];
  const cell = (value, text, source) => (value === undefined ? "–" : figure(text(value), source));
  const sent = axes.filter((axis) => places.some((rank) => forecast(rank)[axis]) || runs.some((run) => run.sent_bytes[axis])).map((axis) => [chip(axis),
    ...places.map((rank) => cell(forecast(rank)[axis], bytes, "sent")), ...runs.map((run) => cell(run.sent_bytes[axis], bytes, "run"))]);
  const waits = runs.map((run) => sumByDimension(run.exposed_s)), predicted = now.seconds && exposedOf(now.seconds);
  const exposed = Object.keys(EXPOSED).filter((name) => predicted?.[name] > 1e-9 || waits.some((wait) => wait[name] !== undefined)).map((name) => [make("span", {}, chip(name), ` ${EXPOSED[name]}`),
    cell(predicted?.[name], seconds, "step"), ...waits.map((wait) => cell(wait[name], seconds, "run"))]);
  const measured = runs.map((run) => `rank 0 of ${run.name}, measured`);
  return halves(sent.length ? tableOf(["sent in a step by a rank of", ...places.map((rank) => `pp ${rank}, forecast`), ...measured], sent) : null,
    runs.length && exposed.length ? tableOf(["exposed communication and bubble", "forecast, busiest rank", ...measured], exposed) : null);
}
