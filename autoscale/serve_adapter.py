"""Ray Serve's side of `autoscale.replicas`: the only module of this package that knows Ray.

Serve's controller asks a policy per deployment for the number of its replicas. (It knows a policy for a whole application too,
but takes one from a Serve YAML file only, not from `serve.run`.) Ours decides nothing: the application's own controller, which
hears every lane and draft four times a second, decides for both kinds together, every replica learns the decision with the
answer to its report, and passes it on as an autoscaling metric. So all holds and bounds are those of `autoscale.replicas`, and
Serve's own delays are off.

A deployment without replicas has nobody to pass it on. Serve starts the first replica of such a deployment when a request
waits for it, so that is how drafts come back from zero (`ColdStart`).
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("ray.serve")
WANTED_REPLICAS = "wanted_replicas"
"""What every replica tells Serve's autoscaler: the number of replicas of its own deployment that was decided."""
STALE_AFTER_S = 10.0
METRICS_INTERVAL_S, LOOK_BACK_S = 1.0, 1.5
"""How often Serve is told; and how long it remembers that a request waited for a deployment without replicas: a deployment
that goes back to zero sooner would be started once more."""


def replicas_as_decided(context: Any) -> tuple[float, dict[str, Any]]:
    """The latest decision that any replica has passed on; without a recent one the number stays.

    ``context`` is Serve's `AutoscalingContext`. Runs in Serve's controller, which may not have this package: no imports of it.
    """
    latest_s, wanted = -math.inf, math.nan
    for series in (context.raw_metrics or {}).get(WANTED_REPLICAS, {}).values():
        for point in series:
            if point.timestamp > latest_s:
                latest_s, wanted = point.timestamp, point.value
    if context.current_time - latest_s > STALE_AFTER_S or not (math.isfinite(wanted) and wanted >= 0):
        return context.target_num_replicas, {}
    return wanted, {}


def replica_options(least: int, most: int) -> dict[str, Any]:
    """Options of a deployment with ``least`` to ``most`` replicas, as decided by the application's controller."""
    if least == most:
        return {"num_replicas": most}
    return {
        "autoscaling_config": {
            "min_replicas": least,
            "max_replicas": most,
            "metrics_interval_s": METRICS_INTERVAL_S,
            "look_back_period_s": LOOK_BACK_S,
            "upscale_delay_s": 0.0,
            "downscale_delay_s": 0.0,
            "policy": {"policy_function": replicas_as_decided},
        }
    }


class ColdStart:
    """Asks Serve for the first replica of a deployment that has none, by a request that waits for it."""

    def __init__(self, deployment: str, method: str, find: Callable[[], Any] | None = None):
        """``method`` of the deployment takes no arguments and does nothing. ``find`` makes the handle (it may block)."""
        self._deployment = deployment
        self._method = method
        self._find = find or self._handle
        self._waiting: asyncio.Task[None] | None = None
        self.num_starts = 0

    def ask(self, is_wanted: bool) -> None:
        """Have a request wait, or take back the one that does. Call it on every decision; needs a running loop."""
        if self._waiting is not None and self._waiting.done():
            self._waiting = None
        if is_wanted and self._waiting is None:
            self.num_starts += 1
            self._waiting = asyncio.create_task(self._wait())
        elif not is_wanted and self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    async def _wait(self) -> None:
        try:
            handle = await asyncio.to_thread(self._find)
            response = getattr(handle, self._method).remote()
            try:
                await response
            except asyncio.CancelledError:
                with contextlib.suppress(Exception):
                    response.cancel()
                raise
        except Exception as error:
            logger.warning("the first replica of %s did not start: %s: %s", self._deployment, type(error).__name__, error)

    def _handle(self) -> Any:
        from ray import serve

        return serve.get_deployment_handle(self._deployment, serve.get_replica_context().app_name)
