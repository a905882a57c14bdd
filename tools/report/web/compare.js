"use strict";
// Two layouts side by side, the head of the page, and the first drawing.

if (DATA.layouts.length > 1) pane("compare", "Two layouts", "One model under two layouts.", () => {
  const rows = [["memory per rank", (each) => gib(each.needed_bytes)], ["step", (each) => (each.step_time_s ? seconds(each.step_time_s) : "–")], ["MFU", (each) => (each.mfu ? percent(each.mfu) : "–")],
    ["tokens/s per GPU", (each) => (each.tokens_per_s_per_gpu ? count(each.tokens_per_s_per_gpu) : "–")]];
  const sizes = Object.keys(DATA.layouts[0].sizes);
  const head = make("tr", {}, make("th", {}, ""), ...DATA.layouts.map((each) => make("th", {}, each.name)));
  const line = (name, cells) => make("tr", {}, make("td", {}, name), ...cells.map((cell) => make("td", {}, String(cell))));
  return [make("ul", {}, ...DATA.differences.map((text) => make("li", {}, text))),
    make("div", { class: "scroll" }, make("table", {}, head, ...rows.map(([name, tell]) => line(name, DATA.layouts.map((each) => tell(each.variants[""])))),
      ...sizes.map((name) => line(name, DATA.layouts.map((each) => each.sizes[name])))))];
});

function facts() {
  const { model, sizes, device, world } = layout();
  const dims = ["dp", "tp", "cp", "pp", "ep"].filter((name) => sizes[name] > 1).map((name) => `${name} ${sizes[name]}`).join(" × ") || "one rank";
  return [["model", `${model.name}, ${model.num_layers} layers${model.num_experts ? `, ${model.num_experts} experts` : ""}`], ["ranks", `${count(world)} × ${device.name}`],
    ["layout", `${dims}${sizes.sp ? ", sp" : ""}, ZeRO ${sizes.zero}`], ["batch", `${count(model.gbs)} × ${count(model.seq_len)} tokens, mbs ${model.mbs}`], ["precision", model.dtype + (model.fp8 === "none" ? "" : ` + fp8 ${model.fp8}`)], ["recompute", model.recompute]]
    .map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, text)));
}

function head() {
  document.getElementById("title").textContent = DATA.title;
  document.getElementById("sentence").textContent = DATA.layouts[state.layout].sentence;
  document.getElementById("facts").replaceChildren(...facts());
  const choices = DATA.layouts.map((each, place) => make("button", { type: "button", "aria-pressed": String(place === state.layout), onclick: () => change({ layout: place, off: [], rank: 0 }) }, each.name));
  document.getElementById("layouts").replaceChildren(...(choices.length > 1 ? choices : []));
}
panes.push(head);
head();
