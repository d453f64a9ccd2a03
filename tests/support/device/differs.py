"""The tests that ask on a device for what it does not give, and why; see `pytest --device`."""

import fnmatch

RECURRENT = (
    "the host computes the gates of all steps of an LSTM at once, and no device does, so bits "
    "differ from those of a plain loop on the host"
)
AUTOCAST = "autocast has other lists of operators for a device than for the host"
FOREACH = "the foreach form, which optimizers take on a device, rounds otherwise than the loop"
FAST_PATH = "torch has another kernel for this layer in eval mode on the host"
FROM_OUTSIDE = "the test itself changes or reads weights of a stage without a word to its stream"
SPARSE = "the stand-in has no sparse tensors"
WRAPS = (
    "where torch has an accelerator, nn.DataParallel takes it, and the plain model is on the host"
)
PROCESSES = "workers that share a device share a process, and the test looks for one each"
ON_THE_HOST = "the test computes what it compares with on the host, whose kernels round otherwise"
SLOW = "it starts processes by the dozen, and each takes seconds to begin to use a device"
DETERMINISTIC = (
    "torch itself refuses this layer on a device where deterministic algorithms are asked for"
)
ATOMICS = "torch sums the loss of a map with atomics on CUDA, so two plain loops differ too"

ON_ANY = {
    "*test_corrections.py*nadam*": FOREACH,
    "*test_any_model.py*change_nothing*decoder*": FAST_PATH,
    "*test_replicas.py::test_replicas_that_differ_are_told": FROM_OUTSIDE,
    "*test_diamond.py*through_the_death_of_a_worker": PROCESSES,
    "*test_what_people_see_names_the_replica": PROCESSES,
    "*test_hf.py::test_it_survives_a_worker*": PROCESSES,
    "*test_hf.py::test_each_worker_reads_its_part*": PROCESSES,
    "*test_compatibility.py*autocast inside a layer]": AUTOCAST,
    "*test_compatibility.py*layers-nn.DataParallel]": WRAPS,
}
ON_THE_STANDIN = {
    "*test_any_model.py::test_autocast_is_that_of_the_plain_loop*": AUTOCAST,
    "*test_any_model.py*[[]lstm*": RECURRENT,
    "*test_any_model.py*[[]head first*": RECURRENT,
    "*test_asynchronous_clipping_equals_the_oracle*-2-2]": RECURRENT,
    "*test_asynchronous_clipping_equals_the_oracle*-4-0]": RECURRENT,
    "*test_feeder.py::test_buffers_stay_if_the_user_asks_for_it": RECURRENT,
    "*test_replicas.py::test_sparse_gradients_are_refused": SPARSE,
    "*test_compatibility.py*layers-nn.GRU]": RECURRENT,
    "*test_compatibility.py*layers-nn.LSTM]": RECURRENT,
    "*test_compatibility.py*layers-nn.RNN]": RECURRENT,
    "*test_compatibility.py*optim.ASGD]": FOREACH,
    "*test_compatibility.py*optim.NAdam]": FOREACH,
    "*test_compatibility.py*optim.RAdam]": FOREACH,
    "*test_compatibility.py*optim.SparseAdam]": SPARSE,
    "*test_compatibility.py*a sparse tensor]": SPARSE,
    "*test_any_model.py*[[]graph*": SPARSE,
}
ON_AN_ACCELERATOR = {
    "*test_any_model.py*unet*": ATOMICS,
    "*test_any_model.py::test_asynchronous_clipping_equals_the_oracle*": ATOMICS,
    "*test_any_model.py::test_clipping_goes_on_from_a_checkpoint*": ATOMICS,
    "*test_any_model.py::test_clipping_by_the_norm_of_each_stage": ATOMICS,
    "*test_any_model.py::test_clipping_survives_a_worker*": ATOMICS,
    "*test_any_model.py::test_losses_are_scaled_as_by_torchs_scaler*": ATOMICS,
    "*test_any_model.py::test_scaled_losses_survive_a_worker*": ATOMICS,
    "*test_any_model.py::test_parameter_groups_by_pattern_and_by_function": ATOMICS,
    "*test_any_model.py::test_the_average_of_the_weights_is_that_of_torch*": ON_THE_HOST,
    "*test_any_model.py::test_a_function_is_called_on_every_stage": ON_THE_HOST,
    "*test_any_model.py::test_processes_give_the_same_bits_through_the_death*": PROCESSES,
    "*test_hf.py::test_split_points_by_name_and_its_own_example": ON_THE_HOST,
    "*test_hf.py::test_inputs_that_the_example_did_not_have*": ON_THE_HOST,
    "*test_text_generation.py::test_a_kept_version_generates*": PROCESSES,
    "*test_feeder.py::test_an_evaluation_that_is_left_in_the_middle*": ON_THE_HOST,
    "*test_feeder.py::test_buffers_stay_if_the_user_asks_for_it": ON_THE_HOST,
    "*test_feeder.py::test_predictions_that_nobody_takes_leave_nothing_on_its_way": ON_THE_HOST,
    "*test_feeder.py::test_an_evaluation_in_which_a_worker_dies*buffers*": PROCESSES,
    "*test_feeder.py::test_after_a_kill_and_after_a_resume_they_are_the_same": PROCESSES,
    "*test_replicas.py::test_evaluation_and_inference_read*": ON_THE_HOST,
    "*test_replicas.py::test_one_stage_with_replicas_and_a_flush*": ON_THE_HOST,
    "*test_diamond.py::test_it_equals_its_oracle_on_threads*": ON_THE_HOST,
    "*test_sequences.py::test_on_processes": SLOW,
    "*test_corrections.py::test_so_do_processes_and_the_death_of_one*worker-1*": PROCESSES,
    "*test_compatibility.py*AdaptiveLogSoftmaxWithLoss*": DETERMINISTIC,
    "*test_compatibility.py::test_the_page_is_the_table": "the page is that of the tested torch",
    "*test_recovery.py::test_a_fork_server_that_does_not_answer*": PROCESSES,
    "*test_recovery.py::test_a_worker_without_a_sign_of_life*": PROCESSES,
    "*test_recovery.py::test_a_stage_that_stalls*": PROCESSES,
    "*test_recovery.py::test_recoveries_leave_nothing_behind": PROCESSES,
    "*test_recovery.py::test_everything_a_script_does_survives[[]local]": SLOW,
}
"""Why a test is skipped, by a pattern of its name."""


def why(nodeid, device):
    """Return why a test is skipped on a device; None if it is not."""
    of_device = ON_THE_STANDIN if device == "standin" else ON_AN_ACCELERATOR
    found = (
        reason
        for pattern, reason in (ON_ANY | of_device).items()
        if fnmatch.fnmatchcase(nodeid, pattern)
    )
    return next(found, None)
