"""Deployment files: valid by Ray's schema, or by the fields of KubeRay's that they use, and closed by default."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[1]
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
CONTAINER = {
    "type": "object",
    "required": ["name", "image", "resources"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "image": {"type": "string"},
        "ports": {"type": "array"},
        "resources": {"type": "object", "additionalProperties": TEXTS},
        "volumeMounts": {"type": "array"},
    },
}
GROUP = {
    "rayStartParams": TEXTS,
    "template": {
        "type": "object",
        "required": ["spec"],
        "properties": {"spec": {"type": "object", "properties": {"containers": {"type": "array", "items": CONTAINER}}}},
    },
}
COUNTS = {name: {"type": "integer", "minimum": 0} for name in ("replicas", "minReplicas", "maxReplicas")}
# A hand-written part of KubeRay's definitions (ray.io/v1): the fields that the manifests use, closed to all others.
SPECS: dict[str, dict[str, Any]] = {
    "raycluster": {
        "rayVersion": {"type": "string"},
        "enableInTreeAutoscaling": {"type": "boolean"},
        "headGroupSpec": {"type": "object", "additionalProperties": False, "properties": GROUP},
        "workerGroupSpecs": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "properties": {**GROUP, **COUNTS, "groupName": {"type": "string"}},
            },
        },
    },
    "rayjob": {
        "entrypoint": {"type": "string"},
        "runtimeEnvYAML": {"type": "string"},
        "clusterSelector": TEXTS,
        "shutdownAfterJobFinishes": {"type": "boolean"},
        "submissionMode": {"enum": ["K8sJobMode", "HTTPMode"]},
        "backoffLimit": {"type": "integer"},
    },
}


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_ray_accepts_the_cluster_file() -> None:
    cluster = read("cluster.yaml")
    validate_config(prepare_config(cluster))
    assert {"head", "target", "trainer"} == set(cluster["available_node_types"])


@pytest.mark.parametrize("name", SPECS)
def test_a_manifest_uses_only_fields_of_its_kind(name: str) -> None:
    spec = read(f"platform/kuberay/{name}.yaml")["spec"]
    jsonschema.validate(spec, {"type": "object", "additionalProperties": False, "properties": SPECS[name]})


def test_the_manifests_and_the_cluster_file_name_the_same_roles() -> None:
    groups = read("platform/kuberay/raycluster.yaml")["spec"]["workerGroupSpecs"]
    types = read("cluster.yaml")["available_node_types"]
    for group in groups:
        role = group["groupName"]
        assert f'"{{\\"{role}\\": {types[role]["resources"][role]}}}"' == group["rayStartParams"]["resources"]


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
