"""`rungway plan`: how much memory, how many replicas and how much money a model needs for a load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rungway.commands.common import AsJson, emit_json, fail, show, table

if TYPE_CHECKING:
    from rungway.simulate.load import Load

Model = Annotated[str, typer.Option(help="llama-3-70b, qwen2.5-0.5b, ..., or the path of a config.json.")]
Hardware = Annotated[str, typer.Option(help="h100, h200, b200, a100, a100-40gb, l40s, a10g, l4, cpu.")]
Context = Annotated[
    int | None, typer.Option(help="Tokens of a full session. Default: 8192, or the model's own if less.")
]
Devices = Annotated[int | None, typer.Option(help="Devices per replica (default: as many as the weights need).")]
Tenants = Annotated[int | None, typer.Option(help="Share the sessions among so many.")]
Trace = Annotated[Path | None, typer.Option(help="Take the load from a trace (formats of `rungway simulate`).")]
Rate = Annotated[float | None, typer.Option(help="Load: requests per second at the peak.")]
Prompt = Annotated[int | None, typer.Option(help="Load: tokens of a prompt.")]
Output = Annotated[int | None, typer.Option(help="Load: tokens of an answer.")]
Ttft = Annotated[float, typer.Option(help="Target: time to first token, 99th percentile.")]
Tpot = Annotated[float, typer.Option(help="Target: mean time per output token.")]
WeightsIn = Annotated[str | None, typer.Option(help="Weights: fp32, bf16, fp8, int8, int4. Default: as published.")]
CacheIn = Annotated[str, typer.Option(help="KV cache: bf16, fp8.")]
Usd = Annotated[float | None, typer.Option(help="Price of one device; without it, costs are device hours.")]
Reserve = Annotated[float, typer.Option(help="Share of memory kept for activations.")]
Headroom = Annotated[float, typer.Option(help="Share of a replica's capacity left free at the peak.")]
Efficiency = Annotated[float, typer.Option(help="Share of nominal bandwidth and FLOP/s that is reached.")]


def plan(
    model: Model,
    hardware: Hardware,
    context: Context = None,
    devices: Devices = None,
    tenants: Tenants = None,
    trace: Trace = None,
    requests_per_s: Rate = None,
    prompt_tokens: Prompt = None,
    output_tokens: Output = None,
    ttft_ms: Ttft = 500.0,
    tpot_ms: Tpot = 50.0,
    dtype: WeightsIn = None,
    kv_dtype: CacheIn = "bf16",
    gpu_usd_per_hour: Usd = None,
    reserve: Reserve = 0.1,
    headroom: Headroom = 0.3,
    efficiency: Efficiency = 0.6,
    as_json: AsJson = False,
) -> None:
    """Plan capacity from nominal data-sheet figures: memory, rooflines, replicas for the targets, cost, rollback.

    Exit 1 when no number of replicas meets the targets, 2 for what cannot be planned.
    """
    from rungway.simulate.fleet import Slo
    from rungway.simulate.hardware import Dtype, KvDtype, accelerator
    from rungway.simulate.plan import Question, context_of, make_plan
    from rungway.simulate.plan_data import told
    from rungway.simulate.shapes import shape_of

    shape = shape_of(model)
    tokens = context_of(shape, context)
    question = Question(
        shape=shape,
        device=accelerator(hardware),
        context=tokens,
        slo=Slo(ttft_ms, tpot_ms, headroom),
        dtype=shape.native if dtype is None else _one_of(Dtype, "--dtype", dtype),
        kv_dtype=_one_of(KvDtype, "--kv-dtype", kv_dtype),
        devices=devices,
        load=_load(trace, tokens, requests_per_s, prompt_tokens, output_tokens),
        tenants=tenants,
        usd_per_hour=gpu_usd_per_hour,
        reserve=reserve,
        efficiency=efficiency,
    )
    made = told(make_plan(question))
    if as_json:
        emit_json(made)
    else:
        _print(made)
    if made["problem"] is not None:
        raise fail(made["problem"])


def _one_of(kind: Any, option: str, text: str) -> Any:
    """A member of the enumeration `kind`; exit 2 when it has none of that name."""
    try:
        return kind(text.lower())
    except ValueError:
        raise fail(f"{option} is one of {', '.join(kind)}, not {text!r}", 2) from None


def _load(trace: Path | None, context: int, per_s: float | None, prompt: int | None, output: int | None) -> Load | None:
    from rungway.simulate.load import steady_load, trace_load

    given = [value is not None for value in (per_s, prompt, output)]
    if trace is not None:
        if any(given):
            raise fail("give --trace or --requests-per-s, --prompt-tokens and --output-tokens, not both", 2)
        return trace_load(trace, context)
    if per_s is None or prompt is None or output is None:
        if any(given):
            raise fail("a load needs all of --requests-per-s, --prompt-tokens and --output-tokens", 2)
        return None
    return steady_load(per_s, prompt, output)


# -- output ---------------------------------------------------------------------------------------------------------


def _print(made: dict[str, Any]) -> None:
    title = f"{made['model']} ({made['dtype']}) on {made['devices_per_replica']} x {made['hardware']} per replica"
    rows = _memory_rows(made) + _roofline_rows(made)
    if made["fleet"] is not None:
        rows += _fleet_rows(made) + _cost_rows(made)
    if made["sessions_per_tenant"] is not None:
        whole = "the fleet" if made["fleet"] else "one replica"
        rows.append(["tenants", "sessions per tenant", f"{made['sessions_per_tenant']:,} of {whole}"])
    show(table(title, ["", "", "value"], rows))
    if made["load"] is None:
        show("Replicas and cost need a load: --trace, or --requests-per-s, --prompt-tokens and --output-tokens.")
    elif made["load"]["left_out"]:
        show(f"{made['load']['left_out']:,} requests of the trace are longer than the context and left out.")


def _memory_rows(made: dict[str, Any]) -> list[list[str]]:
    from rungway.simulate.rig import WEIGHTS_SHARE

    memory, count = made["memory"], made["devices_per_replica"]
    per_gpu = memory["sessions_per_gpu"]
    rows = [
        ["memory", "KV cache per token", f"{memory['kv_bytes_per_token']:,} bytes ({made['kv_dtype']})"],
        [
            "",
            f"KV cache per session of {made['context']:,}",
            f"{memory['kv_gib_per_session']:.3g} GiB ({memory['kv_bytes_per_session'] / 1e9:.3g} GB)",
        ],
        ["", "weights", f"{memory['weights_bytes'] / 1e9:.4g} GB ({made['parameters'] / 1e9:.4g} B parameters)"],
        ["", "usable", f"{memory['usable_bytes'] / 1e9:.4g} GB after a reserve of {memory['reserve']:.0%}"],
    ]
    if count > 1:
        crowded = memory["weights_bytes"] * count > WEIGHTS_SHARE * memory["usable_bytes"]
        why = ": one does not hold the weights and a cache" if crowded else ""
        rows.append(["", "devices per replica", f"{count} (tensor parallel){why}"])
    if memory["kv_copies"] > 1:
        rows.append(["", "KV cache is stored", f"{memory['kv_copies']:.3g} times (fewer KV heads than devices)"])
    return [*rows, ["", "full sessions", f"{memory['sessions_per_replica']:,} per replica, {per_gpu:.4g} per device"]]


def _roofline_rows(made: dict[str, Any]) -> list[list[str]]:
    prefill, decode = made["prefill"], made["decode"]
    what = f"batch within TPOT at {made['context']:,} each"
    return [
        [
            "prefill",
            f"{prefill['prompt_tokens']:,} tokens",
            f"{_ms(prefill['ms'])}, {prefill['tokens_per_s']:,.0f} tokens/s",
        ],
        ["", "compute bound from", f"{prefill['compute_bound_from_tokens']:,} tokens per step"],
        ["decode", "one sequence", f"{_ms(decode['one_sequence_ms'])} per token"],
        ["", what, f"{decode['batch']:,} (limited by {decode['limited_by']}; {decode['bound']} bound)"],
        ["", "at that batch", f"{_ms(decode['step_ms'])}, {decode['tokens_per_s']:,.0f} tokens/s"],
    ]


def _fleet_rows(made: dict[str, Any]) -> list[list[str]]:
    load, fleet, rollback = made["load"], made["fleet"], made["rollback"]
    tokens = f"{load['prompt_tokens']:,.0f} + {load['output_tokens']:,.0f} tokens"
    lost = fleet["utilization_one_lost"]
    after = "none is left" if lost is None else f"{lost:.0%}" + (" (overload)" if lost >= 1 else "")
    parts = f"prefill {_ms(fleet['prefill_ms_p99'])} + wait {_ms(fleet['wait_ms_p99'])}"
    warm = f"{_count(rollback['warm_replicas'], 'replica')} of the old version ({_count(rollback['extra_devices'], 'device')} more)"
    return [
        ["load", "requests/s", f"{load['peak_per_s']:.4g} at the peak, {load['mean_per_s']:.4g} on average; {tokens}"],
        ["replicas", "for the targets", f"{fleet['replicas']:,} ({_count(fleet['devices'], 'device')})"],
        ["", "batch", f"{fleet['batch']:,} per replica (limited by {fleet['limited_by']})"],
        [
            "",
            "one replica serves",
            f"{fleet['requests_per_s_per_replica']:.4g} requests/s, {fleet['headroom']:.0%} kept free",
        ],
        ["", "utilization", f"{fleet['utilization']:.0%}; with one replica lost {after}"],
        ["", "TPOT", _ms(fleet["tpot_ms"])],
        ["", "TTFT p99", f"{_ms(fleet['ttft_ms_p99'])}: {parts}"],
        ["rollback", "kept warm for 100 %", warm],
    ]


def _cost_rows(made: dict[str, Any]) -> list[list[str]]:
    cost, rollback = made["cost"], made["rollback"]
    rows = []
    for side in ("input", "output"):
        hours, usd = cost[f"device_hours_per_million_{side}"], cost[f"usd_per_million_{side}"]
        price = "" if usd is None else f"{usd:.4g} USD, "
        rows.append(["cost" if side == "input" else "", f"million {side} tokens", f"{price}{hours:.4g} device hours"])
    if cost["usd_per_hour"] is not None:
        more = f"{rollback['extra_usd_per_hour']:.4g} more while both versions are warm"
        rows.append(["", "fleet per hour", f"{cost['usd_per_hour']:.4g} USD, {more}"])
    return rows


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 1000 else f"{value:.4g} ms"
