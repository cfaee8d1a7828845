from __future__ import annotations

import pytest

from dspark.training.data.chat import ChatFormat
from tests.training.data.fakes import CHATML, END, END_OF_TEXT, START, make_tokenizer

SYSTEM_IN_USER = (  # as in Gemma: no system role, contents trimmed
    "{{ '<|endoftext|>' }}{% if messages[0]['role'] == 'system' %}{% set prefix = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set prefix = '' %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{{ '<|im_start|>' + message['role'] + '\n' + (prefix if loop.first else '')"
    " + message['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
)


def text(chat: ChatFormat, ids: tuple[int, ...]) -> str:
    return chat.decode(ids)


def test_an_open_user_turn_ends_where_the_user_speaks() -> None:
    chat = ChatFormat(make_tokenizer())
    assert (
        text(chat, chat.open_user_turn("Be a tutor."))
        == "<|im_start|>system\nBe a tutor.<|im_end|>\n<|im_start|>user\n"
    )
    assert text(chat, chat.open_user_turn("Be a tutor.", "Solve")).endswith("<|im_start|>user\nSolve")
    assert chat.end_of_user_turn_ids == {END}
    assert chat.stop_token_ids == {END}


def test_a_template_that_puts_the_system_message_into_the_user_turn_works_too() -> None:
    chat = ChatFormat(make_tokenizer(SYSTEM_IN_USER, eos="<|endoftext|>"))
    assert text(chat, chat.open_user_turn("Be a tutor.")) == "<|endoftext|><|im_start|>user\nBe a tutor.\n\n"
    assert chat.stop_token_ids == {END, END_OF_TEXT}


def test_further_stop_tokens_are_added() -> None:
    assert ChatFormat(make_tokenizer(), stop_token_ids=[END_OF_TEXT]).stop_token_ids == {END, END_OF_TEXT}


def test_the_end_of_turn_token_is_written_once() -> None:
    chat = ChatFormat(make_tokenizer())
    messages = [{"role": "user", "content": "Hi"}]
    between = "\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
    assert text(chat, chat.next_answer_prompt(messages, "More", END)) == between
    assert text(chat, chat.next_answer_prompt(messages, "More", 77)) == "<|im_end|>" + between


def test_contents_are_kept_whatever_they_are() -> None:
    chat = ChatFormat(make_tokenizer())
    content = "ünï {{ messages }} \\ \n\n {% x %}"
    assert content in text(chat, chat.answer_prompt([{"role": "user", "content": content}]))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat_template"),
        ("{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}", "2 times instead of once"),
        ("{{ raise_exception('not today') }}", "refuses a conversation with the roles user: not today"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(template: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatFormat(make_tokenizer(template))


def test_self_prompting_needs_a_system_message_and_an_end_of_turn() -> None:
    no_system = CHATML.replace(
        "{% for message in messages %}", "{% for message in messages if message['role'] != 'system' %}"
    )
    with pytest.raises(ValueError, match="leaves the system message out"):
        ChatFormat(make_tokenizer(no_system)).open_user_turn("Be a tutor.")
    plain = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    with pytest.raises(ValueError, match="would have no end"):
        ChatFormat(make_tokenizer(plain)).open_user_turn("Be a tutor.")
    with pytest.raises(ValueError, match="nothing ends an answer"):
        ChatFormat(make_tokenizer(plain, eos=None))


def test_a_template_that_rewrites_earlier_turns_is_refused_for_further_turns() -> None:
    rewriting = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ('' if loop.last else ' (past)') + '\n' + m['content']"
        " + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    chat = ChatFormat(make_tokenizer(rewriting))
    with pytest.raises(ValueError, match="writes earlier turns differently"):
        chat.next_answer_prompt([{"role": "user", "content": "Hi"}], "More", END)


def test_the_template_hash_tells_templates_apart() -> None:
    hashes = {ChatFormat(make_tokenizer(template)).template_hash for template in (CHATML, SYSTEM_IN_USER)}
    assert len(hashes) == 2
    assert START in ChatFormat(make_tokenizer()).special_token_ids


NO_SYSTEM_ROLE = CHATML.replace(  # as in Gemma 2
    "{% for message in messages %}",
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}",
)
LEAVES_SYSTEM_OUT = CHATML.replace(
    "{% for message in messages %}", "{% for message in messages if message['role'] != 'system' %}"
)


def test_a_template_that_refuses_the_system_role_cannot_steer() -> None:
    with pytest.raises(ValueError, match="roles system, user: System role not supported; user turns are steered by a"):
        ChatFormat(make_tokenizer(NO_SYSTEM_ROLE)).open_user_turn("Be a tutor.")


def test_whether_a_template_has_the_system_role() -> None:
    for template in (CHATML, SYSTEM_IN_USER):
        ChatFormat(make_tokenizer(template)).check_system_role()
    with pytest.raises(ValueError, match="System role not supported"):
        ChatFormat(make_tokenizer(NO_SYSTEM_ROLE)).check_system_role()
    with pytest.raises(ValueError, match="leaves the system message out"):
        ChatFormat(make_tokenizer(LEAVES_SYSTEM_OUT)).check_system_role()


def test_what_ends_an_answer_when_nothing_else_is_known() -> None:
    assert ChatFormat(make_tokenizer(eos="<|endoftext|>")).end_of_answer_id == END
    plain = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    assert ChatFormat(make_tokenizer(plain), stop_token_ids=[END_OF_TEXT]).end_of_answer_id == END
