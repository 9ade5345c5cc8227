"""A capacity plan: memory, roofline, replicas, cost and rollback headroom of a model under a load. Pure arithmetic; what the
parts assume is told in `shapes`, `hardware`, `rig`, `fleet` and `docs/plan.md`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rungway.simulate.cost import GB
from rungway.simulate.errors import SimulationError
from rungway.simulate.fleet import Fleet, Slo, SloError, size_fleet
from rungway.simulate.hardware import Accelerator, Dtype, KvDtype
from rungway.simulate.load import Load
from rungway.simulate.rig import DEVICES_MAX, Rig, choose_devices, largest
from rungway.simulate.shapes import Shape

CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class Question:
    """`devices` None = as many per replica as the weights need. `usd_per_hour`: of one device; None = no prices."""

    shape: Shape
    device: Accelerator
    context: int
    slo: Slo
    dtype: Dtype
    kv_dtype: KvDtype = KvDtype.BF16
    devices: int | None = None
    load: Load | None = None
    tenants: int | None = None
    usd_per_hour: float | None = None
    reserve: float = 0.1
    efficiency: float = 0.6


@dataclass(frozen=True, slots=True)
class Decode:
    """Decoding sequences of the whole context. `batch` 0: not even one meets the TPOT."""

    one_ms: float
    batch: int
    limit: str
    step_ms: float
    bound: str


@dataclass(frozen=True, slots=True)
class Plan:
    question: Question
    rig: Rig
    sessions: int
    prefill_ms: float
    prefill_tokens: int
    compute_bound_from: int
    decode: Decode
    fleet: Fleet | None
    problem: str | None


def context_of(shape: Shape, wanted: int | None) -> int:
    """Raises SimulationError when the model does not read that far."""
    if wanted is not None and wanted > shape.context:
        raise SimulationError(f"{shape.name} reads at most {shape.context} tokens, not {wanted}")
    return min(CONTEXT, shape.context) if wanted is None else wanted


def make_plan(question: Question) -> Plan:
    """Raises SimulationError for what cannot be planned. Targets that cannot be met are the plan's `problem`."""
    _check(question)
    rig = choose_devices(lambda devices: _rig(question, devices), question.devices)
    sessions = rig.sessions(question.context)
    if sessions == 0:
        raise SimulationError(_too_long(question, rig))
    load, problem, fleet = question.load, None, None
    if load is not None:
        try:
            fleet = size_fleet(rig, load, question.slo)
        except SloError as error:
            problem = str(error)
    prompt = question.context if load is None else load.prompt_p99
    decode = decode_at(rig, question.context, sessions, question.slo.tpot_ms)
    if load is None and decode.batch == 0:
        problem = f"TPOT {question.slo.tpot_ms:g} ms cannot be met: a step of one sequence takes {decode.one_ms:.1f} ms"
    return Plan(
        question=question,
        rig=rig,
        sessions=sessions,
        prefill_ms=rig.prefill_ms(float(prompt)),
        prefill_tokens=prompt,
        compute_bound_from=compute_bound_from(rig),
        decode=decode,
        fleet=fleet,
        problem=problem,
    )


def decode_at(rig: Rig, context: int, sessions: int, tpot_ms: float) -> Decode:
    """The largest batch of full-context sequences whose step is within the TPOT, and what holds it back."""

    def step_ms(batch: int) -> float:
        return rig.step_ms(batch, batch * context)

    batch = largest(lambda count: step_ms(count) <= tpot_ms, sessions)
    at = rig.cost(max(1, batch))
    moved_ms = at.weights_ms + batch * context * at.kv_ms_per_1k / 1e3
    return Decode(
        one_ms=step_ms(1),
        batch=batch,
        limit="memory" if batch == sessions else "TPOT",
        step_ms=step_ms(max(1, batch)),
        bound="bandwidth" if moved_ms >= batch * at.token_ms else "compute",
    )


def compute_bound_from(rig: Rig) -> int:
    """Tokens in a step from which its arithmetic takes longer than reading the weights it needs."""
    most = 2**20
    below = largest(lambda tokens: tokens * rig.cost(tokens).token_ms < rig.cost(tokens).weights_ms, most)
    return below + 1


def _rig(question: Question, devices: int) -> Rig:
    q = question
    return Rig(q.shape, q.device, devices, q.dtype, q.kv_dtype, q.reserve, q.efficiency)


def _too_long(question: Question, rig: Rig) -> str:
    counts = (2**power for power in range(DEVICES_MAX.bit_length()))
    rigs = (_rig(question, count) for count in counts if question.shape.heads % count == 0)
    enough = next((rig.devices for rig in rigs if rig.sessions(question.context)), None)
    free = (rig.usable - rig.weights) / GB
    more = "no number of them does" if enough is None else f"it needs --devices {enough}"
    place = f"the {free:.1f} GB beside the weights on {rig.devices} x {rig.device.name}"
    return f"{question.shape.name}: not one session of {question.context} tokens fits {place}; {more}"


def _check(question: Question) -> None:
    above_zero = {
        "--context": question.context,
        "--ttft-ms": question.slo.ttft_ms,
        "--tpot-ms": question.slo.tpot_ms,
        "--devices": question.devices,
        "--tenants": question.tenants,
        "--gpu-usd-per-hour": question.usd_per_hour,
    }
    for name, value in above_zero.items():
        if value is not None and (not math.isfinite(value) or value <= 0):
            raise SimulationError(f"{name} must be a number above 0, not {value}")
    for name, share in (("--reserve", question.reserve), ("--headroom", question.slo.headroom)):
        if not 0 <= share < 1:
            raise SimulationError(f"{name} must be at least 0 and below 1, not {share}")
    if not 0 < question.efficiency <= 1:
        raise SimulationError(f"--efficiency must be above 0 and at most 1, not {question.efficiency}")
    if question.load is not None:
        longest = question.load.prompt_tokens + question.load.output_tokens
        if longest > question.context:
            raise SimulationError(f"prompt and answer take {longest:.0f} tokens, the context has {question.context}")
