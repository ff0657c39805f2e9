"""The lab in a real browser: with JavaScript and without, by mouse and by keyboard, in light, in dark, on a phone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="needs playwright, of requirements-dev.txt")

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from chromium import EXECUTABLE, MISSING, PHONE, looking
from isostep.explain.replicas import replica_update
from isostep.lab.app import VIEWS
from isostep.lab.files import WRITERS
from isostep.lab.view import View
from isostep.schedule.costs import Costs
from isostep.schedule.generate import generate
from isostep.schedule.simulate import simulate
from lab_server import APP, Running, answer, numbers, running
from page import expected, set_to, settle, shown, unfold

pytestmark = [pytest.mark.browser, pytest.mark.skipif(EXECUTABLE is None, reason=MISSING)]

PAGES = ("/", "/replicas?unequal=1", "/tokens?counts=1,7+0,5&losses=", "/batch?context=2048&examples=10000",
         "/pipeline?compare=zb-v&transfer=0.1&memory-limit=3")  # fmt: skip
OTHER = {
    "replicas": "replicas=2 w=-1.5 lr=0.25 unequal=1 n0=5 n1=2 y0=3,4 y1=-2",
    "tokens": "losses= counts=1,7+3,5 losses=1,2+3,4",
    "batch": "m=3 accumulate=5 replicas=4 stages=3 slices=2 context=512 examples=1000 last=drop",
    "pipeline": "schedule=interleaved-1f1b compare=zb-h1 stages=3 microbatches=6 chunks=3 forward=1,2,1 input-grad=1.5 "
    "weight-grad=0.5 transfer=0.25 recompute=1 memory-limit=3 from=2 to=20 forward-only=1",
}
"""Another text for each control of a view, in an order in which each step is a state that has an answer."""


def changes_of(view: View) -> list[tuple[str, str]]:
    """Names and texts."""
    pairs = (change.partition("=") for change in OTHER[view.name].split())
    return [(name, text.replace("+", " ")) for name, _, text in pairs]


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_every_control_changes_the_numbers_to_the_library_s(browser: Browser, lab: Running, view: View) -> None:
    changes = changes_of(view)
    with looking(browser, lab.base) as (page, seen):
        page.goto(f"{lab.base}/{view.name}")
        unfold(page)
        for name, text in changes:
            before = page.url
            set_to(page, name, text)
            settle(page)
            assert page.url != before, name
            assert shown(page) == expected(page), name
            assert page.locator(".refused:not(.soft)").count() == 0, name
        assert seen.most_at_once == 1
        documents = [url for url in seen.requests if "fragment=1" not in url and f"/{view.name}" in url]
        assert len(documents) == 1, "nothing but results was asked for"
        names = {field.name for field in view.fields}
        assert names - dict(changes).keys() == ({f"{letter}{i}" for letter in "yn" for i in range(2, 8)} & names)


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_every_control_works_without_javascript(browser: Browser, lab: Running, view: View) -> None:
    changes = changes_of(view)
    with looking(browser, lab.base, java_script_enabled=False) as (page, _):
        page.goto(f"{lab.base}/{view.name}")
        assert page.locator("input[type=range]").count() == 0
        unfold(page)
        if view.name == "replicas":  # the rows of portions come with the page that has them
            set_to(page, "unequal", "1")
            page.get_by_role("button", name="Show").click()
            unfold(page)
        for name, text in changes:
            set_to(page, name, text)
        page.get_by_role("button", name="Show").click()
        for name, text in dict(changes).items():
            assert page.locator(f'[name="{name}"]').input_value() == text
        assert shown(page) == expected(page)
        assert shown(page) != numbers(answer(APP, f"/{view.name}").text)
        page.get_by_role("link", name="Start again").click()
        assert page.url == f"{lab.base}/{view.name}"


def test_numbers_are_the_library_s(browser: Browser, lab: Running) -> None:
    with looking(browser, lab.base) as (page, _):
        page.goto(f"{lab.base}/replicas")
        page.get_by_label("Unequal portions").check()
        settle(page)
        update = replica_update([[0.0], [2.0], [4.0]], [1, 1, 4])
        assert shown(page)["exact.w_after"] == update.exact.w_after
        assert page.locator('[data-key="exact.gradient"]').inner_text() == "\N{MINUS SIGN}2"
        page.goto(f"{lab.base}/pipeline?stages=3&microbatches=4&forward-only=1")
        assert shown(page)["makespan"] == 6
        assert page.locator('[data-key="busy_share"]').inner_text() == "66.7 %"


def test_spans_drawn_are_the_actions(browser: Browser, lab: Running) -> None:
    schedules = [generate(name, 4, 8) for name in ("1f1b", "zb-v")]
    with looking(browser, lab.base) as (page, _):
        page.goto(f"{lab.base}/pipeline?schedule=1f1b&compare=zb-v")
        drawn = page.locator(".isostep-gantt rect.span")
        assert drawn.count() == sum(schedule.size for schedule in schedules)
        widths = drawn.evaluate_all("spans => spans.map(span => span.getBoundingClientRect().width)")
        assert min(widths) > 1
        sims = [simulate(schedule, Costs.of_stages(schedule)) for schedule in schedules]
        assert [shown(page)[f"{i}.makespan"] for i in range(2)] == [sim.makespan for sim in sims]


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_sliders_answer(browser: Browser, lab: Running, view: View) -> None:
    with looking(browser, lab.base, expect_refusals=True) as (page, _):
        page.goto(f"{lab.base}/{view.name}{'?schedule=looped-bfs' if view.name == 'pipeline' else ''}")
        unfold(page)
        sliders = page.locator("input[type=range]:visible")
        assert sliders.count() == sum(field.slider is not None for field in view.fields) - (
            13 if view.name == "replicas" else 0  # of 16 rows of targets and portions 3 are visible
        )
        for index in range(sliders.count()):
            slider = sliders.nth(index)
            assert slider.get_attribute("aria-label")
            before, url = slider.input_value(), page.url
            slider.press("ArrowRight")
            settle(page)
            assert float(slider.input_value()) > float(before)
            assert page.url != url
            assert slider.locator("xpath=following-sibling::input").input_value() == slider.input_value()


def test_a_slider_that_is_dragged_asks_one_question_at_a_time(browser: Browser, lab: Running) -> None:
    drag = """slider => {
        for (let value = 1; value <= 60; value++) {
            slider.value = value;
            slider.dispatchEvent(new Event("input", { bubbles: true }));
        }
    }"""
    with looking(browser, lab.base) as (page, seen):
        page.goto(f"{lab.base}/pipeline")
        page.get_by_label("M, microbatches, slider").evaluate(drag)
        settle(page)
        asked = [url for url in seen.requests if "fragment=1" in url]
        assert seen.most_at_once == 1
        assert 1 <= len(asked) <= 3, "all but the first and the last are never asked"
        assert "microbatches=60" in page.url
        assert shown(page) == expected(page)


def test_a_refused_value_is_said_and_mended(browser: Browser, lab: Running) -> None:
    with looking(browser, lab.base, expect_refusals=True) as (page, _):
        page.goto(f"{lab.base}/pipeline")
        page.get_by_label("P, stages", exact=True).fill("65")
        sentence = "stages: got '65', expected a whole number from 1 to 64; change it"
        expect(page.locator("#refusal .refused")).to_have_text(sentence)
        expect(page.get_by_role("status")).to_have_text(sentence)
        expect(page.locator("[aria-invalid]")).to_have_attribute("name", "stages")
        page.get_by_label("P, stages", exact=True).fill("2")
        expect(page.locator("#refusal .refused")).to_have_count(0)
        expect(page.locator("[aria-invalid]")).to_have_count(0)
        summary = page.locator("#result .summary").inner_text()
        expect(page.get_by_role("status")).to_have_text(summary)


def test_by_keyboard_alone(browser: Browser, lab: Running) -> None:
    focused = "document.activeElement.id || document.activeElement.textContent.trim()"
    with looking(browser, lab.base) as (page, _):
        page.goto(f"{lab.base}/")
        page.keyboard.press("Tab")
        assert page.evaluate(focused) == "Skip to the content"
        page.keyboard.press("Enter")
        assert page.evaluate(focused) == "main"
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_url("**/replicas")
        order = []
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement === document.body"):
                break
            order.append(page.evaluate(focused))
            outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none", order[-1]
            if order[-1] == "f-lr":
                page.keyboard.press("ArrowUp")
            if order[-1] == "f-unequal":
                page.keyboard.press("Space")
                settle(page)
        assert order.index("f-replicas") < order.index("f-w") < order.index("f-lr") < order.index("f-unequal")
        assert "f-n2" in order, "the portions can be reached once they are there"
        assert "unequal=1" in page.url
        assert "lr=0.11" in page.url
        assert shown(page) == expected(page)


def test_the_window_moves_by_links(browser: Browser, lab: Running) -> None:
    with looking(browser, lab.base) as (page, seen):
        page.goto(f"{lab.base}/pipeline?stages=4&microbatches=16")
        everything = generate("1f1b", 4, 16).size
        page.get_by_role("link", name="Closer").scroll_into_view_if_needed()
        scrolled = page.evaluate("scrollY")
        assert scrolled > 0
        page.get_by_role("link", name="Closer").click()
        settle(page)
        part = page.locator(".isostep-gantt rect.span").count()
        assert 0 < part < everything
        page.get_by_role("link", name="Later").click()
        settle(page)
        assert "Drawn: from" in page.locator(".windows").inner_text()
        assert page.evaluate("document.activeElement.textContent") == "Earlier"
        page.get_by_role("link", name="All", exact=True).click()
        settle(page)
        assert page.locator(".isostep-gantt rect.span").count() == everything
        assert page.evaluate("scrollY") == scrolled
        assert len([url for url in seen.requests if "fragment=1" not in url and "/pipeline" in url]) == 1
    with looking(browser, lab.base, java_script_enabled=False) as (page, _):
        page.goto(f"{lab.base}/pipeline?stages=4&microbatches=16")
        page.get_by_role("link", name="Closer").click()
        assert page.url.endswith("#gantt")
        assert 0 < page.locator(".isostep-gantt rect.span").count() < everything


@pytest.mark.parametrize("javascript", [True, False], ids=["javascript", "plain"])
def test_downloads(browser: Browser, lab: Running, javascript: bool, tmp_path: Path) -> None:
    with looking(browser, lab.base, java_script_enabled=javascript) as (page, _):
        query = "schedule=zb-h1&stages=3&microbatches=5"
        page.goto(f"{lab.base}/pipeline?{query}")
        for name in WRITERS:
            with page.expect_download() as started:
                page.locator(f'a[href^="/pipeline/{name}"]').click()
            path = tmp_path / name
            started.value.save_as(path)
            stem = f"zb-h1-3-stages-5-microbatches-[0-9a-f]{{8}}-{re.escape(name)}"
            assert re.fullmatch(stem, started.value.suggested_filename)
            assert path.read_text() == answer(APP, f"/pipeline/{name}", query).text
        page.goto(lab.base)
        with page.expect_download() as started:
            page.get_by_role("link", name="token_mean.py").click()
        started.value.save_as(tmp_path / "worked.py")
        worked = Path(__file__).parents[2] / "examples" / "worked" / "token_mean.py"
        assert (tmp_path / "worked.py").read_text() == worked.read_text()


def serious(page: Page) -> list[str]:
    """What axe-core finds that would keep somebody out."""
    found: Any = Axe().run(page).response["violations"]
    return [
        f"{violation['id']}: {node['target']}"
        for violation in found
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]


@pytest.mark.parametrize("options", [{}, {"color_scheme": "dark"}, {"viewport": PHONE, "has_touch": True}],
                         ids=["light", "dark", "phone"])  # fmt: skip
def test_accessible(browser: Browser, lab: Running, options: dict[str, Any]) -> None:
    with looking(browser, lab.base, expect_refusals=True, **options) as (page, _):
        for path in (*PAGES, "/pipeline?stages=x"):
            page.goto(f"{lab.base}{path}")
            assert serious(page) == [], path
            width = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
            assert width[0] <= width[1], path


def test_control_axe_finds_what_is_wrong(browser: Browser, lab: Running) -> None:
    with looking(browser, lab.base) as (page, _):
        page.goto(f"{lab.base}/replicas")
        page.evaluate("document.querySelector('label[for=f-w]').remove()")
        assert any(fault.startswith("label") for fault in serious(page))


def test_a_lab_that_has_ended_is_said(browser: Browser) -> None:
    with running() as gone, browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{gone.base}/batch")
        gone.end()
        page.get_by_label("D, replicas", exact=True).fill("3")
        expect(page.locator("#refusal")).to_contain_text("The lab does not answer")
        expect(page.locator("#result .summary")).to_contain_text("examples per update")
