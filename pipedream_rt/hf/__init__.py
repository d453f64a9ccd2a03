"""For scripts that use `transformers.Trainer`: the same Trainer over a pipeline."""

from __future__ import annotations

try:
    from pipedream_rt.hf.trainer import PipelineMixin, PipelineTrainer
except ModuleNotFoundError as error:
    if error.name not in ("transformers", "accelerate"):
        raise
    raise ModuleNotFoundError(
        f"PipelineTrainer needs transformers 5.8 or newer and accelerate, and there is no "
        f"{error.name}: pip install transformers accelerate",
        name=error.name,
    ) from error

__all__ = ["PipelineMixin", "PipelineTrainer"]
