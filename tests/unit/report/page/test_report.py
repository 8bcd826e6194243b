"""dear-train report: the page of whole, broken and empty runs."""

from __future__ import annotations

import html
import html.parser
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from dearmpi.cli.main import main
from dearmpi.report.read.trace import trace_path
from tests.unit.report.example_run import ExampleRun

RUNS = {
    "Computation limits": ExampleRun(),
    "The network limits": ExampleRun(backlog_s=0.4),
    "The first bucket limits": ExampleRun(first_s=0.5),
    "Rank 1 on n1 limits": ExampleRun(num_ranks=4, slow={1: 0.5}),
    "Loading data limits": ExampleRun(data_s=0.4),
}

PICTURES = "step gains iteration ranks buckets layout step-time throughput loss learning-rate"


@pytest.fixture
def no_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    """PNG pictures take most of the time, and one test looks at them."""
    monkeypatch.setitem(sys.modules, "PIL", None)


quick = pytest.mark.usefixtures("no_pillow")


def report(folder: Path, *options: str) -> str:
    assert main(["report", str(folder), *options]) == 0
    return (folder / "report.html").read_text()


def text_of(page: str) -> str:
    """What a reader sees and hears of ``page``."""
    return html.unescape(re.sub(r"<style>.*?</style>|<[^>]*>", "", page, flags=re.DOTALL))


@quick
@pytest.mark.parametrize("sentence", RUNS)
def test_the_sentence_on_top_is_that_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sentence: str
) -> None:
    page = report(RUNS[sentence].write(tmp_path))
    assert capsys.readouterr().out.startswith(sentence)
    assert page.index(sentence) < page.index("<figure")
    assert "What is missing" not in page


@quick
def test_ranks_that_are_slow_in_turn_are_not_called_slow(tmp_path: Path) -> None:
    folder = ExampleRun(slow={1: 0.5}).write(tmp_path)
    shutil.rmtree(folder / "trace")
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[1::2]:
        row["rank_wait_s"].reverse()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = report(folder)
    assert "Ranks that are late in turn limit" in page
    assert "no rank is so much slower all the time" in page


@quick
def test_a_trace_of_one_iteration_is_told_what_it_lacks(tmp_path: Path) -> None:
    page = report(ExampleRun(backlog_s=0.4, num_iterations=1).write(tmp_path))
    assert "One iteration" not in page
    assert "record two at least, such as --trace 20:22" in text_of(page)


def test_slow_data_is_told_without_a_trace_and_not_guessed_at(tmp_path: Path) -> None:
    folder = ExampleRun(data_s=0.4).write(tmp_path)
    shutil.rmtree(folder / "trace")
    assert "Loading data limits" in report(folder)
    path = folder / "metrics.jsonl"  # as earlier versions wrote it
    path.write_text(path.read_text().replace("rank_data_s", "other"))
    assert "Loading data limits" not in report(folder)


@quick
def test_a_page_needs_nothing_else_and_is_small(tmp_path: Path) -> None:
    run = ExampleRun(num_ranks=16, num_buckets=100, num_iterations=3)
    page = report(run.write(tmp_path))
    assert len(page) < 300_000
    assert not re.search(r"https?://|\bsrc=|@import|<script", page)
    opened: list[str] = []

    class Balance(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta", "link", "br"):
                opened.append(tag)

        def handle_startendtag(self, tag: str, attrs: object) -> None:
            pass

        def handle_endtag(self, tag: str) -> None:
            assert opened.pop() == tag

    Balance().feed(page)
    assert not opened


def test_pictures_are_png_files_as_well(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    folder = ExampleRun().write(tmp_path)
    page = report(folder)
    pictures = sorted(path.stem for path in (folder / "report").glob("*.png"))
    assert pictures == sorted(PICTURES.split())
    assert page.count("<figure") == len(pictures)


@pytest.mark.parametrize("pillow", [True, False])
def test_pictures_of_an_earlier_report_do_not_stay_beside_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, pillow: bool
) -> None:
    if not pillow:
        monkeypatch.setitem(sys.modules, "PIL", None)
    folder = ExampleRun().write(tmp_path)
    (folder / "report").mkdir()
    for name in [*PICTURES.split(), "mine"]:
        (folder / "report" / f"{name}.png").write_text("old")
    shutil.rmtree(folder / "trace")  # as where a run went on without one
    report(folder)
    old = [path.name for path in (folder / "report").iterdir() if path.read_bytes() == b"old"]
    assert old == ["mine.png"]


@quick
def test_without_pillow_there_is_a_page_and_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ExampleRun().write(tmp_path)
    report(folder)
    assert "pip install" in capsys.readouterr().out
    assert not (folder / "report").exists()


@quick
def test_names_are_escaped(tmp_path: Path) -> None:
    nasty = "<img src=x onerror=alert(1)>"
    folder = ExampleRun().write(tmp_path, name="<b>bold & co")
    (folder / "config.yaml").write_text(json.dumps({"task": nasty}))
    facts = {"world_size": 2, "hosts": [nasty, nasty], "command": ["dear-train", nasty]}
    (folder / "env.json").write_text(json.dumps(facts))
    page = report(folder)
    assert "<img" not in page and "<b>" not in page
    assert "&lt;b&gt;bold &amp; co" in page and page.count("&lt;img") >= 3


@quick
def test_an_empty_run_has_a_page_that_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    page = report(tmp_path / "run")
    assert "Nothing was measured" in capsys.readouterr().out
    for word in (
        "Nothing was measured",
        "metrics.jsonl is missing",
        "no trace",
        "config.yaml is missing",
    ):
        assert word in page


@quick
def test_a_trace_of_another_run_is_told_of_and_left_out(tmp_path: Path) -> None:
    folder = ExampleRun().write(tmp_path)
    ExampleRun(run_id="two").write_trace(folder, 1)
    page = report(folder)
    assert f"{folder}/trace/rank-00001.json is of run example (two)" in page
    assert "One iteration" not in page


@quick
def test_a_half_line_of_metrics_is_left_out_and_told(tmp_path: Path) -> None:
    folder = ExampleRun().write(tmp_path)
    metrics = folder / "metrics.jsonl"
    text = metrics.read_text()
    metrics.write_text(text[:-20])
    assert "1 of 20 lines of metrics.jsonl is broken" in report(folder)
    metrics.write_bytes(b"\xff\x00\n[1]\n{}\n" + text.encode() + b'{"step": "x"}\n')
    assert "4 of 24 lines of metrics.jsonl are broken" in report(folder)
    metrics.write_text('{"step": 1, "loss": null, "step_s": "fast", "rank_step_s": [1]}\n')
    report(folder)


@quick
def test_numbers_that_are_not_finite_do_no_harm(tmp_path: Path) -> None:
    folder = ExampleRun().write(tmp_path)
    rows = [{"step": 1, "loss": float("nan")}, {"step": 2, "step_s": float("inf")}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report(folder)


@quick
def test_a_run_without_a_trace_is_judged_by_its_metrics(tmp_path: Path) -> None:
    folder = ExampleRun(backlog_s=0.4).write(tmp_path)
    shutil.rmtree(folder / "trace")
    page = report(folder)
    assert "The network limits" in page and "There is no trace" in page
    assert "One iteration" not in page


@quick
def test_a_trace_without_metrics_is_enough(tmp_path: Path) -> None:
    folder = ExampleRun(num_ranks=3, slow={2: 0.5}).write(tmp_path)
    (folder / "metrics.jsonl").unlink()
    page = report(folder)
    assert "Rank 2 on n2 limits" in page and "metrics.jsonl is missing" in page


@quick
def test_a_torn_and_a_missing_trace_are_told(tmp_path: Path) -> None:
    folder = ExampleRun(num_ranks=3).write(tmp_path)
    torn = folder / "trace" / "rank-00001.json"
    torn.write_bytes(torn.read_bytes()[:-100])
    (folder / "trace" / "rank-00002.json").unlink()
    page = report(folder)
    assert "rank-00001.json ends in the middle" in page and "No trace of rank 2" in page
    assert "One iteration" in page


@quick
def test_of_many_ranks_the_slowest_is_shown(tmp_path: Path) -> None:
    page = report(ExampleRun(num_ranks=12, num_iterations=3, slow={7: 0.3}).write(tmp_path))
    shown = page[page.index("One iteration") : page.index("<h2>Ranks")]
    assert "rank 7 on n7" in shown and "rank 0 on n0" in shown and "rank 5 on n5" not in shown
    assert "Shown are 4 of 12 ranks" in shown


@quick
def test_a_trace_of_more_ranks_than_the_run_has_now_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where a run goes on with fewer of them."""
    folder = ExampleRun(num_ranks=2).write(tmp_path / "now")
    shutil.rmtree(folder / "trace")
    before = ExampleRun(num_ranks=4, slow={1: 0.5}).write(tmp_path / "before")
    shutil.copytree(before / "trace", folder / "trace")
    page = report(folder)
    assert capsys.readouterr().out.startswith("Computation limits")
    assert "of an earlier part of the run, on another number of ranks" in page


@quick
def test_a_copy_without_the_checkpoints_will_do(tmp_path: Path) -> None:
    folder = ExampleRun().write(tmp_path)
    shutil.rmtree(folder / "checkpoints")
    assert "Computation limits" in report(folder)


@quick
@pytest.mark.parametrize("missing", [0, 1])
def test_what_limits_a_run_is_told_from_the_traces_that_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: int
) -> None:
    folder = ExampleRun(first_s=0.5).write(tmp_path)
    trace_path(folder, missing).unlink()
    report(folder)
    assert capsys.readouterr().out.startswith("The first bucket limits")


@quick
def test_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"there is no folder {tmp_path / 'nowhere'}" in said
    assert f"{tmp_path} is no run folder" in said


@quick
def test_a_run_is_named_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs", "a").mkdir(parents=True)
    assert main(["report", "a"]) == 2
    assert f"did you mean {Path('runs', 'a')}?" in capsys.readouterr().err


@quick
def test_a_place_that_cannot_be_written_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ExampleRun().write(tmp_path)
    assert main(["report", str(folder), "--out", "/proc/nowhere"]) == 2
    assert "cannot write /proc/nowhere" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "report.html").symlink_to("/dev/full")
    assert main(["report", str(folder), "--out", str(tmp_path / "full")]) == 2
    assert f"cannot write {tmp_path}/full: No space left on device" in capsys.readouterr().err


@quick
def test_values_that_cannot_be_are_left_out(tmp_path: Path) -> None:
    """None of these may end in a traceback: each was found by striking files at random."""
    folder = ExampleRun().write(tmp_path)
    row = {"step": 1, "step_s": -1, "loss": 1e308, "rank_step_s": [-1, 1], "rank_wait_s": [1, 1]}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    trace = folder / "trace" / "rank-00000.json"
    text = trace.read_text()
    for old, new in (
        ('"ts":', '"ts":"x","was":'),
        ('"bucket":0', '"bucket":"x"'),
        ('"bucket_bytes":[', '"bucket_bytes":[null,'),
        ('"offset_us":0', '"offset_us":99999999999'),
        ('"name":"B layer0"', '"name":["B"]'),
    ):
        assert old in text
        trace.write_text(text.replace(old, new))
        report(folder)


def on_one_host(folder: Path, **facts: object) -> Path:
    path = folder / "env.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hosts": ["n0", "n0"]} | facts))
    return folder


@quick
@pytest.mark.parametrize(
    "run",
    [ExampleRun(), ExampleRun(backlog_s=0.4), ExampleRun(first_s=0.5), ExampleRun(data_s=0.4)],
)
def test_on_one_host_the_page_does_not_speak_of_a_network(tmp_path: Path, run: ExampleRun) -> None:
    folder = on_one_host(run.write(tmp_path), cores=[0, 1], torch_threads=2)
    assert not re.search("network|link", text_of(report(folder)).lower())
    shutil.rmtree(folder / "trace")
    assert not re.search("network|link", text_of(report(folder)).lower())


@quick
def test_the_bar_of_a_step_is_filled_by_its_parts(tmp_path: Path) -> None:
    page = report(ExampleRun(num_ranks=3, backlog_s=0.2, slow={2: 0.3}, data_s=0.1).write(tmp_path))
    bar = page[page.index("<h2>Where a step goes") : page.index("<h2>What a change")]
    for drawing, width in zip(bar.split("<svg")[1:], (920, 340), strict=True):
        boxes = re.findall(
            r'<rect class="f\w+" x="([\d.]+)" .*?width="([\d.]+)" height="34">', drawing
        )
        assert len(boxes) == 4  # nothing is done besides
        ends = [float(x) + float(wide) for x, wide in boxes]
        starts = [float(x) for x, _ in boxes]
        assert starts[0] == 0 and ends[-1] == pytest.approx(width, abs=0.5)
        assert all(a == pytest.approx(b, abs=0.5) for a, b in zip(ends, starts[1:], strict=False))
    assert "1.52 s" in bar and "waits for late ranks: 300 ms (20 %)" in bar


@quick
def test_flags_and_values_do_not_break_across_lines(tmp_path: Path) -> None:
    folder = ExampleRun(backlog_s=0.4).write(tmp_path)
    shutil.rmtree(folder / "trace")
    page = report(folder)
    prose = re.sub(r'<span class="flag">--[\w-]+</span>', "", page[page.index("<h1>") :])
    assert page.count('<span class="flag">--batch-size') == 1
    assert ".flag{white-space:nowrap}" in page and "--" not in text_of(prose)
    verdict = page[page.index('<p class="verdict') :].partition("</p>")[0]
    values = re.findall(r'<span class="value">([^<]*)</span>', verdict)
    assert [value.split(" ")[1] for value in values[:3]] == ["ms", "s", "%"]
    assert ".value{white-space:nowrap}" in page


@quick
def test_values_stand_where_a_pointer_rests(tmp_path: Path) -> None:
    page = report(ExampleRun(backlog_s=0.4).write(tmp_path))
    for figure in page.split("<figure")[1:]:
        drawn = figure.partition("</figure>")[0]
        assert "<title>" in drawn, figure[:400]
    assert "<title>step 100: step 1.32, of it waiting for communication 0.42 (s per step)" in page
    assert "<title>rank 0 on n0, computes: 0.9 s per step</title>" in page


@quick
def test_terms_are_explained_on_the_page(tmp_path: Path) -> None:
    page = report(ExampleRun(slow={1: 0.5}, backlog_s=0.2).write(tmp_path))
    terms = page[page.index("<h2>Terms") :]
    for term in ("step", "bucket", "reduce-scatter", "hidden, exposed", "late ranks", "simulated"):
        assert term in terms


@quick
def test_throughput_and_loss_have_the_units_of_the_console(tmp_path: Path) -> None:
    folder = ExampleRun().write(tmp_path)
    units = {"rate": "tokens", "per_sample": 128, "loss": "bits per byte", "loss_scale": 2.0}
    text = text_of(report(on_one_host(folder, units=units)))
    rate = round(128 * 64 / ExampleRun().step_s)
    assert f"{rate:,} tokens/s" in text and "samples/s" not in text
    assert "Bits per byte" in text and "In training 10.0000 to 0.5000" in text
    half = {"rate": "a", "per_sample": "x", "loss": "b", "loss_scale": 1}
    wrong: tuple[object, ...] = ({"rate": 1}, half, [])
    for broken in wrong:
        assert "samples/s" in text_of(report(on_one_host(folder, units=broken)))
