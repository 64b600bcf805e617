"""Checks the text of an exported program's JSON against small grammars, because torch evaluates some of it as Python.

`torch.export.load` gives `expr_str` to `sympy.sympify`, which is an `eval`; `ExportedProgram.module` writes
`guards_code` and the names of inputs into a function and runs `exec`; a node's `target` is any attribute of torch that
can be reached by dots, and `torch.hub.load` is one. So a file without a pickle can run what it likes.

The method: everything is refused that is not known. Expressions and guards are parsed by `ast`, which evaluates
nothing, and may hold sums, comparisons and the functions that torch prints. Targets are torch's own tensor operators.
Any other string that torch may put into code is plain: names with dots, without brackets, quotes, blanks or line ends,
of which no call can be written. Free text stands only where torch quotes it (`as_string`) or keeps it as a remark
(`metadata`).

How it can be wrong: a later torch may evaluate a field that it only keeps today, and an honest program may use a
function that is not listed; the error names the text. Cost: each distinct expression is parsed once.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any, Final

_PLAIN: Final = re.compile(r"[A-Za-z0-9_.:/@*+-]{0,512}\Z")
_EXPRESSION: Final = re.compile(r"[A-Za-z0-9_ .,()'=<>!&|~+*/%-]{1,16384}\Z")
_GUARD: Final = re.compile(r"[A-Za-z0-9_ .,()'\[\]=<>!+*/%-]{1,16384}\Z")
_SYMBOL: Final = re.compile(r"[a-z]{1,8}_?[0-9]{1,9}\Z")
_SYMBOL_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}\Z")
_NUMBER: Final = re.compile(r"-?[0-9.]{1,64}(e[+-]?[0-9]{1,3})?\Z")
_TARGET: Final = re.compile(
    r"torch\.ops\.(aten|prims|quantized_decomposed|torchvision)(\.[A-Za-z0-9_]+){1,2}\Z"
    r"|torch\.ops\.higher_order\.(cond|while_loop|scan|associative_scan|map_impl|wrap_with_set_grad_enabled"
    r"|wrap_with_autocast)\Z"
    r"|_operator\.(add|sub|mul|truediv|floordiv|mod|pow|neg|pos|abs|eq|ne|lt|le|gt|ge|and_|or_|not_|getitem"
    r"|lshift|rshift)\Z"
    r"|math\.(ceil|floor|trunc|sqrt|pow|exp|log|log2)\Z"
    r"|torch\.(_?sym_[a-z0-9_]+)\Z"
)
_FORBIDDEN_TARGETS: Final = re.compile(r"torch\.ops\.aten\.(from_file|__|_?import|_?load)")
_FUNCTIONS: Final = frozenset({
    "Symbol", "Integer", "Float", "Rational", "Add", "Mul", "Pow", "Mod", "Max", "Min", "Abs", "Equality",
    "Unequality", "Relational", "StrictLessThan", "LessThan", "StrictGreaterThan", "GreaterThan", "Eq", "Ne", "Lt",
    "Le", "Gt", "Ge", "And", "Or", "Not", "Xor", "Piecewise", "ExprCondPair", "Tuple", "floor", "ceiling",
    "FloorDiv", "ModularIndexing", "Where", "PythonMod", "CleanDiv", "CeilToInt", "FloorToInt", "CeilDiv", "LShift",
    "RShift", "PowByNatural", "FloatPow", "FloatTrueDiv", "IntTrueDiv", "IsNonOverlappingAndDenseIndicator",
    "TruncToFloat", "TruncToInt", "RoundToInt", "RoundDecimal", "ToFloat", "Identity", "OpaqueUnaryFn_sqrt", "max",
    "min", "abs",
})  # fmt: skip
_GROWING: Final = frozenset({"Pow", "PowByNatural", "FloatPow", "LShift"})
_CONSTANTS: Final = frozenset({"true", "false", "oo", "int_oo", "inf", "nan"})
_MEASURES: Final = frozenset({"size", "stride", "storage_offset", "numel", "dim"})
_OPERATORS: Final = (
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.USub, ast.UAdd, ast.Not, ast.And, ast.Or,
    ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.BitAnd, ast.BitOr, ast.Invert,
)  # fmt: skip
_MAX_DIGITS: Final = 10**19
_MAX_EXPONENT: Final = 16
_MAX_POWERS: Final = 3
_REMARKS: Final = frozenset({"metadata", "torch_version", "as_string", "as_strings"})
_SPECS: Final = frozenset({"in_spec", "out_spec"})


class UnsafeText(ValueError):
    """A text in an exported program that torch would evaluate and that is not in the grammar; it says which."""


class ProgramGrammar:
    """The check of one archive's documents. Remembers the texts that it has passed, of which most come often."""

    def __init__(self) -> None:
        self._passed: set[tuple[str, str]] = set()

    def check(self, document: Any) -> None:
        """Check a decoded JSON document of the archive. Raises UnsafeText."""
        try:
            self._walk(document, "")
        except RecursionError as error:
            raise UnsafeText("it is nested too deep") from error

    def _walk(self, value: Any, field: str) -> None:
        if isinstance(value, str):
            self._text(value, field)
        elif isinstance(value, dict):
            for key, inner in value.items():
                if not _PLAIN.match(key):
                    raise UnsafeText(f"the key {key[:200]!r} of {field or 'the document'}")
                if key not in _REMARKS or (isinstance(inner, dict) and key != "metadata"):
                    self._walk(inner, key)
        elif isinstance(value, list):
            for inner in value:
                self._walk(inner, field)

    def _text(self, text: str, field: str) -> None:
        if (field, text) in self._passed:
            return
        if field == "expr_str":
            check_expression(text)
        elif field == "guards_code":
            check_guard(text)
        elif field in ("target", "as_operator") and text.startswith(("torch.", "_operator", "math", "#")):
            if not _TARGET.match(text) or _FORBIDDEN_TARGETS.match(text):
                raise UnsafeText(f"the operator {text[:200]!r}")
        elif field == "as_operator":
            raise UnsafeText(f"the operator {text[:200]!r}")
        elif field in _SPECS or (field == "context" and not _PLAIN.match(text)):
            self._spec(text, field)
        elif not _PLAIN.match(text):
            raise UnsafeText(f"the text {text[:200]!r} of {field or 'the document'}")
        self._passed.add((field, text))

    def _spec(self, text: str, field: str) -> None:
        """A tree's description is JSON in a string, and so is the context of each of its nodes."""
        try:
            inner = json.loads(text) if text else None
        except ValueError as error:
            raise UnsafeText(f"the text {text[:200]!r} of {field}") from error
        self._walk(inner, "context")


def check_expression(text: str) -> None:
    """Raises UnsafeText for what is no expression over dimensions, as torch prints them."""
    if not _EXPRESSION.match(text) or not _is_sum(_parsed(text), 0):
        raise UnsafeText(f"the expression {text[:200]!r}")


def check_guard(text: str) -> None:
    """Raises UnsafeText for what is no condition on the inputs' dimensions and plain values."""
    if not _GUARD.match(text) or not _is_condition(_parsed(text)):
        raise UnsafeText(f"the guard {text[:200]!r}")


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnsafeText(f"no expression: {text[:200]!r}") from error


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and abs(node.value) < _MAX_DIGITS


def _is_small(node: ast.expr) -> bool:
    """Whether an exponent is a small literal: sympy computes powers at once, and 9**9**9 does not end."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Integer", "Rational"):
        return all(_is_small(one) for one in node.args) and not node.keywords
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and abs(node.value) <= _MAX_EXPONENT


def _is_sum(node: ast.expr, powers: int) -> bool:
    if isinstance(node, ast.Name):
        return bool(_SYMBOL.match(node.id)) or node.id in _CONSTANTS
    if isinstance(node, ast.Call):
        return _is_function(node, powers)
    if isinstance(node, ast.Tuple):
        return all(_is_sum(one, powers) for one in node.elts)
    if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp)):
        return _is_operation(node) and all(_is_sum(one, powers) for one in _operands(node))
    return _is_number(node)


def _is_function(node: ast.Call, powers: int) -> bool:
    if not isinstance(node.func, ast.Name) or node.func.id not in _FUNCTIONS:
        return False
    name, words = node.func.id, node.keywords
    if name == "Symbol":
        names = len(node.args) == 1 and _is_text(node.args[0], _SYMBOL_NAME)
        return names and all(word.arg is not None and _is_flag(word.value) for word in words)
    if name == "Float":
        digits = len(node.args) == 1 and (_is_text(node.args[0], _NUMBER) or _is_number(node.args[0]))
        return digits and all(word.arg == "precision" and _is_number(word.value) for word in words)
    if words:
        return False
    if name in _GROWING:
        if len(node.args) != 2 or powers >= _MAX_POWERS or not _is_small(node.args[1]):
            return False
        return _is_sum(node.args[0], powers + 1)
    return all(_is_sum(one, powers) for one in node.args)


def _is_text(node: ast.expr, pattern: re.Pattern[str]) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(pattern.match(node.value))


def _is_flag(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, bool)


def _is_operation(node: ast.expr) -> bool:
    if isinstance(node, ast.Compare):
        return all(isinstance(one, _OPERATORS) for one in node.ops)
    return isinstance(node, (ast.BinOp, ast.UnaryOp, ast.BoolOp)) and isinstance(node.op, _OPERATORS)


def _operands(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    return [node.operand] if isinstance(node, ast.UnaryOp) else []


def _is_condition(node: ast.expr) -> bool:
    if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp)):
        return _is_operation(node) and all(_is_condition(one) for one in _operands(node))
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call):
        return _is_measure(node.value) and _is_number(node.slice)
    if isinstance(node, ast.Call):
        return _is_measure(node) or (
            isinstance(node.func, ast.Name)
            and node.func.id in _FUNCTIONS - _GROWING - {"Symbol", "Float"}
            and not node.keywords
            and all(_is_condition(one) for one in node.args)
        )
    return _is_number(node) or _is_input(node)


def _is_measure(node: ast.Call) -> bool:
    """Whether it is a tensor's `size()`, `stride()` or the like."""
    method = node.func
    named = isinstance(method, ast.Attribute) and method.attr in _MEASURES and _is_input(method.value)
    return named and not node.keywords and all(_is_number(one) for one in node.args)


def _is_input(node: ast.expr) -> bool:
    """Whether it is L['x'] or a part of it, L['x'][0]['y']."""
    if isinstance(node, ast.Subscript):
        return (_is_number(node.slice) or _is_text(node.slice, _SYMBOL_NAME)) and _is_input(node.value)
    return isinstance(node, ast.Name) and node.id == "L"
