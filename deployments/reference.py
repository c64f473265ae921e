"""`python -m deployments.reference`: write the reference of the configuration, from the models that check it."""

import argparse
import json
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from engine.config import MAX_FAN_OUT, MIN_SHARED_TOKENS, OutriderConfig

NAMES: dict[Any, str] = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path"}
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
INTRODUCTION = """\
# Configuration

Made by `python -m deployments.reference` from `engine/config.py`; change that instead.

One tree, the same everywhere: a YAML file for `outrider serve --config FILE`, the `args` of a Ray Serve application whose
`import_path` is `deployments.app:build_app`, and `engine.config.parse_config` in Python. On the command line
`--set section.key=value` replaces one value, which is read as YAML: `--set draft.skip_layers=[1,2]`.

Every key has a default, so an empty file is a configuration. An unknown key is an error that names the nearest known one, and a
value out of its limits is an error that names the key. Combinations that have no meaning are refused with the fix. A default of
`null` means that the key is not set; what holds then stands beside it.

```sh
outrider doctor --config outrider.yaml    # checks a file on this machine, before anything is started
```

Fetched and converted models lie in the folder that the environment variable `OUTRIDER_CACHE` names, else in
`XDG_CACHE_HOME/outrider`, else in `~/.cache/outrider`.
"""
BEYOND_BOUNDS = {
    "speculation.depth": "`auto`, or 0 to `max_depth`",
    "speculation.fan_out": f"`auto`, or 0 to {MAX_FAN_OUT}",
    "draft.suffix_shared_tokens": f"0, or ≥ {MIN_SHARED_TOKENS}",
}
"""Limits that are no plain bounds, so that the models check them in code."""


def reference() -> str:
    """The whole page as Markdown: a table per section, in the order of the models."""
    sections = OutriderConfig.model_fields.items()
    return "\n".join([INTRODUCTION, *(_section(name, field.annotation) for name, field in sections)])


def _section(name: str, model: Any) -> str:
    rows = "".join(_row(name, key, field) for key, field in model.model_fields.items())
    about = " ".join((model.__doc__ or "").split())
    return f"## {name}\n\n{about}\n\n| key | type | default | limits | meaning |\n|---|---|---|---|---|\n{rows}"


def _row(section: str, key: str, field: FieldInfo) -> str:
    allowed = BEYOND_BOUNDS.get(f"{section}.{key}", limits(field))
    cells = [f"`{key}`", type_name(field.annotation), f"`{_as_yaml(field.default)}`", allowed, field.description or ""]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _as_yaml(default: object) -> str:
    return json.dumps(default).strip('"')


def type_name(annotation: Any) -> str:
    """A type as a reader of YAML would say it; raises KeyError for one that no key had so far."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(part) for part in arguments if part is not type(None))
    if origin is tuple:
        return f"list of {type_name(arguments[0])}s"
    return NAMES[annotation]


def limits(field: FieldInfo) -> str:
    """The bounds of a number; empty where there are none."""
    bounds = [(sign, getattr(mark, name)) for name, sign in SIGNS.items() for mark in field.metadata if hasattr(mark, name)]
    return ", ".join(f"{sign} {bound}" for sign, bound in bounds)


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m deployments.reference", description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/configuration.md"), metavar="FILE")
    parser.parse_args().out.write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
