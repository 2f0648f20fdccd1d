// Lanes and memory of one plan, in one figure over one axis of time.

// What stands on lanes, in drawing order. Colours are variables of page.css.
const CLASSES = [
  { id: "forward", label: "compute, forward" },
  { id: "backward", label: "compute, backward" },
  { id: "handling", label: "issue and finish" },
  { id: "all-gather", label: "all-gather" },
  { id: "reduce-scatter", label: "reduce-scatter" },
  { id: "all-reduce", label: "all-reduce" },
  { id: "copy", label: "other transfers" },
  { id: "exposed", label: "exposed communication" },
];
const LANE_NAMES = { h2d: "host → device", d2h: "device → host", nvme: "NVMe" };
const MARGIN = { l: 92, r: 14, t: 6, b: 28 };
const LANE = 30, MEMORY = 190, GAP = 26; // pixels of height
const NARROW = 3; // pixels: bars narrower than this, with less than one between them, are merged
// A merged bar is as high as it is busy, but at least so high; below LOWEST.handling it is left out.
const HEIGHT = { exposed: 0.9, handling: 0.5, other: 0.66 };
const LOWEST = { exposed: 0.25, handling: 0.2, other: 0.3 };
const POINTS = 700; // of a memory curve at once; thinning keeps the highest of each stretch

function classOf(plan, kind, graph, row) {
  if (kind === "wait") return "exposed";
  if (kind === "issue" || kind === "finish") return "handling";
  if (kind === "compute") return graph === "backward" ? "backward" : "forward";
  return row >= 0 ? plan.collectives[row].kind : "copy";
}

/** Events as objects, and by collective; done once. */
function decode(plan) {
  const line = plan.timeline;
  plan.events = line.events.map(([lane, kind, name, graph, start, end, row]) => {
    const found = classOf(plan, kind, graph, row);
    const known = CLASSES.some((each) => each.id === found);
    return { lane, kind, name, graph, start, end, row, cls: known ? found : "copy", count: 1 };
  });
  plan.byRow = new Map();
  for (const event of plan.events) {
    if (event.row < 0) continue;
    if (!plan.byRow.has(event.row)) plan.byRow.set(event.row, []);
    plan.byRow.get(event.row).push(event);
  }
  plan.total = line.times.map((_, i) => line.memory.reduce((sum, curve) => sum + curve[i], 0));
}

/** What is seen between two times: bars too narrow to be told apart become one. */
function visible(events, from, to, pixel) {
  const open = new Map(), out = [];
  for (const event of events) {
    if (event.end < from || event.start > to) continue;
    const key = event.lane + event.cls, last = open.get(key);
    const narrow = event.end - event.start < NARROW * pixel;
    const close = last && event.start - last.end < pixel;
    if (close && event.kind === "compute") last.edge = event.start; // no cracks where a gap has no pixel
    if (close && narrow && last.narrow) {
      if (event.end - event.start > last.longest) {
        last.longest = event.end - event.start;
        last.row = event.row;
      }
      last.end = Math.max(last.end, event.end);
      last.edge = last.end;
      last.count += 1;
      last.busy += event.end - event.start;
      continue;
    }
    const length = event.end - event.start;
    const made = { ...event, narrow, longest: length, busy: length, edge: event.end };
    open.set(key, made);
    out.push(made);
  }
  return out;
}

function thinned(plan, from, to) {
  const { times } = plan.timeline;
  let first = 0, last = times.length - 1;
  while (first + 1 < times.length && times[first + 1] <= from) first += 1;
  while (last > 0 && times[last - 1] >= to) last -= 1;
  const count = last - first + 1, kept = [];
  if (count <= POINTS) {
    for (let i = first; i <= last; i += 1) kept.push(i);
    return kept;
  }
  kept.push(first);
  for (let bin = 0; bin < POINTS; bin += 1) {
    const begin = first + Math.floor(bin * count / POINTS);
    const end = first + Math.floor((bin + 1) * count / POINTS);
    let best = begin;
    for (let i = begin; i < end; i += 1) if (plan.total[i] > plan.total[best]) best = i;
    if (best > kept[kept.length - 1]) kept.push(best);
  }
  if (kept[kept.length - 1] < last) kept.push(last);
  return kept;
}

function hoverText(plan, event) {
  const span = `${ms(event.start)} to ${ms(event.end)}`;
  if (event.count > 1) {
    return `<b>${event.count} together</b>, ${ms(event.busy)} busy<br>${span}<br>Zoom in to tell them apart`;
  }
  if (event.row < 0) {
    return `<b>${escaped(event.name)}</b><br>${event.graph}, ${ms(event.end - event.start)}<br>${span}`;
  }
  const row = plan.collectives[event.row];
  const action = { wait: "exposed: the step stands still for ", issue: "issue of ", finish: "finish of " };
  return [
    `<b>${action[event.kind] || ""}${row.kind} ${row.key}</b>, ${row.graph}`,
    `${ms(event.end - event.start)}, ${span}`,
    wrapped(few(row.parameters, 3)),
    `${amount(row.bytes)} ${shortType(row.dtype)} by ${row.primitive}`,
    `issued before ${escaped(row.issue || "the end")}, awaited before ${escaped(row.wait || "the end")}`
      + (row.release ? `, released after ${escaped(row.release)}` : ""),
    `exposed ${ms(row.exposed)}`,
    ...(row.reason ? [`<i>${wrapped(row.reason)}</i>`] : []),
  ].join("<br>");
}

/** app: {plans, window, full, top, selected, select(plan, row), zoom(from, to)} */
function makeFigure(app, index) {
  const plan = app.plans[index], line = plan.timeline;
  decode(plan);
  const lanes = line.lanes, shown = line.times.length > 0;
  const height = MARGIN.t + MARGIN.b + LANE * lanes.length + (shown ? MEMORY + GAP : 0);
  const plot = el("div", {
    class: "plot", tabindex: "0", role: "group", id: `plot-${index}`,
    "aria-label": `Timeline of ${plan.title}. Left and right arrows step through the collectives, `
      + "plus and minus zoom, shift with arrows moves, 0 shows the whole step, Escape clears.",
  });
  plot.style.height = `${height}px`;
  const cursor = el("div", { class: "cursor", hidden: true });
  cursor.style.height = `${height - MARGIN.b}px`;
  const legend = makeLegend(plan);
  const figure = el("figure", { class: "plan", "data-plan": String(index) },
    el("figcaption", {}, plan.title,
      el("span", {}, ` ${plan.collectives.length} collectives, ${plan.operations.toLocaleString("en")} operations`)),
    el("div", { class: "canvas" }, plot, cursor), shown ? legend.element : null);

  function width() { return Math.max(plot.clientWidth - MARGIN.l - MARGIN.r, 100); }

  function bars() {
    const [from, to] = app.window, pixel = (to - from) / width();
    const found = visible(plan.events, from, to, pixel);
    return CLASSES.map(({ id, label }) => {
      const kind = HEIGHT[id] ? id : "other";
      const busy = (e) => (e.kind === "compute" ? 1 : Math.min(1, e.busy / Math.max(e.end - e.start, pixel)));
      const rows = found.filter((e) => e.cls === id && (kind !== "handling" || busy(e) >= LOWEST.handling));
      const high = rows.map((e) => HEIGHT[kind] * Math.max(LOWEST[kind], busy(e) > 0.9 ? 1 : busy(e)));
      return {
        type: "bar", orientation: "h", name: label, xaxis: "x", yaxis: "y",
        base: rows.map((e) => e.start), x: rows.map((e) => Math.max(e.edge - e.start, pixel)),
        // All stand on the lane's floor, the marks of exposed communication a little below it.
        y: rows.map((e, i) => lanes.length - 1 - e.lane - HEIGHT[id === "exposed" ? id : "other"] / 2 + high[i] / 2),
        width: high,
        customdata: rows.map((e) => e.row),
        hovertext: rows.map((e) => hoverText(plan, e)), hoverinfo: "text",
        marker: { color: colour(id), line: { color: colour("surface"),
          width: rows.map((e) => (e.kind === "transfer" && e.end - e.start > 8 * pixel ? 1 : 0)) } },
      };
    }).filter((trace) => trace.x.length);
  }

  function curves() {
    const kept = thinned(plan, ...app.window), { times, memory, categories } = line;
    const end = Math.max(line.seconds, times[times.length - 1]);
    return categories.map((name, c) => ({
      type: "scatter", mode: "lines", stackgroup: "memory", name, xaxis: "x", yaxis: "y2",
      x: [...kept.map((i) => times[i]), end],
      y: [...kept, kept[kept.length - 1]].map((i) => memory[c][i]),
      line: { width: 0, shape: "hv" }, fillcolor: colour(`memory-${name}`) || colour("muted"), hoverinfo: "skip",
    }));
  }

  function marks() {
    const shapes = [], annotations = [];
    const ink = colour("ink"), muted = colour("muted");
    if (shown && plan.budget !== null) {
      const inside = plan.budget <= app.top;
      if (inside) {
        shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, yref: "y2", y0: plan.budget, y1: plan.budget,
          line: { color: colour("exposed"), width: 1.5, dash: "dash" } });
      }
      annotations.push({ xref: "paper", x: 0, xanchor: "left", yref: "y2", y: inside ? plan.budget : app.top,
        yanchor: inside ? "bottom" : "top", showarrow: false, font: { color: colour("exposed-text"), size: 12 },
        text: `budget ${amount(plan.budget)}${inside ? "" : " (above this scale)"}` });
    }
    if (shown && line.peak) {
      const right = line.peakAt > (app.window[0] + app.window[1]) / 2;
      annotations.push({ x: line.peakAt, y: Math.max(...plan.total), xref: "x", yref: "y2", text: `peak ${amount(line.peak)}`,
        showarrow: true, arrowhead: 0, arrowwidth: 1, arrowcolor: ink, ax: right ? -34 : 34, ay: -16, bgcolor: colour("surface"), borderpad: 1,
        xanchor: right ? "right" : "left", font: { color: ink, size: 12 } });
    }
    if (app.selected && app.selected.plan === index) shapes.push(...outline(app.selected.row, ink));
    if (shown) {
      annotations.push({ xref: "paper", yref: "paper", x: 0, y: MEMORY / (height - MARGIN.t - MARGIN.b), xanchor: "right",
        yanchor: "bottom", xshift: -4, text: "memory", showarrow: false, font: { color: muted, size: 12 } });
    }
    return { shapes, annotations };
  }

  /** Around what belongs to a collective, and a path from its issue over its transfer to its wait. */
  function outline(row, ink) {
    const [from, to] = app.window, pixel = (to - from) / width();
    const events = plan.byRow.get(row) || [], shapes = [];
    const y = (event) => lanes.length - 1 - event.lane;
    for (const e of events) {
      shapes.push({ type: "rect", xref: "x", yref: "y", x0: e.start - pixel, x1: Math.max(e.end, e.start + 2 * pixel) + pixel,
        y0: y(e) - 0.45, y1: y(e) + 0.45, line: { color: ink, width: 2 }, fillcolor: "rgba(0,0,0,0)" });
    }
    const transfer = events.find((e) => e.kind === "transfer");
    const issue = events.find((e) => e.kind === "issue");
    const wait = events.find((e) => e.kind === "wait") || events.find((e) => e.kind === "finish");
    const path = (a, ya, b, yb) => shapes.push({ type: "path", xref: "x", yref: "y",
      path: `M ${a},${ya} L ${b},${yb}`, line: { color: ink, width: 1.5, dash: "dot" } });
    if (transfer && issue && y(issue) !== y(transfer)) path(issue.start, y(issue), transfer.start, y(transfer));
    if (transfer && wait && y(wait) !== y(transfer)) path(transfer.end, y(transfer), Math.max(wait.end, transfer.end), y(wait));
    return shapes;
  }

  function layout() {
    const inner = height - MARGIN.t - MARGIN.b, muted = colour("muted"), rule = colour("rule");
    const cut = shown ? MEMORY / inner : 0, low = shown ? (MEMORY + GAP) / inner : 0;
    const axis = { gridcolor: rule, zerolinecolor: rule, linecolor: rule, tickfont: { color: muted, size: 12 } };
    return {
      width: plot.clientWidth, height, margin: MARGIN, barmode: "overlay", bargap: 0, showlegend: false, hovermode: "closest",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, color: colour("ink") },
      hoverlabel: { bgcolor: colour("raised"), bordercolor: colour("line"), align: "left",
        font: { color: colour("ink"), size: 13, family: getComputedStyle(document.body).fontFamily } },
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      xaxis: { ...axis, range: [...app.window], anchor: shown ? "y2" : "y", ticksuffix: " ms", showspikes: false, nticks: 9 },
      yaxis: { ...axis, domain: [low, 1], range: [-0.6, lanes.length - 0.4], fixedrange: true, showgrid: false, zeroline: false,
        tickvals: lanes.map((_, i) => lanes.length - 1 - i), ticktext: lanes.map((name) => LANE_NAMES[name] || name) },
      ...(shown ? { yaxis2: { ...axis, domain: [0, cut], range: [0, app.top], fixedrange: true, nticks: 5,
        tickvals: app.ticks, ticktext: app.ticks.map(amount) } } : {}),
      ...marks(),
    };
  }

  const options = { displayModeBar: false, responsive: false, doubleClick: false, displaylogo: false };
  let drawn = false;
  function draw() {
    if (figure.hidden) return;
    Plotly.react(plot, [...(shown ? curves() : []), ...bars()], layout(), options);
    if (drawn) return;
    drawn = true;
    plot.on("plotly_relayout", (change) => {
      if (change["xaxis.range[0]"] !== undefined) app.zoom(change["xaxis.range[0]"], change["xaxis.range[1]"]);
    });
    plot.on("plotly_doubleclick", () => app.zoom(...app.full));
    plot.on("plotly_click", ({ points }) => {
      const row = points[0].customdata;
      if (row >= 0) app.select(index, row);
    });
  }

  figure.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect(), at = event.clientX - box.left - MARGIN.l;
    const inside = at >= 0 && at <= width() && event.clientY <= box.bottom && event.clientY >= box.top;
    cursor.hidden = !inside;
    if (!inside) { legend.show(null); return; }
    cursor.style.left = `${event.clientX - box.left}px`;
    legend.show(app.window[0] + at / width() * (app.window[1] - app.window[0]));
  });
  figure.addEventListener("pointerleave", () => { cursor.hidden = true; legend.show(null); });
  plot.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    const at = (event.clientX - plot.getBoundingClientRect().left - MARGIN.l) / width();
    app.scale(event.deltaY > 0 ? 1.25 : 0.8, Math.min(Math.max(at, 0), 1));
  }, { passive: false });
  plot.addEventListener("keydown", (event) => app.key(event, index));
  return { element: figure, draw };
}

/** Categories with their bytes: at the peak, or where the pointer is. */
function makeLegend(plan) {
  const line = plan.timeline, cells = line.categories.map(() => el("b"));
  const where = el("span", { class: "where" }), sum = el("b");
  const element = el("div", { class: "memory" }, where,
    ...line.categories.map((name, i) => el("span", { class: "key" },
      el("i", { style: `background:var(--memory-${name}, var(--muted))` }), `${name} `, cells[i])),
    el("span", { class: "key" }, "in all ", sum));
  const peak = plan.total.indexOf(Math.max(...plan.total, 0));

  function show(time) {
    let index = peak;
    if (time !== null) {
      let low = 0, high = line.times.length - 1;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (line.times[middle] <= time) low = middle; else high = middle - 1;
      }
      index = low;
    }
    if (index < 0) return;
    where.textContent = time === null ? "At the peak" : `At ${ms(time)}`;
    cells.forEach((cell, i) => { cell.textContent = amount(line.memory[i][index]); });
    sum.textContent = amount(plan.total[index]);
  }
  show(null);
  return { element, show };
}
