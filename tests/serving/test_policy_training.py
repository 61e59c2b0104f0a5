"""A served policy that learns from its clients: what they said is trained on as it was sampled, and nothing else is."""

import importlib.util
import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import openai
import pytest
import torch

from assay.agents.transcript import Transcript
from assay.cli import run
from assay.client import ClientTrajectory, Policy, trajectory
from assay.errors import GuardStop, StoreError, UsageError
from assay.generate.generation_request import Completion
from assay.guard.update_rows import calls_and_faults, check_calls
from assay.recipes.options import Trained
from assay.serving import policy_training
from assay.serving.engine_thread import EngineThread, ServerSize
from assay.serving.openai_protocol import read_chat
from assay.serving.policy_training import ServedPolicy
from assay.serving.server import serve_in_background
from assay.store.artifact import build_model, open_artifact
from assay.testing.tiny_models import nudge, save_model, tiny_model
from assay.verdict import Outcome
from assay.zoo import catalogue
from tests.serving.test_tools import ADD, TOOL_TEMPLATE, WEB, with_template

GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"
LAWS = ("version", "every_turn", "heard", "token_law", "episode_rewards", "episode_kinds", "calls", "identity", "movement",
        "update_rows")
INSERTED = ("inserted_tokens", "inserted_ids")  # before the first update
EXAMPLE = Path(__file__).parents[2] / "examples" / "tool_agent.py"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    root = tmp_path_factory.mktemp("policy")
    folder = save_model(root / "base", nudge(tiny_model("qwen3", vocab=270), 0.3), tokenizer=with_template(TOOL_TEMPLATE)).folder
    serving = EngineThread(ServerSize(slots=2))
    model = serving.open("policy", folder, learns=True)
    policy = serving.ask(lambda: ServedPolicy(model, root / "out", 1e-3)).result()
    with serve_in_background(serving, policy=policy) as url:
        yield policy, url


@pytest.fixture
def policy(served):
    return served[0]


@pytest.fixture
def url(served):
    return served[1]


def say(url, made, messages, **options):
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=WEB, default_headers=made.headers)
    return client.chat.completions.create(model="policy", messages=messages, max_tokens=6, **options)


def talk(url, reward, seed, turns=2):
    """An agent of two turns, with a tool's answer between them."""
    with trajectory(url, reward=reward) as made:
        messages = [{"role": "user", "content": "1+3?"}]
        for turn in range(turns):
            said = say(url, made, messages, seed=seed + turn, tools=[ADD]).choices[0].message
            messages += [said.model_dump(exclude_none=True), {"role": "user", "content": "and?"}]
    return made


def written_rows(policy):
    return [json.loads(line) for line in (policy.folder / "trajectories.jsonl").read_text().splitlines()]


def trained_rows(policy):
    return [row for row in written_rows(policy) if "dropped" not in row]


def test_what_was_said_is_trained_on_as_it_was_sampled_and_the_version_moves(policy, url):
    before, weights = policy.model.engine.version, [p.detach().clone() for p in policy.weights.parameters()]
    made = [talk(url, float(seed % 2), seed) for seed in range(4)]
    sampled = {each.id: [turn.ids for turn in policy.find(each.id).finished().turns] for each in made}
    due = LAWS if policy.updates else LAWS + INSERTED
    told = Policy(url).train([[each.id for each in made]])
    assert (told["before"], told["version"]) == (before, policy.model.engine.version)
    assert before != told["version"]
    assert {verdict["check"]: verdict["outcome"] for verdict in told["verdicts"]} == dict.fromkeys(due, "PROVEN")
    assert any(not torch.equal(old, new) for old, new in zip(weights, policy.weights.parameters(), strict=True))
    rows = trained_rows(policy)
    assert {row["id"] for row in rows} >= sampled.keys()
    for row in rows[-len(sampled):]:
        trained = [token for each in row["sequences"] for token, said in zip(each["ids"], each["sampled"], strict=True) if said]
        assert trained == [token for turn in sampled[row["id"]] for token in turn]
    with pytest.raises(UsageError, match="trained on already"):
        Policy(url).train([[each.id for each in made]])


def test_what_is_of_other_weights_or_has_no_reward_is_refused_and_nothing_moves(policy, url):
    old = [talk(url, float(seed % 2), seed, turns=1) for seed in range(2)]
    with trajectory(url, reward=1.0) as begun:
        say(url, begun, [{"role": "user", "content": "hi"}])
        with pytest.raises(UsageError, match="not closed"):
            Policy(url).train([[begun.id, old[0].id]])
        new = [talk(url, float(seed % 2), seed, turns=1) for seed in range(2)]
        now = Policy(url).train([[each.id for each in new]])["version"]
        with pytest.raises(openai.ConflictError, match="other weights"):
            say(url, begun, [{"role": "user", "content": "hi"}, {"role": "user", "content": "again"}])
    with pytest.raises(UsageError, match="come from version"):
        Policy(url).train([[each.id for each in old]])
    with pytest.raises(UsageError, match="given once"):
        Policy(url)._post(f"/trajectories/{old[0].id}/close", {"reward": 1.0})
    with pytest.raises(UsageError, match="all rewards are the same"):
        Policy(url).train([[talk(url, 1.0, seed, turns=1).id for seed in range(2)]])
    assert policy.model.engine.version == now
    dropped = {row["id"]: row["dropped"] for row in written_rows(policy) if "dropped" in row}
    assert [dropped[each.id] for each in (*old, begun)] == [*["an update came before it was trained on"] * 2,
                                                            "an update came before it was closed"]


def test_what_can_never_be_learned_from_makes_room_and_what_was_never_used_can_be_given_back(policy, url, monkeypatch):
    old = [talk(url, float(seed % 2), seed, turns=1) for seed in range(2)]
    told = Policy(url).train([[talk(url, float(seed % 2), seed, turns=1).id for seed in range(2)]])
    rows = [row["id"] for row in written_rows(policy) if row["update"] == told["update"] and "dropped" in row]
    assert told["dropped"] == len(rows) == len({*rows, *(each.id for each in old)})
    monkeypatch.setattr(policy_training, "MOST_TRAJECTORIES", len(policy.trajectories))
    unused = ClientTrajectory(**Policy(url)._post("/trajectories", {}))
    assert not policy.trajectories.keys() & {each.id for each in old}
    monkeypatch.setattr(policy_training, "MOST_TRAJECTORIES", len(policy.trajectories))
    with pytest.raises(UsageError, match="held already"):
        Policy(url)._post("/trajectories", {})
    with pytest.raises(UsageError, match="nothing was said"):
        Policy(url)._post(f"/trajectories/{unused.id}/close", {"reward": 1.0})
    Policy(url)._post(f"/trajectories/{unused.id}/close", {"error": "nobody came"})
    assert unused.id not in policy.trajectories
    assert Policy(url)._post("/trajectories", {})["id"] in policy.trajectories


def test_of_two_clients_that_train_at_once_one_is_told_that_the_weights_moved(policy, url):
    groups = [[talk(url, float(seed % 2), seed, turns=1).id for seed in range(2)] for _ in range(2)]
    before, told = policy.updates, list[str]()

    def one(names):
        try:
            told.append(f"update {Policy(url).train([names])['update']}")
        except UsageError as error:
            told.append(str(error))

    with ThreadPoolExecutor(2) as clients:
        list(clients.map(one, groups))
    assert policy.updates == before + 1
    assert sorted("come from version" in each for each in told) == [False, True]


@pytest.mark.parametrize(("path", "reply"), [
    ("/trajectories", None), ("/trajectories", {"id": "a"}), ("/close", None), ("/close", {}), ("/train", None), ("/train", {"loss": 1.0}),
    ("/train", {"update": 1, "trained": 1, "version": "1", "verdicts": []})])
def test_a_client_takes_no_other_answer_for_one(policy, url, monkeypatch, path, reply):
    """As of a refusal that was swallowed, or of another server."""
    def answered(self, at, body):
        return reply if at.endswith(path) else usual(self, at, body)

    def whole():
        with trajectory(url, reward=1.0) as made:
            say(url, made, [{"role": "user", "content": "hi"}])
        Policy(url).train([[made.id, made.id]])

    usual = Policy._send
    monkeypatch.setattr(Policy, "_send", answered)
    with pytest.raises(UsageError, match=r"is assay serve --train running|2 trajectories were given, 1 were learned from"):
        whole()


def test_a_checkpoint_comes_every_so_many_updates_and_is_the_policy_as_it_was_then(policy, url, monkeypatch):
    monkeypatch.setattr(policy, "save_steps", 1)
    told = Policy(url).train([[talk(url, float(seed % 2), seed, turns=1).id for seed in range(2)]])
    assert told["verdicts"][-1]["check"] == "saved"
    saved = open_artifact(policy.folder / "checkpoints" / f"step-{policy.updates:06d}")
    assert all(torch.equal(a, b) for a, b in zip(build_model(saved).parameters(), policy.weights.parameters(), strict=True))


def test_a_checkpoint_that_is_due_and_not_there_ends_the_policy(policy, url, monkeypatch):
    monkeypatch.setattr(policy, "save_steps", 1)
    monkeypatch.setattr(policy, "save", lambda: None)
    monkeypatch.setattr(policy.model, "broken", None)  # afterwards too
    with pytest.raises(GuardStop, match=r"not recorded: saved: .* is due every 1 updates"):
        policy.learn([[talk(url, float(seed), seed, turns=1).id for seed in range(2)]])


@pytest.mark.parametrize("reward", [math.nan, math.inf, "1.0", None])
def test_a_reward_that_is_no_number_closes_its_trajectory_with_an_error(policy, url, reward):
    def paid():
        with trajectory(url, reward=lambda _: reward) as made:
            opened.append(made)
            say(url, made, [{"role": "user", "content": "hi"}])

    opened = []
    with pytest.raises(UsageError, match="reward"):
        paid()
    assert policy.find(opened[0].id).finished().reward is None
    assert "reward" in policy.find(opened[0].id).error


def test_a_loss_that_takes_the_clients_words_is_refused_before_the_first_update(policy, url, monkeypatch):
    usual, before = policy_training.policy_gradient, policy.model.engine.version

    def everything(batch):
        return ((batch.documents >= 0) & (torch.arange(batch.tokens.shape[1]) > 0)).float()

    def unmasked(asked):
        return lambda model, batch: usual(asked)(model, replace(batch, weight=everything(batch)))

    monkeypatch.setattr(policy_training, "policy_gradient", unmasked)
    monkeypatch.setattr(policy, "updates", 0)
    with pytest.raises(UsageError, match="not trained: inserted_tokens"):
        Policy(url).train([[talk(url, float(seed % 2), seed, turns=1).id for seed in range(2)]])
    assert policy.model.engine.version == before


def test_turns_that_are_not_as_they_were_sampled_are_refused_by_name_though_nothing_be_left_of_one(policy, url, tmp_path):
    made = []
    for seed in range(2):
        with trajectory(url, reward=float(seed)) as each:
            client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=WEB, default_headers=each.headers)
            for tokens in (1, 6):
                client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}], max_tokens=tokens, seed=seed)
        made.append(each.id)
    with catalogue()["agent's conversation rendered and encoded again"].plant(tmp_path), pytest.raises(GuardStop, match="every_turn"):
        policy.learn([made])


def test_a_history_that_the_client_rewrote_begins_a_sequence_in_which_it_is_not_trained_on(policy, url):
    with trajectory(url, reward=1.0) as made:
        first = say(url, made, [{"role": "user", "content": "hi"}], seed=1).choices[0].message
        say(url, made, [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I never said this"},
                        {"role": "user", "content": "go on"}], seed=2)
    sequences = policy.find(made.id).finished().sequences
    assert [len(each.turns) for each in sequences] == [1, 1]
    second = [token for token, said in zip(sequences[1].ids, sequences[1].sampled, strict=True) if said]
    assert len(second) == len(sequences[1].turns[0].ids)
    assert "never said" in policy.model.tokenizer.decode(sequences[1].ids)
    assert first.content is not None


@pytest.mark.parametrize("lost", ["branch", "hear"])
def test_a_turn_that_was_sampled_after_another_text_than_its_request_carried_is_not_trained_on(policy, url, monkeypatch, lost):
    def noted(self, messages, pieces):
        self.messages += messages

    made, before = [], policy.model.engine.version
    asked = [{"role": "user", "content": "hi"}]
    monkeypatch.setattr(Transcript, lost, noted)
    for seed in range(2):
        with trajectory(url, reward=float(seed)) as each:
            said = {"role": "assistant", "content": say(url, each, asked, seed=seed).choices[0].message.content}
            say(url, each, [*asked, said if lost == "hear" else {**said, "content": "never said"}, *asked], seed=seed)
        made.append(each.id)
    with pytest.raises(GuardStop, match=r"not trained: heard: .* was not heard"):
        policy.learn([made])
    assert policy.model.engine.version == before


def test_a_call_that_the_client_adds_to_what_was_said_is_shown_as_one_and_trained_on(policy, url):
    """In this format earlier calls are shown as text."""
    call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    made = []
    for seed in range(2):
        with trajectory(url, reward=float(seed)) as each:
            asked = [{"role": "user", "content": "hi"}]
            said = say(url, each, asked, seed=seed, tools=[ADD]).choices[0].message.model_dump(exclude_none=True)
            more = [{"role": "user", "content": "and?"}, {"role": "assistant", "content": None, "tool_calls": [call]},
                    {"role": "tool", "content": "3", "tool_call_id": "a1b2c3d4e"}]
            say(url, each, [*asked, said, *more], seed=seed, tools=[ADD])
        made.append(each.id)
        assert '"arguments": {"a": 1, "b": 2}' in policy.model.tokenizer.decode(policy.find(each.id).sampled[1].prompt)
    assert Policy(url).train([made])["trained"] == 2


@pytest.mark.parametrize(("wrong", "words"), [
    (lambda name, rows: [*rows, *rows], r"2 rows are in updates.jsonl|stands 2 times"),
    (lambda name, rows: [], "0 rows are in updates.jsonl"),
    (lambda name, rows: [] if name == "updates.jsonl" else rows, "0 rows are in updates.jsonl"),
    (lambda name, rows: rows[1:] if name == "trajectories.jsonl" else rows, "are not in trajectories.jsonl"),
    (lambda name, rows: [{**row, "kind": "with tools"} if "kind" in row else row for row in rows], "written down as with tools"),
    (lambda name, rows: [{**row, "dropped": "late"} if "sequences" in row else row for row in rows], "dropped, and"),
    (lambda name, rows: [{**row, "reward": 0.5} if "id" in row else row for row in rows], "with the reward 0.5"),
    (lambda name, rows: [{**row, "loss": 0.5} if "loss" in row else row for row in rows], "which says what the client is told"),
    (lambda name, rows: [{**row, "sequences": row["sequences"][:1]} if "sequences" in row else row for row in rows], "sampled ids"),
    (lambda name, rows: [{**row, "id": "x"} if "kind" in row else row for row in rows], "are not in trajectories.jsonl"),
])
def test_an_update_that_is_written_down_otherwise_than_it_was_ends_the_policy(policy, url, monkeypatch, wrong, words):
    usual = policy_training.append_json_rows
    talk(url, 1.0, 5, turns=1)  # in no group
    made = []
    for seed in range(2):
        with trajectory(url, reward=float(seed)) as each:
            for content in ("hi", "no, this"):
                say(url, each, [{"role": "user", "content": content}], seed=seed)
        made.append(each.id)
    monkeypatch.setattr(policy.model, "broken", None)  # afterwards too
    monkeypatch.setattr(policy_training, "append_json_rows", lambda path, rows: usual(path, wrong(path.name, [*rows])))
    with pytest.raises(GuardStop, match=f"not recorded: update_rows: .*({words}).*; start again"):
        policy.learn([made])
    assert "is wrong" in policy.model.broken


def test_an_update_that_the_disk_has_no_room_for_ends_the_policy(policy, url, monkeypatch):
    def full(path, rows):
        raise StoreError(f"{path}: no space left on the device")

    monkeypatch.setattr(policy.model, "broken", None)  # afterwards too
    monkeypatch.setattr(policy_training, "append_json_rows", full)
    with pytest.raises(StoreError, match="no space left"):
        policy.learn([[talk(url, float(seed), seed, turns=1).id for seed in range(2)]])
    assert "could not be written down" in policy.model.broken


def test_calls_and_faults_are_counted_over_all_turns(policy, url):
    """Those that were sampled here hold none; a turn that cannot be read is said for the policy."""
    with trajectory(url, reward=1.0) as made:
        asked, faulty = [{"role": "user", "content": "hi"}], "<tool_call>no</tool_call>"
        for text in (faulty, faulty, "seven"):
            policy.begin_turn(made.id, read_chat({"model": "policy", "messages": asked, "tools": [ADD]}), policy.model)
            ids = tuple(policy.model.tokenizer.encode(text))
            said = {"role": "assistant", "content": text}
            policy.end_turn(made.id, Completion(ids, (-1.0,) * len(ids), "length", policy.model.engine.version), said, "there")
            asked = [*asked, said, {"role": "user", "content": "and?"}]
    found = policy.find(made.id)
    assert (found.calls, found.faults) == calls_and_faults(found.heard) == (0, 2)
    assert check_calls([found.finished()], [found.heard]).outcome is Outcome.PROVEN
    for wrong in ({"faults": 0}, {"faults": 1}, {"calls": 1}):
        assert "turn by turn there are 0 and 2" in check_calls([replace(found.finished(), **wrong)], [found.heard]).reason


def test_room_is_asked_for_by_the_ids_that_were_sampled_and_not_by_their_text(policy, url):
    """A byte that is no character is one id, and three where its text is encoded again."""
    tokenizer, ids, asked = policy.model.tokenizer, (0x80,) * 100, [{"role": "user", "content": "hi"}]
    with trajectory(url, reward=1.0) as made:
        policy.begin_turn(made.id, read_chat({"model": "policy", "messages": asked}), policy.model)
        said = {"role": "assistant", "content": tokenizer.decode(ids)}
        policy.end_turn(made.id, Completion(ids, (-1.0,) * 100, "length", policy.model.engine.version), said, "there")
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=WEB, default_headers=made.headers)
        again = client.chat.completions.create(model="policy", messages=[*asked, said, *asked], max_tokens=90)
        assert 100 < again.usage.prompt_tokens < policy.model.engine.length - 90 < len(tokenizer.encode(said["content"]))
        assert len(policy.find(made.id).finished().sequences) == 1


def test_a_turn_that_was_cancelled_was_never_said(policy, url):
    with trajectory(url, reward=1.0) as made:
        say(url, made, [{"role": "user", "content": "first"}], seed=1)
        policy.end_turn(made.id, None, {}, "")  # as the server does for a client that left
        say(url, made, [{"role": "user", "content": "first"}, {"role": "user", "content": "second"}], seed=2)
    last = policy.model.tokenizer.decode(policy.find(made.id).finished().sequences[-1].ids)
    assert last.count("first") == last.count("second") == 1


def test_a_block_that_raises_gives_no_reward(policy, url):
    made = None

    def fails():
        nonlocal made
        with trajectory(url, reward=1.0) as made:
            say(url, made, [{"role": "user", "content": "hi"}])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    closed = policy.find(made.id)
    assert (closed.closed, closed.reward, closed.finished().reward) == (True, None, None)


@pytest.mark.parametrize(("options", "param"), [
    ({"temperature": 0.5}, "temperature"), ({"n": 2}, "n"), ({"response_format": {"type": "json_object"}}, "response_format")])
def test_what_another_distribution_would_say_is_refused_by_name(url, options, param):
    with trajectory(url, reward=1.0) as made:
        say(url, made, [{"role": "user", "content": "hi"}])
        with pytest.raises(openai.BadRequestError) as caught:
            say(url, made, [{"role": "user", "content": "hi"}], **options)
    assert caught.value.param == param


def test_the_shipped_agent_runs_and_what_it_leaves_opens_again(policy, url, capsys):
    spec = importlib.util.spec_from_file_location("tool_agent", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(url, "policy", updates=1, groups=1, members=2)
    assert capsys.readouterr().out
    saved = open_artifact(policy.save().folder)
    assert all(torch.equal(a, b) for a, b in zip(build_model(saved).parameters(), policy.weights.parameters(), strict=True))


def test_the_page_about_your_agent_works_as_it_is_written(policy, url):
    """Its code, with this server's address and name; a model that knows nothing is rewarded every second time."""
    page = GUIDE.read_text().partition("## Bring your agent")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    assert len(blocks) == 3
    code = "\n".join(blocks)
    for written, here in {"http://127.0.0.1:8000/v1": url, "smollm2-135m": "policy", '"5" in t.answer': "len(group) % 2"}.items():
        assert written in code
        code = code.replace(written, here)
    before, found = policy.model.engine.version, {}
    exec(compile(code, "docs/guide.md", "exec"), found)
    assert found["told"]["before"] == before != policy.model.engine.version


# ---------------------------------------------------------------- an adapter on its base


@pytest.fixture(scope="module")
def adapted(served, tmp_path_factory):
    """An adapter of rank 4 on the base of the policy above."""
    root, folder = tmp_path_factory.mktemp("adapted"), served[0].model.artifact.path
    serving = EngineThread(ServerSize(slots=2))
    options = Trained(out=str(root), model=str(folder), lora_r=4, lora_target_modules=("q_proj",))
    model = serving.open("policy", folder, learns=True, lora=options)
    policy = serving.ask(lambda: ServedPolicy(model, root / "out", 1e-2)).result()
    with serve_in_background(serving, policy=policy) as url:
        yield policy, url


def group(url, members=4):
    return [talk(url, float(seed % 2), seed) for seed in range(members)]


def test_an_adapter_learns_under_its_versions_and_its_base_stays(adapted):
    policy, url = adapted
    frozen = {name: parameter.detach().clone() for name, parameter in policy.weights.named_parameters() if not parameter.requires_grad}
    versions = [policy.model.engine.version]
    for _ in range(2):
        with trajectory(url, reward=1.0) as asked:
            assert say(url, asked, [{"role": "user", "content": "hi"}]).system_fingerprint == asked.version == versions[-1]
        made = group(url)
        sampled = {each.id: [turn.ids for turn in policy.find(each.id).finished().turns] for each in made}
        due = ("frozen", *LAWS, *(() if policy.updates else INSERTED))
        told = Policy(url).train([[each.id for each in made]])
        assert {verdict["check"]: verdict["outcome"] for verdict in told["verdicts"]} == dict.fromkeys(due, "PROVEN")
        versions.append(told["version"])
    assert len(set(versions)) == 3
    rows = trained_rows(policy)[-len(sampled):]
    assert {row["id"]: [token for each in row["sequences"] for token, said in zip(each["ids"], each["sampled"], strict=True) if said]
            for row in rows} == {name: [token for turn in turns for token in turn] for name, turns in sampled.items()}
    now = dict(policy.weights.named_parameters())
    assert all(torch.equal(now[name], tensor) for name, tensor in frozen.items())
    assert all(".q" in name or ".qkv" in name for name in now.keys() - frozen.keys())


def test_a_served_adapter_is_saved_as_one_and_goes_on_where_it_stopped(adapted, tmp_path):
    policy, url = adapted
    Policy(url).train([[each.id for each in group(url)]])
    folder = policy.save().folder
    saved = open_artifact(folder)
    assert saved.base is not None
    assert saved.base.digest == policy.model.artifact.digest
    serving = EngineThread(ServerSize(slots=2))
    model = serving.open("again", folder, learns=True)
    again = serving.ask(lambda: ServedPolicy(model, tmp_path / "out", 1e-2)).result()
    serving.stop()
    one, other = (dict(each.weights.named_parameters()) for each in (policy, again))
    assert all(torch.equal(one[name], other[name]) and one[name].requires_grad == other[name].requires_grad for name in one)


def test_a_base_that_an_update_changed_ends_the_policy(adapted, monkeypatch):
    policy, url = adapted
    usual, made = policy_training.train, group(url)

    def strays(*given, **named):
        steps = list(usual(*given, **named))
        with torch.no_grad():
            policy.weights.embed.weight[0, 0] += 1e-3
        return steps

    monkeypatch.setattr(policy_training, "train", strays)
    with pytest.raises(GuardStop, match=r"base of 'policy' changed .*embed"):
        policy.learn([[each.id for each in made]])
    opened = ClientTrajectory(**Policy(url)._post("/trajectories", {}))
    with pytest.raises(openai.InternalServerError, match="start again"):
        say(url, opened, [{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(("options", "sentence"), [
    (("--lora-r", "4"), "--lora-r 4 has no effect without --train"), (("--lora-alpha", "4"), "give --train too"),
    (("--train", "--lora-alpha", "4"), "--train needs --out"),
    (("--out", "x"), "for --train alone"), (("--train", "--rollouts", "--out", "x"), "give one of them")])
def test_a_server_learns_or_takes_weights_or_neither(options, sentence, capsys):
    assert run(["serve", "nowhere", *options]) == 2
    assert sentence in capsys.readouterr().err
