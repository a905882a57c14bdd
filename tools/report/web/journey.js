"use strict";
// The path of one micro-batch as steps: compute and messages, in the order and with the bytes of the planner.

const MOST_UNITS = 14, MOST_STAGES = 6; // above these, layers and stages are folded

// Variants share the records of their units.
for (const { variants, units } of DATA.layouts) for (const { microbatch } of Object.values(variants)) if (microbatch) microbatch.units = microbatch.units.map((at) => units[at]);

/** The dimension of an axis of the ledger. */
const dimensionOf = (axis) => (/^(e?dp|world|stage)/.test(axis) ? "dp" : /^e/.test(axis) ? "ep" : axis === "cp_tp" ? "tp" : axis.split("_")[0]);

/** All ranks that exchange messages with `rank` over an axis of the ledger. */
function groupOver(micro, axis, rank) {
  const { dense, expert } = micro.grid, parts = axis.split("_"), isExpert = /^e/.test(axis), grid = isExpert ? expert : dense;
  const shares = parts.filter((part) => part === "replicate" || part === "shard");
  const copies = (name) => (shares.length ? shares : ["replicate", "shard"]).map((share) => `${name}_${share}`);
  const names = parts.flatMap((part) => (part === "dp" || part === "edp" ? copies(part) : ["tp", "cp", "pp", "ep", "etp"].includes(part) ? [part] : []));
  const group = groupOf(grid, names, rank), inner = micro.inner[parts[0]] ?? 1, place = group.indexOf(rank);
  if (parts.includes("outer")) return group.filter((_, at) => at % inner === place % inner);
  if (parts.includes("inner")) return group.filter((_, at) => Math.floor(at / inner) === Math.floor(place / inner));
  return group;
}

/** Columns of the picture: single units, runs of layers within a stage, and runs of stages. */
function columnsOf(micro) {
  const last = micro.stages.length - 1, many = micro.stages.reduce((sum, units) => sum + units.length, 0) > MOST_UNITS;
  const foldStages = last + 1 > MOST_STAGES, columns = [];
  micro.stages.forEach((units, stage) => {
    const hidden = foldStages && stage > 1 && stage < last;
    if (hidden && stage > 2) { columns.at(-1).units.push(...units); columns.at(-1).last = stage; return; }
    if (hidden) { columns.push({ stage, last: stage, units: [...units] }); return; }
    const layers = units.flatMap(([name], at) => (name.startsWith("layer") ? [at] : [])), fold = many && layers.length > 3;
    units.forEach((unit, at) => {
      if (!fold || at <= layers[0] || at >= layers.at(-1)) columns.push({ stage, last: stage, units: [unit] });
      else if (at === layers[1]) columns.push({ stage, last: stage, units: layers.slice(1, -1).map((place) => units[place]) });
    });
  });
  return columns.map((column, index) => ({ ...column, index, name: columnName(column), folded: column.units.length > 1 || column.last > column.stage }));
}
function columnName({ stage, last, units }) {
  if (last > stage) return `stages ${stage}–${last}`;
  const [first, end] = [units[0][0], units.at(-1)[0]];
  return units.length > 1 ? `layers ${first.split(" ")[1]}–${end.split(" ")[1]}` : first;
}
const hasExperts = (micro, unit) => micro.units[unit].F.some(([, phase]) => phase === "experts");

/** Bytes by dimension of some messages [axis, collective, bytes]. */
function byDimension(messages) {
  const sums = {};
  for (const [axis, , size] of messages) sums[dimensionOf(axis)] = (sums[dimensionOf(axis)] ?? 0) + size;
  return sums;
}
const unitMessages = (micro, unit, pass) => [...micro.units[unit][pass].flatMap(([, , , messages]) => messages), ...micro.units[unit].zero[pass]];

/** Steps of a micro-batch: forward, backward, and the update at the end of the step. */
function journeyOf(micro) {
  const columns = columnsOf(micro), steps = [], last = micro.stages.length - 1;
  const add = (step) => steps.push({ sums: {}, ...step });
  for (const dir of ["f", "b"]) for (const column of dir === "f" ? columns : columns.toReversed()) {
    unitSteps(micro, column, dir).forEach(add);
    const [from, to] = dir === "f" ? [column.last, column.last + 1] : [column.stage, column.stage - 1];
    const next = columns[column.index + (dir === "f" ? 1 : -1)];
    if (to < 0 || to > last || !next || next.stage === column.stage || micro.routes[0][from] === micro.routes[0][to]) continue;
    const size = micro.hops[Math.min(from, to)];
    add({ dir, column: dir === "f" ? column.index : next.index, at: "gap", stage: from, to, axis: "pp", what: dir === "f" ? "send to the next stage" : "send to the stage before", size, sums: { pp: size } });
  }
  const updates = [...new Set(micro.updates.flatMap((messages) => messages.map(([axis, what]) => `${axis} ${what}`)))];
  updates.sort((a, b) => a.includes("all_gather") - b.includes("all_gather"));
  const own = (rank) => micro.updates[rank] ?? [];
  const sizeOn = (key) => (rank) => own(rank).filter(([axis, what]) => `${axis} ${what}` === key).reduce((sum, [, , size]) => sum + size, 0);
  const update = { dir: "u", column: -1, at: "update", weights: true };
  let done = false;
  for (const key of [...updates, "optimizer"]) {
    const [axis, what] = key.split(" ");
    if (!done && (what === undefined || what === "all_gather")) { add({ ...update, what: "optimizer", weights: false }); done = true; }
    if (what) add({ ...update, axis, what, sizeOn: sizeOn(key), once: true });
  }
  const number = new Map();
  for (const step of steps) { const key = `${step.dir} ${step.column} ${step.at}`; step.place = number.get(key) ?? 0; number.set(key, step.place + 1); }
  for (const step of steps) step.count = number.get(`${step.dir} ${step.column} ${step.at}`);
  return { steps, columns };
}

function unitSteps(micro, column, dir) {
  const pass = dir.toUpperCase(), common = { dir, column: column.index, stage: column.stage };
  if (column.folded) {
    const byStage = {};
    for (let stage = column.stage; stage <= column.last; stage += 1) {
      const units = column.last > column.stage ? micro.stages[stage] : column.units;
      byStage[stage] = byDimension(units.flatMap(([, unit]) => unitMessages(micro, unit, pass)));
      const hop = micro.hops[dir === "f" ? stage : stage - 1];
      if (stage !== (dir === "f" ? column.last : column.stage)) byStage[stage].pp = hop;
    }
    return [{ ...common, at: "first", what: column.name, many: column.units.length, last: column.last, sums: byStage[column.stage], byStage, state: micro.sizes.sp ? "sp" : "cp" }];
  }
  const [name, unit] = column.units[0], record = micro.units[unit], steps = [];
  const zero = (what) => record.zero[pass].filter(([, operation]) => operation === what).map(([axis, , size]) => (
    { ...common, at: "first", kind: dir === "f" ? "forward" : "backward", axis, what, size, sums: { dp: size }, weights: true }));
  steps.push(...zero("all_gather"));
  for (const [kind, phase, gemms, messages] of record[pass]) {
    const at = ["mlp", "dispatch", "experts", "combine"].includes(phase) ? "second" : "first", most = Math.max(...messages.map(([, , size]) => size));
    let position = 0;
    const looksUp = phase === "Embedding" && dir === "f"; // which no GEMM does
    const compute = (until) => steps.push({ ...common, at, kind, phase, what: "compute", from: position, until, gemms, unit: name });
    if (looksUp) compute(0);
    const heads = messages.filter(([axis, what]) => dimensionOf(axis) === "cp" && what === "all_to_all"); // of Ulysses: there and back
    for (const message of messages) {
      const [axis, what, size, after] = message, attends = heads.length > 1 && message === heads[kind === "backward" ? 1 : heads.length - 1];
      if (attends) compute(position);
      if (after > position) { compute(after); position = after; }
      const dim = dimensionOf(axis), before = steps.at(-1);
      if (size < most / 100 && before) { before.sums = { ...before.sums, [dim]: (before.sums?.[dim] ?? 0) + size }; before.small = (before.small ?? 0) + size; continue; }
      if (before?.axis === axis && before.what === what && before.after === after && before.phase === phase && before.kind === kind) {
        before.size += size; before.calls += 1; before.sums[dim] += size;
      } else steps.push({ ...common, at, kind, phase, axis, what, size, after, calls: 1, sums: { [dim]: size }, unit: name });
    }
    if (position < gemms || !(messages.length || looksUp)) compute(gemms);
  }
  steps.push(...zero("reduce_scatter"));
  track(steps, micro.sizes, dir);
  return steps;
}

/** Adds to each step the form of the data before and after it: see `formOf`. */
function track(steps, sizes, dir) {
  const rest = sizes.sp && sizes.tp > 1 ? "sp" : "cp";
  let state = rest;
  for (const step of steps) {
    step.before = state;
    const dim = step.axis && dimensionOf(step.axis);
    if (step.weights) ; // the data wait
    else if (step.phase === "experts" && dim === "tp") ; // the shared expert, next to the routed ones
    else if (dim === "tp" && step.what === "all_gather") state = "cp";
    else if (dim === "tp" && step.what === "reduce_scatter") state = "sp";
    else if (dim === "tp") state = step.phase === "Head" && dir === "f" ? "logits" : "cp";
    else if (dim === "ep" && !/^etp/.test(step.axis)) state = state === "routed" ? rest : "routed";
    else if (dim === "cp" && step.what === "all_to_all") state = state === "ulysses" ? "heads" : "ulysses";
    else if (dim === "cp") state = state === "ulysses" ? state : "heads";
    else if (state === "ulysses" || (step.phase === "attention" && step.from === step.until)) ; // attention itself
    else if (state === "sp" && step.phase !== "combine") ; // works on its own tokens, such as MLA's latents, or on gradients of weights
    else if (step.phase === "attention") state = sizes.tp === 1 && sizes.cp === 1 ? "cp" : step.until < step.gemms ? "heads" : "cp";
    else if (step.phase === "Head") state = dir === "f" ? "logits" : "cp";
    else if (step.phase === "Embedding") state = dir === "f" ? "cp" : "none";
    else if (step.phase === "combine" && dir === "f") state = rest;
    step.state = state;
  }
}

// ---------- words ----------
const few = (ranks) => (ranks.length > 5 ? `${ranks.slice(0, 3).join(", ")} … ${ranks.at(-1)}` : ranks.length > 1 ? `${ranks.slice(0, -1).join(", ")} and ${ranks.at(-1)}` : `${ranks[0]}`);
const share = (size) => ({ 2: "half", 3: "third", 4: "quarter", 8: "eighth" }[size] ?? `1/${size}`);
const aShare = (size) => (share(size).startsWith("1/") ? "" : "a ") + share(size);
const PLACES = { attention: "attention", mlp: "MLP", dispatch: "router and dispatch", experts: "experts", combine: "combine", Head: "head", Embedding: "embedding" };
const ARROWS = { f: "forward", b: "backward", u: "end of the step" };

function titleOf(micro, step) {
  const hop = step.what === "shift" ? `ring hop${step.calls > 1 ? `, ${step.calls} times` : ""}` : step.what === "compute" ? computeTitle(step) : step.what;
  return hop + (step.axis && step.axis !== "pp" ? ` over ${step.axis}` : "");
}
function computeTitle({ phase, from, until, gemms, dir }) {
  const back = dir === "b" ? ", backward" : "";
  if (phase === "attention") return (dir === "f" ? (from === until ? "attention" : until >= gemms && from > 0 ? "output matrix" : from === 0 && until < gemms ? "queries, keys, values" : "attention") : "attention") + back;
  return (PLACES[phase] ?? phase) + back;
}
function placeText(columns, step) {
  if (step.dir === "u") return "once a step";
  if (step.at === "gap") return `between stages ${step.stage} and ${step.to}`;
  if (step.many) return ARROWS[step.dir];
  const phase = PLACES[step.phase] ?? step.phase, name = columns[step.column].name;
  return `${name}${phase && phase !== name ? `, ${phase}` : ""}, ${step.kind === "recompute" ? "recomputed before its backward" : ARROWS[step.dir]}`;
}

const REASONS = { attention: "each computes its own heads, but for all of these tokens", mlp: "each holds its part of the MLP's width",
  experts: "the shared expert is cut like an MLP", Head: "each holds its part of the vocabulary", Embedding: "each holds its part of the vocabulary" };

/** What happens in a step, as a sentence. */
function sentenceOf(micro, step, rank, group) {
  const size = bytes(step.size ?? step.sizeOn?.(pipelinePlace(micro, rank)) ?? 0), from = `${size} from each`, who = `Ranks ${few(group)}`, { sizes } = micro, dim = step.axis && dimensionOf(step.axis);
  const plus = step.small ? ` Counts and weights of the choices add ${bytes(step.small)}.` : "";
  if (step.many) return foldedSentence(step);
  if (!step.axis) return computeSentence(micro, step) + plus;
  const next = group[(group.indexOf(rank) + 1) % group.length], back = step.dir === "b" && step.kind !== "recompute", grad = back ? "the gradient" : "the tokens";
  if (dim === "pp") return step.dir === "f" ? `Rank ${rank} hands its activations to rank ${group[1]}, ${size}. Stages exchange nothing else, so they may lie in different nodes.` : `Rank ${rank} returns the gradient of its input to rank ${group[1]}, ${size}.`;
  if (step.weights) return weightsSentence(step, who, from, sizes) + plus;
  const key = `${dim} ${step.what}`;
  return ({
    "tp all_gather": back && step.after > 0 ? `${who} gather the input again, ${from}, for the gradients of the weights; keeping it would cost memory.` : `${who} show each other their ${share(group.length)} of ${grad}, ${from}: ${REASONS[step.phase] ?? "each needs all of them"}.`,
    "tp reduce_scatter": `${who} add up their partial ${back ? "gradients" : "results"}, and each keeps ${sizes.sp ? `${aShare(group.length)} of the tokens` : "its part"}, ${from}.`,
    "tp all_reduce": step.phase === "Head" ? `${who} share a maximum and a sum for every token, ${from}: the loss is exact, and no rank holds all logits.` : `${who} add up their partial ${back ? "gradients" : "results"}, ${from}, and all keep the sum: without sequence parallelism it is not cut.`,
    "cp shift": back ? `Keys and values go around once more together with their gradients, ${size} from rank ${rank} to rank ${next}, until each gradient is back home.` : `Rank ${rank} passes keys and values to rank ${next}, ${size}: attention needs every earlier token. Meanwhile it attends to those it has.`,
    "cp all_gather": `${who} gather all keys and values, ${from}, because attention needs every earlier token.`,
    "cp reduce_scatter": `${who} add up the gradients of keys and values, ${from}, and each keeps those of its tokens.`,
    "cp all_to_all": `${who} exchange heads for sequence (Ulysses), ${from}: for attention each has all tokens of some heads, otherwise all heads of some tokens.`,
    "ep all_to_all": /^etp/.test(step.axis) ? `${who} hold parts of the same experts: they exchange rows, ${from}.` : step.state === "routed" ? `${back ? "The gradient of each token" : "Each token"} travels to the experts that the router chose, ${from} among ranks ${few(group)}: each rank holds only ${aShare(group.length)} of the experts.` : `${back ? "The gradients" : "The experts' outputs"} travel home, ${from} among ranks ${few(group)}${back ? "." : "; each token adds those of its experts, weighted by the router."}`,
  }[key] ?? `${who} run ${step.what}, ${from}.`) + plus;
}
function foldedSentence(step) {
  const sums = Object.entries(step.sums).map(([dim, size]) => `${bytes(size)} over ${dim}`);
  const stages = step.last > step.stage, what = stages ? `${step.last - step.stage + 1} stages with ${step.many} layers` : `${step.many} layers`;
  return `${what}, like those that are shown one by one${step.dir === "b" ? ", backward" : ""}. A rank ${stages ? `of stage ${step.stage} ` : ""}sends ${sums.length ? sums.join(", ") : "nothing"}.`;
}
function weightsSentence(step, who, from, sizes) {
  const slice = `${sizes.zero >= 3 ? "ZeRO-3" : `ZeRO-${sizes.zero}`}`, kind = step.axis.startsWith("e") ? "expert " : "";
  if (dimensionOf(step.axis) !== "dp") return `${who} add up gradients of ${kind}weights of which each has a copy, such as norms, ${from}.`;
  if (step.what === "all_gather") return step.once ? `${who} send each other their slices of the updated ${kind}weights, ${from}; then all are equal again.` : `${who} lend each other their slices of these ${kind}weights, ${from}: under ${slice} a rank keeps only its slice, unless the pass before has just used them.`;
  if (step.what === "reduce_scatter") return `${who} saw different tokens and hold copies of the same ${kind}weights. They add up the gradients, ${from}, and each keeps a slice (${slice}).`;
  return `${who} saw different tokens and hold copies of the same ${kind}weights. They add up the gradients, ${from}.`;
}
function computeSentence({ sizes }, step) {
  if (step.what === "optimizer") return sizes.zero ? "Each rank updates the slice whose optimizer state it owns (hatched). Nothing is sent." : "Each rank updates all weights it holds; copies repeat the same work.";
  const back = step.dir === "b" && step.kind !== "recompute", part = sizes.tp > 1 ? `its ${share(sizes.tp)} of ` : "", again = step.kind === "recompute" ? "To save memory the forward's tensors were not kept; they are computed again. " : "";
  const text = { Embedding: `Each rank looks up its tokens in ${part}the vocabulary.`, Head: `Each rank scores its tokens against ${part}the vocabulary.`, mlp: `Each rank multiplies by ${part}the MLP: up, activation, down.`,
    dispatch: "The router scores the experts for each token and sorts the tokens by expert.", combine: "Each token adds up the outputs of its experts, weighted by the router.",
    experts: step.until <= step.gemms / 2 && sizes.tp > 1 ? `Each rank multiplies by ${part}the shared expert.` : `Each rank runs its experts${sizes.ep > 1 ? `, ${aShare(sizes.ep)} of all,` : ""} on the tokens that arrived${sizes.etp > 1 ? `, with its ${share(sizes.etp)} of each matrix` : ""}.`,
    attention: step.from === 0 && step.until < step.gemms ? `Each rank computes queries, keys and values of ${sizes.tp > 1 ? "its own heads" : "all heads"}.` : step.from > 0 && step.until > step.from ? `Each rank mixes its heads with ${part}the output matrix${sizes.tp > 1 ? ": a partial sum" : ""}.` : "Each rank attends with its heads to the tokens it has." }[step.phase] ?? `Each rank computes ${step.phase}.`;
  return back ? `Backward: gradients of ${PLACES[step.phase] ?? step.phase} weights stay where the weights are; the gradient of the input goes on.` : `${again}${text} Nothing is sent.`;
}
const pipelinePlace = (micro, rank) => axisPlace(micro.grid.dense, "pp", rank);
