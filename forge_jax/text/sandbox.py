"""Jinja's sandbox with limits on time and memory, because chat templates are untrusted programs.

Jinja's own sandbox protects Python's internals. It does not limit nested loops over `range`, or
strings of a gigabyte. Here every rendering has a `Budget`. Each operation that a template can
repeat, or whose size it can choose, passes a checkpoint that charges the budget:

- Loop iterations and calls are charged by a wrapper around the iterable or the callee.
- Operations that make strings or containers are charged by size: literals, slices, `+`, `~`, `*`,
  `%`, filters, methods and printing. If the result can be much larger than the operands, its size
  is computed first.
- Comparisons and tests that read whole values are charged.

At most one operation on values of bounded size runs between two checkpoints, so a rendering ends
within milliseconds of its limit. `_Metered` adds the wrappers to the syntax tree when a template is
compiled. Templates cannot call them. Otherwise templates render as in Jinja.
"""

from __future__ import annotations

import contextlib
import re
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.exceptions
import jinja2.filters
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.tests
import jinja2.utils
import jinja2.visitor
import markupsafe

MAX_STRING = 4 * 2**20  # Characters of a string.
MAX_WEIGHT = 16 * 2**20  # Weight of a container with its content, as counted by `_weight`.
MAX_EFFORT = 256 * 2**20  # Characters made in a rendering. Each step counts as STEP.
MAX_SECONDS = 1.0  # CPU time of a rendering.
LOOK_EVERY = 8192  # Effort of fast operations between two reads of the clock.
MAX_INTEGER_BITS = 16_384
MAX_SMALL = 65_536  # Characters that slow filters accept.
MAX_ATTRIBUTE, MAX_PARTS = 1024, 8  # Characters and dots in the name of an attribute.
MAX_ARGUMENTS = 16  # Arguments of a call. If there are more, their weight is checked.
MAX_WIDTH = 9999  # Width that a format may pad to.
STEP = 64
ITEM = 64  # Weight of a container's item, about its bytes of memory.
MAX_ERROR = 500  # Characters of a message.


class OverLimitError(jinja2.TemplateRuntimeError):
    """A template exceeds the time or memory of a rendering."""


class Budget:
    """The effort that a rendering has spent, and its limits."""

    __slots__ = ("_cpu_limit", "_most", "look_at", "look_beyond", "spent")

    def __init__(self, seconds: float, most: float):
        self.spent, self._most = 0, most
        self.look_beyond = LOOK_EVERY  # effort
        self.look_at = time.monotonic() + seconds
        self._cpu_limit = time.thread_time() + seconds

    def charge(self, cost: int) -> None:
        """Charge an operation that may be slow, and check the clock.

        Raises:
          OverLimitError: a limit is exceeded.
        """
        self.spent += cost
        if self.spent > self._most or time.monotonic() > self.look_at:
            self.look()

    def look(self) -> None:
        """Check the limits. Fast operations add to `spent`, and call this beyond `look_beyond`."""
        self.look_beyond = self.spent + LOOK_EVERY
        if self.spent > self._most:
            raise OverLimitError("the chat template exceeds the limit on generated text")
        if time.monotonic() > self.look_at:
            # Only this thread's CPU time counts, so that a busy machine does not fail a template.
            left = self._cpu_limit - time.thread_time()
            if left <= 0:
                raise OverLimitError("the chat template exceeds the time limit")
            self.look_at = time.monotonic() + left


_budget: ContextVar[Budget] = ContextVar("rendering")


@contextlib.contextmanager
def budget(share: float = 1.0) -> Iterator[Budget]:
    """Charge templates in the body to a new budget, which is `share` of a full one."""
    token = _budget.set(Budget(share * MAX_SECONDS, share * MAX_EFFORT))
    try:
        yield _budget.get()
    finally:
        _budget.reset(token)


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox of chat templates, which are compiled and rendered under `budget`."""

    intercepted_binops = frozenset({"*", "%", "**"})

    def __init__(self, **options: Any):
        super().__init__(optimized=False, **options)
        self.code_generator_class = _Generator
        for name, run in list(self.filters.items()):
            self.filters[name] = _metered_filter(name, run)
        self.filters |= _CHECKPOINTS
        for name in _LONG_TESTS & self.tests.keys():
            self.tests[name] = _metered(self.tests[name])
        self.filters["sum"] = _metered_filter("sum", _sum)
        self.globals["namespace"] = Namespace
        self.globals["dict"] = _dict
        del self.globals["lipsum"]  # makes text of any length

    def add_filter(self, name: str, run: Callable[..., Any]) -> None:
        self.filters[name] = _metered_filter(name, run)

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a filter by name for `map`, but reject checkpoints."""
        if name in _CHECKPOINTS:
            raise jinja2.TemplateRuntimeError(f"No filter named {name!r} found.")
        return super().call_filter(name, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return True if a template may access this attribute.

        Data types expose only the methods that templates need.
        """
        names = _METHODS.get(type(obj))
        if names is not None:
            return attr in names
        return isinstance(obj, _JINJAS_OWN) and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Raise SecurityError for private attributes, which Jinja would print as nothing."""
        if attribute.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"access to {attribute[:40]!r} is unsafe")
        return super().unsafe_undefined(obj, attribute)

    def call(
        self, context: jinja2.runtime.Context, callee: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        _budget.get().charge(STEP)
        if len(args) > MAX_ARGUMENTS or len(kwargs) > MAX_ARGUMENTS:
            _weight([args, kwargs])  # a generator may have made them, and they become one value
        kind = type(callee)
        if kind is types.BuiltinMethodType or kind is types.MethodType:
            if isinstance(callee.__self__, str):
                kwargs.pop("_loop_vars", None)  # only for functions that take the context
                kwargs.pop("_block_vars", None)
                check = _METHOD_CHECKS.get(callee.__name__)
                if check is not None:
                    args = check(callee.__self__, *args, **kwargs) or args
                if kind is types.BuiltinMethodType:
                    return _made(callee(*args, **kwargs))
        elif kind is jinja2.runtime.LoopContext:
            args = tuple(map(_counted, args))
        return _made(super().call(context, callee, *args, **kwargs))

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        _budget.get().charge(STEP)
        match operator:
            case "*":
                _check_product(left, right)
            case "%" if isinstance(left, str):
                _check_percent(left, right)
            case "**":
                _check_power(left, right)
        return _made(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        run = super().wrap_str_format(value)
        if run is None:
            return None
        text = value.__self__
        return lambda *args, **kwargs: _format(self, text, run.__name__, args, kwargs)


class Namespace(jinja2.utils.Namespace):
    """Jinja's namespace with a fixed repr, because it may contain itself many times."""

    def __repr__(self) -> str:
        return "<Namespace>"


# Checkpoints in the compiled template


def _tick(value: Any, cost: int = STEP) -> Any:
    _budget.get().charge(cost)
    return value


def _counted(iterable: Iterable[Any], cost: int = STEP) -> Iterator[Any]:
    budget = _budget.get()
    for item in iterable:
        budget.spent += cost
        if budget.spent > budget.look_beyond:
            budget.look()
        yield item


def _made(value: Any) -> Any:
    """Charge for a new value by its size, and reject one that is too large."""
    if isinstance(value, str):
        size = len(value)
        if size > MAX_STRING:
            _too_large()
        budget = _budget.get()
        budget.spent += STEP + size
        if budget.spent > budget.look_beyond:
            budget.look()
    elif isinstance(value, list | tuple | dict):
        _budget.get().charge(STEP + ITEM * len(value))
        _weight(value)
    elif value is None:
        pass
    elif isinstance(value, int):
        if value.bit_length() > MAX_INTEGER_BITS:
            _too_large()
    elif isinstance(value, Iterator) and not isinstance(value, jinja2.runtime.LoopContext):
        return _weighed(value)
    return value


def _weighed(iterable: Iterable[Any]) -> Iterator[Any]:
    """Yield a filter's items and check containers, which have passed no checkpoint yet."""
    for item in _counted(iterable):
        if isinstance(item, list | tuple | dict):
            _weight(item)
        yield item


def _sliced(value: Any) -> Any:
    size = len(value) if isinstance(value, str) else ITEM * len(value)
    _budget.get().charge(STEP + size)
    return value


def _joined(parts: list[Any]) -> str:
    """Return the concatenation `a ~ b ~ c` of parts."""
    texts, size = [], 0
    for part in parts:
        text = part if isinstance(part, str) else _text(part)
        size += len(text)
        if size > MAX_STRING:
            _too_large()
        texts.append(text)
    _budget.get().charge(STEP + size)
    return "".join(texts)


def _printed(value: Any) -> str:
    """Return the text that `{{ }}` adds to an output that is joined into one string."""
    return _made(value if isinstance(value, str) else _text(value))


def _text(value: Any) -> str:
    if isinstance(value, list | tuple | dict):
        _weight(value)
    return str(value)


def _too_large() -> NoReturn:
    raise OverLimitError("the chat template creates a value that is too large")


def _weight(value: Any) -> int:
    """Return the characters of all strings in a value, plus ITEM for each value in it.

    A value counts as often as it occurs. Containers are immutable, but one may occur in another
    many times, and is compared or printed that often.

    Raises:
      OverLimitError: the weight exceeds MAX_WEIGHT.
    """
    total = ITEM
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            total += 2 * ITEM * len(item)
            stack.extend(item)
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            total += ITEM * len(item)
            stack.extend(item)
        if total > MAX_WEIGHT:
            _too_large()
    return total


class _Generator(jinja2.compiler.CodeGenerator):
    """Jinja's code generator, applied to a tree with checkpoints."""

    def visit_Template(self, node: jinja2.nodes.Template, frame: Any = None) -> None:
        super().visit_Template(_Metered(self.environment).visit(node), frame)

    def _output_child_to_const(self, node: Any, frame: Any, finalize: Any) -> str:
        """Generate only fixed text at compile time."""
        if not isinstance(node, jinja2.nodes.TemplateData):
            raise jinja2.nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


# Jinja treats them as filters. Templates cannot write a filter name with a space, except as a
# string: see `call_filter`.
_MADE, _PRINTED, _JOINED, _SLICED = "made ", "printed ", "joined ", "sliced "
_TICK, _COUNTED = "tick ", "counted "
_CHECKPOINTS = {
    _MADE: _made,
    _PRINTED: _printed,
    _JOINED: _joined,
    _TICK: _tick,
    _COUNTED: _counted,
    _SLICED: _sliced,
}
_CHAIN = 8  # operands of `+` between two checkpoints


class _Metered(jinja2.visitor.NodeTransformer):
    """A transformer that adds checkpoints around the nodes that need them."""

    def __init__(self, environment: jinja2.Environment):
        self._environment = environment
        self._gathers = False  # True while printed pieces are joined into one text

    def _around(
        self, name: str, node: Any, *args: Any, lineno: int | None = None
    ) -> jinja2.nodes.Filter:
        constants = [jinja2.nodes.Const(arg) for arg in args]
        wrapped = jinja2.nodes.Filter(node, name, constants, [], None, None)
        for new in (wrapped, *constants):
            new.environment = self._environment
            new.lineno = node.lineno if lineno is None else lineno
        return wrapped

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:
        """Charge each iteration for the fixed text that it can print, in addition to its calls."""
        fixed = sum(len(data.data) for data in node.find_all(jinja2.nodes.TemplateData))
        for constant in node.find_all(jinja2.nodes.Const):
            fixed += len(constant.value) if isinstance(constant.value, str) else 0
        self._visit_gathering(node) if node.recursive else self.generic_visit(node)
        node.iter = self._around(_COUNTED, node.iter, STEP + fixed)
        if node.recursive:  # `loop(...)` adds iterations
            start = jinja2.nodes.Const(0, lineno=node.lineno, environment=self._environment)
            charge = self._around(_TICK, start, STEP + fixed)
            node.body.insert(0, jinja2.nodes.ExprStmt(charge, lineno=node.lineno))
        return node

    def _visit_gathering(self, node: Any) -> Any:
        before, self._gathers = self._gathers, True
        self.generic_visit(node)
        self._gathers = before
        return node

    visit_Macro = visit_CallBlock = visit_Block = _visit_gathering

    def visit_FilterBlock(self, node: Any) -> Any:
        """Check the text of a block before its filters receive it."""
        self._visit_gathering(node)
        text = self._around(_MADE, None, lineno=node.lineno)
        innermost = node.filter
        while innermost is not None and innermost.node is not None:
            innermost = innermost.node
        if innermost is None:
            node.filter = text
        else:
            innermost.node = text
        return node

    visit_AssignBlock = visit_FilterBlock

    def visit_Add(self, node: jinja2.nodes.Add, *, checked: bool = True) -> Any:
        """Check the last addition of a chain, and every `_CHAIN`-th one in it."""
        operands: list[Any] = []
        first: Any = node
        while isinstance(first, jinja2.nodes.Add):
            operands.append(first)
            first = first.left
        value = self.visit(first)
        for i, add in enumerate(reversed(operands), 1):
            add.left, add.right = value, self.visit(add.right)
            last = add is node and checked
            value = self._around(_MADE, add) if i % _CHAIN == 0 or last else add
        return value

    def visit_Concat(self, node: jinja2.nodes.Concat) -> Any:
        self.generic_visit(node)
        parts = jinja2.nodes.List(node.nodes, lineno=node.lineno, environment=self._environment)
        return self._around(_JOINED, parts)

    def visit_List(self, node: Any) -> Any:
        self.generic_visit(node)
        plain = all(isinstance(item, jinja2.nodes.Const) for item in node.items)
        return node if plain else self._around(_MADE, node)

    def visit_Tuple(self, node: jinja2.nodes.Tuple) -> Any:
        return self.visit_List(node) if node.ctx == "load" else self.generic_visit(node)

    visit_Dict = visit_List

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> Any:
        """Charge a slice only for its copy, because a part weighs less than the whole value."""
        sliced = isinstance(node.arg, jinja2.nodes.Slice)
        self.generic_visit(node)
        return self._around(_SLICED, node) if sliced else node

    def visit_Compare(self, node: jinja2.nodes.Compare) -> Any:
        """Charge comparisons, except with a constant, which read no more than the constant."""
        self.generic_visit(node)
        cheap = all(
            isinstance(operand.expr, jinja2.nodes.Const) and operand.op not in ("in", "notin")
            for operand in node.ops
        )
        return node if cheap else self._around(_TICK, node)

    def visit_Output(self, node: jinja2.nodes.Output) -> jinja2.nodes.Output:
        """Convert constants to fixed text, and check printed values that are joined.

        The caller of `generate` counts pieces that are not joined.
        """
        node.nodes = [self._output(part) for part in node.nodes]
        return node

    def _output(self, part: Any) -> Any:
        if isinstance(part, jinja2.nodes.TemplateData):
            return part
        if isinstance(part, jinja2.nodes.Const) and isinstance(part.value, str):
            return jinja2.nodes.TemplateData(
                part.value, lineno=part.lineno, environment=self._environment
            )
        if isinstance(part, jinja2.nodes.Add):
            part = self.visit_Add(part, checked=False)
        else:
            part = self.visit(part)
        return self._around(_PRINTED, part) if self._gathers else part


# Operators


def _check_product(left: Any, right: Any) -> None:
    for count, value in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(value, str | list | tuple):
            limit = MAX_STRING if isinstance(value, str) else MAX_WEIGHT // ITEM
            if max(count, 0) * len(value) > limit:
                _too_large()


def _check_power(base: Any, exponent: Any) -> None:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and abs(base) > 1 and base.bit_length() * exponent > MAX_INTEGER_BITS:
        _too_large()


def _check_percent(text: str, arguments: Any) -> None:
    """Reject `text % arguments` if the upper bound of its length is too large."""
    charge, at, total, uses = _budget.get().charge, 0, len(text), 1
    values = arguments if isinstance(arguments, tuple) else (arguments,)
    # An escaped character takes up to ten characters.
    factor = 1 if all(isinstance(value, str | int | float) for value in values) else 10
    while (at := text.find("%", at)) >= 0:
        charge(STEP)
        at += 1
        if text[at : at + 1] == "(":  # each named directive may print all arguments
            uses, at = uses + 1, _end_of_key(text, at)
        match = _DIRECTIVE.match(text, at)
        assert match is not None
        if "*" in match[0]:
            raise OverLimitError("a format cannot take a width from an argument")
        for number in re.findall(r"\d+", match[0]):
            total += _width(number)
        factor = 10 if text[match.end() : match.end() + 1] in ("r", "a") else factor
        at = match.end() + 1
    if total + factor * uses * _weight(arguments) > MAX_WEIGHT:
        _too_large()


_DIRECTIVE = re.compile(r"[-#0 +]*[0-9*]*(?:\.[0-9*]*)?[hlL]?")


def _end_of_key(text: str, at: int) -> int:
    """Return the position after the parenthesis that closes the one at `at`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, at):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    return len(text)


def _width(digits: str) -> int:
    if len(digits) > 5 or int(digits) > MAX_WIDTH:
        raise OverLimitError(f"the width of a format must be at most {MAX_WIDTH}")
    return int(digits)


# Methods of strings


def _check_width(text: str, width: Any = 0, *_: Any, **__: Any) -> None:
    if isinstance(width, int) and width > MAX_STRING:
        _too_large()


def _check_tabs(text: str, tabsize: Any = 8, **_: Any) -> None:
    if isinstance(tabsize, int) and text.count("\t") * max(tabsize, 0) > MAX_STRING:
        _too_large()


def _check_replace(text: str, old: Any, new: Any, count: Any = -1) -> None:
    if isinstance(old, str) and isinstance(new, str) and len(new) > len(old):
        found = text.count(old)
        if isinstance(count, int) and 0 <= count < found:
            found = count
        if len(text) + found * (len(new) - len(old)) > MAX_STRING:
            _too_large()


def _check_join(separator: str, iterable: Any) -> list[Any]:
    """Return the arguments with the iterable as a list, because it may be a generator."""
    items = list(_counted(iterable))
    if _weight(items) + len(separator) * len(items) > MAX_WEIGHT:
        _too_large()
    return [items]


_METHOD_CHECKS: dict[str, Callable[..., Any]] = {
    "center": _check_width,
    "ljust": _check_width,
    "rjust": _check_width,
    "zfill": _check_width,
    "expandtabs": _check_tabs,
    "replace": _check_replace,
    "join": _check_join,
}

_STRING_METHODS = frozenset(
    """capitalize casefold center count endswith expandtabs find format format_map index isalnum
    isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle
    isupper join ljust lower lstrip partition removeprefix removesuffix replace rfind rindex rjust
    rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill""".split()
)
_METHODS: dict[type, frozenset[str]] = {
    str: _STRING_METHODS,
    markupsafe.Markup: _STRING_METHODS,
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
}
_JINJAS_OWN = (
    jinja2.runtime.LoopContext, jinja2.runtime.Macro, jinja2.runtime.BlockReference,
    jinja2.runtime.TemplateReference, jinja2.utils.Namespace, jinja2.utils.Cycler,
    jinja2.utils.Joiner,
)  # fmt: skip


class _Formatter(jinja2.sandbox.SandboxedFormatter):
    """Jinja's formatter, with a check of each field's size."""

    size = 0

    def format_field(self, value: Any, format_spec: str) -> str:
        for digits in re.findall(r"\d+", format_spec):
            _width(digits)
        text = super().format_field(value, format_spec)
        self.size += len(text)
        if self.size > MAX_STRING:
            _too_large()
        _budget.get().charge(STEP + len(text))
        return text


def _format(
    environment: Sandbox, text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    if name == "format_map":
        if kwargs or len(args) != 1:
            raise TypeError("format_map() takes exactly one argument")
        args, kwargs = (), args[0]
    if text.count("{") > MAX_SMALL:
        _too_large()
    return _made(_Formatter(environment).vformat(str(text), args, kwargs))


# Filters and tests


def _metered(run: Callable[..., Any]) -> Callable[..., Any]:
    def metered(*args: Any) -> Any:
        _budget.get().charge(STEP)
        return run(*args)

    return metered


_LONG_TESTS = {
    "in", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", "ge", ">=", "<", "lt",
    "lessthan", "<=", "le", "lower", "upper", "divisibleby",
}  # fmt: skip

# These cannot enlarge their input, and take negligible time.
_LIGHT_FILTERS = {"count", "d", "default", "first", "length", "safe"}
# These are slow or hard to bound, and useless in a chat, so they accept only short values.
_SMALL_FILTERS = {
    "filesizeformat", "pprint", "striptags", "title", "truncate", "urlencode", "urlize",
    "wordcount", "wordwrap", "xmlattr",
}  # fmt: skip


def _metered_filter(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that charges the budget and checks its arguments.

    A check may return positional arguments that replace the original ones.
    """
    if name in _LIGHT_FILTERS:
        return run
    passes = getattr(run, "jinja_pass_arg", None) is not None
    check = _FILTER_CHECKS.get(name)
    if name in _SMALL_FILTERS:
        check = _check_small

    def metered(*args: Any, **kwargs: Any) -> Any:
        _budget.get().charge(STEP)
        if check is not None:
            own = args[1:] if passes else args
            replaced = check(*own, **kwargs)
            if replaced is not None:
                args = (*args[: len(args) - len(own)], *replaced)
        return _made(run(*args, **kwargs))

    if passes:
        metered.jinja_pass_arg = run.jinja_pass_arg  # type: ignore[attr-defined]
    return metered


def _check_small(value: Any, *args: Any, **kwargs: Any) -> None:
    if _weight([value, args, list(kwargs.values())]) > MAX_SMALL:
        raise OverLimitError(
            f"a filter of the chat template accepts at most {MAX_SMALL} characters"
        )
    if any(isinstance(arg, int) and abs(arg) > MAX_SMALL for arg in (*args, *kwargs.values())):
        _too_large()


def _check_center(value: Any, width: Any = 80) -> None:
    _check_width("", width)


def _check_indent(text: Any, width: Any = 4, first: Any = False, blank: Any = False) -> None:
    size = len(width) if isinstance(width, str) else width if isinstance(width, int) else 0
    if isinstance(text, str) and (text.count("\n") + 2) * size > MAX_STRING:
        _too_large()


def _check_count(value: Any, count: Any = 1, fill_with: Any = None) -> None:
    if isinstance(count, int) and count > MAX_SMALL:
        _too_large()


def _check_round(value: Any, precision: Any = 0, method: Any = "common") -> None:
    if isinstance(precision, int) and abs(precision) > 300:
        raise OverLimitError("round accepts at most 300 digits")


def _check_replace_filter(value: Any, old: Any, new: Any, count: Any = None) -> None:
    _check_replace(str(value), str(old), str(new), -1 if count is None else count)


def _check_join_filter(value: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    _check_attribute(value, *args[1:], **kwargs)
    separator = args[0] if args else kwargs.get("d", "")
    return (*_check_join(str(separator), value), *args)


def _check_format_filter(value: Any, *args: Any, **kwargs: Any) -> None:
    _check_percent(str(value), kwargs or args)


def _check_json(
    value: Any,
    ensure_ascii: Any = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: Any = False,
) -> None:
    if separators is not None and any(len(part) > 16 for part in separators):
        raise OverLimitError("separators of tojson must have at most 16 characters")
    size = _weight(value)
    if indent is None:
        return
    width = len(indent) if isinstance(indent, str) else indent
    if not isinstance(width, int) or width > 16:
        raise OverLimitError("the indent of tojson must be at most 16")
    if size + _lines_of_json(value) * width > MAX_WEIGHT:
        _too_large()


def _lines_of_json(value: Any) -> int:
    """Return the total number of indentation steps over all lines."""
    total, depth, level = 0, 0, [value]
    while level:
        level = [
            item
            for container in level
            if isinstance(container, dict | list | tuple)
            for item in (container.values() if isinstance(container, dict) else container)
        ]
        depth += 1
        total += 2 * depth * len(level)
    return total


def _check_all_at_once(value: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...] | None:
    """Limit the items and attribute names of filters that read all items first."""
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, str) and (len(arg) > MAX_ATTRIBUTE or arg.count(".") > MAX_PARTS):
            _too_large()
    items = value if isinstance(value, str | dict | list | tuple) else list(_counted(value))
    if len(items) > MAX_SMALL:
        _too_large()
    return (items, *args)


def _check_attribute(value: Any, *args: Any, **kwargs: Any) -> None:
    for arg in (*args[:1], kwargs.get("attribute")):
        if isinstance(arg, str) and (len(arg) > MAX_ATTRIBUTE or arg.count(".") > MAX_PARTS):
            _too_large()


def _sum(
    environment: jinja2.Environment, iterable: Any, attribute: Any = None, start: Any = 0
) -> Any:
    """Return Jinja's `sum`, with each addition checked, because it can also add lists."""
    if isinstance(start, str):
        raise TypeError("sum cannot add strings: use join")
    get = jinja2.filters.make_attrgetter(environment, attribute) if attribute is not None else None
    total = start
    for item in _counted(iterable):
        total = _made(total + (get(item) if get is not None else item))
    return total


_sum = jinja2.pass_environment(_sum)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Return a `dict`, with each pair charged, because chosen numbers can make hashes collide."""
    found: dict[Any, Any] = {}
    for pairs in args:
        for key, value in _counted(pairs.items() if isinstance(pairs, Mapping) else pairs):
            found[key] = value
    return found | kwargs


_FILTER_CHECKS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort"), _check_all_at_once),
    **dict.fromkeys(("map", "rejectattr", "selectattr", "sum", "unique"), _check_attribute),
    "batch": _check_count,
    "center": _check_center,
    "format": _check_format_filter,
    "indent": _check_indent,
    "join": _check_join_filter,
    "replace": _check_replace_filter,
    "round": _check_round,
    "slice": _check_count,
    "tojson": _check_json,
}
