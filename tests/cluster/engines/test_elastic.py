"""Nodes that are told their rank as by torchrun: with options, or with ``PET_`` variables."""

import pytest

from pipedream_rt.cluster.engines import EngineRequest, Node, node_job
from pipedream_rt.errors import ConfigError

KUBEFLOW = {"PET_NNODES": "4", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "job-node-0-0.job"}
STEP = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}


def node_of(environment, **asked):
    return node_job(environment, EngineRequest(**asked)).node


def test_a_pod_of_kubeflow():
    assert node_of(KUBEFLOW) == Node(rank=2, size=4, host="job-node-0-0.job", port=29500)
    assert node_of({**KUBEFLOW, "PET_NNODES": "4:4", "PET_MASTER_PORT": "7"}).port == 7
    assert node_of({**KUBEFLOW, **STEP}, nodes=2, rank=1, endpoint="h:5") == Node(
        rank=1, size=2, host="h", port=5
    )


def test_a_first_node_whose_address_is_of_ipv6():
    job = node_job({**KUBEFLOW, "PET_MASTER_ADDR": "fd00::1"}, EngineRequest())
    assert (job.node.host, job.node.port) == ("fd00::1", 29500)
    assert job.title == "the job of 4 nodes at [fd00::1]:29500"


def test_without_a_rank_the_machine_that_has_the_address_is_the_first():
    assert node_of({}, nodes=2, endpoint="127.0.0.1:5").rank == 0
    other = node_of({}, nodes=2, endpoint="192.0.2.1:5")
    assert other.rank == 1
    assert other.name_of_worker(0).endswith("-0")
    assert not other.name_of_worker(0).startswith("node-")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"PET_NNODES": "1:4"}, "a job has a fixed number of nodes"),
        ({"PET_NNODES": "many"}, "PET_NNODES must be a number of at least 1"),
        ({"PET_NNODES": "0"}, r"PET_NNODES must be a number of .* 1, not '0'.*unset PET_NNODES"),
        ({"PET_NNODES": "-1"}, "PET_NNODES must be a number of at least 1"),
        ({**KUBEFLOW, "PET_MASTER_PORT": "0"}, "PET_MASTER_PORT must be a number of at least 1"),
        ({**KUBEFLOW, "PET_NODE_RANK": "x"}, "PET_NODE_RANK must be a number of at least 0"),
        ({"PET_NNODES": "2"}, "give all of them --rdzv-endpoint HOST:PORT"),
        (
            {**KUBEFLOW, "PET_NODE_RANK": "4"},
            r"node is 4, which --node-rank or PET_NODE_RANK says, and .* 4 nodes",
        ),
    ],
)
def test_variables_of_torchrun_that_make_no_sense(environment, words):
    with pytest.raises(ConfigError, match=words):
        node_job(environment, EngineRequest())
