"""Which source drafts for a request: expected tokens against what they cost, learned from every committed token."""

import random
from itertools import accumulate
from operator import mul

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscale.choice import Chosen, TextChooser
from autoscale.cost_model import RoundCost
from autoscale.hybrid import Hybrid, Terms, best_hybrid, longest_hybrid, model_gain
from autoscale.lane_policy import LanePolicy
from autoscale.text_acceptance import PRIOR_ALPHAS, TextAcceptance, confidence_class
from engine.propose.from_text import TextDraft
from engine.types import DepthRequest, SourceStep, StepReport, TextChoice, TextOffer

TARGET = tuple(zip((1, 2, 4, 8, 16, 32, 64), (0.022, 0.024, 0.025, 0.033, 0.044, 0.070, 0.120), strict=True))
DRAFT = ((1, 0.011), (2, 0.012), (4, 0.013), (8, 0.016), (16, 0.020), (64, 0.060))


def offer(name="r", length=8, match=8, share=0.0, room=100, unread=0):
    return TextOffer(DepthRequest(name, room), length, match, share, unread)


def policy(**options):
    usual = {"max_depth": 8, "target_step_times": TARGET, "draft_step_times": DRAFT, "prior_alpha": 0.88, "dwell_s": 1.0}
    return LanePolicy(**{**usual, **options})


def learned(lane, alpha, match=8, rounds=60, name="other"):
    """Offers of eight tokens, of which the first few are kept with probability ``alpha`` each."""
    chance = random.Random(3)
    for _ in range(rounds):
        kept = next((j for j in range(8) if chance.random() >= alpha), 8)
        lane.observe_text(name, TextDraft((1,) * 8, match), kept, min(kept + 1, 8))
    return lane


def report(depths, text_depths=(), committed=0, verify_s=0.0, exposed_s=0.0):
    return StepReport(
        round_id=0,
        batch_size=len(depths),
        num_waiting=0,
        num_target_tokens=sum(depths) + len(depths),
        num_prefill_tokens=0,
        num_committed=committed or len(depths),
        num_drafted=sum(depths),
        num_accepted=0,
        depths=tuple(depths),
        text_depths=tuple(text_depths),
        verify_time_s=verify_s,
        exposed_time_s=exposed_s,
    )


# --- acceptance -------------------------------------------------------------------------------------------------------------


def test_longer_matches_and_surer_counts_are_other_classes():
    """Bug guarded: one acceptance for a chance match of a word and for a copied page."""
    assert [confidence_class(match, 0.0)[0] for match in (0, 1, 2, 3, 4, 5, 8, 9, 17, 99)] == [0, 0, 1, 2, 2, 3, 3, 4, 5, 5]
    assert [confidence_class(1, share)[1] for share in (0.0, 0.69, 0.7, 0.99, 1.0)] == [0, 0, 1, 1, 2]


def test_classes_are_learned_apart_and_shrunk_to_what_is_expected():
    """Bug guarded: a class that was never seen is certain, or classes share what they learned."""
    acceptance = TextAcceptance()
    priors = [acceptance.survival(offer("new", 1, match))[0] for match in (1, 2, 3, 5, 9, 17)]
    assert priors == pytest.approx(PRIOR_ALPHAS)
    for _ in range(40):
        acceptance.observe("a", 1, 0.0, 0, 1)
        acceptance.observe("b", 17, 0.0, 8, 8)
    rare, copied = (acceptance.survival(offer("new", match=match))[0] for match in (1, 17))
    assert rare < 0.25 < 0.95 < copied
    assert rare < acceptance.survival(offer("new", match=3))[0] < copied


def test_a_draft_is_surer_the_further_it_came():
    """Bug guarded: survival falls as if a draft whose first eight tokens were kept were still a match of one word."""
    acceptance = TextAcceptance()
    for _ in range(60):
        acceptance.observe("a", 1, 0.0, 0, 1)
        acceptance.observe("b", 8, 0.0, 8, 8)
    survival = acceptance.survival(offer("new", length=16, match=1))
    assert survival[0] < 0.3
    assert survival[15] / survival[8] > 0.7


def test_a_request_that_copies_is_told_from_one_that_does_not():
    """Bug guarded: requests of one lane share one acceptance, so that the copying one waits for the others' average."""
    acceptance = TextAcceptance()
    for _ in range(30):
        acceptance.observe("copies", 4, 0.0, 2, 2)
        acceptance.observe("writes", 4, 0.0, 0, 1)
    copies, writes, other = (acceptance.survival(offer(name, 1, 4))[0] for name in ("copies", "writes", "new"))
    assert writes < 0.2 < 0.5 < other < 0.85 < copies
    acceptance.forget("copies")
    assert acceptance.survival(offer("copies", 1, 4))[0] == other


def test_what_was_learned_grows_old():
    """Bug guarded: a class that was useless for hours needs hours of good offers; an idle lane forgets."""
    acceptance = TextAcceptance()
    for _ in range(500):
        acceptance.observe(str(_), 4, 0.0, 0, 1)
        acceptance.end_round()
    before = acceptance.survival(offer("new", 1, 4))[0]
    for _ in range(100):
        acceptance.end_round()
    assert acceptance.survival(offer("new", 1, 4))[0] == before < 0.06
    for _ in range(100):
        acceptance.observe(f"late{_}", 4, 0.0, 1, 1)
        acceptance.end_round()
    assert acceptance.survival(offer("new", 1, 4))[0] > 0.5


# --- choosing ---------------------------------------------------------------------------------------------------------------


def choose(lane, *offers, has_model=True, now_s=0.0):
    """(choice, depth of the model) of every offer."""
    choices = lane.text_choices(offers, len(offers), now_s, has_model=has_model)
    return list(zip(choices, lane.depths([one.request for one in offers], len(offers), now_s), strict=True))


def test_the_draft_that_promises_more_for_its_cost_is_taken():
    """Bug guarded: a bad match takes the place of a good model, or a sure copy waits for it."""
    ((choice, model),) = choose(learned(policy(), 0.97), offer())
    assert choice.is_first
    assert choice.depth >= 6
    assert model == 0
    ((choice, model),) = choose(learned(policy(), 0.1), offer())
    assert not choice.is_first
    assert model >= 2
    ((choice, model),) = choose(policy(), offer(length=0))
    assert choice == TextChoice(0, is_first=False)
    assert model >= 2


def test_a_costly_draft_gives_way_to_a_fair_text_and_a_cheap_one_does_not():
    """Bug guarded: sources are compared by acceptance alone, whatever they cost."""
    fair = 0.6
    assert choose(learned(policy(), fair), offer())[0][0].is_first
    assert not choose(learned(policy(draft_step_times=((1, 0.0005), (64, 0.0006))), fair), offer())[0][0].is_first


def test_the_text_pays_where_load_has_closed_the_model():
    """Bug guarded: a text's draft is charged with the model's steps, or falls silent with it."""
    offers = [offer(f"r{i}", match=17) for i in range(64)]
    chosen = choose(learned(policy(), 0.99, match=17), *offers)
    assert all(model == 0 for _, model in chosen)
    assert sum(choice.depth for choice, _ in chosen) > 64
    chosen = choose(learned(policy(), 0.3, match=17), *offers)
    assert all(choice.depth == model == 0 for choice, model in chosen)


def test_without_a_model_the_text_goes_first():
    """Bug guarded: the text waits for a draft that is not there."""
    assert choose(learned(policy(), 0.5), offer(), has_model=False)[0][0].is_first


def test_requests_of_one_batch_have_different_sources():
    """Bug guarded: one source for all requests of a round."""
    lane = policy(draft_step_times=((1, 0.003), (64, 0.02)))
    learned(learned(lane, 0.97, name="copies"), 0.05, name="writes")
    (copies, copied), (writes, written) = choose(lane, offer("copies"), offer("writes"))
    assert (copies.is_first, copied) == (True, 0)
    assert not writes.is_first
    assert written > 0


def test_a_fixed_depth_takes_what_promises_more():
    """Bug guarded: a fixed depth switches the text off, or the model, or is exceeded."""
    ((choice, model),) = choose(learned(policy(fixed_depth=3), 0.97), offer())
    assert choice == TextChoice(3, is_first=True)
    assert model == 3
    ((choice, _),) = choose(learned(policy(fixed_depth=3), 0.2), offer())
    assert choice == TextChoice(3, is_first=False)
    assert choose(policy(fixed_depth=0), offer())[0] == (TextChoice(0, is_first=False), 0)
    assert choose(policy(max_depth=0), offer())[0] == (TextChoice(0, is_first=False), 0)


def test_what_the_text_makes_raises_the_price_of_waiting():
    """Bug guarded: where the text makes six tokens a round, the model is still charged at the rate of its own drafts, and a
    round with it costs more than it brings (docs/log.md); or what one request makes is the price of the next one."""
    lane = learned(policy(), 0.97)
    assert choose(lane, offer(length=0))[0][1] > 0
    for _ in range(20):
        assert choose(lane, offer(), now_s=1.0)[0][0].is_first
        lane.report(report([8], [8], committed=6, verify_s=0.03), 1.0)
    assert choose(lane, offer(length=0), now_s=1.0)[0][1] == 0
    assert choose(lane, offer("another", length=0), now_s=1.0)[0][1] > 0
    choose(lane, offer(), offer("another", length=0), now_s=1.0)
    lane.report(report([8, 0], [8, 0]), 1.0)
    assert lane.explain()["reason"].endswith("; what the text offers goes before the model's drafts for 1 of 2 requests")
    lane.finished("r")
    assert choose(lane, offer(length=0), now_s=1.0)[0][1] > 0


def test_the_yield_moves_with_the_text_alone():
    """Bug guarded: a lucky streak of the model, or a round of a good text, makes all drafts shallower at once; plans where
    there is no text are changed at all."""
    chooser, cost = TextChooser(), RoundCost.measured(TARGET, DRAFT)
    rate = 4 / cost.time(1, 3)
    for _ in range(30):
        chooser.choose([(offer(length=0), 1.0)], [[0.99] * 3], Terms(rate, cost, 1))
        chooser.model_was_used("r", 3)
        chooser.end_round(1.0, rate, cost)
    assert chooser.yield_factor(["r"]) == pytest.approx(1.0)
    chooser.choose([(offer("s", match=17), 1.0)], [[]], Terms(rate, cost, 1))
    chooser.end_round(1.0, rate, cost)
    assert 1.0 < chooser.yield_factor(["s"]) < 2.0
    assert chooser.yield_factor(["nobody"]) == chooser.factor == 1.0


def test_overlapped_rounds_prepare_on_while_the_text_drafts():
    """Bug guarded: nothing is prepared after a text's draft, so that the model has to be waited for as soon as it is needed; or
    it is waited for although the text has something."""
    lane = policy(draft_step_times=((1, 0.003), (64, 0.006)), overlaps=True, fan_out=2)
    ((choice, model),) = choose(learned(lane, 0.99, match=17), offer(match=17))
    assert choice.is_first
    assert model > 0
    assert len(lane.fan_out("r", choice.depth, 1, 0.0)) == choice.depth + 1
    ((choice, model),) = choose(learned(policy(overlaps=True, fan_out=2), 0.3), offer())
    assert (choice.is_first, choice.depth > 0, model > 0) == (False, True, True), "what was prepared costs nothing more"


def test_a_missed_draft_is_asked_for_only_where_it_beats_the_text():
    """Bug guarded: the round waits for the model although the text's draft is worth as much."""
    lane = learned(policy(draft_step_times=((1, 0.003), (64, 0.006)), overlaps=True, fan_out=2), 0.6)
    ((_, model),) = choose(lane, offer(length=0))
    assert lane.asked_depth([("r", model)], 1, 0.0) > 0
    lane._texts._chosen["r"] = lane._texts.of("r")._replace(gain=5.0)
    assert lane.asked_depth([("r", model)], 1, 0.0) == 0


def test_the_model_reads_again_once_that_has_paid():
    """Bug guarded: after a streak of the text's drafts every round without a match makes the model read all of it; or the model
    is never used again."""
    lane = learned(policy(), 0.05)
    waits = 0
    while choose(lane, offer(unread=60), now_s=1.0)[0][1] == 0:
        lane.report(report([0], [0]), 1.0)
        waits += 1
    assert 3 < waits < 40
    lane.observe("r", 2, 2)
    lane.report(report([2], [0]), 1.0)
    assert choose(lane, offer(unread=1), now_s=1.0)[0][1] > 0
    lane.report(report([2], [0]), 1.0)
    assert choose(lane, offer(unread=60), now_s=1.0)[0][1] == 0, "what was forgone before the model read does not count twice"
    assert choose(learned(policy(), 0.05), offer(unread=0))[0][1] > 0, "a prompt is read at once"


def test_the_gain_of_a_draft_is_that_of_its_best_length():
    """Bug guarded: tokens that do not pay are charged to the draft, or its first one alone decides."""
    cost = RoundCost.measured(((1, 0.02), (2, 0.022), (64, 0.146)), ((1, 0.004), (64, 0.004)), 0.002)
    terms = Terms(50.0, cost, 1)
    assert model_gain([0.9, 0.8, 0.1], terms) == pytest.approx(1.7 - 2 * (0.1 + 0.2) - 0.1)
    assert model_gain([0.9, 0.8, 0.1], terms._replace(prepared_price=0.2)) == pytest.approx(1.7 - 2 * 0.2)
    assert model_gain([0.1], terms) == model_gain([], terms) == 0.0


def test_the_texts_drafts_do_not_count_as_the_models():
    """Bug guarded: rounds of the text alone correct the cost of the model's step, or tell that the model keeps up."""
    lane = policy()
    before = lane.draft_step_times
    lane.report(report([4], [4]), 1.0)
    assert lane.draft_step_times == before
    assert report([4, 3, 0], [4, 0, 0]).model_depths == (0, 3, 0)
    assert report([4, 3]).model_depths == (4, 3)
    assert SourceStep(1, 2, 1, 0.5) + SourceStep(1, 4, 3, 0.25) == SourceStep(2, 6, 4, 0.75)


# --- the text's tokens, and then the model's --------------------------------------------------------------------------------

CHEAP = ((1, 0.004), (8, 0.006), (64, 0.03))
SURVIVALS = st.lists(st.floats(0.05, 0.99), min_size=1, max_size=8).map(lambda alphas: list(accumulate(alphas, mul)))


def extendable(name="r", length=3, match=8, unread=1):
    return offer(name, length=length, match=match, unread=unread)._replace(extendable=length)


@settings(max_examples=40, deadline=None)
@given(SURVIVALS, SURVIVALS, st.floats(1.0, 80.0), st.sampled_from([0.0, 0.004]), st.floats(0.2, 2.0))
def test_a_hybrid_is_worth_at_least_the_models_own_draft(text, model, rate, hop_s, worth):
    """Bug guarded: a hybrid takes the place of a better draft of the model's own, or is deeper than any draft may be."""
    terms = Terms(rate, RoundCost.measured(TARGET, DRAFT, hop_s), 1)
    model = [worth * chance for chance in model]
    best = best_hybrid(text, worth, model, terms)
    assert best.gain >= model_gain(model, terms)
    assert 0 <= best.head < len(model)
    if best.head:
        head, reach = text[: best.head], text[best.head - 1]
        gains = [
            sum(worth * t - terms.position for t in head)
            + sum(reach * s - terms.position - rate * terms.cost.draft_time(1) for s in model[:depth])
            - rate * hop_s
            - terms.reading(best.head)
            for depth in range(1, len(model) - best.head + 1)
        ]
        assert best.gain == pytest.approx(max(gains))
    else:
        assert best == Hybrid(0, model_gain(model, terms))
    longest = longest_hybrid(text, model)
    assert longest.gain >= sum(model)
    assert 0 <= longest.head < len(model)


def test_the_model_goes_on_where_a_sure_text_ends():
    """Bug guarded: the model's steps are spent on tokens that the text has, or nothing follows them; a costly model goes on
    wherever it can."""
    assert choose(learned(policy(), 0.97), extendable())[0][0] == TextChoice(3, is_first=True)
    lane = learned(policy(draft_step_times=CHEAP), 0.97)
    ((choice, model),) = choose(lane, extendable())
    assert choice == TextChoice(3, is_first=True, extended=3)
    assert 1 <= model <= 5, "together they are as deep as any draft"
    ((choice, model),) = choose(lane, extendable(length=8))
    assert choice.extended == 0
    assert model == 0, "a text that goes on needs no model"
    ((choice, model),) = choose(learned(policy(draft_step_times=CHEAP), 0.1), extendable())
    assert choice.extended == 0
    assert model >= 2
    assert choose(lane, extendable(), has_model=False)[0][0] == TextChoice(3, is_first=True)


def test_overlapped_rounds_have_one_source_each():
    """Bug guarded: a round that could use what was prepared waits for the model to go on after the text."""
    lane = learned(policy(draft_step_times=((1, 0.003), (64, 0.006)), overlaps=True, fan_out=2), 0.97)
    ((choice, _),) = choose(lane, extendable())
    assert choice.extended == 0


def test_overlapped_rounds_of_a_fixed_depth_have_one_source_each_too():
    """Bug guarded: the next round's drafts are prepared only as deep as the text leaves room for in this one."""
    lane = learned(policy(fixed_depth=5, draft_step_times=((1, 0.003), (64, 0.006)), overlaps=True, fan_out=2), 0.97)
    ((choice, model),) = choose(lane, extendable())
    assert lane.fan_out("r", 5, 1, 0.0), "rounds do not overlap"
    assert choice.extended == 0
    assert model == 5


def test_a_text_that_is_worth_more_than_any_hybrid_is_alone():
    """Bug guarded: the model is asked to go on after part of a text that is worth more whole."""
    lane = learned(policy(draft_step_times=CHEAP), 0.995)
    ((choice, model),) = choose(lane, extendable(length=8))
    assert choice == TextChoice(8, is_first=True)
    assert model == 0


def test_a_hybrid_waits_for_a_model_that_would_have_to_read_too_much():
    """Bug guarded: after a streak of the text's drafts the model reads all of it for the sake of one hybrid."""
    lane = learned(policy(draft_step_times=CHEAP), 0.97)
    ((choice, model),) = choose(lane, extendable(unread=60))
    assert choice == TextChoice(3, is_first=True)
    assert model == 0


def test_a_fixed_depth_is_filled_up_by_the_model():
    """Bug guarded: a short offer takes the place of a whole draft, or a hybrid is deeper than the depth that was set."""
    ((choice, model),) = choose(learned(policy(fixed_depth=5), 0.97), extendable())
    assert choice == TextChoice(3, is_first=True, extended=3)
    assert model == 2


def test_tokens_that_were_never_tested_teach_nothing_of_the_model():
    """Bug guarded: the model's acceptance falls because the text before its tokens was refused; or its cost is not learned from
    hybrid drafts, whose first step reads the text as well."""
    lane = policy()
    before, cost = lane.acceptance, lane.draft_step_times
    for _ in range(3):
        lane.observe("r", 3, 0, reached=False)
        lane.report(msgspec.structs.replace(report([5], [2], verify_s=0.03), draft_time_s=0.5), 1.0)
    assert lane.acceptance == before
    assert lane.draft_step_times[0][1] > cost[0][1]
    lane.observe("r", 3, 0)
    lane.report(report([3], [0]), 1.0)
    assert lane.acceptance < before


def test_the_yield_counts_both_parts_of_a_hybrid():
    """Bug guarded: what a hybrid makes is taken for what the text alone would have, or its model's tokens are counted whole
    whatever the text's were likely to be."""
    chosen = Chosen(3, 2.0, 2.4, is_first=True, is_held_back=False, head=2, head_promised=1.7, reach=0.8)
    assert chosen.promised_with(0.5, 0) == pytest.approx(3.4)
    assert chosen.promised_with(0.5, 2) == pytest.approx(1 + 1.7 + 0.8 * (0.5 + 0.25))


# --- beside prompts ---------------------------------------------------------------------------------------------------------

KNEE = ((1, 0.02), (64, 0.021), (80, 0.05), (256, 0.4))


def test_texts_are_trimmed_beside_prompts():
    """Bug guarded: positions that cost nothing alone are verified beside a prompt that fills the step, where each takes as long
    as a token of the prompt and delays its first token; or what was trimmed still counts as promised."""
    lane = learned(policy(target_step_times=KNEE), 0.9)
    offers = [extendable(f"r{i}", length=8) for i in range(2)]
    choices = lane.text_choices(offers, 2, 0.0, has_model=True)
    depths = {one.request.request_id: choice.depth for one, choice in zip(offers, choices, strict=True)}
    assert sum(depths.values()) >= 12
    assert lane.trim_texts(depths, 8, 2, 0.0) == depths, "a short prompt leaves room in the step"
    trimmed = lane.trim_texts(depths, 200, 2, 0.0)
    assert sum(trimmed.values()) < sum(depths.values()) / 2
    assert {name: lane._texts.of(name).depth for name in depths} == trimmed
    assert all(lane._texts.of(name).promised <= depth for name, depth in trimmed.items())
    fixed = policy(target_step_times=KNEE, fixed_depth=8)
    assert fixed.trim_texts(depths, 200, 2, 0.0) == depths


def test_texts_of_requests_behind_their_objective_stay_deeper_beside_prompts():
    """Bug guarded: what a late request's tokens are worth counts for the model's drafts and not for the text's."""
    depths = {}
    for objective_s in (None, 0.001):
        lane = learned(policy(latency_objective_s=objective_s), 0.3)
        lane.depths([DepthRequest("r", 100, 0)], 1, 0.0)
        late = offer(length=8)._replace(request=DepthRequest("r", 80, 20))
        (choice,) = lane.text_choices([late], 1, 5.0, has_model=True)
        depths[objective_s] = (choice.depth, lane.trim_texts({"r": choice.depth}, 60, 1, 5.0)["r"])
    assert depths == {None: (3, 2), 0.001: (3, 3)}


def test_text_and_model_share_the_delay_of_a_first_token():
    """Bug guarded: each source lengthens a round that reads prompts by all that drafts may."""
    step_times = ((1, 0.02), (64, 0.0326), (256, 0.0455))
    lane = learned(policy(target_step_times=step_times, draft_step_times=CHEAP), 0.95, name="copies")
    learned(lane, 0.02, name="writes")
    copies, writes = extendable("copies", length=8), extendable("writes", length=8)
    choices = lane.text_choices([copies, writes], 2, 0.0, has_model=True)
    texts = lane.trim_texts({"copies": choices[0].depth, "writes": choices[1].depth}, 30, 2, 0.0)
    depths = dict(zip(("copies", "writes"), lane.depths([copies.request, writes.request], 2, 0.0), strict=True))
    trimmed = lane.trim(depths, 30, 2, 0.0)
    assert choices[0].depth > texts["copies"] > 0
    assert trimmed["writes"] < depths["writes"]
    assert 2e-4 * (texts["copies"] + sum(trimmed.values())) <= 0.05 * (0.02 + 31 * 2e-4) + 1e-9


# --- the text goes on after the model ---------------------------------------------------------------------------------------


def continued(lane, offers, drafted, num_prompt_tokens=0):
    """Tokens of each offer after drafts of the model that are as deep as was chosen."""
    pairs = list(zip(offers, drafted, strict=True))
    return lane.continuations(pairs, num_prompt_tokens, sum(drafted), len(offers), 0.0)


def test_the_text_goes_on_where_that_pays():
    """Bug guarded: positions are spent on a bad match, or after a draft that is unlikely to be kept; a sure one is left out."""
    lane = learned(policy(), 0.95, match=8)
    ((_, depth),) = choose(lane, offer(length=0))
    assert depth >= 2
    sure, bad = offer(length=4), offer(length=4, match=1)
    assert continued(lane, [sure], [depth]) == [4]
    assert continued(learned(policy(), 0.05, match=1), [bad], [2]) == [0]
    assert continued(lane, [sure], [9]) == [0], "nothing is known of a draft that nobody planned"
    assert continued(lane, [sure], [0]) == [0]


def test_the_text_goes_on_after_a_hybrid():
    """Bug guarded: what the text offers after text and model is worth what follows as many tokens of the model's own."""
    lane = learned(policy(draft_step_times=CHEAP), 0.97)
    ((choice, model),) = choose(lane, extendable())
    assert (choice.extended, model) != (0, 0)
    assert choice.extended == 3
    tail = offer(length=4)
    assert continued(lane, [tail], [choice.extended + model]) == [4]
    assert continued(lane, [tail], [choice.extended]) == [0], "none of it is the model's"


def test_what_goes_on_after_the_model_is_as_deep_as_a_fixed_depth():
    """Bug guarded: a fixed depth is exceeded."""
    lane = policy(fixed_depth=4)
    assert continued(lane, [offer(length=6)], [4]) == [0]
    assert continued(lane, [offer(length=6)], [1]) == [3]


def test_the_text_does_not_go_on_where_that_delays_a_first_token():
    """Bug guarded: what goes on after the model is not counted beside prompts."""
    lane = learned(policy(target_step_times=KNEE, draft_step_times=CHEAP), 0.95, match=8)
    ((_, depth),) = choose(lane, offer(length=0))
    assert continued(lane, [offer(length=6)], [depth]) == [6]
    assert continued(lane, [offer(length=6)], [depth], num_prompt_tokens=70)[0] < 6


def test_requests_that_are_drafted_for_from_their_text_want_no_draft():
    """Bug guarded: replicas of the draft are started, or kept, for requests whose text serves them; or a request whose text has
    nothing to offer wants no draft."""
    lane = learned(policy(), 0.97)
    wanted, _ = lane.draft_demand(8, False, 0.0)
    assert wanted == 8
    for _ in range(60):
        choose(lane, offer("copies"), offer("writes", length=0))
        lane.report(report([8, 2], [8, 0]), 0.0)
    assert lane.draft_demand(8, False, 0.0)[0] == pytest.approx(4, abs=0.2)
    for _ in range(60):
        choose(lane, offer("copies"), offer("writes"))
        lane.report(report([8, 8], [8, 8]), 0.0)
    assert lane.draft_demand(8, False, 0.0) == (0, 0), "a share that only fades would keep the last replica for ever"
    for _ in range(60):
        choose(lane, offer("copies", length=0), offer("writes", length=0), has_model=False)
        lane.report(report([0, 0], [0, 0]), 0.0)
    assert lane.draft_demand(8, False, 0.0)[0] == pytest.approx(8, abs=0.2)
