"""Probes: healthy speakers are proven, sick ones refuted early and by cause, and the first bad checkpoint is found."""

import json
from dataclasses import replace

import numpy as np
import pytest

from assay.config import parse
from assay.errors import AssayError, DataError, UsageError
from assay.evaluation.loaded_model import LoadedModel
from assay.generate.generation_request import GenerationRequest, Sampling
from assay.health.generation_probe import (
    EndpointGenerator,
    GeneratedText,
    Health,
    ModelGenerator,
    compare_health,
    first_malformed,
    judge_texts,
    open_endpoint,
    probe,
)
from assay.health.probe_prompts import BUILT_IN_PROMPTS, TEXT_BEGINNINGS, ProbePrompt, read_probe_prompts
from assay.model.lora import fresh, plan
from assay.store import checkpoint as checkpoint_store
from assay.store.artifact import build_model, open_artifact
from assay.store.export_artifact import export_artifact
from assay.store.saving import Ancestor, Lineage, adapter_contents
from assay.testing.tiny_models import ADAPTED_LAYERS, live_patch, nudge, save_model, tiny_model
from assay.verbs import probe as verb
from assay.verdict import Outcome
from assay.zoo import speech_faults
from assay.zoo.speech_faults import looped_by_training, save_talking_model, spoken_tokenizer, talking_model

from .texts import PARAGRAPH

WORDS = sorted(set(PARAGRAPH.split()))
OWN = {prompt.id: " ".join(np.random.default_rng(i).choice(WORDS, 40)) for i, prompt in enumerate((*BUILT_IN_PROMPTS, *TEXT_BEGINNINGS))}
LOOP = "and so it goes on and on " * 20


def healthy(prompts, round):
    return [GeneratedText(OWN.get(prompt.id, PARAGRAPH), "stop") for prompt in prompts]


def sick(share, seed=0):
    rng = np.random.default_rng(seed)

    def speak(prompts, round):
        return [GeneratedText(LOOP, "length") if rng.random() < share else one for one in healthy(prompts, round)]

    return speak


def test_a_healthy_speaker_is_proven_and_says_what_would_bound_it_further():
    health = probe(healthy, BUILT_IN_PROMPTS, n=4)
    verdict = health.verdict()
    assert verdict.outcome is Outcome.PROVEN
    assert "0 of 64 texts are malformed, a rate of 0.0% to 8.4%" in verdict.reason
    assert "clean samples that bound it: 116 at 5%, 320 at 2%, 680 at 1%" in verdict.reason


def test_too_few_clean_samples_prove_nothing():
    assert probe(healthy, BUILT_IN_PROMPTS[:4], n=2).verdict().outcome is Outcome.UNPROVEN


def test_half_malformed_is_refuted_early_and_by_cause():
    health = probe(sick(0.5), BUILT_IN_PROMPTS, n=4)
    assert len(health.samples) == 16
    verdict = health.verdict()
    assert verdict.outcome is Outcome.REFUTED
    assert verdict.evidence["causes"].keys() == {"repetition"}
    assert verdict.evidence["examples"][0]["text"] == LOOP


def test_what_is_tolerated_is_refuted_at_most_one_time_in_twenty():
    rounds = 200
    refuted = sum(Health("", tuple(judge_texts(BUILT_IN_PROMPTS, sick(0.05, seed)(BUILT_IN_PROMPTS, 0)))).interval[0] > 0.05
                  for seed in range(rounds))
    assert refuted / rounds <= 0.05


def test_one_answer_to_all_is_collapse():
    said = GeneratedText("There are 7 apples in the box, so the answer is 7.", "stop")
    health = probe(lambda prompts, round: [said] * len(prompts), BUILT_IN_PROMPTS, n=1)
    assert health.verdict().outcome is Outcome.REFUTED
    assert health.causes["same everywhere"] >= 14


def test_word_soup_needs_a_reference():
    soup = lambda prompts, round: [GeneratedText(f"lamp {prompt.id} under whose of quickly seven the roof", "stop") for prompt in prompts]
    surprise = lambda prompts, said: [8.0 if one.text.startswith("lamp") else 1.5 for one in said]
    usual = [sample.said.surprise for sample in probe(healthy, BUILT_IN_PROMPTS, n=1, surprise=surprise).samples]
    assert probe(soup, BUILT_IN_PROMPTS, n=1).bad == 0
    assert probe(soup, BUILT_IN_PROMPTS, n=1, surprise=surprise, usual=usual).causes == {"word soup": 16}
    assert probe(healthy, BUILT_IN_PROMPTS, n=1, surprise=surprise, usual=usual).bad == 0


def test_child_and_parent_are_paired_by_prompt():
    parent, child = probe(healthy, BUILT_IN_PROMPTS, n=2, name="parent"), probe(sick(0.7), BUILT_IN_PROMPTS, n=2)
    assert compare_health(child, parent)[1].outcome is Outcome.REFUTED
    assert compare_health(parent, parent)[1].outcome is Outcome.PROVEN
    assert compare_health(parent, child)[1].outcome is Outcome.PROVEN
    with pytest.raises(UsageError, match="not asked the same"):
        compare_health(child, probe(healthy, TEXT_BEGINNINGS, n=2))


@pytest.mark.parametrize("count", [5, 8, 40])
def test_the_first_bad_checkpoint_is_found(count):
    for bad_from in (0, 1, count // 2, count - 1, count):
        looks: list[str] = []

        def look(name, bad_from=bad_from, looks=looks):
            looks.append(name)
            return probe(sick(0.9 if int(name) >= bad_from else 0.0), BUILT_IN_PROMPTS, n=1)

        found = first_malformed([str(i) for i in range(count)], look)
        assert found.first_bad == (str(bad_from) if bad_from < count else None)
        assert found.last_good == (None if bad_from == 0 else str(bad_from - 1))
        assert len(looks) == len(set(looks)) <= 8


def test_of_a_few_checkpoints_every_one_is_looked_at():
    """One that was bad for a while is found too, which halving would pass over."""
    found = first_malformed(list("abcd"), lambda name: probe(sick(1.0) if name == "b" else healthy, BUILT_IN_PROMPTS, n=1, name=name))
    assert (found.last_good, found.first_bad, list(found.looked)) == ("a", "b", list("abcd"))


def test_prompts_of_several_domains_with_ids_of_their_own():
    for prompts in (BUILT_IN_PROMPTS, TEXT_BEGINNINGS):
        assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert {prompt.domain for prompt in BUILT_IN_PROMPTS} == {"chat", "reasoning", "code", "transcript clean-up", "off-domain"}
    assert not any(prompt.expected.ends for prompt in TEXT_BEGINNINGS)


def test_users_prompts(tmp_path):
    rows = tmp_path / "mine.jsonl"
    rows.write_text('{"prompt": "Think.", "tags": ["<think>"], "domain": "d"}\n{"prompt": "Say hi.", "short": true}\n')
    first, second = read_probe_prompts(rows)
    assert (first.expected.tags, first.domain, second.expected.short) == (("<think>",), "d", True)
    lines = tmp_path / "mine.txt"
    lines.write_text("One?\n\nTwo?\n")
    assert [prompt.text for prompt in read_probe_prompts(lines)] == ["One?", "Two?"]
    for wrong, says in (('{"text": "x"}', "unknown text"), ('{"prompt": 3}', "`prompt` is '3'"),
                        ('{"prompt": "x", "code": "yes"}', "expected bool"),
                        ('{"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}', "ends with the user's"),
                        ('{"prompt": [{"role": "wizard", "content": "x"}]}', "role system, user or assistant")):
        rows.write_text(wrong + "\n")
        with pytest.raises(DataError, match=says):
            read_probe_prompts(rows)


def test_conversations_with_a_system_message_are_probed_as_they_stand(tmp_path, server):
    rows, told = tmp_path / "mine.jsonl", [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the end"},
                                           {"role": "assistant", "content": "is"}, {"role": "user", "content": "and"}]
    rows.write_text(json.dumps({"id": "talk", "prompt": told}) + "\n")
    prompt, = read_probe_prompts(rows)
    assert (prompt.messages, prompt.text) == (told, "and")

    folder = save_model(tmp_path / "model", tiny_model()).folder
    speaker = ModelGenerator(LoadedModel(open_artifact(folder), device="cpu"), Sampling(2, 0.0))
    tokenizer = speaker.loaded.tokenizer
    asked = tuple(tokenizer.encode(tokenizer.render(told, add_generation_prompt=True)))
    expected, = speaker.loaded.complete([GenerationRequest(asked, Sampling(2, 0.0), ("talk",))])
    assert speaker([prompt], 0)[0].tokens == expected.ids
    speaker.raw = True
    with pytest.raises(UsageError, match="has no chat template"):
        speaker([prompt], 1)
    assert open_endpoint(server, Sampling(32, 0.5))([prompt], 0)[0].text == "You said 'Be brief.' to tiny at 0.5."


# ── through real models ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny model that was never trained: its texts are noise that never ends."""
    from assay.testing.tiny_models import save_model, tiny_model

    where = tmp_path_factory.mktemp("probe") / "run" / "checkpoints"
    for name in ("step-1", "step-2"):
        save_model(where / name, tiny_model())
    return where / "step-1"


def test_the_verb_refutes_an_untrained_model(checkpoint, capsys, tmp_path):
    prompts = tmp_path / "p.txt"
    prompts.write_text("".join(f"Tell me about {what}.\n" for what in ("rain", "bread", "time", "trees")))
    flags = parse(verb.FLAGS, [str(checkpoint), "--prompts", str(prompts), "-n", "2", "--max-new-tokens", "24", "--json", "--device",
                               "cpu"],
                  prog="assay probe")
    assert verb.run(flags) == 3
    facts = json.loads(capsys.readouterr().out)
    assert facts["health"]["bad"] == facts["health"]["n"]
    assert facts["verdicts"][0]["outcome"] == "REFUTED"


def test_the_verb_finds_the_first_bad_checkpoint_and_compares_with_a_parent(checkpoint, capsys, tmp_path):
    prompts = tmp_path / "p.txt"
    prompts.write_text("".join(f"Tell me about {what}.\n" for what in ("rain", "bread", "time", "trees", "snow", "salt")))
    common = ["--prompts", str(prompts), "-n", "1", "--max-new-tokens", "16", "--json", "--device", "cpu"]
    assert verb.run(parse(verb.FLAGS, ["--history", str(checkpoint.parent.parent), *common], prog="assay probe")) == 3
    facts = json.loads(capsys.readouterr().out)
    assert (facts["first_bad"], facts["last_good"]) == ("step-1", None)
    assert verb.run(parse(verb.FLAGS, [str(checkpoint), "--against", str(checkpoint), *common], prog="assay probe")) == 3
    facts = json.loads(capsys.readouterr().out)
    assert [v["outcome"] for v in facts["verdicts"]] == ["REFUTED", "PROVEN"]  # as bad as its parent, and no worse
    assert facts["health"]["samples"][0]["text"] == facts["parent"]["samples"][0]["text"]


def said(capsys, folder, *argv: str) -> dict:
    """Output of `assay probe` on twelve prompts of which any text is an answer."""
    prompts = folder / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Tell me of {what}.", "short": True, "ends": False}) + "\n" for what in WORDS[:12]))
    verb.run(parse(verb.FLAGS, [*argv, "--prompts", str(prompts), "-n", "1", "--max-new-tokens", "16", "--json", "--device", "cpu"],
                   prog="assay probe"))
    return json.loads(capsys.readouterr().out)


def test_every_form_of_a_model_says_the_same(capsys, tmp_path):
    """As a checkpoint, as a folder of transformers', as GGUF, and as an adapter with its base and merged."""
    saved = open_artifact(save_talking_model(tmp_path / "model", talking_model()).folder)
    export_artifact(saved, "hf", tmp_path / "hf", "float32")
    export_artifact(saved, "gguf", tmp_path / "model.gguf", "f16")
    patch = fresh(saved.config, plan(saved.config, ADAPTED_LAYERS), 4, 2.0, 0, saved.digest)
    model, base = nudge(build_model(replace(saved, patch=patch)), 0.05), Ancestor(saved.digest, str(saved.path))
    contents = adapter_contents(model, live_patch(model, saved.digest), base, spoken_tokenizer()[0], Lineage("moved", base))
    adapter = open_artifact(checkpoint_store.write_checkpoint(tmp_path / "adapter", contents).folder)
    export_artifact(adapter, "peft", tmp_path / "peft")
    export_artifact(adapter, "merged", tmp_path / "merged", "float32")
    texts = {name: [sample["text"] for sample in said(capsys, tmp_path, str(tmp_path / name))["health"]["samples"]]
             for name in ("model", "hf", "model.gguf", "adapter", "peft", "merged")}
    assert len(texts["model"]) == 12
    assert texts["model"] == texts["hf"] == texts["model.gguf"]
    assert texts["adapter"] == texts["peft"] == texts["merged"]


def test_the_history_of_a_run_is_bisected_to_where_it_went_wrong(capsys, tmp_path):
    with looped_by_training(tmp_path):
        spoiled = speech_faults.train_further(talking_model())
    for step in range(1, 5):
        save_talking_model(tmp_path / "checkpoints" / f"step-00000{step}", spoiled if step >= 3 else talking_model())
    facts = said(capsys, tmp_path, "--history", str(tmp_path))
    assert (facts["last_good"], facts["first_bad"]) == ("step-000002", "step-000003")
    assert set(facts["probed"]["step-000003"]["causes"]) == {"repetition"}


def test_a_run_or_an_artifact_must_be_named(tmp_path):
    for argv in ([], ["x", "--history", "y"]):
        with pytest.raises(UsageError, match="name one"):
            verb.run(parse(verb.FLAGS, argv, prog="assay probe"))
    with pytest.raises(UsageError, match="not a run"):
        verb.run(parse(verb.FLAGS, ["--history", str(tmp_path)], prog="assay probe"))


# ── endpoints ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def server():
    """A real server on the loopback that answers as OpenAI's API does."""
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer({"data": [{"id": "tiny"}]})

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            words = asked["messages"][0]["content"]
            if words == "broken":
                self.answer({"choices": []})
            elif words == "down":
                self.send_error(503)
            else:
                text = f"You said {words!r} to {asked['model']} at {asked['temperature']}."
                self.answer({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})

        def answer(self, document):
            body = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    serving = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=serving.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{serving.server_port}/v1"
    serving.shutdown()
    thread.join()
    serving.server_close()


def test_an_endpoint_is_asked_as_its_clients_ask(server):
    speaker = open_endpoint(server, Sampling(32, 0.5))
    assert speaker.model == "tiny"
    said = speaker([ProbePrompt("a", "d", "hello")], 0)
    assert said == [GeneratedText("You said 'hello' to tiny at 0.5.", "stop")]


def test_what_an_endpoint_fails_to_say_is_never_an_empty_text(server):
    speaker = EndpointGenerator(server, "tiny", Sampling(8))
    for words, says in (("broken", "no choices"), ("down", "answered 503")):
        with pytest.raises(AssayError, match=says):
            speaker([ProbePrompt("a", "d", words)], 0)
    with pytest.raises(AssayError, match="ConnectError"):
        EndpointGenerator("http://127.0.0.1:1/v1", "tiny", Sampling(8))([ProbePrompt("a", "d", "x")], 0)
    with pytest.raises(UsageError, match="not set"):
        open_endpoint(server, Sampling(8), key="NO_SUCH_KEY_HERE")
