"""The files in deploy/: they match the server's flags, paths, port and metrics.

These tests need neither Docker, Kubernetes, Grafana nor Prometheus. docs/operations.md describes
how the files were tried with those programs.
"""

from __future__ import annotations

import asyncio
import configparser
import dataclasses
import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
import types
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from deploy_files import (
    DEPLOY,
    DOCKERFILE,
    ROOT,
    check_pod,
    dockerfile,
    entrypoint,
    options,
    routes,
    stop_sleep_s,
)
from promql import label_values, reads

from forge_jax.config import ParallelConfig
from forge_jax.engine.thread import Engine
from forge_kernels.private_files import private_folder_fault
from forge_serve.cli.flags import flags
from forge_serve.cli.main import SECTIONS
from forge_serve.config import ServerConfig
from forge_serve.http.auth import HEALTH_PATHS
from forge_serve.server.process import make_runner
from forge_serve.server.service import Service
from forge_serve.telemetry.request_log import RequestRecord

DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/forge-jax.json").read_text())
ALERTS = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
# Labels that Prometheus adds to a target; Kubernetes' come from deploy/prometheus/kubernetes.yml.
OF_THE_TARGET = {"job", "instance", "namespace", "pod", "service"}
OF_PROMETHEUS = {"up"}
# Requested periodically by machines, independent of clients.
PROBES_AND_SCRAPES = {"/health", "/healthz", "/ping", "/forge/v1/health", "/metrics"}
KUBERNETES = {
    part["kind"]: part
    for part in yaml.safe_load_all((DEPLOY / "kubernetes/forge-jax.yaml").read_text())
}
POD = KUBERNETES["Deployment"]["spec"]["template"]["spec"]
SEVERAL_HOSTS = {
    part["kind"]: part
    for part in yaml.safe_load_all((DEPLOY / "kubernetes/leaderworkerset.yaml").read_text())
}
LWS = SEVERAL_HOSTS["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
LWS_POD = LWS["workerTemplate"]["spec"]
(CONTAINER,) = POD["containers"]
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
CUDA = yaml.safe_load((DEPLOY / "compose.cuda.yaml").read_text())


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def check_query(after_one_request: Any, query: str) -> None:
    for series, labels in reads(query):
        if series not in OF_PROMETHEUS:
            assert series in after_one_request.labels, f"there is no {series}: {query}"
            missing = labels - OF_THE_TARGET - set(after_one_request.labels[series])
            assert not missing, f"{series} has no label {missing}: {query}"


# ---- Grafana and Prometheus ----------------------------------------------------------------------


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_dashboard_panel_queries_existing_series(after_one_request, panel):
    assert panel["targets"]
    for target in panel["targets"]:
        check_query(after_one_request, target["expr"])


def test_dashboard_variables_are_existing_labels(after_one_request):
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            for series, labels in label_values(variable["definition"]):
                assert labels - OF_THE_TARGET <= set(after_one_request.labels[series])


def test_dashboard_shows_every_forge_series(after_one_request):
    own = {name for name in after_one_request.families if name.startswith("forge:")}
    queries = [target["expr"] for panel in panels() for target in panel["targets"]]
    shown = {series for query in queries for series, _ in reads(query)}
    assert own <= {re.sub(r"_(total|sum|count|bucket)$", "", name) for name in shown} | shown


def test_dashboard_panels_do_not_overlap():
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_alert_uses_existing_series_and_is_documented(after_one_request, rule):
    check_query(after_one_request, rule["expr"])
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert f"| `{rule['alert']}` |" in (ROOT / "docs/operations.md").read_text()
    of_the_alert = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    assert of_the_alert <= OF_THE_TARGET | {"model_name"}


def test_alert_covers_each_state_that_serves_nothing(after_one_request):
    (rule,) = (rule for rule in ALERTS if rule["alert"] == "ServerNotServing")
    states = set(re.search(r'state=~"([a-z|]+)"', rule["expr"])[1].split("|"))
    assert states < after_one_request.labels["forge:server_state"]["state"]


def test_probes_and_scrapes_are_excluded_from_queries():
    queries = [target["expr"] for panel in panels() for target in panel["targets"]]
    queries += [rule["expr"] for rule in ALERTS]
    selectors = re.findall(r"http_requests_total(\{[^}]*\}|)", "".join(queries))
    assert len(selectors) >= 5
    for selector in selectors:
        (left_out,) = re.findall(r'handler!~"([^"]*)"', selector)
        assert {path for path in routes() if re.fullmatch(left_out, path)} == PROBES_AND_SCRAPES


@pytest.mark.parametrize("name", ["prometheus.yml", "kubernetes.yml"])
def test_prometheus_scrapes_the_server_and_loads_the_rules(name):
    config = yaml.safe_load((DEPLOY / "prometheus" / name).read_text())
    assert [(DEPLOY / "prometheus" / rules).is_file() for rules in config["rule_files"]] == [True]
    (job,) = config["scrape_configs"]
    assert f'job="{job["job_name"]}"' in "".join(rule["expr"] for rule in ALERTS)
    assert "metrics_path" not in job and "/metrics" in routes()


def test_prometheus_adds_the_kubernetes_labels_of_vllm_dashboards():
    config = yaml.safe_load((DEPLOY / "prometheus/kubernetes.yml").read_text())
    rules = config["scrape_configs"][0]["relabel_configs"]
    targets = {rule["target_label"] for rule in rules if "target_label" in rule}
    assert targets == {"namespace", "pod", "service"}
    (kept,) = (rule for rule in rules if rule.get("action") == "keep")
    assert kept["regex"] == KUBERNETES["Service"]["metadata"]["labels"]["app"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Prometheus' promtool")
@pytest.mark.parametrize(
    "command",
    ["check config prometheus.yml", "check rules alerts.yml", "test rules alerts_test.yml"],
)
def test_prometheus_accepts_its_files_and_the_alerts_fire(command):
    subprocess.run(["promtool", *command.split()], check=True, cwd=DEPLOY / "prometheus")


# ---- Docker --------------------------------------------------------------------------------------


def test_files_that_the_image_copies_exist_and_are_not_ignored():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in dockerfile("COPY"):
        if "--from" in line:
            continue
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            left_out = False
            for pattern in ignored:
                if pattern and not pattern.startswith("#") and fnmatch(source, pattern.lstrip("!")):
                    left_out = not pattern.startswith("!")
            assert not left_out, f"{source} is in .dockerignore"


def test_image_has_the_packages_of_the_wheel():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = {word for line in dockerfile("COPY") for word in line.split()}
    for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        assert package.split("/")[0] in copied
    readme = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["fragments"]
    files = {fragment["path"] for fragment in readme} | set(project["project"]["license-files"])
    assert files | {project["tool"]["hatch"]["version"]["path"].split("/")[0]} <= copied
    extras = project["project"]["optional-dependencies"]
    for extra in re.findall(r"EXTRA=(\w+)", DOCKERFILE):
        assert extra in extras
    assert "otel" in extras and '".[otel' in DOCKERFILE


def test_image_runs_an_existing_command_on_its_exposed_port():
    (model,) = json.loads(dockerfile("CMD")[-1])
    found = options([*entrypoint(), model])
    assert (found["command"], found["model"], found["host"]) == ("serve", "forge-tiny", "0.0.0.0")
    assert dockerfile("EXPOSE") == [str(found["port"])]


def test_image_health_check_requests_health():
    (check,) = re.findall(r"HEALTHCHECK .*?CMD +(\[.*\])", DOCKERFILE)
    url = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", json.loads(check)[-1])
    assert (int(url[1]), url[2] in HEALTH_PATHS) == (ServerConfig.port, True)


@pytest.mark.parametrize("serves", [True, False], ids=["serving", "still starting"])
async def test_image_health_check_reports_whether_it_serves(serves):
    (check,) = re.findall(r"HEALTHCHECK .*?CMD +(\[.*\])", DOCKERFILE)
    service = Service(ServerConfig())
    if serves:
        service.engine = Engine.fake()
        service.engine.start()
    runner = make_runner(service, last_bytes_s=0.1)
    await runner.setup()
    with socket.create_server(("127.0.0.1", 0)) as sock:
        await web.SockSite(runner, sock).start()
        _, flag, code = json.loads(check)
        code = code.replace(str(ServerConfig.port), str(sock.getsockname()[1]))
        asked = await asyncio.create_subprocess_exec(
            sys.executable, flag, code, stderr=asyncio.subprocess.PIPE
        )
        _, said = await asked.communicate()
        await runner.cleanup()
    if service.engine is not None:
        await service.engine.stop()
    assert asked.returncode == (0 if serves else 1), said.decode()
    assert serves or b"503" in said


def test_files_that_compose_mounts_exist():
    for name, service in COMPOSE["services"].items():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), f"{name}: {source}"
            else:
                assert source in COMPOSE["volumes"]
    build = COMPOSE["services"]["forge-jax"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()


def test_compose_connects_the_programs():
    port = ServerConfig.port
    assert COMPOSE["services"]["forge-jax"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    prometheus = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    targets = prometheus["scrape_configs"][0]["static_configs"][0]["targets"]
    assert targets == [f"forge-jax:{port}"] and "forge-jax" in COMPOSE["services"]
    sources = DEPLOY / "grafana/provisioning/datasources/prometheus.yml"
    (source,) = yaml.safe_load(sources.read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in COMPOSE["services"]


def test_compose_with_cuda_adds_the_extra_and_the_gpus():
    (name,) = CUDA["services"]
    assert name in COMPOSE["services"] and CUDA.keys() == {"services"}
    service = CUDA["services"][name]
    # `-f` twice merges mappings, so missing keys keep their values from compose.yaml.
    assert service.keys() == {"image", "build", "deploy"} and service.keys() - {"build"} <= (
        service.keys() - COMPOSE["services"][name].keys()
    )
    assert service["build"] == {"args": {"EXTRA": "cuda13"}}
    (argument,) = service["build"]["args"]
    assert f'{argument}=""' in dockerfile("ARG")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert service["build"]["args"][argument] in extras["optional-dependencies"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    for file in ("compose.yaml", "compose.cuda.yaml"):
        assert f"-f deploy/{file}" in (DEPLOY / "compose.cuda.yaml").read_text()


def test_grafana_finds_the_dashboard():
    mounts = dict(m.split(":")[:2] for m in COMPOSE["services"]["grafana"]["volumes"])
    providers = DEPLOY / "grafana/provisioning/dashboards/forge-jax.yml"
    (provider,) = yaml.safe_load(providers.read_text())["providers"]
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]
    environment = COMPOSE["services"]["grafana"]["environment"]
    home = environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.startswith(provider["options"]["path"] + "/")
    assert (DEPLOY / "grafana/dashboards" / Path(home).name).is_file()


def test_each_way_to_stop_leaves_time_to_drain():
    drain_s = ServerConfig.drain_timeout_s
    assert int(COMPOSE["services"]["forge-jax"]["stop_grace_period"].rstrip("s")) > drain_s
    assert float(unit()["Service"]["TimeoutStopSec"]) > drain_s


# ---- Kubernetes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("pod", "hosts"), [(POD, 1), (LWS_POD, LWS["size"])], ids=["pod", "LWS"])
def test_pod_runs_the_server_and_checks_its_health(pod, hosts):
    check_pod(pod, hosts)
    container = pod["containers"][0]
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == "api-keys")
    assert f"--api-key-file={mount['mountPath']}/api-keys" in container["args"]


def test_pod_is_killed_later_than_it_is_unready_or_stalled():
    def seconds(probe: str) -> float:
        return CONTAINER[probe]["periodSeconds"] * CONTAINER[probe]["failureThreshold"]

    assert seconds("readinessProbe") < ServerConfig.stall_timeout_s < seconds("livenessProbe")
    assert seconds("startupProbe") > 600
    # A frozen engine is replaced before its pod is killed.
    killed_s = ServerConfig.stall_timeout_s + seconds("livenessProbe")
    assert killed_s > ParallelConfig.engine_timeout_s + 60


def test_claimed_volume_folders_stay_private(tmp_path, monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path)
    # An empty Kubernetes volume with an fsGroup, and at later starts a filled one.
    tmp_path.chmod(0o2777)
    cache = tmp_path / "cache" / "forge-jax" / "xla"
    assert private_folder_fault(cache) is None
    cache.chmod(cache.stat().st_mode | 0o070)
    assert "others can write to it" in str(private_folder_fault(cache))
    assert POD["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_manifest_parts_reference_each_other():
    labels = KUBERNETES["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for selector in (
        KUBERNETES["Deployment"]["spec"]["selector"]["matchLabels"],
        KUBERNETES["Service"]["spec"]["selector"],
        KUBERNETES["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    volumes = {volume["name"] for volume in POD["volumes"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == volumes
    (port,) = KUBERNETES["Service"]["spec"]["ports"]
    assert port["targetPort"] in [p["name"] for p in CONTAINER["ports"]]
    assert port["port"] == ServerConfig.port


def test_several_hosts_are_one_group_with_one_http_server():
    labels = LWS["workerTemplate"]["metadata"]["labels"]
    (port,) = SEVERAL_HOSTS["Service"]["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (ServerConfig.port, "http")
    index = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}  # set by the controller
    assert SEVERAL_HOSTS["Service"]["spec"]["selector"] == index | {"app": labels["app"]}
    # The controller creates a headless service with the set's name.
    names = {kind: part["metadata"]["name"] for kind, part in SEVERAL_HOSTS.items()}
    assert names["Service"] != names["LeaderWorkerSet"]
    assert SEVERAL_HOSTS["LeaderWorkerSet"]["spec"]["startupPolicy"] == "LeaderCreated"
    policy = SEVERAL_HOSTS["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    http, group = policy["ingress"]
    assert http == {"ports": [{"protocol": "TCP", "port": "http"}]}
    assert group == {"from": [{"podSelector": policy["podSelector"]}]}


def test_other_hosts_stop_after_host_0_has_drained():
    found = options([*entrypoint(), *(arg for arg in LWS_POD["containers"][0]["args"]
                                      if "LWS" not in arg)])  # fmt: skip
    first, other = (stop_sleep_s(LWS_POD, rank) for rank in range(2))
    assert other > first + found["drain_timeout_s"]
    assert other < LWS_POD["terminationGracePeriodSeconds"]


def test_inference_pool_selects_the_pods_of_the_deployment():
    path = DEPLOY / "kubernetes/inference-pool.yaml"
    pool, route = yaml.safe_load_all(path.read_text())
    labels = KUBERNETES["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert pool["spec"]["targetPorts"] == [{"number": ServerConfig.port}]
    assert labels["llm-d.ai/engine-type"] == "vllm"
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert (backend["kind"], backend["name"]) == (pool["kind"], pool["metadata"]["name"])


def test_ray_service_builds_an_existing_application():
    service = yaml.safe_load((DEPLOY / "kubernetes/rayservice.yaml").read_text())
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    module, _, function = application["import_path"].partition(":")
    source = (ROOT / "serve" / module.replace(".", "/")).with_suffix(".py").read_text()
    assert f"\ndef {function}(args: " in source
    flags = application["args"].copy()
    command = ["forge-jax", "serve", flags.pop("model")]
    assert flags.pop("deployment").keys() == {"autoscaling_config"}
    for name, value in flags.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    options(command)
    version = service["spec"]["rayClusterConfig"]["rayVersion"]
    pins = (ROOT / "tests/clients/requirements.txt").read_text().splitlines()
    assert f"ray=={version}" in pins


def test_endpoint_pickers_find_their_series(after_one_request):
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert f"vllm:{name}" in after_one_request.labels
    assert {"block_size", "num_gpu_blocks"} <= after_one_request.labels[
        "vllm:cache_config_info"
    ].keys()


# ---- the document --------------------------------------------------------------------------------


def test_documented_commands_exist():
    text = (ROOT / "docs/operations.md").read_text().replace("\\\n", "")
    commands = re.findall(r"^(forge-jax .*)$", text, re.MULTILINE)
    assert commands
    for command in commands:
        options(shlex.split(command))
    mentioned = set(re.findall(r"`(--[a-z-]+)", text))
    known = {flag for section in SECTIONS.values() for flag in (f.flag for f in flags(section))}
    of_commands = {"--build-arg", "--api-key", "--target"}  # which are not options of the engine
    assert mentioned - known == of_commands - known


def test_documented_series_and_files_exist(after_one_request):
    text = (ROOT / "docs/operations.md").read_text()
    for name in re.findall(r"`((?:vllm|forge):\w+)`", text):
        assert name in after_one_request.labels, name
    for name in re.findall(r"^\| `([\w./-]+)` \|", text, re.MULTILINE):
        if "/" in name or "." in name:
            assert (DEPLOY / name).exists(), name


def test_documentation_lists_the_fields_of_a_log_line():
    text = (ROOT / "docs/operations.md").read_text().partition("## Logs")[2].partition("## ")[0]
    names = {name for row in re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
             for name in re.findall(r"`(\w+)`", row)}  # fmt: skip
    assert names == {field.name for field in dataclasses.fields(RequestRecord)} | {"trace"}


# ---- systemd, Modal ------------------------------------------------------------------------------


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read_string((DEPLOY / "systemd/forge-jax.service").read_text().replace("\\\n", ""))
    return parser


def test_unit_runs_an_existing_command():
    found = options(shlex.split(unit()["Service"]["ExecStart"]))
    assert (found["host"], found["port"]) == ("127.0.0.1", ServerConfig.port)
    assert found["api_key_file"] == "${CREDENTIALS_DIRECTORY}/api-keys"
    assert unit()["Service"]["LoadCredential"].startswith("api-keys:")


def test_unit_may_load_the_kernels_it_builds():
    service = unit()["Service"]
    state = service["StateDirectory"]
    assert (
        service["DynamicUser"] == "yes" and f"XDG_CACHE_HOME=%S/{state}/" in service["Environment"]
    )
    assert service["ExecPaths"] == f"%S/private/{state}"  # otherwise it is mounted with noexec


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path):
    text = (DEPLOY / "systemd/forge-jax.service").read_text()
    copy = tmp_path / "forge-jax.service"
    copy.write_text(text.replace("/opt/forge-jax/bin/forge-jax", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "forge-jax" in line]
    assert (done.returncode, said) == (0, [])
    copy.write_text(copy.read_text().replace("Restart=", "Restrat="))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True)
    assert "Restrat" in done.stderr, "a mistake would be noticed"


def test_modal_runs_an_existing_command_on_its_open_port(monkeypatch):
    monkeypatch.setitem(sys.modules, "modal", Anything("modal"))
    path = DEPLOY / "modal/forge_jax_modal.py"
    spec = importlib.util.spec_from_file_location("forge_jax_modal", path)
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    found = options(recipe.COMMAND)
    assert (found["host"], found["port"], found["model"]) == ("0.0.0.0", recipe.PORT, recipe.MODEL)
    assert found["api_key_file"] == recipe.KEYS
    assert recipe.ROOT == ROOT


class Anything(types.ModuleType):
    """A stand-in for Modal: every attribute exists, and decorators do nothing."""

    def __getattr__(self, name: str) -> Anything:
        return Anything(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        decorated = args[0] if len(args) == 1 and isinstance(args[0], types.FunctionType) else self
        return decorated


# ---- the checks detect errors ------------------------------------------------------------------


def test_unknown_flag_is_detected(capsys):
    with pytest.raises(SystemExit):
        options([*entrypoint(), "forge-tiny", "--no-such-flag"])
    assert "--no-such-flag" in capsys.readouterr().err


def test_unknown_series_or_label_is_detected(after_one_request):
    with pytest.raises(AssertionError, match="there is no forge:made_up"):
        check_query(after_one_request, "rate(forge:made_up[5m])")
    with pytest.raises(AssertionError, match="has no label"):
        check_query(after_one_request, "sum by (color) (forge:kv_blocks)")
