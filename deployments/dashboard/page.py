"""The live page: three files of this package as one document that loads nothing from anywhere."""

import base64
import hashlib
from functools import cache
from importlib import resources


@cache
def page() -> tuple[str, dict[str, str]]:
    """The document and its headers. It holds no data: it asks ``/dashboard/data``, with the key that the user enters.

    Its style and its script are allowed by their hashes and nothing else is, so no text that a model or anybody makes can run.
    """
    style, script = _read("page.css"), _read("page.js")
    document = _read("page.html").replace("/* page.css */", style).replace("/* page.js */", script)
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash(script)}",
            f"style-src {_hash(style)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )
    return document, {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
