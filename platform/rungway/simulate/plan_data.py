"""A capacity plan as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rungway.simulate.fleet import Fleet
from rungway.simulate.plan import Plan, Question

GIB = 2**30


def told(plan: Plan) -> dict[str, Any]:
    """The plan as JSON. Bytes are bytes, times milliseconds, rates per second, money US dollars."""
    question, rig = plan.question, plan.rig
    return {
        "model": question.shape.name,
        "parameters": question.shape.parameters,
        "active_parameters": question.shape.active_parameters,
        "hardware": rig.device.name,
        "devices_per_replica": rig.devices,
        "dtype": str(rig.dtype),
        "kv_dtype": str(rig.kv_dtype),
        "context": question.context,
        "memory": _memory(plan),
        "prefill": {
            "prompt_tokens": plan.prefill_tokens,
            "ms": plan.prefill_ms,
            "tokens_per_s": 1e3 * plan.prefill_tokens / plan.prefill_ms,
            "compute_bound_from_tokens": plan.compute_bound_from,
        },
        "decode": {
            "one_sequence_ms": plan.decode.one_ms,
            "batch": plan.decode.batch,
            "limited_by": plan.decode.limit,
            "bound": plan.decode.bound,
            "step_ms": plan.decode.step_ms,
            "tokens_per_s": 1e3 * plan.decode.batch / plan.decode.step_ms,
        },
        "load": None if question.load is None else asdict(question.load),
        "fleet": None if plan.fleet is None else _fleet(question, plan.fleet),
        "rollback": None if plan.fleet is None else _rollback(question, plan.fleet),
        "cost": None if plan.fleet is None else _cost(question, plan.fleet),
        "sessions_per_tenant": _per_tenant(plan),
        "problem": plan.problem,
    }


def _memory(plan: Plan) -> dict[str, Any]:
    rig, context = plan.rig, plan.question.context
    per_token = rig.shape.kv_bytes_per_token(rig.kv_dtype.bytes)
    return {
        "kv_bytes_per_token": per_token,
        "kv_bytes_per_session": per_token * context,
        "kv_gib_per_session": per_token * context / GIB,
        "kv_copies": rig.shape.kv_copies(rig.devices),
        "weights_bytes": rig.weights,
        "usable_bytes": rig.usable,
        "reserve": rig.reserve,
        "sessions_per_replica": plan.sessions,
        "sessions_per_gpu": plan.sessions / rig.devices,
    }


def _per_tenant(plan: Plan) -> int | None:
    if plan.question.tenants is None:
        return None
    return plan.sessions * (plan.fleet.replicas if plan.fleet else 1) // plan.question.tenants


def _fleet(question: Question, fleet: Fleet) -> dict[str, Any]:
    return {
        "replicas": fleet.replicas,
        "devices": fleet.devices,
        "batch": fleet.batch,
        "limited_by": fleet.batch_limit,
        "tpot_ms": fleet.tpot_ms,
        "ttft_ms_p99": fleet.ttft_p99_ms,
        "prefill_ms_p99": fleet.prefill_p99_ms,
        "wait_ms_p99": fleet.wait_p99_ms,
        "requests_per_s_per_replica": fleet.capacity_per_s,
        "headroom": question.slo.headroom,
        "utilization": fleet.utilization,
        "utilization_one_lost": fleet.utilization_one_lost,
    }


def _rollback(question: Question, fleet: Fleet) -> dict[str, Any]:
    usd = question.usd_per_hour
    return {
        "warm_replicas": fleet.replicas,
        "replicas_during_rollout": 2 * fleet.replicas,
        "extra_devices": fleet.devices,
        "extra_usd_per_hour": None if usd is None else usd * fleet.devices,
    }


def _cost(question: Question, fleet: Fleet) -> dict[str, Any]:
    usd = question.usd_per_hour
    return {
        "device_hours_per_million_input": fleet.hours_per_m_input,
        "device_hours_per_million_output": fleet.hours_per_m_output,
        "usd_per_million_input": None if usd is None else usd * fleet.hours_per_m_input,
        "usd_per_million_output": None if usd is None else usd * fleet.hours_per_m_output,
        "usd_per_hour": None if usd is None else usd * fleet.devices,
    }
