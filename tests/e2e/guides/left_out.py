"""What tests leave out of the pages' commands, and why; the rest is run.

By page, and by how a command begins. What needs another machine than this one is checked as far as it can be: scripts
and targets of `make` exist, and `test_commands_on_pages.py` holds every `tidegate …` against the command's own parser.
"""

from __future__ import annotations

from typing import Final

_IMAGES: Final = "builds images out of Debian packages: `make image-test`"
_CLUSTER: Final = "needs a cluster: `make e2e-kind`"
_INSTALLS: Final = "installs from a registry"
_A_MACHINE: Final = "done as root on a machine of its own by tests/e2e/security/test_forty_devices.py"

LEFT_OUT: Final[dict[str, dict[str, str]]] = {
    "docs/accelerators.md": {
        "make openvino": _INSTALLS,
        ".venv-openvino/bin/python": "needs what `make openvino` installs",
    },
    "docs/compiled.md": {
        "make wheel-compiled": "compiles for minutes: `make test-compiled`",
        "make test-compiled": "compiles for minutes; a target of its own",
        "pip install": _INSTALLS,
    },
    "docs/configuring-devices.md": {
        "kubectl create": _CLUSTER,
        "kubectl apply": "needs a cluster; tests/contract/kubernetes holds the files against Kubernetes' schemas",
    },
    "docs/containers.md": {
        "deploy/containers/build.sh": _IMAGES,
        "PIP_EXTRA_INDEX_URL=": _IMAGES,
        "podman run": "needs an image: `make image-test`",
        "sudo env": "needs root, and writes into the checkout: tests/e2e/test_compose.py runs it on a copy",
        "cp -r .tidegate/models deploy/compose/state/models": "writes into the checkout, as root",
        "docker compose": "needs images: tests/e2e/test_compose.py runs the services' commands as processes",
        "curl --cacert": "asks what `docker compose up` serves",
        "PYTHON=/usr/bin/python3 deploy/containers/wheels.sh": _INSTALLS,
        "deploy/debian/build.sh": "packs what wheels.sh installs: `make image-test`, tests/e2e/test_debian_package.py",
        "sudo apt install": "needs root, and changes the machine: `make image-test`",
    },
    "docs/edge-device.md": {
        "python3 -m venv /opt/tidegate": _A_MACHINE,
        "cp deploy/systemd/tidegate.sysusers": _A_MACHINE,
        "install -d": _A_MACHINE,
        "/opt/tidegate/bin/tidegate edge join": _A_MACHINE,
        "cp deploy/systemd/tidegate-edge.service": _A_MACHINE,
        "runuser -u tidegate -- sh -c 'echo update": "needs systemd",
        "pip install --dry-run": "asks a registry: tests/tidegate/test_edge_wheels.py has the same list",
    },
    "docs/generating-models.md": {
        "python -m venv /opt/vllm": _INSTALLS,
        "pip install": _INSTALLS,
    },
    "docs/generation.md": {
        "from langchain_openai": "LangChain is not in the tests' environment: `make clients`",
        "tidegate model calibrate smollm2": "asks a real language model for minutes",
        "aiperf": "is not in the tests' environment",
    },
    "docs/kubernetes.md": {
        "helm install": _CLUSTER,
        "kubectl": _CLUSTER,
        "helm template": "needs Helm's program; tests/contract/kubernetes renders every example with its engine",
    },
    "docs/layer-split.md": {
        "tidegate model split-layers minilm\n": "measures four cuts for a minute; the page's last section makes one",
    },
    "docs/loading-models.md": {
        "client.load_model": "a line of the reader's own program: tests/e2e/test_stack_clients.py",
    },
}
