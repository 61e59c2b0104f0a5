"""What is supervised is what was meant: the answers and the tokens that end them, after the ids that a sampler would be given."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assay.data.chat import Rendered, TrainingExample, render_conversations, supervised_runs
from assay.data.layouts import Conversation
from assay.errors import DataError
from assay.guard.example_audit import audit_examples
from assay.model.special_tokens import resolve_special_tokens
from assay.model.tokenizer import Tokenizer
from assay.testing.tiny_models import TINY_CHAT_TEMPLATE, tiny_tokenizer
from assay.verdict import Outcome
from assay.zoo.chat_faults import words_with_bos

TALK = (("system", "Be brief."), ("user", "Is the river long?"), ("assistant", "the river is."), ("user", "Why?"),
        ("assistant", " \n\nRain.\n"))
MARKED = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}\
{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# As some thinking models have it: an answer is written otherwise once another question follows.
UNSTABLE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}" \
           "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def talk(*turns: tuple[str, str], **facts: Any) -> Conversation:
    return Conversation("made:1:0", "made:1", tuple({"role": role, "content": content} for role, content in turns or TALK), **facts)


def plain(prompt: str, completion: str) -> Conversation:
    return Conversation("made:1:0", "made:1", plain=(prompt, completion))


def rendered(*conversations: Conversation, words: Tokenizer | None = None, length: int = 400, **options: Any) -> Rendered:
    words = words or tiny_tokenizer()
    return render_conversations(conversations, words, resolve_special_tokens(words, {}, {}), length=length, **options)


def taught(example: TrainingExample, words: Tokenizer) -> list[str]:
    return [words.decode(example.tokens[start:stop].tolist()) for start, stop in supervised_runs(example.weight)]


def with_template(template: str) -> Tokenizer:
    plain = tiny_tokenizer()
    return Tokenizer(plain.document, plain.settings, {"default": template})


def test_answers_and_their_ends_are_taught_and_nothing_else():
    words = tiny_tokenizer()
    (example,) = rendered(talk()).examples
    assert taught(example, words) == list(example.intended) == ["the river is.<|im_end|>", " \n\nRain.\n<|im_end|>"]
    text = words.render([{"role": role, "content": content} for role, content in TALK])
    assert words.decode(example.tokens.tolist()) == text.removesuffix("\n")  # nothing follows what is learned
    assert example.tokens[: example.prompt].tolist() == words.encode(example.asked)
    assert example.asked == words.render([{"role": r, "content": c} for r, c in TALK[:2]], add_generation_prompt=True)


def test_the_mask_is_the_one_that_transformers_makes_of_a_marked_template(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    words = with_template(MARKED)
    for name, data in words.files().items():
        (tmp_path / name).write_bytes(data)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        [{"role": role, "content": content} for role, content in TALK], return_dict=True, return_assistant_tokens_mask=True)
    (example,) = rendered(talk(), words=words).examples
    ids, mask = np.array(theirs["input_ids"]), np.array(theirs["assistant_masks"])
    assert ids[: len(example)].tolist() == example.tokens.tolist()
    assert mask[: len(example)].tolist() == example.weight.tolist()
    assert not mask[len(example) :].any()


def test_other_roles_are_taught_on_request():
    words = tiny_tokenizer()
    (example,) = rendered(talk(), roles=("user",)).examples
    assert taught(example, words) == list(example.intended) == ["Is the river long?<|im_end|>", "Why?<|im_end|>"]
    (example,) = rendered(talk(), roles=("user", "assistant", "system")).examples
    assert len(example.intended) == 5
    with pytest.raises(DataError, match=r"nothing to learn: .*assistant, system, user"):
        rendered(talk(), roles=("tool",))


def test_only_the_completion_of_a_prompt_is_taught():
    (example,) = rendered(talk(learned_from=3)).examples
    assert example.intended == (" \n\nRain.\n<|im_end|>",)


def test_plain_text_ends_with_eos_and_nothing_predicts_its_first_token():
    words = tiny_tokenizer(template=False)
    (example,) = rendered(plain("Is it? ", "the river."), words=words).examples
    assert taught(example, words) == ["the river.<|endoftext|>"]
    (example,) = rendered(plain("", "Once the river."), words=words).examples
    assert taught(example, words) == list(example.intended) == ["nce the river.<|endoftext|>"]
    assert example.weight.tolist() == [0.0] + [1.0] * (len(example) - 1)
    (example,) = rendered(plain("", "Once.<|endoftext|>"), words=words).examples
    assert example.tokens.tolist().count(words.eos) == 1


def test_bos_stands_once_whoever_writes_it():
    words = words_with_bos()
    for conversation in (talk(), plain("Is it? ", "It is."), plain("<|endoftext|>Is it? ", "It is."), plain("", "It is.")):
        (example,) = rendered(conversation, words=words).examples
        assert example.tokens[0] == words.bos
        assert example.tokens.tolist().count(words.bos) == 1


def test_a_token_that_would_reach_over_the_seam_is_cut_there():
    words = tiny_tokenizer(template=False)
    assert words.encode("say the river")[:4] != words.encode("say th")[:4]
    made = rendered(plain("say th", "e river"), plain("say", " the river"), words=words)
    assert made.seams == 1
    for example in made.examples:
        assert example.tokens[: example.prompt].tolist() == words.encode(example.asked)
        assert taught(example, words) == list(example.intended)


def test_what_is_too_long_is_dropped_cut_or_refused_and_counted():
    short, long = talk(("user", "a"), ("assistant", "b")), talk(("user", "a"), ("assistant", "b" * 50))
    asked = talk(("user", "a" * 50), ("assistant", "b"))
    assert rendered(short, long, asked, length=40).counts["dropped"] == {"longer than the length": 2}
    made = rendered(short, long, asked, length=40, over="truncate")
    assert (made.counts["kept"], made.truncated) == (2, 1)
    assert made.counts["dropped"] == {"nothing supervised is left within the length": 1}
    assert [len(example) for example in made.examples][1] == 40
    assert made.examples[1].cut
    with pytest.raises(DataError, match=r"tokens, and the length is 40; raise --max-length"):
        rendered(short, long, length=40, over="error")
    with pytest.raises(DataError, match="holds nothing that is predicted"):
        rendered(short, length=1)


def test_a_template_that_rewrites_earlier_turns_is_refused_or_taught_turn_by_turn():
    words = with_template(UNSTABLE)
    with pytest.raises(DataError, match=r"made:1: .*--turns apart"):
        rendered(talk(), words=words)
    made = rendered(talk(), words=words, turns="apart").examples
    assert [text for example in made for text in example.intended] == ["<think></think>the river is.<|im_end|>",
                                                                       "<think></think> \n\nRain.\n<|im_end|>"]
    assert [example.id for example in made] == ["made:1:0#2", "made:1:0#4"]


def test_a_template_whose_generation_prompt_is_not_how_it_writes_answers_is_refused():
    with pytest.raises(DataError, match="no sampler will begin there"):
        rendered(talk(), words=with_template(TINY_CHAT_TEMPLATE.replace("<|im_start|>assistant\n", "<|im_start|>assistant: ")))


@pytest.mark.parametrize(("prompt", "way_out"), [
    ("<|im_start|>assistant\n<think>\n", "opens a thought, and this answer has none: give the thoughts as reasoning_content"),
    ("<|im_start|>assistant\n\n", "they differ in white space"),
    ("<|im_start|>model\n", "generation prompt be what it writes before an answer")])
def test_a_generation_prompt_that_is_no_answers_beginning_is_refused_with_a_way_out(prompt: str, way_out: str):
    with pytest.raises(DataError, match=way_out):
        rendered(talk(), words=with_template(TINY_CHAT_TEMPLATE.replace("<|im_start|>assistant\n", prompt)))


@pytest.mark.parametrize("template", ["{% for m in messages %}{{ m.role }}{% endfor %}",
                                      "{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}"])
def test_a_template_that_does_not_write_what_is_said_is_refused(template: str):
    with pytest.raises(DataError, match="the chat template does not write"):
        rendered(talk(), words=with_template(template))


def test_what_cannot_be_taught_is_refused_in_words():
    with pytest.raises(DataError, match="this model has no chat template to write them with"):
        rendered(talk(), words=tiny_tokenizer(template=False))
    with pytest.raises(DataError, match="there is a prompt and nothing to learn"):
        rendered(talk(("user", "a"), learned_from=1))
    bare = tiny_tokenizer(template=False)
    with pytest.raises(DataError, match="names an EOS token"):
        rendered(plain("a", "b"), words=Tokenizer(bare.document, {}, {}))


def test_an_example_is_checked_and_never_changes():
    example = TrainingExample("a:1:0", (1, 2), (0, 1), ("x",), 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="read-only"):
        example.weight[1] = 0
    with pytest.raises(DataError, match="column 0 has weight 1"):
        TrainingExample("a:1:0", (1, 2), (1, 1), ("x",), 1)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="expected one weight a token"):
        TrainingExample("a:1:0", (1, 2), (0,), ("x",), 1)  # type: ignore[arg-type]

# ---------------------------------------------------------------- what a message says beside its content

CALL = {"type": "function", "id": "c1",
        "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": [1, 2.5], "hourly": True}}}
CALLER = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content | trim }}</think>{% endif %}{{ m.content }}\
{% for call in m.tool_calls or [] %}<call>CALL</call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WAYS = ("{{ call | tojson }}", "{{ call.function.name }} {{ call.function.arguments | tojson(indent=2, ensure_ascii=True) }}",
        "{{ call.function.name }} {{ call.function.arguments }}",
        "{{ call.function.name }}{% for k, v in call.function.arguments.items() %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}")


def asked(**message: Any) -> Conversation:
    return Conversation("made:1:0", "made:1", ({"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "", **message}))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("said", ["", "I call get_weather for Köln."])
def test_calls_and_reasoning_that_the_template_writes_are_taught(way: str, said: str):
    words = with_template(CALLER.replace("CALL", way))
    conversation = asked(content=said, tool_calls=[CALL], reasoning_content=" rain? ")
    found = rendered(conversation, words=words)
    assert "get_weather" in found.examples[0].intended[0]
    assert "<think>rain?</think>" in found.examples[0].intended[0]
    verdicts = audit_examples(found.examples, words, resolve_special_tokens(words, {}, {}))
    assert [verdict.check for verdict in verdicts if verdict.outcome is Outcome.REFUTED] == []


def test_arguments_as_json_in_a_text_are_found_as_they_are_and_escaped_again():
    for way in ("{{ call.function.name }}{{ call.function.arguments }}", "{{ call | tojson }}"):
        calls = [{"function": {"name": "get_weather", "arguments": '{"city":"K\\u00f6ln",  "note": "a \\"b\\""}'}}]
        assert rendered(asked(tool_calls=calls), words=with_template(CALLER.replace("CALL", way))).examples


@pytest.mark.parametrize(("template", "message", "lost"), [
    (TINY_CHAT_TEMPLATE, {"tool_calls": [CALL]}, r"tool_calls \('get_weather'\)"),
    (TINY_CHAT_TEMPLATE, {"tool_calls": [CALL], "content": "I call get_weather."}, "tool_calls"),
    (TINY_CHAT_TEMPLATE, {"reasoning_content": "rain?", "content": "Wet."}, r"reasoning_content \('rain\?'\)"),
    (TINY_CHAT_TEMPLATE, {"thinking": "rain?", "content": "Wet."}, "thinking"),
    (CALLER.replace("CALL", "{{ call.function.name }}"), {"tool_calls": [CALL]}, "tool_calls .'city'"),
    (CALLER.replace("{{ m.content }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}"),
     {"content": "Weather?", "tool_calls": [CALL]}, "content"),
])
def test_a_field_that_the_template_loses_is_refused_with_its_place(template: str, message: dict[str, Any], lost: str):
    with pytest.raises(DataError, match=f"^made:1: the chat template does not write {lost}.* of turn 1"):
        rendered(asked(**message), words=with_template(template))


def test_what_the_model_never_sees_is_counted():
    turns = ({"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "Wet.", "train": 1},
             {"role": "user", "content": "Why?"})
    tools = ({"type": "function", "function": {"name": "get_weather"}},)
    found = rendered(Conversation("made:1:0", "made:1", turns, tools=tools))
    assert found.unread == {"last turns that nothing answers": 1, "message field 'train'": 1,
                            "rows whose tools the chat template does not write": 1}
    assert rendered(talk()).unread == {}
