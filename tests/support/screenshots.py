"""Pictures of the page: `python tests/support/screenshots.py FOLDER`. Needs gradio, playwright and Chromium."""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from lilicorr_hf.demo.page import LOOK, build


PATIENCE_MS = 120_000


def open_page(browser, url: str, width: int, height: int) -> Page:
    page = browser.new_page(viewport={"width": width, "height": height}, device_scale_factor=1.5)
    page.set_default_timeout(PATIENCE_MS)
    page.goto(url)
    page.locator("#lattice .chart").wait_for()
    return page


def shoot(browser, url: str, folder: Path) -> None:
    light = open_page(browser, f"{url}?__theme=light&example=smollm2", 1240, 900)
    light.get_by_text("Block 1 of").wait_for()
    light.screenshot(path=folder / "lattice-light.png", full_page=True)

    dark = open_page(browser, f"{url}?__theme=dark", 1240, 900)
    dark.get_by_label("Step back").click()
    dark.locator("h1").hover()
    dark.screenshot(path=folder / "lattice-dark.png", full_page=True)

    phone = open_page(browser, f"{url}?__theme=light&example=smollm2", 360, 740)
    phone.get_by_text("Block 1 of").wait_for()
    phone.locator("#lattice .blocks").evaluate("node => node.scrollIntoView()")
    phone.screenshot(path=folder / "lattice-phone.png")


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium") or sys.exit("No chromium: run `make browser`.")
    page = build()
    _, url, _ = page.launch(prevent_thread_lock=True, quiet=True, inbrowser=False, **LOOK)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        shoot(browser, url, folder)
        browser.close()
    page.close()


if __name__ == "__main__":
    main()
