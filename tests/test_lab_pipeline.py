"""The view *Pipeline* of the lab: numbers, pictures, searches and files are the library's."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import time
from xml.etree import ElementTree

import pytest

from isostep.commands.simulate import configure
from isostep.commands.simulate_text import _cadence
from isostep.lab.pipeline import slowest
from isostep.lab.pipeline_state import CHOOSE_CHUNKS, MAX_SEARCHED, MAX_WORK
from isostep.schedule import csv_file, gantt_svg, search, trace
from isostep.schedule.generate import NAMES, generate
from lab_server import APP, answer, numbers, page, simulated


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
    busiest = [rank for rank, work in enumerate(sim.busy) if work == pytest.approx(max(sim.busy))]
    assert ("slowest" in shown) == (len(busiest) == 1)
    assert [sim.schedule.rank_of[int(shown["slowest"])]] == busiest if "slowest" in shown else len(busiest) > 1
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
    assert f"zb-v is {first.makespan - second.makespan:g}" in text


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


@pytest.mark.parametrize(
    ("query", "name", "note"),
    [
        ("stages=4&microbatches=8", "none: equal work", "of the longest chain is on stage"),
        ("forward=1,1,2,1", "stage 2", "its rank sets the cadence"),
        ("forward=2,1,1,2", "none: 2 ranks tie", "of the longest chain is on stage"),
        ("schedule=zb-v&forward=1,1,2,1", "none: 2 ranks tie", "of the longest chain is on chunk"),
        ("schedule=interleaved-1f1b&stages=3&forward=1,2,1.5", "chunk 5 (rank 2)", "its rank sets the cadence"),
        ("schedule=interleaved-1f1b&chunks=3", "none: equal work", "of the longest chain is on chunk"),
        ("forward=0&input-grad=0&weight-grad=0", "none: equal work", "0.0 % of the longest chain"),
    ],
)
def test_the_slowest_stage_is_the_one_with_the_most_work(query: str, name: str, note: str) -> None:
    tile = re.search(r"<dt>Slowest stage</dt><dd>(.*?)</dd>", page("/pipeline", query), re.DOTALL)
    assert tile
    said = re.sub("<[^>]*>", "", tile[1])
    assert said.startswith(name)
    assert note in said


def test_the_slowest_stage_is_where_the_command_says_that_it_sets_the_cadence() -> None:
    found = set()
    for name in ("1f1b", "zb-h1", "interleaved-1f1b", "zb-v"):
        for forward in ([1, 1, 1, 1], [1, 1, 2, 1], [1.05, 1, 1, 1], [2, 1, 1, 2]):
            sim = simulated(name, 4, 8, forward=forward)
            shown = slowest(sim)
            sets = "sets the cadence" in _cadence(sim)
            assert sets == ("sets the cadence" in shown["note"])
            assert not sets or shown["stage"] == sim.critical_stage
            found.add((sets, shown["stage"] is None))
    assert found >= {(True, False), (False, True)}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in CHOOSE_CHUNKS])
def test_schedules_without_a_choice_of_chunks_ignore_it(name: str) -> None:
    assert numbers(page("/pipeline", f"schedule={name}&chunks=3")) == numbers(page("/pipeline", f"schedule={name}"))


@pytest.mark.parametrize("name", CHOOSE_CHUNKS)
def test_schedules_with_a_choice_of_chunks_take_it(name: str) -> None:
    for query, place in ((f"schedule={name}", 0), (f"schedule=1f1b&compare={name}", 1)):
        assert numbers(page("/pipeline", f"{query}&chunks=3"))[f"{place}.chunks"] == 3


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("compare=auto&forward-only=1", "forward-only: got True"),
        ("compare=auto&stages=8&microbatches=49", "auto searches at most 384 stages x microbatches here"),
        ("compare=interleaved-1f1b&microbatches=9", "microbatches: got 9"),
        ("compare=dualpipe-v&microbatches=7", "microbatches: got 7"),
        ("schedule=gpipe&compare=zb-v&from=30", "from: got 30.0"),
    ],
)
def test_where_the_second_schedule_cannot_be_drawn_the_first_is(query: str, reason: str) -> None:
    text = page("/pipeline", query)
    said = re.findall(r'<p class="refused soft" data-summary>(.*?)</p>', text)
    assert len(said) == 1
    assert said[0].startswith("Not beside it: ")
    assert reason in said[0]
    alone = page("/pipeline", re.sub("compare=[^&]*&", "", query))
    assert numbers(text) == numbers(alone)


def test_the_command_for_a_larger_search_is_exact() -> None:
    """It is read by the command's own parser, and comes to the same arguments."""
    query = "stages=3&microbatches=200&forward=1,2,1.5&input-grad=0.5&transfer=0.1,0.25&recompute=1&memory-limit=4"
    got = answer(APP, "/pipeline", f"schedule=auto&{query}")
    assert got.status == 400
    command = re.search(r"`(isostep simulate [^`]*)`", got.text)
    assert command
    parser = argparse.ArgumentParser()
    configure(parser)
    args = parser.parse_args(shlex.split(command[1])[2:])
    assert (args.schedule, args.stages, args.microbatches, args.memory_limit) == ("auto", 3, 200, 4)
    assert (args.forward, args.input_grad, args.weight_grad) == ([1, 2, 1.5], [0.5], [1])
    assert (args.transfer, args.recompute) == ([0.1, 0.25], 0.0)


def test_a_search_ends_where_it_takes_long() -> None:
    """Costs as unequal as these ask for more orders than the lab tries."""
    forward, weight_grad = ",".join("1231" * 3), ",".join(["0.5", "1", "1.5", "0.5"] * 3)
    state = f"stages=12&microbatches=16&forward={forward}&weight-grad={weight_grad}"
    begin = time.process_time()
    got = answer(APP, "/pipeline", f"schedule=auto&{state}")
    assert time.process_time() - begin < 2
    assert got.status == 400
    assert "auto: got &#39;more than 280 orders to try&#39;" in got.text


def test_dualpipe_v_says_how_its_pairs_are_timed() -> None:
    said = "dualpipe-v: the two actions of an overlapped pair are timed one after the other."
    assert said in page("/pipeline", "schedule=dualpipe-v")
    assert page("/pipeline", "compare=dualpipe-v").count(said) == 1
    assert said not in page("/pipeline", "schedule=zb-v&compare=1f1b")


def test_transfers_may_differ_from_link_to_link() -> None:
    shown = numbers(page("/pipeline", "stages=3&microbatches=6&transfer=0.5,0.125"))
    assert shown["makespan"] == simulated("1f1b", 3, 6, transfer=[0.5, 0.125]).makespan
    assert shown["makespan"] != simulated("1f1b", 3, 6, transfer=0.5).makespan


def test_a_large_picture_is_cut_and_links_move_it() -> None:
    text = page("/pipeline", "schedule=1f1b&stages=8&microbatches=600")
    assert "A picture holds 4,000 actions at most." in text
    assert 3000 < text.count('<rect class="span') <= 4000
    later = re.search(r'<a href="/pipeline\?([^"]*)" data-here>Later</a>', text)
    assert later
    assert later[1].endswith("#gantt")
    after = page("/pipeline", later[1].removesuffix("#gantt").replace("&amp;", "&"))
    assert 3000 < after.count('<rect class="span') <= 4000
    assert "Earlier</a>" in after
    assert "Earlier</a>" not in text


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
        stem = f"interleaved-1f1b-2-stages-4-microbatches-[0-9a-f]{{8}}-{re.escape(name)}"
        assert re.fullmatch(f'attachment; filename="{stem}"', got.headers["content-disposition"])
        link = re.search(rf'href="(/pipeline/{name}\?[^"]*)" download', text)
        assert link
        path, _, linked = link[1].replace("&amp;", "&").partition("?")
        assert answer(APP, path, linked).text == content


def test_the_names_of_files_tell_states_apart() -> None:
    def name(query: str) -> str:
        return answer(APP, "/pipeline/gantt.svg", query).headers["content-disposition"]

    states = ("", "forward=2", "transfer=0.5", "memory-limit=4", "recompute=1", "from=1", "from=1&to=9")
    assert len({name(query) for query in states}) == len(states)
    same = ("", "schedule=1f1b&stages=4", "forward=1.0", "compare=zb-v", "chunks=3")
    assert len({name(query) for query in same}) == 1


def test_the_files_of_a_second_schedule_are_its_own() -> None:
    text = page("/pipeline", "schedule=interleaved-1f1b&chunks=4&compare=zb-v")
    links = [link.replace("&amp;", "&") for link in re.findall(r'href="/pipeline/schedule.csv\?([^"]*)"', text)]
    assert [answer(APP, "/pipeline/schedule.csv", link).text for link in links] == [
        csv_file.text(generate("interleaved-1f1b", 4, 8, 4)),
        csv_file.text(generate("zb-v", 4, 8)),
    ]


def test_pictures_are_xml() -> None:
    text = page("/pipeline", "compare=zb-v&memory-limit=4&transfer=0.1")
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)


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
