"""The promise, on the real default pair through real Ray and HTTP: the draft changes the speed and nothing else."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import App, Texts
from helpers import drafted

PROMPTS, SAMPLED = Texts.PROMPTS, Texts.SAMPLED


@pytest.fixture(scope="module")
def app(pair: App) -> App:
    return pair


def test_greedy_text_is_the_same_at_every_depth(app: App) -> None:
    """Guards against a verify of K+1 rows that computes other logits than K+1 steps, and against lost rollbacks."""
    for prompt in PROMPTS:
        plain = app.complete(prompt, speculation={"max_depth": 0})
        assert drafted(plain) == 0
        for depth in (1, 2, 4, 8):
            result = app.complete(prompt, speculation={"max_depth": depth})
            assert result["choices"][0]["text"] == plain["choices"][0]["text"], f"K={depth}, prompt {prompt!r}"
            assert drafted(result) > 0, "no draft token was verified: nothing was tested"


def test_greedy_text_is_the_same_under_concurrency(app: App) -> None:
    """Guards against rows of one request that leak into, or are rounded by, the rest of the batch."""
    alone = {prompt: app.text(prompt, speculation={"max_depth": 0}) for prompt in PROMPTS}
    jobs = [(prompt, depth) for depth in (0, 1, 2, 4, 8) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(jobs)) as pool:
        texts = list(pool.map(lambda job: app.text(job[0], speculation={"max_depth": job[1]}), jobs))
    for (prompt, depth), text in zip(jobs, texts, strict=True):
        assert text == alone[prompt], f"K={depth}, prompt {prompt!r}"


def test_the_promise_is_reported_with_its_limits(app: App) -> None:
    """Guards against a server that does not say whether "the same text" is literal on its device."""
    (target,) = app.client.get("/health").json()["targets"].values()
    assert target["numerics"] in ("invariant", "fast")
    assert isinstance(target["row_invariant"], bool)
    assert "row-invariant" in target["row_invariance"]
    (line,) = (line for line in app.client.get("/metrics").text.splitlines() if line.startswith("outrider_row_invariant{"))
    assert float(line.split()[-1]) == target["row_invariant"]


def test_a_prompt_is_scored_as_it_would_be_written(app: App) -> None:
    """Guards against logprobs of an echoed prompt that belong to other positions, or change with what follows the prompt."""
    written = app.complete(PROMPTS[0], max_tokens=6, logprobs=2, ignore_eos=True)["choices"][0]
    scored = app.complete(PROMPTS[0] + written["text"], max_tokens=0, logprobs=2, echo=True)["choices"][0]
    assert scored["text"] == PROMPTS[0] + written["text"]
    assert scored["finish_reason"] == "length"
    assert scored["logprobs"]["token_logprobs"][0] is None
    assert scored["logprobs"]["tokens"][-6:] == written["logprobs"]["tokens"]
    exact = next(iter(app.client.get("/health").json()["targets"].values()))["row_invariant"]
    got, wanted = scored["logprobs"]["token_logprobs"][-6:], written["logprobs"]["token_logprobs"]
    assert got == (wanted if exact else pytest.approx(wanted, abs=0.3))


def test_streamed_text_equals_the_whole_text(app: App) -> None:
    """Guards against tokens lost between rounds and chunks."""
    whole = app.text(PROMPTS[1])
    streamed = ""
    with app.client.stream("POST", "/v1/completions", json=app.body(PROMPTS[1], stream=True)) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        streamed += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    assert streamed == whole


def test_a_python_handle_says_the_same(app: App) -> None:
    """Guards against a second path through the system that samples, counts or cuts otherwise."""
    from ray import serve

    handle = serve.get_app_handle("outrider")
    whole = handle.complete.remote(PROMPTS[0], temperature=0, max_tokens=20).result(timeout_s=60)
    pieces = list(handle.options(stream=True).generate.remote(PROMPTS[0], temperature=0, max_tokens=20))
    expected = app.complete(PROMPTS[0])
    assert whole["text"] == "".join(piece["text"] for piece in pieces) == expected["choices"][0]["text"]
    assert whole["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    assert whole["finish_reason"] == pieces[-1]["finish_reason"] == expected["choices"][0]["finish_reason"]


def test_draft_and_target_run_in_different_processes(app: App) -> None:
    """Guards against a 'draft actor' that is a second model in the target's process."""
    from ray import serve

    draft_pid = serve.get_deployment_handle("Draft", "outrider").process_id.remote().result(timeout_s=30)
    own = serve.get_deployment_handle("Router", "outrider").process_ids.remote().result(timeout_s=30)
    assert len({draft_pid, own["router"], own["target"]}) == 3
    assert app.controller()["lane_details"][0]["target_pid"] == own["target"]


def test_seeded_sampling_does_not_depend_on_draft_or_depth(app: App, texts: Texts) -> None:
    """Guards the coupled rule: target, prompt and seed alone decide, however deep whoever drafts, in whichever application."""
    plain = {prompt: app.text(prompt, **SAMPLED, speculation={"max_depth": 0}) for prompt in PROMPTS}
    assert app.text(PROMPTS[0], **{**SAMPLED, "seed": 99}) != plain[PROMPTS[0]], "the seed has no effect"
    for prompt in PROMPTS:
        texts.check(prompt, plain[prompt], is_sampled=True, by="no draft")
        for depth in (1, 4):
            text = app.text(prompt, **SAMPLED, speculation={"max_depth": depth})
            texts.check(prompt, text, is_sampled=True, by=f"self-int8, K={depth}")
