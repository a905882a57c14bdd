"use strict";
// The pipeline: the simulated step slot by slot on a canvas, a second schedule on the same scale, and the activations held.

const OPS = { F: ["forward", "--f"], I: ["input gradient", "--i"], W: ["weight gradient", "--w"], B: ["backward", "--b"] };
const view = { zoom: 1, from: 0, other: "" };
const parsed = (text) => { const [, op, stage, batch] = /^([FIWB])(\d+)\.(\d+)$/.exec(text); return { op, stage: +stage, batch: +batch }; };

/** Draws one schedule; returns a function that tells what is at a place of the canvas. */
function drawTimeline(canvas, record, longest) {
  const styles = getComputedStyle(document.documentElement);
  const paint = (name) => styles.getPropertyValue(name).trim();
  const width = canvas.clientWidth || 900, left = 44, row = Math.max(10, Math.min(24, 420 / record.slots.length));
  const height = row * record.slots.length + 4, ratio = devicePixelRatio || 1;
  canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio); pen.clearRect(0, 0, width, height);
  const perTick = record.makespan / 100000, scale = ((width - left) / longest) * view.zoom;
  const xOf = (ticks) => left + (ticks * perTick - view.from) * scale;
  const boxes = [], own = pipelineRank();
  pen.font = "10px system-ui"; pen.textBaseline = "middle";
  record.slots.forEach((slots, rank) => {
    const y = rank * row + 2, tall = row - 3;
    pen.fillStyle = paint("--idle"); pen.fillRect(Math.max(left, xOf(0)), y, Math.min(width, xOf(100000)) - Math.max(left, xOf(0)), tall);
    let before = 0;
    for (const [start, length, ...actions] of [...slots, [100000, 0]]) {
      idleGap(pen, paint, xOf(before), xOf(start), y, tall, span(record, (start - before) * perTick), left, width, boxes, rank);
      before = start + length;
      const x = xOf(start), w = Math.max(0.5, length * perTick * scale);
      if (!actions.length || x > width || x + w < left) continue;
      actions.forEach((text, place) => {
        const { op, stage, batch } = parsed(text), part = tall / actions.length, top = y + place * part;
        pen.globalAlpha = stage >= record.num_stages / 2 && record.num_stages > record.slots.length ? 0.7 : 1;
        pen.fillStyle = paint(OPS[op][1]); pen.fillRect(Math.max(left, x), top, Math.max(0.5, Math.min(width, x + w) - Math.max(left, x) - 0.5), part - 0.5);
        pen.globalAlpha = 1;
        if (w > 7 * String(batch).length && part > 7 && x > left - 4) { pen.fillStyle = "#fff"; pen.textAlign = "center"; pen.fillText(batch, x + w / 2, top + part / 2); }
      });
      boxes.push([x, y, w, tall, () => `rank ${rank}: ${actions.map((text) => { const each = parsed(text); return `${OPS[each.op][0]} of micro-batch ${each.batch}, stage ${each.stage}`; }).join("\nwith ")}\n${span(record, start * perTick)} to ${span(record, (start + length) * perTick)}`]);
    }
    pen.fillStyle = paint("--paper"); pen.fillRect(0, y - 2, left - 1, row);
    pen.fillStyle = paint("--ink"); pen.textAlign = "left"; pen.font = rank === own ? "bold 11px system-ui" : "11px system-ui";
    pen.fillText(`pp ${rank}`, 0, y + tall / 2); pen.font = "10px system-ui";
  });
  return { row, at: (x, y) => boxes.find(([bx, by, w, h]) => x >= bx && x <= bx + w && y >= by && y <= by + h)?.[4] };
}

/** Hatches an idle gap and writes its length where it is wide enough. */
function idleGap(pen, paint, from, to, y, tall, idle, left, width, boxes, rank) {
  const [a, b] = [Math.max(left, from), Math.min(width, to)];
  if (b - a < 2) return;
  pen.save(); pen.beginPath(); pen.rect(a, y, b - a, tall); pen.clip();
  pen.strokeStyle = paint("--edge"); pen.beginPath();
  for (let x = a - tall; x < b; x += 5) { pen.moveTo(x, y + tall); pen.lineTo(x + tall, y); }
  pen.stroke();
  if (b - a > 44) { pen.fillStyle = paint("--dim"); pen.textAlign = "center"; pen.fillText(idle, (a + b) / 2, y + tall / 2); }
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
  const idle = record.idle[pipelineRank()];
  return [make("p", {}, make("b", {}, record.name), `: ${record.num_microbatches} micro-batches, ${span(record, record.makespan)}, `,
    figure(`bubble ${percent(record.bubble)}`, "bubble"), `; pipeline rank ${pipelineRank()} is idle for ${span(record, idle)}`), canvas];
}

/** Bytes of activations that the selected pipeline rank holds over the step. */
function heldCurve(record) {
  const rank = pipelineRank(), held = record.held_bytes[rank], slots = record.slots[rank];
  const most = Math.max(...record.held_bytes.flat()), width = 900, height = 70;
  const points = slots.flatMap(([start, length], place) => [start, start + length].map((tick) => `${44 + (tick / 100000) * (width - 44)},${height - (held[place] / most) * (height - 8)}`));
  return make("svg", { viewBox: `0 0 ${width} ${height + 2}`, role: "img", "aria-label": "Activations held" },
    make("polyline", { points: points.join(" "), fill: "none", stroke: "var(--cp)", "stroke-width": 1.5 }),
    make("text", { x: 48, y: 12, "font-size": 11 }, `activations of pipeline rank ${rank}: at most ${bytes(Math.max(...held))}`));
}

pane("pipeline", "The pipeline", "The step as the simulator times it: micro-batch numbers in the cells, idle time hatched. Choose a second schedule to compare.", () => {
  const records = layout().pipeline;
  if (!records.length) return make("p", { class: "dimmed" }, "parallel.pp = 1: no pipeline.");
  const [mine] = records;
  if (mine.unknown) return make("p", { class: "warn" }, mine.unknown);
  const other = records.find((record) => record.name === view.other && record.slots);
  const longest = Math.max(mine.makespan, other?.makespan ?? 0);
  const again = (values) => { Object.assign(view, values); view.from = Math.max(0, Math.min(view.from, longest * (1 - 1 / view.zoom))); change({}); };
  const select = make("select", { "aria-label": "Second schedule", onchange: (event) => again({ other: event.target.value }) },
    make("option", { value: "" }, "compare with …"),
    ...records.slice(1).map((record) => make("option", { value: record.name, selected: record.name === view.other ? "" : null, disabled: record.slots ? null : "" },
      `${record.name}: bubble ${percent(record.bubble)}${record.slots ? "" : " (not drawn)"}`)));
  const button = (text, label, values) => make("button", { type: "button", "aria-label": label, onclick: () => again(values) }, text);
  const bar = make("div", { class: "bar" }, select, button("+", "Zoom in", { zoom: view.zoom * 1.6 }), button("−", "Zoom out", { zoom: Math.max(1, view.zoom / 1.6) }),
    button("◀", "Earlier", { from: view.from - longest / view.zoom / 3 }), button("▶", "Later", { from: view.from + longest / view.zoom / 3 }), button("whole step", "Whole step", { zoom: 1, from: 0 }));
  const used = new Set(mine.slots?.flat().flatMap(([, , ...actions]) => actions.map((text) => text[0])) ?? []);
  const legend = make("div", { class: "legend" }, ...Object.entries(OPS).filter(([op]) => used.has(op)).map(([op, [name, paint]]) => make("span", {}, make("i", { style: `--c:var(${paint})` }), `${op} ${name}`)), make("span", {}, make("i", { style: "--c:var(--idle)" }), "idle"));
  const drawn = mine.slots ? [...timeline(mine, longest), heldCurve(mine)] : [make("p", {}, `${mine.name}: ${count(mine.num_microbatches)} micro-batches are too many to draw; bubble ${percent(mine.bubble)}`)];
  return [bar, ...drawn, ...(other ? timeline(other, longest) : []), legend];
});
