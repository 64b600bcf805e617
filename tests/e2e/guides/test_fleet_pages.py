"""Guides that ask a running fleet: each command is typed to one that `tidegate up --ship operator.pub` has started.

The fleet's model is the digits, its device `edge-1`: those words stand for the pages' own. What a page does to the
fleet it undoes, so that the pages may be followed in any order.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.pages.text import read
from tests.e2e.guides.guide import Page
from tests.e2e.guides.reader import NEEDS_A_NETWORK, Reader
from tests.e2e.guides.terminal import Typed
from tests.e2e.stack import WARM_S
from tidegate.models.repository import Repository

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    NEEDS_A_NETWORK,
]
DEVICE = "127.0.0.1:8007"

MADE = """
import json
import numpy as np, onnxruntime
from sklearn.datasets import load_digits

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
np.savez("test.npz", image=images[-200:], labels=labels[-200:])
run = onnxruntime.InferenceSession("digits-int8.onnx").run
said = np.concatenate([run(["probabilities"], {"image": one[None]})[0] for one in images[:400]])
np.savez("cases.npz", image=images[:20], probabilities=said[:20])
best = np.sort(said)
unsure = images[np.argmin(best[:, -1] - best[:, -2])]
tensor = {"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8], "data": unsure.ravel().tolist()}
json.dump({"inputs": [tensor]}, open("request.json", "w"))
"""
ASK = """
import sys, time
import numpy as np
from tidegate import Tidegate

images = np.load("test.npz")["image"]
with Tidegate("http://127.0.0.1:8000", budget_s=2.0) as client:
    for number in range(int(sys.argv[1])):
        answer = client.infer("digits", {"image": images[number % 200 : number % 200 + 1]})
        time.sleep(0.02)
print(answer.served.request_id)
"""


class Fleet:
    """A reader, and what a test may ask about the fleet that was started in the first terminal."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._first = reader.terminal()
        self._first.type(f"export TIDEGATE_POOL_WARMUP_BUDGET_S={WARM_S}")
        self.up = self._first.begin("tidegate up --ship operator.pub --demo digits")
        reader.until(lambda: "requests, as they are served" in self.up.printed, "tidegate up")

    def interrupt(self, command: str, when: Callable[[Typed], bool]) -> str:
        """Type it in another terminal, press Ctrl-C there when this has happened, and return what it printed."""
        other = self.reader.terminal()
        begun = other.begin(command)
        try:
            self.reader.until(lambda: when(begun), command)
        finally:
            other.close()
        return begun.printed

    def close(self) -> None:
        self._first.close()


@pytest.fixture(scope="module")
def fleet(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet-pages")
    reader = Reader(folder)
    try:
        shutil.copytree(digits, folder / ".tidegate" / "models")
        repository = Repository(digits)
        version = repository.folder(repository.manifest("digits"))
        shutil.copy(version / "int8.onnx", folder / "digits-int8.onnx")
        shutil.copy(version / "fp32.pt2", folder / "digits.pt2")
        (folder / "made.py").write_text(MADE)
        (folder / "ask.py").write_text(ASK)
        reader.run("python made.py")
        reader.run(Page("docs/rollout.md").take("tidegate keys signing create operator "))
        made = Fleet(reader)
        try:
            yield made
        finally:
            made.close()
    finally:
        reader.close()


def test_the_page_of_rollouts_goes_as_it_says(fleet: Fleet) -> None:
    reader = fleet.reader
    with Page("docs/rollout.md") as page:
        page.take("tidegate keys signing create operator ")  # before the fleet was started
        assert "`tidegate up --ship operator.pub`" in read("docs/rollout.md")
        assert "added digits, version 3" in reader.run(page.take("tidegate model add digits --version 3"))

        def is_tried() -> bool:
            return "active" in reader.run("tidegate model status digits")

        tonight = page.take("tidegate model rollout digits --key operator.key --golden")
        said = fleet.interrupt(tonight, lambda _: is_tried())
        assert "the rollout goes on without you: `tidegate model status digits" in said

        ours = {"minilm 2": "digits 3"}
        name = {"minilm": "digits"}
        split = reader.run(page.take("tidegate model split minilm 2 --share 5%", ours))
        assert re.search(r"3 +│ 5 %, candidate", split), split
        split = reader.run(page.take("tidegate model split minilm 2 --share 20%", ours))
        assert re.search(r"3 +│ 20 % and acme, candidate", split), split
        assert "20 % and acme" in reader.run(page.take("tidegate model status minilm", name))
        promote = page.take("tidegate model promote minilm", {"minilm ": "digits "})
        assert "or: tidegate model return minilm" in promote
        reader.run("tidegate model return digits")
        reader.run("tidegate model split digits 3 --share 5%")
        assert "requests that name no version get digits 3" in reader.run(promote)
        assert "get digits 2" in reader.run("tidegate model abort digits")

        reader.run(page.take("tidegate keys signing create operator-2027"))
        fleet.interrupt(page.take("tidegate model rollout digits --key operator.key --key"), lambda _: is_tried())
        assert "get digits 2" in reader.run("tidegate model abort digits")

        reader.run(page.take("for name in a b c d"))
        assert "version 2, 2 of 3 keys" in reader.run(page.take("tidegate keys signing rotate"))
        fleet.interrupt(page.take("tidegate model rollout digits --key a.key"), lambda _: is_tried())
        assert "get digits 2" in reader.run("tidegate model abort digits")
        reader.run(page.take("tidegate keys signing draft"))
        reader.run(page.take("cp root-3.json"))
        reader.run(page.take("tidegate keys signing sign root-3.json"))
        reader.run(page.take("tidegate keys signing sign root-3.from-c.json"))
        assert "version 3, 2 of 3 keys" in reader.run(page.take("tidegate keys signing merge"))


def test_the_page_of_recordings_goes_as_it_says(fleet: Fleet) -> None:
    reader = fleet.reader
    device = {"kiosk-1": "edge-1"}
    asked = reader.run("python ask.py 30").split()[-1]
    with Page("docs/recording.md") as page:
        assert f"answered as {asked}" in reader.run(page.take("tidegate explain 3fa09c", {"3fa09c-1042": asked}))
        late = page.take("tidegate explain --late", device)
        assert "remembers no request of that kind" in reader.run(late)
        assert "digits" in reader.run(page.take("tidegate explain --slowest 10", {"minilm": "digits"}))
        record = page.take("tidegate record")
        said = fleet.interrupt(record, lambda _: bool(reader.run("python ask.py 150")))
        assert "monday.tgz" in said and "monday.tgz: 0 requests" not in said
        for _ in range(5):
            replay = page.take("tidegate simulate --replay")
            replay = replay.replace("kiosk-1", "edge-1")
            assert "recorded" in reader.run(replay), replay


def test_the_pages_of_placement_and_of_metrics_go_as_they_say(fleet: Fleet) -> None:
    reader = fleet.reader
    with Page("docs/placement.md"):
        reader.run("python ask.py 5")
        assert "`tidegate explain '#3'`" in read("docs/placement.md")
        assert ", because " in reader.run("tidegate explain '#3'")
    with Page("docs/observability.md") as page:
        assert reader.run(page.take("tidegate log-level ")).strip() == "info"
        module = page.take("tidegate log-level debug --module")
        assert "gateway.targets.directory: debug" in reader.run(module)
        reader.run(module.replace(" debug ", " default "))
        pid = re.search(r"(?m)^gateway .* (\d+) *$", fleet.up.printed)
        assert pid is not None, fleet.up.printed
        everything = page.take("kill -s RTMIN PID", {"PID": pid[1]})
        reader.run(everything)
        reader.run(everything)


def test_the_page_of_devices_that_are_offline_goes_as_it_says(fleet: Fleet) -> None:
    reader = fleet.reader
    device = {"device:9000": DEVICE}
    config = {"edge.yaml": ".tidegate/run/edge-1.yaml"}
    with Page("docs/offline.md") as page:
        said = reader.run(page.take("curl -i http://device:9000/v2/models/digits/infer", device))
        assert "202 Accepted" in said, said
        ticket = re.search(r"Location: /v2/tickets/(\w+)", said)
        assert ticket is not None, said
        shown = page.take("curl http://device:9000/v2/tickets", device)
        shown = re.sub(r"tickets/\w+", f"tickets/{ticket[1]}", shown)
        reader.until(lambda: '"outputs"' in reader.run(shown), "the ticket's answer")
        assert "tickets: 1 done" in reader.run(page.take("tidegate edge --config edge.yaml store list", config))
        shown = page.take("tidegate edge --config edge.yaml store show", config | {" ID": f" {ticket[1]}"})
        assert '"state": "done"' in reader.run(shown)
        for begins in ("store retry", "store drop"):  # of dead letters, of which there is none
            reader.run(page.take(f"tidegate edge --config edge.yaml {begins}", config | {" ID": " --all"}))
        assert '"records"' in reader.run(page.take("curl 'http://127.0.0.1:8003/v1/ingested"))


def test_the_page_of_security_goes_as_it_says(fleet: Fleet) -> None:
    reader = fleet.reader
    with Page("docs/security.md") as page:
        printed = reader.run(page.take("tidegate keys create"))
        key = re.search(r"^tg_\w+$", printed, re.M)
        assert key is not None, printed
        assert '"name"' in reader.run(f"KEY={key[0]}\n{page.take('curl -H')}")
        level = page.take("curl -X PUT", {"/run/tidegate/": "tidegate/"})  # of $XDG_RUNTIME_DIR
        assert '"level": "debug"' in reader.run(level)
        reader.run(level.replace('"debug"', '"info"'))
        assert "pki/ca.crt" in reader.run(page.take("tidegate pki init"))
        for _ in range(4):
            reader.run(page.take("tidegate pki issue"))
        assert "ed25519 " in reader.run(page.take("tidegate attest init", {"/etc/tidegate/": ""}))


def test_the_page_of_links_goes_as_it_says(fleet: Fleet) -> None:
    reader = fleet.reader
    with Page("docs/testing-with-links.md") as page:
        reader.run(f"python -c '{page.take('from tidegate.testing import LinkThread')}'")
        link = page.take("tidegate link")

        state = page.take("curl 127.0.0.1:7090/state")

        def is_asked(_: Typed) -> bool:
            if '"link"' not in reader.run(f"{state} || true"):
                return False  # it does not listen yet
            for begins in ("curl -X PUT", "curl -X DELETE", "curl -X PUT", "curl -X DELETE", "curl -X PUT"):
                reader.run(page.take(begins).replace("curl ", "curl -sSf "))
            assert "partition" in reader.run(page.take("curl '127.0.0.1:7090/events"))
            return True

        fleet.interrupt(link, is_asked)


def test_the_page_of_the_operator_goes_as_it_says(fleet: Fleet) -> None:
    reader = fleet.reader
    with Page("docs/operator.md") as page:
        (reader.folder / "site.yaml").write_text(read("deploy/operator/examples/site.yaml"))
        assert "kind: StatefulSet" in reader.run(page.take("tidegate operator render site.yaml"))
        (reader.folder / "device.yaml").write_text("max_queue_size: 32\n")
        # The guide to rollouts may have given the devices other keys before; this order is written, and not sent.
        order = page.take("tidegate fleet configure kiosks", {"kiosks": "all", " --out": " --replace --out"})
        reader.run(order)
        assert json.loads((reader.folder / "order.json").read_text())
        reader.run(page.take("tidegate keys create --tenant operator"))
        assert json.loads((reader.folder / "key.json").read_text())["key"].startswith("tg_")
