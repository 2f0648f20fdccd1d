// Sortable, searchable tables, under tabs.

/** columns: {label, value(row), cell(row)?, number?, minor?}. onpick(row): rows can be chosen. */
function makeTable({ id, label, columns, rows, onpick, picked, text }) {
  let order = null, descending = false, active = 0, listed = [];
  const body = el("tbody");
  const count = el("output", { class: "count", for: `${id}-search` });
  const search = el("input", { type: "search", id: `${id}-search`, placeholder: `Search ${label.toLowerCase()}`,
    "aria-label": `Search ${label.toLowerCase()}`, autocomplete: "off", spellcheck: "false", oninput: fill });
  const heads = columns.map((column, index) => el("th", { scope: "col", class: classes(column), "aria-sort": "none" },
    el("button", { type: "button", onclick: () => sort(index) }, column.label)));
  const box = el("div", { class: "scroll", tabindex: onpick ? null : "0", role: "region", "aria-label": label },
    el("table", { id: `${id}-table` }, el("thead", {}, el("tr", {}, heads)), body));
  const element = el("div", { class: "tabled" }, el("div", { class: "find" }, search, count), box);

  function classes(column) { return [column.number ? "number" : "", column.minor ? "minor" : ""].join(" ").trim(); }

  function sort(index) {
    // Figures begin with the largest, names with the first; a third click is the plan's own order.
    const first = Boolean(columns[index].number);
    if (order !== index) { order = index; descending = first; }
    else if (descending === first) descending = !first;
    else order = null;
    heads.forEach((head, i) => head.setAttribute("aria-sort", i !== order ? "none" : descending ? "descending" : "ascending"));
    fill();
  }

  function fill() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const all = rows();
    listed = all.filter((row) => { const hay = text(row); return words.every((word) => hay.includes(word)); });
    if (order !== null) {
      const value = columns[order].value;
      listed.sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        const less = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
        return descending ? -less : less;
      });
    }
    count.textContent = listed.length === all.length ? `${all.length}` : `${listed.length} of ${all.length}`;
    active = 0;
    body.replaceChildren(...listed.map(line));
    mark(false);
  }

  function line(row, index) {
    const cells = columns.map((column) => el("td", { class: classes(column) },
      column.cell ? column.cell(row) : String(column.value(row))));
    if (!onpick) return el("tr", {}, cells);
    return el("tr", { tabindex: "-1", onclick: () => { active = index; onpick(row); } }, cells);
  }

  function mark(scroll) {
    if (!onpick) return;
    const lines = body.rows;
    listed.forEach((row, index) => {
      const chosen = picked(row);
      if (chosen) active = index;
      if (chosen) lines[index].setAttribute("aria-current", "true"); else lines[index].removeAttribute("aria-current");
      lines[index].tabIndex = -1;
    });
    if (!lines.length) return;
    lines[active].tabIndex = 0;
    if (scroll && picked(listed[active]) && !element.hidden) {
      const top = lines[active].offsetTop, head = 36;
      if (top < box.scrollTop + head || top + 32 > box.scrollTop + box.clientHeight) box.scrollTop = top - box.clientHeight / 2;
    }
  }

  body.addEventListener("focusin", (event) => { active = Math.max(0, event.target.closest("tr").sectionRowIndex); });
  body.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity }[event.key];
    const lines = body.rows;
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); if (listed[active]) onpick(listed[active]); return; }
    if (step === undefined) return;
    event.preventDefault();
    lines[active].tabIndex = -1;
    active = Math.min(Math.max(active + step, 0), lines.length - 1);
    lines[active].tabIndex = 0;
    lines[active].focus();
  });
  fill();
  return { element, fill, mark };
}

function makeTabs(root, tabs) {
  const buttons = tabs.map(({ id, label, count }, index) => el("button", {
    type: "button", role: "tab", id: `tab-${id}`, "aria-controls": `panel-${id}`, onclick: () => open(index),
  }, label, count === undefined ? null : el("span", {}, String(count))));
  const panels = tabs.map(({ id, element }) => el("div", { role: "tabpanel", id: `panel-${id}`, "aria-labelledby": `tab-${id}` }, element));
  const bar = el("div", { class: "tabs", role: "tablist", "aria-label": "Tables" }, buttons);
  bar.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = (buttons.indexOf(document.activeElement) + step + tabs.length) % tabs.length;
    open(next);
    buttons[next].focus();
  });
  function open(chosen) {
    buttons.forEach((button, i) => { button.setAttribute("aria-selected", String(i === chosen)); button.tabIndex = i === chosen ? 0 : -1; });
    panels.forEach((panel, i) => { panel.hidden = i !== chosen; });
  }
  root.append(bar, ...panels);
  open(0);
}

function collectiveTable(app) {
  const two = app.plans.length > 1;
  const all = app.plans.map((plan, index) => plan.collectives.map((it, row) => ({ it, row, index,
    text: [it.graph, it.kind, it.key, it.dtype, it.primitive, it.issue, it.wait, it.release, it.reason, ...it.parameters].join(" ").toLowerCase() })));
  const code = (read) => (row) => (read(row) ? bare(read(row)) : "end");
  return makeTable({
    id: "collectives", label: "Collectives",
    rows: () => all.filter((_, index) => app.shows(index)).flat(),
    text: (row) => row.text,
    picked: (row) => Boolean(app.selected) && app.selected.plan === row.index && app.selected.row === row.row,
    onpick: (row) => app.select(row.index, row.row),
    columns: [
      ...(two ? [{ label: "Plan", value: (r) => "AB"[r.index], cell: (r) => el("span", { class: "badge" }, "AB"[r.index]) }] : []),
      { label: "Graph", value: (r) => r.it.graph },
      { label: "Collective", value: (r) => r.it.key, cell: (r) => [el("i", { class: "dot", style: `background:var(--${r.it.kind})` }), r.it.key] },
      { label: "Parameters", value: (r) => r.it.parameters[0] || "", cell: (r) => bare(few(r.it.parameters)) },
      { label: "Size", number: true, value: (r) => r.it.bytes, cell: (r) => amount(r.it.bytes) },
      { label: "Sent", number: true, minor: true, value: (r) => r.it.sent, cell: (r) => amount(r.it.sent) },
      { label: "Type", minor: true, value: (r) => shortType(r.it.dtype) },
      { label: "Primitive", minor: true, value: (r) => r.it.primitive, cell: (r) => bare(r.it.primitive) },
      { label: "Issue", minor: true, value: (r) => r.it.issue, cell: code((r) => r.it.issue) },
      { label: "Wait", minor: true, value: (r) => r.it.wait, cell: code((r) => r.it.wait) },
      { label: "Release", minor: true, value: (r) => r.it.release, cell: (r) => (r.it.release ? bare(r.it.release) : "–") },
      { label: "Exposed", number: true, value: (r) => r.it.exposed,
        cell: (r) => el("span", { class: r.it.exposed >= 0.005 ? "late" : "faint" }, ms(r.it.exposed)) },
    ],
  });
}

function parameterTable(app) {
  const two = app.plans.length > 1;
  const [of, other] = app.plans.map((plan) => new Map(plan.parameters.map((p) => [p.name, p])));
  const names = [...new Set(app.plans.flatMap((plan) => plan.parameters.map((p) => p.name)))];
  const rows = names.map((name) => {
    const a = of.get(name), b = other && other.get(name), p = a || b;
    const differs = two && (a && a.residency) !== (b && b.residency);
    const reason = differs && b ? b.reason : p.reason;
    return { p, a, b, differs, reason, text: [name, p.dtype, a && a.residency, b && b.residency, reason, differs ? "changed" : ""].join(" ").toLowerCase() };
  });
  const size = (p) => p.shape.reduce((product, n) => product * n, 1);
  const pill = (p) => (p ? el("span", { class: `pill ${p.residency}` }, p.residency) : "–");
  return makeTable({
    id: "parameters", label: "Parameters", rows: () => rows, text: (row) => row.text,
    columns: [
      { label: "Parameter", value: (r) => r.p.name, cell: (r) => bare(r.p.name) },
      { label: "Shape", number: true, minor: two, value: (r) => size(r.p), cell: (r) => r.p.shape.join(" × ") || "scalar" },
      { label: "Type", minor: true, value: (r) => shortType(r.p.dtype) },
      { label: "Whole", number: true, value: (r) => r.p.bytes, cell: (r) => amount(r.p.bytes) },
      { label: "At rest", number: true, minor: two, value: (r) => r.p.shard_bytes, cell: (r) => amount(r.p.shard_bytes) },
      ...(two ? [
        { label: "In A", value: (r) => (r.a ? r.a.residency : ""), cell: (r) => pill(r.a) },
        { label: "In B", value: (r) => (r.b ? r.b.residency : ""), cell: (r) => [pill(r.b), r.differs ? el("span", { class: "changed" }, " changed") : ""] },
      ] : [{ label: "Residency", value: (r) => r.p.residency, cell: (r) => pill(r.p) }]),
      { label: "Why", value: (r) => r.reason, cell: (r) => el("span", { class: "why" }, r.reason) },
    ],
  });
}

/** How many of each sort of change: [count, what]. */
function tally(found) {
  const counts = new Map();
  const add = (what) => counts.set(what, (counts.get(what) || 0) + 1);
  for (const c of found.residency) add(`residency ${c.a || "absent"} → ${c.b || "absent"}`);
  for (const c of found.buckets) add(!c.b ? "only in A" : !c.a ? "only in B" : "in other buckets");
  for (const c of found.moves) {
    const way = /(earlier|later)/.exec(c.note);
    add(`${c.what} ${way ? way[1] : "changed"}`);
  }
  return [...counts].map(([what, count]) => [count, what]);
}

function differenceTable(found) {
  const rows = [...found.residency, ...found.buckets, ...found.moves].map((c) => ({ ...c,
    text: [c.what, c.graph, c.name, c.a, c.b, c.note].join(" ").toLowerCase() }));
  const table = makeTable({
    id: "differences", label: "Differences", rows: () => rows, text: (row) => row.text,
    columns: [
      { label: "What", value: (r) => r.what, cell: (r) => el("span", { class: "badge" }, r.what) },
      { label: "Of", value: (r) => `${r.graph} ${r.name}`.trim() },
      { label: "In A", value: (r) => r.a, cell: (r) => r.a || "–" },
      { label: "In B", value: (r) => r.b, cell: (r) => r.b || "–" },
      { label: "Note", value: (r) => r.note, cell: (r) => el("span", { class: "why" }, r.note) },
    ],
  });
  const brief = el("ul", { class: "brief", "aria-label": "Summary of differences" }, rows.length
    ? tally(found).map(([count, what]) => el("li", {}, el("b", {}, String(count)), ` ${what}`))
    : el("li", {}, "The schedules are the same: residency, buckets and places."));
  return { count: rows.length, element: el("div", {}, brief, rows.length ? table.element : null) };
}
