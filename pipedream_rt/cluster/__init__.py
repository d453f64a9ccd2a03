"""Where stages run: on worker processes or in the caller's thread; how workers start and end.

In the order of the imports:

- `keys`, `addresses`, `environment`, `subprocesses`, `control_records`, `control`: what the
  coordinator, workers and the command line share;
- `forked_workers`, `local_workers`, `members`: the worker processes, as the coordinator knows them;
- `pending_connections`, `admission`, `handshakes`, `listener`, and `dial` on the worker's side:
  the handshake;
- `rendezvous`, `unix_links`, `peer_links`, `formation`, `liveness`: the life of a group;
- `processes` (worker processes), and the room `serial` (one thread): the two kinds of
  `interface.Cluster`;
- `torchrun`, `engines`, `supervision`, `launch`: which of them a job uses, and who starts workers;
- `supervisor`: `pipedream-rt run`;
- `worker`: what a worker process runs.
"""
