"""Where stages run: on worker processes or in the caller's thread; how workers start and end.

In the order of the imports:

- `identity`, `addresses`, `environment`, `subprocesses`, `records`: what the coordinator, workers
  and the command line share;
- `control`, `dial`: the worker's end of a control connection, and how it comes to be;
- `stream`, `reception`: who is at the other end; `peer_listeners`, `peer_links`: how members meet;
- `roster`: what is decided of members, without I/O; `listener`, `generation`, `control_loop`: what
  carries it out, in one event loop; `worker_life`: how workers end, and who starts them again;
- `forked_workers`, `local`, `elsewhere`, `torchrun`, `engines`: who starts the workers;
- `processes` (worker processes), and the room `serial` (one thread): the two kinds of
  `interface.Cluster`; `generations`: which of them a job uses;
- `nodes`: `pipedream-rt run` on several nodes;
- `worker`: what a worker process runs.
"""
