"""A lane and its target's process, without Ray: drafts come over the stream of the verifies."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import random_ids, tiny_model

from deployments.lossless.play import Played, Text
from deployments.remote import StreamTarget, TargetHeads
from deployments.target import TargetActor
from engine.config import parse_config
from engine.drivers import AsyncDriver
from engine.propose.heads.eagle import EagleHead
from engine.propose.heads.load import load_head
from engine.propose.heads.source import HeadSource
from engine.scheduler import FixedDepth, Scheduler
from engine.types import GenerateRequest, SamplingParams
from engine.verify.target import Target

SECRET = "sixteen letters!"


class Handle:
    """An actor's methods as Ray hands them out."""

    def __init__(self, actor: Any):
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._actor, name))


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setattr("engine.verify.ragged.STEP_BUDGET_S", 0.0)
    torch.set_num_threads(1)
    loaded = tiny_model("llama")
    EagleHead.untrained(loaded.config, loaded.model.get_input_embeddings().weight, draft_ids=range(3, 40)).save(tmp_path)
    head = load_head(str(tmp_path), loaded)
    target = Target(loaded, kv_capacity_tokens=2048, kernels="torch", hidden_layers=head.layers)
    target.listen(HeadSource(head, target.info))
    return target


async def test_a_lane_asks_its_target_for_drafts(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: an actor that does not answer for its heads, a lane that believes drafts from them cost nothing."""
    monkeypatch.setattr("engine.build.build_served_target", lambda config: target)
    monkeypatch.setattr("deployments.target.freeze_loaded", lambda: None)
    monkeypatch.setattr(
        "deployments.target.ray", SimpleNamespace(util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"))
    )
    actor = TargetActor(parse_config({"draft": {"source": "heads"}}).model_dump(), SECRET)
    stream = StreamTarget(Handle(actor), SECRET)
    info = await stream.connect()
    assert target.heads is not None
    assert stream.head_step_times == target.heads.info.step_times
    prompts = [tuple(random_ids(length)) for length in (5, 70)]
    try:
        plain = await _texts(stream, info, prompts, 0)
        drafted = await _texts(stream, info, prompts, 3)
    finally:
        await stream._client.close()  # type: ignore[union-attr]
        await actor._server.stop()
    assert drafted.num_drafted > 0
    assert [text.ids for text in drafted.texts.values()] == [text.ids for text in plain.texts.values()]
    assert set(drafted.fallbacks) <= {"catching_up"}


async def _texts(stream: StreamTarget, info: Any, prompts: list[tuple[int, ...]], depth: int) -> Played:
    """Some greedy and some sampled text after each prompt, all in one batch."""
    requests = [
        GenerateRequest(
            request_id=f"{depth}-{index}-{temperature}",
            prompt_ids=prompt,
            params=SamplingParams(temperature=temperature, seed=index, max_tokens=12, ignore_eos=True),
        )
        for index, prompt in enumerate(prompts)
        for temperature in (0.0, 1.0)
    ]
    played = Played({request.request_id: Text() for request in requests})
    scheduler = Scheduler(info, FixedDepth(depth), max_batch=8, prefill_tokens=64, max_waiting=8)
    driver = AsyncDriver(stream, TargetHeads(stream, 20.0), scheduler, on_report=played.report)
    rounds = asyncio.create_task(driver.run())
    try:
        await asyncio.gather(*(_stream(driver, request, played.texts[request.request_id]) for request in requests))
    finally:
        rounds.cancel()
    return played


async def _stream(driver: AsyncDriver, request: GenerateRequest, text: Text) -> None:
    async for delta in driver.generate(request):
        text.add(delta)
