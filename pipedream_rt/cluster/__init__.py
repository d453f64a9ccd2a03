"""Where stages run: on worker processes or in the caller's thread; how workers start and end.

In the order of the imports:

- `keys`, `addresses`, `environment`, `subprocesses`, `records`, `control`: what coordinator,
  workers and the command line share;
- `fork_server`, `local_workers`, `members`: the worker processes, as the coordinator knows them;
- `crowd`, `admission`, `callers`, `door`, and `calling` on the worker's side: the handshake;
- `rendezvous`, `nearby`, `meeting`, `formation`, `clocks`, `watch`: the steps of a group's life;
- `processes` (worker processes) and `serial` (one thread): the two kinds of `base.Cluster`;
- `torchrun`, `engines`, `keepers`, `launch`: which of them a job uses, and who starts its workers;
- `supervisor`, `farewell`: `pipedream-rt run`.
"""
