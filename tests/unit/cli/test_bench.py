"""dear-train bench: its flags, and its files, in this process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dearmpi.cli.main import main
from dearmpi.plan.data.workload import read_workload
from dearmpi.plan.model.profile import profile_workload

QUICK = ["--num-warmup-batches", "1", "--num-batches-per-iter", "2", "--num-iters", "1"]
SMALL = [
    *("--workload", "equal:0.01:2", "--feed-forward-s", "0.001", "--backprop-s", "0.002"),
    *QUICK,
]


def test_a_bench_writes_its_table_and_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, picture = tmp_path / "bench.json", tmp_path / "bench.svg"
    arguments = ["--methods", "dear,wfbp", "--json", str(report), "--picture", str(picture)]
    assert main(["bench", *SMALL, *arguments]) == 0
    text = capsys.readouterr().out
    assert "dear         Iter #0: " in text and "bound of DeAR" in text
    found = json.loads(report.read_text())
    assert [row["label"] for row in found["rows"]] == ["dear", "wfbp"]
    assert f"torch threads per rank: {found['torch_threads']} (" in text
    assert picture.read_text().startswith("<svg")


def test_a_factory_beside_the_command_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_own_method.py").write_text(
        "from dearmpi.bench.method import Entrant\n"
        "def plain(setup):\n"
        "    optimizer = setup.make_optimizer(setup.model.parameters())\n"
        "    return Entrant(setup.model, optimizer)\n"
    )
    monkeypatch.chdir(tmp_path)
    arguments = ["--methods", "dear", "--method", "my_own_method:plain"]
    assert main(["bench", *SMALL, *arguments]) == 0
    assert "my_own_method:plain Iter #0: " in capsys.readouterr().out


@pytest.mark.parametrize("peer", ["horovod", "deepspeed"])
def test_a_peer_that_is_not_installed_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], peer: str
) -> None:
    monkeypatch.setitem(sys.modules, peer, None)
    monkeypatch.delitem(sys.modules, "horovod.torch", raising=False)
    assert main(["bench", *SMALL, "--methods", f"dear,{peer}"]) == 1
    text = capsys.readouterr().out
    assert f"{peer}: ImportError: {peer} cannot be imported on any rank (" in text
    early = text.index(f"{peer} is out: ImportError: {peer} cannot be imported on any rank (")
    assert early < text.index("compute time: ")  # by which nothing has been measured
    assert "pip install --no-build-isolation" in text and "dear         Iter #0: " in text


def test_nothing_measured_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--methods", "", "--method", "not_installed_anywhere:make"]
    assert main(["bench", *SMALL, *arguments]) == 1
    assert "ModuleNotFoundError" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import not_installed_anywhere\n", "ModuleNotFoundError: No module named 'not_installed"),
        ("raise SystemExit('no licence')\n", "SystemExit: no licence"),
        ("def others(setup): ...\n", "AttributeError: module 'bad_method' has no attribute 'make'"),
    ],
)
def test_a_method_that_cannot_be_imported_is_told_before_anything_is_measured(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    body: str,
    words: str,
) -> None:
    (tmp_path / "bad_method.py").write_text(body)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "bad_method", raising=False)
    report = tmp_path / "bench.json"
    arguments = ["--methods", "dear", "--method", "bad_method:make", "--json", str(report)]
    assert main(["bench", *SMALL, *arguments]) == 1
    text = capsys.readouterr().out
    assert text.index(f"bad_method:make is out: {words}") < text.index("compute time: ")
    assert f"\nbad_method:make: {words}" in text  # below the table as well
    dear, bad = json.loads(report.read_text())["rows"]
    assert dear["blocks"] and not dear["error"] and words in bad["error"]


def test_a_method_that_fails_is_a_failure_though_others_were_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "failing_method.py").write_text("def make(setup):\n    raise OSError('no luck')\n")
    monkeypatch.chdir(tmp_path)
    arguments = ["--methods", "dear", "--method", "failing_method:make"]
    assert main(["bench", *SMALL, *arguments]) == 1
    text = capsys.readouterr().out
    assert "failing_method:make: OSError: no luck" in text and " is out: " not in text
    assert "dear         Iter #0: " in text and "bound of DeAR" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--collectives", "--ratio", "1"], ["--ratio", "--collectives"]),
        (["--sizes-mb", "1"], ["--sizes-mb", "--collectives"]),
        ([*SMALL, "--comm-dtype", "bf16", "--methods", "fsdp2"], ["fsdp2 is not measured as bf16"]),
        (["--collectives", "--comm-dtype", "fp8"], ["fp8", "bf16"]),
        (["--collectives"], ["one rank"]),
        (["--collectives", "--sizes-mb", "big"], ["big"]),
        (
            ["--workload", "resnet51"],
            ["resnet51", "known: bytes-lm", "workloads are bert_base"],
        ),
        (["--workload", "equal:1", "--ratio", "1"], ["one rank"]),
        (["--num-iters", "0", "--feed-forward-s", "1", "--backprop-s", "1"], ["0 rounds"]),
        (["--methods", "dear,dear"], ["dear", "2 times"]),
        ([*SMALL, "--methods", "dear,ddp:capp=8"], ["ddp:capp=8", "it has cap, comm_dtype, view"]),
        ([*SMALL, "--json", "/nowhere/at/all.json"], ["/nowhere/at"]),
        ([*SMALL, "--picture", "bench.png"], ["bench.png", ".svg"]),
    ],
)
def test_what_cannot_be_measured_is_refused_before_it_takes_time(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    text = capsys.readouterr().err
    assert all(word in text for word in words), text


def test_the_times_of_a_profile_are_of_its_batch_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = read_workload("equal:0.01:2")
    path = tmp_path / "profile.json"
    path.write_text(profile_workload(workload, feed_forward_s=0.001, backprop_s=0.002).to_json())
    asked = workload.batch_size + 1
    assert main(["bench", "--workload", str(path), *QUICK, "--batch-size", str(asked)]) == 2
    text = capsys.readouterr().err
    assert f"{workload.batch_size} samples per rank" in text and f"size is {asked}" in text
