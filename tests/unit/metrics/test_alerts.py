"""Alerts and dashboard name only metrics and labels that there are, and promtool runs the rules."""

import json
import re
import shutil
import subprocess

import pytest
import yaml
from helpers import ROOT

from unicron.metric_definitions import FAMILIES, HISTOGRAM

FOLDER = ROOT / "deploy" / "unicron_deploy" / "prometheus"
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "unicron.json").read_text())
PROMTOOL = shutil.which("promtool")

known = {name for name, family in FAMILIES.items() if family.kind != HISTOGRAM} | {
    f"{name}_{part}" for name, family in FAMILIES.items() if family.kind == HISTOGRAM for part in ("bucket", "sum")
}


def rules():
    return [rule for group in yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"] for rule in group["rules"]]


def expressions():
    shown = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [(rule["alert"], rule["expr"]) for rule in rules()] + shown


@pytest.mark.parametrize(("title", "text"), expressions())
def test_each_expression_names_metrics_and_labels_that_there_are(title, text):
    named = set(re.findall(r"\bunicron_\w+", text))
    assert named <= known, title
    assert named or "up{" in text or "process_cpu_seconds_total" in text
    for name, matchers in re.findall(r"\b(unicron_\w+)\{([^}]*)\}", text):
        assert set(re.findall(r"(\w+)(?:=~?|!=)", matchers)) <= set(FAMILIES[name].labels), title
    for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", text):
        wanted = {label.strip() for label in labels.split(",")} - {"le"}
        for name in named:
            family = FAMILIES[name.removesuffix("_bucket")]
            assert wanted <= set(family.labels), f"{title}: {name}"


def test_each_alert_says_how_bad_it_is_and_what_to_do_and_is_tried():
    tried = (FOLDER / "rules.test.yml").read_text()
    for rule in rules():
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert set(rule["annotations"]) == {"summary", "description"}
        assert f"alertname: {rule['alert']}\n" in tried, f"{rule['alert']} fires in no test"


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool; Debian's package prometheus has it")
@pytest.mark.parametrize("words", ["check rules rules.yml", "test rules rules.test.yml", "check config prometheus.yml"])
def test_promtool_finds_nothing_wrong(words):
    done = subprocess.run([PROMTOOL, *words.split()], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
