"""Seconds until the page of the demo shows its lattice, before any model is loaded; for a core without other work.

Server and browser share this process's cores. Every visit has a profile of its own, so nothing is cached. Chromium
first gets time to settle, as opening a window for a new profile keeps it busy, too.
"""

import shutil
import statistics
import sys
import time

from playwright.sync_api import Browser, sync_playwright

from lilicorr_hf.demo.page import LOOK, build


VISITS, SETTLE_SECONDS = 7, 4
FIRST_PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def visit(browser: Browser, url: str) -> tuple[float, float]:
    """Seconds to the browser's first contentful paint, and to the drawn lattice."""
    context = browser.new_context()
    page = context.new_page()
    time.sleep(SETTLE_SECONDS)
    start = time.perf_counter()
    page.goto(url, wait_until="commit")
    page.locator("#lattice .chart").wait_for()
    lattice = time.perf_counter() - start
    paint = page.evaluate(FIRST_PAINT) / 1000
    context.close()
    return paint, lattice


def main() -> None:
    chromium = shutil.which("chromium") or sys.exit("No chromium: run `make browser`.")
    page = build()
    _, url, _ = page.launch(prevent_thread_lock=True, quiet=True, inbrowser=False, **LOOK)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        seconds = [visit(browser, url) for _ in range(VISITS)]
        browser.close()
    page.close()
    for name, values in zip(("first contentful paint", "lattice"), zip(*seconds, strict=True), strict=True):
        sys.stdout.write(f"{name}: median {statistics.median(values):.2f} s, slowest {max(values):.2f} s\n")


if __name__ == "__main__":
    main()
