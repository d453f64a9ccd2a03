"""For scripts that use `transformers.Trainer`: the same Trainer over a pipeline."""

from __future__ import annotations

from pipedream_rt.hf.trainer import PipelineTrainer

__all__ = ["PipelineTrainer"]
