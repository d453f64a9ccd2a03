"""The coordinator: what the process of the user's script does for a pipeline, one class per job.

- `recovery`: the workers, one generation after another, and what was fed since the last checkpoint;
- `checkpointing`: checkpoints that are made while a run goes on;
- `feed`: the loop over a loader, and mini-batches on their way;
- `parameters`: those of the model, which live on the workers, and the optimizer over them;
- `references`: what reaches a stage by name, where somebody asks for it;
- `views`: what a run shows of itself;
- `run`: all of these together, for one job.
"""
