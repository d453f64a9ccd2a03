"""torch RPC: what it carries here, and how it is kept from strangers. Nothing outside imports it.

Workers are endpoints of `torch.distributed.rpc` that hold their sub-modules behind RRefs, and the
optimizer is built over RRefs to the parameters. References are for control and inspection: the
activations and gradients of training go over signed sockets (`../sockets.py`), which are faster and
fail as errors. torch's own RPC ends a process where descriptors run out, listens on every
interface, and unpickles what anybody sends; so each file here closes one of these doors:

- `endpoint.py`: starts and stops an endpoint with deadlines, one generation after another;
- `fence.py`: tries whether strangers can be kept out here, and says what is done where not;
- `tunnel.py`: lets TensorPipe's connections pass through the links that are admitted already;
- `listening.py`: keeps TensorPipe from listening beyond loopback;
- `descriptors.py`: counts what a start will need before torch is asked for it;
- `pickling.py`: signs what is sent, and unpickles nothing else.
"""
