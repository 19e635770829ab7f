"""The script of a report's page, in a browser: the values of a curve under the pointer, and a part of it in large."""

from __future__ import annotations

import pytest
from tests.report.chromium import chromium, find_chromium
from tests.report.measured import measured, rank

from phalanx._job.report.findings import find
from phalanx._job.report.page import render

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium")

PICTURE = "document.querySelector('svg[data-scale]')"
TOLD = f"{PICTURE}.querySelector('.told').textContent"
POINTS = f"{PICTURE}.querySelector('[data-name]').getAttribute('points').split(' ').length"


@pytest.fixture
def browser(tmp_path):
    loss = tuple((step, 4.0 - step / 50) for step in range(101))
    run = measured(rank(0), rank(1), loss=loss)
    (tmp_path / "report.html").write_text(render(run, find(run)), encoding="utf-8")
    with chromium() as opened:
        opened.open(tmp_path / "report.html")
        yield opened
        assert opened.problems == []


def at(browser, share):
    """Where in the window the point of the loss's picture lies that far from the left of its axes."""
    left, top, width, height = browser.evaluate(
        f"(() => {{ const box = {PICTURE}.getBoundingClientRect(), x = JSON.parse({PICTURE}.dataset.scale).x,"
        f" all = {PICTURE}.viewBox.baseVal.width; return [box.left + box.width * x[0] / all, box.top,"
        " box.width * (x[1] - x[0]) / all, box.height]; })()"
    )
    return {"x": left + share * width, "y": top + height / 2}


def mouse(browser, kind, share, **how):
    browser.call("Input.dispatchMouseEvent", type=kind, **at(browser, share), **how)


@pytest.mark.slow
def test_the_value_under_the_pointer_is_told(browser):
    browser.evaluate(f"{PICTURE}.scrollIntoView({{block: 'center'}})")
    assert browser.evaluate(TOLD) == ""
    mouse(browser, "mouseMoved", 0.5)
    assert browser.evaluate(TOLD) == "3 loss, step 50"
    mouse(browser, "mouseMoved", 1.0)
    assert browser.evaluate(TOLD) == "2 loss, step 100"


def test_a_part_that_is_dragged_across_is_shown_in_large_until_a_double_click(browser):
    browser.evaluate(f"{PICTURE}.scrollIntoView({{block: 'center'}})")
    whole = browser.evaluate(POINTS)
    mouse(browser, "mouseMoved", 0.2)
    mouse(browser, "mousePressed", 0.2, button="left", clickCount=1)
    mouse(browser, "mouseMoved", 0.4)
    mouse(browser, "mouseReleased", 0.4, button="left", clickCount=1)
    assert browser.evaluate(POINTS) < whole / 3
    mouse(browser, "mouseMoved", 0.5)
    assert browser.evaluate(TOLD) == "3.4 loss, step 30"
    for count in (1, 2):
        mouse(browser, "mousePressed", 0.5, button="left", clickCount=count)
        mouse(browser, "mouseReleased", 0.5, button="left", clickCount=count)
    assert browser.evaluate(POINTS) == whole
