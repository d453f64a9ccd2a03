"""How long each file of tests takes: the longest begin first, and who takes too long is told.

`pytest -n 2 --dist loadfile` gives files to processes in the order of collection, so a long one
that came last would keep one process waiting for the other.
"""

from collections import Counter

SECONDS = {
    "tests/properties/test_any_model.py": 80,
    "tests/devices/test_pipelines.py": 50,
    "tests/docs/test_blocks.py": 50,
    "tests/properties/test_elastic.py": 45,
    "tests/test_examples.py": 45,
    "tests/hf/test_hf.py": 40,
    "tests/hf/test_live.py": 40,
    "tests/cluster/test_nodes.py": 35,
    "tests/coordinator/recovery/test_recovery.py": 35,
    "tests/hf/test_calls.py": 35,
    "tests/cli/test_run.py": 30,
    "tests/hf/test_arguments.py": 30,
    "tests/hf/test_trainer.py": 30,
    "tests/properties/test_sizes.py": 30,
    "tests/verify/test_innocent.py": 30,
    "tests/properties/test_compatibility.py": 25,
    "tests/properties/test_nothing_silent.py": 25,
    "tests/benchmarks/test_suite.py": 25,
    "tests/coordinator/feed/test_script_loss.py": 25,
    "tests/properties/test_determinism.py": 20,
    "tests/properties/test_replicas.py": 20,
    "tests/doctor/test_rounds.py": 20,
    "tests/properties/test_coded_edges.py": 20,
    "tests/properties/test_security.py": 20,
    "tests/cluster/test_processes.py": 20,
    "tests/cli/test_profile.py": 20,
    "tests/coordinator/feed/test_feeder.py": 20,
    "tests/coordinator/test_text_generation.py": 20,
    "tests/devices/test_standin.py": 20,
    "tests/cluster/test_peer_links.py": 20,
    "tests/cluster/test_two_hosts.py": 20,
    "tests/hf/test_epoch.py": 20,
    "tests/verify/test_run.py": 20,
    "tests/properties/test_corrections.py": 20,
    "tests/cluster/test_without_rights.py": 20,
    "tests/properties/test_said_or_done.py": 20,
    "tests/properties/test_exactness.py": 20,
    "tests/cluster/test_hardened.py": 20,
    "tests/transport/test_shared.py": 20,
    "tests/job/test_script_values.py": 20,
    "tests/devices/test_waits.py": 20,
    "tests/coordinator/checkpointing/test_checkpointer.py": 20,
    "tests/properties/test_tensor_parallel.py": 20,
    "tests/schedules/test_channels.py": 20,
    "tests/coordinator/test_resume.py": 20,
    "tests/coordinator/test_run_state.py": 20,
    "tests/cluster/engines/test_same_bits.py": 15,
    "tests/cluster/test_forked_workers.py": 15,
    "tests/cluster/engines/test_kubernetes.py": 15,
    "tests/hf/test_overrides.py": 15,
    "tests/batches/test_weighing.py": 15,
    "tests/planning/test_auto_split.py": 15,
    "tests/properties/test_chaos.py": 15,
    "tests/test_dynamo.py": 15,
    "tests/serial/test_cluster.py": 15,
    "tests/properties/test_staleness.py": 10,
}
"""By file, its seconds on two quiet cores beside another file; those above `SHORT`."""

SHORT = 10
SLOWEST = 20


def longest_first(items):
    """Sort tests by the time of their file; those of a file stay in their order."""
    items.sort(key=lambda item: -SECONDS.get(file_of(item.nodeid), SHORT))


def file_of(nodeid):
    return nodeid.partition("::")[0]


class Durations:
    """A plugin of pytest that tells the slowest files, and those that take twice their time."""

    def __init__(self):
        self.seconds = Counter()

    def pytest_runtest_logreport(self, report):
        self.seconds[file_of(report.nodeid)] += report.duration

    def pytest_terminal_summary(self, terminalreporter):
        if len(self.seconds) < SLOWEST:
            return
        terminalreporter.section("slowest files")
        for file, seconds in self.seconds.most_common(SLOWEST):
            terminalreporter.write_line(f"{seconds:7.1f} s  {file}")
        for file, seconds in sorted(self.seconds.items()):
            if seconds > (most := 2 * SECONDS.get(file, SHORT)):
                terminalreporter.write_line(
                    f"{file} took {seconds:.0f} s, and may take {most}: this machine is busy, or "
                    "it needs a look (tests/support/durations.py)"
                )
