"""The command ``init``: writes a script to start from. It imports only the user's model class."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from importlib import import_module
from pathlib import Path
from string import Template

import click

from pipedream_rt.cli.shared_options import GivenPath
from pipedream_rt.errors import ConfigError
from pipedream_rt.schema import write_file

_OF_CLASS = Template('''"""Train $name on $stages stages. Run it: python $script

$todo
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from $module import $name
from pipedream_rt import Checkpoints, Observe, Pipeline

STAGES, EPOCHS = $stages, 1


def model() -> torch.nn.Module:
    """The model, whose forward takes$takes."""
    torch.manual_seed(0)
    return $call


def loader() -> Iterator[tuple[Tensor, Tensor]]:
    """Mini-batches (x, y); a DataLoader does as well."""
    raise SystemExit("say in loader() of $script where the mini-batches come from")


def main() -> None:
    """Train, and keep the weights."""
    net = model()
    with Pipeline(
        net,
        stages=STAGES,
        example=next(iter(loader())),  # the forward is recorded on it once
        loss_fn=F.cross_entropy,  # called with the output and y
        optimizer=(torch.optim.AdamW, {"lr": 3e-4}),
        checkpoint=Checkpoints("run", every=200),
        observe=Observe(report="report.html"),
    ) as pipe:
        for _ in range(pipe.epoch, EPOCHS):
            for _result in pipe.train_epoch(loader(), progress=True):
                pass  # it has .step, .loss and .staleness
        print(f"loss {pipe.evaluate(loader()):.4f} on the mini-batches of loader()")
        net.load_state_dict(pipe.state_dict())
    torch.save(net.state_dict(), "weights.pt")


if __name__ == "__main__":
    main()
''')

_OF_NAME = Template('''"""Fine-tune $name on $stages stages with the Trainer of transformers.

$todo Then: python $script
"""

from __future__ import annotations

from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    TrainingArguments,
)

from pipedream_rt import Observe
from pipedream_rt.hf import PipelineTrainer

NAME, STAGES = "$name", $stages


def texts() -> list[str]:
    """What to learn."""
    raise SystemExit("say in texts() of $script which texts to learn")


def main() -> None:
    """Train, and keep the weights."""
    tokenizer = AutoTokenizer.from_pretrained(NAME)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    data = Dataset.from_dict({"text": texts()}).map(
        lambda row: tokenizer(row["text"], truncation=True, max_length=512),
        remove_columns=["text"],
    )
    trainer = PipelineTrainer(
        model=AutoModelForCausalLM.from_pretrained(NAME),
        args=TrainingArguments(
            "run",
            per_device_train_batch_size=8,
            num_train_epochs=1,
            learning_rate=2e-5,
            save_steps=200,
            report_to=[],
        ),
        train_dataset=data,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        pipeline={"stages": STAGES, "observe": Observe(report="report.html")},
    )
    trainer.train()
    trainer.save_model("weights")
    trainer.close()


if __name__ == "__main__":
    main()
''')


@click.command(short_help="Write a script to start from, for a model.")
@click.argument("model")
@click.option("-o", "--output", default="train.py", show_default=True,
              type=GivenPath(dir_okay=False), help="The script to write.")  # fmt: skip
@click.option("--stages", default=2, show_default=True, type=click.IntRange(min=1),
              help="The number of stages.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace a script that is there.")
def init(model: str, output: str, stages: int, force: bool) -> None:
    """Write a script to start from, for MODEL.

    MODEL is a class as module:Class, which is imported; or a name or folder of a causal language
    model of Hugging Face, as org/name.
    """
    path = Path(output)
    if path.is_file() and not force:
        raise ConfigError(f"{path} is there already; --force replaces it, -o writes another one")
    sys.path.insert(0, os.getcwd())
    module, colon, name = model.partition(":")
    text = _of_class(module, name, path, stages) if colon else _of_name(model, path, stages)
    try:
        write_file(path, text.encode(errors="backslashreplace"))
    except OSError as error:
        raise ConfigError(f"cannot write to {path}: {error.strerror}") from error
    what = f"the class {name}" if colon else f"{model} of Hugging Face"
    click.echo(f"{path} trains {what}: fill in what its first lines name, then: python {path}")


def _of_name(model: str, path: Path, stages: int) -> str:
    """Return the script for a model of Hugging Face."""
    if not model or not model.isprintable() or any(c in model for c in "\"'\\{}$ "):
        raise ConfigError(f"{model!r} is neither module:Class nor a name of Hugging Face")
    module, _, name = model.rpartition(".")
    if name == "py" or (module and not Path(model).is_dir() and _is_there(module)):
        meant = f"{module}:{'Class' if name == 'py' else name}"
        raise ConfigError(
            f"{model} is no model of Hugging Face; for a class of yours, give {meant}"
        )
    todo = "Fill in texts(). It needs transformers and datasets, the extra hf of pipedream-rt."
    return _OF_NAME.substitute(name=model, stages=stages, script=path.name, todo=todo)


def _is_there(module: str) -> bool:
    """Whether a module can be found in this folder or among the installed packages."""
    try:
        return importlib.util.find_spec(module) is not None
    except (Exception, SystemExit):  # its parent packages are imported, and may raise anything
        return False


def _of_class(module: str, name: str, path: Path, stages: int) -> str:
    """Return the script for a class of the user's."""
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"there is no class {name!r} in {module!r}: {error}") from error
    forward = getattr(found, "forward", None)
    if not inspect.isclass(found) or not callable(forward):
        raise ConfigError(f"{module}:{name} is no class with a forward, as an nn.Module has one")
    needed = [
        each.name
        for each in inspect.signature(found.__init__).parameters.values()
        if each.name != "self"
        and each.default is each.empty
        and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    names = [n for n in inspect.signature(forward).parameters if n != "self"]
    parts = ["loader()"]
    if needed:
        parts.insert(0, f"the arguments of {name} ({', '.join(needed)})")
    call = f"{name}({', '.join(f'{each}=...' for each in needed)})"
    return _OF_CLASS.substitute(
        name=name,
        module=module,
        stages=stages,
        script=path.name,
        call=call,
        takes=f" {', '.join(names)}" if names else " nothing",
        todo=f"Fill in {' and '.join(parts)}; put your loss in the place of F.cross_entropy.",
    )
