"""Data of one's own: forms of a file, tokens and targets, what does not fit, what is held out, what is refused."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from isostep import causal_lm, pad_batch
from isostep.config import Data
from isostep.data.stdlib_functions import StdlibFunctions
from isostep.data.text import load_split, read_text
from isostep.data.tokens import BEGIN_TOKEN, END_TOKEN, ByteExamples
from isostep.errors import InputError
from isostep.objective import IGNORE

CONTEXT_LENGTH = 64
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hé"},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": ""},
    ]
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory, so that paths in messages are short."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, content: str | bytes | Sequence[Any]) -> str:
    """A file of text, of bytes, or of one JSON value per line."""
    if not isinstance(content, (str, bytes)):
        content = "".join(f"{json.dumps(value)}\n" for value in content)
    Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    return name


def texts(count: int) -> list[dict[str, str]]:
    return [{"text": f"text {i}"} for i in range(count)]


def shown(data: ByteExamples, index: int = 0) -> tuple[str, str]:
    """Tokens of an example, and its targets, as text: begin is <, an end >, and a position without a target _."""
    signs = {BEGIN_TOKEN: "<", END_TOKEN: ">", IGNORE: "_"}
    example = data[index]
    assert example["id"] == index
    assert example["input_ids"].dtype == example["labels"].dtype == torch.int64
    assert data.lengths[index] == len(example["input_ids"]) == len(example["labels"])
    ids, labels = ("".join(signs.get(t) or chr(t) for t in example[k].tolist()) for k in ("input_ids", "labels"))
    return ids.encode("latin-1").decode(), labels


# ------------------------------------------------------------------------------------------------- forms


@pytest.mark.parametrize(
    ("line", "ids", "labels"),
    [
        ({"prompt": "ab", "completion": "cd"}, "<abcd>", "___cd>"),
        ({"completion": "", "prompt": "ab", "source": 3}, "<ab>", "___>"),
        ({"prompt": "", "completion": "cd"}, "<cd>", "_cd>"),
        ({"text": "ab", "prompt": "no form without a completion"}, "<ab>", "_ab>"),
        ({"text": ""}, "<>", "_>"),
        (CHAT, "<system:\nBe brief.>user:\nHé>assistant:\nHo>user:\n?>assistant:\n>",
         "_" * (1 + 18 + 10 + 11) + "Ho>" + "_" * (8 + 11) + ">"),
    ],
)  # fmt: skip
def test_forms_of_a_line(folder: Path, line: dict[str, Any], ids: str, labels: str) -> None:
    data = read_text(write("a.jsonl", [line]), 100)
    assert shown(data) == (ids, labels)
    assert len(data) == 1


def test_a_message_that_asks_for_nothing_has_no_target(folder: Path) -> None:
    unanswered = {"messages": [{"role": "user", "content": "Hi"}]}
    data = read_text(write("a.jsonl", [unanswered, {"messages": []}, {"text": "x"}]), CONTEXT_LENGTH)
    assert [shown(data, i)[1] for i in range(3)] == ["_" * 10, "_", "_x>"]
    assert data.num_supervised_tokens == 2


def test_lines_of_a_file_as_editors_write_it(folder: Path) -> None:
    content = b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "\xc3\xa9\\u2028\xe2\x80\xa8"}\n{"text": "no line break"}'
    data = read_text(write("a.JSONL", content), CONTEXT_LENGTH)
    assert [shown(data, i)[0] for i in range(len(data))] == ["<a>", "<é\u2028\u2028>", "<no line break>"]


def test_paragraphs(folder: Path) -> None:
    content = b"\xef\xbb\xbf\n \n one\n  two \n\n\t\r\nthree\r\nfour\r\n\r\n\nfiv\xc3\xa9"
    data = read_text(write("a.txt", content), CONTEXT_LENGTH)
    assert [shown(data, i)[0] for i in range(len(data))] == ["< one\n  two >", "<three\r\nfour>", "<fivé>"]
    assert shown(data)[1] == "_ one\n  two >"


def test_an_index_outside_of_the_data_set(folder: Path) -> None:
    data = read_text(write("a.txt", "a\n\nb"), CONTEXT_LENGTH)
    assert data[1]["id"] == 1
    for index in (-1, 2):
        with pytest.raises(IndexError):
            data[index]


def test_supervised_tokens_are_those_that_the_objective_counts(folder: Path) -> None:
    lines = [CHAT, {"text": "ab"}, {"prompt": "ab", "completion": "c"}, {"prompt": "p" * 200, "completion": "c"}]
    for context_length in (2, 47, 48, CONTEXT_LENGTH, 300):
        data = read_text(write("a.jsonl", lines), context_length, too_long="cut")
        assert data.num_supervised_tokens == causal_lm.count_of(pad_batch([data[i] for i in range(len(data))]))
    stdlib = StdlibFunctions(128, max_examples=50)
    assert stdlib.num_supervised_tokens == causal_lm.count_of(pad_batch([stdlib[i] for i in range(len(stdlib))]))


def test_content_hash_follows_tokens_and_targets_and_not_the_file(folder: Path) -> None:
    def hash_of(name: str, content: Any) -> str:
        return read_text(write(name, content), CONTEXT_LENGTH).content_hash()

    same = [hash_of("a.txt", "ab\n\ncd\n"), hash_of("b.jsonl", [{"text": "ab"}, {"text": "cd"}])]
    assert same[0] == same[1]
    others = [
        hash_of("a.jsonl", [{"prompt": "a", "completion": "b"}, {"text": "cd"}]),
        hash_of("a.jsonl", [{"text": "cd"}, {"text": "ab"}]),
        hash_of("a.jsonl", [{"text": "ab"}]),
    ]
    assert len({same[0], *others}) == 4


def test_examples_are_kept_as_bytes(folder: Path) -> None:
    data = read_text(write("a.jsonl", [{"text": "x" * 10_000}] * 20), 20_000)
    kept = [vars(data), *vars(data).values()]
    assert not any(isinstance(value, torch.Tensor) for value in kept)
    pieces = [piece for example in data._examples for piece in example]
    assert sum(sys.getsizeof(piece.text) for piece in pieces) < 20 * 10_100


# ------------------------------------------------------------------------------------------------- what does not fit


def test_too_long_is_refused_with_its_place(folder: Path) -> None:
    path = write("a.jsonl", '{"text": "four"}\n\n{"text": "fives"}\n')
    assert len(read_text(path, 7)) == 2
    with pytest.raises(InputError, match=re.escape("length of a.jsonl, line 3: got 7, expected at most 6 tokens, the")):
        read_text(path, 6)


def test_too_long_is_left_out_and_counted(folder: Path) -> None:
    path = write("a.txt", "four\n\nfives\n\nsix\n\nsevenths")
    data = read_text(path, 6, too_long="leave-out")
    assert [shown(data, i)[0] for i in range(len(data))] == ["<four>", "<six>"]
    assert data.num_left_out == 2
    assert read_text(path, 10, too_long="leave-out").num_left_out == 0


@pytest.mark.parametrize(
    ("context_length", "ids", "labels"),
    [(7, "<abcde>", "___cde>"), (6, "<abcde", "___cde"), (4, "<abc", "___c"), (2, "<a", "__")],
)
def test_too_long_is_cut(folder: Path, context_length: int, ids: str, labels: str) -> None:
    path = write("a.jsonl", [{"prompt": "ab", "completion": "cde"}, {"text": ""}])
    data = read_text(path, context_length, too_long="cut")
    assert shown(data) == (ids, labels)
    assert data.num_left_out == 0


@pytest.mark.parametrize("length", range(1, 49))
def test_a_cut_example_is_the_beginning_of_the_whole(folder: Path, length: int) -> None:
    path = write("a.jsonl", [CHAT, {"text": ""}])
    whole, beginning = read_text(path, 100)[0], read_text(path, max(2, length), too_long="cut")[0]
    for key in ("input_ids", "labels"):
        assert torch.equal(beginning[key], whole[key][: max(2, length)])


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "a.jsonl, line 2: got '{', expected JSON; mend or remove the line"),
        ("[" * 100_000, "a.jsonl, line 2: got '[[[[["),
        ("{'text': 'a'}", "a.jsonl, line 2: got \"{'text': 'a'}\", expected JSON"),
        ('"text"', "a.jsonl, line 2: got 'text', expected an object with prompt and completion, or text, or messages"),
        ("[1]", "a.jsonl, line 2: got [1], expected an object"),
        ('{"prompt": "a"}', "a.jsonl, line 2: got ['prompt'], expected an object with prompt and completion, or text"),
        ("{}", "a.jsonl, line 2: got [], expected an object with"),
        ('{"text": "a", "messages": []}', "a.jsonl, line 2: got ['text', 'messages'], expected one form: "),
        ('{"text": 3}', "'text' of a.jsonl, line 2: got 3, expected text"),
        ('{"text": null}', "'text' of a.jsonl, line 2: got None, expected text"),
        ('{"prompt": ["a"], "completion": "b"}', "'prompt' of a.jsonl, line 2: got ['a'], expected text"),
        ('{"prompt": "a", "completion": true}', "'completion' of a.jsonl, line 2: got True, expected text"),
        ('{"text": "a\\ud800"}', "'text' of a.jsonl, line 2: got 'half a surrogate pair at character 2', expected"),
        ('{"messages": {}}', "'messages' of a.jsonl, line 2: got {}, expected a list of objects"),
        ('{"messages": ["a"]}', "message 0 of a.jsonl, line 2: got 'a', expected an object with role and content"),
        ('{"messages": [{"role": "user"}]}', "message 0 of a.jsonl, line 2: got {'role': 'user'}, expected an object"),
        ('{"messages": [{"role": "Assistant", "content": ""}]}',
         "'role' of message 0 of a.jsonl, line 2: got 'Assistant', expected one of system, developer, user, assistant"),
        ('{"messages": [{"role": ["user"], "content": ""}]}', "'role' of message 0 of a.jsonl, line 2: got ['user']"),
        ('{"messages": [{"role": "user", "content": null}]}',
         "'content' of message 0 of a.jsonl, line 2: got None, expected text"),
        ('{"messages": [{"role": "user", "content": "\\udfff"}]}',
         "'content' of message 0 of a.jsonl, line 2: got 'half a surrogate pair at character 1'"),
        (b'{"text": "a\xff"}', "a.jsonl, line 2: got 'byte 12 that is not UTF-8', expected text in UTF-8"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_example(folder: Path, line: str | bytes, message: str) -> None:
    line = line.encode() if isinstance(line, str) else line
    with pytest.raises(InputError) as caught:
        read_text(write("a.jsonl", b'{"text": "good"}\n' + line + b"\n"), CONTEXT_LENGTH)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "data file: got 'none.jsonl', expected one that can be read; No such file or directory"),
        ("folder.txt", "folder", "data file: got 'folder.txt', expected one that can be read; Is a directory"),
        ("nul\0.txt", None, "data file: got 'nul\\x00.txt', expected one that can be read; embedded null byte"),
        ("a.json", b"{}", "data file: got 'a.json', expected a name in .jsonl or .txt; rename or convert it"),
        ("jsonl", b"{}", "data file: got 'jsonl', expected a name in"),
        ("a.jsonl", b"", "a.jsonl: got 'no example', expected one or more that fit"),
        ("a.txt", b"\n \n", "a.txt: got 'no example', expected one or more that fit"),
        ("a.txt", b"good\n\n\xe9", "a.txt, line 3: got 'byte 1 that is not UTF-8'"),
        ("a.txt", "good".encode("utf-16"), "a.txt, line 1: got 'byte 1 that is not UTF-8'"),
        ("a.jsonl", [{"messages": [{"role": "user", "content": "a"}]}], "a.jsonl: got 'no supervised token in all"),
    ],
)
def test_a_file_that_holds_no_data(folder: Path, name: str, content: Any, message: str) -> None:
    if content == "folder":
        Path(name).mkdir()
    elif content is not None:
        write(name, content)
    with pytest.raises(InputError) as caught:
        read_text(name, CONTEXT_LENGTH)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_nothing_that_fits_and_nothing_left_to_learn(folder: Path) -> None:
    path = write("a.jsonl", [{"prompt": "p" * 10, "completion": "c"}] * 3)
    with pytest.raises(InputError, match=r"a.jsonl: got '3 examples, all longer than the context', expected one or"):
        read_text(path, 11, too_long="leave-out")
    with pytest.raises(InputError, match=r"a.jsonl: got 'no supervised token in all of it', expected one or more"):
        read_text(path, 11, too_long="cut")
    assert read_text(path, 12, too_long="cut").num_supervised_tokens == 3


# ------------------------------------------------------------------------------------------------- two splits


def split_of(context_length: int = CONTEXT_LENGTH, **values: Any) -> tuple[ByteExamples, ByteExamples]:
    return load_split(Data(**values), context_length)


def all_of(data: ByteExamples) -> list[str]:
    return [shown(data, i)[0] for i in range(len(data))]


def test_a_share_is_held_out_by_content(folder: Path) -> None:
    lines = texts(1000)
    whole = read_text(write("a.jsonl", lines), CONTEXT_LENGTH)
    train, validation = split_of(source="a.jsonl", validation_percent=20.0)
    assert 150 < len(validation) < 250
    assert sorted(all_of(train) + all_of(validation)) == sorted(all_of(whole))
    in_train = set(all_of(train))
    assert all_of(train) == [text for text in all_of(whole) if text in in_train]
    same = split_of(source=write("b.jsonl", lines[::-1]), validation_percent=20.0)
    assert [set(all_of(side)) for side in same] == [set(all_of(train)), set(all_of(validation))]
    more = split_of(source="a.jsonl", validation_percent=40.0)[1]
    assert set(all_of(validation)) < set(all_of(more))


def test_the_same_text_is_never_in_both(folder: Path) -> None:
    lines = [
        line
        for i in range(200)
        for line in ({"text": f"text {i}"}, {"text": f"text {i}"}, {"prompt": f"text {i}", "completion": ""})
    ]
    train, validation = split_of(source=write("a.jsonl", lines), validation_percent=50.0)
    assert len(train) % 3 == len(validation) % 3 == 0
    assert set(all_of(train)).isdisjoint(all_of(validation))
    long = [{"text": f"text {i} and its tail"} for i in range(200)] + texts(200)
    cut = split_of(8, source=write("a.jsonl", long), validation_percent=50.0, too_long="cut")
    assert set(all_of(cut[0])).isdisjoint(all_of(cut[1]))


def test_ids_count_from_0_in_each(folder: Path) -> None:
    for side in split_of(source=write("a.jsonl", texts(40)), validation_percent=50.0):
        assert [side[i]["id"] for i in range(len(side))] == list(range(len(side)))
        assert len(side) > 10


def test_what_is_left_out_counts_on_its_side(folder: Path) -> None:
    lines = texts(50) + [{"text": f"text {i} {'x' * 99}"} for i in range(50)]
    train, validation = split_of(source=write("a.jsonl", lines), validation_percent=50.0, too_long="leave-out")
    assert len(train) + len(validation) == train.num_left_out + validation.num_left_out == 50
    assert 10 < validation.num_left_out < 40


def test_a_validation_file_of_its_own(folder: Path) -> None:
    write("a.jsonl", texts(3))
    train, validation = split_of(source="a.jsonl", validation=write("b.txt", "b"))
    assert all_of(train) == ["<text 0>", "<text 1>", "<text 2>"]
    assert all_of(validation) == ["<b>"]
    with pytest.raises(InputError, match=r"length of b.txt, line 1: got 3"):
        split_of(2, source=write("empty.jsonl", [{"text": ""}]), validation="b.txt")
    assert all_of(split_of(2, source="empty.jsonl", validation="b.txt", too_long="cut")[1]) == ["<b"]


def test_the_embedded_functions_and_their_splits(folder: Path) -> None:
    train, validation = split_of(96)
    assert train.content_hash() == StdlibFunctions(96).content_hash()
    assert validation.content_hash() == StdlibFunctions(96, split="validation").content_hash()
    ignored = split_of(96, validation_percent=50.0, too_long="cut")
    assert [side.content_hash() for side in ignored] == [train.content_hash(), validation.content_hash()]
    train, validation = split_of(96, validation=write("b.txt", "b"))
    assert train.content_hash() == StdlibFunctions(96).content_hash()
    assert all_of(validation) == ["<b>"]


@pytest.mark.parametrize(("percent", "side"), [(0.001, "validation"), (99.999, "train")])
def test_a_share_that_leaves_nothing(folder: Path, percent: float, side: str) -> None:
    with pytest.raises(InputError) as caught:
        split_of(source=write("a.jsonl", texts(3)), validation_percent=percent)
    assert str(caught.value) == (
        f"data.validation_percent: got {percent}, expected a share that leaves {side} a supervised token; "
        "give another one, or a file as [data] validation, for the 3 examples of a.jsonl"
    )


def test_a_side_without_a_target_is_as_good_as_empty(folder: Path) -> None:
    unanswered = [{"messages": [{"role": "user", "content": f"{i}"}]} for i in range(100)]
    write("a.jsonl", [*unanswered, {"text": "the only target"}])
    with pytest.raises(InputError, match=r"leaves (train|validation) a supervised token"):
        split_of(source="a.jsonl", validation_percent=50.0)
