"""Runs a chat template that came with a model file, as code that nobody has read.

Jinja2's immutable sandbox keeps it from reaching Python; the rest is done here: loop passes and
calls are counted, strings are kept below a limit, so that a template neither runs for ever nor
fills the memory. Jinja2 is imported on first use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from jinja2 import Environment, Template

__all__ = ["MAX_CHARS", "MAX_STEPS", "TemplateProblem", "compile_template", "render_template"]

MAX_CHARS = 32 << 20
"""Characters of a rendered text, and of a string made by an operator in a template."""

MAX_STEPS = 1_000_000
"""Loop passes and calls of one rendering."""

_MAX_SOURCE_CHARS = 1 << 20
_STEPS = "_aprefetch_steps"
_LOOP_FILTER = "_aprefetch_counted"
_JOIN_FILTER = "_aprefetch_joined"


class TemplateProblem(Exception):
    """Why a template gave no text; the message is for people."""


def compile_template(source: str) -> Template:
    """Raises TemplateProblem if the template is not valid or too long."""
    from jinja2 import TemplateError

    if len(source) > _MAX_SOURCE_CHARS:
        raise TemplateProblem(f"it is longer than {_MAX_SOURCE_CHARS} characters")
    try:
        return _environment().from_string(source)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        raise TemplateProblem(f"{error}" + (f" (line {line})" if line else "")) from error
    except (RecursionError, SyntaxError, MemoryError, ValueError) as error:
        raise TemplateProblem(f"it cannot be compiled: {error}") from error


def render_template(template: Template, variables: Mapping[str, Any]) -> str:
    """The rendered text. Raises TemplateProblem for whatever goes wrong inside."""
    parts: list[str] = []
    n_chars = 0
    try:
        for part in template.generate({**variables, _STEPS: _Steps()}):
            n_chars += len(part)
            if n_chars > MAX_CHARS:
                raise TemplateProblem(f"its text is longer than {MAX_CHARS} characters")
            parts.append(part)
    except TemplateProblem:
        raise
    except RecursionError:
        raise TemplateProblem("it calls itself without end") from None
    except Exception as error:  # a template can make any operation fail
        raise TemplateProblem(f"{type(error).__name__}: {error}") from error
    return "".join(parts)


class _Steps:
    """What is left of one rendering's allowance."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def take(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise TemplateProblem(f"it takes more than {MAX_STEPS} steps")


def _check_size(size: int) -> None:
    if size > MAX_CHARS:
        raise TemplateProblem(f"it makes a value of more than {MAX_CHARS} characters")


def _raise_exception(message: object) -> NoReturn:
    raise TemplateProblem(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja2's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@cache
def _environment() -> Environment:
    from jinja2 import nodes, pass_context
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.visitor import NodeTransformer

    class Bound(NodeTransformer):
        """Puts every loop and every `~` through a filter of ours."""

        def visit_For(self, node: nodes.For) -> nodes.Node:
            self.generic_visit(node)
            node.iter = nodes.Filter(node.iter, _LOOP_FILTER, [], [], None, None)
            return node

        def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
            self.generic_visit(node)
            return nodes.Filter(nodes.List(node.nodes), _JOIN_FILTER, [], [], None, None)

    class BoundedEnvironment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**", "+", "%"})

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            tree = super()._parse(source, name, filename)
            Bound().visit(tree)  # the root stays the same node
            tree.set_environment(self)
            return tree

        def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
            _steps_of(context).take()
            return super().call(context, obj, *args, **kwargs)

        def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
            _check_operands(operator, left, right)
            return super().call_binop(context, operator, left, right)

    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.filters["format"] = _format
    environment.filters[_LOOP_FILTER] = pass_context(_counted)
    environment.filters[_JOIN_FILTER] = _joined
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals.pop("lipsum", None)
    return environment


def _steps_of(context: Any) -> _Steps:
    steps = context.parent.get(_STEPS)  # a template's own assignment cannot replace this one
    if not isinstance(steps, _Steps):
        raise TemplateProblem("it replaces what counts its steps")
    return steps


def _counted(context: Any, items: Iterable[Any]) -> Iterable[Any]:
    steps = _steps_of(context)
    if isinstance(items, (list, tuple, str, range)) or hasattr(items, "__len__"):
        # Sized things stay what they are for `loop.length` and the like; they cost in advance.
        values = list(items)
        for _ in values:
            steps.take()
        return values

    def one_by_one() -> Iterator[Any]:
        for item in items:
            steps.take()
            yield item

    return one_by_one()


def _joined(parts: Iterable[Any]) -> str:
    texts = [str(part) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _check_format(pattern: str) -> None:
    """Field widths are the one way by which a short format makes a huge text."""
    if re.search(r"%[^a-zA-Z%]*(\d{6}|\*)", pattern):
        raise TemplateProblem("it formats with a field width out of all measure")


def _format(pattern: object, *args: Any, **kwargs: Any) -> str:
    text = str(pattern)
    _check_format(text)
    formatted: str = text % (kwargs or args)
    return formatted


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "**":
        numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        if not numbers or abs(right) > 1024 or abs(left) > 1 << 32:
            raise TemplateProblem("it raises to a power out of all measure")
    elif operator == "*":
        for sized, times in ((left, right), (right, left)):
            if isinstance(times, int) and hasattr(sized, "__len__"):
                _check_size(len(sized) * max(0, times))
        if isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() + right.bit_length())
    elif operator == "%":
        if isinstance(left, str):
            _check_format(left)
    elif isinstance(left, str) and isinstance(right, str):
        _check_size(len(left) + len(right))
