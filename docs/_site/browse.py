"""Open every page of the built site in headless Chromium: `make docs` does it where a Chromium is installed.

Each page must load without an error, ask no other server for anything, show its heading, fit a telephone, and be light
or dark as the reader's system says. Copy buttons copy what is typed, and the search finds what readers look for.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import console
from playwright.sync_api import Error, Page, sync_playwright
from searches import SEARCHES

PROMPT = re.compile(r"^([\w-]+)?\$ \S", re.M)
PHOTOGRAPHED = (
    ("home", ""),
    ("command-line", "reference/command-line/"),
    ("pipeline", "how-to/pipeline/"),
    ("ddp", "reference/python/ddp/"),
    ("errors", "reference/errors/"),
)
NARROW = {"width": 390, "height": 844}
WIDE = {"width": 1280, "height": 800}
# As root, in a container, without a display; and Chromium's own requests to its makers are switched off.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]


def main(folder: str, screenshots: str = "") -> int:
    """Browse the site in `folder`; returns 1 if something is wrong, having said what."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        print("make docs: there is no Chromium here, so the pages were built, and not opened in it.")
        return 0
    site = Path(folder)
    problems: list[str] = []
    with serve(site) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        reader = browser.new_context(viewport=WIDE, color_scheme="light")
        reader.grant_permissions(["clipboard-read", "clipboard-write"])
        wide = reader.new_page()
        narrow = browser.new_context(viewport=NARROW, color_scheme="dark").new_page()
        dark = {"", *(place for _, place in PHOTOGRAPHED)}
        for page in (wide, narrow):
            watch(page, address, problems)
        places = sorted(str(path.parent.relative_to(site)) for path in site.rglob("index.html"))
        shown = copied = 0
        for place in places:
            url = f"{address}/{'' if place == '.' else place + '/'}"
            if is_redirect(site / place / "index.html"):
                continue
            shown += 1
            look_at(wide, url, "default", problems)
            wide.set_viewport_size(NARROW)
            fit(wide, problems)
            wide.set_viewport_size(WIDE)
            copied += copy(wide, problems)
            if url.removeprefix(f"{address}/") in dark:  # colours are the theme's, the same on all pages
                look_at(narrow, url, "slate", problems)
        above_the_fold(wide, address, problems)
        search(wide, address, problems)
        if screenshots:
            photograph(wide, narrow, address, Path(screenshots))
        browser.close()
    for problem in problems:
        print(f"make docs: {problem}", file=sys.stderr)
    print(
        f"make docs: Chromium opened {shown} pages, wide and narrow, light and dark, "
        f"pressed {copied} copy buttons and typed {len(SEARCHES)} queries; {len(problems)} problems."
    )
    return 1 if problems else 0


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve the folder at a free port of this machine alone."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="site")
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A server that says nothing of each request."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def is_redirect(file: Path) -> bool:
    """Say whether the page only leads to another one."""
    return 'http-equiv="refresh"' in file.read_text(encoding="utf-8")


def watch(page: Page, address: str, problems: list[str]) -> None:
    """Note errors of scripts, requests that fail, and requests to other servers."""
    page.on("pageerror", lambda error: problems.append(f"{page.url}: an error of a script: {error}"))
    page.on(
        "response",
        lambda answer: answer.status >= 400 and problems.append(f"{page.url}: {answer.url} gives {answer.status}"),
    )
    page.on(
        "request",
        lambda asked: (
            asked.url.startswith((address, "data:", "blob:"))
            or problems.append(f"{page.url} asks another server: {asked.url}")
        ),
    )


def look_at(page: Page, url: str, scheme: str, problems: list[str]) -> None:
    """Open the page: it has one heading, the colours of the reader's system, and the width of the window."""
    page.goto(url, wait_until="load")
    if (headings := page.locator("article h1").count()) != 1:
        problems.append(f"{url}: it has {headings} headings of the first level")
    if (found := page.evaluate("document.body.getAttribute('data-md-color-scheme')")) != scheme:
        problems.append(f"{url}: its colours are {found}, and not {scheme}")
    fit(page, problems)


def fit(page: Page, problems: list[str]) -> None:
    """Note it if the page is wider than its window."""
    window = page.viewport_size
    width = page.evaluate("document.documentElement.scrollWidth")
    if window and width > window["width"]:
        problems.append(f"{page.url}: it is {width} pixels wide in a window of {window['width']}")
    hidden = page.evaluate(
        "[...document.querySelectorAll('article table')].filter(one => one.scrollWidth > one.clientWidth"
        " && !getComputedStyle(one).backgroundAttachment.includes('local')).length"
    )
    if hidden:
        problems.append(f"{page.url}: {hidden} tables scroll, and do not show it")


def above_the_fold(page: Page, address: str, problems: list[str]) -> None:
    """Expect on the first screen of the home page: how to install, a script, its output, a picture and a table."""
    page.goto(f"{address}/", wait_until="load")
    shown = "pre", "pre", "pre", "img", "table"
    ends = page.evaluate(
        "[...document.querySelectorAll('.home pre, .home img, .home table')]"
        ".map(one => [one.localName, one.getBoundingClientRect().bottom])"
    )
    if tuple(name for name, _ in ends) != shown or max(end for _, end in ends) > WIDE["height"]:
        problems.append(f"{page.url}: its first screen shows {ends}")
    for link in ("The repository", "Versions and support", "Edit this page"):
        if not page.locator(f"header a[title='{link}']").is_visible():
            problems.append(f"{page.url}: its header has no link {link!r}")


def copy(page: Page, problems: list[str]) -> int:
    """Press the copy button of every console block; return how many there are. Only what is typed may be copied."""
    blocks = page.locator("article div.highlight").filter(has=page.locator("button[data-md-type=copy]"))
    consoles = [block for block in blocks.all() if PROMPT.search(block.locator("code").inner_text())]
    for block in consoles:
        block.locator("button[data-md-type=copy]").dispatch_event("click")
        copied = page.evaluate("navigator.clipboard.readText()")
        if copied != console.commands(block.locator("code").inner_text()):
            problems.append(f"{page.url}: the copy button of a console block copies {copied!r}")
    return len(consoles)


def search(page: Page, address: str, problems: list[str]) -> None:
    """Type each query, and expect a page that answers it among the first three results."""
    page.goto(f"{address}/", wait_until="load")
    typed = page.locator("input.md-search__input")
    typed.click()
    results = page.locator(".md-search-result__item > a")
    for query, places in SEARCHES.items():
        typed.fill("")
        typed.press("Shift")  # the theme reads what is typed when a key comes up
        results.first.wait_for(state="detached")
        typed.fill(query)
        typed.press("Shift")
        try:
            results.first.wait_for(state="attached")
        except Error:
            problems.append(f"the search for {query!r} finds nothing")
            continue
        found = [link.get_attribute("href") or "" for link in results.all()[:3]]
        found = [urlsplit(link).path.removeprefix(urlsplit(address).path).strip("/") for link in found]
        if not set(found) & set(places.split()):
            problems.append(f"the search for {query!r} finds first {', '.join(found)}, and not {places}")


def photograph(wide: Page, narrow: Page, address: str, folder: Path) -> None:
    """Keep pictures of some pages, for a person to look at."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, place in PHOTOGRAPHED:
        for kind, page in (("wide", wide), ("narrow", narrow)):
            page.goto(f"{address}/{place}", wait_until="load")
            page.screenshot(path=folder / f"{name}-{kind}.png")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
