"""Writes tests/schemas/kuberay.json: of KubeRay's own definitions, what lies on the way of our manifests.

    python benchmarks/write_kuberay_schema.py FOLDER RELEASE

FOLDER holds `ray.io_rayclusters.yaml` and `ray.io_rayjobs.yaml` of that release. The manifests are checked against the
whole definitions here. What is written keeps the names of all fields wherever a manifest goes, so that a field that
KubeRay does not have is refused by the tests too, and the rules of the fields that the manifests use.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import yaml

ROOT = Path(__file__).parents[1]
SCHEMAS = ROOT / "tests" / "schemas" / "kuberay.json"
_RULES = ("type", "required", "enum", "minimum", "maximum", "pattern")
Schema = dict[str, Any]


def spec_schema(folder: Path, kind: str) -> Schema:
    """KubeRay's definition of the `spec` of a kind (`raycluster`), version v1."""
    definition = yaml.load((folder / f"ray.io_{kind}s.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
    (version,) = (one for one in definition["spec"]["versions"] if one["name"] == "v1")
    spec: Schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return spec


def closed(schema: Any) -> Any:
    """The same as JSON schema that refuses unknown fields, as the API server does in strict validation."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    found = {key: closed(value) for key, value in schema.items() if key != "properties" and not key.startswith("x-")}
    if "properties" in schema:
        found["properties"] = {name: closed(value) for name, value in schema["properties"].items()}
        found.setdefault("additionalProperties", False)
    return found


def along(schema: Schema, value: Any) -> Schema:
    """What a closed schema says on the way of a value: all names beside it, and the rules of what it holds."""
    found = {key: schema[key] for key in _RULES if key in schema}
    inner = schema.get("additionalProperties")
    if isinstance(value, Mapping) and "properties" in schema:
        names = schema["properties"]
        found["properties"] = {name: along(names[name], value[name]) if name in value else {} for name in names}
        found["additionalProperties"] = False
    elif isinstance(value, Mapping) and isinstance(inner, dict):
        found["additionalProperties"] = along(inner, next(iter(value.values())))
    elif isinstance(value, list):
        found["items"] = along(schema["items"], _together(value))
    return found


def _together(values: list[Any]) -> Any:
    """All that the values of a list hold, in one."""
    if not isinstance(values[0], dict):
        return values[0]
    names = {name for value in values for name in value}
    return {name: next(value[name] for value in values if name in value) for name in sorted(names)}


def main(folder: Path, release: str) -> None:
    """Checks the manifests and writes the file."""
    found: Schema = {"source": f"custom resource definitions of KubeRay {release}"}
    for kind in ("raycluster", "rayjob"):
        manifest = yaml.safe_load((ROOT / "platform" / "kuberay" / f"{kind}.yaml").read_text(encoding="utf-8"))
        schema = closed(spec_schema(folder, kind))
        jsonschema.validate(manifest["spec"], schema)
        found[kind] = along(schema, manifest["spec"])
    SCHEMAS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
