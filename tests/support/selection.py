"""Which tests of long families `make test` runs; `make stress` runs the others.

What a family shows is shown by those that are left, in fewer combinations.
"""

import pytest

_BY_FILE = {
    "cli/test_bad_environment.py": {
        "a_variable_that_makes_no_sense_is_named": 2,
    },
    "cli/test_cli.py": {
        "a_script_that_never_closes_its_pipeline_ends_all_the_same": 3,
        "run_replaces_workers_that_fail": 2,
        "under_torchrun_the_ranks_are_used": 2,
    },
    "cluster/engines/test_kubernetes.py": {
        "a_jobset_of_which_nodes_are_lost": None,
    },
    "cluster/engines/test_nodes.py": {
        "a_node_with_another_secret_is_kept_out": None,
        "a_node_with_another_version_is_refused_by_name": None,
        "an_elastic_job_goes_on_without_a_node": None,
        "nodes_may_have_different_numbers_of_workers": None,
        "nodes_that_are_missing_are_told_of_where_to_look": None,
        "sigterm_at_a_good_end_is_a_good_end": None,
        "the_same_script_under_torchrun_on_two_nodes": None,
        "what_the_script_has_forked_does_not_keep_the_port": None,
    },
    "cluster/engines/test_same_bits.py": {
        "the_same_bits_whoever_starts_it": 2,
    },
    "cluster/test_two_hosts.py": {
        "a_stranger_on_the_other_machine_while_groups_form": None,
        "addresses_of_ipv6": None,
        "an_elastic_job_on_two_machines": None,
        "faults_of_the_network_and_of_persistent_workers": None,
        "memory_is_shared_within_each_machine": None,
        "the_replicas_of_a_stage_are_on_two_machines": None,
        "torchrun_on_two_nodes": None,
        "workers_that_do_not_persist_and_the_death_of_the_coordinator": None,
    },
    "coordinator/test_resume.py": {
        "a_killed_script_goes_on": 2,
    },
    "coordinator/test_two_runs.py": {
        "nothing_unfinished_is_left_by_whatever_end": 3,
    },
    "schedules/test_channels.py": {
        "what_is_proved_of_a_written_schedule_is_what_happens": 2,
    },
    "transport/test_shared.py": {
        "workers_that_were_started_elsewhere_on_this_machine_share_too": 2,
    },
    "test_any_model.py": {
        "a_schedule_that_flushes_gives_the_bits_of_any_other_number_of_stages": 6,
        "activations_that_are_computed_again_are_the_same": 3,
        "asynchronous_training_equals_the_oracle": 2,
        "clipping_is_that_of_the_plain_loop": 6,
    },
    "test_between_step_and_apply.py": {
        "the_bits_are_the_same": 2,
    },
    "test_chaos.py": {
        "exceptions_at_random_places_in_process": 6,
    },
    "test_coded_edges.py": {
        "failures_change_no_bit": 2,
        "they_give_the_bits_of_the_oracle": 2,
    },
    "test_compatibility.py": {
        "given_whole": 2,
        "on_processes": 2,
    },
    "test_corrections.py": {
        "a_correction_computes_what_its_equation_says": 2,
    },
    "test_elastic.py": {
        "a_spare_worker_takes_the_place_of_one_that_is_lost": None,
        "fewer_processes_give_the_same_bits": 2,
    },
    "test_exactness.py": {
        "a_failure_after_a_checkpoint": 2,
        "a_loader_goes_on_where_it_was": 2,
    },
    "test_hf.py": {
        "it_generates_the_tokens_of_the_plain_model": 3,
        "it_trains_to_the_bits_of_plain_pytorch": 2,
        "padded_labels_weigh_nothing": 3,
        "with_dropout_the_number_of_stages_does_not_matter": 2,
    },
    "test_nothing_silent.py": {
        "fingerprints_of_checkpoints_find_the_step_at_which_two_runs_part": 2,
        "looking_changes_nothing": 3,
    },
    "test_replicas.py": {
        "a_divided_optimizer_gives_the_same_bits": 3,
        "a_run_goes_on_from_a_checkpoint": 4,
        "they_are_the_oracle_bit_for_bit": 4,
    },
    "test_sequences.py": {
        "on_threads": 3,
    },
    "test_staleness.py": {
        "the_first_updates_read_the_newest_weights": 2,
    },
}

EVERY = {
    f"tests/{path}::test_{name}": every
    for path, tests in _BY_FILE.items()
    for name, every in tests.items()
}
"""By test, one of how many of its cases is run; None for no case."""


def thin_out(items):
    """Mark the tests of `EVERY` that `make test` leaves out as ones of ``stress``."""
    seen = dict.fromkeys(EVERY, 0)  # in the order of their parameters, alike in all processes
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name in EVERY:
            every = EVERY[name]
            if every is None or seen[name] % every:
                item.add_marker(pytest.mark.stress)
            seen[name] += 1
