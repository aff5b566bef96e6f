"""The Kubernetes manifests: valid by the published schemas, and what they say fits the route, the commands and each other."""

from __future__ import annotations

import copy
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from dgr.cli.command_line import _parser
from dgr.cluster.route_file import read_route_file
from dgr.wire.tcp import parse_address

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "deploy" / "kubernetes"
#: The version whose schemas are asked.
KUBERNETES = "1.33"
SET_SCHEMA = json.loads(Path(__file__).with_name("leader_worker_set.json").read_text())

Object = dict[str, Any]


def _objects() -> Iterator[Object]:
    for path in sorted(MANIFESTS.glob("*.yaml")):
        if path.name != "kustomization.yaml":
            yield from yaml.safe_load_all(path.read_text())


def _of_kind(kind: str) -> Object:
    (found,) = (each for each in _objects() if each["kind"] == kind)
    return found


def _validate(each: Object) -> None:
    """Strictly: a field that is not known is a mistake."""
    if each["kind"] != "LeaderWorkerSet":
        kubernetes_validate.validate(each, KUBERNETES, strict=True)
        return
    jsonschema.validate(each, SET_SCHEMA)
    for template in _templates(each).values():
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def _templates(lws: Object) -> dict[str, Object]:
    both = lws["spec"]["leaderWorkerTemplate"]
    return {"server": both["leaderTemplate"], "stage": both["workerTemplate"]}


def _pods() -> dict[str, Object]:
    return {name: template["spec"] for name, template in _templates(_of_kind("LeaderWorkerSet")).items()}


def _containers(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def test_every_object_is_valid() -> None:
    kinds = [each["kind"] for each in _objects()]
    assert sorted(kinds) == ["LeaderWorkerSet", "NetworkPolicy", "PersistentVolumeClaim", "Service"]
    for each in _objects():
        _validate(each)


def _misspell(lws: Object) -> None:
    container = _templates(lws)["stage"]["spec"]["containers"][0]
    container["livenesProbe"] = container.pop("livenessProbe")


def _no_such_policy(lws: Object) -> None:
    lws["spec"]["leaderWorkerTemplate"]["restartPolicy"] = "Always"


def _elsewhere(lws: Object) -> None:
    lws["spec"]["size"] = lws["spec"]["leaderWorkerTemplate"].pop("size")


def _number(lws: Object) -> None:
    _templates(lws)["server"]["spec"]["containers"][0]["args"].append(5)


@pytest.mark.parametrize("mistake", [_misspell, _no_such_policy, _elsewhere, _number])
def test_a_mistake_would_be_seen(mistake: Callable[[Object], None]) -> None:
    lws = copy.deepcopy(_of_kind("LeaderWorkerSet"))
    mistake(lws)
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        _validate(lws)


def test_the_route_names_every_worker_of_the_set() -> None:
    lws, file = _of_kind("LeaderWorkerSet"), read_route_file(MANIFESTS / "route.toml")
    file.route.check(43)
    name, size = lws["metadata"]["name"], lws["spec"]["leaderWorkerTemplate"]["size"]
    hosts = [f"{name}-0-{worker}.{name}.default.svc.cluster.local" for worker in range(1, size)]
    assert [ref.address for ref in file.route.stages] == [f"{host}:7701" for host in hosts]
    (stage,) = _pods()["stage"]["containers"]
    for worker, ref in enumerate(file.route.stages, 1):
        args = [
            arg.replace("$(POD_NAME)", f"{name}-0-{worker}").replace("$(NAMESPACE)", "default") for arg in stage["args"]
        ]
        parsed = _parser().parse_args(args)
        assert parsed.only == [ref.address]
        assert Path(parsed.tls_cert).name == f"{parse_address(ref.address)[0]}.pem"  # as `dgr keys` names it
        assert Path(parsed.tls_key).name == f"{parse_address(ref.address)[0]}.key"
    ports = {port["name"]: port["containerPort"] for port in stage["ports"]}
    assert ports["stage"] == 7701
    assert {parse_address(file.stage_metrics[ref.address])[1] for ref in file.route.stages} == {ports["metrics"]}


def test_containers_call_commands_with_flags_that_they_have() -> None:
    for pod in _pods().values():
        for container in _containers(pod):
            args = _parser().parse_args([str(arg).replace("$(", "").replace(")", "") for arg in container["args"]])
            assert args.run is not None
            assert container["image"] == f"dgr:{version('dgr')}"


def test_probes_ask_what_tells_alive_from_able() -> None:
    for pod in _pods().values():
        (container,) = pod["containers"]
        ports = {port["name"] for port in container["ports"]}
        probes = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
        assert [probe["path"] for probe in probes.values()] == ["/health", "/health", "/ready"]
        assert {probe["port"] for probe in probes.values()} <= ports
    (server,) = _pods()["server"]["containers"]
    grace = _parser().parse_args(server["args"]).grace
    assert _pods()["server"]["terminationGracePeriodSeconds"] > grace


def test_a_stage_is_drained_before_it_is_stopped() -> None:
    pod = _pods()["stage"]
    (stage,) = pod["containers"]
    shell, flag, line = stage["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, flag) == ("sh", "-c")
    words = shlex.split(line.replace("$POD_NAME", "dgr-0-1").replace("$NAMESPACE", "default"))
    assert words[:2] == ["exec", "dgr"]
    args = _parser().parse_args(words[2:])
    addresses = [ref.address for ref in read_route_file(MANIFESTS / "route.toml").stages]
    assert args.address == addresses[0]
    assert args.tls_cert == f"/etc/dgr/keys/{parse_address(args.address)[0]}.pem"
    assert pod["terminationGracePeriodSeconds"] > args.timeout


def test_pods_may_do_little_and_mount_what_there_is() -> None:
    for pod in _pods().values():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in _containers(pod):
            may = container["securityContext"]
            assert may["readOnlyRootFilesystem"] is True
            assert may["allowPrivilegeEscalation"] is False
            assert may["capabilities"] == {"drop": ["ALL"]}
            assert {mount["name"] for mount in container["volumeMounts"]} <= {*volumes}
        assert (
            volumes["model"]["persistentVolumeClaim"]["claimName"]
            == _of_kind("PersistentVolumeClaim")["metadata"]["name"]
        )


def test_selectors_find_the_pods() -> None:
    set_name = {"leaderworkerset.sigs.k8s.io/name": _of_kind("LeaderWorkerSet")["metadata"]["name"]}
    labels = {
        name: {**template["metadata"]["labels"], **set_name}
        for name, template in _templates(_of_kind("LeaderWorkerSet")).items()
    }
    service, policy = _of_kind("Service")["spec"], _of_kind("NetworkPolicy")["spec"]
    assert service["selector"].items() <= labels["server"].items()
    assert not service["selector"].items() <= labels["stage"].items()
    assert policy["podSelector"]["matchLabels"].items() <= labels["stage"].items()


def test_secrets_are_those_that_the_docs_make() -> None:
    text = (ROOT / "docs" / "deployment.md").read_text()
    secrets = {
        volume["secret"]["secretName"] for pod in _pods().values() for volume in pod["volumes"] if "secret" in volume
    }
    assert {*re.findall(r"kubectl create secret generic (\S+)", text)} == secrets


def test_kustomize_makes_one_of_all() -> None:
    listed = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())
    assert {*listed["resources"]} == {path.name for path in MANIFESTS.glob("*.yaml")} - {"kustomization.yaml"}
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    made = subprocess.run([kubectl, "kustomize", str(MANIFESTS)], capture_output=True, text=True, check=True).stdout
    objects = {each["kind"]: each for each in yaml.safe_load_all(made)}
    assert {*objects} == {each["kind"] for each in _objects()} | {"ConfigMap"}
    assert objects["ConfigMap"]["data"]["route.toml"] == (MANIFESTS / "route.toml").read_text()
    mounted = {v["configMap"]["name"] for pod in _pods().values() for v in pod["volumes"] if "configMap" in v}
    assert mounted == {objects["ConfigMap"]["metadata"]["name"]}
