"""Pictures of the live page for the docs: `python tests/browser/screenshots.py` (minutes; after `make browser`)."""

import io
from pathlib import Path

from chromium import chromium, missing, wait_for
from PIL import Image
from served import others, served

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images"
PROMPT = "Explain in three short sentences why the sky is blue, and then list the colours of the rainbow."
TRAFFIC = ((1, 20), (6, 15), (1, 10))
"""Clients of others, and for how many seconds: until the curves show something."""
PICTURES = (("dashboard-light", "light", 1200), ("dashboard-dark", "dark", 1200), ("dashboard-phone", "light", 360))


def main() -> None:
    """Serve, ask a question in the page, let others ask, and take the pictures."""
    if (reason := missing()) is not None:
        raise SystemExit(reason)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with served() as url, chromium() as browser:
        page = browser.new_page(viewport={"width": 1200, "height": 800})
        page.goto(f"{url}/dashboard")
        wait_for(page, "document.getElementById('connection').textContent === 'live'")
        page.fill("#prompt", PROMPT)
        page.fill("#temperature", "1")
        page.fill("#seed", "5")
        page.press("#prompt", "Control+Enter")
        wait_for(page, "/ended by/.test(document.getElementById('answer-status').textContent)")
        page.evaluate("document.activeElement.blur()")
        for num_clients, for_s in TRAFFIC:
            with others(url, "One two three four", num_clients=num_clients):
                page.wait_for_timeout(1000 * for_s)
        with others(url, "One two three four", num_clients=1):
            for name, scheme, width in PICTURES:
                page.emulate_media(color_scheme=scheme)
                page.set_viewport_size({"width": width, "height": 800})
                page.wait_for_timeout(2500)  # drawn anew at the next answer of the server
                save(page.screenshot(full_page=True), FOLDER / f"{name}.png")


def save(screenshot: bytes, path: Path) -> None:
    """With few colours: a third of the size."""
    picture = Image.open(io.BytesIO(screenshot)).convert("RGB")
    picture.quantize(96, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
