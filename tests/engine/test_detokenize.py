"""Streamed text equals whole text, for every way to cut it into tokens."""

from __future__ import annotations

import random

import pytest

from rungway.engine.detokenize import Detokenizer


class Pieces:
    """A vocabulary made of given byte strings."""

    vocab_size = 1 << 20
    eos_ids: frozenset[int] = frozenset()

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]

    token_name = token_bytes


def stream(pieces: list[bytes], stops: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    detokenizer = Detokenizer(Pieces(pieces), stops)
    out = [detokenizer.push(token) for token in range(len(pieces))]
    return [*out, detokenizer.flush()], detokenizer.stopped


def test_random_bytes_give_what_one_decode_gives() -> None:
    rng = random.Random(0)
    alphabet = ["a", "é", "北", "🙂", "👩‍👩‍👧", "\n", "ก็"]
    for _ in range(500):
        data = "".join(rng.choice(alphabet) for _ in range(20)).encode()
        if rng.random() < 0.5:  # damage
            data = bytes(byte for byte in data if rng.random() > 0.1) + bytes([rng.randrange(256)])
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(15))
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        whole = data.decode("utf-8", "replace")
        text = "".join(stream(pieces)[0])
        # the one difference allowed: an unfinished character at the very end is left out
        assert whole in (text, text + "\ufffd")
        assert "\ufffd" not in text or "\ufffd" in whole


@pytest.mark.parametrize("stop", ["STOP", "é🙂", "aa", "\n\n"])
def test_every_split_of_a_stop_string(stop: str) -> None:
    data = f"xaSé{stop}tail{stop}".encode()
    whole = data.decode()[: data.decode().index(stop)]
    for first in range(len(data)):
        for second in range(first, len(data)):
            out, stopped = stream([data[:first], data[first:second], data[second:]], (stop,))
            assert "".join(out) == whole and stopped


def test_bytes_one_by_one_with_several_stops() -> None:
    rng = random.Random(1)
    for _ in range(400):
        text = "".join(rng.choice("abc") for _ in range(30))
        stops = tuple("".join(rng.choice("abc") for _ in range(rng.randint(2, 5))) for _ in range(3))
        ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
        expected = text[: min(ends)[1]] if ends else text
        sizes = [rng.randint(1, 4) for _ in range(30)]
        pieces, at = [], 0
        for size in sizes:
            pieces.append(text[at : at + size].encode())
            at += size
        assert "".join(stream(pieces, stops)[0]) == expected
        assert "".join(stream([char.encode() for char in text], stops)[0]) == expected


def test_text_is_held_back_only_while_a_stop_could_come() -> None:
    detokenizer = Detokenizer(Pieces([b"ab", b"<", b"b", b"<st", b"x", b"<s", b"top>z"]), ("<stop>",))
    assert [detokenizer.push(token) for token in range(7)] == ["ab", "", "<b", "", "<stx", "", ""]
    assert detokenizer.stopped and detokenizer.flush() == ""


def test_what_was_held_back_comes_at_the_end() -> None:
    out, stopped = stream([b"a<st"], ("<stop>",))
    assert out == ["a", "<st"] and not stopped
