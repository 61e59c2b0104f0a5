"""What a saved artifact says is judged in its proof: held against its parent's texts, said and not demanded where there is no parent."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from assay.errors import GuardStop, UsageError
from assay.evaluation.loaded_model import LoadedModel
from assay.guard import behaviour_checks, proof
from assay.guard.behaviour_checks import check_generations, check_health, health_prompts
from assay.guard.proof import ProofRequest, examine_artifact
from assay.guard.proof_subject import ProofSampling, ProofSubject
from assay.health.generation_probe import ModelGenerator
from assay.recipes import hand_over, run, sft
from assay.recipes.options import Sft
from assay.store import checkpoint
from assay.store.artifact import open_artifact
from assay.store.checkpoint import Checkpoint
from assay.store.export_artifact import export_artifact
from assay.store.ledger import Ledger
from assay.store.saving import Ancestor, Lineage, model_contents
from assay.testing.fault_injection import FAULTS
from assay.testing.tiny_models import forget_manifest, nudge, save_model, tiny_model, tiny_tokenizer, tokenizer_and_stops
from assay.verdict import Outcome, Verdict, overall, without_optional
from assay.zoo import speech_faults
from assay.zoo.speech_faults import save_talking_model, talking_model
from tests.zoo.sightings import sight

MINE = [fault for fault in FAULTS.values() if fault.job.__module__ == speech_faults.__name__]


def without_others(monkeypatch) -> None:
    """Skip the check through transformers, which is another test's matter, and takes seconds."""
    monkeypatch.setattr(proof, "PROOF_CHECKS", tuple(check for check in proof.PROOF_CHECKS if check.__name__ != "check_consumer"))


def subject(path: Path, against: Path | None = None, **probing) -> ProofSubject:
    found = open_artifact(path)
    return ProofSubject(found.raw, found, None if against is None else open_artifact(against), probing=ProofSampling(**probing))


def looping(model):
    with speech_faults.looped_by_training(Path()):
        return speech_faults.train_further(model)


@pytest.mark.parametrize("fault", MINE, ids=lambda fault: fault.name)
def test_a_model_that_speaks_badly_is_caught(fault, monkeypatch):
    without_others(monkeypatch)
    seen = sight(fault)
    assert seen.caught, seen.planted
    assert not seen.false_alarm, seen.clean
    if fault.name == "words shuffled by training":  # what was saved is what was trained: nothing else shows it
        refuting = [verdict for verdict in seen.planted if verdict.outcome is Outcome.REFUTED]
        assert [verdict.check for verdict in refuting] == ["health"]
        assert "word soup" in refuting[0].reason


def test_there_are_some():
    assert len(MINE) == 5


def test_clean_texts_are_enough_after_one_round(tmp_path):
    verdict = check_health(subject(save_talking_model(tmp_path / "model", talking_model()).folder))
    assert verdict.outcome is Outcome.PROVEN
    assert (verdict.evidence["bad"], verdict.evidence["n"]) == (0, 8)
    assert "0.0% to 43.9%" in verdict.reason


def test_without_a_parent_a_babbler_is_unproven_and_nothing_is_demanded(tmp_path):
    verdict = check_health(subject(save_talking_model(tmp_path / "model", looping(talking_model())).folder))
    assert verdict.outcome is Outcome.UNPROVEN
    assert verdict.evidence["causes"] == {"repetition": 8}
    assert "in its first steps every model babbles" in verdict.reason
    assert without_optional([verdict]) == []


def test_a_parent_that_babbles_as_well_lost_nothing(tmp_path):
    parent, child = save_model(tmp_path / "parent", tiny_model()).folder, save_model(tmp_path / "child", nudge(tiny_model())).folder
    verdict = check_health(subject(child, parent))
    assert verdict.outcome is Outcome.UNPROVEN
    assert verdict.reason.endswith("of its parent's 8 of 8: no better")


def test_a_model_that_learned_to_speak_is_not_held_to_its_parent(tmp_path):
    """To a parent that only repeats itself, words in order are anything but likely."""
    parent, child = save_talking_model(tmp_path / "parent", looping(talking_model())).folder, save_talking_model(tmp_path / "child",
                                                                                                                 talking_model()).folder
    assert check_health(subject(child, parent)).outcome is not Outcome.REFUTED


def test_silence_is_neither_proof_nor_fault(tmp_path):
    """What was taught sums alone may have nothing to say to the rest."""
    mute = talking_model()
    with torch.no_grad():
        mute.head.weight[list(speech_faults.spoken_tokenizer()[1].stop_ids)] += 8 * mute.embed.weight[0] / speech_faults.LOUD_EMBEDDING
    verdict = check_health(subject(save_talking_model(tmp_path / "mute", mute).folder,
                                   save_talking_model(tmp_path / "parent", talking_model()).folder))
    assert verdict.outcome is Outcome.UNPROVEN
    assert set(verdict.evidence["causes"]) == {"empty"}
    assert verdict.reason.endswith("nothing is wrong with what was said")


def test_every_other_text_is_enough(tmp_path, monkeypatch):
    """At the rate of the run that went wrong: 35 of 72."""
    good, bad = (save_talking_model(tmp_path / name, model).folder for name,
                 model in (("good", talking_model()), ("bad", looping(talking_model()))))
    well, badly = (LoadedModel(open_artifact(path)) for path in (good, bad))
    real = LoadedModel.complete

    def every_other(self, requests):
        said, ill = real(well, requests), real(badly, requests)
        if self.identity != badly.identity:
            return said
        return [(ill if (i + request.sampling.seed) % 2 else said)[i] for i, request in enumerate(requests)]

    monkeypatch.setattr(LoadedModel, "complete", every_other)
    verdict = check_health(subject(bad, good))
    assert verdict.outcome is Outcome.REFUTED, verdict
    assert 8 <= verdict.evidence["bad"] <= 24


def test_samples_can_be_left_out(tmp_path):
    path = save_talking_model(tmp_path / "model", talking_model()).folder
    verdict = check_health(subject(path, samples=0))
    assert verdict.outcome is Outcome.UNPROVEN
    assert without_optional([verdict]) == []
    with pytest.raises(UsageError, match="--probe-samples -1"):
        ProofSampling(-1)


def test_a_context_too_short_for_questions_is_said(tmp_path):
    path = save_model(tmp_path / "model", tiny_model(max_length=48)).folder
    assert "no room for our questions" in check_health(subject(path)).reason


def test_a_beginning_is_cut_to_a_short_context(tmp_path):
    contents = model_contents(tiny_model(max_length=48), tiny_tokenizer(template=False), tokenizer_and_stops()[1], Lineage())
    speaker = ModelGenerator(LoadedModel(open_artifact(checkpoint.write_checkpoint(tmp_path / "model", contents).folder)),
                             behaviour_checks.HEALTH_SAMPLING)
    prompts = health_prompts(speaker)
    assert len(prompts) == 8
    assert all(0 < speaker.loaded.length_of(prompt.text, raw=True) <= 48 - behaviour_checks.HEALTH_SAMPLING.max_new for prompt in prompts)
    assert prompts[1].text == "ran outside and"


def test_a_gpu_that_is_full_leaves_the_cpu(tmp_path, monkeypatch):
    real = behaviour_checks._speaker

    def full(artifact, built, device, ahead):
        if device == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(artifact, built, device, ahead)

    monkeypatch.setattr(behaviour_checks, "_speaker", full)
    verdict = check_health(subject(save_talking_model(tmp_path / "model", talking_model()).folder, device="cuda"))
    assert (verdict.outcome, verdict.evidence["device"]) == (Outcome.PROVEN, "cpu")


def test_a_copy_shares_what_was_heard_of_the_very_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where a file differs, it is asked for itself; a source without a hallmark has nothing to share."""
    without_others(monkeypatch)
    source = save_talking_model(tmp_path / "source", talking_model()).folder
    bound = export_artifact(open_artifact(source), "hf", tmp_path / "copy")
    request = ProofRequest(str(tmp_path / "copy"), against=str(source), expect="same", bound=bound)

    def shared() -> set[str]:
        return {verdict.check for verdict in examine_artifact(request) if "shared_with" in verdict.evidence}

    assert shared() == set()
    monkeypatch.setattr(proof, "prove", lambda request, **_: examine_artifact(request))
    assert overall(without_optional(proof.prove_checkpoint(source))) is Outcome.PROVEN
    assert shared() == {"generations", "health"}
    monkeypatch.setattr(Checkpoint, "model_files", lambda checkpoint: {"config.json": checkpoint.folder.name})
    assert shared() == set()


def test_rounds_that_are_drawn_together_are_those_that_are_drawn_one_by_one(tmp_path: Path):
    loaded = LoadedModel(open_artifact(save_talking_model(tmp_path / "model", talking_model()).folder))
    alone, together = (ModelGenerator(loaded, behaviour_checks.HEALTH_SAMPLING, ahead=ahead) for ahead in (1, 4))
    prompts = health_prompts(alone)
    assert [alone(prompts, round) for round in range(4)] == [together(prompts, round) for round in range(4)]


def test_a_request_reaches_the_fresh_process_whole():
    request = ProofRequest("a", against="b", probing=ProofSampling(7, "cuda:1"), checks=("consumer",))
    assert ProofRequest.from_fields(json.loads(json.dumps(asdict(request)))) == request

# ---------------------------------------------------------------- in a recipe


class WhenAsked:
    """Replacement of `Prover`: a proof is made when the loop asks for it, in the loop's own thread."""

    witnesses, proves = False, True

    def __init__(self):
        self.pending = []

    @property
    def busy(self) -> bool:
        return bool(self.pending)

    def start_early(self, device: str) -> None:
        pass

    def replay_early(self, *_) -> None:
        pass

    def start(self, folder: Path, **options) -> None:
        self.pending.append((folder, options))

    def wait_no_longer(self) -> None:
        pass

    def finished(self):
        pending, self.pending = self.pending, []
        return [(folder, proof.prove_checkpoint(folder, **options)) for folder, options in pending]

    close = finished


def in_this_process(monkeypatch) -> list[ProofRequest]:
    """Proofs without a process each: what they say is the same."""
    asked: list[ProofRequest] = []

    def proved(request: ProofRequest, **_) -> list[Verdict]:
        asked.append(request)
        return examine_artifact(request)

    without_others(monkeypatch)
    monkeypatch.setattr(run, "Prover", WhenAsked)
    for module in (proof, hand_over):
        monkeypatch.setattr(module, "prove", proved)
    return asked


def tuning(tmp_path: Path, **options) -> Sft:
    save_talking_model(tmp_path / "base", talking_model())
    rows = [{"prompt": "Where?", "completion": f" {a} {b}"} for a,
            b in zip(speech_faults.TINY_WORDS, speech_faults.TINY_WORDS[1:], strict=False)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Sft(data=(str(tmp_path / "rows.jsonl"),), out=str(tmp_path / "run"), model=str(tmp_path / "base"), max_length=48,
               batch_tokens=192,
               max_steps=2, num_train_epochs=2, learning_rate=1e-4, held_out=0.2, device="cpu", **options)


def probed(tmp_path: Path) -> dict[str, list[dict]]:
    events = Ledger(tmp_path / "run" / "ledger.jsonl").events()
    return {event.get("checkpoint"): [v for v in event["verdicts"] if v["check"] == "health"] for event in events
            if event["kind"] in ("proof", "hand over")}


def test_every_checkpoint_of_a_run_is_probed_and_what_it_hands_over(tmp_path, monkeypatch):
    in_this_process(monkeypatch)
    sft.sft(tuning(tmp_path), lambda _: None)
    found = probed(tmp_path)
    assert found.keys() >= {"step-000000", "step-000001", "step-000002"}
    assert all(verdict["outcome"] == "PROVEN" for verdicts in found.values() for verdict in verdicts), found
    assert all(found.values())
    from assay.report.page import render_report
    from assay.report.run_record import read_run

    page = render_report(read_run(tmp_path / "run"))
    assert "its proof" in page
    assert "step-000002, handed over" in page or "step-000001, handed over" in page


def test_a_run_whose_saves_garble_is_stopped_by_its_proof(tmp_path, monkeypatch):
    in_this_process(monkeypatch)
    config = tuning(tmp_path)
    with speech_faults.head_scrambled_on_the_way_to_the_disk(tmp_path), pytest.raises(GuardStop, match=r"health: \d+ of \d+ texts are mal"):
        sft.sft(config, lambda _: None)


def test_no_samples_reach_no_proof_of_the_run(tmp_path, monkeypatch):
    asked = in_this_process(monkeypatch)
    sft.sft(tuning(tmp_path, probe_samples=0), lambda _: None)
    assert {request.probing for request in asked} == {ProofSampling(0, "cpu")}
    assert len(asked) == 4
    found = [verdict["reason"] for verdicts in probed(tmp_path).values() for verdict in verdicts]
    assert set(found) == {"no texts were asked for (--probe-samples 0)"}

# ---------------------------------------------------------------- the stop token


def without_a_stop(model):
    """Model whose words go round: what ended a text leads to the first word."""
    tokenizer, stops = speech_faults.spoken_tokenizer()
    first = tokenizer.encode(f" {speech_faults.TINY_WORDS[0]}")[0]
    with torch.no_grad():
        model.head.weight[first] += sum(model.head.weight[id] for id in stops.stop_ids)
        model.head.weight[list(stops.stop_ids)] = -model.head.weight[list(stops.stop_ids)]
    return model


def child_of(parent: Path, where: Path, model) -> Path:
    """Child as a fine-tuning saves it, with nothing on record of stop tokens."""
    return save_talking_model(where, model, Lineage("moved", Ancestor(open_artifact(parent).digest, str(parent)))).folder


def test_a_model_that_unlearned_its_stop_token_is_refuted_as_a_checkpoint_and_as_a_foreign_folder(tmp_path):
    parent = save_talking_model(tmp_path / "parent", talking_model()).folder
    child = child_of(parent, tmp_path / "child", without_a_stop(talking_model()))
    for where in (child, forget_manifest(child)):
        verdict = check_generations(subject(where, parent))
        assert verdict.outcome is Outcome.REFUTED, verdict
        assert "lost the stop token" in verdict.reason


def test_a_model_that_still_ends_or_never_did_is_not_refuted(tmp_path):
    parent = save_talking_model(tmp_path / "parent", talking_model()).folder
    assert check_generations(subject(child_of(parent, tmp_path / "a", nudge(talking_model())), parent)).outcome is Outcome.PROVEN
    endless = save_talking_model(tmp_path / "endless", without_a_stop(talking_model())).folder
    verdict = check_generations(subject(child_of(endless, tmp_path / "b", nudge(without_a_stop(talking_model()))), endless))
    assert verdict.outcome is Outcome.PROVEN
    assert "its parent's do not end either" in verdict.reason


def test_a_model_that_learned_to_say_more_is_given_more_room(tmp_path, monkeypatch):
    """Nothing ends within two tokens, and everything within more: no stop token was lost."""
    parent = save_talking_model(tmp_path / "parent", talking_model()).folder
    child = subject(child_of(parent, tmp_path / "child", nudge(talking_model())), parent)
    real = behaviour_checks.greedy_completions
    monkeypatch.setattr(behaviour_checks, "greedy_completions", lambda model, artifact, new=2, **room: real(model, artifact, new, **room))
    monkeypatch.setattr(behaviour_checks, "AGAIN", 2)
    verdict = check_generations(child)
    assert verdict.outcome is Outcome.PROVEN
    assert "within 256" in verdict.reason


def test_a_longer_speaker_that_knows_where_its_parent_ended_is_unproven_and_not_stopped(tmp_path, monkeypatch):
    parent = save_talking_model(tmp_path / "parent", talking_model()).folder
    monkeypatch.setattr(behaviour_checks, "_ended", lambda completions: 0)
    verdict = check_generations(subject(child_of(parent, tmp_path / "child", nudge(talking_model())), parent))
    assert verdict.outcome is Outcome.UNPROVEN
    assert without_optional([verdict]) == []


def test_a_fine_tuning_that_unlearns_the_stop_token_is_stopped(tmp_path, monkeypatch):
    in_this_process(monkeypatch)
    real = sft.tuning_optimizer

    def unlearning(config, start):
        optimizer = real(config, start)
        optimizer.register_step_post_hook(lambda *_: without_a_stop(start.model) and None)
        return optimizer

    monkeypatch.setattr(sft, "tuning_optimizer", unlearning)
    with pytest.raises(GuardStop, match="lost the stop token"):
        sft.sft(tuning(tmp_path, save_steps=1), lambda _: None)
