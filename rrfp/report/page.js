// The page around the timeline. The data is the run's alone: every text is set as text, never as markup.

const KINDS = {
  F: "forward", B: "backward", I: "input gradient", W: "weight gradient",
  ALL_TO_ALL: "all-to-all", ALL_REDUCE: "all-reduce", REDUCE_SCATTER: "reduce-scatter", ALL_GATHER: "all-gather",
};
// Cause -> [CSS variable, what it means].
const CAUSES = {
  "warm-up": ["warmup", "the pipeline fills: no work has reached this rank yet"],
  "drain": ["drain", "the pipeline empties: this rank's work is done, others' is not"],
  "late message": ["late", "the input was produced in time but its message took longer than messages usually do"],
  "slow upstream": ["upstream", "waiting for an activation that the stage before has not produced yet"],
  "slow downstream": ["downstream", "waiting for a gradient that the stage after has not produced yet"],
  "memory limit": ["memory", "a forward was ready, but the in-flight limit did not allow it; the stages after it then starve, as slow upstream"],
  "fixed order": ["fixed", "something was ready, but the fixed order named something else"],
  "announced wait": ["announced", "something was ready, but announced work was worth waiting for"],
  "runtime": ["runtime", "choosing, messages, Megatron's work around the actions"],
  "lost": ["critical", "the rank was lost"],
};
// In the order of what can be done about them.
const GROUPS = [
  ["to be mended where it is", ["lost", "late message", "memory limit", "fixed order", "announced wait", "agreement", "runtime"]],
  ["follows from another rank: point at it in the timeline to see which", ["slow upstream", "slow downstream"]],
  ["of any pipeline: fewer with more microbatches", ["warm-up", "drain"]],
];
const NAMED = "\u25b2", HELD = "\u25c6"; // marks of a stage: a finding names it; the limit held it

const palette = new Map();
function colour(name) {
  if (!palette.has(name)) palette.set(name, getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim() || "#888");
  return palette.get(name);
}
const kindVariable = (kind) => (kind in KINDS ? kind : "other");
const kindColour = (kind) => colour(kindVariable(kind));
const causeVariable = (cause) => (CAUSES[cause] || ["wait"])[0];
const causeColour = (cause) => colour(causeVariable(cause));

// Seconds as text: three digits or, with a `step`, as many as an axis of that step needs, in the unit of `size`.
function time(seconds, step, size = Math.abs(seconds)) {
  if (!seconds && !step) return "0";
  const [scale, unit] = size >= 0.9995 ? [1, "s"] : size >= 0.9995e-3 ? [1e3, "ms"] : [1e6, "\u00b5s"], value = seconds * scale;
  const digits = step ? -Math.floor(Math.log10(step * scale) + 1e-9) : 2 - Math.floor(Math.log10(Math.abs(value) * 1.0005));
  return value.toFixed(Math.min(Math.max(digits, 0), 7)) + " " + unit;
}
// From when to when, fine enough to tell the two apart.
const span = (start, end) => [start, end].map((at) => time(at, Math.max((end - start) / 100, 1e-6), end)).join(" to ") + ": " + time(end - start);
// Milliseconds, as the findings write them: three digits, more above a second.
const number = (seconds) => (seconds ? (seconds * 1e3).toFixed(Math.min(6, Math.max(0, 2 - Math.floor(Math.log10(Math.abs(seconds) * 1.0005e3))))) : "0");
const ms = (seconds) => number(seconds) + " ms";
const percent = (share) => (share > 0 && share < 0.0005 ? "<0.1%" : (100 * share).toFixed(share < 0.0995 && share > 0 ? 1 : 0) + "%");
const sum = (values) => values.reduce((a, b) => a + b, 0);
// A rank's name: its stage where the two are the same.
function named(rank, call) {
  const stages = call.stages.filter((stage) => call.rank_of[stage] === rank);
  if (stages.length === 1 && stages[0] === rank) return "stage " + rank;
  return `rank ${rank} (${stages.length > 3 ? stages.length + " stages" : "stage " + stages.join(", ")})`;
}

function make(tag, properties = {}, ...children) {
  const { data, style, ...rest } = properties, made = Object.assign(document.createElement(tag), rest);
  Object.assign(made.dataset, data);
  Object.assign(made.style, style);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}
const get = (id) => document.getElementById(id);
const cell = (className, ...children) => make("td", { className }, ...children);
const swatch = (variable, low) => make("i", { className: low ? "low" : "", style: { background: `var(--${variable})` } });

function table(head, rows, pick) {
  const body = rows.map(({ cells, go, className = "" }) => {
    const row = make("tr", { className }, ...cells.map((cell) => (cell instanceof Node && cell.tagName === "TD" ? cell : make("td", {}, cell))));
    if (go && pick) {
      row.tabIndex = 0;
      row.title = "show in the timeline";
      row.onclick = () => pick(...go);
      row.onkeydown = (event) => { if (event.key === "Enter") pick(...go); };
    }
    return row;
  });
  return make("div", { className: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...head.map((each) => (each instanceof Node ? each : make("th", { scope: "col" }, each))))), make("tbody", {}, ...body)));
}

// Whole microseconds to seconds, once.
function seconds(columns) {
  for (const name of ["start", "end", "padded"]) if (columns[name]) columns[name] = Float64Array.from(columns[name], (each) => each / 1e6);
}
function prepare(call) {
  if (call.ready) return call;
  [call.actions, call.waits, call.critical_path].forEach(seconds);
  for (const steps of Object.values(call.in_flight)) for (const step of steps) step[0] /= 1e6;
  const parts = Object.values(call.utilisation), whole = Math.max(sum(parts.map((each) => sum(Object.values(each)))), 1e-12);
  call.computing = sum(parts.map((each) => each.compute || 0)) / whole;
  call.emulated = sum([...call.actions.padded]) / Math.max(sum(parts.map((each) => each.compute || 0)), 1e-12);
  const marks = (mark, findings) => findings.flatMap((each) => each.stages.map((stage) => [stage, mark]));
  call.marks = new Map();
  for (const [stage, mark] of [...marks(NAMED, call.findings.filter((each) => each.cause !== "limit")), ...marks(HELD, call.findings.filter((each) => each.cause === "limit"))]) {
    if (!(call.marks.get(stage) || "").includes(mark)) call.marks.set(stage, (call.marks.get(stage) || "") + mark);
  }
  call.named = (stage) => (call.marks.get(stage) || "").includes(NAMED);
  call.working = new Set(call.findings.filter((each) => each.cause !== "limit" && !each.edges.length).flatMap((each) => each.stages));
  call.markedEdges = new Set(call.findings.flatMap((each) => each.edges));
  call.loud = new Set(call.findings.map((each) => each.idle).filter(Boolean));
  call.ready = true;
  return call;
}

function actionLines(call, i) {
  const a = call.actions, name = `${a.stage[i]}${a.kind[i]}${a.microbatch[i] ?? ""}`;
  return [
    `${name}: ${KINDS[a.kind[i]] || a.kind[i]} of microbatch ${a.microbatch[i] ?? "-"} on stage ${a.stage[i]}`,
    span(a.start[i], a.end[i]) + (a.padded[i] ? ` (${time(a.padded[i])} emulated)` : ""),
    `Started then because: ${a.reason[i]}`,
    a.waited_for[i] ? `The rank idled before, for: ${a.waited_for[i]}` : "The rank did not idle before",
    `In flight: ${a.in_flight[i]}` + (a.critical[i] ? ". On the critical path" : ""),
  ];
}
function waitLines(call, i) {
  const w = call.waits, cause = w.cause[i];
  return [
    `rank ${w.rank[i]} idle: ${cause}`,
    span(w.start[i], w.end[i]),
    CAUSES[cause] ? CAUSES[cause][1] : "",
    w.culprit[i] ? `Waited for: ${w.culprit[i]}` : "",
  ].filter(Boolean);
}
function tip(lines, x, y) {
  const box = get("tip");
  box.hidden = !lines;
  if (!lines) return;
  box.replaceChildren(...lines.map((line, i) => make(i ? "div" : "b", {}, line)));
  const { width, height } = box.getBoundingClientRect();
  box.style.left = Math.max(4, Math.min(x + 14, innerWidth - width - 8)) + "px";
  box.style.top = (y + 18 + height > innerHeight ? Math.max(4, y - height - 12) : y + 18) + "px";
}

function verdict(call) {
  const [first, ...others] = call.findings, idea = call.suggestion;
  const more = (finding) => [
    finding.evidence.length ? make("p", { className: "evidence" }, finding.evidence.join("\u00a0\u00b7 ")) : null,
    finding.action ? make("p", { className: "next" }, make("b", {}, "Next: "), finding.action) : null,
  ].filter(Boolean);
  get("verdict").replaceChildren(
    make("p", { className: "first" }, first.text), ...more(first),
    ...(others.length ? [make("b", {}, "Also:"), make("ul", {}, ...others.map((each) => make("li", {}, each.text, ...more(each))))] : []),
    ...(idea ? [make("p", { className: "try" }, make("b", {}, idea.lead + ": "), idea.text, make("br"),
      ...(idea.flags ? [] : ["Training has no flags for it; in simulation: "]), make("code", {}, idea.flags || `rrfp simulate --trace DIR --modes ${idea.mode}`))] : []),
  );
}

// What the call would take with each finding mended, and with all of them: from one base.
function savings(call) {
  const [measured, simulated, ...changed] = call.savings;
  if (!changed.length) return get("savings").replaceChildren();
  const kinds = { imagined: "imagined, for comparison: ", suggested: "as suggested: ", together: "together: " };
  const rows = [measured, ...changed].map((each) => ({
    className: each === measured ? "as-it-ran" : "",
    cells: [cell("wide", (kinds[each.kind] || "") + each.what + (each === measured ? ", measured" : "")), number(each.seconds),
      each.speedup.toFixed(2) + "x", cell("wide", make("span", { className: "part", style: { width: 90 * Math.min(1.2, each.seconds / measured.seconds) + "px" } }))],
  }));
  const error = simulated.seconds / measured.seconds - 1;
  return get("savings").replaceChildren(table(["what if", "ms", "speed-up", "time"], rows),
    make("p", { className: "quiet" }, `Gains overlap: they do not add up. Predictions are simulated; with nothing changed, the simulator makes this call ${ms(simulated.seconds)}, `
      + `${Math.abs(error) < 0.0005 ? "as measured" : `${percent(Math.abs(error))} ${error > 0 ? "more" : "less"} than measured; every row is scaled by that${Math.abs(error) > 0.1 ? ", and shows a direction, not an amount" : ""}`}.`));
}

// Which call this is, and what it ran under.
function run(call) {
  const ranks = new Set(Object.values(call.rank_of)).size, hosts = [...new Set(Object.values(call.hosts))];
  const held = (host) => Object.keys(call.hosts).filter((rank) => call.hosts[rank] === host).map(Number);
  const listed = (all) => (all.length > 2 && all.at(-1) - all[0] === all.length - 1 ? `${all[0]}-${all.at(-1)}` : all.join(", "));
  const on = hosts.length > 4 ? `${hosts.length} hosts` : hosts.map((host) => host + (hosts.length > 1 ? ` (ranks ${listed(held(host))})` : "")).join(", ");
  const facts = [`Call ${call.call}`, call.wall ? `began ${new Date(call.wall * 1e3).toISOString().replace("T", " ").slice(0, 19)} UTC` : "",
    `${call.stages.length} stages on ${ranks} ranks`, `${call.microbatches} microbatches${call.forward_only ? ", forward only" : ""}`, on ? `on ${on}` : ""];
  get("run").replaceChildren(facts.filter(Boolean).join(" \u00b7 "), " \u00b7 ran under ", make("code", {}, call.flags || call.mode || "(not in the trace)"), call.missing ? make("p", { className: "alarm" }, call.missing) : "");
}

function figures(calls, names) {
  const peaks = (call) => { const all = Object.values(call.peak_in_flight); return all.length > 8 ? `${Math.max(...all)} to ${Math.min(...all)}` : all.join(" "); };
  // What the first finding is worth; where there is none, the largest part of the critical path.
  const mendable = (call) => call.findings[0].seconds > 0, first = calls[0].findings[0];
  const largest = (call) => Object.entries(call.critical_totals).reduce((a, b) => (b[1] > a[1] ? b : a), ["none", 0]);
  const emulated = calls.find((call) => call.emulated > 0.005);
  const shown = [
    ["iteration" + (names.length ? `: ${(calls[0].seconds / calls[1].seconds).toFixed(2)} to 1` : ""), (call) => ms(call.seconds)],
    ["of the ranks' time is computing" + (emulated ? ` (${percent(emulated.emulated)} of it emulated)` : ""), (call) => percent(call.computing)],
    ["idle (bubble)", (call) => percent(1 - call.computing)],
    [`peak in flight; per rank ${calls.map(peaks).join(" | ")}`, (call) => Math.max(0, ...Object.values(call.peak_in_flight))],
    mendable(calls[0]) ? [`less time without it (${calls[0].savings.length ? "predicted" : "its part of the critical path"})`,
      (call) => percent(first.seconds / call.seconds), () => first.where, calls.slice(0, 1)]
      : ["largest part of the critical path", (call) => percent(largest(call)[1] / call.seconds), (call) => largest(call)[0]],
  ];
  get("figures").replaceChildren(...shown.map(([text, value, more = () => "", of = calls]) => make("div", { className: "figure" },
    ...of.map((call, i) => make("b", {}, value(call), make("small", {}, more(call) || names[i] || ""))), make("span", {}, text))));
}

const inOrder = (kinds) => [...new Set([...Object.keys(KINDS), ...kinds])].filter((kind) => kinds.includes(kind));
// What the colours of these kinds and causes mean.
function legend(used, { emulated = false, id = "", loud = new Set(), marks = [] } = {}) {
  const kinds = inOrder([...used].filter((each) => !(each in CAUSES))), causes = Object.keys(CAUSES).filter((cause) => used.has(cause));
  return make("div", { id, className: "legend" },
    ...kinds.map((kind) => make("span", {}, swatch(kindVariable(kind)), `${kind} ${KINDS[kind] || ""}`)), emulated ? make("span", {}, "paler: emulated (sleeping)") : null,
    causes.length ? make("span", { className: "quiet" }, "idle:") : null,
    ...causes.map((cause) => make("span", { title: CAUSES[cause][1] }, swatch(causeVariable(cause), !loud.has(cause)), cause)),
    ...marks.map((text) => make("span", { className: "quiet" }, text)));
}

function utilisation(call) {
  const ranks = Object.entries(call.utilisation), used = new Set(), { actions } = call, ran = {};
  actions.kind.forEach((kind, i) => {
    const rank = (ran[call.rank_of[actions.stage[i]]] ??= {});
    rank[kind] = (rank[kind] || 0) + actions.end[i] - actions.start[i];
  });
  const rows = ranks.flatMap(([rank, { compute = 0, ...idle }]) => {
    const whole = Math.max(compute + sum(Object.values(idle)), 1e-12), label = named(+rank, call);
    const own = call.stages.filter((stage) => call.rank_of[stage] === +rank), marked = own.some(call.named);
    const mark = [NAMED, HELD].filter((each) => own.some((stage) => (call.marks.get(stage) || "").includes(each))).join("");
    const parts = [...inOrder(Object.keys(ran[rank] || {})).map((kind) => [kind, ran[rank][kind], kindVariable(kind)]),
      ...Object.entries(idle).map(([cause, value]) => [cause, value, causeVariable(cause)])].filter(([, value]) => value > 0);
    const pieces = parts.map(([part, value, variable]) => {
      used.add(part);
      return make("span", { title: `${label}: ${part} ${time(value)}, ${percent(value / whole)}`, style: { width: 100 * value / whole + "%", background: `var(--${variable})` } });
    });
    return [make("span", { className: marked ? "alarm" : "" }, mark ? mark + " " : "", brief(label)),
      make("div", { className: "stack", role: "img", ariaLabel: pieces.map((each) => each.title).join("; ") }, ...pieces),
      make("span", {}, percent(compute / whole))];
  });
  const stacks = make("div", { className: "stacks" }, make("span"), make("span"), make("span", { className: "quiet" }, "computing"), ...rows);
  get("utilisation").replaceChildren(legend(used), make("div", { className: ranks.length > 24 ? "scroll" : "" }, stacks));
}

// A rank's name whose "stage" gives way on a narrow screen.
const brief = (label) => (label.startsWith("stage ") ? make("span", {}, make("span", { className: "word" }, "stage\u00a0"), label.slice(6)) : label);
const bar = (share) => make("td", {}, make("span", { className: "part", style: { width: Math.max(1, 70 * share) + "px" } }), percent(share));

function bubbles(call) {
  const totals = new Map(), worst = new Map();
  for (const [rank, parts] of Object.entries(call.bubbles)) {
    for (const [cause, value] of Object.entries(parts)) {
      totals.set(cause, (totals.get(cause) || 0) + value);
      if (!worst.has(cause) || value > worst.get(cause)[1]) worst.set(cause, [rank, value]);
    }
  }
  const idle = Math.max(sum([...totals.values()]), 1e-12), ranks = Object.keys(call.bubbles).length;
  const others = [...totals.keys()].filter((cause) => !GROUPS.some(([, causes]) => causes.includes(cause)));
  const rows = [...GROUPS, ["other", others]].flatMap(([group, causes]) => {
    const here = causes.filter((cause) => totals.get(cause) > 0).sort((a, b) => totals.get(b) - totals.get(a));
    return here.length ? [{ className: "group", cells: [make("td", { className: "wide", colSpan: 4 }, group)] }, ...here.map((cause) => ({
      cells: [cell("wide", swatch(causeVariable(cause)), make("b", {}, cause), make("div", { className: "quiet" }, (CAUSES[cause] || ["", ""])[1])),
        number(totals.get(cause) / ranks), bar(totals.get(cause) / idle), cell("", brief(named(+worst.get(cause)[0], call)), ": " + number(worst.get(cause)[1]))],
    }))] : [];
  });
  get("bubbles").replaceChildren(rows.length ? table(["cause", "per rank, ms", "share", "most on, ms"], rows) : make("p", { className: "quiet" }, "No rank was ever idle."));
}

function critical(call, pick) {
  const { name, what, start, end } = call.critical_path, entries = Object.entries(call.critical_totals).sort((a, b) => b[1] - a[1]);
  // Parts under 1% would only make the list long.
  const large = entries.filter(([, value], i) => i < 3 || value >= 0.01 * call.seconds), small = entries.slice(large.length);
  if (small.length) large.push([`${small.length} other part${small.length > 1 ? "s" : ""}, each under 1%`, sum(small.map((each) => each[1]))]);
  const totals = large.map(([part, value]) => ({ cells: [cell("wide", part), number(value), bar(value / call.seconds)] }));
  const most = 500, order = [...name.keys()].sort((a, b) => end[b] - start[b] - (end[a] - start[a])).slice(0, most).sort((a, b) => start[a] - start[b]);
  const steps = order.map((i) => ({ cells: [name[i], what[i], time(start[i]), time(end[i] - start[i])], go: [start[i], end[i]] }));
  const label = name.length > most ? `The ${most} longest of ${name.length} steps, in order` : `All ${name.length} steps, in order`;
  get("critical").replaceChildren(
    make("p", { className: "quiet" }, "The chain of actions, messages and pauses that set the length of this call, in the order that it ran in. Speeding up an action or message that is not on it gains nothing; another order or limit makes another path (what if, above)."),
    table(["on the path", "ms", "share"], totals), make("details", {}, make("summary", {}, label), table(["step", "what", "from", "time"], steps, pick)));
}

// Steps (time, value) as the points of an area, at most one step a pixel: the highest value in it.
function curve(steps, length, most) {
  const width = 600, height = 30, peaks = new Map();
  let value = 0, path = `M0 ${height}`;
  for (const [at, n] of steps) { const x = Math.round(width * at / length); peaks.set(x, Math.max(n, peaks.get(x) || 0)); peaks.set(x + 0.5, n); }
  for (const [x, n] of peaks) { if (n !== value) path += `H${x}V${(height - 1 - (height - 2) * n / most).toFixed(1)}`; value = n; }
  return `${path}H${width}V${height}Z`;
}
function inFlight(call) {
  const most = Math.max(1, ...Object.values(call.in_flight).flat().map((step) => step[1]));
  const curves = call.stages.filter((stage) => call.in_flight[stage]).slice(0, 128).map((stage) => {
    const steps = call.in_flight[stage], peak = Math.max(0, ...steps.map((step) => step[1]));
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    svg.setAttribute("viewBox", "0 0 600 30");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `stage ${stage}: at most ${peak} in flight`);
    path.setAttribute("d", curve(steps, call.seconds, most));
    svg.append(path);
    return make("div", { className: "curve" }, `stage ${stage}: at most ${peak}`, svg);
  });
  get("inflight").replaceChildren(make("p", { className: "quiet" }, `Activations that a stage holds over the call; the top of every curve's frame is ${most}.`), make("div", { className: "curves" }, ...curves));
}

function spread(target, rows, head, marked, empty) {
  const most = Math.max(0, ...rows.map((each) => each.p95));
  const order = inOrder([...new Set(rows.map((each) => each.kind))]), spreads = rows.map((each) => each.variability).sort((a, b) => a - b), typical = spreads[spreads.length >> 1] || 0;
  const rank = (each) => (each.kind === "message" ? +(Number(each.where.split(">")[0]) > Number(each.where.split(">")[1])) : each.stage);
  // Stages with their kinds in order; forward edges, then backward ones.
  const lines = [...rows].sort((a, b) => rank(a) - rank(b) || a.stage - b.stage || order.indexOf(a.kind) - order.indexOf(b.kind)).map((each) => {
    const ratio = each.others ? each.p50 / each.others : 1, mark = marked(each), alarm = (wrong) => (mark && wrong ? "alarm" : "");
    return { cells: [cell(alarm(true), (mark ? NAMED + " " : "") + each.where), cell("minor", each.n), cell("minor", number(each.p5)), number(each.p50), number(each.p95),
      cell(alarm(ratio >= 1.15), ratio.toFixed(2) + "x"), cell(alarm(each.variability > 2 * Math.max(typical, 0.05)), percent(each.variability))] };
  });
  const minor = (text) => make("th", { scope: "col", className: "minor" }, text);
  const note = rows.length && !most ? `${rows.length} edges, ${sum(rows.map((each) => each.n))} messages: no time passed between sending and arrival, so they were instant, or not measured.` : empty;
  get(target).replaceChildren(most ? table([head, minor("n"), minor("p5, ms"), "median, ms", "p95, ms", "vs others", "spread"], lines) : make("p", { className: "quiet" }, note),
    ...(most ? [make("p", { className: "quiet" }, "Vs others: the median over that of the other rows of the same kind. Spread: (p95 - p5) / median.")] : []));
}

function notes(call) {
  const clocks = Object.entries(call.clocks).map(([host, error]) => `Clock of ${host}: may be off by ${time(error)} against the first host's; so may every message between them.`);
  get("notes").replaceChildren(...[...call.notes, ...clocks].map((text) => make("p", { className: "quiet" }, text)));
}

function show(runs, number) {
  const call = prepare(runs[0].calls[number]), calls = [call, ...runs.slice(1).map((run) => prepare(run.calls[0]))];
  tip(null);
  run(call);
  verdict(call);
  savings(call);
  const view = new View(Math.max(...calls.map((each) => each.seconds), 1e-6)), names = calls.length > 1 ? runs.map((run) => run.title) : [];
  figures(calls, names);
  get("timelines").replaceChildren();
  calls.forEach((each, i) => {
    const canvas = make("canvas", { id: i ? "timeline" + (i + 1) : "timeline" });
    get("timelines").append(...(names[i] ? [make("div", { className: "name" }, `${names[i]}, call ${each.call}`)] : []), canvas);
    new Timeline(canvas, each, view, { marks: each.marks, edges: each.markedEdges, loud: each.loud, tip });
  });
  const toggle = make("button", { id: "toggle", type: "button", ariaPressed: "false" }, "Critical path");
  toggle.onclick = () => { view.critical = !view.critical; toggle.ariaPressed = String(view.critical); view.redraw(); };
  const buttons = [["+", "zoom in", () => view.zoom(0.5)], ["\u2212", "zoom out", () => view.zoom(2)], ["\u2190", "earlier", () => view.pan(-0.3)],
    ["\u2192", "later", () => view.pan(0.3)], ["Whole call", "show the whole call", () => view.set(0, view.length)]];
  get("buttons").replaceChildren(toggle, ...buttons.map(([text, title, onclick]) => make("button", { type: "button", title, ariaLabel: title, onclick }, text)));
  get("keys").textContent = "Wheel or drag: zoom. Shift-drag, sideways wheel or arrow keys: move. + \u2212 0 c: keys. Hover: why.";
  get("legend").replaceWith(legend(new Set(calls.flatMap((each) => [...each.actions.kind, ...each.waits.cause])), { emulated: call.emulated > 0, id: "legend", loud: call.loud, marks: [
    ...(call.stages.some(call.named) ? [NAMED + " named by a finding"] : []), ...([...call.marks.values()].some((each) => each.includes(HELD)) ? [HELD + " held by the limit"] : []),
    ...(call.markedEdges.size ? ["arrow: late edge"] : []), ...(call.loud.size ? ["tall: what a finding is about"] : [])] }));
  utilisation(call);
  bubbles(call);
  critical(call, (start, end) => { if (!view.critical) toggle.click(); view.frame(start, end); get("timelines").scrollIntoView({ block: "nearest" }); });
  inFlight(call);
  spread("durations", call.durations, "stage, kind", (each) => call.working.has(each.stage), "No action ran.");
  spread("messages", call.latencies, "edge", (each) => call.markedEdges.has(each.where), "No message was traced.");
  notes(call);
  document.body.dataset.call = call.call;
  return view;
}

// What ended the run: the verdict, then the whole report, folded.
function failed(failure) {
  get("failure").hidden = !failure;
  if (!failure) return;
  get("failure").replaceChildren(make("h2", {}, "This run failed"), make("p", { className: "first" }, failure.verdict),
    ...failure.further.map((text) => make("p", { className: "evidence" }, text)),
    make("details", {}, make("summary", {}, "Every rank's view"), make("div", { className: "scroll" }, make("pre", {}, failure.text))));
}

const { runs, failure } = JSON.parse(get("data").textContent);
failed(failure);
get("title").textContent = runs.map((run) => run.title).join(" beside ");
get("choose").hidden = runs[0].calls.length < 2;
get("calls").append(...runs[0].calls.map((call, i) => make("option", { value: i }, `${call.call}: ${ms(call.seconds)}${call.forward_only ? ", forward only" : ""}`)));
get("calls").onchange = () => { view = show(runs, +get("calls").value); };
let view = show(runs, 0);
// Print is always light; the canvas has to be drawn again in the other palette, at once, before the page is printed.
for (const query of [matchMedia("(prefers-color-scheme: dark)"), matchMedia("print")]) {
  query.addEventListener("change", () => { palette.clear(); view.drawers.forEach((draw) => draw()); });
}
