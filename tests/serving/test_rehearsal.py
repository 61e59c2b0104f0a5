"""Rehearsal: a server answers the known requests before it listens; clean servers of every kind do, and one that errs does not listen."""

import pytest
import torch

from assay.cli import run
from assay.errors import GuardStop
from assay.guard.due_replies import PLAIN_SOFTMAX, due_row
from assay.model.tokenizer import Tokenizer
from assay.serving import endpoints, server
from assay.serving.engine_thread import EngineThread, ServerSize
from assay.serving.policy_training import ServedPolicy
from assay.serving.rehearsal import rehearse
from assay.serving.request_fields import RequestRefused
from assay.testing.tiny_models import nudge, save_model, tiny_model, tiny_tokenizer
from assay.testing.tiny_rehearsed import save_tool_model
from assay.verdict import Outcome
from assay.zoo import catalogue

ROLES = "{{ raise_exception('only a system speaks') if messages[0].role != 'system' }}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tool_model(tmp_path_factory.mktemp("rehearsed") / "base")


def rehearsed(path, token=None, **size):
    serving = EngineThread(ServerSize(**{"slots": 2, **size}))
    try:
        serving.open("m", path)
        return rehearse(serving, token), serving
    finally:
        serving.stop()


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "gpt_oss", "qwen2_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clean_servers_of_several_families_and_number_formats_are_proven(tmp_path, family, dtype):
    found, _ = rehearsed(save_model(tmp_path / "m", nudge(tiny_model(family), 0.3)).folder, dtype=dtype)
    assert found.outcome is Outcome.PROVEN


def test_all_subjects_are_heard_with_a_token_and_in_small_rounds_and_counts_begin_anew(folder):
    found, serving = rehearsed(folder, token="a secret of some length")
    assert found.outcome is Outcome.PROVEN
    assert found.evidence["answered"] >= 18
    assert serving.first.prompt_tokens == serving.first.completion_tokens == serving.busy == 0
    small, _ = rehearsed(folder, slots=1, queue=3)
    assert small.evidence["answered"] == found.evidence["answered"]


@pytest.mark.parametrize("template", [None, ROLES])
def test_a_model_without_a_chat_template_or_with_one_that_refuses_the_roles_answers_texts(tmp_path, template):
    plain = tiny_tokenizer(template=False)
    tokenizer = Tokenizer(plain.document, plain.settings, {} if template is None else {"default": template})
    found, _ = rehearsed(save_model(tmp_path / "m", nudge(tiny_model(), 0.3), tokenizer=tokenizer).folder)
    assert found.outcome is Outcome.PROVEN
    assert found.evidence["answered"] >= 6


@pytest.mark.parametrize("size", [{"length": 24}, {"slots": 1, "queue": 0}])
def test_a_server_without_room_for_them_is_unproven_and_says_so(folder, size):
    found, _ = rehearsed(folder, **size)
    assert found.outcome is Outcome.UNPROVEN
    assert "were not asked" in found.reason


def test_without_llguidance_forms_are_not_asked_for_and_that_is_said(folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found, _ = rehearsed(folder)
    assert found.outcome is Outcome.PROVEN
    assert "not served: texts of a given form" in found.reason


def test_a_policy_that_learns_is_rehearsed_and_has_no_trajectories_of_it(folder, tmp_path):
    serving = EngineThread(ServerSize(slots=2))
    try:
        model = serving.open("m", folder, learns=True)
        policy = serving.ask(lambda: ServedPolicy(model, tmp_path / "out", 1e-3)).result()
        assert rehearse(serving, policy=policy).outcome is Outcome.PROVEN
        assert not policy.updates
    finally:
        serving.stop()


def test_tools_that_are_refused_without_a_reason_end_the_start(tmp_path, monkeypatch):
    """A template without a place for tools; the refusal names what is wrong with another."""
    def refused(model, asked):
        raise RequestRefused("tools are not supported by this model: None", param="tools", code="unsupported_parameter")

    usual = endpoints.encoded_prompts
    monkeypatch.setattr(endpoints, "encoded_prompts", lambda model, asked: (refused if asked.form.tools else usual)(model, asked))
    with pytest.raises(GuardStop, match="refused without a reason"):
        rehearsed(save_model(tmp_path / "m", nudge(tiny_model(), 0.3)).folder)


def test_a_server_that_errs_does_not_listen(folder, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "serve", lambda *given, **named: 0)
    assert run(["serve", str(folder), "--port", "0", "--device", "cpu"]) == 0
    assert "PROVEN    known_requests: " in capsys.readouterr().out
    monkeypatch.setattr(server, "serve", lambda *given, **named: pytest.fail("it listens"))
    with catalogue()["usage without the stop token"].plant(tmp_path):
        assert run(["serve", str(folder), "--port", "0", "--device", "cpu"]) == 4
    assert "'base' is not served: known_requests: a reply counts" in capsys.readouterr().err


def test_the_distribution_of_a_draw_by_its_definition():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0], dtype=torch.float64)
    assert torch.allclose(due_row(logits, (), PLAIN_SOFTMAX, 1e-3), logits.log_softmax(-1))
    warm = due_row(logits, {0, 3}, PLAIN_SOFTMAX | {"temperature": 0.5, "repetition_penalty": 2.0}, 1e-3)
    assert torch.allclose(warm, torch.tensor([2.0, 2.0, 0.0, -4.0], dtype=torch.float64).log_softmax(-1))
    cut = due_row(logits, (), PLAIN_SOFTMAX | {"top_k": 3, "top_p": 0.7}, 1e-3)  # 0.665, 0.245, 0.090 of the three
    assert torch.allclose(cut.exp(), torch.tensor([0.7311, 0.2689, 0.0, 0.0], dtype=torch.float64), atol=1e-4)
    assert due_row(logits, (), PLAIN_SOFTMAX | {"temperature": 0}, 1e-3).tolist() == [0.0, *[-torch.inf] * 3]
    assert due_row(torch.zeros(4), (), PLAIN_SOFTMAX | {"top_k": 2}, 1e-3) is None
    small = due_row(logits, (), PLAIN_SOFTMAX | {"min_p": 0.2}, 1e-3)
    assert small.isfinite().tolist() == [True, True, False, False]
