"use strict";
// The pipeline: the simulated step slot by slot on a canvas, a second schedule on the same scale, the bubble and its causes.

const OPS = { F: ["forward", "--f"], I: ["input gradient", "--i"], W: ["weight gradient", "--w"], B: ["backward", "--b"] };
const CAUSES = { "warm-up and drain": "equal stages would wait as long", messages: "stages wait for messages in flight", imbalance: "ranks with fewer or cheaper layers wait for the busiest" };
const view = { zoom: 1, from: 0, other: "" };
const parsed = (text) => { const [, op, stage, batch] = /^([FIWB])(\d+)\.(\d+)$/.exec(text); return { op, stage: +stage, batch: +batch }; };

/** Draws one schedule; returns a function that tells what is at a place of the canvas. */
function drawTimeline(canvas, record, longest) {
  const styles = getComputedStyle(document.documentElement);
  const paint = (name) => styles.getPropertyValue(name).trim();
  const width = canvas.clientWidth || 900, left = 44, row = Math.max(12, Math.min(26, 420 / record.slots.length));
  const height = row * record.slots.length + 4, ratio = devicePixelRatio || 1;
  canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio); pen.clearRect(0, 0, width, height);
  const perTick = record.makespan / 100000, scale = ((width - left) / longest) * view.zoom;
  const xOf = (ticks) => left + (ticks * perTick - view.from) * scale;
  const boxes = [], selected = pipelineRank();
  pen.font = "11px system-ui"; pen.textBaseline = "middle";
  record.slots.forEach((slots, rank) => {
    const y = rank * row + 2, tall = row - 3;
    let before = 0;
    for (const [start, length, ...actions] of [...slots, [100000, 0]]) {
      idleGap(pen, paint, xOf(before), xOf(start), y, tall, span(record, (start - before) * perTick), left, width, boxes, rank);
      before = start + length;
      const x = xOf(start), w = Math.max(0.5, length * perTick * scale);
      if (!actions.length || x > width || x + w < left) continue;
      actions.forEach((text, place) => {
        const { op, stage, batch } = parsed(text), share = tall / actions.length, top = y + place * share;
        pen.globalAlpha = stage >= record.num_stages / 2 && record.num_stages > record.slots.length ? 0.7 : 1;
        pen.fillStyle = paint(OPS[op][1]); pen.fillRect(Math.max(left, x), top, Math.max(0.5, Math.min(width, x + w) - Math.max(left, x) - (w > 4 ? 0.5 : 0)), share - 0.5);
        pen.globalAlpha = 1;
        if (w > 8 * String(batch).length && share > 8 && x > left - 4) { pen.fillStyle = paint("--on-pass"); pen.textAlign = "center"; pen.fillText(batch, x + w / 2, top + share / 2); }
      });
      boxes.push([x, y, w, tall, () => `rank ${rank}: ${actions.map((text) => { const action = parsed(text); return `${OPS[action.op][0]} of micro-batch ${action.batch}, stage ${action.stage}`; }).join("\nwith ")}\n${span(record, start * perTick)} to ${span(record, (start + length) * perTick)}`]);
    }
    pen.fillStyle = paint("--paper"); pen.fillRect(0, y - 2, left - 1, row);
    pen.fillStyle = paint("--ink"); pen.textAlign = "left"; pen.font = rank === selected ? "bold 12px system-ui" : "12px system-ui";
    pen.fillText(`pp ${rank}`, 0, y + tall / 2); pen.font = "11px system-ui";
  });
  return { row, at: (x, y) => boxes.find(([bx, by, w, h]) => x >= bx && x <= bx + w && y >= by && y <= by + h)?.[4] };
}

/** Hatches an idle gap and writes its length where it is wide enough. */
function idleGap(pen, paint, from, to, y, tall, idle, left, width, boxes, rank) {
  const [a, b] = [Math.max(left, from), Math.min(width, to)];
  if (b - a < 1) return;
  pen.save(); pen.beginPath(); pen.rect(a, y, b - a, tall); pen.clip();
  pen.fillStyle = paint("--idle"); pen.fillRect(a, y, b - a, tall);
  pen.strokeStyle = paint("--hatch"); pen.lineWidth = 1.5; pen.beginPath();
  for (let x = a - tall - (a % 6); x < b; x += 6) { pen.moveTo(x, y + tall); pen.lineTo(x + tall, y); }
  pen.stroke();
  const half = pen.measureText(idle).width / 2 + 4;
  if (b - a > 2 * half + 8 && tall > 12) {
    pen.fillStyle = paint("--idle"); pen.fillRect((a + b) / 2 - half, y + 1, 2 * half, tall - 2);
    pen.fillStyle = paint("--ink"); pen.textAlign = "center"; pen.fillText(idle, (a + b) / 2, y + tall / 2);
  }
  pen.restore();
  boxes.push([from, y, to - from, tall, () => `rank ${rank} waits ${idle}`]);
}

function timeline(record, longest) {
  const canvas = make("canvas", { style: "width: 100%; touch-action: pan-y", role: "img", "aria-label": `Timeline of ${record.name}` });
  let drawn;
  const draw = () => { drawn = drawTimeline(canvas, record, longest); };
  canvas.addEventListener("mousemove", (event) => { const text = drawn?.at(event.offsetX, event.offsetY); showTip(event, text ? text() : ""); });
  canvas.addEventListener("mouseleave", hideTip);
  canvas.addEventListener("click", (event) => change({ rank: withPipelineRank(Math.min(record.slots.length - 1, Math.floor(event.offsetY / drawn.row))) }));
  new ResizeObserver(() => canvas.clientWidth && draw()).observe(canvas);
  return [make("p", {}, make("b", {}, record.name), `: ${microBatches(record.num_microbatches)}, ${span(record, record.makespan)}; pipeline rank ${pipelineRank()} is idle for ${span(record, record.idle[pipelineRank()])}`), canvas];
}

/** The bubble as a large number, and a bar of its causes on the scale of the step. */
function bubbleFigure(record) {
  const width = Math.min(paneWidth(), 560), svg = drawing(width, 20, "The bubble by cause, as a share of the step");
  svg.append(make("rect", { x: 0, y: 2, width, height: 16, fill: "var(--busy)" }));
  let x = 0;
  const parts = Object.entries(record.bubble_by_cause).map(([cause, time]) => [cause, time / record.step_time]);
  for (const [cause, part] of parts) {
    svg.append(make("rect", { x, y: 2, width: part * width, height: 16, fill: "url(#hatch)", stroke: "var(--ink)", "stroke-width": 1 }, make("title", {}, `${cause}: ${CAUSES[cause]}`)));
    x += part * width;
  }
  return make("div", { class: "bubble" }, figure(percent(record.bubble), "bubble"), make("div", {}, make("b", {}, "bubble"), `, mean of ${record.idle.length} pipeline ranks: `,
    parts.map(([cause, part]) => `${cause} ${percent(part)}`).join(" · "), `. pp ${record.busiest}, the busiest: ${percent(record.idle[record.busiest] / record.step_time)}.`, svg));
}

/** The bubble of rank 0 as simulated and as measured: what it runs, and hatched what it waits. */
function measuredBubbles(record) {
  const runs = DATA.runs.filter((run) => run.exposed_s.pp !== undefined);
  if (!runs.length || state.off.length) return null;
  const bars = [["simulated", record.idle[0] / record.step_time], ...runs.map((run) => [`${run.name}, measured`, run.exposed_s.pp / run.step_time_s])];
  const width = paneWidth(), left = 150, right = 60, svg = drawing(width, 24 * bars.length, "Bubble of rank 0, simulated and measured");
  bars.forEach(([name, part], place) => {
    const y = 24 * place, idle = part * (width - left - right);
    svg.append(make("text", { x: 0, y: y + 16 }, name), make("rect", { x: left, y: y + 3, width: width - left - right - idle, height: 18, fill: "var(--busy)" }),
      make("rect", { x: width - right - idle, y: y + 3, width: idle, height: 18, fill: "url(#hatch)", stroke: "var(--pp)", "stroke-width": 2 }), make("text", { x: width, y: y + 16, "text-anchor": "end" }, percent(part)));
  });
  return [make("h3", {}, "The bubble of rank 0"), svg];
}

/** Bytes of activations that the selected pipeline rank keeps over the step. */
function activationCurve(record) {
  const rank = pipelineRank(), kept = record.held_bytes[rank], slots = record.slots[rank];
  const most = Math.max(...record.held_bytes.flat()), width = paneWidth(), height = 64;
  const points = slots.flatMap(([start, length], place) => [start, start + length].map((tick) => `${44 + (tick / 100000) * (width - 44)},${height - (kept[place] / most) * (height - 4)}`));
  const svg = drawing(width, height + 2, "Activations kept");
  svg.append(make("polyline", { points: points.join(" "), fill: "none", stroke: "var(--activations)", "stroke-width": 2 }));
  return [make("p", {}, `Activations of pipeline rank ${rank}: at most ${gib(Math.max(...kept))}`), svg];
}

pane("pipeline", "The pipeline", "The step as the simulator times it: micro-batch numbers in the cells, idle time hatched. The bubble is the time in which pipeline ranks run no pass, as a share of the step.", () => {
  const record = ownTimeline(), records = state.off.length ? [] : layout().pipeline;
  if (!record) return make("p", { class: "dimmed" }, variant().refused ?? "parallel.pp = 1: no pipeline.");
  const other = records.find(({ name, slots }) => name === view.other && slots);
  const longest = Math.max(record.makespan, other?.makespan ?? 0);
  const again = (values) => { Object.assign(view, values); view.from = Math.max(0, Math.min(view.from, longest * (1 - 1 / view.zoom))); change({}); };
  const select = make("select", { "aria-label": "Second schedule", "data-key": "second", onchange: (event) => again({ other: event.target.value }) },
    make("option", { value: "" }, "compare with …"),
    ...records.slice(1).map(({ name, bubble, step_time: time, slots, in_seconds }) => make("option", { value: name, selected: name === view.other ? "" : null, disabled: slots ? null : "" },
      `${name}: ${span({ in_seconds }, time)}, bubble ${percent(bubble)}${slots ? "" : " (too many slots for this page)"}`)));
  const action = (text, label, values) => make("button", { type: "button", "aria-label": label, "data-key": label, onclick: () => again(values) }, text);
  const bar = make("div", { class: "bar" }, records.length > 1 ? select : null, action("+", "Zoom in", { zoom: view.zoom * 1.6 }), action("−", "Zoom out", { zoom: Math.max(1, view.zoom / 1.6) }),
    action("◀", "Earlier", { from: view.from - longest / view.zoom / 3 }), action("▶", "Later", { from: view.from + longest / view.zoom / 3 }), action("whole step", "Whole step", { zoom: 1, from: 0 }));
  const used = new Set([record, other].flatMap((shown) => shown?.slots ?? []).flat().flatMap(([, , ...actions]) => actions.map((text) => text[0])));
  const marks = legendOf(Object.entries(OPS).filter(([op]) => used.has(op)).map(([op, [name, paint]]) => [`${op} ${name}`, paint]));
  marks.append(make("span", {}, make("i", { class: "hatched" }), "idle"));
  const unit = record.in_seconds ? [] : [make("p", { class: "dimmed" }, `Times are not predicted for this device: F is the time of a forward through one stage${layout().free_messages ? ", and messages take no time" : ""}.`)];
  const drawn = record.slots ? [...timeline(record, longest), ...activationCurve(record)] : [make("p", {}, `${record.name}: ${microBatches(record.num_microbatches)} have too many slots to draw${state.off.length ? " for every combination of switches" : ""}.`)];
  return [bubbleFigure(record), ...unit, record.slots ? bar : null, ...drawn, ...(other ? timeline(other, longest) : []), record.slots ? marks : null, measuredBubbles(record)].flat();
});
