"""Token in, token out: turns stand in a trajectory as they were sampled, after the very ids they were sampled after; or it branches."""

import pytest

from assay.agents.environment_pool import EnvironmentPool
from assay.agents.episodes import EpisodeTask, TurnLimits, play_episodes
from assay.agents.transcript import ChatWriter, Transcript
from assay.generate.engine import Engine
from assay.generate.generation_request import Completion, Sampling
from assay.model.tokenizer import Tokenizer
from assay.testing import tiny_episodes
from assay.testing.tiny_models import TINY_CHAT_TEMPLATE, tiny_model, tiny_tokenizer
from assay.verdict import Outcome

STRIPPING = TINY_CHAT_TEMPLATE.replace("{{ message.content }}", "{{ message.content.split('</think>')[-1] }}")


def templated(template):
    tokenizer = tiny_tokenizer()
    return Tokenizer(tokenizer.document, tokenizer.settings, {} if template is None else {"default": template})


def said(tokenizer, text, version="v"):
    ids = (*tokenizer.encode(text), tokenizer.eos)
    return Completion(ids, (-0.5,) * len(ids), "stop", version)


def two_turns(template, text):
    tokenizer = templated(template)
    writer = ChatWriter(tokenizer, ())
    asked = [{"role": "user", "content": "hi"}]
    [(pieces, _)] = writer.first([asked])
    transcript, turn = Transcript(pieces, asked), said(tokenizer, text)
    transcript.say(turn, writer.turn(turn, "a"))
    writer.insert([(transcript, [{"role": "user", "content": "and <b>?"}])])
    again = said(tokenizer, "c")
    transcript.say(again, writer.turn(again, "b"))
    return tokenizer, transcript


@pytest.mark.parametrize("text", ["plain", "  spaces  ", "<tool_call>{}</tool_call>", "ä\u2028b"])
def test_a_template_that_goes_on_from_what_was_said_is_followed_token_for_token(text):
    tokenizer, transcript = two_turns(TINY_CHAT_TEMPLATE, text)
    [sequence] = transcript.sequences
    assert tokenizer.decode(sequence.ids) == (
        f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>user\nand <b>?<|im_end|>\n"
        "<|im_start|>assistant\nc<|im_end|>")
    spoken = {source: tokenizer.decode(token for piece in sequence.pieces if piece.source == source for token in piece.ids)
              for source in ("policy", "environment")}
    assert spoken == {"policy": f"{text}<|im_end|>c<|im_end|>", "environment": "hiand <b>?"}


def test_a_template_that_strips_thinking_makes_a_second_sequence_and_trains_nothing_twice():
    tokenizer, transcript = two_turns(STRIPPING, "hm</think>yes")
    first, second = transcript.sequences
    assert tokenizer.decode(first.ids).endswith("hm</think>yes<|im_end|>")
    assert "hm" not in tokenizer.decode(second.ids)
    assert [tokenizer.decode(turn.ids) for turn in (*first.turns, *second.turns)] == ["hm</think>yes<|im_end|>", "c<|im_end|>"]


def test_a_model_without_a_template_hears_the_words_alone():
    tokenizer, transcript = two_turns(None, "yes")
    assert tokenizer.decode(transcript.sequences[0].ids) == "hiyes<|im_end|>and <b>?c<|im_end|>"


def test_a_turn_that_was_cut_gets_its_end_from_the_template_and_not_from_the_policy():
    tokenizer = templated(TINY_CHAT_TEMPLATE)
    writer, asked = ChatWriter(tokenizer, ()), [{"role": "user", "content": "hi"}]
    [(pieces, _)] = writer.first([asked])
    transcript, cut = Transcript(pieces, asked), Completion(tuple(tokenizer.encode("abc")), (-1.0,) * 3, "length", "v")
    transcript.say(cut, writer.turn(cut, "a"))
    writer.insert([(transcript, [{"role": "user", "content": "go on"}])])
    assert tokenizer.decode(transcript.prompt).count("<|im_end|>") == 3
    assert tokenizer.decode(transcript.sequences[0].turns[0].ids) == "abc"


def test_episodes_are_the_same_whatever_the_workers_do_and_reuse_their_prefixes():
    model, tokenizer = tiny_model(seed=1), templated(TINY_CHAT_TEMPLATE)

    def once(workers):
        engine = Engine(model, slots=8, length=250, stop_ids=tiny_episodes.TURN_STOPS, version="v", tokenizer=tokenizer)
        writer = ChatWriter(tokenizer, ())
        with EnvironmentPool(tiny_episodes.ECHO, {}, count=workers) as pool:
            [(pieces, _)] = writer.first([pool.open({"x": 5})["x"].messages])
            pool.close(["x"])
            task = EpisodeTask("t", 5, tuple(token for piece in pieces for token in piece.ids))
            return engine, play_episodes(engine, pool, writer, [task], Sampling(max_new=6, seed=3), ("a",), 4, TurnLimits(3, 250))

    (engine, one), (_, two) = once(1), once(3)
    assert one == two
    [group] = one.groups
    assert {trajectory.ended for trajectory in group} == {"done"}
    assert len({trajectory.turns for trajectory in group}) == 4
    own = sum(len(trajectory.sequences[-1]) for trajectory in group)
    assert engine.forwarded <= 1.2 * own


def test_two_episodes_that_say_the_same_may_differ_in_whether_they_count():
    """One of them ended with an error: that it does not count is no loss of the other, and that it counts is a fault."""
    from collections import Counter

    from assay.agents.episodes import SampledTurn
    from assay.agents.trajectory import Piece, TokenSequence, Trajectory
    from assay.guard.trajectory_checks import check_token_law
    from assay.recipes.episode_batch import episode_batch

    said = Piece("policy", (5, 6), (-1.0, -1.0), "v", "stop")
    sequence = TokenSequence((Piece("environment", (1, 2)), said))
    both = [Trajectory(str(number), "t", number, (sequence,), (), (1.0,), "done", error=error)
            for number, error in enumerate((None, "late"))]
    turns = [SampledTurn((1, 2), Completion((5, 6), (-1.0, -1.0), "stop", "v"))] * 2
    judged = {counts: check_token_law(episode_batch(both, [1.0, -1.0], [True, counts], "token", cap=2), turns, Counter([sequence.ids]),
                                      stop_ids=(6,), cap=2).outcome for counts in (False, True)}
    assert judged == {False: Outcome.PROVEN, True: Outcome.REFUTED}


@pytest.mark.parametrize("base", [1_000_003, 0, 1])
def test_where_turns_were_sampled_is_found_by_hashes_and_settled_by_comparing(base, monkeypatch):
    """With a base of 0 every beginning has the same hash: what is found does not change."""
    from assay.agents.episodes import SampledTurn
    from assay.guard import trajectory_checks

    def turn(prompt, ids):
        return SampledTurn(prompt, Completion(ids, (-1.0,) * len(ids), "stop", "v"))

    monkeypatch.setattr(trajectory_checks, "HASH_BASE", base)
    turns = [turn((1, 2), (5, 6)), turn((1, 2), (7,)), turn((1, 2, 5, 6, 3), (5, 6)), turn((2, 1), (5, 6)), turn((0, 0, 9), (8,))]
    whole, cut, strange, other = (1, 2, 5, 6, 3, 5, 6), (1, 2, 5, 6, 3), (1, 2, 5, 6, 4, 5, 6), (0, 0, 9, 8)
    found = trajectory_checks.sampled_places(turns, [whole, cut, strange, other, (2, 1, 7), (1, 2, 7)])
    assert [None if each is None else each.nonzero()[0].tolist() for each in found] == [[2, 3, 5, 6], None, None, [3], None, [2]]
