"use strict";
// Runs: curves and events of their logs, all runs in one chart.

const RUN_COLORS = ["--run-0", "--run-1", "--run-2", "--run-3", "--run-4", "--run-5"];
const CHART_UNITS = { memory_gb: 1e9 / 2 ** 30 }; // logged in GB

/** At most five round numbers in a range. */
function ticksOf(from, to) {
  const raw = (to - from) / 4, power = 10 ** Math.floor(Math.log10(raw)), step = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
  const first = Math.ceil(from / step - 1e-9);
  return Array.from({ length: Math.floor(to / step + 1e-9) - first + 1 }, (_, place) => +((first + place) * step).toPrecision(12));
}
const tickText = (value) => (value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3) ? value.toExponential() : String(value));

/** The forecast of a field of the log; undefined where there is none. */
function forecastOf(field) {
  const now = asIs(), record = layout().pipeline[0];
  if (field === "bubble") return record && record.idle[0] / record.step_time;
  return { mfu: now.mfu, step_time_s: now.step_time_s, tokens_per_s_per_gpu: now.tokens_per_s_per_gpu }[field];
}

function chart(field, name, width) {
  const unit = CHART_UNITS[field] ?? 1, height = 190, left = 58, bottom = 26;
  const lines = DATA.runs.map((run, place) => [run, (run.fields[field] ?? []).map(([x, y]) => [x, y * unit]), RUN_COLORS[place % RUN_COLORS.length]]).filter(([, points]) => points.length);
  if (!lines.length) return null;
  const xs = lines.flatMap(([, points]) => points.map(([x]) => x)), ys = lines.flatMap(([, points]) => points.map(([, y]) => y)).sort((a, b) => a - b);
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)], forecast = forecastOf(field);
  let [y0, y1] = [ys[Math.floor(0.002 * ys.length)], ys[Math.min(ys.length - 1, Math.ceil(0.995 * ys.length))]];
  if (forecast !== undefined) [y0, y1] = [Math.min(y0, forecast), Math.max(y1, forecast)];
  if (y0 === y1) { y0 -= Math.abs(y0) * 0.1 || 1; y1 += Math.abs(y1) * 0.1 || 1; }
  const px = (x) => left + ((x - x0) / (x1 - x0 || 1)) * (width - left - 8), py = (y) => 10 + (1 - (Math.min(y1, Math.max(y0, y)) - y0) / (y1 - y0)) * (height - bottom - 14);
  const svg = drawing(width, height, name);
  for (const y of ticksOf(y0, y1)) svg.append(make("line", { x1: left, x2: width - 8, y1: py(y), y2: py(y), stroke: "var(--edge)" }), make("text", { x: left - 5, y: py(y) + 4, "text-anchor": "end" }, tickText(y)));
  svg.append(make("text", { x: left, y: height - 8 }, `step ${count(x0)}`), make("text", { x: width - 8, y: height - 8, "text-anchor": "end" }, `step ${count(x1)}`));
  if (forecast !== undefined) svg.append(make("line", { x1: left, x2: width - 8, y1: py(forecast), y2: py(forecast), stroke: "var(--ink)", "stroke-width": 1.5, "stroke-dasharray": "6 4" }));
  for (const [run, points, paint] of lines) {
    const line = make("polyline", { points: points.map(([x, y]) => `${px(x).toFixed(1)},${py(y).toFixed(1)}`).join(" "), fill: "none", stroke: `var(${paint})`, "stroke-width": 1.8 });
    line.append(make("title", {}, run.name));
    svg.append(line);
    if (points.length < 40) for (const [x, y] of points) svg.append(make("circle", { cx: px(x), cy: py(y), r: 2.4, fill: `var(${paint})` }));
    for (const event of run.events) svg.append(make("line", { x1: px(event.step), x2: px(event.step), y1: 10, y2: height - bottom, stroke: `var(${paint})`, "stroke-dasharray": "2 3" }, make("title", {}, `${event.what}, step ${event.step}`)));
  }
  svg.addEventListener("mousemove", (event) => {
    const x = x0 + ((event.offsetX - left) / (width - left - 8)) * (x1 - x0);
    showTip(event, lines.map(([run, points]) => { const near = points.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a)); return `${run.name}, step ${near[0]}: ${+near[1].toPrecision(6)}`; }).join("\n"));
  });
  svg.addEventListener("mouseleave", hideTip);
  const dashed = forecast === undefined ? [] : [make("p", { class: "dimmed small" }, `dashed: the forecast, ${+forecast.toPrecision(3)}`)];
  return make("div", { class: "card" }, make("h3", {}, figure(name, "run")), svg, ...dashed);
}

if (DATA.runs.length) pane("runs", DATA.runs.length > 1 ? "The runs" : "The run", "What the log holds, over steps; dotted lines are events.", () => {
  const marks = legendOf(DATA.runs.map((run, place) => [`${run.name}: ${count(run.steps)} steps, loss ${run.last_loss?.toFixed(4)}`, RUN_COLORS[place % RUN_COLORS.length]]));
  const events = DATA.runs.flatMap((run) => run.events.map((event) => make("li", {}, `${run.name}, step ${event.step}: ${event.what}`)));
  const columns = Math.max(1, Math.floor(paneWidth() / 390)), width = Math.floor((paneWidth() - 13 * (columns - 1)) / columns) - 28;
  return [marks, make("div", { class: "cards", style: `grid-template-columns: repeat(${columns}, 1fr)` }, ...DATA.charts.map(([field, label]) => chart(field, label, width)).filter(Boolean)),
    events.length ? make("details", {}, make("summary", { "data-key": "events" }, `${events.length} event${events.length > 1 ? "s" : ""}`), make("ul", {}, ...events)) : null];
});
