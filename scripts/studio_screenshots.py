"""Screenshots of every page of the studio into docs/images: light, dark, and on a phone.

    python scripts/studio_screenshots.py LINK [--pages runs,run] [--output docs/images]

LINK is what `gracetune studio FOLDER --control` printed. The pages about one run show the run named by --run, or the
first in the list. Images are WebP files of less than 150 kB.
"""

from __future__ import annotations

import argparse
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = "/usr/bin/chromium"
LARGEST = 150_000
ROUTES = {
    "runs": "#/runs",
    "run": "#/run/RUN",
    "samples": "#/run/RUN",
    "memory": "#/run/RUN/memory",
    "data": "#/run/RUN/data",
    "compare": "#/compare?ids=ALL",
    "new": "#/new",
    "queue": "#/queue",
    "machine": "#/machine",
}
WAIT_MS = 2500
SLOW_MS = 15_000
"""Lists of data and the machine's checks are made when a page first needs them."""


@dataclass(frozen=True)
class Variant:
    name: str
    theme: Literal["light", "dark"]
    width: int
    height: int


VARIANTS = (
    Variant("light", "light", 1280, 860),
    Variant("dark", "dark", 1280, 860),
    Variant("phone", "light", 390, 844),
)


def compressed(png: bytes) -> bytes:
    """A WebP of less than `LARGEST` bytes: with less quality where that is needed."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    for quality in (90, 80, 65, 50, 30):
        stream = io.BytesIO()
        image.save(stream, "WEBP", quality=quality, method=6)
        if stream.tell() < LARGEST:
            break
    return stream.getvalue()


def runs(page: Page, chosen: str) -> tuple[str, list[str]]:
    """The id of the chosen run, and the ids to compare."""
    rows = page.evaluate("fetch('api/runs').then((answer) => answer.json())")["runs"]
    if not rows:
        raise SystemExit("found no run, expected at least one below the studio's folder; type: gracetune demo")
    named = [row["id"] for row in rows if row["name"] == chosen]
    first = (named or [row["id"] for row in rows])[0]
    family = next(row["family"] for row in rows if row["id"] == first)
    alike = [row["id"] for row in rows if row["family"] == family]
    return first, (alike if len(alike) > 1 else [row["id"] for row in rows])[:3]


def screenshots(browser: Browser, link: str, pages: list[str], chosen: str, folder: str, output: Path) -> None:
    for variant in VARIANTS:
        size = ViewportSize(width=variant.width, height=variant.height)
        context = browser.new_context(
            viewport=size, color_scheme=variant.theme, reduced_motion="reduce",
            device_scale_factor=2 if variant.name == "phone" else 1,
        )  # fmt: skip
        page = context.new_page()
        page.goto(link)
        run, compared = runs(page, chosen)
        for name in pages:
            route = ROUTES[name].replace("RUN", run).replace("ALL", ",".join(compared))
            page.goto(link.partition("?")[0] + route)
            page.wait_for_timeout(SLOW_MS if name in ("data", "machine") else WAIT_MS)
            if name == "new" and folder:
                page.get_by_label("Folder of images").fill(folder)
                page.get_by_role("button", name="Propose a config").click()
                page.locator(".plan-headline").wait_for(timeout=120_000)
                page.wait_for_timeout(WAIT_MS)
            if name == "samples":
                page.get_by_role("button", name="Before and after").click()
                page.locator(".samples").scroll_into_view_if_needed()
                page.wait_for_timeout(500)
            file = output / f"studio-{name}-{variant.name}.webp"
            file.write_bytes(compressed(page.screenshot()))
            print(f"{file.name}  {file.stat().st_size / 1000:.0f} kB")
        context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("link")
    parser.add_argument("--pages", default=",".join(ROUTES))
    parser.add_argument("--run", default="", help="name of the run to show")
    parser.add_argument("--folder", default="", help="folder of images to propose a config for")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        screenshots(browser, options.link, options.pages.split(","), options.run, options.folder, options.output)
        browser.close()


if __name__ == "__main__":
    main()
