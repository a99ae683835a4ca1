"""The page in a real browser: Debian's chromium, headless. Without one these tests are skipped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import secateur as sc
from runs import write_run
from worlds import ROOT

FLAGS = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-component-update"
HOSTILE = """<script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">'"&\u2028</title></style>""" + "x" * 5000


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("there is no chromium with its chromedriver here")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS.split(), "disable-sync", f"user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    opened = webdriver.Chrome(options=options, service=Service(driver))
    yield opened
    opened.quit()


@pytest.fixture(scope="module")
def page(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The page of a prune, open in the browser."""
    browser.get(sc.write_report(write_run(tmp_path_factory.mktemp("run"))).as_uri())
    return browser


def requests(browser: Any) -> list[str]:
    """What pages from files asked for since this was last called, beside themselves and data in them."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    urls = [params["request"]["url"] for params in sent if params["documentURL"].startswith("file:")]
    assert any(url.startswith("file:") for url in urls)
    return [url for url in urls if not url.startswith(("file:", "data:"))]


def test_a_page_opens_without_an_error_and_asks_for_nothing(page: Any) -> None:
    assert page.get_log("browser") == []
    assert requests(page) == []
    assert page.find_element("css selector", "html").get_attribute("lang") == "en"
    levels = [int(head.tag_name[1]) for head in page.find_elements("css selector", "h1, h2, h3")]
    assert levels[0] == 1 and levels.count(1) == 1


def test_the_map_has_a_cell_for_each_unit_and_shows_its_numbers(page: Any) -> None:
    from selenium.webdriver import ActionChains

    cells = page.find_elements("css selector", ".map .cell")
    assert len(cells) == 96 and len(page.find_elements("css selector", ".map")) == 2
    chosen = page.find_element("css selector", ".map .cell.chosen")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", chosen)
    ActionChains(page).move_to_element(chosen).perform()
    tip = page.find_element("id", "tip")
    assert tip.is_displayed() and "Removed as number" in tip.text and "Measured damage" in tip.text and "95%" in tip.text


def test_the_keyboard_goes_from_unit_to_unit(page: Any) -> None:
    from selenium.webdriver import ActionChains, Keys

    stops = page.find_elements("css selector", ".map .cell[tabindex='0']")
    assert len(stops) == 2  # one for each kind
    stops[1].click()
    page.execute_script("arguments[0].focus()", stops[1])
    first = page.find_element("id", "tip").text
    ActionChains(page).send_keys(Keys.ARROW_RIGHT).perform()
    focused = page.switch_to.active_element
    assert focused.get_attribute("data-column") == "1" and focused.get_attribute("tabindex") == "0"
    shown = page.find_element("id", "tip").text
    assert shown != first and shown.replace("\n", " ") in focused.get_attribute("aria-label").replace("\n", " ")
    ActionChains(page).send_keys(Keys.ESCAPE).perform()
    assert not page.find_element("id", "tip").is_displayed()


def test_the_heading_of_a_column_sorts_the_table(page: Any) -> None:
    table = page.execute_script(
        "return [...document.querySelectorAll('table')].find(t => t.caption.textContent === 'The units')"
    )
    page.execute_script("arguments[0].closest('details').open = true", table)
    button = next(b for b in table.find_elements("css selector", "thead button") if b.text == "Measurements")
    column = "return [...arguments[0].tBodies[0].rows].map(row => Number(row.children[7].textContent))"
    button.click()
    up = page.execute_script(column, table)
    button.click()
    down = page.execute_script(column, table)
    assert len(up) == 96 and up == sorted(up) and down == sorted(down, reverse=True) and up != down
    assert button.find_element("xpath", "..").get_attribute("aria-sort") == "descending"


def test_hostile_names_are_text_and_the_page_stays_as_wide_as_a_phone(browser: Any, tmp_path: Path) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 360, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    )
    try:
        browser.get(sc.write_report(write_run(tmp_path, HOSTILE)).as_uri())
        assert browser.execute_script("return window.hacked") is None
        assert browser.execute_script("return document.images.length") == 0
        assert HOSTILE in browser.execute_script("return document.body.textContent")
        assert HOSTILE[-5000:] in browser.find_element("id", "command").text
        assert browser.execute_script("return document.documentElement.scrollWidth") == 360
        assert browser.get_log("browser") == [] and requests(browser) == []
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_page_of_a_store_opens_without_an_error(browser: Any, tmp_path: Path) -> None:
    store = ROOT / "results" / "ablations"
    browser.get(sc.write_report(store, tmp_path / "store.html").as_uri())
    assert browser.get_log("browser") == [] and requests(browser) == []
    assert len(browser.find_elements("css selector", "svg.chart")) >= 2
