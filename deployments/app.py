"""The Ray Serve application. The only place where deployments are bound together.

`serve run deployments.app:build_app` starts the defaults. Other settings go into a Serve YAML file whose ``import_path`` is
``deployments.app:build_app`` and whose ``args`` are the sections of `engine.config.OutriderConfig`.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle

from deployments import metrics
from deployments.api import ApiState, build_http_app
from deployments.controller import Controller
from deployments.draft import Draft
from deployments.handle_calls import complete_call, load_served_model, stream_call
from deployments.messages import LaneStatus
from deployments.router import Router
from engine.build import draft_is_a_model, preflight
from engine.config import OutriderConfig, parse_config
from engine.errors import ConfigError, OutriderError, Overloaded
from engine.types import Delta, GenerateRequest

logger = logging.getLogger("ray.serve")
SMALL_ACTOR_CPUS = 0.1
"""Api, router and controller mostly wait: they must fit beside the models on a machine with two cores."""
MAX_RESUMES = 3
LONGEST_STREAM_S = 600.0
"""A replica that is to stop may finish its streams for this long."""


def build_app(args: OutriderConfig) -> serve.Application:
    """Bind Api → Router (→ TargetActor) and Draft to a Controller; checks the configuration before anything is started."""
    tokenizer = preflight(args)
    _read_keys(args.api.keys_file)
    config = args.model_dump()
    # Guards the streams between the application's own processes; a new one for every deployment of the application.
    secret = secrets.token_hex(16)
    controller = _bind(Controller, _small(max_ongoing_requests=1000, logging_config={"enable_access_log": False}), config)
    router = _bind(Router, _router_options(args), config, secret, controller)
    drafts = []
    if draft_is_a_model(args) and args.drafts.replicas > 0 and args.speculation.max_depth > 0:
        options = {
            "num_replicas": args.drafts.replicas,
            "max_ongoing_requests": 1000,
            "ray_actor_options": {"num_cpus": args.drafts.num_cpus, "num_gpus": args.drafts.num_gpus},
        }
        drafts.append(_bind(Draft, options, config, secret, tokenizer.fingerprint, controller))
    api_options = _small(
        num_replicas=args.api.replicas, max_ongoing_requests=10_000, graceful_shutdown_timeout_s=LONGEST_STREAM_S
    )
    return _bind(Api, api_options, config, router, controller, drafts)


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
    options = _small(
        # The router's own queue refuses with 429; Serve must not hold requests back before it.
        max_ongoing_requests=config.lanes.max_batch + config.api.max_waiting + 1000,
        graceful_shutdown_timeout_s=LONGEST_STREAM_S,
        placement_group_bundles=[{"CPU": SMALL_ACTOR_CPUS}, target],
        placement_group_strategy="PACK",
    )
    if config.lanes.max > config.lanes.min:
        options["autoscaling_config"] = {
            "min_replicas": config.lanes.min,
            "max_replicas": config.lanes.max,
            "target_ongoing_requests": config.lanes.max_batch / 2,
        }
    else:
        options["num_replicas"] = config.lanes.min
    return options


class HandleLanes:
    """Streams of requests over a Serve handle: Serve chooses the lane; leaving the stream cancels it there.

    When the lane dies, the request goes on in another one with what it has committed. Under ``greedy`` and ``coupled`` the text
    is the same as without the fault, under ``rejection`` it has the same distribution.
    """

    def __init__(self, router: DeploymentHandle[Any]):
        self._generate = router.options(stream=True).generate

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """One request's deltas; raises `InvalidRequest`, `Overloaded` or `LaneError`."""
        before = Delta(request_id=request.request_id, token_ids=())
        for attempt in range(1 + MAX_RESUMES):
            # A new id: if the old lane lives after all, it must not meet its own request again.
            own = msgspec.structs.replace(
                request, request_id=f"{request.request_id}.{attempt}" if attempt else request.request_id
            )
            try:
                async with aclosing(self._stream(own)) as deltas:
                    async for delta in deltas:
                        last = _continued(before, delta)
                        request = msgspec.structs.replace(request, output_ids=request.output_ids + delta.token_ids)
                        yield last
                return
            except _LaneLost as error:
                before = last if request.output_ids else before
                logger.warning("request %s lost its lane (%s) and goes on in another", request.request_id, error)
        raise LaneError(f"the request lost its lane {1 + MAX_RESUMES} times")

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        response: Any = self._generate.remote(request)
        finished = False
        try:
            async for delta in response:
                finished = delta.finish_reason is not None
                yield delta
            if not finished:
                raise _LaneLost("the stream ended early")
        except RayTaskError as error:
            raise _as_own_error(error) from None
        except BackPressureError as error:
            raise Overloaded(str(error)) from None
        except RayError as error:
            raise _LaneLost(type(error).__name__) from None
        finally:
            if not finished:
                response.cancel()


def _continued(before: Delta, delta: Delta) -> Delta:
    """Counters of a resumed request include those of the lanes before."""
    return msgspec.structs.replace(
        delta,
        request_id=before.request_id,
        num_drafted=before.num_drafted + delta.num_drafted,
        num_accepted=before.num_accepted + delta.num_accepted,
        num_rounds=before.num_rounds + delta.num_rounds,
    )


class _LaneLost(Exception):
    """The lane died in the middle of a stream."""


class LaneError(OutriderError):
    """The lane failed, or too many lanes died under one request."""


def _as_own_error(error: RayTaskError) -> Exception:
    cause: Exception = error.cause
    if isinstance(cause, OutriderError):
        return cause
    return LaneError(f"the lane failed: {type(cause).__name__}")


def _read_keys(path: Path | None) -> frozenset[str]:
    """One key per line; empty lines and lines that begin with # do not count."""
    if path is None:
        return frozenset()
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ConfigError(f"api.keys_file {path}: {error.strerror}") from None
    keys = frozenset(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"api.keys_file {path} holds no key: with an empty file nobody could be let in")
    return keys


@serve.ingress()
class Api:
    """HTTP ingress and Python handle: text in, text out. Tokenises, validates, streams; models are elsewhere."""

    def __init__(
        self, config: dict[str, Any], router: DeploymentHandle[Any], controller: DeploymentHandle[Any], drafts: list[Any]
    ):
        self._config = parse_config(config)
        self._controller = controller
        self._state = ApiState(
            lanes=HandleLanes(router),
            model=load_served_model(self._config),
            config=self._config.api,
            status=self._status,
            metrics=self._metrics,
            controller=self._snapshot,
            api_keys=_read_keys(self._config.api.keys_file),
            request_timeout_s=self._config.api.request_timeout_s,
        )

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

    async def _status(self) -> dict[str, Any]:
        snapshot, statuses = await asyncio.gather(self._snapshot(), self._lanes())
        lanes = snapshot["lane_details"]
        wants_draft = self._config.draft.source != "none" and self._config.speculation.max_depth > 0
        degraded = [f"lane {lane['lane_id']}: {lane['draft_state']}" for lane in lanes if lane["draft_state"] != "ok"]
        return {
            "ready": bool(lanes),
            "reason": None if lanes else "no lane is ready yet",
            "degraded": degraded if wants_draft else [],
            "lanes": len(lanes),
            "drafts": len(snapshot["drafts"]),
            "targets": metrics.numerics_by_lane(statuses),
        }

    async def _metrics(self) -> str:
        return metrics.render(await self._lanes(), await self._snapshot())

    async def _lanes(self) -> list[LaneStatus]:
        lanes: list[LaneStatus] = await self._controller.lanes.remote()
        return lanes

    async def _snapshot(self) -> dict[str, Any]:
        snapshot: dict[str, Any] = await self._controller.snapshot.remote()
        return snapshot
