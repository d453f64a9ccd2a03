"""What the process that forks workers imports beside a program."""

import pytest

from pipedream_rt.cluster.forked_workers import imports_of

pytest.importorskip("transformers", reason="needs the extra hf")

PROGRAM = """
import json, torch, transformers.models.gpt2
import torch.nn as nn
from . import neighbour
from transformers import (
    GPT2Config,
    GPT2LMHeadModel as Model,
)
from pipedream_rt import Pipeline
import no_such_package, yaml

if __name__ == "__main__":
    try:
        from transformers.models.bert import modeling_bert
    except ImportError:
        pass

def later():
    from transformers import LlamaForCausalLM
"""


def test_what_a_program_imports_by_itself_of_packages_that_build_on_torch(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    assert imports_of(tmp_path / "train.py") == [
        "transformers.models.gpt2",
        "transformers:GPT2Config",
        "transformers:GPT2LMHeadModel",
        "transformers.models.bert:modeling_bert",
    ]


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("Pipeline(model, training=Training(recompute=[0]))", True),
        ("def main():\n    return Training(compile=options.compile)", True),
        ("from torch.utils.checkpoint import checkpoint", True),
        ("Training(compile=False, recompute=None)", False),
        ("import torch; torch.compile(model)", False),
    ],
)
def test_a_program_whose_workers_need_the_compiler_of_torch(tmp_path, text, needed):
    (tmp_path / "train.py").write_text(text)
    assert imports_of(tmp_path / "train.py") == ["torch._dynamo"] * needed


def test_a_program_that_cannot_be_read_imports_nothing(tmp_path):
    (tmp_path / "wrong.py").write_text("import transformers\ndef (")
    (tmp_path / "binary.py").write_bytes(b"import transformers\0")
    (tmp_path / "large.py").write_text("import transformers\n" + "#" * (1 << 20))
    for name in ("wrong.py", "binary.py", "large.py", "nothing.py", ""):
        assert imports_of(tmp_path / name) == []
