"""Every kernel as it is launched for a Llama of head size 128 and hidden size 4096, and what its machine code may take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rungway.kernels import decode_attention, glu, prefill_attention, rms_norm, rope, rope_kv, sampling, weight_only
from rungway.kernels.layouts import BLOCK

MMA = {80: "mma.sync", 90: "mma.sync|wgmma", 100: "mma.sync|tcgen05.mma"}
WARP_GROUP_MMA = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
VECTORS = r"ld\.global\S*\.v4|cp\.async\S* .*, 0x10"  # 16 bytes a thread


class Build(NamedTuple):
    """One kernel as it is launched: argument types and constants, for bfloat16 data.

    `registers`: most that a thread may take. `expects`: regular expressions that its PTX must match, by architecture (0 =
    every one). `cuts`: names of integers that are multiples of 16. `stack`: bytes that it may
    keep in memory: the reduction of large angles by the sine has a table there (32 bytes with Triton 3.6, none with 3.9).
    """

    name: str
    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int
    registers: int
    stages: int = 3
    expects: Mapping[int, tuple[str, ...]] = {}
    cuts: tuple[str, ...] = ()
    stack: int = 0


def pointers(kind: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, kind)


_CUTS = ("hidden", "size", "ins", "outs", "stride_head", "stride_block", "stride_token")
_WIDE = {0: (VECTORS,)}


def builds(architecture: int) -> list[Build]:
    """All of them."""
    return [*_pointwise(), *_decode(), *_prefill(architecture), *_linear(), *_sampling()]


def _pointwise() -> list[Build]:
    norm = pointers("*bf16", "x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "h_ptr")
    norm |= pointers("i32", "tokens", "hidden") | {"eps": "fp32"}
    turn = pointers("*bf16", "q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr")
    turn |= {"positions_ptr": "*i64", "frequencies_ptr": "*fp32", "heads": "i32", "kv_heads": "i32"}
    turned = {"HALF": 64, "HALF_BLOCK": 64, "HEADS_BLOCK": 32}
    place = pointers("*bf16", "qkv_ptr", "q_ptr", "k_ptr", "v_ptr") | {"eps": "fp32"}
    place |= pointers("*i64", "positions_ptr", "slots_ptr") | pointers("*fp32", "frequencies_ptr", "norms_ptr")
    place |= pointers("i32", "heads", "kv_heads", "stride_head", "stride_block", "stride_token")
    placed = {"HALF": 64, "HALF_BLOCK": 64, "HEADS_BLOCK": rope_kv.HEADS_BLOCK, "BLOCK_TOKENS": 16}
    gate = {"gate_up_ptr": "*bf16", "out_ptr": "*bf16", "size": "i32"}
    wide = {"HAS_RESIDUAL": True, "ROWS": 1, "BLOCK": 4096}
    narrow = {"HAS_RESIDUAL": True, "ROWS": 2, "BLOCK": 1024}
    return [
        Build("rms_norm", rms_norm._rms_norm, norm, wide, 8, 64, expects=_WIDE, cuts=_CUTS),
        Build("rms_norm_narrow", rms_norm._rms_norm, norm, narrow, 4, 64, expects=_WIDE, cuts=_CUTS),
        Build("rope", rope._rope, turn, turned, 4, 96, stack=32),
        Build(
            "rope_kv", rope_kv._rope_kv, place, placed | {"NORMED": False}, 4, 96, expects=_WIDE, cuts=_CUTS, stack=32
        ),
        Build(
            "rope_kv_normed",
            rope_kv._rope_kv,
            place,
            placed | {"NORMED": True},
            4,
            128,
            expects=_WIDE,
            cuts=_CUTS,
            stack=32,
        ),
        Build("swiglu", glu._glu, gate, {"GELU": False, "BLOCK": glu.BLOCK}, 4, 64, expects=_WIDE, cuts=_CUTS),
        Build("geglu", glu._glu, gate, {"GELU": True, "BLOCK": glu.BLOCK}, 4, 64, expects=_WIDE, cuts=_CUTS),
    ]


def _cached() -> dict[str, str]:
    attend = pointers("*bf16", "q_ptr", "k_ptr", "v_ptr", "out_ptr") | pointers("fp32", "scale", "soft_cap")
    attend |= pointers("*i64", "tables_ptr", "lens_ptr", "starts_ptr")  # as the engine has them
    return attend | pointers("i32", "window", "heads", "table_width", "stride_head", "stride_block", "stride_token")


def _decode() -> list[Build]:
    attend = _cached() | pointers("*fp32", "max_ptr", "sum_ptr", "acc_ptr") | {"segments": "i32"}
    merge = pointers("*fp32", "max_ptr", "sum_ptr", "acc_ptr") | {"out_ptr": "*bf16", "heads": "i32", "segments": "i32"}
    merge |= pointers("*i64", "lens_ptr", "starts_ptr")
    expects = {0: (VECTORS, r"cp\.async"), **{arch: (name,) for arch, name in MMA.items()}}

    def one(name: str, dim: int, rows: int, registers: int, **changed: bool | int) -> Build:
        config = decode_attention.config_for(dim, 2)
        sizes = {"SEGMENTS": config.segments, "SEGMENT": config.segment, "TILE": config.tile, "RAGGED": False}
        plain = {"GROUP": 4, "ROWS": rows, "DIM": dim, "DIM_BLOCK": dim, "BLOCK_TOKENS": 16}
        plain |= sizes | {"WINDOWED": False, "CAPPED": False, "DIRECT": False} | changed
        return Build(
            name, decode_attention._attend, attend, plain, config.warps, registers, config.stages, expects, _CUTS
        )

    config = decode_attention.config_for(128, 2)
    sizes = {"SEGMENTS": config.segments, "SEGMENT": config.segment, "TILE": config.tile, "RAGGED": False}
    return [
        one("decode_64", 64, 16, 128),
        one("decode", 128, 16, 168),
        one("decode_direct", 128, 16, 168, DIRECT=True),
        one("decode_8_queries", 128, 32, 255, RAGGED=True)._replace(stack=8),  # on sm_80, for a third program
        one("decode_8_queries_of_8", 128, 64, 255, RAGGED=True, GROUP=8)._replace(stack=8),
        one("decode_window_cap_256", 256, 16, 255, WINDOWED=True, CAPPED=True),
        Build("decode_merge", decode_attention._merge, merge, {"DIM": 128, "DIM_BLOCK": 128} | sizes, 4, 128),
    ]


def _prefill(architecture: int) -> list[Build]:
    attend = _cached()
    expects = {0: (VECTORS, r"cp\.async"), **{arch: (name,) for arch, name in WARP_GROUP_MMA.items()}}

    def one(name: str, dim: int, **changed: bool | int) -> Build:
        config = prefill_attention.config_for(dim, 2, architecture)
        plain = {"GROUP": 4, "ROWS": config.rows, "DIM": dim, "DIM_BLOCK": dim, "BLOCK_TOKENS": 16, "TILE": config.tile}
        plain |= {"WINDOWED": False, "CAPPED": False} | changed
        return Build(name, prefill_attention._prefill, attend, plain, config.warps, 255, config.stages, expects, _CUTS)

    return [one("prefill_64", 64), one("prefill", 128), one("prefill_window_cap_256", 256, WINDOWED=True, CAPPED=True)]


def _linear() -> list[Build]:
    kinds = {"int8": ("*i8", 0, "*fp32"), "int4": ("*u8", 128, "*bf16"), "fp8_rows": ("*u8", 0, "*fp32")}
    kinds |= {"int4_g32": ("*u8", 32, "*bf16"), "fp8_blocks": ("*u8", BLOCK, "*fp32")}
    which = {"int8": 0, "int4": 1, "int4_g32": 1, "fp8_rows": 2, "fp8_blocks": 2}
    found = []
    for tokens in (8, 64, 4096):
        config = weight_only.config_for(tokens, 4096, 4096)
        sizes = {"OUTS": config.outs, "TOKENS": config.tokens, "INS": config.ins, "SPLIT": config.split}
        expects = {0: (VECTORS,), **{arch: (name,) for arch, name in (MMA if tokens == 8 else WARP_GROUP_MMA).items()}}
        for name, (codes, group, scales) in kinds.items():
            signature = {"x_ptr": "*bf16", "codes_ptr": codes, "bias_ptr": "*bf16"}
            signature |= pointers(scales, "scales_ptr", "zeros_ptr") | pointers("i32", "tokens", "outs", "ins")
            signature["out_ptr"] = "*fp32" if config.split > 1 else "*bf16"
            constants = {"KIND": which[name], "GROUP": group, "HAS_BIAS": True, "EVEN": True} | sizes
            found.append(
                Build(
                    f"{name}_linear_{tokens}", weight_only._linear, signature, constants, config.warps, 255,
                    config.stages, expects, _CUTS,
                )
            )  # fmt: skip
    parts = {"parts_ptr": "*fp32", "scales_ptr": "*fp32", "bias_ptr": "*bf16", "out_ptr": "*bf16"}
    parts |= pointers("i32", "outs", "stride")
    summed = {"HAS_SCALE": True, "HAS_BIAS": True, "SPLIT": 4, "SIZE": 1024}
    return [
        *found,
        Build("linear_add_parts", weight_only._add_parts, parts, summed, 4, 64, expects=_WIDE, cuts=(*_CUTS, "stride")),
    ]


def _sampling() -> list[Build]:
    stats = pointers("*bf16", "logits_ptr", "raw_ptr") | pointers("*fp32", "temperature_ptr", "stats_ptr")
    stats |= {"first_ptr": "*i32"} | pointers("i32", "vocabulary", "chunks")
    pick = pointers("*bf16", "logits_ptr", "raw_ptr")
    pick |= pointers("*fp32", "temperature_ptr", "top_p_ptr", "min_p_ptr", "stats_ptr", "logprob_ptr")
    pick |= pointers("*i32", "top_k_ptr", "first_ptr", "ids_ptr") | {"uniform_ptr": "*fp64", "token_ptr": "*i64"}
    pick |= pointers("i32", "vocabulary", "chunks")
    sizes = {"CHUNK": sampling.CHUNK, "CHUNKS": 64, "SIZE": sampling.SIZE, "ROOM": sampling.CANDIDATES}
    cuts = ("vocabulary",)
    return [
        Build(
            "sample_stats",
            sampling._stats,
            stats,
            {"HAS_RAW": False, "CHUNK": sampling.CHUNK},
            8,
            64,
            expects=_WIDE,
            cuts=cuts,
        ),
        Build("sample_pick", sampling._pick, pick, sizes, 8, 255, cuts=cuts, stack=32),
    ]
