"""dear-train simulate: its table, its files, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dearmpi.cli.main import main
from dearmpi.plan.data.workload import read_workload
from dearmpi.plan.model.profile import profile_workload
from dearmpi.tune.calibration import Calibration, DimensionTimes, GridTimes, SizeTimes
from tests.unit.cli.bare import run_bare

DOCUMENT = Path(__file__).parents[3] / "docs" / "explanation" / "planning.md"
SMALL = [
    *("--workload", "equal:8:4", "--feed-forward-s", "0.1", "--backprop-s", "0.2"),
    *("--world-size", "16"),
]


def test_a_table_and_json_of_all_methods(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "simulated.json"
    assert main(["simulate", *SMALL, "--json", str(path)]) == 0
    text = capsys.readouterr().out
    (result,) = json.loads(path.read_text())
    names = [row["name"] for row in result["methods"]]
    assert names[0] == "serial" and names[-1] == "dear-plan" and len(names) == 9
    assert f"bytes on the wire {result['wire_s']:.4f}" in text
    assert all(f"\n{name} " in text for name in names)
    assert result["bound_s"] == pytest.approx(0.3)
    best_s = min(row["iteration_s"] for row in result["methods"] if "dear" not in row["name"])
    for row in result["methods"]:
        assert row["speed_up"] == pytest.approx(best_s / row["iteration_s"])
        assert row["exposed_s"] == pytest.approx(row["iteration_s"] - 0.3)


def test_the_table_of_the_document_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    block = DOCUMENT.read_text().partition("$ dear-train simulate ")[2].partition("```")[0]
    arguments, *lines = block.splitlines()
    assert main(["simulate", *arguments.split()]) == 0
    printed = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line and not line.startswith("computation")]
    assert len(rows) > 10
    assert [row for row in rows if row not in printed] == []
    assert any(line.startswith(lines[0]) for line in printed)  # without where its times come from


def test_on_one_rank_nothing_is_exposed_and_no_zero_has_a_sign(
    capsys: pytest.CaptureFixture[str],
) -> None:
    methods = ["--method", "ddp", "--method", "dear"]
    assert main(["simulate", "--world-size", "1", *methods]) == 0
    text = capsys.readouterr().out
    assert "-0.0" not in text and text.count(" 0.0000 ") == 2


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_picture_shows_every_method_over_ranks_and_bandwidth(tmp_path: Path, suffix: str) -> None:
    if suffix == "png":
        pytest.importorskip("PIL")
    path = tmp_path / f"simulated.{suffix}"
    methods = ["--method", "ddp", "--method", "dear"]
    assert main(["simulate", *SMALL, *methods, "--picture", str(path)]) == 0
    content = path.read_bytes()
    if suffix == "png":
        assert content.startswith(b"\x89PNG")
    else:
        text = content.decode()
        assert text.startswith("<svg") and text.count("<polyline") > 6
        assert all(f">{word}</text>" in text for word in ("ddp", "dear", "bound", "4096", "300"))
        assert "ranks, over 10GbE" in text and "Gbit/s, 16 ranks" in text


def test_a_profile_and_numbers_for_the_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    profile = profile_workload(read_workload("equal:8:4"), feed_forward_s=1, backprop_s=2)
    path.write_text(profile.to_json())
    arguments = ["--profile", str(path), "--network", "0,0", "--method", "ddp"]
    assert main(["simulate", *arguments]) == 0
    text = capsys.readouterr().out
    assert "computation 3.0000 s" in text and "network: as given" in text
    assert text.splitlines()[-1].split() == ["ddp", "2", "3.0000", "0.0000", "1.000", "1.000"]


def test_half_precision_takes_half_the_time_on_the_wire(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, picture = tmp_path / "simulated.json", tmp_path / "simulated.svg"
    exposed = {}
    for dtype in ("fp32", "bf16"):
        arguments = [*SMALL, "--network", "0,1e-8", "--method", "serial", "--comm-dtype", dtype]
        files = ["--json", str(path), "--picture", str(picture)]
        assert main(["simulate", *arguments, *files]) == 0
        ((row,),) = (result["methods"] for result in json.loads(path.read_text()))
        exposed[dtype] = row["exposed_s"]
    assert exposed["bf16"] == pytest.approx(exposed["fp32"] / 2)
    assert "parameters sent in bf16" in capsys.readouterr().out
    text = picture.read_text()
    assert "Gbit/s, 16 ranks" in text and ">300</text>" in text and ">600</text>" not in text


def test_a_calibration_is_the_network_at_any_number_of_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def times(alpha_s: float, beta: float) -> tuple[SizeTimes, ...]:
        alone = [(n, alpha_s + beta * n) for n in (2**14, 2**17, 2**20)]
        return tuple(SizeTimes(n, t, max(t, 2 * beta * n)) for n, t in alone)

    link = times(1e-4, 4e-9)  # over 2 ranks: 8 ns per byte sent, and one round
    path, result_path = tmp_path / "lr=0.1,bs=32", tmp_path / "simulated.json"
    path.write_text(Calibration(("n0", "n1"), "MPICH 5.0.2", "ring", link, link).to_json())
    arguments = ["--network", str(path), "--method", "serial", "--json", str(result_path)]
    assert main(["simulate", *SMALL, *arguments]) == 0
    assert "network: measured with 2 ranks, MPICH 5.0.2" in capsys.readouterr().out
    (result,) = json.loads(result_path.read_text())
    for half in ("reduce_scatter", "all_gather"):
        cost = result["network"][half]
        assert cost["alpha_s"] == pytest.approx(15 * 1e-4)
        assert cost["beta_s_per_byte"] == pytest.approx(15 / 16 * 8e-9)


def test_ranks_that_shared_a_node_when_the_network_was_measured_are_not_put_on_nodes_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = tuple(SizeTimes(n, 1e-4 + 1e-9 * n, 2e-9 * n) for n in (2**14, 2**20))
    path = tmp_path / "link.json"
    path.write_text(Calibration(("n0", "n0", "n1"), "MPICH", "ring", times, times).to_json())
    nodes = ["--ranks-per-node", "2", "--node-network", "1e-6,1e-10"]
    arguments = [*SMALL, "--method", "serial", "--network", str(path)]
    assert main(["simulate", *arguments]) == 0
    assert main(["simulate", *arguments, *nodes]) == 2
    assert "measured with 2 ranks on n0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("world_size", "told"),
    [(16, ""), (14, "the last one has 2"), (3, "all 3 ranks are on one node")],
)
def test_ranks_that_do_not_fill_the_nodes_are_told(
    world_size: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = ["--ranks-per-node", "4", "--node-network", "1e-6,1e-10"]
    arguments = [*SMALL, "--method", "serial", "--world-size", str(world_size)]
    assert main(["simulate", *arguments, *nodes]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("nodes: ")]
    assert len(lines) == bool(told) and all(told in line for line in lines)


def test_a_topology_is_of_dear_alone(tmp_path: Path) -> None:
    """Inside a host bytes are ten times as fast, and half of a bucket leaves it: DeAR gains."""

    def times(beta: float) -> tuple[SizeTimes, ...]:
        return tuple(SizeTimes(n, 1e-5 + beta * n, 2 * beta * n) for n in (2**14, 2**17, 2**20))

    inner, outer = (DimensionTimes(2, times(beta), times(beta)) for beta in (1e-9, 1e-8))
    grid = GridTimes("2x2", (inner, outer), 1.0)
    path, out = tmp_path / "link.json", tmp_path / "out.json"
    hosts, flat = ("n0", "n0", "n1", "n1"), times(1.5e-8)
    path.write_text(Calibration(hosts, "MPICH", "ring", flat, flat, grid=grid).to_json())
    took: dict[str, dict[str, float]] = {}
    for topology in ("flat", "hosts", "2x8"):
        arguments = ["--network", str(path), "--topology", topology, "--json", str(out)]
        assert main(["simulate", *SMALL, "--method", "ddp", "--method", "dear", *arguments]) == 0
        (result,) = json.loads(out.read_text())
        took[topology] = {one["name"]: one["exposed_s"] for one in result["methods"]}
    assert took["hosts"] == took["2x8"]
    assert took["hosts"]["ddp"] == took["flat"]["ddp"]
    assert took["hosts"]["dear"] < 0.7 * took["flat"]["dear"]


def test_methods_are_weighed_alike_however_the_network_is_given(tmp_path: Path) -> None:
    """None pays for its own code, neither over a measured network nor over one in numbers."""
    times = tuple(SizeTimes(n, 1e-4 + 1e-9 * n, 2e-9 * n) for n in (2**14, 2**20))
    path, out = tmp_path / "link.json", tmp_path / "out.json"
    path.write_text(Calibration(("n0", "n1"), "MPICH 5.0.2", "ring", times, times).to_json())
    took = []
    for network in (str(path), "1e-4,2e-9"):  # half of the bytes cross between two ranks
        assert main(["simulate", *SMALL, "--network", network, "--json", str(out)]) == 0
        (result,) = json.loads(out.read_text())
        took.append({one["name"]: one["iteration_s"] for one in result["methods"]})
    assert took[0] == pytest.approx(took[1])


def test_json_tells_the_caps_and_cycles_that_were_given(tmp_path: Path) -> None:
    path, names = tmp_path / "simulated.json", ("ddp", "ddp:8", "horovod:64:5", "horovod:32")
    methods = [word for name in names for word in ("--method", name)]
    assert main(["simulate", *SMALL, *methods, "--json", str(path)]) == 0
    (result,) = json.loads(path.read_text())
    assert [row["numbers"] for row in result["methods"]] == [
        "25 MiB, the first 1 MiB", "8 MiB", "64 MiB, every 5 ms", "32 MiB, every 1 ms"
    ]  # fmt: skip
    assert not any("MiB" in row["about"] + row["source"] for row in result["methods"])


def test_the_paper_beside_what_is_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dearmpi.plan.rivals.side_by_side.MODELS", ("resnet50",))
    path = tmp_path / "paper.json"
    assert main(["simulate", "--compare-paper", "--json", str(path)]) == 0
    text = capsys.readouterr().out
    assert "the paper says up to 83%" in text and "the paper says up to 15%" in text
    assert text.count("resnet50 ") == 4 and "2080 Ti" in text
    assert "DeAR has the best of 10 bucket caps, and the others are as they come" in text
    lines = [line.split() for line in text.splitlines() if line.startswith("resnet50 ")]
    parts = ("gain", "overlap", "start_up", "rest", "most_overlap")
    for line, told in zip(lines, json.loads(path.read_text()), strict=True):
        assert line[1:3] == ["yes" if told["fusion"] else "no", told["best_other"]]
        assert line[5:] == [f"{told[part] - 1:+.1%}" for part in parts]
        dear = [row for row in told["methods"] if row["name"].startswith("dear")]
        assert all("one operation of a kind in flight" in row["about"] for row in dear)


def test_it_needs_neither_torch_nor_mpi() -> None:
    assert "\nddp " in run_bare("simulate", "--method", "ddp", "--method", "dear")


def test_compression_sends_less_of_dear_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, rows = tmp_path / "simulated.json", []
    methods = ["--network", "0,8e-9", "--method", "dear", "--method", "ddp"]
    for flags in ([], ["--compress", "int8"], ["--compress", "random-k", "--density", "0.1"]):
        assert main(["simulate", *SMALL, *methods, *flags, "--json", str(path)]) == 0
        (result,) = json.loads(path.read_text())
        rows.append([row["exposed_s"] for row in result["methods"]] + [result["wire_s"]])
    assert "DeAR with compress random-k 0.1, whose computation is" in capsys.readouterr().out
    (dense, ddp, wire), (int8, *_, wire8), (random, other, _) = rows
    assert ddp == other and wire8 == pytest.approx(0.252 * wire, rel=0.01)
    assert 0 < int8 < 0.4 * dense and 0 < random < int8
    for compress in ("nonzero", "powersgd"):
        assert main(["simulate", *SMALL, "--compress", compress]) == 2
        assert "plan 'auto'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workload", "resnet51"], ["resnet51", "did you mean 'resnet50'", "bert_large"]),
        (["--workload", "foo"], ["there is no workload 'foo'; known: bert_base"]),
        (["--workload", "profile.json"], ["profile.json", "by --profile"]),
        (["--workload", "equal:8"], ["equal:8", "--feed-forward-s"]),
        (["--workload", "equal:inf"], ["equal:inf", "4 bytes at least"]),
        (["--workload", "equal:nan"], ["equal:nan", "4 bytes at least"]),
        (["--feed-forward-s", "1"], ["--backprop-s is missing"]),
        (["--feed-forward-s", "nan", "--backprop-s", "1"], ["feed_forward_s is nan"]),
        (["--method", "dpp"], ["dpp", "did you mean 'ddp'", "mg-wfbp"]),
        (["--method", "ddp", "--method", "ddp"], ["ddp", "2 times"]),
        (["--method", "all", "--method", "dpp"], ["--method all", "leave out"]),
        (
            ["--world-size", "1", "--feed-forward-s", "0", "--backprop-s", "0"],
            ["neither computation nor 1 rank", "above 0"],
        ),
        (["--ranks-per-node", "8"], ["--node-network is missing"]),
        (["--topology", "hosts"], ["nothing tells", "--ranks-per-node"]),
        (["--topology", "8x4"], ["8x4", "32", "64"]),
        (["--topology", "auto"], ["--topology is auto", "8x8"]),
        (["--topology", "8x8/1x1"], ["8x8/1x1", "calibrate --topology"]),
        (["--topology", "8x8", "--compress", "int8"], ["'8x8'", "'int8'"]),
        (["--topology", "8x8", "--picture", "a.svg"], ["--picture", "--topology"]),
        (
            ["--ranks-per-node", "1", "--node-network", "1e-6,1e-11"],
            ["nodes of 1 ranks", "2 ranks"],
        ),
        (["--ranks-per-node", "8", "--node-network", "nvlink"], ["nvlink", "alpha,beta"]),
        (["--network", "5GbE"], ["5GbE", "10GbE", "100GbIB", "alpha,beta"]),
        (["--network", "nan,1e-9"], ["'nan,1e-9'", "0 or more"]),
        (["--network", "1e-5,-1e-9"], ["'1e-5,-1e-9'", "0 or more"]),
        (["--world-size", "0"], ["0", "from 1"]),
        (["--workload", "equal:1e303:4"], ["1e+303 MB"]),
        (["--method", "horovod:64:1e-320"], ["0.001 to 1000 ms"]),
        (["--network", "x" * 5000], ["there is no network"]),
        (["--network", "," * 5000], ["network"]),
        (["--picture", "simulated.pdf"], ["simulated.pdf", ".svg or .png"]),
        (
            ["--network", "1e-5,0", "--picture", "simulated.svg"],
            ["network 1e-5,0", "0 s per byte", "above 0"],
        ),
        (["--json", "/nowhere/at/all.json"], ["/nowhere/at"]),
        (["--profile", "/nowhere.json"], ["/nowhere.json"]),
        (["--profile", "a.json", "--workload", "bert_base"], ["--workload", "--profile"]),
        (["--compare-paper", "--world-size", "8"], ["--world-size", "--compare-paper"]),
        (["--compare-themis", "--world-size", "8"], ["--world-size", "--compare-themis"]),
        (["--allocation", "--network", "10GbE"], ["--network", "--allocation"]),
        (["--mtbf-hours", "50700"], ["--checkpoint-s and --restart-s"]),
        (
            [*SMALL, "--mtbf-hours", "1", "--checkpoint-s", "0", "--restart-s", "1"],
            ["the time of a checkpoint is 0 s", "positive"],
        ),
        (["--compare-themis", "--compare-paper"], ["--compare-paper", "--compare-themis"]),
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *arguments]) == 2
    text = capsys.readouterr().err
    assert all(word in text for word in words), text


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert main(["simulate", *SMALL, "--picture", str(tmp_path / "x.png")]) == 2
    told = capsys.readouterr()
    assert "need Pillow" in told.err and not told.out


def test_themis_is_shown_beside_the_papers_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "themis.json"
    assert main(["simulate", "--compare-themis", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    assert [row["topology"] for row in rows][-1] == "mean" and len(rows) == 7
    told = capsys.readouterr().out
    assert f"{100 * rows[-1]['smallest']:.1f} %" in told and "95.1 %" in told


def test_allocations_are_shown_from_even_to_joint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "allocation.json"
    assert main(["simulate", "--allocation", "--json", str(path)]) == 0
    *_, last = json.loads(path.read_text())
    assert last["joint"] < last["load"] < last["even"]
    assert f"{last['joint']:.3f}" in capsys.readouterr().out


def test_what_failures_cost_stands_below_the_methods(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "failures.json"
    failures = ["--mtbf-hours", "50700", "--checkpoint-s", "1", "--restart-s", "300"]
    size = ["--world-size", "4096"]
    given = ["--method", "dear", *size, *failures]
    assert main(["simulate", *given, "--json", str(path)]) == 0
    *_, last = json.loads(path.read_text())
    assert round(last["failures"]["interval_s"]) == 298
    assert "every 12.4 h" in capsys.readouterr().out
