"""The CPU kernels against their formulae, and what happens where they cannot be compiled."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from rungway.kernels import attention_reference
from rungway.kernels import reference as plain
from rungway.kernels.cpu import bindings, build, layouts, reference
from rungway.kernels.cpu.__main__ import main
from rungway.kernels.cpu.build import BuildError

try:
    bindings.library()
    MISSING = ""
except BuildError as error:
    MISSING = str(error)

needs_kernels = pytest.mark.skipif(bool(MISSING), reason=MISSING or "compiled")
SHAPES = [(1, 64, 64), (5, 100, 72), (8, 960, 576), (17, 64, 4), (33, 130, 130), (4, 320, 1000), (0, 64, 64)]


@pytest.fixture(scope="module", params=["native", "without bfloat16"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """As this processor has it, and as one without instructions for bfloat16 does."""
    if request.param == "native":
        return bindings.library()
    return bindings.load(build.built(tmp_path_factory.mktemp("kernels"), extra=("-mno-avx512bf16",)))


class Layer(NamedTuple):
    packed: bindings.Linear
    kept: tuple[torch.Tensor | None, ...]
    codes: torch.Tensor
    scales: torch.Tensor


def linear(weight: torch.Tensor, bias: torch.Tensor | None, kind: int) -> Layer:
    scales = weight.abs().amax(1) / reference.PEAK
    codes = (weight / scales[:, None]).round().to(torch.int8)
    packed = layouts.pack_codes(codes) if kind == bindings.CODES else layouts.pack_halves(weight)
    kept = (packed, layouts.pad_row(scales), None if bias is None else layouts.pad_row(bias))
    addresses = [None if part is None else part.data_ptr() for part in kept]
    sizes = (kind, *weight.shape, layouts.padded(weight.shape[1]))
    return Layer(bindings.Linear(*addresses, *sizes), kept, codes, scales)


def run(library: Any, layer: Layer, x: torch.Tensor, add: torch.Tensor | None = None, threads: int = 1) -> torch.Tensor:
    y = torch.full((len(x), layer.packed.outputs), 7.0) if add is None else add.clone()
    assert library.rw_linear(layer.packed, x.data_ptr(), len(x), y.data_ptr(), add is not None, threads) == 0
    return y


@needs_kernels
@pytest.mark.parametrize("kind", [bindings.CODES, bindings.HALVES], ids=["codes", "halves"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear(library: Any, shape: tuple[int, int, int], kind: int) -> None:
    rows, outputs, inputs = shape
    generator = torch.Generator().manual_seed(1)
    weight, bias, x = (
        torch.randn(*size, generator=generator) for size in ((outputs, inputs), (outputs,), (rows, inputs))
    )
    x[:1] = 0.0
    for given in (bias, None):
        layer = linear(weight, given, kind)
        if kind == bindings.CODES:
            expected = reference.linear_codes(x, layer.codes, layer.scales, given)
        else:
            expected = reference.linear_halves(x, weight, given)
        # codes: sums are exact, what is left is the order of three multiplications
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if kind == bindings.CODES else {"rtol": 1e-4, "atol": 2e-4}
        torch.testing.assert_close(run(library, layer, x), expected, **tolerance)
        torch.testing.assert_close(run(library, layer, x, add=expected), 2 * expected, **tolerance)


@needs_kernels
@pytest.mark.parametrize("kind", [bindings.CODES, bindings.HALVES], ids=["codes", "halves"])
def test_rows_do_not_know_each_other(library: Any, kind: int) -> None:
    torch.manual_seed(1)
    layer, x = linear(torch.randn(300, 200), torch.randn(300), kind), torch.randn(70, 200)
    together = run(library, layer, x)
    for count in (1, 2, 3, 4, 5, 8, 9):
        assert torch.equal(run(library, layer, x[-count:].contiguous()), together[-count:])
    loud = x.clone()
    loud[0] *= 50.0
    loud[1] = float("nan")
    loud[2, 5] = float("inf")
    beside = run(library, layer, loud)
    assert torch.equal(beside[3:], together[3:]) and not beside[1:3].isfinite().any(1).all()
    assert torch.equal(run(library, layer, x, threads=3), together)


@needs_kernels
@pytest.mark.parametrize("kind", [bindings.CODES, bindings.HALVES], ids=["codes", "halves"])
def test_gated_linear(library: Any, kind: int) -> None:
    torch.manual_seed(1)
    weight, bias, x = torch.randn(256, 96) * 0.3, torch.randn(256), torch.randn(7, 96)
    layer = linear(weight, bias, kind)
    got = torch.empty(7, 128)
    assert library.rw_gated_linear(layer.packed, x.data_ptr(), 7, got.data_ptr(), 2) == 0
    torch.testing.assert_close(got, plain.swiglu(run(library, layer, x)), rtol=1e-5, atol=1e-6)
    extremes = torch.tensor([[-1e30, 1.0], [1e4, 1.0], [-100.0, 2.0], [0.0, 3.0]])
    pairs = linear(torch.eye(2).repeat_interleave(64, 0), None, bindings.HALVES)
    got = torch.empty(4, 64)
    assert library.rw_gated_linear(pairs.packed, extremes.data_ptr(), 4, got.data_ptr(), 1) == 0
    torch.testing.assert_close(got[:, 0], plain.swiglu(extremes.bfloat16().float())[:, 0], rtol=1e-5, atol=1e-6)


@needs_kernels
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 100), (2, 576), (4, 1000)])
def test_norm_and_codes(library: Any, rows: int, size: int) -> None:
    torch.manual_seed(1)
    x, weight, stride = torch.randn(rows, size), torch.randn(size), layouts.padded(size)
    x[0] = 0.0
    h, scales, sums = torch.empty(rows, size), torch.empty(rows), torch.empty(rows, dtype=torch.int32)
    codes = torch.full((rows, stride), 9, dtype=torch.int8)
    where = (part.data_ptr() for part in (h, codes, scales, sums))
    library.rw_norm_codes(x.data_ptr(), weight.data_ptr(), 1e-5, rows, size, stride, *where)
    torch.testing.assert_close(h, plain.rms_norm(x, weight, 1e-5)[0], rtol=1e-5, atol=1e-6)
    expected, by = reference.encode(h)
    torch.testing.assert_close(scales[:, None], by, rtol=1e-6, atol=0.0)
    assert (codes[:, :size].int() - expected.int()).abs().max() <= 1  # a tie may go the other way
    assert codes[:, size:].eq(0).all() and torch.equal(sums, codes.int().sum(1, dtype=torch.int32))


class World:
    """Sequences in a cache whose unused blocks, and unused places in used ones, are NaN."""

    def __init__(self, heads: int, kv_heads: int, dim: int, block_tokens: int, lengths: list[int]) -> None:
        generator = torch.Generator().manual_seed(sum(lengths))
        self.model = bindings.Model(heads=heads, kv_heads=kv_heads, dim=dim, scale=dim**-0.5, eps=1e-5)
        self.lengths, self.block_tokens = lengths, block_tokens
        counts = [-(-length // block_tokens) for length in lengths]
        order = torch.randperm(sum(counts) + 3, generator=generator)
        self.tables = [part.contiguous() for part in order[: sum(counts)].split(counts)]
        self.cache = torch.full((2, kv_heads, len(order), block_tokens, dim), float("nan"), dtype=torch.bfloat16)
        self.qkv = [torch.randn(length, heads + 2 * kv_heads, dim, generator=generator) for length in lengths]
        self.frequencies = 10000.0 ** (-torch.arange(0, dim, 2).float() / dim)

    def step(self, rows: list[tuple[int, int, int]], threads: int = 1) -> tuple[bindings.Step, torch.Tensor, list[Any]]:
        """Rows of a step and their qkv: (sequence, first position, count)."""
        positions = torch.cat([torch.arange(first, first + count) for _, first, count in rows])
        tables = [self.tables[seq] for seq, _, count in rows for _ in range(count)]
        blocks = torch.stack([table[at // self.block_tokens] for table, at in zip(tables, positions, strict=True)])
        slots = blocks * self.block_tokens + positions % self.block_tokens
        turns = positions[:, None].float() * self.frequencies
        stretches, start = np.zeros(len(rows), dtype=bindings.STRETCH), 0
        for at, (seq, first, count) in enumerate(rows):
            stretches[at] = (start, count, first, self.tables[seq].data_ptr())
            start += count
        kept = [slots, turns.cos(), turns.sin(), stretches]
        step = bindings.Step(
            slots=slots.data_ptr(),
            cos=kept[1].data_ptr(),
            sin=kept[2].data_ptr(),
            stretches=stretches.ctypes.data,
            blocks=self.cache.shape[2],
            block_tokens=self.block_tokens,
            tokens=start,
            stretch_count=len(rows),
            threads=threads,
        )
        return step, torch.cat([self.qkv[seq][first : first + count] for seq, first, count in rows]), kept

    def attend(
        self, library: Any, rows: list[tuple[int, int, int]], threads: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps the rows and attends; (queries, results)."""
        step, qkv, kept = self.step(rows, threads)
        q = torch.empty(len(qkv), self.model.heads, self.model.dim, dtype=torch.bfloat16)
        out = torch.full(q.shape, 7.0)
        library.rw_place(self.model, step, self.cache.data_ptr(), qkv.data_ptr(), q.data_ptr())
        library.rw_attend(self.model, step, self.cache.data_ptr(), q.data_ptr(), out.data_ptr())
        del kept
        return q, out


WORLDS = [
    (4, 4, 64, 16, [1, 15, 16, 17]),
    (9, 3, 64, 16, [63, 64, 65]),
    (14, 2, 64, 32, [130, 5]),
    (8, 1, 96, 16, [55]),
    (4, 2, 32, 48, [300, 7]),
    (64, 1, 128, 16, [40]),
    (12, 2, 128, 16, [200]),
    (2, 1, 256, 16, [70]),
]


@needs_kernels
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_placing_and_attention(library: Any, world: tuple[int, int, int, int, list[int]]) -> None:
    made = World(*world)
    heads, kv_heads, dim, _, lengths = world
    q, got = made.attend(library, [(seq, 0, length) for seq, length in enumerate(lengths)])
    keys, values = layouts.plain_cache(made.cache)
    start = 0
    for seq, length in enumerate(lengths):
        qkv, positions = made.qkv[seq], torch.arange(length)
        rotated_q, rotated_k = plain.rope(qkv[:, :heads], qkv[:, heads:-kv_heads], positions, made.frequencies)
        torch.testing.assert_close(q[start : start + length].float(), rotated_q, rtol=0.01, atol=0.01)
        blocks = made.tables[seq]
        kept_k = keys[:, blocks].reshape(kv_heads, -1, dim)[:, :length]
        kept_v = values[:, blocks].reshape(kv_heads, -1, dim)[:, :length]
        torch.testing.assert_close(kept_k.transpose(0, 1).float(), rotated_k, rtol=0.01, atol=0.01)
        assert torch.equal(kept_v.transpose(0, 1), qkv[:, -kv_heads:].bfloat16())
        table = blocks.expand(length, -1).contiguous()
        mine = q[start : start + length].float()
        expected = attention_reference.paged_attention(
            mine, keys.float(), values.float(), table, positions + 1, dim**-0.5
        )
        torch.testing.assert_close(got[start : start + length], expected, rtol=0.02, atol=0.01)
        start += length
    assert start == len(got) and got.isfinite().all()


@needs_kernels
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_attention_has_one_order(library: Any, world: tuple[int, int, int, int, list[int]]) -> None:
    """Whole prompts together, token by token, in uneven chunks, with threads: the same bits."""
    lengths = world[-1]
    whole = [(seq, 0, length) for seq, length in enumerate(lengths)]
    expected = World(*world).attend(library, whole)[1]
    assert torch.equal(World(*world).attend(library, whole, threads=3)[1], expected)
    start = 0
    for seq, length in enumerate(lengths):
        for size in (1, 7):
            alone = World(*world)
            parts = [(first, min(size, length - first)) for first in range(0, length, size)]
            got = torch.cat([alone.attend(library, [(seq, first, count)])[1] for first, count in parts])
            assert torch.equal(got, expected[start : start + length])
        start += length


@needs_kernels
@pytest.mark.parametrize("rising", [True, False], ids=["rising", "falling"])
def test_scores_that_grow_far_and_a_row_that_is_not_a_number(library: Any, rising: bool) -> None:
    """The weights' peak has to move, often or never again; and one bad query spoils its own result alone."""
    made = World(2, 1, 64, 16, [400])
    steps = torch.linspace(0.0, 30.0, 400)
    made.frequencies.zero_()  # no rotation: scores are what the factors below make them
    made.qkv[0][:, :2] = 1.0
    made.qkv[0][:, 2] = (steps if rising else steps.flip(0))[:, None]
    q, got = made.attend(library, [(0, 0, 400)])
    keys, values = layouts.plain_cache(made.cache)
    table = made.tables[0].expand(400, -1).contiguous()
    expected = attention_reference.paged_attention(
        q.float(), keys.float(), values.float(), table, torch.arange(1, 401), made.model.scale
    )
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)
    made.qkv[0][200, 1] = float("nan")
    beside = made.attend(library, [(0, 0, 400)])[1]
    assert beside[200, 1].isnan().all()
    beside[200, 1] = got[200, 1]
    assert torch.equal(beside, got)


@needs_kernels
def test_values_that_nobody_sees_do_not_matter(library: Any) -> None:
    """What an earlier owner left behind in a block, NaN here, stays out of the sums: `attend` writes token by token."""
    made = World(4, 2, 64, 16, [35])
    for position in range(35):
        assert made.attend(library, [(0, position, 1)])[1].isfinite().all()


@needs_kernels
def test_two_at_once_and_jobs_inside_a_busy_pool(library: Any) -> None:
    torch.manual_seed(1)
    layer, x = linear(torch.randn(640, 256), None, bindings.CODES), torch.randn(40, 256)
    expected = run(library, layer, x)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: run(library, layer, x, threads=2), range(40)))
    assert all(torch.equal(got, expected) for got in results)


def test_no_compiler_a_failing_one_and_one_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "processor_flags", lambda: frozenset(build.NEEDS))
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        build.built(tmp_path)
    fake = tmp_path / "cxx"
    monkeypatch.setenv("CXX", str(fake))
    for script, told in (
        ("echo 'error: no such header' >&2; exit 1", "no such header"),
        ("exec sleep 60", "longer than"),
    ):
        fake.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\n{script}\n')
        fake.chmod(0o755)
        with pytest.raises(BuildError, match=told):
            build.built(tmp_path / "cache", timeout_s=0.5)
    assert list((tmp_path / "cache").iterdir()) == []  # nothing half made is left


def test_other_processors_are_told_what_they_lack(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nflags : fpu avx2 avx512f\n")
    assert build.processor_flags(info) == {"fpu", "avx2", "avx512f"}
    assert build.processor_flags(tmp_path / "none") == frozenset()


def test_a_processor_without_vnni_gets_no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "processor_flags", lambda: frozenset({"avx2"}))
    with pytest.raises(BuildError, match="avx512_vnni"):
        build.built(tmp_path)


def test_a_library_that_is_none(tmp_path: Path) -> None:
    broken = tmp_path / "cpu.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(BuildError, match="do not load"):
        bindings.load(broken)


def test_builders_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each makes its own and puts it in place whole; a second start finds it."""
    monkeypatch.setattr(build, "processor_flags", lambda: frozenset(build.NEEDS))
    fake = tmp_path / "cxx"
    runs = tmp_path / "runs"
    fake.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\n'
        f'echo x >> {runs}\nwhile [ "$1" != -o ]; do shift; done\nprintf whole > "$2"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    with ThreadPoolExecutor(4) as pool:
        made = set(pool.map(lambda _: build.built(tmp_path / "cache"), range(4)))
    assert len(made) == 1 and made.pop().read_bytes() == b"whole"
    before = runs.read_text()
    build.built(tmp_path / "cache")
    assert runs.read_text() == before
    assert len(list((tmp_path / "cache").iterdir())) == 1


@needs_kernels
def test_peaks(library: Any) -> None:
    torch.manual_seed(1)
    x = torch.randn(6, 1003) * 4
    x[1, [7, 23, 900]] = 30.0  # the first of equals
    x[2] = -float("inf")
    x[2, 1002] = 3.0
    x[3, 5] = float("nan")
    x[4, 5] = float("inf")
    x[5] = -float("inf")
    best, sums = torch.zeros(6, dtype=torch.long), torch.zeros(6)
    library.rw_peaks(x.data_ptr(), 6, 1003, best.data_ptr(), sums.data_ptr())
    assert best[:3].tolist() == x[:3].argmax(-1).tolist() and best[1] == 7 and best.max() < 1003
    torch.testing.assert_close(sums[:3], torch.logsumexp(x[:3], -1), rtol=1e-6, atol=1e-6)
    assert not (x.gather(1, best[:, None])[:, 0] - sums)[3:].isfinite().any()


def test_the_command_says_what_there_is_and_never_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main()
    said = capsys.readouterr().out
    assert said == f"own CPU kernels are not used: {MISSING}\n" if MISSING else said.endswith(".so\n")
    monkeypatch.setenv("RUNGWAY_CPU_KERNELS", "off")
    bindings.library.cache_clear()
    try:
        main()
    finally:
        bindings.library.cache_clear()
    assert capsys.readouterr().out == "own CPU kernels are not used: RUNGWAY_CPU_KERNELS is off\n"
