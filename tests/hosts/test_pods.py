"""The pods of `examples/kubernetes/`, as hosts: their commands, variables and names."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from harness.launching import ROOT, until

FOLDER = ROOT / "examples" / "kubernetes"
HOME = "/home/ranks"  # in the image


def documents(name):
    """The documents of a file, by their kind."""
    found = yaml.safe_load_all((FOLDER / name).read_text())
    return {document["kind"]: document for document in found}


def container(template):
    """The one container of a pod."""
    (found,) = template["spec"]["containers"]
    return found


def variables(of, secrets):
    """The environment of a container, as the kubelet makes it."""
    found = {}
    for each in of.get("env", []):
        if "value" in each:
            found[each["name"]] = each["value"]
        else:
            reference = each["valueFrom"]["secretKeyRef"]
            found[each["name"]] = secrets[reference["name"]][reference["key"]]
    return found


def words(of, env, folder=ROOT / "examples"):
    """The command of a container with its variables, in the image's folder."""
    command = of["command"]
    for name, value in env.items():
        command = [word.replace(f"$({name})", value) for word in command]
    path = f"PATH={Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin"
    return ["env", "-C", folder, path, *command]


def resolve(net, name, pods, service, known):
    """Write a pod's /etc/hosts: its own name, and what the cluster's DNS knows."""
    lines = ["127.0.0.1 localhost"]
    for other in known:
        full = f"{pods[other]}.{service}"
        domain = f"{full}.default.svc.cluster.local {full}.default.svc {full}"
        own = f" {pods[other]}" if other == name else ""
        lines.append(f"{net.address(other)} {domain}{own}")
    net.write_hosts(name, "\n".join(lines))


def started(net, name, index, folder, secret="0123456789abcdef" * 4):
    """A pod of the Indexed Job, on a host."""
    of = container(documents("job.yaml")["Job"]["spec"]["template"])
    env = variables(of, {"digits": {"secret": secret}})
    env["JOB_COMPLETION_INDEX"] = str(index)  # by the controller of jobs
    return net.start(name, words(of, env, folder), **env)


_NUMBERS = """
import os
print(*(os.environ[f"HOROVOD_{name}"] for name in ("RANK", "SIZE", "CROSS_SIZE")))
"""


@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_pods_of_the_job_are_one(net, shared, trains):
    """The second one comes first, and the name of the first one is not known yet."""
    folder = ROOT / "examples" if trains else shared
    (shared / "digits.py").write_text(_NUMBERS)
    pods = {"a": "digits-0", "b": "digits-1"}
    service = documents("job.yaml")["Service"]["metadata"]["name"]
    for name, pod in pods.items():
        net.rename(name, pod)
    resolve(net, "a", pods, service, "a")
    resolve(net, "b", pods, service, "b")
    second = started(net, "b", 1, folder)
    time.sleep(3)
    first = started(net, "a", 0, folder)
    resolve(net, "a", pods, service, "ab")
    resolve(net, "b", pods, service, "ab")
    printed, problems = first.communicate(timeout=180)
    also_printed, also_problems = second.communicate(timeout=30)
    assert (first.returncode, second.returncode) == (0, 0), problems + also_problems
    if trains:
        assert "4 on 2 hosts" in printed and "validation accuracy" in printed
    else:
        expected = ["0 4 2", "[1] 1 4 2", "[2] 2 4 2", "[3] 3 4 2"]
        assert sorted((printed + also_printed).splitlines()) == expected


@pytest.fixture
def key(folder):
    """The folder of the job's key, which the operator makes and mounts in each pod."""
    (folder / ".ssh").mkdir()
    words = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-N", ""]
    subprocess.run([*words, "-f", folder / ".ssh" / "id_rsa"], check=True)
    public = folder / ".ssh" / "id_rsa.pub"
    shutil.copy(public, folder / ".ssh" / "authorized_keys")
    return folder


@pytest.mark.long
def test_the_pods_of_the_mpi_operator_train_as_one(net, key):
    """A launcher without ranks, and two workers that know each other by the key."""
    spec = documents("mpijob.yaml")["MPIJob"]["spec"]
    pods = {"a": "digits-launcher", "b": "digits-worker-0", "c": "digits-worker-1"}
    for name, pod in pods.items():
        net.rename(name, pod)
        resolve(net, name, pods, "digits", "abc")
    for name in ("ssh_config", "sshd_config"):
        (key / name).write_text((FOLDER / name).read_text().replace(HOME, str(key)))
    slots = spec["slotsPerWorker"]
    workers = [f"digits-worker-{k}.digits.default.svc" for k in (0, 1)]
    hostfile = key / "hostfile"
    hostfile.write_text("".join(f"{each} slots={slots}\n" for each in workers))
    template = spec["mpiReplicaSpecs"]["Worker"]["template"]
    sshd = [*container(template)["command"], "-f", key / "sshd_config"]
    for name in "bc":
        net.start(name, sshd)
    of = container(spec["mpiReplicaSpecs"]["Launcher"]["template"])
    env = variables(of, {})
    command = [
        hostfile if word == "/etc/mpi/hostfile" else word for word in words(of, env)
    ]
    bound = net.run("a", ["mount", "--bind", key / "ssh_config", "/etc/ssh/ssh_config"])
    assert bound.returncode == 0, bound.stderr
    port = template["spec"]["containers"][0]["readinessProbe"]["tcpSocket"]["port"]
    for worker in workers:
        knock = ["bash", "-c", f"exec 3<>/dev/tcp/{worker}/{port}"]
        until(lambda k=knock: not net.run("a", k).returncode, "sshd")
    done = net.run("a", command, timeout=180, **env)
    assert done.returncode == 0, done.stderr
    assert "4 on 2 hosts" in done.stdout
    assert "validation accuracy" in done.stdout
