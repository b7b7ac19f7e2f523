"""The pages in a real browser, whose view is checked: headless Chromium."""

from __future__ import annotations

import json
import shutil

import pytest

from rmetric import Record, Run
from rmetric.diagnosis.report.incident import incident_page
from rmetric.reporting.page import index_of
from tests.diagnosis.diagnoses import out_of_memory
from tests.reporting.page.pages import HOSTILE, eventful_run, hostile_run, page
from tests.reporting.page.test_page import row

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver import ActionChains, Keys  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
DESK, PHONE = (1200, 900), (390, 800)

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium and chromedriver on this machine"
)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def browser(chromium, tmp_path):
    """Open a page from disk; its requests and errors are checked afterwards."""

    def visit(html: str, size: tuple[int, int] = DESK, scheme: str = "light"):
        path = tmp_path / "page.html"
        path.write_text(html, encoding="utf-8")
        width, height = size
        screen = dict(width=width, height=height, deviceScaleFactor=1, mobile=size is PHONE)
        chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        chromium.get(path.as_uri())
        return chromium

    for kind in ("browser", "performance"):
        chromium.get_log(kind)
    yield visit
    assert chromium.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in chromium.get_log("performance")]
    sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    # The browser's own first page may still be loading.
    urls = [e["request"]["url"] for e in sent if e["documentURL"].startswith("file:")]
    assert urls, "the page itself is asked for"
    assert all(url.startswith(("file:", "data:")) for url in urls), urls


def view(browser) -> list[float]:
    return browser.execute_script("return rmetricPage.view()")


def chart(browser, panel: str):
    """In the middle of the window."""
    over = browser.find_element(By.CSS_SELECTOR, f"[data-panel={panel}] .u-over")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", over)
    return over


def drag(browser, panel: str, start: float, end: float) -> None:
    """From one share of the width of a chart to another."""
    over = chart(browser, panel)
    width = over.size["width"]
    actions = ActionChains(browser, duration=20)
    actions.move_to_element_with_offset(over, int((start - 0.5) * width), 0).click_and_hold()
    actions.move_by_offset(int((end - start) * width), 0).release().perform()


def wide(browser) -> bool:
    """Whether the page is wider than the window."""
    return browser.execute_script("return document.documentElement.scrollWidth > innerWidth")


def until(browser, condition) -> None:
    WebDriverWait(browser, 5, poll_frequency=0.02).until(condition)


def inked(browser, panel: str) -> int:
    """How many pixels of a chart have something on them."""
    return browser.execute_script(
        """const canvas = document.querySelector(`[data-panel=${arguments[0]}] canvas`);
        const copy = new OffscreenCanvas(canvas.width, canvas.height);
        const context = copy.getContext("2d", { willReadFrequently: true });
        context.drawImage(canvas, 0, 0);
        const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
        let drawn = 0;
        for (let i = 3; i < pixels.length; i += 4) drawn += pixels[i] > 0;
        return drawn;""",
        panel,
    )


def test_every_panel_is_drawn(browser):
    shown = browser(page(eventful_run(), "loss_z_score"))
    names = shown.execute_script("return rmetricPage.page.panels.map(panel => panel.name)")
    assert len(names) >= 8
    until(shown, lambda b: all(inked(b, name) > 500 for name in names))


def test_dragging_zooms_all_panels_and_reset_shows_all_again(browser):
    shown = browser(page(eventful_run()))
    whole = view(shown)
    drag(shown, "loss", 0.25, 0.5)
    width = whole[1] - whole[0]
    low, high = view(shown)
    assert low == pytest.approx(whole[0] + 0.25 * width, abs=0.02 * width)
    assert high == pytest.approx(whole[0] + 0.5 * width, abs=0.02 * width)
    scales = "return rmetricPage.panels.map(p => [p.chart.scales.x.min, p.chart.scales.x.max])"
    until(shown, lambda b: all(scale == [low, high] for scale in b.execute_script(scales)))
    shown.find_element(By.CSS_SELECTOR, "[data-do=reset]").click()
    assert view(shown) == whole
    drag(shown, "r_metric", 0.6, 0.4)
    assert view(shown) != whole
    ActionChains(shown).double_click(chart(shown, "loss")).perform()
    until(shown, lambda b: view(b) == whole)


def test_pointing_at_a_step_shows_its_values_in_all_panels(browser):
    run = eventful_run()
    shown = browser(page(run))
    ActionChains(shown, duration=0).move_to_element(chart(shown, "gradient_norm")).perform()
    where = shown.find_element(By.CLASS_NAME, "where")
    until(shown, lambda b: where.text.startswith("step "))
    step = int(where.text.removeprefix("step "))
    record = run.records[step - 1]
    loss, norm = (
        shown.find_element(By.CSS_SELECTOR, f"[data-panel={name}] .legend b").text
        for name in ("loss", "gradient_norm")
    )
    assert float(loss) == pytest.approx(record.training_loss, rel=1e-3)
    assert float(norm) == pytest.approx(record.gradient_norm, rel=1e-3)


def test_the_keyboard_zooms_pans_points_and_changes_the_scale(browser):
    shown = browser(page(eventful_run()))
    whole = view(shown)
    shown.find_element(By.CSS_SELECTOR, "[data-panel=loss] .plot").send_keys(Keys.ARROW_RIGHT)
    keyboard = shown.switch_to.active_element
    keyboard.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    where = shown.find_element(By.CLASS_NAME, "where")
    until(shown, lambda b: where.text == "step 3")
    keyboard.send_keys("+")
    closer = view(shown)
    assert closer[1] - closer[0] == pytest.approx((whole[1] - whole[0]) / 2)
    keyboard.send_keys(Keys.SHIFT + Keys.ARROW_RIGHT)
    assert view(shown)[0] > closer[0]
    keyboard.send_keys("0")
    assert view(shown) == whole
    panel = shown.find_element(By.CSS_SELECTOR, "[data-panel=loss]")
    assert panel.get_attribute("data-scale") == "linear"
    keyboard.send_keys("l")
    assert panel.get_attribute("data-scale") == "log"
    assert inked(shown, "loss") > 500
    panel.find_element(By.CLASS_NAME, "scale").click()
    assert panel.get_attribute("data-scale") == "linear"


def test_nan_and_inf_are_shown_by_name(browser):
    shown = browser(page(eventful_run()))
    value = shown.find_element(By.CSS_SELECTOR, "[data-panel=loss] .legend b")
    for step, word in ((395, "nan"), (397, "inf")):
        shown.execute_script(f"rmetricPage.point({step})")
        until(shown, lambda b, word=word: value.text == word)


def test_an_alarm_in_the_table_leads_to_its_step(browser):
    shown = browser(page(eventful_run()))
    link = shown.find_element(By.CSS_SELECTOR, ".alarms a")
    step = int(link.get_attribute("data-step"))
    shown.execute_script("arguments[0].click()", link)
    low, high = view(shown)
    assert low <= step <= high
    assert high - low < 100
    cursor = (
        "const chart = rmetricPage.panels[1].chart; return chart.posToVal(chart.cursor.left, 'x')"
    )
    until(shown, lambda b: abs(b.execute_script(cursor) - step) < 1)


def test_a_run_named_as_a_script_runs_nothing(browser):
    for html in (page(hostile_run()), index_of([row(id=HOSTILE, source=HOSTILE)])):
        shown = browser(html)
        assert shown.execute_script("return window.hacked === undefined")
        assert HOSTILE in shown.find_element(By.TAG_NAME, "main").text


def test_on_a_phone_nothing_is_wider_than_the_screen(browser):
    run = eventful_run()
    run.id = "a_long_name_without_any_place_to_break_it_" * 4
    run.notes.append("x" * 300)
    rows = [row(id=run.id, source="folder/" * 30, outcome="failed", first_alert_step=3)]
    rows.append(row(problem="y" * 500, source="z" * 300))
    shown = browser(page(run), size=PHONE)
    until(shown, lambda b: inked(b, "loss") > 300)
    assert not wide(shown)
    assert not wide(browser(index_of(rows), size=PHONE))


def test_a_finger_that_moves_sideways_zooms(browser):
    shown = browser(page(eventful_run()), size=PHONE)
    whole = view(shown)
    left, top, width = shown.execute_script(
        "const r = arguments[0].getBoundingClientRect(); return [r.left, r.top + 50, r.width]",
        chart(shown, "loss"),
    )
    touches = [("touchStart", 0.2), ("touchMove", 0.4), ("touchMove", 0.6), ("touchEnd", None)]
    for kind, share in touches:
        points = [] if share is None else [{"x": left + share * width, "y": top}]
        shown.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    until(shown, lambda b: view(b) != whole)
    low, high = view(shown)
    assert high - low == pytest.approx(0.4 * (whole[1] - whole[0]), rel=0.1)


ROWS = [
    row(id="b", folder="b", outcome="failed", first_alert_step=30, num_records=200),
    row(id="a", folder="a", outcome="healthy", num_records=1000),
    row(id="c", folder="c", outcome="failed", first_alert_step=4, num_records=30),
    row(problem="broken", source="bad.csv"),
]


def order(browser) -> list[str]:
    links = browser.find_elements(By.CSS_SELECTOR, "#runs tbody th")
    return [link.text for link in links if link.is_displayed()]


def test_the_index_sorts_by_every_column_by_click_and_by_key(browser):
    shown = browser(index_of(ROWS))
    heads = {head.text: head for head in shown.find_elements(By.CSS_SELECTOR, "#runs thead button")}
    assert order(shown) == ["a", "b", "c"]
    heads["Run"].click()
    assert order(shown) == ["a", "b", "c"]
    heads["Records"].click()
    assert order(shown) == ["c", "b", "a"], "as numbers, not as texts"
    heads["Records"].send_keys(Keys.ENTER)
    assert order(shown) == ["a", "b", "c"]
    first = next(head for text, head in heads.items() if text.startswith("First alarm"))
    first.click()
    assert order(shown) == ["c", "b", "a"]
    first.click()
    assert order(shown) == ["b", "c", "a"], "a blank stays at the end"
    assert first.find_element(By.XPATH, "..").get_attribute("aria-sort") == "descending"


def test_the_index_is_filtered_by_outcome_and_by_text(browser):
    shown = browser(index_of(ROWS))
    outcome = shown.find_element(By.NAME, "outcome")
    outcome.send_keys("failed")
    until(shown, lambda b: order(b) == ["b", "c"])
    text = shown.find_element(By.NAME, "text")
    text.send_keys("200")
    assert order(shown) == ["b"]
    assert shown.find_element(By.NAME, "count").text == "1 of 4 shown"
    text.clear()
    text.send_keys("nothing like it")
    assert order(shown) == []


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_incident_draws_its_charts_and_fits(browser, tmp_path, size, scheme):
    metrics = tmp_path / "run.csv"
    rows = (f"{step},{3 - step / 500 + 6 * (step > 420)}" for step in range(1, 432))
    metrics.write_text("step,loss\n" + "\n".join(rows) + "\n")
    shown = browser(incident_page(out_of_memory(), metrics=metrics), size, scheme)
    assert not wide(shown)
    until(shown, lambda b: inked(b, "loss") > 500 and inked(b, "score_calibrated") > 500)
    assert shown.find_elements(By.CSS_SELECTOR, ".timeline .mark line")
    # Nothing of the axis of time lies beside it.
    inside = """const box = document.querySelector(".timeline").getBoundingClientRect();
        return [...document.querySelectorAll(".timeline text, .timeline line")]
            .filter(one => one.checkVisibility()).map(one => one.getBoundingClientRect())
            .every(one => one.left >= box.left - 3 && one.right <= box.right + 3);"""
    assert shown.execute_script(inside)


@pytest.mark.parametrize("size", [(1280, 800), PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("kind", ["diverged", "healthy"])
def test_verdict_and_loss_fill_the_first_screen(browser, size, kind):
    losses = [3 + 7 * 0.9**i + 0.01 * (i % 3) for i in range(200)]
    if kind == "diverged":
        losses[120:] = [9.0 + 0.1 * (i % 2) for i in range(80)]
    records = [Record(step=i, training_loss=x, gradient_norm=1.0) for i, x in enumerate(losses)]
    run = Run(id="a_run_of_" + "a_long_name_" * 5, records=records, source="logs/run.csv")
    shown = browser(page(run, "calibrated"), size=size)
    until(shown, lambda b: inked(b, "loss") > 300)
    places = shown.execute_script(
        """const at = name => document.querySelector(name).getBoundingClientRect();
        return [at(".call").top, at(".call").bottom, at("[data-panel=loss] .plot").top,
                at("[data-panel=loss] .plot").bottom, at("[data-panel=r_metric]").top,
                innerHeight];"""
    )
    top, bottom, chart_top, chart_bottom, published, height = places
    assert 0 <= top < bottom <= chart_top < chart_bottom <= height < published
    assert chart_bottom - chart_top >= 0.25 * height
    call = shown.find_element(By.CLASS_NAME, "call")
    assert call.text.startswith("DIVERGED at step 120" if kind == "diverged" else "HEALTHY")
    key = shown.find_element(By.CLASS_NAME, "key").text
    assert ("diverged from here, step 120" in key) == (kind == "diverged")
    assert "published" not in key
    assert not wide(shown)
