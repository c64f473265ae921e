import itertools
import subprocess
import sys

import jinja2
import msgspec
import pytest

from deployments.openai import ServedModel, choice_seed, validate_chat, validate_completion
from deployments.schema import ApiError, TokenText, as_api_error
from engine.config import ApiConfig, parse_config
from engine.errors import InvalidRequest, ModelError, Overloaded
from engine.request import check_request
from engine.testing import model_info
from engine.types import SAMPLING_RULES, GenerateRequest

LIMITS = ApiConfig()


class ByteTokenizer:
    """One token per byte; 256 is BOS, 257 EOS. The template writes roles and refuses two turns of the same role."""

    def __init__(self, bos: bool = False, template: str | None = "yes"):
        self.bos = bos
        self.chat_template = template

    def encode(self, text, add_special_tokens):
        return [256] * (self.bos and add_special_tokens) + list(text.encode())

    def decode(self, ids, skip_special_tokens):
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def convert_ids_to_tokens(self, ids):
        return f"<0x{ids:02X}>"

    def __call__(self, text, *, add_special_tokens, return_offsets_mapping):
        spans = [(i, i + 1) for i, character in enumerate(text) for _ in character.encode()]
        return {"offset_mapping": [(0, 0)] * (self.bos and add_special_tokens) + spans}

    def apply_chat_template(self, conversation, *, add_generation_prompt, tokenize):
        roles = [turn["role"] for turn in conversation]
        if any(a == b for a, b in itertools.pairwise(roles)):
            raise jinja2.TemplateError("roles must alternate")
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in conversation) + "<assistant>"


def served(**changes):
    fields = {
        "name": "m",
        "tokenizer": ByteTokenizer(),
        "vocab_size": 300,
        "max_context": 64,
        "eos_token_ids": frozenset({257}),
    }
    return ServedModel(**{**fields, **changes})


def chat(limits=LIMITS, on=None, **fields):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return validate_chat(body, limits, on or served())


def complete(limits=LIMITS, on=None, **fields):
    return validate_completion({"model": "m", "prompt": "hi", **fields}, limits, on or served())


def refused(call, **fields):
    with pytest.raises((InvalidRequest, ApiError)) as caught:
        call(**fields)
    return as_api_error(caught.value)


NOT_INTEGERS = ["5", True, 1.5, float("nan"), [1], {}]
BAD = {
    "temperature": [-0.1, 2.1, float("nan"), float("inf"), 10**400, "1", True],
    "top_p": [0, -1, 1.01, float("nan"), "1"],
    "min_p": [-0.1, 1.1, float("nan")],
    "top_k": [-2, *NOT_INTEGERS],
    "presence_penalty": [-2.1, 2.1, float("-inf"), float("nan")],
    "frequency_penalty": [-2.1, 2.1, float("nan")],
    "repetition_penalty": [0, -1, 1e-3, 101, float("inf"), float("nan")],
    "n": [0, -1, 10**6, *NOT_INTEGERS],
    "max_tokens": [-1, 0, 10**12, *NOT_INTEGERS],
    "min_tokens": [-1, 10**12, *NOT_INTEGERS],
    "seed": [1 << 64, -(1 << 63) - 1, *NOT_INTEGERS],
    "stop": ["", [""], ["a", ""], [1], 5, {}, ["x"] * 10_000, "a" * 1001],
    "stop_token_ids": [[300], [-1], [99999999], ["1"], 5, list(range(65)), [1] * 65],
    "logit_bias": [
        *[{"300": 1}, {"99999999": 5}, {"-1": 5}, {"x": 1}, {"": 1}, {"1.0": 1}, {"1": 101}, {"1": "2"}, []],
        *[{"1": float("nan")}, {"1": float("inf")}, {"7": 1, "07": 2}, {str(token): 1 for token in range(1025)}],
    ],
    "stream": ["true", 1],
    "stream_options": [{"include_usage": True}, {"unknown": 1}, 5],
    "ignore_eos": [1, "no"],
    "speculation": [{"max_depth": -1}, {"max_depth": 1.5}, {"max_depth": 10**30}, {"rule": "lossy"}, {"depth": 3}, 4],
    "model": [None, 5, ""],
}


@pytest.mark.parametrize("call", [chat, complete])
@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_a_bad_value_is_refused_by_name(call, field, value):
    """Guards: a value out of range or of another type reaches an actor, or is refused without saying which field it is."""
    error = refused(call, **{field: value})
    assert (error.status, error.param) == (404 if value == "" and field == "model" else 400, field)
    assert field in str(error) or field == "model"


NOT_SUPPORTED = {
    "tools": [{"type": "function"}],
    "tool_choice": "auto",
    "functions": [{}],
    "response_format": {"type": "json_object"},
    "audio": {},
    "modalities": ["text", "audio"],
    "suffix": "x",
    "best_of": 2,
    "logits_processors": ["x"],
    "guided_json": {},
    "prediction": {},
    "parallel_tool_calls": True,
    "reasoning_effort": "low",
}


@pytest.mark.parametrize("field", NOT_SUPPORTED)
def test_what_is_not_supported_is_refused(field):
    """Guards: an option that is accepted and ignored."""
    error = refused(chat, **{field: NOT_SUPPORTED[field]})
    assert (error.status, error.param) == (400, field)
    assert "not supported" in str(error)


def test_an_unknown_field_is_refused_and_the_nearest_named():
    """Guards: a misspelt option silently dropped."""
    error = refused(complete, max_token=5)
    assert error.param == "max_token"
    assert "'max_tokens'" in str(error)
    assert refused(chat, echo=True).param == "echo"
    assert refused(complete, messages=[]).param == "messages"


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "k"},
        {"tools": None, "functions": [], "response_format": {"type": "text"}, "best_of": 1, "modalities": ["text"]},
        {"tools": [{"type": "function"}], "tool_choice": "none"},
        {"temperature": None, "n": None, "stop": None, "max_tokens": None, "logit_bias": None, "speculation": None},
        {"safety_identifier": "s", "stream": False, "stream_options": None, "suffix": None},
    ],
)
@pytest.mark.parametrize("call", [chat, complete])
def test_what_asks_for_nothing_is_accepted(call, fields):
    """Guards: clients that send every field, with null or its neutral value, are refused; "none" must always work."""
    assert len(call(**fields).requests) == 1


def test_sampling_fields_arrive():
    """Guards: a field that is checked but never handed to the engine."""
    params = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.2,
        "min_tokens": 2,
        "max_tokens": 9,
        "ignore_eos": True,
        "seed": 5,
    }
    extra = {"stop": "x", "stop_token_ids": [3, 3], "logit_bias": {"7": -100}, "speculation": {"max_depth": 0}}
    for call in (chat, complete):
        got = call(**params, **extra).requests[0].params
        assert {name: getattr(got, name) for name in params} == params
        assert (got.stop, got.stop_token_ids, got.logit_bias) == (("x",), (3,), {7: -100.0})
        assert (got.max_depth, got.rule, got.logprobs) == (0, "coupled", None)


def test_the_rule_is_the_requests_then_the_servers():
    """Guards: speculation.rule of the configuration ignored."""
    model = served(rule="rejection")
    assert chat(on=model).requests[0].params.rule == "rejection"
    assert chat(on=model, speculation={"rule": "coupled"}).requests[0].params.rule == "coupled"


def test_an_unknown_rule_is_answered_with_the_known_ones():
    """Guards: a misspelt rule refused without saying which there are, or a rule of the engine that no request can choose."""
    for call in (chat, complete):
        message = str(refused(call, speculation={"rule": "greedy"}))
        assert all(f"'{rule}'" in message for rule in SAMPLING_RULES)
        assert "speculation.rule" in message
        assert [call(speculation={"rule": r}).requests[0].params.rule for r in SAMPLING_RULES] == list(SAMPLING_RULES)
    assert [parse_config({"speculation": {"rule": r}}).speculation.rule for r in SAMPLING_RULES] == list(SAMPLING_RULES)


def test_the_longest_lists_are_accepted():
    """Guards: an off-by-one in the limits of logit_bias and stop_token_ids."""
    model = served(vocab_size=2000)
    params = chat(
        on=model, stop_token_ids=list(range(64)), logit_bias={str(token): 1 for token in range(1024)}, repetition_penalty=0.01
    )
    assert (len(params.requests[0].params.stop_token_ids), len(params.requests[0].params.logit_bias)) == (64, 1024)


def test_what_the_api_accepts_the_lane_accepts():
    """Guards: a value that passes here and is refused by the lane only, after actors were called (or breaks the wire, as an
    integer of more than 64 bits does)."""
    info = model_info(vocab_size=300, max_context=64)
    ends = {"temperature": 2, "top_p": 1e-9, "min_p": 1, "top_k": 10**12, "repetition_penalty": 0.01, "seed": (1 << 64) - 1}
    starts = {"temperature": 0, "top_p": 1, "min_p": 0, "top_k": -1, "repetition_penalty": 100, "seed": -(1 << 63)}
    deep = {"speculation": {"max_depth": (1 << 31) - 1}}
    for fields in (ends, starts, deep, {"echo": True, "logprobs": 20, "max_tokens": 0}):
        request = complete(**fields).requests[0]
        check_request(request, info)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=GenerateRequest) == request


def test_top_k_off_and_beyond_the_vocabulary():
    """Guards: vLLM's -1 refused; a top_k above the vocabulary crashing a kernel."""
    assert [chat(top_k=k).requests[0].params.top_k for k in (-1, 0, 10**12)] == [0, 0, 300]


@pytest.mark.parametrize("stop", [None, [], ["a", "a"]])
def test_stop_forms(stop):
    """Guards: stop [] refused or different from null; the same string counted twice."""
    assert chat(stop=stop).requests[0].params.stop == (("a",) if stop else ())
    assert len(chat(stop=[str(i) for i in range(16)]).requests[0].params.stop) == 16
    assert refused(chat, stop=[str(i) for i in range(17)]).param == "stop"


def test_seeds_of_choices():
    """Guards: choices that repeat each other, and a seed that does not repeat a run."""
    seeds = [request.params.seed for request in complete(n=3, prompt=["a", "b"], seed=-1).requests]
    assert seeds[0] == seeds[3] == (1 << 64) - 1
    assert seeds[:3] == seeds[3:]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    assert choice_seed(7, 1) not in {choice_seed(7 + 0x9E3779B97F4A7C15, 0), choice_seed(8, 0)}


def test_drawn_seeds_differ_and_fit_a_double():
    """Guards: unseeded requests that share one stream; equal prompts of one request that give equal answers."""
    seeds = [request.params.seed for _ in range(10) for request in complete(prompt=["a", "a"]).requests]
    assert len(set(seeds)) == 20
    assert all(seed < 1 << 53 for seed in seeds)


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[97, 98]]),
        (["a", "b"], [[97], [98]]),
        ([0], [[0]]),
        ([0, 0], [[0, 0]]),
        ([[0]], [[0]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompt_forms(prompt, ids):
    """Guards: [0] judged empty, a list of prompts joined, order lost."""
    job = complete(prompt=prompt)
    assert [list(request.prompt_ids) for request in job.requests] == ids
    assert job.num_prompt_tokens == sum(map(len, ids))
    assert len({request.request_id for request in job.requests}) == len(ids)


@pytest.mark.parametrize(
    "prompt", ["", [""], [], [[]], ["a", ""], [[1], []], None, 5, ["a", 1], [True], [[1.0]], [300], [[-1]]]
)
def test_bad_prompts(prompt):
    """Guards: a prompt without tokens, with ids beyond the vocabulary or of mixed kinds reaches an actor."""
    error = refused(complete, prompt=prompt)
    assert (error.status, error.param) == (400, "prompt")


def test_the_tokenizer_decides_on_bos():
    """Guards: BOS missing from completions, or doubled after a template that wrote it."""
    model = served(tokenizer=ByteTokenizer(bos=True))
    assert complete(on=model, prompt="").requests[0].prompt_ids == (256,)
    assert 256 not in chat(on=model).requests[0].prompt_ids


def test_choices_are_limited_before_tokenising():
    """Guards: n or a list of prompts that allocates by request value."""
    assert len(complete(n=8, prompt=["a", "b"]).requests) == 16
    assert refused(complete, n=9, prompt=["a", "b"]).param == "n"
    assert refused(complete, prompt=["a"] * 17).param == "prompt"
    assert refused(chat, n=17).param == "n"


def test_context_limit():
    """Guards: an off-by-one at the exact fit; an error that does not say limit, prompt and request."""
    assert complete(prompt="x" * 8, max_tokens=56).requests[0].params.max_tokens == 56
    error = refused(complete, prompt="x" * 8, max_tokens=57)
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "max_tokens")
    assert all(number in str(error) for number in ("64", "8", "57", "65"))
    for length in (64, 300):
        error = refused(complete, prompt="x" * length, max_tokens=1)
        assert (error.param, error.code) == ("prompt", "context_length_exceeded")
        assert str(length) in str(error)
        assert refused(complete, prompt="x" * length).param == "prompt"
    assert refused(chat, messages=[{"role": "user", "content": "x" * 64}]).param == "messages"


def test_default_max_tokens():
    """Guards: a chat cut at 16 tokens, or endless; a default that pushes a fitting prompt over the limit."""
    prompt = len("<user>hi<assistant>")
    assert chat().requests[0].params.max_tokens == 64 - prompt
    assert complete().requests[0].params.max_tokens == 16
    assert complete(prompt="x" * 60).requests[0].params.max_tokens == 4
    limits = ApiConfig(default_max_tokens=30)
    assert chat(limits).requests[0].params.max_tokens == complete(limits).requests[0].params.max_tokens == 30


def test_both_names_of_max_tokens():
    """Guards: the newer name ignored; a silent choice between two values."""
    assert chat(max_completion_tokens=5).requests[0].params.max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).requests[0].params.max_tokens == 5
    assert refused(chat, max_completion_tokens=5, max_tokens=6).param == "max_completion_tokens"
    assert refused(chat, max_completion_tokens=0).param == "max_completion_tokens"
    assert refused(complete, max_completion_tokens=5).param == "max_completion_tokens"


def test_min_tokens_above_max_tokens():
    """Guards: a request that can never end by its own rules."""
    assert refused(complete, min_tokens=5, max_tokens=4).param == "min_tokens"
    assert refused(complete, min_tokens=17).param == "min_tokens"


def test_logprobs_of_each_endpoint():
    """Guards: logprobs true alone fails; limits of the endpoints mixed up."""
    assert chat(logprobs=True).requests[0].params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).requests[0].params.logprobs == 20
    assert chat(logprobs=False).requests[0].params.logprobs is None
    assert complete(logprobs=0).requests[0].params.logprobs == 0
    for fields in ({"top_logprobs": 5}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": True, "top_logprobs": -1}):
        assert refused(chat, **fields).param == "top_logprobs"
    for value in (21, -1, True, 10**6):
        assert refused(complete, logprobs=value).param == "logprobs"
    assert refused(chat, logprobs=5).param == "logprobs"


def test_echo():
    """Guards: max_tokens 0 without echo; a prompt that is scored although nobody will see it, or echoed without its scores."""
    job = complete(echo=True, max_tokens=0, prompt=["ab", "c"], n=2)
    assert (job.echo, job.echo_offsets) == (("ab", "ab", "c", "c"), ((), (), (), ()))
    assert complete(echo=True, prompt=[104, 105]).echo == ("hi",)
    assert complete().echo == ("",)
    assert [complete(**f).requests[0].params.prompt_logprobs for f in ({}, {"logprobs": 2}, {"echo": True})] == [None] * 3
    for logprobs in (0, 20):
        assert complete(echo=True, logprobs=logprobs).requests[0].params.prompt_logprobs == logprobs
    assert refused(complete, max_tokens=0, logprobs=0).param == "max_tokens"
    assert complete(echo=True, logprobs=0, max_tokens=0, prompt="x" * 64).requests[0].params.max_tokens == 0


class SpacingTokenizer(ByteTokenizer):
    """One token per word; says, as some tokenizers do, that a word begins after the space before it."""

    def __call__(self, text, *, add_special_tokens, return_offsets_mapping):
        return {"offset_mapping": [(0, 0), (0, 2), (3, 5), (5, 6), (0, 0)]}


def test_where_the_tokens_of_an_echo_begin():
    """Guards: offsets in bytes instead of characters, BOS taken for a character, a space between tokens that is in neither."""
    assert complete(echo=True, logprobs=0, prompt="aéb").echo_offsets == ((0, 1, 1, 2),)
    assert complete(echo=True, logprobs=0, prompt=[97, *"é".encode(), 256, 98]).echo_offsets == ((0, 1, 1, 2, 2),)
    assert complete(echo=True, logprobs=0, prompt="aé", on=served(tokenizer=ByteTokenizer(bos=True))).echo_offsets == (
        (0, 0, 1, 1),
    )
    assert complete(echo=True, logprobs=0, prompt="ab cde", on=served(tokenizer=SpacingTokenizer())).echo_offsets == (
        (0, 0, 2, 5, 5),
    )


class ForgetfulTokenizer(ByteTokenizer):
    """Has no offsets, as tokenizers written in Python."""

    def __call__(self, text, *, add_special_tokens, return_offsets_mapping):
        raise NotImplementedError


def test_an_echo_whose_offsets_are_unknown_is_refused():
    """Guards: a server error for an option that this tokenizer cannot serve, or made-up offsets."""
    model = served(tokenizer=ForgetfulTokenizer())
    assert refused(complete, on=model, echo=True, logprobs=0).param == "echo"
    assert complete(on=model, echo=True, logprobs=0, prompt=[97, 98]).echo_offsets == ((0, 1),)
    assert complete(on=model, echo=True).echo == ("hi",)


def test_content_forms():
    """Guards: text parts dropped or refused for some roles; an assistant's null content refused."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": parts},
        {"role": "user", "content": parts, "name": "x"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": ""},
    ]
    ids = chat(messages=messages, max_tokens=1, on=served(max_context=200)).requests[0].prompt_ids
    assert bytes(ids).decode() == "<system>ab<user>ab<assistant><user><assistant>"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content"),
        ({"role": "user", "content": ["a"]}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "system"}, "messages[1].content"),
        ({"role": "tool", "content": "x"}, "messages[1].role"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[1].tool_calls"),
        ({"role": "user", "content": "x", "contents": "y"}, "messages[1].contents"),
        ("x", "messages[1]"),
    ],
)
def test_bad_messages(message, param):
    """Guards: a part or field of a message that is dropped silently."""
    error = refused(chat, messages=[{"role": "user", "content": "a"}, message])
    assert (error.status, error.param) == (400, param)


def test_templates():
    """Guards: a template's refusal answered as a server error; a model without a template given a wrong one."""
    error = refused(chat, messages=[{"role": "user", "content": "a"}] * 2)
    assert (error.status, error.param) == (400, "messages")
    assert "roles must alternate" in str(error)
    error = refused(chat, on=served(tokenizer=ByteTokenizer(template=None)))
    assert (error.status, error.param) == (400, "messages")
    assert "/v1/completions" in str(error)
    assert refused(chat, messages=[]).param == "messages"


def test_unknown_model():
    """Guards: any name accepted."""
    error = refused(chat, model="x")
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequest("m", "f"), 400, None),
        (Overloaded("m", 2.6), 429, "overloaded"),
        (TimeoutError("/secret/path"), 408, "request_timeout"),
        (ModelError("m"), 503, "service_unavailable"),
        (ConnectionResetError("/secret/path"), 503, "service_unavailable"),
        (RuntimeError("/secret/path"), 500, "internal_error"),
    ],
)
def test_every_failure_has_an_answer_without_insides(error, status, code):
    """Guards: a traceback or path in an error body; a retryable failure that looks final."""
    answer = as_api_error(error)
    assert (answer.status, answer.code) == (status, code)
    assert set(answer.body["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in str(answer.body)
    assert answer.headers == ({"Retry-After": "3"} if status == 429 else {})


def test_tokens_as_text():
    """Guards: minus infinity, which JSON cannot hold; a partial character without its bytes."""
    assert (TokenText(b" a", -1.0).text, TokenText(b" \xf0\x9f", -1.0).text) == (" a", "bytes: \\xf0\\x9f")
    assert TokenText(b"a", float("-inf")).shown_logprob == -9999.0


def test_the_api_imports_neither_torch_nor_ray():
    """Guards: an API process that takes seconds to start and gigabytes to hold."""
    code = "import deployments.api, sys; sys.exit(any(name in sys.modules for name in ('torch', 'ray', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
