"""The Helm chart and the manifests, against Helm itself and Kubernetes' schemas.

`make test-kubernetes` installs both. Schemas of custom resources come from a folder of CRDs:

    make test-kubernetes ARGS="--crds FOLDER"
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from deploy_files import DEPLOY, check_pod

from forge_jax import __version__

helm = pytest.importorskip("helm_python", reason="make test-kubernetes installs it")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

CHART = DEPLOY / "helm/forge-jax"
VERSIONS = ("1.30", "1.34")  # Kubernetes versions
EVERYTHING = {
    "apiKeys": {"existingSecret": "keys"},
    "huggingFaceToken": {"existingSecret": "hf"},
    "env": [{"name": "TZ", "value": "UTC"}],
    "args": ["--max-num-seqs=64", "--log-format=text"],
    "persistence": {"enabled": True, "storageClassName": "fast"},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "autoscaling": {"enabled": True},
    "inferencePool": {"enabled": True},
    "networkPolicy": {"from": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]},
    "podLabels": {"team": "a"},
    "nodeSelector": {"gpu": "h200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "priorityClassName": "high",
}
SEVERAL_HOSTS = {"hosts": 2, "tensorParallel": 8, "pipelineParallel": 2}
CASES = {
    "defaults": {},
    "everything": EVERYTHING,
    "several hosts": SEVERAL_HOSTS,
    "everything on several hosts": EVERYTHING | SEVERAL_HOSTS,
}
# The API groups of custom resources, which Kubernetes' own schemas lack.
CUSTOM = ("leaderworkerset.x-k8s.io", "inference.networking.k8s.io", "monitoring.coreos.com",
          "gateway.networking.k8s.io", "ray.io")  # fmt: skip


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name="forge-jax", namespace="prod")
    return [
        document
        for name, text in files.items()
        if name.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document is not None
    ]


def by_kind(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {document["kind"]: document for document in documents}
    assert len(found) == len(documents)
    return found


def pods_in(value: Any) -> list[dict[str, Any]]:
    """Return all pod templates of a resource."""
    if isinstance(value, list):
        return [pod for item in value for pod in pods_in(item)]
    if not isinstance(value, dict):
        return []
    if "containers" in value.get("spec", {}):
        return [value]
    return [pod for item in value.values() for pod in pods_in(item)]


def check(document: dict[str, Any], crds: dict[tuple[str, str], Any]) -> None:
    """Check a resource, or the pods in a custom resource, against the schemas."""
    group = document["apiVersion"].partition("/")[0]
    if group not in CUSTOM:
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)
        return
    schema = crds.get((document["apiVersion"], document["kind"]))
    if schema is not None:
        jsonschema.validate(document, schema)
    for pod in pods_in(document):
        check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}} | pod, crds)


@pytest.fixture(scope="module")
def crds(request: pytest.FixtureRequest) -> dict[tuple[str, str], Any]:
    """Return the schemas of custom resources by API version and kind. They allow no other field."""
    folder = request.config.getoption("--crds")
    found = {}
    for path in sorted(Path(folder).glob("*.yaml")) if folder else ():
        for crd in yaml.safe_load_all(path.read_text()):
            for version in crd["spec"]["versions"]:
                schema = version["schema"]["openAPIV3Schema"]
                close(schema)
                schema["properties"]["metadata"] = {}
                key = f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"]
                found[key] = schema
    assert found or not folder, f"--crds: {folder} has no CRD"
    return found


def close(schema: Any) -> None:
    if isinstance(schema, list):
        for item in schema:
            close(item)
    elif isinstance(schema, dict):
        if schema.get("properties") and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
        for item in schema.values():
            close(item)


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_helm_lints_the_chart(values):
    report = helm.lint(str(CHART), values, strict=True)
    assert report["errors"] == []
    assert {each["error"] for each in report["messages"]} <= {"icon is recommended"}


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_kubernetes_accepts_the_rendered_chart(values, crds):
    for document in rendered(values):
        check(document, crds)


@pytest.mark.parametrize("path", sorted((DEPLOY / "kubernetes").iterdir()), ids=lambda p: p.name)
def test_kubernetes_accepts_the_manifest(path, crds):
    for document in yaml.safe_load_all(path.read_text()):
        check(document, crds)


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_chart_runs_the_server_on_every_host(values):
    hosts = values.get("hosts", 1)
    for document in rendered(values):
        for pod in pods_in(document):
            check_pod(pod["spec"], hosts)


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_parts_of_the_chart_reference_each_other(values):
    found = by_kind(rendered(values))
    several = values.get("hosts", 1) > 1
    workload = found["LeaderWorkerSet" if several else "Deployment"]
    (pod,) = pods_in(workload)
    labels = pod["metadata"]["labels"]
    if several:
        assert "Deployment" not in found
        labels = labels | {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
    else:
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert found["Service"]["spec"]["selector"].items() <= labels.items()
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    policy = found["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert len(policy["ingress"]) == (2 if several else 1)
    if values.get("inferencePool"):
        pool = found["InferencePool"]["spec"]
        assert pool["selector"]["matchLabels"] == found["Service"]["spec"]["selector"]
    if values.get("serviceMonitor"):
        selector = found["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
        assert selector.items() <= found["Service"]["metadata"]["labels"].items()
    if values.get("autoscaling"):
        target = found["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
        assert {"metadata": {"name": target["name"]}, "kind": target["kind"]}.items() <= (
            workload | {"metadata": {"name": workload["metadata"]["name"]}}
        ).items()
        assert "replicas" not in workload["spec"]
    if values.get("persistence"):
        claims = [each.get("persistentVolumeClaim") for each in pod["spec"]["volumes"]]
        assert {"claimName": found["PersistentVolumeClaim"]["metadata"]["name"]} in claims


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replica": 2}, "additional properties 'replica' not allowed"),
        ({"hosts": 0}, "/hosts"),
        ({"args": ["--port=1"]}, "/args/0"),
        ({"hosts": 3, "tensorParallel": 8, "pipelineParallel": 2}, "must be a multiple of hosts"),
    ],
)
def test_invalid_values_are_rejected(values, message):
    with pytest.raises(helm.HelmError, match=message):
        rendered(values)


def test_schema_lists_every_default_value():
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values.keys() | {"global"} == schema["properties"].keys()


def test_chart_has_the_version_of_the_package():
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == __version__


def test_unknown_field_is_detected(crds):
    (deployment, *_) = yaml.safe_load_all((DEPLOY / "kubernetes/forge-jax.yaml").read_text())
    deployment["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(Exception, match="readynessProbe"):
        check(deployment, crds)
