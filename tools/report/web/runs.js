"use strict";
// Runs: curves and events of their logs, all runs in one chart.

const RUN_COLORS = ["--tp", "--pp", "--cp", "--ep", "--dp", "--b"];

function chart(field, label) {
  const width = 560, height = 190, left = 58, bottom = 26;
  const lines = DATA.runs.map((run, place) => [run, run.fields[field] ?? [], RUN_COLORS[place % RUN_COLORS.length]]).filter(([, points]) => points.length);
  if (!lines.length) return null;
  const xs = lines.flatMap(([, points]) => points.map(([x]) => x)), ys = lines.flatMap(([, points]) => points.map(([, y]) => y)).sort((a, b) => a - b);
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  let [y0, y1] = [ys[Math.floor(0.002 * ys.length)], ys[Math.min(ys.length - 1, Math.ceil(0.995 * ys.length))]];
  if (y0 === y1) { y0 -= Math.abs(y0) * 0.1 || 1; y1 += Math.abs(y1) * 0.1 || 1; }
  const px = (x) => left + ((x - x0) / (x1 - x0 || 1)) * (width - left - 8), py = (y) => 10 + (1 - (Math.min(y1, Math.max(y0, y)) - y0) / (y1 - y0)) * (height - bottom - 14);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const part of [0, 0.5, 1]) {
    const y = y0 + part * (y1 - y0);
    svg.append(make("line", { x1: left, x2: width - 8, y1: py(y), y2: py(y), stroke: "var(--edge)" }), make("text", { x: left - 5, y: py(y) + 4, "font-size": 11, "text-anchor": "end" }, Math.abs(y) >= 1e4 ? y.toExponential(1) : String(+y.toPrecision(4))));
  }
  svg.append(make("text", { x: left, y: height - 8, "font-size": 11 }, `step ${count(x0)}`), make("text", { x: width - 8, y: height - 8, "font-size": 11, "text-anchor": "end" }, `step ${count(x1)}`));
  for (const [run, points, paint] of lines) {
    const line = make("polyline", { points: points.map(([x, y]) => `${px(x).toFixed(1)},${py(y).toFixed(1)}`).join(" "), fill: "none", stroke: `var(${paint})`, "stroke-width": 1.6 });
    line.append(make("title", {}, run.name));
    svg.append(line);
    if (points.length < 40) for (const [x, y] of points) svg.append(make("circle", { cx: px(x), cy: py(y), r: 2.4, fill: `var(${paint})` }));
    for (const event of run.events) svg.append(make("line", { x1: px(event.step), x2: px(event.step), y1: 10, y2: height - bottom, stroke: `var(${paint})`, "stroke-dasharray": "2 3" }, make("title", {}, `${event.what}, step ${event.step}`)));
  }
  svg.addEventListener("mousemove", (event) => {
    const box = svg.getBoundingClientRect(), x = x0 + ((event.clientX - box.left) * (width / box.width) - left) / (width - left - 8) * (x1 - x0);
    showTip(event, lines.map(([run, points]) => { const near = points.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a)); return `${run.name}, step ${near[0]}: ${+near[1].toPrecision(6)}`; }).join("\n"));
  });
  svg.addEventListener("mouseleave", hideTip);
  return make("div", { class: "card" }, make("h3", {}, figure(label, "run")), svg);
}

if (DATA.runs.length) pane("runs", DATA.runs.length > 1 ? "The runs" : "The run", "What the log holds, over steps; dotted lines are events.", () => {
  const legend = make("div", { class: "legend" }, ...DATA.runs.map((run, place) => make("span", {}, make("i", { style: `--c:var(${RUN_COLORS[place % RUN_COLORS.length]})` }), `${run.name}: ${count(run.steps)} steps, loss ${run.last_loss?.toFixed(4)}`)));
  const events = DATA.runs.flatMap((run) => run.events.map((event) => make("li", {}, `${run.name}, step ${event.step}: ${event.what}`)));
  return [legend, make("div", { class: "cards", style: "grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr))" }, ...DATA.charts.map(([field, label]) => chart(field, label)).filter(Boolean)),
    events.length ? make("details", {}, make("summary", {}, `${events.length} events`), make("ul", {}, ...events)) : null];
});
