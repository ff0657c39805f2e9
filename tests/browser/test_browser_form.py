"""The form of a page in a real browser: history, what a refusal keeps, controls that do not apply, phones."""

from __future__ import annotations

import pytest

pytest.importorskip("playwright", reason="needs playwright, of requirements-dev.txt")

from playwright.sync_api import Browser, Page, expect

from chromium import DESKTOP, EXECUTABLE, MISSING, PHONE, looking
from lab_server import Running
from page import expected, settle, shown, unfold

pytestmark = [
    pytest.mark.grid,
    pytest.mark.browser,
    pytest.mark.skipif(EXECUTABLE is None, reason=MISSING),
]


def drag(page: Page, label: str, values: list[int]) -> None:
    """Move a slider as a mouse does: an input event for each value, one change at the end."""
    script = """(slider, values) => {
        for (const value of values) {
            slider.value = value;
            slider.dispatchEvent(new Event("input", { bubbles: true }));
        }
        slider.dispatchEvent(new Event("change", { bubbles: true }));
    }"""
    page.get_by_label(f"{label}, slider").evaluate(script, values)
    settle(page)


def test_back_returns_to_the_state_before_each_change(browser: Browser, lab: Running) -> None:
    with looking(browser, lab.base) as (page, _):
        page.goto(f"{lab.base}/pipeline?stages=2")
        first = shown(page)
        length = page.evaluate("history.length")
        drag(page, "M, microbatches", [9, 10, 11, 12])
        page.get_by_label("Compare with").select_option("zb-v")
        settle(page)
        page.get_by_role("link", name="Closer").click()
        settle(page)
        assert page.evaluate("history.length") == length + 3, "an entry for each change, none for a move on the way"
        assert "from=" in page.url
        page.go_back()
        settle(page)
        assert "from=&to=" in page.url
        assert page.locator("[name=compare]").input_value() == "zb-v"
        assert shown(page) == expected(page)
        page.go_back()
        settle(page)
        assert page.locator("[name=compare]").input_value() == ""
        assert page.locator("[name=microbatches]").input_value() == "12"
        page.go_back()
        expect(page.locator("[name=microbatches]")).to_have_value("8")
        settle(page)
        assert page.get_by_label("M, microbatches, slider").input_value() == "8"
        assert page.url == f"{lab.base}/pipeline?stages=2"
        assert shown(page) == first
        page.go_forward()
        expect(page.locator("[name=microbatches]")).to_have_value("12")
        settle(page)
        assert shown(page) == expected(page)


def test_a_refusal_keeps_the_last_result_dimmed(browser: Browser, lab: Running) -> None:
    with looking(browser, lab.base, expect_refusals=True) as (page, _):
        page.goto(f"{lab.base}/pipeline?forward=1,1,2,1")
        before = page.locator("#result").inner_html()
        stages = page.get_by_label("P, stages", exact=True)
        for text in ("3", ""):  # the list has 4 numbers; a field is emptied before it is filled anew
            stages.fill(text)
            settle(page)
            expect(page.locator("#refusal")).to_contain_text("forward: got" if text else "stages: got ''")
            expect(page.locator("[aria-invalid]")).to_have_attribute("name", "forward" if text else "stages")
            assert page.locator("#result").inner_html() == before
            expect(page.locator("#result")).to_have_css("opacity", "0.4")
        stages.fill("4")
        settle(page)
        expect(page.locator("#refusal")).to_be_hidden()
        expect(page.locator("#result")).to_have_css("opacity", "1")
        page.goto(f"{lab.base}/pipeline?stages=x")  # there is no result to keep
        stages.fill("65")
        settle(page)
        assert page.locator(".refused").count() == 1
        expect(page.locator("#result .refused")).to_contain_text("stages: got '65'")


def test_controls_that_do_not_apply_are_disabled(browser: Browser, lab: Running) -> None:
    with looking(browser, lab.base) as (page, _):
        page.goto(f"{lab.base}/pipeline?chunks=3")
        chunks, slider = page.locator("[name=chunks]"), page.get_by_label("v, chunks on a rank, slider")
        expect(chunks).to_be_disabled()
        expect(slider).to_be_disabled()
        page.get_by_label("Compare with").select_option("looped-bfs")
        settle(page)
        expect(chunks).to_be_enabled()
        assert shown(page)["1.chunks"] == 3
        forward = page.get_by_label("Forward", exact=True)
        forward.fill("1,1,2,1")
        expect(page.get_by_label("Forward, slider")).to_be_disabled()
        forward.fill("2")
        expect(page.get_by_label("Forward, slider")).to_be_enabled()


def test_a_window_is_dropped_by_another_change_and_a_limit_by_its_slider(browser: Browser, lab: Running) -> None:
    with looking(browser, lab.base) as (page, _):
        page.goto(f"{lab.base}/pipeline?microbatches=16&from=40&to=50&memory-limit=2")
        drag(page, "M, microbatches", [4])
        assert "from=&to=" in page.url
        assert page.locator(".refused:not(.soft)").count() == 0
        page.locator("[name=to]").fill("9")
        page.locator("[name=from]").fill("5")
        settle(page)
        assert "from=5&to=9" in page.url
        slider = page.get_by_label("Memory limit, slider")
        expect(page.locator("#result")).to_contain_text("does not fit")
        slider.press("Home")
        settle(page)
        assert "memory-limit=&" in page.url
        assert slider.get_attribute("aria-valuetext") == "none"
        expect(page.locator("#result")).not_to_contain_text("does not fit")
        slider.press("ArrowRight")
        settle(page)
        assert "memory-limit=1&" in page.url


def test_a_small_screen_shows_what_a_slider_does(browser: Browser, lab: Running) -> None:
    with looking(browser, lab.base, viewport=PHONE, has_touch=True, expect_refusals=True) as (page, _):
        page.goto(f"{lab.base}/pipeline")
        slider, brief = page.get_by_label("M, microbatches, slider"), page.locator("#brief")
        slider.evaluate("slider => scrollTo(0, slider.getBoundingClientRect().top - 100)")
        expect(page.locator("#result .summary")).not_to_be_in_viewport()
        before = brief.inner_text()
        slider.press("ArrowRight")
        settle(page)
        expect(brief).to_be_in_viewport(ratio=1)
        assert brief.inner_text() != before
        assert brief.inner_text().startswith("takes 36, busy")
        for name, text in (("stages", ""), ("stages", "4")):
            page.locator(f"[name={name}]").fill(text)
            settle(page)
            assert brief.inner_text().startswith("takes" if text else "stages: got")
        for view in ("replicas?unequal=1", "tokens", "batch"):
            page.goto(f"{lab.base}/{view}")
            assert brief.is_visible()
            width = brief.evaluate("line => [line.scrollWidth, line.clientWidth]")
            assert width[0] <= width[1], f"{view}: one line that fits"
    with looking(browser, lab.base) as (page, _):
        page.goto(f"{lab.base}/pipeline")
        expect(page.locator("#brief")).to_be_hidden()


def test_without_javascript_the_button_is_there_at_once(browser: Browser, lab: Running) -> None:
    with looking(browser, lab.base, java_script_enabled=False) as (page, _):
        for view, viewport in (("pipeline", DESKTOP), ("replicas?replicas=8&unequal=1", PHONE)):
            page.set_viewport_size(viewport)
            page.goto(f"{lab.base}/{view}")
            page.locator("form .field").first.scroll_into_view_if_needed()
            expect(page.get_by_role("button", name="Show")).to_be_in_viewport(ratio=1)
            assert page.locator(".controls").evaluate("part => part.scrollHeight <= part.clientHeight + 1")


def test_lists_have_the_width_of_the_form(browser: Browser, lab: Running) -> None:
    with looking(browser, lab.base) as (page, _):
        for view, names in (
            ("pipeline", ("forward", "input-grad", "weight-grad", "transfer")),
            ("tokens", ("counts",)),
        ):
            page.goto(f"{lab.base}/{view}")
            unfold(page)
            for name in names:
                widths = page.locator(f"[name={name}]").evaluate("f => [f.offsetWidth, f.form.offsetWidth]")
                assert widths[0] == widths[1], name


INSIDE = """() => [...document.querySelectorAll(".flow .column")].flatMap((column) => {
    const boxes = [...column.querySelectorAll("rect")].map((box) => box.getBBox());
    return [...column.querySelectorAll("text")].filter((text) => {
        const t = text.getBBox();
        const [right, bottom] = [t.x + t.width, t.y + t.height];
        return !boxes.some((b) => b.x < t.x && b.y < t.y && right < b.x + b.width && bottom < b.y + b.height);
    }).map((text) => text.textContent);
}).concat([...document.querySelectorAll(".flow > .mid")].filter((text) => {
    const [t, b] = [text.getBBox(), document.querySelector(".flow .source").getBBox()];
    return t.x < b.x || t.x + t.width > b.x + b.width;
}).map((text) => text.textContent)).concat([...document.querySelectorAll(".dots text")].filter((text) => {
    const t = text.getBBox();
    return t.x < 0 || t.x + t.width > document.querySelector(".dots").viewBox.baseVal.width;
}).map((text) => text.textContent))"""
"""Texts of the pictures that run out of their box."""


def test_texts_stay_in_their_boxes(browser: Browser, lab: Running) -> None:
    eight = "replicas=8&unequal=1&w=-98765.4321&n3=64&n4=2&y4=0.12345,777777&y5=-0.000012345&y1=-999999.5&n7=0"
    with looking(browser, lab.base) as (page, _):
        for query in ("replicas=3&w=-123.456&lr=0.0333", eight, "replicas=2&w=-1000000&y0=1000000&lr=0.001",
                      "replicas=1&w=123456.789&y0=0.1,0.2,0.3,0.4", "replicas=2&w=1e-7&y0=-1234567e-1"):  # fmt: skip
            page.goto(f"{lab.base}/replicas?{query}")
            assert page.evaluate(INSIDE) == [], query
            assert page.locator(".flow .column").count() == int(query[9])
        page.locator(".flow .column .strong").first.evaluate("text => { text.lastChild.data += ' and some more'; }")
        assert len(page.evaluate(INSIDE)) == 1, "a text that is too long is found"


def test_captions_are_whole_and_wide_tables_show_it(browser: Browser, lab: Running) -> None:
    cut = """captions => captions.filter((caption) => {
        const [text, frame] = [document.createRange(), caption.closest(".scroll")];
        text.selectNodeContents(caption);
        return text.getBoundingClientRect().right > frame.getBoundingClientRect().right;
    }).map((caption) => caption.textContent)"""
    with looking(browser, lab.base) as (page, _):
        for path in ("/pipeline?schedule=dualpipe-v&stages=2", "/tokens", "/batch?stages=8&replicas=8&slices=4"):
            page.goto(f"{lab.base}{path}")
            for viewport in (DESKTOP, PHONE):
                page.set_viewport_size(viewport)
                assert page.locator("caption").evaluate_all(cut) == [], path
        page.locator("caption").last.evaluate("caption => { caption.textContent += 'x'.repeat(200); }")
        assert len(page.locator("caption").evaluate_all(cut)) == 1, "a caption that is cut is found"
        table = page.get_by_label("Table: ranks of each replica and stage")
        assert table.evaluate("part => part.scrollWidth > part.clientWidth")
        assert "linear-gradient" in table.evaluate("part => getComputedStyle(part).backgroundImage")
