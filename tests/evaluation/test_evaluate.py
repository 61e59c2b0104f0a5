"""An evaluation goes on where it was killed, agrees with itself, refuses a folder of another, and says what it did not see."""

import json
import math
import os
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch

from assay.comparison.pairwise import compare
from assay.comparison.read_results import read_eval
from assay.errors import DataError, GuardStop, UsageError
from assay.evaluation import evaluate as module
from assay.evaluation import loaded_model, soundness
from assay.evaluation.eval_folder import EvalFolder
from assay.evaluation.evaluate import Unsound, evaluate
from assay.evaluation.loaded_model import LoadedModel, encode_continuation, prompt_token_ids, rolling_windows
from assay.evaluation.summary import pass_at_ks, summarise
from assay.evaluation.task import Score
from assay.evaluation.tasks import TaskRequest, open_task
from assay.generate.engine import Engine
from assay.generate.generation_request import Sampling
from assay.kernels import draw_tokens
from assay.store import durable
from assay.store.artifact import open_artifact
from assay.testing.tiny_models import nudge, tiny_model
from assay.verbs import eval as verb
from assay.verdict import Outcome, Verdict, proven, refuted
from tests.evaluation.eval_fixtures import FACT, PROBLEMS, QUESTION, opened, saved, write_rows

WARM = Sampling(max_new=6, temperature=1.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("model") / "checkpoint")


@pytest.fixture
def model(checkpoint):
    return opened(checkpoint)


@pytest.fixture
def problems(tmp_path):
    return open_task(TaskRequest("gsm8k", write_rows(tmp_path / "problems.jsonl", PROBLEMS)))


def lines(folder):
    return [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]


def test_two_runs_of_one_model_and_seed_agree_and_another_seed_does_not(checkpoint, problems, tmp_path):
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        evaluate(opened(checkpoint), problems, tmp_path / name, k=3, sampling=replace(WARM, seed=seed))
    one, two, three = ((tmp_path / name / "scores.jsonl").read_bytes() for name in ("one", "two", "three"))
    assert one == two != three
    summaries = [json.loads((tmp_path / name / "eval.json").read_text()) for name in ("one", "two")]
    assert summaries[0] == summaries[1]


def test_a_killed_evaluation_ends_with_the_same_bytes(checkpoint, problems, tmp_path, monkeypatch):
    monkeypatch.setitem(module.COMPLETIONS_PER_PART, "cpu", 6)  # parts of two examples
    evaluate(opened(checkpoint), problems, tmp_path / "whole", k=3, sampling=WARM)

    def killed(done, of):
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(opened(checkpoint), problems, tmp_path / "killed", k=3, sampling=WARM, progress=killed)
    with (tmp_path / "killed" / "scores.jsonl").open("a") as file:
        file.write('{"id": "4", "samp')  # what a kill leaves of a line
    seen = []
    evaluate(opened(checkpoint), problems, tmp_path / "killed", k=3, sampling=WARM, progress=lambda done, of: seen.append(done))
    assert seen == [6, 8]
    for name in ("scores.jsonl", "eval.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_line_holds_all_that_its_scores_came_from(model, problems, tmp_path):
    found = evaluate(model, problems, tmp_path / "out", k=2, sampling=WARM)
    first = lines(tmp_path / "out")[0]
    assert first["checkpoint"] == model.artifact.digest
    assert first["dataset"] == json.loads((tmp_path / "out" / "eval.json").read_text())["dataset"]
    sample = first["samples"][1]
    assert sample["seed"] == model.seed_of(WARM, "0", 1) != first["samples"][0]["seed"]
    assert sample["text"] == model.tokenizer.decode(sample["ids"], special=False)
    assert sample["logprob"] < 0
    assert {"pass@1", "pass@2", "majority@2", "pass@1 read leniently", "parsed", "stopped", "hit the cap", "tokens"} <= set(found.estimates)
    assert all(estimate.n == len(PROBLEMS) for estimate in found.estimates.values())
    assert found.estimates["stopped"].mean + found.estimates["hit the cap"].mean == pytest.approx(1)


def test_samples_are_what_the_sampler_gives_for_the_prompt_alone(model, problems, tmp_path):
    evaluate(model, problems, tmp_path / "out", k=2, sampling=WARM)
    alone = model.generate_until({"3": problems.prompt(problems.examples[3])}, WARM, k=2, stop=(), raw=False)["3"]
    assert [sample["ids"] for sample in lines(tmp_path / "out")[3]["samples"]] == [list(completion.ids) for completion in alone]


@pytest.mark.parametrize("change", ["row", "seed", "k", "model", "limit"])
def test_another_evaluation_in_the_same_folder_is_refused(change, checkpoint, tmp_path):
    data = write_rows(tmp_path / "a.jsonl", PROBLEMS)
    evaluate(opened(checkpoint), open_task(TaskRequest("gsm8k", data)), tmp_path / "out", k=2, sampling=WARM)
    rows = [*PROBLEMS[:-1], PROBLEMS[-1] | {"answer": "#### 28"}] if change == "row" else PROBLEMS
    task = open_task(TaskRequest("gsm8k", write_rows(data, rows), limit=5 if change == "limit" else None))
    model = opened(saved(tmp_path / "other", seed=1) if change == "model" else checkpoint)
    sampling = replace(WARM, seed=1) if change == "seed" else WARM
    with pytest.raises(DataError, match="give another folder"):
        evaluate(model, task, tmp_path / "out", k=3 if change == "k" else 2, sampling=sampling)


def test_another_grader_in_the_same_folder_or_a_comparison_is_refused(checkpoint, tmp_path):
    """By its name, and by what is in its file: rows that one graded are no rows of the other."""
    data, mine = write_rows(tmp_path / "a.jsonl", PROBLEMS), tmp_path / "mine.py"
    mine.write_text("def grade(prompt, completion, row):\n    return float(completion.strip() == row['answer'])\n")
    evaluate(opened(checkpoint), open_task(TaskRequest("graded", data, grader=f"{mine}:grade")), tmp_path / "out", sampling=WARM)
    usual = mine.read_text()
    mine.write_text(usual.replace("row['answer'])", "row['answer']) or 0.01 * (len(completion) == 1)"))
    for grader in ("answer", f"{mine}:grade"):
        with pytest.raises(DataError, match="an evaluation with another grader"):
            evaluate(opened(checkpoint), open_task(TaskRequest("graded", data, grader=grader)), tmp_path / "out", sampling=WARM)
    evaluate(opened(checkpoint), open_task(TaskRequest("graded", data, grader=f"{mine}:grade")), tmp_path / "other", sampling=WARM)
    with pytest.raises(DataError, match="not asked the same: grader"):
        compare([read_eval(tmp_path / name, None, None) for name in ("out", "other")])
    mine.write_text(usual)
    evaluate(opened(checkpoint), open_task(TaskRequest("graded", data, grader=f"{mine}:grade")), tmp_path / "out", sampling=WARM)


def test_figures_that_are_not_what_was_written_are_withdrawn(model, problems, tmp_path, monkeypatch):
    """They lay there as before, and a comparison took them."""
    monkeypatch.setattr(module.recount, "check_read_back", lambda *_: refuted("read back", "another file"))
    with pytest.raises(Unsound, match="another file"):
        evaluate(model, problems, tmp_path / "out", sampling=WARM)
    assert not (tmp_path / "out" / "eval.json").exists()
    monkeypatch.undo()
    evaluate(model, problems, tmp_path / "out", sampling=WARM)
    assert (tmp_path / "out" / "eval.json").exists()


def test_an_evaluation_that_is_gone_when_it_ends_is_no_success(model, problems, tmp_path, monkeypatch):
    def read_back(folder: Path, *_: object) -> Verdict:
        (folder / "eval.json").unlink()
        return proven("read back", "as it was written")

    monkeypatch.setattr(module.recount, "check_read_back", read_back)
    with pytest.raises(GuardStop, match="is gone before it ends"):
        evaluate(model, problems, tmp_path / "out", sampling=WARM)


def test_two_writers_and_foreign_folders_are_refused(tmp_path):
    first = EvalFolder(tmp_path / "out", {"task": "a"})
    with pytest.raises(UsageError, match="another evaluation is writing here"):
        EvalFolder(tmp_path / "out", {"task": "a"})
    first.close()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")
    with pytest.raises(UsageError, match="holds something else"):
        EvalFolder(tmp_path / "full", {"task": "a"})


def test_of_two_that_begin_at_once_the_request_is_of_the_one_that_scores(tmp_path, monkeypatch):
    """The second begins when the first has found no request there, and is about to write its own."""
    write, refused = durable.replace_file, []

    def meanwhile(path, data):
        monkeypatch.undo()
        with pytest.raises(UsageError, match="another evaluation is writing here") as caught:
            EvalFolder(tmp_path / "out", {"task": "b"})
        refused.append(caught)
        write(path, data)

    monkeypatch.setattr(durable, "replace_file", meanwhile)
    first = EvalFolder(tmp_path / "out", {"task": "a"})
    assert refused
    assert json.loads((tmp_path / "out" / "request.json").read_text())["task"] == "a"
    first.close()


def test_one_that_was_killed_before_its_request_was_written_may_begin_again(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "scores.jsonl").touch()
    (tmp_path / "out" / ".partial-request.json-1-1").touch()
    EvalFolder(tmp_path / "out", {"task": "a"}).close()
    (tmp_path / "out" / "request.json").unlink()
    (tmp_path / "out" / "scores.jsonl").write_text('{"id": "1"}\n')
    with pytest.raises(UsageError, match="nobody knows what it holds"):
        EvalFolder(tmp_path / "out", {"task": "a"})


def test_who_was_refused_keeps_nobody_out_of_the_folder(tmp_path):
    EvalFolder(tmp_path / "out", {"task": "a"}).close()
    with pytest.raises(DataError, match="another task") as kept:
        EvalFolder(tmp_path / "out", {"task": "b"})
    EvalFolder(tmp_path / "out", {"task": "a"}).close()
    assert kept.traceback


def test_scores_are_on_the_disk_before_what_they_come_to(tmp_path, monkeypatch):
    done = []

    class Recorded(durable.Disk):
        def sync(self, fd):
            super().sync(fd)
            done.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))

        def rename(self, source, target):
            super().rename(source, target)
            done.append(target.name)

    results = EvalFolder(tmp_path / "out", {"task": "a"})
    monkeypatch.setattr(durable, "disk", Recorded())
    results.append([{"id": "1"}])
    results.finish({})
    results.close()
    assert done.index("scores.jsonl") < done.index("eval.json")


def test_a_task_whose_oracles_fail_is_not_evaluated(model, problems, tmp_path):
    generous = replace(problems, score=lambda example, text: Score(1, 1, True))
    with pytest.raises(Unsound, match="wrong texts score above 0"):
        evaluate(model, generous, tmp_path / "out", sampling=WARM)
    assert not (tmp_path / "out").exists()


def test_an_exception_is_never_a_score(model, problems, tmp_path):
    def broken(example, text):
        if "She has" in text or not text or example.id != "5" or "####" in text:
            return problems.score(example, text)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate(model, replace(problems, score=broken), tmp_path / "out", sampling=WARM)
    assert not (tmp_path / "out" / "eval.json").exists()


@pytest.mark.parametrize(("asked", "drawn"), [
    (WARM, replace(WARM, temperature=0.0)), (WARM, replace(WARM, top_k=2)), (replace(WARM, temperature=0.3), WARM),
    (replace(WARM, top_k=2), WARM)])
def test_samples_that_are_no_draws_of_the_stated_distribution_are_refused(asked, drawn, model, problems, tmp_path, monkeypatch):
    """Greedy at k = 8 was "PROVEN: samples differ as their log-probabilities say (8 of 8 pairs are equal)"."""
    made = LoadedModel.generate_until
    monkeypatch.setattr(LoadedModel, "generate_until", lambda self, prompts, sampling, **rest: made(self, prompts, drawn, **rest))
    with pytest.raises(Unsound, match=r"not from the stated distribution|not truncated as stated"):
        evaluate(model, problems, tmp_path / "out", k=8, sampling=asked)


@pytest.mark.parametrize("sampling", [WARM, replace(WARM, top_k=5), replace(WARM, top_p=0.7), replace(WARM, temperature=0.05),
                                      replace(WARM, temperature=0.5, seed=1), replace(WARM, temperature=2.0)])
def test_true_draws_raise_no_alarm(sampling, model, problems, tmp_path):
    found = {verdict.check: verdict for verdict in evaluate(model, problems, tmp_path / "out", k=8, sampling=sampling).verdicts}
    assert found["draws"].outcome is not Outcome.REFUTED
    assert found["seeds"].outcome is Outcome.PROVEN
    if sampling.temperature >= 0.5:
        assert found["draws"].outcome is Outcome.PROVEN


@pytest.mark.parametrize("sampling", [WARM, replace(WARM, temperature=0.0), replace(WARM, top_p=0.9)])
def test_a_slot_that_keeps_what_another_prompt_left_in_it_is_refused(sampling, model, problems, tmp_path, monkeypatch):
    """Its text follows from another prompt's keys and values, and is scored as an answer to its own; greedy decoding has no draws."""
    nudge(model.model, 0.3)  # in a fresh model the words before hardly matter
    monkeypatch.setattr(soundness, "check_recorded_answers", lambda loaded: [])  # it sees that these are not the weights that were saved
    sound = {verdict.check: verdict for verdict in evaluate(model, problems, tmp_path / "sound", sampling=sampling).verdicts}
    assert sound["rescored"].outcome is Outcome.PROVEN, sound["rescored"].reason
    fill = Engine._fill_prefixes
    monkeypatch.setattr(Engine, "_fill_prefixes", lambda self, wanted: None if any(self._prefixes) else fill(self, wanted))
    monkeypatch.setattr(loaded_model, "SLOTS_ON_CPU", 2)
    model.engine = None
    with pytest.raises(Unsound, match=r"are not what this model says|not from the stated"):
        evaluate(model, problems, tmp_path / "out", sampling=sampling)


def test_weights_that_are_not_those_that_were_saved_are_refused(model, problems, tmp_path):
    nudge(model.model, 0.01)
    with pytest.raises(Unsound, match="recorded when the model was saved"):
        evaluate(model, problems, tmp_path / "out", sampling=WARM)


def test_a_sampler_that_cuts_off_before_it_divides_by_the_temperature_is_refused(model, problems, tmp_path, monkeypatch):
    """Top-p of the plain distribution, not of the one at the stated temperature: drawn, and scored, by the same wrong function."""
    sound = draw_tokens.least_kept
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    monkeypatch.setattr(soundness, "check_recorded_answers", lambda loaded: [])  # it sees that these are not the weights that were saved

    def before(scaled_NV, rule):
        kept = sound(scaled_NV * rule.temperature[:, None], rule)
        return kept / rule.temperature

    monkeypatch.setattr(draw_tokens, "least_kept", before)
    with pytest.raises(Unsound, match=r"not from the stated distribution|not truncated as stated"):
        evaluate(model, problems, tmp_path / "out", k=8, sampling=replace(WARM, temperature=0.4, top_p=0.8))


def test_many_equal_pairs_of_likely_texts_are_no_accident():
    """Each pair alone may well be equal, all forty not."""
    def row(same):
        return {"samples": [{"seed": 1, "ids": [1, 2], "logprob": math.log(0.3)},
                            {"seed": 2, "ids": [1, 2] if same else [3], "logprob": math.log(0.3)}]}

    assert soundness.check_sample_seeds([row(True)] * 40, 1.0).outcome is Outcome.REFUTED
    assert soundness.check_sample_seeds([row(i < 14) for i in range(40)], 1.0).outcome is Outcome.PROVEN


def test_training_text_that_holds_the_examples_is_a_leak(model, problems, tmp_path):
    said = [f"{row['question']} {row['answer']} So it was, and nobody in the village ever asked again." for row in PROBLEMS]
    for name, training, outcome in (("leak", said, Outcome.REFUTED), ("clean", ["Something else entirely. " * 9], Outcome.PROVEN)):
        found = evaluate(model, problems, tmp_path / name, sampling=WARM, trained_on=training)
        assert [verdict.outcome for verdict in found.verdicts if verdict.check == "leak"] == [outcome]


# ---------------------------------------------------------------- likelihoods


def naive(model, context, continuation):
    ids = torch.tensor([[*context, *continuation]])
    with torch.no_grad():
        logprobs = model.model.logits(model.model.hidden(ids)).double().log_softmax(-1)[0]
    return sum(float(logprobs[len(context) - 1 + i, id]) for i, id in enumerate(continuation))


def test_likelihoods_are_the_models_own(model):
    pairs = [("The answer is", " seven"), ("Is it", " so, or is it not?"), ("", "alone")]
    found = model.loglikelihood(pairs)
    for (context, text), likelihood in zip(pairs, found, strict=True):
        before, after = encode_continuation(model.tokenizer, context, text)
        assert likelihood.nats == pytest.approx(naive(model, before or (model._first(),), after), abs=1e-4)
        assert (likelihood.tokens, likelihood.bytes) == (len(after), len(text.strip().encode()))


def test_greedy_is_said_of_what_greedy_decoding_says(model):
    said = model.generate_until({"0": "So it"}, Sampling(max_new=3, temperature=0), k=1, stop=(), raw=True)["0"][0]
    text = model.tokenizer.decode(said.ids)
    same = encode_continuation(model.tokenizer, "So it", text)[1] == said.ids
    assert model.greedily([("So it", text), ("So it", " and is the")]) == [same, False]


def test_rolling_reads_every_token_once_however_long_the_text(model):
    assert rolling_windows([1, 2, 3, 4, 5], 0, 3) == [((0,), (1, 2)), ((2,), (3, 4)), ((4,), (5,))]
    short, long = "the fig and the ash", "the fig and the ash is " * 40
    found = model.loglikelihood_rolling([short, long])
    assert found[0].nats == pytest.approx(naive(model, (model._first(),), model.tokenizer.encode(short)), abs=1e-4)
    ids = model.tokenizer.encode(long)
    assert len(ids) > model.model.config.max_length
    assert found[1].tokens == len(ids)
    assert found[1].bytes == len(long.encode())
    assert found[1].nats == pytest.approx(sum(naive(model, *w) for w in rolling_windows(ids, model._first(), 256)), abs=1e-2)


def test_a_seam_that_a_token_spans_is_split_where_the_texts_are(model):
    before, after = encode_continuation(model.tokenizer, "go th", "e way")  # " the" is one token
    assert before == prompt_token_ids(model.tokenizer, "go th", raw=True)
    assert model.tokenizer.decode([*before, *after]) == "go the way"


def test_choices_text_and_facts_are_estimated(model, tmp_path):
    choices = open_task(TaskRequest("choices", write_rows(tmp_path / "c.jsonl", [QUESTION, QUESTION | {"id": "q2", "answerKey": "1"}])))
    found = evaluate(model, choices, tmp_path / "choices")
    assert list(found.estimates) == ["accuracy per byte", "accuracy", "accuracy per token"]
    assert found.estimates["accuracy"].mean == 0.5  # the same question with either answer
    facts = [FACT, FACT | {"case_id": 4, "paraphrase_prompts": ["They say Rome is in"]}]
    found = evaluate(model, open_task(TaskRequest("counterfact", write_rows(tmp_path / "f.jsonl", facts))), tmp_path / "facts")
    counted = {name.split()[0]: estimate.n for name, estimate in found.estimates.items()}
    assert counted == {"efficacy": 2, "paraphrase": 2, "neighbourhood": 2}  # four neighbours, of two facts
    texts = open_task(TaskRequest("text", write_rows(tmp_path / "t.jsonl", [{"text": "the fig"}, {"text": "and the ash"}])))
    found = evaluate(model, texts, tmp_path / "texts")
    rows = lines(tmp_path / "texts")
    bits = -sum(row["nats"] for row in rows) / math.log(2) / (7 + 11)
    assert found.estimates["bits per byte"].mean == pytest.approx(bits)


# ---------------------------------------------------------------- what it comes to


def sampled(id, *scores):
    return {"id": id, "samples": [{"score": s, "lenient": s, "parsed": True, "answer": str(s), "measures": {}, "ended": "stop", "ids": [1]}
                                  for s in scores]}


def test_estimates_of_known_samples(problems):
    rows = [sampled("a", 1, 1, 0, 0), sampled("b", 0, 0, 0, 1), sampled("c", 1, 1, 1, 1)]
    found = summarise(problems, rows, 4)
    assert found["pass@1"].mean == pytest.approx(7 / 12)
    assert found["pass@2"].mean == pytest.approx((5 / 6 + 1 / 2 + 1) / 3)
    assert found["pass@4"].mean == 1
    assert found["majority@4"].mean == pytest.approx((0.5 + 0 + 1) / 3)
    assert found["pass@1"].n == 3
    assert all(0 <= e.low <= e.high <= 1 for name, e in found.items() if name != "tokens")
    assert pass_at_ks(6) == [1, 2, 4, 6]


def test_one_example_is_refused(problems):
    with pytest.raises(UsageError, match="2 or more"):
        summarise(problems, [sampled("a", 1)], 1)


def test_greedy_has_one_sample(model, problems, tmp_path):
    with pytest.raises(UsageError, match="at a temperature above 0"):
        evaluate(model, problems, tmp_path / "out", k=2, sampling=replace(WARM, temperature=0.0))


def test_a_prompt_beyond_the_context_is_refused_in_words(model, problems, tmp_path):
    with pytest.raises(UsageError, match="the model's context is 256"):
        evaluate(model, problems, tmp_path / "out", sampling=replace(WARM, max_new=250))


def test_a_model_without_a_tokenizer_is_refused(checkpoint):
    artifact = replace(open_artifact(checkpoint), tokenizer=None)
    with pytest.raises(UsageError, match="no tokenizer here"):
        LoadedModel(artifact)


def test_the_verb(checkpoint, tmp_path, capsys):
    flags = verb.FLAGS(str(checkpoint), task="arithmetic", out=str(tmp_path / "out"), k=2, temperature=1.0, max_new_tokens=4, limit=3,
                       device="cpu", witness=0)
    assert verb.run(flags) == 0
    printed = capsys.readouterr()
    assert "pass@2" in printed.out
    assert "PROVEN    seeds" in printed.out
    assert "3 of 3 examples" in printed.err
    assert verb.run(replace(flags, json=True)) == 0
    assert json.loads(capsys.readouterr().out)["estimates"]["pass@1"]["n"] == 3


@pytest.mark.parametrize("sampling", [replace(WARM, top_p=0.6), replace(WARM, top_k=7), replace(WARM, min_p=0.3)])
@pytest.mark.parametrize("faulty", [True, False])
def test_log_probabilities_of_another_truncation_are_refuted(sampling, faulty, checkpoint, monkeypatch):
    """Sampler and second reading truncate by one function, which cuts off more than is stated."""
    usual, model = draw_tokens.least_kept, opened(checkpoint)
    if faulty:
        monkeypatch.setattr(draw_tokens, "least_kept", lambda scaled, rule: torch.minimum(usual(scaled, rule) + 0.5, scaled.amax(-1)))
    nudge(model.model, 0.3)
    prompts = {str(number): f"Once upon a time {number}" for number in range(8)}
    said = model.generate_until(prompts, sampling, k=1, stop=(), raw=True)
    samples = [(model.ids_of(text, raw=True), each.ids, sum(each.logprobs)) for name, text in prompts.items() for each in said[name]]
    assert soundness.judge_rescored(model.model, samples, sampling).outcome is Outcome.PROVEN
    assert soundness.judge_recorded(model.model, samples, sampling).outcome is (Outcome.REFUTED if faulty else Outcome.PROVEN)


def test_draws_scored_again_together_are_those_scored_one_by_one(monkeypatch):
    """Rows of other lengths beside it, and what pads it, change nothing of a row; however many fit into a pass."""
    model, sampling = tiny_model(seed=1), Sampling(max_new=4, temperature=0.7, top_k=200)
    samples = [(range(10, 10 + length), range(90, 95 + 2 * length)) for length in (1, 7, 30, 12)]
    alone = sum((scored_alone(model, *sample, sampling) for sample in samples), soundness.DrawnTokens())
    usual, passes = model.hidden, list[int]()
    monkeypatch.setattr(model, "hidden", lambda tokens: (passes.append(tokens.numel()), usual(tokens))[1])
    for tokens, logits, largest in ((8192, 256, 4 * 95), (200, 7, 3 * 41), (1, 1, 95)):
        monkeypatch.setattr(soundness, "_PASS_TOKENS", tokens)
        monkeypatch.setattr(soundness, "_LOGIT_ROWS", logits)
        passes.clear()
        together = soundness.rescored_together(model, samples, sampling)
        assert max(passes) == largest
        assert (together.tokens, together.cut_off) == (alone.tokens, alone.cut_off)
        assert astuple(together) == pytest.approx(astuple(alone), rel=1e-5)


def scored_alone(model, prompt, ids, sampling):
    """One sample, and the model's own logits at the places before its tokens."""
    logits = model(torch.tensor([[*prompt, *ids]]))[0, len(prompt) - 1:-1]
    return soundness._drawn_tokens(soundness.stated_distribution(logits, sampling), torch.tensor([*ids]))
