"""The HTML page in headless Chromium: it draws, selects, searches, sorts, and asks for nothing."""

import dataclasses
import os
import re
import shutil
import sys
import time

import pytest
from show_samples import large, measured, sample

from zcompile.errors import ZeroError
from zcompile.show import html

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
browser_needed = pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed")

SAMPLES = {
    "one": lambda: [sample()],
    "two": lambda: [sample(), sample(stage=2)],
    "measured": lambda: [sample(layers=4, budget=1.3e9), measured(sample(layers=4, budget=1.3e9))],
    "large": lambda: [large()],
    "bare": lambda: [dataclasses.replace(sample(layers=2), timeline=None, budget=None)],
}


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield found
        found.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def pages(browser, folder):
    """Opened pages by sample: reading plotly.js takes a second, so tests share them."""
    return {"said": []}


@pytest.fixture
def opened(browser, folder, pages):
    """Open a sample's page; afterwards nothing was written to the console, nothing requested."""

    def open_page(name):
        if name not in pages:
            pages[name] = load(browser, folder, name, pages["said"])
        page = pages[name]
        page.bring_to_front()
        page.set_viewport_size({"width": 1440, "height": 1000})
        page.emulate_media(color_scheme="light")
        page.evaluate("""document.querySelectorAll('input[type=search]').forEach(
            (each) => { each.value = ''; each.dispatchEvent(new Event('input')); })""")
        page.locator("[role=tab]").first.click()
        if name != "bare":
            page.locator(".plot").first.focus()
            for key in ("Escape", "0"):
                page.keyboard.press(key)
        page.evaluate("scrollTo(0, 0)")
        return page

    yield open_page
    assert pages["said"] == []


def load(browser, folder, name, said):
    path = folder / f"{name}.html"
    path.write_text(html.page(*SAMPLES[name]()), encoding="utf-8")
    page = browser.new_page()
    page.set_default_timeout(120_000)
    page.on("console", lambda message: said.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    inside = ("file:", "data:", "blob:")
    page.on("request", lambda r: r.url.startswith(inside) or said.append(f"request: {r.url}"))
    page.goto(path.as_uri())
    if name != "bare":
        page.wait_for_selector(".plot .barlayer .point")
    return page


def until(page, expression, *arguments, seconds=10.0):
    """The page's own policy forbids what page.wait_for_function does."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression, *arguments):
        assert time.monotonic() < end, f"never became true: {expression}"
        page.wait_for_timeout(30)


def lanes(page):
    return page.locator(".plot").first.locator(".ytick text").all_text_contents()


def rows(page, table="collectives"):
    return page.locator(f"#{table}-table tbody tr")


@browser_needed
@pytest.mark.parametrize("name", ["one", "two", "large"])
def test_the_page_opens(opened, name):
    page = opened(name)
    for width, scheme in ((1440, "light"), (800, "light"), (800, "dark"), (1440, "dark")):
        page.set_viewport_size({"width": width, "height": 1000})
        page.emulate_media(color_scheme=scheme)
        until(page, "w => document.querySelector('.plot').layout.width < w", width)
        ink = f"{SHADE}(document.querySelector('.plot').layout.font.color)"
        until(page, f"{ink} {'> 200' if scheme == 'dark' else '< 60'}")
        paper = page.evaluate(f"{SHADE}(getComputedStyle(document.body).backgroundColor)")
        assert (paper < 60) == (scheme == "dark")
        looks_right(page, name, width)


SHADE = """(colour => { const it = document.createElement('canvas').getContext('2d');
    it.fillStyle = colour; return Math.max(...it.fillStyle.match(/[0-9a-f]{2}/g)
    .map(h => parseInt(h, 16))); })"""


def looks_right(page, name, width):
    plot = page.locator(".plot").first
    assert lanes(page) == ["compute", "gather", "reduce"]
    curves = plot.locator(".scatterlayer .js-fill")
    assert curves.count() == len(SAMPLES[name]()[0].timeline.memory.values)
    assert plot.locator(".shapelayer path").count() >= 1  # the budget's line
    assert "budget" in "".join(plot.locator(".annotation-text").all_text_contents())
    wide, seen = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= seen, "the page scrolls sideways"
    for index in range(page.locator(".plot").count()):
        box = page.locator(".plot").nth(index).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        lane = page.locator(".plot").nth(index).locator(".barlayer").bounding_box()
        assert lane["width"] > 0.7 * box["width"]


@browser_needed
def test_exposed_communication_is_marked(opened):
    page = opened("one")
    traces = page.evaluate("document.querySelector('.plot').data.map(t => [t.name, t.base])")
    bars = dict(traces)
    line = sample().timeline
    begun = {round(e.start * 1e3, 3) for e in line.events if e.kind == "wait"}
    assert {round(x, 3) for x in bars["exposed communication"]} <= begun
    assert len(bars["exposed communication"]) >= 2
    assert page.locator("#details .worst li").first.inner_text().startswith("backward reduce.47")


@browser_needed
def test_a_click_on_a_transfer_shows_its_reason(opened):
    page = opened("one")
    plot = page.locator(".plot").first
    x, y = page.evaluate(
        """() => {
          const plot = document.querySelector('.plot'), box = plot.getBoundingClientRect();
          const trace = plot.data.find((t) => t.name === 'all-gather'), l = plot._fullLayout;
          const at = trace.base[5] + trace.x[5] / 2;
          return [box.left + l.margin.l + l.xaxis.d2p(at), box.top + l.margin.t + l.yaxis._offset
                  - l.margin.t + l.yaxis.d2p(trace.y[5])];
        }"""
    )
    page.mouse.move(x, y)
    label = plot.locator(".hoverlayer .hovertext")
    label.wait_for()
    assert "all-gather gather.5" in label.text_content()
    assert "h.2.mlp.fc.weight, h.2.mlp.proj.weight" in label.text_content()
    assert "issued 9 operations early" in label.text_content()
    page.mouse.click(x, y)
    details = page.locator("#details")
    details.locator(".reason").wait_for()
    row = sample().collectives[5]
    assert details.locator("h2").inner_text() == "all-gather gather.5"
    assert details.locator(".reason").inner_text() == row.reason
    read = details.inner_text().replace("\xa0", " ")
    for expected in (*row.parameters, "67.1 MB bf16, 58.7 MB sent", row.primitive, row.issue,
                     row.wait, row.release, "0.00 ms"):  # fmt: skip
        assert expected in read
    assert rows(page).nth(5).get_attribute("aria-current") == "true"


@browser_needed
def test_a_row_selects_and_the_lanes_show_it(opened):
    page = opened("one")
    before = page.locator(".plot .shapelayer path").count()
    rows(page).nth(60).click()
    until(page, f"document.querySelectorAll('.plot .shapelayer path').length > {before}")
    row = sample().collectives[60]
    assert page.locator("#details h2").inner_text() == f"{row.kind} {row.key}"
    page.get_by_role("button", name="zoom to it").click()
    until(page, "document.querySelector('.plot').layout.xaxis.range[0] > 0")
    page.get_by_role("button", name="Clear the selection").click()
    assert page.locator("#details h2").inner_text() == "No collective selected"


@browser_needed
def test_it_works_from_the_keyboard(opened):
    page = opened("one")
    page.locator(".plot").first.focus()
    for key in ("ArrowRight", "ArrowRight", "+"):
        page.keyboard.press(key)
    assert page.locator("#details h2").inner_text() == "all-gather gather.1"
    until(page, "document.querySelector('.plot').layout.xaxis.range[1] < 150")
    page.keyboard.press("0")
    until(page, "document.querySelector('.plot').layout.xaxis.range[1] > 200")
    page.keyboard.press("Escape")
    assert page.locator("#details .reason").count() == 0
    rows(page).nth(0).focus()
    for key in ("ArrowDown", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    assert page.locator("#details h2").inner_text() == "all-gather gather.2"
    page.locator("#tab-collectives").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#parameters-table").is_visible()
    assert page.evaluate("document.activeElement.id") == "tab-parameters"


@browser_needed
def test_search_filters(opened):
    page = opened("one")
    page.locator("#tab-parameters").click()
    page.locator("#parameters-search").fill("h.7. mlp")
    names = rows(page, "parameters").locator("td:first-child").all_inner_texts()
    assert names == ["h.7.mlp.fc.weight", "h.7.mlp.proj.weight"]
    assert page.locator("#panel-parameters .count").inner_text() == "2 of 147"
    page.locator("#parameters-search").fill("no such name")
    assert rows(page, "parameters").count() == 0


@browser_needed
def test_sort_sorts(opened):
    page = opened("one")
    page.locator("#tab-parameters").click()
    column = page.get_by_role("columnheader", name=re.compile("Whole")).locator("button")
    read = lambda: rows(page, "parameters").first.inner_text().split("\t")[0].strip()
    assert read() == "wte.weight"
    column.click()
    assert read() == "wte.weight"  # the largest
    column.click()
    assert read() == "h.0.ln_1.weight"  # the smallest
    sorted_by = page.locator("#parameters-table th[aria-sort='ascending']")
    assert sorted_by.inner_text().startswith("Whole")
    column.click()
    assert page.locator("#parameters-table th[aria-sort='ascending']").count() == 0
    page.locator("#tab-collectives").click()
    page.get_by_role("columnheader", name=re.compile("Exposed")).locator("button").click()
    assert "reduce.47" in rows(page).first.inner_text()
    for _ in range(2):
        page.get_by_role("columnheader", name=re.compile("Exposed")).locator("button").click()
    assert "gather.0" in rows(page).first.inner_text()


@browser_needed
def test_two_plans_stand_over_the_same_axes(opened):
    page = opened("two")
    axes = """[...document.querySelectorAll('.plot')].map(
                ({layout}) => [layout.xaxis.range, layout.yaxis2.range])"""
    first, second = page.evaluate(axes)
    assert first == second
    page.locator(".plot").first.focus()
    page.keyboard.press("+")
    until(page, f"document.querySelector('.plot').layout.xaxis.range[1] < {first[0][1]}")
    first, second = page.evaluate(axes)
    assert first == second
    assert page.locator("figure.plan:visible").count() == 2
    page.locator(".views label", has_text=re.compile("^B$")).click()
    assert page.locator("figure.plan:visible").count() == 1
    assert page.locator("figcaption:visible").inner_text().startswith("B: ")
    brief = page.locator(".brief li").all_inner_texts()
    assert brief == ["90 residency gathered → kept", "44 only in A", "44 release changed"]
    page.locator("#differences-search").fill("h.3.mlp.fc")
    assert rows(page, "differences").count() == 3
    page.locator("#tab-collectives").click()
    assert rows(page).count() == len(sample(stage=2).collectives)
    summary = page.locator("#summary .tile").nth(5).inner_text()
    assert "5.12 GB" in summary and "7.33 GB" in summary and "+43." in summary


@browser_needed
def test_a_measured_step_lies_over_a_simulated_one(opened):
    page = opened("measured")
    assert page.locator("figcaption").all_inner_texts()[1].startswith("B: gpt-4x2048, stage 3 (mea")
    assert page.locator(".brief").inner_text().startswith("The schedules are the same")
    assert page.locator("#summary .delta").count() >= 3


@browser_needed
def test_a_large_plan_is_thinned_and_comes_apart(opened):
    page = opened("large")
    points = page.locator(".plot .barlayer .point")
    assert 100 < points.count() < 2500
    assert (
        page.evaluate("Math.max(...document.querySelector('.plot').data.map(t => t.x.length))")
        < 1500
    )
    peak = large().timeline.peak_bytes
    highest = page.evaluate(
        """() => {
           const c = document.querySelector('.plot').data.filter((t) => t.type === 'scatter');
           return Math.max(...c[0].x.map((_, i) => c.reduce((sum, t) => sum + t.y[i], 0))); }"""
    )
    assert highest == peak  # thinning keeps it
    rows(page).nth(400).click()
    page.get_by_role("button", name="zoom to it").click()
    until(
        page,
        "document.querySelector('.plot').data.some(t => t.name === 'all-gather' && t.x.length < 9)",
    )
    page.mouse.wheel(0, 900)
    until(page, "scrollY > 0")
    assert rows(page).count() == 795


@browser_needed
def test_the_pointer_reads_the_memory_at_its_time(opened):
    page = opened("one")
    box = page.locator(".plot").first.bounding_box()
    legend = page.locator(".memory").first
    assert legend.inner_text().startswith("At the peak")
    page.mouse.move(box["x"] + 300, box["y"] + box["height"] - 90)
    until(page, "document.querySelector('.memory').innerText.startsWith('At 4')")
    assert page.locator(".cursor").first.is_visible()


@browser_needed
def test_a_plan_without_a_timeline(opened):
    page = opened("bare")
    assert "holds no timeline" in page.locator("#figures").inner_text()
    assert rows(page).count() == len(sample(layers=2).collectives)
    rows(page).first.click()
    assert page.locator("#details .reason").is_visible()


def test_names_cannot_end_the_script():
    plan = sample(layers=2)
    name = "</script><b>"
    made = html.page(dataclasses.replace(plan, name=name, notes=("<!--",)))
    assert made.count("</script>") == html.page(plan).count("</script>")
    assert "<title>&lt;/script&gt;&lt;b&gt; - zcompile</title>" in made


def test_without_plotly_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ZeroError, match=r"pip install 'zcompile\[show\]'"):
        html.page(sample(layers=2))
