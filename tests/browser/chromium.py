"""A Chromium of the system, driven by Playwright without a window and without any traffic of its own."""

import contextlib
import shutil
import time
from collections.abc import Iterator
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def missing() -> str | None:
    """Why no browser can be driven here; None if one can."""
    try:
        import playwright  # noqa: F401
    except ModuleNotFoundError:
        return "the Python package playwright is not installed (`make browser` installs it)"
    if find() is None:
        return f"no Chromium was found (looked for {', '.join(NAMES)})"
    return None


def find() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A running browser (`playwright.sync_api.Browser`)."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=find(), args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


def wait_for(page: Any, condition: str, timeout_s: float = 120.0) -> None:
    """Until the JavaScript expression ``condition`` is true on ``page``; raises `AssertionError` after ``timeout_s``.

    `page.wait_for_function` makes code from text inside the page, which the page's policy forbids.
    """
    deadline_s = time.monotonic() + timeout_s
    while not page.evaluate(condition):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {timeout_s:g} s: {condition}")
        page.wait_for_timeout(50)
