import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

FORBIDDEN = ("torch", "ray", "transformers")

settings.register_profile("unit", deadline=None, derandomize=True)
settings.load_profile("unit")


@pytest.fixture(scope="session", autouse=True)
def _no_heavy_imports(request: pytest.FixtureRequest) -> Iterator[None]:
    """The unit tier stays fast and runs anywhere: whatever it tests must not pull in torch or Ray.

    Checked only when nothing but unit tests was collected, since the other tiers import both.
    """
    yield
    here = Path(__file__).parent
    if all(here in item.path.parents for item in request.session.items):
        loaded = [name for name in FORBIDDEN if name in sys.modules]
        if loaded:
            pytest.fail(f"unit tests imported {', '.join(loaded)}")
