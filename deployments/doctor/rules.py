"""The rules for a running server: facts in, findings out. Each says what was seen and, where it is not well, what to do."""

from collections.abc import Callable, Iterator
from typing import Any

from autoscale.cost_model import StepCost
from deployments.doctor.findings import Finding, ok, problem, warning
from deployments.doctor.seen import Seen

ENOUGH_ROUNDS, ENOUGH_DRAFTED = 50, 100
"""From so many on a share says something."""
LOW_ACCEPTANCE = 0.5
DEAR_DRAFT = 0.7
"""Draft step over target step."""
MANY_TOKENS, STEEP = 16, 8.0
"""Verifying so many tokens should take less than so many times as long as one of them."""
LONG_HOP = 0.2
"""Hop over target step."""
SMALL_GAIN = 1.05
MANY_FALLBACKS = 0.1
"""Per request and round that drafted or fell back."""
LITTLE_MEMORY = 0.05

_CURES = {
    "late": "the draft answers after draft.timeout_s: give it a device of its own, or a smaller model",
    "no_draft": "no draft replica can be asked: look at drafts.min and at what Ray could not place (`ray status`)",
    "draft_failed": "a draft replica fails: read its log",
    "draft_backoff": "a draft replica failed and is left alone for a while: read its log",
    "draft_busy": "the draft has not answered the round before: add replicas (drafts.max), or a smaller draft",
    "catching_up": "the draft lags behind the prompt: long prompts and a slow draft; add replicas (drafts.max)",
    "need_context": "the draft forgot sequences: raise draft.kv_cache_tokens",
    "out_of_context": "the draft's context is shorter than the target's: choose another draft for long texts",
    "target_takes_no_drafts": "this architecture computes one token after another: set draft.source to none",
    "bad_logits": "the draft's logits are not finite: choose another dtype for it",
}


def readiness(seen: Seen) -> Iterator[Finding]:
    """Whether it serves."""
    if not seen.health["ready"]:
        advice = "look at `serve status` and at the replicas' logs; a large model loads for minutes"
        yield problem("ready", str(seen.health.get("reason")), advice)
        return
    yield ok("ready", f"lanes: {len(seen.lanes)}, drafts: {len(seen.drafts)}")
    for reason in seen.health.get("degraded") or []:
        yield warning("degraded", reason, "drafts are missing; requests go on without them: look at the draft replicas' logs")


def versions(seen: Seen) -> Iterator[Finding]:
    """Python and Ray exchange objects and must agree; another torch computes other bits."""
    local = {"python": seen.local.python, **seen.local.packages}
    for package in ("python", "ray", "torch", "transformers"):
        found = {name: _version(facts, package) for name, facts in seen.processes.items()}
        kinds = sorted({version for version in found.values() if version})
        if len(kinds) > 1:
            told = "; ".join(f"{name} {version}" for name, version in found.items())
            advice = "run one image everywhere: processes of one application exchange objects and must compute the same bits"
            yield (problem if package in ("python", "ray") else warning)("versions", f"{package}: {told}", advice)
        elif kinds and package in ("python", "ray") and local.get(package) and _minor(local[package]) != _minor(kinds[0]):
            advice = f"use {package} {kinds[0]} here, too, before you deploy or call handles from here; HTTP does not mind"
            yield warning("versions", f"{package} {kinds[0]} in the cluster, {local[package]} here", advice)
        elif kinds:
            yield ok("versions", f"{package} {kinds[0]}")


def devices(seen: Seen) -> Iterator[Finding]:
    """Where the models run and in what they compute."""
    for lane in seen.lanes:
        device, dtype = lane["target_device"], lane["target_dtype"]
        told = f"target of {lane['lane_id']} on {device} in {dtype}"
        if device.startswith("cuda") and dtype == "float32":
            yield warning("devices", told, "set target.dtype to auto: GPUs compute several times faster in bfloat16")
        else:
            yield ok("devices", told)
        place = _place(lane.get("processes", {}).get("target"), device)
        for draft in seen.drafts:
            if place is not None and _place(draft.get("process"), draft["device"]) == place:
                told = f"draft {draft['draft_id']} and target of {lane['lane_id']} share {device}"
                advice = "they slow each other down: another device for the draft (drafts.num_gpus), or draft.source ngram"
                yield warning("devices", told, advice)
    for draft in seen.drafts:
        yield ok("devices", f"draft {draft['draft_id']} on {draft['device']} in {draft['model']['dtype']}")


def row_invariance(seen: Seen) -> Iterator[Finding]:
    """Whether the text is the same bit for bit."""
    for lane_id, target in seen.health.get("targets", {}).items():
        if target["row_invariant"] is False:
            advice = (
                "set target.numerics: invariant and target.kernels: auto (float32 with torch's operations is not invariant)"
            )
            yield warning("row invariance", f"{lane_id}: {target['row_invariance']}", advice)
        else:
            yield ok("row invariance", f"{lane_id}: {target['row_invariance']}")


def vocabularies(seen: Seen) -> Iterator[Finding]:
    """An id must mean the same to both."""
    for draft in seen.drafts:
        strangers = [lane["lane_id"] for lane in seen.lanes if lane["target"]["fingerprint"] != draft["target_fingerprint"]]
        if strangers:
            told = f"draft {draft['draft_id']} was checked against another vocabulary than that of {', '.join(strangers)}"
            yield problem(
                "vocabularies", told, "an update is under way, or two releases are mixed: deploy the application again"
            )
        else:
            yield ok("vocabularies", f"draft {draft['draft_id']} and its targets agree")


def hops(seen: Seen) -> Iterator[Finding]:
    """Streams against the step they serve."""
    for lane in seen.lanes:
        cost = seen.cost(lane)
        for peer in ("target", "draft"):
            hop_s = seen.hop_s(lane, peer)
            if hop_s is None:
                continue
            told = f"{lane['lane_id']} to {peer} and back: {1e3 * hop_s:.2f} ms"
            if cost is not None and hop_s > LONG_HOP * cost.target.time(1):
                share = hop_s / cost.target.time(1)
                advice = (
                    "put them on one node or a faster network; on crowded cores give Ray more CPUs (num_cpus), fewer threads"
                )
                yield warning("hops", f"{told}, {share:.0%} of a target step", advice)
            else:
                yield ok("hops", told)


def step_times(seen: Seen) -> Iterator[Finding]:
    """What the cost model rests on."""
    for lane in seen.lanes:
        cost = seen.cost(lane)
        if cost is None:
            advice = "without them speculation stays off: leave the lane idle for half a minute, it measures then; see its log"
            yield problem("step times", f"{lane['lane_id']}: the target was not measured", advice)
            continue
        target_s = cost.target.time(1)
        yield from _steepness(lane["lane_id"], cost.target)
        told = f"{lane['lane_id']}: target {1e3 * target_s:.1f} ms for 1 token, {1e3 * cost.target.time(16):.1f} ms for 16"
        if cost.draft is None:
            yield ok("step times", f"{told}; drafts cost nothing or were not measured")
            continue
        draft_s = cost.draft_time(1)
        told += f"; draft {1e3 * draft_s:.1f} ms, c = {draft_s / target_s:.2f}"
        if draft_s > DEAR_DRAFT * target_s:
            advice = "this draft is too dear: a smaller model, draft.dtype int8, a device of its own, or draft.source ngram"
            yield warning("step times", told, advice)
        else:
            yield ok("step times", told)


def _steepness(lane_id: str, target: StepCost) -> Iterator[Finding]:
    slower = target.time(MANY_TOKENS) / target.time(1)
    if slower > STEEP:
        told = f"{lane_id}: a forward of {MANY_TOKENS} tokens takes {slower:.1f} times as long as one of 1"
        advice = (
            "measured while the machine was busy (idle lanes measure again), or this device computes too slowly to speculate"
        )
        yield warning("step times", told, advice)


def acceptance(seen: Seen) -> Iterator[Finding]:
    """What becomes of the drafts."""
    for lane in seen.lanes:
        drafted, accepted = seen.drafted(lane), seen.accepted(lane)
        if drafted < ENOUGH_DRAFTED:
            continue
        told = f"{lane['lane_id']}: {accepted:.0f} of {drafted:.0f} draft tokens accepted ({accepted / drafted:.0%})"
        if not accepted:
            advice = "drafts are never right: check that draft.model is of the target's family and its weights are whole"
            yield problem("acceptance", told, advice)
        elif accepted < LOW_ACCEPTANCE * drafted:
            advice = (
                "a draft closer to the target (self-int8, or one distilled from it) or one for this kind of text is worth more"
            )
            yield warning("acceptance", told, advice)
        else:
            yield ok("acceptance", told)


def depth(seen: Seen) -> Iterator[Finding]:
    """Whether drafts are used at all."""
    for lane in seen.lanes:
        if not seen.wants_drafts:
            yield ok("depth", f"{lane['lane_id']}: speculation is switched off by the configuration")
        elif seen.rounds(lane) < ENOUGH_ROUNDS:
            yield ok("depth", f"{lane['lane_id']}: {seen.rounds(lane):.0f} rounds played, too few to judge")
        elif not seen.drafted(lane):
            told = f"{lane['lane_id']}: no draft in {seen.rounds(lane):.0f} rounds; draft {lane['draft_state']}"
            yield warning("depth", f"{told}; {lane['why'].get('reason', '')}", _why_no_depth(seen, lane))
        else:
            yield ok("depth", f"{lane['lane_id']}: mean {lane['mean_depth']:.2f} now; {lane['why'].get('reason', '')}")


def _why_no_depth(seen: Seen, lane: dict[str, Any]) -> str:
    if not lane["draft_state"].startswith("ok"):
        return "no draft can be asked: look at the draft replicas and at what Ray could not place (`ray status`)"
    gain = seen.expected_gain(lane, 1)
    if gain is not None and gain[0] < SMALL_GAIN:
        return "no draft pays on this pair, not even for one request: see step times; else set draft.source to none"
    return "the load is above break-even, or requests ask for max_depth 0: more lanes (lanes.max) bring the batch down"


def gain(seen: Seen) -> Iterator[Finding]:
    """What speculation is worth, by the lanes' own cost model."""
    for lane in seen.lanes:
        batch = max(int(lane["running"]), 1)
        expected = seen.expected_gain(lane, 1) if seen.wants_drafts else None
        if expected is None:
            continue
        told = f"{lane['lane_id']}: {expected[0]:.2f} times the tokens at depth {expected[1]} for one request"
        if batch > 1 and (now := seen.expected_gain(lane, batch)) is not None:
            told += f", {now[0]:.2f} for the {batch} that run"
        if expected[0] < SMALL_GAIN:
            advice = "speculation does not pay here: a cheaper or better draft, another device for it, or draft.source none"
            yield warning("expected gain", told, advice)
        else:
            yield ok("expected gain", told)


def break_even(seen: Seen) -> Iterator[Finding]:
    """From which load on it stops paying."""
    limit, batch = seen.controller.get("break_even_batch"), seen.controller.get("actual_batch") or 0.0
    if not seen.wants_drafts or seen.controller.get("price") is None:
        return
    if limit is None:
        yield ok("break-even", "speculation pays at every batch size")
    elif batch >= limit > 1:
        told = f"{batch:.0f} requests per lane, speculation pays below {limit}"
        yield warning("break-even", told, "speculation rests at this load, as it should; more lanes (lanes.max) bring it back")
    elif limit > 1:
        yield ok("break-even", f"speculation pays below {limit} requests per lane; {batch:.1f} now")
    else:
        advice = "see step times, acceptance and expected gain: one of them says why"
        yield warning("break-even", "by what was measured, speculation pays at no batch size", advice)


def fallbacks(seen: Seen) -> Iterator[Finding]:
    """Requests that went without the draft they were to have."""
    counted = seen.scrape.by_label("fallbacks", "reason")
    drafts = (seen.scrape.total("drafted_by_position", position="0") or 0.0) + sum(counted.values())
    if drafts < ENOUGH_ROUNDS:
        return
    many = {reason: count for reason, count in counted.items() if count > MANY_FALLBACKS * drafts and reason != "first_token"}
    for reason, count in many.items():
        cure = _CURES.get(reason, "read the log of the lane and of the draft")
        yield warning("fallbacks", f"{count / drafts:.0%} of the drafts that were wanted: {reason}", cure)
    if not many:
        yield ok("fallbacks", "few drafts were wanted and not had")


def threads(seen: Seen) -> Iterator[Finding]:
    """OpenMP in the processes that compute, on cores that others use, too."""
    for name, facts in seen.processes.items():
        if facts["num_threads"] is None or name.split()[0] not in ("target", "draft"):
            continue
        if facts["num_threads"] > facts["num_cpus"]:
            told = f"{name}: {facts['num_threads']} threads on {facts['num_cpus']} cores"
            yield warning("threads", told, "set target.num_threads and draft.num_threads to the cores that each may use")
        elif facts["spin_count"] is None:
            told = f"{name}: GOMP_SPINCOUNT is not set"
            yield warning(
                "threads", told, "set it to 10000 before torch loads: waiting threads spin for milliseconds otherwise"
            )
        else:
            yield ok("threads", f"{name}: {facts['num_threads']} threads, GOMP_SPINCOUNT {facts['spin_count']}")


def memory(seen: Seen) -> Iterator[Finding]:
    """Of the machines, and of the KV cache."""
    for name, facts in seen.processes.items():
        total, available = facts["memory_bytes"], facts["memory_available_bytes"]
        if total and available is not None and available < LITTLE_MEMORY * total:
            told = f"{name} on {facts['host']}: {available / 1e9:.1f} of {total / 1e9:.1f} GB were left when it became ready"
            yield problem("memory", told, "lower target.kv_cache_tokens and draft.kv_cache_tokens, or give the pod more memory")
    preempted, requests = seen.scrape.total("preemptions") or 0.0, seen.scrape.total("requests") or 0.0
    if preempted > MANY_FALLBACKS * max(requests, 1.0):
        told = f"{preempted:.0f} times a request gave up its KV cache and was prefilled again ({requests:.0f} requests)"
        yield warning("memory", told, "raise target.kv_cache_tokens, lower lanes.max_batch, or add lanes (lanes.max)")
    else:
        yield ok("memory", f"{preempted:.0f} preemptions in {requests:.0f} requests")


def replicas(seen: Seen) -> Iterator[Finding]:
    """Whether Ray could place what was decided."""
    for kind, number in (("lanes", len(seen.lanes)), ("drafts", len(seen.controller.get("drafts", [])))):
        wanted = seen.controller.get(f"wanted_{kind}")
        if wanted is not None and number < wanted:
            advice = "they are loading, or Ray has no place for them: `ray status` names what is asked for and not there"
            yield warning("replicas", f"{number} {kind}, {wanted} are wanted", advice)


def ingress(seen: Seen) -> Iterator[Finding]:
    """The way of every token to the client."""
    facts = seen.processes.get("api")
    if facts is None:
        return
    if facts["haproxy"]:
        yield ok("ingress", "HAProxy")
    else:
        advice = "set RAY_SERVE_ENABLE_HA_PROXY=1 before the cluster starts; `outrider serve` does by itself"
        yield warning("ingress", "Ray Serve's Python proxy: every token passes one more process", advice)


RULES: tuple[Callable[[Seen], Iterator[Finding]], ...] = (
    readiness,
    versions,
    devices,
    row_invariance,
    vocabularies,
    hops,
    step_times,
    acceptance,
    depth,
    gain,
    break_even,
    fallbacks,
    threads,
    memory,
    replicas,
    ingress,
)


def examine(seen: Seen) -> list[Finding]:
    """All rules, in the order in which a person would look."""
    return [finding for rule in RULES for finding in rule(seen)]


def _version(facts: dict[str, Any], package: str) -> str | None:
    version: str | None = facts["python"] if package == "python" else facts["packages"].get(package)
    return version


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _place(facts: dict[str, Any] | None, device: str) -> tuple[str, ...] | None:
    """What device this really is: Ray gives each process GPUs of its own, which each then counts from 0."""
    return None if facts is None else (facts["host"], device, (facts["visible_gpus"] or "") if device != "cpu" else "")
