"""torch RPC: what it carries here, and how it is kept from strangers.

Workers are endpoints of `torch.distributed.rpc` that hold their sub-modules behind RRefs, and the
optimizer is built over RRefs to the parameters. References are for control and inspection: the
activations and gradients of training go over the links (`../sockets.py`), which are faster and
fail with errors. torch RPC by itself aborts a process that runs out of descriptors, listens on the
network, and unpickles what anybody sends. Each file here closes one of these gaps:

- `endpoint.py`: starts and stops an endpoint with deadlines, one generation after another;
- `../fence.py`: filters packets, tries whether that is allowed here, and decides what to do where
  not; of the core, as it needs no torch RPC;
- `tunnel.py`: carries TensorPipe's connections over the links, whose ends are admitted members;
- `listening.py`: holds TensorPipe up at its ``listen`` until the packet filter stands;
- `descriptors.py`: finds, breaks and closes the sockets that torch has made;
- `pickling.py`: signs what is sent, and unpickles nothing else.
"""
