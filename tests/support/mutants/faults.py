"""The faults that one can seed into a file, each a change of one place of its text."""

import ast
import hashlib
from typing import NamedTuple

KINDS = ("condition", "call", "error", "condition", "off by one", "arguments")
"""In this order they are taken in turn; conditions come twice, since they are the most."""

NEIGHBOUR = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip

SAYS = ("debug", "info", "warning", "warn", "note", "log", "tell")
"""A call of one of these names is a line for a reader; to leave it out is no fault."""

UNTRIED = ("__repr__", "__str__", "__getstate__")


class Fault(NamedTuple):
    """One change of a file.

    Attributes:
        path: Of the file, from the root of the repository.
        function: The name of the function around it, with those of its classes.
        entry: The first line of that function, where its decorators begin.
        kind: Of `KINDS`.
        line: Where the change begins.
        before: The text that is taken out.
        after: The text in its place.
        count: How many alike stand before it in the same function.
    """

    path: str
    function: str
    entry: int
    kind: str
    line: int
    before: str
    after: str
    count: int = 0

    @property
    def key(self):
        """What it is called as long as its text stays, wherever it stands in the file."""
        named = "\n".join(
            [self.path, self.function, self.kind, self.before, self.after, str(self.count)]
        )
        return hashlib.sha256(named.encode()).hexdigest()[:12]


def faults_of(path, text):
    """All faults of a file with their places in its bytes: {fault: (begin, end)}."""
    finder = _Finder(path, text)
    finder.visit(ast.parse(text))
    return finder.found


def with_fault(text, place, fault):
    """Return a file's text with one of its faults."""
    data = text.encode()
    begin, end = place
    return (data[:begin] + fault.after.encode() + data[end:]).decode()


def chosen(faults, count):
    """So many of a room's faults, all kinds in turn; a change elsewhere chooses no others."""
    kinds = {kind: sorted((f for f in faults if f.kind == kind), key=_rank) for kind in KINDS}
    taken = []
    while len(taken) < count and any(kinds.values()):
        taken += [kinds[kind].pop() for kind in KINDS if kinds[kind]]
    return taken[:count]


def _rank(fault):
    return fault.key


class _Finder(ast.NodeVisitor):
    """Collects the faults of the functions of a file."""

    def __init__(self, path, text):
        self.path, self.data = path, text.encode()
        self.lines = [0]
        for line in text.encode().splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.names, self.entries, self.found, self.alike = [], [], {}, {}

    def place(self, node):
        begin = self.lines[node.lineno - 1] + node.col_offset
        return begin, self.lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node):
        begin, end = self.place(node)
        return self.data[begin:end].decode()

    def add(self, kind, node, after, place=None):
        if not self.entries:
            return  # not in a function
        begin, end = place or self.place(node)
        before = self.data[begin:end].decode()
        name = ".".join(self.names)
        count = self.alike.setdefault((name, kind, before, after), 0)
        self.alike[name, kind, before, after] += 1
        fault = Fault(self.path, name, self.entries[-1], kind, node.lineno, before, after, count)
        self.found[fault] = begin, end

    def visit_ClassDef(self, node):
        self.names.append(node.name)
        for each in node.body:
            self.visit(each)
        self.names.pop()

    def visit_FunctionDef(self, node):
        if node.name in UNTRIED:
            return
        self.names.append(node.name)
        self.entries.append(min([node.lineno, *(d.lineno for d in node.decorator_list)]))
        for each in node.body:
            self.visit(each)
        self.entries.pop()
        self.names.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Assert(self, node):
        """Leave it: it states what the types do not know."""

    def visit_If(self, node):
        if self.text(node.test) not in ("TYPE_CHECKING", "__debug__"):
            self.turned(node.test)
            self.generic_visit(node)

    def turned(self, test):
        self.add("condition", test, f"not ({self.text(test)})")

    def visit_While(self, node):
        if not isinstance(node.test, ast.Constant):
            self.turned(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node):
        self.turned(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node):
        for test in node.ifs:
            self.turned(test)
        self.generic_visit(node)

    def visit_Compare(self, node):
        if len(node.ops) == 1 and type(node.ops[0]) in (ast.Lt, ast.LtE, ast.Gt, ast.GtE):
            self.between("condition", node.left, node.comparators[0], node.ops[0])
        for each in (node.left, *node.comparators):
            self.off_by_one(each)
        self.generic_visit(node)

    def between(self, kind, left, right, operator):
        """Change the operator, which stands between two operands; what surrounds it stays."""
        begin, end = self.place(left)[1], self.place(right)[0]
        gap = self.data[begin:end].decode()
        was = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Add: "+", ast.Sub: "-"}
        new = {ast.Add: "-", ast.Sub: "+"} | NEIGHBOUR
        if gap.strip("()\n ") == was[type(operator)]:
            changed = gap.replace(was[type(operator)], new[type(operator)])
            self.add(kind, left, changed, (begin, end))

    def visit_BoolOp(self, node):
        first, second = node.values[:2]
        begin, end = self.place(first)[1], self.place(second)[0]
        gap = self.data[begin:end].decode()
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        if len(node.values) == 2 and gap.strip("()\n ") == old:
            self.add("condition", first, gap.replace(old, new), (begin, end))
        self.generic_visit(node)

    def off_by_one(self, node):
        if isinstance(node, ast.Constant) and type(node.value) is int:
            self.add("off by one", node, str(node.value + 1))

    def visit_BinOp(self, node):
        if isinstance(node.op, ast.Add | ast.Sub) and (
            isinstance(node.right, ast.Constant) and type(node.right.value) is int
        ):
            self.between("off by one", node.left, node.right, node.op)
        self.generic_visit(node)

    def visit_Subscript(self, node):
        bounds = node.slice
        for each in (bounds.lower, bounds.upper) if isinstance(bounds, ast.Slice) else (bounds,):
            self.off_by_one(each)
        self.generic_visit(node)

    def visit_AnnAssign(self, node):
        if node.value is not None:
            self.visit(node.value)

    def visit_Call(self, node):
        first = node.args[:2]
        if len(first) == 2 and all(isinstance(a, ast.Name | ast.Attribute) for a in first):
            one, two = map(self.text, first)
            begin, end = self.place(first[0])[0], self.place(first[1])[1]
            gap = self.data[self.place(first[0])[1] : self.place(first[1])[0]].decode()
            if one != two and _name(node) not in ("isinstance", "issubclass", "hasattr"):
                self.add("arguments", first[0], two + gap + one, (begin, end))
        if _name(node) == "range":
            for each in node.args:
                self.off_by_one(each)
        self.generic_visit(node)

    def visit_Expr(self, node):
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call) and not _name(call).strip("_").startswith(SAYS):
            self.add("call", node, "pass")
        self.generic_visit(node)

    def visit_Raise(self, node):
        self.add("error", node, "pass")
        self.generic_visit(node)


def _name(call):
    function = call.func
    return getattr(function, "attr", getattr(function, "id", ""))
