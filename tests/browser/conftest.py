"""One server and one browser for all tests of this tier; skipped, with the reason, where there is no browser."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import chromium, missing, wait_for
from served import served

KEY = "sk-" + "b" * 40


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    if reason is not None:
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """Depth 4 in every round, so that there are drafts whatever this machine is doing."""
    with served(speculation={"depth": 4}) as address:
        yield address


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


class Visit:
    """An open page and everything that went wrong or out on it."""

    def __init__(self, context: Any):
        self.page = context.new_page()
        self.problems: list[str] = []
        self.addresses: list[str] = []
        self.page.on("console", lambda message: message.type in ("error", "warning") and self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.addresses.append(request.url))

    def wait_for(self, condition: str) -> None:
        """Until the JavaScript expression is true. Asked from outside: Playwright's own wait is a script the page forbids."""
        wait_for(self.page, condition)


@pytest.fixture
def visit(browser: Any, url: str) -> Iterator[Callable[..., Visit]]:
    """Open the page: ``visit(width=360)``; options are those of a browser context."""
    contexts = []

    def go(address: str = url, *, width: int = 1200, **options: Any) -> Visit:
        context = browser.new_context(viewport={"width": width, "height": 800}, **options)
        contexts.append(context)
        visit = Visit(context)
        visit.page.goto(f"{address}/dashboard")
        return visit

    yield go
    for context in contexts:
        context.close()
