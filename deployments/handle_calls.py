"""Python calls on the application's handle: the same validation and the same texts as over HTTP, without the HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from deployments.api import ApiState
from deployments.openai import Answer, Job, ServedModel, validate_chat, validate_completion
from deployments.schema import token_logprob
from engine.config import OutriderConfig
from engine.errors import InvalidRequest


def load_served_model(config: OutriderConfig) -> ServedModel:
    """Tokenizer and limits of the target, without its weights."""
    from engine.models import load_tokenizer

    loaded = load_tokenizer(config.target.model)
    return ServedModel(
        name=config.served_model_name,
        tokenizer=loaded.tokenizer,
        vocab_size=loaded.vocab_size,
        max_context=min(config.target.max_context or loaded.max_context, loaded.max_context),
        eos_token_ids=frozenset(loaded.eos_token_ids),
        rule=config.speculation.rule,
        fingerprint=loaded.fingerprint,
    )


async def stream_call(
    state: ApiState, prompt: str | list[dict[str, Any]], params: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """Yield ``{"text", "finish_reason"}`` per round; the last one also has ``usage`` and ``seed``.

    With logprobs every piece has ``logprobs`` too, an entry per token in the form of OpenAI's chats.
    """
    job = await asyncio.to_thread(_job, state, prompt, params)
    answer = Answer(job, state.model)
    seed = None
    async with aclosing(state.lanes.generate(job.requests[0])) as deltas:  # type: ignore[type-var]
        async for delta in deltas:
            part = answer.feed(0, delta)
            seed = part.seed if part.seed is not None else seed
            piece: dict[str, Any] = {"text": part.text, "finish_reason": part.finish_reason and str(part.finish_reason)}
            if part.entries is not None:
                piece["logprobs"] = [token_logprob(entry) for entry in part.entries]
            if delta.finish_reason is not None:
                piece |= {"usage": _usage(answer), "seed": seed}
            yield piece


async def complete_call(state: ApiState, prompt: str | list[dict[str, Any]], params: dict[str, Any]) -> dict[str, Any]:
    """The pieces of `stream_call` joined."""
    pieces = [piece async for piece in stream_call(state, prompt, params)]
    whole = {**pieces[-1], "text": "".join(piece["text"] for piece in pieces)}
    if "logprobs" in whole:
        whole["logprobs"] = [entry for piece in pieces for entry in piece["logprobs"]]
    return whole


def _job(state: ApiState, prompt: str | list[dict[str, Any]], params: dict[str, Any]) -> Job:
    unusable = next((name for name in ("stream", "stream_options", "model", "echo") if name in params), None)
    if unusable is not None:
        raise InvalidRequest(f"{unusable} has no meaning in a Python call", unusable)
    if params.get("n", 1) != 1:
        raise InvalidRequest("a Python call makes one choice: call again with another seed", "n")
    body = {"model": state.model.name, **params}
    if isinstance(prompt, str):
        return validate_completion({**body, "prompt": prompt}, state.config, state.model)
    return validate_chat({**body, "messages": prompt}, state.config, state.model)


def _usage(answer: Answer) -> dict[str, int]:
    usage = answer.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "accepted_prediction_tokens": usage.accepted,
        "rejected_prediction_tokens": usage.drafted - usage.accepted,
    }
