"""Reinforcement by a judge over real HTTP: one call a group, costs counted, and no group that vanishes; a judge that cannot is refused."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.errors import GuardStop, UsageError
from assay.model.resize_embeddings import with_new_tokens
from assay.recipes import grpo as recipe
from assay.recipes.trainer import Trainer
from assay.reward.answer import read_answer
from assay.reward.endpoint import Endpoint, connected
from assay.reward.llm_judge import Judge, judge_group
from assay.serving.engine_thread import EngineThread, ServerSize
from assay.serving.server import serve_in_background
from assay.store import checkpoint
from assay.store.saving import Lineage, model_contents
from assay.testing.tiny_models import tiny_model, tokenizer_and_stops
from tests.recipes.sums import Believer, events, left_by, options, reinforced, steps_of, unproven, write
from tests.refusals import stopped_by
from tests.reward.played import Asked, Played, Reaction, always, message, playing, shown


@pytest.fixture(scope="module")
def parent(knows_sums: Path) -> Path:
    return knows_sums


@pytest.fixture(scope="module")
def server() -> Iterator[Played]:
    with playing() as played:
        yield played


@pytest.fixture(autouse=True)
def without_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    unproven(monkeypatch, Believer)


def texts(asked: Asked) -> list[str]:
    return [each["messages"][-1]["content"] for each in shown(asked)]


def rehearsed(asked: Asked) -> bool:
    """Whether this is the judge's preflight: before the run, one completion of every group is empty."""
    return "" in texts(asked)


def sheet(asked: Asked, scores: list[float]) -> tuple[int, dict[str, str], str]:
    return message(json.dumps({"scores": [{"id": str(place), "explanation": "", "score": score} for place, score in enumerate(scores, 1)]}))


def fair(_: int, asked: Asked) -> tuple[int, dict[str, str], str]:
    """The sum alone is best; of the rest, less said is better."""
    a, b = map(int, re.search(r"(\d)\+(\d)=", asked["messages"][1]["content"]).groups())  # type: ignore[union-attr]
    return sheet(asked, [1.0 if read_answer(text) == str(a + b) else 0.5 / (2 + len(text)) if text else 0.0 for text in texts(asked)])


def judged(parent: Path, out: Path, server: Played, reaction: Reaction, settings: str = "", **changed: Any) -> Any:
    """A run's options, before a judge that reacts so."""
    server.forget()
    server.reaction = reaction
    spec = f"judge[model=big,url={server.url},tries=1,concurrency=1{settings}]:1"
    return options(parent, out, **({"reward": (spec,), "metric": "answer", "reward_errors": 0.9} | changed))

# ---------------------------------------------------------------- a judge that can


def test_one_call_a_group_and_what_it_cost_stand_in_metrics_and_ledger(parent: Path, server: Played, tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "a-very-secret-key")
    config = judged(parent, tmp_path / "run", server, fair, ",repeat=0.5", reward=(
        f"judge[model=big,url={server.url},concurrency=1,repeat=0.5]:1", "format:0.1"), metric="answer")
    said: list[str] = []
    reinforced(config, said.append)
    rows = steps_of(config)
    assert [row["judge/groups"] for row in rows] == [4] * 4
    assert all(row["judge/calls"] == row["judge/groups"] + row["judge/repeats"] for row in rows)
    assert all(row["judge/prompt_tokens"] == 100 * row["judge/calls"] for row in rows)
    assert all(row["judge/agreement"] == 1 for row in rows if "judge/agreement" in row)
    assert all(row["rewards/judge/mean"] + 0.1 * row["rewards/format/mean"] == pytest.approx(row["reward"]) for row in rows)
    [*_, last] = events(config, "judge cost")
    assert last["calls"] == len(server.asked)
    assert (last["model"], last["url"], last["unjudged"]) == ("big", server.url, 0)
    before = {verdict["check"]: verdict["outcome"] for verdict in events(config, "preflight")[0]["verdicts"]}
    assert before["judge_order"] == before["judge_errors"] == "PROVEN"
    assert events(config, "judge")[-1]["verdicts"][0]["outcome"] == "PROVEN"
    assert any("judged by big at" in line for line in said)
    assert any("judge_agreement: " in line for line in said), "printed, not only kept"
    assert before["judge_places"] == "PROVEN"
    assert set(server.keys) == {"Bearer a-very-secret-key"}
    for file in (path for path in (tmp_path / "run").rglob("*") if path.is_file()):
        assert b"a-very-secret-key" not in file.read_bytes(), file


@pytest.mark.arithmetic
def test_a_judge_teaches_and_held_out_scores_are_the_rules(parent: Path, server: Played, tmp_path: Path):
    """Its scores rank a group: no look could compare them with another's, so none is recorded."""
    config = judged(parent, tmp_path / "run", server, fair, ",repeat=0", prompts=16, num_generations=8, max_steps=8, save_steps=8,
                    eval_prompts=30, num_generations_eval=8, learning_rate=4e-4)
    gain = reinforced(config)[-1]
    assert gain.evidence["change"] > 0.05
    looks = [row for row in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) if "eval_answer" in row]
    assert len(looks) >= 2
    assert not any("eval_reward" in row for row in looks)

# ---------------------------------------------------------------- groups that cannot be judged


class Moody:
    """Fair, but for the first group of the run: about that it says nothing usable so many times."""

    def __init__(self, times: int):
        self.times, self.failed, self.victim = times, 0, ""

    def __call__(self, number: int, asked: Asked) -> tuple[int, dict[str, str], str]:
        about = asked["messages"][1]["content"].split("The completions:")[0]
        if not rehearsed(asked) and not self.victim:
            self.victim = about
        if about == self.victim and not rehearsed(asked) and self.failed < self.times:
            self.failed += 1
            return message("They are all lovely.")
        return fair(number, asked)


def test_a_group_that_fails_once_is_asked_again_when_the_others_are_done(parent: Path, server: Played, tmp_path: Path):
    config = judged(parent, tmp_path / "run", server, Moody(1), ",repeat=0")
    reinforced(config)
    first = steps_of(config)[0]
    assert (first["judge/late"], first["judge/unjudged"], first["rewards/unknown"], first["judge/calls"]) == (1, 0, 0, 5)
    assert events(config, "unjudged") == []


def test_a_group_that_stays_unjudged_is_told_and_its_prompt_is_drawn_again(parent: Path, server: Played, tmp_path: Path):
    config = judged(parent, tmp_path / "run", server, Moody(2), ",repeat=0", samples=20)
    said: list[str] = []
    reinforced(config, said.append)
    [told] = events(config, "unjudged")
    [waiting] = told["groups"]
    assert "not JSON" in told["groups"][waiting][0]
    assert told["cost"]["calls"] == 8 + 5, "a reply that could not be used is paid for too"
    first, second, *_ = steps_of(config)
    assert (first["judge/unjudged"], first["rewards/unknown"], first["groups"]) == (1, 0.25, 4)
    assert (second["judge/unjudged"], second["groups"]) == (0, 5)
    kept = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    of_it = [row for row in kept if row["prompt_id"] == waiting]
    assert {row["step"] for row in of_it} == {0, 1}
    assert all((row["reward"] is None) is (row["step"] == 0) for row in of_it)
    assert all(row["error"].startswith("judge: ") and row["advantage"] == 0 for row in of_it if row["step"] == 0)
    assert any("could not be judged and are drawn again" in line for line in said)


def test_what_waits_survives_an_interruption_and_the_rest_is_the_same(parent: Path, server: Played, tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch):
    """With a judge that always says the same, resuming is exact; that no judge must is said."""
    uncut = judged(parent, tmp_path / "uncut", server, Moody(2))
    reinforced(uncut)
    cut = judged(parent, tmp_path / "cut", server, Moody(2))
    over = Trainer.over

    def struck(trainer: Trainer) -> bool:
        if trainer.done == 1:
            trainer.run.interrupted = 15
        return over(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "over", struck)
        assert recipe.grpo(cut, lambda _: None).interrupted == 15
    said: list[str] = []
    reinforced(cut, said.append)
    assert [row["groups"] for row in steps_of(cut)] == [4, 5, 4, 4]
    assert left_by(cut, 4) == left_by(uncut, 4)
    assert any("a judge may answer otherwise" in line for line in said)
    assert events(cut, "not bit-exact")[0]["changed"]["judge"]["model"] == "big"


def test_the_run_ends_where_too_many_groups_have_no_judgement(parent: Path, server: Played, tmp_path: Path):
    config = judged(parent, tmp_path / "run", server, lambda n, asked: fair(n, asked) if rehearsed(asked) else (500, {}, "busy"),
                    reward_errors=0.05)
    with pytest.raises(GuardStop, match=r"could not be scored.*judge: status 500: busy"):
        recipe.grpo(config, lambda _: None)
    assert events(config, "unjudged")
    assert events(config, "stopped")

# ---------------------------------------------------------------- a judge that must not


@pytest.mark.parametrize(("reaction", "words"), [
    (always(500, "down"), "8 of 8 groups of known worth could not be judged: status 500: down"),
    (lambda n, asked: sheet(asked, [0.5] * len(texts(asked))), "it does not reward what is right"),
    (lambda n, asked: sheet(asked, [1 - len(text) / 100 for text in texts(asked)]), "it does not reward what is right"),
    (lambda n, asked: message(json.dumps({"scores": [{"id": "1", "score": float("nan")}]})), "could not be judged"),
], ids=["down", "flat", "empty is best", "nan"])
def test_a_judge_that_does_not_order_right_and_wrong_is_refused_before_the_first_rollout(reaction: Reaction, words: str, parent: Path,
                                                                                        server: Played, tmp_path: Path):
    config = judged(parent, tmp_path / "run", server, reaction)
    with pytest.raises(GuardStop, match=words):
        recipe.grpo(config, lambda _: None)
    assert not (tmp_path / "run" / "samples.jsonl").exists()


def test_a_judge_that_contradicts_itself_ends_the_run(parent: Path, server: Played, tmp_path: Path):
    def fickle(number: int, asked: Asked) -> tuple[int, dict[str, str], str]:
        rising = [(place + 1) / 10 for place in range(len(texts(asked)))]
        in_order = dict(zip(sorted(texts(asked)), rising if fickle.calls[0] % 2 else rising[::-1], strict=True))
        fickle.calls[0] += not rehearsed(asked)
        return fair(number, asked) if rehearsed(asked) else sheet(asked, [in_order[text] for text in texts(asked)])

    fickle.calls = [0]  # type: ignore[attr-defined]
    config = judged(parent, tmp_path / "run", server, fickle, ",repeat=1", prompts=9, save_steps=1)
    with stopped_by("judge_agreement"):
        recipe.grpo(config, lambda _: None)


def test_a_key_that_is_refused_stops_the_run_at_once(parent: Path, server: Played, tmp_path: Path):
    config = judged(parent, tmp_path / "run", server, lambda n, asked: fair(n, asked) if rehearsed(asked) else (401, {}, "who are you?"))
    with pytest.raises(UsageError, match="401, the key was not accepted"):
        recipe.grpo(config, lambda _: None)


def test_another_judge_is_another_run(parent: Path, server: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    monkeypatch.setenv("OPENAI_MODEL", "big")
    config = judged(parent, tmp_path / "run", server, fair, reward=("judge[tries=1]:1",))
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "over", lambda trainer: trainer.done >= 2)
        reinforced(config)
    monkeypatch.setenv("OPENAI_MODEL", "bigger")
    with pytest.raises(GuardStop, match="scores of two judges do not compare"):
        recipe.grpo(config, lambda _: None)


@pytest.mark.parametrize(("changed", "words"), [
    ({"reward": ("judge[model=m,url=http://127.0.0.1:1/v1]:1",), "metric": None}, "give --metric"),
    ({"reward": ("judge[model=m]:1",)}, "OPENAI_BASE_URL"),
    ({"reward": ("judge[model=m,url=http://127.0.0.1:1,key=sk-123]:1",)}, "the name of a variable"),
    ({"reward": ("judge[modle=m]:1",)}, "did you mean 'model'"),
    ({"reward": ("judge[model=m,url=http://127.0.0.1:1,rubric=nowhere.txt]:1",)}, "rubric nowhere.txt"),
    ({"reward": ("answer:1",), "metric": "judge"}, "a judge compares the completions of a group"),
])
def test_a_judge_is_asked_for_in_a_way_that_can_be_served(changed: dict[str, Any], words: str, parent: Path, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch):
    for name in ("OPENAI_BASE_URL", "OPENAI_MODEL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=words):
        recipe.grpo(options(parent, tmp_path / "run", **({"metric": "answer"} | changed)), lambda _: None)
    assert not (tmp_path / "run").exists()

# ---------------------------------------------------------------- our own server as the judge

SAYS = ('{"scores": [{"id": "1", "score": 0.9}, ', '{"id": "2", "score": 0.1}]}')


@pytest.fixture(scope="module")
def tiny_judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real model behind our server that knows one sentence: whatever it is asked, the first of two is the better one.

    The sentence is two tokens that no grammar allows, so the server has none: it refuses a response_format, as many do.
    """
    plain, stops = tokenizer_and_stops()
    tokenizer = with_new_tokens(plain, SAYS)
    model = tiny_model("llama", max_length=4096)
    newline, first, second, end = (tokenizer.encode(text)[-1] for text in ("\n", *SAYS, "<|im_end|>"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        for token, row in ((newline, (1, 0, 0)), (first, (10, 100, 0)), (second, (0, 1e3, 1e4)), (end, (0, 0, 1e5))):
            model.embed.weight[token, :3] = torch.tensor(row, dtype=torch.float32)
    folder = tmp_path_factory.mktemp("judge") / "model"
    checkpoint.write_checkpoint(folder, model_contents(model, tokenizer, stops, Lineage()))
    serving = EngineThread(ServerSize(slots=2, queue=32))
    serving.open("tiny", folder)
    with pytest.MonkeyPatch.context() as patch, serve_in_background(serving) as url:
        patch.setitem(sys.modules, "llguidance", None)
        yield url


def test_our_own_server_judges_over_http(tiny_judge: str):
    """It knows no response_format and says so; the answer is checked all the same. What it costs is counted by its own tokens."""
    groups = [judge_group(f"g{number}", f"prompt {number}", ["a", "b"]) for number in range(9)]
    with connected(Endpoint(tiny_judge, "tiny")) as post:
        judge = Judge(post, repeat=0.0, tries=2, sleep=lambda _: None)
        found = judge.score([*groups, judge_group("three", "prompt", ["a", "b", "c"])])
    assert {*found.scores.values()} == {(0.9, 0.1), (0.1, 0.9)}, "shuffled, and put back"
    assert judge.formats is False
    assert [each.group.id for each in found.unjudged] == ["three"]
    assert found.cost.calls == 9 + 2
    assert found.cost.completion_tokens == 3 * found.cost.calls
    assert found.cost.prompt_tokens > 100 * found.cost.calls


def test_a_run_is_judged_by_our_own_server(tiny_judge: str, parent: Path, tmp_path: Path):
    """Rows without gold: that nothing shows what the judge prefers is said; that it prefers what comes first is found out."""
    write(tmp_path / "bare.jsonl", [{"prompt": f"{a}+{b}="} for a in range(10) for b in range(10)])
    config = options(parent, tmp_path / "run", data=(str(tmp_path / "bare.jsonl"),), metric=r"regex[pattern=\d]", num_generations=2,
                     prompts=12,
                     reward=(f"judge[model=tiny,url={tiny_judge},tries=1,repeat=0]:1",), max_steps=1, reward_errors=0.99)
    said: list[str] = []
    reinforced(config, said.append)
    order, = [v for v in events(config, "preflight")[0]["verdicts"] if v["check"] == "judge_order"]
    assert order["outcome"] == "UNPROVEN"
    assert any("scored in the order of the page" in line for line in said)
    for row in steps_of(config):
        assert row["judge/groups"] == 12
        assert row["rewards/judge/mean"] == pytest.approx(0.5), "each group has its 0.9 and its 0.1"
