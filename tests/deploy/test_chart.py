"""The Helm chart, rendered: valid objects that fit each other and the gateway."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.settings.loading import load
from tests.deploy.conftest import Rendered

pytestmark = pytest.mark.deploy

# Of Prometheus' operator, whose schemas no package brings.
FOREIGN = {"ServiceMonitor", "PrometheusRule"}


def pods(rendered: Rendered) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for (kind, _), document in rendered.items():
        if kind in ("Deployment", "StatefulSet"):
            yield document, document["spec"]["template"]


def test_objects_are_valid(rendered: Rendered) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for (kind, _), document in rendered.items():
        if kind not in FOREIGN:
            validate.validate(document, "1.31", strict=True)


def test_selectors_find_what_they_are_for(rendered: Rendered) -> None:
    for document, pod in pods(rendered):
        assert document["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    found = {}
    for (kind, name), document in rendered.items():
        if kind != "Service":
            continue
        targets = [
            pod
            for _, pod in pods(rendered)
            if document["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        ]
        found[name] = len(targets)
        (target,) = targets
        ports = {port["name"]: port["containerPort"] for port in target["spec"]["containers"][0]["ports"]}
        for port in document["spec"]["ports"]:
            wanted = port.get("targetPort", port["port"])
            assert wanted in ports or wanted in ports.values()
    assert found["demo"] == found["demo-operators"] == found["demo-valkey"] == 1


def test_the_gateway_takes_its_configuration(rendered: Rendered, tmp_path: Path) -> None:
    path = tmp_path / "ropeway.yaml"
    path.write_text(rendered["ConfigMap", "demo"]["data"]["ropeway.yaml"])
    config = load(path, environment={})
    container = rendered["Deployment", "demo"]["spec"]["template"]["spec"]["containers"][0]
    assert {config.port, config.admin.port, config.metrics.port} == {
        port["containerPort"] for port in container["ports"]
    }
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    for file in (config.keyring, config.admin.key_file, config.tenants.api_keys_file):
        assert file is None or str(file.parent) in mounts
    assert config.redis == "redis://demo-valkey:6379"
    assert config.timeouts.shutdown_seconds == 60
    if ("StatefulSet", "demo-vllm") in rendered:
        urls = [worker.url for worker in config.workers]
        assert urls == ["http://other:8000", "http://demo-vllm-0.demo-vllm:8000", "http://demo-vllm-1.demo-vllm:8000"]
        assert config.timeouts.idle_seconds == 60


def test_nothing_runs_as_root_or_writes_its_root(rendered: Rendered) -> None:
    for document, pod in pods(rendered):
        if document["kind"] == "StatefulSet":
            continue  # vLLM's image is made for root
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        # Its word opens the API server: only for whoever looks for workers there.
        looks = pod["spec"].get("serviceAccountName") == "demo"
        assert pod["spec"]["automountServiceAccountToken"] == looks
        for container in pod["spec"]["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"]
            assert not context["allowPrivilegeEscalation"]
            assert context["capabilities"] == {"drop": ["ALL"]}


def test_whoever_looks_for_workers_may_see_them_and_nothing_else(rendered: Rendered) -> None:
    config = yaml.safe_load(rendered["ConfigMap", "demo"]["data"]["ropeway.yaml"])
    role = rendered.get(("Role", "demo-discovery"))
    assert (role is not None) == ("kubernetes" in config)
    if role is not None:
        assert role["metadata"]["namespace"] == config["kubernetes"]["namespace"] == "models"
        (rule,) = role["rules"]
        assert rule == {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        }
        (subject,) = rendered["RoleBinding", "demo-discovery"]["subjects"]
        assert ("ServiceAccount", subject["name"]) in rendered


def test_a_pod_is_given_the_time_to_drain(rendered: Rendered) -> None:
    spec = rendered["Deployment", "demo"]["spec"]["template"]["spec"]
    config = yaml.safe_load(rendered["ConfigMap", "demo"]["data"]["ropeway.yaml"])
    assert spec["terminationGracePeriodSeconds"] > config["timeouts"]["shutdown_seconds"] + 5


def test_rules_arrive_as_they_are(rendered: Rendered) -> None:
    if ("PrometheusRule", "demo") not in rendered:
        pytest.skip("not asked for")
    rules = yaml.safe_load((Path(__file__).parents[2] / "deploy/prometheus/ropeway.rules.yml").read_text())
    assert rendered["PrometheusRule", "demo"]["spec"] == rules


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"config": {"redis": "redis://x"}}, "config.redis is the chart's to set"),
        ({"keyringSecret": ""}, "keyringSecret names a secret"),
        ({"adminKeySecret": ""}, "adminKeySecret names a secret"),
        ({"vllm": {"enabled": True}}, "vllm.model names what is served"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    helm: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    output = helm(path)
    assert output.returncode == 1
    assert message in output.stderr
