"""The Ray Serve application. The only place where deployments are bound together.

`serve run deployments.app:build_app` starts the defaults. Other settings go into a Serve YAML file whose ``import_path`` is
``deployments.app:build_app`` and whose ``args`` are the sections of `engine.config.OutriderConfig`.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from autoscale.serve_adapter import replica_options
from deployments import metrics
from deployments.api import ApiState, build_http_app
from deployments.controller import Controller
from deployments.dashboard.data import cluster_data
from deployments.draft import Draft
from deployments.facts import read_facts
from deployments.handle_calls import complete_call, load_served_model, stream_call
from deployments.keys import KeyFile
from deployments.lanes import StreamLanes
from deployments.logs import serve_options, set_up_replica
from deployments.memory import freeze_loaded
from deployments.messages import Directory, LaneStatus
from deployments.router import Router
from deployments.tracing import current_trace_parent, find_tracer
from deployments.wire import read_secret, read_tls
from engine.build import draft_is_a_model, preflight
from engine.config import ApiConfig, OutriderConfig, parse_config

logger = logging.getLogger("ray.serve")
SMALL_ACTOR_CPUS = 0.1
"""Api, router and controller mostly wait: they must fit beside the models on a machine with two cores."""
LONGEST_STREAM_S = 600.0
"""A replica that is to stop may finish its streams for this long."""
DRAIN_LOOP_S = 0.1
"""Serve looks this often whether a replica that is to stop still has requests of Serve's own; lanes and drafts have none."""


def build_app(args: OutriderConfig) -> serve.Application:
    """Bind Api → Router (→ TargetActor) and Draft to a Controller; checks the configuration before anything is started."""
    tokenizer = preflight(args)
    read_tls(args.streams)
    _open_keys(args.api)
    config = args.model_dump()
    # Guards the streams between the application's own processes. From a file, which every process reads for itself, it stays
    # the same while the application is updated, and Ray keeps no copy; else every deployment of the application has a new one.
    secret = "" if args.streams.secret_file else secrets.token_hex(16)
    read_secret(args.streams, secret)
    logs = serve_options(args.logging)
    quiet = serve_options(args.logging, access_log=False)
    controller = _bind(Controller, _small(max_ongoing_requests=1000, **quiet), config)
    router = _bind(Router, {**_router_options(args), **logs}, config, secret, controller)
    drafts = []
    if draft_is_a_model(args) and args.drafts.max > 0 and args.speculation.max_depth > 0:
        options = {
            "max_ongoing_requests": 1000,
            "graceful_shutdown_wait_loop_s": DRAIN_LOOP_S,
            "ray_actor_options": {"num_cpus": args.drafts.num_cpus, "num_gpus": args.drafts.num_gpus},
            **replica_options(args.drafts.min, args.drafts.max),
            **logs,
        }
        drafts.append(_bind(Draft, options, config, secret, tokenizer.fingerprint, controller))
    api_options = _small(
        num_replicas=args.api.replicas, max_ongoing_requests=10_000, graceful_shutdown_timeout_s=LONGEST_STREAM_S, **logs
    )
    return _bind(Api, api_options, config, secret, controller, [router, *drafts])


def _bind(deployment_class: type, options: dict[str, Any], *arguments: Any) -> serve.Application:
    deployment: Any = serve.deployment(deployment_class)
    application: serve.Application = deployment.options(**options).bind(*arguments)
    return application


def _small(**options: Any) -> dict[str, Any]:
    return {"ray_actor_options": {"num_cpus": SMALL_ACTOR_CPUS, "num_gpus": 0}, **options}


def _router_options(config: OutriderConfig) -> dict[str, Any]:
    target = {"CPU": config.target.num_cpus}
    if config.target.num_gpus:
        target["GPU"] = config.target.num_gpus
    return _small(
        graceful_shutdown_timeout_s=LONGEST_STREAM_S,
        graceful_shutdown_wait_loop_s=DRAIN_LOOP_S,
        placement_group_bundles=[{"CPU": SMALL_ACTOR_CPUS}, target],
        placement_group_strategy="PACK",
        **replica_options(config.lanes.min, config.lanes.max),
    )


def _open_keys(config: ApiConfig) -> KeyFile | None:
    return None if config.keys_file is None else KeyFile(config.keys_file)


@serve.ingress()
class Api:
    """HTTP ingress and Python handle: text in, text out. Tokenises, validates, streams; models are elsewhere."""

    async def __init__(  # type: ignore[misc]
        self, config: dict[str, Any], secret: str, controller: DeploymentHandle[Any], others: list[DeploymentHandle[Any]]
    ):
        """``others`` belong to the application only because they are bound here; they are found by the controller."""
        self._config = parse_config(config)
        set_up_replica()
        self._controller = controller
        streams = self._config.streams
        self._lanes = StreamLanes(read_secret(streams, secret), serve.get_replica_context().replica_tag, read_tls(streams))
        self._following = asyncio.create_task(self._follow_lanes())
        model = await asyncio.to_thread(load_served_model, self._config)
        self._state = ApiState(
            lanes=self._lanes,
            model=model,
            config=self._config.api,
            status=self._status,
            metrics=self._metrics,
            controller=self._snapshot,
            dashboard=self._dashboard,
            api_keys=_open_keys(self._config.api),
            request_timeout_s=self._config.api.request_timeout_s,
            answers_request_id=False,  # Serve's own middleware does
            trace_parent=(lambda: "") if find_tracer() is None else current_trace_parent,
        )
        self._process = read_facts()
        freeze_loaded()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_http_app(self._state)

    async def generate(self, prompt: str | list[dict[str, Any]], **params: Any) -> AsyncIterator[dict[str, Any]]:
        """Continue a text, or answer chat messages; parameters are those of the HTTP body.

        Yields ``{"text": ..., "finish_reason": None}`` per round; the last item also has ``usage`` and ``seed``.
        """
        async for piece in stream_call(self._state, prompt, params):
            yield piece

    async def complete(self, prompt: str | list[dict[str, Any]], **params: Any) -> dict[str, Any]:
        """The whole answer at once: ``{"text", "finish_reason", "usage", "seed"}``."""
        return await complete_call(self._state, prompt, params)

    async def check_health(self) -> None:
        """Serve's liveness probe: an Api that no longer follows the lanes is replaced."""
        if self._following.done():
            raise RuntimeError("the task that follows the lanes ended")

    async def _follow_lanes(self) -> None:
        while True:
            try:
                directory: Directory = await self._controller.directory.remote()
                await self._lanes.update(directory.lanes)
            except Exception as error:
                logger.warning("the controller cannot be reached, going on with its last answer: %s", type(error).__name__)
            await asyncio.sleep(self._config.controller.report_interval_s)

    async def _status(self) -> dict[str, Any]:
        snapshot, statuses = await asyncio.gather(self._snapshot(), self._lane_statuses())
        lanes = snapshot["lane_details"]
        ready = any(not lane["leaving"] for lane in lanes)
        # Where the number of drafts follows the load, none may be what is wanted.
        wants_draft = (
            self._config.draft.source != "none" and self._config.speculation.max_depth > 0 and snapshot["wanted_drafts"] != 0
        )
        degraded = [f"lane {lane['lane_id']}: {lane['draft_state']}" for lane in lanes if lane["draft_state"] != "ok"]
        return {
            "ready": ready,
            "reason": None if ready else "no lane is ready yet",
            "degraded": degraded if wants_draft else [],
            "lanes": len(lanes),
            "drafts": len(snapshot["drafts"]),
            "targets": metrics.numerics_by_lane(statuses),
        }

    async def _metrics(self) -> str:
        return metrics.render(await self._lane_statuses(), await self._snapshot())

    async def _dashboard(self) -> dict[str, Any]:
        snapshot, statuses = await asyncio.gather(self._snapshot(), self._lane_statuses())
        return cluster_data(snapshot, statuses, self._config)

    async def _lane_statuses(self) -> list[LaneStatus]:
        lanes: list[LaneStatus] = await self._controller.lanes.remote()
        return lanes

    async def _snapshot(self) -> dict[str, Any]:
        snapshot: dict[str, Any] = await self._controller.snapshot.remote()
        return {**snapshot, "api_process": self._process}
