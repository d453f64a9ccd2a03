"""Where stages run: threads of this process, or worker processes; how they start, join and end.

In the order of the imports:

- `keys`, `addresses`, `control`, `environment`, `subprocesses`: what coordinator, workers and the
  command line share;
- `fork_server`, `local_workers`, `members`: the worker processes, as the coordinator knows them;
- `admission`, `rendezvous`, `formation`, `clocks`, `watch`: the steps of a group's life;
- `processes` (worker processes) and `serial` (one thread): the two kinds of `base.Cluster`;
- `torchrun`, `launch`: which of them a job uses.
"""
