"use strict";
// Layouts side by side, the head of the page, and the first drawing.

if (DATA.layouts.length > 1) pane("compare", DATA.layouts.length > 2 ? "The layouts" : "Two layouts", "One model under several layouts.", () => {
  const rows = [["memory of a rank", (numbers) => gib(numbers.needed_bytes)], ["step", (numbers) => (numbers.step_time_s ? seconds(numbers.step_time_s) : "–")], ["MFU", (numbers) => (numbers.mfu ? percent(numbers.mfu) : "–")],
    ["tokens/s per GPU", (numbers) => (numbers.tokens_per_s_per_gpu ? count(numbers.tokens_per_s_per_gpu) : "–")]];
  const sizes = Object.keys(DATA.layouts[0].sizes);
  return [make("ul", {}, ...DATA.differences.map((text) => make("li", {}, text))),
    tableOf(["", ...DATA.layouts.map(({ name }) => name)], [...rows.map(([name, tell]) => [name, ...DATA.layouts.map(({ variants }) => tell(variants[""]))]),
      ...sizes.map((name) => [name, ...DATA.layouts.map((each) => String(each.sizes[name]))])])];
});

function facts() {
  const { model, device, world } = layout(), now = variant(), { sizes } = sizesAndGrids();
  const dims = ["dp", "tp", "cp", "pp", "ep"].filter((name) => sizes[name] > 1).map((name) => `${name} ${sizes[name]}`).join(" × ") || "one rank";
  return [["model", `${model.name}, ${model.num_layers} layers${model.num_experts ? `, ${model.num_experts} experts` : ""}`], ["ranks", `${count(world)} × ${device.name}`],
    ["layout", now.refused ? "not valid" : `${dims}${sizes.sp ? ", sp" : ""}, ZeRO ${sizes.zero}`], ["batch", `${count(now.gbs ?? model.gbs)} × ${count(model.seq_len)} tokens, mbs ${model.mbs}`],
    ["precision", model.dtype + (model.fp8 === "none" ? "" : ` + fp8 ${model.fp8}`)], ["recompute", model.recompute]]
    .map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, text)));
}

function head() {
  document.getElementById("title").textContent = DATA.title;
  document.getElementById("sentence").textContent = variant().sentence;
  document.getElementById("facts").replaceChildren(...facts());
  document.getElementById("switches").replaceChildren(...switches());
  const choices = DATA.layouts.map(({ name }, place) => make("button", { type: "button", "data-key": `layout ${place}`, "aria-pressed": String(place === state.layout), onclick: () => change({ layout: place, off: [], rank: 0 }) }, name));
  document.getElementById("layouts").replaceChildren(...(choices.length > 1 ? choices : []));
}
panes.push(head);
change({}); // once more: a scrollbar may have changed the width
drawnWidth = paneWidth();
