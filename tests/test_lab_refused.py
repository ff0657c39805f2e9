"""What the lab refuses, and what every answer of it keeps to."""

from __future__ import annotations

import re
from typing import Any

import pytest

from isostep.lab.app import VIEWS
from isostep.lab.query import MAX_QUERY
from lab_server import APP, PATHS, answer, page

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


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
        ("/pipeline", "schedule=auto&forward-only=1", "forward-only: got True"),
        ("/pipeline", "schedule=auto&stages=8&microbatches=49", "8 stages x 49 microbatches = 392"),
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
