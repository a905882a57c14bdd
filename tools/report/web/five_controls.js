"use strict";
// The clock, the controls and the schedule of the picture.

const scenes = {
  model: [new Scene("five-model", "The model, layer by layer, and the steps of a micro-batch"), modelItems],
  data: [new Scene("five-data", "The data: batch, sequence, hidden"), dataItems],
  ranks: [new Scene("five-ranks", "Ranks; arrow keys select one"), gridItems],
  costs: [new Scene("five-costs", "Memory, and bytes sent"), costItems],
};
const button = (id, text, name, act) => make("button", { type: "button", id, "aria-label": name, onclick: act }, text);
const parts = {
  switches: make("div", { class: "five-switches", role: "group", "aria-label": "Dimensions of the picture" }),
  play: button("five-play", "Play", "Play or pause", () => play()),
  time: make("input", { type: "range", id: "five-time", min: 0, step: 1, "aria-label": "Steps", oninput: (event) => go(+event.target.value, true) }),
  count: make("span", { class: "dimmed", id: "five-count" }), title: make("h3", { id: "five-title" }), sentence: make("p", { id: "five-sentence", "aria-live": "polite" }),
  form: make("p", { id: "five-form" }), rank: make("h3", { id: "five-rank" }), coordinates: make("p", { id: "five-coordinates" }), message: make("p", { id: "five-message" }),
  follow: button("five-follow", "", "Follow the micro-batch", () => { five.follows = !five.follows; wake(); }), note: make("p", { class: "warn" }),
  schedule: make("canvas", { id: "five-schedule", role: "img" }), bubble: make("p", { class: "dimmed", id: "five-bubble" }),
};
const root = make("div", { id: "five-root", role: "group", tabindex: 0, "aria-label": "One micro-batch in five dimensions: space plays, arrow keys step" }, parts.switches, parts.note, scenes.model[0].svg,
  make("div", { class: "five-story" },
    make("div", { class: "five-bar" }, button("five-first", "|◀", "To the beginning", () => go(0)), button("five-back", "◀", "One step back", () => go(target() - 1)), parts.play, button("five-next", "▶", "One step forward", () => go(target() + 1)), parts.count, parts.time),
    make("div", {}, parts.title, parts.sentence)),
  make("div", { class: "five-schedule" }, parts.bubble, parts.schedule),
  make("div", { class: "five-trio" },
    make("div", {}, make("h3", {}, "The data that it holds now"), parts.form, scenes.data[0].svg),
    make("div", {}, make("div", { class: "five-head" }, parts.rank, parts.follow), parts.coordinates, parts.message, scenes.ranks[0].svg),
    make("div", {}, scenes.costs[0].svg)),
  make("p", { class: "dimmed five-keys" }, ...[["space", "play"], ["← →", "step"], ["shift + ← →", "layer"], ["p d c t s e z", "switches"], ["f", "follow"]].flatMap(([key, what]) => [make("kbd", {}, key), ` ${what}  `]), "Arrow keys in the ranks select one."));
scenes.ranks[0].svg.setAttribute("tabindex", "0");
scenes.ranks[0].svg.setAttribute("role", "group");

function selectRank(rank) {
  const now = drawn(), holder = now.step.dir === "u" ? null : now.micro.routes[0][now.step.stage];
  five.follows = holder !== null && pipelinePlace(now.micro, rank) === holder;
  change({ rank });
}
function flip(name) {
  const { switches } = layout();
  if (switches.includes(name)) change({ off: switches.filter((each) => (each === name) !== state.off.includes(each)) });
}

// ---------- time ----------
let awake = false, before = 0;
function wake() { if (!awake) { awake = true; before = performance.now(); requestAnimationFrame(frame); } }
const target = () => Math.floor(five.goal ?? five.time);
function go(at, jump = false) {
  Object.assign(five, { playing: false, goal: Math.max(0, Math.min(drawn().steps.length - 1, at)) + 0.5 });
  if (jump) five.time = five.goal;
  wake();
}
function play() {
  const last = drawn().steps.length - 0.5;
  if (!five.playing && five.time >= last - 0.1) five.time = 0;
  Object.assign(five, { playing: !five.playing, goal: five.playing ? Math.floor(five.time) + 0.5 : null });
  wake();
}
function frame(now) {
  const passed = Math.max(0, Math.min(60, now - before));
  before = now;
  let busy = five.playing;
  if (five.playing) {
    const { step, steps } = drawn();
    five.time = Math.min(steps.length - 0.5, five.time + passed / (step.axis ? 1600 : 1000));
    if (five.time >= steps.length - 0.5) five.playing = false;
  } else if (five.goal !== null) {
    const way = five.goal - five.time, move = passed / 450;
    if (Math.abs(way) <= move || Math.abs(way) > 1.2 || still) Object.assign(five, { time: five.goal, goal: null });
    else { five.time += Math.sign(way) * move; busy = true; }
  }
  busy = show(still ? 1 : 1 - Math.exp(-passed / 110)) || busy;
  awake = busy;
  if (busy) requestAnimationFrame(frame);
}
function jumpColumn(by) {
  const { steps } = drawn(), key = (step) => `${step.dir} ${step.column} ${step.at === "gap"}`, from = target();
  let at = from;
  while (steps[at + by] && key(steps[at]) === key(steps[from])) at += by;
  if (by < 0) while (steps[at - 1] && key(steps[at - 1]) === key(steps[at])) at -= 1;
  go(at);
}
function selectNear(event) {
  const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (!way) return;
  event.preventDefault();
  event.stopPropagation();
  const now = drawn(), { at } = gridPlaces(now, scenes.ranks[0].svg.clientWidth), [x, y] = at.get(now.rank) ?? [0, 0];
  let best = null, least = Infinity;
  for (const [rank, [x2, y2]] of at) {
    const along = (x2 - x) * way[0] + (y2 - y) * way[1], aside = Math.abs((x2 - x) * way[1]) + Math.abs((y2 - y) * way[0]);
    if (along > 4 && along + 4 * aside < least) { least = along + 4 * aside; best = rank; }
  }
  if (best !== null) selectRank(best);
}
scenes.ranks[0].svg.addEventListener("keydown", selectNear);
root.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const { key, shiftKey, target: { tagName } } = event, switches = { p: "pp", c: "cp", t: "tp", s: "sp", e: "ep", z: "zero" };
  const acts = { ArrowRight: () => (shiftKey ? jumpColumn(1) : go(target() + 1)), ArrowLeft: () => (shiftKey ? jumpColumn(-1) : go(target() - 1)), Home: () => go(0), End: () => go(drawn().steps.length - 1), f: () => parts.follow.click(), " ": tagName === "BUTTON" ? null : play };
  const act = acts[key] ?? (switches[key] && (() => flip(switches[key])));
  if (act) { event.preventDefault(); act(); }
});
scenes.model[0].svg.addEventListener("pointerdown", (event) => {
  const drag = (moved) => {
    const box = scenes.model[0].svg.getBoundingClientRect(), { places, lane } = modelItems, narrow = innerWidth < 700, [x, y] = [moved.clientX - box.left, moved.clientY - box.top];
    if (y < lane.f - 20) return;
    const distance = (step) => Math.abs(placeOfStep(step, places, narrow ? 18 : 78, narrow) - x) + 3 * Math.abs(lane[step.dir] - y);
    go(drawn().steps.reduce((best, step, at, steps) => (distance(step) < distance(steps[best]) ? at : best), 0), true);
  };
  const stop = () => { removeEventListener("pointermove", drag); removeEventListener("pointerup", stop); };
  drag(event);
  addEventListener("pointermove", drag);
  addEventListener("pointerup", stop);
});

// ---------- the schedule ----------
/** The step as it is scheduled, with this micro-batch in ink and a line at the time of the step shown. */
function drawSchedule(now) {
  const record = layout().pipeline[0], { micro, step, steps, place } = now, shown = Boolean(record?.slots) && micro.sizes.pp > 1;
  parts.schedule.hidden = !shown;
  parts.bubble.textContent = shown ? `${record.name}, ${count(record.num_microbatches)} micro-batch${record.num_microbatches > 1 ? "es" : ""}${state.off.length ? ", the layout as it is" : ""}: bubble ${percent(record.bubble)} (gray). The micro-batch of the picture stands out.` : "";
  if (!shown) return;
  const canvas = parts.schedule, width = canvas.clientWidth, left = 36, row = Math.max(7, Math.min(16, 150 / record.slots.length)), ratio = devicePixelRatio || 1, height = row * record.slots.length + 10;
  if (!width) return;
  Object.assign(canvas, { width: width * ratio, height: height * ratio });
  canvas.style.height = `${height}px`;
  canvas.setAttribute("aria-label", parts.bubble.textContent);
  const pen = canvas.getContext("2d"), styles = getComputedStyle(document.documentElement), paint = (name) => styles.getPropertyValue(name).trim(), xOf = (tick) => left + (tick / 100000) * (width - left - 2);
  pen.scale(ratio, ratio);
  pen.font = "11px system-ui";
  record.slots.forEach((slots, rank) => {
    pen.fillStyle = paint("--idle");
    pen.fillRect(left, rank * row + 6, width - left - 2, row - 2);
    for (const [start, length, ...actions] of slots) actions.forEach((text, at) => {
      const { op, batch } = parsed(text), tall = (row - 2) / actions.length, w = xOf(start + length) - xOf(start);
      pen.fillStyle = batch === 0 ? paint("--use") : paint(OPS[op][1]);
      pen.globalAlpha = batch === 0 ? 1 : 0.45;
      pen.fillRect(xOf(start), rank * row + 6 + at * tall, Math.max(batch === 0 ? 1.5 : 0.4, w - (w > 3 ? 0.6 : 0)), tall);
    });
    pen.globalAlpha = 1;
    if (row >= 11 || rank % 4 === 0) { pen.fillStyle = paint(rank === place ? "--ink" : "--dim"); pen.fillText(`pp ${rank}`, 0, rank * row + 8 + row / 2); }
  });
  const moment = momentOf(record, step, steps);
  pen.fillStyle = paint("--ink");
  pen.fillRect(xOf(moment) - 0.75, 4, 1.5, height - 8);
  pen.beginPath(); pen.moveTo(xOf(moment) - 5, 0); pen.lineTo(xOf(moment) + 5, 0); pen.lineTo(xOf(moment), 6); pen.fill();
}
function momentOf(record, step, steps) {
  if (step.dir === "u") return 100000;
  const ops = step.dir === "f" ? ["F"] : ["B", "I"], mates = steps.filter((each) => each.dir === step.dir && each.stage === step.stage);
  for (const slots of record.slots) for (const [start, length, ...actions] of slots) for (const text of actions) {
    const { op, stage, batch } = parsed(text);
    if (batch === 0 && stage === step.stage && ops.includes(op)) return start + (length * (mates.indexOf(step) + 0.5)) / mates.length;
  }
  return 0;
}

// ---------- words, and the pane ----------
function formText({ micro, step, present, rank }) {
  const { seq_len: length, mbs, hidden_size: hidden } = layout().model, { cp, tp, sp } = micro.sizes, cut = cp > 1 ? "/cp" : "", thin = sp ? "/tp" : "";
  const forms = { sp: [`[s${cut}/tp, b, h]`, [length / cp / tp, mbs, hidden]], cp: [`[s${cut}, b, h]`, [length / cp, mbs, hidden]], heads: [`[s${cut}, b, heads${tp > 1 ? "/tp" : ""}]`], ulysses: [`[s${micro.inner.cp < cp ? "/cp_outer" : ""}, b, heads/cp${micro.inner.cp < cp ? "_inner" : ""}${tp > 1 ? "/tp" : ""}]`], logits: [`[s${cut}, b, v${tp > 1 ? "/tp" : ""}]`], routed: ["[rows, h], the tokens of its experts"] };
  if (step.weights || step.dir === "u") return "Weights and gradients move now, not the data.";
  if (!present) return `The micro-batch is on stage ${step.stage}; rank ${rank} works on another one, or waits.`;
  const [a, b] = [forms[step.before ?? step.state ?? (thin ? "sp" : "cp")], forms[step.state ?? (thin ? "sp" : "cp")]], sizes = (form) => (form?.[1] ? ` = [${form[1].map(count).join(", ")}]` : "");
  return [a, b].every((form) => form) && a[0] !== b[0] ? `${a[0]} → ${b[0]}${sizes(b)}` : b ? b[0] + sizes(b) : "Nothing: its gradient is used up.";
}
function show(speed) {
  const now = drawn(), { micro, step, steps, columns, at, rank, group } = now, moving = Object.values(scenes).map(([scene, items]) => scene.draw(items(now, scene), speed)).some(Boolean);
  const key = [at, rank, state.layout, state.off.join(), five.playing, five.follows, innerWidth].join();
  if (key === show.key) return moving;
  show.key = key;
  const dim = step.axis && dimensionOf(step.axis), node = layout().device.node, nodes = new Set(group.map((of) => Math.floor(of / node)));
  parts.title.replaceChildren(make("span", { style: dim ? `color: var(--${dim}-text)` : "" }, titleOf(micro, step)), make("span", { class: "dimmed" }, `  ${placeText(columns, step).replace(`${titleOf(micro, step)}, `, "")}`));
  parts.sentence.setAttribute("aria-live", five.playing ? "off" : "polite");
  parts.sentence.textContent = sentenceOf(micro, step, now.actor, group);
  parts.count.textContent = `${at + 1} / ${steps.length}`;
  Object.assign(parts.time, { max: steps.length - 1, value: at });
  parts.time.setAttribute("aria-valuetext", `${titleOf(micro, step)}, ${placeText(columns, step)}`);
  parts.play.textContent = five.playing ? "Pause" : "Play";
  parts.form.textContent = formText(now);
  parts.rank.textContent = `Rank ${count(rank)} of ${count(worldOf(micro))}`;
  parts.follow.textContent = five.follows ? "follows the micro-batch" : "stays";
  parts.follow.setAttribute("aria-pressed", String(five.follows));
  parts.coordinates.replaceChildren(...["pp", "dp", "cp", "tp", "ep"].filter((name) => micro.sizes[name] > 1).flatMap((name, place) => [place ? " · " : "", make("b", { style: `color: var(--${name}-text)` }, `${name} ${placeOf(micro, name, rank)}`)]));
  parts.message.textContent = step.axis ? `${bytes(sizeOn(now))} from each rank, ${nodes.size > 1 ? "between nodes" : "inside the node"}` : "Nothing travels in this step.";
  const refused = variant() ? variant().refused : "this combination was not computed";
  parts.note.textContent = refused ? `Drawn is the layout as it is: ${refused}` : "";
  paintSwitches(micro);
  drawSchedule(now);
  return moving;
}
function paintSwitches(micro) {
  if (!parts.switches.childElementCount) for (const [name, title, cuts] of AXES) parts.switches.append(make("button", { type: "button", "data-axis": name, style: `--c: ${color(name)}`, onclick: () => flip(name) }, make("b", {}, title), make("span", {}, `cuts ${cuts}`)));
  for (const node of parts.switches.children) {
    const name = node.dataset.axis, size = micro.sizes[name], lit = name === "sp" ? micro.sizes.sp : name === "zero" ? size > 0 : size > 1;
    node.setAttribute("aria-pressed", String(lit));
    node.disabled = !layout().switches.includes(name);
    node.firstChild.textContent = `${AXES.find(([axis]) => axis === name)[1]}${lit ? (name === "sp" ? "" : ` ${size}`) : " off"}`;
  }
}
/** Keeps the place on the way when the layout changes. */
function follow() {
  const last = drawn.steps && drawn.steps[Math.min(drawn.steps.length - 1, Math.floor(five.time))], old = drawn.micro, { steps, micro } = drawn();
  if (!old) five.time = Math.max(0, steps.findIndex((step) => step.what === "all_gather" && !step.weights), steps.findIndex((step) => step.axis && !step.weights)) + 0.5;
  else if (old !== micro) {
    const like = (...keys) => steps.findIndex((step) => keys.every((key) => step[key] === last[key])), at = [like("dir", "column", "phase", "what"), like("dir", "column", "at"), like("dir")].find((place) => place >= 0) ?? 0;
    Object.assign(five, { time: at + 0.5, goal: null });
  }
  show.key = null;
  if (root.isConnected) show(1);
  wake();
  return root;
}
pane("five", "Five dimensions, one micro-batch", "The model cut by the layout, and the messages of one micro-batch on its way forward and back, in the planner's order and with its bytes.", follow);
document.getElementById("panes").prepend(document.getElementById("five"));
new ResizeObserver(() => { for (const [scene] of Object.values(scenes)) scene.fresh = true; show.key = null; wake(); }).observe(root);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { show.key = null; wake(); });
