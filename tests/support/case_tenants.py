"""The tenants of the cases: one per case that changes or uses up something, so that no case sees another's traces."""

from __future__ import annotations

from typing import Any

TPM600 = {"quotas": {"tokens_per_minute": 600, "requests_per_minute": 1000, "concurrent_requests": 100}}
ONE = {"quotas": {"concurrent_requests": 1}}
RICH = {"budget": {"usd": 100}}
# Waits all the time, and is never turned away for it.
PATIENT = {"slo": {"ttft_ms_p99": 600_000, "tpot_ms_p99": 10_000}}

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "vip": {},
    "junk": {},
    "wrong-asks": {},
    "expired": {"key": {"expires": "2020-01-01T00:00:00Z"}},
    "cached": {},
    "cached2": {},
    "tpm600": TPM600,
    "tpm600b": TPM600,
    "tpm600c": TPM600,
    "tpm600d": TPM600,
    "rpm30": {"quotas": {"requests_per_minute": 30}},
    "tpm6000": {"quotas": {"tokens_per_minute": 6000}},
    "single": ONE,
    "queue2": {"quotas": {"queue_max": 2}},
    "rich": RICH,
    "rich2": RICH,
    "rich3": RICH,
    "poor": {"budget": {"usd": 10}},
    "zero-rpm": {"quotas": {"requests_per_minute": 0}},
    "zero-tpm": {"quotas": {"tokens_per_minute": 0}},
    "zero-concurrent": {"quotas": {"concurrent_requests": 0}},
    "zero-budget": {"budget": {"usd": 0}},
    "paused": {},
    "leaver1": ONE,
    "leaver2": ONE,
    "leaver3": ONE,
    "filler": {},
    "storm": {},
    "big-jobs": {"weight": 1} | PATIENT,
    "small-jobs": {"weight": 1} | PATIENT,
    "heavy": {"weight": 3} | PATIENT,
    "light": {"weight": 1} | PATIENT,
    "late": {"weight": 1} | PATIENT,
    "nightly": {"class": "batch"} | PATIENT,
    "firm": {},
    "flexible": {"ladder": {"floor": "small_tier"}, "slo": {"ttft_ms_p99": 200}},
    "flexible-rpm": {
        "ladder": {"floor": "small_tier"},
        "slo": {"ttft_ms_p99": 200},
        "quotas": {"requests_per_minute": 3},
    },
    "strict": {"ladder": {"floor": "small_tier", "opt_out": ["small_tier"]}, "slo": {"ttft_ms_p99": 200}},
    "sdk": {},
    "sdk-rpm": {"quotas": {"requests_per_minute": 30}},
    "sdk-small": {"models": ["small"]},
    "sdk-poor": {"budget": {"usd": 0}},
}

PAIR: dict[str, dict[str, Any]] = {
    "acme": {},
    "beta": {},
    "failing": {},
    "hanging": {},
    "tpm600": TPM600,
}
