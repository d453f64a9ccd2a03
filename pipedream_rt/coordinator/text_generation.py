"""Generation of tokens: the generation loop of transformers, whose forwards the stages do.

The loop runs in the script, with everything that it knows of sampling. What it calls is a stand-in
of the user's model: it has the model's class and configuration, but its forward goes through the
pipeline. The caches of keys and values stay on the stages, where each layer finds its own; the
cache that the loop sees has their shapes alone.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipedream_rt.batches.forwards import Cache
from pipedream_rt.batches.items import Batch
from pipedream_rt.coordinator.feed.feeder import Feeder
from pipedream_rt.devices.hosted import on_host
from pipedream_rt.errors import ConfigError, PipelineError

_CACHE = "past_key_values"
"""The keyword argument under which models of transformers take a cache."""

_BY_ITSELF = "load pipe.state_dict() into a model of its class, and generate with that"


@dataclass(slots=True)
class _GenerateCall:
    """The forwards of one call of `generate`.

    Attributes:
        version: Number of the kept version that is read; 0 for the newest weights.
        beside: One item of it is drawn after each forward.
        caches: By ``id`` of a cache here: the cache, so that no other one gets its id, and the
            number of the caches on the stages.
        positions: The positions of the forwards in the feed.
    """

    feeder: Feeder
    version: int
    beside: Iterator[Any]
    config: Any
    caches: dict[int, tuple[Any, int]] = field(default_factory=dict)
    positions: list[int] = field(default_factory=list)

    def forward(self, **kwargs: Any) -> Any:
        """Stand in for the forward of the model."""
        inputs = {name: value for name, value in kwargs.items() if value is not None}
        mask = inputs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.all()):
            # Without padding a mask says nothing, and its shape would differ in every forward.
            del inputs["attention_mask"]
        inputs.pop("return_dict", None)
        self._refuse_inputs(inputs)
        value = inputs.pop(_CACHE, None)
        if value is None and inputs.get("use_cache") and self.caches:
            # A model may give its cache up and begin another one.
            value = type(next(iter(self.caches.values()))[0])(config=self.config)
        if value is None or not inputs.get("use_cache", True):
            inputs["use_cache"] = False
            output, position = self.feeder.generated(Batch((), inputs, None), self.version)
        else:
            number = self._number_of(value)
            ids = inputs["input_ids"] if "input_ids" in inputs else inputs["inputs_embeds"]
            output, position = self.feeder.generated(
                Batch((), inputs, None),
                self.version,
                Cache(_CACHE, value),
                number,
                ids.shape[1],
            )
            output[_CACHE] = value
        self.positions.append(position)
        with torch.enable_grad():  # the loop turned them off; `beside` may train
            next(self.beside, None)
        return output

    def _refuse_inputs(self, inputs: dict[str, Any]) -> None:
        """Refuse inputs that no stage can take, or outputs that none gives."""
        for name in ("output_attentions", "output_hidden_states"):
            if inputs.get(name):
                raise ConfigError(
                    f"the last stage returns only the scores: leave {name} out, in "
                    "generation_config too"
                )
        for name, value in inputs.items():
            if isinstance(value, Tensor) and value.is_meta:
                raise ConfigError(
                    f"generate calls the forward with {name} on the meta device, without values: "
                    "what a model computes from its weights before the forward has none, as the "
                    f"weights are on the stages; {_BY_ITSELF}"
                )
        ids = inputs.get("input_ids")
        tokens = getattr(self.config.get_text_config(), "vocab_size", None)
        if isinstance(ids, Tensor) and ids.numel() and isinstance(tokens, int):
            low, high = map(int, ids.aminmax())
            if low < 0 or high >= tokens:
                raise ConfigError(
                    f"the model has the tokens 0 to {tokens - 1}, and is given "
                    f"{low if low < 0 else high}"
                )

    def _number_of(self, cache: Any) -> int:
        """Return the number of the caches on the stages that stand behind a cache here."""
        if id(cache) in self.caches:
            return self.caches[id(cache)][1]
        if type(cache).__name__ != "DynamicCache" or getattr(cache, "offloading", False):
            raise ConfigError(
                f"generate works with the DynamicCache of transformers as it is by default, not "
                f"with this {type(cache).__name__}; leave cache_implementation out"
            )
        if cache.get_seq_length():
            raise ConfigError(
                f"{_CACHE} holds what another model has computed, which the stages do not have; "
                "give the whole text as input_ids"
            )
        self.caches[id(cache)] = cache, next(self.feeder.numbers)
        return self.caches[id(cache)][1]


def generate(
    feeder: Feeder,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    version: int,
    beside: Iterator[Any],
) -> Any:
    """Generate tokens; see `Pipeline.generate`."""
    _refuse_model(model)
    if not version:
        feeder.flush()
    generation = _GenerateCall(feeder, version, beside, model.config)
    stand_in = _stand_in(model, generation)
    feeder.hold()
    try:
        args, kwargs = on_host((args, kwargs))
        return stand_in.generate(*args, **kwargs)
    except (RuntimeError, NotImplementedError) as error:
        # The loop has computed with weights of the stand-in, which have no values.
        if "meta" in str(error) and not isinstance(error, PipelineError):
            text = str(error).partition("\n")[0]
            raise ConfigError(
                f"generate has failed on a tensor without values ({text}): outside of the forward "
                f"the weights have none, as they are on the stages; {_BY_ITSELF}"
            ) from error
        raise
    finally:
        numbers = [number for _, number in generation.caches.values()]
        feeder.end_generation(numbers, generation.positions)


def _refuse_model(model: nn.Module) -> None:
    """Refuse a model that does not generate as causal models of transformers do."""
    config = getattr(model, "config", None)
    if not (hasattr(model, "generate") and hasattr(model, "generation_config")):
        raise ConfigError(
            f"generate needs a causal model of transformers, not a {type(model).__name__}; with "
            "another model call pipe(...) for each token"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{type(model).__name__} has an encoder, which generate would run by itself; "
            f"{_BY_ITSELF}"
        )


def _stand_in(model: nn.Module, generation: _GenerateCall) -> Any:
    """Return a copy of a model without values, whose forward goes through the stages."""
    cls: Any = type(model)

    # Wrapped, since transformers reads the signature.
    @functools.wraps(cls.forward)
    def forward(self: Any, input_ids: Any = None, **kwargs: Any) -> Any:
        if input_ids is not None:
            kwargs["input_ids"] = input_ids
        return generation.forward(**kwargs)

    def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(
            "generate goes through the stages greedily or by sampling, with one sequence for each "
            "text; give num_beams=1 and no assistant"
        )

    # Its modules have no values, so that nothing computes with weights of the script's model.
    tensors = (*model.parameters(), *model.buffers())
    stand_in = copy.deepcopy(model, {id(t): t.detach().to("meta") for t in tensors})
    stand_in.generation_config = copy.deepcopy(model.generation_config)
    stand_in.training = False
    stand_in.__class__ = type(
        cls.__name__,
        (cls,),
        {
            "forward": forward,
            "_beam_search": refused,
            "_assisted_decoding": refused,
            "device": torch.device("cpu"),  # by itself it is that of the parameters, meta
            "__module__": cls.__module__,
        },
    )
    return stand_in
