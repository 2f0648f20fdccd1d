// The page: what is shown, what is selected, which time is in view.

const found = JSON.parse(document.getElementById("plan").textContent);
const plans = found.plans, timed = plans.filter((plan) => plan.timeline);
const LEAST = 1e-3; // ms that can be zoomed into

const app = {
  plans, selected: null, view: "both",
  full: [0, Math.max(1e-3, ...timed.map((plan) => plan.timeline.seconds))],
  shows: (index) => plans.length === 1 || app.view === "both" || app.view === "ab"[index],
};
app.window = [...app.full];

/** The memory axis is the same for all plans. A budget far above what is used is off the scale. */
function memoryScale() {
  const peak = Math.max(1, ...timed.map((plan) => plan.timeline.peak),
    ...timed.map((plan) => plan.timeline.times.reduce((most, _, i) =>
      Math.max(most, plan.timeline.memory.reduce((sum, curve) => sum + curve[i], 0)), 0)));
  const budgets = timed.map((plan) => plan.budget || 0).filter((budget) => budget <= 2.5 * peak);
  app.top = Math.max(peak * 1.18, ...budgets.map((budget) => budget * 1.14));
  const rough = app.top / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough);
  app.ticks = [];
  for (let tick = 0; tick <= app.top; tick += step) app.ticks.push(tick);
}

const figures = [];
let waiting = 0;
function redraw() {
  if (waiting) return;
  waiting = requestAnimationFrame(() => { waiting = 0; figures.forEach((figure) => figure.draw()); });
}

app.zoom = (from, to) => {
  const [low, high] = app.full, span = Math.min(Math.max(to - from, LEAST), high - low);
  const start = Math.min(Math.max(from, low), high - span);
  app.window = [start, start + span];
  redraw();
};
/** at: the point that stays where it is, from 0 to 1; else the selected collective, if in view. */
app.scale = (factor, at = null) => {
  const [from, to] = app.window, span = (to - from) * factor;
  if (at === null) {
    const held = app.selected && spanOf(app.selected.plan, app.selected.row);
    const centre = held ? (held[0] + held[1]) / 2 : NaN;
    at = centre >= from && centre <= to ? (centre - from) / (to - from) : 0.5;
  }
  const middle = from + (to - from) * at;
  app.zoom(middle - span * at, middle + span * (1 - at));
};

app.select = (plan, row) => {
  app.selected = plan === null ? null : { plan, row };
  if (app.selected && !app.shows(plan)) app.setView("ab"[plan]);
  if (app.selected) reveal(plan, row);
  details.show();
  collectives.mark(true);
  redraw();
};

function spanOf(plan, row) {
  const events = (plans[plan].byRow && plans[plan].byRow.get(row)) || [];
  return events.length ? [Math.min(...events.map((e) => e.start)), Math.max(...events.map((e) => e.end))] : null;
}
function reveal(plan, row) {
  const span = spanOf(plan, row), [from, to] = app.window;
  if (!span || (span[1] >= from && span[0] <= to)) return;
  const middle = (span[0] + span[1]) / 2;
  app.zoom(middle - (to - from) / 2, middle + (to - from) / 2);
}
app.focus = (plan, row) => {
  const [start, end] = spanOf(plan, row), pad = Math.max(end - start, LEAST);
  app.zoom(start - pad, end + pad);
};

/** To the collective before or behind the selected one, in order of issue. */
app.step = (by, plan = null) => {
  const index = app.selected ? app.selected.plan : plan !== null ? plan : plans.findIndex((_, i) => app.shows(i));
  const count = plans[index].collectives.length;
  if (!count) return;
  const row = app.selected ? (app.selected.row + by + count) % count : by > 0 ? 0 : count - 1;
  app.select(index, row);
};

app.key = (event, plan) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const move = (app.window[1] - app.window[0]) / 5;
  const actions = {
    ArrowRight: () => (event.shiftKey ? app.zoom(app.window[0] + move, app.window[1] + move) : app.step(1, plan)),
    ArrowLeft: () => (event.shiftKey ? app.zoom(app.window[0] - move, app.window[1] - move) : app.step(-1, plan)),
    "+": () => app.scale(0.6), "=": () => app.scale(0.6), "-": () => app.scale(1 / 0.6),
    0: () => app.zoom(...app.full), Escape: () => app.select(null),
    Enter: () => app.selected && spanOf(app.selected.plan, app.selected.row) && app.focus(app.selected.plan, app.selected.row),
  };
  if (!actions[event.key]) return;
  event.preventDefault();
  actions[event.key]();
};

app.setView = (view) => {
  app.view = view;
  document.querySelectorAll("#toolbar input").forEach((input) => { input.checked = input.value === view; });
  document.querySelectorAll("figure.plan").forEach((each) => { each.hidden = !app.shows(Number(each.dataset.plan)); });
  if (app.selected && !app.shows(app.selected.plan)) app.selected = null;
  collectives.fill();
  details.show();
  redraw();
};

function header() {
  const [a, b] = plans;
  const about = (plan) => [`${plan.world} rank${plan.world === 1 ? "" : "s"} of ${plan.device}`,
    plan.timeline ? `${plan.timeline.source} times` : "no times",
    plan.budget === null ? "no budget stated" : `budget ${amount(plan.budget)}`,
    plan.fingerprint ? `graphs ${plan.fingerprint.slice(0, 12)}` : ""].filter(Boolean).join(" · ");
  const line = (plan, letter) => el("p", {}, letter ? el("span", { class: "badge" }, letter) : null, about(plan));
  document.getElementById("top").append(el("p", { class: "brand" }, "zcompile"),
    el("h1", {}, b ? (a.name === b.name ? a.name : `${a.name} against ${b.name}`) : a.name), ...(b ? [line(a, "A"), line(b, "B")] : [line(a, "")]));
}

function summary() {
  const root = document.getElementById("summary");
  const tile = (label, read, note, worse = true) => {
    const known = plans.map((plan) => (plan.timeline || label === "Sent per rank" ? read(plan) : null));
    const lines = plans.map((plan, i) => (known[i] === null ? null : el("p", { class: "value" },
      plans.length > 1 ? el("span", { class: "badge" }, "AB"[i]) : null, el("strong", {}, known[i].text), delta(known, i, worse))));
    if (known.every((each) => each === null)) return;
    root.append(el("div", { class: "tile" }, el("h2", {}, label), lines,
      plans.length === 1 && note ? el("p", { class: "note" }, note(plans[0])) : null));
  };
  const delta = (known, i, worse) => {
    if (i !== 1 || !known[0] || !known[1] || known[0].text === known[1].text || !known[0].value) return null;
    const change = known[1].value / known[0].value - 1, good = change < 0 === worse;
    return el("span", { class: `delta ${good ? "good" : "bad"}` }, `${change > 0 ? "+" : "−"}${(100 * Math.abs(change)).toFixed(1)} %`);
  };
  const time = (field) => (plan) => ({ value: plan.timeline[field], text: ms(plan.timeline[field]) });
  tile("Step", time("seconds"), (p) => `${(p.timeline.seconds / p.timeline.bound).toFixed(3)} × the lower bound`);
  tile("Compute", time("compute"), (p) => `${percent(p.timeline.compute, p.timeline.seconds)} of the step`);
  tile("Communication", time("communication"), (p) => `${p.collectives.length} collectives`);
  tile("Exposed", time("exposed"), (p) => `${percent(p.timeline.exposed, p.timeline.seconds)} of the step`);
  tile("Lower bound", time("bound"), () => "no order takes less");
  tile("Peak memory", (p) => ({ value: p.timeline.peak, text: amount(p.timeline.peak) }), (p) => [
    p.budget ? `${percent(p.timeline.peak, p.budget)} of budget` : "", p.timeline.peakNode ? el("code", { title: "in this operation" }, p.timeline.peakNode) : ""]);
  tile("Sent per rank", (p) => ({ value: p.sent, text: amount(p.sent) }), () => "in one step");
}

function toolbar() {
  const root = document.getElementById("toolbar");
  if (plans.length > 1) {
    const choice = (value, label) => el("label", {}, el("input", { type: "radio", name: "view", value,
      checked: value === app.view, onchange: () => app.setView(value) }), el("span", {}, label));
    root.append(el("fieldset", { class: "views" }, el("legend", {}, "Plans shown"), choice("a", "A"), choice("b", "B"), choice("both", "A and B")));
  }
  const present = new Set(timed.flatMap((plan) => plan.events.map((event) => event.cls)));
  const button = (label, text, act) => el("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
  root.append(
    el("ul", { class: "classes" }, CLASSES.filter(({ id }) => present.has(id)).map(({ id, label }) => el("li", {}, el("i", { class: `swatch ${id}` }), label))),
    el("div", { class: "zoom", role: "group", "aria-label": "Zoom" },
      button("Zoom in", "+", () => app.scale(0.6)), button("Zoom out", "−", () => app.scale(1 / 0.6)),
      button("Show the whole step", "whole step", () => app.zoom(...app.full))));
}

const details = makeDetails(app);
header();
summary();
memoryScale();
plans.forEach((plan, index) => { if (plan.timeline) figures.push(makeFigure(app, index)); });
if (figures.length) {
  document.getElementById("figures").append(...figures.map((figure) => figure.element));
  toolbar();
} else {
  document.getElementById("figures").append(el("p", { class: "none" }, "This plan holds no timeline: plan it with costs, or measure a step."));
}
const collectives = collectiveTable(app), parameters = parameterTable(app);
const difference = found.diff ? differenceTable(found.diff) : null;
const notes = el("div", { class: "notes" }, plans.map((plan, index) => el("section", {},
  plans.length > 1 ? el("h3", {}, plan.title) : null,
  el("h4", {}, "Costs"), plan.costs.length ? el("ul", {}, plan.costs.map((text) => el("li", {}, text))) : el("p", {}, "none stated"),
  plan.notes.length ? [el("h4", {}, "Notes"), el("ul", {}, plan.notes.map((text) => el("li", {}, text)))] : null)));
makeTabs(document.getElementById("tables"), [
  ...(difference ? [{ id: "differences", label: "Differences", count: difference.count, element: difference.element }] : []),
  { id: "collectives", label: "Collectives", count: plans.map((plan) => plan.collectives.length).join(" / "), element: collectives.element },
  { id: "parameters", label: "Parameters", count: plans[0].parameters.length, element: parameters.element },
  { id: "notes", label: "Costs and notes", element: notes },
]);
details.show();
redraw();

const themed = matchMedia("(prefers-color-scheme: dark)");
themed.addEventListener("change", redraw);
new ResizeObserver(redraw).observe(document.getElementById("figures"));
