"""The lab: its numbers are the library's, what it refuses, what it never does."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from isostep.explain.batch import batch_sizes
from isostep.explain.replicas import replica_update
from isostep.explain.tokens import token_weights
from isostep.lab.app import VIEWS, build_app
from isostep.lab.pipeline_state import MAX_SEARCHED, MAX_WORK
from isostep.lab.query import MAX_QUERY
from isostep.schedule import csv_file, gantt_svg, search, trace
from isostep.schedule.costs import Costs
from isostep.schedule.generate import NAMES, generate
from isostep.schedule.simulate import Simulation, simulate
from lab_server import PATHS, Asked, answer, faults, fuzzed, numbers

APP = build_app()
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def page(path: str, query: str = "") -> str:
    """A page that is answered."""
    got = answer(APP, path, query)
    assert got.status == 200, got.text[-900:]
    return got.text


def simulated(name: str, stages: int, num_microbatches: int, chunks: int | None = None, **costs: Any) -> Simulation:
    schedule = generate(name, stages, num_microbatches, chunks)
    return simulate(schedule, Costs.of_stages(schedule, **costs))


# ------------------------------------------------------------------------------------------- numbers on the pages


def test_replicas_golden_numbers() -> None:
    shown = numbers(page("/replicas"))
    update = replica_update([[0.0], [2.0], [4.0]])
    assert shown["exact.w_after"] == update.exact.w_after == pytest.approx(1.1, abs=1e-12)
    assert [shown[f"alone.{i}"] for i in range(3)] == pytest.approx([0.9, 1.1, 1.3], abs=1e-12)
    assert shown["mean_of_means.w_after"] == pytest.approx(1.1, abs=1e-12)


def test_replicas_unequal_portions() -> None:
    shown = numbers(page("/replicas", "unequal=1"))
    update = replica_update([[0.0], [2.0], [4.0]], [1, 1, 4])
    assert shown["exact.gradient"] == update.exact.gradient == -2
    assert shown["exact.w_after"] == pytest.approx(1.2, abs=1e-12)
    assert shown["mean_of_means.gradient"] == update.mean_of_means.gradient == -1


def test_replicas_other_state() -> None:
    text = page("/replicas", "replicas=2&w=-3&lr=0.5&y0=0,1&y1=2,4,6&fragment=1")
    update = replica_update([[0.0, 1.0], [2.0, 4.0, 6.0]], None, -3.0, 0.5)
    shown = numbers(text)
    assert shown["exact.w_after"] == update.exact.w_after
    assert shown["mean_of_means.gradient"] == update.mean_of_means.gradient != update.exact.gradient
    assert text.count('<g class="column">') == 2
    assert "<html" not in text


def test_a_replica_without_examples() -> None:
    text = page("/replicas", "unequal=1&n0=2&n1=0&n2=2")
    assert "no example" in text
    assert "NaN in torch" in text
    assert "mean.1" not in numbers(text)


def test_tokens_numbers() -> None:
    shown = numbers(page("/tokens"))
    loops = token_weights([[512, 1536]], [[2.0, 4.0]]).loops
    assert [shown[f"loss.{i}"] for i in range(6)] == [loop.loss for loop in loops]
    assert (shown["loss.0"], shown["loss.1"]) == (3.5, 3)
    for row in range(2):
        assert [shown[f"ratio.{row}.{i}"] for i in range(6)] == [float(loop.ratios[0][row] or 0) for loop in loops]


def test_tokens_with_an_empty_microbatch() -> None:
    text = page("/tokens", "counts=0,8+4,4&losses=")
    assert "NaN" in text
    assert "ratio.0.0" not in numbers(text)


def test_batch_numbers() -> None:
    shown = numbers(page("/batch", "context=2048&examples=10000"))
    sizes = batch_sizes(2, 8, 2, 2, 1, 2048, 10_000)
    assert shown["examples.3"] == sizes.examples_per_update == 32
    assert shown["examples.2"] == sizes.examples_per_replica == 16
    assert shown["tokens.3"] == sizes.tokens_per_update
    assert shown["world_size"] == 4
    assert (shown["believed"], shown["gradient_scale"]) == (64, 0.5)


def test_pipeline_of_six_ticks() -> None:
    shown = numbers(page("/pipeline", "stages=3&microbatches=4&forward-only=1"))
    assert shown["makespan"] == 6
    assert shown["busy_share"] == shown["closed_form"] == pytest.approx(2 / 3, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_pipeline_numbers_are_the_library_s(name: str) -> None:
    text = page("/pipeline", f"schedule={name}&stages=3&microbatches=6&forward=1,2,1.5&transfer=0.25&input-grad=0.5")
    sim = simulated(name, 3, 6, forward=[1, 2, 1.5], input_grad=0.5, transfer=0.25)
    shown = numbers(text)
    for key in ("makespan", "busy_share", "bubble_global", "bubble_own_span", "rate_global", "rate_own_span"):
        assert shown[f"0.{key}"] == getattr(sim, key), key
    assert shown["0.latency.worst"] == sim.latency.worst
    assert shown["critical_stage"] == sim.critical_stage
    assert shown["peak"] == max(sim.peak_memory)
    assert text.count('<rect class="span') == sim.schedule.size


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("costs", ["", "&recompute=1", "&forward=2&weight-grad=0.5"])
def test_a_closed_form_that_is_shown_is_what_was_simulated(name: str, costs: str) -> None:
    shown = numbers(page("/pipeline", f"schedule={name}&stages=4&microbatches=12{costs}"))
    if "closed_form" in shown:
        assert shown["closed_form"] == pytest.approx(shown["busy_share"], abs=1e-12)
    else:
        assert name not in ("gpipe", "1f1b")
    assert "closed_form" not in numbers(page("/pipeline", f"schedule={name}&stages=4&microbatches=12&transfer=0.1"))


def test_two_schedules_beside_each_other() -> None:
    text = page("/pipeline", "schedule=1f1b&compare=zb-v")
    first, second = simulated("1f1b", 4, 8), simulated("zb-v", 4, 8)
    shown = numbers(text)
    assert (shown["0.makespan"], shown["1.makespan"]) == (first.makespan, second.makespan)
    assert first.makespan > second.makespan
    assert text.count('<rect class="span') == first.schedule.size + second.schedule.size
    assert f"zb-v takes {first.makespan - second.makespan:g}" in text


def test_two_pictures_have_one_scale_of_time() -> None:
    """A second of the one is as wide as a second of the other."""
    text = page("/pipeline", "schedule=1f1b&compare=zb-v&stages=4&microbatches=8")
    scales = []
    for svg in re.findall(r"<svg xmlns=.*?</svg>", text, re.DOTALL):
        if 'class="span' in svg:
            ends = [
                float(x) + float(w)
                for x, w in re.findall(r'<rect class="span[^>]* x="([\d.]+)"[^>]* width="([\d.]+)"', svg)
            ]
            begins = [float(x) for x in re.findall(r'<rect class="span[^>]* x="([\d.]+)"', svg)]
            scales.append(max(ends) - min(begins))
    first, second = simulated("1f1b", 4, 8).makespan, simulated("zb-v", 4, 8).makespan
    assert scales[0] / first == pytest.approx(scales[1] / second, rel=5e-3)
    assert scales[0] / scales[1] > 1.1


def test_a_searched_order_is_the_library_s() -> None:
    text = page("/pipeline", "schedule=1f1b&compare=auto&memory-limit=4&forward=1,1,2,1")
    found = search.auto(4, 8, memory_limit=4, forward=[1, 1, 2, 1])
    shown = numbers(text)
    assert shown["1.makespan"] == found.simulation.makespan < shown["0.makespan"]
    assert f"the best of {found.tried} orders, {found.origin}." in text
    query = "schedule=auto&memory-limit=4&forward=1,1,2,1"
    assert answer(APP, "/pipeline/schedule.csv", query).text == csv_file.text(found.simulation.schedule)


def test_a_memory_limit_that_does_not_hold_is_said() -> None:
    assert "gpipe does not fit: rank 0 holds 8 stage activations, and the limit is 4." in page(
        "/pipeline", "schedule=gpipe&memory-limit=4"
    )
    assert "does not fit" not in page("/pipeline", "schedule=1f1b&memory-limit=4")


def test_a_large_picture_is_cut_and_links_move_it() -> None:
    text = page("/pipeline", "schedule=1f1b&stages=8&microbatches=600")
    assert "A picture holds 4,000 actions at most." in text
    assert 3000 < text.count('<rect class="span') <= 4000
    later = re.search(r'<a href="/pipeline\?([^"]*)">Later</a>', text)
    assert later
    after = page("/pipeline", later[1].replace("&amp;", "&"))
    assert 3000 < after.count('<rect class="span') <= 4000
    assert "Earlier</a>" in after
    assert "Earlier</a>" not in text


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("path", "query", "names"),
    [
        ("/replicas", "w=x", "w: got &#39;x&#39;"),
        ("/replicas", "w=nan", "w: got &#39;nan&#39;"),
        ("/replicas", "w=1e7", "w: got &#39;1e7&#39;"),
        ("/replicas", "w=", "w: got &#39;&#39;"),
        ("/replicas", "lr=0", "lr: got 0.0"),
        ("/replicas", "lr=-1", "lr: got &#39;-1&#39;"),
        ("/replicas", "replicas=9", "replicas: got &#39;9&#39;"),
        ("/replicas", "replicas=0", "replicas: got &#39;0&#39;"),
        ("/replicas", "replicas=2.5", "replicas: got &#39;2.5&#39;"),
        ("/replicas", "y0=", "y0: got &#39;&#39;"),
        ("/replicas", "y0=" + ",".join("123456789"), "y0: got &#39;9 numbers&#39;"),
        ("/replicas", "y1=1,,2", "y1: got &#39;&#39;"),
        ("/replicas", "unequal=yes", "unequal: got &#39;yes&#39;"),
        ("/replicas", "unequal=1&n0=65", "n0: got &#39;65&#39;"),
        ("/replicas", "unequal=1&y0=1,2", "portions: got 1"),
        ("/replicas", "unequal=1&n0=0&n1=0&n2=0", "portions: got &#39;no example at all&#39;"),
        ("/replicas", "w=1&w=2", "w: got &#39;the same name twice&#39;"),
        ("/replicas", "v=1", "query: got &#39;v&#39;"),
        ("/replicas", "fragment=2", "fragment: got"),
        ("/replicas", "w=" + "1" * 1001, "w: got &#39;1001 characters&#39;"),
        ("/replicas", "w=%ff", "query: got &#39;bytes that are no UTF-8&#39;"),
        ("/tokens", "counts=", "counts: got &#39;&#39;"),
        ("/tokens", "counts=0&losses=", "counts: got 0"),
        ("/tokens", "counts=1.5", "counts: got &#39;1.5&#39;"),
        ("/tokens", "counts=-1&losses=", "counts: got -1"),
        ("/tokens", "counts=1,2+3", "counts: got 1"),
        ("/tokens", "counts=1&losses=1,2", "losses: got 2"),
        ("/tokens", "counts=" + "+".join("1" * 9), "counts: got &#39;9 replicas&#39;"),
        ("/tokens", "counts=" + ",".join("1" * 17), "counts: got &#39;17 on a replica&#39;"),
        ("/batch", "m=0", "m: got &#39;0&#39;"),
        ("/batch", "stages=1000001", "stages: got &#39;1000001&#39;"),
        ("/batch", "last=pad", "last: got &#39;pad&#39;"),
        ("/batch", "context=0", "context: got &#39;0&#39;"),
        ("/pipeline", "schedule=pipedream", "schedule: got &#39;pipedream&#39;"),
        ("/pipeline", "compare=all", "compare: got &#39;all&#39;"),
        ("/pipeline", "stages=65", "stages: got &#39;65&#39;"),
        ("/pipeline", "microbatches=1025", "microbatches: got &#39;1025&#39;"),
        ("/pipeline", "stages=64&microbatches=512", "64 stages x 1 chunk x 512 microbatches = 32768"),
        ("/pipeline", "chunks=2", "chunks: got 2"),
        ("/pipeline", "schedule=auto&chunks=2", "chunks: got 2"),
        ("/pipeline", "compare=auto&forward-only=1", "forward-only: got True"),
        ("/pipeline", "schedule=auto&stages=8&microbatches=33", "8 stages x 33 microbatches = 264"),
        ("/pipeline", "schedule=interleaved-1f1b&chunks=17", "chunks: got &#39;17&#39;"),
        ("/pipeline", "schedule=interleaved-1f1b&stages=4&microbatches=9", "microbatches: got 9"),
        ("/pipeline", "schedule=dualpipe-v&microbatches=7", "microbatches: got 7"),
        ("/pipeline", "forward=1,2", "forward: got &#39;2 numbers&#39;"),
        ("/pipeline", "input-grad=-1", "input-grad: got &#39;-1&#39;"),
        ("/pipeline", "weight-grad=1e7", "weight-grad: got &#39;1e7&#39;"),
        ("/pipeline", "transfer=inf", "transfer: got &#39;inf&#39;"),
        ("/pipeline", "memory-limit=0", "memory-limit: got &#39;0&#39;"),
        ("/pipeline", "from=5&to=4", "to: got 4"),
        ("/pipeline", "from=1000", "from: got 1000"),
        ("/pipeline/trace.json", "stages=x", "stages: got &#39;x&#39;"),
        ("/pipeline/gantt.svg", "x=1", "query: got &#39;x&#39;"),
        ("/", "x=1", "query: got &#39;x&#39;"),
        ("/worked/replicas.py", "x=1", "query: got &#39;x&#39;"),
    ],
)  # fmt: skip
def test_refused_with_one_sentence_that_names_it(path: str, query: str, names: str) -> None:
    got = answer(APP, path, query)
    assert got.status == 400
    assert got.headers["content-type"].startswith("text/html")
    sentences = re.findall(r'class="refused"[^>]*>(.*?)</p>', got.text, re.DOTALL)
    assert len(sentences) == 1
    assert names in sentences[0]
    assert "expected" in sentences[0]
    assert len(sentences[0]) < 400
    assert "\n" not in sentences[0]


def test_a_refused_state_keeps_what_was_typed() -> None:
    text = answer(APP, "/pipeline", "stages=65&forward=1,2").text
    assert 'name="stages" value="65"' in text
    assert 'name="forward" value="1,2"' in text


@pytest.mark.parametrize(("method", "status"), [("POST", 405), ("PUT", 405), ("DELETE", 405), ("OPTIONS", 405)])
@pytest.mark.parametrize("path", ["/", "/replicas", "/nothing", "/static/lab.css"])
def test_methods_that_change_something_are_refused(path: str, method: str, status: int) -> None:
    got = answer(APP, path, method=method)
    assert got.status == status
    assert got.headers["allow"] == "GET, HEAD"


def test_head_has_no_body() -> None:
    got = answer(APP, "/replicas", method="HEAD")
    assert got.status == 200
    assert int(got.headers["content-length"]) > 1000


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8642", "localhost:1", "LOCALHOST", "[::1]", "[::1]:8642"])
def test_hosts_of_this_machine(host: str) -> None:
    assert answer(APP, "/", host=host.encode()).status == 200


@pytest.mark.parametrize(
    "host", ["", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "127.0.0.1:a",
             "127.0.0.1:123456", "user@127.0.0.1", "[::2]", "127.0.0.1 ", "0.0.0.0:8642", "127.0.0.2"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/", "/replicas", "/static/lab.js", "/worked/replicas.py"])
def test_other_hosts_are_refused(host: str, path: str) -> None:
    got = answer(APP, path, host=host.encode())
    assert got.status == 400
    assert "Host: got another name" in got.text


def test_a_long_query_is_refused() -> None:
    assert answer(APP, "/tokens", "a" * (MAX_QUERY + 1)).status == 414
    assert answer(APP, "/tokens", "losses=&counts=" + "1," * 15 + "1").status == 200


@pytest.mark.parametrize("path", ["/nothing", "/replicas/", "/worked/", "/worked/none.py", "/worked/../app.py",
                                  "/static/none.css", "/static/../app.py", "/static/%2e%2e/app.py",
                                  "/templates/base.html", "/pipeline/none.json"])  # fmt: skip
def test_no_such_page(path: str) -> None:
    got = answer(APP, path)
    assert got.status == 404
    assert "import" not in got.text


HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=x>{{7*7}}"


@pytest.mark.parametrize(("view", "name"), [(view.name, field.name) for view in VIEWS for field in view.fields])
def test_everything_is_escaped(view: str, name: str) -> None:
    for query in (f"{name}={HOSTILE}", f"{HOSTILE}={name}"):
        for more in ("", "&fragment=1"):
            got = answer(APP, f"/{view}", query.replace("&", "%26").replace("+", "%2B") + more)
            assert got.status == 400
            assert "<script>" not in got.text
            assert "<img" not in got.text
            assert "49" not in got.text.split("refused", 1)[1][:300]


def test_paths_are_escaped() -> None:
    assert "<script>" not in answer(APP, "/<script>alert(1)</script>").text
    assert "<script>" not in answer(APP, "/worked/<script>alert(1)</script>").text


@pytest.mark.parametrize(
    ("path", "query", "others"),
    [
        *((path, "", {}) for path in PATHS),
        ("/nothing", "", {}),
        ("/replicas", "w=x", {}),
        ("/replicas", "w=x&fragment=1", {}),
        ("/", "", {"method": "POST"}),
        ("/", "", {"host": b"evil.example"}),
        ("/", "a" * 5000, {}),
    ],
)
def test_every_answer_has_the_headers(path: str, query: str, others: dict[str, Any]) -> None:
    got = answer(APP, path, query, **others)
    assert {name: got.headers.get(name) for name in HEADERS} == HEADERS


def test_a_fault_is_a_page_with_the_headers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isostep.lab.app.values_of", lambda *_: 1 / 0)
    got = answer(APP, "/replicas", "w=77")
    assert got.status == 500
    assert got.headers["cache-control"] == "no-store"
    assert "ZeroDivisionError" not in got.text


def test_pages_need_nothing_from_elsewhere_and_hold_nothing_inline() -> None:
    """What the content security policy would block is not there in the first place."""
    for path in ("/", *(f"/{view.name}" for view in VIEWS)):
        text = page(path)
        assert not re.search(r'\bstyle="|<style|\bon[a-z]+="|javascript:', text), path
        assert not re.search(r'(?:src|href|action)="(?:https?:)?//', text), path
        assert re.findall(r"<script[^>]*>", text) == ['<script src="/static/lab.js" defer>']


def test_controls_have_labels_and_tables_have_captions() -> None:
    for view in VIEWS:
        text = page(f"/{view.name}")
        controls = re.findall(r'<(?:input|select)[^>]* id="([^"]+)"', text)
        assert len(controls) == len(view.fields)
        assert all(f'<label for="{control}"' in text for control in controls)
        assert text.count("<table") == text.count("<caption>")
        assert text.count("<h1>") == 1


# ------------------------------------------------------------------------------------------------------- downloads


def test_files_are_the_library_s_own_text() -> None:
    query = "schedule=interleaved-1f1b&stages=2&microbatches=4&transfer=0.5&memory-limit=3"
    sim = simulated("interleaved-1f1b", 2, 4, transfer=0.5)
    expected = {
        "schedule.csv": csv_file.text(sim.schedule),
        "gantt.svg": gantt_svg.draw(sim, width=1200),
        "memory.svg": gantt_svg.memory(sim, 3, 1200),
        "trace.json": json.dumps(trace.document(sim)),
        "simulation.json": json.dumps(sim.document(spans=True)),
    }
    text = page("/pipeline", query)
    for name, content in expected.items():
        got = answer(APP, f"/pipeline/{name}", query)
        assert got.text == content, name
        stem = f"interleaved-1f1b-2-stages-4-microbatches-{name}"
        assert got.headers["content-disposition"] == f'attachment; filename="{stem}"'
        link = re.search(rf'href="(/pipeline/{name}\?[^"]*)" download', text)
        assert link
        path, _, linked = link[1].replace("&amp;", "&").partition("?")
        assert answer(APP, path, linked).text == content


def test_the_files_of_a_second_schedule_are_its_own() -> None:
    text = page("/pipeline", "schedule=interleaved-1f1b&chunks=4&compare=zb-v")
    links = [link.replace("&amp;", "&") for link in re.findall(r'href="/pipeline/schedule.csv\?([^"]*)"', text)]
    assert [answer(APP, "/pipeline/schedule.csv", link).text for link in links] == [
        csv_file.text(generate("interleaved-1f1b", 4, 8, 4)),
        csv_file.text(generate("zb-v", 4, 8)),
    ]


def test_worked_examples_are_the_files_of_the_repository() -> None:
    folder = Path(__file__).parents[1] / "examples" / "worked"
    index = page("/")
    names = sorted(path.name for path in folder.glob("*.py"))
    assert re.findall(r'href="/worked/([^"]+)" download', index) == names
    for name in names:
        content = (folder / name).read_text()
        assert page(f"/worked/{name}") == content
        assert content.splitlines()[0].strip('"') in index.replace("&#39;", "'")


def test_pictures_are_xml() -> None:
    text = page("/pipeline", "compare=zb-v&memory-limit=4&transfer=0.1")
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)


# ------------------------------------------------------------------------------------------------- fuzz and bounds


def test_a_thousand_hostile_requests() -> None:
    requests = fuzzed(seed=20261130, count=1000)
    assert faults(APP, requests) == []
    statuses = {answer(APP, r.path, r.query.decode("latin-1"), method=r.method).status for r in requests[:60]}
    assert {200, 400} <= statuses, "the requests reach the pages, and are refused"


def test_control_planted_faults_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [Asked("/replicas", b"w=5.5"), Asked("/tokens", b"counts=3&losses="), Asked("/batch", b"m=<script>")]
    assert faults(APP, requests) == []

    async def faulty(scope: Any, receive: Any, send: Any) -> None:
        if b"w=5.5" in scope["query_string"]:
            raise KeyError("planted")
        if b"counts=3" in scope["query_string"]:
            time.sleep(0.06)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["query_string"]})

    found = faults(faulty, requests, seconds=0.05)
    assert [fault.split(":")[0] for fault in found] == ["status 500", found[1].split(":")[0], "not escaped"]
    assert found[1].startswith("0.0")


@pytest.mark.parametrize(
    ("name", "stages", "chunks"),
    [("gpipe", 8, 1), ("1f1b", 64, 1), ("interleaved-1f1b", 8, 8), ("looped-bfs", 10, 2), ("zb-h1", 10, 1),
     ("interleaved-zb", 5, 4), ("zb-v", 10, 2), ("dualpipe-v", 8, 2), ("auto", 12, 0)],
)  # fmt: skip
def test_the_largest_states_answer_within_a_second(name: str, stages: int, chunks: int) -> None:
    work = MAX_WORK // chunks if chunks else MAX_SEARCHED
    microbatches = min(1024, work // stages // stages * stages)
    query = f"schedule={name}&stages={stages}&microbatches={microbatches}&chunks={chunks or ''}&transfer=0.1"
    begin = time.process_time()  # others may share the cores
    got = answer(APP, "/pipeline", f"{query}&compare=gpipe")
    assert time.process_time() - begin < 1, query
    assert got.status == 200, got.text[-400:]
    assert got.text.count('<rect class="span') <= 2 * 4000
    begin = time.process_time()
    assert answer(APP, "/pipeline/trace.json", query).status == 200
    assert time.process_time() - begin < 1, query
