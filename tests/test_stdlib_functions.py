"""The embedded data set: what is in it, its labels, its order, and its split."""

import ast
import collections
import inspect
import os
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from isostep.data.stdlib_functions import (
    BEGIN_TOKEN,
    END_TOKEN,
    VOCAB_SIZE,
    Example,
    Function,
    StdlibFunctions,
    stdlib_functions,
)
from isostep.errors import InputError
from isostep.objective import IGNORE

CONTEXT_LENGTH = 256


@pytest.fixture(scope="module")
def train() -> StdlibFunctions:
    return StdlibFunctions(CONTEXT_LENGTH)


@pytest.fixture(scope="module")
def validation() -> StdlibFunctions:
    return StdlibFunctions(CONTEXT_LENGTH, split="validation")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of the standard library. `read_again` reads it."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    return tmp_path


def read_again() -> dict[str, tuple[str, str]]:
    """Prompt and completion of each function, by name; not from the cache and not into it."""
    functions = stdlib_functions.__wrapped__()
    return {function.name: (function.prompt.decode(), function.completion.decode()) for function in functions}


def examples(dataset: StdlibFunctions) -> list[Example]:
    return [dataset[index] for index in range(len(dataset))]


def texts(dataset: StdlibFunctions) -> list[bytes]:
    return [bytes(example["input_ids"][1:-1].tolist()) for example in examples(dataset)]


def by_name() -> dict[str, Function]:
    return {function.name: function for function in stdlib_functions()}


def test_every_example_is_begin_text_end_and_fits(train: StdlibFunctions) -> None:
    assert len(train) > 1000
    for index, example in enumerate(examples(train)):
        ids, labels = example["input_ids"], example["labels"]
        assert example["id"] == index
        assert ids.dtype == labels.dtype == torch.int64
        assert ids.shape == labels.shape == (train.lengths[index],)
        assert len(ids) <= CONTEXT_LENGTH
        assert ids[0] == BEGIN_TOKEN
        assert ids[-1] == END_TOKEN
        assert ids[1:-1].max() < BEGIN_TOKEN < END_TOKEN < VOCAB_SIZE


def test_labels_mask_exactly_begin_and_prompt(train: StdlibFunctions) -> None:
    for example in examples(train):
        ids, labels = example["input_ids"], example["labels"]
        num_masked = int((labels == IGNORE).sum())
        assert (labels[:num_masked] == IGNORE).all()
        assert torch.equal(labels[num_masked:], ids[num_masked:])
        prompt, completion = bytes(ids[1:num_masked].tolist()), bytes(ids[num_masked:-1].tolist())
        assert prompt.endswith(b"\n")
        only_docstring = ast.parse(prompt).body[0]  # the prompt alone is a whole function: its docstring
        whole = ast.parse(prompt + completion).body[0]
        assert isinstance(only_docstring, ast.FunctionDef | ast.AsyncFunctionDef)
        assert isinstance(whole, ast.FunctionDef | ast.AsyncFunctionDef)
        assert len(only_docstring.body) == 1
        assert ast.get_docstring(only_docstring) == ast.get_docstring(whole) is not None
        assert len(whole.body) > 1


def test_text_is_the_source_of_the_function() -> None:
    function = by_name()["textwrap.indent"]
    assert (function.prompt + function.completion).decode() == inspect.getsource(textwrap.indent)
    method = by_name()["collections.Counter.most_common"]
    source = inspect.getsource(collections.Counter.most_common)
    assert (method.prompt + method.completion).decode() == textwrap.dedent(source)


def test_supervised_counts_are_unequal(train: StdlibFunctions) -> None:
    counts = sorted(int((example["labels"] != IGNORE).sum()) for example in examples(train))
    assert counts[0] >= 2
    assert counts[len(counts) * 9 // 10] > 4 * counts[len(counts) // 10]


def test_no_text_is_in_both_splits_and_none_twice(train: StdlibFunctions, validation: StdlibFunctions) -> None:
    train_texts, validation_texts = texts(train), texts(validation)
    assert set(train_texts).isdisjoint(validation_texts)
    assert len(set(train_texts)) == len(train_texts)
    assert 0.03 < len(validation) / (len(train) + len(validation)) < 0.07


def test_context_length_leaves_out_and_says_how_many(train: StdlibFunctions) -> None:
    wider = StdlibFunctions(2 * CONTEXT_LENGTH)
    assert len(wider) > len(train)
    assert len(wider) + wider.num_left_out == len(train) + train.num_left_out
    assert StdlibFunctions(10**9).num_left_out == 0


def test_fewer_examples_are_the_first_ones_from_many_modules(train: StdlibFunctions) -> None:
    few = StdlibFunctions(CONTEXT_LENGTH, max_examples=20)
    assert texts(few) == texts(train)[:20]
    first_names = [function.name for function in stdlib_functions()[:20]]
    assert len({name.split(".")[0] for name in first_names}) > 10


def test_same_content_in_another_file_order(train: StdlibFunctions, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = os.walk

    def walk_backwards(root: str) -> Iterator[tuple[str, list[str], list[str]]]:
        for folder, subfolders, names in walk(root):
            subfolders.sort(reverse=True)
            yield folder, subfolders, sorted(names, reverse=True)

    monkeypatch.setattr(os, "walk", walk_backwards)
    monkeypatch.setattr("isostep.data.stdlib_functions.stdlib_functions", stdlib_functions.__wrapped__)
    assert StdlibFunctions(CONTEXT_LENGTH).content_hash() == train.content_hash()


def test_content_hash_changes_with_the_content(train: StdlibFunctions, validation: StdlibFunctions) -> None:
    without_last = StdlibFunctions(CONTEXT_LENGTH, max_examples=len(train) - 1)
    hashes = {train.content_hash(), validation.content_hash(), without_last.content_hash()}
    assert len(hashes) == 3


def test_which_functions_are_taken_and_how_they_are_cut(library: Path) -> None:
    (library / "pack").mkdir()
    (library / "pack" / "__init__.py").write_text(
        '''
if True:
    class Outer:
        class Inner:
            @staticmethod
            async def method(  # a comment
                a=1,
            ):
                """One.

      Less indented.
                """
                # before the body

                def nested():
                    """Not an example of its own."""
                    return 1
                return nested  # end


def bare():
    return 1
def only_docstring():
    """Nothing follows."""
def one_line(): """Same line."""; return 2
def last():
    "No newline at the end of the file."
    return 3'''
    )
    assert read_again() == {
        "pack.Outer.Inner.method": (
            'async def method(  # a comment\n    a=1,\n):\n    """One.\n\n      Less indented.\n    """\n',
            "    # before the body\n\n    def nested():\n"
            '        """Not an example of its own."""\n        return 1\n    return nested  # end\n',
        ),
        "pack.last": ('def last():\n    "No newline at the end of the file."\n', "    return 3\n"),
    }


def test_which_files_are_read(library: Path) -> None:
    def write(name: str, function: str, before: str = "", encoding: str = "utf-8") -> None:
        path = library / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'{before}def {function}():\n    "é"\n    return "\\d"\n', encoding=encoding)

    write("plain.py", "plain")  # "\d" is an odd escape sequence; its warning must not come through
    write("latin.py", "latin", "# coding: latin-1\n", "latin-1")
    write("crlf.py", "crlf", "x = 1\r\n")
    write("broken.py", "broken", "print 'Python 2'\n")
    write("undecodable.py", "undecodable", encoding="latin-1")
    write("notes.txt", "text")
    for folder in ("test", "tests", "site-packages"):
        write(f"{folder}/module.py", "skipped")
    functions = read_again()
    assert sorted(functions) == ["crlf.crlf", "latin.latin", "plain.plain"]
    assert functions["latin.latin"][0] == 'def latin():\n    "é"\n'


def test_equal_texts_count_once(library: Path) -> None:
    for name in ("a.py", "b.py"):
        (library / name).write_text('def same():\n    "Same."\n    return 1\n')
    (library / "c.py").write_text('def same():\n    "Same."\n    return 2\n')
    assert len(read_again()) == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"context_length": 512, "split": "test"}, "split: got 'test'"),
        ({"context_length": 512, "max_examples": 0}, "max_examples: got 0"),
        ({"context_length": 3}, r"context_length: got 3, expected at least \d+, the shortest function"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        StdlibFunctions(**arguments)


def test_an_index_outside_of_the_data_set(validation: StdlibFunctions) -> None:
    assert validation[len(validation) - 1]["id"] == len(validation) - 1
    for index in (-1, len(validation)):
        with pytest.raises(IndexError):
            validation[index]
