"""Change the arguments of a call, and nothing else of its text."""

from collections.abc import Iterable, Sequence

import libcst as cst

_NOTHING = cst.SimpleWhitespace("")
EQUAL = cst.AssignEqual(whitespace_before=_NOTHING, whitespace_after=_NOTHING)


def keyword(call: cst.Call, name: str) -> cst.Arg | None:
    """Return the argument that is passed by this name, if any."""
    for arg in call.args:
        if arg.keyword is not None and arg.keyword.value == name:
            return arg
    return None


def passed(call: cst.Call, name: str, position: int) -> cst.BaseExpression | None:
    """Return the value of an argument, by its name or by its position."""
    arg = keyword(call, name)
    if arg is None and position < len(call.args):
        found = call.args[position]
        if found.keyword is None and not found.star:
            arg = found
    return arg.value if arg is not None else None


def literal(node: cst.BaseExpression | None) -> object:
    """Return the value of a number, a string, `None`, `True` or `False`; else `...`.

    >>> literal(cst.parse_expression("0.0")), literal(cst.parse_expression("a"))
    (0.0, Ellipsis)
    """
    constants = {"None": None, "True": True, "False": False}
    if isinstance(node, cst.Name) and node.value in constants:
        return constants[node.value]
    if isinstance(node, (cst.Integer, cst.Float, cst.SimpleString)):
        return node.evaluated_value
    return ...


def renamed(call: cst.Call, old: str, new: str) -> cst.Call:
    """Return the call with one argument passed under another name."""
    return _changed(call, old, keyword=cst.Name(new))


def with_value(call: cst.Call, name: str, value: cst.BaseExpression) -> cst.Call:
    """Return the call with another value for an argument that it passes by name."""
    return _changed(call, name, value=value)


def _changed(call: cst.Call, name: str, **changes: cst.BaseExpression) -> cst.Call:
    old = keyword(call, name)
    args = [arg.with_changes(**changes) if arg is old else arg for arg in call.args]
    return call.with_changes(args=args)


def appended(call: cst.Call, name: str, value: cst.BaseExpression) -> cst.Call:
    """Return the call with one more argument at the end, separated as the others."""
    new = cst.Arg(keyword=cst.Name(name), value=value, equal=EQUAL)
    if not call.args:
        return call.with_changes(args=[new])
    last = call.args[-1]
    new = new.with_changes(
        comma=last.comma, whitespace_after_arg=last.whitespace_after_arg
    )
    space = _space(call.args[-2]) if len(call.args) > 1 else cst.SimpleWhitespace(" ")
    if isinstance(space, cst.ParenthesizedWhitespace):
        line = space.first_line.with_changes(comment=None, whitespace=_NOTHING)
        space = space.with_changes(first_line=line, empty_lines=[])
    last = last.with_changes(
        comma=cst.Comma(whitespace_after=space),
        whitespace_after_arg=_NOTHING,
    )
    return call.with_changes(args=[*call.args[:-1], last, new])


def without(call: cst.Call, names: Iterable[str]) -> cst.Call:
    """Return the call without the arguments that are passed by these names."""
    for name in names:
        arg = keyword(call, name)
        if arg is not None:
            call = call.with_changes(args=_cut(list(call.args), call.args.index(arg)))
    return call


def without_elements(node: cst.List, gone: Sequence[bool]) -> cst.List:
    """Return a list without some elements, and without the comments above them.

    Args:
        node: The list.
        gone: For each element, whether to remove it.
    """
    elements = list(node.elements)
    # What is above each element is behind the comma of the one before it.
    above = [node.lbracket.whitespace_after, *(_space(one) for one in elements)]
    stay = [index for index, is_gone in enumerate(gone) if not is_gone]
    if not stay:
        empty = cst.LeftSquareBracket(whitespace_after=_NOTHING)
        end = cst.RightSquareBracket(whitespace_before=_NOTHING)
        return node.with_changes(elements=[], lbracket=empty, rbracket=end)
    new = [elements[index] for index in stay]
    for number, index in enumerate(stay[1:]):
        space = _after_line(above[stay[number] + 1], above[index])
        new[number] = new[number].with_changes(comma=cst.Comma(whitespace_after=space))
    if stay[-1] < len(elements) - 1:
        new[-1] = new[-1].with_changes(comma=elements[-1].comma)
    first = _after_line(above[0], above[stay[0]])
    left = node.lbracket.with_changes(whitespace_after=first)
    return node.with_changes(elements=new, lbracket=left)


def _after_line(
    line: cst.BaseParenthesizableWhitespace, rest: cst.BaseParenthesizableWhitespace
) -> cst.BaseParenthesizableWhitespace:
    """Join the end of one line, with its comment, and what is below another one."""
    if isinstance(line, cst.ParenthesizedWhitespace) and isinstance(
        rest, cst.ParenthesizedWhitespace
    ):
        return rest.with_changes(first_line=line.first_line)
    return rest


def _cut(args: list[cst.Arg], index: int) -> list[cst.Arg]:
    cut = args.pop(index)
    if index == 0:
        return args
    before = args[index - 1]
    if index < len(args):
        space = _joined(_space(before), _space(cut))
        comma = cst.Comma(whitespace_after=space)
        args[index - 1] = before.with_changes(comma=comma)
    elif not _has_comment(_space(before)):
        args[index - 1] = before.with_changes(
            comma=cut.comma, whitespace_after_arg=cut.whitespace_after_arg
        )
    return args


def _space(arg: cst.Arg | cst.BaseElement) -> cst.BaseParenthesizableWhitespace:
    """Return what is between the comma behind an argument or element and the next."""
    if isinstance(arg.comma, cst.Comma):
        return arg.comma.whitespace_after
    return _NOTHING


def _joined(
    before: cst.BaseParenthesizableWhitespace, after: cst.BaseParenthesizableWhitespace
) -> cst.BaseParenthesizableWhitespace:
    """Join the space on both sides of an argument that is cut."""
    if not isinstance(after, cst.ParenthesizedWhitespace):
        return before
    if not isinstance(before, cst.ParenthesizedWhitespace):
        return after
    lines = [*before.empty_lines, *after.empty_lines]
    return after.with_changes(first_line=before.first_line, empty_lines=lines)


def _has_comment(space: cst.BaseParenthesizableWhitespace) -> bool:
    if not isinstance(space, cst.ParenthesizedWhitespace):
        return False
    comments = [space.first_line.comment, *(line.comment for line in space.empty_lines)]
    return any(comment is not None for comment in comments)
