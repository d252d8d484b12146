"""Deployment files: valid by the schemas of Ray and of KubeRay, images that cannot move, and closed by default."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE
from ray.autoscaler._private.util import prepare_config, validate_config

from actors.gauges import MEASURES, exported
from jobs.config import load_settings
from jobs.session import needed_cpus, needed_gpus
from jobs.uploading import check_inputs, check_outputs, collect_upload

ROOT = Path(__file__).parents[1]


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_ray_accepts_the_cluster_file() -> None:
    cluster = read("cluster.yaml")
    validate_config(prepare_config(cluster))
    assert {"head", "target", "trainer"} == set(cluster["available_node_types"])


@pytest.mark.parametrize(("name", "kind"), [("raycluster", "RayCluster"), ("rayjob", "RayJob")])
def test_kuberay_knows_every_field_of_a_manifest(name: str, kind: str) -> None:
    schema = json.loads((ROOT / "tests" / "schemas" / "kuberay.json").read_text())[name]
    manifest = read(f"platform/kuberay/{name}.yaml")
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", kind)
    jsonschema.validate(manifest["spec"], schema)
    manifest["spec"]["replicaz"] = 1
    with pytest.raises(jsonschema.ValidationError, match="replicaz"):
        jsonschema.validate(manifest["spec"], schema)


def images(value: Any) -> Iterator[str]:
    """Every `image` in a file."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if isinstance(value, dict) and isinstance(value.get("image"), str):
        yield value["image"]
    for part in parts:
        yield from images(part)


def test_images_are_builds_of_the_projects_dockerfile_or_have_a_version() -> None:
    for name in ("cluster.yaml", "platform/kuberay/raycluster.yaml"):
        assert set(images(read(name))) == {"registry.example.com/dspark-node:2.60.0"}
    others = set(images(read("platform/mlflow/compose.yaml")))
    assert len(others) == 3
    assert all(image.partition(":")[2] not in ("", "latest") for image in others)
    base = next(line for line in (ROOT / "platform/docker/Dockerfile").read_text().splitlines() if line[:4] == "FROM")
    assert base == "FROM rayproject/ray:2.60.0-py311"
    assert "\nray==2.60.0\n" in (ROOT / "constraints.txt").read_text()


def test_the_standing_cluster_asks_for_a_token() -> None:
    assert read("platform/kuberay/raycluster.yaml")["spec"]["authOptions"] == {"mode": "token"}


def test_the_manifests_and_the_cluster_file_name_the_same_roles() -> None:
    groups = read("platform/kuberay/raycluster.yaml")["spec"]["workerGroupSpecs"]
    types = read("cluster.yaml")["available_node_types"]
    for group in groups:
        role = group["groupName"]
        assert f'"{{\\"{role}\\": {types[role]["resources"][role]}}}"' == group["rayStartParams"]["resources"]
        assert group["labels"] == types[role]["labels"] == {"dspark.role": role}


def test_what_is_up_from_the_start_has_the_places_that_a_preset_books() -> None:
    types = read("cluster.yaml")["available_node_types"]
    groups = {
        group["groupName"]: group for group in read("platform/kuberay/raycluster.yaml")["spec"]["workerGroupSpecs"]
    }
    for kind in ("dspark", "dflash", "eagle3"):
        settings = load_settings(ROOT / f"platform/presets/qwen3_4b_{kind}.yaml", [])
        wanted = {"target": settings.targets.actors, "trainer": settings.train.workers}
        started = {name: types[name]["min_workers"] for name in wanted}
        assert started == {name: groups[name]["minReplicas"] for name in wanted}
        assert started == {name: groups[name]["replicas"] for name in wanted}
        cpus, gpus = (
            {name: count * types[name]["resources"][key] for name, count in started.items()} for key in ("CPU", "GPU")
        )
        assert all(gpus[name] >= count for name, count in wanted.items())
        assert sum(gpus.values()) >= needed_gpus(settings, wanted["target"])
        assert sum(cpus.values()) >= needed_cpus(settings, wanted["target"])


def jobs_by_hand() -> list[list[str]]:
    """Entry points of jobs as files and pages give them to Ray, from the preset on."""
    page = (ROOT / "docs/clusters.md").read_text().replace("\\\n", " ")
    lines = [read("platform/kuberay/rayjob.yaml")["spec"]["entrypoint"], *re.findall(r"-- +(python -m jobs.*)", page)]
    assert len(lines) == 2
    return [shlex.split(line)[3:] for line in lines]


def test_a_job_that_is_given_by_hand_reads_what_goes_along_or_lies_on_the_storage_of_all_nodes() -> None:
    upload = collect_upload(ROOT)
    for preset, *overrides in jobs_by_hand():
        settings = load_settings(ROOT / preset, overrides)
        check_inputs(settings, upload)
        check_outputs(settings, ROOT)
        assert (settings.ray.address, Path(preset) in upload.files) == ("auto", True)


def test_the_tracking_server_listens_on_loopback_and_holds_no_password() -> None:
    services = read("platform/mlflow/compose.yaml")["services"]
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports == ["127.0.0.1:5000:5000"]
    secrets = [
        value
        for service in services.values()
        for key, value in service.get("environment", {}).items()
        if "PASSWORD" in key or "SECRET" in key or ("://" in value and "@" in value)
    ]
    assert len(secrets) == 5 and all("${" in secret for secret in secrets)


def shown(value: Any) -> Iterator[str]:
    """Every query in a dashboard or in rules."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        if key in ("expr", "query") and isinstance(part, str):
            yield part
        yield from shown(part)


def test_dashboard_and_alerts_name_only_numbers_that_jobs_or_ray_data_export() -> None:
    known = {exported(name): {"run", *measure.labels} for name, measure in MEASURES.items()}
    known["ray_data_current_bytes"] = {"dataset"}
    dashboard, rules = (
        json.loads((ROOT / "platform/grafana/dspark.json").read_text()),
        read("platform/prometheus/rules.yml"),
    )
    (group,) = rules["groups"]
    assert {rule["alert"] for rule in group["rules"]} == {
        "TrainerStalled",
        "TrainersWait",
        "AcceptanceFell",
        "RowsNotFinite",
    }
    assert all({"expr", "labels", "annotations"} <= rule.keys() for rule in group["rules"])
    queries = [query for query in (*shown(dashboard), *shown(rules)) if "ray_" in query]
    names = [re.findall(r"\bray_\w+", query) for query in queries]
    assert all(names) and {name for found in names for name in found} <= known.keys()
    assert {exported(name) for name in MEASURES} <= {name for found in names for name in found}
    for query, found in zip(queries, names, strict=True):
        grouped = {label for part in re.findall(r"by \(([^)]*)\)", query) for label in part.split(", ")}
        assert grouped <= known[found[0]], query
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}")


def test_prometheus_reads_the_rules_and_the_list_of_nodes_that_ray_keeps() -> None:
    config = read("platform/prometheus/prometheus.yml")
    assert [(ROOT / "platform/prometheus" / name).is_file() for name in config["rule_files"]] == [True]
    (scraped,) = config["scrape_configs"]
    (place,) = scraped["file_sd_configs"][0]["files"]
    assert Path(place).name == PROMETHEUS_SERVICE_DISCOVERY_FILE
