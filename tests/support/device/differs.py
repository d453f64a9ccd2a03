"""The tests that ask on the stand-in for what no device gives, and why; see `pytest --device`."""

import fnmatch

RECURRENT = (
    "the host computes the gates of all steps of an LSTM at once, and no device does, so bits "
    "differ from those of a plain loop on the host"
)
AUTOCAST = "autocast has other lists of operators for a device than for the host"
FOREACH = "the foreach form, which optimizers take on a device, rounds otherwise than the loop"
FAST_PATH = "torch has another kernel for this layer in eval mode on the host"
FROM_OUTSIDE = "the test itself changes or reads weights of a stage without a word to its stream"
HOLDS = "the loss of the test holds a tensor on the host, as plain PyTorch would refuse too"
SPARSE = "the stand-in has no sparse tensors"
WRAPS = (
    "where torch has an accelerator, nn.DataParallel takes it, and the plain model is on the host"
)
PROCESSES = "workers that share a device share a process, and the test looks for one each"

DIFFERS = {
    "*test_any_model.py*[[]lstm*": RECURRENT,
    "*test_any_model.py*[[]head first*": RECURRENT,
    "*test_asynchronous_clipping_equals_the_oracle*-2-2]": RECURRENT,
    "*test_asynchronous_clipping_equals_the_oracle*-4-0]": RECURRENT,
    "*test_weighing.py::test_buffers_stay_if_the_user_asks_for_it": RECURRENT,
    "*test_any_model.py::test_autocast_is_that_of_the_plain_loop*": AUTOCAST,
    "*test_corrections.py*nadam*": FOREACH,
    "*test_any_model.py*change_nothing*decoder*": FAST_PATH,
    "*test_replicas.py::test_replicas_that_differ_are_told": FROM_OUTSIDE,
    "*test_weighing.py*weights of classes*": HOLDS,
    "*test_weighing.py*contrastive*": HOLDS,
    "*test_replicas.py::test_sparse_gradients_are_refused": SPARSE,
    "*test_diamond.py*through_the_death_of_a_worker": PROCESSES,
    "*test_what_people_see_names_the_replica": PROCESSES,
    "*test_hf.py::test_it_survives_a_worker*": PROCESSES,
    "*test_hf.py::test_each_worker_reads_its_part*": PROCESSES,
    "*test_compatibility.py*layers-nn.GRU]": RECURRENT,
    "*test_compatibility.py*layers-nn.LSTM]": RECURRENT,
    "*test_compatibility.py*layers-nn.RNN]": RECURRENT,
    "*test_compatibility.py*optim.ASGD]": FOREACH,
    "*test_compatibility.py*optim.NAdam]": FOREACH,
    "*test_compatibility.py*optim.RAdam]": FOREACH,
    "*test_compatibility.py*optim.SparseAdam]": SPARSE,
    "*test_compatibility.py*a sparse tensor]": SPARSE,
    "*test_compatibility.py*autocast inside a layer]": AUTOCAST,
    "*test_compatibility.py*layers-nn.DataParallel]": WRAPS,
}
"""Why a test is skipped, by a pattern of its name."""


def why(nodeid):
    """Return why a test is skipped; None if it is not."""
    found = (reason for pattern, reason in DIFFERS.items() if fnmatch.fnmatchcase(nodeid, pattern))
    return next(found, None)
