"use strict";
// The GPU grid: every rank on its node, with the groups of the selected rank highlighted.

const MOST_SQUARES = 2048;

/** Axis name -> ranks that share a group with the selected one along it. */
function groups() {
  const { dense, expert } = layout().grid;
  const found = {};
  for (const [name, grid, names] of [["tp", dense, ["tp"]], ["cp", dense, ["cp"]], ["pp", dense, ["pp"]],
    ["dp", dense, ["dp_replicate", "dp_shard"]], ["ep", expert, ["ep"]]]) {
    const ranks = grid ? groupOf(grid, names, state.rank) : [];
    if (ranks.length > 1) found[name] = ranks;
  }
  return found;
}

function squares(total, perRow, lit, box, label, select) {
  const rows = Math.ceil(total / perRow), node = layout().device.node;
  const gap = (place) => (total === layout().world ? Math.floor((place % perRow) / node) * box * 0.35 : 0);
  const svg = make("svg", { viewBox: `0 0 ${perRow * box + gap(perRow - 1) + 1} ${rows * box + 1}`, role: "img", "aria-label": label });
  for (let place = 0; place < total; place++) {
    const axes = lit(place);
    const own = axes.includes("self");
    const square = make("rect", {
      x: (place % perRow) * box + gap(place) + 0.5, y: Math.floor(place / perRow) * box + 0.5, width: box - 1, height: box - 1, rx: box / 8,
      fill: own ? "var(--ink)" : axes.length ? axisColor(axes[0]) : "var(--idle)", "data-rank": place,
      stroke: axes.length > 1 && !own ? axisColor(axes[1]) : "none", "stroke-width": box / 8,
    });
    square.addEventListener("click", () => select(place));
    svg.append(square);
  }
  return svg;
}

pane("grid", "The GPU grid", "Each square is a rank; gaps separate nodes. Select one (or use the arrow keys) to see its communication groups.", () => {
  const { world, device } = layout(), node = Math.min(device.node, world), found = groups();
  const of = new Map();
  for (const [axis, ranks] of Object.entries(found)) for (const rank of ranks) of.set(rank, [...(of.get(rank) ?? []), axis]);
  of.set(state.rank, ["self"]);
  const hover = (event) => {
    const place = event.target.dataset?.rank;
    if (place !== undefined) showTip(event, `${folded && event.currentTarget === board ? "node" : "rank"} ${place}`); else hideTip();
  };
  const folded = world > MOST_SQUARES;
  const inNode = (place) => [...new Set(Array.from({ length: node }, (_, k) => of.get(place * node + k) ?? []).flat())];
  const width = folded ? Math.ceil(Math.sqrt(world / node / 0.5)) : Math.max(node, Math.round(Math.sqrt(world / 0.4) / node) * node || node);
  const board = folded
    ? squares(Math.ceil(world / node), width, (place) => inNode(place).sort((a) => (a === "self" ? -1 : 0)), 14, `${world / node} nodes`, (place) => change({ rank: place * node }))
    : squares(world, width, (place) => of.get(place) ?? [], 14, `${world} ranks`, (place) => change({ rank: place }));
  board.style.maxHeight = "420px";
  board.style.width = `min(100%, ${width * (folded ? 18 : 34)}px)`;
  const first = Math.floor(state.rank / node) * node;
  const open = folded ? squares(node, node, (place) => of.get(first + place) ?? [], 22, "ranks of the selected node", (place) => change({ rank: first + place })) : null;
  if (open) open.style.maxWidth = `${node * 30}px`;
  const holder = make("div", { tabindex: 0, role: "application", "aria-label": "Ranks: arrow keys select", "data-selected": state.rank });
  holder.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: folded ? node : width, ArrowUp: folded ? -node : -width }[event.key];
    if (!step) return;
    event.preventDefault();
    change({ rank: Math.min(world - 1, Math.max(0, state.rank + step)) });
    document.querySelector("#grid [role=application]").focus();
  });
  holder.addEventListener("mousemove", hover);
  holder.addEventListener("mouseleave", hideTip);
  board.addEventListener("mousemove", hover);
  holder.append(board, ...(open ? [make("h4", {}, `node ${first / node}`), open] : []));
  const crosses = (ranks) => (ranks.every((rank) => Math.floor(rank / node) === Math.floor(ranks[0] / node)) ? "inside the node" : "between nodes");
  const rows = Object.entries(found).map(([axis, ranks]) => make("tr", {}, make("td", {}, chip(axis)), make("td", {}, count(ranks.length)),
    make("td", {}, crosses(ranks)), make("td", {}, ranks.slice(0, 8).join(", ") + (ranks.length > 8 ? ", …" : ""))));
  return [holder, make("p", {}, make("b", {}, `Rank ${state.rank}`), `, pipeline rank ${pipelineRank()}, node ${first / node}`),
    make("div", { class: "scroll" }, make("table", {}, make("tr", {}, ...["group", "ranks", "links", "members"].map((name) => make("th", {}, name))), ...rows))];
});
