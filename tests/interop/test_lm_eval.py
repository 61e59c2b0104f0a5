"""lm-eval scores our checkpoints as we do: the same likelihoods, the same texts, the same accuracy."""

import json

import pytest

from assay.errors import UsageError
from assay.evaluation.evaluate import evaluate
from assay.evaluation.tasks import TaskRequest, open_task
from assay.generate.generation_request import Sampling
from assay.interop.lm_eval import generate_texts, lm_eval_model, stop_strings
from tests.evaluation.eval_fixtures import opened, saved, write_rows

OPTIONS = ["a stone", "the fig and the ash", "an axe"]
ROWS = [{"id": f"q{n}", "question": f"Which is number {n}?", "choices": OPTIONS, "answer": n % 3} for n in range(8)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("model") / "checkpoint")


def test_a_bare_stop_string_is_one_and_not_its_letters(checkpoint):
    assert stop_strings("Question:") == stop_strings(["Question:"]) == ("Question:",)
    assert stop_strings(()) == ()
    with pytest.raises(UsageError, match="num_beams"):
        generate_texts(opened(checkpoint), [("So", {"num_beams": 4})], seed=0)


def test_a_request_is_what_the_sampler_gives(checkpoint):
    model = opened(checkpoint)
    [greedy] = model.generate_until({"0": "So it"}, Sampling(max_new=5, temperature=0), k=1, stop=(), raw=True)["0"]
    options = {"until": ["\n\n"], "max_gen_toks": 5, "do_sample": False, "temperature": 0.7}
    assert greedy.text
    found = generate_texts(model, [("So it", options), ("Else", options | {"max_gen_toks": 2}), ("So it", options)], seed=0)
    assert found[::2] == [greedy.text] * 2


def test_a_task_of_lm_eval_gives_our_accuracy(checkpoint, tmp_path):
    lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install lm-eval")
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager

    write_rows(tmp_path / "rows.jsonl", ROWS)
    task = ConfigurableTask(config={
        "task": "made", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]})
    theirs = lm_eval.simple_evaluate(model=lm_eval_model(checkpoint), tasks=[task], bootstrap_iters=0, log_samples=True,
                                     task_manager=TaskManager(include_defaults=False))  # it would read its thousands of tasks first
    ours = evaluate(opened(checkpoint), open_task(TaskRequest("choices", tmp_path / "rows.jsonl")), tmp_path / "out")
    found = theirs["results"]["made"]
    assert found["acc,none"] == pytest.approx(ours.estimates["accuracy"].mean)
    assert found["acc_norm,none"] == pytest.approx(ours.estimates["accuracy per byte"].mean)
    likelihoods = {sample["doc"]["id"]: [float(resp[0][0]) for resp in sample["resps"]] for sample in theirs["samples"]["made"]}
    for line in (tmp_path / "out" / "scores.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert likelihoods[row["id"]] == pytest.approx(row["nats"], abs=1e-4)
