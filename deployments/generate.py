"""`outrider generate`: one answer in this process, through the same rounds that the router plays, without Ray."""

import sys
import time

import msgspec

from engine.build import LocalEngine, build_local_engine
from engine.config import OutriderConfig
from engine.errors import InvalidRequest, OutriderError
from engine.request import check_params
from engine.text import TextStream
from engine.types import Delta, GenerateRequest, SamplingParams


def generate_text(
    config: OutriderConfig, prompt: str, *, raw: bool, max_tokens: int, temperature: float, top_p: float, seed: int
) -> int:
    """Print the answer as it is made; figures go to stderr. Returns the exit code."""
    params = SamplingParams(
        temperature=temperature, top_p=top_p, seed=seed % (1 << 64), max_tokens=max_tokens, rule=config.speculation.rule
    )
    check_params(params)  # before a model is loaded, which takes minutes for large ones
    engine = build_local_engine(config)
    prompt_ids = engine.encode(prompt, chat=not raw)
    room = engine.info.max_context - len(prompt_ids)
    if room < 1:
        raise InvalidRequest(f"the prompt has {len(prompt_ids)} tokens; this model's context holds {engine.info.max_context}")
    params = msgspec.structs.replace(params, max_tokens=min(max_tokens, room))
    request = GenerateRequest(request_id="generate", prompt_ids=tuple(prompt_ids), params=params)
    started_s = time.perf_counter()
    last = _print_stream(engine, request)
    print(_figures(engine, last, time.perf_counter() - started_s), file=sys.stderr)
    return 0


def _print_stream(engine: LocalEngine, request: GenerateRequest) -> Delta:
    stream = TextStream.for_request(engine.tokenizer, request)
    last: Delta | None = None
    for last in engine.generate([request]):
        if last.error is not None:
            raise OutriderError(last.error)
        print("".join(stream.push(token) for token in last.token_ids), end="", flush=True)
    print(stream.finish())
    if last is None:
        raise OutriderError("the engine stopped without an answer")
    return last


def _figures(engine: LocalEngine, last: Delta, seconds: float) -> str:
    speed = f"{last.num_output_tokens} tokens in {seconds:.2f} s, {last.num_output_tokens / seconds:.1f} tokens/s"
    source = engine.source_name or "no drafts"
    if not last.num_drafted:
        return f"[{speed}; {source}]"
    return (
        f"[{speed}; {source}: {last.num_accepted} of {last.num_drafted} draft tokens accepted "
        f"({last.num_accepted / last.num_drafted:.0%}), "
        f"{last.num_output_tokens / last.num_rounds:.2f} tokens per target forward]"
    )
