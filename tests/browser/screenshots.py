"""Pictures of the live page for the docs: `python tests/browser/screenshots.py` (minutes; after `make browser`)."""

from pathlib import Path
from typing import Any

from chromium import chromium, missing, wait_for
from served import others, served

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images"
PROMPT = "Explain in three short sentences why the sky is blue, and then list the colours of the rainbow."
WARM_UP_S = 45
"""Until the curves show something."""


def main() -> None:
    """Serve, let others ask now and then, ask a question in the page, and take the pictures."""
    if (reason := missing()) is not None:
        raise SystemExit(reason)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with served() as url, chromium() as browser:
        take(browser, url, "dashboard-light.png", "light", 1200)
        take(browser, url, "dashboard-dark.png", "dark", 1200)
        take(browser, url, "dashboard-phone.png", "light", 360)


def take(browser: Any, url: str, name: str, scheme: str, width: int) -> None:
    """One picture of the whole page, after some load and an answer."""
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    page.goto(f"{url}/dashboard")
    page.fill("#prompt", PROMPT)
    for num_clients, share in ((1, 0.4), (6, 0.3), (2, 0.3)):
        with others(url, "One two three four", num_clients=num_clients):
            page.wait_for_timeout(1000 * share * WARM_UP_S)
    page.press("#prompt", "Control+Enter")
    wait_for(page, "/ended by/.test(document.getElementById('answer-status').textContent)")
    page.screenshot(path=FOLDER / name, full_page=True)
    context.close()


if __name__ == "__main__":
    main()
