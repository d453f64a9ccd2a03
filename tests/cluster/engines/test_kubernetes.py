"""The manifests in workers/, checked against published schemas, and run by a played kubelet."""

import signal
from pathlib import Path

import pytest
from support.nodes import SCRIPT, expected
from support.two_hosts import why_not

MANIFESTS = Path(__file__).parents[3] / "workers"


def documents(name):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed; make engines installs it")
    return list(yaml.safe_load_all((MANIFESTS / name).read_text()))


def dropped(given, kept, at=""):
    """What a schema does not know, by its path."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [
            path
            for key, value in given.items()
            for path in (
                dropped(value, kept[key], f"{at}.{key}") if key in kept else [f"{at}.{key}"]
            )
        ]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [
            path
            for index, pair in enumerate(zip(given, kept, strict=True))
            for path in dropped(*pair, f"{at}[{index}]")
        ]
    return [] if given == kept else [at]


@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])
def test_the_published_schemas_know_every_field(name):
    models = pytest.importorskip(
        "kubeflow_trainer_api.models",
        reason="kubeflow-trainer-api is not installed; make engines installs it",
    )
    kinds = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }
    for document in documents(name):
        read = kinds[document["kind"]].from_dict(document)
        assert dropped(document, read.to_dict()) == []


def pods(value):
    """Every specification of a pod in a document."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from pods(each)


@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])
def test_pods_are_restricted(name):
    """As the Pod Security Standard of that name asks; and the image has the user that they name."""
    found = [pod for document in documents(name) for pod in pods(document)]
    assert found
    for pod in found:
        user = pod["securityContext"]
        assert user["runAsNonRoot"]
        assert user["seccompProfile"] == {"type": "RuntimeDefault"}
        assert f"USER {user['runAsUser']}:{user['runAsGroup']}" in (
            (MANIFESTS / "Containerfile").read_text()
        )
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "/tmp" in [mount["mountPath"] for mount in container["volumeMounts"]]


@pytest.mark.parametrize("place", sorted(MANIFESTS.iterdir()), ids=lambda place: place.name)
def test_no_secret_is_an_argument(place):
    """Everybody on a machine can read the arguments of its processes."""
    assert "from-literal" not in place.read_text()


@pytest.fixture
def cluster(tmp_path):
    documents("jobset.yaml")
    if reason := why_not():
        pytest.skip(reason)
    from support.kubelet import kubelet

    def make(name, steps):
        folder = tmp_path / name
        folder.mkdir()
        script = [SCRIPT, str(folder / "run"), "--steps", str(steps)]
        return kubelet(MANIFESTS / name, folder, script)

    return make


@pytest.mark.stress
@pytest.mark.rights
@pytest.mark.processes
def test_a_jobset_of_which_nodes_are_lost(cluster):
    """A container that is killed, then the node of the script: it comes back at another address."""
    with cluster("jobset.yaml", 600) as pods:
        pods.start_all()
        first = pods.containers["train-first-0-0"]
        first.wait_for("step 100")
        pods.containers["train-others-0-1"].signal(signal.SIGKILL)
        pods.start("train-others-0-1")
        first.wait_for("step 220")
        pods.lose("train-first-0-0")
        first = pods.start("train-first-0-0")
        assert int(first.wait_for("began at").split()[2]) >= 200
        assert first.wait_for("digest") == expected(600)
        assert {name: each.ended() for name, each in pods.containers.items()} == dict.fromkeys(
            pods.containers, 0
        )


@pytest.mark.rights
@pytest.mark.processes
def test_a_trainjob(cluster):
    with cluster("trainjob.yaml", 40) as pods:
        pods.start_all()
        assert pods.containers["train-node-0-0"].wait_for("digest") == expected(40)
        assert [each.ended() for each in pods.containers.values()] == [0] * 4
