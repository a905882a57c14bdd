"use strict";
// The GPU grid: every rank in its node, with the groups of the selected rank highlighted.

const MOST_SQUARES = 512, MOST_NUMBERED = 512; // above these, nodes are drawn for ranks, and without numbers
const CELL = 34;

/** Axis name -> ranks that share a group with the selected one along it. */
function groups() {
  const { dense, expert } = grids();
  const members = {};
  for (const [name, grid, names] of [["tp", dense, ["tp"]], ["cp", dense, ["cp"]], ["pp", dense, ["pp"]],
    ["dp", dense, ["dp_replicate", "dp_shard"]], ["ep", expert, ["ep"]]]) {
    const ranks = grid ? groupOf(grid, names, state.rank) : [];
    if (ranks.length > 1) members[name] = ranks;
  }
  return members;
}

/** A rank or node: filled in the color of its first group, with a rim in that of ep. */
function squareOf(x, y, size, place, names, text) {
  const isSelected = names.includes("self"), fill = names.find((name) => name !== "ep" && name !== "self");
  const square = make("rect", { x: x + 2, y: y + 2, width: size - 4, height: size - 4, rx: 4, "data-rank": place,
    fill: isSelected ? "var(--ink)" : fill ? color(fill) : "var(--idle)", stroke: names.includes("ep") ? color("ep") : "none", "stroke-width": 3 });
  if (!text) return [square];
  const paint = isSelected || fill ? "var(--paper)" : "var(--ink)";
  return [square, make("text", { x: x + size / 2, y: y + size / 2 + 4, "text-anchor": "middle", "pointer-events": "none", style: `fill: ${paint}` }, place)];
}

/** Ranks in frames, one for each node. */
function framedRanks(first, last, node, width, namesOf) {
  const columns = Math.max(1, Math.min(node <= 4 ? node : Math.ceil(node / Math.max(2, Math.round(Math.sqrt(node / 2)))), Math.floor((width - 10) / CELL)));
  const frameW = columns * CELL + 8, frameH = Math.ceil(node / columns) * CELL + 26;
  const inRow = Math.max(1, Math.min(last - first, Math.floor((width + 8) / (frameW + 8)))), rows = Math.ceil((last - first) / inRow);
  const svg = drawing(inRow * (frameW + 8) - 8, rows * (frameH + 8) - 8, `${count((last - first) * node)} ranks in ${last - first} nodes`);
  for (let number = first; number < last; number++) {
    const x = ((number - first) % inRow) * (frameW + 8), y = Math.floor((number - first) / inRow) * (frameH + 8);
    svg.append(make("rect", { x: x + 0.5, y: y + 0.5, width: frameW - 1, height: frameH - 1, rx: 6, fill: "none", stroke: "var(--edge)" }), make("text", { x: x + 6, y: y + 15, class: "small" }, `node ${number}`));
    for (let place = 0; place < node; place++) {
      const rank = number * node + place;
      svg.append(...squareOf(x + 4 + (place % columns) * CELL, y + 20 + Math.floor(place / columns) * CELL, CELL, rank, namesOf(rank), true));
    }
  }
  return svg;
}

function nodeSquares(total, width, namesOf) {
  const isNumbered = total <= MOST_NUMBERED, size = isNumbered ? (isNarrow() ? 28 : CELL) : 16, inRow = Math.floor(width / size);
  const svg = drawing(Math.min(total, inRow) * size, Math.ceil(total / inRow) * size, `${count(total)} nodes`);
  for (let number = 0; number < total; number++)
    svg.append(...squareOf((number % inRow) * size, Math.floor(number / inRow) * size, size, number, namesOf(number), isNumbered));
  return svg;
}

pane("grid", "The GPU grid", "Each square is a rank in its node. Select one (or use the arrow keys) to see its communication groups.", () => {
  const { world, device } = layout(), node = Math.min(device.node, world), members = groups(), numNodes = Math.ceil(world / node);
  const byRank = new Map();
  for (const [name, ranks] of Object.entries(members)) for (const rank of ranks) byRank.set(rank, [...(byRank.get(rank) ?? []), name]);
  byRank.set(state.rank, ["self"]);
  const namesOf = (rank) => byRank.get(rank) ?? [];
  const inNode = (number) => [...new Set(Array.from({ length: node }, (_, place) => namesOf(number * node + place)).flat())];
  const isFolded = world > MOST_SQUARES, ownNode = Math.floor(state.rank / node), half = paneWidth() > 900 ? paneWidth() / 2 : paneWidth();
  const board = isFolded ? nodeSquares(numNodes, half, inNode) : framedRanks(0, numNodes, node, half, namesOf);
  const holder = make("div", { tabindex: 0, role: "application", "data-key": "ranks", "aria-label": "Ranks: arrow keys select", "data-selected": state.rank }, board);
  if (isFolded) holder.append(framedRanks(ownNode, ownNode + 1, node, half, namesOf));
  const placed = (event) => (event.target.dataset?.rank === undefined ? null : Number(event.target.dataset.rank));
  const onNodes = (event) => isFolded && board.contains(event.target);
  holder.addEventListener("click", (event) => { const place = placed(event); if (place !== null) change({ rank: onNodes(event) ? place * node : place }); });
  holder.addEventListener("mousemove", (event) => { const place = placed(event); if (place === null) hideTip(); else showTip(event, `${onNodes(event) ? "node" : "rank"} ${place}`); });
  holder.addEventListener("mouseleave", hideTip);
  holder.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: node, ArrowUp: -node }[event.key];
    if (!step) return;
    event.preventDefault();
    change({ rank: Math.min(world - 1, Math.max(0, state.rank + step)) });
  });
  const sent = sumByDimension(variant().sent_bytes?.[pipelineRank()] ?? {});
  const links = (ranks) => (ranks.every((rank) => Math.floor(rank / node) === ownNode) ? "inside the node" : "between nodes");
  const rows = Object.entries(members).map(([name, ranks]) => [chip(name), count(ranks.length), links(ranks), sent[name] ? figure(bytes(sent[name]), "sent") : "–", ranks.slice(0, 8).join(", ") + (ranks.length > 8 ? ", …" : "")]);
  const marks = legendOf([["selected", "--ink"], ...Object.keys(members).map((name) => [name, `--${name}`, name === "ep" ? "rim" : null])]);
  return halves([holder, marks], [make("p", {}, make("b", {}, `Rank ${state.rank}`), `, pipeline rank ${pipelineRank()}, node ${ownNode}`),
    tableOf(["group", "ranks", "links", "sent in a step", "members"], rows)]);
});
