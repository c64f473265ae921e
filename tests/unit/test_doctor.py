"""Every rule of `outrider doctor`, on made-up facts."""

import json
from typing import Any

import pytest
from routes import DRAFT, LANE, draft, facts, lane, routes, seen_of

from deployments.doctor.command import report
from deployments.doctor.findings import ok, problem, warning, worst
from deployments.doctor.rules import RULES, examine

UNMEASURED = {"target_step_times": [], "draft_step_times": []}
DEAR = {"draft_step_times": [[1, 0.028], [64, 0.03]]}
OLD_TORCH = facts(packages={**facts()["packages"], "torch": "2.12.0"}, visible_gpus="1")
FEW_ROUNDS = {f'rounds_total{{lane="{LANE}"}}': 3.0, f'drafted_tokens_total{{lane="{LANE}"}}': 0.0}
NO_DRAFTS = {f'drafted_tokens_total{{lane="{LANE}"}}': 0.0, f'accepted_tokens_total{{lane="{LANE}"}}': 0.0}

BAD: dict[str, tuple[dict[str, Any], str, str, str]] = {
    # name: what the server says, level, check, words of the advice or of what was seen
    "not ready": ({"health": {"ready": False, "reason": "no lane is ready yet"}}, "problem", "ready", "no lane is ready yet"),
    "degraded": ({"health": {"degraded": ["lane a: no draft"]}}, "warning", "degraded", "lane a: no draft"),
    "python": ({"api_process": facts(python="3.12.1")}, "problem", "versions", "3.12.1"),
    "torch": ({"draft_details": [draft(process=OLD_TORCH)]}, "warning", "versions", "2.12.0"),
    "float32": ({"lane_details": [lane(target_dtype="float32")]}, "warning", "devices", "target.dtype"),
    "one GPU": ({"draft_details": [draft(process=facts(visible_gpus="0"))]}, "warning", "devices", "share cuda:0"),
    "one CPU": (
        {"lane_details": [lane(target_device="cpu")], "draft_details": [draft(device="cpu")]},
        "warning",
        "devices",
        "share cpu",
    ),
    "rows": (
        {"health": {"targets": {LANE: {"row_invariant": False, "row_invariance": "differ by 0.1"}}}},
        "warning",
        "row invariance",
        "target.numerics",
    ),
    "vocabulary": ({"draft_details": [draft(target_fingerprint="v0")]}, "problem", "vocabularies", LANE),
    "hop": (
        {"metrics": {f'hop_seconds_total{{lane="{LANE}",peer="draft"}}': 2.0}},
        "warning",
        "hops",
        "draft and back: 20.00 ms, 67% of a target step",
    ),
    "unmeasured": ({"lane_details": [lane(**UNMEASURED)]}, "problem", "step times", "not measured"),
    "dear draft": ({"lane_details": [lane(**DEAR)]}, "warning", "step times", "c = 0.93"),
    "never right": (
        {"metrics": {f'accepted_tokens_total{{lane="{LANE}"}}': 0.0}},
        "problem",
        "acceptance",
        "0 of 2000",
    ),
    "seldom right": (
        {"metrics": {f'accepted_tokens_total{{lane="{LANE}"}}': 400.0}},
        "warning",
        "acceptance",
        "(20%)",
    ),
    "depth 0, no draft": (
        {"metrics": NO_DRAFTS, "lane_details": [lane(draft_state="no draft is running")]},
        "warning",
        "depth",
        "ray status",
    ),
    "depth 0, dear": (
        {"metrics": NO_DRAFTS, "lane_details": [lane(**DEAR, acceptance=0.3)]},
        "warning",
        "depth",
        "not even for one",
    ),
    "depth 0, load": ({"metrics": NO_DRAFTS}, "warning", "depth", "lanes.max"),
    "no gain": ({"lane_details": [lane(**DEAR, acceptance=0.3)]}, "warning", "expected gain", "1.00 times"),
    "steep": (
        {"lane_details": [lane(target_step_times=[[1, 0.03], [16, 0.4]])]},
        "warning",
        "step times",
        "13.3 times as long",
    ),
    "never pays": ({"break_even_batch": 1}, "warning", "break-even", "at no batch size"),
    "above break-even": ({"actual_batch": 80.0}, "warning", "break-even", "pays below 64"),
    "fallbacks": (
        {"metrics": {f'fallbacks_total{{lane="{LANE}",reason="late"}}': 300.0}},
        "warning",
        "fallbacks",
        "draft.timeout_s",
    ),
    "too many threads": (
        {"lane_details": [lane(processes={"target": facts(num_threads=64)})]},
        "warning",
        "threads",
        "64 threads on 8 cores",
    ),
    "spinning": (
        {"lane_details": [lane(processes={"target": facts(spin_count=None)})]},
        "warning",
        "threads",
        "GOMP_SPINCOUNT",
    ),
    "memory": ({"process": facts(memory_available_bytes=1_000_000_000)}, "problem", "memory", "1.0 of 64.0 GB"),
    "preemptions": (
        {"metrics": {f'preemptions_total{{lane="{LANE}"}}': 9.0}},
        "warning",
        "memory",
        "target.kv_cache_tokens",
    ),
    "no place": ({"wanted_drafts": 3}, "warning", "replicas", "1 drafts, 3 are wanted"),
    "proxy": ({"api_process": facts(haproxy=False)}, "warning", "ingress", "RAY_SERVE_ENABLE_HA_PROXY"),
}


def test_a_healthy_server_has_no_findings() -> None:
    """Bug guarded: a rule that cries wolf: nobody reads a report that always names something."""
    findings = examine(seen_of(routes()))
    assert {finding.level for finding in findings} == {"ok"}, [f for f in findings if f.level != "ok"]
    checks = {finding.check for finding in findings}
    expected = {"ready", "versions", "devices", "row invariance", "vocabularies", "hops", "step times", "acceptance", "depth"}
    assert expected | {"expected gain", "break-even", "fallbacks", "threads", "memory", "ingress"} == checks


@pytest.mark.parametrize("name", BAD)
def test_each_fault_is_found_and_named(name: str) -> None:
    """Bug guarded: a fault that a rule does not see, names wrongly, or says nothing to do about."""
    said, level, check, words = BAD[name]
    bad = [finding for finding in examine(seen_of(routes(**said))) if finding.level != "ok"]
    found = [finding for finding in bad if finding.check == check]
    assert [finding.level for finding in found] == [level], bad
    assert words in f"{found[0].seen} → {found[0].advice}"
    assert found[0].advice


def test_every_rule_can_complain() -> None:
    """Bug guarded: a rule without a test above, which may never have found anything."""
    assert len({BAD[name][2] for name in BAD} - {"degraded"}) == len(RULES)


def test_a_young_server_is_not_judged() -> None:
    """Bug guarded: advice from three rounds."""
    findings = examine(seen_of(routes(metrics=FEW_ROUNDS)))
    assert worst(findings) == "ok"
    assert any("too few to judge" in finding.seen for finding in findings)


def test_without_speculation_nothing_is_said_of_drafts() -> None:
    """Bug guarded: a server that is configured without drafts being told that it has none."""
    configured = {"source": "none", "max_depth": 8, "depth": "auto"}
    alone = lane(draft="none", draft_state="off", draft_step_times=[])
    said = routes(configured=configured, lane_details=[alone], draft_details=[], drafts=[], wanted_drafts=0, metrics=NO_DRAFTS)
    assert worst(examine(seen_of(said))) == "ok"


def test_a_server_of_an_older_release_is_examined_as_far_as_it_tells() -> None:
    """Bug guarded: a traceback from a route that does not tell what a later release does."""
    old = lane()
    del old["processes"], old["target_step_times"], old["draft_step_times"]
    said = routes(lane_details=[old], draft_details=[draft(process=None)], metrics={})
    for name in ("process", "api_process", "configured", "wanted_lanes"):
        del said.controller[name]
    assert {f.check for f in examine(seen_of(said)) if f.level != "ok"} == {"step times"}


@pytest.mark.parametrize(
    ("findings", "code"),
    [
        ([ok("a", "x")], 0),
        ([ok("a", "x"), warning("b", "y", "do")], 0),
        ([warning("b", "y", "do"), problem("c", "z", "mend")], 1),
    ],
)
def test_the_exit_code_is_that_of_the_worst(findings: list[Any], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug guarded: a script that goes on although something is broken, or stops for advice; JSON that is not alone."""
    assert report(findings, "s", as_json=True) == code
    printed = json.loads(capsys.readouterr().out)
    assert printed["verdict"] == findings[-1].level
    assert len(printed["findings"]) == len(findings)
    assert report(findings, "s", as_json=False) == code
    assert findings[-1].seen in capsys.readouterr().out


def test_names_of_the_drafts_are_told() -> None:
    """Bug guarded: a finding about one of many replicas that does not say which."""
    two = [draft(), draft(draft_id=f"{DRAFT}2", target_fingerprint="v0")]
    found = [f for f in examine(seen_of(routes(draft_details=two))) if f.level == "problem"]
    assert f"{DRAFT}2" in found[0].seen
