"""Chat templates are untrusted programs: bounded in time and memory, and isolated."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
import tracemalloc
from datetime import datetime

import jinja2.sandbox
import pytest

from forge_jax.errors import CheckpointError, RequestError
from forge_jax.text import ChatTemplate, chat_template, sandbox

HELLO = [{"role": "user", "content": "hello"}]
MIB = 2**20


def render(source: str, messages=HELLO, **kwargs) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **kwargs)


def big(name: str) -> str:
    """Return template code that makes a string of a mebibyte, by doubling."""
    return f"{{% set n = namespace({name}='abcdefghijklmnop') %}}" + (
        f"{{% for i in range(16) %}}{{% set n.{name} = n.{name} + n.{name} %}}{{% endfor %}}"
    )


BIG = big("s")
EQUAL = BIG + "{% set n.t = n.s + '' + 'x' %}{% set n.s = n.s + 'x' %}"
FOREVER = "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}"
# Two equal lists of sixteen thousand lists, to be compared one by one.
DOUBLED = (
    "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(14) %}"
    "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}"
)

# Time: loops, recursion, calls

ENDLESS = {
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "nothing but loops": FOREVER,
    "nothing but comparisons": DOUBLED + "{{ n.x == n.y }}" * 4000,
    "nothing but tests": DOUBLED + "{{ n.x is eq n.y }}" * 4000,
    "three ranges": "{% for i in range(999) %}{% for j in range(9999) %}{% for k in range(9999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "filtered": "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}x{% endfor %}"
    "{% endfor %}",
    "recursive loop": "{% for i in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "recursive ranges": "{% for i in range(99999) recursive %}{% if loop.depth < 2 %}"
    "{{ loop(range(99999)) }}{% endif %}{% endfor %}",
    "macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "macro twice": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "macros in turn": "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}"
    "{{ a() }}",
    "caller": "{% macro m(n) %}{{ caller() }}{% if n %}{% call m(n-1) %}{{ caller() }}{% endcall %}"
    "{% call m(n-1) %}x{% endcall %}{% endif %}{% endmacro %}{% call m(60) %}x{% endcall %}",
    "block": "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "in a range": "{% for i in range(99999) %}{{ 0.5 in range(99999) }}{% endfor %}",
    "list of a range": "{% for i in range(99999) %}{% set x = range(99999)|list %}{% endfor %}",
    "sum": "{% for i in range(99999) %}{{ range(99999)|sum }}{% endfor %}",
    "sum of lists": "{{ range(99999)|map('string')|batch(1)|sum(start=[]) }}",
    "select": "{% for i in range(9999) %}{{ range(99999)|select('in', [])|list }}{% endfor %}",
    "map of lists": "{% for i in range(9999) %}{% for x in [[1]*999]*99 | map('sum') %}{% endfor %}"
    "{% endfor %}",
    "sort": BIG + "{% for i in range(9999) %}{{ (range(99999)|sort|length) }}{% endfor %}",
    "replace": BIG + "{% for i in range(9999) %}{{ n.s.replace('a', 'b')|length }}{% endfor %}",
    "split": BIG + "{% for i in range(9999) %}{{ n.s.split('a')|length }}{% endfor %}",
    "upper": BIG + "{% set t = n.s|upper %}" * 2000,
    "slices": BIG + "{% set t = n.s[1:] %}" * 2000,
    "compare": BIG + "{% set t = n.s + 'x' %}" + "{{ n.s + 'y' == t }}" * 2000,
    "search": BIG + "{% for i in range(99999) %}{{ ('b' * 1000 + 'a') in n.s }}{% endfor %}",
    "colliding numbers": "{% set n = namespace(d=[]) %}{% for i in range(40000) %}"
    "{% set n.d = n.d + [i * 2305843009213693951] %}{% endfor %}{{ n.d|unique|list|length }}",
    "colliding keys": "{{ dict(range(99999)|map('string')|map('int')|batch(2)) }}" * 200,
    "a number": "{{ 10 ** (10 ** 9) }}",
    "numbers": "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}"
    "{% endfor %}",
    "int of text": BIG + "{{ n.s|int(0, 16) }}{{ ('f' * 1000000)|int(0, 16) }}",
    "round": "{{ 1.5|round(10**9, 'floor') }}",
    "lipsum": "{{ lipsum(n=10**9) }}",
    "strftime": "{{ strftime_now('%9999999d' + 'x' * 4000000) }}",
    "doubled lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "doubled dicts": "{% set n = namespace(x={}) %}{% for i in range(60) %}"
    "{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}{{ n.x == n.x }}",
    "doubled tuples": "{% set n = namespace(x=(1,)) %}{% for i in range(60) %}"
    "{% set n.x = (n.x, n.x) %}{% endfor %}{{ {n.x: 1} }}",
    "a long attribute": "{{ range(9)|map(attribute=('a.' * 2000000), default={})|list }}",
    "sort by parts": "{{ range(99999)|sort(attribute='a.b.c') }}",
    "many at once": "{{ (range(99999)|list)|groupby(0)|list }}",
    "a checkpoint as a filter": "{{ ['a']|map('tick ', -10**15)|list }}" + FOREVER,
    "a counter as a filter": "{% for x in ['abc']|map('counted ', -10**15) %}{{ x|list }}"
    "{% endfor %}" + FOREVER,
    "one text many times": EQUAL + "{% set x = range(99999)|map(attribute='z', default=n.s)"
    "|batch(60000)|first %}{% set y = range(99999)|map(attribute='z', default=n.t)|batch(60000)"
    "|first %}{{ x == y }}",
    "one argument many times": EQUAL + "{% macro m() %}{{ caller(varargs) }}{% endmacro %}"
    "{% call(x) m(*(range(99999)|map(attribute='z', default=n.s))) %}"
    "{% call(y) m(*(range(99999)|map(attribute='z', default=n.t))) %}{{ x == y }}{% endcall %}"
    "{% endcall %}",
    "braces": BIG + "{% set x = ('{{' * 2000000).format() %}",
    "deep lists": "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = [n.x] %}"
    "{% endfor %}{{ n.x }}",
}


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.quick_cases(15)
def test_endless_template_is_stopped(name, monkeypatch):
    """It stops within a quarter of a second of CPU time after the limit, which is low here."""
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.1)
    template = ChatTemplate(ENDLESS[name], {})
    begin = time.thread_time()
    with pytest.raises(RequestError) as caught:
        template.render(HELLO)
    assert time.thread_time() - begin < 0.1 + 0.25 * 4  # for a loaded machine with slower cores
    assert caught.value.param == "messages" and len(str(caught.value)) < 1000


def test_recursive_template_is_stopped_in_a_thread(monkeypatch):
    """The server renders in a thread, which has another stack size than the main thread."""
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.1)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for name in ("macro", "macro twice", "block", "recursive loop", "caller", "deep lists"):
            template = ChatTemplate(ENDLESS[name])
            with pytest.raises(RequestError):
                pool.submit(template.render, HELLO).result()


def test_client_arguments_cannot_make_a_template_explode():
    """The request's arguments are deep and wide JSON, rendered with an indentation."""
    wide: list = [1] * 200_000
    for _ in range(50):
        wide = [wide]
    for source in ("{{ tools|tojson(indent=4) }}", "{{ '-' * x }}", "{{ 'a'|indent(x, true) }}"):
        with pytest.raises(RequestError):
            render(source, tools=wide, x=10**9)


def test_conversation_dependent_explosion_is_stopped(monkeypatch):
    """A trial when the template is loaded would not detect it."""
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.1)
    template = ChatTemplate("{% if messages|length > 1 %}" + FOREVER + "{% endif %}ok", {})
    assert template.render(HELLO) == "ok"
    with pytest.raises(RequestError):
        template.render(HELLO * 3)
    assert template.render(HELLO) == "ok"


# Memory: sizes of values

HUGE = {
    "product": "{{ 'a' * 10**9 }}",
    "product reversed": "{{ 10**9 * 'a' }}",
    "product of lists": "{{ [1] * 10**9 }}",
    "product of products": "{% set n = namespace(x='a') %}{% for i in range(40) %}"
    "{% set n.x = n.x * 1000 %}{% endfor %}{{ n.x }}",
    "sum": "{% set n = namespace(x='a') %}{% for i in range(40) %}{% set n.x = n.x + n.x %}"
    "{% endfor %}{{ n.x|length }}",
    "concatenation": "{% set n = namespace(x='a') %}{% for i in range(40) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x|length }}",
    "sum of lists": "{% set n = namespace(x=[1]) %}{% for i in range(40) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}{{ n.x|length }}",
    "one long sum": BIG + "{{ " + " + ".join(["n.s"] * 60) + " }}",
    "one long concatenation": BIG + "{{ " + " ~ ".join(["n.s"] * 200) + " }}",
    "a list of strings": BIG + "{% set x = [" + ", ".join(["n.s"] * 200) + "] %}{{ x|length }}",
    "many variables": BIG + "".join(f"{{% set x{i} = n.s + '{i}' %}}" for i in range(600)),
    "many slices": BIG + "".join(f"{{% set x{i} = n.s[{i}:] %}}" for i in range(600)),
    "kept strings": "{% set n = namespace(x=none) %}{% for i in range(99999) %}"
    "{% set n.x = [n.x, 'a' * 10000 + i|string] %}{% endfor %}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent with a star": "{{ '%*d' % (10**9, 1) }}",
    "percent precision": "{{ '%.1000000000f' % 1 }}",
    "percent of a name": "{{ '%(a(b)c)999999999d' % {'a(b)c': 1} }}",
    "many percents": BIG + "{{ ('%(a)s' * 1000) % {'a': n.s} }}",
    "format filter": "{{ '%1000000000d'|format(1) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format within": "{{ '{:{w}}'.format(1, w=10**9) }}",
    "format map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "many formats": BIG + "{{ ('{0}' * 1000).format(n.s) }}",
    "format by attr": "{{ ('{:1000000000}'|attr('format'))(1) }}",
    "center": "{{ 'a'.center(10**9) }}",
    "center filter": "{{ 'a'|center(10**9) }}",
    "center mapped": "{{ ['a']|map('center', 10**9)|list }}",
    "a method kept": "{% set f = 'a'.ljust %}{{ f(10**9) }}",
    "zfill": "{{ '1'.zfill(10**9) }}",
    "tabs": "{{ '\\t'.expandtabs(10**9) }}",
    "replace": BIG + "{{ n.s.replace('a', n.s) }}",
    "replace by more": BIG + "{{ n.s.replace('a', 'b' * 10000) }}",
    "replace nothing": BIG + "{{ n.s.replace('', n.s) }}",
    "replace filter": BIG + "{{ n.s|replace('', n.s) }}",
    "join": BIG + "{{ n.s.join('a' * 10000) }}",
    "join filter": BIG + "{{ range(99999)|join(n.s) }}",
    "join by name": BIG + "{{ range(99999)|join(d=n.s) }}",
    "join of an attribute": BIG + "{{ ([{'a': n.s}] * 9999)|join(attribute='a') }}",
    "indent": BIG + "{{ n.s.replace('a', '\\n')|indent(9999) }}",
    "indent text": BIG + "{{ 'a\\nb\\nc\\nd\\ne'|indent(n.s, true) }}",
    "batch": "{{ [1]|batch(10**9, 0)|list }}",
    "slice": "{{ [1]|slice(10**9)|list }}",
    "tojson": "{{ {'a': 1}|tojson(indent=10**9) }}",
    "tojson indent": BIG + "{{ [[1], [1]]|tojson(indent=n.s) }}",
    "tojson separators": BIG + "{{ range(9999)|list|tojson(separators=(n.s, n.s)) }}",
    "tojson of many": "{{ ([1] * 200000)|tojson(indent=16) }}",
    "wordwrap": BIG + "{{ n.s|wordwrap(1) }}",
    "pprint": BIG + "{{ [n.s]|pprint }}",
    "urlize": BIG + "{{ n.s|urlize }}",
    "printed": BIG + "{{ n.s }}" * 100,
    "macro": BIG + "{% macro m() %}" + "{{ n.s }}" * 700 + "{% endmacro %}{% set x = m() %}",
    "set block": BIG + "{% set x %}" + "{{ n.s }}" * 700 + "{% endset %}",
    "block": BIG + "{% if x %}{% block b %}" + "{{ n.s }}" * 700 + "{% endblock %}{% endif %}"
    "{% set y = self.b() %}",
    "filter block": BIG + "{% filter length %}" + "{{ n.s }}" * 300 + "{% endfilter %}",
    "text in a macro": "{% macro m() %}{% for i in range(99999) %}" + "x" * 10000 + "{% endfor %}"
    "{% endmacro %}{% set x = m() %}",
    "text in a recursive loop": "{% for i in [1] recursive %}{% if loop.depth < 2 %}"
    "{% set x = loop(range(99999)) %}{% endif %}" + "x" * 10000 + "{% endfor %}",
    "refusal": BIG + "{{ raise_exception(n.s) }}",
    "an unknown name": BIG + "{{ messages[n.s].x }}",
}


@pytest.mark.parametrize("name", HUGE)
@pytest.mark.quick_cases(20)
def test_too_large_value_is_never_made(name):
    template = ChatTemplate(HUGE[name], {})
    tracemalloc.start()
    try:
        with pytest.raises(RequestError) as caught:
            template.render(HELLO)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 400 * MIB and len(str(caught.value)) < 1000


def test_same_values_are_made_without_limits():
    """Jinja's sandbox alone allows it, so the tests above can fail."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment()
    for source in ("{{ ('a' * 10**7)|length }}", "{{ 'a'.center(10**7)|length }}"):
        assert environment.from_string(source).render() == "10000000"
        with pytest.raises(RequestError, match="creates a value that is too large"):
            render(source)


# Compilation


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 10_000 + "1" + ")" * 10_000 + " }}",
        "{{ " + "+".join(["x"] * 10_000) + " }}",
        "{{ " + "x|trim" + "|trim" * 10_000 + " }}",
        "{% if x %}" * 2000 + "{% endif %}" * 2000,
        "{% for i in x %}" * 50 + "{% endfor %}" * 50,
        "{{ x }}" * 10_000,
        "x" * 200_000,
        "{{ " + "[" * 5000 + " }}",
        "{# " * 20_000,
        "{% raw %}" * 1000,
        "{{ x|nosuchfilter }}",
        "{% autoescape 'a'|center(1000000000) %}{% endautoescape %}x{{",
    ],
    ids=range(12),
)
def test_uncompilable_template_is_rejected_soon(source):
    begin = time.thread_time()
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate(source)
    assert time.thread_time() - begin < 10  # less than one on an idle machine


def test_compiling_a_template_computes_nothing():
    environment = chat_template._environment(datetime.now)
    seen: list[str] = []
    environment.add_filter("probe", lambda value: seen.append(value) or value)
    with sandbox.budget():
        for use in (
            "{{ %s }}",
            "{%% set x = %s %%}",
            "{%% if %s %%}{%% endif %%}",
            "{{ [%s][0] }}",
        ):
            template = environment.from_string(use % "'a'|probe")
            assert not seen
            template.render()
            assert seen.pop() == "a"


# Escaping from the sandbox

ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''['__class__'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ ''|attr('_' ~ '_class__') }}",
    "{{ ''|attr('\\x5f\\x5fclass\\x5f\\x5f') }}",
    "{{ ['']|map(attribute='__class__')|list|first }}",
    "{{ ['']|map('attr', '__class__')|list|first }}",
    "{{ ['']|groupby('__class__') }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{0.__class__.__mro__}'.format_map({'0': ''}) }}",
    "{{ ('{0.__class__}'|attr('format'))('') }}",
    "{{ '%s'.format.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ cycler('a')._pos }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ namespace(a=1)._Namespace__attrs }}",
    "{{ range.__class__ }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__closure__ }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ messages[0].__init__ }}",
    "{{ (1).__class__.__mro__ }}",
    "{{ true.__class__ }}",
    "{{ none.__class__ }}",
    "{{ undefined_name.__class__ }}",
    "{{ ().__class__.__bases__[0].__subclasses__() }}",
    "{% for x in [1] %}{{ loop.__class__ }}{% endfor %}",
    "{% for x in [1] %}{{ loop._iterator.gi_frame }}{% endfor %}",
    "{{ ([1]|map('string')).gi_frame }}",
    "{{ ([1]|map('string')).gi_code }}",
    "{{ ([1]|map('string')).close() }}",
    "{% macro m() %}{% endmacro %}{{ m.__globals__ }}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "{{ ''.join.__self__ }}",
    "{{ 'a'.encode().hex() }}",
    "{{ 'a'.translate({}) }}",
    "{{ {}.fromkeys('abc') }}",
    "{{ (1).to_bytes(1000000000) }}",
    "{{ (1.5).as_integer_ratio() }}",
    "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ messages[0].__setitem__('a', 1) }}",
    "{{ messages[0].pop('role') }}",
    "{% set messages[0].role = 'x' %}",
    "{% include '/etc/passwd' %}",
    "{% include messages %}",
    "{% import 'os' as os %}{{ os }}",
    "{% from 'os' import system %}{{ system('id') }}",
    "{% extends '/etc/passwd' %}",
    "{{ config }}{{ config.items() }}",
    "{{ request.application }}",
    "{{ get_flashed_messages.__globals__ }}",
    "{{ url_for.__globals__ }}",
    "{{ lipsum.__globals__.os }}",
    "{{ __import__('os') }}",
    "{{ eval('1') }}",
    "{{ open('/etc/passwd') }}",
    "{{ environment.filters }}",
    "{{ context.parent }}",
    "{% do messages.append(1) %}",
    "{% debug %}",
    "{{ messages|made }}",
    "{{ messages|counted(0) }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_classic_attack_is_rejected(source):
    messages = [{"role": "user", "content": "hello"}]
    with contextlib.suppress(RequestError, CheckpointError):
        assert ChatTemplate(source).render(messages) == ""  # Jinja renders undefined values as ""
    assert messages == HELLO


@pytest.mark.parametrize("source", ["{{ x }}", "{{ messages[0].content }}", "{{ messages }}"])
def test_text_that_looks_like_a_template_is_text(source):
    text = render(source, [{"role": "user", "content": "{{ 7*7 }}{% raw %}"}], x="{{ 7*7 }}")
    assert "49" not in text and "{{ 7*7 }}" in text


# Ordinary templates


LONG_TEMPLATE = (
    "{{ bos_token }}{% set ns = namespace(last=-1) %}"
    "{% for m in messages[::-1] %}{% if m.role == 'user' and ns.last < 0 %}"
    "{% set ns.last = messages|length - 1 - loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set content = m.content %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}"
    "{% endif %}{% if m.role not in ['user', 'assistant', 'tool'] %}{{ raise_exception('role') }}"
    "{% endif %}{{ '<' + m.role + '>' + content|trim + '</' ~ m.role ~ '>' }}"
    "{% if loop.index0 == ns.last %}<last>{% endif %}{% endfor %}"
    "{% if tools %}{% for t in tools %}{{ t|tojson(indent=4) }}{% endfor %}{% endif %}"
)


@pytest.mark.parametrize(("count", "size"), [(2, 1_000_000), (4096, 400), (16_384, 60)])
def test_long_conversation_is_far_from_the_limits(monkeypatch, count, size):
    """Covers more than a hundred thousand tokens, in few messages or in many."""
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 60.0)  # effort does not depend on the machine
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": "<think>\n</think>" + "é" * size}
        for i in range(count)
    ]
    with_tools = [{"name": f"f{i}", "parameters": {"x": ["a" * 100] * 10}} for i in range(100)]
    template = ChatTemplate(LONG_TEMPLATE, {"bos_token": "<s>"})
    with sandbox.budget() as used:
        text = "".join(template._template_for(None).generate(
            {"messages": messages, "tools": with_tools, "bos_token": "<s>"}
        ))  # fmt: skip
    assert text.count("é") == count * size and text.count("<last>") == 1
    assert used.spent < sandbox.MAX_EFFORT / 5
    assert template.render(messages, tools=with_tools) == text


def test_busy_machine_does_not_fail_a_rendering(monkeypatch):
    """Wall time during which the thread does not run is not counted."""
    clock = iter(range(0, 10**9, 10))
    monkeypatch.setattr(sandbox.time, "monotonic", lambda: float(next(clock)))
    source = "{% for i in range(1000) %}{{ 'abc'.upper() }}{% endfor %}"
    assert render(source) == "ABC" * 1000


def test_renderings_do_not_share_a_budget(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_EFFORT", 2_000_000)
    template = ChatTemplate("{% for i in range(9000) %}{{ 'x'.upper() }}{% endfor %}")
    for _ in range(5):
        assert template.render(HELLO) == "X" * 9000


def test_filters_and_loops_match_jinja():
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    for source in [
        "{% for i in range(3) %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}"
        "{{ loop.revindex }}{{ loop.previtem }}{{ loop.nextitem }},{% endfor %}",
        "{% for k, v in {'a': 1, 'b': [2, 3]}.items() %}{{ k }}={{ v }};{% else %}none{% endfor %}",
        "{% for i in [] %}x{% else %}none{% endfor %}{% for i in nothing %}x{% endfor %}",
        "{% for i in [[1, [2]], [3]] recursive %}{% if i is iterable %}({{ loop(i) }}){% else %}"
        "{{ i }}{% endif %}{% endfor %}",
        "{{ 'a' + 'b' + 'c' * 3 + 'd' ~ 1 ~ none ~ 2.5 }}{{ 1 + 2 + 3 }}{{ [1] + [2] + [3] }}",
        "{{ 'a' + 'b' + 'c' + 'd' + 'e' + 'f' + 'g' + 'h' + 'i' + 'j' + 'k' + 'l' + x }}",
        "{{ '%s: %d %5.2f %%' % ('a', 3, 2.5) }}{{ '%(a)s' % {'a': 1} }}{{ 7 % 3 }}{{ 2 ** 10 }}",
        "{{ '{} {:>5} {a!r:<4}|'.format(1, 2, a='x') }}{{ '%s-%s'|format('a', 1) }}",
        "{{ x[1:] }}{{ x[::-1] }}{{ (1, 2)[0] }}{{ [1, 2, 3][1:] }}{{ x.upper().split('B') }}",
        "{{ [3, 1, 2]|sort|join(', ') }}{{ [1, 2]|join(d='-') }}{{ [{'a': 1}]|join('', 'a') }}",
        "{{ [1, 2, 3]|sum }}{{ [{'a': 2}]|sum(attribute='a') }}{{ [[1], [2]]|sum(start=[]) }}",
        "{{ [1, 2, 3, 4, 5]|batch(2, 0)|list }}{{ [1, 2, 3]|slice(2)|list }}",
        "{{ [1, 1]|unique|list }}",
        "{{ 'a b'|title }}{{ 'a'|center(5) }}{{ 'a\nb'|indent(2) }}{{ 'aXb'|replace('X', '--') }}",
        "{{ [1, 2, 3]|select('odd')|map('string')|list }}{{ 2.567|round(1) }}{{ '12'|int + 1 }}",
        "{{ dict(a=1, **{'b': 2}) }}{{ dict([('a', 1)]) }}{{ namespace(a=1).a }}",
        "{{ x is in 'abc' }}",
        "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ caller() if caller }}{% endmacro %}"
        "{{ m(1) }}{% call m(1, 2, 3) %}body{% endcall %}",
        "{% set y %}a{{ x }}b{% endset %}{{ y|upper }}{% filter upper %}q{{ x }}{% endfilter %}",
        "{% block b %}B{{ x }}{% endblock %}{{ self.b() }}{% with z = 1 %}{{ z }}{% endwith %}",
        "{{ 1 if x == 'abc' else 2 }}{{ 'a' in x }}{{ 1 < 2 < 3 }}{{ x in ('abc', 'd') }}{{ -1 }}",
        "{{ x.replace('a', 'b', 1) }}{{ x.center(7) }}{{ ','.join(['a', 'b']) }}{{ '7'.zfill(3) }}",
        "{{ x }}{{ 1 }}{{ 1.5 }}{{ none }}{{ true }}{{ [1, 'a'] }}{{ 'const' }}{{ 'a' 'b' }}",
    ]:
        ours = ChatTemplate(source).render(HELLO, x="abc")
        assert ours == plain.from_string(source).render(x="abc"), source
