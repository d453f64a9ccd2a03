"""Values of every kind, for fields that want another one."""

NESTED: list = []
for _ in range(90):
    NESTED = [NESTED]
WRONG = (
    None, True, -1, 1.5, "\x1b[2J\n", b"bytes", [], {}, [[]], [{}], {"a": {}}, {1: [2]}, 1 << 63,
    NESTED,
)  # fmt: skip
