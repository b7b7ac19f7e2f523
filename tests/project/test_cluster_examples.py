"""The examples for Slurm, Kubernetes, Prometheus and Grafana fit our commands and metrics."""

import argparse
import json
import os
import re
import subprocess
import time
from importlib import import_module
from pathlib import Path

import pytest

from rmetric.cli import COMMANDS
from rmetric.telemetry.export import METRICS

yaml = pytest.importorskip("yaml")
FOLDER = Path(__file__).resolve().parents[2] / "examples"
GRAFANA = FOLDER / "grafana"


def parsed(words):
    """The words of one of our commands as its own parser reads them; SystemExit if it does not."""
    program, command, *arguments = words
    assert (program, command in COMMANDS) == ("rmetric", True)
    parser = argparse.ArgumentParser()
    import_module(f"rmetric.cli.{command}").add_arguments(parser)
    return parser.parse_args(arguments)


def exported():
    """Names of all metrics, as they are scraped."""
    pytest.importorskip("prometheus_client")
    pytest.importorskip("torch")
    from rmetric.monitor.actions import Prometheus

    names = {f"rmetric_gpu_{metric.name}{'_total' * metric.counter}" for metric in METRICS}
    action = Prometheus(textfile="unused.prom")
    families = {family.name: family.type for family in action.collect()}
    return names | {f"{name}{'_total' * (kind == 'counter')}" for name, kind in families.items()}


def queries():
    board = json.loads((GRAFANA / "dashboard.json").read_text())
    yield from (target["expr"] for panel in board["panels"] for target in panel.get("targets", ()))
    variables = board["templating"]["list"]
    yield from (variable["query"]["query"] for variable in variables if variable["type"] == "query")
    yield from (rule["expr"] for rule in rules())


def rules():
    groups = yaml.safe_load((GRAFANA / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_each_metric_of_the_dashboard_and_the_rules_is_exported():
    used = set(re.findall(r"\brmetric_\w+", " ".join(queries())))
    assert used - exported() == set()
    assert len(used) >= 15


def test_each_rule_has_a_made_case_in_which_it_fires():
    names = {rule["alert"] for rule in rules()}
    (cases,) = yaml.safe_load((GRAFANA / "rules_test.yml").read_text())["tests"]
    fires = {case["alertname"] for case in cases["alert_rule_test"] if case.get("exp_alerts")}
    assert fires == names
    config = yaml.safe_load((GRAFANA / "prometheus.yml").read_text())
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    assert set(re.findall(r'job="([^"]+)"', " ".join(queries()))) <= jobs


def test_the_manifests_call_commands_with_options_that_exist():
    job = yaml.safe_load((FOLDER / "kubernetes/job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (telemetry,), (train,) = pod["initContainers"], pod["containers"]
    assert parsed(telemetry["command"]).http == 9401
    options = parsed([*train["command"], *train["args"]])
    assert options.command[0] == "torchrun"
    assert options.stop_seconds < pod["terminationGracePeriodSeconds"]
    assert job["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [2, 5, 6]
    jobset = yaml.safe_load((FOLDER / "kubernetes/jobset.yaml").read_text())
    (workers,) = jobset["spec"]["replicatedJobs"]
    (train,) = workers["template"]["spec"]["template"]["spec"]["containers"]
    assert parsed([*train["command"], *train["args"]]).rescue
    master = f"{jobset['metadata']['name']}-{workers['name']}-0-0.{jobset['metadata']['name']}"
    assert f"--master-addr={master}" in train["args"]


@pytest.fixture
def tools(tmp_path):
    """Stand-ins for rmetric and Slurm's commands, which note how they are called."""

    def make(name, body):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        note = f'printf "%s\\n" {name} "$@" > {tmp_path}/{name}.args'
        path.write_text(f"#!/bin/bash\n{note}\n{body}\n")
        path.chmod(0o755)

    def called(name):
        path = tmp_path / f"{name}.args"
        return path.read_text().splitlines() if path.exists() else None

    make("scontrol", '[ "$1" = show ] && printf "n1\\nn2\\n"')
    make("logger", "")
    return make, called, os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}


@pytest.mark.parametrize("code", [0, 1, 3, 2, 127])
def test_slurms_prolog_drains_a_node_only_for_its_gpus(tools, code):
    make, called, environment = tools
    make("rmetric", f"echo 'GPU 1: fatal, reset the GPU'; exit {code}")
    done = subprocess.run(
        ["bash", str(FOLDER / "slurm/check_gpus.sh")],
        env=environment | {"SLURMD_NODENAME": "n1", "SLURM_SCRIPT_CONTEXT": "prolog_slurmd"},
    )
    assert parsed(called("rmetric")).once
    assert done.returncode == (code in (1, 3))
    assert (called("logger") is not None) == (code in (2, 127))
    reason = f"Reason=rmetric prolog_slurmd: exit code {code} GPU 1: fatal, reset the GPU"
    drains = ["scontrol", "update", "NodeName=n1", "State=DRAIN", reason]
    assert called("scontrol") == (drains if code in (1, 3) else None)


@pytest.mark.parametrize(("ends", "code"), [("sleep 60 & wait", 143), ("exit 6", 6)])
def test_slurms_job_saves_and_is_queued_again_before_its_time_is_over(tools, tmp_path, ends, code):
    make, called, environment = tools
    make("rmetric", f"trap 'sleep 0.3; exit 143' TERM; touch {tmp_path}/begun; {ends}")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_SUBMIT_DIR": str(tmp_path)}
    script = FOLDER / "slurm/train.sbatch"
    with subprocess.Popen(["bash", str(script)], env=environment | job) as batch:
        while not (tmp_path / "begun").exists():
            time.sleep(0.02)
        if code == 143:
            time.sleep(0.2)
            batch.terminate()  # as --signal=B:TERM does
        assert batch.wait(20) == code
    options = parsed(called("rmetric"))
    assert options.nodes == {"n1": tuple(range(8)), "n2": tuple(range(8))}
    assert "--nodelist={node}" in options.prefix
    assert options.stop_seconds < int(re.search(r"B:TERM@(\d+)", script.read_text())[1])
    assert called("scontrol")[1:2] == ["requeue" if code == 143 else "show"]
