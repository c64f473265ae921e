"""The request's life and the one place where committed tokens are walked."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import msgspec
import pytest

from engine.errors import InvalidRequest
from engine.request import LIVE, TRANSITIONS, Event, InvalidTransitionError, Request, State, check_request, fit_to_cache
from engine.testing import model_info
from engine.types import FinishReason, GenerateRequest, SamplingParams, TokenLogprob

EOS = frozenset({0})

# Written out by hand, apart from the table under test: every pair that is not listed must be refused.
ALLOWED = {
    ("waiting", "admit"): "prefilling",
    ("waiting", "cancel"): "cancelled",
    ("waiting", "fail"): "failed",
    ("prefilling", "caught_up"): "decoding",
    ("prefilling", "lose_cache"): "prefilling",
    ("prefilling", "preempt"): "preempted",
    ("prefilling", "cancel"): "cancelled",
    ("prefilling", "fail"): "failed",
    ("decoding", "lose_cache"): "prefilling",
    ("decoding", "preempt"): "preempted",
    ("decoding", "finish"): "finished",
    ("decoding", "cancel"): "cancelled",
    ("decoding", "fail"): "failed",
    ("preempted", "requeue"): "waiting",
    ("preempted", "cancel"): "cancelled",
    ("preempted", "fail"): "failed",
}


class LetterDecoder:
    """Id 1 is "a", id 2 is "b" and so on."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(chr(ord("a") + token - 1) for token in ids if token)


class SpaceDecoder:
    """Like SentencePiece: every token is a word with a space in front, and the first space of a text is dropped."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return " ".join(chr(ord("a") + token - 1) for token in ids)


def _request(prompt: tuple[int, ...] = (7,), output: tuple[int, ...] = (), decoder: object = None, **params: object) -> Request:
    generate = GenerateRequest(
        request_id="r",
        prompt_ids=prompt,
        output_ids=output,
        params=SamplingParams(**{"max_tokens": 100, **params}),  # type: ignore[arg-type]
    )
    return Request(generate, decoder or LetterDecoder(), 0.0)  # type: ignore[arg-type]


def _logprobs(run: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token, -float(i)) for i, token in enumerate(run))


# --- states -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)), ids=lambda value: value.value)
def test_every_pair_of_state_and_event(state: State, event: Event) -> None:
    """Bug guarded: an event that arrives late (a verdict after a cancel, a second finish) revives or corrupts a request."""
    request = _request()
    request.state = state
    expected = ALLOWED.get((state.value, event.value))
    if expected is None:
        with pytest.raises(InvalidTransitionError, match=r"request r: no "):
            request.apply(event)
        assert request.state is state
    else:
        request.apply(event)
        assert request.state == expected


def test_the_dead_stay_dead() -> None:
    """Bug guarded: a table entry that leads out of an end state makes a request answer twice."""
    ends = set(State) - LIVE
    assert ends == {State.FINISHED, State.CANCELLED, State.FAILED}
    assert not any(state in ends for state, _ in TRANSITIONS)


# --- the walk ---------------------------------------------------------------------------------------------------------------

# name, parameters, run, tokens shown, reason, stop string
CUTS = [
    ("nothing fires", {}, (1, 2, 3), 3, None, None),
    ("EOS first", {}, (0, 2, 3), 1, "stop", None),
    ("EOS inside", {}, (1, 0, 3), 2, "stop", None),
    ("EOS last", {}, (1, 2, 0), 3, "stop", None),
    ("two EOS", {}, (1, 0, 0), 2, "stop", None),
    ("ignore_eos", {"ignore_eos": True}, (1, 0, 3), 3, None, None),
    ("stop id inside", {"stop_token_ids": (2,)}, (1, 2, 3), 2, "stop", None),
    ("stop id despite ignore_eos", {"stop_token_ids": (0,), "ignore_eos": True}, (1, 0, 3), 2, "stop", None),
    ("max_tokens inside", {"max_tokens": 2}, (1, 2, 3), 2, "length", None),
    ("max_tokens at the last", {"max_tokens": 3}, (1, 2, 3), 3, "length", None),
    ("max_tokens 1", {"max_tokens": 1}, (1, 2, 3), 1, "length", None),
    ("EOS at max_tokens", {"max_tokens": 2}, (1, 0, 3), 2, "stop", None),
    ("EOS beyond max_tokens", {"max_tokens": 1}, (1, 0, 3), 1, "length", None),
    ("ignore_eos still ends", {"max_tokens": 2, "ignore_eos": True}, (0, 0, 0), 2, "length", None),
    ("stop string inside", {"stop": ("bc",)}, (1, 2, 3, 4), 3, "stop", "bc"),
    ("stop string over several tokens, not yet", {"stop": ("bcd",)}, (1, 2, 3), 3, None, None),
    ("stop string at max_tokens", {"stop": ("c",), "max_tokens": 3}, (1, 2, 3, 4), 3, "stop", "c"),
    ("stop string beyond max_tokens", {"stop": ("d",), "max_tokens": 3}, (1, 2, 3, 4), 3, "length", None),
    ("first of two stop strings", {"stop": ("d", "b")}, (1, 2, 3, 4), 2, "stop", "b"),
    ("EOS before the stop string", {"stop": ("c",)}, (1, 0, 3), 2, "stop", None),
    ("stop string before EOS", {"stop": ("a",)}, (1, 0, 3), 1, "stop", "a"),
    ("stop string before min_tokens is text", {"stop": ("b",), "min_tokens": 3}, (1, 2, 3, 2), 4, "stop", "b"),
]


@pytest.mark.parametrize(("params", "run", "shown", "reason", "stop"), [c[1:] for c in CUTS], ids=[c[0] for c in CUTS])
@pytest.mark.parametrize("rounds", ["one run", "token by token"])
def test_a_run_is_cut_at_the_first_stop(
    params: dict[str, Any], run: tuple[int, ...], shown: int, reason: str | None, stop: str | None, rounds: str
) -> None:
    """Bug guarded: a stop inside an accepted run is seen only at its end, so tokens after it leak, or a stop that falls on the
    last budgeted token is reported as "length" (cases L17 to L24)."""
    request = _request(prompt=(7, 7), **params)
    if rounds == "one run":
        committed = request.commit(run, _logprobs(run), EOS)
        tokens, logprobs = committed.tokens, committed.logprobs or ()
    else:
        tokens, logprobs = (), ()
        for i, token in enumerate(run):
            committed = request.commit((token,), _logprobs(run)[i : i + 1], EOS)
            tokens, logprobs = tokens + committed.tokens, logprobs + (committed.logprobs or ())
            if committed.finish_reason is not None:
                break
    assert tokens == run[:shown]
    assert logprobs == _logprobs(run)[:shown]
    assert (committed.finish_reason, committed.stop_string) == (reason, stop)
    assert request.ids == [7, 7, *run[:shown]]
    assert request.num_output == shown


def test_without_logprobs_there_are_none() -> None:
    """Bug guarded: a request that asked for no logprobs gets an empty list, which the API would show as such."""
    assert _request(max_tokens=2).commit((1, 2, 3), None, EOS).logprobs is None


def test_a_resumed_request_counts_what_was_committed_elsewhere() -> None:
    """Bug guarded: after a router died, max_tokens starts again from zero and the answer gets longer."""
    request = _request(prompt=(7,), output=(1, 2), max_tokens=4)
    assert (request.prompt_length, request.num_output, request.num_pending) == (1, 2, 3)
    committed = request.commit((3, 4, 5), None, EOS)
    assert committed.tokens == (3, 4)
    assert committed.finish_reason is FinishReason.LENGTH


def test_a_stop_string_may_begin_in_another_router() -> None:
    """Bug guarded: the text committed before a router died is forgotten, so a stop string across the gap is missed."""
    request = _request(output=(1, 2), stop=("bc",))
    committed = request.commit((3, 4), None, EOS)
    assert committed.tokens == (3,)
    assert committed.stop_string == "bc"


def test_stop_strings_see_the_text_that_the_api_shows() -> None:
    """Bug guarded: the router decodes the answer without the end of the prompt and so without its leading space, while the API
    shows the space: a stop string that begins with it is never found."""
    request = _request(prompt=(9,), decoder=SpaceDecoder(), stop=(" a",))
    assert request.commit((1, 2), None, EOS).stop_string == " a"


def test_stop_strings_need_a_decoder() -> None:
    """Bug guarded: a router without a tokenizer accepts stop strings and ignores them."""
    generate = GenerateRequest(request_id="r", prompt_ids=(1,), params=SamplingParams(stop=("x",)))
    with pytest.raises(InvalidRequest) as refused:
        Request(generate, None, 0.0)
    assert refused.value.field == "stop"


# --- refusals ---------------------------------------------------------------------------------------------------------------

INFO = model_info(vocab_size=100, max_context=64, kv_capacity_tokens=128)


def _check(prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (), info: object = INFO, **params: object) -> None:
    check_request(
        GenerateRequest(request_id="r", prompt_ids=prompt, output_ids=output, params=SamplingParams(**params)),  # type: ignore[arg-type]
        info,  # type: ignore[arg-type]
    )


GOOD = [
    {"temperature": 0.0},
    {"temperature": 2.0},
    {"top_p": 1e-9},
    {"top_p": 1.0},
    {"top_k": 0},
    {"top_k": 1000},
    {"min_p": 0.0},
    {"min_p": 1.0},
    {"seed": 0},
    {"seed": (1 << 64) - 1},
    {"repetition_penalty": 0.5},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 2.0},
    {"logit_bias": {0: -100.0, 99: 100.0}},
    {"stop_token_ids": (0, 99)},
    {"logprobs": 0},
    {"logprobs": 20},
    {"prompt_logprobs": 0},
    {"prompt_logprobs": 20, "max_tokens": 0},
    {"max_depth": 0},
    {"max_tokens": 62},
    {"min_tokens": 16, "max_tokens": 16},
    {"rule": "rejection"},
    {"rule": "block"},
    {"stop_token_ids": tuple(range(64))},
]
BAD = [
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": math.nan}),
    ("temperature", {"temperature": math.inf}),
    ("temperature", {"temperature": 1e39}),
    ("top_p", {"top_p": 0.0}),
    ("top_p", {"top_p": 1.01}),
    ("top_p", {"top_p": math.nan}),
    ("min_p", {"min_p": -0.1}),
    ("min_p", {"min_p": 1.1}),
    ("top_k", {"top_k": -1}),
    ("seed", {"seed": -1}),
    ("seed", {"seed": 1 << 64}),
    ("seed", {"seed": 1 << 2000}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("repetition_penalty", {"repetition_penalty": 1e-50}),
    ("repetition_penalty", {"repetition_penalty": math.inf}),
    ("presence_penalty", {"presence_penalty": 2.1}),
    ("frequency_penalty", {"frequency_penalty": -2.1}),
    ("logit_bias", {"logit_bias": {100: 1.0}}),
    ("logit_bias", {"logit_bias": {-1: 1.0}}),
    ("logit_bias", {"logit_bias": {1: math.inf}}),
    ("logit_bias", {"logit_bias": {1: math.nan}}),
    ("logit_bias", {"logit_bias": {1: 1e300}}),
    ("logit_bias", {"logit_bias": dict.fromkeys(range(1025), 1.0)}),
    ("stop_token_ids", {"stop_token_ids": (1,) * 65}),
    ("stop_token_ids", {"stop_token_ids": (100,)}),
    ("stop", {"stop": ("",)}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": 63}),
    ("max_tokens", {"max_tokens": 1 << 2000}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"min_tokens": 17, "max_tokens": 16}),
    ("logprobs", {"logprobs": 21}),
    ("logprobs", {"logprobs": -1}),
    ("prompt_logprobs", {"prompt_logprobs": 21}),
    ("prompt_logprobs", {"prompt_logprobs": -1}),
    ("max_depth", {"max_depth": -1}),
    ("max_depth", {"max_depth": 1 << 64}),
    ("speculation", {"rule": "lossy"}),
    ("speculation", {"rule": "greedy"}),
    ("prompt", {"prompt": ()}),
    ("prompt", {"prompt": (100,)}),
    ("prompt", {"prompt": (-1,)}),
    ("prompt", {"output": (100,)}),
    ("prompt", {"prompt": (1,) * 64}),
]


@pytest.mark.parametrize("params", GOOD, ids=str)
def test_the_edges_of_every_range_are_accepted(params: dict[str, Any]) -> None:
    """Bug guarded: an off-by-one in a bound refuses a value that the API documents."""
    _check(**params)


@pytest.mark.parametrize(("field", "params"), BAD, ids=lambda value: str(value)[:60])
def test_what_no_model_should_see_is_refused_with_its_field(field: str, params: dict[str, Any]) -> None:
    """Bug guarded: NaN, infinities, numbers that overflow float32 and ids outside of the vocabulary reach the sampler, where
    they fail the whole batch or draw a token from nothing (cases L12, L15)."""
    with pytest.raises(InvalidRequest) as refused:
        _check(**params)
    assert refused.value.field == field
    assert str(refused.value)


def test_a_request_is_cut_to_what_the_cache_holds() -> None:
    """Bug guarded: only whole blocks can be used, so a request that needs the rest of a capacity that is no multiple of the
    block size is accepted, can never be admitted, and blocks the queue for ever; or every chat that fills a long context is
    refused by a server with a small cache."""
    info = model_info(max_context=512, kv_capacity_tokens=40, kv_block_size=16)
    request = GenerateRequest(request_id="r", prompt_ids=(1,) * 20, params=SamplingParams(max_tokens=12))
    assert fit_to_cache(request, info) is request
    longer = msgspec.structs.replace(request, params=SamplingParams(max_tokens=400))
    assert fit_to_cache(longer, info).params.max_tokens == 12
    with pytest.raises(InvalidRequest, match="KV cache") as refused:
        fit_to_cache(msgspec.structs.replace(request, prompt_ids=(1,) * 32), info)
    assert refused.value.field == "prompt"


def test_a_request_that_is_already_complete_is_refused() -> None:
    """Bug guarded: a request resumed with all its tokens gets one more than max_tokens."""
    _check(output=(1,) * 3, max_tokens=4)
    with pytest.raises(InvalidRequest) as refused:
        _check(output=(1,) * 4, max_tokens=4)
    assert refused.value.field == "max_tokens"
