"use strict";
// The load of experts as logged: layers over steps, colored by the share of the busiest expert.

const ROW = 16, LEFT_OF_MAP = 64;

function heatMap(run) {
  const { layers, steps, loads } = run.expert_loads, all = loads.flat().filter((load) => load !== null), most = Math.max(1.5, ...all);
  const row = Math.max(6, Math.min(ROW, 480 / layers.length)), height = row * layers.length + 26;
  const canvas = make("canvas", { style: "width: 100%", role: "img", "aria-label": `Load of the busiest expert of ${layers.length} layers over ${steps.length} records of ${run.name}` });
  const place = (event) => [Math.floor((event.offsetY - 2) / row), Math.floor(((event.offsetX - LEFT_OF_MAP) / (canvas.clientWidth - LEFT_OF_MAP)) * steps.length)];
  const draw = () => {
    const width = canvas.clientWidth, ratio = devicePixelRatio || 1, pen = canvas.getContext("2d"), styles = getComputedStyle(document.documentElement), paint = (name) => styles.getPropertyValue(name).trim();
    if (!width) return;
    Object.assign(canvas, { width: width * ratio, height: height * ratio });
    canvas.style.height = `${height}px`;
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui";
    pen.textBaseline = "middle";
    const cell = (width - LEFT_OF_MAP) / steps.length;
    layers.forEach((layer, at) => {
      loads[at].forEach((load, column) => {
        pen.globalAlpha = 1;
        pen.fillStyle = paint("--idle");
        pen.fillRect(LEFT_OF_MAP + column * cell, 2 + at * row, cell + 0.3, row - 1);
        if (load === null) return;
        pen.globalAlpha = Math.min(1, (load - 1) / (most - 1));
        pen.fillStyle = paint("--ep");
        pen.fillRect(LEFT_OF_MAP + column * cell, 2 + at * row, cell + 0.3, row - 1);
      });
      pen.globalAlpha = 1;
      pen.fillStyle = paint("--dim");
      if (row >= 11 || at % 4 === 0) pen.fillText(`layer ${layer}`, 0, 2 + at * row + row / 2);
    });
    pen.fillText(`step ${count(steps[0])}`, LEFT_OF_MAP, height - 10);
    pen.textAlign = "right";
    pen.fillText(`step ${count(steps.at(-1))}`, width, height - 10);
  };
  canvas.addEventListener("mousemove", (event) => {
    const [at, column] = place(event), load = loads[at]?.[column];
    showTip(event, load ? `layer ${layers[at]}, step ${count(steps[column])}: the busiest expert has ${trim(load)} × an even share` : "");
  });
  canvas.addEventListener("mouseleave", hideTip);
  new ResizeObserver(draw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  const worst = Math.max(...all), at = loads.findIndex((row) => row.includes(worst)), scale = [1, (1 + most) / 2, most];
  const key = make("div", { class: "legend" }, ...scale.map((load) => make("span", {}, make("i", { style: `--c: color-mix(in srgb, var(--ep) ${Math.round((100 * (load - 1)) / (most - 1))}%, var(--idle))` }), load === 1 ? "1 = even" : `${trim(load)} ×`)));
  return [make("p", {}, make("b", {}, run.name), `: layer ${layers[at]} was least even; at step ${count(steps[loads[at].indexOf(worst)])} its busiest expert had `, figure(`${trim(worst)} × an even share`, "run"), "."), canvas, key];
}

const withLoads = DATA.runs.filter((run) => run.expert_loads);
if (withLoads.length) pane("experts", "The experts' load", "Tokens of the busiest expert of each layer, relative to an even share, over the steps of a run. The rank that holds it sets the pace of all.", () => withLoads.flatMap(heatMap));
