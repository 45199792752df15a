"""Write again what is made from the chart and into it: `python charts/generate.py` (needs helm on PATH).

The chart's copies of the CRD, the alert rules and the dashboard; its README and docs/values.md;
deploy/operator.yaml. With `--check`, writes nothing and ends with 1 where a file differs.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from charts import values_docs  # noqa: E402
from deploy.grafana import dashboard  # noqa: E402

CHART = ROOT / "charts" / "springtide"
NAMESPACE = "springtide-system"

_README = """\
# The springtide chart

Installs the Springtide operator, which runs elastic PyTorch training jobs
(`TrainingJob`, `springtide.dev/v1alpha1`).
Helm 3.10 or newer, Kubernetes 1.29 or newer.

```console
$ helm install springtide charts/springtide --namespace springtide-system --create-namespace
$ helm test springtide --namespace springtide-system
```

`docs/install.md` leads through clusters of several kinds, upgrades and removal.
`docs/security.md` says what each right of the operator is for.

## Values

Generated from `values.yaml`; unknown keys are refused.

"""

_VALUES = """\
# Values of the chart

Generated from `charts/springtide/values.yaml` by `python charts/generate.py`.
Unknown keys are refused.

"""

_OPERATOR = f"""\
# The operator without Helm: kubectl apply -f deploy/crd -f deploy/operator.yaml
# One replica, which restarts in place; to have another stand by:
# kubectl -n {NAMESPACE} scale deployment/springtide-operator --replicas=2
# For images from elsewhere use the chart, or deploy/kustomization.yaml.
# Rendered from charts/springtide by `python charts/generate.py`; change the chart, not this file.
apiVersion: v1
kind: Namespace
metadata:
  name: {NAMESPACE}
  labels:
    app.kubernetes.io/name: springtide
    pod-security.kubernetes.io/enforce: restricted
"""


def operator_manifest() -> str:
    """The chart's objects without the CRD, the FlowSchema (which belongs to the whole cluster), Helm's labels
    and the test. Raises RuntimeError.
    """
    helm = shutil.which("helm")
    if helm is None:
        raise RuntimeError("helm is not on PATH: make tools brings it")
    command = [helm, "template", "springtide", str(CHART), "--namespace", NAMESPACE]
    values = "crds.enabled=false,replicas=1,helmTest.enabled=false,flowSchema.enabled=false"
    done = subprocess.run(
        [*command, "--set", values],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"helm template failed: {done.stderr.strip()}")
    return _OPERATOR + "\n".join(line for line in done.stdout.splitlines() if not _helms_own(line)) + "\n"


def files() -> dict[Path, str]:
    """Every generated file and its text."""
    deploy = ROOT / "deploy"
    board = dashboard.to_json()
    values = values_docs.markdown(values_docs.load(CHART))
    return {
        deploy / "grafana" / "springtide.json": board,
        CHART / "files" / "dashboard.json": board,
        CHART / "files" / "alerts.yaml": (deploy / "prometheus" / "alerts.yaml").read_text(),
        **{CHART / "files" / path.name: path.read_text() for path in sorted((deploy / "crd").glob("*.yaml"))},
        CHART / "README.md": _README + values,
        ROOT / "docs" / "values.md": _VALUES + values,
    }


def main(arguments: list[str]) -> int:
    """Write or check; the exit code."""
    check = arguments == ["--check"]
    differing = []
    for path, text in files().items():
        if not path.exists() or path.read_text() != text:
            differing.append(path)
            if not check:
                path.write_text(text)
    # After the others: helm reads the copies.
    target, text = ROOT / "deploy" / "operator.yaml", operator_manifest()
    if not target.exists() or target.read_text() != text:
        differing.append(target)
        if not check:
            target.write_text(text)
    for path in differing:
        print(f"{'differs' if check else 'written'}: {path.relative_to(ROOT)}")
    return 1 if check and differing else 0


def _helms_own(line: str) -> bool:
    words = line.strip()
    return words.startswith(("helm.sh/chart:", "app.kubernetes.io/managed-by: Helm", "# Source: springtide/"))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (RuntimeError, ValueError) as error:
        sys.exit(f"charts/generate.py: {error}")
