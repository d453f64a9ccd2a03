"""msgpack, whose texts are those of Python.

A path, a variable or a name of this system that is no UTF-8 is a text with lone surrogates in
Python (PEP 383). msgpack refuses these unless it is told not to.
"""

from __future__ import annotations

from functools import partial

import msgpack

Unpacker = partial(msgpack.Unpacker, unicode_errors="surrogatepass")
packb = partial(msgpack.packb, unicode_errors="surrogatepass")
unpackb = partial(msgpack.unpackb, unicode_errors="surrogatepass")
