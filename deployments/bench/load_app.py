"""The application that `outrider bench load` starts when it is given no other: one lane, whose depth is switched."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console

from deployments.bench.lane import BenchLane
from deployments.bench.load_client import Arm, Endpoint, find_endpoint
from deployments.bench.load_report import ADAPTIVE, FIXED_DEPTHS, OFF, fixed
from deployments.bench.rounds import paced_config, wait_for_draft
from engine.build import draft_is_a_model, preflight
from engine.config import OutriderConfig, parse_config
from engine.errors import ConfigError

console = Console(stderr=True)
Served = tuple[Endpoint, list[Arm]]


@contextmanager
def own_application(config: OutriderConfig, emulation: str | None, api: str, headers: dict[str, str]) -> Iterator[Served]:
    """Serve the configured pair, or the emulated one of this name, on a cluster of its own.

    Yields the endpoint and the arms: no speculation, fixed depths, and the depth that follows the load. Raises `ConfigError`
    for a configuration that cannot be measured so, before anything is started.
    """
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        if emulation is not None:
            config = _emulated(Path(folder), emulation, config)
        _check(config)
        with _served(config) as lane:
            yield _endpoint(config, api, headers), lane_arms(lane, calibrate=emulation is None)


def _emulated(folder: Path, emulation: str, config: OutriderConfig) -> OutriderConfig:
    """The application of `outrider bench rounds`; what ``config`` sets explicitly stays."""
    file = folder / "emulation"
    file.write_text(emulation, encoding="utf-8")
    tree = paced_config(file, config.api.port).model_dump()
    for section, values in config.model_dump(exclude_unset=True).items():
        tree[section] |= values
    return parse_config(tree)


def _check(config: OutriderConfig) -> None:
    if not draft_is_a_model(config):
        raise ConfigError(
            f"draft.source is '{config.draft.source}': the arms of this benchmark need a draft model; "
            "to measure what such a server gains, serve it and give its --url"
        )
    if config.lanes.max > 1:
        raise ConfigError(
            f"lanes.max is {config.lanes.max}: the depth is switched in one lane; set it to 1, or serve it and give its --url"
        )
    if config.speculation.max_depth < max(FIXED_DEPTHS):
        raise ConfigError(
            f"speculation.max_depth is {config.speculation.max_depth}: the arms go to depth {max(FIXED_DEPTHS)}; "
            f"set it to {max(FIXED_DEPTHS)} or more"
        )
    preflight(config)


@contextmanager
def _served(config: OutriderConfig) -> Iterator[BenchLane]:
    from deployments.launch import cluster, deploy

    with cluster(config, None):
        with console.status(f"starting {config.served_model_name}") as status:
            deploy(config, status.update)
            lane = wait_for_draft(BenchLane(config))
        yield lane


def _endpoint(config: OutriderConfig, api: str, headers: dict[str, str]) -> Endpoint:
    return find_endpoint(f"http://{config.api.host}:{config.api.port}", api=api, headers=headers)


def lane_arms(lane: BenchLane, *, calibrate: bool) -> list[Arm]:
    """No speculation, the fixed depths, and adaptive, each switched on before its load.

    ``calibrate``: measure the models before adaptive is played for the first time. Just after a start the machine is still
    busy, and one bad measurement would be believed for ten minutes. Emulated models announce how long all their steps take.
    """
    depths = {OFF: 0, **{fixed(depth): depth for depth in FIXED_DEPTHS}}
    arms = [Arm(name, {}, partial(lane.use, {"depth": depth})) for name, depth in depths.items()]
    return [*arms, Arm(ADAPTIVE, {}, _adaptive(lane, calibrate=calibrate))]


def _adaptive(lane: BenchLane, *, calibrate: bool) -> Callable[[], None]:
    is_due = calibrate

    def switch_on() -> None:
        nonlocal is_due
        lane.use({"depth": "auto"}, afresh=is_due)
        is_due = False

    return switch_on
