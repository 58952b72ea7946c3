"""The page of a report in a real browser: it is drawn, sorts, marks clients everywhere, and asks for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from report.browsing import Tab
from tailorfl.report.page.page import page
from tailorfl.report.result import ExperimentResult


@pytest.fixture(scope="module")
def file(run: ExperimentResult, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("browser") / "report.html"
    file.write_text(page(run), encoding="utf-8")
    return file


@pytest.fixture
def shown(tab: Tab, file: Path) -> Iterator[Any]:
    """The drawn page at the width of a desk; no test leaves a message in the console or a request."""
    tab.page.emulate_media(color_scheme="light")
    tab.draw(file)
    yield tab.page
    assert tab.messages == []
    assert [url for url in tab.requests if not url.startswith("data:")] == [file.as_uri()]


def column(shown: Any, table: str, number: int) -> list[str]:
    return list(
        shown.locator(f"#{table} table").first.locator(f"tbody td:nth-child({number})").all_inner_texts()
    )


def test_every_chart_is_drawn_and_has_words(shown: Any) -> None:
    names = shown.eval_on_selector_all(".chart", "charts => charts.map(chart => chart.dataset.chart)")
    assert {"round", "bytes", "gains", "against-1", "against-2", "reliability", "labels", "worst"} == set(
        names
    )
    for name in names:
        assert shown.locator(f"#chart-{name} svg path").count() > 3, name
        told = shown.locator(f"#chart-{name} [role=graphics-document], #chart-{name}[role=graphics-document]")
        assert len(told.first.get_attribute("aria-label", timeout=1000) or "") > 20, name
    assert shown.locator("#chart-gains .points_marks path").count() == 2 * 3 * 5


def test_tables_sort_by_mouse_and_by_keyboard(shown: Any) -> None:
    def numbers() -> list[float]:
        return [float(text.split(" ±")[0]) for text in column(shown, "comparison", 3)]

    arrow = "query => getComputedStyle(document.querySelector(query), '::after').content"
    assert shown.evaluate(arrow, "#comparison th button") == '" ↕"'
    before = numbers()
    head = shown.locator("#comparison table thead th").nth(2)
    head.locator("button").click()
    assert numbers() == sorted(before, reverse=True)
    assert head.get_attribute("aria-sort") == "descending"
    assert shown.evaluate(arrow, "#comparison th[aria-sort] button") == '" ↓"'
    head.locator("button").focus()
    shown.keyboard.press("Enter")
    assert numbers() == sorted(before)
    assert head.get_attribute("aria-sort") == "ascending"
    shown.locator("#comparison table thead th button").first.press("Space")
    assert column(shown, "comparison", 1) == ["Ditto", "FedAvg", "LocalTrain"]
    assert head.get_attribute("aria-sort") is None


def test_a_client_is_marked_in_every_picture_by_mouse_and_by_list(shown: Any) -> None:
    rings = "#chart-{} .shown_marks path"
    others = ("against-1", "against-2")
    assert all(shown.locator(rings.format(name)).count() == 0 for name in others)
    points = shown.locator("#chart-against-1 .points_marks path")
    points.first.scroll_into_view_if_needed()
    points.first.hover(force=True)
    shown.wait_for_selector(rings.format("against-2"))
    assert all(shown.locator(rings.format(name)).count() == 1 for name in others)
    # The ring of the other picture is at the point of the client that the page names.
    assert shown.evaluate(
        """() => {
            const {data} = JSON.parse(document.getElementById("store").textContent);
            const said = document.querySelector(".said").textContent;
            const named = data.clients.find(c => said.startsWith(`${c.name}, seed ${c.seed},`));
            const all = query => [...document.querySelectorAll(`#chart-against-2 ${query} path`)];
            const is_named = ({__data__: {datum}}) => datum.local === named.local && datum.m2 === named.m2;
            const place = all(".points_marks").find(is_named).getAttribute("transform");
            return place === all(".shown_marks")[0].getAttribute("transform");
        }"""
    )
    shown.mouse.move(2, 2)
    shown.wait_for_function("document.querySelectorAll('#chart-against-2 .shown_marks path').length === 0")
    select = shown.locator("select.client")
    values = select.locator("option").evaluate_all("options => options.map(o => o.value)")
    assert len(values) == 1 + 3 * 5
    select.select_option(values[1])
    shown.wait_for_selector(rings.format("against-1"))
    assert shown.locator(rings.format("labels")).count() == 10, "a frame around each of its classes"
    shown.keyboard.press("Escape")
    shown.wait_for_function("document.querySelectorAll('.shown_marks path').length === 0")


def test_a_name_in_the_legend_hides_its_line_everywhere(shown: Any) -> None:
    key = shown.locator("#curves button.key[data-label=Ditto]")
    key.click()
    shown.wait_for_selector("#worst button.key[data-label=Ditto][aria-pressed=false]")
    drawn = """name => new Set([...document.querySelectorAll(`#chart-${name} .band_marks path`)]
        .map(path => path.getAttribute("fill"))).size"""
    shown.wait_for_function(f"({drawn})('round') === 2 && ({drawn})('worst') === 2")
    key.click()
    shown.wait_for_function(f"({drawn})('round') === 3 && ({drawn})('worst') === 3")


def test_texts_stand_out_in_both_themes_and_paper_is_light_and_whole(shown: Any) -> None:
    """At least 4.5 : 1, as WCAG 2 AA asks of text."""
    contrast = """() => {
        const linear = v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
        const light = colour => {
            const [r, g, b] = colour.match(/[\\d.]+/g).map(v => linear(v / 255));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const ground = light(getComputedStyle(document.body).backgroundColor);
        return ["body", "caption", "figcaption", "a", "td", "th"].map(query => {
            const mine = light(getComputedStyle(document.querySelector(query)).color);
            return (Math.max(mine, ground) + 0.05) / (Math.min(mine, ground) + 0.05); });
    }"""
    ground = "getComputedStyle(document.body).backgroundColor"
    single = shown.locator("#single table")
    light = shown.evaluate(ground)
    assert light == "rgb(255, 255, 255)"
    assert min(shown.evaluate(contrast)) > 4.5
    assert not single.is_visible()
    shown.locator("#theme").click()
    dark = shown.evaluate(ground)
    assert dark != light
    assert min(shown.evaluate(contrast)) > 4.5
    shown.emulate_media(media="print")
    assert shown.evaluate(ground) == light
    assert not shown.locator("#theme").is_visible()
    assert single.bounding_box()["height"] > 300, "single clients are folded on a screen alone"
    shown.emulate_media(media="screen", color_scheme="dark")
    shown.evaluate("delete document.documentElement.dataset.theme")
    assert shown.evaluate(ground) == dark
    shown.locator("#single summary").click()
    assert single.is_visible()
    assert single.locator("tbody tr").count() == 3 * 5


def test_a_phone_scrolls_tables_and_not_the_page_and_begins_with_the_metric(shown: Any) -> None:
    table = shown.locator("#comparison .table").first
    assert table.evaluate("table => table.scrollWidth <= table.clientWidth"), "it fits a desk"
    shown.set_viewport_size({"width": 400, "height": 800})
    shown.wait_for_function("document.querySelector('#chart-round svg').getBoundingClientRect().width <= 400")
    assert shown.evaluate("document.documentElement.scrollWidth") == 400
    head = table.locator("thead th").nth(1)
    assert head.inner_text().startswith("accuracy")
    for cell in (head, table.locator("tbody tr").first.locator("td").nth(1)):
        box = cell.bounding_box()
        assert box["x"] + box["width"] <= 400 - 16


@pytest.mark.parametrize("width", [1400, 400])
def test_labels_in_pictures_are_never_cut(
    tab: Tab, run: ExperimentResult, tmp_path: Path, width: int
) -> None:
    """Labels of sixty letters, with and without blanks."""
    names = {
        "local": "alone " * 10,
        "fedavg": "W" * 60,
        "ditto": "Ditto lam=0.1 train.lr=0.05 weights=uniform rounds",
    }
    jobs = [({**summary, "label": names[summary["label"]]}, store) for summary, store in run.jobs]
    result = ExperimentResult(run.path, jobs)
    (tmp_path / "report.html").write_text(page(result), encoding="utf-8")
    tab.draw(tmp_path / "report.html", width)
    texts = tab.page.evaluate(
        """() => [...document.querySelectorAll(".chart svg text")].filter(text => text.textContent).map(text => {
            const box = text.getBoundingClientRect();
            const is_free = getComputedStyle(text.closest("svg")).overflow === "visible";
            return [text.textContent, is_free && box.left >= 0 && box.right <= innerWidth]; })"""
    )
    assert tab.page.evaluate("document.documentElement.scrollWidth") == width
    assert [text for text, is_whole in texts if "…" in text or not is_whole] == []
    drawn = "".join(text for text, _ in texts)
    assert drawn.count("W") >= 2 * 60, "in the strip and beside the diagonal"


def test_tables_are_there_without_a_script(chromium: Any, file: Path) -> None:
    plain = chromium.browser.new_context(java_script_enabled=False) if chromium.browser else None
    if plain is None:
        pytest.skip("this browser gives no page without scripts")
    opened = plain.new_page()
    opened.goto(file.as_uri())
    assert opened.locator("#comparison tbody tr").count() == 3
    assert opened.locator("noscript p").is_visible()
    assert not opened.locator("#theme").is_visible()
    plain.close()
