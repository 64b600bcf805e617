"""Model files that can run code are refused unless an operator named them; pickles inside archives always are."""

from __future__ import annotations

import contextlib
import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.models.trusted import trust_file
from tests.support.serving.host import minilm
from tidegate.engines.archive import refuse_code
from tidegate.engines.errors import EngineError
from tidegate.engines.program_grammar import UnsafeText, check_expression, check_guard
from tidegate.models.repository import RepositoryError
from tidegate.models.trust import TRUSTED, check_engine
from tidegate.models.trusted_digests import TrustedDigests


@pytest.mark.parametrize("engine", ["torchscript", "tensorrt"])
def test_an_engine_whose_files_are_programs_runs_only_where_it_is_named(engine: str) -> None:
    manifest = minilm()
    variant = replace(manifest.variants[0], engine=engine)

    with pytest.raises(RepositoryError, match="'allowed_engines'"):
        check_engine(manifest, variant, TRUSTED)

    check_engine(manifest, variant, (*TRUSTED, engine))  # type: ignore[arg-type]
    check_engine(manifest, manifest.variants[0], TRUSTED)


def archive(folder: Path, **configs: object) -> Path:
    path = folder / "m.pt2"
    with zipfile.ZipFile(path, "w") as file:
        for name, config in configs.items():
            folder_name = "constants" if name.endswith("constants") else "weights"
            file.writestr(f"m/data/{folder_name}/{name}_config.json", json.dumps(config))
    return path


PLAIN = {"config": {"w": {"path_name": "w", "use_pickle": False}}}
PICKLED = {"config": {"w": {"path_name": "w", "use_pickle": True}}}
UNSAID = {"config": {"w": {"path_name": "w"}}}


def test_an_archive_of_plain_tensors_passes(tmp_path: Path) -> None:
    refuse_code(archive(tmp_path, model_weights=PLAIN, model_constants={"config": {}}))


@pytest.mark.parametrize(("configs", "words"), [
    ({"model_weights": PICKLED}, "stored as a pickle"),
    ({"model_weights": PLAIN, "model_constants": PICKLED}, "stored as a pickle"),
    ({"model_weights": UNSAID}, "stored as a pickle"),
    ({"model_weights": []}, "no list"),
    ({}, "older form"),
])  # fmt: skip
def test_an_archive_with_a_pickle_is_refused(tmp_path: Path, configs: dict[str, object], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        refuse_code(archive(tmp_path, **configs))


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    path.write_bytes(b"\x80\x04.")
    with pytest.raises(EngineError, match="no exported program"):
        refuse_code(path)


class _Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["EVIL"],)


@pytest.mark.slow
def test_example_inputs_that_are_a_pickle_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from tidegate.engines.engine import load_engine

    class Double(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return x * 2

    good, bad, mark = tmp_path / "good.pt2", tmp_path / "bad.pt2", tmp_path / "mark"
    monkeypatch.setenv("EVIL", str(mark))
    torch.export.save(torch.export.export(Double(), (torch.ones(2),)), good)
    pickled = io.BytesIO()
    torch.save(_Evil(), pickled)
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(bad, "w") as target:
        for one in source.infolist():
            examples = one.filename.endswith(".pt")
            target.writestr(one.filename, pickled.getvalue() if examples else source.read(one))

    trust_file(bad, tmp_path)
    load_engine("torch-export", good, outputs=("y",), trusted=trust_file(good, tmp_path))
    with contextlib.suppress(EngineError):
        load_engine("torch-export", bad, outputs=("y",), trusted=TrustedDigests(tmp_path))

    assert not mark.exists()


def rewritten(source: Path, target: Path, change: Any, *, extra: dict[str, bytes] | None = None) -> Path:
    """The archive with its program changed by `change`, written with members that torch's reader takes."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for one in old.infolist():
            content = old.read(one)
            if one.filename.endswith("models/model.json"):
                program = json.loads(content)
                change(program)
                content = json.dumps(program).encode()
            new.writestr(one.filename, content)
        root = old.namelist()[0].partition("/")[0]
        for name, content in (extra or {}).items():
            new.writestr(f"{root}/{name}", content)
    return target


@pytest.fixture(scope="module")
def dynamic_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch = pytest.importorskip("torch")

    class Flat(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any, y: Any) -> Any:
            return (x[:, 1:] * 2).reshape(-1) ** 2, {"sum": y.sum()}

    path = tmp_path_factory.mktemp("program") / "flat.pt2"
    batch, width = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("width", min=3, max=512)
    shapes = {"x": {0: batch, 1: width}, "y": {0: batch, 1: width}}
    program = torch.export.export(Flat(), (torch.ones(2, 4), torch.ones(2, 4)), dynamic_shapes=shapes)
    torch.export.save(program, path)
    return path


def _expression(program: Any, code: str) -> None:
    program["graph_module"]["graph"]["tensor_values"]["x"]["sizes"][0]["as_expr"]["expr_str"] = code


def _guard(program: Any, code: str) -> None:
    program["guards_code"] = [code]


def _target(program: Any, name: str) -> None:
    program["graph_module"]["graph"]["nodes"][0]["target"] = name


@pytest.mark.slow
def test_a_program_with_dimensions_that_vary_passes_and_loads(dynamic_program: Path, tmp_path: Path) -> None:
    from tidegate.engines.torch import load_program

    assert load_program(dynamic_program, trust_file(dynamic_program, tmp_path)).module() is not None


@pytest.mark.slow
@pytest.mark.parametrize("change", [_expression, _guard])
def test_code_in_a_programs_json_is_not_run(dynamic_program: Path, tmp_path: Path, change: Any) -> None:
    """The file has no pickle: torch itself evaluates the text, when it loads the program or calls it."""
    import torch

    from tidegate.engines.engine import load_engine
    from tidegate.tools.build.errors import BuildError
    from tidegate.tools.build.inspect.exported_program import inspect_program

    mark = tmp_path / "mark"
    code = f"__import__('os').mkdir({str(mark)!r})"
    bad = rewritten(dynamic_program, tmp_path / "bad.pt2", lambda program: change(program, code))

    with pytest.raises(EngineError, match="refused, since it could run code"):
        load_engine("torch-export", bad, outputs=("a", "b"), trusted=trust_file(bad, tmp_path))
    with pytest.raises(BuildError, match="could run code"):
        inspect_program(bad, TrustedDigests(tmp_path))
    assert not mark.exists()

    with contextlib.suppress(Exception):
        torch.export.load(bad).module()(torch.ones(2, 4), torch.ones(2, 4))
    assert mark.exists(), "the file does run code where nothing checks it, so this test would notice"


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    "torch.hub.load", "torch.load", "torch.ops.load_library", "_operator.attrgetter", "_operator.call",
    "torch.ops.aten.from_file.default", "torch._C._pickle_load_obj", "math.__loader__.load_module",
    "torch.ops.aten.__class__.__init__", "#evil:op",
])  # fmt: skip
def test_a_node_may_only_call_tensor_operators(dynamic_program: Path, tmp_path: Path, name: str) -> None:
    bad = rewritten(dynamic_program, tmp_path / "bad.pt2", lambda program: _target(program, name))
    with pytest.raises(EngineError, match="the operator"):
        refuse_code(bad)


@pytest.mark.slow
@pytest.mark.parametrize("member", [
    "data/aotinductor/model/a.so", "data/constants/model.pt", "data/weights/model.pt", "code/evil.py",
])  # fmt: skip
def test_a_member_that_is_compiled_code_or_a_pickle_is_refused(
    dynamic_program: Path, tmp_path: Path, member: str
) -> None:
    bad = rewritten(dynamic_program, tmp_path / "bad.pt2", lambda program: None, extra={member: b"x"})
    with pytest.raises(EngineError, match="no member of a plain exported program"):
        refuse_code(bad)


@pytest.mark.parametrize("kind", ["opaque_obj_0", "custom_obj_0"])
def test_an_object_among_the_constants_is_refused_whatever_its_entry_says(tmp_path: Path, kind: str) -> None:
    constants = {"config": {"c": {"path_name": kind, "use_pickle": False}}}
    with pytest.raises(EngineError, match="stored as an object"):
        refuse_code(archive(tmp_path, model_weights=PLAIN, model_constants=constants))


@pytest.mark.parametrize("text", [
    "Symbol('s17', positive=True, integer=True)", "Max(Integer(1), Add(Symbol('s27', positive=True), Integer(-1)))",
    "s0 + 1", "2*s0*s1 - 3", "Pow(Symbol('s0'), Integer(2))", "FloorDiv(s0, 2)", "Float('1.5', precision=53)",
    "Equality(Mod(s0, Integer(8)), Integer(0))", "s0 < 4",
])  # fmt: skip
def test_an_expression_over_dimensions_passes(text: str) -> None:
    check_expression(text)


@pytest.mark.parametrize("text", [
    "__import__('os').system('x')", "exec('x')", "Symbol.__class__", "(lambda: 1)()", "[x for x in y]", "s0.real",
    "Symbol('s0', **{})", "Symbol('a b')", "Integer('__import__')", "f's0'", "9**9**9", "Pow(9, Pow(9, 9))",
    "LShift(1, 99999999999)", "Pow(Pow(Pow(Pow(9, 16), 16), 16), 16)", "s0 #", "s0\n", "", "eval", "S('x')",
    "Lambda(s0, s0)", "sympify('x')", "Function('f')", "(s0 := 1)", "Symbol(exec)", "9" * 40,
])  # fmt: skip
def test_anything_else_is_no_expression(text: str) -> None:
    with pytest.raises(UnsafeText):
        check_expression(text)


@pytest.mark.parametrize(("text", "passes"), [
    ("L['y'].size()[0] == L['x'].size()[0]", True),
    ("L['x'].stride()[1] % 8 == 0", True),
    ("L['x'][0]['k'] == 3", True),
    ("not (L['x'].numel() <= 2 and 3 < L['y'].dim())", True), ("L['x'].__class__", False),
    ("L['x'].share_memory_()", False),
    ("__import__('os')", False), ("L[exec]", False), ("L['x'].size(exec('x'))", False), ("1)\n  exec('x'", False),
    ("L['a\"b']", False), ("math.os", False),
])  # fmt: skip
def test_a_guard_speaks_of_dimensions_only(text: str, passes: bool) -> None:
    with contextlib.nullcontext() if passes else pytest.raises(UnsafeText):
        check_guard(text)


@pytest.mark.slow
def test_a_file_that_is_replaced_between_the_check_and_the_load_is_not_loaded(
    dynamic_program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidegate.engines import torch as engine

    mark, path = tmp_path / "mark", tmp_path / "m.pt2"
    code = f"__import__('os').mkdir({str(mark)!r})"
    bad = rewritten(dynamic_program, tmp_path / "bad.pt2", lambda program: _expression(program, code)).read_bytes()
    path.write_bytes(dynamic_program.read_bytes())

    def slowly(artefact: Path, **shown: Any) -> Any:
        checked = refuse_code(artefact, **shown)
        path.write_bytes(bad)
        return checked

    monkeypatch.setattr(engine, "refuse_code", slowly)
    assert engine.load_program(path, trust_file(dynamic_program, tmp_path)) is not None
    assert path.read_bytes() == bad
    assert not mark.exists()
