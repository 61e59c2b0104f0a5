"""Where a text begins and ends is one answer from three files, and every disagreement is a sentence."""

import json

import pytest

from assay.model.special_tokens import read_special_tokens, resolve_special_tokens
from assay.model.tokenizer import Tokenizer
from tests.model.test_tokenizer import write
from tests.model.trained_tokenizers import CHATML, byte_level

TEXT_END, TURN_START, TURN_END = 0, 1, 2


def resolved(config=None, generation=None, **settings):
    return resolve_special_tokens(byte_level(**settings), config or {}, generation or {})


@pytest.mark.parametrize(("config", "generation", "stop_ids"), [
    ({}, {}, (TURN_END,)),
    ({"eos_token_id": TURN_END}, {"eos_token_id": TURN_END}, (TURN_END,)),
    ({"eos_token_id": TURN_END}, {"eos_token_id": [TEXT_END, TURN_END]}, (TEXT_END, TURN_END)),
    ({"eos_token_id": [TEXT_END, TURN_END]}, {}, (TEXT_END, TURN_END)),
    ({"eos_token_id": None, "bos_token_id": TEXT_END}, {"bos_token_id": TEXT_END}, (TURN_END,)),
])
def test_files_that_agree_or_extend_each_other_are_silent(config, generation, stop_ids):
    stops = resolved(config, generation)
    assert stops.disagreements == ()
    assert (stops.stop_ids, stops.eos, stops.turn_end) == (stop_ids, TURN_END, TURN_END)
    assert stops.bos is None  # tokenizer_config.json says null, and that is an answer


@pytest.mark.parametrize(("config", "generation", "settings", "words"), [
    ({"eos_token_id": TEXT_END}, {}, {},
     ["tokenizer_config.json ends with '<|im_end|>'", "config.json with '<|endoftext|>'"]),
    ({}, {"eos_token_id": [TEXT_END, TURN_START]}, {}, ["generation_config.json with '<|endoftext|>' (id 0) or"]),
    ({"eos_token_id": TEXT_END}, {"eos_token_id": [TURN_END, TURN_START]}, {"eos_token": None},
     ["config.json ends with '<|endoftext|>'", "generation_config.json with"]),
    ({}, {}, {"eos_token": "<|endoftext|>"}, ["ends a turn with '<|im_end|>' (id 2)", "not a stop id", "run on"]),
    ({"eos_token_id": 99_999}, {}, {}, ["config.json: eos_token_id 99999 is not an id"]),
    ({}, {}, {"eos_token": None, "chat_template": None}, ["nothing would ever stop"]),
    ({}, {}, {"chat_template": CHATML.replace("<|im_end|>", "[end]")}, ["no special token"]),
    ({}, {}, {"chat_template": "{{ raise_exception('no') }}"}, ["cannot be rendered"]),
    ({}, {}, {"chat_template": "{% for %}"}, ["cannot be rendered", "refused"]),
    ({"bos_token_id": TEXT_END}, {}, {"bos_token": "<|im_start|>"}, ["begins with '<|im_start|>'"]),
    ({}, {}, {"bos_token": "<|im_start|>", "add_bos_token": True}, ["add_bos_token"]),
])
def test_disagreements_are_said(config, generation, settings, words):
    stops = resolved(config, generation, **settings)
    assert len(stops.disagreements) == 1
    for word in words:
        assert word in stops.disagreements[0]


def test_a_contradiction_stops_at_either_end_but_never_at_an_undeclared_one():
    assert resolved({"eos_token_id": TEXT_END}).stop_ids == (TEXT_END, TURN_END)
    assert resolved(eos_token="<|endoftext|>").stop_ids == (TEXT_END,)
    assert resolved(eos_token="<|endoftext|>").turn_end == TURN_END
    assert resolved({"eos_token_id": 99_999}).stop_ids == (TURN_END,)


def test_what_the_tokenizers_own_files_dispute_is_passed_on(tmp_path):
    folder = write(byte_level(), tmp_path, special_tokens_map={"eos_token": "<|endoftext|>"})
    (problem,) = read_special_tokens(folder, Tokenizer.from_folder(folder)).disagreements
    assert "special_tokens_map.json" in problem


def test_other_files_speak_where_the_tokenizer_has_no_such_field(tmp_path):
    generation = {"eos_token_id": [TURN_END]}
    folder = write(byte_level(), tmp_path, config={"bos_token_id": TURN_START}, generation_config=generation)
    silent = byte_level()
    del silent.settings["bos_token"], silent.settings["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(silent.settings))
    stops = read_special_tokens(folder, silent)
    assert (stops.bos, stops.eos, stops.disagreements) == (TURN_START, TURN_END, ())
