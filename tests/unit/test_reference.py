"""The reference of the configuration against the models that check it."""

import re
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field
from pydantic.fields import FieldInfo

from deployments.reference import BEYOND_BOUNDS, limits, reference, type_name
from engine.config import MAX_FAN_OUT, MIN_SHARED_TOKENS, OutriderConfig, parse_config
from engine.errors import ConfigError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def test_the_page_is_what_the_models_say() -> None:
    """Bug guarded: a key that was added or changed and is described as it was before."""
    assert PAGE.read_text(encoding="utf-8") == reference(), "run `python -m deployments.reference`"


def test_every_key_has_a_row_with_a_meaning() -> None:
    """Bug guarded: a key without a description, or a generator that leaves some out."""
    found = re.findall(r"^## (\w+)|^\| `(\w+)` \|.*\| (.*) \|$", reference(), re.MULTILINE)
    section, rows = "", {}
    for heading, key, meaning in found:
        section = heading or section
        if key:
            rows[f"{section}.{key}"] = meaning
    assert set(rows) == {f"{name}.{key}" for name, keys in OutriderConfig().model_dump().items() for key in keys}
    assert [key for key, meaning in rows.items() if not meaning] == []


def test_types_and_limits_are_said_in_words() -> None:
    """Bug guarded: Python's own spelling on the page, or a bound that is left out."""
    assert type_name(int | Literal["auto"] | None) == "integer or `auto`"
    assert type_name(tuple[int, ...]) == "list of integers"
    field = Field(1, gt=0, le=5)
    assert isinstance(field, FieldInfo)
    assert limits(field) == "> 0, ≤ 5"


@pytest.mark.parametrize(
    ("key", "inside", "outside"),
    [
        ("speculation.depth", 3, 4),
        ("speculation.fan_out", MAX_FAN_OUT, MAX_FAN_OUT + 1),
        ("draft.suffix_shared_tokens", MIN_SHARED_TOKENS, MIN_SHARED_TOKENS - 1),
    ],
)
def test_limits_that_are_no_bounds_hold(key: str, inside: int, outside: int) -> None:
    """Bug guarded: a limit on the page that nobody checks, or that was moved."""
    assert set(BEYOND_BOUNDS) == {"speculation.depth", "speculation.fan_out", "draft.suffix_shared_tokens"}
    section, name = key.split(".")
    base = {"draft": {"source": "suffix"}, "speculation": {"max_depth": 3}}
    parse_config({**base, section: {**base[section], name: inside}})
    with pytest.raises(ConfigError, match=key):
        parse_config({**base, section: {**base[section], name: outside}})
