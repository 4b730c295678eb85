"""JavaScript printed from the library's closed-form functions.

The pages that calculate without a kernel run what this prints, so a formula stands in
one place. It knows arithmetic, comparisons, conditions, assignments, the fields of
records, calls of the functions it prints, and numpy's functions of single elements
under the name `np`; anything else is refused with its line.

Whole numbers up to 2**53 are divided with `//` and `%` as in Python. Of a fraction
these ask more than a double holds (1 // 0.1 is 9, and 1 / 0.1 is 10): write
`np.floor(a / b)`, which means the same on both sides.
"""

import ast
import inspect
import json
import textwrap
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

ARITHMETIC = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**"}
COMPARISON = {
    ast.Eq: "===",
    ast.NotEq: "!==",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
BUILTIN = {
    "abs": "Math.abs",
    "ceil": "Math.ceil",
    "floor": "Math.floor",
    "int": "Math.trunc",
    "float": "Number",
    "log2": "Math.log2",
    "max": "Math.max",
    "min": "Math.min",
    "sqrt": "Math.sqrt",
}
NUMPY = {
    "abs": "Math.abs",
    "ceil": "Math.ceil",
    "floor": "Math.floor",
    "log2": "Math.log2",
    "maximum": "Math.max",
    "minimum": "Math.min",
    "sqrt": "Math.sqrt",
}
PAIRS = {"Math.max", "Math.min"}  # of two arguments; the others take one

WORDS = """arguments case catch const default delete do enum eval export extends
function interface let new package private protected public static super switch this
throw typeof var void"""
RESERVED = set(WORDS.split())


class RefusedError(TypeError):
    """A piece of Python that has no JavaScript here."""


def to_js(*functions: Callable[..., Any]) -> str:
    """Print `functions`, which may call one another, as JavaScript.

    Args:
        functions: Pure functions of numbers, strings, booleans and records of them.

    Returns:
        One `function` declaration for each, in the order given.

    Raises:
        RefusedError: A function does something that cannot be printed; names the line.
            Or two functions have one name.
    """
    known = {f.__name__: f for f in functions}
    if len(known) < len(functions):
        names = [f.__name__ for f in functions]
        raise RefusedError(f"two of {sorted(n for n in names if names.count(n) > 1)}")
    return "\n".join(_Printer(f, known).function() for f in functions)


def is_condition(node: ast.expr) -> bool:
    """A comparison, or comparisons joined by `&` and `|`."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        return is_condition(node.left) and is_condition(node.right)
    return isinstance(node, ast.Compare)


class _Printer:
    """Prints one function."""

    def __init__(self, function: Callable[..., Any], known: Mapping[str, Any]) -> None:
        source = textwrap.dedent(inspect.getsource(function))
        node = ast.parse(source).body[0]
        if not isinstance(node, ast.FunctionDef) or node.decorator_list:
            raise RefusedError(f"{function} is not a plain function")
        self.node, self.known = node, known
        self.name, self.globals = function.__name__, function.__globals__
        self.locals = {a.arg for a in (*node.args.args, *node.args.kwonlyargs)}
        self.assigned = {
            n.id
            for n in ast.walk(node)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }

        if reserved := RESERVED & (self.locals | self.assigned):
            raise RefusedError(
                f"{self.name}: {sorted(reserved)} are JavaScript's own words"
            )

    def refuse(self, node: ast.AST) -> RefusedError:
        line = getattr(node, "lineno", "?")
        return RefusedError(
            f"{self.name}, line {line}: no JavaScript for {ast.unparse(node)}"
        )

    def function(self) -> str:
        arguments = self.node.args
        if arguments.vararg or arguments.kwarg:
            raise self.refuse(self.node)
        names = [a.arg for a in (*arguments.args, *arguments.kwonlyargs)]
        missing: list[ast.expr | None] = [None] * (
            len(arguments.args) - len(arguments.defaults)
        )
        defaults = [*missing, *arguments.defaults, *arguments.kw_defaults]
        parameters = ", ".join(
            name if default is None else f"{name} = {self.expression(default)}"
            for name, default in zip(names, defaults, strict=True)
        )
        declared = sorted(self.assigned - self.locals)
        head = f"let {', '.join(declared)}; " if declared else ""
        body = head + self.block(self.node.body)
        return f"function {self.name}({parameters}) {{ {body} }}"

    def block(self, body: list[ast.stmt]) -> str:
        return " ".join(filter(None, map(self.statement, body)))

    def statement(self, node: ast.stmt) -> str:
        match node:
            case ast.Expr(value=ast.Constant(value=str())) | ast.Pass():
                return ""
            case ast.Assign(targets=[target]):
                return f"{self.target(target)} = {self.expression(node.value)};"
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                return f"{name} = {self.expression(value)};"
            case ast.AugAssign(target=ast.Name(id=name)):
                whole = ast.BinOp(ast.Name(name, ast.Load()), node.op, node.value)
                return f"{name} = {self.expression(ast.copy_location(whole, node))};"
            case ast.Return(value=ast.expr() as value):
                return f"return {self.expression(value)};"
            case ast.If():
                text = f"if ({self.truth(node.test)}) {{ {self.block(node.body)} }}"
                if node.orelse:
                    text += f" else {{ {self.block(node.orelse)} }}"
                return text
            case ast.Raise(exc=ast.Call(func=ast.Name(id="ValueError"))):
                return f"throw new RangeError({json.dumps(self.name)});"
        raise self.refuse(node)

    def target(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name):
                return name
            case ast.Tuple(elts=elements):
                return f"[{', '.join(map(self.target, elements))}]"
        raise self.refuse(node)

    def truth(self, node: ast.expr) -> str:
        """A condition: numbers, strings and booleans are as true there as here."""
        return self.expression(node)

    def expression(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None):
                return json.dumps(node.value)
            case ast.Name(id=name):
                return self.name_of(node, name)
            case ast.Attribute(value=record, attr=attr):
                if self.is_record(record):
                    return f"{self.expression(record)}.{attr}"
            case ast.Tuple(elts=elements):
                return f"[{', '.join(map(self.expression, elements))}]"
            case ast.BinOp():
                return self.arithmetic(node)
            case ast.UnaryOp(op=ast.USub()):
                return f"(-{self.expression(node.operand)})"
            case ast.UnaryOp(op=ast.Not()):
                return f"(!{self.expression(node.operand)})"
            case ast.BoolOp(op=op, values=values):
                word = " && " if isinstance(op, ast.And) else " || "
                return f"({word.join(map(self.expression, values))})"
            case ast.Compare():
                return self.comparison(node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                chosen = f"{self.expression(body)} : {self.expression(orelse)}"
                return f"({self.truth(test)} ? {chosen})"
            case ast.Subscript(value=ast.Name(id=name), slice=key):
                if isinstance(self.globals.get(name), Mapping):
                    return f"({self.name_of(node, name)})[{self.expression(key)}]"
            case ast.Call():
                return self.call(node)
        raise self.refuse(node)

    def is_record(self, node: ast.expr) -> bool:
        """A local value, or a field of one."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id in self.locals | self.assigned

    def name_of(self, node: ast.expr, name: str) -> str:
        """A local, or the value of a constant of the function's module."""
        if name in self.locals or name in self.assigned:
            return name
        value = self.globals.get(name)
        plain = dict(value) if isinstance(value, Mapping) else value
        numbers = plain.values() if isinstance(plain, dict) else [plain]
        if all(isinstance(n, bool | int | float | str) for n in numbers):
            return json.dumps(plain)
        raise self.refuse(node)

    def arithmetic(self, node: ast.BinOp) -> str:
        left, right = self.expression(node.left), self.expression(node.right)
        if isinstance(node.op, ast.FloorDiv):
            return f"Math.floor({left} / {right})"
        if isinstance(node.op, ast.Mod):  # of the divisor's sign, as in Python
            return f"({left} - {right} * Math.floor({left} / {right}))"
        if type(node.op) in ARITHMETIC:
            return f"({left} {ARITHMETIC[type(node.op)]} {right})"
        if is_condition(node):  # element by element in numpy
            word = "&&" if isinstance(node.op, ast.BitAnd) else "||"
            return f"({left} {word} {right})"
        raise self.refuse(node)

    def comparison(self, node: ast.Compare) -> str:
        pairs = []
        sides = [node.left, *node.comparators]
        if any(map(is_condition, sides)):
            raise self.refuse(node)  # True is 1 in Python only
        for op, left, right in zip(node.ops, sides, sides[1:], strict=False):
            if isinstance(op, ast.In | ast.NotIn) and isinstance(right, ast.Tuple):
                found = f"{self.expression(right)}.includes({self.expression(left)})"
                pairs.append(found if isinstance(op, ast.In) else f"!{found}")
            elif type(op) in COMPARISON:
                word = COMPARISON[type(op)]
                pairs.append(f"{self.expression(left)} {word} {self.expression(right)}")
            else:
                raise self.refuse(node)
        return f"({' && '.join(pairs)})"

    def call(self, node: ast.Call) -> str:
        name, called = self.called(node)
        if name in self.known:
            if called is not self.known[name]:
                raise self.refuse(node)  # another function of that name
            return f"{name}({', '.join(self.arguments(node, self.known[name]))})"
        if called is not None and called is getattr(np, name, None):
            return self.numpy(node, name)
        several = name not in ("max", "min") or len(node.args) > 1
        if name in BUILTIN and several and not node.keywords:
            return f"{BUILTIN[name]}({', '.join(map(self.expression, node.args))})"
        raise self.refuse(node)

    def numpy(self, node: ast.Call, name: str) -> str:
        """The functions of elements; `where` evaluates what it chooses only."""
        given = [self.expression(argument) for argument in node.args]
        if name == "where" and len(given) == 3 and not node.keywords:
            return f"({given[0]} ? {given[1]} : {given[2]})"
        written = NUMPY.get(name, "")
        wanted = 2 if written in PAIRS else 1
        if written and len(given) == wanted and not node.keywords:
            return f"{written}({', '.join(given)})"
        raise self.refuse(node)

    def spread(self, node: ast.expr) -> str:
        """An argument, or several in a local tuple."""
        match node:
            case ast.Starred(value=ast.Name(id=name)) if name in self.assigned:
                return f"...{name}"
            case ast.Starred():
                raise self.refuse(node)
        return self.expression(node)

    def called(self, node: ast.Call) -> tuple[str, Any]:
        """The name that is called, and the function that it means here."""
        match node.func:
            case ast.Name(id=name):
                return name, self.globals.get(name)
            case ast.Attribute(value=ast.Name(id=module), attr=name):
                if isinstance(self.globals.get(module), ModuleType):
                    return name, getattr(self.globals[module], name, None)
        raise self.refuse(node)

    def arguments(self, node: ast.Call, function: Callable[..., Any]) -> list[str]:
        """The arguments of a call by position, `undefined` where the default holds."""
        if any(isinstance(a, ast.Starred) for a in node.args):
            if node.keywords:
                raise self.refuse(node)
            return list(map(self.spread, node.args))
        given = dict(
            zip(inspect.signature(function).parameters, node.args, strict=False)
        )
        for keyword in node.keywords:
            if keyword.arg is None:
                raise self.refuse(node)
            given[keyword.arg] = keyword.value
        return [
            self.expression(given[name]) if name in given else "undefined"
            for name in inspect.signature(function).parameters
        ]
