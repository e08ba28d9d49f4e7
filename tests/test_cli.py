"""The command line: what each command prints and returns, and that a command loads only what it needs."""

from __future__ import annotations

import csv
import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_fp4kv
from torch_fp4kv import cli, doctor
from torch_fp4kv.ops.call import AttentionCall


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["--help"])
    assert done.value.code == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_each_command_has_a_help_page(command, capsys):
    with pytest.raises(SystemExit) as done:
        cli.main([command, "--help"])
    assert done.value.code == 0
    assert f"torch-fp4kv {command}" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["nothing"], ["doctor", "--nothing"]], ids=["none", "unknown", "option"])
def test_a_wrong_call_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(argv)
    assert done.value.code == 2
    assert "usage: torch-fp4kv" in capsys.readouterr().err


def test_ctrl_c_is_status_130(monkeypatch, capsys):
    def examine():
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", examine)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_reader_that_leaves_is_no_traceback():
    code = "import sys, time; from torch_fp4kv import cli; time.sleep(0.2); sys.exit(cli.main(['doctor']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 1


@pytest.mark.parametrize(("name", "reason"), [("nvfp4", "no device nvfp4: "), ("cuda:99", "no device cuda:99: ")])
@pytest.mark.parametrize("command", ["demo", "eval"])
def test_a_device_that_is_not_here_is_refused_before_anything_runs(command, name, reason, capsys):
    with pytest.raises(SystemExit) as done:
        cli.main([command, "--device", name])
    assert done.value.code == 2
    assert reason in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == f"torch-fp4kv {torch_fp4kv.__version__}"


def test_the_package_runs_as_a_module(monkeypatch):
    monkeypatch.setattr(cli, "main", lambda: 3)
    with pytest.raises(SystemExit) as done:
        runpy.run_module("torch_fp4kv", run_name="__main__")
    assert done.value.code == 3


def test_doctor_prints_what_serves_and_why_the_others_do_not(capsys):
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for op in ("quantize", "dequantize", "append", "attention"):
        assert f"\n{op}" in printed
    assert "not triton (quantize, dequantize, append, attention): Triton kernels run on GPUs" in printed
    assert "round trip: right values" in printed
    assert printed.rstrip().endswith("usable")


def test_doctor_json_is_the_report(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["usable"] is True
    assert printed["versions"]["torch"] == torch.__version__
    cpu = printed["devices"][0]
    assert (cpu["device"], cpu["problem"]) == ("cpu", None)
    assert {backend["op"]: backend["serves"] for backend in cpu["backends"]} == dict.fromkeys(
        ("quantize", "dequantize", "append", "attention"), "torch"
    )
    assert printed["lowerings"].startswith("registered")


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (lambda *a, **k: (_ for _ in ()).throw(OSError("no such driver")), "OSError: no such driver"),
        (lambda *a, **k: torch.zeros(1, 4, 1, 64), "attention is off by"),
        (lambda *a, **k: torch.full((1, 4, 1, 64), torch.nan), "attention is off by nan"),
    ],
    ids=["raises", "wrong", "NaN"],
)
def test_doctor_returns_1_where_nothing_works(monkeypatch, capsys, broken, problem):
    good = doctor.ops.attention
    monkeypatch.setattr(
        doctor.ops, "attention", lambda *a, **k: good(*a, **k) if k.get("backend") == "torch" else broken(*a, **k)
    )
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert problem in printed
    assert "not usable" in printed


def test_doctor_s_round_trip_is_one_that_the_first_kernel_takes(monkeypatch):
    """On a GPU another would be tried in place of the one that the report names."""
    decode = pytest.importorskip("torch_fp4kv.ops.kernels.decode", exc_type=ImportError)
    reasons = []

    def attention(*arguments, **options):
        reasons.append(decode.unsupported(AttentionCall(*arguments, **options)))
        return torch_fp4kv.attention(*arguments, **options)

    monkeypatch.setattr(doctor.ops, "attention", attention)
    doctor._round_trip(torch.device("cpu"))
    assert reasons == [None]


def test_doctor_says_where_a_compiler_is_missing(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda name: name if name == "clang++" else None)
    assert "C++ compiler, and g++ is not on PATH" in doctor.compiler_missing(torch.device("cpu"))
    monkeypatch.setenv("CXX", "clang++")
    assert doctor.compiler_missing(torch.device("cpu")) is None
    monkeypatch.setenv("CXX", "none++")
    assert "none++ is not on PATH" in doctor.compiler_missing(torch.device("cpu"))


def test_doctor_notes_versions_outside_the_supported_ones():
    notes = doctor._notes({"torch": "2.10.1+cpu", "transformers": None, "triton": "3.6.0"})
    assert "torch 2.10.1+cpu is outside" in notes[0]
    assert "needs transformers" in notes[1]
    assert len(notes) == 2


def test_links_at_the_root(tmp_path):
    assert "no checkout" in doctor.links(tmp_path)
    for name in ("ops", "lowering"):
        (tmp_path / "torch_fp4kv" / name).mkdir(parents=True)
        (tmp_path / "torch_fp4kv" / name / "__init__.py").touch()
        (tmp_path / name).symlink_to(Path("torch_fp4kv") / name)
    (tmp_path / "pyproject.toml").touch()
    assert doctor.links(tmp_path) == "ok"
    (tmp_path / "ops").unlink()
    # What a checkout without symbolic links leaves: a file with the target's name.
    (tmp_path / "ops").write_text("torch_fp4kv/ops")
    assert "ops at the root is no link" in doctor.links(tmp_path)


def test_doctor_loads_neither_transformers_nor_triton_kernels_on_a_cpu():
    if torch.cuda.is_available():
        pytest.skip("on a GPU the round trip runs Triton kernels")
    code = (
        "import sys; from torch_fp4kv import cli; cli.main(['doctor', '--json']); "
        "print([m for m in sys.modules if m == 'transformers' or m.startswith('torch_fp4kv.ops.kernels.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.rstrip().endswith("[]"), done.stderr


@pytest.mark.slow
def test_bench_compile_starts_cold_and_then_from_the_cache(tmp_path, capsys):
    file = tmp_path / "compile.csv"
    given = ["--shape", "tiny", "--layers", "1", "--new-tokens", "6", "--csv", str(file)]
    assert cli.main(["bench", "compile", *given]) == 0
    cold, warm = list(csv.DictReader(file.open()))
    assert (cold["start"], cold["graphs_compiled"], cold["graphs_from_cache"]) == ("cold", "1", "0")
    assert (warm["start"], warm["graphs_compiled"], warm["graphs_from_cache"]) == ("warm", "0", "1")
    assert float(warm["first_step_s"]) < float(cold["first_step_s"])
    assert cold["model"] == "tiny" and cold["torch"] == torch.__version__
    assert "cold" in capsys.readouterr().out


def test_bench_compile_needs_a_model(monkeypatch, capsys):
    monkeypatch.setattr("torch_fp4kv.demo.packaged_model", lambda: None)
    assert cli.main(["bench", "compile"]) == 1
    assert "no model" in capsys.readouterr().err
