"""Bytes as tokens: the vocabulary, an example as pieces of text, and a map-style data set of such examples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, TypeAlias, TypedDict

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..objective import IGNORE

BEGIN_TOKEN = 256
END_TOKEN = 257
VOCAB_SIZE = 258


class Example(TypedDict):
    """One text as tokens. `input_ids` and `labels` are int64 [length]; labels are not shifted."""

    id: int
    input_ids: Tensor
    labels: Tensor


class Piece(NamedTuple):
    """A part of an example. `ends`: END_TOKEN follows the text. `supervised`: text and end are targets."""

    text: bytes
    supervised: bool
    ends: bool

    @property
    def num_tokens(self) -> int:
        """One token for each byte, and one for the end."""
        return len(self.text) + self.ends


Pieces: TypeAlias = tuple[Piece, ...]
"""An example: BEGIN_TOKEN, which is never a target, and then its pieces."""


def num_tokens(pieces: Pieces) -> int:
    """Length of an example, begin and ends counted."""
    return 1 + sum(piece.num_tokens for piece in pieces)


def cut(pieces: Pieces, length: int) -> Pieces:
    """The first `length` >= 1 tokens of an example."""

    def kept() -> Iterator[Piece]:
        room = length - 1
        for piece in pieces:
            if room > 0:
                yield Piece(piece.text[:room], piece.supervised, piece.ends and piece.num_tokens <= room)
            room -= piece.num_tokens

    return tuple(kept())


class ByteExamples(Dataset[Example]):
    """Examples of byte tokens, map style: `data[i]` for 0 <= i < len(data). Kept as bytes, not as tensors.

    Tokens are bytes (id 0..255), BEGIN_TOKEN first and END_TOKEN behind a piece that ends. The labels are the
    input ids, with -100 at begin and over every piece that is not supervised. They are not shifted: a causal
    loss pairs the logits of position i with the label of position i + 1.

    Attributes: `lengths`, the tokens of each example in order; `num_left_out`, how many did not fit the context.
    """

    def __init__(self, examples: Sequence[Pieces], num_left_out: int = 0) -> None:
        self._examples = examples
        self.lengths = [num_tokens(pieces) for pieces in examples]
        self.num_left_out = num_left_out

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        """Example `index`, whose id is `index`. Raises IndexError outside of 0..len-1."""
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        input_ids = torch.full((self.lengths[index],), BEGIN_TOKEN)
        labels = torch.full_like(input_ids, IGNORE)
        start = 1
        for piece in self._examples[index]:
            stop = start + piece.num_tokens
            input_ids[start:stop] = END_TOKEN
            if piece.text:
                text = torch.frombuffer(bytearray(piece.text), dtype=torch.uint8)
                input_ids[start : start + len(piece.text)] = text
            if piece.supervised:
                labels[start:stop] = input_ids[start:stop]
            start = stop
        return {"id": index, "input_ids": input_ids, "labels": labels}

    @cached_property
    def num_supervised_tokens(self) -> int:
        """Targets of all examples after the causal shift; none is lost by it, since begin is never a target."""
        return sum(piece.num_tokens for pieces in self._examples for piece in pieces if piece.supervised)

    def content_hash(self) -> str:
        """SHA-256 (hex) over each example in order: id, length, input ids, labels, as little-endian int64."""
        digest = hashlib.sha256()
        for index, length in enumerate(self.lengths):
            example = self[index]
            header = torch.tensor([index, length])
            values = torch.cat((header, example["input_ids"], example["labels"]))
            digest.update(values.numpy().astype("<i8", copy=False).tobytes())
        return digest.hexdigest()
