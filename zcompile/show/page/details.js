// The selected collective, and what to look at while none is.

const MOST = 6; // exposed collectives that are offered
const NAMED = 10; // parameters that are shown at once

function bare(text) { return el("code", {}, text); }

function makeDetails(app) {
  const root = document.getElementById("details");

  function show() {
    root.replaceChildren(...(app.selected ? chosen(app.selected) : overview()));
  }

  function chosen({ plan: index, row }) {
    const plan = app.plans[index], it = plan.collectives[row];
    const events = (plan.byRow && plan.byRow.get(row)) || [];
    const time = (kind) => {
      const event = events.find((e) => e.kind === kind);
      return event ? ` at ${ms(event.start)}` : "";
    };
    const transfer = events.find((e) => e.kind === "transfer");
    const place = (name) => (name ? bare(name) : "the graph's end");
    const rows = [
      ["Exposed", el("strong", { class: it.exposed >= 0.005 ? "late" : "" }, ms(it.exposed))],
      transfer ? ["Transfer", `${ms(transfer.end - transfer.start)}, from ${ms(transfer.start)}`] : null,
      ["Size", `${amount(it.bytes)} ${shortType(it.dtype)}, ${amount(it.sent)} sent per rank`],
      ["Primitive", bare(it.primitive)],
      ["Issued before", [place(it.issue), time("issue")]],
      ["Awaited before", [place(it.wait), time("wait") || time("finish")]],
      ["Released after", it.release ? bare(it.release) : it.kind === "all-gather" ? "not in this graph" : "does not apply"],
    ].filter(Boolean);
    return [
      el("div", { class: "head" },
        el("h2", {}, el("i", { class: "dot", style: `background:var(--${it.kind})` }), `${it.kind} ${it.key}`),
        el("button", { type: "button", class: "quiet", "aria-label": "Clear the selection", onclick: () => app.select(null) }, "×")),
      el("p", { class: "of" }, [app.plans.length > 1 ? `plan ${"AB"[index]}, ` : "", it.graph, ", ",
        `${it.parameters.length} parameter${it.parameters.length === 1 ? "" : "s"}`].join("")),
      it.reason ? el("p", { class: "reason" }, it.reason) : null,
      el("dl", {}, rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
      parameters(plan, it),
      el("div", { class: "buttons" },
        el("button", { type: "button", onclick: () => app.step(-1) }, "← previous"),
        el("button", { type: "button", onclick: () => app.step(1) }, "next →"),
        events.length ? el("button", { type: "button", onclick: () => app.focus(index, row) }, "zoom to it") : null),
    ].filter(Boolean);
  }

  function parameters(plan, it) {
    const known = new Map(plan.parameters.map((p) => [p.name, p]));
    const item = (name) => {
      const p = known.get(name);
      return el("li", {}, bare(name), p ? el("span", {}, ` ${p.shape.join(" × ") || "scalar"}, ${p.residency}`) : null);
    };
    const first = el("ul", { class: "names" }, it.parameters.slice(0, NAMED).map(item));
    if (it.parameters.length <= NAMED) return first;
    return el("div", {}, first, el("details", {},
      el("summary", {}, `and ${it.parameters.length - NAMED} more`),
      el("ul", { class: "names" }, it.parameters.slice(NAMED).map(item))));
  }

  function overview() {
    const all = app.plans.flatMap((plan, index) => (app.shows(index)
      ? plan.collectives.map((it, row) => ({ it, row, index })) : []));
    const worst = all.filter(({ it }) => it.exposed >= 0.005)
      .sort((a, b) => b.it.exposed - a.it.exposed).slice(0, MOST);
    return [
      el("h2", {}, "No collective selected"),
      el("p", {}, "Click a transfer, or a row of the table below. With the timeline in focus, ",
        el("kbd", {}, "←"), " and ", el("kbd", {}, "→"), " step through them."),
      worst.length ? el("h3", {}, "Most exposed") : el("p", {}, "No collective is exposed."),
      el("ol", { class: "worst" }, worst.map(({ it, row, index }) => el("li", {},
        el("button", { type: "button", class: "link", onclick: () => app.select(index, row) },
          el("span", {}, (app.plans.length > 1 ? `${"AB"[index]} ` : "") + `${it.graph} ${it.key}`), el("b", {}, ms(it.exposed)))))),
    ];
  }

  return { show };
}
