"""How long the page of a large search, 116 units and 50,000 pulls, takes to make, and to open in chromium.

python benchmarks/report.py
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from secateur.report.page import write_report
from secateur.selection import Pull, Selection, Step
from secateur.units import counts_by_layer, enumerate_units

PULLS, STEPS = 50_000, 12
FLAGS = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-component-update"


def large_selection() -> Selection:
    rng = np.random.default_rng(0)
    units = enumerate_units([3] * 12, [32 * 8] * 10, target="both")
    damages = rng.normal(0.01, 0.02, len(units))
    trace, steps = [], []
    for i in range(PULLS):
        arm = int(rng.integers(len(units)))
        gap = tuple(rng.normal(damages[arm], 0.01, 2).tolist())
        base = (2.0, 2.1)
        masked = (2.0 + gap[0], 2.1 + gap[1])
        trace.append(Pull(i * STEPS // PULLS, units[arm], (0, 1), base, masked, sum(gap) / 2, 0.5, 4))
    for step in range(STEPS):
        unit = units[int(np.argsort(damages)[step])]
        steps.append(Step(step, unit, 0.5, 0.5, 400, 100, 100, 0, 0.9, float(np.sort(damages)[step]), 100.0 * step))
    return Selection(
        tuple(step.unit for step in steps), steps=tuple(steps), trace=tuple(trace), candidates=counts_by_layer(units)
    )


def opened_in(page: Path) -> float | None:
    """Milliseconds until the page is loaded and its script has run; None without a browser."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        return None
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options: Any = webdriver.ChromeOptions()
    options.binary_location = chromium
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS.split(), f"user-data-dir={profile}"):
            options.add_argument(f"--{flag}")
        browser = webdriver.Chrome(options=options, service=Service(driver))
        try:
            browser.get(page.as_uri())
            entry = "const [e] = performance.getEntriesByType('navigation'); return e.loadEventEnd"
            return float(browser.execute_script(entry))
        finally:
            browser.quit()


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        large_selection().save(folder / "selection.json")
        started = time.perf_counter()
        page = write_report(folder)
        print(f"made in {time.perf_counter() - started:.2f} s: {page.stat().st_size / 1000:,.0f} kB")
        ms = opened_in(page)
        print("no chromium with chromedriver here" if ms is None else f"opened in {ms:,.0f} ms")


if __name__ == "__main__":
    main()
