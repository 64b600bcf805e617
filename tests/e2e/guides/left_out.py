"""What tests leave out of the pages' commands, and why; the rest is run.

By page, and by how a command begins. What needs another machine than this one is checked as far as it can be: scripts
and targets of `make` exist, and `test_commands_on_pages.py` holds every `tidegate …` against the command's own parser.
"""

from __future__ import annotations

from typing import Final

_IMAGES: Final = "builds images out of Debian packages: `make image-test`"
_CLUSTER: Final = "needs a cluster: `make e2e-kind`"
_INSTALLS: Final = "installs from a registry"
_GENERATES: Final = "asks a real language model: tests/e2e/generate"
_TINY_LLAMA: Final = "takes a minute of a core: tests/tidegate/tools/build/test_generative_*.py run it on a tiny Llama"
_OWN: Final = "a reader's own model: the tutorial and the guide to models are followed"
_ROLLOUTS: Final = "the guide to rollouts is followed"
_RELEASES: Final = "packs for minutes: tests/tidegate/tools/release has its parts"
_A_MACHINE: Final = "done as root on a machine of its own by tests/e2e/security/test_forty_devices.py"

LEFT_OUT: Final[dict[str, dict[str, str]]] = {
    "README.md": {
        "make run": "sets up an environment; what it starts is `tidegate up`",
        "from openai import OpenAI": _GENERATES,
        "curl -N http://127.0.0.1:8000/v1/chat/completions": _GENERATES,
        "tidegate model quantize encoder.onnx": _OWN,
        "tidegate model add encoder": _OWN,
        "tidegate model rollout encoder": _ROLLOUTS,
        "tidegate model status encoder": _ROLLOUTS,
    },
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
    "docs/models.md": {
        "pip install": _INSTALLS,
        "tidegate model build smollm2": "builds for minutes",
        "tidegate model add talker": _TINY_LLAMA,
        "tidegate model verify smollm2": _TINY_LLAMA,
        "tidegate model quantize talker": _TINY_LLAMA,
    },
    "docs/operator.md": {
        "helm": _CLUSTER,
        "kubectl": _CLUSTER,
        "tidegate operator render site.yaml | kubectl": _CLUSTER,
    },
    "docs/pipelines.md": {
        "curl --data-binary": "sent to a device and to a pool by tests/e2e/pipelines/test_image_files.py",
    },
    "docs/placement.md": {
        "tidegate gateway --config gateway.yaml": "the fleet's own gateway runs",
        "python -m tests.bench.frontier": "a bench",
    },
    "docs/pool.md": {"pip install": _INSTALLS},
    "docs/python-client.md": {"pip install": _INSTALLS},
    "docs/ray.md": {
        "pip install": _INSTALLS,
        "ray start": "tests/e2e/ray_serve/test_ray_serve.py starts a Ray where one is installed",
        "serve deploy": "tests/e2e/ray_serve/test_ray_serve.py deploys the same file",
        "export RAY_gcs_rpc_server": "of a cluster's nodes",
        "RAY_REDIS_ADDRESS=redis:6379 ray start": "of a cluster's head, under a supervisor",
        "tidegate status": "asks what `serve deploy` serves",
        "tidegate ray-scale": "tests/e2e/ray_serve/test_ray_serve.py, and tests/tidegate/tools/test_ray_scale_cli.py",
    },
    "docs/releasing.md": {
        "make dist": _RELEASES,
        "tidegate keys signing create operator": _RELEASES,
        "tidegate release sign": _RELEASES,
        "tidegate release verify": _RELEASES,
        "pip install": _INSTALLS,
        "PIP_EXTRA_INDEX_URL": _INSTALLS,
    },
    "docs/testing-with-links.md": {
        "pip install": _INSTALLS,
        "def test_": "tests/tidegate/testing/test_pytest_plugin.py runs it",
        "tidegate up --link": "a whole system behind links: tests/e2e/test_stack_links.py",
    },
    "docs/upstreams.md": {
        "llama-server": "another maker's: tests/e2e/generate/test_real_upstream.py runs one where it is installed",
        "tidegate status": "asks the gateway before that server",
    },
}
