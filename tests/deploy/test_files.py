"""The compose file, the alerts and Grafana's dashboard: valid, and naming what there is."""

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest

from gateway.config import GatewayConfig, RoutingConfig
from gateway.server import Gateway
from tests.gateway.end_to_end.processes import new_keyring

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
GRAFANA = DEPLOY / "grafana" / "ropeway.json"
RULES = DEPLOY / "prometheus" / "ropeway.rules.yml"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of samples that a gateway with every part exports, whether it has any of them yet or not."""
    keyring = new_keyring(tmp_path_factory.mktemp("keys"))
    config = GatewayConfig(keyring=keyring, routing=RoutingConfig(shadow=("dynamo",)))
    gateway, names = Gateway(config), set[str]()
    text = generate_latest(gateway.collectors).decode()
    asyncio.run(gateway.fleet.stop())
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            names |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"} if kind == "histogram" else {name}
    return names


@pytest.mark.parametrize("path", [GRAFANA, RULES], ids=["dashboard", "alerts"])
def test_every_metric_that_is_asked_for_is_exported(exported: set[str], path: Path) -> None:
    asked = set(re.findall(r"\bropeway_[a-z0-9_]+", path.read_text()))
    assert len(asked) > 8
    assert asked <= exported


def test_panels_stand_beside_each_other_and_have_something_to_show() -> None:
    panels = json.loads(GRAFANA.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or all(target["expr"] for target in panel["targets"])


def test_each_alert_says_what_and_how_bad() -> None:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]:
        assert rule["alert"].startswith("Ropeway")
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]


def services() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]


def test_what_compose_mounts_is_there() -> None:
    made = {"./secrets/keyring.json", "./secrets/admin-key"}
    document = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert {secret["file"] for secret in document["secrets"].values()} == made
    for service in services().values():
        for volume in service.get("volumes", []):
            assert (DEPLOY / volume.split(":")[0]).exists(), volume
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), port


def test_compose_starts_what_the_configuration_names() -> None:
    config = yaml.safe_load((DEPLOY / "ropeway.yaml").read_text())
    hosts = [worker.removeprefix("http://").split(":")[0] for worker in config["workers"]]
    assert set(hosts) | {"valkey"} <= set(services())
    (target,) = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"][0][
        "static_configs"
    ][0]["targets"]
    assert target == f"gateway:{config['metrics']['port']}"


@pytest.mark.deploy
def test_the_compose_file_is_valid() -> None:
    compose = pytest.importorskip("compose_spec")
    # Aliases are YAML's, which the specification leaves to its reader.
    document = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    spec = compose.PyCompose.from_yaml(yaml.safe_dump(document))
    spec.validate()
    assert set(spec.service_names()) == set(services())


@pytest.mark.deploy
@pytest.mark.parametrize("command", [("check", "rules", str(RULES)), ("test", "rules", "ropeway.rules.test.yml")])
def test_alerts_rise_when_they_should(command: tuple[str, ...]) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: make test-deploy says what is needed")
    done = subprocess.run(["promtool", *command], cwd=RULES.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
