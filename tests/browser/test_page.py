"""The live page in a real Chromium, against a running server."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import others

PROMPT = "Count from one to ten in words."
LIVE = "document.getElementById('connection').textContent === 'live'"
FINISHED = "/ended by/.test(document.getElementById('answer-status').textContent)"
TOKENS = "[...document.querySelectorAll('#answer .token')].map(token => [token.textContent, token.className])"

CONTRASTS = """() => {
  const channels = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const linear = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const colour = channels(getComputedStyle(element).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !element.getClientRects().length || element.disabled) continue;
    const style = getComputedStyle(element);
    const front = light(channels(element instanceof SVGElement ? style.fill : style.color));
    const back = light(behind(element instanceof SVGElement ? element.closest('section') : element));
    found.push([(Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05), walk.currentNode.data.trim()]);
  }
  return found;
}"""

UNNAMED = """() => [...document.querySelectorAll('input, textarea, button, summary, svg, [tabindex]')].filter((element) => !(
  element.labels?.length || element.getAttribute('aria-label') ||
  (element.matches('button, summary') && element.textContent.trim())
)).map((element) => element.outerHTML)"""

BROKEN_REFERENCES = """() => ['for', 'aria-labelledby', 'aria-describedby'].flatMap((name) =>
  [...document.querySelectorAll(`[${name}]`)].map((element) => element.getAttribute(name))
).filter((id) => !document.getElementById(id))"""

UNDERLINES = """() => [...document.querySelectorAll('#legend .token')].map((element) => getComputedStyle(element)).map(
  (style) => style.textDecorationLine + style.textDecorationStyle)"""


def answered(url: str, **params: Any) -> dict[str, Any]:
    """The server's own answer, without the page and without origins."""
    body = {"model": "smollm2", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 30, **params}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


def send_by_keyboard(page: Any, *, speculate: bool = True, seed: str = "7", temperature: str = "1") -> None:
    """From the top of the page to the answer without a pointer."""
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "prompt":
            break
    page.keyboard.press("Control+A")
    page.keyboard.type(PROMPT)
    for value in ("30", temperature, seed):
        page.keyboard.press("Tab")
        page.keyboard.press("Control+A")
        page.keyboard.type(value)
    page.keyboard.press("Tab")
    if not speculate:
        page.keyboard.press("Space")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "send"
    page.keyboard.press("Enter")


def test_it_loads_alone_and_without_errors(visit: Callable[..., Any], url: str) -> None:
    """Bug guarded: a script that its own policy forbids, a font or an icon from another host, an error nobody sees."""
    seen = visit()
    seen.wait_for(LIVE)
    assert seen.page.title() == "Outrider"
    assert seen.page.inner_text("#model") == "smollm2"
    assert seen.page.locator("#parts tr").count() == 2  # a target and a draft
    assert seen.problems == []
    assert {address for address in seen.addresses if not address.startswith((url, "data:"))} == set()
    assert f"{url}/dashboard/data" in seen.addresses


@pytest.mark.parametrize("speculate", [True, False], ids=["with drafts", "without"])
def test_an_answer_asked_for_by_keyboard(visit: Callable[..., Any], url: str, speculate: bool) -> None:
    """Bug guarded: a control that only a pointer reaches; tokens lost, doubled or coloured as what they are not."""
    seen = visit()
    seen.wait_for(LIVE)
    send_by_keyboard(seen.page, speculate=speculate)
    seen.wait_for(FINISHED)
    expected = answered(url, seed=7, temperature=1, speculation={} if speculate else {"max_depth": 0})
    shown = seen.page.evaluate(TOKENS)
    assert "".join(text for text, _ in shown) == expected["choices"][0]["message"]["content"]
    origins = {kind.removeprefix("token ") for _, kind in shown}
    counts = {name: int(seen.page.text_content(f"#count-{name}") or 0) for name in ("draft", "recovery", "bonus", "target")}
    assert sum(counts.values()) == expected["usage"]["completion_tokens"]
    if speculate:
        assert {"draft", "target"} <= origins  # the first token is the target's alone
        assert origins & {"recovery", "bonus"}
    else:
        assert origins == {"target"}
    assert "seed 7" in seen.page.inner_text("#answer-status")
    assert seen.page.evaluate("document.activeElement.id") == "send"  # the focus is not lost with the button that had it
    assert seen.problems == []


def test_an_answer_can_be_stopped(visit: Callable[..., Any]) -> None:
    """Bug guarded: a stop that leaves the form locked, or the request running in its lane."""
    seen = visit()
    seen.wait_for(LIVE)
    seen.page.fill("#max-tokens", "2000")
    seen.page.press("#prompt", "Control+Enter")
    seen.wait_for("document.querySelectorAll('#answer .token').length > 0")
    seen.page.click("#stop")
    seen.wait_for("document.getElementById('answer-status').textContent === 'stopped'")
    assert seen.page.is_enabled("#send")
    seen.wait_for(
        "[...document.querySelectorAll('#parts td')].some(cell => cell.textContent.startsWith('0 running, 0 waiting'))"
    )


def test_what_the_server_refuses_is_said(visit: Callable[..., Any]) -> None:
    """Bug guarded: an error object shown as an answer, or nothing at all."""
    seen = visit()
    seen.wait_for(LIVE)
    seen.page.fill("#max-tokens", "4096")
    seen.page.fill("#prompt", "one two " * 3000)
    seen.page.click("#send")
    seen.wait_for("/context holds/.test(document.getElementById('answer-status').textContent)")
    assert seen.page.inner_text("#answer") == ""
    assert seen.page.is_enabled("#send")


def test_it_follows_the_cluster_and_shows_nobody_elses_text(visit: Callable[..., Any], url: str) -> None:
    """Bug guarded: figures of the moment when it was loaded; prompts or answers of others in the page or its data."""
    seen = visit()
    seen.wait_for(LIVE)
    secret = "zanzibar confidential"
    with others(url, secret, num_clients=2):
        seen.wait_for("parseFloat(document.getElementById('throughput').textContent) > 0")
        seen.wait_for(
            "/in flight/.test(document.querySelector('#chart .title').textContent) && "
            "parseInt(document.querySelector('#chart .title').textContent) > 0"
        )
        seen.wait_for("/times the tokens/.test(document.getElementById('gain').textContent)")
        seen.wait_for("parseFloat(document.getElementById('length').textContent) > 1")
        seen.wait_for("/ms|s$/.test(document.getElementById('itl').textContent)")
        whole = seen.page.content() + httpx.get(f"{url}/dashboard/data", timeout=30).text
    assert "zanzibar" not in whole
    assert seen.page.inner_text("#reason").startswith("1 lane")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read(visit: Callable[..., Any], scheme: str) -> None:
    """Bug guarded: text below the contrast of 4.5 that WCAG 2.2 asks for, in either scheme; controls without a name."""
    seen = visit(color_scheme=scheme)
    seen.wait_for(LIVE)
    seen.page.evaluate("document.getElementById('key-box').open = true")
    send_by_keyboard(seen.page, seed="", temperature="0")
    seen.wait_for(FINISHED)
    contrasts = seen.page.evaluate(CONTRASTS)
    assert len(contrasts) > 40
    assert [entry for entry in contrasts if entry[0] < 4.5] == []
    assert seen.page.evaluate(UNNAMED) == []
    assert seen.page.evaluate(BROKEN_REFERENCES) == []
    (red, green, blue) = seen.page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (red + green + blue > 600) == (scheme == "light")


def test_origins_do_not_rely_on_colour(visit: Callable[..., Any]) -> None:
    """Bug guarded: a legend that a person who sees no colours cannot tell apart."""
    seen = visit()
    assert len(set(seen.page.evaluate(UNDERLINES))) == 4


@pytest.mark.parametrize("width", [360, 768])
def test_it_fits_a_phone(visit: Callable[..., Any], width: int) -> None:
    """Bug guarded: a long id, a table or the chart that makes a phone scroll sideways."""
    seen = visit(width=width)
    seen.wait_for(LIVE)
    seen.page.fill("#prompt", "w" * 300)
    seen.page.fill("#max-tokens", "20")
    seen.page.press("#prompt", "Control+Enter")
    seen.wait_for(FINISHED)
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    sizes = seen.page.evaluate("[...document.querySelectorAll('button')].map(b => b.offsetHeight).filter(height => height)")
    assert min(sizes) >= 24  # WCAG 2.2, target size


def test_a_key_is_asked_for_and_kept_in_the_tab(visit: Callable[..., Any], url: str) -> None:
    """Bug guarded: a page that shows nothing where keys are needed, sends the key elsewhere, or keeps it after the tab."""
    key, seen = "sk-" + "k" * 40, visit()
    seen.wait_for(LIVE)
    sent: list[str | None] = []

    def guard(route: Any) -> None:
        """What the server does with keys (tests/serve) in front of one that has none."""
        sent.append(route.request.headers.get("authorization"))
        if sent[-1] == f"Bearer {key}":
            route.continue_()
        else:
            body = '{"error": {"message": "a valid API key is needed"}}'
            route.fulfill(status=401, content_type="application/json", body=body)

    seen.page.route("**/dashboard/data", guard)
    seen.wait_for("/a valid API key/.test(document.getElementById('connection').textContent)")
    assert seen.page.is_visible("#key")
    seen.page.fill("#key", key)
    seen.page.press("#key", "Enter")
    seen.wait_for(LIVE)
    assert sent[0] is None
    assert sent[-1] == f"Bearer {key}"
    stored = "[sessionStorage.getItem('outrider.key'), localStorage.length, document.cookie]"
    assert seen.page.evaluate(stored) == [key, 0, ""]
    assert {address for address in seen.addresses if key in address} == set()
    seen.page.evaluate("document.getElementById('key-box').open = true")
    seen.page.click("#key-forget")
    assert seen.page.evaluate("sessionStorage.length") == 0


def test_a_server_that_is_gone_is_said(visit: Callable[..., Any]) -> None:
    """Bug guarded: old figures shown as if they were those of now."""
    seen = visit()
    seen.wait_for(LIVE)
    seen.page.route("**/dashboard/data", lambda route: route.abort())
    seen.wait_for("/cannot be reached/.test(document.getElementById('connection').textContent)")
    assert "stale" in seen.page.evaluate("document.body.className")
    seen.page.unroute("**/dashboard/data")
    seen.wait_for(LIVE)
    assert "stale" not in seen.page.evaluate("document.body.className")


def test_screenshots_in_the_docs_are_small() -> None:
    """Bug guarded: a clone that carries megabytes of pictures."""
    pictures = list((Path(__file__).resolve().parents[2] / "docs" / "images").glob("dashboard*.png"))
    assert len(pictures) >= 2
    assert [picture.name for picture in pictures if picture.stat().st_size >= 150_000] == []
