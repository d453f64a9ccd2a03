"""Which tests of long families `make test` runs; `make stress` runs the others.

What a family shows is shown by those that are left, in fewer combinations.
"""

import pytest

_BY_FILE = {
    "cluster/engines/test_kubernetes.py": {
        "a_jobset_of_which_nodes_are_lost": None,
    },
    "cluster/engines/test_nodes.py": {
        "a_node_with_another_secret_is_kept_out": None,
        "a_node_with_another_version_is_refused_by_name": None,
        "an_elastic_job_goes_on_without_a_node": None,
        "nodes_that_are_missing_are_told_of_where_to_look": None,
        "the_same_script_under_torchrun_on_two_nodes": None,
        "what_the_script_has_forked_does_not_keep_the_port": None,
    },
    "cluster/test_two_hosts.py": {
        "a_stranger_on_the_other_machine_while_groups_form": None,
        "an_elastic_job_on_two_machines": None,
        "faults_of_the_network_and_of_persistent_workers": None,
        "the_replicas_of_a_stage_are_on_two_machines": None,
        "torchrun_on_two_nodes": None,
        "workers_that_do_not_persist_and_the_death_of_the_coordinator": None,
    },
    "coordinator/test_resume.py": {
        "a_killed_script_goes_on": 2,
    },
    "coordinator/test_two_runs.py": {
        "nothing_unfinished_is_left_by_whatever_end": 2,
    },
    "cli/test_cli.py": {
        "a_script_that_never_closes_its_pipeline_ends_all_the_same": 3,
    },
    "test_any_model.py": {
        "activations_that_are_computed_again_are_the_same": 3,
        "asynchronous_training_equals_the_oracle": 2,
        "clipping_is_that_of_the_plain_loop": 3,
        "a_schedule_that_flushes_gives_the_bits_of_any_other_number_of_stages": 3,
    },
    "test_chaos.py": {
        "exceptions_at_random_places_in_process": 3,
    },
    "test_compatibility.py": {
        "given_whole": 2,
        "on_processes": 2,
    },
    "test_elastic.py": {
        "fewer_processes_give_the_same_bits": 2,
    },
    "test_hf.py": {
        "it_generates_the_tokens_of_the_plain_model": 3,
        "padded_labels_weigh_nothing": 3,
        "with_dropout_the_number_of_stages_does_not_matter": 2,
    },
    "test_nothing_silent.py": {
        "looking_changes_nothing": 3,
    },
    "test_replicas.py": {
        "a_divided_optimizer_gives_the_same_bits": 3,
        "a_run_goes_on_from_a_checkpoint": 4,
        "they_are_the_oracle_bit_for_bit": 4,
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
