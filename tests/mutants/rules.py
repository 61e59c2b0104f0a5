"""Mutation rules: small mistakes that a programmer makes, planted in a module's source one at a time.

A rule looks at a node of the syntax tree and yields nodes to stand in its place. The change is cut into the text, so that the rest of the
file keeps its lines. Left alone: what is only said (messages, f-strings, docstrings), what is only declared (annotations, imports), asserts
and what is raised.
"""

import ast
import copy
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Change = Iterator[ast.AST]


@dataclass(frozen=True)
class Mutant:
    """`before` and `after` are the text of the node; `first` and `last` are the lines whose running reaches it."""

    file: str
    rule: str
    line: int
    last: int
    start: int  # offsets in the source, in bytes
    end: int
    before: str
    after: str
    within: bool  # a function, rather than a module's or a class's body

    @property
    def id(self) -> str:
        return hashlib.sha256(f"{self.file}:{self.rule}:{self.start}:{self.before}:{self.after}".encode()).hexdigest()[:12]

    def planted_in(self, source: str) -> str:
        data = source.encode()
        return (data[:self.start] + self.after.encode() + data[self.end:]).decode()


# ---------------------------------------------------------------- the rules

ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div, ast.Mod: ast.FloorDiv,
              ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.MatMult: ast.Mult}
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
               ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any", "argmax": "argmin", "argmin": "argmax", "amax": "amin", "amin": "amax",
             "sum": "mean", "mean": "sum", "floor": "ceil", "ceil": "floor", "clamp_min": "clamp_max", "clamp_max": "clamp_min",
             "cumsum": "cumprod", "log": "log2", "zeros": "ones", "ones": "zeros", "zeros_like": "ones_like", "ones_like": "zeros_like"}
MODES = {"no_grad", "inference_mode", "autocast", "enable_grad", "evaluating", "eval_mode"}
AXES = {"dim", "axis"}
QUIET = {"print", "say", "note", "warn", "debug", "info"}  # calls that only say something


def operator_turned(node: ast.AST) -> Change:
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _is_text(node):
        yield _with(node, op=ARITHMETIC[type(node.op)]())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield node.operand
    if isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())


def comparison_flipped(node: ast.AST) -> Change:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        yield _with(node, ops=[COMPARISONS[type(node.ops[0])]()])


def condition_negated(node: ast.AST) -> Change:
    if isinstance(node, ast.If | ast.IfExp) and not isinstance(node.test, ast.Compare):
        yield _at(node.test, ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.comprehension) and node.ifs and not isinstance(node.ifs[0], ast.Compare):
        yield _at(node.ifs[0], ast.UnaryOp(ast.Not(), node.ifs[0]))


def condition_lost(node: ast.AST) -> Change:
    if isinstance(node, ast.comprehension) and node.ifs:
        yield _at(node.ifs[0], ast.Constant(True))
    if isinstance(node, ast.BoolOp):
        yield node.values[0]


def index_off_by_one(node: ast.AST) -> Change:
    if isinstance(node, ast.Subscript):
        for part in _indices(node.slice):
            if isinstance(part, ast.Constant) and type(part.value) is int:
                yield _at(part, ast.Constant(part.value + 1))
            elif isinstance(part, ast.Name | ast.BinOp | ast.Attribute) and isinstance(node.slice, ast.Slice | ast.Tuple):
                yield _at(part, ast.BinOp(part, ast.Add(), ast.Constant(1)))
    if isinstance(node, ast.Call) and _name(node.func) in ("range", "arange") and node.args:
        last = node.args[min(1, len(node.args) - 1)]
        yield _at(last, ast.BinOp(last, ast.Sub(), ast.Constant(1)))


def constant_changed(node: ast.AST) -> Change:
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield ast.Constant(node.value + 1 if abs(node.value) < 16 else node.value * 2)
    elif isinstance(node, ast.Constant) and type(node.value) is float:
        yield ast.Constant(node.value * 2 if node.value else 1.0)


def call_dropped(node: ast.AST) -> Change:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _is_quiet(node.value):
        yield ast.Pass()


def call_doubled(node: ast.AST) -> Change:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _is_quiet(node.value):
        yield ast.Expr(ast.Tuple([node.value, node.value], ast.Load()))


def arguments_swapped(node: ast.AST) -> Change:
    plain = isinstance(node, ast.Call) and len(node.args) >= 2 and not any(isinstance(one, ast.Starred) for one in node.args[:2])
    if plain and _name(node.func) not in ("isinstance", "getattr", "hasattr", "setattr", "cast", "option"):
        yield _with(node, args=[node.args[1], node.args[0], *node.args[2:]])
    if isinstance(node, ast.Call) and len(node.keywords) >= 2 and all(word.arg for word in node.keywords[:2]):
        one, two = node.keywords[:2]
        if not isinstance(one.value, ast.Constant) or not isinstance(two.value, ast.Constant):
            swapped = [ast.keyword(one.arg, two.value), ast.keyword(two.arg, one.value), *node.keywords[2:]]
            yield _with(node, keywords=swapped)


def detach_added(node: ast.AST) -> Change:
    named = ("logits", "loss", "hidden", "logprob", "logp", "states", "weight", "grad", "delta", "ratio", "total", "output")
    returned = isinstance(node, ast.Return) and isinstance(node.value, ast.Name | ast.BinOp | ast.Call)
    if returned and any(word in ast.unparse(node.value).lower() for word in named):
        yield ast.Return(_call(node.value, "detach"))


def detach_lost(node: ast.AST) -> Change:
    method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args
    if method and node.func.attr in ("detach", "clone", "contiguous", "copy", "float", "double"):
        yield node.func.value


def mode_lost(node: ast.AST) -> Change:
    """`.eval()`, `.train()`, no_grad, inference_mode, requires_grad_, zero_grad, autocast: whatever says how to compute."""
    method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    if method and node.func.attr in ("eval", "train", "requires_grad_") and _name(node.func.value) not in ("torch", "loop"):
        yield node.func.value
    if isinstance(node, ast.With):
        for item in node.items:
            if _name(getattr(item.context_expr, "func", item.context_expr)) in MODES:
                yield _at(item.context_expr, ast.parse("__import__('contextlib').nullcontext()", mode="eval").body)
    if isinstance(node, ast.FunctionDef):
        for decorator in node.decorator_list:
            if _name(getattr(decorator, "func", decorator)) in MODES:
                yield _at(decorator, ast.parse("(lambda function: function)", mode="eval").body)


def sort_turned(node: ast.AST) -> Change:
    if isinstance(node, ast.Call) and _name(node.func) in ("sorted", "sort", "argsort", "topk"):
        if _name(node.func) == "sorted" and isinstance(node.func, ast.Name) and node.args:
            yield ast.Call(ast.Name("list", ast.Load()), [node.args[0]], [])
        word = {"sorted": "reverse", "sort": "descending", "argsort": "descending", "topk": "largest"}[_name(node.func)]
        given = next((one for one in node.keywords if one.arg == word), None)
        others = [one for one in node.keywords if one.arg != word]
        value = ast.Constant(word != "largest") if given is None else ast.UnaryOp(ast.Not(), given.value)
        yield _with(node, keywords=[*others, ast.keyword(word, value)])


def axis_wrong(node: ast.AST) -> Change:
    if not isinstance(node, ast.Call):
        return
    for place, word in enumerate(node.keywords):
        if word.arg in AXES and (axis := _number(word.value)) is not None:
            other = [copy.copy(one) for one in node.keywords]
            other[place] = ast.keyword(word.arg, ast.Constant(0 if axis else 1))
            yield _with(node, keywords=other)
    if _name(node.func) in ("sum", "mean", "softmax", "log_softmax", "cumsum", "argmax", "gather", "flatten", "unsqueeze", "squeeze", "cat",
                            "stack", "amax", "logsumexp", "transpose", "max", "norm", "select", "narrow", "index_select"):
        axes = [place for place, one in enumerate(node.args) if _number(one) is not None][:1]
        if axes and isinstance(node.func, ast.Attribute):
            args = list(node.args)
            args[axes[0]] = ast.Constant(0 if _number(args[axes[0]]) else 1)
            yield _with(node, args=args)


def not_refreshed(node: ast.AST) -> Change:
    """A cached value that is not refreshed: an attribute or entry keeps what it held."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Attribute | ast.Subscript):
        target = node.targets[0]
        if isinstance(target, ast.Attribute):
            kept = f"({ast.unparse(target)}) if hasattr({ast.unparse(target.value)}, {target.attr!r}) else ({ast.unparse(node.value)})"
            yield ast.Assign([target], ast.parse(kept, mode="eval").body, lineno=node.lineno)
        else:
            yield ast.Pass()
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute | ast.Subscript | ast.Name):
        yield ast.Pass()


def default_ignored(node: ast.AST) -> Change:
    """An argument that is given is ignored: the callee's default stands; or the default takes the given value's place."""
    if isinstance(node, ast.Call) and node.keywords and _name(node.func) not in ("option", "argument", "field", "dataclass", "replace"):
        for place, word in enumerate(node.keywords):
            if word.arg not in (None, *AXES):
                yield _with(node, keywords=[*node.keywords[:place], *node.keywords[place + 1:]])
    if isinstance(node, ast.IfExp):
        yield node.orelse
        yield node.body


def exception_swallowed(node: ast.AST) -> Change:
    if isinstance(node, ast.Raise):
        yield ast.Pass()
    if isinstance(node, ast.ExceptHandler) and node.body and not isinstance(node.body[0], ast.Pass):
        yield _at(node.body[0], ast.Pass())


def key_wrong(node: ast.AST) -> Change:
    """A value cached, or looked up, by the wrong key: one part of the key is lost."""
    several = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple) and len(node.slice.elts) > 1
    if several and all(isinstance(one, ast.Name | ast.Attribute | ast.Constant) for one in node.slice.elts):
        yield _at(node.slice.elts[-1], node.slice.elts[0])
    if isinstance(node, ast.Call) and _name(node.func) in ("derive", "generator") and len(node.args) > 2:
        yield _with(node, args=node.args[:-1])
    if isinstance(node, ast.DictComp) and isinstance(node.generators[0].target, ast.Tuple) and isinstance(node.key, ast.Name):
        names = [one.id for one in node.generators[0].target.elts if isinstance(one, ast.Name) and one.id != node.key.id]
        if names:
            yield _at(node.key, ast.Name(names[0], ast.Load()))


def returned_early(node: ast.AST) -> Change:
    if isinstance(node, ast.For | ast.While) and node.body:
        yield _at(node.body[-1], ast.Break())
    if isinstance(node, ast.Continue):
        yield ast.Break()
    if isinstance(node, ast.Break):
        yield ast.Continue()


def sum_not_kept(node: ast.AST) -> Change:
    """`+=` becomes `=`."""
    if isinstance(node, ast.AugAssign):
        yield ast.Assign([node.target], node.value, lineno=node.lineno)
    method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) == 1 and not node.keywords
    if method and node.func.attr in ("add_", "mul_", "addcmul_", "lerp_"):
        yield _with(node, func=ast.Attribute(node.func.value, "copy_", ast.Load()))


def opposite_called(node: ast.AST) -> Change:
    """min for max, sum for mean, any for all, floor for ceil."""
    if isinstance(node, ast.Call) and (other := OPPOSITES.get(_name(node.func))):
        if isinstance(node.func, ast.Name) and other not in ("mean", "cumprod"):
            yield _with(node, func=ast.Name(other, ast.Load()))
        elif isinstance(node.func, ast.Attribute):
            yield _with(node, func=ast.Attribute(node.func.value, other, ast.Load()))


RULES: dict[str, Callable[[ast.AST], Change]] = {
    "operator turned": operator_turned, "comparison flipped": comparison_flipped, "condition negated": condition_negated,
    "condition lost": condition_lost, "index off by one": index_off_by_one, "constant changed": constant_changed,
    "call dropped": call_dropped, "call doubled": call_doubled, "arguments swapped": arguments_swapped, "detach added": detach_added,
    "detach or copy lost": detach_lost, "mode lost": mode_lost, "sort turned": sort_turned, "wrong axis": axis_wrong,
    "not refreshed": not_refreshed, "argument or default ignored": default_ignored, "exception swallowed": exception_swallowed,
    "wrong key": key_wrong, "ended early": returned_early, "sum not kept": sum_not_kept, "opposite called": opposite_called}

# ---------------------------------------------------------------- walking a module


def mutants_of(file: str, source: str) -> Iterator[Mutant]:
    """Every mutant of a module, in the order of the text; two rules that write the same text make one. Not each is still Python."""
    starts = _line_starts(source)
    seen: set[tuple[int, int, str]] = set()
    data = source.encode()
    for node, within in _walk(ast.parse(source)):
        for rule, change in RULES.items():
            for changed in change(node):
                place = getattr(changed, "instead_of", node)
                if not hasattr(place, "lineno"):
                    continue
                start, end = starts[place.lineno - 1] + place.col_offset, starts[place.end_lineno - 1] + place.end_col_offset
                before, after = data[start:end].decode(), _text(changed)
                key = (start, end, after)
                mutant = Mutant(file, rule, place.lineno, place.end_lineno, start, end, before, after, within)
                if key not in seen and ast.dump(changed) != ast.dump(place):
                    seen.add(key)
                    yield mutant


def _walk(node: ast.AST, within: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        if _is_left_alone(child):
            if isinstance(child, ast.Raise):
                yield child, within
            continue
        yield child, within
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            for part in child.body:
                yield from _within_statement(part, True)
            for default in (*child.args.defaults, *filter(None, child.args.kw_defaults)):
                yield default, False  # it is computed once, where the function is defined
            continue
        if isinstance(child, ast.AnnAssign):
            if child.value is not None:
                yield child.value, within
                yield from _walk(child.value, within)
            continue
        yield from _walk(child, within)


def _within_statement(part: ast.stmt, within: bool) -> Iterator[tuple[ast.AST, bool]]:
    yield from _walk(ast.Module([part], []), within)


def _is_left_alone(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True  # a docstring
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return True
    if isinstance(node, ast.Call) and _is_quiet(node):
        return True
    if isinstance(node, ast.Call) and _name(node.func) in ("option", "argument", "proven", "refuted", "unproven"):
        return True
    return isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.arguments | ast.Global)


def _line_starts(source: str) -> list[int]:
    starts, at = [], 0
    for line in source.encode().splitlines(keepends=True):
        starts.append(at)
        at += len(line)
    return starts


def _text(node: ast.AST) -> str:
    """Source text of a node, in brackets where it is an expression: what stands around it must not bind differently."""
    text = ast.unparse(ast.fix_missing_locations(node))
    plain = isinstance(node, ast.stmt | ast.Name | ast.Constant | ast.Call | ast.Attribute | ast.Subscript)
    return text if plain else f"({text})"


def is_python(source: str) -> bool:
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _at(place: ast.AST, changed: ast.AST) -> ast.AST:
    """`changed` stands for a part of the node rather than for all of it."""
    changed = copy.copy(changed)
    changed.instead_of = place  # type: ignore[attr-defined]
    return changed


def _call(value: ast.expr, method: str) -> ast.Call:
    return ast.Call(ast.Attribute(value, method, ast.Load()), [], [])


def _name(function: ast.AST) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _number(node: ast.AST) -> int | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand)
        return None if inner is None else -inner
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def _indices(part: ast.expr) -> Iterator[ast.expr]:
    if isinstance(part, ast.Tuple):
        for one in part.elts:
            yield from _indices(one)
    elif isinstance(part, ast.Slice):
        yield from filter(None, (part.lower, part.upper))
    elif not isinstance(part, ast.Constant) or part.value is not None:
        yield part


def _is_text(node: ast.BinOp) -> bool:
    """Types joined by |, and texts joined or filled in."""
    parts = (node.left, node.right)
    return any(isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Constant) and (part.value is None or isinstance(part.value, str)))
               for part in parts)


def _is_quiet(call: ast.Call) -> bool:
    return _name(call.func) in QUIET
