"""The files of `examples/kubernetes/` are what Kubernetes and the MPI operator know."""

import importlib
from pathlib import Path

import pytest
import yaml
from harness.needs import needs

pytestmark = needs("clusters", "kubernetes_validate")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "kubernetes"

# The first version with all of it, and the newest one that the validator knows.
VERSIONS = ["1.31", "1.37"]


def documents(name):
    """The documents of a file."""
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def check(document, version):
    """Validate one document strictly: unknown fields are errors."""
    validate = importlib.import_module("kubernetes_validate").validate
    validate(document, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("document", documents("job.yaml"), ids=lambda d: d["kind"])
def test_the_job_fits_the_schemas_of_kubernetes(document, version):
    """Service, network policy and job."""
    check(document, version)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("role", ["Launcher", "Worker"])
def test_the_pods_of_the_mpi_job_fit_the_schemas_of_kubernetes(role, version):
    """Each template, as that of a job."""
    (job,) = documents("mpijob.yaml")
    own = job["spec"]["mpiReplicaSpecs"][role]
    template = {**own["template"], "spec": {**own["template"]["spec"]}}
    template["spec"]["restartPolicy"] = own["restartPolicy"]
    check(
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "pods"},
            "spec": {"template": template},
        },
        version,
    )


def test_the_mpi_job_fits_the_schema_of_its_operator():
    """Its own fields; the templates of pods are Kubernetes's."""
    schema = yaml.safe_load((Path(__file__).parent / "mpijob_schema.yaml").read_text())
    (job,) = documents("mpijob.yaml")
    jsonschema = importlib.import_module("jsonschema")
    jsonschema.validate(job, schema)
    with pytest.raises(jsonschema.ValidationError, match="slots"):
        jsonschema.validate({**job, "spec": {**job["spec"], "slots": 2}}, schema)


def test_what_does_not_fit_is_noticed():
    """A field that Kubernetes does not know."""
    *_, job = documents("job.yaml")
    wrong = {**job, "spec": {**job["spec"], "completion": 2}}
    errors = importlib.import_module("kubernetes_validate").ValidationError
    with pytest.raises(errors, match="completion"):
        check(wrong, VERSIONS[-1])
