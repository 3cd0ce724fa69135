"""A chat reads as transformers renders it; what a template refuses is the client's mistake, in the template's words."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from chat_templates import TEMPLATES
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from bifolio.cluster import answer as answer_module
from bifolio.cluster import chat as chat_module
from bifolio.cluster import template_budget
from bifolio.cluster.answer import CHAT_THREADS, in_thread
from bifolio.cluster.chat import Chat, ChatTemplate
from bifolio.cluster.tokenizer import Tokenizer
from bifolio.protos.errors import ConfigError, InvalidRequest, Overloaded

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
Messages = list[dict[str, Any]]


def said(*texts: str, system: str | None = None) -> Messages:
    """Turns of user and assistant by turns."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


CHATS = {
    "one question": said("What is 2 + 2?"),
    "a system message": said("Hello", system="You are terse."),
    "several turns": said("Hi", "Hello!", "And now?", system="Be kind."),
    "ends with the assistant": said("Write a poem", "Roses are"),
    "spaces and lines": said("  two \n\n", " Roses are \n", "\tand "),
    "all scripts": said("서울은 👩‍👩‍👧‍👦", "e\u0301 שלום", "한"),
    "looks like a template": said("{{ bos_token }}{% raise %}{# #}", "{{ 7 * 7 }}", "<|im_end|>\n<|im_start|>system"),
    "escapes": said("<b>&amp;'\"</b>", "\\n", "\u2028"),
    "nothing": said(""),
}


@pytest.fixture(scope="module")
def templates(smollm2_gguf: Path) -> dict[str, str]:
    source = Tokenizer.load(smollm2_gguf).chat_template
    assert source is not None
    return {"smollm2": source, **TEMPLATES}


@pytest.fixture(scope="module")
def theirs() -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=Backend(models.BPE()), **SPECIAL)


def same(theirs: Any, source: str, messages: Messages, goes_on: bool = False, **variables: Any) -> None:
    """Renders equally in both, or is refused by both."""
    template = ChatTemplate(source, SPECIAL)
    chat = Chat(tuple(messages), goes_on, variables)
    try:
        expected = theirs.apply_chat_template(
            messages,
            chat_template=source,
            tokenize=False,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            **variables,
        )
    except Exception:
        with pytest.raises(InvalidRequest):
            template.render(chat)
    else:
        assert template.render(chat) == expected


@pytest.mark.parametrize("name", ["smollm2", *TEMPLATES])
@pytest.mark.parametrize("about", CHATS)
@pytest.mark.parametrize("goes_on", [False, True])
def test_it_reads_as_transformers_renders_it(
    templates: dict[str, str], theirs: Any, name: str, about: str, goes_on: bool
) -> None:
    same(theirs, templates[name], CHATS[about], goes_on)


@pytest.mark.parametrize("name", ["smollm2", *TEMPLATES])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_chat_reads_as_transformers_renders_it(
    templates: dict[str, str], theirs: Any, name: str, data: st.DataObject
) -> None:
    text = st.one_of(st.text(max_size=15), st.text("{}%# \n<|>'\"\\", max_size=15))
    role = st.sampled_from(["user", "assistant", "system", "tool", "developer"])
    message = st.fixed_dictionaries({"role": role, "content": text}, optional={"name": text, "tool_calls": st.none()})
    messages = data.draw(st.lists(message, min_size=1, max_size=5))
    same(theirs, templates[name], messages, data.draw(st.booleans()))


def test_some_texts_to_look_at(templates: dict[str, str]) -> None:
    chat = Chat(tuple(said("Hi", "Yes", "Go", system="S")))
    texts = {name: ChatTemplate(source, SPECIAL).render(chat) for name, source in templates.items()}
    assert texts["smollm2"] == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n"
        "<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n"
    )
    assert texts["mistral"] == "<s>[INST] S\n\nHi [/INST] Yes</s>[INST] Go [/INST]"
    going_on = Chat(tuple(said("Hi", "Yes, I ")), continue_final_message=True)
    assert ChatTemplate(templates["zephyr"], SPECIAL).render(going_on) == "<|user|>\nHi</s>\n<|assistant|>\nYes, I "


def test_a_rendered_chat_has_its_own_special_tokens(smollm2_gguf: Path, templates: dict[str, str]) -> None:
    tokenizer = Tokenizer.load(smollm2_gguf)
    text = ChatTemplate(templates["smollm2"], tokenizer.special_tokens).render(Chat(tuple(said("Hi"))))
    ids = tokenizer.encode(text, special_tokens=False)
    assert ids.count(1) == 3
    assert ids.count(2) == 2


# --- what templates may use ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}|{{ {'b': '<é>', 'a': 1} | tojson(sort_keys=true) }}",
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% generation %}{% set x = 1 %}{{ m.content }}{% endgeneration %}{{ x }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{{ bos_token }}{{ eos_token }}{{ pad_token }}[{{ unk_token }}]{{ tools }}{{ documents }}",
        "  {% if add_generation_prompt %}\n  yes\n  {% endif %}\n",
        "{{ dict(a=1) }}{{ dict.fromkeys('ab') }}{{ strftime_now('%Y') | length }}{{ extra }}{{ nested.a[0] }}",
        "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}{{ messages[0].name is defined }}",
        "{{ messages[-1]['content'].strip().split('a')[-1] | upper }}{{ range(3) | list }}",
        "{% macro said(m) %}{{ m.role }}:{{ m.content }}{% endmacro %}{{ said(messages[0]) }}",
        "{{ 'a' ~ 1 ~ none ~ [2] ~ nobody }}{% autoescape true %}{{ extra ~ '>' ~ ('&' | safe) }}{% endautoescape %}",
        "{{ ('<{}>' | safe).format('<') }}{{ '{0:>5}|{a[0]!r}'.format(1, a='x') }}{{ '{a}'.format_map({'a': 1}) }}",
        "{{ '%5.1f|%-4s|%%|%(a)s' % {'a': 'é'} }}",
        "{{ '%5.1f|%-4s|%%|%r' % (2.25, 'x', 'y') }}{{ '%s' | format(messages) }}{{ '<%s>' % 'é' }}{{ 7 % 3 }}",
        "{{ [[1], [2]] + [[3]] }}{{ 'ab' * 3 }}{{ 2 * [0] }}{{ (1, 2) + (3,) }}{{ 2 ** 64 }}{{ 2 ** -1 }}{{ 1.5 * 2 }}",
        "{{ messages[1:] }}{{ 'abcdef'[::2] }}{{ messages[::-1] | map(attribute='role') | join(', ') }}",
        "{% for x in 'abc' %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.nextitem }},{% endfor %}",
        "{% for x in nobody %}x{% else %}none{% endfor %}{% for k, v in messages[0] | items %}{{ k }}{% endfor %}",
        "{% for x in [1, 2, 3] if x != 2 %}{{ x }}{{ loop.revindex }}{% endfor %}{% for x in none %}{% endfor %}",
        "{% for x in [[1, [2]], [3]] recursive %}{{ loop(x) if x is iterable else x }}{{ loop.depth }}{% endfor %}",
        "{{ 'a\nb' | indent(2, true) }}{{ 'a\nb' | indent('--') }}{{ 'aXbX' | replace('X', 'YY') | center(20) }}",
        "{{ [1, 2.5] | sum }}{{ [3, 1] | sort | list }}{{ 'cab' | list }}{{ [1, 2, 3] | batch(2) | list }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | map('length') | list }}",
        "{{ 'a b'.split() }}{{ ' a,b '.strip().rsplit(',', 1) }}{{ 'a\nb'.splitlines() }}{{ '-'.join(['a', 'b']) }}",
        "{{ 'aa'.replace('a', 'b', 1) }}{{ 'a'.ljust(5) }}{{ '7'.zfill(3) }}{{ ''.join([]) }}{{ 'x'.join([1]) }}",
        "{% set x %}a{{ 1 }}{% endset %}{% filter upper %}{{ x }}{% endfilter %}{% call dict() %}{% endcall %}",
        "{{ messages | tojson(indent='-') }}{{ messages | tojson(separators=(',', ':'), ensure_ascii=true) }}",
    ],
)
def test_a_template_has_what_transformers_gives_it(theirs: Any, source: str) -> None:
    messages: Messages = [
        {"role": "user", "content": "é<a>", "reasoning": "because", "name": None, "more": {"k": [1, 2.5, True, None]}},
        {"role": "assistant", "content": "bab "},
    ]
    same(theirs, source, messages, extra="x", nested={"a": [1]})


@pytest.mark.parametrize(
    "variables", [{"bos_token": "<other>"}, {"tools": [{"name": "f"}]}, {"enable_thinking": False}, {"range": 1}]
)
def test_a_users_variables_come_over_special_tokens_as_in_transformers(theirs: Any, variables: Any) -> None:
    source = "{{ bos_token }}{{ tools | tojson }}{{ enable_thinking }}{{ range(2) | list }}"
    same(theirs, source, said("content"), **variables)


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "continue_final_message"])
def test_a_users_variables_do_not_replace_the_request(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"chat_template_kwargs names {name}, which") as caught:
        ChatTemplate("{{ messages }}", {}).render(Chat(tuple(said("Hi")), template_kwargs={name: []}))
    assert caught.value.field == "chat_template_kwargs"


# --- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "does not take these messages: roles must alternate$"),
        ("{{ messages[0].nothing.at_all }}", "has no attribute 'nothing'"),
        ("{{ nobody.there }}", "'nobody' is undefined"),
        ("{{ 'a' + 1 }}", "can only concatenate str"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ raise_exception.__globals__.json }}", "access to attribute '__globals__' .* is unsafe"),
        ("{% set n = namespace(_x=1) %}", "no name that begins with an underscore"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ raise_exception('x' * 100000) }}", "x{500}$"),
    ],
)
def test_a_template_that_fails_is_the_requests_mistake(source: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        ChatTemplate(source, SPECIAL).render(Chat(tuple(said("Hi"))))
    assert caught.value.field == "messages"
    assert caught.value.__cause__ is None
    assert "/" not in caught.value.message


NESTED = "{% set n = namespace(l=[0, 1]) %}{% for i in range(99) %}{% set n.l = [n.l, n.l] %}{% endfor %}"
TOO_MUCH = {
    "a width or a count": [
        "{{ 'a'.center(10 ** 9) }}",
        "{{ 'a'.ljust(width) }}",
        "{{ 'a'.zfill(*[10 ** 9]) }}",
        "{% for m in ['a'] | map(attribute='rjust') %}{{ m(10 ** 9) }}{% endfor %}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%.1000000000f' % 1 }}",
        "{{ '%(a)01000000000d' | format(a=1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:00000000000000001000000000}'.format(1) }}",
        "{{ '{a:{w}}'.format_map({'a': 1, 'w': width}) }}",
        "{{ 'a\nb' | indent(1000000000) }}",
        "{{ 'a' | center(width=1000000000) }}",
        "{{ [['a', 1000000000]] | map('last') | map('string') | list }}{{ ['a'] | map('center', 10 ** 9) | list }}",
        "{{ [1] | batch(1000000000, 0) | list }}",
        "{{ [1] | slice(1000000000) | list }}",
        "{{ 1 | round(1000000000, 'floor') }}",
    ],
    "with % in a way": ["{{ '%*d' % (width, 1) }}", "{{ '%((a))1000000000d' % {'(a)': 1} }}"],
    "longer than 67108864 characters": [
        "{{ 'a' * 10 ** 9 }}",
        "{{ width * 'a' }}",
        "{{ [0] * 10 ** 9 }}",
        "{{ (0,) * 10 ** 9 }}",
        "{{ 'a' * 10 ** 7 * 10 }}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s=[0]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = [n.s, n.s] | join %}{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = '%s%s' % (n.s, n.s) %}{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = '{0}{0}'.format(n.s) %}{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}"
        "{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}",
        "{% macro m(s) %}{{ s }}{{ s }}{% endmacro %}"
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = m(n.s) %}{% endfor %}",
        "{% set s = 'a' * 10 ** 6 %}{{ s.replace('a', s) }}",
        "{% set s = 'a' * 10 ** 6 %}{{ s | replace('a', s) }}",
        "{% set s = 'a' * 10 ** 6 %}{{ s.join(s) }}",
        "{% set s = 'a' * 10 ** 6 %}{{ s | join(s) }}",
        "{% set s = '\n' * 10 ** 6 %}{{ s | indent(1000) }}",
        "{{ ('a,' * 10 ** 7).split(',') }}",
        "{{ ('a,' * 10 ** 7) | list }}",
        "{% set n = namespace(l=[]) %}{% set s = 'a' * 10 ** 6 %}"
        "{% for i in range(9999) %}{% set n.l = n.l + [s[i:]] %}{% endfor %}",
    ],
    "more than 100000 bits": [
        "{{ 7 ** (10 ** 9) }}",
        "{{ 7 ** width }}",
        "{% set n = namespace(i=7) %}{% for i in range(99) %}{% set n.i = n.i * n.i %}{% endfor %}",
        "{{ ('f' * 10 ** 6) | int(base=16) }}",
    ],
    "indentation or separators": [
        "{{ [1] | tojson(indent=10 ** 9) }}",
        "{{ [1] | tojson(separators=(',' * 999, '')) }}",
    ],
    "the time in a format": ["{{ strftime_now('%c' * 10 ** 6) }}"],
    "sums up what is no number": ["{{ [[0]] | sum(start=[]) }}"],
    "is unsafe": ["{{ ('a'.encode() * 9).center(10 ** 9) }}", "{{ width.to_bytes(10 ** 9) }}"],
    "'lipsum' is undefined": ["{{ lipsum(n=10 ** 7) }}"],
    "ranges have more than 1000000 steps": [
        "{% for i in range(99999) %}" * 5 + "{% endfor %}" * 5,
        "{% for i in range(99999) %}{% set x = range(99999) | list %}{% endfor %}",
    ],
    "longer than 0.2 s": [
        "{% set r = range(99999) | list %}" + "{% for i in r %}" * 4 + "{% endfor %}" * 4,
        "{% set r = range(99999) | list %}{% for i in r recursive %}{{ loop(r) if loop.depth < 3 }}{% endfor %}",
        *(NESTED + text for text in ("{{ n.l }}", "{{ n.l | tojson }}", "{{ '' ~ n.l }}", "{{ '%s' % n.l }}")),
        *(NESTED + text for text in ("{{ '{}'.format(n.l) }}", "{{ n.l | string }}", "{{ [n.l] | join }}")),
        "{% macro m(n) %}{{ m(n - 1) or m(n - 1) if n }}{% endmacro %}{{ m(99) }}",
        "{% set r = range(99999) | list %}{{ r | select('in', r | reverse | list) | list }}",
        "{% set r = range(99999) | list %}"
        "{% set s = 'a' * 10 ** 6 %}{% for i in r %}{{ s.count('b') or '' }}{% endfor %}",
    ],
}


@pytest.mark.parametrize(("says", "source"), [(says, source) for says in TOO_MUCH for source in TOO_MUCH[says]])
def test_a_template_that_takes_too_much_is_refused(says: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "DEADLINE", 0.2 if "0.2 s" in says else 60)
    with pytest.raises(InvalidRequest, match=says) as caught:
        ChatTemplate(source, {}).render(Chat(tuple(said("Hi")), template_kwargs={"width": 10**9}))
    assert caught.value.field == "messages"


LIMITED = """
import resource
from bifolio.cluster.chat import Chat, ChatTemplate
from bifolio.protos.errors import InvalidRequest

resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
for source in SOURCES:
    try:
        ChatTemplate(source, {}).render(Chat(({"role": "user", "content": "Hi"},), template_kwargs={"width": 10**9}))
    except InvalidRequest as error:
        assert "MemoryError" not in error.message, source
    else:
        raise AssertionError(source)
"""


def test_what_is_refused_takes_no_gigabytes() -> None:
    sources = [source for says in TOO_MUCH if "0.2 s" not in says for source in TOO_MUCH[says]]
    subprocess.run([sys.executable, "-c", LIMITED.replace("SOURCES", repr(sources))], check=True, timeout=300)


def test_each_render_has_a_budget_of_its_own() -> None:
    template = ChatTemplate("{% for i in range(99999) %}{% endfor %}{% for i in range(99999) %}{% endfor %}x", {})
    assert {template.render(Chat(tuple(said("Hi")))) for _ in range(20)} == {"x"}


def test_chats_that_hang_take_no_threads_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_module, "PATIENCE", 0.05)
    end = threading.Event()

    async def run() -> None:
        hanging = [asyncio.create_task(in_thread(True, end.wait)) for _ in range(CHAT_THREADS)]
        await asyncio.sleep(0)
        waiting = await asyncio.gather(*(in_thread(True, end.wait) for _ in range(50)), return_exceptions=True)
        assert all(isinstance(error, Overloaded) and "chat template" in error.message for error in waiting)
        assert await asyncio.wait_for(in_thread(False, lambda: "completed"), 60) == "completed"
        end.set()
        assert await asyncio.gather(*hanging) == [True] * CHAT_THREADS
        assert await in_thread(True, lambda: "chatted") == "chatted"

    try:
        asyncio.run(run())
    finally:
        end.set()


def test_a_text_without_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "MOST_CHARACTERS", 10_000)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{{ messages[0].content }}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="the text is longer than 10000 characters"):
        ChatTemplate(endless, {}).render(Chat(tuple(said("Hi"))))


@pytest.mark.parametrize(
    ("chat", "says"),
    [
        (Chat(()), "messages is empty; at least one"),
        (Chat(({"role": "user"},), True), "the last message has no content to continue"),
        (Chat(({"role": "user", "content": []},), True), "the last message has no content to continue"),
        (Chat(tuple(said("Hi", "yes")), True), "leaves out or changes the last message's text"),
    ],
)
def test_a_chat_that_cannot_be_rendered_is_refused(chat: Chat, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        ChatTemplate("{{ messages[0].content }}", {}).render(chat)
    assert caught.value.field == "messages"


def test_variables_that_are_nested_without_end_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested too deep"):
        ChatTemplate("x", {}).render(Chat(tuple(said("Hi")), template_kwargs={"deep": deep}))


def test_the_last_of_several_parts_is_continued(theirs: Any) -> None:
    source = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}</s>{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]
    same(theirs, source, [{"role": "assistant", "content": parts}], True)
    assert parts[1]["text"] == "b "


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("a\n{% if %}", "mistake in line 2: Expected an expression"),
        ("{% for m in messages %}", "mistake in line 1: Unexpected end of template"),
        ("{{ messages | no_such_filter }}", "mistake in line 1: No filter named 'no_such_filter'"),
        ("{% include 'x' %}{% nonsense %}", "unknown tag 'nonsense'"),
    ],
)
def test_a_template_with_a_mistake_is_a_clear_error(source: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ChatTemplate(source, {})


def test_nothing_can_be_loaded() -> None:
    with pytest.raises(InvalidRequest, match="no loader"):
        ChatTemplate("{% include 'x' %}", {}).render(Chat(tuple(said("Hi"))))


def test_one_template_serves_many_threads(templates: dict[str, str]) -> None:
    template, texts = ChatTemplate(templates["qwen2.5"], SPECIAL), {}

    def render(number: int) -> None:
        texts[number] = {template.render(Chat(tuple(said(f"Hi {number}")))) for _ in range(50)}

    threads = [threading.Thread(target=render, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(texts[number]) == 1 and f"Hi {number}<" in texts[number].pop() for number in range(8))
